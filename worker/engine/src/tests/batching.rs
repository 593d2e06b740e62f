//! What batching, chunking and reuse must not change.

use super::*;

fn prompt(i: u32, len: u32) -> Vec<u32> {
    (0..len).map(|j| (i * 31 + j * 17 + i * j) % 250).collect()
}

/// Mixed requests: greedy, seeded sampling, penalties.
fn mixed(i: u32) -> GenerateRequest {
    let mut r = request(&prompt(i, 1 + (i * 37) % 300), 5 + (i as usize * 13) % 60);
    if i % 3 == 1 {
        r.sampling = SamplingParams { temperature: 0.8, top_p: 0.9, seed: Some(u64::from(i)), ..Default::default() };
    } else if i % 3 == 2 {
        r.sampling.frequency_penalty = 0.5;
        r.sampling.repetition_penalty = 1.2;
    }
    r
}

#[test]
fn sixty_four_requests_come_and_go_and_each_survivor_is_as_if_alone() {
    let config = EngineConfig { max_batch: 8, max_queue: 64, prefill_chunk: 50, prefill_chunk_busy: 20, ..small() };
    let engine = start(MockModel::hashing(), config);
    std::thread::scope(|scope| {
        for i in 0..64u32 {
            let engine = &engine;
            scope.spawn(move || {
                // A third arrives while others run.
                std::thread::sleep(Duration::from_micros(u64::from(i % 3) * 1500));
                let mut rx = engine.submit(mixed(i)).unwrap();
                let mut heard = Heard::default();
                // Every fifth leaves: at once, or after a few tokens.
                let leaves = (i % 5 == 0).then_some(i as usize % 4);
                while leaves.is_none_or(|n| heard.tokens.len() < n) {
                    let Some(event) = rx.blocking_recv() else { break };
                    heard.take(event);
                }
                if leaves.is_none() {
                    let want = alone(mixed(i));
                    assert_eq!(heard.tokens, want.tokens, "request {i}");
                    assert_eq!(heard.text, want.text, "request {i}");
                }
            });
        }
    });
    let stats = eventually(&engine, "idle", |s| s.running == 0 && s.queued == 0);
    assert_eq!(stats.requests, 64);
    assert!(stats.finished >= 51);
    assert_eq!(stats.finished + stats.reaped + stats.cancelled_prefill + stats.cancelled_decode, 64);
}

#[test]
fn prompts_are_computed_in_bounded_slices_beside_decoding_requests() {
    let (gate, before) = gate();
    let config = EngineConfig { prefill_chunk: 100, prefill_chunk_busy: 30, ..small() };
    let engine = start(MockModel::hashing().before(before), config);
    let first = engine.submit(request(&prompt(1, 150), 40)).unwrap();
    assert_eq!(gate.held().rows(), 100);
    let second = engine.submit(request(&prompt(2, 70), 40)).unwrap();
    let third = engine.submit(request(&prompt(3, 5), 40)).unwrap();
    gate.let_go();
    // The end of the first prompt, and the beginning of the second, fill the slice.
    let rows = |p: &BatchPlan| p.spans.iter().map(|s| s.rows).collect::<Vec<_>>();
    let plan = gate.held();
    assert_eq!((rows(&plan), plan.wanted.clone()), (vec![50, 50], vec![49]));
    gate.let_go();
    // The first decodes; the second ends; the third fits beside it whole.
    let plan = gate.held();
    assert_eq!((rows(&plan), plan.wanted.clone()), (vec![1, 20, 5], vec![0, 20, 25]));
    gate.let_go();
    assert_eq!(rows(&gate.held()), [1, 1, 1]);
    drop(gate);
    assert_eq!(hear(first).tokens, alone(request(&prompt(1, 150), 40)).tokens);
    assert_eq!(hear(second).tokens, alone(request(&prompt(2, 70), 40)).tokens);
    assert_eq!(hear(third).tokens, alone(request(&prompt(3, 5), 40)).tokens);
}

#[test]
fn a_later_prompt_waits_until_the_one_before_is_whole() {
    let (gate, before) = gate();
    let config = EngineConfig { prefill_chunk: 100, ..small() };
    let engine = start(MockModel::hashing().before(before), config);
    let _first = engine.submit(request(&prompt(1, 250), 2)).unwrap();
    gate.held();
    let _second = engine.submit(request(&prompt(2, 10), 2)).unwrap();
    gate.let_go();
    let plan = gate.held();
    assert_eq!((plan.spans.len(), plan.rows()), (1, 100), "one half-computed prompt at a time");
}

#[test]
fn a_second_turn_computes_only_what_is_new() {
    let engine = start(MockModel::hashing(), small());
    let first = hear(engine.submit(request(&prompt(1, 100), 10)).unwrap());
    let mut turn = prompt(1, 100);
    turn.extend(&first.tokens);
    turn.extend([7, 8, 9]);
    let second = hear(engine.submit(request(&turn, 10)).unwrap());
    let (_, timings) = second.done();
    // The last generated token was never fed back, so its row is new.
    assert_eq!((timings.prompt_tokens, timings.cached_tokens, timings.completion_tokens), (113, 109, 10));
    assert_eq!(second.tokens, alone(request(&turn, 10)).tokens);
    let stats = engine.stats();
    assert_eq!((stats.prefix_hits, stats.cached_tokens, stats.prefill_tokens), (1, 109, 104));
}

#[test]
fn the_same_seed_gives_the_same_text_whatever_runs_beside_it() {
    let sampled = |seed| {
        let mut r = request(&prompt(4, 20), 40);
        r.sampling = SamplingParams { temperature: 1.5, seed: Some(seed), ..Default::default() };
        r
    };
    let engine = start(MockModel::hashing(), small());
    let _noise: Vec<_> = (0..3).map(|i| engine.submit(request(&prompt(i, 40), 60)).unwrap()).collect();
    let one = hear(engine.submit(sampled(1)).unwrap());
    assert_eq!(one.tokens, alone(sampled(1)).tokens);
    assert_ne!(one.tokens, alone(sampled(2)).tokens);
}

#[test]
fn timings_and_events_tell_one_story() {
    let engine = start(MockModel::replying(3, b"abc".map(u32::from).to_vec()), small());
    let mut rx = engine.submit(request(&[1, 2, 3], 50)).unwrap();
    assert!(matches!(rx.blocking_recv(), Some(Event::Admitted)));
    let heard = hear(rx);
    let (reason, timings) = heard.done();
    assert_eq!((heard.text.as_str(), reason), ("abc", FinishReason::Stop));
    assert_eq!((timings.prompt_tokens, timings.completion_tokens), (3, 4), "the end token counts as generated");
    assert!(timings.prefill > Duration::ZERO);
}
