//! Products with plain floats: F32, F16 and BF16 weights, and rows of f32 (attention).
//!
//! Per output and row: sixteen running sums, sum `l` over the inputs `l, l + 16, l + 32, …` in order, folded at the end as
//! [`Lanes::sum`] does it. Inputs lie along the lanes as they lie in memory, so weights are widened on the way into a register and
//! nothing is transposed; how many rows and outputs share a register tile changes no bits.

#![allow(clippy::needless_range_loop, reason = "indices name registers, rows and outputs")]

use ds4_manifests::GgmlType;

use crate::cpu::isa::multiversion;
use crate::cpu::lanes::{Lanes, N, array};

/// Rows of plain floats in some storage.
trait Rows: Copy {
    /// Sixteen elements as they are stored.
    type Chunk;
    /// The whole chunks of row `row`.
    fn chunks(&self, row: usize) -> &[Self::Chunk];
    /// A chunk as f32.
    fn widen<L: Lanes>(chunk: &Self::Chunk) -> L;
    /// The elements of row `row` after `k` chunks, fewer than 16, padded with zeros.
    fn tail<L: Lanes>(&self, row: usize, k: usize) -> L;
}

macro_rules! stored {
    ($name:ident, $bytes:literal, $load:expr) => {
        /// Little-endian rows of one type.
        #[derive(Clone, Copy)]
        struct $name<'a>(&'a [&'a [u8]]);

        impl Rows for $name<'_> {
            type Chunk = [u8; $bytes * N];
            #[inline(always)]
            fn chunks(&self, row: usize) -> &[Self::Chunk] {
                self.0[row].as_chunks().0
            }
            #[inline(always)]
            fn widen<L: Lanes>(chunk: &Self::Chunk) -> L {
                $load(chunk)
            }
            #[inline(always)]
            fn tail<L: Lanes>(&self, row: usize, k: usize) -> L {
                let rest = &self.0[row][$bytes * N * k..];
                let mut bytes = [0; $bytes * N];
                bytes[..rest.len()].copy_from_slice(rest);
                $load(&bytes)
            }
        }
    };
}

#[inline(always)]
fn halves<L: Lanes>(bytes: &[u8; 2 * N]) -> L {
    L::load_f16(&array!(N, 0u16, |i| u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])))
}

stored!(F32Rows, 4, L::load_bytes);
stored!(F16Rows, 2, halves);
stored!(Bf16Rows, 2, L::load_bf16);

/// Rows of f32 of one width, one after the other.
#[derive(Clone, Copy)]
struct Plain<'a> {
    data: &'a [f32],
    width: usize,
}

impl Rows for Plain<'_> {
    type Chunk = [f32; N];
    #[inline(always)]
    fn chunks(&self, row: usize) -> &[[f32; N]] {
        self.data[row * self.width..(row + 1) * self.width].as_chunks().0
    }
    #[inline(always)]
    fn widen<L: Lanes>(chunk: &[f32; N]) -> L {
        L::load(chunk)
    }
    #[inline(always)]
    fn tail<L: Lanes>(&self, row: usize, k: usize) -> L {
        let rest = &self.data[row * self.width + N * k..(row + 1) * self.width];
        let mut x = [0.0; N];
        x[..rest.len()].copy_from_slice(rest);
        L::load(&x)
    }
}

/// `out[r][o] = x[r] · w[o]` for `R` rows from `first` and `count` outputs, `C` outputs at a time.
#[inline(always)]
fn block<L: Lanes, W: Rows, const R: usize, const C: usize>(
    x: Plain<'_>,
    first: usize,
    w: W,
    count: usize,
    out: &mut [[f32; N]],
) {
    let mut all = [[L::splat(0.0); N]; R];
    let full = x.width / N;
    // Slices of one length, so that the loop has no bounds left to check: with checks it was half as fast.
    let rows = array!(R, &x.chunks(first)[..full], |r| &x.chunks(first + r)[..full]);
    let mut o = 0;
    while o < count {
        // Outputs past the last are computed as the last one again, and dropped.
        let index = array!(C, 0, |i| (o + i).min(count - 1));
        let weights = array!(C, &w.chunks(0)[..full], |i| &w.chunks(index[i])[..full]);
        let mut acc = [[L::splat(0.0); C]; R];
        for k in 0..full {
            let v = array!(C, L::splat(0.0), |i| W::widen::<L>(&weights[i][k]));
            for r in 0..R {
                let x = L::load(&rows[r][k]);
                for c in 0..C {
                    acc[r][c] = x.fma(v[c], acc[r][c]);
                }
            }
        }
        if !x.width.is_multiple_of(N) {
            for r in 0..R {
                let v = x.tail::<L>(first + r, full);
                for c in 0..C {
                    acc[r][c] = v.fma(w.tail::<L>(index[c], full), acc[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..C.min(N - o) {
                all[r][o + c] = acc[r][c];
            }
        }
        o += C;
    }
    for r in 0..R {
        L::sums(&all[r]).store(&mut out[r]);
    }
}

#[inline(always)]
fn all_rows<L: Lanes, W: Rows>(x: Plain<'_>, w: W, count: usize, out: &mut [[f32; N]]) {
    let mut r = 0;
    while r < out.len() {
        let left = out.len() - r;
        let o = &mut out[r..];
        if L::WIDE && left >= 4 {
            block::<L, W, 4, 4>(x, r, w, count, o);
            r += 4;
        } else if left >= 2 {
            if L::WIDE {
                block::<L, W, 2, 4>(x, r, w, count, o);
            } else {
                block::<L, W, 2, 2>(x, r, w, count, o);
            }
            r += 2;
        } else {
            if L::WIDE {
                block::<L, W, 1, 8>(x, r, w, count, o);
            } else {
                block::<L, W, 1, 4>(x, r, w, count, o);
            }
            r += 1;
        }
    }
}

#[inline(always)]
fn product_impl<L: Lanes>(ty: GgmlType, rows: &[&[u8]], cols: usize, x: &[f32], out: &mut [[f32; N]]) {
    let plain = Plain { data: x, width: cols };
    match ty {
        GgmlType::F32 => all_rows::<L, _>(plain, F32Rows(rows), rows.len(), out),
        GgmlType::F16 => all_rows::<L, _>(plain, F16Rows(rows), rows.len(), out),
        GgmlType::BF16 => all_rows::<L, _>(plain, Bf16Rows(rows), rows.len(), out),
        other => panic!("{other} is not a plain float"),
    }
}

multiversion! {
    /// `out[r][o] = x[r] · rows[o]` for the `out.len()` rows of `x` and up to 16 rows of weights; the other outputs hold
    /// anything.
    pub(crate) fn product = product_impl(ty: GgmlType, rows: &[&[u8]], cols: usize, x: &[f32], out: &mut [[f32; N]]);
}

/// Rows of f32 in any order.
#[derive(Clone, Copy)]
struct Picked<'a> {
    data: &'a [f32],
    index: &'a [u32],
    width: usize,
}

impl Rows for Picked<'_> {
    type Chunk = [f32; N];
    #[inline(always)]
    fn chunks(&self, row: usize) -> &[[f32; N]] {
        let at = self.index[row] as usize * self.width;
        self.data[at..at + self.width].as_chunks().0
    }
    #[inline(always)]
    fn widen<L: Lanes>(chunk: &[f32; N]) -> L {
        L::load(chunk)
    }
    #[inline(always)]
    fn tail<L: Lanes>(&self, row: usize, k: usize) -> L {
        let at = self.index[row] as usize * self.width;
        let rest = &self.data[at + N * k..at + self.width];
        let mut x = [0.0; N];
        x[..rest.len()].copy_from_slice(rest);
        L::load(&x)
    }
}

/// `out[r][k] = x[r] · rows[index[k]]` for the `out.len()` rows of `x` and up to 16 indices, all `dim` wide.
#[inline(always)]
pub(crate) fn dots_at_impl<L: Lanes>(x: &[f32], rows: &[f32], dim: usize, index: &[u32], out: &mut [[f32; N]]) {
    let x = Plain { data: x, width: dim };
    all_rows::<L, _>(x, Picked { data: rows, index, width: dim }, index.len(), out);
}

/// `out[r][k] = x[r] · rows[k]` for the `out.len()` rows of `x` and `count` (up to 16) of `rows`, all `dim` wide.
#[inline(always)]
pub(crate) fn dots_impl<L: Lanes>(x: &[f32], rows: &[f32], dim: usize, count: usize, out: &mut [[f32; N]]) {
    let plain = |data| Plain { data, width: dim };
    all_rows::<L, _>(plain(x), plain(rows), count, out);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::Random;
    use crate::cpu::isa::Isa;
    use crate::quant;

    /// The definition in the module's documentation, for one output.
    fn defined(x: &[f32], w: &[f32]) -> f32 {
        let mut sums = [0.0f32; N];
        for (i, (x, w)) in x.iter().zip(w).enumerate() {
            sums[i % N] = x.mul_add(*w, sums[i % N]);
        }
        let mut half = N / 2;
        while half > 0 {
            for i in 0..half {
                sums[i] += sums[i + half];
            }
            half /= 2;
        }
        sums[0]
    }

    #[test]
    fn every_isa_and_tile_gives_the_bits_of_the_definition() {
        let seed = Random::fresh_seed();
        let mut rng = Random::new(seed);
        for ty in [GgmlType::F32, GgmlType::F16, GgmlType::BF16] {
            for (cols, outputs, rows) in [(64, 16, 1), (100, 3, 2), (16, 7, 3), (512, 16, 13), (5, 1, 4), (40, 15, 9)] {
                let bytes = rng.weights(ty, outputs, cols);
                let w: Vec<&[u8]> = bytes.chunks_exact(quant::row_bytes(ty, cols)).collect();
                let x = rng.activations(rows * cols);
                for isa in Isa::available() {
                    let mut out = vec![[f32::NAN; N]; rows];
                    product(isa, ty, &w, cols, &x, &mut out);
                    for (r, out) in out.iter().enumerate() {
                        for (o, w) in w.iter().enumerate() {
                            let mut float = vec![0.0; cols];
                            quant::dequantize_row(ty, w, &mut float);
                            let want = defined(&x[r * cols..(r + 1) * cols], &float);
                            assert_eq!(
                                out[o].to_bits(),
                                want.to_bits(),
                                "{ty} {cols} {} (DS4_SEED={seed})",
                                isa.name()
                            );
                        }
                    }
                }
            }
        }
    }
}
