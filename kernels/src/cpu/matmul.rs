//! `x · wᵀ` for groups of weights that share their activations.
//!
//! Work is split into items of one *panel* (16 outputs of one weight) and one block of activation rows. The panel's weights
//! are unpacked once per item into a small tile and reused by all rows of the block; a single row takes the same path, so
//! its operations are the same whatever the batch.

#![allow(unsafe_code, reason = "items write disjoint parts of shared outputs")]

use std::cell::RefCell;

use crate::cpu::float;
use crate::cpu::lanes::N;
use crate::cpu::raw::RawRows;
use crate::cpu::{CpuBuffer, CpuDevice, CpuWeight};

/// Activation rows per item: their quantised form stays in the L2 cache while panels pass by.
const ROW_BLOCK: usize = 128;

#[derive(Default)]
struct Scratch {
    rowwise: Vec<f32>,
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
                let tile_len = w.cols.next_multiple_of(N);
                if s.tile.len() < tile_len {
                    s.tile.resize(tile_len, [0.0; N]);
                }
                s.out.resize(ROW_BLOCK, [0.0; N]);
                float::decode(device.isa, w.ty, &weight_rows[..outputs], w.cols, &mut s.rowwise, &mut s.tile);
                let result = &mut s.out[..r1 - r0];
                float::product(device.isa, &x.data()[r0 * w.cols..r1 * w.cols], w.cols, &s.tile, result);
                for (r, o) in (r0..r1).zip(result) {
                    // SAFETY: this item alone has these rows of this panel.
                    unsafe { out.part(r, first, outputs) }.copy_from_slice(&o[..outputs]);
                }
            }
        });
    });
}
