//! The weight manifest on the wire: a fixed header and a bincode body.
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 8 | magic `DS4WMAN\0` |
//! | 8 | 4 | schema version, u32 little-endian |
//! | 12 | 8 | body length, u64 little-endian |
//! | 20 | 32 | BLAKE3 of the body |
//! | 52 | … | body: bincode 2, little-endian, fixed-width integers |
//!
//! The memory that holds a manifest is exactly this long. Arrays travel as byte blobs, because a worker's restart
//! includes decoding a 130,000-token vocabulary.

use std::borrow::Cow;
use std::collections::HashSet;

use bincode::config::{Configuration, Fixint, Limit, LittleEndian};
use bincode::de::{BorrowDecode, BorrowDecoder, Decode};
use bincode::enc::{Encode, Encoder};
use bincode::error::{DecodeError, EncodeError};

use crate::dtype::GgmlType;
use crate::metadata::{Metadata, StringTable, Value};
use crate::weights::{Backend, Chunk, ModelIdentity, TensorEntry, WeightManifest};

/// First bytes of a manifest.
pub const MAGIC: [u8; 8] = *b"DS4WMAN\0";
/// Version of the body's schema; raised by every change of it.
pub const VERSION: u32 = 2;
/// Bytes before the body.
pub const HEADER_BYTES: usize = 52;
/// Longest body: 256 MiB.
pub const MAX_BODY_BYTES: u64 = 256 << 20;

/// Errors of [`encode`] and [`decode`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// The first bytes are not the magic.
    #[error("not a weight manifest: it begins with {0:02x?}; is this socket a weight owner's?")]
    Magic(Vec<u8>),
    /// Another release's manifest.
    #[error(
        "weight manifest of schema version {found}, this worker reads version {supported}; \
         restart the worker and the owner with the same release of ds4"
    )]
    Version {
        /// Version in the header.
        found: u32,
        /// Version of this build.
        supported: u32,
    },
    /// Longer than any manifest may be.
    #[error("weight manifest body of {len} bytes exceeds the cap of {MAX_BODY_BYTES}")]
    TooLarge {
        /// Declared or needed length.
        len: u64,
    },
    /// Fewer bytes than the header or the declared length.
    #[error("weight manifest is truncated: {have} bytes of {need}")]
    Truncated {
        /// Bytes given.
        have: u64,
        /// Bytes needed.
        need: u64,
    },
    /// More bytes than declared.
    #[error("weight manifest is followed by {extra} stray bytes")]
    Trailing {
        /// How many.
        extra: u64,
    },
    /// The body is not the one that was hashed.
    #[error("weight manifest is damaged: its body does not match its BLAKE3; restart the owner")]
    Hash,
    /// The hash fits but the body does not parse: a schema change without a new version.
    #[error(
        "weight manifest body cannot be decoded ({0}); restart the worker and the owner with the same release of ds4"
    )]
    Body(String),
    /// It parses but contradicts itself.
    #[error("weight manifest contradicts itself: {0}")]
    Invalid(String),
}

impl ManifestError {
    /// Stable code for logs and scripts.
    pub fn code(&self) -> &'static str {
        match self {
            ManifestError::Magic(_) => "manifest_magic",
            ManifestError::Version { .. } => "manifest_version",
            ManifestError::TooLarge { .. } => "manifest_too_large",
            ManifestError::Truncated { .. } => "manifest_truncated",
            ManifestError::Trailing { .. } => "manifest_trailing_bytes",
            ManifestError::Hash => "manifest_hash",
            ManifestError::Body(_) => "manifest_body",
            ManifestError::Invalid(_) => "manifest_invalid",
        }
    }
}

type BodyConfig = Configuration<LittleEndian, Fixint, Limit<{ 256 << 20 }>>;
const BODY_CONFIG: BodyConfig =
    bincode::config::standard().with_little_endian().with_fixed_int_encoding().with_limit::<{ 256 << 20 }>();

/// Serialises `manifest`. Fails when it contradicts itself, or when the body would pass [`MAX_BODY_BYTES`].
pub fn encode(manifest: &WeightManifest) -> Result<Vec<u8>, ManifestError> {
    validate(manifest)?;
    let body = bincode::encode_to_vec(WireManifest::from(manifest), BODY_CONFIG)
        .map_err(|e| ManifestError::Body(e.to_string()))?;
    if len_u64(body.len()) > MAX_BODY_BYTES {
        return Err(ManifestError::TooLarge { len: len_u64(body.len()) });
    }
    Ok(frame(&body))
}

/// Puts a header before `body`, whatever it holds: for tests and fuzzing of what comes after the hash.
pub fn frame(body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_BYTES + body.len());
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&len_u64(body.len()).to_le_bytes());
    out.extend_from_slice(blake3::hash(body).as_bytes());
    out.extend_from_slice(body);
    out
}

/// Checks and parses a manifest. What it returns is consistent: every tensor lies inside its chunk, has the length of its
/// type and shape, and a name of its own.
pub fn decode(bytes: &[u8]) -> Result<WeightManifest, ManifestError> {
    let truncated = |need: u64| ManifestError::Truncated { have: len_u64(bytes.len()), need };
    let (magic, rest) = bytes.split_first_chunk::<8>().ok_or_else(|| truncated(len_u64(HEADER_BYTES)))?;
    if *magic != MAGIC {
        return Err(ManifestError::Magic(magic.to_vec()));
    }
    let (version, rest) = rest.split_first_chunk::<4>().ok_or_else(|| truncated(len_u64(HEADER_BYTES)))?;
    let version = u32::from_le_bytes(*version);
    if version != VERSION {
        return Err(ManifestError::Version { found: version, supported: VERSION });
    }
    let (len, rest) = rest.split_first_chunk::<8>().ok_or_else(|| truncated(len_u64(HEADER_BYTES)))?;
    let len = u64::from_le_bytes(*len);
    if len > MAX_BODY_BYTES {
        return Err(ManifestError::TooLarge { len });
    }
    let (hash, body) = rest.split_first_chunk::<32>().ok_or_else(|| truncated(len_u64(HEADER_BYTES)))?;
    match len_u64(body.len()) {
        have if have < len => return Err(truncated(len + len_u64(HEADER_BYTES))),
        have if have > len => return Err(ManifestError::Trailing { extra: have - len }),
        _ => {}
    }
    if blake3::hash(body) != *hash {
        return Err(ManifestError::Hash);
    }
    let (wire, read): (WireManifest<'_>, usize) =
        bincode::borrow_decode_from_slice(body, BODY_CONFIG).map_err(|e| ManifestError::Body(e.to_string()))?;
    if read != body.len() {
        return Err(ManifestError::Body(format!("{} bytes after its end", body.len() - read)));
    }
    let manifest = wire.into_manifest()?;
    validate(&manifest)?;
    Ok(manifest)
}

/// Refuses a manifest that contradicts itself. Linear in its size.
pub fn validate(manifest: &WeightManifest) -> Result<(), ManifestError> {
    let invalid = |reason: String| Err(ManifestError::Invalid(reason));
    if let Backend::CudaVmm { granularity, .. } = manifest.backend
        && !granularity.is_power_of_two()
    {
        return invalid(format!("a granularity of {granularity} bytes is no power of two"));
    }
    let mut names = HashSet::with_capacity(manifest.tensors.len());
    for t in &manifest.tensors {
        if !names.insert(t.name.as_str()) {
            return invalid(format!("tensor {:?} occurs twice", t.name));
        }
        let expected = t.ty.tensor_bytes(&t.shape);
        if expected != Some(t.len) {
            let needs = expected.map_or_else(|| "cannot exist".to_owned(), |e| format!("needs {e} bytes"));
            return invalid(format!("tensor {:?} ({} {:?}) {needs}, but has {}", t.name, t.ty, t.shape, t.len));
        }
        let Some(chunk) = usize::try_from(t.chunk).ok().and_then(|c| manifest.chunks.get(c)) else {
            let n = manifest.chunks.len();
            return invalid(format!("tensor {:?} lies in chunk {}, but there are {n} chunks", t.name, t.chunk));
        };
        if t.offset.checked_add(t.len).is_none_or(|end| end > chunk.len) {
            return invalid(format!(
                "tensor {:?} at offset {} with {} bytes leaves chunk {} of {} bytes",
                t.name, t.offset, t.len, t.chunk, chunk.len
            ));
        }
    }
    let mut keys = HashSet::with_capacity(manifest.metadata.entries.len());
    for (key, value) in &manifest.metadata.entries {
        if !keys.insert(key.as_str()) {
            return invalid(format!("metadata key {key:?} occurs twice"));
        }
        if let Value::Strings(table) = value {
            let ordered = table.ends.is_sorted();
            let whole = table.ends.last().map_or(0, |end| u64::from(*end)) == len_u64(table.bytes.len());
            if !ordered || !whole {
                return invalid(format!("metadata key {key:?} is a damaged string table"));
            }
        }
    }
    Ok(())
}

pub(crate) fn le_blob<T: Copy, const N: usize>(values: &[T], to_bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    let mut out = Vec::with_capacity(values.len() * N);
    values.iter().for_each(|v| out.extend_from_slice(&to_bytes(*v)));
    out
}

fn from_blob<T, const N: usize>(blob: &[u8], from_bytes: impl Fn([u8; N]) -> T) -> Result<Vec<T>, ManifestError> {
    let (elements, rest) = blob.as_chunks::<N>();
    if !rest.is_empty() {
        return Err(ManifestError::Body(format!("an array of {} bytes is not made of {N}-byte elements", blob.len())));
    }
    Ok(elements.iter().map(|e| from_bytes(*e)).collect())
}

pub(crate) fn len_u64(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

/// A list whose decoding never reserves more than what was already read pays for.
struct List<T>(Vec<T>);

impl<T: Encode> Encode for List<T> {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        len_u64(self.0.len()).encode(encoder)?;
        self.0.iter().try_for_each(|item| item.encode(encoder))
    }
}

impl<'de, C, T: BorrowDecode<'de, C>> BorrowDecode<'de, C> for List<T> {
    fn borrow_decode<D: BorrowDecoder<'de, Context = C>>(decoder: &mut D) -> Result<Self, DecodeError> {
        let len = u64::decode(decoder)?;
        let mut items = Vec::new();
        for _ in 0..len {
            items.push(T::borrow_decode(decoder)?);
        }
        Ok(List(items))
    }
}

#[derive(bincode::Encode, bincode::BorrowDecode)]
struct WireManifest<'a> {
    family: Cow<'a, str>,
    artifact: Cow<'a, str>,
    name: Cow<'a, str>,
    content: [u8; 32],
    known: bool,
    epoch: u64,
    backend: WireBackend<'a>,
    chunks: List<WireChunk>,
    tensors: List<WireTensor<'a>>,
    metadata: List<WireEntry<'a>>,
}

#[derive(bincode::Encode, bincode::BorrowDecode)]
enum WireBackend<'a> {
    Memfd { page: u64 },
    CudaVmm { device: [u8; 16], device_name: Cow<'a, str>, granularity: u64, driver: u32, layout: Cow<'a, str> },
}

#[derive(bincode::Encode, bincode::BorrowDecode)]
struct WireChunk {
    len: u64,
    blake3: [u8; 32],
}

#[derive(bincode::Encode, bincode::BorrowDecode)]
struct WireTensor<'a> {
    name: Cow<'a, str>,
    ty: u32,
    shape: List<u64>,
    chunk: u32,
    offset: u64,
    len: u64,
}

#[derive(bincode::Encode, bincode::BorrowDecode)]
struct WireEntry<'a> {
    key: Cow<'a, str>,
    value: WireValue<'a>,
}

#[derive(bincode::Encode, bincode::BorrowDecode)]
enum WireValue<'a> {
    U64(u64),
    I64(i64),
    F64(f64),
    Bool(bool),
    String(Cow<'a, str>),
    Strings { ends: Cow<'a, [u8]>, bytes: Cow<'a, [u8]> },
    Ints32(Cow<'a, [u8]>),
    Ints64(Cow<'a, [u8]>),
    Floats(Cow<'a, [u8]>),
    Bools(Cow<'a, [u8]>),
}

impl<'a> From<&'a WeightManifest> for WireManifest<'a> {
    fn from(m: &'a WeightManifest) -> Self {
        let text = |s: &'a str| Cow::Borrowed(s);
        Self {
            family: text(&m.model.family),
            artifact: text(&m.model.artifact),
            name: text(&m.model.name),
            content: m.model.content,
            known: m.model.known,
            epoch: m.epoch,
            backend: match &m.backend {
                Backend::Memfd { page } => WireBackend::Memfd { page: *page },
                Backend::CudaVmm { device, device_name, granularity, driver, layout } => WireBackend::CudaVmm {
                    device: *device,
                    device_name: text(device_name),
                    granularity: *granularity,
                    driver: *driver,
                    layout: text(layout),
                },
            },
            chunks: List(m.chunks.iter().map(|c| WireChunk { len: c.len, blake3: c.blake3 }).collect()),
            tensors: List(
                m.tensors
                    .iter()
                    .map(|t| WireTensor {
                        name: text(&t.name),
                        ty: t.ty.id(),
                        shape: List(t.shape.clone()),
                        chunk: t.chunk,
                        offset: t.offset,
                        len: t.len,
                    })
                    .collect(),
            ),
            metadata: List(
                m.metadata
                    .entries
                    .iter()
                    .map(|(key, value)| WireEntry { key: text(key), value: WireValue::from(value) })
                    .collect(),
            ),
        }
    }
}

impl<'a> From<&'a Value> for WireValue<'a> {
    fn from(value: &'a Value) -> Self {
        match value {
            Value::U64(v) => WireValue::U64(*v),
            Value::I64(v) => WireValue::I64(*v),
            Value::F64(v) => WireValue::F64(*v),
            Value::Bool(v) => WireValue::Bool(*v),
            Value::String(v) => WireValue::String(Cow::Borrowed(v)),
            Value::Strings(v) => WireValue::Strings {
                ends: Cow::Owned(le_blob(&v.ends, u32::to_le_bytes)),
                bytes: Cow::Borrowed(&v.bytes),
            },
            Value::Ints(v) => match v.iter().map(|x| i32::try_from(*x)).collect::<Result<Vec<i32>, _>>() {
                Ok(narrow) => WireValue::Ints32(Cow::Owned(le_blob(&narrow, i32::to_le_bytes))),
                Err(_) => WireValue::Ints64(Cow::Owned(le_blob(v, i64::to_le_bytes))),
            },
            Value::Floats(v) => WireValue::Floats(Cow::Owned(le_blob(v, f32::to_le_bytes))),
            Value::Bools(v) => WireValue::Bools(Cow::Owned(le_blob(v, |b| [u8::from(b)]))),
        }
    }
}

impl WireManifest<'_> {
    fn into_manifest(self) -> Result<WeightManifest, ManifestError> {
        Ok(WeightManifest {
            model: ModelIdentity {
                family: self.family.into_owned(),
                artifact: self.artifact.into_owned(),
                name: self.name.into_owned(),
                content: self.content,
                known: self.known,
            },
            epoch: self.epoch,
            backend: match self.backend {
                WireBackend::Memfd { page } => Backend::Memfd { page },
                WireBackend::CudaVmm { device, device_name, granularity, driver, layout } => Backend::CudaVmm {
                    device,
                    device_name: device_name.into_owned(),
                    granularity,
                    driver,
                    layout: layout.into_owned(),
                },
            },
            chunks: self.chunks.0.into_iter().map(|c| Chunk { len: c.len, blake3: c.blake3 }).collect(),
            tensors: self.tensors.0.into_iter().map(WireTensor::into_entry).collect::<Result<_, _>>()?,
            metadata: Metadata {
                entries: self
                    .metadata
                    .0
                    .into_iter()
                    .map(|e| Ok((e.key.into_owned(), e.value.into_value()?)))
                    .collect::<Result<_, ManifestError>>()?,
            },
        })
    }
}

impl WireTensor<'_> {
    fn into_entry(self) -> Result<TensorEntry, ManifestError> {
        let name = self.name.into_owned();
        let Some(ty) = GgmlType::from_id(self.ty) else {
            return Err(ManifestError::Invalid(format!("tensor {name:?} has unknown type {}", self.ty)));
        };
        Ok(TensorEntry { name, ty, shape: self.shape.0, chunk: self.chunk, offset: self.offset, len: self.len })
    }
}

impl WireValue<'_> {
    fn into_value(self) -> Result<Value, ManifestError> {
        Ok(match self {
            WireValue::U64(v) => Value::U64(v),
            WireValue::I64(v) => Value::I64(v),
            WireValue::F64(v) => Value::F64(v),
            WireValue::Bool(v) => Value::Bool(v),
            WireValue::String(v) => Value::String(v.into_owned()),
            WireValue::Strings { ends, bytes } => {
                Value::Strings(StringTable { bytes: bytes.into_owned(), ends: from_blob(&ends, u32::from_le_bytes)? })
            }
            WireValue::Ints32(blob) => Value::Ints(from_blob(&blob, |b| i64::from(i32::from_le_bytes(b)))?),
            WireValue::Ints64(blob) => Value::Ints(from_blob(&blob, i64::from_le_bytes)?),
            WireValue::Floats(blob) => Value::Floats(from_blob(&blob, f32::from_le_bytes)?),
            WireValue::Bools(blob) => {
                if let Some(bad) = blob.iter().find(|b| **b > 1) {
                    return Err(ManifestError::Body(format!("a boolean has the value {bad}")));
                }
                Value::Bools(blob.iter().map(|b| *b == 1).collect())
            }
        })
    }
}

#[cfg(test)]
mod tests;
