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
/// Heads and places of a block for few rows, and heads of one for many, with their threads.
const NARROW_HEADS: usize = 16;
const PLACES: usize = 64;
const WIDE_HEADS: usize = 32;
const WIDE_THREADS: u32 = 128;
/// Bytes that a head's query takes in shared memory.
const QUERY: usize = 2 * 2 * (512 + 8);
/// Rows of a launch from which blocks of many heads are enough to fill a device.
const MANY_ROWS: usize = 24;
/// Most memory for scores: longer steps are computed in parts.
const SCORES: usize = 192 << 20;

/// `Places` in `sparse_tensor.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct PlacesArg {
    first: i32,
    stride: i32,
    scores: u64,
    keys: u64,
    recent: u64,
}
kernel_args!(PlacesArg);

/// Whether the kernels take such rows and heads.
pub(super) fn fits(p: &SparseAttention, ring: &SlotArg, compressed: Option<&SlotArg>) -> bool {
    let ring = ring.ty == F16 && ring.width == WIDTH;
    let compressed = compressed.is_none_or(|c| c.ty == FP8 && c.width == WIDTH && c.rotary == ROTARY && c.row_bytes % 8 == 0);
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
    let (scores, keys, recent) = (p.heads * stride * 4, stride * 8, p.head_dim * 2);
    let rows = (SCORES / scores).clamp(1, step.rows);
    let memory = d.scratch().partial.at_least(d.context(), rows * (scores + keys) + step.rows * recent);
    let mut places = PlacesArg {
        first: 0,
        stride: int(stride),
        scores: memory,
        keys: memory + (rows * scores) as u64,
        recent: memory + (rows * (scores + keys)) as u64,
    };
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
            let (block, shared) = ([WIDE_THREADS, 1, 1], WIDE_HEADS * QUERY);
            d.launch(File::SparseScores, "sparse_scores_wide", grid, block, shared, &scores);
            d.launch(File::SparseValues, "sparse_values_wide", grid, BLOCK, 0, &values);
        } else {
            let grid = |last: usize| [dim(n), dim(p.heads / NARROW_HEADS), dim(last)];
            let shared = NARROW_HEADS * QUERY;
            d.launch(File::SparseScores, "sparse_scores_narrow", grid(stride / PLACES), BLOCK, shared, &scores);
            d.launch(File::SparseValues, "sparse_values_narrow", grid(p.head_dim / 64), BLOCK, 0, &values);
        }
    }
}
