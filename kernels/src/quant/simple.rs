//! Plain floats and the 32-element types: one f16 scale (and for `_1` types an f16 minimum) per block.
//!
//! In every 4- and 5-bit block of 32, byte `j` of the nibbles holds element `j` low and element `j + 16` high.
//! Each function decodes one block; operation order is part of the contract (see the [module above](super)).

use super::{f16_at, u32_at};

/// IEEE single precision.
#[inline]
pub fn f32(b: &[u8; 4], out: &mut [f32; 1]) {
    out[0] = f32::from_le_bytes(*b);
}

/// IEEE half precision.
#[inline]
pub fn f16(b: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = f16_at(b, 0);
}

/// bfloat16: the upper half of an f32.
#[inline]
pub fn bf16(b: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
}

/// `[d: f16][16 nibbles]`: `d * (q - 8)`.
#[inline]
pub fn q4_0(b: &[u8; 18], out: &mut [f32; 32]) {
    let d = f16_at(b, 0);
    for (j, &q) in b[2..].iter().enumerate() {
        out[j] = d * (f32::from(q & 15) - 8.0);
        out[j + 16] = d * (f32::from(q >> 4) - 8.0);
    }
}

/// `[d: f16][m: f16][16 nibbles]`: `d * q + m`.
#[inline]
pub fn q4_1(b: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (f16_at(b, 0), f16_at(b, 2));
    for (j, &q) in b[4..].iter().enumerate() {
        out[j] = d * f32::from(q & 15) + m;
        out[j + 16] = d * f32::from(q >> 4) + m;
    }
}

/// The 5-bit value of element `j` (0..32): nibble from `qs`, fifth bit from bit `j` of `high`.
#[inline]
fn five_bits(qs: &[u8], high: u32, j: usize) -> u8 {
    let nibble = if j < 16 { qs[j] & 15 } else { qs[j - 16] >> 4 };
    nibble | (u8::from((high >> j) & 1 == 1) << 4)
}

/// `[d: f16][fifth bits: u32][16 nibbles]`: `d * (q - 16)`.
#[inline]
pub fn q5_0(b: &[u8; 22], out: &mut [f32; 32]) {
    let (d, high) = (f16_at(b, 0), u32_at(b, 2));
    for (j, o) in out.iter_mut().enumerate() {
        *o = d * (f32::from(five_bits(&b[6..], high, j)) - 16.0);
    }
}

/// `[d: f16][m: f16][fifth bits: u32][16 nibbles]`: `d * q + m`.
#[inline]
pub fn q5_1(b: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m, high) = (f16_at(b, 0), f16_at(b, 2), u32_at(b, 4));
    for (j, o) in out.iter_mut().enumerate() {
        *o = d * f32::from(five_bits(&b[8..], high, j)) + m;
    }
}

/// `[d: f16][32 × i8]`: `q * d`.
#[inline]
pub fn q8_0(b: &[u8; 34], out: &mut [f32; 32]) {
    let d = f16_at(b, 0);
    for (o, &q) in out.iter_mut().zip(&b[2..]) {
        *o = f32::from(q.cast_signed()) * d;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Worked by hand from the layout: scale 0.5, nibbles low = 15, high = 0.
    #[test]
    fn q4_0_puts_low_nibbles_first() {
        let mut b = [0x0f; 18];
        b[..2].copy_from_slice(&half::f16::from_f32(0.5).to_le_bytes());
        let mut out = [0.0; 32];
        q4_0(&b, &mut out);
        assert!(out[..16].iter().all(|&v| v == 3.5));
        assert!(out[16..].iter().all(|&v| v == -4.0));
    }

    /// Bit 17 of the fifth bits belongs to element 17, which is a high nibble.
    #[test]
    fn q5_1_takes_the_fifth_bit_of_its_element() {
        let mut b = [0u8; 24];
        b[..2].copy_from_slice(&half::f16::ONE.to_le_bytes());
        b[2..4].copy_from_slice(&half::f16::from_f32(-2.0).to_le_bytes());
        b[4..8].copy_from_slice(&(1u32 << 17).to_le_bytes());
        b[8 + 1] = 0x30;
        let mut out = [0.0; 32];
        q5_1(&b, &mut out);
        assert_eq!(out[17], 16.0 + 3.0 - 2.0);
        assert_eq!(out[1], -2.0);
    }

    #[test]
    fn bf16_and_f16_widen_exactly() {
        let mut out = [0.0];
        bf16(&0xc049u16.to_le_bytes(), &mut out);
        assert_eq!(out[0], -3.140_625);
        f16(&0x0001u16.to_le_bytes(), &mut out);
        assert_eq!(out[0], 2f32.powi(-24));
    }
}
