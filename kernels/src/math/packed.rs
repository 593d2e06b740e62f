//! State rows in the bits that their numeric profile leaves: FP8 with f16 rotary parts, and FP4.
//!
//! Rows that went through [`super::lowp`]'s round trips are stored without loss: every value is a code times a power of two,
//! and the smallest power of two that fits the block's largest value fits all of them.

use half::f16;

use super::lowp::{FP4_BLOCK, FP8_BLOCK, pow2_ceil, round_e2m1, round_e4m3};

/// Bytes of an FP8 row: codes, one scale exponent per 64, padding to an even offset, then `rotary` f16.
pub const fn fp8_row_bytes(width: usize, rotary: usize) -> usize {
    let nope = width - rotary;
    (nope + nope.div_ceil(FP8_BLOCK)).next_multiple_of(2) + 2 * rotary
}

/// Bytes of an FP4 row: two codes a byte, low nibble first, then one scale exponent per 32.
pub const fn fp4_row_bytes(width: usize) -> usize {
    width.div_ceil(2) + width.div_ceil(FP4_BLOCK)
}

/// The exponent byte of a power of two (E8M0: 2^(e−127)), and the scale itself.
fn scale_of(amax: f32, limit: f32) -> (u8, f32) {
    let scale = pow2_ceil((amax / limit).max(f32::MIN_POSITIVE));
    // The exponent field of a normal f32 is the E8M0 byte.
    ((scale.to_bits() << 1).to_be_bytes()[0], scale)
}

fn scale_from(e: u8) -> f32 {
    f32::from_bits(u32::from(e) << 23)
}

/// The E4M3FN code of a value that is one.
fn e4m3_code(x: f32) -> u8 {
    let bits = x.abs().to_bits();
    let magnitude = if bits == 0 {
        0
    } else if x.abs() < 0.015_625 {
        // Subnormal: multiples of 2^-9.
        (1..8u8).find(|m| f32::from(*m) / 512.0 == x.abs()).unwrap_or(0)
    } else {
        // Exponent rebased from 127 to 7, three mantissa bits.
        (((bits >> 20) - (120 << 3)) & 0x7f).to_le_bytes()[0]
    };
    magnitude | if x.is_sign_negative() { 0x80 } else { 0 }
}

fn e4m3_value(code: u8) -> f32 {
    let (e, m) = ((code >> 3) & 15, f32::from(code & 7));
    let magnitude = if e == 0 { m / 512.0 } else { (1.0 + m / 8.0) * scale_from(e + 120) };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

fn e2m1_code(x: f32) -> u8 {
    let magnitude = (0..8u8).find(|c| E2M1[usize::from(*c)] == x.abs()).unwrap_or(0);
    magnitude | if x.is_sign_negative() { 8 } else { 0 }
}

fn e2m1_value(code: u8) -> f32 {
    let magnitude = E2M1[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

fn amax(block: &[f32]) -> f32 {
    block.iter().fold(0.0, |m, v| m.max(v.abs()))
}

/// Stores a row; `out` has [`fp8_row_bytes`] bytes.
pub fn store_fp8(row: &[f32], rotary: usize, out: &mut [u8]) {
    let nope = row.len() - rotary;
    let (codes, rest) = out.split_at_mut(nope);
    let (scales, rest) = rest.split_at_mut(nope.div_ceil(FP8_BLOCK));
    for ((block, codes), e) in row[..nope].chunks(FP8_BLOCK).zip(codes.chunks_mut(FP8_BLOCK)).zip(scales) {
        let (byte, scale) = scale_of(amax(block), 448.0);
        *e = byte;
        for (v, c) in block.iter().zip(codes) {
            *c = e4m3_code(round_e4m3(*v / scale));
        }
    }
    let at = rest.len() - 2 * rotary;
    for (v, b) in row[nope..].iter().zip(rest[at..].as_chunks_mut::<2>().0) {
        *b = f16::from_f32(*v).to_le_bytes();
    }
}

/// Loads a row that [`store_fp8`] stored.
pub fn load_fp8(bytes: &[u8], rotary: usize, row: &mut [f32]) {
    let nope = row.len() - rotary;
    let (codes, rest) = bytes.split_at(nope);
    let (scales, rest) = rest.split_at(nope.div_ceil(FP8_BLOCK));
    let (head, tail) = row.split_at_mut(nope);
    for ((block, codes), e) in head.chunks_mut(FP8_BLOCK).zip(codes.chunks(FP8_BLOCK)).zip(scales) {
        let scale = scale_from(*e);
        for (v, c) in block.iter_mut().zip(codes) {
            *v = e4m3_value(*c) * scale;
        }
    }
    let at = rest.len() - 2 * rotary;
    for (v, b) in tail.iter_mut().zip(rest[at..].as_chunks::<2>().0) {
        *v = f16::from_le_bytes(*b).to_f32();
    }
}

/// Stores a row; `out` has [`fp4_row_bytes`] bytes.
pub fn store_fp4(row: &[f32], out: &mut [u8]) {
    let (codes, scales) = out.split_at_mut(row.len().div_ceil(2));
    codes.fill(0);
    for (b, (block, e)) in row.chunks(FP4_BLOCK).zip(scales).enumerate() {
        let (byte, scale) = scale_of(amax(block), 6.0);
        *e = byte;
        for (i, v) in block.iter().enumerate() {
            let at = b * FP4_BLOCK + i;
            codes[at / 2] |= e2m1_code(round_e2m1(*v / scale)) << (4 * (at % 2));
        }
    }
}

/// Loads a row that [`store_fp4`] stored.
pub fn load_fp4(bytes: &[u8], row: &mut [f32]) {
    let (codes, scales) = bytes.split_at(row.len().div_ceil(2));
    for (b, (block, e)) in row.chunks_mut(FP4_BLOCK).zip(scales).enumerate() {
        let scale = scale_from(*e);
        for (i, v) in block.iter_mut().enumerate() {
            let at = b * FP4_BLOCK + i;
            *v = e2m1_value(codes[at / 2] >> (4 * (at % 2)) & 15) * scale;
        }
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "test values are rounded to f32 on purpose")]
mod tests {
    use super::*;
    use crate::math::lowp;

    /// Rows of very different sizes, zeros included.
    fn rows(width: usize) -> Vec<Vec<f32>> {
        let mut state = 1u64;
        let mut next = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            f64::from(u32::try_from(state >> 40).unwrap()) / f64::from(1u32 << 23) - 1.0
        };
        let mut all = vec![vec![0.0; width]];
        for k in 0..200 {
            let size = 10f64.powi(k % 13 - 8);
            all.push((0..width).map(|_| (next().powi(3) * size) as f32).collect());
        }
        all
    }

    #[test]
    fn deepseek_v4_fp8_rows_are_stored_without_loss() {
        assert_eq!(fp8_row_bytes(512, 64), 448 + 7 + 1 + 128);
        for width in [512, 32] {
            let rotary = width / 8;
            for mut row in rows(width) {
                lowp::fp8_round_trip(&mut row[..width - rotary]);
                lowp::f16_round_trip(&mut row);
                let before = row.clone();
                let mut bytes = vec![0xaa; fp8_row_bytes(width, rotary)];
                store_fp8(&row, rotary, &mut bytes);
                load_fp8(&bytes, rotary, &mut row);
                assert_eq!(row, before);
            }
        }
    }

    #[test]
    fn deepseek_v4_fp4_rows_are_stored_without_loss() {
        assert_eq!(fp4_row_bytes(128), 68);
        for width in [128, 16] {
            for mut row in rows(width) {
                lowp::hadamard(&mut row);
                lowp::fp4_round_trip(&mut row);
                let before = row.clone();
                let mut bytes = vec![0xaa; fp4_row_bytes(width)];
                store_fp4(&row, &mut bytes);
                load_fp4(&bytes, &mut row);
                assert_eq!(row, before);
            }
        }
    }

    #[test]
    fn every_e4m3_code_but_nan_is_its_value_again() {
        for code in (0..=255u8).filter(|c| c & 0x7f != 0x7f) {
            assert_eq!(e4m3_code(e4m3_value(code)), code);
        }
        assert_eq!((e4m3_value(0x7e), e4m3_value(1), e4m3_value(0x38)), (448.0, 1.0 / 512.0, 1.0));
    }
}
