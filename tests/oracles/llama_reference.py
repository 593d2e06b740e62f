"""transformers' LlamaForCausalLM on the dequantised weights of a llama GGUF: the reference forward pass.

Everything is f32 with eager attention and a fixed thread count. `rounding` gives the same model with what a CPU engine
rounds: activations in front of quantised weights (integers in blocks of 32, d = max|x|/levels) and K/V rows stored as f16. The
difference between the two is where the tests' bounds come from; no figure of ours enters it. Rounding is repeated on
slightly different grids (`INT8`, `INT16`), because one draw may be lucky.
"""

import contextlib

import gguf
import numpy as np
import torch
import transformers
from transformers.models.llama import modeling_llama

from gguf_model import field

torch.set_num_threads(1)
torch.manual_seed(0)

PLAIN = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16)
NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def hf_name(name):
    if not name.startswith("blk."):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.weight"


def split_halves(w, heads):
    """Rows of q and k: from GGUF's order for interleaved rope (2i, 2i+1) to Hugging Face's (i, i + dim/2)."""
    return w.reshape(heads, w.shape[0] // heads // 2, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def load(reader):
    """The model, with `model.quantised`: names of the linear modules whose GGUF tensor is quantised."""
    key = lambda k: field(reader, f"llama.{k}")
    heads, kv_heads = key("attention.head_count"), key("attention.head_count_kv")
    config = transformers.LlamaConfig(
        vocab_size=len(field(reader, "tokenizer.ggml.tokens")), hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"), num_hidden_layers=key("block_count"),
        num_attention_heads=heads, num_key_value_heads=kv_heads, rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": key("rope.freq_base")},
        max_position_embeddings=key("context_length"), tie_word_embeddings=True, hidden_act="silu",
        bos_token_id=None, eos_token_id=None, attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    state, quantised = {}, set()
    for t in reader.tensors:
        w = gguf.dequantize(t.data, t.tensor_type).astype(np.float32).reshape([int(n) for n in t.shape[::-1]])
        if ".attn_q." in t.name or ".attn_k." in t.name:
            w = split_halves(w, heads if ".attn_q." in t.name else kv_heads)
        state[hf_name(t.name)] = torch.from_numpy(np.ascontiguousarray(w))
        if t.tensor_type not in PLAIN:
            quantised.add("lm_head" if t.name == "token_embd.weight" else hf_name(t.name).removesuffix(".weight"))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    model.quantised = quantised
    return model


# Rounding is a draw of noise: a slightly different grid gives another draw of the same size. What is common among engines is
# 127 levels; ours has 32512 (kernels/src/cpu/q16.rs).
INT8 = (127.0, 126.3, 125.7, 125.1)
INT16 = (32512.0, 32400.0, 32300.0, 32200.0)


def integers(x, levels):
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    d = blocks.abs().amax(-1, keepdim=True) / levels
    q = torch.where(d > 0, torch.round(blocks / torch.where(d > 0, d, 1)), 0)
    return (q * d).reshape(x.shape)


@contextlib.contextmanager
def rounding(model, levels):
    handles = [
        m.register_forward_pre_hook(lambda _, args: (integers(args[0], levels), *args[1:]))
        for name, m in model.named_modules() if name in model.quantised
    ]
    assert len(handles) == len(model.quantised)
    plain = modeling_llama.eager_attention_forward

    def attention(module, q, k, v, *args, **kwargs):
        return plain(module, q, k.half().float(), v.half().float(), *args, **kwargs)

    modeling_llama.eager_attention_forward = attention
    try:
        yield model
    finally:
        modeling_llama.eager_attention_forward = plain
        for h in handles:
            h.remove()


@torch.no_grad()
def logits(model, ids):
    """All positions of one sequence, [len, vocab]."""
    return model(torch.tensor([ids])).logits[0]


@torch.no_grad()
def greedy(model, ids, n):
    """`n` greedy tokens and the lead of each over the runner-up."""
    out, margins, cache, step = [], [], None, ids
    for _ in range(n):
        r = model(torch.tensor([step]), cache=cache, use_cache=True)
        cache = r.cache
        top = torch.topk(r.logits[0, -1], 2)
        out.append(int(top.indices[0]))
        margins.append(float(top.values[0] - top.values[1]))
        step = [out[-1]]
    return out, margins


@torch.no_grad()
def screen(model, prompts, n, floor, stop):
    """Those of `prompts` whose `n` greedy tokens all lead by `floor` and hold none of `stop`: {index: (smallest lead,
    distinct tokens)}. One left-padded batch, thinned as prompts drop out: quick, and good for choosing prompts only."""
    width = max(map(len, prompts))
    step = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    alive, least = torch.arange(len(prompts)), torch.full((len(prompts),), torch.inf)
    seen, cache, stop = [set() for _ in prompts], None, torch.tensor(sorted(stop))
    for _ in range(n):
        r = model(step, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1)
        cache = r.cache
        top = r.logits[:, -1].topk(2)
        step = top.indices[:, :1]
        least = torch.minimum(least, top.values[:, 0] - top.values[:, 1])
        keep = ((least >= floor) & ~torch.isin(step[:, 0], stop)).nonzero()[:, 0]
        mask = torch.cat([mask, torch.ones_like(step)], dim=1)
        positions = positions[:, -1:] + 1
        if len(keep) < len(alive):
            alive, least, step, mask, positions = (x[keep] for x in (alive, least, step, mask, positions))
            if not len(keep):
                break
            cache.batch_select_indices(keep)
        for i, t in zip(alive.tolist(), step[:, 0].tolist()):
            seen[i].add(t)
    return {i: (lead, len(seen[i])) for i, lead in zip(alive.tolist(), least.tolist())}


def errors(got, want):
    """Root-mean-square error relative to the spread of the logits, and the largest absolute error, over one row."""
    diff = (got - want).double()
    spread = (want.double() - want.double().mean()).pow(2).mean().sqrt()
    return {"rel": float(diff.pow(2).mean().sqrt() / spread), "max_abs": float(diff.abs().max())}
