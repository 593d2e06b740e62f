//! Tests of the reader against files that are built byte by byte, so that they can be wrong in any way.

mod header;
mod hostile;
mod open;
mod shards;

use super::{GgufError, GgufWriter, Parsed, parse};
use crate::dtype::GgmlType;
use crate::metadata::Value;

/// Parses a whole file.
fn parse_all(bytes: &[u8]) -> Result<Parsed, GgufError> {
    parse(bytes, bytes.len() as u64)
}

fn code(bytes: &[u8]) -> &'static str {
    parse_all(bytes).map(|_| "parsed").unwrap_or_else(|e| e.code())
}

/// A file offset as an index.
fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap()
}

/// A header with every field free.
#[derive(Clone)]
struct Raw {
    magic: [u8; 4],
    version: u32,
    tensor_count: Option<u64>,
    key_count: Option<u64>,
    keys: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    data: Vec<u8>,
}

impl Raw {
    fn new() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            tensor_count: None,
            key_count: None,
            keys: vec![],
            tensors: vec![],
            data: vec![],
        }
    }

    /// A key whose value bytes (type id included) are given.
    fn key(mut self, name: &[u8], ty: u32, payload: &[u8]) -> Self {
        self.keys.push([&string(name)[..], &ty.to_le_bytes(), payload].concat());
        self
    }

    fn tensor(mut self, name: &[u8], dims: &[u64], ty: u32, offset: u64) -> Self {
        let dim_bytes: Vec<u8> = dims.iter().flat_map(|d| d.to_le_bytes()).collect();
        let n = u32::try_from(dims.len()).unwrap().to_le_bytes();
        self.tensors.push([&string(name)[..], &n, &dim_bytes, &ty.to_le_bytes(), &offset.to_le_bytes()].concat());
        self
    }

    fn data(mut self, len: usize) -> Self {
        self.data = vec![7; len];
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend_from_slice(&self.version.to_le_bytes());
        out.extend_from_slice(&self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend_from_slice(&self.key_count.unwrap_or(self.keys.len() as u64).to_le_bytes());
        out.extend(self.keys.iter().chain(&self.tensors).flatten());
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend_from_slice(&self.data);
        out
    }
}

fn string(s: &[u8]) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes()[..], s].concat()
}

/// A small well-formed model with a value of every kind.
fn sample() -> GgufWriter {
    let mut words = crate::StringTable::default();
    for w in [&b"a"[..], b"", b"\xff\xfe", "\u{1f600}".as_bytes()] {
        words.push(w).unwrap();
    }
    GgufWriter::new()
        .metadata("general.architecture", Value::String("llama".into()))
        .metadata("u32", Value::U64(7))
        .metadata("u64", Value::U64(1 << 40))
        .metadata("i32", Value::I64(-7))
        .metadata("i64", Value::I64(-(1 << 40)))
        .metadata("f32", Value::F64(0.5))
        .metadata("f64", Value::F64(0.1))
        .metadata("bool", Value::Bool(true))
        .metadata("strings", Value::Strings(words))
        .metadata("ints", Value::Ints(vec![1, -2, 3]))
        .metadata("longs", Value::Ints(vec![1 << 40, -1]))
        .metadata("floats", Value::Floats(vec![1.5, f32::MIN_POSITIVE]))
        .metadata("bools", Value::Bools(vec![true, false]))
        .tensor("a.weight", GgmlType::Q4_1, &[64, 3], (0..120).collect())
        .tensor("b.weight", GgmlType::F32, &[5], vec![1; 20])
        .tensor("c.weight", GgmlType::F16, &[2, 2, 2], vec![2; 16])
}
