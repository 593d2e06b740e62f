//! DeepSeek V4 under the engine: what prompts share with earlier ones is taken from checkpoints, and never changes an answer.

#[path = "../../models/tests/support/seeded.rs"]
mod seeded;
#[path = "../../models/tests/support/mod.rs"]
mod support;

use std::sync::Arc;

use ds4_engine::{
    Engine, EngineConfig, EngineHandle, Event, GenerateRequest, LogitsWanted, SamplingParams, Vocabulary,
};
use ds4_kernels::CpuDevice;
use support::json;

/// These tests compare token ids; text has its own tests.
struct NoText;

impl Vocabulary for NoText {
    fn token_bytes(&self, _: u32) -> &[u8] {
        &[]
    }
    fn is_eog(&self, _: u32) -> bool {
        false
    }
    fn is_control(&self, _: u32) -> bool {
        false
    }
}

/// Layers of every kind, window 128, ratios 4 and 128.
fn engine(config: EngineConfig) -> EngineHandle {
    let all = json("deepseek_v4/cases.json");
    let case = all.as_array().unwrap().iter().find(|c| c["name"] == "mixed").unwrap();
    let device = CpuDevice::default();
    let model = ds4_models::build(&device, &seeded::weights(case)).unwrap();
    Engine::new(device, model, Arc::new(NoText), config).unwrap().spawn().unwrap()
}

/// Greedy tokens and how many prompt tokens were not computed.
fn serve(engine: &EngineHandle, prompt: &[u32], max_tokens: usize) -> (Vec<u32>, usize) {
    let request = GenerateRequest {
        id: "test".into(),
        prompt: prompt.to_vec(),
        max_tokens,
        sampling: SamplingParams::greedy(),
        stop: Vec::new(),
        format: None,
        logprobs: None,
        ignore_eos: true,
        logits: LogitsWanted::default(),
    };
    let mut rx = engine.submit(request).unwrap();
    let mut got = Vec::new();
    loop {
        match rx.blocking_recv().expect("an end") {
            Event::Token { token, .. } => got.push(token),
            Event::Done { timings, .. } => return (got, timings.cached_tokens),
            Event::Failed(e) => panic!("{e}"),
            _ => {}
        }
    }
}

/// A prompt of `len` tokens; the first `same` are those of every other prompt.
fn prompt(same: usize, len: usize, salt: u64) -> Vec<u32> {
    let draw = |mut x: u64| {
        move |_| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            u32::try_from((x >> 33) % 120).unwrap()
        }
    };
    (0..same).map(draw(1)).chain((same..len).map(draw(salt))).collect()
}

/// Answers of an engine that keeps nothing.
struct Fresh(EngineHandle);

impl Fresh {
    fn new() -> Self {
        Self(engine(EngineConfig { max_batch: 1, checkpoints: 0, idle_keep_bytes: Some(0), ..EngineConfig::default() }))
    }

    fn answer(&self, prompt: &[u32], n: usize) -> Vec<u32> {
        let (tokens, cached) = serve(&self.0, prompt, n);
        assert_eq!(cached, 0);
        tokens
    }
}

#[test]
fn deepseek_v4_an_edited_turn_is_answered_from_a_checkpoint_as_if_computed_anew() {
    let fresh = Fresh::new();
    for chunk in [5, 64, 256] {
        let config =
            EngineConfig { max_batch: 1, prefill_chunk: chunk, checkpoint_interval: 100, ..EngineConfig::default() };
        let engine = engine(config);
        let first = prompt(0, 301, 7);
        let (answer, cached) = serve(&engine, &first, 20);
        assert_eq!((&answer, cached), (&fresh.answer(&first, 20), 0), "chunks of {chunk}");

        // The same prompt again: all but the token whose logits are needed.
        let (again, cached) = serve(&engine, &first, 20);
        assert_eq!((&again, cached), (&answer, 300), "chunks of {chunk}");

        // A second turn continues from the last token computed, which is the one before the answer's last.
        let mut second = [&first[..], &answer[..]].concat();
        second.extend(prompt(0, 60, 8));
        let (reply, cached) = serve(&engine, &second, 20);
        assert_eq!((&reply, cached), (&fresh.answer(&second, 20), 320), "chunks of {chunk}");

        // Its message is edited: back to where the turn began.
        let mut edited = [&first[..], &answer[..]].concat();
        edited.extend(prompt(0, 60, 9));
        let (reply, cached) = serve(&engine, &edited, 20);
        assert_eq!((&reply, cached), (&fresh.answer(&edited, 20), 320), "chunks of {chunk}");

        // The prompt's end is rewritten (as when a turn's reasoning is dropped): back to before its last token.
        let mut rewritten = first[..300].to_vec();
        rewritten.extend(prompt(0, 30, 10));
        let (reply, cached) = serve(&engine, &rewritten, 20);
        assert_eq!((&reply, cached), (&fresh.answer(&rewritten, 20), 300), "chunks of {chunk}");

        // An early change: back to a checkpoint of the interval, at most a chunk past it.
        let mut early = first[..250].to_vec();
        early.extend(prompt(0, 50, 11));
        let (reply, cached) = serve(&engine, &early, 20);
        assert_eq!(reply, fresh.answer(&early, 20), "chunks of {chunk}");
        assert!(chunk == 256 || (100..=250).contains(&cached), "{cached} with chunks of {chunk}");

        let stats = engine.stats();
        assert_eq!(stats.rewinds, stats.prefix_hits - 1, "all but the continuation");
        assert!(stats.checkpoint_bytes > 0 && stats.checkpoint_bytes < stats.bank_bytes);
        let computed =
            [&first, &first, &second, &edited, &rewritten, &early].map(|p| p.len() as u64).iter().sum::<u64>()
                - stats.cached_tokens;
        assert_eq!(stats.prefill_tokens, computed, "reused tokens are those that were not computed");
    }
}

#[test]
fn deepseek_v4_many_conversations_over_few_banks_answer_as_alone() {
    // 40 requests over 3 banks from 4 threads, with shared beginnings of every length, a memory limit that is passed and
    // few checkpoints: which bank, checkpoint or nothing a request gets depends on timing, its answer must not.
    let fresh = Fresh::new();
    let prompts: Vec<Vec<u32>> = (0..40usize)
        .map(|i| prompt([3, 64, 127, 128, 129, 200, 255][i % 7], 130 + 37 * (i % 5), 20 + i as u64 / 2))
        .collect();
    let want: Vec<Vec<u32>> = prompts.iter().map(|p| fresh.answer(p, 8)).collect();
    let engine = engine(EngineConfig {
        max_batch: 3,
        prefill_chunk: 48,
        prefill_chunk_busy: 20,
        checkpoints: 3,
        checkpoint_interval: 50,
        idle_keep_bytes: Some(2 << 20),
        ..EngineConfig::default()
    });
    std::thread::scope(|scope| {
        for t in 0..4 {
            let (engine, prompts, want) = (&engine, &prompts, &want);
            scope.spawn(move || {
                for i in (t..40).step_by(4) {
                    assert_eq!(serve(engine, &prompts[i], 8).0, want[i], "request {i}");
                }
            });
        }
    });
    let stats = engine.stats();
    assert!(stats.rewinds > 0, "checkpoints were used: {stats:?}");
    assert_eq!((stats.finished, stats.failed), (40, 0));
}
