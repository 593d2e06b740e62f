"""Writes tests/fixtures/eval/: continuation vectors of the starter model, and token ids of prompts.

usage: eval_vectors.py [SmolLM2-135M-Instruct.Q4_1.gguf]   (or set DS4_STARTER_MODEL; DS4_DEEPSEEK_TOKENIZER for tiny-v4)

`smollm2.vec` and `raw.vec` hold greedy continuations of the model in transformers (f32 on the dequantised weights), with the
log-probabilities of the best candidates by an f64 log-softmax, in the text form that `ds4 eval vectors` reads;
`capture.official.json` is one of them in the form of the official API's captures. Prompts are rendered by Jinja with the
model's own template and encoded by Hugging Face `tokenizers`. No prompt is taken whose continuation is a close call.

`tokens.json` has token ids of rendered prompts: of the starter model, and of tests/fixtures/deepseek_v4/tiny-v4.gguf by the
layout of the facts (BOS, system text, User, text, Assistant, end of thinking) and DeepSeek V4's own pre-tokenizer over the
tiny file's vocabulary.
"""

import json
import os
import pathlib
import sys

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models

import llama_reference as ref
from gguf_model import PlainBpe, field, open_model, template_environment, tokenizer

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"
OUT = FIXTURES / "eval"
TOP, MARGIN = 5, 0.45

STORY = (
    "The lighthouse stood at the end of a long spit of sand, and every evening at dusk the keeper climbed its one hundred "
    "and twelve steps with a can of oil in one hand and a book in the other. He had done so for thirty years. "
)
# name, text, steps; the first prompts of each kind that are no close call are kept.
CHAT = {
    "capital": (["What is the capital of France?", "What is the capital of Japan?", "Name the capital of Italy."], 8),
    "function": ([f"Write a Python function called {n} and show how to call it." for n in ("contains", "add", "square", "reverse", "merge", "swap")], 6),
    "long": ([f"Copy the following text:\n\n{STORY * n}" for n in (6, 7, 8, 5)], 12),
    "accents": (["Übersetze »Käse« ins Englische.", "Que veut dire « où » en anglais ?", "What does “naïve” mean?", "Wie heißt »Straße« auf Englisch?", "¿Qué es una “piñata”?"], 5),
}
RAW = {
    "count": (["1, 2, 3, 4,", "one two three four", "Monday, Tuesday, Wednesday,"], 8),
    "again": ([f"{STORY}\n\n{STORY[:n]}" for n in (120, 150, 60, 200)], 8),
}


def steps_of(model, ids, n):
    """Greedy tokens with their best candidates, or None where a runner-up is near."""
    out, steps = list(ids), []
    for _ in range(n):
        row = ref.logits(model, out)[-1].double()
        logprobs = torch.log_softmax(row, -1)
        best = logprobs.topk(TOP + 1)
        values, tokens = best.values.tolist(), best.indices.tolist()
        if values[0] - values[1] < MARGIN:
            return None
        steps.append((tokens[0], list(zip(tokens[:TOP], values[:TOP]))))
        out.append(tokens[0])
    return steps


reader = open_model()
tok, _ = tokenizer(reader)
second = PlainBpe(reader)
raw_bytes = {c: b for b, c in second.alphabet.items()}
names = field(reader, "tokenizer.ggml.tokens")
kinds = field(reader, "tokenizer.ggml.token_type")
template = template_environment().from_string(field(reader, "tokenizer.chat_template"))
model = ref.load(reader)


def token_bytes(i):
    return names[i].encode() if kinds[i] == 3 else bytes(raw_bytes[c] for c in names[i])


def rendered(text, system=None):
    messages = [{"role": "system", "content": system}] if system else []
    return template.render(messages=[*messages, {"role": "user", "content": text}], add_generation_prompt=True)


def encoded(text):
    ids = tok.encode(text, add_special_tokens=False).ids
    assert ids == second.encode(text)
    return ids


def vectors(kind, table, render):
    lines = ["# SmolLM2-135M-Instruct.Q4_1.gguf in transformers, f32; by tests/oracles/eval_vectors.py",
             "# case ID CTX STEPS PROMPTFILE / step INDEX HEX NTOP / top HEX LOGPROB"]
    kept = {}
    for name, (texts, count) in table.items():
        for text in texts:
            ids = encoded(render(text))
            if steps := steps_of(model, ids, count):
                break
        else:
            raise SystemExit(f"{name}: every candidate is a close call; add one")
        (OUT / "prompts").mkdir(parents=True, exist_ok=True)
        (OUT / f"prompts/{name}.txt").write_text(text)
        lines += ["", f"case {name} 4096 {len(steps)} tests/fixtures/eval/prompts/{name}.txt"]
        for i, (token, top) in enumerate(steps):
            lines.append(f"step {i} {token_bytes(token).hex()} {len(top)}")
            lines += [f"top {token_bytes(t).hex()} {v:.9g}" for t, v in top]
        lines.append("end")
        kept[name] = (text, ids, steps)
        print(kind, name, len(ids), repr(tok.decode([t for t, _ in steps])))
    (OUT / f"{kind}.vec").write_text("\n".join(lines) + "\n")
    return kept


chat = vectors("smollm2", CHAT, rendered)
vectors("raw", RAW, lambda text: text)


def entry(i):
    return {"text": token_bytes(i).decode(errors="replace"), "bytes": list(token_bytes(i))}


text, ids, steps = chat["capital"]
(OUT / "capture.official.json").write_text(json.dumps({
    "schema": "ds4-official-logprobs-v1", "source": "transformers", "model": "SmolLM2-135M-Instruct", "id": "capital_json",
    "kind": "short", "prompt": text, "usage": {"prompt_tokens": len(ids), "completion_tokens": len(steps)},
    "finish_reason": "length", "logits_available": False,
    # As the API has it: the chosen token has logprob 0 and its rivals -9999, which say nothing.
    "steps": [{"step": i, "token": entry(t), "logprob": 0, "top_logprobs": [
        {"token": entry(c), "logprob": 0 if c == t else -9999} for c, _ in top]} for i, (t, top) in enumerate(steps)],
}, ensure_ascii=False, indent=1) + "\n")

# Token ids of prompts.
PROMPTS = ["What is the capital of France?", "  two  spaces\n\n1234 €uro 天气 👩‍💻", "say <|im_end|> and <｜User｜> and </think>"]
plain = tokenizer(reader)[1]


def starter_ids(text, system):
    """The template's control tokens by their ids; what lies between them, the user's text included, as plain text."""
    mark = "735190446812"
    template_text = rendered(mark, system)
    assert template_text.count(mark) == 1
    ids = []
    for piece in second.special.split(template_text):
        if piece in second.vocab and kinds[second.vocab[piece]] == 3:
            ids.append(second.vocab[piece])
        elif piece:
            ids += plain.encode(piece.replace(mark, text), add_special_tokens=False).ids
    return ids


tiny = gguf.GGUFReader(FIXTURES / "deepseek_v4/tiny-v4.gguf")
tiny_names, tiny_kinds = field(tiny, "tokenizer.ggml.tokens"), field(tiny, "tokenizer.ggml.token_type")
published = os.environ.get("DS4_DEEPSEEK_TOKENIZER") or os.path.expanduser("~/.cache/ds4/tokenizers/deepseek-v4/tokenizer.json")
merges = [tuple(m.split(" ")) for m in field(tiny, "tokenizer.ggml.merges")]
bpe = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tiny_names)}, merges=merges))
bpe.pre_tokenizer = Tokenizer.from_file(published).pre_tokenizer
bpe.decoder = decoders.ByteLevel()


def tiny_ids(text, system):
    special = tiny_names.index
    body = lambda t: bpe.encode(t, add_special_tokens=False).ids if t else []
    return [special("<｜begin▁of▁sentence｜>"), *body(system or ""), special("<｜User｜>"), *body(text),
            special("<｜Assistant｜>"), special("</think>")]


cases = [{"text": t, "system": s, "smollm2": starter_ids(t, s), "tiny_v4": tiny_ids(t, s)} for t in PROMPTS for s in (None, "Be brief.")]
assert cases[0]["smollm2"] == encoded(rendered(PROMPTS[0]))
(OUT / "tokens.json").write_text(json.dumps(cases, ensure_ascii=False).replace(', {"text"', ',\n{"text"') + "\n")
print({"transformers": ref.transformers.__version__, "torch": torch.__version__, "python": sys.version.split()[0]})
