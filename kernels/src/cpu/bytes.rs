//! Thirty-two bytes at a time: what decoding a block needs. Left to itself the compiler decodes byte by byte, ten times slower.
//!
//! The contract is that of [`crate::cpu::lanes`]: methods only run inside the wrappers of `multiversion!`.

#![allow(unsafe_code, reason = "std::arch intrinsics")]

/// Bytes in a vector.
pub(crate) const B: usize = 32;

/// Thirty-two bytes.
pub(crate) trait Bytes: Copy {
    /// All bytes `x`.
    fn splat(x: u8) -> Self;
    /// Loads 32 bytes.
    fn load(src: &[u8; B]) -> Self;
    /// Stores 32 bytes.
    fn store(self, dst: &mut [u8; B]);
    /// Low nibbles of 16 bytes, then high ones.
    fn nibbles(src: &[u8; 16]) -> Self;
    /// `x` where bit `i` of `bits` is set, else 0.
    fn expand(bits: u32, x: u8) -> Self;
    /// Bitwise and.
    fn and(self, o: Self) -> Self;
    /// Bitwise or.
    fn or(self, o: Self) -> Self;
    /// Bitwise exclusive or.
    fn xor(self, o: Self) -> Self;
    /// Wrapping difference.
    fn sub(self, o: Self) -> Self;
    /// Every byte shifted right by `n` in 0..8.
    fn shr(self, n: u32) -> Self;
    /// Every byte shifted left by `n` in 0..8.
    fn shl(self, n: u32) -> Self;
    /// `table[b]` for bytes below 16.
    fn lookup(self, table: &[u8; 16]) -> Self;
    /// Widens a half float: every block has one or two, so a call for each would be felt.
    fn half(bits: u16) -> f32;
}

/// Widens a half float without a table or a branch that would keep the loop around it scalar.
#[inline(always)]
fn half(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff) << 13;
    // 2^112 moves the exponent from half's bias to single's; it is exact, subnormals included.
    let scaled = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
    let special = if magnitude >= 0x0f80_0000 { magnitude | 0x7f80_0000 } else { scaled };
    f32::from_bits(special | (u32::from(bits & 0x8000) << 16))
}

/// A plain array.
#[derive(Clone, Copy)]
pub(crate) struct PortableBytes([u8; B]);

impl PortableBytes {
    #[inline(always)]
    fn zip(self, o: Self, f: impl Fn(u8, u8) -> u8) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], o.0[i])))
    }
}

impl Bytes for PortableBytes {
    #[inline(always)]
    fn splat(x: u8) -> Self {
        Self([x; B])
    }
    #[inline(always)]
    fn load(src: &[u8; B]) -> Self {
        Self(*src)
    }
    #[inline(always)]
    fn store(self, dst: &mut [u8; B]) {
        *dst = self.0;
    }
    #[inline(always)]
    fn nibbles(src: &[u8; 16]) -> Self {
        Self(std::array::from_fn(|i| if i < 16 { src[i] & 15 } else { src[i - 16] >> 4 }))
    }
    #[inline(always)]
    fn expand(bits: u32, x: u8) -> Self {
        Self(std::array::from_fn(|i| if (bits >> i) & 1 == 1 { x } else { 0 }))
    }
    #[inline(always)]
    fn and(self, o: Self) -> Self {
        self.zip(o, |a, b| a & b)
    }
    #[inline(always)]
    fn or(self, o: Self) -> Self {
        self.zip(o, |a, b| a | b)
    }
    #[inline(always)]
    fn xor(self, o: Self) -> Self {
        self.zip(o, |a, b| a ^ b)
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        self.zip(o, u8::wrapping_sub)
    }
    #[inline(always)]
    fn shr(self, n: u32) -> Self {
        Self(self.0.map(|x| x >> n))
    }
    #[inline(always)]
    fn shl(self, n: u32) -> Self {
        Self(self.0.map(|x| x << n))
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16]) -> Self {
        Self(self.0.map(|x| table[usize::from(x & 15)]))
    }
    #[inline(always)]
    fn half(bits: u16) -> f32 {
        half(bits)
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::Avx2Bytes;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{B, Bytes};

    /// One 256-bit register.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2Bytes(__m256i);

    // Every block below is sound because loads and stores go through references of exactly the size read or written, and
    // the instructions exist because the methods only run inside the wrappers of `multiversion!` (module contract).
    impl Bytes for Avx2Bytes {
        #[inline(always)]
        fn splat(x: u8) -> Self {
            // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
            unsafe { Self(_mm256_set1_epi8(x.cast_signed())) }
        }
        #[inline(always)]
        fn load(src: &[u8; B]) -> Self {
            // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
            unsafe { Self(_mm256_loadu_si256(src.as_ptr().cast())) }
        }
        #[inline(always)]
        fn store(self, dst: &mut [u8; B]) {
            // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
            unsafe { _mm256_storeu_si256(dst.as_mut_ptr().cast(), self.0) }
        }
        #[inline(always)]
        fn nibbles(src: &[u8; 16]) -> Self {
            // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
            unsafe {
                let x = _mm_loadu_si128(src.as_ptr().cast());
                let both = _mm256_set_m128i(_mm_srli_epi16::<4>(x), x);
                Self(_mm256_and_si256(both, _mm256_set1_epi8(15)))
            }
        }
        #[inline(always)]
        fn expand(bits: u32, x: u8) -> Self {
            // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
            unsafe {
                let byte = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
                let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits.cast_signed()), byte);
                let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201u64.cast_signed());
                let set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
                Self(_mm256_and_si256(set, _mm256_set1_epi8(x.cast_signed())))
            }
        }
        #[inline(always)]
        fn and(self, o: Self) -> Self {
            // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
            unsafe { Self(_mm256_and_si256(self.0, o.0)) }
        }
        #[inline(always)]
        fn or(self, o: Self) -> Self {
            // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
            unsafe { Self(_mm256_or_si256(self.0, o.0)) }
        }
        #[inline(always)]
        fn xor(self, o: Self) -> Self {
            // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
            unsafe { Self(_mm256_xor_si256(self.0, o.0)) }
        }
        #[inline(always)]
        fn sub(self, o: Self) -> Self {
            // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
            unsafe { Self(_mm256_sub_epi8(self.0, o.0)) }
        }
        #[inline(always)]
        fn shr(self, n: u32) -> Self {
            // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
            unsafe {
                let x = _mm256_srl_epi16(self.0, _mm_cvtsi32_si128(n.cast_signed()));
                Self(_mm256_and_si256(x, _mm256_set1_epi8((0xffu8 >> n).cast_signed())))
            }
        }
        #[inline(always)]
        fn shl(self, n: u32) -> Self {
            // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
            unsafe {
                let x = _mm256_sll_epi16(self.0, _mm_cvtsi32_si128(n.cast_signed()));
                Self(_mm256_and_si256(x, _mm256_set1_epi8((0xffu8 << n).cast_signed())))
            }
        }
        #[inline(always)]
        fn lookup(self, table: &[u8; 16]) -> Self {
            // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
            unsafe {
                let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
                Self(_mm256_shuffle_epi8(table, self.0))
            }
        }
        #[inline(always)]
        fn half(bits: u16) -> f32 {
            // SAFETY: the contract above the impl: sized references, instructions that the wrapper proved.
            unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::Random;
    use crate::cpu::isa::{Isa, multiversion};
    use crate::cpu::lanes::Lanes;

    #[test]
    fn half_agrees_with_the_half_crate_on_all_65536() {
        for bits in 0..=u16::MAX {
            let (got, want) = (half(bits), ::half::f16::from_bits(bits).to_f32());
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{bits:#x}");
        }
    }

    /// Every operation on `x` and `y`, one after another.
    #[inline(always)]
    fn all_impl<L: Lanes>(x: &[u8; B], y: &[u8; B], bits: u32, halves: &mut [u32; 16], out: &mut [[u8; B]; 22]) {
        let (a, b) = (L::Bytes::load(x), L::Bytes::load(y));
        let low: &[u8; 16] = x.first_chunk().expect("16 of 32");
        let fixed = [
            L::Bytes::nibbles(low),
            L::Bytes::expand(bits, x[0]),
            a.and(b),
            a.or(b),
            a.xor(b),
            a.sub(b).or(L::Bytes::splat(y[1])),
        ];
        for (v, o) in fixed.into_iter().zip(out.iter_mut()) {
            v.store(o);
        }
        for n in 0..8u8 {
            a.shr(u32::from(n)).store(&mut out[6 + usize::from(n)]);
            a.shl(u32::from(n)).store(&mut out[14 + usize::from(n)]);
        }
        let nibble = a.and(L::Bytes::splat(15)).lookup(low);
        nibble.xor(L::Bytes::load(&out[21])).store(&mut out[21]);
        for (h, pair) in halves.iter_mut().zip(x.as_chunks::<2>().0) {
            let bits = u16::from_le_bytes(*pair);
            *h = if bits & 0x7c00 == 0x7c00 { 0 } else { L::Bytes::half(bits).to_bits() };
        }
    }
    multiversion! {
        fn all = all_impl(x: &[u8; B], y: &[u8; B], bits: u32, halves: &mut [u32; 16], out: &mut [[u8; B]; 22]);
    }

    #[test]
    fn every_isa_agrees_with_plain_arrays() {
        let seed = Random::fresh_seed();
        let mut rng = Random::new(seed);
        for _ in 0..500 {
            let mut x = [0; B];
            let mut y = [0; B];
            x.fill_with(|| rng.bits().to_le_bytes()[0]);
            y.fill_with(|| rng.bits().to_le_bytes()[0]);
            let bits = u32::from_le_bytes(*rng.bits().to_le_bytes().first_chunk().expect("4 of 8"));
            let mut first = None;
            for isa in Isa::available() {
                let (mut halves, mut out) = ([0; 16], [[0; B]; 22]);
                all(isa, &x, &y, bits, &mut halves, &mut out);
                let got = (halves, out);
                assert_eq!(*first.get_or_insert(got), got, "{} (DS4_SEED={seed})", isa.name());
            }
        }
    }
}
