//! The K types: super-blocks of 256 elements with quantised sub-block scales.
//!
//! Each function decodes one block; operation order is part of the contract (see the [module above](super)).

use super::f16_at;

/// Unpacks the eight 6-bit scales and eight 6-bit minimums of a Q4_K or Q5_K block.
///
/// Bytes 0..4 hold scales 0..4 in their low six bits, bytes 4..8 minimums 0..4; their upper two bits are the upper bits
/// of scales and minimums 4..8, whose lower four bits are the nibbles of bytes 8..12 (scale low, minimum high).
#[inline]
pub fn scales_and_mins(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let (mut scales, mut mins) = ([0; 8], [0; 8]);
    for j in 0..4 {
        let (s, m, low) = (packed[j], packed[j + 4], packed[j + 8]);
        scales[j] = s & 63;
        mins[j] = m & 63;
        scales[j + 4] = (low & 15) | ((s >> 6) << 4);
        mins[j + 4] = (low >> 4) | ((m >> 6) << 4);
    }
    (scales, mins)
}

/// Unpacks the sixteen 6-bit scales of a Q3_K block, offset of 32 removed: -32..=31.
///
/// Scale `i` has its low nibble in byte `i % 8` (low half for `i < 8`) and its upper two bits in byte `8 + i % 4`, at
/// bit `2 * (i / 4)`.
#[inline]
pub fn q3_scales(packed: &[u8; 12]) -> [i8; 16] {
    std::array::from_fn(|i| {
        let low = (packed[i % 8] >> (4 * (i / 8))) & 15;
        let high = (packed[8 + i % 4] >> (2 * (i / 4))) & 3;
        (low | (high << 4)).cast_signed() - 32
    })
}

/// `[16 × (scale: 4 bits, min: 4 bits)][64 bytes of 2 bits][d: f16][dmin: f16]`: `(d*sc) * q - dmin*m`, 16 per scale.
///
/// Elements `128h + 32s + j` sit in byte `32h + j` at bit `2s`.
pub fn q2_k(b: &[u8; 84], out: &mut [f32; 256]) {
    let (scales, qs) = (&b[..16], &b[16..80]);
    let (d, dmin) = (f16_at(b, 80), f16_at(b, 82));
    for (g, group) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(scales[g] & 15);
        let min = dmin * f32::from(scales[g] >> 4);
        let (first, shift) = (32 * (g / 8) + 16 * (g % 2), 2 * (g % 8 / 2));
        for (o, &q) in group.iter_mut().zip(&qs[first..]) {
            *o = scale * f32::from((q >> shift) & 3) - min;
        }
    }
}

/// `[32 bytes of high bits][64 bytes of 2 bits][12 bytes of scales][d: f16]`: `(d*sc) * q`, `q` in -4..4, 16 per scale.
///
/// The two low bits lie as in [`q2_k`]; the high bit of element `32s + j` is bit `s` of byte `j`, and *clear* means -4.
pub fn q3_k(b: &[u8; 110], out: &mut [f32; 256]) {
    let (high, qs) = (&b[..32], &b[32..96]);
    let scales = q3_scales(b[96..108].as_array().expect("12 bytes"));
    let d = f16_at(b, 108);
    for (g, group) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(scales[g]);
        let half = 16 * (g % 2);
        let (first, shift, bit) = (32 * (g / 8) + half, 2 * (g % 8 / 2), g / 2);
        for (j, o) in group.iter_mut().enumerate() {
            let low = ((qs[first + j] >> shift) & 3).cast_signed();
            let offset = if (high[half + j] >> bit) & 1 == 1 { 0 } else { 4 };
            *o = scale * f32::from(low - offset);
        }
    }
}

/// `[d: f16][dmin: f16][12 bytes of scales and mins][128 bytes of nibbles]`: `(d*sc) * q - dmin*m`, 32 per scale.
///
/// Byte `32h + j` holds element `64h + j` low and `64h + 32 + j` high.
pub fn q4_k(b: &[u8; 144], out: &mut [f32; 256]) {
    let (d, dmin) = (f16_at(b, 0), f16_at(b, 2));
    let (scales, mins) = scales_and_mins(b[4..16].as_array().expect("12 bytes"));
    let qs = &b[16..];
    for (g, group) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = (d * f32::from(scales[g]), dmin * f32::from(mins[g]));
        for (o, &q) in group.iter_mut().zip(&qs[32 * (g / 2)..]) {
            *o = scale * f32::from((q >> (4 * (g % 2))) & 15) - min;
        }
    }
}

/// `[d: f16][dmin: f16][12 bytes of scales and mins][32 bytes of fifth bits][128 bytes of nibbles]`:
/// `(d*sc) * q - dmin*m`, 32 per scale.
///
/// Nibbles lie as in [`q4_k`]; the fifth bit of element `32g + j` is bit `g` of byte `j`.
pub fn q5_k(b: &[u8; 176], out: &mut [f32; 256]) {
    let (d, dmin) = (f16_at(b, 0), f16_at(b, 2));
    let (scales, mins) = scales_and_mins(b[4..16].as_array().expect("12 bytes"));
    let (high, qs) = (&b[16..48], &b[48..]);
    for (g, group) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = (d * f32::from(scales[g]), dmin * f32::from(mins[g]));
        for (j, o) in group.iter_mut().enumerate() {
            let q = ((qs[32 * (g / 2) + j] >> (4 * (g % 2))) & 15) | (((high[j] >> g) & 1) << 4);
            *o = scale * f32::from(q) - min;
        }
    }
}

/// `[128 bytes of nibbles][64 bytes of upper 2 bits][16 × i8 scales][d: f16]`: `(d*sc) * (q - 32)`, 16 per scale.
///
/// In each half of 128: element `32s + j` has its nibble in byte `32(s % 2) + j` (high half for `s >= 2`) and its upper
/// bits in byte `j` at bit `2s`.
pub fn q6_k(b: &[u8; 210], out: &mut [f32; 256]) {
    let (low, high, scales) = (&b[..128], &b[128..192], &b[192..208]);
    let d = f16_at(b, 208);
    for (g, group) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(scales[g].cast_signed());
        let (h, s, first) = (g / 8, g % 8 / 2, 16 * (g % 2));
        for (j, o) in group.iter_mut().enumerate() {
            let nibble = (low[64 * h + 32 * (s % 2) + first + j] >> (4 * (s / 2))) & 15;
            let upper = (high[32 * h + first + j] >> (2 * s)) & 3;
            *o = scale * f32::from((nibble | (upper << 4)).cast_signed() - 32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_5_and_min_5_come_from_three_bytes() {
        let mut p = [0u8; 12];
        p[1] = 0b10_000000; // upper bits of scale 5
        p[5] = 0b01_000000; // upper bits of min 5
        p[9] = 0xa3; // low nibbles: scale 3, min 10
        let (s, m) = scales_and_mins(&p);
        assert_eq!((s[5], m[5]), (0b10_0011, 0b01_1010));
        assert_eq!((s[1], m[1]), (0, 0));
    }

    #[test]
    fn q3_scale_13_comes_from_bytes_5_and_9() {
        let mut p = [0u8; 12];
        p[5] = 0x90;
        p[9] = 0b01_00_00_00;
        let s = q3_scales(&p);
        assert_eq!(s[13], (0b01_1001) - 32);
        assert_eq!(s[5], -32);
    }
}
