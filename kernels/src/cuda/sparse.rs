//! Launches of the sparse attention's kernels.

use std::sync::{Mutex, PoisonError};

use super::bank::SlotArg;
use super::buffer::{CudaBuffer, Growable};
use super::dense::{BLOCK, MANY_ROWS, blocks, matmul, per_lane, rows_of};
use super::device::CudaDevice;
use super::driver::{KernelArg, Memory};
use super::fatal::OrFatal;
use super::kernels::{File, dim, int, long, threads};
use super::quantized;
use super::step::CudaStep;
use super::weight::CudaWeight;
use crate::kernel_args;
use crate::ops::{Compressor, Indexer, KvNumerics, SparseAttention, SparseOps};
use crate::state::StateType;

/// Keys per piece, and heads per block (`PIECE`, `HEADS` in sparse.cu).
const PIECE: usize = 40;
const HEADS: usize = 8;
/// Indexer keys per block (index_scores in sparse.cu).
const INDEX_KEYS: usize = 64;

/// Angular frequencies in device memory, f64, and the sines and cosines of the last step's positions: a step rotates several times in
/// every layer, and f64 functions are slow on small devices.
#[derive(Debug)]
pub struct CudaRope {
    memory: Memory,
    pairs: usize,
    turns: Mutex<(u64, Growable)>,
}

/// Per row: the selected compressed rows, in device memory.
#[derive(Debug, Default)]
pub struct CudaSelection {
    top_k: usize,
    rows: usize,
    selected: Growable,
    counts: Growable,
}

impl CudaSelection {
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

/// `Compress` in sparse.cu.
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

/// `Sparse` in sparse.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct SparseArg {
    heads: i32,
    head_dim: i32,
    window: i32,
    ratio: i32,
    scale: f32,
    top_k: i32,
    sinks: u64,
    q: u64,
    kv: u64,
    selected: u64,
    counts: u64,
}
kernel_args!(CompressArg, SparseArg);

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
        self.launch(File::Sparse, "compress_rows", grid, block, c.dim * 4, &[&step.arg, &p, &frontier, &rows]);
        let grid = [dim((c.ratio * width).div_ceil(256)), dim(step.spans), 1];
        self.launch(File::Sparse, "compress_frontier", grid, BLOCK, 0, &[&step.arg, &p, &frontier]);
    }

    fn index_select(&self, step: &CudaStep, p: &Indexer, q: &CudaBuffer, w: &CudaBuffer, out: &mut CudaSelection) {
        rows_of(step, q);
        assert!(q.width() == p.heads * p.head_dim && w.width() == p.heads, "indexer shape");
        let rows = step.rows;
        (out.rows, out.top_k) = (rows, p.top_k);
        let selected = out.selected.at_least(self.context(), rows.max(16) * p.top_k * 4);
        let counts = out.counts.at_least(self.context(), rows.max(16) * 4);
        if rows == 0 {
            return;
        }
        let visible = step.deepest / p.ratio;
        let mut scores = 0;
        // Whole blocks of keys: the stride need not change with every token.
        let stride = visible.next_multiple_of(INDEX_KEYS);
        let (top_k, ratio, n) = (int(p.top_k), int(p.ratio), int(stride));
        if visible > p.top_k {
            scores = self.scratch().scores.at_least(self.context(), rows * stride * 4);
            let slot = step.layout().slot(p.rows_slot);
            let args = (int(p.heads), int(p.head_dim), q.start(), w.start());
            let all: [&dyn KernelArg; 11] =
                [&step.arg, &slot, &args.0, &args.1, &top_k, &ratio, &p.scale, &args.2, &args.3, &n, &scores];
            let name = format!("index_scores_{}", per_lane(p.head_dim, 8));
            let grid = [dim(stride / INDEX_KEYS), dim(rows), 1];
            self.launch(File::Sparse, &name, grid, BLOCK, p.heads * p.head_dim * 4, &all);
        }
        let all: [&dyn KernelArg; 7] = [&step.arg, &top_k, &ratio, &scores, &n, &selected, &counts];
        self.launch(File::Sparse, "index_top", [dim(rows), 1, 1], [512, 1, 1], 0, &all);
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
        rows_of(step, q);
        rows_of(step, kv);
        assert!(
            q.width() == p.heads * p.head_dim && out.width() == q.width() && kv.width() == p.head_dim,
            "attention shape"
        );
        assert!(step.distinct_banks, "two spans of one bank in a step of a model with a sliding window");
        assert!(selection.is_none_or(|s| s.rows == step.rows), "selection of another step");
        out.resize(step.rows);
        if step.rows == 0 {
            return;
        }
        let ring = step.layout().slot(p.ring_slot);
        let compressed = p.compressed.map(|(slot, _)| step.layout().slot(slot));
        let check = |s: &SlotArg| assert_eq!(usize::try_from(s.width), Ok(p.head_dim), "state rows of another width");
        let fp4 = [Some(p.ring_slot), p.compressed.map(|c| c.0)]
            .into_iter()
            .flatten()
            .any(|s| step.layout().kind(s).ty() == StateType::Fp4);
        assert!(!fp4, "attention over FP4 rows");
        check(&ring);
        compressed.iter().for_each(check);
        let ratio = p.compressed.map_or(0, |(_, ratio)| ratio);
        let arg = SparseArg {
            heads: int(p.heads),
            head_dim: int(p.head_dim),
            window: int(p.window),
            ratio: int(ratio),
            scale: p.scale,
            top_k: int(selection.map_or(0, |s| s.top_k)),
            sinks: sinks.vector(),
            q: q.start(),
            kv: kv.start(),
            selected: selection.map_or(0, |s| s.selected.start()),
            counts: selection.map_or(0, |s| s.counts.start()),
        };
        let visible = step.deepest.checked_div(ratio).unwrap_or(0);
        let history = selection.map_or(visible, |s| s.top_k.min(visible));
        let keys = step.deepest.min(p.window) + history;
        let pieces = if step.rows >= MANY_ROWS { 1 } else { keys.div_ceil(PIECE).max(1) };
        let partial = match pieces {
            1 => 0,
            n => {
                let len = step.rows * p.heads * n * (p.head_dim + 2) * 4;
                self.scratch().partial.at_least(self.context(), len)
            }
        };
        let (e, to) = (per_lane(p.head_dim, 16), out.start());
        let grid = [dim(step.rows), dim(p.heads.div_ceil(HEADS)), dim(pieces)];
        let comp = compressed.unwrap_or(ring);
        let all: [&dyn KernelArg; 6] = [&step.arg, &arg, &ring, &comp, &partial, &to];
        self.launch(File::Sparse, &format!("sparse_attention_{e}"), grid, BLOCK, 0, &all);
        if pieces > 1 {
            let (grid, n) = ([dim(step.rows), dim(p.heads), 1], int(pieces));
            let all: [&dyn KernelArg; 5] = [&step.arg, &arg, &n, &partial, &to];
            self.launch(File::Sparse, "sparse_merge", grid, [512, 1, 1], pieces * 8, &all);
        }
    }

    fn grouped_matmul(&self, x: &CudaBuffer, w: &CudaWeight, groups: usize, out: &mut CudaBuffer) {
        assert!(x.width() == groups * w.cols && out.width() == w.rows, "{}: grouped shape", w.name);
        if !w.is_tiled() {
            return matmul(self, x, w, groups, out);
        }
        // A row of x is `groups` rows of one group each.
        out.resize(x.rows());
        let acts = quantized::quantize(self, &mut self.scratch().activations, w, x.start(), x.rows() * groups);
        let rows = quantized::Rows::Strided { matrices: groups, rows: x.rows() };
        quantized::product(self, &[w], &acts, rows, 1, w.rows / groups, &[out.start()]);
    }
}
