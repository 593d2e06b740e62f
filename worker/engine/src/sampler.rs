//! The sampler: one token from one row of logits.
//!
//! Order: repetition penalty, frequency and presence penalties, logit bias, temperature, then the filters top-k, top-p (over
//! what top-k kept) and min-p (relative to the best token), then one draw. A request has its own generator and draws once
//! a token, so its text does not depend on its batch mates.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use ds4_kernels::math::exp::{exp_nonpositive, sum};
use ds4_kernels::math::select;

use crate::request::SamplingParams;

/// Buckets of the top-p search, and how many of them cover one unit of scaled logit: 24 units in all. What is below is one
/// last bucket.
const BUCKETS: usize = 1536;
const BUCKETS_PER_UNIT: f32 = 64.0;

/// Reusable memory of the sampler, one per engine.
#[derive(Debug, Default)]
pub struct Scratch {
    pub(crate) candidates: Vec<(f32, u32)>,
    pub(crate) weights: Vec<f32>,
    buckets: Vec<f64>,
    undo: Vec<(u32, f32)>,
    /// A row with what a grammar refuses left out.
    pub(crate) held: Vec<f32>,
}

/// The sampling state of one request.
#[derive(Clone, Debug)]
pub struct Sampler {
    pub(crate) params: SamplingParams,
    pub(crate) rng: ChaCha8Rng,
    /// Times that a token was generated; prompt tokens are present with 0 when a repetition penalty needs them.
    counts: HashMap<u32, u32>,
    pub(crate) penalised: bool,
    /// The latest note of a token, and what was noted of it before.
    noted: Option<(u32, Option<u32>)>,
}

impl Sampler {
    /// For validated parameters and a prompt. Without a seed, one is drawn.
    pub fn new(params: SamplingParams, prompt: &[u32]) -> Self {
        // RandomState's keys come from the operating system: enough entropy for an unseeded request.
        let seed = params.seed.unwrap_or_else(|| std::hash::RandomState::new().build_hasher().finish());
        let repetition = params.repetition_penalty != 1.0;
        let penalised = repetition || params.frequency_penalty != 0.0 || params.presence_penalty != 0.0;
        let counts = if repetition { prompt.iter().map(|&t| (t, 0)).collect() } else { HashMap::new() };
        Self { params, rng: ChaCha8Rng::seed_from_u64(seed), counts, penalised, noted: None }
    }

    /// Draws a token. `logits` is as the model gave it, NaN aside (see [`select::sanitise`]), and is left unchanged.
    /// `None`: the row has nothing to choose from.
    pub fn sample(&mut self, logits: &mut [f32], scratch: &mut Scratch) -> Option<u32> {
        self.modify(logits, &mut scratch.undo);
        let token = self.pick(logits, scratch);
        for (token, logit) in scratch.undo.drain(..).rev() {
            logits[token as usize] = logit;
        }
        let token = token?;
        self.count(token);
        Some(token)
    }

    /// The most likely token after the request's biases, whatever its temperature: for syntax, in which only one token is
    /// right. Penalties do not apply: markup repeats itself. `None`: the row has nothing to choose from.
    pub fn best(&mut self, logits: &mut [f32], scratch: &mut Scratch) -> Option<u32> {
        scratch.undo.clear();
        self.bias(logits, &mut scratch.undo);
        let token = select::argmax(logits);
        for (token, logit) in scratch.undo.drain(..).rev() {
            logits[token as usize] = logit;
        }
        token
    }

    /// As [`Sampler::best`], but of these tokens only (ascending): a few of many.
    pub fn best_of(&mut self, logits: &mut [f32], tokens: &[u32], scratch: &mut Scratch) -> Option<u32> {
        scratch.undo.clear();
        self.bias(logits, &mut scratch.undo);
        let known = tokens.iter().filter_map(|&t| Some((*logits.get(t as usize)?, t)));
        let best = known.filter(|(l, _)| *l > f32::NEG_INFINITY).min_by(select::better);
        for (token, logit) in scratch.undo.drain(..).rev() {
            logits[token as usize] = logit;
        }
        best.map(|(_, token)| token)
    }

    /// Applies penalties and bias in place, remembering what was there.
    fn modify(&self, logits: &mut [f32], undo: &mut Vec<(u32, f32)>) {
        undo.clear();
        for (&token, &count) in &self.counts {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            undo.push((token, *logit));
            *logit = self.penalise(*logit, count);
        }
        self.bias(logits, undo);
    }

    /// The logit of a token that was in the prompt, or generated `count` times.
    #[allow(clippy::cast_precision_loss, reason = "a count of generated tokens is far below 2^24")]
    fn penalise(&self, logit: f32, count: u32) -> f32 {
        let p = &self.params;
        let repeated = if logit > 0.0 { logit / p.repetition_penalty } else { logit * p.repetition_penalty };
        if count > 0 { repeated - (count as f32 * p.frequency_penalty + p.presence_penalty) } else { repeated }
    }

    /// A token's logit after penalties and biases: what [`Sampler::modify`] makes of it.
    pub(crate) fn modified(&self, token: u32, logit: f32) -> f32 {
        let penalised = self.counts.get(&token).map_or(logit, |count| self.penalise(logit, *count));
        let own = self.params.logit_bias.iter().filter(|(t, _)| *t == token);
        own.fold(penalised, |logit, (_, bias)| logit + bias)
    }

    /// Takes note of a token that was drawn.
    pub(crate) fn count(&mut self, token: u32) {
        if self.penalised {
            let before = self.counts.get(&token).copied();
            self.counts.insert(token, before.unwrap_or(0) + 1);
            self.noted = Some((token, before));
        }
    }

    /// Takes back the latest note: the token that was drawn is not taken.
    pub(crate) fn uncount(&mut self) {
        match self.noted.take() {
            Some((token, Some(before))) => drop(self.counts.insert(token, before)),
            Some((token, None)) => drop(self.counts.remove(&token)),
            None => {}
        }
    }

    fn bias(&self, logits: &mut [f32], undo: &mut Vec<(u32, f32)>) {
        for &(token, bias) in &self.params.logit_bias {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            undo.push((token, *logit));
            *logit += bias;
        }
    }

    fn pick(&mut self, logits: &[f32], scratch: &mut Scratch) -> Option<u32> {
        if self.params.temperature == 0.0 {
            return select::argmax(logits);
        }
        let max = select::max(logits);
        if max == f32::NEG_INFINITY {
            return None;
        }
        let unit = Self::unit(&mut self.rng);
        let top_k = self.params.top_k as usize;
        if top_k == 0 || top_k >= logits.len() {
            self.pick_from_row(unit, logits, max, scratch)
        } else {
            select::top_k(logits, top_k, &mut scratch.candidates);
            self.draw_best(unit, scratch)
        }
    }

    /// A request's next random number, in 0..1.
    #[allow(clippy::cast_precision_loss, reason = "53 random bits fit an f64 exactly")]
    pub(crate) fn unit(rng: &mut ChaCha8Rng) -> f64 {
        (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Without top-k: weights in token order, those that top-p or min-p exclude set to 0. Nothing is sorted but the one
    /// bucket in which top-p ends.
    fn pick_from_row(&self, unit: f64, logits: &[f32], max: f32, scratch: &mut Scratch) -> Option<u32> {
        let scale = self.scale();
        let weights = &mut scratch.weights;
        weights.clear();
        weights.extend(logits.iter().map(|&l| exp_nonpositive((l - max) * scale)));
        let mut total = sum(weights);
        let mut cut = false;
        if self.params.top_p < 1.0 {
            let mass = f64::from(self.params.top_p) * total;
            let last = last_of_nucleus(
                logits,
                weights,
                mass,
                |l| (max - l) * scale,
                &mut scratch.buckets,
                &mut scratch.candidates,
            );
            if let Some(last) = last {
                for ((w, &l), id) in weights.iter_mut().zip(logits).zip(0u32..) {
                    if select::better(&(l, id), &last).is_gt() {
                        *w = 0.0;
                    }
                }
                cut = true;
            }
        }
        if self.params.min_p > 0.0 {
            let floor = self.min_p_floor();
            for (w, &l) in weights.iter_mut().zip(logits) {
                if (l - max) * scale < floor {
                    *w = 0.0;
                }
            }
            cut = true;
        }
        if cut {
            total = sum(weights);
        }
        u32::try_from(draw(unit, total, weights)?).ok()
    }

    /// With top-k: from the candidates, which are best first, cut by top-p and min-p.
    pub(crate) fn draw_best(&self, unit: f64, scratch: &mut Scratch) -> Option<u32> {
        let scale = self.scale();
        let (weights, candidates) = (&mut scratch.weights, &mut scratch.candidates);
        let max = candidates.first()?.0;
        weights.clear();
        weights.extend(candidates.iter().map(|c| exp_nonpositive((c.0 - max) * scale)));
        if self.params.top_p < 1.0 {
            let mass = f64::from(self.params.top_p) * sum(weights);
            let mut reached = 0f64;
            let at = weights.iter().position(|&w| {
                reached += f64::from(w);
                reached >= mass
            });
            weights.truncate(at.map_or(weights.len(), |i| i + 1));
        }
        let floor = self.min_p_floor();
        weights.truncate(candidates.partition_point(|c| (c.0 - max) * scale >= floor).max(1));
        let at = draw(unit, sum(weights), weights)?;
        Some(candidates[at].1)
    }

    /// `1 / temperature`, bounded so that a temperature of 1e-40 is greedy and not 0 times infinity.
    pub(crate) fn scale(&self) -> f32 {
        1.0 / self.params.temperature.max(1e-30)
    }

    /// `ln(min_p)`: the least scaled logit below the best one that min-p keeps.
    pub(crate) fn min_p_floor(&self) -> f32 {
        if self.params.min_p > 0.0 { self.params.min_p.ln() } else { f32::NEG_INFINITY }
    }
}

/// The index of the weight that `unit`, in 0..1, falls to; `None` when all are 0.
pub(crate) fn draw(unit: f64, total: f64, weights: &[f32]) -> Option<usize> {
    let mut left = unit * total;
    let mut last = None;
    for (i, &w) in weights.iter().enumerate() {
        if w > 0.0 {
            last = Some(i);
            left -= f64::from(w);
            if left < 0.0 {
                break;
            }
        }
    }
    last
}

/// The worst candidate of the smallest set of best tokens whose weights reach `mass`; `None` when rounding leaves even all
/// of them short. `below(logit)` is the scaled distance from the best logit.
///
/// Weights are summed into buckets by distance, so that only the bucket in which the sum passes `mass` needs an order.
fn last_of_nucleus(
    logits: &[f32],
    weights: &[f32],
    mass: f64,
    below: impl Fn(f32) -> f32,
    buckets: &mut Vec<f64>,
    candidates: &mut Vec<(f32, u32)>,
) -> Option<(f32, u32)> {
    // A saturating cast: the far tail, infinities included, falls into the last bucket.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative, and saturating is meant")]
    let bucket = |l: f32| ((below(l) * BUCKETS_PER_UNIT) as usize).min(BUCKETS - 1);
    buckets.clear();
    buckets.resize(BUCKETS, 0.0);
    for (&l, &w) in logits.iter().zip(weights) {
        buckets[bucket(l)] += f64::from(w);
    }
    let mut reached = 0f64;
    let end = buckets.iter().position(|b| {
        let enough = reached + b >= mass;
        if !enough {
            reached += b;
        }
        enough
    })?;
    candidates.clear();
    candidates.extend(logits.iter().zip(0u32..).filter(|(l, _)| bucket(**l) == end).map(|(&l, id)| (l, id)));
    candidates.sort_unstable_by(select::better);
    let at = candidates.iter().position(|c| {
        reached += f64::from(weights[c.1 as usize]);
        reached >= mass
    });
    // The bucket's own sum, in another order, may have been a rounding error larger.
    at.map(|i| candidates[i]).or_else(|| candidates.last().copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params() -> SamplingParams {
        SamplingParams { seed: Some(7), ..Default::default() }
    }

    #[allow(clippy::cast_possible_truncation, reason = "logits are f32")]
    fn log(p: f64) -> f32 {
        p.ln() as f32
    }

    fn logits_of(p: &[f64]) -> Vec<f32> {
        // The shift must not matter.
        p.iter().map(|p| log(*p) - 1.5).collect()
    }

    #[test]
    fn the_best_token_heeds_biases_and_neither_temperature_nor_penalties() {
        let p = SamplingParams {
            temperature: 2.0,
            frequency_penalty: 2.0,
            repetition_penalty: 10.0,
            logit_bias: vec![(2, 5.0)],
            ..params()
        };
        let mut sampler = Sampler::new(p, &[1, 2]);
        let (mut row, mut scratch) = (vec![0.0, 4.0, 1.0, -1.0], Scratch::default());
        for _ in 0..50 {
            assert_eq!(sampler.best(&mut row, &mut scratch), Some(2), "4 is less than 1 + 5");
            assert_eq!(row, [0.0, 4.0, 1.0, -1.0]);
        }
        assert_eq!(Sampler::new(params(), &[]).best(&mut [f32::NEG_INFINITY; 3], &mut scratch), None);
    }

    #[test]
    fn the_best_of_some_tokens_is_none_of_the_others() {
        let biased = SamplingParams { temperature: 2.0, logit_bias: vec![(3, 2.5)], ..params() };
        let (mut row, mut scratch) = (vec![9.0, 1.0, 3.0, 1.0, 3.0, f32::NEG_INFINITY], Scratch::default());
        for (p, tokens, want) in [
            (params(), &[1u32, 2, 4][..], Some(2)),
            (params(), &[1, 3], Some(1)),
            (biased.clone(), &[1, 2, 3], Some(3)),
            (biased, &[1, 2], Some(2)),
            (params(), &[4, 5, 700], Some(4)),
            (params(), &[5], None),
            (params(), &[700], None),
        ] {
            let before = row.clone();
            assert_eq!(Sampler::new(p, &[]).best_of(&mut row, tokens, &mut scratch), want, "{tokens:?}");
            assert_eq!(row, before, "the row must be left as it was");
        }
    }

    #[test]
    fn a_token_that_is_not_taken_leaves_no_trace() {
        let penalised = SamplingParams { repetition_penalty: 2.0, frequency_penalty: 1.0, ..SamplingParams::greedy() };
        let mut sampler = Sampler::new(penalised, &[1]);
        let mut row = vec![0.5, 1.2, 1.0];
        let fresh = [0u32, 1, 2].map(|t| sampler.modified(t, row[t as usize]));
        for _ in 0..3 {
            assert_eq!(sampler.sample(&mut row, &mut Scratch::default()), Some(2), "1 was in the prompt");
            sampler.uncount();
            assert_eq!([0u32, 1, 2].map(|t| sampler.modified(t, row[t as usize])), fresh);
        }
        sampler.count(1);
        sampler.uncount();
        sampler.uncount();
        assert_eq!([0u32, 1, 2].map(|t| sampler.modified(t, row[t as usize])), fresh, "the prompt's are kept");
    }

    /// Draws `n` times and returns the counts.
    fn histogram(params: SamplingParams, logits: &[f32], n: usize) -> Vec<f64> {
        let mut sampler = Sampler::new(params, &[]);
        let (mut row, mut scratch) = (logits.to_vec(), Scratch::default());
        let mut counts = vec![0f64; logits.len()];
        for _ in 0..n {
            counts[sampler.sample(&mut row, &mut scratch).unwrap() as usize] += 1.0;
        }
        assert_eq!(row, logits, "the row must be left as it was");
        counts
    }

    /// Chi-square against `expected` probabilities; impossible outcomes must not occur at all.
    fn assert_distribution(params: SamplingParams, logits: &[f32], expected: &[f64]) {
        let n = 40_000;
        let counts = histogram(params.clone(), logits, n);
        let mut chi = 0.0;
        let mut cells = 0;
        for (count, p) in counts.iter().zip(expected) {
            if *p == 0.0 {
                assert_eq!(*count, 0.0, "{params:?}: drew an excluded token: {counts:?}");
            } else {
                chi += (count - n as f64 * p).powi(2) / (n as f64 * p);
                cells += 1;
            }
        }
        // 99.99th percentile of chi-square with up to 4 degrees of freedom is 23.5; the seed is fixed.
        assert!(cells <= 5 && chi < 23.5, "{params:?}: chi-square {chi}, counts {counts:?}, expected {expected:?}");
    }

    const P: [f64; 5] = [0.1, 0.4, 0.05, 0.25, 0.2];

    #[test]
    fn plain_sampling_follows_the_softmax() {
        assert_distribution(params(), &logits_of(&P), &P);
    }

    #[test]
    fn temperature_raises_probabilities_to_its_inverse() {
        // T = 0.5 squares the probabilities: .01 .16 .0025 .0625 .04, sum .275.
        let squared: Vec<f64> = P.iter().map(|p| p * p / 0.275).collect();
        assert_distribution(SamplingParams { temperature: 0.5, ..params() }, &logits_of(&P), &squared);
    }

    #[test]
    fn top_k_keeps_the_k_best_renormalised() {
        let want = [0.0, 0.4 / 0.65, 0.0, 0.25 / 0.65, 0.0];
        assert_distribution(SamplingParams { top_k: 2, ..params() }, &logits_of(&P), &want);
    }

    #[test]
    fn top_p_keeps_the_smallest_set_that_reaches_p() {
        // Sorted: .4 .25 .2 .1 .05. p = 0.7 needs the first three (.85).
        let want = [0.0, 0.4 / 0.85, 0.0, 0.25 / 0.85, 0.2 / 0.85];
        assert_distribution(SamplingParams { top_p: 0.7, ..params() }, &logits_of(&P), &want);
        // p = 0.3 is reached by the best alone.
        assert_distribution(SamplingParams { top_p: 0.3, ..params() }, &logits_of(&P), &[0.0, 1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn top_p_counts_within_what_top_k_kept() {
        // top-k 3 renormalises to .4/.85=.47, .29, .24; p = 0.7 is reached by the first two (.76).
        let want = [0.0, 0.4 / 0.65, 0.0, 0.25 / 0.65, 0.0];
        assert_distribution(SamplingParams { top_k: 3, top_p: 0.7, ..params() }, &logits_of(&P), &want);
    }

    #[test]
    fn min_p_is_relative_to_the_best() {
        // 0.3 * 0.4 = 0.12 drops 0.1 and 0.05.
        let want = [0.0, 0.4 / 0.85, 0.0, 0.25 / 0.85, 0.2 / 0.85];
        assert_distribution(SamplingParams { min_p: 0.3, ..params() }, &logits_of(&P), &want);
        assert_distribution(SamplingParams { min_p: 0.3, top_p: 0.99, ..params() }, &logits_of(&P), &want);
    }

    #[test]
    fn top_p_over_equal_tokens_keeps_the_lowest_ids() {
        // 1000 equal tokens, one bucket: p = 0.5 keeps the 500 lowest ids.
        let row = vec![0f32; 1000];
        let counts = histogram(SamplingParams { top_p: 0.5, ..params() }, &row, 20_000);
        assert!(counts[500..].iter().all(|c| *c == 0.0));
        assert!(counts[..500].iter().filter(|c| **c > 0.0).count() > 490);
    }

    #[test]
    fn top_p_agrees_with_a_full_sort_on_wide_rows() {
        let mut x = 88_172_645_463_325_252u64;
        let mut uniform = move || {
            // xorshift64
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 40) as f32 / 16_777_216.0
        };
        for round in 0..40 {
            let width = [0.01, 1.0, 8.0, 60.0][round % 4];
            let row: Vec<f32> = (0..700).map(|_| (uniform() * 256.0).floor() / 256.0 * width).collect();
            let top = select::max(&row);
            let weights: Vec<f32> = row.iter().map(|l| exp_nonpositive(l - top)).collect();
            let mass = f64::from([0.1f32, 0.5, 0.9, 0.999][round / 10]) * sum(&weights);
            let mut sorted: Vec<(f32, u32)> = row.iter().zip(0..).map(|(&l, i)| (l, i)).collect();
            sorted.sort_by(select::better);
            let mut reached = 0.0;
            let want = sorted.iter().find(|c| {
                reached += f64::from(weights[c.1 as usize]);
                reached >= mass
            });
            let got = last_of_nucleus(&row, &weights, mass, |l| top - l, &mut Vec::new(), &mut Vec::new());
            assert_eq!(got.as_ref(), want, "round {round}");
        }
    }

    #[test]
    fn bias_multiplies_odds() {
        // +ln 4 on the token of 0.1 makes the weights .4 .4 .05 .25 .2, sum 1.3.
        let want = [0.4 / 1.3, 0.4 / 1.3, 0.05 / 1.3, 0.25 / 1.3, 0.2 / 1.3];
        let biased = SamplingParams { logit_bias: vec![(0, 4f32.ln())], ..params() };
        assert_distribution(biased, &logits_of(&P), &want);
        let banned = SamplingParams { temperature: 0.0, logit_bias: vec![(1, -100.0)], ..params() };
        assert_eq!(Sampler::new(banned, &[]).sample(&mut logits_of(&P), &mut Scratch::default()), Some(3));
    }

    #[test]
    fn frequency_and_presence_follow_the_formula() {
        // Greedy over [2.0, 1.5]: each use of a token costs 0.3 per use plus 0.4 once.
        // 2.0 → 1.3 <1.5 → token 1 → 0.8; 1.3 → 1.0; 0.8 <1.0 → token 0 → 0.7; 0.8 → token 1.
        let p = SamplingParams { temperature: 0.0, frequency_penalty: 0.3, presence_penalty: 0.4, ..params() };
        let mut sampler = Sampler::new(p, &[0, 0, 0, 1]);
        let (mut row, mut scratch) = (vec![2.0, 1.5], Scratch::default());
        let got: Vec<u32> = (0..5).map(|_| sampler.sample(&mut row, &mut scratch).unwrap()).collect();
        assert_eq!(got, [0, 1, 0, 0, 1]);
    }

    #[test]
    fn repetition_penalty_covers_the_prompt_and_both_signs() {
        let p = SamplingParams { temperature: 0.0, repetition_penalty: 2.0, ..params() };
        // Token 0 was in the prompt: 2.0 becomes 1.0, below 1.5.
        assert_eq!(Sampler::new(p.clone(), &[0]).sample(&mut [2.0, 1.5], &mut Scratch::default()), Some(1));
        // A negative logit moves away from zero: -1 becomes -2, below -1.5.
        assert_eq!(Sampler::new(p, &[0]).sample(&mut [-1.0, -1.5], &mut Scratch::default()), Some(1));
    }

    #[test]
    fn one_seed_one_sequence() {
        let row = logits_of(&[1.0 / 64.0; 64]);
        let run = |seed, noise: bool| {
            let mut s = Sampler::new(SamplingParams { seed: Some(seed), ..Default::default() }, &[]);
            let mut other = Sampler::new(params(), &[]);
            let mut scratch = Scratch::default();
            let mut row = row.clone();
            (0..32)
                .map(|_| {
                    if noise {
                        other.sample(&mut row, &mut scratch);
                    }
                    s.sample(&mut row, &mut scratch).unwrap()
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(run(1, false), run(1, true));
        assert_ne!(run(1, false), run(2, false));
        let unseeded = || {
            let mut s = Sampler::new(SamplingParams::default(), &[]);
            let mut row = row.clone();
            (0..32).map(|_| s.sample(&mut row, &mut Scratch::default()).unwrap()).collect::<Vec<_>>()
        };
        assert_ne!(unseeded(), unseeded());
    }

    #[test]
    fn bad_numbers_are_never_chosen() {
        use select::sanitise;
        let mut row = [f32::NAN, 1.0, f32::NEG_INFINITY, f32::INFINITY];
        assert_eq!(sanitise(&mut row), 3);
        for temperature in [0.0, 1e-30, 1.0, 2.0] {
            let p = SamplingParams { temperature, top_p: 0.9, ..params() };
            assert_eq!(Sampler::new(p, &[]).sample(&mut row, &mut Scratch::default()), Some(3), "T={temperature}");
        }
        let mut nothing = [f32::NAN; 40];
        assert_eq!(sanitise(&mut nothing), 40);
        for p in [params(), SamplingParams::greedy(), SamplingParams { top_k: 3, ..params() }] {
            assert_eq!(Sampler::new(p, &[]).sample(&mut nothing, &mut Scratch::default()), None);
        }
    }
}
