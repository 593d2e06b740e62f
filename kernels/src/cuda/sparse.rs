//! Compressors, rotations and rounding of sparse attention; its indexer and the attention itself have modules of their own.

use std::sync::{Mutex, PoisonError};

use super::buffer::{CudaBuffer, Growable};
use super::dense::{BLOCK, blocks, matmul, rows_of};
use super::device::CudaDevice;
use super::driver::{KernelArg, Memory};
use super::fatal::OrFatal;
use super::indexer::CudaSelection;
use super::kernels::{File, dim, int, long, threads};
use super::quantized;
use super::step::CudaStep;
use super::weight::CudaWeight;
use crate::kernel_args;
use crate::ops::{Compressor, Indexer, KvNumerics, SparseAttention, SparseOps};

/// Angular frequencies in device memory, f64, and the sines and cosines of the last step's positions: a step rotates several times in
/// every layer, and f64 functions are slow on small devices.
#[derive(Debug)]
pub struct CudaRope {
    memory: Memory,
    pairs: usize,
    turns: Mutex<(u64, Growable)>,
}

/// `Compress` in compress.cu.
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

kernel_args!(CompressArg);

impl SparseOps for CudaDevice {
    type RopeTable = CudaRope;
    type Selection = CudaSelection;

    fn upload_rope(&self, frequencies: &[f64]) -> CudaRope {
        let bytes: Vec<u8> = frequencies.iter().flat_map(|f| f.to_le_bytes()).collect();
        let memory = Memory::new(self.context(), bytes.len()).or_fatal("a rotary table");
        #[allow(unsafe_code, reason = "a copy to the device")]
        // SAFETY: new memory of that size.
        unsafe { self.stream().upload(memory.start(), &bytes) }.or_fatal("a rotary table");
        CudaRope { memory, pairs: frequencies.len(), turns: Mutex::default() }
    }

    fn head_rms(&self, x: &mut CudaBuffer, head_dim: usize, eps: f32) {
        assert!(x.width().is_multiple_of(head_dim), "whole heads");
        let (at, n) = (x.start(), int(head_dim));
        let heads = x.rows() * (x.width() / head_dim);
        let block = [threads(head_dim, 256), 1, 1];
        self.launch(File::Elementwise, "head_rms", [dim(heads), 1, 1], block, 0, &[&at, &n, &eps]);
    }

    fn rope_tail(&self, step: &CudaStep, table: &CudaRope, head_dim: usize, inverse: bool, x: &mut CudaBuffer) {
        rows_of(step, x);
        assert!(x.width().is_multiple_of(head_dim) && 2 * table.pairs <= head_dim, "rotary shape");
        let mut turns = table.turns.lock().unwrap_or_else(PoisonError::into_inner);
        let (pairs, n) = (int(table.pairs), step.rows * table.pairs);
        let known = turns.0 == step.id;
        let at = turns.1.at_least(self.context(), step.rows.max(16) * table.pairs * 8);
        if !known {
            let (frequencies, total) = (table.memory.start(), int(n));
            let all: [&dyn KernelArg; 5] = [&step.arg, &frequencies, &pairs, &total, &at];
            self.launch(File::Elementwise, "rope_turns", blocks(n), BLOCK, 0, &all);
            turns.0 = step.id;
        }
        let heads = x.width() / head_dim;
        let total = n * heads;
        let args = (int(head_dim), int(heads), i32::from(inverse), x.start(), long(total));
        let all: [&dyn KernelArg; 7] = [&at, &pairs, &args.0, &args.1, &args.2, &args.3, &args.4];
        self.launch(File::Elementwise, "rope_tail", blocks(total), BLOCK, 0, &all);
    }

    fn round_kv(&self, numerics: KvNumerics, rope_dim: usize, x: &mut CudaBuffer) {
        if numerics == KvNumerics::Official {
            let (at, width, rope) = (x.start(), int(x.width()), int(rope_dim));
            let shared = x.width() * 4;
            self.launch(File::State, "round_kv", [dim(x.rows()), 1, 1], BLOCK, shared, &[&at, &width, &rope]);
        }
    }

    fn round_index(&self, numerics: KvNumerics, head_dim: usize, x: &mut CudaBuffer) {
        if numerics == KvNumerics::Official {
            assert!(head_dim.is_power_of_two(), "Hadamard over {head_dim} elements");
            let (at, width) = (x.start(), int(head_dim));
            let heads = x.rows() * (x.width() / head_dim);
            let block = [threads(head_dim, 256), 1, 1];
            self.launch(File::State, "round_index", [dim(heads), 1, 1], block, head_dim * 4, &[&at, &width]);
        }
    }

    fn compress(&self, step: &CudaStep, c: &Compressor<'_, Self>, values: &CudaBuffer, scores: &CudaBuffer) {
        let width = if c.overlap { 2 * c.dim } else { c.dim };
        assert!(values.width() == width && scores.width() == width, "compressor projections of another width");
        rows_of(step, values);
        assert!(step.distinct_banks, "two spans of one bank in a step of a model with recurrent state");
        assert!(c.ape.rows == c.ratio && c.ape.cols == width, "{}: shape", c.ape.name);
        assert_eq!(2 * c.rope.pairs, c.rope_dim, "rotary part of another width");
        if step.rows == 0 {
            return;
        }
        let p = CompressArg {
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
            frequencies: c.rope.memory.start(),
            values: values.start(),
            scores: scores.start(),
        };
        let (frontier, rows) = (step.layout().slot(c.frontier_slot), step.layout().slot(c.rows_slot));
        // As many windows as the longest span can touch; blocks beyond a span's last finished window do nothing.
        let windows = step.longest / c.ratio + 1;
        let grid = [dim(windows), dim(step.spans), 1];
        let block = [threads(c.dim, 256), 1, 1];
        self.launch(File::Compress, "compress_rows", grid, block, c.dim * 4, &[&step.arg, &p, &frontier, &rows]);
        let grid = [dim((c.ratio * width).div_ceil(256)), dim(step.spans), 1];
        self.launch(File::Compress, "compress_frontier", grid, BLOCK, 0, &[&step.arg, &p, &frontier]);
    }

    fn index_select(&self, step: &CudaStep, p: &Indexer, q: &CudaBuffer, w: &CudaBuffer, out: &mut CudaSelection) {
        super::indexer::index_select(self, step, p, q, w, out);
    }

    fn sparse_attention(
        &self,
        step: &CudaStep,
        p: &SparseAttention,
        sinks: &CudaWeight,
        q: &CudaBuffer,
        kv: &CudaBuffer,
        selection: Option<&CudaSelection>,
        out: &mut CudaBuffer,
    ) {
        super::sparse_attention::attend(self, step, p, sinks, (q, kv), selection, out);
    }

    fn grouped_matmul(&self, x: &CudaBuffer, w: &CudaWeight, groups: usize, out: &mut CudaBuffer) {
        assert!(x.width() == groups * w.cols && out.width() == w.rows, "{}: grouped shape", w.name);
        if !w.is_tiled() {
            return matmul(self, x, w, groups, out);
        }
        // A row of x is `groups` rows of one group each.
        out.resize(x.rows());
        let acts = super::split::quantize(self, &mut self.scratch().activations, w, x.start(), x.rows() * groups);
        let rows = quantized::Rows::Strided { matrices: groups, rows: x.rows() };
        quantized::product(self, &[w], &acts, rows, 1, w.rows / groups, &[out.start()]);
    }
}
