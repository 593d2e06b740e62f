//! `x · wᵀ` for groups of weights that share their activations.
//!
//! Work is split into items of one *panel* (16 outputs of one weight) and one block of activation rows. The panel's weights
//! are unpacked once per item into a small tile and reused by all rows of the block; a single row takes the same path, so
//! its operations are the same whatever the batch.

#![allow(unsafe_code, reason = "items write disjoint parts of shared outputs")]

use std::cell::RefCell;

use ds4_manifests::GgmlType;

use crate::cpu::lanes::N;
use crate::cpu::panel::Panel;
use crate::cpu::q16::{self, Activations};
use crate::cpu::raw::RawRows;
use crate::cpu::{CpuBuffer, CpuDevice, CpuWeight};
use crate::cpu::{dot, float};

/// Activation rows per item: their quantised form stays in the L2 cache while panels pass by.
const ROW_BLOCK: usize = 128;

/// Rows below which quantising them in parallel is not worth a dispatch.
const PARALLEL_ROWS: usize = 8;

#[derive(Default)]
struct Scratch {
    panel: Panel,
    tile: Vec<[f32; N]>,
    out: Vec<[f32; N]>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// For each `(w, out)`: `out = x · wᵀ`.
pub(crate) fn matmul(device: &CpuDevice, x: &CpuBuffer, group: &mut [(&CpuWeight, &mut CpuBuffer)]) {
    let rows = x.rows();
    if rows == 0 {
        group.iter_mut().for_each(|(_, out)| out.resize(0));
        return;
    }
    let mut targets = Vec::with_capacity(group.len());
    let mut ends = Vec::with_capacity(group.len());
    let mut panels = 0;
    for (w, out) in group.iter_mut() {
        assert_eq!(w.cols, x.width(), "{}: activations of another width", w.name);
        assert_eq!(w.rows, out.width(), "{}: output of another width", w.name);
        out.resize(rows);
        panels += w.rows.div_ceil(N);
        ends.push(panels);
        targets.push((*w, RawRows::new(out.data_mut(), w.rows)));
    }
    let mut activations = device.activations.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if targets.iter().any(|(w, _)| !is_float(w.ty)) {
        quantize(device, x, &mut activations);
    }
    let activations = &*activations;
    let blocks = rows.div_ceil(ROW_BLOCK);
    let items = panels * blocks;
    let grain = (panels / (device.pool.threads() * 8)).clamp(1, 16);
    device.pool.run(items, grain, &|range| {
        SCRATCH.with_borrow_mut(|s| {
            for item in range {
                let (block, panel) = (item / panels, item % panels);
                let g = ends.partition_point(|end| *end <= panel);
                let (w, out) = &targets[g];
                let first = (panel - if g == 0 { 0 } else { ends[g - 1] }) * N;
                let outputs = N.min(w.rows - first);
                let (r0, r1) = (block * ROW_BLOCK, rows.min((block + 1) * ROW_BLOCK));
                let bytes = &*w.bytes;
                let mut weight_rows = [&bytes[..0]; N];
                for (i, r) in weight_rows.iter_mut().enumerate().take(outputs) {
                    *r = &bytes[(first + i) * w.row_bytes..(first + i + 1) * w.row_bytes];
                }
                s.out.resize(ROW_BLOCK, [0.0; N]);
                let result = &mut s.out[..r1 - r0];
                if is_float(w.ty) {
                    let tile_len = w.cols.next_multiple_of(N);
                    if s.tile.len() < tile_len {
                        s.tile.resize(tile_len, [0.0; N]);
                    }
                    float::decode(device.isa, w.ty, &weight_rows[..outputs], w.cols, &mut s.tile);
                    float::product(device.isa, &x.data()[r0 * w.cols..r1 * w.cols], w.cols, &s.tile, result);
                } else {
                    s.panel.unpack(device.isa, w.ty, &weight_rows[..outputs], w.cols);
                    let at = r0 * activations.blocks;
                    dot::product(device.isa, &s.panel, &activations.quants[at..], &activations.meta[at..], result);
                }
                for (r, o) in (r0..r1).zip(result) {
                    // SAFETY: this item alone has these rows of this panel.
                    unsafe { out.part(r, first, outputs) }.copy_from_slice(&o[..outputs]);
                }
            }
        });
    });
}

/// Types that are multiplied as f32.
fn is_float(ty: GgmlType) -> bool {
    ty.block_elems() == 1
}

/// Quantises all rows of `x`.
fn quantize(device: &CpuDevice, x: &CpuBuffer, to: &mut Activations) {
    to.resize(x.rows(), x.width());
    let blocks = to.blocks;
    let mut rows: Vec<_> = to
        .quants
        .chunks_exact_mut(blocks)
        .zip(to.meta.chunks_exact_mut(blocks))
        .take(x.rows())
        .map(std::sync::Mutex::new)
        .collect();
    let one = |r: usize, row: &mut (&mut [q16::Quants], &mut [q16::Meta])| {
        q16::quantize(device.isa, x.row(r), row.0, row.1);
    };
    if rows.len() < PARALLEL_ROWS {
        for (r, row) in rows.iter_mut().enumerate() {
            one(r, row.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner));
        }
        return;
    }
    device.pool.run(rows.len(), 4, &|range| {
        for r in range {
            one(r, &mut rows[r].lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        }
    });
}
