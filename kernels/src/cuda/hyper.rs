//! Launches of the hyper-connections' kernels.

use super::buffer::CudaBuffer;
use super::dense::{BLOCK, blocks, product};
use super::device::CudaDevice;
use super::driver::vmm::DevicePtr;
use super::fatal::OrFatal;
use super::kernels::{File, dim, int, threads};
use super::weight::CudaWeight;
use crate::ops::{HyperOps, HyperParams, HyperWeights};

/// Most residual streams of the kernels: the mixer of one row is a warp's registers.
const MAX_STREAMS: usize = 5;

/// Blocks over (rows, parts of the width).
fn grid(rows: usize, width: usize) -> [u32; 3] {
    [dim(rows), dim(width.div_ceil(256)), 1]
}

impl CudaDevice {
    /// Raw mixer outputs of the RMS-normalised state, `[rows, outputs]`, to `out`.
    fn mixer(&self, p: &HyperParams, w: &CudaWeight, state: &CudaBuffer, out: DevicePtr) {
        let (rows, width) = (state.rows(), state.width());
        assert_eq!(w.cols, width, "{}: streams of another width", w.name);
        let flat = self.scratch().flat.at_least(&self.context().clone(), rows * width * 4);
        let args = (state.start(), int(width));
        let block = [threads(width, 1024), 1, 1];
        self.launch(File::Hyper, "hyper_norm", [dim(rows), 1, 1], block, 0, &[&args.0, &p.rms_eps, &args.1, &flat]);
        assert!(!w.is_tiled(), "{}: mixers are float tensors", w.name);
        product(self, w, 1, flat, rows, width, out);
    }

    fn combine(&self, gates: DevicePtr, stride: usize, streams: usize, state: &CudaBuffer, x: &mut CudaBuffer) {
        x.resize(state.rows());
        let args = (int(stride), state.start(), int(streams), int(x.width()), x.start());
        let grid = grid(state.rows(), x.width());
        let all: [&dyn super::driver::KernelArg; 6] = [&gates, &args.0, &args.1, &args.2, &args.3, &args.4];
        self.launch(File::Hyper, "hyper_combine", grid, [256, 1, 1], 0, &all);
    }
}

impl HyperOps for CudaDevice {
    fn hyper_start(&self, streams: usize, x: &CudaBuffer, state: &mut CudaBuffer) {
        assert_eq!(x.width() * streams, state.width(), "streams of another width");
        state.resize(x.rows());
        let args = (x.start(), int(x.width()), int(streams), state.start());
        let grid = [dim(x.rows()), 1, 1];
        self.launch(File::Hyper, "hyper_start", grid, [256, 1, 1], 0, &[&args.0, &args.1, &args.2, &args.3]);
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
        assert!(n <= MAX_STREAMS, "{n} streams; {MAX_STREAMS} at most");
        assert!(state.width() == n * x.width() && mix.width() == 2 * n + n * n, "hyper-connection shape");
        mix.resize(state.rows());
        self.mixer(p, &w.mixer, state, mix.start());
        let args = (mix.start(), w.scale.vector(), w.base.vector(), int(n), int(p.iterations));
        let all: [&dyn super::driver::KernelArg; 6] = [&args.0, &args.1, &args.2, &args.3, &args.4, &p.eps];
        self.launch(File::Hyper, "hyper_weights", [dim(state.rows()), 1, 1], [32, 1, 1], 0, &all);
        self.combine(mix.start(), mix.width(), n, state, x);
    }

    fn hyper_post(&self, p: &HyperParams, mix: &CudaBuffer, y: &CudaBuffer, state: &mut CudaBuffer) {
        let n = p.streams;
        assert!(state.width() == n * y.width() && mix.width() == 2 * n + n * n, "hyper-connection shape");
        assert!(mix.rows() == y.rows() && state.rows() == y.rows(), "rows of another step");
        let args = (mix.start(), y.start(), int(n), int(y.width()), state.start());
        let grid = grid(y.rows(), y.width());
        let all: [&dyn super::driver::KernelArg; 5] = [&args.0, &args.1, &args.2, &args.3, &args.4];
        self.launch(File::Hyper, "hyper_post", grid, [256, 1, 1], 0, &all);
    }

    fn hyper_head(&self, p: &HyperParams, w: &HyperWeights<CudaWeight>, state: &CudaBuffer, x: &mut CudaBuffer) {
        let (n, rows) = (p.streams, state.rows());
        assert_eq!(state.width(), n * x.width(), "hyper-connection shape");
        let gates = self.scratch().gates.at_least(&self.context().clone(), rows * n * 4);
        self.mixer(p, &w.mixer, state, gates);
        let args = (w.scale.vector(), w.base.vector(), int(n), int(rows * n));
        let all: [&dyn super::driver::KernelArg; 6] = [&gates, &args.0, &args.1, &args.2, &p.eps, &args.3];
        self.launch(File::Hyper, "hyper_gates", [dim((rows * n).div_ceil(256)), 1, 1], [256, 1, 1], 0, &all);
        self.combine(gates, n, n, state, x);
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
        let args = (state.start(), x.start(), n as i64);
        self.launch(File::Elementwise, "add", blocks(n), BLOCK, 0, &[&args.0, &args.1, &args.2]);
    }
}
