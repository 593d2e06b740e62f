"""The content hash of a GGUF, computed without the project's code: what the catalog's [[known]] lists must say.

    python tests/oracles/content_hash.py MODEL.gguf        (needs the PyPI packages blake3, gguf and numpy)

Reads the file with the gguf package; the packing and the hashed fields follow the documentation of `plan_layout`
and `content_hash` in the crate ds4-manifests. Single files only.
"""

import struct
import sys

import gguf
import numpy as np
from blake3 import blake3

CHUNK, ALIGN = 1 << 30, 256
T = gguf.GGUFValueType


def text(b):
    return struct.pack("<Q", len(b)) + b


def scalar(kind, raw):
    v = raw[0]
    if kind in (T.UINT8, T.UINT16, T.UINT32, T.UINT64):
        return b"\0" + struct.pack("<Q", int(v))
    if kind in (T.INT8, T.INT16, T.INT32, T.INT64):
        return b"\1" + struct.pack("<q", int(v))
    if kind in (T.FLOAT32, T.FLOAT64):
        return b"\2" + struct.pack("<d", float(v))
    if kind == T.BOOL:
        return b"\3" + bytes([bool(v)])
    if kind == T.STRING:
        return b"\4" + text(raw.tobytes())
    raise ValueError(kind)


def value(field):
    if field.types[0] != T.ARRAY:
        return scalar(field.types[0], field.parts[field.data[0]])
    kind, items = field.types[1], [field.parts[i] for i in field.data]
    count = struct.pack("<Q", len(items))
    if kind == T.STRING:
        blobs = [i.tobytes() for i in items]
        ends = np.cumsum([len(b) for b in blobs]).astype("<u4").tobytes()
        return b"\5" + count + ends + b"".join(blobs)
    flat = [i[0] for i in items]
    if kind in (T.FLOAT32, T.FLOAT64):
        return b"\7" + count + np.array(flat, dtype="<f4").tobytes()
    if kind == T.BOOL:
        return b"\x08" + count + bytes(bool(x) for x in flat)
    return b"\6" + count + np.array(flat, dtype="<i8").tobytes()


def main(path):
    reader = gguf.GGUFReader(path)
    chunks, placed = [bytearray()], []
    for t in reader.tensors:
        data = t.data.tobytes()
        assert len(data) == t.n_bytes
        padded = -(-len(data) // ALIGN) * ALIGN
        if chunks[-1] and len(chunks[-1]) + padded > CHUNK:
            chunks.append(bytearray())
        placed.append((t, len(chunks) - 1, len(chunks[-1]), len(data)))
        chunks[-1] += data + bytes(padded - len(data))
    h = blake3(b"ds4 content v1\0")
    h.update(struct.pack("<Q", len(chunks)))
    for c in chunks:
        digest = blake3(c).digest()
        print("chunk", len(c), digest.hex())
        h.update(struct.pack("<Q", len(c)) + digest)
    h.update(struct.pack("<Q", len(placed)))
    for t, chunk, offset, length in placed:
        shape = [int(d) for d in t.shape]
        h.update(text(t.name.encode()) + struct.pack("<II", int(t.tensor_type), len(shape)))
        h.update(struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQQ", chunk, offset, length))
    # The reader adds the header's own fields under names with this prefix.
    fields = [f for f in reader.fields.values() if not f.name.startswith(("GGUF.", "split."))]
    h.update(struct.pack("<Q", len(fields)))
    for f in fields:
        h.update(text(f.name.encode()) + value(f))
    print("content", h.hexdigest())


if __name__ == "__main__":
    main(sys.argv[1])
