//! The lightning indexer: scores of compressed rows, and the best of them.
//!
//! Sixteen rows at a time meet all heads of all queries of a tile: rows stored in FP4 as integers ([`crate::cpu::index_fp4`]),
//! others widened to f32. Per query and row, heads are summed in order.

use std::ops::Range;

use crate::cpu::bank::BankView;
use crate::cpu::float;
use crate::cpu::index_fp4::{self, Query};
use crate::cpu::isa::{Isa, multiversion};
use crate::cpu::lanes::{Lanes, N};
use crate::cpu::matmul::grow;
use crate::cpu::raw::RawRows;
use crate::cpu::{CpuBuffer, state_rows};
use crate::ops::Indexer;
use crate::state::StateType;

/// Work memory of scoring.
#[derive(Default)]
pub(crate) struct Scratch {
    keys: Vec<f32>,
    part: Vec<[f32; N]>,
    packed: index_fp4::Keys,
}

/// The queries of a tile as rows stored in FP4 meet them; none for other storage.
pub(crate) fn prepare(isa: Isa, p: &Indexer, bank: &BankView, q: &CpuBuffer, rows: Range<usize>, out: &mut Vec<Query>) {
    let fp4 = bank.slot(p.rows_slot).ty == StateType::Fp4 && index_fp4::fits(p.head_dim);
    out.resize_with(if fp4 { rows.len() } else { 0 }, Query::default);
    for (query, row) in out.iter_mut().zip(rows) {
        query.set(isa, q.row(row));
    }
}

#[allow(clippy::too_many_arguments, reason = "operands and work memory of an operation")]
#[inline(always)]
fn score_impl<L: Lanes>(
    q: &[f32],
    keys: &[f32],
    dim: usize,
    count: usize,
    weights: &[f32],
    scale: f32,
    part: &mut Vec<[f32; N]>,
    out: &mut [f32; N],
) {
    let part = grow(part, weights.len(), [0.0; N]);
    float::dots_impl::<L>(q, keys, dim, count, part);
    let zero = L::splat(0.0);
    let mut total = zero;
    for (w, s) in weights.iter().zip(part.iter()) {
        total = L::splat(w * scale).fma(L::load(s).max(zero), total);
    }
    total.store(out);
}

multiversion! {
    /// `out[k] = Σ_h weights[h] · scale · max(0, q[h] · keys[k])` for up to 16 keys.
    fn score = score_impl(q: &[f32], keys: &[f32], dim: usize, count: usize, weights: &[f32], scale: f32,
        part: &mut Vec<[f32; N]>, out: &mut [f32; N]);
}

/// Scores of compressed rows `16 panels.start .. 16 panels.end` (below `visible`) for the queries at rows `queries` of `q` and `w`,
/// into the same columns of `out`, a row per query; `out` is `[queries, whole panels]`. `prepared` is what [`prepare`] made of them.
///
/// # Safety
/// Nobody else may use those columns of `out` meanwhile.
#[allow(unsafe_code, reason = "columns are disjoint among callers")]
#[allow(clippy::too_many_arguments, reason = "operands of an operation")]
pub(crate) unsafe fn scores(
    isa: Isa,
    p: &Indexer,
    bank: &BankView,
    panels: Range<usize>,
    visible: usize,
    (q, w): (&CpuBuffer, &CpuBuffer),
    queries: Range<usize>,
    prepared: &[Query],
    s: &mut Scratch,
    out: &RawRows<'_>,
) {
    if !prepared.is_empty() {
        for panel in panels {
            let mut rows = [&[][..]; N];
            let count = N.min(visible - panel * N);
            for (k, row) in rows.iter_mut().enumerate().take(count) {
                *row = state_rows::packed(bank, p.rows_slot, panel * N + k);
            }
            s.packed.set(isa, &rows[..count], p.head_dim);
            for (i, row) in queries.clone().enumerate() {
                let mut sum = [0.0; N];
                index_fp4::score(isa, &prepared[i], &s.packed, w.row(row), p.scale, &mut sum);
                // SAFETY: as the caller promises.
                unsafe { out.part(i, panel * N, N) }.copy_from_slice(&sum);
            }
        }
        return;
    }
    s.keys.resize(N * p.head_dim, 0.0);
    for panel in panels {
        let count = N.min(visible - panel * N);
        for (k, key) in s.keys.chunks_exact_mut(p.head_dim).enumerate().take(count) {
            state_rows::read(isa, bank, p.rows_slot, panel * N + k, key);
        }
        for (i, row) in queries.clone().enumerate() {
            let mut sum = [0.0; N];
            score(isa, q.row(row), &s.keys, p.head_dim, count, w.row(row), p.scale, &mut s.part, &mut sum);
            // SAFETY: as the caller promises.
            unsafe { out.part(i, panel * N, N) }.copy_from_slice(&sum);
        }
    }
}

/// Indices of the `k` largest, ascending; ties go to the lower index.
pub(crate) fn top_rows(scores: &[f32], k: usize) -> Vec<usize> {
    // The order of floats as integers, reversed, above the index: the smallest `k` are what is wanted.
    let mut order: Vec<u64> = (0u32..)
        .zip(scores)
        .map(|(i, s)| {
            let bits = s.to_bits();
            let ascending = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
            (u64::from(!ascending) << 32) | u64::from(i)
        })
        .collect();
    if k < order.len() {
        order.select_nth_unstable(k);
        order.truncate(k);
    }
    let mut rows: Vec<u32> = order.into_iter().map(|o| u32::try_from(o & 0xffff_ffff).unwrap_or(u32::MAX)).collect();
    rows.sort_unstable();
    rows.into_iter().map(|r| usize::try_from(r).unwrap_or(usize::MAX)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lower_row() {
        assert_eq!(top_rows(&[1.0, 3.0, 2.0, 3.0, 3.0], 2), [1, 3]);
        assert_eq!(top_rows(&[0.0; 5], 3), [0, 1, 2]);
        assert_eq!(top_rows(&[1.0, 2.0], 4), [0, 1]);
        assert_eq!(top_rows(&[-1.0, -3.0, 0.0, -0.5, 1e-30], 3), [2, 3, 4]);
    }
}
