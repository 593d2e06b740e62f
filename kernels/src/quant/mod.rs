//! Block formats of quantised tensors: exact scalar decoders, and encoders.
//!
//! This is the reference that faster code is held against. Decoders perform the same f32 operations in the same order as
//! the public `gguf` Python package (0.19), so results agree with it bit for bit; `tests/fixtures/quant` holds the proof,
//! made by `tests/oracles/quant_fixtures.py`.
//!
//! Format source: the ggml type table and block layouts as published with the GGUF specification.

pub mod encode;
mod encode_iq2;
mod encode_k;
pub mod grids;
pub mod iq;
pub mod k;
pub mod simple;

#[cfg(test)]
mod encode_quality;
#[cfg(test)]
mod fixtures;

use ds4_manifests::GgmlType;

pub use encode::{can_quantize, largest, quantize_row, quantize_row_weighted};

/// Every type that [`dequantize_row`] decodes.
pub const SUPPORTED: [GgmlType; 20] = [
    GgmlType::F32,
    GgmlType::F16,
    GgmlType::BF16,
    GgmlType::Q4_0,
    GgmlType::Q4_1,
    GgmlType::Q5_0,
    GgmlType::Q5_1,
    GgmlType::Q8_0,
    GgmlType::Q2_K,
    GgmlType::Q3_K,
    GgmlType::Q4_K,
    GgmlType::Q5_K,
    GgmlType::Q6_K,
    GgmlType::IQ2_XXS,
    GgmlType::IQ2_XS,
    GgmlType::IQ3_XXS,
    GgmlType::IQ4_NL,
    GgmlType::IQ4_XS,
    GgmlType::IQ1_S,
    GgmlType::IQ1_M,
];

/// True when [`dequantize_row`] decodes `ty`.
pub fn is_supported(ty: GgmlType) -> bool {
    SUPPORTED.contains(&ty)
}

/// Bytes of `elems` elements of `ty`.
///
/// # Panics
/// When `elems` is not a whole number of blocks.
pub fn row_bytes(ty: GgmlType, elems: usize) -> usize {
    let bytes = u64::try_from(elems).ok().and_then(|n| ty.row_bytes(n)).and_then(|n| usize::try_from(n).ok());
    match bytes {
        Some(n) => n,
        None => panic!("a row of {elems} elements is not a whole number of {ty} blocks of {}", ty.block_elems()),
    }
}

/// Decodes a whole row (any whole number of blocks): `dst.len()` elements from `src`.
///
/// # Panics
/// When `src` is not exactly `row_bytes(ty, dst.len())` long, or `ty` is not [supported](is_supported): callers check
/// types when they bind a tensor.
pub fn dequantize_row(ty: GgmlType, src: &[u8], dst: &mut [f32]) {
    assert_eq!(src.len(), row_bytes(ty, dst.len()), "{ty}: wrong number of bytes for {} elements", dst.len());
    match ty {
        GgmlType::F32 => blocks(src, dst, simple::f32),
        GgmlType::F16 => blocks(src, dst, simple::f16),
        GgmlType::BF16 => blocks(src, dst, simple::bf16),
        GgmlType::Q4_0 => blocks(src, dst, simple::q4_0),
        GgmlType::Q4_1 => blocks(src, dst, simple::q4_1),
        GgmlType::Q5_0 => blocks(src, dst, simple::q5_0),
        GgmlType::Q5_1 => blocks(src, dst, simple::q5_1),
        GgmlType::Q8_0 => blocks(src, dst, simple::q8_0),
        GgmlType::Q2_K => blocks(src, dst, k::q2_k),
        GgmlType::Q3_K => blocks(src, dst, k::q3_k),
        GgmlType::Q4_K => blocks(src, dst, k::q4_k),
        GgmlType::Q5_K => blocks(src, dst, k::q5_k),
        GgmlType::Q6_K => blocks(src, dst, k::q6_k),
        GgmlType::IQ2_XXS => blocks(src, dst, iq::iq2_xxs),
        GgmlType::IQ2_XS => blocks(src, dst, iq::iq2_xs),
        GgmlType::IQ3_XXS => blocks(src, dst, iq::iq3_xxs),
        GgmlType::IQ4_NL => blocks(src, dst, iq::iq4_nl),
        GgmlType::IQ4_XS => blocks(src, dst, iq::iq4_xs),
        GgmlType::IQ1_S => blocks(src, dst, iq::iq1_s),
        GgmlType::IQ1_M => blocks(src, dst, iq::iq1_m),
        other => panic!("{other} is not a supported tensor type; check is_supported before binding"),
    }
}

/// Applies a block decoder to every block of a row.
#[inline]
fn blocks<const B: usize, const N: usize>(src: &[u8], dst: &mut [f32], decode: impl Fn(&[u8; B], &mut [f32; N])) {
    let (src, _) = src.as_chunks::<B>();
    let (dst, _) = dst.as_chunks_mut::<N>();
    for (block, out) in src.iter().zip(dst) {
        decode(block, out);
    }
}

/// The half-precision number at `at`, widened.
#[inline]
pub(crate) fn f16_at(block: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The little-endian u16 at `at`.
#[inline]
pub(crate) fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// The little-endian u32 at `at`.
#[inline]
pub(crate) fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_supported_type_decodes_a_row_of_its_size() {
        for ty in SUPPORTED {
            let bytes = vec![0u8; row_bytes(ty, 512)];
            let mut out = vec![f32::NAN; 512];
            dequantize_row(ty, &bytes, &mut out);
            assert!(out.iter().all(|v| *v == 0.0), "{ty}: zero blocks are zeros");
        }
    }

    #[test]
    fn types_without_a_decoder_are_not_supported() {
        for ty in [GgmlType::Q8_1, GgmlType::Q8_K, GgmlType::I8, GgmlType::F64, GgmlType::MXFP4] {
            assert!(!is_supported(ty), "{ty}");
        }
    }

    #[test]
    #[should_panic(expected = "not a whole number of Q4_K blocks of 256")]
    fn partial_blocks_are_refused() {
        row_bytes(GgmlType::Q4_K, 128);
    }

    #[test]
    #[should_panic(expected = "Q8_0: wrong number of bytes for 32 elements")]
    fn short_rows_are_refused() {
        dequantize_row(GgmlType::Q8_0, &[0; 33], &mut [0.0; 32]);
    }
}
