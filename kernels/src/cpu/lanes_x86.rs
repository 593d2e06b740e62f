//! [`Lanes`] in the registers of x86-64. The contract is that of [`crate::cpu::lanes`].

#![allow(unsafe_code, reason = "std::arch intrinsics")]

use std::arch::x86_64::*;

use crate::cpu::bytes::Avx2Bytes;
use crate::cpu::lanes::{E2M1_HALF, E4M3_HALF, Lanes, N};

/// One 512-bit register.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512);

// Every block below is sound because loads and stores go through references of exactly the size read or written, and
// the instructions exist because the methods only run inside the wrappers of `multiversion!` (module contract).
impl Lanes for Avx512 {
    type Bytes = Avx2Bytes;
    #[inline(always)]
    fn load_bf16(src: &[u8; 2 * N]) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(src.as_ptr().cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }
    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm512_set1_ps(x)) }
    }
    #[inline(always)]
    fn load(src: &[f32; N]) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm512_loadu_ps(src.as_ptr())) }
    }
    #[inline(always)]
    fn store(self, dst: &mut [f32; N]) {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { _mm512_storeu_ps(dst.as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn load_bytes(src: &[u8; 4 * N]) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm512_castsi512_ps(_mm512_loadu_si512(src.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn widen_bytes(src: &[u8; 2 * N], offset: i16) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe {
            let wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(src.as_ptr().cast()));
            Self(_mm512_castsi512_ps(_mm512_sub_epi16(wide, _mm512_set1_epi16(offset))))
        }
    }
    #[inline(always)]
    fn load_f16(src: &[u16; N]) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(src.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn store_f16(self, dst: &mut [u16; N]) {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe {
            _mm256_storeu_si256(dst.as_mut_ptr().cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0));
        }
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm512_add_ps(self.0, o.0)) }
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm512_sub_ps(self.0, o.0)) }
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm512_mul_ps(self.0, o.0)) }
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm512_div_ps(self.0, o.0)) }
    }
    #[inline(always)]
    fn fma(self, a: Self, b: Self) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm512_fmadd_ps(self.0, a.0, b.0)) }
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm512_max_ps(self.0, o.0)) }
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm512_min_ps(self.0, o.0)) }
    }
    #[inline(always)]
    fn pow2(self) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe {
            let n = _mm512_add_epi32(_mm512_cvttps_epi32(self.0), _mm512_set1_epi32(127));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(n)))
        }
    }
    #[inline(always)]
    fn select_gt(a: Self, b: Self, x: Self, y: Self) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a.0, b.0), y.0, x.0)) }
    }
    const WIDE: bool = true;
    #[inline(always)]
    fn load_e4m3(src: &[u8; N]) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe {
            let half = e4m3_halves(_mm_loadu_si128(src.as_ptr().cast()));
            Self(_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(E4M3_HALF)))
        }
    }
    #[inline(always)]
    fn load_e2m1(src: &[u8; N / 2]) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm512_cvtph_ps(e2m1_halves(_mm_loadl_epi64(src.as_ptr().cast())))) }
    }
    #[inline(always)]
    fn sums(m: &[Self; N]) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe {
            // Eight apart: two vectors into one; four apart: four into one. Then `x[i]` holds vectors i, i + 4, i + 8, i + 12.
            let two = |a: usize, b: usize| {
                let low = _mm512_shuffle_f32x4::<0x44>(m[a].0, m[b].0);
                _mm512_add_ps(low, _mm512_shuffle_f32x4::<0xee>(m[a].0, m[b].0))
            };
            let mut x = [_mm512_setzero_ps(); 4];
            for (i, x) in x.iter_mut().enumerate() {
                let (a, b) = (two(i, i + 4), two(i + 8, i + 12));
                *x = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
            }
            let pair = |a, b| _mm512_add_ps(_mm512_shuffle_ps::<0x44>(a, b), _mm512_shuffle_ps::<0xee>(a, b));
            let (a, b) = (pair(x[0], x[1]), pair(x[2], x[3]));
            Self(_mm512_add_ps(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xdd>(a, b)))
        }
    }
    #[inline(always)]
    fn transpose(m: &mut [Self; N]) {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe {
            let mut t = [_mm512_setzero_ps(); N];
            // Pairs of rows, then quads within 128-bit lanes, then 4x4 blocks of lanes in two steps.
            for i in 0..8 {
                t[2 * i] = _mm512_unpacklo_ps(m[2 * i].0, m[2 * i + 1].0);
                t[2 * i + 1] = _mm512_unpackhi_ps(m[2 * i].0, m[2 * i + 1].0);
            }
            let mut u = [_mm512_setzero_ps(); N];
            for i in 0..4 {
                let (a, b) = (_mm512_castps_pd(t[4 * i]), _mm512_castps_pd(t[4 * i + 1]));
                let (c, d) = (_mm512_castps_pd(t[4 * i + 2]), _mm512_castps_pd(t[4 * i + 3]));
                u[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
                u[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
                u[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
                u[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
            }
            for j in 0..4 {
                let a = _mm512_shuffle_f32x4::<0x88>(u[j], u[4 + j]);
                let b = _mm512_shuffle_f32x4::<0xdd>(u[j], u[4 + j]);
                let c = _mm512_shuffle_f32x4::<0x88>(u[8 + j], u[12 + j]);
                let d = _mm512_shuffle_f32x4::<0xdd>(u[8 + j], u[12 + j]);
                m[j].0 = _mm512_shuffle_f32x4::<0x88>(a, c);
                m[4 + j].0 = _mm512_shuffle_f32x4::<0x88>(b, d);
                m[8 + j].0 = _mm512_shuffle_f32x4::<0xdd>(a, c);
                m[12 + j].0 = _mm512_shuffle_f32x4::<0xdd>(b, d);
            }
        }
    }
}

/// Two 256-bit registers.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256, __m256);

// Every block below is sound for the reasons given at `Avx512`.
impl Lanes for Avx2 {
    type Bytes = Avx2Bytes;
    #[inline(always)]
    fn load_bf16(src: &[u8; 2 * N]) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe {
            let a = _mm256_cvtepu16_epi32(_mm_loadu_si128(src.as_ptr().cast()));
            let b = _mm256_cvtepu16_epi32(_mm_loadu_si128(src.as_ptr().add(16).cast()));
            Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(a)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(b)))
        }
    }
    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }
    #[inline(always)]
    fn load(src: &[f32; N]) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm256_loadu_ps(src.as_ptr()), _mm256_loadu_ps(src.as_ptr().add(8))) }
    }
    #[inline(always)]
    fn store(self, dst: &mut [f32; N]) {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe {
            _mm256_storeu_ps(dst.as_mut_ptr(), self.0);
            _mm256_storeu_ps(dst.as_mut_ptr().add(8), self.1);
        }
    }
    #[inline(always)]
    fn load_bytes(src: &[u8; 4 * N]) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm256_loadu_ps(src.as_ptr().cast()), _mm256_loadu_ps(src.as_ptr().add(32).cast())) }
    }
    #[inline(always)]
    fn widen_bytes(src: &[u8; 2 * N], offset: i16) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe {
            let a = _mm256_cvtepu8_epi16(_mm_loadu_si128(src.as_ptr().cast()));
            let b = _mm256_cvtepu8_epi16(_mm_loadu_si128(src.as_ptr().add(16).cast()));
            let offset = _mm256_set1_epi16(offset);
            Self(_mm256_castsi256_ps(_mm256_sub_epi16(a, offset)), _mm256_castsi256_ps(_mm256_sub_epi16(b, offset)))
        }
    }
    #[inline(always)]
    fn load_f16(src: &[u16; N]) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe {
            Self(
                _mm256_cvtph_ps(_mm_loadu_si128(src.as_ptr().cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(src.as_ptr().add(8).cast())),
            )
        }
    }
    #[inline(always)]
    fn store_f16(self, dst: &mut [u16; N]) {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe {
            let p = dst.as_mut_ptr();
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0));
            _mm_storeu_si128(p.add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1));
        }
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm256_add_ps(self.0, o.0), _mm256_add_ps(self.1, o.1)) }
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm256_sub_ps(self.0, o.0), _mm256_sub_ps(self.1, o.1)) }
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm256_mul_ps(self.0, o.0), _mm256_mul_ps(self.1, o.1)) }
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm256_div_ps(self.0, o.0), _mm256_div_ps(self.1, o.1)) }
    }
    #[inline(always)]
    fn fma(self, a: Self, b: Self) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm256_fmadd_ps(self.0, a.0, b.0), _mm256_fmadd_ps(self.1, a.1, b.1)) }
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm256_max_ps(self.0, o.0), _mm256_max_ps(self.1, o.1)) }
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe { Self(_mm256_min_ps(self.0, o.0), _mm256_min_ps(self.1, o.1)) }
    }
    #[inline(always)]
    fn pow2(self) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe {
            let bias = _mm256_set1_epi32(127);
            let a = _mm256_add_epi32(_mm256_cvttps_epi32(self.0), bias);
            let b = _mm256_add_epi32(_mm256_cvttps_epi32(self.1), bias);
            Self(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(a)), _mm256_castsi256_ps(_mm256_slli_epi32::<23>(b)))
        }
    }
    #[inline(always)]
    fn select_gt(a: Self, b: Self, x: Self, y: Self) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe {
            Self(
                _mm256_blendv_ps(y.0, x.0, _mm256_cmp_ps::<_CMP_GT_OQ>(a.0, b.0)),
                _mm256_blendv_ps(y.1, x.1, _mm256_cmp_ps::<_CMP_GT_OQ>(a.1, b.1)),
            )
        }
    }
    const WIDE: bool = false;
    #[inline(always)]
    fn load_e4m3(src: &[u8; N]) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe {
            let half = e4m3_halves(_mm_loadu_si128(src.as_ptr().cast()));
            let factor = _mm256_set1_ps(E4M3_HALF);
            let (a, b) = (_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
            Self(_mm256_mul_ps(_mm256_cvtph_ps(a), factor), _mm256_mul_ps(_mm256_cvtph_ps(b), factor))
        }
    }
    #[inline(always)]
    fn load_e2m1(src: &[u8; N / 2]) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe {
            let half = e2m1_halves(_mm_loadl_epi64(src.as_ptr().cast()));
            let (a, b) = (_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
            Self(_mm256_cvtph_ps(a), _mm256_cvtph_ps(b))
        }
    }
    #[inline(always)]
    fn sums(m: &[Self; N]) -> Self {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe {
            // Eight apart within each vector, four apart for vectors i and i + 4, two and one apart for four such pairs.
            let fold = |i: usize| _mm256_add_ps(m[i].0, m[i].1);
            let mut out = [_mm256_setzero_ps(); 2];
            for (h, out) in out.iter_mut().enumerate() {
                let mut x = [_mm256_setzero_ps(); 4];
                for (i, x) in x.iter_mut().enumerate() {
                    let (a, b) = (fold(8 * h + i), fold(8 * h + i + 4));
                    let low = _mm256_permute2f128_ps::<0x20>(a, b);
                    *x = _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(a, b));
                }
                let pair = |a, b| _mm256_add_ps(_mm256_shuffle_ps::<0x44>(a, b), _mm256_shuffle_ps::<0xee>(a, b));
                let (a, b) = (pair(x[0], x[1]), pair(x[2], x[3]));
                *out = _mm256_add_ps(_mm256_shuffle_ps::<0x88>(a, b), _mm256_shuffle_ps::<0xdd>(a, b));
            }
            Self(out[0], out[1])
        }
    }
    #[inline(always)]
    fn transpose(m: &mut [Self; N]) {
        // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
        unsafe {
            // Four blocks of 8x8, the two off the diagonal changing places.
            let low = transpose8(crate::cpu::lanes::array!(8, m[0].0, |i| m[i].0));
            let right = transpose8(crate::cpu::lanes::array!(8, m[0].0, |i| m[i].1));
            let below = transpose8(crate::cpu::lanes::array!(8, m[0].0, |i| m[8 + i].0));
            let last = transpose8(crate::cpu::lanes::array!(8, m[0].0, |i| m[8 + i].1));
            for i in 0..8 {
                m[i] = Self(low[i], below[i]);
                m[8 + i] = Self(right[i], last[i]);
            }
        }
    }
}

/// Transposes an 8x8 block.
///
/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn transpose8(m: [__m256; 8]) -> [__m256; 8] {
    // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
    unsafe {
        let mut t = [_mm256_setzero_ps(); 8];
        for i in 0..4 {
            t[2 * i] = _mm256_unpacklo_ps(m[2 * i], m[2 * i + 1]);
            t[2 * i + 1] = _mm256_unpackhi_ps(m[2 * i], m[2 * i + 1]);
        }
        let mut u = [_mm256_setzero_ps(); 8];
        for i in 0..2 {
            let (a, b) = (t[4 * i], t[4 * i + 2]);
            let (c, d) = (t[4 * i + 1], t[4 * i + 3]);
            u[4 * i] = _mm256_shuffle_ps::<0x44>(a, b);
            u[4 * i + 1] = _mm256_shuffle_ps::<0xee>(a, b);
            u[4 * i + 2] = _mm256_shuffle_ps::<0x44>(c, d);
            u[4 * i + 3] = _mm256_shuffle_ps::<0xee>(c, d);
        }
        for i in 0..4 {
            t[i] = _mm256_permute2f128_ps::<0x20>(u[i], u[4 + i]);
            t[4 + i] = _mm256_permute2f128_ps::<0x31>(u[i], u[4 + i]);
        }
        t
    }
}

/// Half floats of 16 E4M3FN codes, smaller by [`E4M3_HALF`].
///
/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn e4m3_halves(codes: __m128i) -> __m256i {
    // SAFETY: as the caller promises.
    unsafe {
        let wide = _mm256_cvtepu8_epi16(codes);
        let magnitude = _mm256_slli_epi16::<7>(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)));
        _mm256_or_si256(magnitude, _mm256_slli_epi16::<8>(_mm256_and_si256(wide, _mm256_set1_epi16(0x80))))
    }
}

/// Half floats of 16 E2M1 codes in the low 8 bytes.
///
/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn e2m1_halves(codes: __m128i) -> __m256i {
    // SAFETY: as the caller promises; the table has 16 bytes.
    unsafe {
        let mask = _mm_set1_epi8(15);
        let nibbles = _mm_unpacklo_epi8(_mm_and_si128(codes, mask), _mm_and_si128(_mm_srli_epi16::<4>(codes), mask));
        let high = _mm_shuffle_epi8(_mm_loadu_si128(E2M1_HALF.as_ptr().cast()), nibbles);
        _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(high))
    }
}
