//! Quantised blocks as bytes and scales: the common form that integer kernels multiply.
//!
//! Every format becomes `scale * (q - OFFSET) + min` with `q` a byte and one scale (and minimum) per 16 or 32 elements.
//! Layouts are those of [`crate::quant`], whose decoders the tests compare with.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    reason = "bytes and bit fields"
)]

use crate::quant::grids::{self, IQ4_VALUES, even_signs};
use crate::quant::{iq, k, u16_at, u32_at};

/// Elements that are decoded at a time: one block of the K and IQ types, eight of the small ones.
pub(crate) const SPAN: usize = 256;

/// One block format.
pub(crate) trait Format {
    /// Bytes per block.
    const BYTES: usize;
    /// Elements per block, 32 or [`SPAN`].
    const ELEMS: usize;
    /// Elements per scale, 16 or 32.
    const SUB: usize;
    /// Whether values have a minimum.
    const MIN: bool;
    /// What `q` is counted from.
    const OFFSET: i32;

    /// Decodes `block`: `ELEMS` bytes of `q`, `ELEMS / SUB` of `scale` and, if [`Format::MIN`], of `min`.
    fn decode(block: &[u8], q: &mut [u8], scale: &mut [f32], min: &mut [f32]);
}

/// Widens a half float without a table or a branch that would keep the loop around it scalar.
#[inline(always)]
pub(crate) fn half(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff) << 13;
    // 2^112 moves the exponent from half's bias to single's; it is exact, subnormals included.
    let scaled = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
    let special = if magnitude >= 0x0f80_0000 { magnitude | 0x7f80_0000 } else { scaled };
    f32::from_bits(special | (u32::from(bits & 0x8000) << 16))
}

#[inline(always)]
fn half_at(b: &[u8], at: usize) -> f32 {
    half(u16_at(b, at))
}

/// Low nibbles first, then high ones.
#[inline(always)]
fn nibbles(src: &[u8], q: &mut [u8]) {
    let (low, high) = q.split_at_mut(src.len());
    for ((b, l), h) in src.iter().zip(low).zip(high) {
        *l = b & 15;
        *h = b >> 4;
    }
}

macro_rules! format {
    ($(#[$m:meta])* $name:ident: $bytes:literal, $elems:literal, $sub:literal, $min:literal, $offset:literal,
     |$b:ident, $q:ident, $scale:ident, $min_out:ident| $body:block) => {
        $(#[$m])*
        pub(crate) struct $name;
        impl Format for $name {
            const BYTES: usize = $bytes;
            const ELEMS: usize = $elems;
            const SUB: usize = $sub;
            const MIN: bool = $min;
            const OFFSET: i32 = $offset;

            #[inline(always)]
            fn decode($b: &[u8], $q: &mut [u8], $scale: &mut [f32], $min_out: &mut [f32]) {
                let ($b, $q) = (&$b[..$bytes], &mut $q[..$elems]);
                $body
            }
        }
    };
}

format!(/// `d * (q - 8)`.
Q4_0: 18, 32, 32, false, 8, |b, q, scale, _min| {
    scale[0] = half_at(b, 0);
    nibbles(&b[2..], q);
});
format!(/// `d * q + m`.
Q4_1: 20, 32, 32, true, 0, |b, q, scale, min| {
    (scale[0], min[0]) = (half_at(b, 0), half_at(b, 2));
    nibbles(&b[4..], q);
});
format!(/// `d * (q - 16)`.
Q5_0: 22, 32, 32, false, 16, |b, q, scale, _min| {
    scale[0] = half_at(b, 0);
    nibbles(&b[6..], q);
    fifth_bits(u32_at(b, 2), q);
});
format!(/// `d * q + m`.
Q5_1: 24, 32, 32, true, 0, |b, q, scale, min| {
    (scale[0], min[0]) = (half_at(b, 0), half_at(b, 2));
    nibbles(&b[8..], q);
    fifth_bits(u32_at(b, 4), q);
});
format!(/// `d * q` with signed `q`.
Q8_0: 34, 32, 32, false, 128, |b, q, scale, _min| {
    scale[0] = half_at(b, 0);
    for (q, b) in q.iter_mut().zip(&b[2..]) {
        *q = b ^ 0x80;
    }
});
format!(/// `(d*sc) * q - dmin*m`.
Q2K: 84, 256, 16, true, 0, |b, q, scale, min| {
    let (d, dmin) = (half_at(b, 80), half_at(b, 82));
    for g in 0..16 {
        scale[g] = d * f32::from(b[g] & 15);
        min[g] = -(dmin * f32::from(b[g] >> 4));
    }
    two_bits(&b[16..80], q);
});
format!(/// `(d*sc) * (q - 4)`.
Q3K: 110, 256, 16, false, 4, |b, q, scale, _min| {
    let d = half_at(b, 108);
    let scales = k::q3_scales(b[96..108].as_array().expect("12 bytes"));
    for g in 0..16 {
        scale[g] = d * f32::from(scales[g]);
    }
    two_bits(&b[32..96], q);
    for (g, q) in q.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (q, high) in q.iter_mut().zip(&b[..32]) {
            *q |= ((high >> g) & 1) << 2;
        }
    }
});
format!(/// `(d*sc) * q - dmin*m`.
Q4K: 144, 256, 32, true, 0, |b, q, scale, min| {
    k_scales(b, scale, min);
    for (q, b) in q.as_chunks_mut::<64>().0.iter_mut().zip(b[16..].as_chunks::<32>().0) {
        nibbles(b, q);
    }
});
format!(/// `(d*sc) * q - dmin*m`.
Q5K: 176, 256, 32, true, 0, |b, q, scale, min| {
    k_scales(b, scale, min);
    for (q, b) in q.as_chunks_mut::<64>().0.iter_mut().zip(b[48..].as_chunks::<32>().0) {
        nibbles(b, q);
    }
    for (g, q) in q.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (q, high) in q.iter_mut().zip(&b[16..48]) {
            *q |= ((high >> g) & 1) << 4;
        }
    }
});
format!(/// `(d*sc) * (q - 32)`.
Q6K: 210, 256, 16, false, 32, |b, q, scale, _min| {
    let d = half_at(b, 208);
    for g in 0..16 {
        scale[g] = d * f32::from(b[192 + g] as i8);
    }
    for h in 0..2 {
        let (low, high) = (&b[64 * h..64 * (h + 1)], &b[128 + 32 * h..128 + 32 * (h + 1)]);
        let q = &mut q[128 * h..128 * (h + 1)];
        nibbles(low, q);
        for (s, q) in q.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (q, high) in q.iter_mut().zip(high) {
                *q |= ((high >> (2 * s)) & 3) << 4;
            }
        }
    }
});
format!(/// `d * (0.5 + sc) / 4 * (q - 128)`.
Iq2Xxs: 66, 256, 32, false, 128, |b, q, scale, _min| {
    let d = half_at(b, 0);
    for (g, q) in q.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let at = 2 + 8 * g;
        let word = u32_at(b, at + 4);
        scale[g] = d * (0.5 + (word >> 28) as u8 as f32) * 0.25;
        for (k, q) in q.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            signed(q, &grids::IQ2_XXS[usize::from(b[at + k])], even_signs(((word >> (7 * k)) & 127) as u8));
        }
    }
});
format!(/// `d * (0.5 + sc) / 4 * (q - 128)`.
Iq2Xs: 74, 256, 16, false, 128, |b, q, scale, _min| {
    let d = half_at(b, 0);
    for (g, q) in q.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        scale[g] = d * (0.5 + f32::from((b[66 + g / 2] >> (4 * (g % 2))) & 15)) * 0.25;
        for (k, q) in q.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let word = u16_at(b, 2 + 2 * (2 * g + k));
            signed(q, &grids::IQ2_XS[usize::from(word & 511)], even_signs((word >> 9) as u8));
        }
    }
});
format!(/// `d * (0.5 + sc) / 2 * (q - 128)`.
Iq3Xxs: 98, 256, 32, false, 128, |b, q, scale, _min| {
    let d = half_at(b, 0);
    for (g, q) in q.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let word = u32_at(b, 66 + 4 * g);
        scale[g] = d * (0.5 + (word >> 28) as u8 as f32) * 0.5;
        for (k, q) in q.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let signs = even_signs(((word >> (7 * (k / 2))) & 127) as u8) >> (4 * (k % 2));
            signed(q, &grids::IQ3_XXS[usize::from(b[2 + 8 * g + k])], signs);
        }
    }
});
format!(/// `d * (q - 128)`.
Iq4Nl: 18, 32, 32, false, 128, |b, q, scale, _min| {
    scale[0] = half_at(b, 0);
    values(&b[2..], q);
});
format!(/// `(d*sc) * (q - 128)`.
Iq4Xs: 136, 256, 32, false, 128, |b, q, scale, _min| {
    let d = half_at(b, 0);
    let scales = iq::iq4_xs_scales(b.as_array().expect("136 bytes"));
    for g in 0..8 {
        scale[g] = d * f32::from(scales[g]);
        values(&b[8 + 16 * g..8 + 16 * (g + 1)], &mut q[32 * g..32 * (g + 1)]);
    }
});
format!(/// `d * (2*sc + 1) / 8 * (q - 128)`: codebook values and their shift of 1/8 in eighths.
Iq1S: 50, 256, 32, false, 128, |b, q, scale, _min| {
    let d = half_at(b, 0);
    for (g, q) in q.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let word = u16_at(b, 34 + 2 * g);
        scale[g] = d * f32::from(2 * ((word >> 12) & 7) + 1) * iq::IQ1_DELTA;
        for (k, q) in q.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let index = u16::from(b[2 + 4 * g + k]) | (((word >> (3 * k)) & 7) << 8);
            eighths(q, usize::from(index), word & 0x8000 != 0);
        }
    }
});
format!(/// `d * (2*sc + 1) / 8 * (q - 128)`, as [`Iq1S`].
Iq1M: 56, 256, 16, false, 128, |b, q, scale, _min| {
    let d = iq::iq1_m_scale(b.as_array().expect("56 bytes"));
    for (g, q) in q.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let word = u16_at(b, 48 + 2 * (g / 4));
        scale[g] = d * f32::from(2 * ((word >> (3 * (g % 4))) & 7) + 1) * iq::IQ1_DELTA;
        for (k, q) in q.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let high = b[32 + g] >> (4 * k);
            eighths(q, usize::from(b[2 * g + k]) | (usize::from(high & 7) << 8), high & 8 != 0);
        }
    }
});

/// Adds bit `j` of `high` as the fifth bit of element `j`.
#[inline(always)]
fn fifth_bits(high: u32, q: &mut [u8]) {
    for (j, q) in q.iter_mut().enumerate() {
        *q |= ((high >> j) & 1) as u8 * 16;
    }
}

/// Elements `128h + 32s + j` from byte `32h + j`, bits `2s`.
#[inline(always)]
fn two_bits(src: &[u8], q: &mut [u8]) {
    for h in 0..2 {
        for s in 0..4 {
            let q = &mut q[128 * h + 32 * s..128 * h + 32 * (s + 1)];
            for (q, b) in q.iter_mut().zip(&src[32 * h..32 * (h + 1)]) {
                *q = (b >> (2 * s)) & 3;
            }
        }
    }
}

/// Scales and minimums of Q4_K and Q5_K.
#[inline(always)]
fn k_scales(b: &[u8], scale: &mut [f32], min: &mut [f32]) {
    let (d, dmin) = (half_at(b, 0), half_at(b, 2));
    let (scales, mins) = k::scales_and_mins(b[4..16].as_array().expect("12 bytes"));
    for g in 0..8 {
        scale[g] = d * f32::from(scales[g]);
        min[g] = -(dmin * f32::from(mins[g]));
    }
}

/// A codebook entry with signs, counted from 128.
#[inline(always)]
fn signed<const E: usize>(q: &mut [u8; E], entry: &[i8; E], signs: u8) {
    for j in 0..E {
        let flip = 0u8.wrapping_sub((signs >> j) & 1);
        q[j] = ((entry[j] as u8) ^ flip).wrapping_sub(flip) ^ 0x80;
    }
}

/// A list of values by nibbles, counted from 128.
#[inline(always)]
fn values(src: &[u8], q: &mut [u8]) {
    for (j, b) in src.iter().enumerate() {
        q[j] = IQ4_VALUES[usize::from(b & 15)] as u8 ^ 0x80;
        q[j + 16] = IQ4_VALUES[usize::from(b >> 4)] as u8 ^ 0x80;
    }
}

/// An IQ1 codebook entry plus or minus 1/8, in eighths, counted from 128.
#[inline(always)]
fn eighths(q: &mut [u8; 8], index: usize, minus: bool) {
    let delta = if minus { 127u8 } else { 129 };
    for (q, v) in q.iter_mut().zip(&grids::IQ1[index]) {
        *q = ((*v as u8) << 3).wrapping_add(delta);
    }
}

/// Calls a generic function with the [`Format`] of a tensor type; `None` for types without one (plain floats).
macro_rules! with_format {
    ($ty:expr, $f:ident::<$($g:ident),* ; F>($($arg:expr),* $(,)?)) => {{
        use $crate::cpu::formats as f;
        use ds4_manifests::GgmlType as T;
        match $ty {
            T::Q4_0 => Some($f::<$($g,)* f::Q4_0>($($arg),*)),
            T::Q4_1 => Some($f::<$($g,)* f::Q4_1>($($arg),*)),
            T::Q5_0 => Some($f::<$($g,)* f::Q5_0>($($arg),*)),
            T::Q5_1 => Some($f::<$($g,)* f::Q5_1>($($arg),*)),
            T::Q8_0 => Some($f::<$($g,)* f::Q8_0>($($arg),*)),
            T::Q2_K => Some($f::<$($g,)* f::Q2K>($($arg),*)),
            T::Q3_K => Some($f::<$($g,)* f::Q3K>($($arg),*)),
            T::Q4_K => Some($f::<$($g,)* f::Q4K>($($arg),*)),
            T::Q5_K => Some($f::<$($g,)* f::Q5K>($($arg),*)),
            T::Q6_K => Some($f::<$($g,)* f::Q6K>($($arg),*)),
            T::IQ2_XXS => Some($f::<$($g,)* f::Iq2Xxs>($($arg),*)),
            T::IQ2_XS => Some($f::<$($g,)* f::Iq2Xs>($($arg),*)),
            T::IQ3_XXS => Some($f::<$($g,)* f::Iq3Xxs>($($arg),*)),
            T::IQ4_NL => Some($f::<$($g,)* f::Iq4Nl>($($arg),*)),
            T::IQ4_XS => Some($f::<$($g,)* f::Iq4Xs>($($arg),*)),
            T::IQ1_S => Some($f::<$($g,)* f::Iq1S>($($arg),*)),
            T::IQ1_M => Some($f::<$($g,)* f::Iq1M>($($arg),*)),
            _ => None,
        }
    }};
}
pub(crate) use with_format;

#[cfg(test)]
mod tests {
    use ds4_manifests::GgmlType;

    use super::*;
    use crate::conformance::Random;
    use crate::quant;

    #[test]
    fn half_agrees_with_the_half_crate_on_all_65536() {
        for bits in 0..=u16::MAX {
            let (got, want) = (half(bits), half::f16::from_bits(bits).to_f32());
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{bits:#x}");
        }
    }

    fn compare<F: Format>(ty: GgmlType, seed: u64) {
        let bytes = Random::new(seed).weights(ty, 64, SPAN);
        assert_eq!((F::BYTES as u64, F::ELEMS as u64), (ty.block_bytes(), ty.block_elems()));
        let mut want = vec![0.0; F::ELEMS];
        for block in bytes.chunks_exact(F::BYTES) {
            quant::dequantize_row(ty, block, &mut want);
            let (mut q, mut scale, mut min) = ([0; SPAN], [0.0; 16], [0.0; 16]);
            F::decode(block, &mut q, &mut scale, &mut min);
            for (i, want) in want.iter().enumerate() {
                let g = i / F::SUB;
                let product = scale[g] * (i32::from(q[i]) - F::OFFSET) as f32;
                // One rounding less or more than the reference.
                let tolerance = (product.abs() + min[g].abs()) * 1.2e-7;
                assert!(
                    (product + min[g] - want).abs() <= tolerance,
                    "{ty} element {i}: {product} {} {want} (DS4_SEED={seed})",
                    min[g]
                );
                assert!(F::MIN || min[g] == 0.0);
            }
        }
    }

    #[test]
    fn every_format_means_what_the_reference_decoder_says() {
        let seed = Random::fresh_seed();
        let mut n = 0;
        for ty in quant::SUPPORTED {
            n += with_format!(ty, compare::< ; F>(ty, seed)).map_or(0, |()| 1);
        }
        assert_eq!(n, quant::SUPPORTED.len() - 3, "all but F32, F16 and BF16");
    }
}
