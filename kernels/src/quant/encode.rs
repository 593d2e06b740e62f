//! Encoders: `ds4 gguf convert` and tests write tensors with them.
//!
//! The simple types here are equal to the `gguf` package's encoders bit for bit. Q4_K and Q2_K (`encode_k`) and IQ2_XXS
//! (`encode_iq2`) are searches of our own for the least squared error, which may be weighted by the importance of each input
//! channel; their quality is held against ggml's encoders.

use ds4_manifests::GgmlType;
use half::f16;

use super::{encode_iq2, encode_k, row_bytes};

/// True when [`quantize_row`] encodes `ty`.
pub fn can_quantize(ty: GgmlType) -> bool {
    matches!(
        ty,
        GgmlType::F32
            | GgmlType::F16
            | GgmlType::BF16
            | GgmlType::Q4_0
            | GgmlType::Q4_1
            | GgmlType::Q5_0
            | GgmlType::Q5_1
            | GgmlType::Q8_0
            | GgmlType::Q4_K
            | GgmlType::Q2_K
            | GgmlType::IQ2_XXS
    )
}

/// The largest magnitude that `ty` can hold: beyond it an encoder's scale (or value) would not fit its f16.
///
/// Q8_0 reaches 127 times an f16, Q5_1 and Q4_1 keep the minimum itself as one, K types have `dmin·63` (Q4_K) and `dmin·15`
/// (Q2_K) for the minimum, IQ2_XXS `d·31/8·43`; 2 % are left for rounding.
pub fn largest(ty: GgmlType) -> f32 {
    let half = f16::MAX.to_f32();
    match ty {
        GgmlType::F32 => f32::MAX,
        GgmlType::BF16 => half::bf16::MAX.to_f32(),
        GgmlType::F16 | GgmlType::Q4_1 | GgmlType::Q5_1 => half,
        GgmlType::Q4_0 => 8.0 * half,
        GgmlType::Q5_0 => 16.0 * half,
        GgmlType::Q8_0 => 127.0 * half,
        GgmlType::Q4_K => 0.98 * 63.0 * half,
        GgmlType::Q2_K => 0.98 * 15.0 * half,
        GgmlType::IQ2_XXS => 0.98 * 31.0 / 8.0 * 43.0 * half,
        other => panic!("{other} has no encoder"),
    }
}

/// Encodes a row of finite values, none beyond [`largest`].
///
/// # Panics
/// When the length is not a whole number of blocks, or [`can_quantize`] says no.
pub fn quantize_row(ty: GgmlType, x: &[f32]) -> Vec<u8> {
    quantize_row_weighted(ty, x, None)
}

/// The same with the importance of each element (zero or more, one an element): Q4_K, Q2_K and IQ2_XXS then minimise the
/// squared error weighted by it, other types do not look at it. A block whose elements all have importance zero is encoded as
/// if they had one.
///
/// # Panics
/// As [`quantize_row`], and when there is not one importance an element.
pub fn quantize_row_weighted(ty: GgmlType, x: &[f32], importance: Option<&[f32]>) -> Vec<u8> {
    if let Some(importance) = importance {
        assert_eq!(importance.len(), x.len(), "one importance an element");
    }
    let encode: SearchedBlock = match ty {
        GgmlType::Q4_K => |x, w, _, out| encode_k::q4_k(x, w, out),
        GgmlType::Q2_K => |x, w, _, out| encode_k::q2_k(x, w, out),
        GgmlType::IQ2_XXS => encode_iq2::iq2_xxs,
        _ => return simple(ty, x),
    };
    let mut out = Vec::with_capacity(row_bytes(ty, x.len()));
    for (i, block) in x.as_chunks::<256>().0.iter().enumerate() {
        let own = importance.map(|w| &w.as_chunks::<256>().0[i]).filter(|w| w.iter().any(|w| *w > 0.0));
        encode(block, own.unwrap_or(&[1.0; 256]), own.is_none(), &mut out);
    }
    out
}

/// Encodes a block from values, weights, and whether the weights are all one.
type SearchedBlock = fn(&[f32; 256], &[f32; 256], bool, &mut Vec<u8>);

fn simple(ty: GgmlType, x: &[f32]) -> Vec<u8> {
    let mut out = Vec::with_capacity(row_bytes(ty, x.len()));
    let (blocks, _) = x.as_chunks::<32>();
    match ty {
        GgmlType::F32 => x.iter().for_each(|v| out.extend(v.to_le_bytes())),
        GgmlType::F16 => x.iter().for_each(|v| out.extend(f16::from_f32(*v).to_le_bytes())),
        GgmlType::BF16 => x.iter().for_each(|v| out.extend(half::bf16::from_f32(*v).to_le_bytes())),
        GgmlType::Q4_0 => blocks.iter().for_each(|b| symmetric(b, 4, &mut out)),
        GgmlType::Q5_0 => blocks.iter().for_each(|b| symmetric(b, 5, &mut out)),
        GgmlType::Q4_1 => blocks.iter().for_each(|b| affine(b, 4, &mut out)),
        GgmlType::Q5_1 => blocks.iter().for_each(|b| affine(b, 5, &mut out)),
        GgmlType::Q8_0 => blocks.iter().for_each(|b| q8_0(b, &mut out)),
        other => {
            panic!("{other} has no encoder; use F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q2_K or IQ2_XXS")
        }
    }
    out
}

fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// Rounds `v + offset` down to a level, at most `top`.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0.5 <= v < 33, and the cast saturates")]
fn level(v: f32, offset: f32, top: u8) -> u8 {
    ((v + offset).trunc() as u8).min(top)
}

/// Q4_0, Q5_0: the element of largest magnitude (the first of equals) takes the most negative level.
fn symmetric(x: &[f32; 32], bits: u32, out: &mut Vec<u8>) {
    let extreme = x[1..].iter().fold(x[0], |e, &v| if v.abs() > e.abs() { v } else { e });
    let (half, top) = if bits == 4 { (8.0, 15) } else { (16.0, 31) };
    let d = extreme / -half;
    let id = inverse(d);
    out.extend(f16::from_f32(d).to_le_bytes());
    // One addition of half + 0.5, as the format's encoder does: two additions would round differently.
    let q = x.map(|v| level(v * id, half + 0.5, top));
    pack(&q, bits, out);
}

/// Q4_1, Q5_1: levels from the minimum to the maximum.
fn affine(x: &[f32; 32], bits: u32, out: &mut Vec<u8>) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let min = x.iter().copied().fold(f32::INFINITY, f32::min);
    let top = if bits == 4 { 15 } else { 31 };
    let d = (max - min) / f32::from(top);
    let id = inverse(d);
    out.extend(f16::from_f32(d).to_le_bytes());
    out.extend(f16::from_f32(min).to_le_bytes());
    let q = x.map(|v| level((v - min) * id, 0.5, top));
    pack(&q, bits, out);
}

/// Fifth bits (if any) as a little-endian u32, then nibbles: element `j` low, `j + 16` high.
fn pack(q: &[u8; 32], bits: u32, out: &mut Vec<u8>) {
    if bits == 5 {
        let high = q.iter().enumerate().fold(0u32, |h, (j, &v)| h | (u32::from(v >> 4) << j));
        out.extend(high.to_le_bytes());
    }
    out.extend((0..16).map(|j| (q[j] & 15) | (q[j + 16] << 4)));
}

fn q8_0(x: &[f32; 32], out: &mut Vec<u8>) {
    let d = x.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0;
    let id = inverse(d);
    out.extend(f16::from_f32(d).to_le_bytes());
    #[allow(clippy::cast_possible_truncation, reason = "|v / d| <= 127 up to rounding, and the cast saturates")]
    out.extend(x.iter().map(|v| ((v * id).round() as i8).cast_unsigned()));
}

#[cfg(test)]
mod tests {
    use super::super::dequantize_row;
    use super::*;

    /// Half a level is the most that rounding may cost, plus what storing the scale as f16 costs.
    #[test]
    fn what_is_encoded_decodes_within_half_a_level() {
        let x: Vec<f32> = (0..128u8).map(|i| (f32::from(i) * 1.3).sin() + 0.2).collect();
        for (ty, levels) in [
            (GgmlType::Q4_0, 8.0),
            (GgmlType::Q4_1, 7.5),
            (GgmlType::Q5_0, 16.0),
            (GgmlType::Q5_1, 15.5),
            (GgmlType::Q8_0, 127.0),
        ] {
            let bytes = quantize_row(ty, &x);
            let mut y = vec![0.0; x.len()];
            dequantize_row(ty, &bytes, &mut y);
            // Symmetric types spend one level: the side opposite the extreme may clip by a whole level.
            let allowed = 1.2 / levels * if matches!(ty, GgmlType::Q4_0 | GgmlType::Q5_0) { 1.0 } else { 0.55 };
            for (a, b) in x.iter().zip(&y) {
                assert!((a - b).abs() <= allowed, "{ty}: {a} became {b}, allowed {allowed}");
            }
        }
    }

    #[test]
    fn zeros_encode_to_zeros() {
        for ty in super::super::SUPPORTED.into_iter().filter(|t| can_quantize(*t)) {
            let bytes = quantize_row(ty, &[0.0; 256]);
            let mut y = [1.0; 256];
            dequantize_row(ty, &bytes, &mut y);
            assert!(y.iter().all(|v| *v == 0.0), "{ty}");
        }
    }
}
