//! Launches of the dense core's kernels.

use super::buffer::CudaBuffer;
use super::device::CudaDevice;
use super::driver::{KernelArg, vmm::DevicePtr};
use super::kernels::{File, dim, int, long, threads};
use super::quantized::SUPERBLOCK;
use super::split::{self, ActsArg};
use super::step::CudaStep;
use super::weight::CudaWeight;
use crate::device::{Attention, Rope, RopeKind};
use crate::state::StateType;

/// Outputs and rows per block of the exact product (`WARPS`, `ROWS` in matmul.cu).
const OUTPUTS: usize = 4;
const ROWS: usize = 4;
/// Keys per piece of dense attention (`PIECE` in attention.cu) and heads per block.
const PIECE: usize = 256;
const HEADS: usize = 4;
/// Rows of a step from which one block does all pieces of a query: enough blocks without splitting.
pub(super) const MANY_ROWS: usize = 64;
/// Widest row that a block norms with eight columns a thread.
const MOST_NORM: usize = 8192;

/// Blocks of 256 threads for `n` elements.
pub(super) fn blocks(n: usize) -> [u32; 3] {
    [dim(n.div_ceil(256)), 1, 1]
}

pub(super) const BLOCK: [u32; 3] = [256, 1, 1];

pub(super) fn rows_of(step: &CudaStep, x: &CudaBuffer) {
    assert_eq!(x.rows(), step.rows, "rows of another step");
}

pub(super) fn embed(d: &CudaDevice, step: &CudaStep, table: &CudaWeight, out: &mut CudaBuffer) {
    assert_eq!(out.width(), table.cols, "{}: output of another width", table.name);
    let token = step.top_token;
    assert!(usize::try_from(token).is_ok_and(|t| t < table.rows), "token {token} in a vocabulary of {}", table.rows);
    out.resize(step.rows);
    if table.is_tiled() {
        let args = (table.tiles(), int(table.cols), out.start());
        let name = format!("embed_tiled_{}", table.ty);
        let all: [&dyn KernelArg; 4] = [&step.arg, &args.0, &args.1, &args.2];
        return d.launch(File::Quantized, &name, [dim(step.rows), 1, 1], BLOCK, 0, &all);
    }
    let name = format!("embed_{}", table.ty);
    let args = (table.start(), long(table.row_bytes), int(table.cols), out.start());
    d.launch(File::Matmul, &name, [dim(step.rows), 1, 1], BLOCK, 0, &[&step.arg, &args.0, &args.1, &args.2, &args.3]);
}

pub(super) fn rms_norm(d: &CudaDevice, x: &CudaBuffer, weight: &CudaWeight, eps: f32, out: &mut CudaBuffer) {
    assert!(weight.rows == 1 && weight.cols == x.width() && out.width() == x.width(), "{}: shape", weight.name);
    out.resize(x.rows());
    let args = (x.start(), weight.vector(), int(x.width()), out.start());
    let grid = [dim(x.rows()), 1, 1];
    if x.width().is_multiple_of(8) && x.width() <= MOST_NORM {
        // Products that follow find the rows split.
        let acts = if x.width().is_multiple_of(SUPERBLOCK) { out.split_here(split::PLAIN) } else { ActsArg::NONE };
        let block = [threads(x.width() / 8, 1024), 1, 1];
        let all: [&dyn KernelArg; 6] = [&args.0, &args.1, &eps, &args.2, &args.3, &acts];
        return d.launch(File::Elementwise, "rms_norm_8", grid, block, 0, &all);
    }
    let four = x.width().is_multiple_of(4);
    let (name, block) = if four { ("rms_norm_4", 256) } else { ("rms_norm", threads(x.width(), 1024)) };
    d.launch(File::Elementwise, name, grid, [block, 1, 1], 0, &[&args.0, &args.1, &eps, &args.2, &args.3]);
}

/// `out = x · wᵀ`, block-diagonal in `groups`, for weights that are not tiled.
pub(super) fn matmul(d: &CudaDevice, x: &CudaBuffer, w: &CudaWeight, groups: usize, out: &mut CudaBuffer) {
    out.resize(x.rows());
    product(d, w, groups, x.start(), x.rows(), x.width(), out.start());
}

/// As [`matmul`], from and to addresses: `rows` rows, `stride` floats apart.
pub(super) fn product(
    d: &CudaDevice,
    w: &CudaWeight,
    groups: usize,
    from: DevicePtr,
    rows: usize,
    stride: usize,
    to: DevicePtr,
) {
    let rank = w.rows / groups;
    // Whole 16-byte loads of weights and activations.
    let float = w.ty.block_elems() == 1 && w.cols.is_multiple_of(8) && stride.is_multiple_of(8);
    // Several outputs a block read the activations once; few rows need the blocks instead.
    let outs = if rows > 32 && rank.is_multiple_of(4) { 4 } else { 1 };
    let at_once = if float && rows == 1 { 1 } else { ROWS };
    let (name, per_block, block) = if float {
        (format!("dense_{}_{outs}_{at_once}", w.ty), outs, [32, 8, 1])
    } else {
        (format!("matmul_{}", w.ty), OUTPUTS, [32, dim(OUTPUTS), 1])
    };
    let grid = [dim(w.rows.div_ceil(per_block)), dim(rows.div_ceil(at_once)), 1];
    let (start, row_bytes, cols, outputs) = (w.start(), long(w.row_bytes), int(w.cols), int(w.rows));
    let (rank, stride, rows) = (int(rank), int(stride), int(rows));
    let all: [&dyn KernelArg; 9] = [&start, &row_bytes, &cols, &outputs, &rank, &from, &stride, &rows, &to];
    d.launch(File::Matmul, &name, grid, block, 0, &all);
}

pub(super) fn rope(d: &CudaDevice, step: &CudaStep, rope: &Rope, head_dim: usize, x: &mut CudaBuffer) {
    rows_of(step, x);
    assert!(rope.dim.is_multiple_of(2) && rope.dim <= head_dim && x.width().is_multiple_of(head_dim), "rope shape");
    let split = i32::from(rope.kind == RopeKind::Split);
    let (width, base, head, heads, at) =
        (int(rope.dim), f64::from(rope.base), int(head_dim), int(x.width() / head_dim), x.changed());
    let grid = [dim(step.rows), 1, 1];
    let args: [&dyn KernelArg; 7] = [&step.arg, &split, &width, &base, &head, &heads, &at];
    d.launch(File::Elementwise, "rope", grid, BLOCK, rope.dim / 2 * 8, &args);
}

pub(super) fn state_write(d: &CudaDevice, step: &CudaStep, slot: usize, x: &CudaBuffer) {
    rows_of(step, x);
    if step.rows == 0 {
        return;
    }
    let slot = step.layout().slot(slot);
    assert_eq!(usize::try_from(slot.width), Ok(x.width()), "state row of another width");
    let from = x.start();
    d.launch(File::State, "state_write", [dim(step.rows), 1, 1], BLOCK, 0, &[&step.arg, &slot, &from]);
}

/// The number after which kernels for heads of `head_dim` elements are named: elements per lane, a power of two.
pub(super) fn per_lane(head_dim: usize, most: usize) -> usize {
    let e = head_dim.div_ceil(32).next_power_of_two();
    assert!(e <= most, "heads of {head_dim} elements; {} at most", 32 * most);
    e
}

pub(super) fn attention(d: &CudaDevice, step: &CudaStep, p: &Attention, q: &CudaBuffer, out: &mut CudaBuffer) {
    rows_of(step, q);
    assert!(q.width() == p.heads * p.head_dim && out.width() == q.width(), "attention shape");
    assert!(p.kv_heads > 0 && p.heads.is_multiple_of(p.kv_heads), "kv_heads divides heads");
    out.resize(q.rows());
    if step.rows == 0 {
        return;
    }
    let layout = step.layout();
    let (k, v) = (layout.slot(p.k_slot), layout.slot(p.v_slot));
    for slot in [k, v] {
        assert_eq!(usize::try_from(slot.width), Ok(p.kv_heads * p.head_dim), "state rows of another width");
        assert_eq!(slot.ty, k.ty, "keys and values of one storage type");
    }
    let ty = match layout.kind(p.k_slot).ty() {
        StateType::F16 => "f16",
        StateType::F32 => "f32",
        other => panic!("packed rows ({other:?}) have no dense attention"),
    };
    let e = per_lane(p.head_dim, 8);
    let pieces = if step.rows >= MANY_ROWS { 1 } else { step.deepest.div_ceil(PIECE) };
    let mut scratch = d.scratch();
    let partial = match pieces {
        1 => 0,
        n => scratch.work.at_least(d.context(), step.rows * p.heads * n * (p.head_dim + 2) * 4),
    };
    let (heads, per_kv, head_dim) = (int(p.heads), int(p.heads / p.kv_heads), int(p.head_dim));
    let (from, to) = (q.start(), out.start());
    d.launch(
        File::Attention,
        &format!("attention_{ty}_{e}"),
        [dim(step.rows), dim(p.heads.div_ceil(HEADS)), dim(pieces)],
        [32, dim(HEADS), 1],
        0,
        &[&step.arg, &k, &v, &heads, &per_kv, &head_dim, &p.scale, &from, &partial, &to],
    );
    if pieces > 1 {
        let (name, n) = (format!("attention_merge_{e}"), int(pieces));
        let grid = [dim(step.rows), dim(p.heads), 1];
        d.launch(File::Attention, &name, grid, [32, 1, 1], 0, &[&step.arg, &heads, &head_dim, &n, &partial, &to]);
    }
}

pub(super) fn swiglu(d: &CudaDevice, gate: &CudaBuffer, up: &CudaBuffer, clamp: f32, out: &mut CudaBuffer) {
    assert!(gate.width() == up.width() && gate.rows() == up.rows() && out.width() == gate.width(), "swiglu shape");
    out.resize(gate.rows());
    let n = gate.rows() * gate.width();
    let args = (gate.start(), up.start(), out.start(), long(n));
    d.launch(File::Elementwise, "swiglu", blocks(n), BLOCK, 0, &[&args.0, &args.1, &clamp, &args.2, &args.3]);
}

pub(super) fn add(d: &CudaDevice, x: &mut CudaBuffer, y: &CudaBuffer) {
    assert!(x.width() == y.width() && x.rows() == y.rows(), "add shape");
    let n = x.rows() * x.width();
    let args = (x.changed(), y.start(), long(n));
    d.launch(File::Elementwise, "add", blocks(n), BLOCK, 0, &[&args.0, &args.1, &args.2]);
}

pub(super) fn gather_wanted(d: &CudaDevice, step: &CudaStep, x: &CudaBuffer, out: &mut CudaBuffer) {
    rows_of(step, x);
    assert_eq!(x.width(), out.width(), "gather shape");
    out.resize(step.wanted);
    let args = (x.start(), int(x.width()), out.start());
    let grid = [dim(step.wanted), dim(x.width().div_ceil(256)), 1];
    d.launch(File::Elementwise, "gather_wanted", grid, BLOCK, 0, &[&step.arg, &args.0, &args.1, &args.2]);
}
