//! Hyper-connections. Those of four streams have kernels of their own (streams.rs); these are for other numbers.

use super::buffer::CudaBuffer;
use super::dense::{BLOCK, blocks, product};
use super::device::CudaDevice;
use super::driver::{KernelArg, vmm::DevicePtr};
use super::fatal::OrFatal;
use super::kernels::{File, dim, int, long};
use super::streams::{self, Update};
use super::weight::CudaWeight;
use crate::device::Device;
use crate::ops::{HyperOps, HyperParams, HyperWeights};

/// Most residual streams of the kernels: the mixer of one row is a warp's registers.
const MAX_STREAMS: usize = 5;

/// Rows from which the sums of squares have a kernel of their own instead of being found by every block.
const MANY_ROWS: usize = 16;

/// Blocks over (rows, parts of the width).
fn grid(rows: usize, width: usize) -> [u32; 3] {
    [dim(rows), dim(width.div_ceil(256)), 1]
}

fn check_post(p: &HyperParams, mix: &CudaBuffer, y: &CudaBuffer, state: &CudaBuffer) {
    let n = p.streams;
    assert!(state.width() == n * y.width() && mix.width() == 2 * n + n * n, "hyper-connection shape");
    assert!(mix.rows() == y.rows() && state.rows() == y.rows(), "rows of another step");
}

impl CudaDevice {
    /// `x` (and, unless it is the head's, the mixing weights to `mix`) from the state: the mixer's product with the state as it is, then
    /// one kernel that divides by the RMS and does the rest.
    fn mixer(
        &self,
        p: &HyperParams,
        w: &HyperWeights<CudaWeight>,
        state: &CudaBuffer,
        mix: DevicePtr,
        x: &mut CudaBuffer,
    ) {
        let (n, rows, width, outputs) = (p.streams, state.rows(), state.width(), w.mixer.rows);
        assert!(n <= MAX_STREAMS, "{n} streams; {MAX_STREAMS} at most");
        assert_eq!(w.mixer.cols, width, "{}: streams of another width", w.mixer.name);
        assert!(!w.mixer.is_tiled(), "{}: mixers are float tensors", w.mixer.name);
        assert!(width.is_multiple_of(4), "streams of {width} elements in all");
        x.resize(rows);
        let mut scratch = self.scratch();
        let s = &mut *scratch;
        let raw = s.mix.at_least(self.context(), rows.max(16) * outputs * 4);
        product(self, &w.mixer, 1, state.start(), rows, width, raw);
        let mut sums = 0;
        let (from, all) = (state.start(), int(width));
        if rows >= MANY_ROWS {
            sums = s.squares.at_least(self.context(), rows * 4);
            self.launch(File::Hyper, "hyper_squares", [dim(rows), 1, 1], BLOCK, 0, &[&from, &all, &sums]);
        }
        let parts = x.width().div_ceil(256) + usize::from(outputs > n);
        let args =
            (w.scale.vector(), w.base.vector(), int(n), int(outputs), int(p.iterations), int(x.width()), x.start());
        let all: [&dyn KernelArg; 13] = [
            &raw, &sums, &args.0, &args.1, &args.2, &args.3, &args.4, &p.eps, &p.rms_eps, &from, &args.5, &mix, &args.6,
        ];
        self.launch(File::Hyper, "hyper_finish", [dim(rows), dim(parts), 1], BLOCK, 0, &all);
    }
}

impl HyperOps for CudaDevice {
    fn hyper_start(&self, streams: usize, x: &CudaBuffer, state: &mut CudaBuffer) {
        assert_eq!(x.width() * streams, state.width(), "streams of another width");
        state.resize(x.rows());
        let args = (x.start(), int(x.width()), int(streams), state.start());
        let grid = grid(x.rows(), x.width());
        self.launch(File::Hyper, "hyper_start", grid, BLOCK, 0, &[&args.0, &args.1, &args.2, &args.3]);
    }

    fn hyper_pre(
        &self,
        p: &HyperParams,
        w: &HyperWeights<CudaWeight>,
        state: &CudaBuffer,
        mix: &mut CudaBuffer,
        x: &mut CudaBuffer,
    ) {
        let n = p.streams;
        assert!(state.width() == n * x.width() && mix.width() == 2 * n + n * n, "hyper-connection shape");
        assert_eq!(w.mixer.rows, mix.width(), "{}: outputs", w.mixer.name);
        if streams::fits(n, x.width()) {
            return streams::finish(self, p, w, state, Some(mix), None, x);
        }
        mix.resize(state.rows());
        self.mixer(p, w, state, mix.start(), x);
    }

    fn hyper_pre_norm(
        &self,
        p: &HyperParams,
        w: &HyperWeights<CudaWeight>,
        state: &CudaBuffer,
        norm: (&CudaWeight, f32),
        mix: &mut CudaBuffer,
        x: &mut CudaBuffer,
        out: &mut CudaBuffer,
    ) {
        let n = p.streams;
        if !streams::fits(n, out.width()) {
            self.hyper_pre(p, w, state, mix, x);
            return self.rms_norm(x, norm.0, norm.1, out);
        }
        assert!(state.width() == n * out.width() && mix.width() == 2 * n + n * n, "hyper-connection shape");
        assert_eq!(w.mixer.rows, mix.width(), "{}: outputs", w.mixer.name);
        streams::finish(self, p, w, state, Some(mix), Some(norm), out);
    }

    fn hyper_head_norm(
        &self,
        p: &HyperParams,
        w: &HyperWeights<CudaWeight>,
        state: &CudaBuffer,
        norm: (&CudaWeight, f32),
        x: &mut CudaBuffer,
        out: &mut CudaBuffer,
    ) {
        if !streams::fits(p.streams, out.width()) {
            self.hyper_head(p, w, state, x);
            return self.rms_norm(x, norm.0, norm.1, out);
        }
        assert!(state.width() == p.streams * out.width() && w.mixer.rows == p.streams, "hyper-connection shape");
        streams::finish(self, p, w, state, None, Some(norm), out);
    }

    fn hyper_post_toward(
        &self,
        p: &HyperParams,
        mix: &CudaBuffer,
        y: &CudaBuffer,
        state: &mut CudaBuffer,
        next: Option<&HyperWeights<CudaWeight>>,
    ) {
        if !streams::fits(p.streams, y.width()) {
            return self.hyper_post(p, mix, y, state);
        }
        check_post(p, mix, y, state);
        streams::post(self, p, &Update { mix, y, parts: None }, state, next);
    }

    fn hyper_post_terms(
        &self,
        p: &HyperParams,
        mix: &CudaBuffer,
        (terms, shared): (&mut CudaBuffer, &CudaBuffer),
        state: &mut CudaBuffer,
        next: Option<&HyperWeights<CudaWeight>>,
    ) {
        assert!(terms.width() == shared.width() && terms.rows().is_multiple_of(state.rows().max(1)), "terms' shape");
        if streams::fits(p.streams, shared.width()) && terms.rows() <= streams::MOST_TERMS * state.rows() {
            check_post(p, mix, shared, state);
            return streams::post(self, p, &Update { mix, y: shared, parts: Some(terms) }, state, next);
        }
        super::moe::sum_terms(self, terms, state.rows());
        self.add(terms, shared);
        self.hyper_post_toward(p, mix, terms, state, next);
    }

    fn hyper_post(&self, p: &HyperParams, mix: &CudaBuffer, y: &CudaBuffer, state: &mut CudaBuffer) {
        let n = p.streams;
        check_post(p, mix, y, state);
        if streams::fits(n, y.width()) {
            return streams::post(self, p, &Update { mix, y, parts: None }, state, None);
        }
        let args = (mix.start(), y.start(), int(n), int(y.width()), state.changed());
        let grid = grid(y.rows(), y.width());
        let all: [&dyn KernelArg; 5] = [&args.0, &args.1, &args.2, &args.3, &args.4];
        self.launch(File::Hyper, "hyper_post", grid, [256, 1, 1], 0, &all);
    }

    fn hyper_head(&self, p: &HyperParams, w: &HyperWeights<CudaWeight>, state: &CudaBuffer, x: &mut CudaBuffer) {
        assert!(state.width() == p.streams * x.width() && w.mixer.rows == p.streams, "hyper-connection shape");
        if streams::fits(p.streams, x.width()) {
            return streams::finish(self, p, w, state, None, None, x);
        }
        self.mixer(p, w, state, 0, x);
    }

    fn hyper_split(&self, streams: usize, state: &CudaBuffer, rows: &[usize], out: &mut CudaBuffer) {
        assert_eq!(state.width(), streams * out.width(), "streams of another width");
        assert!(rows.iter().all(|r| *r < state.rows()), "rows {rows:?} of {}", state.rows());
        out.resize(rows.len() * streams);
        // The streams of a row lie one after the other already: runs of rows are copied as they are.
        let bytes = state.width() * 4;
        let mut done = 0;
        for run in rows.chunk_by(|a, b| a + 1 == *b) {
            let (from, to) = (state.start() + (run[0] * bytes) as u64, out.start() + (done * bytes) as u64);
            #[allow(unsafe_code, reason = "a copy on the device")]
            // SAFETY: the rows exist on both sides, and two buffers do not overlap.
            unsafe { self.stream().copy(to, from, run.len() * bytes) }.or_fatal("hyper_split");
            done += run.len();
        }
    }

    fn hyper_join(&self, streams: usize, x: &CudaBuffer, state: &mut CudaBuffer) {
        assert!(state.width() == streams * x.width() && x.rows() == state.rows() * streams, "streams of another shape");
        let n = state.rows() * state.width();
        let args = (state.changed(), x.start(), long(n));
        self.launch(File::Elementwise, "add", blocks(n), BLOCK, 0, &[&args.0, &args.1, &args.2]);
    }
}
