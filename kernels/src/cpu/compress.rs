//! Compressors on the CPU: the frontier of open windows, pooling, and the finished rows.

use crate::cpu::elementwise;
use crate::cpu::state_rows;
use crate::cpu::{CpuBuffer, CpuDevice, CpuStep};
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

    /// Softmax over the candidates' scores per channel, weighted sum of values. Candidates are `(slot, first channel)`.
    fn pool(&self, candidates: &[(usize, usize)], out: &mut [f32]) {
        for (c, o) in out.iter_mut().enumerate() {
            let at = |(slot, first): &(usize, usize)| slot * self.width + first + c;
            let max = candidates.iter().fold(f32::NEG_INFINITY, |m, x| m.max(self.scores[at(x)]));
            let (mut sum, mut acc) = (0.0f32, 0.0f32);
            for x in candidates {
                let e = (self.scores[at(x)] - max).exp();
                sum += e;
                acc += e * self.values[at(x)];
            }
            *o = acc / sum;
        }
    }
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

/// Takes the step's projections into the frontiers and writes the rows that they finish.
pub(crate) fn compress(
    device: &CpuDevice,
    step: &CpuStep,
    c: &Compressor<'_, CpuDevice>,
    values: &CpuBuffer,
    scores: &CpuBuffer,
) {
    let width = if c.overlap { 2 * c.dim } else { c.dim };
    assert!(values.width() == width && scores.width() == width, "compressor projections of another width");
    let ape = c.ape.f32_rows();
    let isa = device.isa();
    device.for_spans(step, &|span, bank| {
        let mut frontier = Frontier::new(state_rows::fixed(bank, c.frontier_slot), width);
        if span.first_pos == 0 {
            frontier.reset();
        }
        // Own windows; with overlap the previous window's first half takes part, and its second half in the own one.
        let (open, candidates): (usize, Vec<(usize, usize)>) = if c.overlap {
            let previous = (0..c.ratio).map(|j| (j, 0));
            (c.ratio, previous.chain((0..c.ratio).map(|j| (c.ratio + j, c.dim))).collect())
        } else {
            (0, (0..c.ratio).map(|j| (j, 0)).collect())
        };
        let mut row = vec![0.0; c.dim];
        let mut normed = vec![0.0; c.dim];
        for i in 0..span.rows {
            let (pos, at) = (span.first_pos + i, span.first_row + i);
            let j = pos % c.ratio;
            frontier.put(open + j, values.row(at), scores.row(at), &ape[j * width..(j + 1) * width]);
            if j + 1 < c.ratio {
                continue;
            }
            frontier.pool(&candidates, &mut row);
            elementwise::rms_norm(isa, &row, c.norm.vector(), c.eps, &mut normed);
            let window = pos / c.ratio;
            device.rotate_tail(c.rope, window * c.ratio, c.dim, false, &mut normed);
            round(c, &mut normed);
            state_rows::write(isa, bank, c.rows_slot, window, &normed);
            if c.overlap {
                let n = c.ratio * width;
                frontier.values.copy_within(n.., 0);
                frontier.scores.copy_within(n.., 0);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pooling_is_a_softmax_per_channel() {
        let mut memory = vec![0.0; 2 * 2 * 2];
        let mut f = Frontier::new(&mut memory, 2);
        f.reset();
        f.put(0, &[1.0, 10.0], &[0.0, 0.0], &[0.0, 0.0]);
        f.put(1, &[3.0, 20.0], &[3f32.ln(), 0.0], &[0.0, 0.0]);
        let mut out = [0.0; 2];
        f.pool(&[(0, 0), (1, 0)], &mut out);
        // Weights 1/4 and 3/4 in the first channel, halves in the second.
        assert!((out[0] - 2.5).abs() < 1e-6 && (out[1] - 15.0).abs() < 1e-5, "{out:?}");
        // A slot that was never put has no say.
        let mut memory = vec![0.0; 2 * 2 * 2];
        let mut f = Frontier::new(&mut memory, 2);
        f.reset();
        f.put(1, &[3.0, 20.0], &[-50.0, 0.0], &[0.0, 0.0]);
        f.pool(&[(0, 0), (1, 0)], &mut out);
        assert_eq!(out, [3.0, 20.0]);
    }
}
