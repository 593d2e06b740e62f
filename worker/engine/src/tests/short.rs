//! Tokens drawn from summaries of rows: what clients hear is what rows would have given, and rows are read where they are needed only.

use super::*;
use crate::sampler::{Sampler, Scratch};
use crate::select;

/// The tokens that a sampler draws from whole rows of the hashing model.
fn from_rows(r: &GenerateRequest) -> Vec<u32> {
    let (mut sampler, mut scratch) = (Sampler::new(r.sampling.clone(), &r.prompt), Scratch::default());
    let mut sequence = r.prompt.clone();
    for _ in 0..r.max_tokens {
        let mut row = vec![0.0; MockModel::VOCAB];
        MockModel::hash(&sequence, &mut row);
        select::sanitise(&mut row);
        sequence.push(sampler.sample(&mut row, &mut scratch).unwrap());
    }
    sequence.split_off(r.prompt.len())
}

fn sampling(seed: u64) -> SamplingParams {
    SamplingParams { seed: Some(seed), ..SamplingParams::default() }
}

/// Settings, and whether their rows are needed.
fn settings() -> Vec<(SamplingParams, bool)> {
    vec![
        (SamplingParams::greedy(), false),
        (sampling(1), false),
        (SamplingParams { temperature: 0.4, ..sampling(2) }, false),
        (SamplingParams { top_k: 40, top_p: 0.8, ..sampling(3) }, false),
        (SamplingParams { top_p: 0.5, ..sampling(4) }, false),
        (SamplingParams { min_p: 0.3, ..sampling(5) }, false),
        (SamplingParams { top_k: 299, ..sampling(6) }, true),
        (SamplingParams { frequency_penalty: 0.5, ..sampling(7) }, true),
        (SamplingParams { presence_penalty: 0.5, top_k: 20, ..sampling(9) }, false),
        (SamplingParams { repetition_penalty: 1.2, ..SamplingParams::greedy() }, false),
        (SamplingParams { repetition_penalty: 0.9, ..SamplingParams::greedy() }, true),
        (SamplingParams { logit_bias: vec![(7, 3.0)], ..sampling(8) }, true),
    ]
}

#[test]
fn every_setting_draws_what_its_rows_would_give() {
    for (sampling, needs_rows) in settings() {
        let device = MockDevice::default();
        let r = GenerateRequest { sampling, ..request(&[1, 2, 3], 40) };
        let heard = hear(start_on(device.clone(), MockModel::hashing(), small()).submit(r.clone()).unwrap());
        assert_eq!(heard.tokens, from_rows(&r), "{:?}", r.sampling);
        assert_eq!(device.rows_read(), if needs_rows { 40 } else { 0 }, "{:?}", r.sampling);
    }
}

#[test]
fn requests_of_one_step_get_their_own_rows() {
    let engine = start(MockModel::hashing(), EngineConfig { max_batch: 16, max_queue: 32, ..small() });
    let requests: Vec<GenerateRequest> = settings()
        .into_iter()
        .zip(1u32..)
        .map(|((sampling, _), i)| GenerateRequest { sampling, ..request(&[i, 2 * i, 5], 30) })
        .collect();
    let heard: Vec<EventReceiver> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
    for (rx, r) in heard.into_iter().zip(&requests) {
        assert_eq!(hear(rx).tokens, from_rows(r), "{:?}", r.sampling);
    }
}

#[test]
fn log_probabilities_need_no_rows_for_tokens_among_the_best() {
    for (sampling, rows) in [(SamplingParams::greedy(), 0), (sampling(3), 0), (sampling(4), 0)] {
        let device = MockDevice::default();
        let engine = start_on(device.clone(), MockModel::hashing(), small());
        let r = GenerateRequest { sampling, logprobs: Some(5), ..request(&[9, 8], 20) };
        let (mut rx, mut sequence) = (engine.submit(r).unwrap(), vec![9, 8]);
        while let Some(event) = rx.blocking_recv() {
            let Event::Token { token, logprob, .. } = event else { continue };
            let mut row = vec![0.0; MockModel::VOCAB];
            MockModel::hash(&sequence, &mut row);
            let want = crate::logprobs::token_logprob(&row, token, 5, &mut Vec::new());
            let got = logprob.unwrap();
            assert_eq!(
                got.top.iter().map(|t| t.0).collect::<Vec<_>>(),
                want.top.iter().map(|t| t.0).collect::<Vec<_>>()
            );
            assert!((got.logprob - want.logprob).abs() < 1e-6 && got.token == token);
            sequence.push(token);
        }
        assert_eq!((sequence.len(), device.rows_read()), (22, rows));
    }
}
