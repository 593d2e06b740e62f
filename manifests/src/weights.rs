//! The weight manifest: what the owner publishes about one loaded model. A worker needs nothing else: no model path.

use crate::dtype::GgmlType;
use crate::metadata::Metadata;

/// Which model this is, and how sure we are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelIdentity {
    /// Architecture family, e.g. `llama`.
    pub family: String,
    /// Catalog entry that the file matched, e.g. `smollm2-135m`.
    pub artifact: String,
    /// Name under which the API serves it.
    pub name: String,
    /// BLAKE3 over the concatenated content of all tensor chunks and the metadata (see the codec for the exact order).
    pub content: [u8; 32],
    /// True when the catalog entry lists `content` among its known hashes.
    pub known: bool,
}

/// Where the bytes live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Sealed memfds, mapped `PROT_READ`.
    Memfd {
        /// Page size of the mapping, in bytes.
        page: u64,
    },
}

/// One piece of memory with its own descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Length in bytes; descriptors are at least this long.
    pub len: u64,
    /// BLAKE3 of the `len` bytes.
    pub blake3: [u8; 32],
}

/// One tensor inside a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// GGUF tensor name, e.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// Element type.
    pub ty: GgmlType,
    /// Dimensions in GGUF order: `shape[0]` is contiguous (the input width of a matrix).
    pub shape: Vec<u64>,
    /// Index into [`WeightManifest::chunks`].
    pub chunk: u32,
    /// Byte offset inside the chunk.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Everything that a worker learns about a model.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightManifest {
    /// Identity and hash.
    pub model: ModelIdentity,
    /// Counts published loads of one owner; never reused by it.
    pub epoch: u64,
    /// Memory kind.
    pub backend: Backend,
    /// Chunk table; descriptor `k` of an attach is chunk `k`.
    pub chunks: Vec<Chunk>,
    /// Tensor table, in file order.
    pub tensors: Vec<TensorEntry>,
    /// The GGUF's key-value metadata, tokenizer and chat template included.
    pub metadata: Metadata,
}
