//! Compressors, rotations and rounding of sparse attention; its indexer and the attention itself have modules of their own.

use std::ops::Range;

use super::buffer::CudaBuffer;
use super::dense::{BLOCK, blocks, matmul, rows_of};
use super::device::CudaDevice;
use super::driver::{KernelArg, Memory, vmm::DevicePtr};
use super::fatal::OrFatal;
use super::indexer::CudaSelection;
use super::kernels::{File, dim, int, long, threads};
use super::products;
use super::quantized::{self, SUPERBLOCK};
use super::step::CudaStep;
use super::weight::CudaWeight;
use crate::device::Device;
use crate::ops::{Compressor, Indexer, KvNumerics, Operands, SparseAttention, SparseOps};

/// Angular frequencies in device memory, f64.
#[derive(Debug)]
pub struct CudaRope {
    memory: Memory,
    pub(super) pairs: usize,
}

impl CudaRope {
    /// Address of the frequencies.
    pub(super) fn frequencies(&self) -> DevicePtr {
        self.memory.start()
    }

    /// Sines and cosines of the step's positions, `[rows, pairs]`; computed when the step asks for the first time: it rotates several
    /// times in every layer, and f64 functions are slow on small devices.
    pub(super) fn turns(&self, d: &CudaDevice, step: &CudaStep) -> DevicePtr {
        let n = step.rows * self.pairs;
        let (at, made) = step.turns(d.context(), self.frequencies(), step.rows.max(16) * self.pairs * 8);
        if !made {
            let args = (self.frequencies(), int(self.pairs), int(n));
            let all: [&dyn KernelArg; 5] = [&step.arg, &args.0, &args.1, &args.2, &at];
            d.launch(File::Elementwise, "rope_turns", blocks(n), BLOCK, 0, &all);
        }
        at
    }
}

impl SparseOps for CudaDevice {
    type RopeTable = CudaRope;
    type Selection = CudaSelection;

    fn upload_rope(&self, frequencies: &[f64]) -> CudaRope {
        let bytes: Vec<u8> = frequencies.iter().flat_map(|f| f.to_le_bytes()).collect();
        let memory = Memory::new(self.context(), bytes.len()).or_fatal("a rotary table");
        #[allow(unsafe_code, reason = "a copy to the device")]
        // SAFETY: new memory of that size.
        unsafe { self.stream().upload(memory.start(), &bytes) }.or_fatal("a rotary table");
        CudaRope { memory, pairs: frequencies.len() }
    }

    fn lend_rows(&self, x: &CudaBuffer, rows: Range<usize>, out: &mut CudaBuffer) {
        out.borrow_rows(x, rows);
    }

    fn matmul_rows(&self, x: &CudaBuffer, w: &CudaWeight, first: usize, rows: usize, out: &mut CudaBuffer) {
        if x.rows() == rows {
            return self.matmul(x, &mut [(w, out)]);
        }
        if first == 0 {
            out.resize(rows);
        }
        assert_eq!(out.rows(), rows, "parts of one step");
        let mut part = out.rows_mut(first..first + x.rows());
        self.matmul(x, &mut [(w, &mut part)]);
    }

    fn head_rms(&self, x: &mut CudaBuffer, head_dim: usize, eps: f32) {
        assert!(x.width().is_multiple_of(head_dim), "whole heads");
        let (at, n) = (x.changed(), int(head_dim));
        let heads = x.rows() * (x.width() / head_dim);
        let block = [threads(head_dim, 256), 1, 1];
        self.launch(File::Elementwise, "head_rms", [dim(heads), 1, 1], block, 0, &[&at, &n, &eps]);
    }

    fn rope_tail(&self, step: &CudaStep, table: &CudaRope, head_dim: usize, inverse: bool, x: &mut CudaBuffer) {
        rows_of(step, x);
        assert!(x.width().is_multiple_of(head_dim) && 2 * table.pairs <= head_dim, "rotary shape");
        let (at, pairs) = (table.turns(self, step), int(table.pairs));
        let heads = x.width() / head_dim;
        if inverse
            && x.width().is_multiple_of(SUPERBLOCK)
            && head_dim.is_multiple_of(8)
            && table.pairs.is_multiple_of(4)
        {
            // What is rotated back is attention's output, which goes into a product.
            let superblocks = x.width() / SUPERBLOCK;
            let total = step.rows * superblocks;
            let (to, acts) = (x.changed(), x.split_here(super::split::PLAIN));
            let args = (int(head_dim), int(superblocks), long(total));
            let all: [&dyn KernelArg; 7] = [&at, &pairs, &args.0, &args.1, &to, &args.2, &acts];
            return self.launch(File::Qkv, "unrotate_split", [dim(total.div_ceil(8)), 1, 1], BLOCK, 0, &all);
        }
        let total = step.rows * table.pairs * heads;
        let args = (int(head_dim), int(heads), i32::from(inverse), x.changed(), long(total));
        let all: [&dyn KernelArg; 7] = [&at, &pairs, &args.0, &args.1, &args.2, &args.3, &args.4];
        self.launch(File::Elementwise, "rope_tail", blocks(total), BLOCK, 0, &all);
    }

    fn round_kv(&self, numerics: KvNumerics, rope_dim: usize, x: &mut CudaBuffer) {
        if numerics == KvNumerics::Official {
            let (at, width, rope) = (x.changed(), int(x.width()), int(rope_dim));
            let shared = x.width() * 4;
            self.launch(File::State, "round_kv", [dim(x.rows()), 1, 1], BLOCK, shared, &[&at, &width, &rope]);
        }
    }

    fn round_index(&self, numerics: KvNumerics, head_dim: usize, x: &mut CudaBuffer) {
        if numerics == KvNumerics::Official {
            assert!(head_dim.is_power_of_two(), "Hadamard over {head_dim} elements");
            let (at, width) = (x.changed(), int(head_dim));
            let heads = x.rows() * (x.width() / head_dim);
            let block = [threads(head_dim, 256), 1, 1];
            self.launch(File::State, "round_index", [dim(heads), 1, 1], block, head_dim * 4, &[&at, &width]);
        }
    }

    fn prepare(
        &self,
        step: &CudaStep,
        p: &Operands<'_, Self>,
        q: &mut CudaBuffer,
        kv_raw: &CudaBuffer,
        kv: &mut CudaBuffer,
        index: Option<(&Indexer, &mut CudaBuffer, &mut CudaSelection)>,
        compressors: &[(Compressor<'_, Self>, &CudaBuffer, &CudaBuffer)],
    ) -> bool {
        let compressors: Vec<_> = compressors.iter().map(|(c, values, scores)| (c, *values, *scores)).collect();
        super::qkv::prepare(self, step, p, q, kv_raw, kv, index, &compressors)
    }

    fn selects(&self, step: &CudaStep, p: &Indexer) -> bool {
        step.deepest / p.ratio > p.top_k
    }

    fn compress_all(&self, step: &CudaStep, all: &[(Compressor<'_, Self>, &CudaBuffer, &CudaBuffer)]) {
        let all: Vec<_> = all.iter().map(|(c, values, scores)| (c, *values, *scores)).collect();
        super::compress::compress_all(self, step, &all);
    }

    fn compress(&self, step: &CudaStep, c: &Compressor<'_, Self>, values: &CudaBuffer, scores: &CudaBuffer) {
        super::compress::compress_all(self, step, &[(c, values, scores)]);
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
        if products::fits_grouped(w, groups) {
            return products::grouped(self, x, w, groups, out);
        }
        if !w.is_tiled() {
            return matmul(self, x, w, groups, out);
        }
        // A row of x is `groups` rows of one group each.
        out.resize(x.rows());
        let acts = match x.split(super::split::order(w.ty)) {
            Some(acts) => acts,
            None => {
                let rows = x.rows() * groups;
                let room = self.scratch().work.at_least(self.context(), super::split::bytes(rows, w.cols));
                super::split::quantize(self, room, w, x.start(), rows)
            }
        };
        let rows = quantized::Rows::Strided { matrices: groups, rows: x.rows() };
        quantized::product(self, &[w], &acts, rows, 1, w.rows / groups, &[out.start()]);
    }
}
