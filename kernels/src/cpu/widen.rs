//! Stored rows as f32, sixteen elements at a time: f16, and the packed types of [`crate::math::packed`], whose plain loaders
//! define what these compute.

use crate::cpu::isa::{Isa, multiversion};
use crate::cpu::lanes::{Lanes, N};
use crate::math::lowp::{FP4_BLOCK, FP8_BLOCK};
use crate::math::packed;

/// The power of two of an E8M0 byte, as [`packed`] stores it.
#[inline(always)]
fn scale_from(e: u8) -> f32 {
    f32::from_bits(u32::from(e) << 23)
}

#[inline(always)]
fn f16_impl<L: Lanes>(bits: &[u16], out: &mut [f32]) {
    let (full, rest) = bits.as_chunks::<N>();
    let (os, o_rest) = out.as_chunks_mut::<N>();
    for (b, o) in full.iter().zip(os) {
        L::load_f16(b).store(o);
    }
    if !rest.is_empty() {
        let (mut b, mut o) = ([0; N], [0.0; N]);
        b[..rest.len()].copy_from_slice(rest);
        L::load_f16(&b).store(&mut o);
        o_rest.copy_from_slice(&o[..rest.len()]);
    }
}

multiversion! {
    /// Widens half floats.
    pub(crate) fn f16 = f16_impl(bits: &[u16], out: &mut [f32]);
}

#[inline(always)]
fn fp8_impl<L: Lanes>(codes: &[u8], scales: &[u8], out: &mut [f32]) {
    let codes = codes.as_chunks::<N>().0;
    for ((i, c), o) in codes.iter().enumerate().zip(out.as_chunks_mut::<N>().0) {
        L::load_e4m3(c).mul(L::splat(scale_from(scales[i * N / FP8_BLOCK]))).store(o);
    }
}

multiversion! {
    fn fp8_codes = fp8_impl(codes: &[u8], scales: &[u8], out: &mut [f32]);
}

/// As [`packed::load_fp8`].
pub(crate) fn fp8(isa: Isa, bytes: &[u8], rotary: usize, out: &mut [f32]) {
    let nope = out.len() - rotary;
    if !nope.is_multiple_of(N) || !rotary.is_multiple_of(N) {
        packed::load_fp8(bytes, rotary, out);
        return;
    }
    let (codes, rest) = bytes.split_at(nope);
    let (head, tail) = out.split_at_mut(nope);
    fp8_codes(isa, codes, &rest[..nope.div_ceil(FP8_BLOCK)], head);
    let halves = &rest[rest.len() - 2 * rotary..];
    let mut bits = [0u16; FP8_BLOCK];
    for (bytes, out) in halves.chunks(2 * FP8_BLOCK).zip(tail.chunks_mut(FP8_BLOCK)) {
        for (b, half) in bits.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *b = u16::from_le_bytes(*half);
        }
        f16(isa, &bits[..out.len()], out);
    }
}

#[inline(always)]
fn fp4_impl<L: Lanes>(codes: &[u8], scales: &[u8], out: &mut [f32]) {
    let codes = codes.as_chunks::<{ N / 2 }>().0;
    for ((i, c), o) in codes.iter().enumerate().zip(out.as_chunks_mut::<N>().0) {
        L::load_e2m1(c).mul(L::splat(scale_from(scales[i * N / FP4_BLOCK]))).store(o);
    }
}

multiversion! {
    fn fp4_codes = fp4_impl(codes: &[u8], scales: &[u8], out: &mut [f32]);
}

/// As [`packed::load_fp4`].
pub(crate) fn fp4(isa: Isa, bytes: &[u8], out: &mut [f32]) {
    if !out.len().is_multiple_of(N) {
        packed::load_fp4(bytes, out);
        return;
    }
    let (codes, scales) = bytes.split_at(out.len() / 2);
    fp4_codes(isa, codes, scales, out);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::Random;

    /// Any bytes, but without the NaN codes of E4M3 and E8M0, which no row holds.
    fn bytes(rng: &mut Random, n: usize) -> Vec<u8> {
        let byte = |rng: &mut Random| rng.bits().to_le_bytes()[3];
        (0..n).map(|_| byte(rng)).map(|b| if b & 0x7f == 0x7f { b & 0xf0 } else { b }).collect()
    }

    #[test]
    fn deepseek_v4_rows_widen_to_the_bits_of_the_plain_loaders_on_every_isa() {
        let seed = Random::fresh_seed();
        let mut rng = Random::new(seed);
        let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        for isa in Isa::available() {
            for (width, rotary) in [(512, 64), (128, 64), (32, 16), (32, 8), (48, 16)] {
                let row = bytes(&mut rng, packed::fp8_row_bytes(width, rotary));
                let (mut got, mut want) = (vec![0.0; width], vec![0.0; width]);
                fp8(isa, &row, rotary, &mut got);
                packed::load_fp8(&row, rotary, &mut want);
                // A NaN of f16 may change its payload.
                for (g, w) in got.iter().zip(&want) {
                    assert!(
                        g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan()),
                        "{} (DS4_SEED={seed})",
                        isa.name()
                    );
                }
                let row = bytes(&mut rng, packed::fp4_row_bytes(width));
                fp4(isa, &row, &mut got);
                packed::load_fp4(&row, &mut want);
                assert_eq!(bits(&got), bits(&want), "{} (DS4_SEED={seed})", isa.name());
            }
            // Every code of both formats.
            let codes: Vec<u8> = (0..=255).collect();
            let mut row = codes.clone();
            row.retain(|c| c & 0x7f != 0x7f);
            row.extend([0, 0x80]);
            row.extend([127, 1, 200, 254]);
            let (mut got, mut want) = (vec![0.0; 256], vec![0.0; 256]);
            fp8(isa, &row, 0, &mut got);
            packed::load_fp8(&row, 0, &mut want);
            assert_eq!(bits(&got), bits(&want), "{}", isa.name());
            let (mut got, mut want) = (vec![0.0; 512], vec![0.0; 512]);
            let row: Vec<u8> = codes.iter().copied().chain([127; 16]).collect();
            fp4(isa, &row, &mut got);
            packed::load_fp4(&row, &mut want);
            assert_eq!(bits(&got), bits(&want), "{}", isa.name());
            for n in [1u16, 16, 37] {
                let halves: Vec<u16> =
                    (0..n).map(|i| half::f16::from_f32(f32::from(i) / 3.0 - 4.0).to_bits()).collect();
                let mut got = vec![0.0; usize::from(n)];
                f16(isa, &halves, &mut got);
                let want: Vec<f32> = halves.iter().map(|h| half::f16::from_bits(*h).to_f32()).collect();
                assert_eq!(got, want);
            }
        }
    }
}
