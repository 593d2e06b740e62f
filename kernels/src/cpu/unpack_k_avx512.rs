//! Panels of Q2_K, Q4_K and IQ2_XXS straight from memory with AVX-512: the experts' types of DeepSeek V4, whose unpacking was
//! half of a decode step.
//!
//! As in [`super::unpack_avx512`], equal bytes of 16 rows are brought side by side first; fields are then cut out of whole
//! registers. The scales are computed with the operations of [`crate::cpu::formats`], so that panels are equal bit for bit.

#![allow(unsafe_code, reason = "std::arch intrinsics")]
#![allow(clippy::needless_range_loop, reason = "indices name registers and rows")]

use std::arch::x86_64::*;
use std::sync::LazyLock;

use crate::cpu::lanes::{N, array};
use crate::cpu::panel::{Line, Panel};
use crate::cpu::unpack_avx512::{dwords, heads, low_halves, prefetch};
use crate::quant::grids;

/// Blocks of 32 in one of 256.
const PER: usize = 8;

/// Bytes 0 to 3 of 16 dwords, each as 16 floats.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn byte_floats(x: __m512i) -> [__m512; 4] {
    let mask = _mm512_set1_epi32(0xff);
    [
        _mm512_cvtepi32_ps(_mm512_and_si512(x, mask)),
        _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32::<8>(x), mask)),
        _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32::<16>(x), mask)),
        _mm512_cvtepi32_ps(_mm512_srli_epi32::<24>(x)),
    ]
}

/// Stores `d·s` (and `-(dmin·m)`) for four consecutive sub-blocks, whose `s` and `m` are the bytes of `scales` and `mins`.
///
/// # Safety
/// Both pointers have room for four lines.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
unsafe fn put_scales(d: __m512, dmin: __m512, scales: __m512i, mins: __m512i, scale: *mut Line, min: *mut Line) {
    let sign = _mm512_set1_ps(-0.0);
    let (scales, mins) = (byte_floats(scales), byte_floats(mins));
    for j in 0..4 {
        // SAFETY: as the caller promises; lines are aligned to 64 bytes.
        unsafe {
            _mm512_store_ps(scale.add(j).cast(), _mm512_mul_ps(d, scales[j]));
            _mm512_store_ps(min.add(j).cast(), _mm512_xor_ps(_mm512_mul_ps(dmin, mins[j]), sign));
        }
    }
}

/// Q2_K: 16 bytes of scales and minimums, 64 of 2-bit fields, `d`, `dmin`.
///
/// # Safety
/// Rows have `blocks / 8` blocks of 256 and the panel has room for them; the CPU has AVX-512 F, BW, VL and DQ.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(crate) unsafe fn q2_k(rows: [*const u8; N], blocks: usize, panel: &mut Panel) {
    const BYTES: usize = 84;
    let (low, two) = (_mm512_set1_epi8(15), _mm512_set1_epi8(3));
    for b in 0..blocks / PER {
        // SAFETY: block `b` of the rows and its 64 lines of quants and 16 of scales are in bounds by the caller's promise.
        unsafe {
            prefetch::<BYTES>(&rows, blocks / PER, b);
            let at = b * BYTES;
            let head = heads(&rows, at + 80);
            let (d, dmin) = (low_halves(head), low_halves(_mm512_srli_epi32::<16>(head)));
            let (scale, min) = (panel.scale.as_mut_ptr().add(b * 16), panel.min.as_mut_ptr().add(b * 16));
            for (t, v) in dwords(&rows, at).into_iter().enumerate() {
                let mins = _mm512_and_si512(_mm512_srli_epi16::<4>(v), low);
                put_scales(d, dmin, _mm512_and_si512(v, low), mins, scale.add(4 * t), min.add(4 * t));
            }
            let q = panel.q.as_mut_ptr().cast::<__m512i>().add(b * PER * 8);
            for m in 0..4 {
                // Sixteen bytes: half a run of 32, which holds four blocks' fields.
                for (t, v) in dwords(&rows, at + 16 + 16 * m).into_iter().enumerate() {
                    let to = q.add(m / 2 * 32 + m % 2 * 4 + t);
                    _mm512_store_si512(to, _mm512_and_si512(v, two));
                    _mm512_store_si512(to.add(8), _mm512_and_si512(_mm512_srli_epi16::<2>(v), two));
                    _mm512_store_si512(to.add(16), _mm512_and_si512(_mm512_srli_epi16::<4>(v), two));
                    _mm512_store_si512(to.add(24), _mm512_and_si512(_mm512_srli_epi16::<6>(v), two));
                }
            }
        }
    }
}

/// Q4_K: `d`, `dmin`, 12 bytes of 6-bit scales and minimums, 128 of nibbles.
///
/// # Safety
/// As [`q2_k`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(crate) unsafe fn q4_k(rows: [*const u8; N], blocks: usize, panel: &mut Panel) {
    const BYTES: usize = 144;
    let (low, six, high) = (_mm512_set1_epi8(15), _mm512_set1_epi8(63), _mm512_set1_epi8(0x30));
    for b in 0..blocks / PER {
        // SAFETY: block `b` of the rows and its 64 lines of quants and 8 of scales are in bounds by the caller's promise.
        unsafe {
            prefetch::<BYTES>(&rows, blocks / PER, b);
            let at = b * BYTES;
            let [head, x, y, z] = dwords(&rows, at);
            let (d, dmin) = (low_halves(head), low_halves(_mm512_srli_epi32::<16>(head)));
            let (scale, min) = (panel.scale.as_mut_ptr().add(b * 8), panel.min.as_mut_ptr().add(b * 8));
            put_scales(d, dmin, _mm512_and_si512(x, six), _mm512_and_si512(y, six), scale, min);
            // The upper four: low bits in `z`, the upper two of each where `x` and `y` have room.
            let upper = |v| _mm512_and_si512(_mm512_srli_epi16::<2>(v), high);
            let scales = _mm512_or_si512(_mm512_and_si512(z, low), upper(x));
            let mins = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16::<4>(z), low), upper(y));
            put_scales(d, dmin, scales, mins, scale.add(4), min.add(4));
            let q = panel.q.as_mut_ptr().cast::<__m512i>().add(b * PER * 8);
            for m in 0..8 {
                for (t, v) in dwords(&rows, at + 16 + 16 * m).into_iter().enumerate() {
                    let to = q.add(m / 2 * 16 + m % 2 * 4 + t);
                    _mm512_store_si512(to, _mm512_and_si512(v, low));
                    _mm512_store_si512(to.add(8), _mm512_and_si512(_mm512_srli_epi16::<4>(v), low));
                }
            }
        }
    }
}

/// The codebook's magnitudes, counted from 128.
static IQ2_XXS: LazyLock<[[u8; 8]; 256]> =
    LazyLock::new(|| grids::IQ2_XXS.map(|entry| entry.map(|v| v.cast_unsigned() ^ 0x80)));

/// IQ2_XXS: `d`, then per block of 32 four codebook indices and a word of four 7-bit signs and a scale.
///
/// # Safety
/// As [`q2_k`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(crate) unsafe fn iq2_xxs(rows: [*const u8; N], blocks: usize, panel: &mut Panel) {
    const BYTES: usize = 66;
    let grid = &*IQ2_XXS;
    let (half, quarter) = (_mm512_set1_ps(0.5), _mm512_set1_ps(0.25));
    let (even, odd) = (_mm512_set1_epi32(0x0804_0201), _mm512_set1_epi32(0x8040_2010u32.cast_signed()));
    let zero = _mm512_setzero_si512();
    // The first byte of its dword, for every byte of a 128-bit lane.
    let base = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x0404_0404, 0x0808_0808, 0x0c0c_0c0c));
    for b in 0..blocks / PER {
        // SAFETY: block `b` of the rows and its 64 lines of quants and 8 of scales are in bounds by the caller's promise.
        unsafe {
            prefetch::<BYTES>(&rows, blocks / PER, b);
            let at = b * BYTES;
            let d = low_halves(heads(&rows, at));
            for pair in 0..4 {
                let [_, first, _, second] = dwords(&rows, at + 2 + 16 * pair);
                for (i, word) in [first, second].into_iter().enumerate() {
                    let g = 2 * pair + i;
                    let s = _mm512_add_ps(half, _mm512_cvtepi32_ps(_mm512_srli_epi32::<28>(word)));
                    let scale = _mm512_mul_ps(_mm512_mul_ps(d, s), quarter);
                    _mm512_store_ps(panel.scale.as_mut_ptr().add(b * PER + g).cast(), scale);
                    let signs = sign_bytes(word);
                    let q = panel.q.as_mut_ptr().cast::<__m512i>().add((b * PER + g) * 8);
                    for k in 0..4 {
                        let index = at + 2 + 8 * g + k;
                        let a = entries(grid, array!(8, 0, |i| *rows[FIRST[i]].add(index)));
                        let c = entries(grid, array!(8, 0, |i| *rows[FIRST[i] + 2].add(index)));
                        let lines = [_mm512_shuffle_ps::<0x88>(a, c), _mm512_shuffle_ps::<0xdd>(a, c)];
                        // Byte k of every dword to its four bytes; bit j of it belongs to input j of eight.
                        let spread = _mm512_shuffle_epi8(signs, _mm512_add_epi8(base, _mm512_set1_epi8(OF_DWORD[k])));
                        for (t, bits) in [even, odd].into_iter().enumerate() {
                            let v = _mm512_castps_si512(lines[t]);
                            // 128 - m is 0 - (128 + m) in bytes.
                            let v = _mm512_mask_sub_epi8(v, _mm512_test_epi8_mask(spread, bits), zero, v);
                            _mm512_store_si512(q.add(2 * k + t), v);
                        }
                    }
                }
            }
        }
    }
}

/// Rows whose entries lie next to each other, so that one shuffle per line puts 16 rows in order; the other eight are two on.
const FIRST: [usize; 8] = [0, 1, 4, 5, 8, 9, 12, 13];

/// Byte of a dword that holds the signs of entry `k`.
const OF_DWORD: [i8; 4] = [0, 1, 2, 3];

/// Eight codebook entries.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn entries(grid: &[[u8; 8]; 256], index: [u8; 8]) -> __m512 {
    let at = |i: usize| grid[usize::from(index[i])].as_ptr();
    // SAFETY: entries have the 8 bytes that each load reads.
    let pair = |i: usize| unsafe {
        let low = _mm_castsi128_pd(_mm_loadl_epi64(at(i).cast()));
        _mm_castpd_ps(_mm_loadh_pd(low, at(i + 1).cast()))
    };
    let (low, high) = (_mm256_set_m128(pair(2), pair(0)), _mm256_set_m128(pair(6), pair(4)));
    _mm512_insertf32x8::<1>(_mm512_castps256_ps512(low), high)
}

/// The four 7-bit signs of each word as bytes whose top bit makes the number of set bits even.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
fn sign_bytes(word: __m512i) -> __m512i {
    let part = |v, mask: u32| _mm512_and_si512(v, _mm512_set1_epi32(mask.cast_signed()));
    let x = _mm512_or_si512(
        _mm512_or_si512(part(word, 0x7f), part(_mm512_slli_epi32::<1>(word), 0x7f00)),
        _mm512_or_si512(part(_mm512_slli_epi32::<2>(word), 0x7f_0000), part(_mm512_slli_epi32::<3>(word), 0x7f00_0000)),
    );
    // Bit 0 of each byte becomes its parity; bits that come from the next byte never reach it.
    let p = _mm512_xor_si512(x, _mm512_srli_epi32::<4>(x));
    let p = _mm512_xor_si512(p, _mm512_srli_epi32::<2>(p));
    let p = _mm512_xor_si512(p, _mm512_srli_epi32::<1>(p));
    _mm512_or_si512(x, _mm512_slli_epi32::<7>(part(p, 0x0101_0101)))
}
