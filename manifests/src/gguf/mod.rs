//! GGUF version 3: reading (single files and split shards as one logical model) and, for tests and tools, writing.
//!
//! Source: the GGUF specification (ggml, `docs/gguf.md`): `GGUF`, u32 version, u64 tensor count, u64 key count, the keys,
//! the tensor table, padding to `general.alignment`, the tensor data.
//!
//! A file is untrusted: no count in it is believed before the bytes that it implies are known to exist, all arithmetic
//! is checked, and no tensor is returned that does not lie inside its file.

mod error;
mod model;
mod parse;
mod reader;
mod sniff;
pub mod write;

pub use error::GgufError;
pub use model::{GgufModel, Shard};
pub use parse::{Parsed, parse};
pub use write::{GgufPlan, GgufWriter, WriteError};

use crate::dtype::GgmlType;

/// One tensor of a model, as the file describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name, e.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// Element type.
    pub ty: GgmlType,
    /// Dimensions in GGUF order: `shape[0]` is contiguous. None is zero.
    pub shape: Vec<u64>,
    /// Index into [`GgufModel::shards`].
    pub shard: usize,
    /// Absolute byte offset in the shard's file.
    pub offset: u64,
    /// Length in bytes; `offset + len` is at most the file's length.
    pub len: u64,
}

#[cfg(test)]
mod tests;
