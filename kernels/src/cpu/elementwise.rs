//! Row-wise and element-wise operations: exponential, RMS norm, SwiGLU, sums, rotary embedding.

use crate::cpu::isa::multiversion;
use crate::cpu::lanes::{Lanes, N};
use crate::device::{Rope, RopeKind};

/// `e^x` per lane, within 2 ulp over the normal range; below -87.3 it is 0, above 88.3 infinite; NaN stays NaN.
///
/// `x = n ln 2 + r` with `ln 2` in two parts (Cody and Waite), then the Taylor series of `e^r` to degree 7, whose first
/// missing term is below `0.35^8 / 8! = 5e-9`.
#[inline(always)]
pub(crate) fn exp<L: Lanes>(x: L) -> L {
    /// Adding and subtracting it rounds to an integer (1.5 * 2^23).
    const ROUND: f32 = 12_582_912.0;
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    let (lo, hi) = (L::splat(-87.3), L::splat(88.3));
    // In this order a NaN passes through.
    let c = hi.min(lo.max(x));
    let n = c.fma(L::splat(std::f32::consts::LOG2_E), L::splat(ROUND)).sub(L::splat(ROUND));
    let r = n.fma(L::splat(-LN2_HI), c);
    let r = n.fma(L::splat(-LN2_LO), r);
    let mut p = L::splat(1.0 / 5040.0);
    for k in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p.fma(r, L::splat(k));
    }
    let y = p.mul(n.pow2());
    let y = L::select_gt(lo, x, L::splat(0.0), y);
    L::select_gt(x, hi, L::splat(f32::INFINITY), y)
}

/// Calls `f` with each 16 elements of a row; the last call may hold fewer, padded with zeros.
#[inline(always)]
fn padded(row: &[f32]) -> (&[[f32; N]], [f32; N], usize) {
    let (full, rest) = row.as_chunks::<N>();
    let mut tail = [0.0; N];
    tail[..rest.len()].copy_from_slice(rest);
    (full, tail, rest.len())
}

#[inline(always)]
fn inverse_rms_impl<L: Lanes>(x: &[f32], eps: f32) -> f32 {
    let (full, tail, rest) = padded(x);
    let mut sum = L::splat(0.0);
    for c in full {
        let v = L::load(c);
        sum = v.fma(v, sum);
    }
    if rest > 0 {
        let v = L::load(&tail);
        sum = v.fma(v, sum);
    }
    #[allow(clippy::cast_precision_loss, reason = "widths are far below 2^24")]
    let mean = sum.sum() / x.len() as f32;
    1.0 / (mean + eps).sqrt()
}

multiversion! {
    /// `1 / sqrt(mean(x²) + eps)`.
    pub(crate) fn inverse_rms = inverse_rms_impl(x: &[f32], eps: f32) -> f32;
}

#[inline(always)]
fn rms_norm_impl<L: Lanes>(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    let (full, _, rest) = padded(x);
    let scale = inverse_rms_impl::<L>(x, eps);
    let s = L::splat(scale);
    let (ow, _) = out.as_chunks_mut::<N>();
    for ((c, w), o) in full.iter().zip(w.as_chunks::<N>().0).zip(ow) {
        L::load(c).mul(s).mul(L::load(w)).store(o);
    }
    for i in x.len() - rest..x.len() {
        out[i] = x[i] * scale * w[i];
    }
}

multiversion! {
    /// `out = x / sqrt(mean(x²) + eps) * w` for one row.
    pub(crate) fn rms_norm = rms_norm_impl(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]);
}

#[inline(always)]
fn swiglu_impl<L: Lanes>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    #[inline(always)]
    fn one<L: Lanes>(g: &[f32; N], u: &[f32; N], o: &mut [f32; N]) {
        let g = L::load(g);
        let e = exp(L::splat(0.0).sub(g));
        g.div(L::splat(1.0).add(e)).mul(L::load(u)).store(o);
    }
    let (g, g_tail, rest) = padded(gate);
    let (u, u_tail, _) = padded(up);
    let (o, o_rest) = out.as_chunks_mut::<N>();
    for ((g, u), o) in g.iter().zip(u).zip(o) {
        one::<L>(g, u, o);
    }
    if rest > 0 {
        let mut o = [0.0; N];
        one::<L>(&g_tail, &u_tail, &mut o);
        o_rest.copy_from_slice(&o[..rest]);
    }
}

multiversion! {
    /// `out = gate / (1 + e^-gate) * up`.
    pub(crate) fn swiglu = swiglu_impl(gate: &[f32], up: &[f32], out: &mut [f32]);
}

#[inline(always)]
fn add_impl<L: Lanes>(x: &mut [f32], y: &[f32]) {
    let (xs, x_rest) = x.as_chunks_mut::<N>();
    let (ys, y_rest) = y.as_chunks::<N>();
    for (x, y) in xs.iter_mut().zip(ys) {
        L::load(x).add(L::load(y)).store(x);
    }
    for (x, y) in x_rest.iter_mut().zip(y_rest) {
        *x += *y;
    }
}

multiversion! {
    /// `x += y`.
    pub(crate) fn add = add_impl(x: &mut [f32], y: &[f32]);
}

#[inline(always)]
fn to_f16_impl<L: Lanes>(x: &[f32], out: &mut [u16]) {
    let (xs, x_tail, rest) = padded(x);
    let (os, o_rest) = out.as_chunks_mut::<N>();
    for (x, o) in xs.iter().zip(os) {
        L::load(x).store_f16(o);
    }
    if rest > 0 {
        let mut o = [0; N];
        L::load(&x_tail).store_f16(&mut o);
        o_rest.copy_from_slice(&o[..rest]);
    }
}

multiversion! {
    /// Rounds to half precision, to nearest even.
    pub(crate) fn to_f16 = to_f16_impl(x: &[f32], out: &mut [u16]);
}

/// `[cos, sin]` of `pos * base^(-2i/dim)` for `i` in `0..dim/2`, for positions `from..to`.
pub(crate) fn rope_table(base: f32, dim: usize, positions: std::ops::Range<usize>, out: &mut Vec<[f32; 2]>) {
    #[allow(clippy::cast_precision_loss, reason = "positions and widths are far below 2^52")]
    let freq: Vec<f64> = (0..dim / 2).map(|i| f64::from(base).powf(-((2 * i) as f64) / dim as f64)).collect();
    for pos in positions {
        for f in &freq {
            #[allow(clippy::cast_precision_loss, reason = "positions are far below 2^52")]
            let (sin, cos) = (pos as f64 * f).sin_cos();
            #[allow(clippy::cast_possible_truncation, reason = "rounded to the table's precision")]
            out.push([cos as f32, sin as f32]);
        }
    }
}

/// Rotates every head of one row. `table` holds the row's `dim / 2` pairs of cosine and sine.
pub(crate) fn rope_row(rope: &Rope, head_dim: usize, table: &[[f32; 2]], row: &mut [f32]) {
    let half = rope.dim / 2;
    for head in row.chunks_exact_mut(head_dim) {
        match rope.kind {
            RopeKind::Interleaved => {
                for (x, [cos, sin]) in head[..rope.dim].as_chunks_mut::<2>().0.iter_mut().zip(table) {
                    *x = [x[0] * cos - x[1] * sin, x[0] * sin + x[1] * cos];
                }
            }
            RopeKind::Split => {
                let (a, b) = head[..rope.dim].split_at_mut(half);
                for ((a, b), [cos, sin]) in a.iter_mut().zip(b).zip(table) {
                    (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Isa;

    #[inline(always)]
    fn exp_impl<L: Lanes>(x: &[f32; N], out: &mut [f32; N]) {
        exp(L::load(x)).store(out);
    }
    multiversion! { fn exp16 = exp_impl(x: &[f32; N], out: &mut [f32; N]); }

    #[allow(clippy::cast_possible_truncation, reason = "the spacing of f32 is wanted")]
    #[test]
    fn exp_is_within_two_ulp_and_equal_on_every_isa() {
        let mut worst = 0.0f64;
        let mut x = -87.25f32;
        while x < 88.2 {
            let xs: [f32; N] = std::array::from_fn(|i| x + i as f32 * 1e-4);
            let mut first: Option<[f32; N]> = None;
            for isa in Isa::available() {
                let mut y = [0.0; N];
                exp16(isa, &xs, &mut y);
                let bits = y.map(f32::to_bits);
                assert_eq!(*first.get_or_insert(y).map(f32::to_bits).as_ref(), bits, "{} at {x}", isa.name());
            }
            for (x, y) in xs.iter().zip(first.expect("the scalar version always exists")) {
                let want = f64::from(*x).exp();
                let ulp = f64::from(f32::from_bits((want as f32).to_bits() + 1)) - f64::from(want as f32);
                worst = worst.max((f64::from(y) - want).abs() / ulp);
            }
            x += 0.0037;
        }
        assert!(worst < 2.0, "{worst} ulp");
    }

    #[test]
    fn exp_at_the_edges() {
        for isa in Isa::available() {
            let mut x = [0.0; N];
            x[..6].copy_from_slice(&[0.0, -100.0, f32::NEG_INFINITY, 200.0, f32::INFINITY, f32::NAN]);
            let mut y = [0.0; N];
            exp16(isa, &x, &mut y);
            assert_eq!(y[..5], [1.0, 0.0, 0.0, f32::INFINITY, f32::INFINITY], "{}", isa.name());
            assert!(y[5].is_nan(), "{}", isa.name());
        }
    }
}
