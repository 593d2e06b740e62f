//! Guesses ahead: they may save steps and must not change anything that a client hears.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use super::*;
use crate::mock::{Guesses, mock_windowed_spec};
use crate::select;

/// What the hashing model says next.
fn truth(tokens: &[u32]) -> u32 {
    let mut logits = vec![0.0; MockModel::VOCAB];
    MockModel::hash(tokens, &mut logits);
    select::argmax(&logits).unwrap()
}

/// Guesses of which the first `right(known)` are the model's greedy tokens and the rest are not. The drafter must have been
/// shown the whole sequence, or what it guesses is wrong throughout.
fn guesses(right: impl Fn(&[u32]) -> usize + Send + 'static) -> Guesses {
    Box::new(move |known, n| {
        let (mut sequence, right) = (known.to_vec(), right(known));
        (0..n)
            .map(|i| {
                let token = truth(&sequence);
                sequence.push(token);
                if i < right { token } else { (token + 1) % 250 }
            })
            .collect()
    })
}

/// A model that can only be taken back to checkpoints, as those that have drafters.
fn model(guesses: Guesses) -> MockModel {
    MockModel::hashing().keeping(mock_windowed_spec()).guessing(guesses)
}

fn drafting(drafts: usize) -> EngineConfig {
    EngineConfig { drafts, max_queue: 64, ..small() }
}

fn prompt(i: u32, len: u32) -> Vec<u32> {
    (0..len).map(|j| (i * 31 + j * 17 + i * j) % 250).collect()
}

#[test]
fn deepseek_v4_speculation_with_perfect_guesses_takes_fewer_steps() {
    for drafts in [1, 2, 4, 16] {
        let engine = start(model(guesses(|_| usize::MAX)), drafting(drafts));
        let heard = hear(engine.submit(request(&prompt(1, 100), 61)).unwrap());
        assert_eq!(heard.tokens, alone(request(&prompt(1, 100), 61)).tokens, "{drafts}");
        assert_eq!(heard.done().1.completion_tokens, 61);
        let stats = engine.stats();
        assert_eq!(stats.accepted_tokens, stats.drafted_tokens, "{drafts}");
        // 99 prompt tokens, the last one, and the other 60 tokens in groups.
        assert_eq!(stats.steps, 2 + 60u64.div_ceil(drafts as u64 + 1), "{drafts}");
        assert_eq!(stats.decode_tokens, 61);
    }
}

#[test]
fn deepseek_v4_speculation_with_bad_guesses_takes_no_more_steps() {
    for drafts in [1, 3, 16] {
        let engine = start(model(guesses(|_| 0)), drafting(drafts));
        let heard = hear(engine.submit(request(&prompt(1, 100), 40)).unwrap());
        assert_eq!(heard.tokens, alone(request(&prompt(1, 100), 40)).tokens, "{drafts}");
        let stats = engine.stats();
        assert_eq!((stats.accepted_tokens, stats.steps), (0, 2 + 39), "{drafts}");
        assert!(stats.drafted_tokens > 0);
    }
}

/// Greedy requests, some with penalties, biases, logprobs, stop strings and raw rows, and sampled ones between them.
fn mixed(i: u32) -> GenerateRequest {
    let mut r = request(&prompt(i, 1 + (i * 37) % 300), 5 + (i as usize * 13) % 60);
    match i % 6 {
        1 => r.sampling = SamplingParams { temperature: 0.8, seed: Some(u64::from(i)), ..Default::default() },
        2 => r.sampling.repetition_penalty = 1.3,
        3 => r.logits.steps = true,
        4 => r.stop = vec![vec![u8::try_from(truth(&r.prompt) % 250).unwrap()], b"e".to_vec()],
        5 => r.sampling.logit_bias = vec![(65, 3.0), (66, -5.0)],
        _ => {}
    }
    r
}

#[test]
fn deepseek_v4_speculation_changes_nothing_that_clients_hear() {
    for drafts in [1, 2, 5, 16] {
        let config = EngineConfig { max_batch: 5, prefill_chunk: 50, prefill_chunk_busy: 20, ..drafting(drafts) };
        let engine = start(model(guesses(|known| known.len() * 7 % 5)), config);
        std::thread::scope(|scope| {
            for i in 0..48u32 {
                let engine = &engine;
                scope.spawn(move || {
                    let heard = hear(engine.submit(mixed(i)).unwrap());
                    let want = alone(mixed(i));
                    assert_eq!(heard.tokens, want.tokens, "request {i}");
                    assert_eq!((&heard.text, &heard.rows), (&want.text, &want.rows), "request {i}");
                    assert_eq!(heard.done().0, want.done().0, "request {i}");
                    assert_eq!(heard.done().1.completion_tokens, want.done().1.completion_tokens, "request {i}");
                });
            }
        });
        let stats = engine.stats();
        assert!(0 < stats.accepted_tokens && stats.accepted_tokens < stats.drafted_tokens, "{stats:?}");
        assert_eq!((stats.finished, stats.failed), (48, 0));
    }
}

#[test]
fn deepseek_v4_speculation_ends_where_decoding_ends() {
    // The end token, the last token allowed, and a stop string, each at every place among the guesses.
    for at in 1..12usize {
        let reply: Vec<u32> = (0..20).map(|i| 97 + i).collect();
        let answer = reply.clone();
        let perfect: Guesses = Box::new(move |known, n| {
            let truth = |i: usize| answer.get(known.len() - 3 + i).copied().unwrap_or(MockVocabulary::EOG);
            (0..n).map(truth).collect()
        });
        let short: Vec<u32> = reply[..at].to_vec();
        let ends = MockModel::replying(3, short.clone()).keeping(mock_windowed_spec()).guessing(perfect);
        let engine = start(ends, drafting(4));
        let heard = hear(engine.submit(request(&[1, 2, 3], 50)).unwrap());
        assert_eq!((heard.tokens, heard.end.unwrap().unwrap().0), (short, FinishReason::Stop), "{at}");

        let perfect = || model(guesses(|_| usize::MAX));
        let engine = start(perfect(), drafting(4));
        let heard = hear(engine.submit(request(&prompt(2, 9), at)).unwrap());
        assert_eq!((heard.tokens.len(), heard.done().0), (at, FinishReason::Length));
        let engine = start(perfect(), EngineConfig { context: 20 + at, ..drafting(4) });
        let heard = hear(engine.submit(request(&prompt(2, 20), 50)).unwrap());
        assert_eq!((heard.tokens.len(), heard.done().0), (at, FinishReason::Length), "the context's end");
    }
}

#[test]
fn deepseek_v4_speculation_leaves_banks_that_can_be_continued() {
    for right in 0..4usize {
        let engine = start(model(guesses(move |_| right)), EngineConfig { max_batch: 1, ..drafting(3) });
        let mut turn = prompt(1, 100);
        for _ in 0..4 {
            let heard = hear(engine.submit(request(&turn, 13)).unwrap());
            assert_eq!(heard.tokens, alone(request(&turn, 13)).tokens, "{right}");
            turn.extend(&heard.tokens);
            turn.extend([7, 8, 9]);
        }
        let stats = engine.stats();
        assert_eq!(stats.prefix_hits, 3, "{right}");
        // At most the guesses of the last step, and what they were guessed behind, are lost to the next turn.
        assert!(stats.cached_tokens >= 3 * 100 + 13 + 2 * 13 + 3 * 13 - 3 * 5, "{right}: {}", stats.cached_tokens);
    }
}

#[test]
fn deepseek_v4_speculation_is_only_for_greedy_requests_and_only_when_asked_for() {
    let asked = std::sync::Arc::new(AtomicUsize::new(0));
    let counting = || -> Guesses {
        let asked = std::sync::Arc::clone(&asked);
        Box::new(move |_, _| {
            asked.fetch_add(1, SeqCst);
            Vec::new()
        })
    };
    let mut sampled = request(&prompt(1, 30), 10);
    sampled.sampling = SamplingParams { temperature: 1.0, seed: Some(1), ..Default::default() };
    hear(start(model(counting()), drafting(4)).submit(sampled).unwrap());
    hear(start(model(counting()), drafting(0)).submit(request(&prompt(1, 30), 10)).unwrap());
    assert_eq!(asked.load(SeqCst), 0);
    hear(start(model(counting()), drafting(4)).submit(request(&prompt(1, 30), 10)).unwrap());
    assert_eq!(asked.load(SeqCst), 8, "behind every token but the last two");
}

#[test]
fn deepseek_v4_speculation_of_sampled_answers_is_for_their_syntax() {
    // The model is sure of this text, but not so sure that a sampler at this temperature never strays from it.
    let text = b"ab<calls are syntax>cd<so is this>ef<and this>gh";
    let sampled = |seed: u64, toy: super::answers::Toy| GenerateRequest {
        format: Some(Arc::new(toy)),
        sampling: SamplingParams { temperature: 1.2, seed: Some(seed), ..Default::default() },
        ..request(&[1, 2], 60)
    };
    let reply = || MockModel::replying(2, text.map(u32::from).to_vec()).keeping(mock_windowed_spec());
    let perfect = |asked: Arc<AtomicUsize>| -> Guesses {
        Box::new(move |known, n| {
            asked.fetch_add(1, SeqCst);
            let next = |i: usize| text.get(known.len() - 2 + i).map_or(MockVocabulary::EOG, |b| u32::from(*b));
            (0..n).map(next).collect()
        })
    };
    let toy = |forced: &[u8], plain| super::answers::Toy {
        forced: forced.iter().map(|b| u32::from(*b)).collect(),
        plain,
        ..Default::default()
    };
    let mut strayed = 0;
    for seed in 0..20 {
        for forced in [&b""[..], b"ab<calls"] {
            let want = hear(start(reply(), small()).submit(sampled(seed, toy(forced, false))).unwrap());
            strayed += usize::from(!want.tokens.iter().map(|t| u8::try_from(*t % 256).unwrap()).eq(*text));
            let asked = Arc::new(AtomicUsize::new(0));
            let engine = start(reply().guessing(perfect(Arc::clone(&asked))), drafting(4));
            let heard = hear(engine.submit(sampled(seed, toy(forced, false))).unwrap());
            assert_eq!((&heard.tokens, &heard.text), (&want.tokens, &want.text), "seed {seed}");
            let stats = engine.stats();
            if want.tokens.contains(&u32::from(b'<')) {
                assert!(asked.load(SeqCst) > 0 && stats.accepted_tokens > 0, "seed {seed}: {stats:?}");
            }
            let asked = Arc::new(AtomicUsize::new(0));
            let engine = start(reply().guessing(perfect(Arc::clone(&asked))), drafting(4));
            hear(engine.submit(sampled(seed, toy(b"", true))).unwrap());
            let syntax = want.tokens.contains(&u32::from(b'<'));
            assert!(syntax || asked.load(SeqCst) == 0, "nothing to guess in free text");
        }
    }
    assert!((1..40).contains(&strayed), "{strayed} of 40 answers have another text");
}

#[test]
fn deepseek_v4_speculation_fits_into_a_slow_clients_channel() {
    // Four events may wait, one of them the end: never more than two guesses at once, and none while nobody reads.
    let config = EngineConfig { event_capacity: 4, ..drafting(16) };
    let engine = start(model(guesses(|_| usize::MAX)), config);
    let mut rx = engine.submit(request(&prompt(1, 30), 40)).unwrap();
    let mut heard = Heard::default();
    let mut events = 0;
    while let Some(event) = rx.blocking_recv() {
        heard.take(event);
        events += 1;
        // All that waits at once, then nothing: with one read at a time there would never be room for a guess.
        if events % 4 == 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    // How many guesses found room is a matter of timing; an event too many would be lost, and with it a token.
    assert_eq!(heard.tokens, alone(request(&prompt(1, 30), 40)).tokens);
}

#[test]
fn deepseek_v4_speculation_goes_on_without_guesses_when_memory_is_short() {
    let device = MockDevice::default();
    let engine =
        start_on(device.clone(), model(guesses(|_| usize::MAX)), EngineConfig { checkpoints: 0, ..drafting(8) });
    // The model's and the drafter's rows: 30 + 39 and 30 + 38, but no guesses behind the last of them.
    device.limit_tokens(30 + 39 + 30 + 38);
    let heard = hear(engine.submit(request(&prompt(1, 30), 40)).unwrap());
    assert_eq!(heard.tokens, alone(request(&prompt(1, 30), 40)).tokens);
    assert_eq!(heard.done().0, FinishReason::Length);
}
