//! The CPU device: the readable reference of every operation, and fast.
//!
//! Kernels are chosen by the instruction set found at run time ([`Isa`]); each gives the same bits on all of them, because
//! integer sums are exact and every floating-point operation has one fixed place in a row's order of operations.

pub(crate) mod attend;
pub(crate) mod attention;
pub(crate) mod bank;
pub(crate) mod buffer;
pub(crate) mod bytes;
pub(crate) mod compress;
pub(crate) mod dot;
#[cfg(target_arch = "x86_64")]
pub(crate) mod dot_avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod dot_avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod dot_neon;
pub(crate) mod elementwise;
pub(crate) mod float;
pub(crate) mod formats;
pub(crate) mod hyper;
pub(crate) mod index_fp4;
pub(crate) mod indexer;
pub mod isa;
pub(crate) mod lanes;
#[cfg(target_arch = "x86_64")]
pub(crate) mod lanes_x86;
pub(crate) mod matmul;
pub(crate) mod moe;
pub(crate) mod panel;
pub mod pool;
pub(crate) mod q16;
pub(crate) mod raw;
pub(crate) mod sparse;
#[cfg(target_arch = "x86_64")]
pub(crate) mod unpack_avx512;
#[cfg(target_arch = "x86_64")]
pub(crate) mod unpack_k_avx512;
pub(crate) mod widen;

#[allow(unsafe_code, reason = "state rows are raw bank memory")]
mod state_rows;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, RwLock};

use ds4_manifests::GgmlType;
use ds4_os::SharedBytes;

use crate::device::{Attention, Device, DeviceError, Rope, TensorSource};
use crate::plan::BatchPlan;
use crate::quant;
use crate::state::{StateSpec, StateType};
use attention::SpanView;
use bank::BankView;
pub use bank::{CpuBank, CpuCheckpoint};
pub use buffer::{CpuBuffer, CpuRoom};
pub use isa::Isa;
pub use moe::CpuRouting;
use moe::ExpertScratch;
use pool::Pool;
use q16::Activations;
use raw::RawRows;
pub use sparse::CpuSelection;

/// Elements per pool item of row-wise operations: about 2 microseconds of work.
const GRAIN: usize = 8192;

/// A bound weight: shared read-only bytes, and for vectors (norms) their f32 values.
pub struct CpuWeight {
    name: String,
    ty: GgmlType,
    rows: usize,
    cols: usize,
    row_bytes: usize,
    bytes: SharedBytes,
    vector: Vec<f32>,
}

impl CpuWeight {
    /// GGUF name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Output width.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Input width.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// The f32 values of a vector.
    pub(crate) fn vector(&self) -> &[f32] {
        assert_eq!(self.rows, 1, "{}: a vector", self.name);
        &self.vector
    }

    /// Row `row` as f32.
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        quant::dequantize_row(self.ty, &self.bytes[row * self.row_bytes..(row + 1) * self.row_bytes], out);
    }

    /// Row `row` of an I32 table.
    pub(crate) fn i32_row(&self, row: u32) -> Vec<i32> {
        assert_eq!(self.ty, GgmlType::I32, "{}: an integer table", self.name);
        let at = usize::try_from(row).unwrap_or(usize::MAX).saturating_mul(self.row_bytes);
        self.bytes[at..at + self.row_bytes].as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect()
    }
}

/// A plan made ready: positions and bank addresses.
pub struct CpuStep {
    tokens: Vec<u32>,
    positions: Vec<usize>,
    wanted: Vec<usize>,
    spans: Vec<SpanView>,
    banks: Vec<BankView>,
    distinct_banks: bool,
}

impl CpuStep {
    /// Token id of each row.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Whether every span is of another bank.
    pub(crate) fn distinct_banks(&self) -> bool {
        self.distinct_banks
    }

    /// Position of each row.
    pub(crate) fn positions(&self) -> &[usize] {
        &self.positions
    }
}

/// Cosines and sines for positions from 0, `dim / 2` pairs each.
type RopeTable = Arc<Vec<[f32; 2]>>;

/// The CPU as a [`Device`].
pub struct CpuDevice {
    pool: Pool,
    isa: Isa,
    /// Quantised activations of the matmul under way.
    activations: Mutex<Activations>,
    /// Work memory of the experts under way.
    experts: Mutex<ExpertScratch>,
    /// Work memory of the hyper-connections.
    streams: Mutex<CpuBuffer>,
    /// Keyed by the bits of the base and the rotated width; grown to the farthest position seen.
    rope: RwLock<HashMap<(u32, usize), RopeTable>>,
}

impl CpuDevice {
    /// Computes on `threads` threads, the calling one included. More threads than the process may run on only get in each
    /// other's way, so `threads` is capped by [`std::thread::available_parallelism`] (affinity and cgroup quota).
    pub fn new(threads: usize) -> Self {
        Self::with_isa(threads, Isa::detect())
    }

    /// As [`CpuDevice::new`], on a given instruction set: for tests and comparisons.
    pub fn with_isa(threads: usize, isa: Isa) -> Self {
        Self {
            pool: Pool::new(threads.clamp(1, available())),
            isa,
            activations: Mutex::default(),
            experts: Mutex::default(),
            streams: Mutex::default(),
            rope: RwLock::default(),
        }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// A rotary table that covers positions below `positions`.
    fn rope_table(&self, rope: &Rope, positions: usize) -> RopeTable {
        let key = (rope.base.to_bits(), rope.dim);
        let half = rope.dim / 2;
        let known = self.rope.read().unwrap_or_else(std::sync::PoisonError::into_inner).get(&key).cloned();
        match known {
            Some(table) if table.len() >= positions * half => table,
            known => {
                let mut table = known.map(|t| (*t).clone()).unwrap_or_default();
                let have = table.len().checked_div(half).unwrap_or(0);
                let want = positions.next_power_of_two().max(256);
                elementwise::rope_table(rope.base, rope.dim, have..want, &mut table);
                let table = Arc::new(table);
                self.rope.write().unwrap_or_else(std::sync::PoisonError::into_inner).insert(key, Arc::clone(&table));
                table
            }
        }
    }

    /// Runs `f(row, out row)` for every row of `out`, in parallel when there is enough to do.
    fn for_rows(&self, out: &mut CpuBuffer, f: impl Fn(usize, &mut [f32]) + Sync) {
        let (rows, width) = (out.rows, out.width);
        let raw = RawRows::new(out.data_mut(), width);
        self.pool.run(rows, GRAIN.div_ceil(width.max(1)), &|range| {
            for r in range {
                #[allow(unsafe_code, reason = "rows are disjoint")]
                // SAFETY: the pool gives each row to one item.
                f(r, unsafe { raw.part(r, 0, width) });
            }
        });
    }
}

impl CpuDevice {
    /// Runs `f(span, bank)` for every span, in parallel. Operations that carry state along a span need one span per bank.
    pub(crate) fn for_spans(&self, step: &CpuStep, f: &(dyn Fn(&SpanView, &BankView) + Sync)) {
        assert!(step.distinct_banks, "two spans of one bank in a step of a model with recurrent state");
        self.pool.run(step.spans.len(), 1, &|range| step.spans[range].iter().for_each(|s| f(s, &step.banks[s.bank])));
    }
}

impl Default for CpuDevice {
    fn default() -> Self {
        Self::new(available())
    }
}

/// Threads that this process can really run at once.
fn available() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

impl Device for CpuDevice {
    type Buffer = CpuBuffer;
    type Weight = CpuWeight;
    type Bank = CpuBank;
    type Step = CpuStep;
    type Checkpoint = CpuCheckpoint;
    type Room = CpuRoom;

    fn describe(&self) -> String {
        format!("cpu ({}, {} threads)", self.isa.name(), self.threads())
    }

    fn bind(&self, source: &TensorSource) -> Result<CpuWeight, DeviceError> {
        let refuse = |reason: String| DeviceError::Weight { name: source.name.clone(), reason };
        if !quant::is_supported(source.ty) && source.ty != GgmlType::I32 {
            return Err(refuse(format!("type {} has no CPU kernel; convert the model to a supported type", source.ty)));
        }
        let row_bytes = u64::try_from(source.cols).ok().and_then(|n| source.ty.row_bytes(n));
        let Some(row_bytes) = row_bytes.and_then(|n| usize::try_from(n).ok()).filter(|_| source.cols > 0) else {
            let block = source.ty.block_elems();
            return Err(refuse(format!("rows of {} are not whole {} blocks of {block}", source.cols, source.ty)));
        };
        if row_bytes.checked_mul(source.rows) != Some(source.bytes.len()) {
            return Err(refuse(format!("{} bytes for {} rows of {row_bytes} bytes", source.bytes.len(), source.rows)));
        }
        let mut vector = Vec::new();
        if source.rows == 1 && source.ty != GgmlType::I32 {
            vector.resize(source.cols, 0.0);
            quant::dequantize_row(source.ty, &source.bytes, &mut vector);
        }
        Ok(CpuWeight {
            name: source.name.clone(),
            ty: source.ty,
            rows: source.rows,
            cols: source.cols,
            row_bytes,
            bytes: source.bytes.clone(),
            vector,
        })
    }

    fn buffer(&self, width: usize) -> CpuBuffer {
        CpuBuffer::new(width, None)
    }

    fn room(&self) -> CpuRoom {
        CpuRoom::default()
    }

    fn buffer_in(&self, room: &CpuRoom, width: usize) -> CpuBuffer {
        CpuBuffer::new(width, Some(room.clone()))
    }

    fn turn(&self, room: &CpuRoom) {
        room.turn();
    }

    fn bank(&self, spec: &StateSpec, context: usize) -> Result<CpuBank, DeviceError> {
        CpuBank::new(spec, context)
    }

    fn bank_commit(&self, bank: &mut CpuBank, tokens: usize) -> Result<(), DeviceError> {
        bank.commit(tokens)
    }

    fn bank_trim(&self, bank: &mut CpuBank, tokens: usize) {
        bank.trim(tokens);
    }

    fn bank_committed(&self, bank: &CpuBank) -> usize {
        bank.committed()
    }

    fn bank_checkpoint(&self, bank: &CpuBank, tokens: usize) -> Result<CpuCheckpoint, DeviceError> {
        bank.checkpoint(tokens)
    }

    fn bank_rewind(&self, bank: &mut CpuBank, checkpoint: &CpuCheckpoint) {
        bank.rewind(checkpoint);
    }

    fn bank_export(&self, bank: &CpuBank, slot: usize, rows: Range<usize>, out: &mut Vec<u8>) {
        bank.export(slot, &rows, out);
    }

    fn bank_import(&self, bank: &mut CpuBank, slot: usize, rows: Range<usize>, bytes: &[u8]) {
        bank.import(slot, &rows, bytes);
    }

    fn step(&self, plan: &BatchPlan, banks: &mut [CpuBank]) -> Result<CpuStep, DeviceError> {
        let mut step = CpuStep {
            tokens: plan.tokens.clone(),
            positions: Vec::with_capacity(plan.rows()),
            wanted: plan.wanted.clone(),
            spans: Vec::with_capacity(plan.spans.len()),
            banks: Vec::with_capacity(plan.spans.len()),
            distinct_banks: true,
        };
        for s in &plan.spans {
            assert_eq!(s.first_row, step.positions.len(), "spans cover the rows in order");
            let view = banks[s.bank].view();
            let end = s.first_pos + s.rows;
            assert!(end <= view.tokens(), "span to position {end} of a bank committed to {}", view.tokens());
            step.positions.extend(s.first_pos..end);
            let (first_pos, first_row, rows) = (s.first_pos, s.first_row, s.rows);
            step.spans.push(SpanView { bank: step.banks.len(), first_pos, first_row, rows });
            step.banks.push(view);
        }
        assert_eq!(step.positions.len(), step.tokens.len(), "spans cover the rows");
        assert!(step.wanted.iter().all(|w| *w < step.tokens.len()), "wanted rows are rows of the plan");
        // Two spans of one bank may follow each other but not write the same row.
        for (i, a) in plan.spans.iter().enumerate() {
            for b in &plan.spans[..i] {
                step.distinct_banks &= a.bank != b.bank;
                let apart = a.first_pos >= b.first_pos + b.rows || b.first_pos >= a.first_pos + a.rows;
                assert!(a.bank != b.bank || apart, "two spans write the same rows of bank {}", a.bank);
            }
        }
        Ok(step)
    }

    fn embed(&self, step: &CpuStep, table: &CpuWeight, out: &mut CpuBuffer) {
        assert_eq!(out.width, table.cols, "{}: output of another width", table.name);
        out.resize(step.tokens.len());
        self.for_rows(out, |r, out| {
            let token = usize::try_from(step.tokens[r]).unwrap_or(usize::MAX);
            assert!(token < table.rows, "token {token} in a vocabulary of {}", table.rows);
            let row = &table.bytes[token * table.row_bytes..(token + 1) * table.row_bytes];
            quant::dequantize_row(table.ty, row, out);
        });
    }

    fn rms_norm(&self, x: &CpuBuffer, weight: &CpuWeight, eps: f32, out: &mut CpuBuffer) {
        assert!(weight.rows == 1 && weight.cols == x.width && out.width == x.width, "{}: shape", weight.name);
        out.resize(x.rows);
        self.for_rows(out, |r, out| elementwise::rms_norm(self.isa, x.row(r), &weight.vector, eps, out));
    }

    fn matmul(&self, x: &CpuBuffer, group: &mut [(&CpuWeight, &mut CpuBuffer)]) {
        matmul::matmul(self, x, group);
    }

    fn rope(&self, step: &CpuStep, rope: &Rope, head_dim: usize, x: &mut CpuBuffer) {
        assert_eq!(x.rows, step.positions.len(), "rows of another step");
        assert!(rope.dim.is_multiple_of(2) && rope.dim <= head_dim && x.width.is_multiple_of(head_dim), "rope shape");
        let half = rope.dim / 2;
        let table = self.rope_table(rope, step.positions.iter().max().map_or(0, |p| p + 1));
        self.for_rows(x, |r, row| {
            let at = step.positions[r] * half;
            elementwise::rope_row(rope, head_dim, &table[at..at + half], row);
        });
    }

    fn state_write(&self, step: &CpuStep, slot: usize, x: &CpuBuffer) {
        assert_eq!(x.rows, step.positions.len(), "rows of another step");
        for s in &step.spans {
            for i in 0..s.rows {
                state_rows::write(self.isa, &step.banks[s.bank], slot, s.first_pos + i, x.row(s.first_row + i));
            }
        }
    }

    fn attention(&self, step: &CpuStep, p: &Attention, q: &CpuBuffer, out: &mut CpuBuffer) {
        assert_eq!(q.rows, step.positions.len(), "rows of another step");
        assert!(q.width == p.heads * p.head_dim && out.width == q.width, "attention shape");
        assert!(p.kv_heads > 0 && p.heads.is_multiple_of(p.kv_heads), "kv_heads divides heads");
        for b in &step.banks {
            assert_eq!(b.slot(p.k_slot).ty, b.slot(p.v_slot).ty, "keys and values of one storage type");
            for slot in [p.k_slot, p.v_slot] {
                assert_eq!(b.slot(slot).width, p.kv_heads * p.head_dim, "state rows of another width");
                assert!(
                    matches!(b.slot(slot).ty, StateType::F16 | StateType::F32),
                    "packed rows have no dense attention"
                );
            }
        }
        out.resize(q.rows);
        attention::attention(&self.pool, self.isa, &step.banks, &step.spans, p, q.data(), out.data_mut());
    }

    fn swiglu(&self, gate: &CpuBuffer, up: &CpuBuffer, out: &mut CpuBuffer) {
        assert!(gate.width == up.width && gate.rows == up.rows && out.width == gate.width, "swiglu shape");
        out.resize(gate.rows);
        self.for_rows(out, |r, out| elementwise::swiglu(self.isa, gate.row(r), up.row(r), out));
    }

    fn add(&self, x: &mut CpuBuffer, y: &CpuBuffer) {
        assert!(x.width == y.width && x.rows == y.rows, "add shape");
        self.for_rows(x, |r, x| elementwise::add(self.isa, x, y.row(r)));
    }

    fn gather_wanted(&self, step: &CpuStep, x: &CpuBuffer, out: &mut CpuBuffer) {
        assert_eq!(x.rows, step.positions.len(), "rows of another step");
        assert_eq!(x.width, out.width, "gather shape");
        out.resize(step.wanted.len());
        for (row, out) in step.wanted.iter().zip(out.data_mut().chunks_exact_mut(x.width)) {
            out.copy_from_slice(x.row(*row));
        }
    }

    fn read(&self, x: &CpuBuffer, row: usize, out: &mut Vec<f32>) {
        out.clear();
        out.extend_from_slice(x.row(row));
    }
}
