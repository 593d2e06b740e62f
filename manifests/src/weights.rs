//! The weight manifest: what the owner publishes about one loaded model. A worker needs nothing else: no model path.

use std::collections::HashMap;

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
    /// BLAKE3 over the chunk hashes, the tensor table and the metadata: see [`crate::content_hash`].
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
    /// CUDA memory, passed as descriptors of the driver; chunk `k` is one allocation of `len` rounded up to `granularity`.
    CudaVmm {
        /// UUID of the device that holds it: no other can map it.
        device: [u8; 16],
        /// The device's name, for people.
        device_name: String,
        /// What allocations and mappings are multiples of, in bytes; a power of two.
        granularity: u64,
        /// Version of the driver that made it: 1000 × major + 10 × minor.
        driver: u32,
        /// How tensor bytes are arranged: [`LAYOUT_GGUF`] or [`LAYOUT_TILES`]. A worker refuses a tag that it does not know.
        layout: String,
    },
}

/// Layout tag of tensors whose bytes are those of the file.
pub const LAYOUT_GGUF: &str = "gguf";

/// Layout tag of matrices of Q8_0, Q2_K, Q4_K and IQ2_XXS with whole tiles of 16 rows by 256 columns that lie in such tiles, as
/// tensor cores take them, and of other tensors as in the file. A tensor has the same bytes in another order; hashes are those of
/// the file's order. The order is the kernels' (`kernels/cuda/tiled.cuh`): a change of it is another tag.
pub const LAYOUT_TILES: &str = "tiles-16x256";

impl Backend {
    /// As users write it: `memfd` or `cuda-vmm`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Memfd { .. } => "memfd",
            Self::CudaVmm { .. } => "cuda-vmm",
        }
    }
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

impl WeightManifest {
    /// The tensor of this name, by a linear search; use a [`TensorIndex`] to look up many.
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.iter().find(|t| t.name == name)
    }
}

/// Positions of tensors by name, for binders that look up thousands.
#[derive(Clone, Debug, Default)]
pub struct TensorIndex {
    by_name: HashMap<String, usize>,
}

impl TensorIndex {
    /// Indexes `tensors`; of entries with one name the last wins (a decoded manifest has none).
    pub fn new(tensors: &[TensorEntry]) -> Self {
        Self { by_name: tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect() }
    }

    /// Position of `name` in the table that was indexed.
    pub fn get(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }
}
