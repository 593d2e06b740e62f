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
mod tests;
