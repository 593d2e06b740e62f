//! Attention of one query position over a list of rows that are keys and values at once.
//!
//! Per head: scores over the list in order, the largest of them and the sink, exponentials, their sum, then the weighted sum of
//! the rows in list order, divided by the sum. The list is all that a query's result depends on.

#![allow(clippy::needless_range_loop, reason = "indices name registers")]

use crate::cpu::elementwise::exp;
use crate::cpu::float;
use crate::cpu::isa::multiversion;
use crate::cpu::lanes::{Lanes, N, array};
use crate::cpu::matmul::grow;

/// Vectors of a row that are summed at a time, for [`HEADS`] heads: 16 registers.
const STRIP: usize = 4;
/// Heads that share the loads of a strip.
const HEADS: usize = 4;

/// Exponentials of `scores` (padded with minus infinity to whole vectors) in place; returns one over their sum, the sink's
/// included.
#[inline(always)]
fn softmax<L: Lanes>(scores: &mut [[f32; N]], scale: f32, sink: f32) -> f32 {
    let factor = L::splat(scale);
    let mut max = L::splat(f32::NEG_INFINITY);
    for s in scores.iter_mut() {
        let v = L::load(s).mul(factor);
        max = max.max(v);
        v.store(s);
    }
    let max = max.max_lane().max(sink);
    let top = L::splat(max);
    let mut sum = L::splat(0.0);
    for s in scores.iter_mut() {
        let e = exp(L::load(s).sub(top));
        sum = sum.add(e);
        e.store(s);
    }
    let mut lone = [0.0; N];
    exp(L::splat(sink - max)).store(&mut lone);
    1.0 / (sum.sum() + lone[0])
}

/// `out[h][16 d .. 16 (d + V)] = factor[h] · Σ_k p[h][k] · rows[index[k]]`, for `H` heads and `V` vectors.
#[inline(always)]
fn mix<L: Lanes, const H: usize, const V: usize>(
    p: [&[f32]; H],
    factors: [f32; H],
    rows: &[f32],
    dim: usize,
    index: &[u32],
    d: usize,
    out: &mut [f32],
) {
    let mut acc = [[L::splat(0.0); V]; H];
    // Of the list's length, so that the loop has no bounds of theirs left to check.
    let p = array!(H, &p[0][..index.len()], |h| &p[h][..index.len()]);
    for (k, row) in index.iter().enumerate() {
        let at = *row as usize * dim + N * d;
        let row = &rows[at..at + N * V];
        let v = array!(V, L::splat(0.0), |i| L::load(row[N * i..].first_chunk().expect("16 elements")));
        for h in 0..H {
            let w = L::splat(p[h][k]);
            for i in 0..V {
                acc[h][i] = w.fma(v[i], acc[h][i]);
            }
        }
    }
    for h in 0..H {
        for i in 0..V {
            let to = h * dim + N * (d + i);
            acc[h][i].mul(L::splat(factors[h])).store(out[to..].first_chunk_mut().expect("16 elements"));
        }
    }
}

/// `H` heads, whole rows.
#[inline(always)]
fn mix_heads<L: Lanes, const H: usize>(
    p: [&[f32]; H],
    factors: [f32; H],
    rows: &[f32],
    dim: usize,
    index: &[u32],
    out: &mut [f32],
) {
    let (full, mut d) = (dim / N, 0);
    while d < full {
        if L::WIDE && d + STRIP <= full {
            mix::<L, H, STRIP>(p, factors, rows, dim, index, d, out);
            d += STRIP;
        } else if d + 2 <= full {
            mix::<L, H, 2>(p, factors, rows, dim, index, d, out);
            d += 2;
        } else {
            mix::<L, H, 1>(p, factors, rows, dim, index, d, out);
            d += 1;
        }
    }
    for c in N * full..dim {
        for h in 0..H {
            let mut acc = 0.0f32;
            for (k, row) in index.iter().enumerate() {
                acc = p[h][k].mul_add(rows[*row as usize * dim + c], acc);
            }
            out[h * dim + c] = acc * factors[h];
        }
    }
}

#[allow(clippy::too_many_arguments, reason = "operands and work memory of an operation")]
#[inline(always)]
fn attend_impl<L: Lanes>(
    q: &[f32],
    rows: &[f32],
    dim: usize,
    index: &[u32],
    scale: f32,
    sinks: &[f32],
    scores: &mut Vec<[f32; N]>,
    part: &mut Vec<[f32; N]>,
    out: &mut [f32],
) {
    let heads = sinks.len();
    let panels = index.len().div_ceil(N);
    let scores = grow(scores, heads * panels, [0.0; N]);
    let part = grow(part, heads, [0.0; N]);
    for (i, keys) in index.chunks(N).enumerate() {
        float::dots_at_impl::<L>(q, rows, dim, keys, part);
        for h in 0..heads {
            part[h][keys.len()..].fill(f32::NEG_INFINITY);
            scores[h * panels + i] = part[h];
        }
    }
    let mut h = 0;
    while h < heads {
        let take = if h + HEADS <= heads { HEADS } else { 1 };
        let mut factors = [0.0; HEADS];
        for (i, f) in factors.iter_mut().enumerate().take(take) {
            *f = softmax::<L>(&mut scores[(h + i) * panels..(h + i + 1) * panels], scale, sinks[h + i]);
        }
        let p = |h: usize| scores[h * panels..(h + 1) * panels].as_flattened();
        let out = &mut out[h * dim..(h + take) * dim];
        if take == HEADS {
            mix_heads::<L, HEADS>(array!(HEADS, p(h), |i| p(h + i)), factors, rows, dim, index, out);
        } else {
            mix_heads::<L, 1>([p(h)], [factors[0]], rows, dim, index, out);
        }
        h += take;
    }
}

multiversion! {
    /// `out[h] = Σ_k p[h][k] · rows[index[k]]` with `p = softmax(scale · q[h] · rows[index[..]], sinks[h])`; the sink takes
    /// probability and has no row. `q` and `out` are `[heads, dim]`; `scores` and `part` are work memory.
    pub(crate) fn attend = attend_impl(q: &[f32], rows: &[f32], dim: usize, index: &[u32], scale: f32, sinks: &[f32],
        scores: &mut Vec<[f32; N]>, part: &mut Vec<[f32; N]>, out: &mut [f32]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::Random;
    use crate::cpu::isa::Isa;

    #[test]
    fn deepseek_v4_attention_is_its_definition_and_equal_on_every_isa() {
        let seed = Random::fresh_seed();
        let mut rng = Random::new(seed);
        for (heads, dim, n) in [(1, 32, 1), (5, 128, 40), (8, 40, 17), (2, 512, 150), (4, 16, 16)] {
            let (rows, q) = (rng.activations((n + 9) * dim), rng.activations(heads * dim));
            let sinks = rng.activations(heads);
            let index: Vec<u32> = (0..n).map(|_| u32::try_from(rng.below(n + 9)).expect("small")).collect();
            let mut first: Option<Vec<f32>> = None;
            for isa in Isa::available() {
                let mut out = vec![f32::NAN; heads * dim];
                attend(isa, &q, &rows, dim, &index, 0.2, &sinks, &mut Vec::new(), &mut Vec::new(), &mut out);
                assert_eq!(first.get_or_insert_with(|| out.clone()), &out, "{} (DS4_SEED={seed})", isa.name());
            }
            let got = first.expect("the scalar version always exists");
            for h in 0..heads {
                let row = |k: u32| &rows[k as usize * dim..(k as usize + 1) * dim];
                let score = |k: u32| -> f64 {
                    q[h * dim..(h + 1) * dim]
                        .iter()
                        .zip(row(k))
                        .map(|(a, b)| f64::from(*a) * f64::from(*b))
                        .sum::<f64>()
                        * 0.2
                };
                let weights: Vec<f64> = index.iter().map(|k| score(*k)).collect();
                let max = weights.iter().fold(f64::from(sinks[h]), |m, w| m.max(*w));
                let sum: f64 = weights.iter().map(|w| (w - max).exp()).sum::<f64>() + (f64::from(sinks[h]) - max).exp();
                for c in 0..dim {
                    let value = |k: u32| f64::from(row(k)[c]);
                    let want: f64 = index.iter().zip(&weights).map(|(k, w)| (w - max).exp() / sum * value(*k)).sum();
                    let size: f64 =
                        index.iter().zip(&weights).map(|(k, w)| (w - max).exp() / sum * value(*k).abs()).sum();
                    // Scores here are up to 400, so their rounding in f32 is what errs: 400 · 2^-22 and a little.
                    let error = (f64::from(got[h * dim + c]) - want).abs();
                    assert!(error <= 3e-4 * size + 1e-6, "{heads} {dim} {n}: {error:e} of {size} (DS4_SEED={seed})");
                }
            }
        }
    }

    #[test]
    fn a_sink_takes_probability_and_gives_no_value() {
        // Two rows of score 0 and a sink of ln 2: weights 1/4, 1/4 and 1/2.
        let rows = [1.0; 32];
        let mut out = [0.0; 16];
        let sink = [2f32.ln()];
        attend(Isa::detect(), &[0.0; 16], &rows, 16, &[0, 1], 1.0, &sink, &mut Vec::new(), &mut Vec::new(), &mut out);
        assert!(out.iter().all(|v| (v - 0.5).abs() < 1e-6), "{out:?}");
    }
}
