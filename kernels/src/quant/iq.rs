//! The IQ types: codebook entries (see [`super::grids`]) with signs and sub-block scales; IQ4 types use a value list.
//!
//! Each function decodes one block; operation order is part of the contract (see the [module above](super)).

use super::grids::{self, IQ4_VALUES, even_signs};
use super::{f16_at, u16_at, u32_at};

/// The shift of IQ1 codebook values, towards plus or minus.
pub const IQ1_DELTA: f32 = 0.125;

/// Writes `scale * magnitude * sign` for one codebook entry.
#[inline]
fn signed<const E: usize>(out: &mut [f32], scale: f32, entry: &[i8; E], signs: u8) {
    for (j, (o, &magnitude)) in out.iter_mut().zip(entry).enumerate() {
        let sign = if (signs >> j) & 1 == 0 { 1.0 } else { -1.0 };
        *o = scale * f32::from(magnitude) * sign;
    }
}

/// Bits `7k..7k+7` of a sign word, as a full sign byte.
#[inline]
fn signs_at(word: u32, k: usize) -> u8 {
    even_signs(((word >> (7 * k)) & 127).to_le_bytes()[0])
}

/// `[d: f16]` then per 32 elements `[4 codebook indices: u8][4 × 7 sign bits, 4-bit scale: u32]`:
/// `d * (0.5 + sc) * 0.25 * entry * sign`.
pub fn iq2_xxs(b: &[u8; 66], out: &mut [f32; 256]) {
    let d = f16_at(b, 0);
    for (g, group) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let at = 2 + 8 * g;
        let word = u32_at(b, at + 4);
        let scale = d * (0.5 + f32::from((word >> 28).to_le_bytes()[0])) * 0.25;
        for (k, eight) in group.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            signed(eight, scale, &grids::IQ2_XXS[usize::from(b[at + k])], signs_at(word, k));
        }
    }
}

/// `[d: f16][32 × (9-bit codebook index, 7 sign bits)][16 × 4-bit scale]`: `d * (0.5 + sc) * 0.25 * entry * sign`,
/// 16 elements per scale.
pub fn iq2_xs(b: &[u8; 74], out: &mut [f32; 256]) {
    let d = f16_at(b, 0);
    let scales = &b[66..];
    for (g, group) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * (0.5 + f32::from((scales[g / 2] >> (4 * (g % 2))) & 15)) * 0.25;
        for (k, eight) in group.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let q = u16_at(b, 2 + 2 * (2 * g + k));
            signed(eight, scale, &grids::IQ2_XS[usize::from(q & 511)], even_signs((q >> 9).to_le_bytes()[0]));
        }
    }
}

/// `[d: f16][64 codebook indices: u8][8 × (4 × 7 sign bits, 4-bit scale): u32]`: `d * (0.5 + sc) * 0.5 * entry * sign`;
/// an entry has 4 elements, a scale serves 32.
pub fn iq3_xxs(b: &[u8; 98], out: &mut [f32; 256]) {
    let d = f16_at(b, 0);
    for (g, group) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let word = u32_at(b, 66 + 4 * g);
        let scale = d * (0.5 + f32::from((word >> 28).to_le_bytes()[0])) * 0.5;
        for (k, four) in group.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let signs = signs_at(word, k / 2) >> (4 * (k % 2));
            signed(four, scale, &grids::IQ3_XXS[usize::from(b[2 + 8 * g + k])], signs);
        }
    }
}

/// `[d: f16][16 nibbles]` over 32 elements, low nibbles first: `d * value`.
#[inline]
pub fn iq4_nl(b: &[u8; 18], out: &mut [f32; 32]) {
    let d = f16_at(b, 0);
    for (j, &q) in b[2..].iter().enumerate() {
        out[j] = d * f32::from(IQ4_VALUES[usize::from(q & 15)]);
        out[j + 16] = d * f32::from(IQ4_VALUES[usize::from(q >> 4)]);
    }
}

/// The eight 6-bit scales of an IQ4_XS block, offset of 32 removed: nibbles in bytes 4..8, upper 2 bits in the u16 at 2.
#[inline]
pub fn iq4_xs_scales(b: &[u8; 136]) -> [i8; 8] {
    let high = u16_at(b, 2);
    std::array::from_fn(|g| {
        let low = (b[4 + g / 2] >> (4 * (g % 2))) & 15;
        let upper = ((high >> (2 * g)) & 3).to_le_bytes()[0];
        (low | (upper << 4)).cast_signed() - 32
    })
}

/// `[d: f16][upper scale bits: u16][8 scale nibbles][128 bytes of nibbles]`: `(d * sc) * value`, 32 per scale; nibbles of
/// each 32 lie as in [`iq4_nl`].
pub fn iq4_xs(b: &[u8; 136], out: &mut [f32; 256]) {
    let d = f16_at(b, 0);
    let scales = iq4_xs_scales(b);
    for (g, group) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let scale = d * f32::from(scales[g]);
        for (j, &q) in b[8 + 16 * g..8 + 16 * (g + 1)].iter().enumerate() {
            group[j] = scale * f32::from(IQ4_VALUES[usize::from(q & 15)]);
            group[j + 16] = scale * f32::from(IQ4_VALUES[usize::from(q >> 4)]);
        }
    }
}

/// Writes `scale * (value + delta)` for one IQ1 codebook entry; a negative shift when `minus`.
#[inline]
fn shifted(out: &mut [f32; 8], scale: f32, index: usize, minus: bool) {
    let delta = if minus { -IQ1_DELTA } else { IQ1_DELTA };
    for (o, &value) in out.iter_mut().zip(&grids::IQ1[index]) {
        *o = scale * (f32::from(value) + delta);
    }
}

/// `[d: f16][32 low index bytes][8 × (4 × 3 upper index bits, 3-bit scale, shift sign): u16]`:
/// `d * (2*sc + 1) * (entry ± 1/8)`, 32 per scale and shift.
pub fn iq1_s(b: &[u8; 50], out: &mut [f32; 256]) {
    let d = f16_at(b, 0);
    for (g, group) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let word = u16_at(b, 34 + 2 * g);
        let scale = d * f32::from(2 * ((word >> 12) & 7) + 1);
        for (k, eight) in group.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let index = u16::from(b[2 + 4 * g + k]) | (((word >> (3 * k)) & 7) << 8);
            shifted(eight, scale, usize::from(index), word & 0x8000 != 0);
        }
    }
}

/// The f16 super-block scale of an IQ1_M block, spread over the top nibbles of its four scale words.
#[inline]
pub fn iq1_m_scale(b: &[u8; 56]) -> f32 {
    let nibble = |i: usize| u16_at(b, 48 + 2 * i) >> 12;
    half::f16::from_bits(nibble(0) | (nibble(1) << 4) | (nibble(2) << 8) | (nibble(3) << 12)).to_f32()
}

/// `[32 low index bytes][32 × (3 upper index bits, shift sign)][4 × (4 × 3-bit scale, 4 bits of d): u16]`:
/// `d * (2*sc + 1) * (entry ± 1/8)`, 16 per scale, 8 per shift.
pub fn iq1_m(b: &[u8; 56], out: &mut [f32; 256]) {
    let d = iq1_m_scale(b);
    for (g, group) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let word = u16_at(b, 48 + 2 * (g / 4));
        let scale = d * f32::from(2 * ((word >> (3 * (g % 4))) & 7) + 1);
        for (k, eight) in group.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let high = b[32 + g] >> (4 * k);
            let index = usize::from(b[2 * g + k]) | (usize::from(high & 7) << 8);
            shifted(eight, scale, index, high & 8 != 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iq1_m_gathers_its_scale_from_four_words() {
        let mut b = [0u8; 56];
        // 0x3555 = 0.33325195: lowest nibble in the first word.
        for (i, nibble) in [5u8, 5, 5, 3].into_iter().enumerate() {
            b[49 + 2 * i] = nibble << 4;
        }
        assert_eq!(iq1_m_scale(&b), half::f16::from_bits(0x3555).to_f32());
    }

    #[test]
    fn iq4_xs_scale_7_uses_the_top_bits() {
        let mut b = [0u8; 136];
        b[3] = 0b1100_0000;
        b[7] = 0x50;
        assert_eq!(iq4_xs_scales(&b)[7], 0b11_0101 - 32);
        assert_eq!(iq4_xs_scales(&b)[6], -32);
    }
}
