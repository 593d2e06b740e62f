//! A panel: 16 outputs of a quantised weight, unpacked so that outputs lie side by side in the lanes of a register.
//!
//! Per block of 32 inputs, `q` lies in one of two layouts (see [`Layout`]): bytes in groups of four consecutive inputs per
//! output (`[8][16][4]`), or 16-bit differences from the format's offset in pairs (`[16][16][2]`). Scales and minimums are
//! one line of 16 floats per 16 or 32 inputs. A panel of a few thousand inputs stays in the L1 or L2 cache.

use ds4_manifests::GgmlType;

use crate::cpu::formats::{Format, SPAN, with_format};
use crate::cpu::isa::{Isa, multiversion};
use crate::cpu::lanes::{Lanes, N, array};
use crate::cpu::q16::{BLOCK, Layout};

/// 64 aligned bytes: 16 floats, or the bits of quants.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [f32; N]);

impl Line {
    const ZERO: Line = Line([0.0; N]);
}

/// Unpacked weights and their shape. Reused from panel to panel.
#[derive(Default)]
pub(crate) struct Panel {
    /// Quants: 8 (split) or 16 (wide) lines per block.
    pub(crate) q: Vec<Line>,
    /// `blocks * BLOCK / sub` lines.
    pub(crate) scale: Vec<Line>,
    /// As many as scales where the format has minimums.
    pub(crate) min: Vec<Line>,
    /// Blocks of 32 inputs.
    pub(crate) blocks: usize,
    /// Inputs per scale: 16 or 32.
    pub(crate) sub: usize,
    /// Whether `min` counts.
    pub(crate) has_min: bool,
    /// What bytes are counted from (split layout only; the wide one has it subtracted).
    pub(crate) offset: i32,
    staging: Staging,
}

/// Rows as decoded, before they are transposed.
struct Staging {
    q: Vec<[u8; SPAN]>,
    scale: [[f32; N]; N],
    min: [[f32; N]; N],
}

impl Default for Staging {
    fn default() -> Self {
        Self { q: vec![[0; SPAN]; N], scale: [[0.0; N]; N], min: [[0.0; N]; N] }
    }
}

impl Panel {
    /// Makes room for `blocks` of a format with scales per `sub`, in `layout`.
    pub(crate) fn shape(&mut self, layout: Layout, blocks: usize, sub: usize, has_min: bool, offset: i32) {
        let lines = match layout {
            Layout::Split => 8,
            Layout::Wide => 16,
        };
        // Two blocks are transposed at a time: one more than needed may be written.
        grow(&mut self.q, (blocks + 1) * lines);
        grow(&mut self.scale, blocks * BLOCK / sub);
        if has_min {
            grow(&mut self.min, blocks * BLOCK / sub);
        }
        (self.blocks, self.sub, self.has_min, self.offset) = (blocks, sub, has_min, offset);
    }

    /// Unpacks `rows` (1 to 16 of them, missing ones become zeros) of a quantised type.
    ///
    /// # Panics
    /// For types without an integer form.
    pub(crate) fn unpack(&mut self, isa: Isa, ty: GgmlType, rows: &[&[u8]], cols: usize) {
        #[cfg(target_arch = "x86_64")]
        if crate::cpu::unpack_avx512::unpack(isa, ty, rows, cols / BLOCK, self) {
            return;
        }
        self.unpack_staged(isa, ty, rows, cols);
    }

    /// The way that every format has: rows are decoded to bytes, then transposed.
    pub(crate) fn unpack_staged(&mut self, isa: Isa, ty: GgmlType, rows: &[&[u8]], cols: usize) {
        let wide = Layout::of(isa) == Layout::Wide;
        unpack(isa, ty, wide, rows, cols / BLOCK, self);
    }
}

fn grow(lines: &mut Vec<Line>, n: usize) {
    if lines.len() < n {
        lines.resize(n, Line::ZERO);
    }
}

#[inline(always)]
fn unpack_impl<L: Lanes>(ty: GgmlType, wide: bool, rows: &[&[u8]], blocks: usize, panel: &mut Panel) {
    let done = with_format!(ty, unpack_format::<L; F>(wide, rows, blocks, panel));
    assert!(done.is_some(), "{ty} has no integer form");
}

multiversion! {
    fn unpack = unpack_impl(ty: GgmlType, wide: bool, rows: &[&[u8]], blocks: usize, panel: &mut Panel);
}

#[inline(always)]
fn unpack_format<L: Lanes, F: Format>(wide: bool, rows: &[&[u8]], blocks: usize, panel: &mut Panel) {
    let layout = if wide { Layout::Wide } else { Layout::Split };
    panel.shape(layout, blocks, F::SUB, F::MIN, F::OFFSET);
    let Panel { q, scale, min, staging, .. } = panel;
    if rows.len() < N {
        staging.q[rows.len()..].fill([0; SPAN]);
        staging.scale[rows.len()..].fill([0.0; N]);
        staging.min[rows.len()..].fill([0.0; N]);
    }
    let zero = L::splat(0.0);
    let per_span = SPAN / BLOCK;
    for first in (0..blocks).step_by(per_span) {
        let n = per_span.min(blocks - first);
        let units = (n * BLOCK).div_ceil(F::ELEMS);
        for (i, row) in rows.iter().enumerate().take(N) {
            let src = &row[first * BLOCK / F::ELEMS * F::BYTES..];
            let subs = F::ELEMS / F::SUB;
            for (u, block) in src.chunks_exact(F::BYTES).take(units).enumerate() {
                F::decode::<L::Bytes>(
                    block,
                    &mut staging.q[i][u * F::ELEMS..],
                    &mut staging.scale[i][u * subs..],
                    &mut staging.min[i][u * subs..],
                );
            }
        }
        if wide {
            #[allow(clippy::cast_possible_truncation, reason = "OFFSET is at most 128")]
            let offset = F::OFFSET as i16;
            for b in 0..n {
                let mut m = array!(N, zero, |i| L::widen_bytes(part(&staging.q[i], b * BLOCK), offset));
                transpose_to(&mut m, &mut q[(first + b) * 16..]);
            }
        } else {
            for b in (0..n).step_by(2) {
                let mut m = array!(N, zero, |i| L::load_bytes(part(&staging.q[i], b * BLOCK)));
                transpose_to(&mut m, &mut q[(first + b) * 8..]);
            }
        }
        let subs = BLOCK / F::SUB;
        let mut m = array!(N, zero, |i| L::load(&staging.scale[i]));
        transpose_to(&mut m, &mut scale[first * subs..(first + n) * subs]);
        if F::MIN {
            let mut m = array!(N, zero, |i| L::load(&staging.min[i]));
            transpose_to(&mut m, &mut min[first * subs..(first + n) * subs]);
        }
    }
}

/// `B` bytes of a row from `at`.
#[inline(always)]
fn part<const B: usize>(row: &[u8; SPAN], at: usize) -> &[u8; B] {
    row[at..].first_chunk().expect("whole pairs of blocks in a span")
}

/// Transposes and stores as many vectors as `out` has lines.
#[inline(always)]
fn transpose_to<L: Lanes>(m: &mut [L; N], out: &mut [Line]) {
    L::transpose(m);
    for (v, line) in m.iter().zip(out) {
        v.store(&mut line.0);
    }
}
