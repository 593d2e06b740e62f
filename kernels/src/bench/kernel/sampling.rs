//! What a sampler asks of rows of logits; a timing includes the way of the answers to the host.

use std::ops::Range;

use super::{Bench, Kernel, Line, Options, Place, Timed};
use crate::conformance::Random;
use crate::device::DeviceError;
use crate::ops::RowQuery;

struct Sample {
    vocabulary: usize,
    best: usize,
    draws: bool,
}

impl Sample {
    fn queries(&self, rows: usize) -> Vec<RowQuery> {
        // The same question of every row: where a row is in a launch must make no difference.
        let one = |row| RowQuery {
            row,
            best: self.best,
            scale: self.draws.then_some(1.25),
            draw: self.draws.then_some(0.61),
            norm: self.draws,
        };
        (0..rows).map(one).collect()
    }
}

impl Kernel for Sample {
    type Bound<D: Timed> = ();

    fn what(&self) -> String {
        let how = if self.draws { ", sums and a draw" } else { "" };
        format!("best {} of {}{how}", self.best, self.vocabulary)
    }

    fn bind<D: Timed>(&self, _: &D, _: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn weight_bytes(&self) -> usize {
        0
    }

    fn widths(&self) -> Vec<usize> {
        vec![self.vocabulary]
    }

    fn inputs(&self) -> usize {
        1
    }

    fn input(&self, _: usize, rng: &mut Random, _: usize, rows: usize) -> Vec<f32> {
        (0..rows * self.vocabulary).map(|_| 12.0 * rng.unit()).collect()
    }

    fn run<D: Timed>(&self, d: &D, (): &(), _: usize, place: &mut Place<D>, buffers: &mut [D::Buffer]) {
        d.summarise(&buffers[0], &self.queries(place.rows), &mut place.summaries);
    }

    /// Of each row: tokens and their logits, what was drawn, and the two sums.
    #[allow(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "tokens are below 2^24; sums are compared as f32"
    )]
    fn output<D: Timed>(&self, _: &D, place: &Place<D>, _: &[D::Buffer], rows: Range<usize>) -> Vec<f32> {
        let mut out = Vec::new();
        for s in &place.summaries[rows] {
            out.extend(s.best.iter().flat_map(|(logit, token)| [*token as f32, *logit]));
            out.push(s.drawn.map_or(-1.0, |d| d.token as f32));
            out.extend([s.total as f32, s.norm as f32]);
        }
        out
    }

    /// Relative; a token that is another one is infinitely far.
    fn distance(&self, got: &[f32], want: &[f32]) -> f64 {
        if got.len() != want.len() {
            return f64::INFINITY;
        }
        let exact = 2 * self.best + 1;
        let row = |(got, want): (&[f32], &[f32])| {
            if got[..exact] != want[..exact] {
                return f64::INFINITY;
            }
            let far = |(g, w): (&f32, &f32)| {
                let far = f64::from((g - w).abs()) / f64::from(w.abs()).max(1e-30);
                if far.is_nan() { f64::INFINITY } else { far }
            };
            got[exact..].iter().zip(&want[exact..]).map(far).fold(0.0, f64::max)
        };
        got.chunks(exact + 2).zip(want.chunks(exact + 2)).map(row).fold(0.0, f64::max)
    }

    /// Sums in f64, of which f32 is looked at.
    fn bound(&self) -> f64 {
        2e-7
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn bytes(&self, rows: usize) -> f64 {
        (rows * self.vocabulary * 4) as f64
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn macs(&self, rows: usize) -> f64 {
        (rows * self.vocabulary) as f64
    }
}

/// At the numbers of rows that a decode step has.
pub(super) fn sampling<D: Timed>(b: &Bench<'_, D>) -> Result<Vec<Line>, DeviceError> {
    let mut rows: Vec<usize> = b.options.rows.iter().map(|n| (*n).min(super::DECODE)).collect();
    rows.dedup();
    let options = Options { rows, ..b.options.clone() };
    let few = Bench { device: b.device, reference: b.device.reference(), options: &options };
    let mut lines = Vec::new();
    for (best, draws) in [(1, false), (1, true), (64, true)] {
        lines.extend(few.sweep(&Sample { vocabulary: b.size(129_280, 1000), best, draws })?);
    }
    Ok(lines)
}
