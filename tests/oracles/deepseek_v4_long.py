"""Reference logits of a small DeepSeek V4 past position 65,536, from transformers' own modelling class.

The prompt goes through transformers' cache in chunks of 512 (first shown to give what one piece gives, on 1,500 tokens). One thing
is replaced: transformers computes rotary angles in f32, whose spacing at 60,000 rad is 0.004 rad, so that its logits at such
positions are off by about 1e-3. Here angles are f64, from the frequencies of the YaRN paper's formula written out below.

Only rows whose indexer cut is clear are kept: the gap between the last selected and the first dropped score must be 1e-4 of
the scores' standard deviation, a hundred times what two f32 sums differ by.

usage: deepseek_v4_long.py OUTDIR        (torch 2.11.0, transformers 5.24.0; two minutes)
"""
import json
import math
import sys

import numpy as np
import torch

from deepseek_v4 import BASE, build, raw

CASE = dict(BASE, name="long", layers="SHC", tokens=66048, rope=16, hash_layers=1, index_heads=16, seed=21)
ROWS = [*range(65529, 65545), *range(65570, 66048, 29)]
CHUNK = 512


def frequencies(dim, base, yarn_ctx):
    """f64 angular frequency per pair; `yarn_ctx` None: no scaling. YaRN (arXiv 2309.00071) with factor 16, beta 32 and 1."""
    f = [base ** (-2.0 * i / dim) for i in range(dim // 2)]
    if yarn_ctx is None:
        return np.array(f)
    edge = lambda beta: dim * math.log(yarn_ctx / (2 * math.pi * beta)) / (2 * math.log(base))
    low, high = max(0, math.floor(edge(32))), min(dim - 1, math.ceil(edge(1)))
    ramp = [min(1.0, max(0.0, (i - low) / max(0.001, high - low))) for i in range(dim // 2)]
    return np.array([x * (1 - r) + x / 16 * r for x, r in zip(f, ramp)])


def use_exact_angles(m, c):
    tables = {"main": torch.tensor(frequencies(c["rope"], 10000.0, None)),
              "compress": torch.tensor(frequencies(c["rope"], 160000.0, c["yarn_ctx"]))}
    for mod in m.modules():
        if type(mod).__name__ == "DeepseekV4RotaryEmbedding":
            for kind, f in tables.items():
                own = getattr(mod, f"{kind}_inv_freq").double()
                assert torch.allclose(own, f, rtol=1e-5), (kind, own, f)

            def forward(x, position_ids, layer_type=None):
                angle = position_ids[..., None].double() * tables[layer_type]
                return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

            mod.forward = forward


def chunked(m, ids, chunk, rows):
    """Logits of `rows`, feeding `chunk` tokens at a time."""
    cache, out = None, {}
    for at in range(0, len(ids), chunk):
        part = ids[at:at + chunk]
        wanted = [r - at for r in rows if at <= r < at + len(part)]
        keep = torch.tensor(wanted or [len(part) - 1])
        o = m(part[None], past_key_values=cache, use_cache=True, logits_to_keep=keep)
        cache = o.past_key_values
        for w, row in zip(wanted, o.logits[0].float().numpy()):
            out[at + w] = row
    return [out[r] for r in rows]


def main(out):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    c = CASE
    m = build(c)
    use_exact_angles(m, c)
    ids = torch.from_numpy((raw("prompt", c["seed"], c["tokens"]) % np.uint64(c["vocab"])).astype(np.int64))
    with torch.no_grad():
        whole = m(ids[None, :1500], use_cache=False).logits[0].float().numpy()
        pieces = np.stack(chunked(m, ids[:1500], CHUNK, list(range(1500))))
        error = np.abs(whole - pieces).max() / whole.std()
        print("chunks against one piece:", error)
        assert error < 2e-5, error

        gaps = {}
        k = c["index_topk"]

        def scores(mod, args, o):
            seen = o.shape[-1]
            first = 4 * seen - o.shape[1]  # chunks are whole windows
            for r in (r for r in ROWS if first <= r < 4 * seen):
                row = o[0, r - first, :(r + 1) // 4]
                top = torch.topk(row, k + 1).values
                gaps[r] = float((top[-2] - top[-1]) / row.std())

        scorer = next(x for x in m.modules() if type(x).__name__ == "DeepseekV4IndexerScorer")
        scorer.register_forward_hook(scores)
        got = chunked(m, ids, CHUNK, ROWS)
    clear = [i for i, r in enumerate(ROWS) if gaps[r] > 1e-4]
    rows = [ROWS[i] for i in clear]
    logits = np.stack([got[i] for i in clear])
    print(len(rows), "of", len(ROWS), "rows with a clear cut; std", logits.std())
    logits.astype("<f4").tofile(f"{out}/long.f32")
    with open(f"{out}/long.json", "w") as f:
        json.dump(dict(c, rows=rows, std=float(logits.std())), f)
        f.write("\n")


main(sys.argv[1])
