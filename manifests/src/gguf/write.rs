//! Writing GGUF version 3: small models for tests, and tools.
//!
//! The integer width of a value is not kept by [`Value`], so the writer picks the narrowest of the format's usual ones:
//! `U64` → UINT32 when it fits, else UINT64; `I64` and `Ints` → INT32 when (all) fit, else INT64; `F64` → FLOAT32 when
//! that is exact, else FLOAT64; `Floats` → FLOAT32. Reading gives equal values back.

use std::path::{Path, PathBuf};

use super::reader::len_u64;
use crate::dtype::GgmlType;
use crate::metadata::{Metadata, Value};

/// Errors of writing.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The bytes given for a tensor are not what its type and shape need.
    #[error("tensor {name:?} ({ty} {shape:?}) needs {expected:?} bytes (none: no such shape), {found} were given")]
    TensorBytes {
        /// Tensor name.
        name: String,
        /// Type.
        ty: GgmlType,
        /// Dimensions.
        shape: Vec<u64>,
        /// Bytes needed; `None` when the shape is impossible for the type.
        expected: Option<u64>,
        /// Bytes given.
        found: usize,
    },
    /// More shards than tensors, or none, or more than the format counts.
    #[error("cannot split {tensors} tensors into {shards} shards")]
    Shards {
        /// Tensors.
        tensors: usize,
        /// Shards asked for.
        shards: usize,
    },
    /// The file could not be written.
    #[error("cannot write {}: {cause}", path.display())]
    Io {
        /// Path.
        path: PathBuf,
        /// Cause.
        #[source]
        cause: std::io::Error,
    },
}

#[derive(Clone, Debug)]
struct Tensor {
    name: String,
    ty: GgmlType,
    shape: Vec<u64>,
    bytes: Vec<u8>,
}

/// Collects a model in memory and writes it.
///
/// ```
/// use ds4_manifests::{GgmlType, GgufWriter, Value, gguf};
/// let file = GgufWriter::new()
///     .metadata("general.architecture", Value::String("llama".into()))
///     .tensor("output_norm.weight", GgmlType::F32, &[2], vec![0; 8])
///     .to_vec()
///     .unwrap();
/// assert_eq!(gguf::parse(&file, file.len() as u64).unwrap().tensors[0].len, 8);
/// ```
#[derive(Clone, Debug, Default)]
pub struct GgufWriter {
    metadata: Vec<(String, Value)>,
    tensors: Vec<Tensor>,
    alignment: Option<u32>,
}

impl GgufWriter {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a key. Keys are not deduplicated, so that tests can write bad files.
    #[must_use]
    pub fn metadata(mut self, key: &str, value: Value) -> Self {
        self.metadata.push((key.to_owned(), value));
        self
    }

    /// Appends a tensor with its content; `shape[0]` is contiguous.
    #[must_use]
    pub fn tensor(mut self, name: &str, ty: GgmlType, shape: &[u64], bytes: Vec<u8>) -> Self {
        self.tensors.push(Tensor { name: name.to_owned(), ty, shape: shape.to_vec(), bytes });
        self
    }

    /// Writes `general.alignment` (a power of two) and aligns by it, instead of the default 32.
    #[must_use]
    pub fn alignment(mut self, alignment: u32) -> Self {
        self.alignment = Some(alignment);
        self
    }

    /// The file's bytes.
    pub fn to_vec(&self) -> Result<Vec<u8>, WriteError> {
        self.serialise(&self.metadata, &self.tensors)
    }

    /// Writes one file.
    pub fn write_to(&self, path: &Path) -> Result<(), WriteError> {
        write_file(path, &self.to_vec()?)
    }

    /// Writes `n` shards `<stem>-0000k-of-0000n.gguf` into `dir`, tensors spread evenly in order, the model's keys in
    /// the first and `split.*` in all. Returns their paths in order.
    pub fn write_split(&self, dir: &Path, stem: &str, n: usize) -> Result<Vec<PathBuf>, WriteError> {
        let tensors = self.tensors.len();
        let bad = WriteError::Shards { tensors, shards: n };
        let (Ok(count), true) = (u16::try_from(n), (1..=tensors).contains(&n)) else { return Err(bad) };
        let mut paths = Vec::new();
        for (k, no) in (0..n).zip(0..count) {
            let mut metadata = if k == 0 { self.metadata.clone() } else { Vec::new() };
            metadata.push(("split.no".into(), Value::U64(u64::from(no))));
            metadata.push(("split.count".into(), Value::U64(u64::from(count))));
            metadata.push(("split.tensors.count".into(), Value::U64(len_u64(tensors))));
            let own = &self.tensors[k * tensors / n..(k + 1) * tensors / n];
            let path = dir.join(format!("{stem}-{:05}-of-{n:05}.gguf", k + 1));
            write_file(&path, &self.serialise(&metadata, own)?)?;
            paths.push(path);
        }
        Ok(paths)
    }

    fn serialise(&self, metadata: &[(String, Value)], tensors: &[Tensor]) -> Result<Vec<u8>, WriteError> {
        let alignment = u64::from(self.alignment.unwrap_or(32)).max(1);
        let mut table = Vec::new();
        for t in tensors {
            let (expected, found) = (t.ty.tensor_bytes(&t.shape), t.bytes.len());
            if expected != Some(len_u64(found)) {
                return Err(bad_tensor(&t.name, t.ty, &t.shape, expected, found));
            }
            table.push((t.name.as_str(), t.ty, t.shape.as_slice()));
        }
        let own = self.alignment.map(|a| ("general.alignment", Value::U64(u64::from(a))));
        let keys = own.iter().map(|(k, v)| (*k, v)).chain(metadata.iter().map(|(k, v)| (k.as_str(), v)));
        let mut out = head(keys, &table, alignment)?.0;
        for t in tensors {
            pad(&mut out, alignment);
            out.extend_from_slice(&t.bytes);
        }
        Ok(out)
    }
}

/// Where everything of a file goes, for writers that stream the tensors instead of collecting them.
#[derive(Clone, Debug)]
pub struct GgufPlan {
    /// What the file begins with, padded up to the first tensor.
    pub header: Vec<u8>,
    /// Absolute offset and length of each tensor, in the order given.
    pub tensors: Vec<(u64, u64)>,
    /// Length of the file. Bytes that are in no tensor are zero.
    pub file_len: u64,
}

impl GgufPlan {
    /// Plans a file of these keys and tensors (name, type, dimensions) with the default alignment of 32 bytes.
    ///
    /// # Errors
    /// [`WriteError::TensorBytes`] for a shape that its type cannot have.
    pub fn new(metadata: &Metadata, tensors: &[(&str, GgmlType, &[u64])]) -> Result<Self, WriteError> {
        const ALIGNMENT: u64 = 32;
        let (mut header, offsets) = head(metadata.iter(), tensors, ALIGNMENT)?;
        pad(&mut header, ALIGNMENT);
        let start = len_u64(header.len());
        let tensors: Vec<(u64, u64)> = offsets.iter().map(|(offset, len)| (start + offset, *len)).collect();
        let file_len = tensors.last().map_or(start, |(offset, len)| offset + len);
        Ok(Self { header, tensors, file_len })
    }
}

fn bad_tensor(name: &str, ty: GgmlType, shape: &[u64], expected: Option<u64>, found: usize) -> WriteError {
    WriteError::TensorBytes { name: name.to_owned(), ty, shape: shape.to_vec(), expected, found }
}

/// Offset and length of each tensor.
type Spans = Vec<(u64, u64)>;

/// Keys and tensor table, not padded, and each tensor's offset from the data's start and length.
fn head<'a>(
    metadata: impl Iterator<Item = (&'a str, &'a Value)>,
    tensors: &[(&str, GgmlType, &[u64])],
    alignment: u64,
) -> Result<(Vec<u8>, Spans), WriteError> {
    let mut keys = Vec::new();
    let mut count: u64 = 0;
    for (key, value) in metadata {
        put_key(&mut keys, key, value);
        count += 1;
    }
    let mut out = b"GGUF".to_vec();
    out.extend_from_slice(&3_u32.to_le_bytes());
    out.extend_from_slice(&len_u64(tensors.len()).to_le_bytes());
    out.extend_from_slice(&count.to_le_bytes());
    out.append(&mut keys);
    let mut offsets = Vec::new();
    let mut offset: u64 = 0;
    for (name, ty, shape) in tensors {
        let len = ty.tensor_bytes(shape).ok_or_else(|| bad_tensor(name, *ty, shape, None, 0))?;
        put_string(&mut out, name.as_bytes());
        // A shape that has a size has a handful of dimensions.
        out.extend_from_slice(&u32::try_from(shape.len()).unwrap_or(u32::MAX).to_le_bytes());
        for dim in *shape {
            out.extend_from_slice(&dim.to_le_bytes());
        }
        out.extend_from_slice(&ty.id().to_le_bytes());
        out.extend_from_slice(&offset.to_le_bytes());
        offsets.push((offset, len));
        offset = (offset + len).next_multiple_of(alignment);
    }
    Ok((out, offsets))
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    std::fs::write(path, bytes).map_err(|cause| WriteError::Io { path: path.to_owned(), cause })
}

fn pad(out: &mut Vec<u8>, alignment: u64) {
    let alignment = usize::try_from(alignment).unwrap_or(1);
    out.resize(out.len().next_multiple_of(alignment), 0);
}

fn put_string(out: &mut Vec<u8>, s: &[u8]) {
    out.extend_from_slice(&len_u64(s.len()).to_le_bytes());
    out.extend_from_slice(s);
}

fn put_key(out: &mut Vec<u8>, key: &str, value: &Value) {
    put_string(out, key.as_bytes());
    match value {
        Value::U64(v) => match u32::try_from(*v) {
            Ok(v) => put(out, 4, &v.to_le_bytes()),
            Err(_) => put(out, 10, &v.to_le_bytes()),
        },
        Value::I64(v) => match i32::try_from(*v) {
            Ok(v) => put(out, 5, &v.to_le_bytes()),
            Err(_) => put(out, 11, &v.to_le_bytes()),
        },
        Value::F64(v) => {
            #[allow(clippy::cast_possible_truncation, reason = "used only when it is exact")]
            let narrow = *v as f32;
            if f64::from(narrow).to_bits() == v.to_bits() {
                put(out, 6, &narrow.to_le_bytes());
            } else {
                put(out, 12, &v.to_le_bytes());
            }
        }
        Value::Bool(v) => put(out, 7, &[u8::from(*v)]),
        Value::String(v) => {
            put(out, 8, &[]);
            put_string(out, v.as_bytes());
        }
        Value::Strings(v) => {
            put_array(out, 8, v.len());
            for s in v.iter() {
                put_string(out, s);
            }
        }
        Value::Ints(v) => match v.iter().map(|x| i32::try_from(*x)).collect::<Result<Vec<i32>, _>>() {
            Ok(narrow) => {
                put_array(out, 5, narrow.len());
                narrow.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes()));
            }
            Err(_) => {
                put_array(out, 11, v.len());
                v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes()));
            }
        },
        Value::Floats(v) => {
            put_array(out, 6, v.len());
            v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes()));
        }
        Value::Bools(v) => {
            put_array(out, 7, v.len());
            out.extend(v.iter().map(|x| u8::from(*x)));
        }
    }
}

fn put(out: &mut Vec<u8>, ty: u32, bytes: &[u8]) {
    out.extend_from_slice(&ty.to_le_bytes());
    out.extend_from_slice(bytes);
}

fn put_array(out: &mut Vec<u8>, element: u32, len: usize) {
    put(out, 9, &element.to_le_bytes());
    out.extend_from_slice(&len_u64(len).to_le_bytes());
}
