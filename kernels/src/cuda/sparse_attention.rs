//! Launches of attention over the window and compressed rows.

use super::bank::SlotArg;
use super::buffer::CudaBuffer;
use super::dense::{BLOCK, MANY_ROWS, per_lane, rows_of};
use super::device::CudaDevice;
use super::driver::KernelArg;
use super::indexer::CudaSelection;
use super::kernels::{File, dim, int};
use super::sparse_tensor;
use super::step::CudaStep;
use super::weight::CudaWeight;
use crate::kernel_args;
use crate::ops::SparseAttention;
use crate::state::StateType;

/// Keys per piece, and heads per block (`PIECE`, `HEADS` in sparse_attention.cu).
const PIECE: usize = 40;
const HEADS: usize = 8;

/// `Sparse` in sparse.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct SparseArg {
    heads: i32,
    head_dim: i32,
    window: i32,
    ratio: i32,
    scale: f32,
    top_k: i32,
    sinks: u64,
    q: u64,
    pub(super) kv: u64,
    selected: u64,
    counts: u64,
}
kernel_args!(SparseArg);

/// See [`crate::ops::SparseOps::sparse_attention`].
pub(super) fn attend(
    d: &CudaDevice,
    step: &CudaStep,
    p: &SparseAttention,
    sinks: &CudaWeight,
    (q, kv): (&CudaBuffer, &CudaBuffer),
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
    if sparse_tensor::fits(p, &ring, compressed.as_ref()) {
        let slots = (&ring, compressed.as_ref().unwrap_or(&ring));
        return sparse_tensor::attend(d, step, p, &arg, slots, history, out);
    }
    let keys = step.deepest.min(p.window) + history;
    let pieces = if step.rows >= MANY_ROWS { 1 } else { keys.div_ceil(PIECE).max(1) };
    let partial = match pieces {
        1 => 0,
        n => {
            let len = step.rows * p.heads * n * (p.head_dim + 2) * 4;
            d.scratch().work.at_least(d.context(), len)
        }
    };
    let (e, to) = (per_lane(p.head_dim, 16), out.start());
    let grid = [dim(step.rows), dim(p.heads.div_ceil(HEADS)), dim(pieces)];
    let comp = compressed.unwrap_or(ring);
    let all: [&dyn KernelArg; 6] = [&step.arg, &arg, &ring, &comp, &partial, &to];
    d.launch(File::SparseAttention, &format!("sparse_attention_{e}"), grid, BLOCK, 0, &all);
    if pieces > 1 {
        let (grid, n) = ([dim(step.rows), dim(p.heads), 1], int(pieces));
        let all: [&dyn KernelArg; 5] = [&step.arg, &arg, &n, &partial, &to];
        d.launch(File::SparseAttention, "sparse_merge", grid, [512, 1, 1], pieces * 8, &all);
    }
}
