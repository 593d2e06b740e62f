"""Writes tests/fixtures/quant/<type>.bin: random blocks and what the `gguf` package decodes them to.

The layout is described where it is read, in kernels/src/quant/fixtures.rs. Blocks are random bytes with their f16 scale
fields replaced by finite values of ordinary size (random bytes would often be NaN); the first block of each file has all
other bytes 0xff, the second all 0x00, and one has a negative scale. The digest part has random blocks, and for codebook
types visits every entry of the codebook.
"""

import pathlib
import struct

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

OUT = pathlib.Path(__file__).resolve().parents[2] / "tests/fixtures/quant"
rng = np.random.default_rng(20261130)

# Byte offsets of f16 scale fields in a block.
SCALES = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0],
    T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208],
    T.IQ2_XXS: [0], T.IQ2_XS: [0], T.IQ3_XXS: [0], T.IQ4_NL: [0], T.IQ4_XS: [0], T.IQ1_S: [0],
}
ENCODED = [T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0]
PLAIN = [T.F32, T.F16, T.BF16]


def set_scale(block, ty, value):
    """Puts `value` (and fresh random ones in further fields) into the block's scale fields."""
    if ty == T.IQ1_M:  # four nibbles of the f16 in the tops of four u16
        bits = int(np.float16(value).view(np.uint16))
        for i in range(4):
            block[49 + 2 * i] = (block[49 + 2 * i] & 0x0F) | (((bits >> (4 * i)) & 15) << 4)
        return
    for k, at in enumerate(SCALES[ty]):
        v = np.float16(value if k == 0 else rng.uniform(-0.1, 0.1))
        block[at:at + 2] = np.frombuffer(v.tobytes(), np.uint8)


def random_blocks(ty, n):
    _, size = gguf.GGML_QUANT_SIZES[ty]
    blocks = rng.integers(0, 256, (n, size), dtype=np.uint8)
    for b in blocks:
        set_scale(b, ty, rng.uniform(0.001, 0.1))
    return blocks


def visit_codebook(blocks, ty):
    """Makes the indices of `blocks` run through the codebook."""
    if ty == T.IQ2_XXS:
        view = blocks[:, 2:].reshape(-1, 8, 8)
        view[:, :, :4] = np.arange(view.shape[0] * 32).reshape(-1, 8, 4).astype(np.uint8)
    elif ty == T.IQ2_XS:
        index = np.arange(len(blocks) * 32, dtype=np.uint16).reshape(-1, 32) % 512
        words = blocks[:, 2:66].copy().view("<u2")
        blocks[:, 2:66] = ((words & 0xFE00) | index).view(np.uint8)
    elif ty == T.IQ3_XXS:
        blocks[:, 2:66] = np.arange(len(blocks) * 64).reshape(-1, 64).astype(np.uint8)
    elif ty in (T.IQ1_S, T.IQ1_M):
        index = np.arange(len(blocks) * 32).reshape(-1, 32) % 2048
        low, high = (index & 255).astype(np.uint8), index >> 8
        if ty == T.IQ1_S:
            blocks[:, 2:34] = low
            words = blocks[:, 34:50].copy().view("<u2") & 0xF000
            for k in range(4):
                words |= (high[:, k::4] << (3 * k)).astype(np.uint16)
            blocks[:, 34:50] = words.view(np.uint8)
        else:
            blocks[:, 0:32] = low
            shifts = blocks[:, 32:48] & 0x88
            blocks[:, 32:48] = shifts | high[:, 0::2].astype(np.uint8) | (high[:, 1::2] << 4).astype(np.uint8)


def fnv1a(data):
    h = 0xCBF29CE484222325
    for b in data:
        h = ((h ^ b) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return h


def plain_values(ty, n):
    """Ordinary values and the edges of the format, as its own bytes."""
    x = (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 4, n)).astype(np.float32)
    edges = np.array([0.0, -0.0, 1.0, 65504.0, -65504.0, 2.0**-24, 6e-5, np.inf, -np.inf], np.float32)
    x[: len(edges)] = edges
    return gguf.quantize(x.reshape(1, -1), ty).view(np.uint8).ravel()


def encoder_input(ty):
    """24 blocks: normal, one all zero, one constant, one with a tie for the largest magnitude, tiny and large ones."""
    x = rng.standard_normal((24, 32)).astype(np.float32)
    x[1] = 0
    x[2] = 0.37
    x[3, 5], x[3, 20] = 4.0, -4.0
    x[4] *= 1e-6
    x[5] *= 1e4
    x[6] = np.abs(x[6])
    x[7] = np.arange(32) - 16
    x[8] = np.arange(32) / 31.0
    return x


def expect(blocks, ty):
    out = gguf.dequantize(blocks.reshape(1, -1).copy(), ty).astype(np.float32)
    return np.ascontiguousarray(out).ravel()


OUT.mkdir(parents=True, exist_ok=True)
total = 0
for ty in [*PLAIN, *SCALES, T.IQ1_M]:
    elems, size = gguf.GGML_QUANT_SIZES[ty]
    if ty in PLAIN:
        n, m = 64, 512
        blocks, more = plain_values(ty, n), plain_values(ty, m)
    else:
        n = 4 if elems == 256 else 16
        blocks = random_blocks(ty, n)
        blocks[0], blocks[1] = 0xFF, 0x00
        set_scale(blocks[0], ty, 0.0625)
        set_scale(blocks[1], ty, 0.0471)
        set_scale(blocks[2], ty, -0.0333)
        m = 64 if ty in (T.IQ1_S, T.IQ1_M) else 16
        more = random_blocks(ty, m)
        visit_codebook(more, ty)
    e = encoder_input(ty) if ty in ENCODED else np.zeros((0, 32), np.float32)
    encoded = gguf.quantize(e, ty).view(np.uint8).tobytes() if e.size else b""
    data = b"DS4QFIX1" + struct.pack("<4I", int(ty), n, m, e.size)
    data += blocks.tobytes() + expect(blocks, ty).tobytes()
    data += more.tobytes() + struct.pack("<Q", fnv1a(expect(more, ty).tobytes()))
    data += e.tobytes() + encoded
    (OUT / f"{ty.name.lower()}.bin").write_bytes(data)
    total += len(data)
print("total", total, "bytes")
