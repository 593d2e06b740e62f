//! Products with plain floats: F32, F16 and BF16 weights.
//!
//! Sixteen outputs form a *panel*. Its weights are decoded to f32 and transposed once (`tile[k][output]`), then meet every
//! activation row. Per output and row: two running sums, over even and odd `k`, each in order, added at the end.

use ds4_manifests::GgmlType;

use crate::cpu::isa::multiversion;
use crate::cpu::lanes::{Lanes, N, array};

/// Elements `at..at + 16` of a row of bytes; elements past its end are zero.
#[inline(always)]
fn load<L: Lanes>(ty: GgmlType, row: &[u8], at: usize) -> L {
    #[inline(always)]
    fn part<const B: usize>(row: &[u8], at: usize) -> [u8; B] {
        if let Some(bytes) = row[at..].first_chunk() {
            return *bytes;
        }
        let mut bytes = [0; B];
        bytes[..row.len() - at].copy_from_slice(&row[at..]);
        bytes
    }
    match ty {
        GgmlType::F32 => L::load_bytes(&part(row, 4 * at)),
        GgmlType::BF16 => L::load_bf16(&part(row, 2 * at)),
        GgmlType::F16 => {
            let bytes: [u8; 2 * N] = part(row, 2 * at);
            L::load_f16(&array!(N, 0u16, |i| u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])))
        }
        other => panic!("{other} is not a plain float"),
    }
}

#[inline(always)]
fn decode_impl<L: Lanes>(ty: GgmlType, rows: &[&[u8]], cols: usize, tile: &mut [[f32; N]]) {
    for (at, out) in (0..cols).step_by(N).zip(tile.chunks_mut(N)) {
        let mut m = [L::splat(0.0); N];
        for (m, row) in m.iter_mut().zip(rows) {
            *m = load(ty, row, at);
        }
        L::transpose(&mut m);
        for (m, out) in m.iter().zip(out) {
            m.store(out);
        }
    }
}

multiversion! {
    /// Decodes `rows` (16 at most) of `cols` plain floats into `tile[k][row]`; missing rows are zero.
    pub(crate) fn decode = decode_impl(ty: GgmlType, rows: &[&[u8]], cols: usize, tile: &mut [[f32; N]]);
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
            8 => rows_times_tile::<L, 8>(array!(8, x, |i| row(r + i)), tile, o),
            4 => rows_times_tile::<L, 4>(array!(4, x, |i| row(r + i)), tile, o),
            _ => rows_times_tile::<L, 1>([row(r)], tile, o),
        }
        r += take;
    }
}

multiversion! {
    /// `out[r][o] = x[r] · tile[..][o]` for the `out.len()` rows of `x`.
    pub(crate) fn product = product_impl(x: &[f32], cols: usize, tile: &[[f32; N]], out: &mut [[f32; N]]);
}
