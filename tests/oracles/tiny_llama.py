"""Writes tests/fixtures/tiny-llama/: a small random llama GGUF and transformers' logits on its dequantised weights.

Two layers, hidden 64, 4 heads over 2 KV heads, ffn 128, 512 tokens of byte-level BPE; layer 0 and the (tied) embedding are
Q8_0, layer 1 is F32. No part of it comes from a published model.
"""

import json
import pathlib

import gguf
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import llama_reference as ref

OUT = pathlib.Path(__file__).resolve().parents[1] / "fixtures/tiny-llama"
LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, CONTEXT = 2, 64, 4, 2, 128, 512, 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = """The owner holds the weights and the worker serves them. When a worker dies, another takes its place: it maps
the same weights again, reads nothing from the disk, and answers the next request before anyone has noticed. A user asks
and the assistant answers. What is the weather in the north today? It is cold there, and the wind is strong, and the
rain will not stop before the evening. How many of the requests were served? All of them were served, one after the other.
Please write a short function that returns the largest number in a list, then explain each step in plain language. First look
at every element, keep the best value found until now, compare, replace when something larger appears, and finally return it.
Once upon a time there was a small machine without any graphics card; people thought nothing useful could run on such hardware.
"""


def vocabulary():
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])
    tok.train_from_iterator([TEXT], trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=1, show_progress=False,
    ))
    data = json.loads(tok.to_str())["model"]
    tokens = sorted(data["vocab"], key=data["vocab"].get)
    assert len(tokens) == VOCAB, len(tokens)
    return tokens, [" ".join(m) for m in data["merges"]]


def write_model(path):
    rng = np.random.default_rng(7)
    tokens, merges = vocabulary()
    w = gguf.GGUFWriter(path, "llama")
    w.add_name("ds4 tiny llama")
    w.add_license("apache-2.0")
    w.add_block_count(LAYERS)
    w.add_context_length(CONTEXT)
    w.add_embedding_length(HIDDEN)
    w.add_feed_forward_length(FFN)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_rope_freq_base(10000.0)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(VOCAB)
    w.add_rope_dimension_count(HIDDEN // HEADS)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(tokens)
    w.add_token_types([3 if t in SPECIAL else 1 for t in tokens])
    w.add_token_merges(merges)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_pad_token_id(2)
    w.add_add_bos_token(False)
    w.add_add_space_prefix(False)
    w.add_chat_template(TEMPLATE)

    def matrix(name, rows, cols, ty, std):
        x = (rng.standard_normal((rows, cols)) * std).astype(np.float32)
        w.add_tensor(name, gguf.quantize(x, ty), raw_dtype=ty)

    def norm(name):
        w.add_tensor(name, (1 + 0.2 * rng.standard_normal(HIDDEN)).astype(np.float32))

    t = gguf.GGMLQuantizationType
    matrix("token_embd.weight", VOCAB, HIDDEN, t.Q8_0, 0.3)
    kv = HIDDEN // HEADS * KV_HEADS
    for i, ty in enumerate([t.Q8_0, t.F32]):
        norm(f"blk.{i}.attn_norm.weight")
        norm(f"blk.{i}.ffn_norm.weight")
        for part, rows, cols, gain in [
            ("attn_q", HIDDEN, HIDDEN, 1.2), ("attn_k", kv, HIDDEN, 1.2), ("attn_v", kv, HIDDEN, 1), ("attn_output", HIDDEN, HIDDEN, 2),
            ("ffn_gate", FFN, HIDDEN, 1), ("ffn_up", FFN, HIDDEN, 1), ("ffn_down", HIDDEN, FFN, 3),
        ]:
            matrix(f"blk.{i}.{part}.weight", rows, cols, ty, gain / cols**0.5)
    norm("output_norm.weight")
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def rounded(row):
    return [float(f"{v:.7g}") for v in row.tolist()]


OUT.mkdir(parents=True, exist_ok=True)
path = OUT / "tiny-llama.gguf"
write_model(path)
reader = gguf.GGUFReader(path)
model = ref.load(reader)
rng = np.random.default_rng(11)
cases = []
for name, length, full in [("forty", 40, (0, 19, 39)), ("one", 1, (0,)), ("seventeen", 17, (16,))]:
    # The best of some random prompts: greedy decoding must not hang on a near-tie.
    best = None
    for _ in range(1500):
        ids = [int(i) for i in rng.integers(3, VOCAB, length)]
        tokens, margins = ref.greedy(model, ids, 16)
        # A tied random model likes to echo its last token: only varied continuations say anything about positions.
        if len(set(tokens)) < 8:
            continue
        if best is None or min(margins) > min(best[2]):
            best = (ids, tokens, margins)
    ids, tokens, margins = best
    rows = ref.logits(model, ids)
    error = {}
    for kind, draws in [("int8_error", ref.INT8), ("int16_error", ref.INT16)]:
        seen = []
        for levels in draws:
            with ref.rounding(model, levels):
                seen += [ref.errors(e, r) for e, r in zip(ref.logits(model, ids), rows)]
                assert ref.greedy(model, ids, 16)[0] == tokens, name
        # Over the prompt's positions and the draws of the rounding.
        error[kind] = {
            "rel_median": float(np.median([e["rel"] for e in seen])),
            "rel_worst": max(e["rel"] for e in seen),
            "max_abs_worst": max(e["max_abs"] for e in seen),
        }
    cases.append({
        "name": name, "tokens": ids, "greedy": tokens, "margins": [round(m, 4) for m in margins],
        **error,
        "top8": [[[int(i), float(f"{v:.7g}")] for v, i in zip(*(x.tolist() for x in r.topk(8)))] for r in rows],
        "rows": {str(i): rounded(rows[i]) for i in full},
    })
    print(name, "margin", min(margins), error, "spread", float(rows.std()), tokens)
head = {"model": "tiny-llama.gguf", "made_by": "tests/oracles/tiny_llama.py", "cases": cases}
(OUT / "logits.json").write_text(json.dumps(head, separators=(",", ":")).replace(',{"name"', ',\n{"name"') + "\n")
print(path.stat().st_size, (OUT / "logits.json").stat().st_size)
