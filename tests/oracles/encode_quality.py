"""How well ggml's own encoders do on fixed data: the bound that our Q4_K, Q2_K and IQ2_XXS encoders are held to.

Writes tests/fixtures/quant/encoders.json. Data is a function of its name, so that both sides have the same values:
three uniform 24-bit numbers of splitmix64 are added up to a bell (exact in f64, rounded once to f32), and shaped.
Encoder: `ggml_quantize_chunk` of the ggml that the xllamacpp wheel contains, called through ctypes. Decoder: the `gguf` package.
Figure: the square root of sum w (y - x)^2 / sum w x^2. IQ2_XXS of ggml insists on an importance; without one it gets ones.

usage: encode_quality.py     (xllamacpp 2026.10.11549, gguf 0.19.0, numpy)
"""
import ctypes
import importlib.metadata
import importlib.util
import json
import pathlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROWS, COLS = 8, 2048
M64 = (1 << 64) - 1


def words(name, n):
    h = 0xCBF29CE484222325
    for b in name.encode():
        h = ((h ^ b) * 0x100000001B3) & M64
    with np.errstate(over="ignore"):
        z = np.uint64(h) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def bell(name):
    u = (words(name, 3 * ROWS * COLS) >> np.uint64(40)).astype(np.float64).reshape(-1, 3)
    return (u.sum(1) / 2**24 - 1.5).astype(np.float32)


def data(name):
    b = bell(name)
    if name == "bell":
        return b
    if name == "tails":
        return b * b * b
    if name == "shifted":
        return b + np.float32(0.5)
    if name == "small":  # of a trained matrix's size, where f16 scales are subnormal
        return b * np.float32(0.03125)
    if name == "uneven":  # neighbouring groups of 32 differ up to 128-fold
        return b * np.exp2(-((np.arange(b.size) // 32) % 8)).astype(np.float32)
    raise KeyError(name)


def importance():
    """One weight a column, from 0.01 to 4, most of them small."""
    u = (words("importance", COLS) >> np.uint64(40)).astype(np.float64) / 2**24
    return (np.float32(0.1) + (u * u).astype(np.float32) * np.float32(1.9)) ** 2


def library():
    where = pathlib.Path(importlib.util.find_spec("xllamacpp").submodule_search_locations[0])
    lib = ctypes.CDLL(str(next(where.glob("*.so"))))
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64,
                                        ctypes.c_int64, ctypes.c_void_p]
    return lib


def encoded(lib, ty, x, w):
    elems, size = gguf.GGML_QUANT_SIZES[ty]
    out = np.zeros(x.size // elems * size, np.uint8)
    if w is None and ty == T.IQ2_XXS:
        w = np.ones(COLS, np.float32)
    w = None if w is None else np.ascontiguousarray(w, np.float32)
    n = lib.ggml_quantize_chunk(int(ty), x.ctypes.data, out.ctypes.data, 0, ROWS, COLS, w.ctypes.data if w is not None else None)
    assert n == out.size
    return gguf.dequantize(out.reshape(ROWS, -1), ty).astype(np.float32).ravel()


def fnv1a(b):
    h = 0xCBF29CE484222325
    for v in b:
        h = ((h ^ v) * 0x100000001B3) & M64
    return h


lib = library()
cases = []
for name in ["bell", "tails", "shifted", "small", "uneven"]:
    x = data(name)
    for ty in [T.Q4_K, T.Q2_K, T.IQ2_XXS]:
        for weighted in [False, True]:
            w = importance() if weighted else None
            y = encoded(lib, ty, x, w)
            each = np.tile(w, ROWS).astype(np.float64) if weighted else np.ones(x.size)
            x64, y64 = x.astype(np.float64), y.astype(np.float64)
            error = float(np.sqrt((each * (y64 - x64) ** 2).sum() / (each * x64**2).sum()))
            cases.append(dict(data=name, type=ty.name, weighted=weighted, error=round(error, 6), data_fnv=f"{fnv1a(x.tobytes()):016x}"))
            print(name, ty.name, weighted, error)
ours = dict(ggml="xllamacpp " + importlib.metadata.version("xllamacpp"), rows=ROWS, cols=COLS,
            importance_fnv=f"{fnv1a(importance().astype(np.float32).tobytes()):016x}", cases=cases)
text = json.dumps(ours, indent=None).replace('{"data"', '\n{"data"').replace("]}", "\n]}")
(ROOT / "tests/fixtures/quant/encoders.json").write_text(text + "\n")
