//! Causal grouped-query attention over the K and V rows of a bank.
//!
//! Keys are taken in chunks of [`CHUNK`] at fixed absolute positions. Within a chunk: scores, their maximum, their
//! exponentials and sum, then the weighted sum of values in key order; chunks are merged in order. A row's operations
//! therefore depend only on its own position, however its span was cut and whoever computes which chunk.

#![allow(unsafe_code, reason = "bank rows are raw memory")]

use std::cell::RefCell;

use crate::cpu::bank::BankView;
use crate::cpu::elementwise::exp;
use crate::cpu::isa::{Isa, multiversion};
use crate::cpu::lanes::{Lanes, N, array, prefetch};
use crate::cpu::pool::Pool;
use crate::cpu::raw::RawRows;
use crate::device::Attention;
use crate::state::StateType;

/// Keys per softmax chunk.
const CHUNK: usize = 256;
/// Keys per tile: a tile of keys and one of values (16 KiB each at 64 wide) stay in the L1 cache.
const TILE: usize = 64;
/// Vectors per tile row of keys.
const TV: usize = TILE / N;
/// Query vectors (rows times heads of a group) that share a tile; bounds the scratch.
const QUERIES: usize = 96;

/// Rows of one span that are computed together: consecutive positions of one bank.
#[derive(Clone, Copy)]
pub(crate) struct RowTile {
    bank: usize,
    first_pos: usize,
    first_row: usize,
    rows: usize,
}

/// A span as the step holds it.
#[derive(Clone, Copy)]
pub(crate) struct SpanView {
    /// Index into the step's views.
    pub(crate) bank: usize,
    pub(crate) first_pos: usize,
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
}

/// State rows of one slot, as one KV head reads them.
#[derive(Clone, Copy)]
struct HeadRows {
    base: *const u8,
    ty: StateType,
    /// Elements per row.
    stride: usize,
    /// First element of the head.
    offset: usize,
    dim: usize,
}

impl HeadRows {
    /// Asks for the head's part of row `t`, which need not exist.
    #[inline(always)]
    fn prefetch(&self, t: usize) {
        let size = self.ty.row_bytes(1);
        let first = self.base.wrapping_add((t * self.stride + self.offset) * size);
        for at in (0..self.dim * size).step_by(64) {
            prefetch(first.wrapping_add(at));
        }
    }

    /// Elements `d..d + 16` of key `t`; elements past the head are zero.
    ///
    /// # Safety
    /// Row `t` must be readable and `d < dim`.
    #[inline(always)]
    unsafe fn load<L: Lanes, const F16: bool>(&self, t: usize, d: usize) -> L {
        let at = t * self.stride + self.offset + d;
        let n = N.min(self.dim - d);
        // SAFETY: elements `at..at + n` are inside row `t`, which the caller vouches for; rows are aligned to their type.
        unsafe {
            if F16 {
                let p = self.base.cast::<u16>().add(at);
                if n == N {
                    return L::load_f16(&*p.cast::<[u16; N]>());
                }
                let mut x = [0u16; N];
                x[..n].copy_from_slice(std::slice::from_raw_parts(p, n));
                L::load_f16(&x)
            } else {
                let p = self.base.cast::<f32>().add(at);
                if n == N {
                    return L::load(&*p.cast::<[f32; N]>());
                }
                let mut x = [0f32; N];
                x[..n].copy_from_slice(std::slice::from_raw_parts(p, n));
                L::load(&x)
            }
        }
    }
}

/// One unit of work: the queries of a row tile that share a KV head.
struct Unit<'a> {
    keys: HeadRows,
    values: HeadRows,
    /// Query head of row `r`, head `h` of the group: `q[(first_row + r) * heads * dim + (kv_head * group + h) * dim..]`.
    q: &'a [f32],
    q_stride: usize,
    q_offset: usize,
    group: usize,
    rows: usize,
    first_pos: usize,
    scale: f32,
}

/// Per-thread work memory.
#[derive(Default)]
struct Scratch {
    tile: Vec<f32>,
    scores: Vec<f32>,
    part: Vec<f32>,
    run: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Scores of `H` queries against one tile: `out[h][t] = scale * sum_d q[h][d] * kt[d][t]`.
#[inline(always)]
fn scores<L: Lanes, const H: usize>(q: [&[f32]; H], kt: &[[f32; N]], scale: f32, out: [&mut [[f32; N]]; H]) {
    let mut acc = [[L::splat(0.0); TV]; H];
    for (d, k) in kt.as_chunks::<TV>().0.iter().enumerate() {
        let k = array!(TV, L::splat(0.0), |v| L::load(&k[v]));
        for h in 0..H {
            let x = L::splat(q[h][d]);
            for v in 0..TV {
                acc[h][v] = x.fma(k[v], acc[h][v]);
            }
        }
    }
    for (acc, out) in acc.iter().zip(out) {
        for (a, o) in acc.iter().zip(out) {
            a.mul(L::splat(scale)).store(o);
        }
    }
}

/// `acc[h][d] += sum_t p[h][t] * v[t][d]` for `H` queries and `V` vectors of `d` from `from`, in order of `t`.
#[inline(always)]
fn weighted<L: Lanes, const H: usize, const V: usize>(
    p: [&[f32]; H],
    vt: &[[f32; N]],
    row_vectors: usize,
    from: usize,
    keys: usize,
    out: &mut [[f32; N]],
    out_stride: usize,
) {
    let mut acc =
        array!(H, [L::splat(0.0); V], |h| array!(V, L::splat(0.0), |v| L::load(&out[h * out_stride + from + v])));
    for (t, row) in vt.chunks_exact(row_vectors).take(keys).enumerate() {
        let x = array!(V, L::splat(0.0), |v| L::load(&row[from + v]));
        for h in 0..H {
            let w = L::splat(p[h][t]);
            for v in 0..V {
                acc[h][v] = w.fma(x[v], acc[h][v]);
            }
        }
    }
    for h in 0..H {
        for v in 0..V {
            acc[h][v].store(&mut out[h * out_stride + from + v]);
        }
    }
}

#[inline(always)]
fn weighted_heads<L: Lanes, const H: usize>(
    p: [&[f32]; H],
    vt: &[[f32; N]],
    row_vectors: usize,
    keys: usize,
    out: &mut [[f32; N]],
    out_stride: usize,
) {
    let mut from = 0;
    while from < row_vectors {
        match row_vectors - from {
            1 => weighted::<L, H, 1>(p, vt, row_vectors, from, keys, out, out_stride),
            2 => weighted::<L, H, 2>(p, vt, row_vectors, from, keys, out, out_stride),
            3 => weighted::<L, H, 3>(p, vt, row_vectors, from, keys, out, out_stride),
            _ => weighted::<L, H, 4>(p, vt, row_vectors, from, keys, out, out_stride),
        }
        from += 4.min(row_vectors - from);
    }
}

/// Partial results of chunk `chunk` for every query of `u` that reaches it, into `part` (`[rows * group, part_len]`).
#[inline(always)]
fn chunk_impl<L: Lanes>(
    u: &Unit<'_>,
    chunk: usize,
    tile: &mut [[f32; N]],
    score: &mut [[f32; N]],
    part: &mut [[f32; N]],
) {
    match u.keys.ty {
        StateType::F16 => chunk_of::<L, true>(u, chunk, tile, score, part),
        StateType::F32 => chunk_of::<L, false>(u, chunk, tile, score, part),
        StateType::Fp8 { .. } | StateType::Fp4 => unreachable!("refused by `Device::attention`"),
    }
}

#[inline(always)]
fn chunk_of<L: Lanes, const F16: bool>(
    u: &Unit<'_>,
    chunk: usize,
    tile: &mut [[f32; N]],
    score: &mut [[f32; N]],
    part: &mut [[f32; N]],
) {
    let dim = u.keys.dim;
    let dv = dim.div_ceil(N);
    let stride = dv + 1;
    let start = chunk * CHUNK;
    let end = (start + CHUNK).min(u.first_pos + u.rows);
    // Rows ascend in position, so those that reach a key are a tail of the tile.
    let first_at = |key: usize| key.saturating_sub(u.first_pos);
    let query = |i: usize| {
        let at = (i / u.group) * u.q_stride + u.q_offset + (i % u.group) * dim;
        &u.q[at..at + dim]
    };
    let sv = CHUNK / N;

    for (b, t0) in (start..end).step_by(TILE).enumerate() {
        let keys = TILE.min(end - t0);
        // Rows of one head are too far apart for the hardware prefetcher: ask for the values of this tile, which come
        // next, and for the keys of the next one. Without this a lone query waits 65 ns for each key.
        for t in t0..t0 + keys {
            u.values.prefetch(t);
            u.keys.prefetch(t + TILE);
        }
        for tv in 0..TV {
            for d in (0..dim).step_by(N) {
                let mut m = [L::splat(0.0); N];
                for (i, m) in m.iter_mut().enumerate().take(keys.saturating_sub(tv * N)) {
                    // SAFETY: the bank has every row up to the tile's last position (checked when the step was made).
                    *m = unsafe { u.keys.load::<L, F16>(t0 + tv * N + i, d) };
                }
                L::transpose(&mut m);
                for (j, v) in m.iter().enumerate().take(dim - d) {
                    v.store(&mut tile[(d + j) * TV + tv]);
                }
            }
        }
        let kt = &tile[..dim * TV];
        let mut i = first_at(t0) * u.group;
        let n = u.rows * u.group;
        while i < n {
            let mut rows = score[i * sv..].chunks_mut(sv).map(|r| &mut r[b * TV..(b + 1) * TV]);
            let mut next = || rows.next().expect("scores of every query");
            match n - i {
                1 => scores::<L, 1>([query(i)], kt, u.scale, [next()]),
                2 => scores::<L, 2>([query(i), query(i + 1)], kt, u.scale, [next(), next()]),
                3 => scores::<L, 3>([query(i), query(i + 1), query(i + 2)], kt, u.scale, [next(), next(), next()]),
                _ => {
                    let out = [next(), next(), next(), next()];
                    scores::<L, 4>([query(i), query(i + 1), query(i + 2), query(i + 3)], kt, u.scale, out);
                }
            }
            i += 4.min(n - i);
        }
    }

    for i in first_at(start) * u.group..u.rows * u.group {
        let keys = (u.first_pos + i / u.group + 1 - start).min(CHUNK);
        let s = &mut score[i * sv..(i + 1) * sv];
        s.as_flattened_mut()[keys..keys.next_multiple_of(N)].fill(f32::NEG_INFINITY);
        let s = &mut s[..keys.div_ceil(N)];
        let mut max = L::splat(f32::NEG_INFINITY);
        for v in s.iter() {
            max = max.max(L::load(v));
        }
        let max = max.max_lane();
        let mut sum = L::splat(0.0);
        for v in s.iter_mut() {
            let e = exp(L::load(v).sub(L::splat(max)));
            sum = sum.add(e);
            e.store(v);
        }
        let out = &mut part[i * stride..(i + 1) * stride];
        out[..dv].fill([0.0; N]);
        out[dv][0] = max;
        out[dv][1] = sum.sum();
    }

    for (b, t0) in (start..end).step_by(TILE).enumerate() {
        let keys = TILE.min(end - t0);
        for t in 0..keys {
            for (d, v) in tile[t * dv..(t + 1) * dv].iter_mut().enumerate() {
                // SAFETY: as for the keys.
                unsafe { u.values.load::<L, F16>(t0 + t, d * N) }.store(v);
            }
        }
        let vt = &tile[..keys * dv];
        for row in first_at(t0)..u.rows {
            let keys = keys.min(u.first_pos + row + 1 - t0);
            let mut h = 0;
            while h < u.group {
                let i = row * u.group + h;
                let p = |k: usize| score[(i + k) * sv + b * TV..(i + k) * sv + (b + 1) * TV].as_flattened();
                let out = &mut part[i * stride..];
                match u.group - h {
                    1 => weighted_heads::<L, 1>([p(0)], vt, dv, keys, out, stride),
                    2 => weighted_heads::<L, 2>([p(0), p(1)], vt, dv, keys, out, stride),
                    3 => weighted_heads::<L, 3>([p(0), p(1), p(2)], vt, dv, keys, out, stride),
                    _ => weighted_heads::<L, 4>([p(0), p(1), p(2), p(3)], vt, dv, keys, out, stride),
                }
                h += 4.min(u.group - h);
            }
        }
    }
}

multiversion! {
    fn chunk = chunk_impl(u: &Unit<'_>, chunk: usize, tile: &mut [[f32; N]], score: &mut [[f32; N]], part: &mut [[f32; N]]);
}

/// Merges a later partial result into a running one: both are rescaled to the greater maximum.
#[inline(always)]
fn merge_impl<L: Lanes>(run: &mut [[f32; N]], part: &[[f32; N]]) {
    let dv = run.len() - 1;
    let (m1, m2) = (run[dv][0], part[dv][0]);
    let m = if m1 > m2 { m1 } else { m2 };
    let (a, b) = (exp(L::splat(m1 - m)), exp(L::splat(m2 - m)));
    for (r, p) in run[..dv].iter_mut().zip(part) {
        a.fma(L::load(r), b.mul(L::load(p))).store(r);
    }
    let mut l = [0.0; N];
    a.fma(L::splat(run[dv][1]), b.mul(L::splat(part[dv][1]))).store(&mut l);
    run[dv] = [m, l[0], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
}

multiversion! {
    fn merge = merge_impl(run: &mut [[f32; N]], part: &[[f32; N]]);
}

/// Divides by the sum and writes one query's result.
fn finish(run: &[[f32; N]], out: &mut [f32]) {
    let sum = run[run.len() - 1][1];
    for (o, v) in out.iter_mut().zip(run.as_flattened()) {
        *o = v / sum;
    }
}

fn vectors(v: &mut Vec<f32>, n: usize) -> &mut [[f32; N]] {
    if v.len() < n * N {
        v.resize(n * N, 0.0);
    }
    &mut v.as_chunks_mut::<N>().0[..n]
}

/// Attention of every row of `q` (`[rows, heads * dim]`) into `out` of the same shape.
pub(crate) fn attention(
    pool: &Pool,
    isa: Isa,
    banks: &[BankView],
    spans: &[SpanView],
    p: &Attention,
    q: &[f32],
    out: &mut [f32],
) {
    let group = p.heads / p.kv_heads;
    let width = p.heads * p.head_dim;
    let dv = p.head_dim.div_ceil(N);
    let tile_rows = (QUERIES / group).max(1);
    let mut tiles = Vec::new();
    for s in spans {
        for r in (0..s.rows).step_by(tile_rows) {
            let rows = tile_rows.min(s.rows - r);
            tiles.push(RowTile { bank: s.bank, first_pos: s.first_pos + r, first_row: s.first_row + r, rows });
        }
    }
    let chunks = |t: &RowTile| (t.first_pos + t.rows).div_ceil(CHUNK);
    let unit = |t: &RowTile, kv_head: usize| {
        let bank = &banks[t.bank];
        let rows = |slot: usize| HeadRows {
            base: bank.rows(slot),
            ty: bank.slot(slot).ty,
            stride: bank.slot(slot).width,
            offset: kv_head * p.head_dim,
            dim: p.head_dim,
        };
        Unit {
            keys: rows(p.k_slot),
            values: rows(p.v_slot),
            q: &q[t.first_row * width..],
            q_stride: width,
            q_offset: kv_head * group * p.head_dim,
            group,
            rows: t.rows,
            first_pos: t.first_pos,
            scale: p.scale,
        }
    };
    let tile_len = (p.head_dim * TV).max(TILE * dv);
    let raw = RawRows::new(out, width);
    let write = |t: &RowTile, kv_head: usize, i: usize, run: &[[f32; N]]| {
        let (row, head) = (t.first_row + i / group, kv_head * group + i % group);
        // SAFETY: each (row, head) is written by exactly one item.
        finish(run, unsafe { raw.part(row, head * p.head_dim, p.head_dim) });
    };

    let split: usize = tiles.iter().map(|t| chunks(t) * p.kv_heads).sum();
    let whole = tiles.len() * p.kv_heads;
    if whole >= 4 * pool.threads() || split == whole {
        pool.run(whole, 1, &|items| {
            SCRATCH.with_borrow_mut(|s| {
                for item in items {
                    let (t, kv_head) = (&tiles[item / p.kv_heads], item % p.kv_heads);
                    let u = unit(t, kv_head);
                    let n = u.rows * group;
                    let tile = vectors(&mut s.tile, tile_len);
                    let score = vectors(&mut s.scores, n * (CHUNK / N));
                    let part = vectors(&mut s.part, n * (dv + 1));
                    let run = vectors(&mut s.run, n * (dv + 1));
                    chunk(isa, &u, 0, tile, score, run);
                    for c in 1..chunks(t) {
                        chunk(isa, &u, c, tile, score, part);
                        let first = (c * CHUNK).saturating_sub(u.first_pos) * group;
                        let pairs = run.chunks_exact_mut(dv + 1).zip(part.chunks_exact(dv + 1));
                        for (run, part) in pairs.skip(first) {
                            merge(isa, run, part);
                        }
                    }
                    for (i, run) in run.chunks_exact(dv + 1).enumerate() {
                        write(t, kv_head, i, run);
                    }
                }
            });
        });
        return;
    }

    // Few rows over long contexts: the chunks of one row go to different threads, then are merged in the same order.
    let mut items = Vec::with_capacity(split);
    let mut at = 0;
    for t in &tiles {
        // All heads of a chunk follow each other: they share cache lines and pages.
        let n = t.rows * group;
        for c in 0..chunks(t) {
            for kv_head in 0..p.kv_heads {
                items.push((t, kv_head, c, at + (kv_head * chunks(t) + c) * n));
            }
        }
        at += n * p.kv_heads * chunks(t);
    }
    let mut parts = vec![0.0f32; at * (dv + 1) * N];
    let raw_parts = RawRows::new(&mut parts, (dv + 1) * N);
    pool.run(items.len(), 1, &|range| {
        SCRATCH.with_borrow_mut(|s| {
            for (t, kv_head, c, at) in &items[range] {
                let u = unit(t, *kv_head);
                let n = u.rows * group;
                let tile = vectors(&mut s.tile, tile_len);
                let score = vectors(&mut s.scores, n * (CHUNK / N));
                // SAFETY: rows `at..at + n` belong to this item alone.
                let part = unsafe { raw_parts.rows(*at, n) };
                chunk(isa, &u, *c, tile, score, part.as_chunks_mut::<N>().0);
            }
        });
    });
    let parts = parts.as_chunks_mut::<N>().0;
    for (t, kv_head, c, at) in &items {
        let n = t.rows * group;
        if *c == 0 {
            for i in 0..n {
                let (head, rest) = parts[(at + i) * (dv + 1)..].split_at_mut(dv + 1);
                let reach = (t.first_pos + i / group) / CHUNK;
                for k in 1..=reach {
                    merge(isa, head, &rest[(k * n - 1) * (dv + 1)..][..dv + 1]);
                }
                write(t, *kv_head, i, head);
            }
        }
    }
}
