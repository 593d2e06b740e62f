//! Products with weights that are multiplied as f32: plain floats, and any type without an integer path.
//!
//! Sixteen outputs form a *panel*. Its weights are decoded to f32 and transposed once (`tile[k][output]`), then meet every
//! activation row. Per output and row: two running sums, over even and odd `k`, each in order, added at the end.

use ds4_manifests::GgmlType;

use crate::cpu::isa::{Isa, multiversion};
use crate::cpu::lanes::{Lanes, N};
use crate::quant;

/// Decodes rows `rows` (16 at most) of `cols` elements into `tile[k][row]`; missing rows are zero.
pub(crate) fn decode(
    isa: Isa,
    ty: GgmlType,
    rows: &[&[u8]],
    cols: usize,
    rowwise: &mut Vec<f32>,
    tile: &mut [[f32; N]],
) {
    let padded = cols.next_multiple_of(N);
    if rowwise.len() < padded * N {
        rowwise.resize(padded * N, 0.0);
    }
    let rowwise = &mut rowwise[..padded * N];
    for (i, out) in rowwise.chunks_exact_mut(padded).enumerate() {
        match rows.get(i) {
            Some(row) => {
                quant::dequantize_row(ty, row, &mut out[..cols]);
                out[cols..].fill(0.0);
            }
            None => out.fill(0.0),
        }
    }
    transpose(isa, rowwise, tile);
}

#[inline(always)]
fn transpose_impl<L: Lanes>(rowwise: &[f32], tile: &mut [[f32; N]]) {
    let vectors = rowwise.len() / N / N;
    let (rows, _) = rowwise.as_chunks::<N>();
    for v in 0..vectors {
        let mut m: [L; N] = std::array::from_fn(|i| L::load(&rows[i * vectors + v]));
        L::transpose(&mut m);
        for (x, out) in m.iter().zip(&mut tile[v * N..]) {
            x.store(out);
        }
    }
}

multiversion! {
    fn transpose = transpose_impl(rowwise: &[f32], tile: &mut [[f32; N]]);
}

#[inline(always)]
fn rows_times_tile<L: Lanes, const R: usize>(x: [&[f32]; R], tile: &[[f32; N]], out: &mut [[f32; N]]) {
    let mut acc = [[L::splat(0.0); 2]; R];
    let (pairs, last) = tile.as_chunks::<2>();
    for (k, [even, odd]) in pairs.iter().enumerate() {
        let (even, odd) = (L::load(even), L::load(odd));
        for r in 0..R {
            acc[r][0] = L::splat(x[r][2 * k]).fma(even, acc[r][0]);
            acc[r][1] = L::splat(x[r][2 * k + 1]).fma(odd, acc[r][1]);
        }
    }
    for r in 0..R {
        if let [w] = last {
            acc[r][0] = L::splat(x[r][tile.len() - 1]).fma(L::load(w), acc[r][0]);
        }
        acc[r][0].add(acc[r][1]).store(&mut out[r]);
    }
}

#[inline(always)]
fn product_impl<L: Lanes>(x: &[f32], cols: usize, tile: &[[f32; N]], out: &mut [[f32; N]]) {
    let tile = &tile[..cols];
    let row = |r: usize| &x[r * cols..(r + 1) * cols];
    let mut r = 0;
    while r < out.len() {
        let left = out.len() - r;
        let take = if left >= 8 {
            8
        } else if left >= 4 {
            4
        } else {
            1
        };
        let o = &mut out[r..];
        match take {
            8 => rows_times_tile::<L, 8>(std::array::from_fn(|i| row(r + i)), tile, o),
            4 => rows_times_tile::<L, 4>(std::array::from_fn(|i| row(r + i)), tile, o),
            _ => rows_times_tile::<L, 1>([row(r)], tile, o),
        }
        r += take;
    }
}

multiversion! {
    /// `out[r][o] = x[r] · tile[..][o]` for the `out.len()` rows of `x`.
    pub(crate) fn product = product_impl(x: &[f32], cols: usize, tile: &[[f32; N]], out: &mut [[f32; N]]);
}
