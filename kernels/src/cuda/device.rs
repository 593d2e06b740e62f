//! The CUDA device.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::bank::{CudaBank, CudaCheckpoint};
use super::buffer::{CudaBuffer, Growable};
use super::driver::{Context, CudaError, Driver, KernelArg, Stream};
use super::fatal::OrFatal;
use super::host::Host;
use super::kernels::{File, Kernels};
use super::room::CudaRoom;
use super::step::{Arenas, CudaStep};
use super::weight::{self, CudaWeight};
use super::{dense, products, quantized, sample, split};
use crate::device::{Attention, Device, DeviceError, DeviceTensor, Rope, TensorSource};
use crate::ops::{RowQuery, RowSummary};
use crate::plan::BatchPlan;
use crate::state::StateSpec;
use ds4_manifests::GgmlType;

/// Memory between the kernels of one operation.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// A hyper-connection's products and sums of squares.
    pub(super) mix: Growable,
    pub(super) squares: Growable,
    /// What one operation needs between its kernels and no later one reads: scores, pieces of a softmax, split activations. One memory for
    /// all, which no kernel writes before the one before it has ended.
    pub(super) work: Growable,
    /// Where results are copied to.
    host: Host,
    /// Of the sampler's kernels.
    pub(super) sample: sample::Memory,
    /// Outputs of the experts, one for each assignment.
    pub(super) parts: Growable,
    /// Assignments by expert.
    pub(super) groups: quantized::Groups,
}

/// One CUDA device with one stream, in which everything is done in order.
#[derive(Debug)]
pub struct CudaDevice {
    kernels: Kernels,
    arenas: Arenas,
    scratch: Mutex<Scratch>,
    launches: AtomicU64,
    stream: Stream,
    context: Context,
}

impl CudaDevice {
    /// Opens device `ordinal` of the driver.
    ///
    /// # Errors
    /// There is no driver or device, it lacks virtual memory management, or the kernels do not run on it.
    pub fn open(ordinal: u32) -> Result<Self, CudaError> {
        let context = Context::new(Driver::open()?, ordinal)?;
        if !context.device().vmm {
            let text = format!("{} has no virtual memory management", context.device().name);
            return Err(CudaError::Range(text));
        }
        let stream = Stream::new(&context)?;
        let kernels = Kernels::load(&context)?;
        Ok(Self {
            kernels,
            arenas: Arenas::default(),
            scratch: Mutex::default(),
            launches: AtomicU64::new(0),
            stream,
            context,
        })
    }

    /// The context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The stream that all operations go into.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Whether launches of short steps are held back and replayed as graphs (they are unless told otherwise). Results have the
    /// same bits either way.
    pub fn replay(&self, wanted: bool) {
        self.arenas.replay(wanted);
    }

    /// Whether kernels are started while the one before them runs; see [`Stream::start_early`].
    ///
    /// # Errors
    /// What a launch that was held back failed with.
    pub fn early(&self, wanted: bool) -> Result<(), CudaError> {
        self.stream.start_early(wanted)
    }

    /// Waits for everything that was started.
    ///
    /// # Errors
    /// What one of the operations failed with.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.stream.synchronize()
    }

    pub(super) fn scratch(&self) -> MutexGuard<'_, Scratch> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Kernels launched so far. What was launched before the last one has ended when a new one runs, even before that one waits for the
    /// last; where the last one lets others in early, what was launched one earlier (`after_previous`, `let_next_in` in common.cuh).
    pub(super) fn launches(&self) -> u64 {
        self.launches.load(Ordering::Relaxed)
    }

    pub(super) fn launch(
        &self,
        file: File,
        name: &str,
        grid: [u32; 3],
        block: [u32; 3],
        shared: usize,
        args: &[&dyn KernelArg],
    ) {
        // A launch of nothing is none.
        if !grid.contains(&0) {
            self.launches.fetch_add(1, Ordering::Relaxed);
        }
        self.kernels.launch(&self.stream, file, name, grid, block, shared, args);
    }
}

impl Device for CudaDevice {
    type Buffer = CudaBuffer;
    type Weight = CudaWeight;
    type Bank = CudaBank;
    type Step = CudaStep;
    type Checkpoint = CudaCheckpoint;
    type Room = CudaRoom;

    fn describe(&self) -> String {
        let d = self.context.device();
        let (major, minor) = d.capability;
        format!("cuda ({}, sm_{major}{minor}, {} SMs)", d.name, d.multiprocessors)
    }

    fn bind(&self, source: &TensorSource) -> Result<CudaWeight, DeviceError> {
        weight::bind(self, source)
    }

    fn bind_device(&self, source: &DeviceTensor) -> Result<CudaWeight, DeviceError> {
        weight::bind_device(self, source)
    }

    fn buffer(&self, width: usize) -> CudaBuffer {
        CudaBuffer::new(&self.context, None, width)
    }

    fn room(&self) -> CudaRoom {
        CudaRoom::new(&self.context)
    }

    fn buffer_in(&self, room: &CudaRoom, width: usize) -> CudaBuffer {
        CudaBuffer::new(&self.context, Some(room), width)
    }

    fn turn(&self, room: &CudaRoom) {
        room.turn();
    }

    fn bank(&self, spec: &StateSpec, context: usize) -> Result<CudaBank, DeviceError> {
        CudaBank::new(&self.context, spec, context)
    }

    fn bank_commit(&self, bank: &mut CudaBank, tokens: usize) -> Result<(), DeviceError> {
        bank.commit(tokens)
    }

    fn bank_trim(&self, bank: &mut CudaBank, tokens: usize) {
        bank.trim(tokens);
    }

    fn bank_committed(&self, bank: &CudaBank) -> usize {
        bank.committed()
    }

    fn bank_checkpoint(&self, bank: &CudaBank, tokens: usize) -> Result<CudaCheckpoint, DeviceError> {
        bank.checkpoint(self, tokens)
    }

    fn bank_rewind(&self, bank: &mut CudaBank, checkpoint: &CudaCheckpoint) {
        bank.rewind(self, checkpoint);
    }

    fn bank_export(&self, bank: &CudaBank, slot: usize, rows: std::ops::Range<usize>, out: &mut Vec<u8>) {
        bank.export(self, slot, rows, out);
    }

    fn bank_import(&self, bank: &mut CudaBank, slot: usize, rows: std::ops::Range<usize>, bytes: &[u8]) {
        bank.import(self, slot, rows, bytes);
    }

    fn step(&self, plan: &BatchPlan, banks: &mut [CudaBank]) -> Result<CudaStep, DeviceError> {
        let made = CudaStep::new(&self.context, &self.stream, &self.arenas, plan, banks);
        made.map_err(|e| match e {
            CudaError::OutOfMemory { bytes, .. } => {
                DeviceError::OutOfMemory { what: "a step", missing: usize::try_from(bytes).unwrap_or(usize::MAX) }
            }
            other => super::fatal::fatal("a step", &other),
        })
    }

    fn embed(&self, step: &CudaStep, table: &CudaWeight, out: &mut CudaBuffer) {
        dense::embed(self, step, table, out);
    }

    fn rms_norm(&self, x: &CudaBuffer, weight: &CudaWeight, eps: f32, out: &mut CudaBuffer) {
        dense::rms_norm(self, x, weight, eps, out);
    }

    fn matmul(&self, x: &CudaBuffer, group: &mut [(&CudaWeight, &mut CudaBuffer)]) {
        for (w, out) in group.iter() {
            assert_eq!(w.cols, x.width(), "{}: activations of another width", w.name);
            assert_eq!(w.rows, out.width(), "{}: output of another width", w.name);
        }
        // Weights that have the same kernels go into one launch, wherever they are in the group.
        let kernels = |w: &CudaWeight| match (w.is_tiled(), w.ty) {
            (true, _) => 0,
            (_, GgmlType::F16) if products::fits(w) => 1,
            _ if products::fits(w) => 2,
            _ => 3,
        };
        group.sort_by_key(|(w, _)| kernels(w));
        let tiled = group.partition_point(|(w, _)| w.is_tiled());
        let (tiled, others) = group.split_at_mut(tiled);
        let dense = others.partition_point(|(w, _)| products::fits(w));
        let (dense, others) = others.split_at_mut(dense);
        let beside = !tiled.is_empty();
        let room = [
            dense.iter().map(|(w, _)| products::bytes(w.ty, x.rows(), x.width())).max().unwrap_or(0),
            if beside { split::bytes(x.rows(), x.width()) } else { 0 },
        ];
        let [pieces, acts] = self.scratch().work.pieces(&self.context, room);
        let prepared = products::prepare(self, x, dense, beside, pieces);
        if beside {
            quantized::matmul(self, x, tiled, acts);
        }
        products::matmul(self, x, dense, prepared, beside, pieces);
        others.iter_mut().for_each(|(w, out)| dense::matmul(self, x, w, 1, out));
    }

    fn rope(&self, step: &CudaStep, rope: &Rope, head_dim: usize, x: &mut CudaBuffer) {
        dense::rope(self, step, rope, head_dim, x);
    }

    fn state_write(&self, step: &CudaStep, slot: usize, x: &CudaBuffer) {
        dense::state_write(self, step, slot, x);
    }

    fn attention(&self, step: &CudaStep, p: &Attention, q: &CudaBuffer, out: &mut CudaBuffer) {
        dense::attention(self, step, p, q, out);
    }

    fn swiglu(&self, gate: &CudaBuffer, up: &CudaBuffer, out: &mut CudaBuffer) {
        dense::swiglu(self, gate, up, f32::INFINITY, out);
    }

    fn add(&self, x: &mut CudaBuffer, y: &CudaBuffer) {
        dense::add(self, x, y);
    }

    fn gather_wanted(&self, step: &CudaStep, x: &CudaBuffer, out: &mut CudaBuffer) {
        dense::gather_wanted(self, step, x, out);
    }

    fn read(&self, x: &CudaBuffer, row: usize, out: &mut Vec<f32>) {
        assert!(row < x.rows(), "row {row} of {}", x.rows());
        let len = x.width() * 4;
        let mut scratch = self.scratch();
        let bytes = scratch.host.at_least(&self.context, len);
        #[allow(unsafe_code, reason = "a copy from the device")]
        // SAFETY: the row exists.
        unsafe { self.stream.download(x.start() + (row * len) as u64, bytes) }.or_fatal("reading results");
        out.clear();
        out.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)));
    }

    fn summarise(&self, logits: &CudaBuffer, queries: &[RowQuery], out: &mut Vec<RowSummary>) {
        sample::summarise(self, logits, queries, out);
    }
}
