//! The identity of a model's content, and hashing it straight from its files.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

use crate::codec::{le_blob, len_u64};
use crate::gguf::GgufModel;
use crate::layout::plan_layout;
use crate::metadata::{Metadata, Value};
use crate::weights::{Chunk, TensorEntry};

/// The identity of a model's content: BLAKE3 over the following, every number little-endian, every string a u64 length
/// and its bytes.
///
/// 1. `ds4 content v1` and a zero byte;
/// 2. u64 number of chunks; per chunk u64 length and the 32 bytes of its BLAKE3 (padding included: [`crate::plan_layout`]);
/// 3. u64 number of tensors; per tensor its name, u32 type id, u32 number of dimensions, the dimensions as u64,
///    u32 chunk, u64 offset, u64 length;
/// 4. u64 number of metadata entries; per entry its key, a tag byte and the value: 0 u64; 1 i64; 2 f64 bits; 3 bool as a
///    byte; 4 a string; 5 strings: u64 count, the end offsets as u32, then all bytes; 6 integers: u64 count, i64 each;
///    7 floats: u64 count, f32 bits each; 8 booleans: u64 count, a byte each.
///
/// Whether the file was split makes no difference: `split.*` keys are not part of a model's metadata.
pub fn content_hash(chunks: &[Chunk], tensors: &[TensorEntry], metadata: &Metadata) -> [u8; 32] {
    let mut h = blake3::Hasher::new();
    h.update(b"ds4 content v1\0");
    h.update(&len_u64(chunks.len()).to_le_bytes());
    for c in chunks {
        h.update(&c.len.to_le_bytes());
        h.update(&c.blake3);
    }
    h.update(&len_u64(tensors.len()).to_le_bytes());
    for t in tensors {
        hash_bytes(&mut h, t.name.as_bytes());
        h.update(&t.ty.id().to_le_bytes());
        h.update(&u32::try_from(t.shape.len()).unwrap_or(u32::MAX).to_le_bytes());
        for dim in &t.shape {
            h.update(&dim.to_le_bytes());
        }
        h.update(&t.chunk.to_le_bytes());
        h.update(&t.offset.to_le_bytes());
        h.update(&t.len.to_le_bytes());
    }
    h.update(&len_u64(metadata.entries.len()).to_le_bytes());
    for (key, value) in &metadata.entries {
        hash_bytes(&mut h, key.as_bytes());
        hash_value(&mut h, value);
    }
    *h.finalize().as_bytes()
}

fn hash_bytes(h: &mut blake3::Hasher, bytes: &[u8]) {
    h.update(&len_u64(bytes.len()).to_le_bytes());
    h.update(bytes);
}

fn hash_value(h: &mut blake3::Hasher, value: &Value) {
    let counted = |h: &mut blake3::Hasher, tag: u8, count: usize, blob: &[u8]| {
        h.update(&[tag]);
        h.update(&len_u64(count).to_le_bytes());
        h.update(blob);
    };
    match value {
        Value::U64(v) => h.update(&[0]).update(&v.to_le_bytes()),
        Value::I64(v) => h.update(&[1]).update(&v.to_le_bytes()),
        Value::F64(v) => h.update(&[2]).update(&v.to_le_bytes()),
        Value::Bool(v) => h.update(&[3, u8::from(*v)]),
        Value::String(v) => {
            h.update(&[4]);
            hash_bytes(h, v.as_bytes());
            h
        }
        Value::Strings(v) => {
            counted(h, 5, v.len(), &le_blob(&v.ends, u32::to_le_bytes));
            h.update(&v.bytes)
        }
        Value::Ints(v) => {
            counted(h, 6, v.len(), &le_blob(v, i64::to_le_bytes));
            h
        }
        Value::Floats(v) => {
            counted(h, 7, v.len(), &le_blob(v, f32::to_le_bytes));
            h
        }
        Value::Bools(v) => {
            counted(h, 8, v.len(), &le_blob(v, |b| [u8::from(b)]));
            h
        }
    };
}

/// Reads a model's files once and hashes them as an owner's memory would be hashed: the chunks of [`plan_layout`], then
/// [`content_hash`]. For checking a download, and for the catalog's list of known hashes.
///
/// # Errors
/// Those of opening and reading; `UnexpectedEof` when a file has become shorter since its header was read.
pub fn hash_files(model: &GgufModel) -> io::Result<(Vec<Chunk>, [u8; 32])> {
    let layout = plan_layout(&model.tensors);
    let mut files = model.shards.iter().map(|s| File::open(&s.path)).collect::<io::Result<Vec<File>>>()?;
    let mut buffer = vec![0; 1 << 20];
    let mut chunks = Vec::with_capacity(layout.chunks.len());
    let mut tensors = model.tensors.iter().zip(&layout.placed).peekable();
    for (index, len) in layout.chunks.iter().enumerate() {
        let mut hasher = blake3::Hasher::new();
        while let Some((source, place)) = tensors.next_if(|(_, place)| usize::try_from(place.chunk) == Ok(index)) {
            pad(&mut hasher, place.offset);
            let file = files.get_mut(source.shard).ok_or(io::ErrorKind::InvalidInput)?;
            file.seek(SeekFrom::Start(source.offset))?;
            let mut left = source.len;
            while left > 0 {
                let take = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                file.read_exact(&mut buffer[..take])?;
                hasher.update(&buffer[..take]);
                left -= len_u64(take);
            }
        }
        pad(&mut hasher, *len);
        chunks.push(Chunk { len: *len, blake3: *hasher.finalize().as_bytes() });
    }
    let content = content_hash(&chunks, &layout.placed, &model.metadata);
    Ok((chunks, content))
}

/// Zeros up to `offset`; fewer than [`crate::layout::TENSOR_ALIGN`] of them.
fn pad(hasher: &mut blake3::Hasher, offset: u64) {
    let zeros = [0; 256];
    while hasher.count() < offset {
        let take = usize::try_from(offset - hasher.count()).unwrap_or(zeros.len()).min(zeros.len());
        hasher.update(&zeros[..take]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::GgmlType;
    use crate::gguf::GgufWriter;

    fn model(change: &dyn Fn(GgufWriter) -> GgufWriter) -> ([u8; 32], usize) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        let writer = GgufWriter::new()
            .metadata("a", Value::U64(1))
            .tensor("t", GgmlType::F32, &[100], vec![3; 400])
            .tensor("u", GgmlType::F32, &[2], vec![4; 8]);
        change(writer).write_to(&path).unwrap();
        let (chunks, content) = hash_files(&GgufModel::open(&path).unwrap()).unwrap();
        (content, chunks.len())
    }

    /// The chunk's bytes spelled out: tensors at multiples of 256, zeros between and after.
    #[test]
    fn files_hash_like_the_memory_that_they_fill() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        GgufWriter::new()
            .tensor("t", GgmlType::F32, &[100], vec![3; 400])
            .tensor("u", GgmlType::F32, &[2], vec![4; 8])
            .write_to(&path)
            .unwrap();
        let (chunks, _) = hash_files(&GgufModel::open(&path).unwrap()).unwrap();
        let memory = [&[3; 400][..], &[0; 112], &[4; 8], &[0; 248]].concat();
        assert_eq!(chunks, [Chunk { len: 768, blake3: *blake3::hash(&memory).as_bytes() }]);
    }

    #[test]
    fn every_part_of_a_model_changes_its_hash() {
        let base = model(&|w| w).0;
        assert_eq!(model(&|w| w).0, base);
        assert_ne!(model(&|w| w.alignment(64)).0, base, "general.alignment is metadata like any other");
        for (what, other) in [
            ("metadata value", model(&|_| small(2, "t", 3, GgmlType::F32))),
            ("tensor name", model(&|_| small(1, "T", 3, GgmlType::F32))),
            ("tensor byte", model(&|_| small(1, "t", 5, GgmlType::F32))),
            ("tensor type", model(&|_| small(1, "t", 3, GgmlType::I32))),
            ("another tensor", model(&|w| w.tensor("v", GgmlType::F32, &[1], vec![0; 4]))),
            ("another key", model(&|w| w.metadata("b", Value::Bool(true)))),
        ] {
            assert_ne!(other.0, base, "{what}");
        }
        assert_eq!(model(&|_| small(1, "t", 3, GgmlType::F32)).0, base);
    }

    fn small(value: u64, name: &str, byte: u8, ty: GgmlType) -> GgufWriter {
        GgufWriter::new().metadata("a", Value::U64(value)).tensor(name, ty, &[100], vec![byte; 400]).tensor(
            "u",
            GgmlType::F32,
            &[2],
            vec![4; 8],
        )
    }

    #[test]
    fn a_file_cut_after_it_was_opened_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        GgufWriter::new().tensor("t", GgmlType::F32, &[100], vec![3; 400]).write_to(&path).unwrap();
        let model = GgufModel::open(&path).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(model.shards[0].file_len - 1).unwrap();
        assert_eq!(hash_files(&model).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    /// Tensors far apart in chunks of their own would need gigabytes; the packing itself is tested in `layout`.
    #[test]
    fn metadata_values_of_different_kinds_hash_differently() {
        let hash = |v: Value| {
            let mut m = Metadata::default();
            m.set("k", v);
            content_hash(&[], &[], &m)
        };
        let values = [
            Value::U64(1),
            Value::I64(1),
            Value::F64(1.0),
            Value::Bool(true),
            Value::String("\u{1}".into()),
            Value::Ints(vec![1]),
            Value::Floats(vec![1.0]),
            Value::Bools(vec![true]),
        ];
        let hashes: std::collections::HashSet<[u8; 32]> = values.into_iter().map(hash).collect();
        assert_eq!(hashes.len(), 8);
        let strings = |parts: &[&str]| {
            let mut t = crate::StringTable::default();
            parts.iter().for_each(|p| t.push(p.as_bytes()).unwrap());
            hash(Value::Strings(t))
        };
        assert_ne!(strings(&["ab", "c"]), strings(&["a", "bc"]));
    }
}
