//! Launches of the kernels for four residual streams (streams.cu), which do what lies between two sublayers: one updates the streams
//! and begins the next mixer's products, one finishes them, norms the sublayer's input and splits it for products.

use super::buffer::CudaBuffer;
use super::device::CudaDevice;
use super::driver::{KernelArg, vmm::DevicePtr};
use super::kernels::{File, dim, int};
use super::quantized::SUPERBLOCK;
use super::split::{self, ActsArg};
use super::weight::CudaWeight;
use crate::kernel_args;
use crate::ops::{HyperParams, HyperWeights};

/// `STREAMS`, `SLICE` and `SUMS` in streams.cu.
const STREAMS: usize = 4;
const SLICE: usize = 256;
const SUMS: usize = 32;
/// Widest stream whose row is a block's, eight columns a thread and one more warp.
const MOST_WIDTH: usize = 8 * (1024 - 32);
/// Widest stream of the kernel of which two blocks fit a multiprocessor.
const NARROW: usize = 4096;
/// Most rows that are added up to a sublayer's output (`MAX_TERMS` in streams.cu).
pub(super) const MOST_TERMS: usize = 8;
/// Steps of up to so many rows have a block per row and slice; blocks of longer ones meet their weights with several rows.
const FEW_ROWS: usize = 64;
/// Rows of such a block (`MOST_PER_BLOCK` in streams.cu at most), and of its ring (`STAGES * WIDE_ROWS`).
const PER_BLOCK: usize = 16;
const RING_ROWS: usize = 6;
/// Launches after which mixing weights are certain to be there before the previous kernel has ended; one would do.
const LONG_AGO: u64 = 3;

/// `Update` in streams.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct UpdateArg {
    mix: u64,
    y: u64,
    parts: u64,
    terms: i32,
    iterations: i32,
    eps: f32,
    early: i32,
}

/// `Finish` in streams.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct FinishArg {
    partial: u64,
    scale: u64,
    base: u64,
    weight: u64,
    state: u64,
    mix: u64,
    x: u64,
    acts: ActsArg,
    slices: i32,
    width: i32,
    iterations: i32,
    eps: f32,
    rms_eps: f32,
    norm_eps: f32,
}
kernel_args!(UpdateArg, FinishArg);

/// What the streams are updated with.
pub(super) struct Update<'a> {
    pub(super) mix: &'a CudaBuffer,
    pub(super) y: &'a CudaBuffer,
    /// Rows that are added to each of `y`'s, one after the other.
    pub(super) parts: Option<&'a CudaBuffer>,
}

/// Whether these kernels are for so many streams of that width.
pub(super) fn fits(streams: usize, width: usize) -> bool {
    streams == STREAMS && width.is_multiple_of(8) && width <= MOST_WIDTH
}

/// Streams in memory.
#[derive(Clone, Copy)]
struct State {
    at: DevicePtr,
    rows: usize,
    width: usize,
}

impl State {
    /// Bytes of partial products.
    fn sums(self) -> usize {
        self.rows.max(16) * self.width.div_ceil(SLICE) * SUMS * 4
    }
}

/// Updates the streams (with an update) and begins their products with a mixer (with one) at `partial`.
fn launch(d: &CudaDevice, update: Option<UpdateArg>, mixer: Option<(&CudaWeight, DevicePtr)>, s: State) {
    let (mut w, mut partial) = (0, 0);
    let mut name = "streams_post".to_owned();
    let wide = s.rows > FEW_ROWS && update.is_some() && mixer.is_some();
    if let Some((m, to)) = mixer {
        assert_eq!(m.cols, STREAMS * s.width, "{}: streams of another width", m.name);
        assert!(m.ty.block_elems() == 1, "{}: mixers are float tensors", m.name);
        (w, partial) = (m.start(), to);
        let kind = match (update.is_some(), m.rows == STREAMS) {
            (true, _) if wide => "post_mix_wide",
            (true, _) => "post_mix",
            (false, true) => "head",
            (false, false) => "mix",
        };
        name = format!("streams_{kind}_{}", m.ty);
    }
    let args = (int(s.width), int(s.rows), int(PER_BLOCK), update.unwrap_or_default());
    let slices = dim(s.width.div_ceil(SLICE));
    if wide {
        let each = STREAMS + 1 + usize::try_from(args.3.terms).unwrap_or(MOST_TERMS);
        let all: [&dyn KernelArg; 7] = [&w, &args.0, &args.1, &args.2, &args.3, &s.at, &partial];
        let grid = [dim(s.rows.div_ceil(PER_BLOCK)), slices, 1];
        return d.launch(File::Streams, &name, grid, [256, 1, 1], RING_ROWS * each * SLICE * 4, &all);
    }
    let all: [&dyn KernelArg; 6] = [&w, &args.0, &args.1, &args.3, &s.at, &partial];
    d.launch(File::Streams, &name, [dim(s.rows), slices, 1], [256, 1, 1], 0, &all);
}

/// Updates `state`; begins the products with `next`.
pub(super) fn post(
    d: &CudaDevice,
    p: &HyperParams,
    update: &Update<'_>,
    state: &mut CudaBuffer,
    next: Option<&HyperWeights<CudaWeight>>,
) {
    let s = State { at: state.changed(), rows: state.rows(), width: update.y.width() };
    let terms = update.parts.map_or(0, |p| p.rows() / s.rows.max(1));
    assert!(terms <= MOST_TERMS, "{terms} terms; {MOST_TERMS} at most");
    let (mix, y, parts) = (update.mix.start(), update.y.start(), update.parts.map_or(0, CudaBuffer::start));
    // A head's mixer has a kernel without the update only: it meets few of the rows.
    let mixer = next.map(|n| &n.mixer).filter(|m| m.rows > STREAMS);
    let mixer = mixer.map(|m| (m, state.mixed_here(m.start(), s.sums())));
    let begun = update.mix.begun();
    let iterations = begun.map_or(0, |_| int(p.iterations));
    let early = begun.is_some_and(|by| d.launches() - by >= LONG_AGO);
    let update = UpdateArg { mix, y, parts, terms: int(terms), iterations, eps: p.eps, early: i32::from(early) };
    launch(d, Some(update), mixer, s);
}

/// The combination of `state`'s streams to `x`, or its norm, and for a sublayer the mixing weights to `mix`. Of few rows, their rounds are
/// left to the update of the streams, which has the time of all kernels in between for them.
pub(super) fn finish(
    d: &CudaDevice,
    p: &HyperParams,
    w: &HyperWeights<CudaWeight>,
    state: &CudaBuffer,
    mix: Option<&mut CudaBuffer>,
    norm: Option<(&CudaWeight, f32)>,
    x: &mut CudaBuffer,
) {
    let (rows, width) = (state.rows(), x.width());
    let partial = state.mixed(w.mixer.start()).unwrap_or_else(|| {
        let s = State { at: state.start(), rows, width };
        let partial = d.scratch().mix.at_least(d.context(), s.sums());
        launch(d, None, Some((&w.mixer, partial)), s);
        partial
    });
    x.resize(rows);
    let split = norm.is_some() && width.is_multiple_of(SUPERBLOCK);
    if let Some((weight, _)) = norm {
        assert!(weight.rows == 1 && weight.cols == width, "{}: shape", weight.name);
    }
    let leave = rows <= FEW_ROWS;
    let mix = mix.map_or(0, |mix| {
        mix.resize(rows);
        if leave {
            mix.begun_by(d.launches() + 1);
        }
        mix.start()
    });
    let f = FinishArg {
        partial,
        scale: w.scale.vector(),
        base: w.base.vector(),
        weight: norm.map_or(0, |(weight, _)| weight.vector()),
        state: state.start(),
        mix,
        x: x.start(),
        acts: if split { x.split_here(split::PLAIN) } else { ActsArg::NONE },
        slices: int(width.div_ceil(SLICE)),
        width: int(width),
        iterations: if leave { 0 } else { int(p.iterations) },
        eps: p.eps,
        rms_eps: p.rms_eps,
        norm_eps: norm.map_or(0.0, |(_, eps)| eps),
    };
    let name = if width <= NARROW { "streams_finish" } else { "streams_finish_wide" };
    let threads = (width / 8).next_multiple_of(32) + 32;
    d.launch(File::Streams, name, [dim(rows), 1, 1], [dim(threads), 1, 1], 0, &[&f]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_that_fits_has_whole_blocks() {
        for width in (8..20_000).step_by(8).filter(|w| fits(STREAMS, *w)) {
            let threads = (width / 8).next_multiple_of(32) + 32;
            assert!(threads <= if width <= NARROW { 544 } else { 1024 }, "{width}: {threads} threads");
        }
        assert!(fits(4, 7168) && fits(4, 64) && !fits(3, 64) && !fits(4, 68) && !fits(4, 8192));
    }
}
