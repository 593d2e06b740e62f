//! Panels of common formats straight from memory with AVX-512: one row's products cost mostly this. The simple formats are
//! here, those with blocks of 256 in [`unpack_k_avx512`].
//!
//! A block's 16 bytes of each row go to one 128-bit lane (row `4l + j` to lane `l` of register `j`); transposing the four
//! registers' dwords within lanes puts dword `t` of all 16 rows side by side, which is a panel's line.

#![allow(unsafe_code, reason = "std::arch intrinsics")]
#![allow(clippy::needless_range_loop, reason = "indices name registers and rows")]

use std::arch::x86_64::*;

use ds4_manifests::GgmlType;

use crate::cpu::isa::{Isa, Kind};
use crate::cpu::lanes::N;
use crate::cpu::panel::Panel;
use crate::cpu::q16::Layout;
use crate::cpu::unpack_k_avx512;

/// Unpacks 16 rows of a format; false when there is no direct way and nothing was done.
pub(crate) fn unpack(isa: Isa, ty: GgmlType, rows: &[&[u8]], blocks: usize, panel: &mut Panel) -> bool {
    if isa.kind() != Kind::Avx512 || rows.len() != N {
        return false;
    }
    // Bytes and blocks of 32 of one block of the type, inputs per scale, minimums, offset.
    let (bytes, per, sub, min, offset) = match ty {
        GgmlType::Q4_0 => (18, 1, 32, false, 8),
        GgmlType::Q4_1 => (20, 1, 32, true, 0),
        GgmlType::Q8_0 => (34, 1, 32, false, 128),
        GgmlType::Q2_K => (84, 8, 16, true, 0),
        GgmlType::Q4_K => (144, 8, 32, true, 0),
        GgmlType::IQ2_XXS => (66, 8, 32, false, 128),
        _ => return false,
    };
    assert!(
        rows.iter().all(|r| r.len() >= blocks / per * bytes) && blocks.is_multiple_of(per),
        "rows of {blocks} blocks"
    );
    panel.shape(Layout::Split, blocks, sub, min, offset);
    let rows: [*const u8; N] = std::array::from_fn(|i| rows[i].as_ptr());
    // SAFETY: the CPU has AVX-512, each row has `blocks` blocks (checked) and `shape` made room for them.
    unsafe {
        match ty {
            GgmlType::Q4_0 => nibbles::<18, 2, false>(rows, blocks, panel),
            GgmlType::Q4_1 => nibbles::<20, 4, true>(rows, blocks, panel),
            GgmlType::Q2_K => unpack_k_avx512::q2_k(rows, blocks, panel),
            GgmlType::Q4_K => unpack_k_avx512::q4_k(rows, blocks, panel),
            GgmlType::IQ2_XXS => unpack_k_avx512::iq2_xxs(rows, blocks, panel),
            _ => bytes8(rows, blocks, panel),
        }
    }
    true
}

/// Asks for the next panel's bytes while this one is unpacked: rows follow each other in memory, and 16 streams at once are
/// more than the hardware prefetcher follows. A prefetch never faults, so the last panel of a weight needs no care.
#[target_feature(enable = "avx512f")]
#[inline]
pub(crate) fn prefetch<const BYTES: usize>(rows: &[*const u8; N], blocks: usize, b: usize) {
    let next = rows[0].wrapping_add(N * BYTES * (blocks + b));
    let mut at = 0;
    while at < N * BYTES {
        _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(at).cast());
        at += 64;
    }
}

/// Dword `t` of 16 bytes at `at` of every row, for `t` in 0..4, in row order.
///
/// # Safety
/// Every row must have 16 bytes at `at`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
pub(crate) unsafe fn dwords(rows: &[*const u8; N], at: usize) -> [__m512i; 4] {
    let mut z = [_mm512_setzero_si512(); 4];
    for j in 0..4 {
        // SAFETY: as the caller promises.
        unsafe {
            let part = [
                _mm_loadu_si128(rows[j].add(at).cast()),
                _mm_loadu_si128(rows[4 + j].add(at).cast()),
                _mm_loadu_si128(rows[8 + j].add(at).cast()),
                _mm_loadu_si128(rows[12 + j].add(at).cast()),
            ];
            let low = _mm512_mask_broadcast_i32x4(_mm512_castsi128_si512(part[0]), 0x00f0, part[1]);
            let low = _mm512_mask_broadcast_i32x4(low, 0x0f00, part[2]);
            z[j] = _mm512_mask_broadcast_i32x4(low, 0xf000, part[3]);
        }
    }
    let (a, b) = (_mm512_unpacklo_epi32(z[0], z[1]), _mm512_unpackhi_epi32(z[0], z[1]));
    let (c, d) = (_mm512_unpacklo_epi32(z[2], z[3]), _mm512_unpackhi_epi32(z[2], z[3]));
    [_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c), _mm512_unpacklo_epi64(b, d), _mm512_unpackhi_epi64(b, d)]
}

/// The dword at `at` of every row: in four independent chains of merges.
///
/// # Safety
/// Every row must have 4 bytes at `at`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
pub(crate) unsafe fn heads(rows: &[*const u8; N], at: usize) -> __m512i {
    let mut z = [_mm512_setzero_si512(); 4];
    for (c, z) in z.iter_mut().enumerate() {
        for i in 4 * c..4 * c + 4 {
            // SAFETY: as the caller promises.
            let head = unsafe { _mm_loadu_si32(rows[i].add(at).cast()) };
            *z = _mm512_mask_broadcastd_epi32(*z, 1 << i, head);
        }
    }
    _mm512_or_si512(_mm512_or_si512(z[0], z[1]), _mm512_or_si512(z[2], z[3]))
}

/// The low halves of 16 dwords as half floats, widened.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
pub(crate) fn low_halves(z: __m512i) -> __m512 {
    _mm512_cvtph_ps(_mm512_cvtepi32_epi16(z))
}

/// Formats of a half-float scale (and minimum) and 16 bytes of nibbles at `AT`.
///
/// # Safety
/// Rows have `blocks` blocks and the panel has room for them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn nibbles<const BYTES: usize, const AT: usize, const MIN: bool>(
    rows: [*const u8; N],
    blocks: usize,
    panel: &mut Panel,
) {
    let mask = _mm512_set1_epi8(15);
    for b in 0..blocks {
        // SAFETY: block `b` of the rows and its lines are in bounds by the caller's promise.
        unsafe {
            prefetch::<BYTES>(&rows, blocks, b);
            let q = panel.q.as_mut_ptr().cast::<__m512i>().add(b * 8);
            for (t, v) in dwords(&rows, b * BYTES + AT).into_iter().enumerate() {
                _mm512_store_si512(q.add(t), _mm512_and_si512(v, mask));
                _mm512_store_si512(q.add(4 + t), _mm512_and_si512(_mm512_srli_epi16::<4>(v), mask));
            }
            let head = heads(&rows, b * BYTES);
            _mm512_store_ps(panel.scale.as_mut_ptr().add(b).cast(), low_halves(head));
            if MIN {
                let min = low_halves(_mm512_srli_epi32::<16>(head));
                _mm512_store_ps(panel.min.as_mut_ptr().add(b).cast(), min);
            }
        }
    }
}

/// Q8_0: a half-float scale and 32 signed bytes.
///
/// # Safety
/// As [`nibbles`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn bytes8(rows: [*const u8; N], blocks: usize, panel: &mut Panel) {
    let sign = _mm512_set1_epi8(-128);
    for b in 0..blocks {
        // SAFETY: block `b` of the rows and its lines are in bounds by the caller's promise.
        unsafe {
            prefetch::<34>(&rows, blocks, b);
            let q = panel.q.as_mut_ptr().cast::<__m512i>().add(b * 8);
            for half in 0..2 {
                for (t, v) in dwords(&rows, b * 34 + 2 + 16 * half).into_iter().enumerate() {
                    _mm512_store_si512(q.add(4 * half + t), _mm512_xor_si512(v, sign));
                }
            }
            _mm512_store_ps(panel.scale.as_mut_ptr().add(b).cast(), low_halves(heads(&rows, b * 34)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::Random;
    use crate::quant;

    #[test]
    fn direct_panels_equal_staged_ones() {
        let Some(isa) = Isa::available().into_iter().find(|i| i.kind() == Kind::Avx512) else {
            println!("no AVX-512 here: nothing to compare");
            return;
        };
        let seed = Random::fresh_seed();
        for ty in [GgmlType::Q4_0, GgmlType::Q4_1, GgmlType::Q8_0, GgmlType::Q2_K, GgmlType::Q4_K, GgmlType::IQ2_XXS] {
            let blocks = if ty.block_elems() == 32 { 7 } else { 24 };
            let cols = 32 * blocks;
            let bytes = Random::new(seed).weights(ty, N, cols);
            let rows: Vec<&[u8]> = bytes.chunks_exact(quant::row_bytes(ty, cols)).collect();
            let (mut direct, mut staged) = (Panel::default(), Panel::default());
            assert!(unpack(isa, ty, &rows, blocks, &mut direct));
            staged.unpack_staged(isa, ty, &rows, cols);
            let bits = |lines: &[crate::cpu::panel::Line]| -> Vec<u32> {
                lines.iter().flat_map(|l| l.0.map(f32::to_bits)).collect()
            };
            assert_eq!(
                (direct.sub, direct.has_min, direct.offset),
                (staged.sub, staged.has_min, staged.offset),
                "{ty}"
            );
            let scales = blocks * 32 / direct.sub;
            assert_eq!(bits(&direct.q[..blocks * 8]), bits(&staged.q[..blocks * 8]), "{ty} (DS4_SEED={seed})");
            assert_eq!(bits(&direct.scale[..scales]), bits(&staged.scale[..scales]), "{ty} (DS4_SEED={seed})");
            assert_eq!(bits(&direct.min), bits(&staged.min), "{ty} (DS4_SEED={seed})");
        }
    }
}
