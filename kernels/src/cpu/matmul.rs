//! `x · wᵀ` for groups of weights that share their activations.
//!
//! Work is split into items of one *strip* (two panels, 32 outputs of one weight) and one block of activation rows. The strip's
//! weights are unpacked once per item into small tiles and reused by all rows of the block; a single row takes the same path, so
//! its operations are the same whatever the batch.

#![allow(unsafe_code, reason = "items write disjoint parts of shared outputs")]

use std::cell::RefCell;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use ds4_manifests::GgmlType;

use crate::cpu::dot::PAIR;
use crate::cpu::isa::Isa;
use crate::cpu::lanes::N;
use crate::cpu::panel::Panel;
use crate::cpu::q16::{self, Activations};
use crate::cpu::raw::RawRows;
use crate::cpu::{CpuBuffer, CpuDevice, CpuWeight};
use crate::cpu::{dot, float};

/// Activation rows per item: their quantised form stays in the L2 cache while panels pass by.
pub(crate) const ROW_BLOCK: usize = 128;

/// Rows below which quantising them in parallel is not worth a dispatch.
const PARALLEL_ROWS: usize = 8;

/// Outputs per item.
pub(crate) const STRIP: usize = PAIR;

/// Outputs per item of `w` with `rows` activation rows. Float weights with few outputs (a mixer of hyper-connections has 24) must be
/// enough items for all threads.
fn strip_of(w: &CpuWeight, rows: usize) -> usize {
    if !is_float(w.ty) || w.rows > 4 * STRIP {
        STRIP
    } else if rows < PARALLEL_ROWS {
        N / 2
    } else {
        N
    }
}

/// Makes room for `n` elements. Memory that is there keeps what it holds: clearing it each time was felt.
pub(crate) fn grow<T: Copy>(v: &mut Vec<T>, n: usize, zero: T) -> &mut [T] {
    if v.len() < n {
        v.resize(n, zero);
    }
    &mut v[..n]
}

/// Writes as many of a strip's products as `to` has room for. Whole strips are copied in registers; a call for each 128 bytes was 4 % of
/// a prefill.
pub(crate) fn put(to: &mut [f32], products: &[f32; STRIP]) {
    match to.first_chunk_mut() {
        Some(whole) => *whole = *products,
        None => to.copy_from_slice(&products[..to.len()]),
    }
}

/// A thread's unpacked panels and their products.
#[derive(Default)]
pub(crate) struct Scratch {
    panels: [Panel; 2],
    part: Vec<[f32; N]>,
    /// Products of one strip, per row.
    pub(crate) out: Vec<[f32; STRIP]>,
    /// Room for another strip's.
    pub(crate) other: Vec<[f32; STRIP]>,
}

thread_local! {
    /// One per thread: items run to their end on theirs.
    pub(crate) static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Activation rows as products take them: floats for float weights, quants for the others.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    /// `[rows, cols]`; may be empty when every weight is quantised.
    pub(crate) floats: &'a [f32],
    /// The same rows quantised; may be empty when every weight is a float type.
    pub(crate) quants: &'a Activations,
    /// Row width.
    pub(crate) cols: usize,
}

impl Inputs<'_> {
    /// Multiplies `rows` with outputs `first .. first + outputs` ([`STRIP`] at most) of `w` into `s.out`.
    pub(crate) fn strip(
        &self,
        isa: Isa,
        s: &mut Scratch,
        w: &CpuWeight,
        first: usize,
        outputs: usize,
        rows: Range<usize>,
    ) {
        let bytes = &*w.bytes;
        let mut weight_rows = [&bytes[..0]; STRIP];
        for (i, r) in weight_rows.iter_mut().enumerate().take(outputs) {
            *r = &bytes[(first + i) * w.row_bytes..(first + i + 1) * w.row_bytes];
        }
        let weight_rows = &weight_rows[..outputs];
        let out = grow(&mut s.out, rows.len(), [0.0; STRIP]);
        let at = rows.start * self.quants.blocks;
        if !is_float(w.ty) && outputs > N && rows.len() > 1 {
            for (panel, rows) in s.panels.iter_mut().zip(weight_rows.chunks(N)) {
                panel.unpack(isa, w.ty, rows, w.cols);
            }
            let (quants, meta) = (&self.quants.quants[at..], &self.quants.meta[at..]);
            dot::product_pair(isa, &s.panels, quants, meta, &mut s.part, out);
            return;
        }
        let parts = grow(&mut s.part, rows.len(), [0.0; N]);
        for (p, weight_rows) in weight_rows.chunks(N).enumerate() {
            // One row needs no second copy.
            let part =
                if let [out] = out { std::slice::from_mut(&mut out.as_chunks_mut::<N>().0[p]) } else { &mut *parts };
            if is_float(w.ty) {
                let x = &self.floats[rows.start * self.cols..rows.end * self.cols];
                float::product(isa, w.ty, weight_rows, w.cols, x, part);
            } else {
                s.panels[0].unpack(isa, w.ty, weight_rows, w.cols);
                dot::product(isa, &s.panels[0], &self.quants.quants[at..], &self.quants.meta[at..], part);
            }
            if rows.len() > 1 {
                for (out, part) in out.iter_mut().zip(&*parts) {
                    out.as_chunks_mut::<N>().0[p] = *part;
                }
            }
        }
    }
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
    let mut strips = 0;
    for (w, out) in group.iter_mut() {
        assert_eq!(w.cols, x.width(), "{}: activations of another width", w.name);
        assert_eq!(w.rows, out.width(), "{}: output of another width", w.name);
        out.resize(rows);
        strips += w.rows.div_ceil(strip_of(w, rows));
        ends.push(strips);
        targets.push((*w, RawRows::new(out.data_mut(), w.rows)));
    }
    let mut quants = device.activations.lock().unwrap_or_else(PoisonError::into_inner);
    if targets.iter().any(|(w, _)| !is_float(w.ty)) {
        quantize(device, rows, x.width(), &|r| x.row(r), &mut quants);
    }
    let inputs = Inputs { floats: x.data(), quants: &quants, cols: x.width() };
    let items = strips * rows.div_ceil(ROW_BLOCK);
    device.pool.run(items, grain(device, strips), &|range| {
        SCRATCH.with_borrow_mut(|s| {
            for item in range {
                let (block, strip) = (item / strips, item % strips);
                let g = ends.partition_point(|end| *end <= strip);
                let (w, out) = &targets[g];
                let first = (strip - if g == 0 { 0 } else { ends[g - 1] }) * strip_of(w, rows);
                let outputs = strip_of(w, rows).min(w.rows - first);
                let block = block * ROW_BLOCK..rows.min((block + 1) * ROW_BLOCK);
                inputs.strip(device.isa, s, w, first, outputs, block.clone());
                for (r, o) in block.zip(&s.out) {
                    // SAFETY: this item alone has these rows of this strip.
                    put(unsafe { out.part(r, first, outputs) }, o);
                }
            }
        });
    });
}

/// Block-diagonal product: outputs `g·r .. (g + 1)·r` of `w`, `r` its rows divided by `groups`, take the `g`-th of `groups` equal
/// parts of each row of `x`.
pub(crate) fn grouped(device: &CpuDevice, x: &CpuBuffer, w: &CpuWeight, groups: usize, out: &mut CpuBuffer) {
    let (rows, cols, rank) = (x.rows(), w.cols, w.rows / groups);
    assert!(x.width() == groups * cols && out.width() == w.rows, "{}: grouped shape", w.name);
    out.resize(rows);
    // Rows of group 0, then rows of group 1, and so on.
    let part = |i: usize| &x.row(i % rows)[i / rows * cols..(i / rows + 1) * cols];
    let mut quants = device.activations.lock().unwrap_or_else(PoisonError::into_inner);
    let mut floats = Vec::new();
    if is_float(w.ty) {
        (0..groups * rows).for_each(|i| floats.extend_from_slice(part(i)));
    } else {
        quantize(device, groups * rows, cols, &part, &mut quants);
    }
    let inputs = Inputs { floats: &floats, quants: &quants, cols };
    let strips = rank.div_ceil(STRIP);
    let per_block = groups * strips;
    let target = RawRows::new(out.data_mut(), w.rows);
    device.pool.run(per_block * rows.div_ceil(ROW_BLOCK), grain(device, per_block), &|range| {
        SCRATCH.with_borrow_mut(|s| {
            for item in range {
                let (block, g, strip) = (item / per_block, item % per_block / strips, item % strips);
                let first = g * rank + strip * STRIP;
                let outputs = STRIP.min((g + 1) * rank - first);
                let block = block * ROW_BLOCK..rows.min((block + 1) * ROW_BLOCK);
                inputs.strip(device.isa, s, w, first, outputs, g * rows + block.start..g * rows + block.end);
                for (r, o) in block.zip(&s.out) {
                    // SAFETY: this item alone has these rows of this strip.
                    put(unsafe { target.part(r, first, outputs) }, o);
                }
            }
        });
    });
}

/// Strips per claim: few enough to balance, many enough that claiming costs nothing.
pub(crate) fn grain(device: &CpuDevice, strips: usize) -> usize {
    (strips / (device.pool.threads() * 8)).clamp(1, 16)
}

/// Types that are multiplied as f32.
pub(crate) fn is_float(ty: GgmlType) -> bool {
    ty.block_elems() == 1
}

/// Quantises `rows` rows of `cols` elements.
pub(crate) fn quantize<'a>(
    device: &CpuDevice,
    rows: usize,
    cols: usize,
    row: &(dyn Fn(usize) -> &'a [f32] + Sync),
    to: &mut Activations,
) {
    to.resize(rows, cols);
    let blocks = to.blocks;
    if rows < PARALLEL_ROWS || blocks == 0 {
        for r in 0..rows {
            let at = r * blocks..(r + 1) * blocks;
            q16::quantize(device.isa, row(r), &mut to.quants[at.clone()], &mut to.meta[at]);
        }
        return;
    }
    let all: Vec<_> =
        to.quants.chunks_exact_mut(blocks).zip(to.meta.chunks_exact_mut(blocks)).take(rows).map(Mutex::new).collect();
    device.pool.run(rows, 4, &|range| {
        for r in range {
            let (quants, meta) = &mut *all[r].lock().unwrap_or_else(PoisonError::into_inner);
            q16::quantize(device.isa, row(r), quants, meta);
        }
    });
}
