//! Indexer scores between FP4 queries and FP4 rows, in integers.
//!
//! Both sides are E2M1 codes times a power of two per 32 elements. Twice an E2M1 value is an integer of at most 12, so the product
//! of two blocks is an exact integer sum times two powers of two. Per head and row, over blocks in order:
//!
//! ```text
//! i = sum of (2 q) * (2 k)                      exact
//! s = fma(f32(i), (scale_q / 4) * scale_k, s)
//! ```
//!
//! then `total = fma(w, max(s, 0), total)` over heads in order. All versions compute exactly that. Within a block the order of
//! elements is free: of each eight, the even ones come first, as the nibbles of a row's bytes fall apart.

#![allow(unsafe_code, reason = "std::arch intrinsics")]
#![allow(clippy::needless_range_loop, reason = "indices name registers and heads")]

use crate::cpu::isa::{Isa, multiversion};
use crate::cpu::lanes::{Lanes, N};
use crate::math::lowp::{FP4_BLOCK, pow2_ceil};

/// Twice the E2M1 values, counted from 12 so that they are unsigned.
const DOUBLED: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];
const OFFSET: i32 = 12;

/// Whether heads of `dim` elements can be scored here.
pub(crate) fn fits(dim: usize) -> bool {
    dim.is_multiple_of(FP4_BLOCK)
}

/// One query's heads, `[heads, blocks]`.
#[derive(Default)]
pub(crate) struct Query {
    /// Doubled values, in groups of four as the keys have them.
    codes: Vec<[i8; FP4_BLOCK]>,
    /// A quarter of the block's scale.
    scale: Vec<f32>,
    /// [`OFFSET`] times the sum of the codes.
    sum: Vec<i32>,
}

impl Query {
    /// Takes heads that went through the FP4 round trip.
    pub(crate) fn set(&mut self, isa: Isa, heads: &[f32]) {
        let blocks = heads.as_chunks::<FP4_BLOCK>().0;
        self.codes.resize(blocks.len(), [0; FP4_BLOCK]);
        self.scale.resize(blocks.len(), 0.0);
        self.sum.resize(blocks.len(), 0);
        codes(isa, blocks, &mut self.codes, &mut self.scale, &mut self.sum);
    }
}

#[inline(always)]
fn codes_impl<L: Lanes>(
    blocks: &[[f32; FP4_BLOCK]],
    codes: &mut [[i8; FP4_BLOCK]],
    scales: &mut [f32],
    sums: &mut [i32],
) {
    let _ = std::marker::PhantomData::<L>;
    for (((block, codes), scale), sum) in blocks.iter().zip(codes).zip(scales).zip(sums) {
        // As integers, magnitudes order like the floats.
        let mut bits = 0u32;
        for v in block {
            bits = bits.max(v.to_bits() & 0x7fff_ffff);
        }
        // The smallest power of two that fits the largest value fits all: the round trip's, or a smaller one.
        let unit = pow2_ceil((f32::from_bits(bits) / 6.0).max(f32::MIN_POSITIVE));
        let mut whole = [0i32; FP4_BLOCK];
        for (w, v) in whole.iter_mut().zip(block) {
            #[allow(clippy::cast_possible_truncation, reason = "a whole number of at most 12")]
            let n = (v / unit * 2.0) as i32;
            *w = n;
        }
        for (i, w) in whole.iter().enumerate() {
            #[allow(clippy::cast_possible_truncation, reason = "at most 12")]
            let n = *w as i8;
            codes[i / 8 * 8 + i % 2 * 4 + i % 8 / 2] = n;
        }
        *sum = OFFSET * whole.iter().sum::<i32>();
        *scale = unit / 4.0;
    }
}

multiversion! {
    fn codes = codes_impl(blocks: &[[f32; FP4_BLOCK]], codes: &mut [[i8; FP4_BLOCK]], scales: &mut [f32],
        sums: &mut [i32]);
}

/// A line of a panel: four elements of sixteen rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([[u8; 4]; N]);

/// Lines per block.
const LINES: usize = FP4_BLOCK / 4;

/// Sixteen rows side by side.
#[derive(Default)]
pub(crate) struct Keys {
    /// `[blocks, LINES]`.
    lines: Vec<Line>,
    /// Per block.
    scale: Vec<[f32; N]>,
}

impl Keys {
    /// Takes up to 16 packed rows of `dim` elements; scores of missing ones mean nothing.
    pub(crate) fn set(&mut self, isa: Isa, rows: &[&[u8]], dim: usize) {
        let blocks = dim / FP4_BLOCK;
        self.lines.resize(blocks * LINES, Line([[0; 4]; N]));
        self.scale.resize(blocks, [0.0; N]);
        #[cfg(target_arch = "x86_64")]
        if isa.kind() == crate::cpu::isa::Kind::Avx512 && rows.len() == N && blocks.is_multiple_of(4) {
            assert!(rows.iter().all(|r| r.len() >= blocks * 17), "whole rows");
            // SAFETY: the CPU has the features (an `Isa` of this kind exists); rows and room are as long as they must be.
            unsafe { x86::set(self, rows, blocks) };
            return;
        }
        let _ = isa;
        for (r, row) in rows.iter().enumerate() {
            let (codes, scales) = row.split_at(dim / 2);
            for (b, codes) in codes.chunks_exact(FP4_BLOCK / 2).enumerate() {
                for (t, four) in codes.as_chunks::<4>().0.iter().enumerate() {
                    self.lines[b * LINES + 2 * t].0[r] = four.map(|c| DOUBLED[usize::from(c & 15)]);
                    self.lines[b * LINES + 2 * t + 1].0[r] = four.map(|c| DOUBLED[usize::from(c >> 4)]);
                }
                self.scale[b][r] = f32::from_bits(u32::from(scales[b]) << 23);
            }
        }
    }
}

#[inline(always)]
fn score_impl<L: Lanes>(q: &Query, keys: &Keys, weights: &[f32], factor: f32, out: &mut [f32; N]) {
    let blocks = keys.scale.len();
    let mut total = L::splat(0.0);
    for (h, w) in weights.iter().enumerate() {
        let mut s = L::splat(0.0);
        for b in 0..blocks {
            let at = h * blocks + b;
            let mut sum = [-q.sum[at]; N];
            for (line, codes) in keys.lines[b * LINES..(b + 1) * LINES].iter().zip(q.codes[at].as_chunks::<4>().0) {
                for (sum, key) in sum.iter_mut().zip(&line.0) {
                    for (k, c) in key.iter().zip(codes) {
                        *sum += i32::from(*k) * i32::from(*c);
                    }
                }
            }
            #[allow(clippy::cast_precision_loss, reason = "below 2^24")]
            let sum = L::load(&sum.map(|s| s as f32));
            s = sum.fma(L::splat(q.scale[at]).mul(L::load(&keys.scale[b])), s);
        }
        total = L::splat(w * factor).fma(s.max(L::splat(0.0)), total);
    }
    total.store(out);
}

multiversion! {
    fn plain = score_impl(q: &Query, keys: &Keys, weights: &[f32], factor: f32, out: &mut [f32; N]);
}

/// `out[k] = Σ_h weights[h] · factor · max(0, q[h] · keys[k])`.
pub(crate) fn score(isa: Isa, q: &Query, keys: &Keys, weights: &[f32], factor: f32, out: &mut [f32; N]) {
    let n = weights.len() * keys.scale.len();
    assert!(q.codes.len() == n && q.scale.len() == n && q.sum.len() == n, "queries of another shape");
    #[cfg(target_arch = "x86_64")]
    if isa.kind() == crate::cpu::isa::Kind::Avx512 {
        // SAFETY: the CPU has the features (an `Isa` of this kind exists); lengths were checked, lines by `Keys::set`.
        unsafe { x86::score(q, keys, weights, factor, out) };
        return;
    }
    plain(isa, q, keys, weights, factor, out);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{DOUBLED, FP4_BLOCK, Keys, LINES, N, Query};
    use crate::cpu::unpack_avx512::{dwords, heads};

    /// Heads that share the loads of a line.
    const HEADS: usize = 4;

    /// # Safety
    /// Sixteen rows of `blocks` blocks, a multiple of 4, for which `keys` has room.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) unsafe fn set(keys: &mut Keys, rows: &[&[u8]], blocks: usize) {
        let mut at = [std::ptr::null(); N];
        for (p, row) in at.iter_mut().zip(rows) {
            *p = row.as_ptr();
        }
        // SAFETY: a table of 16 bytes.
        let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(DOUBLED.as_ptr().cast()) });
        let low = _mm512_set1_epi8(15);
        for b in 0..blocks {
            // SAFETY: 16 bytes of codes per block, and 4 bytes of scales per four blocks; lines are aligned to 64.
            unsafe {
                let to = keys.lines.as_mut_ptr().add(b * LINES).cast::<__m512i>();
                for (t, v) in dwords(&at, b * FP4_BLOCK / 2).into_iter().enumerate() {
                    let (even, odd) = (_mm512_and_si512(v, low), _mm512_and_si512(_mm512_srli_epi16::<4>(v), low));
                    _mm512_store_si512(to.add(2 * t), _mm512_shuffle_epi8(table, even));
                    _mm512_store_si512(to.add(2 * t + 1), _mm512_shuffle_epi8(table, odd));
                }
                if b % 4 == 0 {
                    let mut scales = heads(&at, blocks * FP4_BLOCK / 2 + b);
                    for i in 0..4 {
                        let byte = _mm512_and_si512(scales, _mm512_set1_epi32(0xff));
                        _mm512_storeu_si512(keys.scale[b + i].as_mut_ptr().cast(), _mm512_slli_epi32::<23>(byte));
                        scales = _mm512_srli_epi32::<8>(scales);
                    }
                }
            }
        }
    }

    /// Scores of `H` heads from `h`, before weights.
    ///
    /// # Safety
    /// As [`score`], with `h + H` heads.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    #[inline]
    unsafe fn some<const H: usize>(q: &Query, keys: &Keys, h: usize) -> [__m512; H] {
        let blocks = keys.scale.len();
        let mut s = [_mm512_setzero_ps(); H];
        for b in 0..blocks {
            let mut sum = [_mm512_setzero_si512(); H];
            // SAFETY: in bounds by the caller's promise.
            unsafe {
                let line = keys.lines.as_ptr().add(b * LINES).cast::<__m512i>();
                for k in 0..LINES {
                    let w = _mm512_load_si512(line.add(k));
                    for i in 0..H {
                        let codes = q.codes.as_ptr().add((h + i) * blocks + b).cast::<i32>().add(k);
                        sum[i] = _mm512_dpbusd_epi32(sum[i], w, _mm512_set1_epi32(codes.read_unaligned()));
                    }
                }
                let scale = _mm512_loadu_ps(keys.scale.as_ptr().add(b).cast());
                for i in 0..H {
                    let at = (h + i) * blocks + b;
                    let exact = _mm512_sub_epi32(sum[i], _mm512_set1_epi32(*q.sum.get_unchecked(at)));
                    let both = _mm512_mul_ps(_mm512_set1_ps(*q.scale.get_unchecked(at)), scale);
                    s[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), both, s[i]);
                }
            }
        }
        s
    }

    /// # Safety
    /// `q` has as many blocks as `weights` and `keys` ask for, `keys` whole lines.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    pub(super) unsafe fn score(q: &Query, keys: &Keys, weights: &[f32], factor: f32, out: &mut [f32; N]) {
        let zero = _mm512_setzero_ps();
        let mut total = zero;
        let mut h = 0;
        let add = |w: f32, s: __m512, total: __m512| {
            _mm512_fmadd_ps(_mm512_set1_ps(w * factor), _mm512_max_ps(s, zero), total)
        };
        while h < weights.len() {
            // SAFETY: heads that exist.
            unsafe {
                if h + HEADS <= weights.len() {
                    let s = some::<HEADS>(q, keys, h);
                    for i in 0..HEADS {
                        total = add(weights[h + i], s[i], total);
                    }
                    h += HEADS;
                } else {
                    let [s] = some::<1>(q, keys, h);
                    total = add(weights[h], s, total);
                    h += 1;
                }
            }
        }
        // SAFETY: 16 floats.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), total) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::Random;
    use crate::math::{lowp, packed};

    fn rounded(rng: &mut Random, dim: usize) -> Vec<f32> {
        let size = 10f32.powf(3.0 * rng.unit());
        let mut row: Vec<f32> = rng.activations(dim).iter().map(|v| v * size).collect();
        lowp::fp4_round_trip(&mut row);
        row
    }

    #[test]
    fn deepseek_v4_fp4_scores_are_the_products_of_the_values_on_every_isa() {
        let seed = Random::fresh_seed();
        let mut rng = Random::new(seed);
        for (heads, dim, count) in [(64, 128, 16), (5, 128, 16), (3, 32, 16), (8, 128, 7), (1, 64, 1)] {
            let mut q = Vec::new();
            (0..heads).for_each(|_| q.extend(rounded(&mut rng, dim)));
            // A head of zeros has no scale to speak of.
            q[..dim].fill(0.0);
            let rows: Vec<Vec<f32>> = (0..count).map(|_| rounded(&mut rng, dim)).collect();
            let bytes: Vec<Vec<u8>> = rows
                .iter()
                .map(|row| {
                    let mut b = vec![0; packed::fp4_row_bytes(dim)];
                    packed::store_fp4(row, &mut b);
                    b
                })
                .collect();
            let weights = rng.activations(heads);
            let (mut query, mut keys) = (Query::default(), Keys::default());
            let mut first: Option<Vec<u32>> = None;
            for isa in Isa::available() {
                query.set(isa, &q);
                keys.set(isa, &bytes.iter().map(Vec::as_slice).collect::<Vec<_>>(), dim);
                let mut out = [0.0; N];
                score(isa, &query, &keys, &weights, 0.25, &mut out);
                let bits: Vec<u32> = out[..count].iter().map(|v| v.to_bits()).collect();
                assert_eq!(first.get_or_insert_with(|| bits.clone()), &bits, "{} (DS4_SEED={seed})", isa.name());
                for (got, row) in out.iter().zip(&rows) {
                    let (mut want, mut size) = (0.0f64, 0.0f64);
                    for (w, head) in weights.iter().zip(q.chunks_exact(dim)) {
                        let dot: f64 = head.iter().zip(row).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                        want += f64::from(*w) * 0.25 * dot.max(0.0);
                        size += f64::from(w.abs()) * 0.25 * dot.abs();
                    }
                    // Blocks and heads are added in f32: at most 64 of them, a rounding of 2^-24 each.
                    assert!(
                        (f64::from(*got) - want).abs() <= 64.0 * 6e-8 * size + 1e-30,
                        "{got} {want} (DS4_SEED={seed})"
                    );
                }
            }
        }
    }
}
