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
    /// Loads 16 E4M3FN numbers (NaN codes give 480).
    fn load_e4m3(src: &[u8; N]) -> Self;
    /// Loads 16 E2M1 numbers, two a byte, low nibble first.
    fn load_e2m1(src: &[u8; N / 2]) -> Self;
    /// Whether a 4 by 4 block of sums fits the registers (else 2 by 2).
    const WIDE: bool;

    /// Lane `i` is [`Lanes::sum`] of `m[i]`.
    #[inline(always)]
    fn sums(m: &[Self; N]) -> Self {
        let mut v = [0.0; N];
        for (v, m) in v.iter_mut().zip(m) {
            *v = m.sum();
        }
        Self::load(&v)
    }

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

/// Half-float bits of an E4M3FN code, smaller by a factor of 2^8 (exponent biases of 15 and 7); subnormals included.
pub(crate) const E4M3_HALF: f32 = 256.0;

/// The high bytes of the half floats of the 16 E2M1 codes; the low ones are zero.
pub(crate) const E2M1_HALF: [u8; 16] =
    [0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, 0x80, 0xb8, 0xbc, 0xbe, 0xc0, 0xc2, 0xc4, 0xc6];

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
    // AArch64 has twice the registers of AVX2 at half the width.
    const WIDE: bool = false;
    #[inline(always)]
    fn load_e4m3(src: &[u8; N]) -> Self {
        let half = src.map(|c| (u16::from(c & 0x7f) << 7) | (u16::from(c & 0x80) << 8));
        Self::load_f16(&half).mul(Self::splat(E4M3_HALF))
    }
    #[inline(always)]
    fn load_e2m1(src: &[u8; N / 2]) -> Self {
        let code = |i: usize| usize::from((src[i / 2] >> (4 * (i % 2))) & 15);
        Self::load_f16(&std::array::from_fn(|i| u16::from(E2M1_HALF[code(i)]) << 8))
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
pub(crate) use crate::cpu::lanes_x86::{Avx2, Avx512};

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
