//! Launches of the lightning indexer's kernels.

use super::buffer::{CudaBuffer, Growable};
use super::dense::{BLOCK, per_lane, rows_of};
use super::device::CudaDevice;
use super::driver::KernelArg;
use super::fatal::OrFatal;
use super::kernels::{File, dim, int};
use super::step::CudaStep;
use crate::ops::Indexer;
use crate::state::StateType;

/// Indexer keys per block (index_scores in indexer.cu).
const INDEX_KEYS: usize = 64;
/// Heads of a tile of the tensor cores, and the width of the rows that they take (index_scores.cu).
pub(super) const TILE: usize = 16;
const WIDTH: usize = 128;
/// Warps of their kernel's blocks, rows that are on their way, and rows of a block.
const WARPS: usize = 8;
const STAGES: usize = 3;
const ROWS: usize = 32;
/// Most memory for scores, as far as one block's rows fit: longer steps are computed in parts.
const SCORES: usize = 96 << 20;

/// Whether the tensor cores' kernel takes the indexer: keys stored in FP4, of the width that it is written for.
pub(super) fn fits(step: &CudaStep, p: &Indexer) -> bool {
    let shape = p.head_dim == WIDTH && p.heads.is_multiple_of(TILE) && p.heads <= 4 * TILE;
    shape && step.layout().kind(p.rows_slot).ty() == StateType::Fp4
}

/// Per row: the selected compressed rows, in device memory.
#[derive(Debug, Default)]
pub struct CudaSelection {
    /// Queries as the tensor cores take them, and the step that they are of.
    queries: Growable,
    queries_of: u64,
    pub(super) top_k: usize,
    pub(super) rows: usize,
    pub(super) selected: Growable,
    pub(super) counts: Growable,
}

impl CudaSelection {
    /// Where the step's queries go, in the order of the tensor cores.
    pub(super) fn prepare(&mut self, d: &CudaDevice, step: &CudaStep, p: &Indexer) -> u64 {
        self.queries_of = step.id;
        self.queries.at_least(d.context(), step.rows.max(16) * p.heads * p.head_dim * 2)
    }

    /// What was selected, per row: `None` for all visible rows, or the selected ones in ascending order. For tests and debugging:
    /// waits for the device.
    pub fn download(&self, d: &CudaDevice) -> Vec<Option<Vec<usize>>> {
        let read = |from: u64, n: usize| -> Vec<i32> {
            let mut bytes = vec![0u8; 4 * n];
            #[allow(unsafe_code, reason = "a copy from the device")]
            // SAFETY: as many were allocated by `index_select`.
            unsafe { d.stream().download(from, &mut bytes) }.or_fatal("reading a selection");
            bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect()
        };
        let (selected, counts) =
            (read(self.selected.start(), self.rows * self.top_k), read(self.counts.start(), self.rows));
        let rows = counts.iter().enumerate();
        rows.map(|(r, count)| {
            let count = usize::try_from(*count).ok()?;
            Some(
                selected[r * self.top_k..][..count].iter().map(|k| usize::try_from(*k).unwrap_or(usize::MAX)).collect(),
            )
        })
        .collect()
    }
}

/// See [`crate::ops::SparseOps::index_select`].
pub(super) fn index_select(
    d: &CudaDevice,
    step: &CudaStep,
    p: &Indexer,
    q: &CudaBuffer,
    w: &CudaBuffer,
    out: &mut CudaSelection,
) {
    rows_of(step, q);
    assert!(q.width() == p.heads * p.head_dim && w.width() == p.heads, "indexer shape");
    let rows = step.rows;
    (out.rows, out.top_k) = (rows, p.top_k);
    let selected = out.selected.at_least(d.context(), rows.max(16) * p.top_k * 4);
    let counts = out.counts.at_least(d.context(), rows.max(16) * 4);
    if rows == 0 {
        return;
    }
    let visible = step.deepest / p.ratio;
    // Whole blocks of keys: the stride need not change with every token.
    let stride = visible.next_multiple_of(INDEX_KEYS);
    let (top_k, ratio, n) = (int(p.top_k), int(p.ratio), int(stride));
    let (top, block) = top_kernel(visible, rows);
    let choose = |scores: u64, first: usize, count: usize| {
        let first = int(first);
        let all: [&dyn KernelArg; 8] = [&step.arg, &top_k, &ratio, &scores, &first, &n, &selected, &counts];
        d.launch(File::IndexTop, top, [dim(count), 1, 1], [block, 1, 1], 0, &all);
    };
    if visible <= p.top_k {
        return choose(0, 0, rows);
    }
    let tensor = fits(step, p);
    if tensor && out.queries_of != step.id {
        // They were rounded by themselves: FP4 values, which f16 holds.
        let (to, tiles) = (out.prepare(d, step, p), rows * p.heads / TILE);
        let args = (q.start(), int(tiles));
        let grid = [dim((tiles * TILE / 2).div_ceil(4)), 1, 1];
        d.launch(File::Qkv, "index_pack", grid, [128, 1, 1], 0, &[&args.0, &args.1, &to]);
    }
    out.queries_of = 0;
    let (slot, heads) = (step.layout().slot(p.rows_slot), int(p.heads));
    let part = rows_at_once(stride).min(rows);
    let scores = d.scratch().work.at_least(d.context(), part * stride * 4);
    for first in (0..rows).step_by(part) {
        let count = part.min(rows - first);
        let (row0, row1, weights) = (int(first), int(first + count), w.start());
        if tensor {
            let multiprocessors = usize::try_from(d.context().device().multiprocessors).unwrap_or(1);
            let groups = groups(step.longest, step.spans * visible, multiprocessors);
            let tile = if groups == 4 { ROWS } else { step.longest };
            let args = (out.queries.start(), int(tile));
            let all: [&dyn KernelArg; 13] = [
                &step.arg, &slot, &heads, &top_k, &ratio, &p.scale, &args.0, &weights, &args.1, &row0, &row1, &n,
                &scores,
            ];
            let name = format!("index_scores_fp4_{groups}");
            let grid = [dim(visible.div_ceil(8 * groups * WARPS)), dim(step.longest.div_ceil(tile)), dim(step.spans)];
            let shared = STAGES * p.heads * (p.head_dim * 2 + 4);
            d.launch(File::IndexScores, &name, grid, [dim(32 * WARPS), 1, 1], shared, &all);
        } else {
            let args = (int(p.head_dim), q.start());
            let all: [&dyn KernelArg; 12] =
                [&step.arg, &slot, &heads, &args.0, &top_k, &ratio, &p.scale, &args.1, &weights, &row0, &n, &scores];
            let name = format!("index_scores_{}", per_lane(p.head_dim, 8));
            let grid = [dim(stride / INDEX_KEYS), dim(count), 1];
            d.launch(File::Indexer, &name, grid, BLOCK, p.heads * p.head_dim * 4, &all);
        }
        choose(scores, first, count);
    }
}

/// Rows whose `stride` scores each are in memory at once: whole blocks of them.
fn rows_at_once(stride: usize) -> usize {
    (SCORES / (stride * 4)).max(ROWS) / ROWS * ROWS
}

/// Groups of 8 keys that a warp has in registers, for spans of up to `longest` rows that see `keys` rows altogether: one or two for few rows,
/// which want the warps, as long as the device takes their blocks at once; four for many, which share the keys.
fn groups(longest: usize, keys: usize, multiprocessors: usize) -> usize {
    match longest {
        ..=8 if keys <= 2 * 8 * WARPS * multiprocessors => 1,
        ..=8 => 2,
        _ => 4,
    }
}

/// The kernel of index_top.cu, and threads of its blocks, for rows that see up to `visible` rows.
fn top_kernel(visible: usize, rows: usize) -> (&'static str, u32) {
    let few = rows <= 64;
    match visible {
        ..=1024 => ("index_top_512_2", 512),
        1025..=2048 => ("index_top_512_4", 512),
        2049..=4096 => ("index_top_512_8", 512),
        4097..=8192 if !few => ("index_top_512_16", 512),
        4097..=16384 => ("index_top_1024_16", 1024),
        16385..=32768 => ("index_top_1024_32", 1024),
        _ => ("index_top", 512),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_take_no_more_memory_at_a_million_tokens() {
        // Models take long steps in parts of 512 rows: one launch each up to 192k tokens of ratio 4.
        assert!(rows_at_once(2048) >= 2048 && rows_at_once(49_152) >= 512);
        for stride in [512, 2048, 16_384, 262_144] {
            let rows = rows_at_once(stride);
            assert!(rows.is_multiple_of(ROWS) && rows * stride * 4 <= SCORES, "{stride}");
        }
        assert_eq!(rows_at_once(1 << 24), ROWS);
    }

    #[test]
    fn a_warp_has_more_keys_where_there_are_more_than_warps() {
        assert_eq!(
            [(1, 16_384), (1, 16 * 2048), (8, 512), (9, 512)].map(|(rows, keys)| groups(rows, keys, 132)),
            [1, 2, 1, 4]
        );
    }

    #[test]
    fn a_block_has_all_scores_in_its_registers() {
        for visible in [1, 1024, 1025, 2049, 5000, 8192, 8193, 16385, 32768] {
            for rows in [1, 64, 2048] {
                let (name, threads) = top_kernel(visible, rows);
                let mut parts = name.split('_').skip(2).map(|n| n.parse::<usize>().expect("a number"));
                let (t, v) = (parts.next().expect("threads"), parts.next().expect("scores a thread"));
                assert_eq!(t, threads as usize, "{name}");
                assert!(t * v >= visible, "{name}: {visible}");
            }
        }
        assert_eq!(top_kernel(32769, 1), ("index_top", 512));
    }
}
