"""Reference logits of DeepSeek V4's prediction block (fact sheet section 4.1) on small random models.

transformers ignores `mtp.*` keys, so the block is put together here: its decoder layer and its stream combination are transformers'
own classes (DeepseekV4DecoderLayer of kind sliding_attention, DeepseekV4HyperHead), what is in front of them is written out.
Everything is computed over the whole sequence at once, guesses included: no cache, no state. Weights come from a seed as in
deepseek_v4.py.

For each case and alignment (same: state at p with token p; next: state at p with token p + 1; both at position p):
  logits of chosen rows on the given tokens, and for some prefix lengths P the guesses and their logits: the block's row P - 1, then
  its own output states with its own guesses at positions P, P + 1, ...

usage: deepseek_v4_mtp.py OUTDIR        (torch 2.11.0, transformers 5.24.0; one thread)
"""
import json
import os
import sys

import numpy as np
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

import deepseek_v4 as base

CASES = [
    dict(base.BASE, name="mtp-mixed", layers="SCHC", tokens=300, hash_layers=1, seed=31),
    dict(base.BASE, name="mtp-window", layers="SC", tokens=90, window=16, hash_layers=0, seed=32),
    dict(base.BASE, name="mtp-production-geometry", layers="SCH", tokens=150, hidden=128, ff=256, heads=2, head_dim=512, rope=64, q_lora=64,
         groups=1, o_lora=64, index_heads=8, index_dim=128, hash_layers=1, seed=33),
]
PREFIXES = {"mtp-mixed": [1, 5, 126, 128, 130, 260], "mtp-window": [3, 14, 15, 16, 17, 40, 70], "mtp-production-geometry": [20, 127, 140]}
DRAFTS = 5


class Block:
    def __init__(self, c, m):
        cfg = m.config
        one = dict(c, layers="S", hash_layers=0)
        self.layer_model = base.build(one)  # for its configuration: one sliding layer with a learned router
        s, d = c["seed"], c["hidden"]
        self.layer = modeling.DeepseekV4DecoderLayer(self.layer_model.config, 0).eval()
        self.head = modeling.DeepseekV4HyperHead(cfg)
        self.rotary = self.layer_model.model.rotary_emb
        self.window = c["window"]
        t = lambda name, *shape: base.tensor("mtp.0." + name, s, shape)
        self.e_proj, self.h_proj = t("e_proj.weight", d, d), t("h_proj.weight", d, d)
        self.enorm, self.hnorm, self.norm = t("enorm.weight", d), t("hnorm.weight", d), t("norm.weight", d)
        self.eps = cfg.rms_norm_eps
        with torch.no_grad():
            self.head.hc_fn.copy_(t("hc_head_fn.weight", 4, 4 * d))
            self.head.hc_base.copy_(t("hc_head_base.weight", 4))
            self.head.hc_scale.copy_(t("hc_head_scale.weight", 1))
            named = list(self.layer.named_parameters()) + [(k, b) for k, b in self.layer.named_buffers() if "e_score" in k]
            for k, p in named:
                if k == "mlp.experts.gate_up_proj":
                    e, two, w = p.shape
                    p.copy_(torch.cat([t("ffn_gate_exps.weight", e, two // 2, w), t("ffn_up_exps.weight", e, two // 2, w)], 1))
                else:
                    p.copy_(t(base.LAYER[k], *p.shape))
        self.embedding, self.output = m.model.embed_tokens.weight, m.lm_head.weight

    def rms(self, x, w):
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * w

    def run(self, states, tokens):
        """states [T, 4, D], tokens [T] -> output states [T, 4, D], logits [T, V]"""
        e = self.rms(self.embedding[tokens], self.enorm) @ self.e_proj.T
        h = self.rms(states, self.hnorm) @ self.h_proj.T
        x = (e[:, None, :] + h)[None]
        n = len(tokens)
        pos = torch.arange(n)[None]
        at = torch.arange(n)
        seen = (at[None, :] <= at[:, None]) & (at[:, None] - at[None, :] < self.window)
        mask = torch.zeros(n, n).masked_fill(~seen, float("-inf"))[None, None]
        rope = {kind: self.rotary(x[:, :, 0], position_ids=pos, layer_type=kind) for kind in ("main", "compress")}
        out = self.layer(x, position_embeddings=rope, position_ids=pos, attention_mask=mask, input_ids=tokens[None], cache=None)
        logits = self.rms(self.head(out)[0], self.norm) @ self.output.T
        return out[0], logits


def main(out):
    os.makedirs(out, exist_ok=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    index = []
    for c in CASES:
        m = base.build(c)
        b = Block(c, m)
        n = c["tokens"]
        ids = torch.from_numpy((base.raw("prompt", c["seed"], n) % np.uint64(c["vocab"])).astype(np.int64))
        caught = []
        hook = m.model.hc_head.register_forward_pre_hook(lambda mod, a: caught.append(a[0]))
        entry = dict(c, ids=ids.tolist(), prefixes=[])
        values = []
        with torch.no_grad():
            m(ids[None], use_cache=False)
            hook.remove()
            states = caught[0][0].float()
            for alignment, tokens in (("same", ids), ("next", ids[1:])):
                _, logits = b.run(states[: len(tokens)], tokens)
                w = c["window"]
                rows = sorted({r for r in range(len(tokens)) if r < 3 or abs(r - w) < 3 or abs(r - 2 * w) < 2 or r % 37 == 0} | {len(tokens) - 1})
                entry[alignment] = dict(rows=rows, std=float(logits.std()))
                values.append(logits[rows])
                for p in PREFIXES[c["name"]]:
                    feed, state, guesses, margins = tokens[:p], states[:p], [], []
                    for _ in range(DRAFTS):
                        o, l = b.run(state, feed)
                        top = torch.topk(l[-1], 2)
                        guesses.append(int(top.indices[0]))
                        margins.append(float(top.values[0] - top.values[1]))
                        values.append(l[-1:])
                        feed = torch.cat([feed, top.indices[:1]])
                        state = torch.cat([state, o[-1:]])
                    entry["prefixes"].append(dict(alignment=alignment, length=p, guesses=guesses, margin=min(margins)))
        torch.cat(values).numpy().astype("<f4").tofile(f"{out}/{c['name']}.f32")
        index.append(entry)
        print(c["name"], {a: entry[a]["std"] for a in ("same", "next")}, "min margin", min(p["margin"] for p in entry["prefixes"]))
    with open(f"{out}/mtp.json", "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(e, separators=(",", ":")) for e in index) + "\n]\n")


main(sys.argv[1])
