//! Sparse attention on the CPU: rotary tails, rounding, the indexer's selection, and attention over window and history.
//!
//! One query position is one unit of work: its visible rows are gathered once, as f32, and meet all heads. The order is fixed
//! (window rows by position, then compressed rows by index), so a row's result does not depend on how its prompt was cut.

use std::cell::RefCell;

use crate::cpu::attention::SpanView;
use crate::cpu::bank::BankView;
use crate::cpu::elementwise;
use crate::cpu::float;
use crate::cpu::hyper::axpy;
use crate::cpu::isa::Isa;
use crate::cpu::lanes::N;
use crate::cpu::raw::RawRows;
use crate::cpu::{CpuBuffer, CpuDevice, CpuStep, CpuWeight, compress, state_rows};
use crate::device::Device;
use crate::math::lowp;
use crate::ops::{Compressor, Indexer, KvNumerics, SparseAttention, SparseOps};

/// Heads per unit of work: decode of one row still has work for several threads.
const HEAD_BLOCK: usize = 16;

/// Per row: `None` for all visible rows, or the selected ones in ascending order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CpuSelection {
    /// One entry per row of the step.
    pub rows: Vec<Option<Vec<usize>>>,
}

#[derive(Default)]
struct Scratch {
    keys: Vec<f32>,
    tile: Vec<[f32; N]>,
    part: Vec<[f32; N]>,
    scores: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// `out[h][k] = x[h] · rows[k]` for `heads` rows of `x` and `n` rows of `rows`, all `dim` wide; `out` is `[heads, n]`.
#[allow(clippy::too_many_arguments, reason = "a small matrix product")]
fn dot_rows(
    isa: Isa,
    x: &[f32],
    rows: &[f32],
    dim: usize,
    n: usize,
    tile: &mut Vec<[f32; N]>,
    part: &mut Vec<[f32; N]>,
    out: &mut [f32],
) {
    let heads = x.len() / dim;
    part.resize(heads, [0.0; N]);
    tile.resize(dim, [0.0; N]);
    for first in (0..n).step_by(N) {
        let count = N.min(n - first);
        for (k, row) in rows[first * dim..(first + count) * dim].chunks_exact(dim).enumerate() {
            for (t, v) in tile.iter_mut().zip(row) {
                t[k] = *v;
            }
        }
        float::product(isa, x, dim, &tile[..dim], &mut part[..heads]);
        for (h, p) in part[..heads].iter().enumerate() {
            out[h * n + first..h * n + first + count].copy_from_slice(&p[..count]);
        }
    }
}

/// `out[h] = Σ_k p[h][k] · rows[k]`; `p` is `[heads, n]`, `out` `[heads, dim]`.
fn mix_rows(isa: Isa, p: &[f32], rows: &[f32], dim: usize, n: usize, out: &mut [f32]) {
    for (weights, out) in p.chunks_exact(n).zip(out.chunks_exact_mut(dim)) {
        for (k, (w, row)) in weights.iter().zip(rows.chunks_exact(dim)).enumerate() {
            axpy(isa, *w, row, k == 0, out);
        }
    }
}

/// Softmax of one head's scores in place, with a sink logit that has no value row.
fn softmax_with_sink(scores: &mut [f32], scale: f32, sink: f32) {
    let mut max = sink;
    for s in scores.iter_mut() {
        *s *= scale;
        max = max.max(*s);
    }
    let mut sum = (sink - max).exp();
    for s in scores.iter_mut() {
        *s = (*s - max).exp();
        sum += *s;
    }
    for s in scores {
        *s /= sum;
    }
}

/// Gathers what the query at `pos` sees into `keys` and returns the number of rows.
fn gather(
    p: &SparseAttention,
    span: &SpanView,
    bank: &BankView,
    kv: &CpuBuffer,
    pos: usize,
    selected: Option<&[usize]>,
    keys: &mut Vec<f32>,
) -> usize {
    let first = (pos + 1).saturating_sub(p.window);
    let compressed = p.compressed.map_or(0, |(_, ratio)| (pos + 1) / ratio);
    let history = selected.map_or(compressed, <[usize]>::len);
    let n = pos + 1 - first + history;
    keys.resize(n * p.head_dim, 0.0);
    let mut out = keys.chunks_exact_mut(p.head_dim);
    for t in first..=pos {
        let Some(row) = out.next() else { break };
        if t < span.first_pos {
            state_rows::read(bank, p.ring_slot, t, row);
        } else {
            row.copy_from_slice(kv.row(span.first_row + t - span.first_pos));
        }
    }
    if let Some((slot, _)) = p.compressed {
        for k in 0..history {
            let Some(row) = out.next() else { break };
            state_rows::read(bank, slot, selected.map_or(k, |s| s[k]), row);
        }
    }
    n
}

impl CpuDevice {
    /// Rotates the trailing pairs of one head.
    pub(crate) fn rotate_tail(
        &self,
        frequencies: &[f64],
        pos: usize,
        head_dim: usize,
        inverse: bool,
        head: &mut [f32],
    ) {
        let dim = 2 * frequencies.len();
        let (pairs, _) = head[head_dim - dim..].as_chunks_mut::<2>();
        for (x, f) in pairs.iter_mut().zip(frequencies) {
            #[allow(clippy::cast_precision_loss, reason = "positions are far below 2^52")]
            let (sin, cos) = (pos as f64 * f).sin_cos();
            #[allow(clippy::cast_possible_truncation, reason = "rounded to the activations' precision")]
            let (sin, cos) = (if inverse { -sin } else { sin } as f32, cos as f32);
            *x = [x[0] * cos - x[1] * sin, x[0] * sin + x[1] * cos];
        }
    }
}

impl SparseOps for CpuDevice {
    type RopeTable = Vec<f64>;
    type Selection = CpuSelection;

    fn upload_rope(&self, frequencies: &[f64]) -> Vec<f64> {
        frequencies.to_vec()
    }

    fn head_rms(&self, x: &mut CpuBuffer, head_dim: usize, eps: f32) {
        assert!(x.width().is_multiple_of(head_dim), "whole heads");
        let isa = self.isa();
        self.for_rows(x, |_, row| {
            for head in row.chunks_exact_mut(head_dim) {
                let scale = elementwise::inverse_rms(isa, head, eps);
                head.iter_mut().for_each(|v| *v *= scale);
            }
        });
    }

    fn rope_tail(&self, step: &CpuStep, table: &Vec<f64>, head_dim: usize, inverse: bool, x: &mut CpuBuffer) {
        assert_eq!(x.rows(), step.positions().len(), "rows of another step");
        assert!(x.width().is_multiple_of(head_dim) && 2 * table.len() <= head_dim, "rotary shape");
        let dim = 2 * table.len();
        self.for_rows(x, |r, row| {
            // Sines once per row, not per head.
            #[allow(clippy::cast_precision_loss, reason = "positions are far below 2^52")]
            let pos = step.positions()[r] as f64;
            let turns: Vec<[f32; 2]> = table
                .iter()
                .map(|f| {
                    let (sin, cos) = (pos * f).sin_cos();
                    #[allow(clippy::cast_possible_truncation, reason = "rounded to the activations' precision")]
                    [if inverse { -sin } else { sin } as f32, cos as f32]
                })
                .collect();
            for head in row.chunks_exact_mut(head_dim) {
                for (x, [sin, cos]) in head[head_dim - dim..].as_chunks_mut::<2>().0.iter_mut().zip(&turns) {
                    *x = [x[0] * cos - x[1] * sin, x[0] * sin + x[1] * cos];
                }
            }
        });
    }

    fn round_kv(&self, numerics: KvNumerics, rope_dim: usize, x: &mut CpuBuffer) {
        if numerics == KvNumerics::Official {
            self.for_rows(x, |_, row| {
                let nope = row.len() - rope_dim;
                lowp::fp8_round_trip(&mut row[..nope]);
                lowp::f16_round_trip(row);
            });
        }
    }

    fn round_index(&self, numerics: KvNumerics, head_dim: usize, x: &mut CpuBuffer) {
        if numerics == KvNumerics::Official {
            self.for_rows(x, |_, row| {
                for head in row.chunks_exact_mut(head_dim) {
                    lowp::hadamard(head);
                    lowp::fp4_round_trip(head);
                }
            });
        }
    }

    fn compress(&self, step: &CpuStep, c: &Compressor<'_, Self>, values: &CpuBuffer, scores: &CpuBuffer) {
        compress::compress(self, step, c, values, scores);
    }

    fn index_select(&self, step: &CpuStep, p: &Indexer, q: &CpuBuffer, w: &CpuBuffer, out: &mut CpuSelection) {
        assert!(q.width() == p.heads * p.head_dim && w.width() == p.heads, "indexer shape");
        out.rows.clear();
        out.rows.resize(q.rows(), None);
        let isa = self.isa();
        let results = std::sync::Mutex::new(&mut out.rows);
        self.for_positions(step, 1, &|_, bank, pos, row, _| {
            let visible = (pos + 1) / p.ratio;
            if visible <= p.top_k {
                return;
            }
            SCRATCH.with_borrow_mut(|s| {
                s.keys.resize(visible * p.head_dim, 0.0);
                for (k, key) in s.keys.chunks_exact_mut(p.head_dim).enumerate() {
                    state_rows::read(bank, p.rows_slot, k, key);
                }
                s.scores.resize(p.heads * visible, 0.0);
                dot_rows(isa, q.row(row), &s.keys, p.head_dim, visible, &mut s.tile, &mut s.part, &mut s.scores);
                let mut total = vec![0.0f32; visible];
                for (h, scores) in s.scores[..p.heads * visible].chunks_exact(visible).enumerate() {
                    let weight = w.row(row)[h] * p.scale;
                    for (t, s) in total.iter_mut().zip(scores) {
                        *t += weight * s.max(0.0);
                    }
                }
                let selected = top_rows(&total, p.top_k);
                results.lock().unwrap_or_else(std::sync::PoisonError::into_inner)[row] = Some(selected);
            });
        });
    }

    fn sparse_attention(
        &self,
        step: &CpuStep,
        p: &SparseAttention,
        sinks: &CpuWeight,
        q: &CpuBuffer,
        kv: &CpuBuffer,
        selection: Option<&CpuSelection>,
        out: &mut CpuBuffer,
    ) {
        assert!(
            q.width() == p.heads * p.head_dim && out.width() == q.width() && kv.width() == p.head_dim,
            "attention shape"
        );
        assert!(step.distinct_banks(), "two spans of one bank in a step of a model with a sliding window");
        out.resize(q.rows());
        let isa = self.isa();
        let blocks = p.heads.div_ceil(HEAD_BLOCK);
        let raw = RawRows::new(out.data_mut(), p.heads * p.head_dim);
        self.for_positions(step, blocks, &|span, bank, pos, row, block| {
            let heads = block * HEAD_BLOCK..p.heads.min((block + 1) * HEAD_BLOCK);
            let selected = selection.and_then(|s| s.rows[row].as_deref());
            SCRATCH.with_borrow_mut(|s| {
                let n = gather(p, span, bank, kv, pos, selected, &mut s.keys);
                s.scores.resize(heads.len() * n, 0.0);
                let mine = heads.start * p.head_dim..heads.end * p.head_dim;
                dot_rows(
                    isa,
                    &q.row(row)[mine.clone()],
                    &s.keys,
                    p.head_dim,
                    n,
                    &mut s.tile,
                    &mut s.part,
                    &mut s.scores,
                );
                let scores = &mut s.scores[..heads.len() * n];
                for (h, scores) in heads.clone().zip(scores.chunks_exact_mut(n)) {
                    softmax_with_sink(scores, p.scale, sinks.vector()[h]);
                }
                #[allow(unsafe_code, reason = "disjoint parts of the output")]
                // SAFETY: this unit alone has these heads of this row.
                let out = unsafe { raw.part(row, mine.start, mine.len()) };
                mix_rows(isa, scores, &s.keys[..n * p.head_dim], p.head_dim, n, out);
            });
        });
    }

    fn grouped_matmul(&self, x: &CpuBuffer, w: &CpuWeight, groups: usize, out: &mut CpuBuffer) {
        let (cols, rank) = (w.cols(), w.rows() / groups);
        assert!(x.width() == groups * cols && out.width() == w.rows(), "{}: grouped shape", w.name());
        out.resize(x.rows());
        let (mut input, mut part) = (self.buffer(cols), self.buffer(rank));
        for g in 0..groups {
            input.resize(x.rows());
            for (r, row) in input.data_mut().chunks_exact_mut(cols).enumerate() {
                row.copy_from_slice(&x.row(r)[g * cols..(g + 1) * cols]);
            }
            self.matmul(&input, &mut [(&w.row_range(g * rank, rank), &mut part)]);
            for (r, row) in out.data_mut().chunks_exact_mut(groups * rank).enumerate() {
                row[g * rank..(g + 1) * rank].copy_from_slice(part.row(r));
            }
        }
    }
}

/// Indices of the `k` largest, ascending; ties go to the lower index.
fn top_rows(scores: &[f32], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    if k < order.len() {
        order.select_nth_unstable_by(k, |a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
        order.truncate(k);
    }
    order.sort_unstable();
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lower_row() {
        assert_eq!(top_rows(&[1.0, 3.0, 2.0, 3.0, 3.0], 2), [1, 3]);
        assert_eq!(top_rows(&[0.0; 5], 3), [0, 1, 2]);
        assert_eq!(top_rows(&[1.0, 2.0], 4), [0, 1]);
    }

    #[test]
    fn a_sink_takes_probability_and_gives_no_value() {
        let mut s = [0.0, 0.0];
        softmax_with_sink(&mut s, 1.0, 2f32.ln());
        assert!((s[0] - 0.25).abs() < 1e-6 && (s[1] - 0.25).abs() < 1e-6);
    }
}
