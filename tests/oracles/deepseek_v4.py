"""Reference logits of small DeepSeek V4 models from transformers' own modelling class.

No weights are committed: both sides derive them from a seed. Element i of the GGUF tensor NAME of a model with seed S is

    h = splitmix64 state (fnv1a64(NAME) ^ S) advanced i + 1 times, u = (h >> 40) / 2^23 - 1   (exact in f32)
    value = offset + scale * u

with (offset, scale) chosen by the tensor's kind (RULES below; `tests/src/seeded.rs` has the same table).

usage: deepseek_v4.py OUTDIR        (torch 2.11.0, transformers 5.24.0; one thread)
"""
import json
import os
import sys

import numpy as np
import torch
from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

KIND = {"S": "sliding_attention", "C": "compressed_sparse_attention", "H": "heavily_compressed_attention"}
# suffix (or whole name) -> (offset, scale); first match wins
RULES = [
    ("norm.weight", (1.0, 0.125)), ("_base.weight", (0.0, 0.25)), ("_scale.weight", (1.0, 0.25)),
    ("attn_sinks.weight", (0.0, 0.5)), ("exp_probs_b.bias", (0.0, 0.125)), ("_ape.weight", (0.0, 0.5)),
    ("token_embd.weight", (0.0, 1.0)), ("_fn.weight", (0.0, 0.125)), ("ffn_gate_inp.weight", (0.0, 0.25)),
    ("_exps.weight", (0.0, 0.25)), ("_shexp.weight", (0.0, 0.25)), ("", (0.0, 0.1875)),
]
M64 = (1 << 64) - 1


def fnv1a64(s):
    h = 0xCBF29CE484222325
    for b in s.encode():
        h = ((h ^ b) * 0x100000001B3) & M64
    return h


def raw(name, seed, n):
    """n outputs of splitmix64 as uint64."""
    with np.errstate(over="ignore"):
        z = np.uint64((fnv1a64(name) ^ seed) & M64) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def tensor(name, seed, shape):
    n = int(np.prod(shape))
    u = (raw(name, seed, n) >> np.uint64(40)).astype(np.float64) / 2**23 - 1.0
    off, scale = next(v for k, v in RULES if name.endswith(k))
    return torch.from_numpy((off + scale * u).astype(np.float32).reshape(shape))


def tid2eid(name, seed, vocab, experts, used):
    """Row t: `used` distinct experts; slot j takes the (r mod remaining)-th of the experts not yet taken, in ascending order."""
    r = raw(name, seed, vocab * used).reshape(vocab, used)
    out = np.zeros((vocab, used), dtype=np.int64)
    for t in range(vocab):
        left = list(range(experts))
        for j in range(used):
            out[t, j] = left.pop(int(r[t, j] % np.uint64(len(left))))
    return torch.from_numpy(out)


LAYER = {
    "attn_hc.fn": "hc_attn_fn.weight", "attn_hc.base": "hc_attn_base.weight", "attn_hc.scale": "hc_attn_scale.weight",
    "ffn_hc.fn": "hc_ffn_fn.weight", "ffn_hc.base": "hc_ffn_base.weight", "ffn_hc.scale": "hc_ffn_scale.weight",
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight", "self_attn.q_a_norm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight", "self_attn.kv_proj.weight": "attn_kv.weight",
    "self_attn.kv_norm.weight": "attn_kv_a_norm.weight", "self_attn.sinks": "attn_sinks.weight",
    "self_attn.o_a_proj.weight": "attn_output_a.weight", "self_attn.o_b_proj.weight": "attn_output_b.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight", "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight", "mlp.experts.down_proj": "ffn_down_exps.weight",
    "self_attn.compressor.position_bias": "attn_compressor_ape.weight", "self_attn.compressor.kv_proj.weight": "attn_compressor_kv.weight",
    "self_attn.compressor.gate_proj.weight": "attn_compressor_gate.weight", "self_attn.compressor.kv_norm.weight": "attn_compressor_norm.weight",
    "self_attn.compressor.indexer.position_bias": "indexer_compressor_ape.weight",
    "self_attn.compressor.indexer.kv_proj.weight": "indexer_compressor_kv.weight",
    "self_attn.compressor.indexer.gate_proj.weight": "indexer_compressor_gate.weight",
    "self_attn.compressor.indexer.kv_norm.weight": "indexer_compressor_norm.weight",
    "self_attn.compressor.indexer.q_b_proj.weight": "indexer.attn_q_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "indexer.proj.weight",
}
ROOT = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight",
        "model.hc_head.hc_fn": "output_hc_fn.weight", "model.hc_head.hc_base": "output_hc_base.weight",
        "model.hc_head.hc_scale": "output_hc_scale.weight"}

BASE = dict(vocab=160, hidden=64, ff=32, heads=4, head_dim=32, rope=8, q_lora=32, groups=2, o_lora=16, experts=8, used=2, hash_layers=1,
            window=128, ratio_c=4, ratio_h=128, index_heads=4, index_dim=16, index_topk=512, yarn_ctx=65536, seed=1)
CASES = [
    dict(BASE, name="swa", layers="SS", tokens=300, hash_layers=0, seed=11),
    dict(BASE, name="csa", layers="CC", tokens=300, hash_layers=0, seed=12),
    dict(BASE, name="hca", layers="HH", tokens=600, hash_layers=0, seed=13),
    dict(BASE, name="hash", layers="SS", tokens=140, hash_layers=2, seed=14),
    dict(BASE, name="mixed", layers="SSCHCH", tokens=600, hash_layers=3, seed=15),
    dict(BASE, name="yarn", layers="CHC", tokens=600, rope=16, yarn_ctx=64, seed=16),
    dict(BASE, name="pro-schedule", layers="HHCHC", tokens=300, hash_layers=3, seed=17),
    dict(BASE, name="production-geometry", layers="SCH", tokens=264, hidden=128, ff=256, heads=2, head_dim=512, rope=64, q_lora=64,
         groups=1, o_lora=64, index_heads=8, index_dim=128, hash_layers=1, seed=18),
    # 16 indexer heads: with few, all ReLUs of a row are often zero at once, and which of several zero scores is kept is open.
    dict(BASE, name="cut", layers="SCC", tokens=300, index_topk=8, index_heads=16, hash_layers=0, seed=19),
]


def build(c):
    n = len(c["layers"])
    cfg = DeepseekV4Config(
        vocab_size=c["vocab"], hidden_size=c["hidden"], moe_intermediate_size=c["ff"], num_hidden_layers=n, num_attention_heads=c["heads"],
        num_key_value_heads=1, head_dim=c["head_dim"], q_lora_rank=c["q_lora"], partial_rotary_factor=c["rope"] / c["head_dim"],
        o_groups=c["groups"], o_lora_rank=c["o_lora"], n_routed_experts=c["experts"], num_experts_per_tok=c["used"], n_shared_experts=1,
        layer_types=[KIND[k] for k in c["layers"]], mlp_layer_types=(["hash_moe"] * c["hash_layers"] + ["moe"] * n)[:n],
        compress_rates={KIND["C"]: c["ratio_c"], KIND["H"]: c["ratio_h"]}, sliding_window=c["window"], index_n_heads=c["index_heads"],
        index_head_dim=c["index_dim"], index_topk=c["index_topk"], hc_mult=4, hc_sinkhorn_iters=20, max_position_embeddings=1 << 20,
        rope_parameters={"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": c["yarn_ctx"], "beta_fast": 32, "beta_slow": 1})
    m = DeepseekV4ForCausalLM(cfg).eval()
    s = c["seed"]
    with torch.no_grad():
        named = list(m.named_parameters()) + [(k, b) for k, b in m.named_buffers() if "tid2eid" in k or "e_score" in k]
        for k, p in named:
            if k in ROOT:
                p.copy_(tensor(ROOT[k], s, p.shape))
                continue
            _, _, i, rest = k.split(".", 3)
            b = f"blk.{i}."
            if rest == "mlp.experts.gate_up_proj":
                e, two, d = p.shape
                g = tensor(b + "ffn_gate_exps.weight", s, (e, two // 2, d))
                u = tensor(b + "ffn_up_exps.weight", s, (e, two // 2, d))
                p.copy_(torch.cat([g, u], 1))
            elif rest == "mlp.gate.tid2eid":
                p.copy_(tid2eid(b + "ffn_gate_tid2eid.weight", s, c["vocab"], c["experts"], c["used"]))
            else:
                p.copy_(tensor(b + LAYER[rest], s, p.shape))
    return m


def main(out):
    os.makedirs(out, exist_ok=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    index = []
    for c in CASES:
        m = build(c)
        ids = (raw("prompt", c["seed"], c["tokens"]) % np.uint64(c["vocab"])).astype(np.int64)
        x = torch.from_numpy(ids)[None]
        picked = {}
        hooks = []
        if c["name"] == "cut":
            for i, layer in enumerate(m.model.layers):
                if c["layers"][i] == "C":
                    scorer = layer.self_attn.compressor.indexer
                    hooks.append(scorer.register_forward_hook(lambda mod, a, o, i=i: picked.__setitem__(i, o)))
        with torch.no_grad():
            logits = m(x, use_cache=False).logits[0].float().numpy()
            for h in hooks:
                h.remove()
            rows = sorted({r for r in range(c["tokens"]) if r < 6 or 124 <= r <= 132 or r % 41 == 0 or 252 <= r <= 260 or r >= c["tokens"] - 3})
            seq = x
            greedy = []
            for _ in range(12):
                o = m(seq, use_cache=False).logits[0, -1].float()
                top = torch.topk(o, 2).values
                greedy.append([int(o.argmax()), float(top[0] - top[1])])
                seq = torch.cat([seq, o.argmax()[None, None]], 1)
        logits[rows].astype("<f4").tofile(f"{out}/{c['name']}.f32")
        entry = dict(c, ids=ids.tolist(), rows=rows, greedy=greedy, std=float(logits.std()))
        if picked:
            entry["picked"] = {str(i): [sorted(int(v) for v in r if v >= 0) for r in o.reshape(c["tokens"], -1).tolist()] for i, o in picked.items()}
        index.append(entry)
        print(c["name"], logits.shape, "std", logits.std(), "min greedy margin", min(g[1] for g in greedy))
    with open(f"{out}/cases.json", "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(e, separators=(",", ":")) for e in index) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1])
