//! The op set: what model code is written against.
//!
//! Operations are coarse and fusable, take whole batches of rows, and never read results back to the host
//! (only [`Device::read`] and [`Device::summarise`] do). The CPU implementation is the reference that every other device is held against.
//!
//! **Row invariance.** On one device, the result of a row does not depend on which other rows are in the batch or how a
//! prompt was cut into chunks: every op performs the same floating-point operations in the same order for a row,
//! whatever the batch. Batched, chunked and lone runs therefore agree bit for bit, and the tests require it.

use std::ops::Range;
use std::sync::Arc;

use ds4_manifests::GgmlType;
use ds4_os::SharedBytes;

use crate::ops::{RowQuery, RowSummary, summarise_row};
use crate::plan::BatchPlan;
use crate::state::StateSpec;

/// Errors of device operations. Shapes are programming errors and panic; these can happen in operation.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// {what}: out of memory: {missing} bytes could not be committed
    #[error("{what}: out of memory: {missing} bytes could not be committed; lower --ctx or --max-batch")]
    OutOfMemory {
        /// What was being allocated.
        what: &'static str,
        /// Bytes asked for.
        missing: usize,
    },
    /// A weight that this device cannot compute with.
    #[error("tensor {name}: {reason}")]
    Weight {
        /// Tensor name.
        name: String,
        /// Why it was refused.
        reason: String,
    },
}

/// A tensor as the manifest describes it, with its bytes.
#[derive(Clone)]
pub struct TensorSource {
    /// GGUF name, for errors.
    pub name: String,
    /// Element type.
    pub ty: GgmlType,
    /// Input width (contiguous dimension).
    pub cols: usize,
    /// Output width; 1 for vectors.
    pub rows: usize,
    /// `rows * row_bytes(cols)` bytes of read-only shared memory.
    pub bytes: SharedBytes,
}

/// A tensor whose bytes lie in a device's memory already, mapped into this process for reading.
#[derive(Clone)]
pub struct DeviceTensor {
    /// GGUF name, for errors.
    pub name: String,
    /// Element type.
    pub ty: GgmlType,
    /// Input width (contiguous dimension).
    pub cols: usize,
    /// Output width; 1 for vectors.
    pub rows: usize,
    /// Address of its first byte, for the device.
    pub address: u64,
    /// Bytes there.
    pub len: u64,
    /// Whether whoever put it there arranged it in the device's tiles, where its type and shape have them.
    pub tiled: bool,
    /// Keeps the mapping.
    pub keep: Arc<dyn Send + Sync>,
}

/// How RoPE pairs the elements of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeKind {
    /// Pairs `(2i, 2i+1)`: what llama-architecture GGUFs use (their q/k rows are permuted for it).
    Interleaved,
    /// Pairs `(i, i + dim/2)`.
    Split,
}

/// Rotary embedding parameters.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// Pairing.
    pub kind: RopeKind,
    /// Rotated elements per head, even.
    pub dim: usize,
    /// Frequency base (theta).
    pub base: f32,
}

/// Grouped-query attention over append-only K and V rows of f16 or f32 with a causal mask.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Slot of the keys: rows of `kv_heads * head_dim`.
    pub k_slot: usize,
    /// Slot of the values: rows of `kv_heads * head_dim`.
    pub v_slot: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Score scale, usually `1/sqrt(head_dim)`.
    pub scale: f32,
}

/// A device that runs models. Buffers are row-major f32 activations `[rows, width]`.
pub trait Device: Send + Sync + 'static {
    /// f32 activations `[rows, width]`, growable in rows.
    type Buffer: Send;
    /// One bound read-only tensor.
    type Weight: Send + Sync;
    /// One sequence's state memory: address space for the whole context, pages committed as rows arrive.
    type Bank: Send;
    /// A plan made ready for the device: positions, bank addresses, lengths.
    type Step: Send;
    /// A copy, in the device's own memory, of what a bank cannot have back by forgetting rows: rings and fixed blocks.
    type Checkpoint: Send;
    /// Memory in which buffers take turns.
    type Room: Send;

    /// Human name, e.g. `cpu (avx512-vnni, 2 threads)`.
    fn describe(&self) -> String;

    /// Binds a weight; refuses types it cannot compute with.
    fn bind(&self, source: &TensorSource) -> Result<Self::Weight, DeviceError>;

    /// Binds a weight that lies in this device's memory, without copying it; refuses what [`Device::bind`] does, and everything
    /// when the device reads no such memory.
    ///
    /// # Errors
    /// [`DeviceError`].
    fn bind_device(&self, source: &DeviceTensor) -> Result<Self::Weight, DeviceError> {
        let reason = format!("it lies in the memory of a device, which {} does not read", self.describe());
        Err(DeviceError::Weight { name: source.name.clone(), reason })
    }

    /// A buffer of `width` columns with no rows yet.
    fn buffer(&self, width: usize) -> Self::Buffer;

    /// A room without buffers.
    fn room(&self) -> Self::Room;

    /// As [`Device::buffer`], in memory that it shares with other buffers of `room`; see [`Device::turn`].
    fn buffer_in(&self, room: &Self::Room, width: usize) -> Self::Buffer;

    /// Begins a turn of `room`: the content of its buffers, and of rows that were lent of them, is lost. Buffers that get rows in the same
    /// turn lie beside each other, those of different turns may lie in the same memory.
    fn turn(&self, room: &Self::Room);

    /// Reserves address space for `context` tokens of `spec`; commits nothing.
    fn bank(&self, spec: &StateSpec, context: usize) -> Result<Self::Bank, DeviceError>;

    /// Commits pages so that `tokens` rows exist.
    fn bank_commit(&self, bank: &mut Self::Bank, tokens: usize) -> Result<(), DeviceError>;

    /// Forgets rows from `tokens` on and gives their whole pages back.
    fn bank_trim(&self, bank: &mut Self::Bank, tokens: usize);

    /// Bytes committed now.
    fn bank_committed(&self, bank: &Self::Bank) -> usize;

    /// Copies the rings and fixed blocks of `bank` as they are after `tokens` tokens, which must be all that were computed in
    /// it. The copy takes [`StateSpec::checkpoint_bytes`] of `tokens`, and is good for [`Device::bank_rewind`] of this bank as long
    /// as its first `tokens` tokens stay the same.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`]; the bank is as it was.
    fn bank_checkpoint(&self, bank: &Self::Bank, tokens: usize) -> Result<Self::Checkpoint, DeviceError>;

    /// Takes `bank` back to where `checkpoint` was taken: later rows are forgotten as [`Device::bank_trim`] does, rings and fixed
    /// blocks are as they were. What is computed from there on has the same bits as after the first time.
    ///
    /// # Panics
    /// When the bank has been trimmed below the checkpoint since: rows that it counts on are gone.
    fn bank_rewind(&self, bank: &mut Self::Bank, checkpoint: &Self::Checkpoint);

    /// Appends storage rows `rows` of `slot` to `out`, in the bytes that [`StateType`](crate::state::StateType) lays down, bit for
    /// bit. A row of a ring lies at its position modulo the ring's length; a fixed block is its slot's row 0.
    ///
    /// # Panics
    /// When rows are asked for that the committed tokens do not have.
    fn bank_export(&self, bank: &Self::Bank, slot: usize, rows: Range<usize>, out: &mut Vec<u8>);

    /// Overwrites storage rows `rows` of `slot` with what [`Device::bank_export`] gave.
    ///
    /// # Panics
    /// When the rows do not exist in the bank or `bytes` has not their size.
    fn bank_import(&self, bank: &mut Self::Bank, slot: usize, rows: Range<usize>, bytes: &[u8]);

    /// Prepares `plan` for this device. Banks must be committed up to the end of every span.
    fn step(&self, plan: &BatchPlan, banks: &mut [Self::Bank]) -> Result<Self::Step, DeviceError>;

    /// `out[row] = dequantised table[token of row]`; resizes `out` to the step's rows.
    fn embed(&self, step: &Self::Step, table: &Self::Weight, out: &mut Self::Buffer);

    /// `out = x / sqrt(mean(x²) + eps) * weight`, per row.
    fn rms_norm(&self, x: &Self::Buffer, weight: &Self::Weight, eps: f32, out: &mut Self::Buffer);

    /// For each `(w, out)`: `out = x · wᵀ`. The activations are prepared (quantised) once for the whole group.
    fn matmul(&self, x: &Self::Buffer, group: &mut [(&Self::Weight, &mut Self::Buffer)]);

    /// Rotates every head of `x` (`[rows, heads * head_dim]`) in place by its row's position.
    fn rope(&self, step: &Self::Step, rope: &Rope, head_dim: usize, x: &mut Self::Buffer);

    /// Writes row `r` of `x` as the state row of `slot` at the row's position in the row's bank.
    fn state_write(&self, step: &Self::Step, slot: usize, x: &Self::Buffer);

    /// Causal attention of `q` over the state rows written so far (this step's included).
    fn attention(&self, step: &Self::Step, p: &Attention, q: &Self::Buffer, out: &mut Self::Buffer);

    /// `out = silu(gate) * up`.
    fn swiglu(&self, gate: &Self::Buffer, up: &Self::Buffer, out: &mut Self::Buffer);

    /// `x += y`.
    fn add(&self, x: &mut Self::Buffer, y: &Self::Buffer);

    /// Gathers the step's wanted rows of `x`.
    fn gather_wanted(&self, step: &Self::Step, x: &Self::Buffer, out: &mut Self::Buffer);

    /// Copies row `row` to the host.
    fn read(&self, x: &Self::Buffer, row: usize, out: &mut Vec<f32>);

    /// Answers queries of rows of logits, in their order, and waits for the answers: what a sampler needs of a row is a few bytes of it.
    fn summarise(&self, logits: &Self::Buffer, queries: &[RowQuery], out: &mut Vec<RowSummary>) {
        let mut row = Vec::new();
        out.clear();
        out.extend(queries.iter().map(|q| {
            self.read(logits, q.row, &mut row);
            summarise_row(&mut row, q)
        }));
    }
}
