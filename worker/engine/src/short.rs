//! Drawing a token from a summary of its row, where that is provably the token that the row would give.
//!
//! The best tokens of a summary are the row's, bit for bit. Sums over the whole row may differ from the sampler's own by rounding, so what
//! is decided by one must hold for every sum within [`SUM_ERROR`] of it. Everything after such a decision is done with the operations
//! that [`Sampler::sample`] would do, in its order: a row's tokens that were cut off have weight 0 there, and adding 0 changes nothing.

use ds4_kernels::math::exp::exp_nonpositive;
use ds4_kernels::math::select::better;
use ds4_kernels::ops::{MAX_BEST, RowQuery, RowSummary, SUM_ERROR};

use crate::logprobs::LogSoftmax;
use crate::request::TokenLogprob;
use crate::sampler::{Sampler, Scratch, draw};

/// Best tokens that are asked for where probability mass decides how many are needed: 128 hold 95 % of it in all but the flattest rows.
const NUCLEUS: usize = 128;
/// Best tokens that are looked through for one of a few that syntax allows.
const SYNTAX: usize = 64;
/// Best tokens that are asked for beyond those wanted where penalties or biases may move some of them down.
const MOVED: usize = 64;

/// What a summary says about a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Short {
    /// This is what the row gives, `None` when it has nothing to choose from.
    Token(Option<u32>),
    /// Only the row itself can say.
    NeedsRow,
}

impl Sampler {
    /// What is to be asked of row `row`, of `vocab` logits, so that a token can be drawn from the answer after `ahead` other draws. `None`:
    /// the row itself is needed, as where penalties or biases raise logits, or change the sum of all weights.
    pub fn query(&self, row: usize, ahead: usize, vocab: usize) -> Option<RowQuery> {
        let p = &self.params;
        let mut q = RowQuery { row, best: 1, scale: None, draw: None, norm: false };
        let modifies = self.modifies();
        if modifies && !self.only_lowers() {
            return None;
        }
        if modifies {
            q.best += MOVED;
        }
        if p.temperature == 0.0 {
            return Some(q);
        }
        match self.kept(vocab) {
            Some(top_k) => q.best += top_k - 1,
            None if modifies && (p.top_p < 1.0 || p.min_p == 0.0) => return None,
            None if p.top_p < 1.0 => (q.best, q.scale) = (NUCLEUS, Some(self.scale())),
            None if p.min_p > 0.0 => q.best = NUCLEUS,
            None => {
                let mut rng = self.rng.clone();
                for _ in 0..ahead {
                    Self::unit(&mut rng);
                }
                (q.scale, q.draw) = (Some(self.scale()), Some(Self::unit(&mut rng)));
            }
        }
        (q.best <= MAX_BEST).then_some(q)
    }

    /// As [`Sampler::sample`], from the answer to a query of [`Sampler::query`]. Nothing is drawn when the row is needed.
    pub fn sample_short(&mut self, s: &RowSummary, vocab: usize, scratch: &mut Scratch) -> Short {
        if self.modifies() {
            let Some(moved) = self.moved(s, vocab) else { return Short::NeedsRow };
            return self.draw_short(&moved, vocab, scratch);
        }
        self.draw_short(s, vocab, scratch)
    }

    fn draw_short(&mut self, s: &RowSummary, vocab: usize, scratch: &mut Scratch) -> Short {
        let p = &self.params;
        let Some(&(max, best)) = s.best.first() else { return Short::NeedsRow };
        if max == f32::NEG_INFINITY {
            return Short::Token(None);
        }
        if p.temperature == 0.0 {
            self.count(best);
            return Short::Token(Some(best));
        }
        let mut rng = self.rng.clone();
        let unit = Self::unit(&mut rng);
        let drawn = match self.kept(vocab) {
            Some(top_k) if s.best.len() < top_k => None,
            Some(top_k) => {
                scratch.candidates.clear();
                scratch.candidates.extend_from_slice(&s.best[..top_k]);
                self.draw_best(unit, scratch)
            }
            None if p.top_p < 1.0 || p.min_p > 0.0 => self
                .nucleus(s, vocab, scratch)
                .and_then(|total| draw(unit, total, &scratch.weights))
                .map(|at| scratch.candidates[at].1),
            None => s.drawn.filter(|d| d.draw == unit && d.margin > SUM_ERROR).map(|d| d.token),
        };
        let Some(token) = drawn else { return Short::NeedsRow };
        self.rng = rng;
        self.count(token);
        Short::Token(Some(token))
    }

    fn modifies(&self) -> bool {
        self.penalised || !self.params.logit_bias.is_empty()
    }

    /// Whether penalties and biases can make no logit larger.
    fn only_lowers(&self) -> bool {
        let p = &self.params;
        let penalties = p.repetition_penalty >= 1.0 && p.frequency_penalty >= 0.0 && p.presence_penalty >= 0.0;
        penalties && p.logit_bias.iter().all(|(_, bias)| *bias <= 0.0)
    }

    /// The summary of the row after penalties and biases that only lower: its best tokens as far as they are known, and no sums. A token
    /// that is not among the row's best is no better than the last of them, before and after; so what stays above that one is known.
    fn moved(&self, s: &RowSummary, vocab: usize) -> Option<RowSummary> {
        if !self.only_lowers() {
            return None;
        }
        let mut best: Vec<(f32, u32)> = s.best.iter().map(|&(logit, t)| (self.modified(t, logit), t)).collect();
        if best.len() < vocab {
            let last = s.best.last()?.0;
            best.retain(|c| c.0 > last);
        }
        best.sort_unstable_by(better);
        Some(RowSummary { best, ..RowSummary::default() })
    }

    /// As [`Sampler::best`].
    pub fn best_short(&self, s: &RowSummary) -> Short {
        match s.best.first() {
            Some((logit, token)) if self.params.logit_bias.is_empty() => {
                Short::Token(Some(*token).filter(|_| *logit > f32::NEG_INFINITY))
            }
            _ => Short::NeedsRow,
        }
    }

    /// As [`Sampler::best_of`].
    pub fn best_of_short(&self, s: &RowSummary, tokens: &[u32]) -> Short {
        let allowed = |c: &&(f32, u32)| c.0 > f32::NEG_INFINITY && tokens.binary_search(&c.1).is_ok();
        match s.best.iter().find(allowed) {
            Some((_, token)) if self.params.logit_bias.is_empty() => Short::Token(Some(*token)),
            _ => Short::NeedsRow,
        }
    }

    /// How many tokens top-k keeps, when it leaves any out.
    fn kept(&self, vocab: usize) -> Option<usize> {
        let top_k = self.params.top_k as usize;
        (top_k > 0 && top_k < vocab).then_some(top_k)
    }

    /// Fills the scratch memory with the candidates that top-p and min-p keep, in token order, and their weights, and gives the sum of these
    /// as [`ds4_kernels::math::exp::sum`] of the row would. `None` when the summary does not tell.
    fn nucleus(&self, s: &RowSummary, vocab: usize, scratch: &mut Scratch) -> Option<f64> {
        let (p, scale, max) = (&self.params, self.scale(), s.best.first()?.0);
        let all = s.best.len() == vocab;
        let mut end = s.best.len();
        if p.top_p < 1.0 {
            if s.total <= 0.0 {
                return None;
            }
            let (mass, error) = (f64::from(p.top_p) * s.total, SUM_ERROR * s.total);
            let mut reached = 0f64;
            let last = s.best.iter().position(|c| {
                reached += f64::from(exp_nonpositive((c.0 - max) * scale));
                reached >= mass - error
            })?;
            if reached < mass + error {
                return None;
            }
            end = last + 1;
        }
        let floor = self.min_p_floor();
        let above = s.best[..end].iter().take_while(|c| (c.0 - max) * scale >= floor).count();
        if p.top_p >= 1.0 && above == end && !all {
            return None;
        }
        let (weights, candidates) = (&mut scratch.weights, &mut scratch.candidates);
        candidates.clear();
        candidates.extend_from_slice(&s.best[..above]);
        candidates.sort_unstable_by_key(|c| c.1);
        weights.clear();
        weights.extend(candidates.iter().map(|c| exp_nonpositive((c.0 - max) * scale)));
        let (mut lanes, mut rest) = ([0f64; 8], 0f64);
        for (w, (_, token)) in weights.iter().zip(candidates.iter()) {
            let token = usize::try_from(*token).ok()?;
            *(if token < vocab / 8 * 8 { &mut lanes[token % 8] } else { &mut rest }) += f64::from(*w);
        }
        Some(lanes.iter().sum::<f64>() + rest)
    }
}

/// Asks for what the log-probabilities of a token and of the `k` best need too. `None` when the row itself is needed.
pub fn with_logprobs(mut q: RowQuery, k: usize) -> Option<RowQuery> {
    (q.norm, q.best) = (true, q.best.max(k));
    (q.best <= MAX_BEST).then_some(q)
}

/// Asks for what a choice among a few tokens will mostly need.
pub fn with_syntax(mut q: RowQuery) -> RowQuery {
    q.best = q.best.max(SYNTAX);
    q
}

/// As [`crate::logprobs::token_logprob`] of the row; `None` when the summary does not tell.
pub fn token_logprob_short(s: &RowSummary, token: u32, k: usize, vocab: usize) -> Option<TokenLogprob> {
    let max = s.best.first()?.0;
    if s.norm <= 0.0 || s.best.len() < k.min(vocab) {
        return None;
    }
    let drawn = s.drawn.iter().map(|d| (d.logit, d.token));
    let (logit, _) = s.best.iter().copied().chain(drawn).find(|c| c.1 == token)?;
    let norm = LogSoftmax::from_sum(max, s.norm);
    Some(TokenLogprob {
        token,
        logprob: norm.logprob(logit),
        top: s.best.iter().take(k).map(|&(logit, id)| (id, norm.logprob(logit))).collect(),
    })
}

#[cfg(test)]
mod tests {
    use ds4_kernels::conformance::Random;
    use ds4_kernels::math::select;
    use ds4_kernels::ops::summarise_row;

    use super::*;
    use crate::logprobs::token_logprob;
    use crate::request::SamplingParams;

    /// Random numbers, and rows and settings made of them.
    struct Numbers(Random);

    impl Numbers {
        /// From a new seed, or the one in `DS4_SEED`; tests show it when they fail.
        fn fresh() -> Self {
            let seed = Random::fresh_seed();
            println!("DS4_SEED={seed}");
            Self(Random::new(seed))
        }

        fn bits(&mut self) -> u64 {
            self.0.bits()
        }

        fn below(&mut self, n: usize) -> usize {
            self.0.below(n)
        }

        /// In -0.5..0.5.
        fn half(&mut self) -> f32 {
            self.0.unit() * 0.5
        }

        fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
            of[self.below(of.len())]
        }

        /// Logits: of some spread, sometimes rounded (ties), sometimes with values that are no numbers.
        fn row(&mut self, vocab: usize) -> Vec<f32> {
            let (spread, round, bad) = (self.one_of(&[0.1, 2.0, 5.0, 20.0]), self.below(3) == 0, self.below(8) == 0);
            (0..vocab)
                .map(|_| {
                    let x = (0..6).map(|_| self.half()).sum::<f32>() * 1.4 * spread;
                    match self.below(50) {
                        0 if bad => f32::NAN,
                        1 if bad => f32::INFINITY,
                        2 if bad => -0.0,
                        3..10 if bad => f32::NEG_INFINITY,
                        _ if round => (x * 4.0).round() / 4.0,
                        _ => x,
                    }
                })
                .collect()
        }

        fn params(&mut self) -> SamplingParams {
            SamplingParams {
                temperature: self.one_of(&[0.0, 0.3, 0.7, 1.0, 1.0, 1.6]),
                top_k: self.one_of(&[0, 0, 0, 1, 5, 40, 128, 256, 300, 5000]),
                top_p: self.one_of(&[1.0, 1.0, 0.1, 0.5, 0.9, 0.95, 0.999]),
                min_p: self.one_of(&[0.0, 0.0, 0.02, 0.2]),
                seed: Some(self.bits()),
                frequency_penalty: self.one_of(&[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 1.0, -0.5]),
                presence_penalty: self.one_of(&[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.5, -0.5]),
                repetition_penalty: self.one_of(&[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.3, 5.0, 0.7]),
                logit_bias: match self.below(12) {
                    0 => vec![(3, 2.0)],
                    1 => vec![(5, -100.0), (1, -0.5), (5, -1.0)],
                    _ => Vec::new(),
                },
            }
        }
    }

    /// The summary as another device may give it: sums that are off by a part of what is allowed.
    fn off(mut s: RowSummary, by: f64) -> RowSummary {
        (s.total, s.norm) = (s.total * (1.0 + by), s.norm * (1.0 + by));
        s
    }

    #[test]
    fn a_summary_gives_the_token_that_its_row_gives() {
        let mut r = Numbers::fresh();
        let (mut short, mut whole) = (Scratch::default(), Scratch::default());
        // Rows, those that a summary was asked for, and those that it decided: without and with penalties and biases.
        let mut seen = [[0u32; 3]; 2];
        for _ in 0..1000 {
            let p = r.params();
            let vocab = r.one_of(&[40, 300, 1003, 3000]);
            // Two samplers of one seed, which must stay in step whichever way a token is drawn.
            let prompt: Vec<u32> = (0..30).map(|i| i * 9).collect();
            let (mut a, mut b) = (Sampler::new(p.clone(), &prompt), Sampler::new(p.clone(), &prompt));
            let mut base = r.row(vocab);
            let seen = &mut seen[usize::from(a.modifies())];
            for _ in 0..8 {
                // Rows much like each other, so that what was drawn is good again.
                let mut row = if r.below(3) == 0 { r.row(vocab) } else { base.clone() };
                base[0] += 0.1;
                let query = a.query(0, 0, vocab);
                let summary = query.map(|q| off(summarise_row(&mut row, &q), f64::from(r.half()) * 1e-10));
                select::sanitise(&mut row);
                let want = b.sample(&mut row, &mut whole);
                let got = summary.map_or(Short::NeedsRow, |s| a.sample_short(&s, vocab, &mut short));
                seen[0] += 1;
                seen[1] += u32::from(query.is_some());
                seen[2] += u32::from(got != Short::NeedsRow);
                let got = match got {
                    Short::Token(token) => token,
                    Short::NeedsRow => a.sample(&mut row, &mut short),
                };
                assert_eq!(got, want, "{p:?}, {vocab} logits");
            }
        }
        println!("rows, asked for, answered: {seen:?}");
        let [[plain, asked, answered], [modified, modified_asked, modified_answered]] = seen;
        assert!(asked * 10 > plain * 9 && answered * 4 > asked * 3, "{seen:?}");
        assert!(modified_asked * 5 > modified && modified_answered * 2 > modified_asked, "{seen:?}");
    }

    #[test]
    fn nothing_is_decided_by_less_than_the_rounding() {
        let p = SamplingParams { top_p: 0.5, seed: Some(1), ..SamplingParams::default() };
        let row = vec![0.0f32; 4];
        let mut sampler = Sampler::new(p.clone(), &[]);
        let s = summarise_row(&mut row.clone(), &sampler.query(0, 0, 4).unwrap());
        // Two of four equal tokens reach one half exactly: no sum that is not exact may say so.
        assert_eq!(sampler.sample_short(&s, 4, &mut Scratch::default()), Short::NeedsRow);
        let mut plain = Sampler::new(SamplingParams { top_p: 1.0, ..p }, &[]);
        let q = plain.query(0, 0, 4).unwrap();
        let at_an_edge = RowQuery { draw: Some(0.25), ..q };
        for (q, want) in [(q, true), (at_an_edge, false)] {
            let s = summarise_row(&mut row.clone(), &q);
            assert_eq!(plain.sample_short(&s, 4, &mut Scratch::default()) != Short::NeedsRow, want, "{:?}", s.drawn);
        }
    }

    #[test]
    fn what_falls_below_the_last_known_token_is_not_decided() {
        let banned = |tokens: &[u32]| SamplingParams {
            logit_bias: tokens.iter().map(|t| (*t, -3.0)).collect(),
            ..SamplingParams::greedy()
        };
        let row = [5.0, 4.0, 3.0, 3.5, 0.0];
        for (tokens, want) in [
            (&[0][..], Short::Token(Some(1))),
            // 2 and 1 are no more than the 3 that others may have.
            (&[0, 1, 3], Short::NeedsRow),
            (&[0, 1], Short::Token(Some(3))),
        ] {
            let s =
                summarise_row(&mut row.to_vec(), &RowQuery { row: 0, best: 4, scale: None, draw: None, norm: false });
            let mut sampler = Sampler::new(banned(tokens), &[]);
            assert_eq!(sampler.sample_short(&s, 5, &mut Scratch::default()), want, "{tokens:?}");
        }
    }

    #[test]
    fn draws_ahead_are_those_that_will_be_drawn() {
        let mut r = Numbers::fresh();
        let mut sampler = Sampler::new(SamplingParams { seed: Some(5), ..SamplingParams::default() }, &[]);
        let rows: Vec<Vec<f32>> = (0..4).map(|_| r.row(500)).collect();
        let ahead: Vec<RowSummary> = rows
            .iter()
            .enumerate()
            .map(|(i, row)| summarise_row(&mut row.clone(), &sampler.query(i, i, 500).unwrap()))
            .collect();
        assert_ne!(sampler.sample_short(&ahead[0], 500, &mut Scratch::default()), Short::NeedsRow);
        // Out of turn: a number that is not the next one decides nothing.
        assert_eq!(sampler.sample_short(&ahead[2], 500, &mut Scratch::default()), Short::NeedsRow);
        assert_ne!(sampler.sample_short(&ahead[1], 500, &mut Scratch::default()), Short::NeedsRow);
    }

    #[test]
    fn log_probabilities_are_the_rows() {
        let mut r = Numbers::fresh();
        let mut told = 0;
        for _ in 0..300 {
            let (vocab, k) = (1000, r.below(21));
            let mut row = r.row(vocab);
            let p = SamplingParams { seed: Some(r.bits()), ..SamplingParams::default() };
            let q = with_logprobs(Sampler::new(p, &[]).query(0, 0, vocab).unwrap(), k).unwrap();
            let s = off(summarise_row(&mut row, &q), f64::from(r.half()) * 1e-10);
            let token = if r.below(4) == 0 { 17 } else { s.drawn.unwrap().token };
            let want = token_logprob(&row, token, k, &mut Vec::new());
            let Some(got) = token_logprob_short(&s, token, k, vocab) else {
                assert!(token == 17, "the logit of what was drawn is told");
                continue;
            };
            told += 1;
            // A sum that is off by 1e-10 moves the logarithm by as much, and its rounding to f32 by one unit at most.
            let near = |a: f32, b: f32| a == b || (a - b).abs() <= b.abs() * f32::EPSILON + 2e-10;
            assert!(near(got.logprob, want.logprob), "{} {}", got.logprob, want.logprob);
            assert_eq!(got.top.len(), k);
            assert!(got.top.iter().zip(&want.top).all(|(a, b)| a.0 == b.0 && near(a.1, b.1)), "{got:?} {want:?}");
        }
        assert!(told > 200, "{told}");
    }

    #[test]
    fn syntax_is_found_among_the_best() {
        let mut row = vec![1.0, 9.0, 5.0, 7.0, 5.0];
        let sampler = Sampler::new(SamplingParams::greedy(), &[]);
        let s = summarise_row(&mut row, &RowQuery { best: 4, ..sampler.query(0, 0, 5).unwrap() });
        assert_eq!(sampler.best_short(&s), Short::Token(Some(1)));
        assert_eq!(sampler.best_of_short(&s, &[0, 2, 4]), Short::Token(Some(2)));
        assert_eq!(sampler.best_of_short(&s, &[0, 700]), Short::NeedsRow, "token 0 is not among the four best");
        let biased = SamplingParams { logit_bias: vec![(0, 50.0)], ..SamplingParams::greedy() };
        let biased = Sampler::new(biased, &[]);
        assert_eq!((biased.best_short(&s), biased.query(0, 0, 5)), (Short::NeedsRow, None), "it may raise any");
        let nothing = summarise_row(&mut [f32::NAN; 5], &with_syntax(sampler.query(0, 0, 5).unwrap()));
        assert_eq!(sampler.best_short(&nothing), Short::Token(None));
        assert_eq!(sampler.best_of_short(&nothing, &[1, 2]), Short::NeedsRow);
    }
}
