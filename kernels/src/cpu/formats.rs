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
#![allow(clippy::needless_range_loop, reason = "an index names a group in several arrays")]

use crate::cpu::bytes::{B, Bytes};
use crate::cpu::lanes::array;
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
    fn decode<V: Bytes>(block: &[u8], q: &mut [u8], scale: &mut [f32], min: &mut [f32]);
}

#[inline(always)]
fn half_at<V: Bytes>(b: &[u8], at: usize) -> f32 {
    V::half(u16_at(b, at))
}

/// 32 bytes of `src` from `at`.
#[inline(always)]
fn load<V: Bytes>(src: &[u8], at: usize) -> V {
    V::load(src[at..].first_chunk().expect("bytes of a block"))
}

/// The nibbles of 16 bytes of `src` from `at`.
#[inline(always)]
fn nibbles<V: Bytes>(src: &[u8], at: usize) -> V {
    V::nibbles(src[at..].first_chunk().expect("bytes of a block"))
}

/// Writes bytes `at..at + 32` of `q`.
#[inline(always)]
fn put<V: Bytes>(v: V, q: &mut [u8], at: usize) {
    v.store(q[at..].first_chunk_mut().expect("bytes of a span"));
}

/// `(x >> n) & mask` per byte.
#[inline(always)]
fn field<V: Bytes>(x: V, n: u32, mask: u8) -> V {
    x.shr(n).and(V::splat(mask))
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
            fn decode<V: Bytes>($b: &[u8], $q: &mut [u8], $scale: &mut [f32], $min_out: &mut [f32]) {
                let ($b, $q) = (&$b[..$bytes], &mut $q[..$elems]);
                $body
            }
        }
    };
}

format!(/// `d * (q - 8)`.
Q4_0: 18, 32, 32, false, 8, |b, q, scale, _min| {
    scale[0] = half_at::<V>(b, 0);
    put(nibbles::<V>(b, 2), q, 0);
});
format!(/// `d * q + m`.
Q4_1: 20, 32, 32, true, 0, |b, q, scale, min| {
    (scale[0], min[0]) = (half_at::<V>(b, 0), half_at::<V>(b, 2));
    put(nibbles::<V>(b, 4), q, 0);
});
format!(/// `d * (q - 16)`.
Q5_0: 22, 32, 32, false, 16, |b, q, scale, _min| {
    scale[0] = half_at::<V>(b, 0);
    put(nibbles::<V>(b, 6).or(V::expand(u32_at(b, 2), 16)), q, 0);
});
format!(/// `d * q + m`.
Q5_1: 24, 32, 32, true, 0, |b, q, scale, min| {
    (scale[0], min[0]) = (half_at::<V>(b, 0), half_at::<V>(b, 2));
    put(nibbles::<V>(b, 8).or(V::expand(u32_at(b, 4), 16)), q, 0);
});
format!(/// `d * q` with signed `q`.
Q8_0: 34, 32, 32, false, 128, |b, q, scale, _min| {
    scale[0] = half_at::<V>(b, 0);
    put(load::<V>(b, 2).xor(V::splat(0x80)), q, 0);
});
format!(/// `(d*sc) * q - dmin*m`.
Q2K: 84, 256, 16, true, 0, |b, q, scale, min| {
    let (d, dmin) = (half_at::<V>(b, 80), half_at::<V>(b, 82));
    for g in 0..16 {
        scale[g] = d * f32::from(b[g] & 15);
        min[g] = -(dmin * f32::from(b[g] >> 4));
    }
    for h in 0..2 {
        let low = load::<V>(b, 16 + 32 * h);
        for s in 0..4 {
            put(field(low, 2 * s as u32, 3), q, 128 * h + 32 * s);
        }
    }
});
format!(/// `(d*sc) * (q - 4)`.
Q3K: 110, 256, 16, false, 4, |b, q, scale, _min| {
    let d = half_at::<V>(b, 108);
    let scales = k::q3_scales(b[96..108].as_array().expect("12 bytes"));
    for g in 0..16 {
        scale[g] = d * f32::from(scales[g]);
    }
    let high = load::<V>(b, 0);
    for h in 0..2 {
        let low = load::<V>(b, 32 + 32 * h);
        for s in 0..4 {
            let third = field(high, (4 * h + s) as u32, 1).shl(2);
            put(field(low, 2 * s as u32, 3).or(third), q, 128 * h + 32 * s);
        }
    }
});
format!(/// `(d*sc) * q - dmin*m`.
Q4K: 144, 256, 32, true, 0, |b, q, scale, min| {
    k_scales::<V>(b, scale, min);
    for g in 0..4 {
        let low = load::<V>(b, 16 + 32 * g);
        put(field(low, 0, 15), q, 64 * g);
        put(low.shr(4), q, 64 * g + 32);
    }
});
format!(/// `(d*sc) * q - dmin*m`.
Q5K: 176, 256, 32, true, 0, |b, q, scale, min| {
    k_scales::<V>(b, scale, min);
    let high = load::<V>(b, 16);
    for g in 0..4 {
        let low = load::<V>(b, 48 + 32 * g);
        put(field(low, 0, 15).or(field(high, 2 * g as u32, 1).shl(4)), q, 64 * g);
        put(low.shr(4).or(field(high, 2 * g as u32 + 1, 1).shl(4)), q, 64 * g + 32);
    }
});
format!(/// `(d*sc) * (q - 32)`.
Q6K: 210, 256, 16, false, 32, |b, q, scale, _min| {
    let d = half_at::<V>(b, 208);
    for g in 0..16 {
        scale[g] = d * f32::from(b[192 + g] as i8);
    }
    for h in 0..2 {
        let high = load::<V>(b, 128 + 32 * h);
        for s in 0..2 {
            let low = load::<V>(b, 64 * h + 32 * s);
            let upper = |s: usize| field(high, 2 * s as u32, 3).shl(4);
            put(field(low, 0, 15).or(upper(s)), q, 128 * h + 32 * s);
            put(low.shr(4).or(upper(s + 2)), q, 128 * h + 32 * (s + 2));
        }
    }
});
format!(/// `d * (0.5 + sc) / 4 * (q - 128)`.
Iq2Xxs: 66, 256, 32, false, 128, |b, q, scale, _min| {
    let d = half_at::<V>(b, 0);
    for g in 0..8 {
        let at = 2 + 8 * g;
        let word = u32_at(b, at + 4);
        scale[g] = d * (0.5 + (word >> 28) as u8 as f32) * 0.25;
        let entries = std::array::from_fn::<_, 4, _>(|k| grids::IQ2_XXS[usize::from(b[at + k])]);
        signed::<V>(entries.as_flattened(), sign_bytes(word), q, 32 * g);
    }
});
format!(/// `d * (0.5 + sc) / 4 * (q - 128)`.
Iq2Xs: 74, 256, 16, false, 128, |b, q, scale, _min| {
    let d = half_at::<V>(b, 0);
    for g in 0..16 {
        scale[g] = d * (0.5 + f32::from((b[66 + g / 2] >> (4 * (g % 2))) & 15)) * 0.25;
    }
    for g in 0..8 {
        let words = std::array::from_fn::<_, 4, _>(|k| u16_at(b, 2 + 2 * (4 * g + k)));
        let entries = words.map(|w| grids::IQ2_XS[usize::from(w & 511)]);
        let signs = u32::from_le_bytes(words.map(|w| even_signs((w >> 9) as u8)));
        signed::<V>(entries.as_flattened(), signs, q, 32 * g);
    }
});
format!(/// `d * (0.5 + sc) / 2 * (q - 128)`.
Iq3Xxs: 98, 256, 32, false, 128, |b, q, scale, _min| {
    let d = half_at::<V>(b, 0);
    for g in 0..8 {
        let word = u32_at(b, 66 + 4 * g);
        scale[g] = d * (0.5 + (word >> 28) as u8 as f32) * 0.5;
        let entries = std::array::from_fn::<_, 8, _>(|k| grids::IQ3_XXS[usize::from(b[2 + 8 * g + k])]);
        signed::<V>(entries.as_flattened(), sign_bytes(word), q, 32 * g);
    }
});
format!(/// `d * (q - 128)`.
Iq4Nl: 18, 32, 32, false, 128, |b, q, scale, _min| {
    scale[0] = half_at::<V>(b, 0);
    put(nibbles::<V>(b, 2).lookup(&IQ4_BYTES), q, 0);
});
format!(/// `(d*sc) * (q - 128)`.
Iq4Xs: 136, 256, 32, false, 128, |b, q, scale, _min| {
    let d = half_at::<V>(b, 0);
    let scales = iq::iq4_xs_scales(b.as_array().expect("136 bytes"));
    for g in 0..8 {
        scale[g] = d * f32::from(scales[g]);
        put(nibbles::<V>(b, 8 + 16 * g).lookup(&IQ4_BYTES), q, 32 * g);
    }
});
format!(/// `d * (2*sc + 1) / 8 * (q - 128)`: codebook values and their shift of 1/8 in eighths.
Iq1S: 50, 256, 32, false, 128, |b, q, scale, _min| {
    let d = half_at::<V>(b, 0);
    for g in 0..8 {
        let word = u16_at(b, 34 + 2 * g);
        scale[g] = d * f32::from(2 * ((word >> 12) & 7) + 1) * iq::IQ1_DELTA;
        let entries = std::array::from_fn::<_, 4, _>(|k| {
            grids::IQ1[usize::from(u16::from(b[2 + 4 * g + k]) | (((word >> (3 * k)) & 7) << 8))]
        });
        eighths::<V>(entries.as_flattened(), if word & 0x8000 == 0 { 0 } else { u32::MAX }, q, 32 * g);
    }
});
format!(/// `d * (2*sc + 1) / 8 * (q - 128)`, as [`Iq1S`].
Iq1M: 56, 256, 16, false, 128, |b, q, scale, _min| {
    let d = iq::iq1_m_scale(b.as_array().expect("56 bytes"));
    for g in 0..16 {
        let word = u16_at(b, 48 + 2 * (g / 4));
        scale[g] = d * f32::from(2 * ((word >> (3 * (g % 4))) & 7) + 1) * iq::IQ1_DELTA;
    }
    for g in 0..8 {
        let high = std::array::from_fn::<_, 4, _>(|k| b[32 + 2 * g + k / 2] >> (4 * (k % 2)));
        let entries = std::array::from_fn::<_, 4, _>(|k| {
            grids::IQ1[usize::from(b[4 * g + k]) | (usize::from(high[k] & 7) << 8)]
        });
        let minus = u32::from_le_bytes(high.map(|h| if h & 8 == 0 { 0 } else { 0xff }));
        eighths::<V>(entries.as_flattened(), minus, q, 32 * g);
    }
});

/// [`IQ4_VALUES`], counted from 128.
const IQ4_BYTES: [u8; 16] = {
    let mut bytes = [0; 16];
    let mut i = 0;
    while i < 16 {
        bytes[i] = IQ4_VALUES[i].cast_unsigned() ^ 0x80;
        i += 1;
    }
    bytes
};

/// Scales and minimums of Q4_K and Q5_K.
#[inline(always)]
fn k_scales<V: Bytes>(b: &[u8], scale: &mut [f32], min: &mut [f32]) {
    let (d, dmin) = (half_at::<V>(b, 0), half_at::<V>(b, 2));
    let (scales, mins) = k::scales_and_mins(b[4..16].as_array().expect("12 bytes"));
    for g in 0..8 {
        scale[g] = d * f32::from(scales[g]);
        min[g] = -(dmin * f32::from(mins[g]));
    }
}

/// The four sign bytes of a word of 7-bit indices.
#[inline(always)]
fn sign_bytes(word: u32) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|k| even_signs(((word >> (7 * k)) & 127) as u8)))
}

/// 32 codebook values, as bytes.
#[inline(always)]
fn entries<V: Bytes>(values: &[i8]) -> V {
    let values: &[i8; B] = values.as_array().expect("entries for 32 elements");
    V::load(&array!(B, 0u8, |i| values[i].cast_unsigned()))
}

/// 32 codebook values, negative where a bit of `signs` is set, counted from 128.
#[inline(always)]
fn signed<V: Bytes>(values: &[i8], signs: u32, q: &mut [u8], at: usize) {
    let flip = V::expand(signs, 0xff);
    put(entries::<V>(values).xor(flip).sub(flip).xor(V::splat(0x80)), q, at);
}

/// 32 IQ1 codebook values plus 1/8, or minus 1/8 where a bit of `minus` is set, in eighths counted from 128.
#[inline(always)]
fn eighths<V: Bytes>(values: &[i8], minus: u32, q: &mut [u8], at: usize) {
    // 8v + 1 - 2 (where minus) + 128; subtracting the negated constants keeps to one operation.
    let base = entries::<V>(values).shl(3).sub(V::splat(127));
    put(base.sub(V::expand(minus, 2)), q, at);
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

    fn compare<F: Format>(ty: GgmlType, seed: u64) {
        let bytes = Random::new(seed).weights(ty, 64, SPAN);
        assert_eq!((F::BYTES as u64, F::ELEMS as u64), (ty.block_bytes(), ty.block_elems()));
        let mut want = vec![0.0; F::ELEMS];
        for block in bytes.chunks_exact(F::BYTES) {
            quant::dequantize_row(ty, block, &mut want);
            let (mut q, mut scale, mut min) = ([0; SPAN], [0.0; 16], [0.0; 16]);
            F::decode::<crate::cpu::bytes::PortableBytes>(block, &mut q, &mut scale, &mut min);
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
