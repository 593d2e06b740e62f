"""A small DeepSeek V4 saved by transformers itself, and its logits: what `ds4 gguf convert` must read.

Writes tests/fixtures/deepseek_v4/convert/:
  saved/      save_pretrained as it is (transformers 5.24 saves under most of DeepSeek's names), one F32 file
  modelled/   the same weights under the names of transformers' own modules, BF16, in shards with an index
  scaled/     DeepSeek's own form of it: its names without `model.`, attention and shared experts in FP8 (E4M3) with a scale per
              block of 16 x 16, routed experts in FP4 (E2M1, two in a byte) with a scale per 32, scales E8M0
  scaled.f32  logits of the model that transformers itself loads from scaled/, dequantising
  logits.f32  logits of DeepseekV4ForCausalLM (f32) at the rows of case.json
  case.json   tokens, rows, spread, greedy continuation; texts with their ids from the `tokenizers` package
Weights are random, rounded to BF16 so that both directories hold the same model. The tokenizer has all bytes, a few merges
and DeepSeek's control tokens; its splits are those of the V4 tokenizer.json (facts: tokenizer section).

usage: deepseek_v4_convert.py     (torch 2.11.0, transformers 5.24.0, tokenizers 0.23.3; one thread)
"""
import json
import pathlib
import shutil

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import FineGrainedFP8Config
from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

OUT = pathlib.Path(__file__).resolve().parents[2] / "tests/fixtures/deepseek_v4/convert"
SPECIALS = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>",
            "｜DSML｜", "<｜latest_reminder｜>"]
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("a", "n"), ("Ġ", "t"), ("Ġ", "the"), ("1", "2")]
SPLITS = [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
          "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
          "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"]
TEXTS = ["the other 12345 things", "Привет, мир!\n\n  123 地球の上", "a.b(c)  ==\t{x}\r\n", "in the end", "<think> is text"]


def tokenizer():
    """Bytes, merges, specials; two ids stay free at the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = SPECIALS[:3] + alphabet + [a + b for a, b in MERGES]
    t = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=MERGES))
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in SPLITS]
    t.pre_tokenizer = pre_tokenizers.Sequence(splits + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken(s, normalized=False) for s in SPECIALS[:3]])
    t.add_tokens([AddedToken(s, normalized=True) for s in SPECIALS[3:]])
    return t


def model(vocab):
    torch.manual_seed(31)
    c = DeepseekV4Config(
        vocab_size=vocab, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1,
        head_dim=32, q_lora_rank=32, partial_rotary_factor=8 / 32, o_groups=2, o_lora_rank=16, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, mlp_layer_types=["hash_moe", "moe", "moe"], sliding_window=16,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        index_n_heads=4, index_head_dim=16, index_topk=512, max_position_embeddings=65536, eos_token_id=[1], pad_token_id=2,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 32}, routed_scaling_factor=2.5, swiglu_limit=3.0,
        rope_parameters={"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2})
    m = DeepseekV4ForCausalLM(c).eval()
    with torch.no_grad():
        named = list(m.named_parameters()) + [(k, b) for k, b in m.named_buffers() if "tid2eid" in k or "e_score" in k]
        for k, p in named:
            if "tid2eid" in k:
                p.copy_(torch.stack([torch.randperm(4)[:2] for _ in range(vocab)]))
            else:
                mean = 1.0 if "norm" in k or "scale" in k else 0.0
                std = 1.0 if "embed" in k else 0.3 if p.dim() == 1 or "position" in k else 0.2
                p.copy_((mean + std * torch.randn(p.shape)).bfloat16().float())
    return m


def power_of_two(x):
    return torch.exp2(torch.ceil(torch.log2(x.clamp_min(1e-9))))


def fp8(w, block=16):
    r, c = w.shape
    blocks = w.reshape(r // block, block, c // block, block)
    s = power_of_two(blocks.abs().amax((1, 3)) / 448)
    return (blocks / s[:, None, :, None]).reshape(r, c).to(torch.float8_e4m3fn), s.to(torch.float8_e8m0fnu)


def fp4(w):
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    r, c = w.shape
    groups = w.reshape(r, c // 32, 32)
    s = power_of_two(groups.abs().amax(2) / 6)
    code = ((groups / s[..., None])[..., None] - values).abs().argmin(-1).reshape(r, c).to(torch.uint8)
    return (code[:, 0::2] | (code[:, 1::2] << 4)).view(torch.int8), s.to(torch.float8_e8m0fnu)


def save_scaled():
    """Writes scaled/ from saved/; transformers' reading of it is the oracle, not this."""
    linears = (".wq_a.", "attn.wq_b.", "attn.wkv.", ".wo_a.", ".wo_b.", ".shared_experts.")
    out = {}
    for name, v in load_file(OUT / "saved/model.safetensors").items():
        name = name.removeprefix("model.").replace("embed_tokens", "embed").replace("hc_head.hc_", "hc_head_").replace("attn.norm", "attn.kv_norm")
        q = fp4(v) if ".experts." in name else fp8(v) if any(x in name for x in linears) and "indexer" not in name else None
        if q is None:
            out[name] = v.bfloat16() if v.is_floating_point() and v.dim() > 1 and "hc_" not in name and "ape" not in name else v
        else:
            out[name], out[name.removesuffix(".weight") + ".scale"] = q
    (OUT / "scaled").mkdir()
    save_file(out, OUT / "scaled/model.safetensors", metadata={"format": "pt"})
    config = json.loads((OUT / "saved/config.json").read_text())
    config["quantization_config"] = dict(quant_method="fp8", fmt="e4m3", scale_fmt="ue8m0", weight_block_size=[16, 16],
                                         activation_scheme="dynamic", expert_dtype="fp4")
    (OUT / "scaled/config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copy(OUT / "saved/tokenizer.json", OUT / "scaled/tokenizer.json")
    how = FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))
    return DeepseekV4ForCausalLM.from_pretrained(OUT / "scaled", dtype=torch.float32, quantization_config=how).eval()


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    shutil.rmtree(OUT, ignore_errors=True)
    t = tokenizer()
    m = model(t.get_vocab_size() + 2)
    m.save_pretrained(OUT / "saved")
    t.save(str(OUT / "saved/tokenizer.json"))
    vocab = m.config.vocab_size
    ids = torch.randint(0, vocab, (1, 200))
    with torch.no_grad():
        logits = m(ids, use_cache=False).logits[0]
        seq, greedy = ids, []
        for _ in range(12):
            last = m(seq, use_cache=False).logits[0, -1]
            top = torch.topk(last, 2).values
            greedy.append([int(last.argmax()), float(top[0] - top[1])])
            seq = torch.cat([seq, last.argmax()[None, None]], 1)
    rows = [0, 1, 2, 3, 4, 15, 16, 17, 31, 32, 33, 63, 64, 127, 128, 199]
    logits[rows].numpy().astype("<f4").tofile(OUT / "logits.f32")
    with torch.no_grad():
        scaled = save_scaled()(ids, use_cache=False).logits[0]
    scaled[rows].numpy().astype("<f4").tofile(OUT / "scaled.f32")
    case = dict(ids=ids[0].tolist(), rows=rows, std=float(logits.std()), scaled_std=float(scaled.std()), greedy=greedy, vocab=vocab,
                texts=[[s, t.encode(s, add_special_tokens=False).ids] for s in TEXTS])
    (OUT / "case.json").write_text(json.dumps(case, ensure_ascii=False) + "\n")
    m.to(torch.bfloat16).save_pretrained(OUT / "modelled", save_original_format=False, max_shard_size="60KB")
    shutil.copy(OUT / "saved/tokenizer.json", OUT / "modelled/tokenizer.json")
    for f in OUT.glob("*/*.safetensors"):
        f.chmod(0o644)
    print("std", case["std"], "smallest lead", min(g[1] for g in greedy))


main()
