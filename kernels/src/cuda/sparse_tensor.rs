//! Launches of sparse attention on tensor cores (`sparse_tensor.cuh` tells how it works).

use super::bank::SlotArg;
use super::buffer::CudaBuffer;
use super::dense::{BLOCK, blocks};
use super::device::CudaDevice;
use super::driver::KernelArg;
use super::kernels::{File, dim, int, long};
use super::sparse_attention::SparseArg;
use super::step::CudaStep;
use crate::kernel_args;
use crate::ops::SparseAttention;

/// The rows that these kernels are made for (`DIM`, `DIM - NOPE` in `sparse_tensor.cuh`).
const WIDTH: i32 = 512;
const ROTARY: i32 = 64;
/// `StateType` in `common.cuh`.
const F16: i32 = 0;
const FP8: i32 = 2;
/// A query's places are padded to this many.
const PLACES: usize = 64;
/// Heads of a block for few rows and of one for many.
const NARROW_HEADS: usize = 16;
const WIDE_HEADS: usize = 32;
/// Places of a block of scores for few rows; threads of both kinds of blocks.
const SCORE_PLACES: usize = 32;
const SCORE_BLOCK: [u32; 3] = [128, 1, 1];
/// Bytes that a head's query takes in shared memory.
const QUERY: usize = 2 * 2 * (512 + 8);
/// Shared memory of the blocks that sum values (`Narrow` in `sparse_values_narrow.cu`, `Wide` in `sparse_values.cu`).
const NARROW_SHARED: usize = 98_752;
const WIDE_SHARED: usize = 90_368;
/// Places that share a greatest score, at least.
const TOP_PLACES: usize = 8;
/// Rows of a launch from which blocks of many heads are enough to fill a device.
const MANY_ROWS: usize = 24;
/// Most memory for scores: longer steps are computed in parts.
const SCORES: usize = 96 << 20;

/// `Places` in `sparse_tensor.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct PlacesArg {
    first: i32,
    stride: i32,
    scores: u64,
    tops: u64,
    keys: u64,
    recent: u64,
    exponents: u64,
}
kernel_args!(PlacesArg);

/// Whether the kernels take such rows and heads. A ring of f16 says that a step's rows are rounded to it before they come here: they
/// must have the same bits whether they are read from the ring or from the step.
pub(super) fn fits(p: &SparseAttention, ring: &SlotArg, compressed: Option<&SlotArg>) -> bool {
    let ring = ring.ty == F16 && ring.width == WIDTH;
    let compressed = compressed.is_none_or(|c| c.ty == FP8 && c.width == WIDTH && c.rotary == ROTARY);
    ring && compressed && p.heads.is_multiple_of(NARROW_HEADS)
}

/// Attends with what `arg` points to; no row sees more than `history` compressed rows.
pub(super) fn attend(
    d: &CudaDevice,
    step: &CudaStep,
    p: &SparseAttention,
    arg: &SparseArg,
    (ring, compressed): (&SlotArg, &SlotArg),
    history: usize,
    out: &CudaBuffer,
) {
    let stride = step.deepest.min(p.window).next_multiple_of(PLACES) + history.next_multiple_of(PLACES);
    let rows = (SCORES / (p.heads * stride * 4)).clamp(1, step.rows);
    // One after the other in scratch memory: scores, their greatest, addresses of keys, their scales, the step's rows.
    let parts = [p.heads * stride * 4, p.heads * (stride / TOP_PLACES) * 4, stride * 8, stride * 8];
    let [scores, tops, keys, exponents] = parts.map(|bytes| rows * bytes);
    let lens = [scores, tops, keys, exponents, step.rows * p.head_dim * 2];
    let [scores, tops, keys, exponents, recent] = d.scratch().work.pieces(d.context(), lens);
    let mut places = PlacesArg { first: 0, stride: int(stride), scores, tops, keys, recent, exponents };
    let wide = step.rows >= MANY_ROWS && p.heads.is_multiple_of(WIDE_HEADS);
    if wide {
        let n = step.rows * p.head_dim;
        let all: [&dyn KernelArg; 3] = [&arg.kv, &places.recent, &long(n)];
        d.launch(File::SparseScores, "sparse_recent", blocks(n.div_ceil(8)), BLOCK, 0, &all);
    }
    let to = out.start();
    for first in (0..step.rows).step_by(rows) {
        places.first = int(first);
        let n = rows.min(step.rows - first);
        let scores: [&dyn KernelArg; 5] = [&step.arg, arg, &places, ring, compressed];
        let values: [&dyn KernelArg; 4] = [&step.arg, arg, &places, &to];
        if wide {
            let grid = [dim(n * (p.heads / WIDE_HEADS)), 1, 1];
            let shared = WIDE_HEADS * QUERY;
            d.launch(File::SparseScores, "sparse_scores_wide", grid, SCORE_BLOCK, shared, &scores);
            d.launch(File::SparseValues, "sparse_values_wide", grid, BLOCK, WIDE_SHARED, &values);
        } else {
            let grid = |last: usize| [dim(n), dim(p.heads / NARROW_HEADS), dim(last)];
            let (blocks, shared) = (grid(stride / SCORE_PLACES), NARROW_HEADS * QUERY);
            d.launch(File::SparseScores, "sparse_scores_narrow", blocks, SCORE_BLOCK, shared, &scores);
            let blocks = grid(p.head_dim / 64);
            d.launch(File::SparseValuesNarrow, "sparse_values_narrow", blocks, BLOCK, NARROW_SHARED, &values);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(ty: i32, width: i32, rotary: i32) -> SlotArg {
        SlotArg { offset: 0, block_stride: 0, rows_per_block: 1, row_bytes: 0, ring: 0, ty, rotary, width }
    }

    #[test]
    fn rows_of_the_official_profile_fit_and_others_do_not() {
        let p =
            |heads| SparseAttention { heads, head_dim: 512, scale: 1.0, window: 128, ring_slot: 0, compressed: None };
        let (ring, rows) = (slot(F16, WIDTH, 0), slot(FP8, WIDTH, ROTARY));
        assert!(fits(&p(64), &ring, Some(&rows)), "Flash");
        assert!(fits(&p(48), &ring, None), "window layers");
        assert!(!fits(&p(2), &ring, Some(&rows)), "too few heads for a fragment");
        let f32 = slot(1, WIDTH, 0);
        assert!(!fits(&p(64), &f32, None) && !fits(&p(64), &ring, Some(&f32)), "the profile without rounding");
        assert!(!fits(&p(64), &slot(F16, 256, 0), None), "another width");
        assert!(!fits(&p(64), &ring, Some(&slot(FP8, WIDTH, 128))), "another rotary part");
    }
}
