//! Launches of the kernels for four residual streams (streams.cu), which do what lies between two sublayers: one updates the streams
//! and begins the next mixer's products, one finishes them, norms the sublayer's input and splits it for products.

use ds4_manifests::GgmlType;

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
/// Mixing weights of a row that the update takes: post and comb.
const MIXES: usize = STREAMS + STREAMS * STREAMS;
const SUMS: usize = 64;
/// Most rows that are added up to a sublayer's output (`MAX_TERMS` in streams.cu).
pub(super) const MOST_TERMS: usize = 8;
/// Steps of up to so many rows have a block per row and slice; blocks of longer ones meet their weights with several rows.
const FEW_ROWS: usize = 64;
/// Rows of such a block (`MOST_PER_BLOCK` in streams.cu at most).
const PER_BLOCK: usize = 32;
/// Launches after which mixing weights are certain to be there before the previous kernel has ended; three would do.
const LONG_AGO: u64 = 5;

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

/// A kernel for many rows.
struct Wide {
    name: String,
    /// Rows at once, and such groups in its ring.
    rows: usize,
    stages: usize,
}

impl Wide {
    /// The one with constant addresses, where there is one; all give the same bits.
    fn of(ty: GgmlType, width: usize, terms: usize) -> Self {
        match (ty, width, terms) {
            (GgmlType::F16, 4096, 0) => Self { name: "streams_post_mix_4096_0_F16".into(), rows: 4, stages: 2 },
            (GgmlType::F16, 4096, 6) => Self { name: "streams_post_mix_4096_6_F16".into(), rows: 2, stages: 3 },
            _ => Self { name: format!("streams_post_mix_wide_{ty}"), rows: 2, stages: 3 },
        }
    }

    /// Bytes of shared memory: updated rows twice, mixing weights, and the ring.
    fn shared(&self, terms: usize) -> usize {
        let updated = 2 * self.rows * STREAMS * (SLICE + 32);
        let ring = self.stages * self.rows * (STREAMS + 1 + terms) * SLICE;
        4 * (updated + MIXES * PER_BLOCK + ring)
    }
}

/// What the streams are updated with.
pub(super) struct Update<'a> {
    pub(super) mix: &'a CudaBuffer,
    pub(super) y: &'a CudaBuffer,
    /// Rows that are added to each of `y`'s, one after the other.
    pub(super) parts: Option<&'a CudaBuffer>,
}

/// Whether these kernels are for so many streams of that width.
pub(super) fn fits(streams: usize, width: usize) -> bool {
    streams == STREAMS && width.is_multiple_of(8)
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
    let update = update.unwrap_or_default();
    let slices = dim(s.width.div_ceil(SLICE));
    let args = (int(s.width), int(s.rows), int(PER_BLOCK));
    let Some((m, partial)) = mixer else {
        let all: [&dyn KernelArg; 6] = [&0u64, &args.0, &args.1, &update, &s.at, &0u64];
        return d.launch(File::Streams, "streams_post", [dim(s.rows), slices, 1], [256, 1, 1], 0, &all);
    };
    assert_eq!(m.cols, STREAMS * s.width, "{}: streams of another width", m.name);
    assert!(m.ty.block_elems() == 1, "{}: mixers are float tensors", m.name);
    let (w, posts) = (m.start(), update.mix != 0);
    if posts && s.rows > FEW_ROWS {
        let terms = usize::try_from(update.terms).unwrap_or(MOST_TERMS);
        let kernel = Wide::of(m.ty, s.width, terms);
        let all: [&dyn KernelArg; 7] = [&w, &args.0, &args.1, &args.2, &update, &s.at, &partial];
        let grid = [dim(s.rows.div_ceil(PER_BLOCK)), slices, 1];
        return d.launch(File::Streams, &kernel.name, grid, [256, 1, 1], kernel.shared(terms), &all);
    }
    let kind = match (posts, m.rows == STREAMS) {
        (true, _) => "post_mix",
        (false, true) => "head",
        (false, false) => "mix",
    };
    let all: [&dyn KernelArg; 6] = [&w, &args.0, &args.1, &update, &s.at, &partial];
    let name = format!("streams_{kind}_{}", m.ty);
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
    // Every block finds its row's gates. Of 1 row, blocks of 1 and of 16 slices take 2.9 and 3.0 µs; of 2048 rows, 52 and 77.
    let slices = width.div_ceil(SLICE);
    let warps = if leave { 1 } else { 2 };
    let grid = [dim(rows), dim(slices.div_ceil(warps)), 1];
    d.launch(File::Streams, "streams_finish", grid, [dim(32 * (warps + 1)), 1, 1], 0, &[&f]);
}

#[cfg(test)]
mod tests {
    use super::super::driver::module::MAX_SHARED;
    use super::*;

    #[test]
    fn four_streams_have_kernels_which_fit_shared_memory() {
        assert!(fits(4, 7168) && fits(4, 64) && !fits(3, 64) && !fits(4, 68));
        for terms in 0..=MOST_TERMS {
            for (ty, width) in [(GgmlType::F16, 4096), (GgmlType::F16, 7168), (GgmlType::F32, 4096)] {
                let shared = dim(Wide::of(ty, width, terms).shared(terms));
                assert!(shared <= MAX_SHARED, "{ty}, {width}, {terms} terms: {shared} bytes");
            }
        }
    }
}
