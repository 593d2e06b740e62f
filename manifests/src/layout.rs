//! Where each tensor goes in the owner's memory: a pure function of the tensor table, so that the loader, the content
//! hash and any tool that checks it agree without talking to one another.

use crate::gguf::TensorInfo;
use crate::weights::TensorEntry;

/// Most bytes that tensors share in one chunk: 1 GiB, the size at which CUDA VMM handles map fast (11.6 ms for 96 of
/// them on an H200) and few enough for one descriptor message.
pub const CHUNK_BYTES: u64 = 1 << 30;

/// Alignment of every tensor inside its chunk, and of a chunk's length: a cache line for SIMD loads, 256 for coalesced
/// device reads.
pub const TENSOR_ALIGN: u64 = 256;

/// The plan: chunk lengths and the tensor table that goes into the manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Length of each chunk in bytes, a multiple of [`TENSOR_ALIGN`].
    pub chunks: Vec<u64>,
    /// One entry per tensor, in the order given.
    pub placed: Vec<TensorEntry>,
}

impl Layout {
    /// Bytes of all chunks, padding included.
    pub fn total_bytes(&self) -> u64 {
        self.chunks.iter().fold(0, |sum, len| sum.saturating_add(*len))
    }
}

/// Packs `tensors` in the order given: each starts at the next multiple of [`TENSOR_ALIGN`] of the current chunk, and
/// opens a new chunk when it would end beyond [`CHUNK_BYTES`]; a larger tensor gets a chunk of its own. Bytes between
/// tensors are zero, and count for the chunk's hash.
pub fn plan_layout(tensors: &[TensorInfo]) -> Layout {
    plan_with(tensors, CHUNK_BYTES)
}

fn plan_with(tensors: &[TensorInfo], chunk_bytes: u64) -> Layout {
    let mut layout = Layout::default();
    let mut chunk: u32 = 0;
    for tensor in tensors {
        // `len` lies inside a file, so rounding it up cannot overflow by any file system's limits; saturate anyway.
        let padded = tensor.len.checked_next_multiple_of(TENSOR_ALIGN).unwrap_or(u64::MAX);
        let offset = match layout.chunks.last_mut() {
            Some(used) if used.checked_add(padded).is_some_and(|end| end <= chunk_bytes) => {
                let at = *used;
                *used += padded;
                at
            }
            Some(_) => {
                layout.chunks.push(padded);
                chunk = chunk.saturating_add(1);
                0
            }
            None => {
                layout.chunks.push(padded);
                0
            }
        };
        layout.placed.push(TensorEntry {
            name: tensor.name.clone(),
            ty: tensor.ty,
            shape: tensor.shape.clone(),
            chunk,
            offset,
            len: tensor.len,
        });
    }
    layout
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::GgmlType;

    fn tensor(name: &str, len: u64) -> TensorInfo {
        TensorInfo { name: name.into(), ty: GgmlType::I8, shape: vec![len], shard: 0, offset: 0, len }
    }

    fn places(layout: &Layout) -> Vec<(u32, u64)> {
        layout.placed.iter().map(|t| (t.chunk, t.offset)).collect()
    }

    #[test]
    fn packs_in_order_and_opens_a_chunk_when_one_is_full() {
        let layout = plan_with(&[tensor("a", 100), tensor("b", 256), tensor("c", 257), tensor("d", 1)], 1024);
        assert_eq!(places(&layout), [(0, 0), (0, 256), (0, 512), (1, 0)]);
        assert_eq!(layout.chunks, [1024, 256]);
        assert_eq!(layout.total_bytes(), 1280);
    }

    #[test]
    fn a_tensor_larger_than_a_chunk_gets_its_own() {
        let layout = plan_with(&[tensor("a", 1), tensor("big", 5000), tensor("b", 1)], 1024);
        assert_eq!(places(&layout), [(0, 0), (1, 0), (2, 0)]);
        assert_eq!(layout.chunks, [256, 5120, 256]);
    }

    #[test]
    fn first_tensor_larger_than_a_chunk_leaves_no_empty_chunk() {
        let layout = plan_with(&[tensor("big", 5000), tensor("b", 1)], 1024);
        assert_eq!(places(&layout), [(0, 0), (1, 0)]);
        assert_eq!(layout.chunks.len(), 2);
    }

    #[test]
    fn nothing_plans_to_nothing() {
        assert_eq!(plan_layout(&[]), Layout::default());
    }
}
