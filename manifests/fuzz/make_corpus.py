"""Writes the committed seed corpus. Needs nothing but Python; shares no code with the reader.

    python3 manifests/fuzz/make_corpus.py

A file's name begins with the code that the reader must answer with (`ok` when it must accept), which the crate's tests
check. Inputs that a fuzzing run finds worth keeping get such a name too.
"""

import pathlib
import struct

HERE = pathlib.Path(__file__).parent / "corpus"


def s(b):
    b = b.encode() if isinstance(b, str) else b
    return struct.pack("<Q", len(b)) + b


def key(name, ty, payload):
    return s(name) + struct.pack("<I", ty) + payload


def arr(ty, n, data=b""):
    return struct.pack("<IQ", ty, n) + data


def tensor(name, dims, ty, offset):
    return s(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", d) for d in dims) + struct.pack("<IQ", ty, offset)


def gguf(keys=(), tensors=(), data=b"", version=3, nk=None, nt=None, align=32):
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors) if nt is None else nt, len(keys) if nk is None else nk)
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % align) + data


ARCH = key("general.architecture", 8, s("llama"))


def u32(name, v):
    return key(name, 4, struct.pack("<I", v))


def f32(name, v):
    return key(name, 6, struct.pack("<f", v))


def tiny_llama():
    keys = [ARCH, u32("llama.block_count", 1), u32("llama.context_length", 16), u32("llama.embedding_length", 32),
            u32("llama.feed_forward_length", 32), u32("llama.attention.head_count", 2), u32("llama.vocab_size", 4),
            f32("llama.attention.layer_norm_rms_epsilon", 1e-5),
            key("tokenizer.ggml.tokens", 9, arr(8, 4, b"".join(map(s, ["a", "b", "<s>", "</s>"]))))]
    shapes = [("token_embd.weight", [32, 4], 2)]
    shapes += [(f"blk.0.{p}.weight", [32], 0) for p in ("attn_norm", "ffn_norm")]
    shapes += [(f"blk.0.{p}.weight", [32, 32], 3) for p in
               ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")]
    shapes += [("output_norm.weight", [32], 0)]
    tensors, offset = [], 0
    for name, dims, ty in shapes:
        rows = dims[1] if len(dims) > 1 else 1
        size = {0: 4 * dims[0], 2: 18, 3: 20}[ty] * rows
        tensors.append(tensor(name, dims, ty, offset))
        offset += size + -size % 32
    return gguf(keys, tensors, bytes(offset))


ONE = tensor("t", [8], 0, 0)
SCALARS = [key("u8", 0, b"\x05"), key("i8", 1, b"\xfb"), key("u16", 2, b"\1\2"), key("i16", 3, b"\xff\xff"),
           key("u32", 4, b"\1\2\3\4"), key("i32", 5, b"\xff" * 4), key("f32", 6, struct.pack("<f", 1.5)),
           key("bool", 7, b"\1"), key("str", 8, s("text")), key("u64", 10, b"\1" * 8), key("i64", 11, b"\xff" * 8),
           key("f64", 12, struct.pack("<d", 0.1))]
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
ARRAYS = [key(f"a{ty}", 9, arr(ty, 3, bytes(3 * n))) for ty, n in SIZES.items()]

GGUF = {
    "ok--tiny_llama": tiny_llama(),
    "ok--no_keys_no_tensors": gguf(),
    "ok--every_scalar": gguf(SCALARS),
    "ok--every_array": gguf(ARRAYS + [key("a8", 9, arr(8, 2, s("x") + s(b"\xff\xfe")))]),
    "ok--alignment_64": gguf([u32("general.alignment", 64)], [ONE], bytes(32), align=64),
    "ok--shard": gguf([key("split.no", 2, b"\1\0"), key("split.count", 2, b"\3\0"), key("split.tensors.count", 5, b"\3\0\0\0")],
                      [ONE], bytes(32)),
    "not_a_gguf--empty": b"",
    "not_a_gguf--html": b"<!DOCTYPE html><html><body>404</body></html>",
    "not_a_gguf--lfs_pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    "not_a_gguf--safetensors": struct.pack("<Q", 40) + b'{"x":{"dtype":"F32","shape":[1]}}',
    "not_a_gguf--zip": b"PK\x03\x04" + bytes(26) + b"archive/data.pkl",
    "truncated_file--magic_only": b"GGUF",
    "truncated_file--half_magic": b"GG",
    "truncated_file--no_counts": gguf()[:12],
    "truncated_file--tensor_data": tiny_llama()[:-1],
    "truncated_file--in_tensor_table": gguf([], [tensor("t" * 40, [8], 0, 0)])[:70],
    "truncated_file--long_string": gguf([key("k", 8, struct.pack("<Q", 1 << 60))], data=bytes(64)),
    "truncated_file--offset_beyond": gguf([], [tensor("t", [8], 0, 1 << 40)], bytes(32)),
    "unsupported_version--1": gguf(version=1),
    "unsupported_version--2": gguf(version=2),
    "big_endian--3": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "count_too_large--keys": gguf(nk=1 << 60, data=bytes(64)),
    "count_too_large--tensors": gguf(nt=1 << 40, data=bytes(64)),
    "count_too_large--array_of_u64": gguf([key("k", 9, arr(10, 1 << 61, bytes(64)))]),
    "count_too_large--array_of_strings": gguf([key("k", 9, arr(8, 1 << 33, bytes(64)))]),
    "count_too_large--array_wraps": gguf([key("k", 9, arr(10, (1 << 64) - 1, bytes(64)))]),
    "unknown_value_type--13": gguf([key("k", 13, bytes(8))]),
    "unknown_value_type--array_of_13": gguf([key("k", 9, arr(13, 1, bytes(8)))]),
    "nested_array--one": gguf([key("k", 9, arr(9, 1, arr(4, 1, bytes(4))))]),
    "bad_metadata_value--boolean_2": gguf([key("k", 7, b"\2")]),
    "bad_metadata_value--string_not_utf8": gguf([key("k", 8, s(b"\xc3\x28"))]),
    "bad_metadata_value--u64_array_beyond_i64": gguf([key("k", 9, arr(10, 1, b"\xff" * 8))]),
    "bad_name--empty_key": gguf([key("", 7, b"\1")], data=bytes(32)),
    "bad_name--tensor_not_utf8": gguf([], [tensor(b"\xff", [8], 0, 0)], bytes(32)),
    "duplicate_key--architecture": gguf([ARCH, ARCH]),
    "duplicate_tensor--t": gguf([], [ONE, tensor("t", [8], 0, 32)], bytes(64)),
    "bad_alignment--zero": gguf([u32("general.alignment", 0)]),
    "bad_alignment--33": gguf([u32("general.alignment", 33)]),
    "bad_shape--no_dimensions": gguf([], [tensor("t", [], 0, 0)], bytes(32)),
    "bad_shape--zero": gguf([], [tensor("t", [0, 8], 0, 0)], bytes(32)),
    "bad_shape--product_wraps": gguf([], [tensor("t", [1 << 32, 1 << 32], 0, 0)], bytes(32)),
    "bad_shape--half_a_block": gguf([], [tensor("t", [48], 3, 0)], bytes(64)),
    "bad_shape--nine_dimensions": gguf([], [tensor("t", [1] * 9, 0, 0)], bytes(32)),
    "unknown_tensor_type--removed": gguf([], [tensor("t", [32], 4, 0)], bytes(32)),
    "unknown_tensor_type--99": gguf([], [tensor("t", [32], 99, 0)], bytes(32)),
    "bad_offset--unaligned": gguf([], [tensor("t", [8], 0, 4)], bytes(64)),
    "bad_offset--wraps": gguf([], [tensor("t", [8], 0, (1 << 64) - 32)], bytes(32)),
    "overlapping_tensors--same_place": gguf([], [ONE, tensor("u", [8], 0, 0)], bytes(32)),
}


def u64(v):
    return struct.pack("<Q", v)


def body(chunks=(), tensors=(), metadata=(), backend=0, known=b"\1"):
    out = s("llama") + s("dev-llama") + s("tiny") + bytes(32) + known + u64(1)
    out += struct.pack("<I", backend) + u64(4096)
    for items in (chunks, tensors, metadata):
        out += u64(len(items)) + b"".join(items)
    return out


def wt(name="t", ty=0, shape=(8,), chunk=0, offset=0, length=32):
    return s(name) + struct.pack("<I", ty) + u64(len(shape)) + b"".join(map(u64, shape)) + struct.pack("<IQQ", chunk, offset, length)


CHUNK = u64(256) + bytes(32)
VALUES = [s("a") + struct.pack("<IQ", 0, 7), s("b") + struct.pack("<Iq", 1, -7), s("c") + struct.pack("<Id", 2, 0.5),
          s("d") + struct.pack("<I", 3) + b"\1", s("e") + struct.pack("<I", 4) + s("x"),
          s("f") + struct.pack("<I", 5) + s(struct.pack("<2I", 1, 3)) + s("abc"),
          s("g") + struct.pack("<I", 6) + s(struct.pack("<2i", 1, -1)), s("h") + struct.pack("<I", 7) + s(bytes(16)),
          s("i") + struct.pack("<I", 8) + s(bytes(8)), s("j") + struct.pack("<I", 9) + s(b"\0\1")]

# `body--`: hashed and framed by whoever reads it. `whole--`: header included.
MANIFEST = {
    "body--ok--every_value": body([CHUNK], [wt()], VALUES),
    "body--ok--empty": body(),
    "body--manifest_body--nothing": b"",
    "body--manifest_body--trailing": body() + b"\0",
    "body--manifest_body--cut": body([CHUNK], [wt()], VALUES)[:-1],
    "body--manifest_body--boolean_2": body(known=b"\2"),
    "body--manifest_body--backend_7": body(backend=7),
    "body--manifest_body--count_of_2_60": body()[:-8] + u64(1 << 60),
    "body--manifest_body--ragged_floats": body(metadata=[s("i") + struct.pack("<I", 8) + s(bytes(7))]),
    "body--manifest_invalid--type_4": body([CHUNK], [wt(ty=4)]),
    "body--manifest_invalid--no_chunk": body([], [wt()]),
    "body--manifest_invalid--outside_chunk": body([CHUNK], [wt(offset=225)]),
    "body--manifest_invalid--length": body([CHUNK], [wt(length=31)]),
    "body--manifest_invalid--twice": body([CHUNK], [wt(), wt()]),
    "body--manifest_invalid--shape_wraps": body([CHUNK], [wt(shape=(1 << 63, 4))]),
    "body--manifest_invalid--key_twice": body(metadata=[VALUES[0], VALUES[0]]),
    "body--manifest_invalid--string_table": body(metadata=[s("f") + struct.pack("<I", 5) + s(struct.pack("<2I", 3, 1)) + s("abc")]),
    "whole--manifest_truncated--empty": b"",
    "whole--manifest_magic--html": b"<!DOCTYPE html><html></html>",
    "whole--manifest_version--9": b"DS4WMAN\0" + struct.pack("<IQ", 9, 0) + bytes(32),
    "whole--manifest_too_large--2_40": b"DS4WMAN\0" + struct.pack("<IQ", 2, 1 << 40) + bytes(32),
    "whole--manifest_truncated--short": b"DS4WMAN\0" + struct.pack("<IQ", 2, 10) + bytes(32 + 9),
    "whole--manifest_trailing_bytes--one": b"DS4WMAN\0" + struct.pack("<IQ", 2, 0) + bytes(32 + 1),
    "whole--manifest_hash--zero": b"DS4WMAN\0" + struct.pack("<IQ", 2, 3) + bytes(32 + 3),
}

for folder, files in (("gguf_parse", GGUF), ("manifest_decode", MANIFEST)):
    (HERE / folder).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (HERE / folder / name).write_bytes(content)
    print(folder, len(files), "files", sum(map(len, files.values())), "bytes")
