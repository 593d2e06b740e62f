//! Activations as 16-bit integers: blocks of 32 with a scale each, made once for a group of products.
//!
//! Element `i` of a block is `d * q`, `d = max|x| / 32512`, `q = round_to_nearest_even(x * (32512 / max|x|))`: an error of at
//! most 1/65024 of the block's greatest magnitude, so that products with quantised weights are as good as f32 ones. The
//! limit 32512 = 127 * 256 lets `q` be cut into two signed bytes, `q = 256 * hi + lo`, for instructions that multiply bytes
//! (VNNI, dotprod): two of those cost no more than one multiplication of 16-bit pairs, and weights stay bytes.

#![allow(unsafe_code, reason = "unchecked conversion of bounded floats")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    reason = "quantisation: ranges are given in the module's documentation"
)]

use crate::cpu::isa::{Isa, Kind, multiversion};
use crate::cpu::lanes::Lanes;

/// Elements per block.
pub(crate) const BLOCK: usize = 32;
/// Greatest magnitude of a quant.
const LIMIT: f32 = 32512.0;

/// One block's quants in 64 bytes. `Split` layout: 32 high bytes, then 32 low bytes; `Wide`: 32 × i16.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Quants(pub(crate) [i16; BLOCK]);

/// What else products need of a block.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Meta {
    /// Scale. NaN when the block held a NaN or an infinity, so that a broken activation shows instead of vanishing.
    pub(crate) d: f32,
    /// Sum of the quants of each half: at most 16 * 32512.
    pub(crate) sum: [i32; 2],
    /// The same as numbers: `d * sum`.
    pub(crate) value: [f32; 2],
    /// `d * (sum[0] + sum[1])`.
    pub(crate) total: f32,
}

impl Meta {
    #[inline(always)]
    fn new(d: f32, sum: [i32; 2]) -> Self {
        Self { d, sum, value: [d * sum[0] as f32, d * sum[1] as f32], total: d * (sum[0] + sum[1]) as f32 }
    }

    /// A block whose greatest magnitude `max` is too small to have an inverse, or not finite.
    #[inline(always)]
    fn broken_or_zero(max: f32) -> Self {
        let d = if max < 1e-30 { 0.0 } else { f32::NAN };
        Self { d, sum: [0; 2], value: [d; 2], total: d }
    }
}

/// How quants lie in [`Quants`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// High bytes, low bytes.
    Split,
    /// 16-bit integers.
    Wide,
}

impl Layout {
    /// The layout that `isa`'s kernels read.
    pub(crate) fn of(isa: Isa) -> Self {
        match isa.kind() {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => Self::Split,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => Self::Wide,
            #[cfg(target_arch = "aarch64")]
            Kind::NeonDot => Self::Split,
            Kind::Scalar => Self::Wide,
        }
    }
}

/// Quantised rows, `[rows, blocks]`.
#[derive(Default)]
pub(crate) struct Activations {
    pub(crate) quants: Vec<Quants>,
    pub(crate) meta: Vec<Meta>,
    pub(crate) blocks: usize,
}

impl Activations {
    /// Makes room for `rows` of `cols` elements.
    pub(crate) fn resize(&mut self, rows: usize, cols: usize) {
        assert!(cols.is_multiple_of(BLOCK), "activation width {cols} is not a multiple of {BLOCK}");
        self.blocks = cols / BLOCK;
        let n = rows * self.blocks;
        if self.quants.len() < n {
            self.quants.resize(n, Quants([0; BLOCK]));
            self.meta.resize(n, Meta::default());
        }
    }
}

#[inline(always)]
fn quantize_impl<L: Lanes>(split: bool, x: &[f32], quants: &mut [Quants], meta: &mut [Meta]) {
    let _ = std::marker::PhantomData::<L>;
    for ((x, out), meta) in x.as_chunks::<BLOCK>().0.iter().zip(quants).zip(meta) {
        // As integers, magnitudes order like the floats and NaN is above infinity.
        let mut max = 0u32;
        for v in x {
            max = max.max(v.to_bits() & 0x7fff_ffff);
        }
        let max = f32::from_bits(max);
        // Below 1e-30 the inverse would overflow; such a block is zero.
        if !(1e-30..f32::INFINITY).contains(&max) {
            (*meta, *out) = (Meta::broken_or_zero(max), Quants([0; BLOCK]));
            continue;
        }
        let (d, inverse) = (max / LIMIT, LIMIT / max);
        let mut q = [0i32; BLOCK];
        for (q, v) in q.iter_mut().zip(x) {
            // SAFETY: finite and at most 32512 * (1 + 2^-22) in magnitude. The checked cast would not vectorise.
            *q = unsafe { (v * inverse).round_ties_even().to_int_unchecked() };
        }
        let sum = [q[..16].iter().sum::<i32>(), q[16..].iter().sum::<i32>()];
        *meta = Meta::new(d, sum);
        if split {
            let mut bytes = [[0i8; 2]; BLOCK];
            let (hi, lo) = bytes.as_flattened_mut().split_at_mut(BLOCK);
            for i in 0..BLOCK {
                hi[i] = ((q[i] + 128) >> 8) as i8;
                lo[i] = q[i] as i8;
            }
            for (o, b) in out.0.iter_mut().zip(bytes) {
                *o = i16::from_ne_bytes([b[0] as u8, b[1] as u8]);
            }
        } else {
            for (o, q) in out.0.iter_mut().zip(q) {
                *o = q as i16;
            }
        }
    }
}

multiversion! {
    fn quantize_row = quantize_impl(split: bool, x: &[f32], quants: &mut [Quants], meta: &mut [Meta]);
}

/// [`quantize_impl`] in the split layout, by hand: the compiler packs bytes one at a time, which was 7 % of a prefill.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn quantize_avx512(x: &[f32], quants: &mut [Quants], meta: &mut [Meta]) {
    use std::arch::x86_64::*;

    use crate::cpu::lanes::array;

    let magnitude = _mm512_set1_epi32(0x7fff_ffff);
    for ((x, out), meta) in x.as_chunks::<BLOCK>().0.iter().zip(quants).zip(meta) {
        // SAFETY: two halves of 32 floats.
        let v = unsafe { [_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16))] };
        let a = _mm512_and_si512(_mm512_castps_si512(v[0]), magnitude);
        let b = _mm512_and_si512(_mm512_castps_si512(v[1]), magnitude);
        let max = f32::from_bits(_mm512_reduce_max_epu32(_mm512_max_epu32(a, b)));
        if !(1e-30..f32::INFINITY).contains(&max) {
            (*meta, *out) = (Meta::broken_or_zero(max), Quants([0; BLOCK]));
            continue;
        }
        let inverse = _mm512_set1_ps(LIMIT / max);
        // The default rounding of the conversion is to nearest even.
        let q = array!(2, a, |i| _mm512_cvtps_epi32(_mm512_mul_ps(v[i], inverse)));
        *meta = Meta::new(max / LIMIT, array!(2, 0, |i| _mm512_reduce_add_epi32(q[i])));
        #[allow(clippy::needless_range_loop, reason = "the halves of a block")]
        for i in 0..2 {
            let hi = _mm512_srai_epi32::<8>(_mm512_add_epi32(q[i], _mm512_set1_epi32(128)));
            // SAFETY: four quarters of 64 bytes, two for high bytes and two for low ones.
            unsafe {
                let to = out.0.as_mut_ptr().cast::<__m128i>();
                _mm_storeu_si128(to.add(i), _mm512_cvtepi32_epi8(hi));
                _mm_storeu_si128(to.add(2 + i), _mm512_cvtepi32_epi8(q[i]));
            }
        }
    }
}

/// Quantises one row in the layout of `isa`.
pub(crate) fn quantize(isa: Isa, x: &[f32], quants: &mut [Quants], meta: &mut [Meta]) {
    #[cfg(target_arch = "x86_64")]
    if isa.kind() == Kind::Avx512 {
        // SAFETY: an `Isa` of this kind exists only where the CPU has the features.
        unsafe { quantize_avx512(x, quants, meta) };
        return;
    }
    quantize_row(isa, Layout::of(isa) == Layout::Split, x, quants, meta);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::Random;

    fn values(layout: Layout, q: &Quants) -> [i32; BLOCK] {
        match layout {
            Layout::Wide => q.0.map(i32::from),
            Layout::Split => {
                let bytes: Vec<i8> = q.0.iter().flat_map(|v| v.to_ne_bytes()).map(u8::cast_signed).collect();
                std::array::from_fn(|i| 256 * i32::from(bytes[i]) + i32::from(bytes[BLOCK + i]))
            }
        }
    }

    #[test]
    fn every_isa_makes_the_same_quants_within_half_a_step() {
        let seed = Random::fresh_seed();
        let mut rng = Random::new(seed);
        for round in 0..200 {
            let mut x = rng.activations(BLOCK);
            x[rng.below(BLOCK)] *= 1e4f32.powf(rng.unit());
            let max = x.iter().fold(0f32, |m, v| m.max(v.abs()));
            let mut first = None;
            for isa in Isa::available() {
                let (mut q, mut m) = ([Quants([0; BLOCK])], [Meta::default()]);
                quantize(isa, &x, &mut q, &mut m);
                let v = values(Layout::of(isa), &q[0]);
                for (x, q) in x.iter().zip(v) {
                    let error = (f64::from(*x) - f64::from(m[0].d) * f64::from(q)).abs();
                    assert!(error <= f64::from(max) / 65024.0 * 1.01, "{x} is {q} of {} (DS4_SEED={seed})", m[0].d);
                }
                assert_eq!(m[0].sum, [v[..16].iter().sum::<i32>(), v[16..].iter().sum::<i32>()]);
                let got = (v, m[0].d.to_bits(), m[0].value.map(f32::to_bits), m[0].total.to_bits());
                assert_eq!(*first.get_or_insert(got), got, "{} round {round} (DS4_SEED={seed})", isa.name());
            }
        }
    }

    #[test]
    fn broken_and_vanishing_blocks() {
        for isa in Isa::available() {
            for (bad, nan) in [(f32::NAN, true), (f32::INFINITY, true), (f32::NEG_INFINITY, true), (1e-40, false)] {
                let mut x = [0.0; BLOCK];
                x[17] = bad;
                let (mut q, mut m) = ([Quants([1; BLOCK])], [Meta::default()]);
                quantize(isa, &x, &mut q, &mut m);
                assert_eq!(m[0].d.is_nan(), nan, "{bad}");
                assert_eq!(m[0].total.is_nan(), nan, "{bad}");
                assert!(nan || (m[0].d == 0.0 && values(Layout::of(isa), &q[0]) == [0; BLOCK]));
            }
        }
    }
}
