//! Sixteen f32 lanes, in the registers of each instruction set.
//!
//! Every operation is one IEEE operation per lane (`fma` rounds once), so a kernel written over [`Lanes`] gives the same
//! bits on every instruction set. Methods must only run inside the wrappers of `multiversion!`: outside of them an
//! implementation may use instructions that the CPU lacks. The module is private to the CPU device for that reason.

#![allow(unsafe_code, reason = "std::arch intrinsics")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    reason = "bit patterns of floats"
)]

use crate::cpu::bytes::{Bytes, PortableBytes};

/// Number of lanes.
pub(crate) const N: usize = 16;

/// Sixteen f32 lanes.
pub(crate) trait Lanes: Copy {
    /// Byte vectors of the same instruction set.
    type Bytes: Bytes;
    /// Loads 16 bfloat16 numbers, little-endian.
    fn load_bf16(src: &[u8; 2 * N]) -> Self;
    /// All lanes `x`.
    fn splat(x: f32) -> Self;
    /// Loads 16 floats.
    fn load(src: &[f32; N]) -> Self;
    /// Stores 16 floats.
    fn store(self, dst: &mut [f32; N]);
    /// 64 bytes as the bits of 16 floats. They may only be moved and transposed.
    fn load_bytes(src: &[u8; 4 * N]) -> Self;
    /// 32 bytes, less `offset`, as 16-bit integers: the bits of 16 floats, as above.
    fn widen_bytes(src: &[u8; 2 * N], offset: i16) -> Self;
    /// Loads 16 half floats.
    fn load_f16(src: &[u16; N]) -> Self;
    /// Stores 16 half floats, rounded to nearest even.
    fn store_f16(self, dst: &mut [u16; N]);
    /// `self + o`.
    fn add(self, o: Self) -> Self;
    /// `self - o`.
    fn sub(self, o: Self) -> Self;
    /// `self * o`.
    fn mul(self, o: Self) -> Self;
    /// `self / o`.
    fn div(self, o: Self) -> Self;
    /// `self * a + b`, rounded once.
    fn fma(self, a: Self, b: Self) -> Self;
    /// `if self > o { self } else { o }`.
    fn max(self, o: Self) -> Self;
    /// `if self < o { self } else { o }`.
    fn min(self, o: Self) -> Self;
    /// `2^self` for integral lanes in [-126, 127].
    fn pow2(self) -> Self;
    /// Lane-wise `if a > b { x } else { y }`.
    fn select_gt(a: Self, b: Self, x: Self, y: Self) -> Self;
    /// Transposes 16 vectors in place: lane `j` of vector `i` and lane `i` of vector `j` change places.
    fn transpose(m: &mut [Self; N]);

    /// Sum of the lanes: halves folded onto each other (8, 4, 2, 1 apart), the same tree everywhere.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut v = [0.0; N];
        self.store(&mut v);
        let mut s = N / 2;
        while s > 0 {
            for i in 0..s {
                v[i] += v[i + s];
            }
            s /= 2;
        }
        v[0]
    }

    /// Greatest lane.
    #[inline(always)]
    fn max_lane(self) -> f32 {
        let mut v = [0.0; N];
        self.store(&mut v);
        let mut m = v[0];
        for x in &v[1..] {
            m = if *x > m { *x } else { m };
        }
        m
    }
}

/// An array whose element `i` is an expression of `i`. Not `std::array::from_fn`: a closure that uses vector instructions
/// cannot be inlined into that function, and each element becomes a call (measured: half the time of a decode).
macro_rules! array {
    ($n:expr, $init:expr, |$i:ident| $e:expr) => {{
        let mut a = [$init; $n];
        #[allow(clippy::needless_range_loop, reason = "the index is the point")]
        for $i in 0..$n {
            a[$i] = $e;
        }
        a
    }};
}
pub(crate) use array;

/// Asks for the cache line at `p`, which need not be readable.
#[inline(always)]
pub(crate) fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, and SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Plain arrays, for baseline code.
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; N]);

impl Portable {
    #[inline(always)]
    fn zip(self, o: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], o.0[i])))
    }
}

impl Lanes for Portable {
    type Bytes = PortableBytes;
    #[inline(always)]
    fn load_bf16(src: &[u8; 2 * N]) -> Self {
        Self(std::array::from_fn(|i| f32::from_bits(u32::from_le_bytes([0, 0, src[2 * i], src[2 * i + 1]]))))
    }
    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; N])
    }
    #[inline(always)]
    fn load(src: &[f32; N]) -> Self {
        Self(*src)
    }
    #[inline(always)]
    fn store(self, dst: &mut [f32; N]) {
        *dst = self.0;
    }
    #[inline(always)]
    fn load_bytes(src: &[u8; 4 * N]) -> Self {
        Self(std::array::from_fn(|i| {
            f32::from_bits(u32::from_le_bytes([src[4 * i], src[4 * i + 1], src[4 * i + 2], src[4 * i + 3]]))
        }))
    }
    #[inline(always)]
    fn widen_bytes(src: &[u8; 2 * N], offset: i16) -> Self {
        Self(std::array::from_fn(|i| {
            let low = (i16::from(src[2 * i]) - offset).cast_unsigned();
            let high = (i16::from(src[2 * i + 1]) - offset).cast_unsigned();
            f32::from_bits(u32::from(low) | (u32::from(high) << 16))
        }))
    }
    #[inline(always)]
    fn load_f16(src: &[u16; N]) -> Self {
        Self(src.map(|h| half::f16::from_bits(h).to_f32()))
    }
    #[inline(always)]
    fn store_f16(self, dst: &mut [u16; N]) {
        *dst = self.0.map(|x| half::f16::from_f32(x).to_bits());
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        self.zip(o, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        self.zip(o, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        self.zip(o, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        self.zip(o, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: Self, b: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].mul_add(a.0[i], b.0[i])))
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        self.zip(o, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        self.zip(o, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn pow2(self) -> Self {
        Self(self.0.map(|x| f32::from_bits((((x as i32) + 127) << 23) as u32)))
    }
    #[inline(always)]
    fn select_gt(a: Self, b: Self, x: Self, y: Self) -> Self {
        Self(std::array::from_fn(|i| if a.0[i] > b.0[i] { x.0[i] } else { y.0[i] }))
    }
    #[inline(always)]
    fn transpose(m: &mut [Self; N]) {
        for i in 0..N {
            for j in 0..i {
                (m[i].0[j], m[j].0[i]) = (m[j].0[i], m[i].0[j]);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Lanes, N};
    use crate::cpu::bytes::Avx2Bytes;

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
        #[inline(always)]
        fn transpose(m: &mut [Self; N]) {
            // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
            unsafe {
                // Four blocks of 8x8, the two off the diagonal changing places.
                let low = transpose8(super::array!(8, m[0].0, |i| m[i].0));
                let right = transpose8(super::array!(8, m[0].0, |i| m[i].1));
                let below = transpose8(super::array!(8, m[0].0, |i| m[8 + i].0));
                let last = transpose8(super::array!(8, m[0].0, |i| m[8 + i].1));
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Isa, multiversion};

    #[inline(always)]
    fn transpose_impl<L: Lanes>(x: &mut [[f32; N]; N]) {
        let mut m: [L; N] = std::array::from_fn(|i| L::load(&x[i]));
        L::transpose(&mut m);
        for (m, x) in m.iter().zip(x) {
            m.store(x);
        }
    }
    multiversion! { fn transpose = transpose_impl(x: &mut [[f32; N]; N]); }

    #[test]
    fn transpose_moves_every_bit_pattern() {
        // Some of these are NaNs: panels carry the bits of integers.
        let bits = |i: usize, j: usize| 0xffff_0000 | ((i as u32) << 8) | j as u32;
        for isa in Isa::available() {
            let mut x: [[f32; N]; N] = std::array::from_fn(|i| std::array::from_fn(|j| f32::from_bits(bits(i, j))));
            transpose(isa, &mut x);
            for (i, row) in x.iter().enumerate() {
                for (j, v) in row.iter().enumerate() {
                    assert_eq!(v.to_bits(), bits(j, i), "{} at {i},{j}", isa.name());
                }
            }
        }
    }
}
