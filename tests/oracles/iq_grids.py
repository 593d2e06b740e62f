"""Writes kernels/src/quant/grids/*.bin: the codebooks of the IQ types, from the `gguf` package's tables.

Elements are indices into the type's value list, lowest bits first: 2 bits each for three values, 4 bits for eight.
"""

import pathlib

import gguf.quants as q
import numpy as np

OUT = pathlib.Path(__file__).resolve().parents[2] / "kernels/src/quant/grids"


def pack(cls, bits):
    cls.init_grid()
    values = np.array(cls.grid_map, dtype=np.float32)
    index = np.searchsorted(values, cls.grid.ravel()).astype(np.uint8)
    assert (values[index] == cls.grid.ravel()).all()
    per_byte = 8 // bits
    index = index.reshape(-1, per_byte) << np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(index, axis=1).astype(np.uint8).tobytes()


OUT.mkdir(parents=True, exist_ok=True)
for name, cls, bits in [
    ("iq2_xxs", q.IQ2_XXS, 2),
    ("iq2_xs", q.IQ2_XS, 2),
    ("iq3_xxs", q.IQ3_XXS, 4),
    ("iq1", q.IQ1_S, 2),
]:
    data = pack(cls, bits)
    (OUT / f"{name}.bin").write_bytes(data)
    print(name, cls.grid_map, len(data), "bytes")
