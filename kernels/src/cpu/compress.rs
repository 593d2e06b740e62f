//! Compressors on the CPU: the frontier of open windows, pooling, and the finished rows.

use crate::cpu::attention::SpanView;
use crate::cpu::elementwise;
use crate::cpu::isa::multiversion;
use crate::cpu::lanes::{Lanes, N};
use crate::cpu::state_rows;
use crate::cpu::{CpuBuffer, CpuDevice, CpuStep, CpuWeight};
use crate::math::lowp;
use crate::ops::{Compressor, KvNumerics};

/// A frontier's layout: values then scores, each `[slots, width]`; with overlap the first `ratio` slots are the previous
/// window and the second the open one.
struct Frontier<'a> {
    values: &'a mut [f32],
    scores: &'a mut [f32],
    width: usize,
}

impl<'a> Frontier<'a> {
    fn new(memory: &'a mut [f32], width: usize) -> Self {
        let half = memory.len() / 2;
        let (values, scores) = memory.split_at_mut(half);
        Self { values, scores, width }
    }

    /// An empty frontier: nothing takes part in a pooling.
    fn reset(&mut self) {
        self.values.fill(0.0);
        self.scores.fill(f32::NEG_INFINITY);
    }

    fn put(&mut self, slot: usize, value: &[f32], score: &[f32], ape: &[f32]) {
        let at = slot * self.width..(slot + 1) * self.width;
        self.values[at.clone()].copy_from_slice(value);
        for ((o, s), a) in self.scores[at].iter_mut().zip(score).zip(ape) {
            *o = s + a;
        }
    }
}

/// One token's part in a pooling: its values, scores and position biases for the row's channels.
#[derive(Clone, Copy)]
struct Candidate<'a> {
    values: &'a [f32],
    scores: &'a [f32],
    bias: &'a [f32],
}

/// Channels `16 c ..` of a slice, padded with zeros.
#[inline(always)]
fn load<L: Lanes>(x: &[f32], c: usize) -> L {
    let rest = &x[N * c..];
    if let Some(x) = rest.first_chunk() {
        return L::load(x);
    }
    let mut padded = [0.0; N];
    padded[..rest.len()].copy_from_slice(rest);
    L::load(&padded)
}

#[inline(always)]
fn pool_impl<L: Lanes>(candidates: &[Candidate<'_>], out: &mut [f32]) {
    for (c, out) in out.chunks_mut(N).enumerate() {
        let mut max = L::splat(f32::NEG_INFINITY);
        for x in candidates {
            max = load::<L>(x.scores, c).add(load(x.bias, c)).max(max);
        }
        let (mut sum, mut acc) = (L::splat(0.0), L::splat(0.0));
        for x in candidates {
            let e = elementwise::exp(load::<L>(x.scores, c).add(load(x.bias, c)).sub(max));
            sum = sum.add(e);
            acc = e.fma(load(x.values, c), acc);
        }
        let mut pooled = [0.0; N];
        acc.div(sum).store(&mut pooled);
        out.copy_from_slice(&pooled[..out.len()]);
    }
}

multiversion! {
    /// Softmax over the candidates' scores per channel, weighted sum of values.
    fn pool = pool_impl(candidates: &[Candidate<'_>], out: &mut [f32]);
}

/// Rounds a finished row as the profile wants it.
fn round(c: &Compressor<'_, CpuDevice>, row: &mut [f32]) {
    match (c.numerics, c.indexer) {
        (KvNumerics::Reference, _) => {}
        (KvNumerics::Official, true) => {
            lowp::hadamard(row);
            lowp::fp4_round_trip(row);
        }
        (KvNumerics::Official, false) => {
            let nope = row.len() - c.rope_dim;
            lowp::fp8_round_trip(&mut row[..nope]);
            lowp::f16_round_trip(row);
        }
    }
}

/// Position biases of those places in a window that a step has tokens for: a decode step has one of up to 128.
struct Biases {
    rows: Vec<f32>,
    /// First element of each place's row; `usize::MAX` for the others.
    at: Vec<usize>,
    width: usize,
}

impl Biases {
    fn new(ape: &CpuWeight, ratio: usize, width: usize, positions: &[usize]) -> Self {
        let (mut rows, mut at) = (Vec::new(), vec![usize::MAX; ratio]);
        for pos in positions {
            let at = &mut at[pos % ratio];
            if *at == usize::MAX {
                *at = rows.len();
                rows.resize(*at + width, 0.0);
                ape.row(pos % ratio, &mut rows[*at..]);
            }
        }
        Self { rows, at, width }
    }

    fn of(&self, place: usize) -> &[f32] {
        &self.rows[self.at[place]..self.at[place] + self.width]
    }
}

/// Where the tokens of one span come from.
struct Source<'a> {
    span: &'a SpanView,
    /// The frontier as earlier steps left it: values, then scores.
    frontier: (&'a [f32], &'a [f32]),
    width: usize,
    values: &'a CpuBuffer,
    scores: &'a CpuBuffer,
    biases: &'a Biases,
    /// As wide as a row: the bias of scores that have theirs.
    zero: &'a [f32],
}

impl Source<'_> {
    /// The token at `pos` as a candidate with `dim` channels from `first`. `slot` is its place in
    /// the frontier if it came in an earlier step.
    fn candidate(&self, pos: usize, ratio: usize, slot: usize, first: usize, dim: usize) -> Candidate<'_> {
        let (width, channels) = (self.width, first..first + dim);
        if pos >= self.span.first_pos {
            let row = self.span.first_row + pos - self.span.first_pos;
            let bias = self.biases.of(pos % ratio);
            return Candidate {
                values: &self.values.row(row)[channels.clone()],
                scores: &self.scores.row(row)[channels.clone()],
                bias: &bias[channels],
            };
        }
        let at = slot * width + first..slot * width + first + dim;
        Candidate { values: &self.frontier.0[at.clone()], scores: &self.frontier.1[at], bias: self.zero }
    }
}

/// Takes the step's projections into the frontiers and writes the rows that they finish.
///
/// Rows are pooled in parallel: their tokens are read where the step has them, and from the frontier, as earlier steps left it,
/// where it does not. The frontiers are brought up to date afterwards.
pub(crate) fn compress(
    device: &CpuDevice,
    step: &CpuStep,
    c: &Compressor<'_, CpuDevice>,
    values: &CpuBuffer,
    scores: &CpuBuffer,
) {
    let (ratio, width) = (c.ratio, if c.overlap { 2 * c.dim } else { c.dim });
    assert!(values.width() == width && scores.width() == width, "compressor projections of another width");
    assert!(step.distinct_banks(), "two spans of one bank in a step of a model with recurrent state");
    let isa = device.isa();
    let biases = Biases::new(c.ape, ratio, width, step.positions());
    let zero = vec![0.0; width];
    let windows: Vec<(&SpanView, usize)> = step
        .spans
        .iter()
        .flat_map(|s| (s.first_pos / ratio..(s.first_pos + s.rows) / ratio).map(move |window| (s, window)))
        .collect();
    // Own window's slots come second where there is a previous one.
    let own = if c.overlap { ratio } else { 0 };
    device.pool.run(windows.len(), 1, &|range| {
        let (mut row, mut normed) = (vec![0.0; c.dim], vec![0.0; c.dim]);
        for (span, window) in &windows[range] {
            let bank = &step.banks[span.bank];
            let frontier = state_rows::fixed_read(bank, c.frontier_slot);
            let frontier = frontier.split_at(frontier.len() / 2);
            let source = Source { span, frontier, width, values, scores, biases: &biases, zero: &zero };
            let first = window * ratio;
            let mut candidates = Vec::with_capacity(2 * ratio);
            if c.overlap && *window > 0 {
                // A previous window that this span began in is still the frontier's open one.
                let slots = if first - ratio < span.first_pos && span.first_pos < first { own } else { 0 };
                candidates.extend((0..ratio).map(|j| source.candidate(first - ratio + j, ratio, slots + j, 0, c.dim)));
            }
            let second = width - c.dim;
            candidates.extend((0..ratio).map(|j| source.candidate(first + j, ratio, own + j, second, c.dim)));
            pool(isa, &candidates, &mut row);
            elementwise::rms_norm(isa, &row, c.norm.vector(), c.eps, &mut normed);
            device.rotate_tail(c.rope, first, c.dim, false, &mut normed);
            round(c, &mut normed);
            state_rows::write(isa, bank, c.rows_slot, *window, &normed);
        }
    });
    device.for_spans(step, &|span, bank| {
        let mut frontier = Frontier::new(state_rows::fixed(bank, c.frontier_slot), width);
        if span.first_pos == 0 {
            frontier.reset();
        }
        // Nothing of tokens before the last complete window is left in the end.
        let end = span.first_pos + span.rows;
        let from = (end / ratio).saturating_sub(1) * ratio;
        for pos in from.max(span.first_pos)..end {
            let (at, j) = (span.first_row + pos - span.first_pos, pos % ratio);
            frontier.put(own + j, values.row(at), scores.row(at), biases.of(j));
            if c.overlap && j + 1 == ratio {
                let n = ratio * width;
                frontier.values.copy_within(n.., 0);
                frontier.scores.copy_within(n.., 0);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Isa;

    #[test]
    fn pooling_is_a_softmax_per_channel() {
        let scores = [[0.0, 0.0], [3f32.ln() - 1.0, -0.5]];
        let bias = [[0.0, 0.0], [1.0, 0.5]];
        let values = [[1.0, 10.0], [3.0, 20.0]];
        let candidates: Vec<_> =
            (0..2).map(|i| Candidate { values: &values[i], scores: &scores[i], bias: &bias[i] }).collect();
        for isa in Isa::available() {
            let mut out = [0.0; 2];
            pool(isa, &candidates, &mut out);
            // Weights 1/4 and 3/4 in the first channel, halves in the second.
            assert!((out[0] - 2.5).abs() < 1e-6 && (out[1] - 15.0).abs() < 1e-5, "{out:?}");
            // One that was never put has no say.
            let absent = Candidate { scores: &[f32::NEG_INFINITY; 2], ..candidates[0] };
            pool(isa, &[absent, candidates[1]], &mut out);
            assert_eq!(out, [3.0, 20.0]);
        }
    }
}
