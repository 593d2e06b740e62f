//! Distributions, penalties, filters, and what a draw leaves behind.

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
