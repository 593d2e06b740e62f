//! Why a GGUF could not be read: one variant per cause, each with a stable code.

use std::path::PathBuf;

/// Errors of [`crate::gguf::GgufModel::open`] and [`crate::gguf::parse`].
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// An error in a named file.
    #[error("{}: {cause}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        cause: Box<GgufError>,
    },
    /// No such file.
    #[error("no such file; check the path, or fetch the model with `ds4 pull`")]
    NotFound,
    /// A directory, pipe or device.
    #[error("is a {0}, not a file; give the path of a .gguf file (of any shard, when it is split)")]
    NotAFile(&'static str),
    /// The operating system refused.
    #[error("cannot be read ({0}); check its owner and mode, and those of its directory")]
    Unreadable(#[source] std::io::Error),
    /// The file is something else.
    #[error("is not a GGUF file: {0}")]
    NotGguf(String),
    /// Bytes end inside the header.
    #[error("is truncated: {what} needs {need} bytes at offset {at}, but the file ends at {file_len}; fetch it again")]
    TruncatedHeader {
        /// What was being read.
        what: &'static str,
        /// Offset of the read.
        at: u64,
        /// Bytes needed.
        need: u64,
        /// Length of the file.
        file_len: u64,
    },
    /// Tensor data end beyond the file.
    #[error(
        "is truncated: tensor {name:?} occupies bytes {offset}..{end}, but the file ends at {file_len}; fetch it again"
    )]
    TruncatedTensor {
        /// Tensor name.
        name: String,
        /// First byte.
        offset: u64,
        /// End byte.
        end: u64,
        /// Length of the file.
        file_len: u64,
    },
    /// A count asks for more than the file can hold.
    #[error("declares {count} {what}, which need at least {need} bytes, but only {left} bytes are left in the file")]
    CountTooLarge {
        /// What is counted.
        what: &'static str,
        /// Declared number.
        count: u64,
        /// Least bytes that it implies (saturating).
        need: u64,
        /// Bytes left.
        left: u64,
    },
    /// The header is longer than any real model's.
    #[error("has a header longer than {limit} bytes; no known model comes near that, so the file is taken for damaged")]
    HeaderTooLarge {
        /// The cap in bytes.
        limit: u64,
    },
    /// Version 1 or 2, or one from the future.
    #[error("is GGUF version {found}; this release reads version 3; {lever}")]
    UnsupportedVersion {
        /// Version in the file.
        found: u32,
        /// What to do.
        lever: &'static str,
    },
    /// Byte-swapped file.
    #[error("is a big-endian GGUF (version {0}); convert it with gguf-convert-endian from the gguf Python package")]
    BigEndian(u32),
    /// A tensor type that is not in ggml's table.
    #[error("tensor {name:?} has type {id}{removed}; requantise it to a current type")]
    UnknownTensorType {
        /// Tensor name.
        name: String,
        /// Type id.
        id: u32,
        /// ` (NAME, removed from ggml)` or nothing.
        removed: String,
    },
    /// A metadata type id outside 0..=12.
    #[error("metadata key {key:?} has unknown value type {id}")]
    UnknownValueType {
        /// Key.
        key: String,
        /// Type id.
        id: u32,
    },
    /// An array of arrays.
    #[error("metadata key {key:?} is an array of arrays, which no model uses and this reader refuses")]
    NestedArray {
        /// Key.
        key: String,
    },
    /// A value outside its type.
    #[error("metadata key {key:?}: {reason}")]
    BadValue {
        /// Key.
        key: String,
        /// What is wrong.
        reason: String,
    },
    /// A key or tensor name that is not UTF-8 or empty.
    #[error("{what} number {index} is {reason}")]
    BadName {
        /// "metadata key" or "tensor name".
        what: &'static str,
        /// Position, from 0.
        index: u64,
        /// What is wrong.
        reason: &'static str,
    },
    /// Two metadata entries of one key.
    #[error("metadata key {0:?} occurs twice")]
    DuplicateKey(String),
    /// Two tensors of one name.
    #[error("tensor {0:?} occurs twice")]
    DuplicateTensor(String),
    /// `general.alignment` is no power of two.
    #[error("general.alignment is {0}; it must be a power of two from 1 to 2^30")]
    BadAlignment(String),
    /// Impossible dimensions.
    #[error("tensor {name:?} of type {ty} has shape {shape:?}: {reason}")]
    BadShape {
        /// Tensor name.
        name: String,
        /// Type name.
        ty: &'static str,
        /// Dimensions.
        shape: Vec<u64>,
        /// What is wrong.
        reason: &'static str,
    },
    /// Offset not aligned, or beyond u64.
    #[error("tensor {name:?} has data offset {offset}: {reason}")]
    BadOffset {
        /// Tensor name.
        name: String,
        /// Relative offset in the file.
        offset: u64,
        /// What is wrong.
        reason: String,
    },
    /// Two tensors share bytes.
    #[error("tensors {first:?} and {second:?} overlap in the file")]
    Overlap {
        /// The one that starts first.
        first: String,
        /// The other.
        second: String,
    },
    /// A file name or `split.*` key that does not make sense by itself.
    #[error("split model: {0}")]
    BadSplit(String),
    /// A sibling is not there.
    #[error("shard {k} of {n} is missing: {} does not exist; put all {n} shards into one directory", path.display())]
    MissingShard {
        /// Shard number, from 1.
        k: u32,
        /// Number of shards.
        n: u32,
        /// Where it was expected.
        path: PathBuf,
    },
    /// A sibling that belongs to another model.
    #[error("shard {k} of {n} ({}) is foreign: {reason}; fetch all shards of one model again", path.display())]
    ForeignShard {
        /// Shard number, from 1.
        k: u32,
        /// Number of shards.
        n: u32,
        /// The file.
        path: PathBuf,
        /// How it differs.
        reason: String,
    },
    /// A sibling that cannot be read.
    #[error("shard {k} of {n}: {cause}")]
    InShard {
        /// Shard number, from 1.
        k: u32,
        /// Number of shards.
        n: u32,
        /// What is wrong with it.
        #[source]
        cause: Box<GgufError>,
    },
}

impl GgufError {
    /// Stable code for gRPC, logs and scripts.
    pub fn code(&self) -> &'static str {
        match self {
            GgufError::InFile { cause, .. } | GgufError::InShard { cause, .. } => cause.code(),
            GgufError::NotFound => "file_not_found",
            GgufError::NotAFile(_) => "not_a_file",
            GgufError::Unreadable(_) => "unreadable",
            GgufError::NotGguf(_) => "not_a_gguf",
            GgufError::TruncatedHeader { .. } | GgufError::TruncatedTensor { .. } => "truncated_file",
            GgufError::CountTooLarge { .. } => "count_too_large",
            GgufError::HeaderTooLarge { .. } => "header_too_large",
            GgufError::UnsupportedVersion { .. } => "unsupported_version",
            GgufError::BigEndian(_) => "big_endian",
            GgufError::UnknownTensorType { .. } => "unknown_tensor_type",
            GgufError::UnknownValueType { .. } => "unknown_value_type",
            GgufError::NestedArray { .. } => "nested_array",
            GgufError::BadValue { .. } => "bad_metadata_value",
            GgufError::BadName { .. } => "bad_name",
            GgufError::DuplicateKey(_) => "duplicate_key",
            GgufError::DuplicateTensor(_) => "duplicate_tensor",
            GgufError::BadAlignment(_) => "bad_alignment",
            GgufError::BadShape { .. } => "bad_shape",
            GgufError::BadOffset { .. } => "bad_offset",
            GgufError::Overlap { .. } => "overlapping_tensors",
            GgufError::BadSplit(_) => "bad_split",
            GgufError::MissingShard { .. } => "missing_shard",
            GgufError::ForeignShard { .. } => "foreign_shard",
        }
    }
}
