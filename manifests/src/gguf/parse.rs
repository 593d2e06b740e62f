//! The header: keys, tensor table, and the checks that make both trustworthy.

use std::collections::HashSet;
use std::io::BufRead;

use super::reader::Reader;
use super::{GgufError, TensorInfo, sniff};
use crate::dtype::GgmlType;
use crate::metadata::{Metadata, Value};

/// Alignment when `general.alignment` is absent.
pub(super) const DEFAULT_ALIGNMENT: u64 = 32;
/// ggml has 4; the format itself sets no bound, and some writers use more.
const MAX_DIMS: u32 = 8;
/// u64 length, at least one byte of key, u32 type, one byte of value.
const LEAST_KEY_BYTES: u64 = 8 + 1 + 4 + 1;
/// u64 length, at least one byte of name, u32 dimension count, one dimension, u32 type, u64 offset.
const LEAST_TENSOR_BYTES: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// What one file says.
#[derive(Clone, Debug, PartialEq)]
pub struct Parsed {
    /// All keys, `split.*` included.
    pub metadata: Metadata,
    /// All tensors, in the order of the table, with absolute offsets and `shard` 0.
    pub tensors: Vec<TensorInfo>,
    /// `general.alignment`, or 32.
    pub alignment: u64,
    /// Absolute offset of the tensor data.
    pub data_offset: u64,
}

/// Parses the header in `bytes` of a file of `file_len` bytes. `bytes` need only hold the header; bytes beyond it are not
/// looked at, but every tensor must lie inside `file_len`.
pub fn parse(bytes: &[u8], file_len: u64) -> Result<Parsed, GgufError> {
    parse_from(bytes, file_len)
}

pub(super) fn parse_from(inner: impl BufRead, file_len: u64) -> Result<Parsed, GgufError> {
    let mut r = Reader::new(inner, file_len);
    let head = r.head(4096)?;
    if !head.starts_with(b"GGUF") {
        // One to three bytes of the magic and no more: what is left of a GGUF.
        if !head.is_empty() && b"GGUF".starts_with(head) {
            return Err(GgufError::TruncatedHeader { what: "the magic", at: 0, need: 4, file_len });
        }
        return Err(GgufError::NotGguf(sniff::describe(head)));
    }
    r.array::<4>("the magic")?;
    check_version(r.u32("the version")?)?;
    let tensor_count = r.u64("the tensor count")?;
    let key_count = r.u64("the key count")?;
    r.check_count("metadata keys", key_count, LEAST_KEY_BYTES)?;
    r.check_count("tensors", tensor_count, LEAST_TENSOR_BYTES)?;

    let metadata = read_metadata(&mut r, key_count)?;
    let alignment = alignment(&metadata)?;
    let (mut tensors, relative) = read_tensor_table(&mut r, tensor_count)?;
    let data_offset = r.pos().next_multiple_of(alignment);
    place(&mut tensors, &relative, data_offset, alignment, file_len)?;
    Ok(Parsed { metadata, tensors, alignment, data_offset })
}

fn check_version(version: u32) -> Result<(), GgufError> {
    match version {
        3 => Ok(()),
        1 | 2 => Err(GgufError::UnsupportedVersion {
            found: version,
            lever: "convert it with a current llama.cpp (gguf-new-metadata rewrites it as version 3)",
        }),
        // A small number in big-endian order.
        v if v & 0xffff == 0 && v != 0 => Err(GgufError::BigEndian(v.swap_bytes())),
        found => Err(GgufError::UnsupportedVersion { found, lever: "update ds4, or fetch the file again" }),
    }
}

fn read_metadata<R: BufRead>(r: &mut Reader<R>, count: u64) -> Result<Metadata, GgufError> {
    let mut seen = HashSet::new();
    let mut metadata = Metadata::default();
    for index in 0..count {
        let key = name(r.string("a metadata key")?, "metadata key", index)?;
        let id = r.u32("a value type")?;
        let value = read_value(r, &key, id)?;
        if !seen.insert(key.clone()) {
            return Err(GgufError::DuplicateKey(key));
        }
        metadata.entries.push((key, value));
    }
    Ok(metadata)
}

fn name(bytes: Vec<u8>, what: &'static str, index: u64) -> Result<String, GgufError> {
    if bytes.is_empty() {
        return Err(GgufError::BadName { what, index, reason: "empty" });
    }
    String::from_utf8(bytes).map_err(|_| GgufError::BadName { what, index, reason: "not UTF-8" })
}

fn bad(key: &str, reason: impl Into<String>) -> GgufError {
    GgufError::BadValue { key: key.to_owned(), reason: reason.into() }
}

/// One value. Type ids: 0..=7 u8 i8 u16 i16 u32 i32 f32 bool, 8 string, 9 array, 10 u64, 11 i64, 12 f64.
fn read_value<R: BufRead>(r: &mut Reader<R>, key: &str, id: u32) -> Result<Value, GgufError> {
    let what = "a metadata value";
    Ok(match id {
        0 => Value::U64(u64::from(r.u8(what)?)),
        1 => Value::I64(i64::from(i8::from_le_bytes(r.array(what)?))),
        2 => Value::U64(u64::from(u16::from_le_bytes(r.array(what)?))),
        3 => Value::I64(i64::from(i16::from_le_bytes(r.array(what)?))),
        4 => Value::U64(u64::from(r.u32(what)?)),
        5 => Value::I64(i64::from(i32::from_le_bytes(r.array(what)?))),
        6 => Value::F64(f64::from(f32::from_le_bytes(r.array(what)?))),
        7 => Value::Bool(boolean(r.u8(what)?).map_err(|e| bad(key, e))?),
        8 => Value::String(
            String::from_utf8(r.string("a metadata string")?)
                .map_err(|e| bad(key, format!("its string is not UTF-8 at byte {}", e.utf8_error().valid_up_to())))?,
        ),
        9 => {
            let element = r.u32("an array's type")?;
            let count = r.u64("an array's length")?;
            read_array(r, key, element, count)?
        }
        10 => Value::U64(r.u64(what)?),
        11 => Value::I64(i64::from_le_bytes(r.array(what)?)),
        12 => Value::F64(f64::from_le_bytes(r.array(what)?)),
        _ => return Err(GgufError::UnknownValueType { key: key.to_owned(), id }),
    })
}

fn read_array<R: BufRead>(r: &mut Reader<R>, key: &str, element: u32, count: u64) -> Result<Value, GgufError> {
    use std::convert::Infallible;
    type Sure<T> = Result<T, Infallible>;
    fn sure<T>(v: Sure<T>) -> T {
        v.unwrap_or_else(|never| match never {})
    }
    Ok(match element {
        0 => Value::Ints(sure(r.numbers(count, |b: [u8; 1]| Sure::Ok(i64::from(b[0])))?)),
        1 => Value::Ints(sure(r.numbers(count, |b| Sure::Ok(i64::from(i8::from_le_bytes(b))))?)),
        2 => Value::Ints(sure(r.numbers(count, |b| Sure::Ok(i64::from(u16::from_le_bytes(b))))?)),
        3 => Value::Ints(sure(r.numbers(count, |b| Sure::Ok(i64::from(i16::from_le_bytes(b))))?)),
        4 => Value::Ints(sure(r.numbers(count, |b| Sure::Ok(i64::from(u32::from_le_bytes(b))))?)),
        5 => Value::Ints(sure(r.numbers(count, |b| Sure::Ok(i64::from(i32::from_le_bytes(b))))?)),
        6 => Value::Floats(sure(r.numbers(count, |b| Sure::Ok(f32::from_le_bytes(b)))?)),
        7 => Value::Bools(r.numbers(count, |b: [u8; 1]| boolean(b[0]))?.map_err(|e| bad(key, e))?),
        8 => Value::Strings(r.strings(count)?),
        9 => return Err(GgufError::NestedArray { key: key.to_owned() }),
        10 => Value::Ints(
            r.numbers(count, |b| {
                let v = u64::from_le_bytes(b);
                i64::try_from(v).map_err(|_| format!("array element {v} exceeds the largest i64"))
            })?
            .map_err(|e| bad(key, e))?,
        ),
        11 => Value::Ints(sure(r.numbers(count, |b| Sure::Ok(i64::from_le_bytes(b)))?)),
        12 => {
            #[allow(
                clippy::cast_possible_truncation,
                reason = "f64 arrays are kept as f32, by the documentation of Value"
            )]
            let narrow = |b| Sure::Ok(f64::from_le_bytes(b) as f32);
            Value::Floats(sure(r.numbers(count, narrow)?))
        }
        id => return Err(GgufError::UnknownValueType { key: key.to_owned(), id }),
    })
}

fn boolean(byte: u8) -> Result<bool, String> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        b => Err(format!("a boolean has the value {b}; only 0 and 1 are allowed")),
    }
}

fn alignment(metadata: &Metadata) -> Result<u64, GgufError> {
    match metadata.get("general.alignment") {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(value) => match metadata.u64("general.alignment") {
            Some(a) if a.is_power_of_two() && a <= 1 << 30 => Ok(a),
            Some(a) => Err(GgufError::BadAlignment(a.to_string())),
            None => Err(GgufError::BadAlignment(format!("{value:?}"))),
        },
    }
}

/// The tensor table, and each tensor's offset relative to the data.
fn read_tensor_table<R: BufRead>(r: &mut Reader<R>, count: u64) -> Result<(Vec<TensorInfo>, Vec<u64>), GgufError> {
    // Checked again: the keys have taken their share of the bytes meanwhile.
    r.check_count("tensors", count, LEAST_TENSOR_BYTES)?;
    let mut tensors = Vec::new();
    let mut relative = Vec::new();
    let mut seen = HashSet::new();
    for index in 0..count {
        let name = name(r.string("a tensor name")?, "tensor name", index)?;
        let dims = r.u32("a dimension count")?;
        if dims == 0 || dims > MAX_DIMS {
            let reason = "it must have 1 to 8 dimensions";
            return Err(GgufError::BadShape { name, ty: "unknown", shape: vec![u64::from(dims)], reason });
        }
        let shape = (0..dims).map(|_| r.u64("a dimension")).collect::<Result<Vec<u64>, _>>()?;
        let id = r.u32("a tensor type")?;
        let Some(ty) = GgmlType::from_id(id) else {
            let removed = GgmlType::removed_name(id)
                .map_or_else(|| ", which is unknown".to_owned(), |n| format!(" ({n}, removed from ggml)"));
            return Err(GgufError::UnknownTensorType { name, id, removed });
        };
        let Some(len) = ty.tensor_bytes(&shape) else {
            let reason = if shape.contains(&0) {
                "no dimension may be zero"
            } else if shape[0] % ty.block_elems() != 0 {
                "its rows are not whole blocks"
            } else {
                "its size overflows"
            };
            return Err(GgufError::BadShape { name, ty: ty.name(), shape, reason });
        };
        relative.push(r.u64("a tensor offset")?);
        if !seen.insert(name.clone()) {
            return Err(GgufError::DuplicateTensor(name));
        }
        tensors.push(TensorInfo { name, ty, shape, shard: 0, offset: 0, len });
    }
    Ok((tensors, relative))
}

/// Turns relative offsets into absolute ones, and requires every tensor to be aligned, inside the file and alone there.
fn place(
    tensors: &mut [TensorInfo],
    relative: &[u64],
    data_offset: u64,
    alignment: u64,
    file_len: u64,
) -> Result<(), GgufError> {
    for (t, &rel) in tensors.iter_mut().zip(relative) {
        if rel % alignment != 0 {
            let reason = format!("it must be a multiple of the alignment, {alignment}");
            return Err(GgufError::BadOffset { name: t.name.clone(), offset: rel, reason });
        }
        let Some((offset, end)) = data_offset.checked_add(rel).and_then(|o| Some((o, o.checked_add(t.len)?))) else {
            return Err(GgufError::BadOffset { name: t.name.clone(), offset: rel, reason: "its end overflows".into() });
        };
        if end > file_len {
            return Err(GgufError::TruncatedTensor { name: t.name.clone(), offset, end, file_len });
        }
        t.offset = offset;
    }
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_unstable_by_key(|&i| tensors[i].offset);
    for pair in order.windows(2) {
        let (a, b) = (&tensors[pair[0]], &tensors[pair[1]]);
        // Cannot overflow: checked against the file's length above.
        if a.offset + a.len > b.offset {
            return Err(GgufError::Overlap { first: a.name.clone(), second: b.name.clone() });
        }
    }
    Ok(())
}
