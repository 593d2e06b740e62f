//! Launches of the compressors' kernels (compress.cu, compress_rows.cu).

use super::bank::SlotArg;
use super::buffer::CudaBuffer;
use super::dense::{BLOCK, rows_of};
use super::device::CudaDevice;
use super::kernels::{File, dim, int, threads};
use super::step::CudaStep;
use crate::kernel_args;
use crate::ops::{Compressor, KvNumerics};

/// `Compress` in frontier.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct CompressArg {
    ratio: i32,
    dim: i32,
    overlap: i32,
    rope_dim: i32,
    official: i32,
    indexer: i32,
    eps: f32,
    pad: i32,
    ape: u64,
    norm: u64,
    frequencies: u64,
    values: u64,
    scores: u64,
}

/// `Compressors` in compress_rows.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct CompressorsArg {
    compress: [CompressArg; 2],
    frontier: [SlotArg; 2],
    rows: [SlotArg; 2],
}
kernel_args!(CompressArg, CompressorsArg);

/// A compressor and its projections.
pub(super) type Given<'a> = (&'a Compressor<'a, CudaDevice>, &'a CudaBuffer, &'a CudaBuffer);

fn width(c: &Compressor<'_, CudaDevice>) -> usize {
    if c.overlap { 2 * c.dim } else { c.dim }
}

/// Whether compress_rows.cu has its shape: a warp has 128 elements of a finished row in its registers, all of an indexer row.
fn fits(c: &Compressor<'_, CudaDevice>) -> bool {
    let width = matches!(c.dim, 128 | 256 | 512) && (!c.indexer || c.dim == 128);
    width && c.rope_dim.is_multiple_of(4) && (c.indexer || (c.dim - c.rope_dim).is_multiple_of(64))
}

fn argument(step: &CudaStep, c: &Compressor<'_, CudaDevice>, values: &CudaBuffer, scores: &CudaBuffer) -> CompressArg {
    let width = width(c);
    assert!(values.width() == width && scores.width() == width, "compressor projections of another width");
    rows_of(step, values);
    rows_of(step, scores);
    assert!(step.distinct_banks, "two spans of one bank in a step of a model with recurrent state");
    assert!(c.ape.rows == c.ratio && c.ape.cols == width, "{}: shape", c.ape.name);
    assert_eq!(2 * c.rope.pairs, c.rope_dim, "rotary part of another width");
    CompressArg {
        ratio: int(c.ratio),
        dim: int(c.dim),
        overlap: i32::from(c.overlap),
        rope_dim: int(c.rope_dim),
        official: i32::from(c.numerics == KvNumerics::Official),
        indexer: i32::from(c.indexer),
        eps: c.eps,
        pad: 0,
        ape: c.ape.floats(),
        norm: c.norm.vector(),
        frequencies: c.rope.frequencies(),
        values: values.start(),
        scores: scores.start(),
    }
}

/// Threads of a compressor's blocks, by which its bits differ: windows of many tokens want the loads.
fn block(c: &Compressor<'_, CudaDevice>) -> usize {
    if c.ratio >= 64 { 1024 } else { 512 }
}

/// One or two compressors that go into one launch.
pub(super) struct Fused {
    pub(super) arg: CompressorsArg,
    /// Blocks per span and compressor.
    pub(super) parts: usize,
    pub(super) count: usize,
    pub(super) threads: usize,
}

impl Fused {
    fn new(step: &CudaStep, pair: &[Given<'_>]) -> Self {
        let of = |i: usize| pair[i.min(pair.len() - 1)];
        let slot = |n: usize| step.layout().slot(n);
        let arg = CompressorsArg {
            compress: [0, 1].map(|i| argument(step, of(i).0, of(i).1, of(i).2)),
            frontier: [0, 1].map(|i| slot(of(i).0.frontier_slot)),
            rows: [0, 1].map(|i| slot(of(i).0.rows_slot)),
        };
        // As many windows as the longest span can finish, but for those that the first block has; blocks beyond do nothing.
        let parts = |c: &Compressor<'_, CudaDevice>| {
            let lead = if c.overlap { 2 } else { 1 };
            1 + (step.longest / c.ratio + 1).saturating_sub(lead)
        };
        Self { arg, parts: parts(of(0).0).max(parts(of(1).0)), count: pair.len(), threads: block(of(0).0) }
    }

    /// If all of them go into one launch.
    pub(super) fn only(step: &CudaStep, all: &[Given<'_>]) -> Option<Self> {
        let one = matches!(all, [first, ..] if all.iter().all(|(c, ..)| fits(c) && block(c) == block(first.0)));
        (one && all.len() <= 2).then(|| Self::new(step, all))
    }

    /// Bytes of shared memory.
    pub(super) fn shared(&self) -> usize {
        self.threads * 12 * 4
    }
}

/// See [`crate::ops::SparseOps::compress_all`]. Which kernel a compressor takes depends on its shape alone, since their bits differ.
pub(super) fn compress_all(d: &CudaDevice, step: &CudaStep, all: &[Given<'_>]) {
    if step.rows == 0 {
        return;
    }
    let (mut fused, plain): (Vec<Given<'_>>, Vec<_>) = all.iter().partition(|(c, ..)| fits(c));
    plain.into_iter().for_each(|(c, values, scores)| general(d, step, c, values, scores));
    fused.sort_by_key(|(c, ..)| block(c));
    for pair in fused.chunk_by(|a, b| block(a.0) == block(b.0)).flat_map(|same| same.chunks(2)) {
        let f = Fused::new(step, pair);
        let grid = [dim(f.parts), dim(step.spans), dim(f.count)];
        let name = format!("compress_all_{}", f.threads);
        d.launch(File::CompressRows, &name, grid, [dim(f.threads), 1, 1], f.shared(), &[&step.arg, &f.arg]);
    }
}

/// Of any shape.
fn general(d: &CudaDevice, step: &CudaStep, c: &Compressor<'_, CudaDevice>, values: &CudaBuffer, scores: &CudaBuffer) {
    let p = argument(step, c, values, scores);
    let (frontier, rows) = (step.layout().slot(c.frontier_slot), step.layout().slot(c.rows_slot));
    // As many windows as the longest span can touch; blocks beyond a span's last finished window do nothing.
    let windows = step.longest / c.ratio + 1;
    let grid = [dim(windows), dim(step.spans), 1];
    let block = [threads(c.dim, 256), 1, 1];
    d.launch(File::Compress, "compress_rows", grid, block, c.dim * 4, &[&step.arg, &p, &frontier, &rows]);
    let grid = [dim((c.ratio * width(c)).div_ceil(256)), dim(step.spans), 1];
    d.launch(File::Compress, "compress_frontier", grid, BLOCK, 0, &[&step.arg, &p, &frontier]);
}
