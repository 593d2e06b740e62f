//! Launches of what attention's operands go through between their projections and their use (qkv.cu).

use super::buffer::CudaBuffer;
use super::compress::{Fused, Given, compress_all};
use super::dense::rows_of;
use super::device::CudaDevice;
use super::driver::KernelArg;
use super::indexer::{self, CudaSelection};
use super::kernels::{File, dim, int};
use super::step::CudaStep;
use crate::kernel_args;
use crate::ops::{Indexer, KvNumerics, Operands, SparseOps};

/// `Prepare` in qkv.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct PrepareArg {
    turns: u64,
    q: u64,
    kv_raw: u64,
    kv_norm: u64,
    kv: u64,
    index_q: u64,
    index_out: u64,
    pairs: i32,
    heads: i32,
    index_tiles: i32,
    official: i32,
    write_ring: i32,
    rows: i32,
    eps: f32,
    pad: i32,
}
kernel_args!(PrepareArg);

/// Warps of a block.
const WARPS: usize = 4;
/// Most rows of a step whose compressors are in the same launch.
const FEW_ROWS: usize = 64;

/// Whether a warp can have a head in its registers, four elements a lane and group of 128; rounding wants whole groups of 64.
fn fits(p: &Operands<'_, CudaDevice>) -> bool {
    matches!(p.head_dim, 128 | 256 | 512)
        && p.rope.pairs.is_multiple_of(2)
        && (p.head_dim - p.rope_dim).is_multiple_of(64)
}

/// See [`SparseOps::prepare`].
#[allow(clippy::too_many_arguments, reason = "as the operation has them")]
pub(super) fn prepare(
    d: &CudaDevice,
    step: &CudaStep,
    p: &Operands<'_, CudaDevice>,
    q: &mut CudaBuffer,
    kv_raw: &CudaBuffer,
    kv: &mut CudaBuffer,
    mut index: Option<(&Indexer, &mut CudaBuffer, &mut CudaSelection)>,
    compressors: &[Given<'_>],
) -> bool {
    rows_of(step, q);
    rows_of(step, kv_raw);
    assert!(q.width().is_multiple_of(p.head_dim) && p.rope_dim <= p.head_dim, "query heads of another width");
    assert!(kv_raw.width() == p.head_dim && kv.width() == p.head_dim, "key-value rows of another width");
    assert_eq!(2 * p.rope.pairs, p.rope_dim, "rotary part of another width");
    assert!(p.kv_norm.rows == 1 && p.kv_norm.cols == p.head_dim, "{}: shape", p.kv_norm.name);
    kv.resize(step.rows);
    // Indexer queries that the scores' kernel does not take from this one are done by themselves.
    let by_itself = |i: &Indexer| !fits(p) || p.numerics != KvNumerics::Official || !indexer::fits(step, i);
    if let Some((i, index_q, _)) = index.take_if(|(i, ..)| by_itself(i)) {
        d.rope_tail(step, p.rope, i.head_dim, false, index_q);
        d.round_index(p.numerics, i.head_dim, index_q);
    }
    if !fits(p) {
        d.head_rms(q, p.head_dim, p.eps);
        d.rope_tail(step, p.rope, p.head_dim, false, q);
        super::dense::rms_norm(d, kv_raw, p.kv_norm, p.eps, kv);
        d.rope_tail(step, p.rope, p.head_dim, false, kv);
        d.round_kv(p.numerics, p.rope_dim, kv);
        compress_all(d, step, compressors);
        return false;
    }
    if step.rows == 0 {
        return false;
    }
    let (mut index_q, mut index_out, mut index_tiles) = (0, 0, 0);
    if let Some((i, from, selection)) = index {
        assert!(from.rows() == step.rows && from.width() == i.heads * i.head_dim, "indexer queries of another shape");
        (index_q, index_out) = (from.start(), selection.prepare(d, step, i));
        index_tiles = i.heads / indexer::TILE;
    }
    let ring = step.layout().slot(p.ring_slot);
    assert_eq!(usize::try_from(ring.width), Ok(p.head_dim), "ring rows of another width");
    // A span's only row replaces the one that leaves its own window. Earlier rows of longer spans still need what later ones replace.
    let write_ring = step.longest == 1 && step.distinct_banks;
    let heads = q.width() / p.head_dim;
    let arg = PrepareArg {
        turns: p.rope.turns(d, step),
        q: q.changed(),
        kv_raw: kv_raw.start(),
        kv_norm: p.kv_norm.vector(),
        kv: kv.start(),
        index_q,
        index_out,
        pairs: int(p.rope.pairs),
        heads: int(heads),
        index_tiles: int(index_tiles),
        official: i32::from(p.numerics == KvNumerics::Official),
        write_ring: i32::from(write_ring),
        rows: int(step.rows),
        eps: p.eps,
        pad: 0,
    };
    // A warp for each query head, the key-value row and each pair of indexer heads.
    let warps = step.rows * (heads + 1 + indexer::TILE / 2 * index_tiles);
    let blocks = warps.div_ceil(WARPS);
    // Many rows have larger blocks with fewer registers for the operands alone.
    let few = p.head_dim == 512 && step.rows <= FEW_ROWS;
    if let Some(f) = Fused::only(step, compressors).filter(|_| few) {
        let args = (int(f.parts), int(step.spans), int(f.count));
        let all: [&dyn KernelArg; 7] = [&step.arg, &arg, &ring, &f.arg, &args.0, &args.1, &args.2];
        let grid = [dim(f.parts * step.spans * f.count + blocks), 1, 1];
        let name = format!("prepare_compress_{}", f.threads);
        d.launch(File::Qkv, &name, grid, [dim(f.threads), 1, 1], f.shared(), &all);
        return write_ring;
    }
    let all: [&dyn KernelArg; 3] = [&step.arg, &arg, &ring];
    let name = format!("prepare_{}", p.head_dim / 128);
    d.launch(File::Qkv, &name, [dim(blocks), 1, 1], [dim(32 * WARPS), 1, 1], 0, &all);
    compress_all(d, step, compressors);
    write_ring
}
