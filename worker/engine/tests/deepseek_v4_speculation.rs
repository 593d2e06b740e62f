//! DeepSeek V4 with its prediction block under the engine: guesses save steps and never change an answer.

#[path = "../../models/tests/support/seeded.rs"]
mod seeded;
#[path = "../../models/tests/support/mod.rs"]
mod support;

use std::sync::Arc;

use ds4_engine::{
    Engine, EngineConfig, EngineHandle, Event, GenerateRequest, LogitsWanted, SamplingParams, Vocabulary,
};
use ds4_kernels::CpuDevice;
use ds4_kernels::ops::KvNumerics;
use ds4_models::deepseek_v4::{DeepseekV4, MtpAlignment, MtpSettings};
use support::json;

/// These tests compare token ids; text has its own tests. One token in 40 ends an answer.
struct NoText;

impl Vocabulary for NoText {
    fn token_bytes(&self, _: u32) -> &[u8] {
        &[]
    }
    fn is_eog(&self, token: u32) -> bool {
        token % 40 == 7
    }
    fn is_control(&self, _: u32) -> bool {
        false
    }
}

/// Layers of every kind, window 128, ratios 4 and 128.
fn engine(alignment: Option<MtpAlignment>, config: EngineConfig) -> EngineHandle {
    let all = json("deepseek_v4/cases.json");
    let case = all.as_array().unwrap().iter().find(|c| c["name"] == "mixed").unwrap();
    let device = CpuDevice::default();
    let (base, block) = seeded::forgetful(case);
    let mut model = DeepseekV4::build(&device, &base, KvNumerics::Official).unwrap();
    if let Some(alignment) = alignment {
        model.attach_mtp(&device, &block, MtpSettings { alignment, margin: 0.0 }).unwrap();
    }
    Engine::new(device, Box::new(model), Arc::new(NoText), config).unwrap().spawn().unwrap()
}

fn serve(engine: &EngineHandle, prompt: &[u32], max_tokens: usize, ignore_eos: bool) -> Vec<u32> {
    let request = GenerateRequest {
        id: "test".into(),
        prompt: prompt.to_vec(),
        max_tokens,
        sampling: SamplingParams::greedy(),
        stop: Vec::new(),
        format: None,
        logprobs: None,
        ignore_eos,
        logits: LogitsWanted::default(),
    };
    let mut rx = engine.submit(request).unwrap();
    let mut got = Vec::new();
    loop {
        match rx.blocking_recv().expect("an end") {
            Event::Token { token, .. } => got.push(token),
            Event::Done { .. } => return got,
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

#[test]
fn deepseek_v4_speculation_under_the_engine_saves_steps_and_changes_nothing() {
    let plain = engine(None, EngineConfig::default());
    let prompts: Vec<Vec<u32>> = [1, 5, 126, 129, 300].map(|len| prompt(0, len, 3 + len as u64)).into();
    let want: Vec<Vec<u32>> = prompts.iter().map(|p| serve(&plain, p, 60, true)).collect();
    let steps = plain.stats().steps;
    for alignment in [MtpAlignment::SameToken, MtpAlignment::NextToken] {
        for drafts in [1, 3, 16] {
            let guessing = engine(Some(alignment), EngineConfig { drafts, ..EngineConfig::default() });
            for (p, want) in prompts.iter().zip(&want) {
                assert_eq!(serve(&guessing, p, 60, true), *want, "{alignment:?}, {drafts}, {} tokens", p.len());
            }
            let stats = guessing.stats();
            println!("{alignment:?}, {drafts}: {} of {}", stats.accepted_tokens, stats.drafted_tokens);
            assert!(stats.accepted_tokens * 3 > stats.drafted_tokens || drafts == 16);
            assert!(stats.steps + 60 < steps, "{} and {steps} steps", stats.steps);
        }
    }
}

#[test]
fn deepseek_v4_speculation_of_many_conversations_answers_as_alone() {
    // Banks that are reused, rewound and trimmed, answers that end anywhere, chunked prompts beside guesses.
    let plain = engine(None, EngineConfig { checkpoints: 0, idle_keep_bytes: Some(0), ..EngineConfig::default() });
    let prompts: Vec<Vec<u32>> = (0..30usize)
        .map(|i| prompt([3, 64, 127, 128, 129, 200, 255][i % 7], 130 + 37 * (i % 5), 20 + i as u64 / 2))
        .collect();
    let want: Vec<Vec<u32>> = prompts.iter().map(|p| serve(&plain, p, 30, false)).collect();
    for (alignment, drafts) in [(MtpAlignment::NextToken, 2), (MtpAlignment::SameToken, 4)] {
        let guessing = engine(
            Some(alignment),
            EngineConfig {
                drafts,
                max_batch: 3,
                prefill_chunk: 48,
                prefill_chunk_busy: 20,
                checkpoints: 3,
                checkpoint_interval: 50,
                idle_keep_bytes: Some(2 << 20),
                ..EngineConfig::default()
            },
        );
        std::thread::scope(|scope| {
            for t in 0..4 {
                let (guessing, prompts, want) = (&guessing, &prompts, &want);
                scope.spawn(move || {
                    for i in (t..30).step_by(4) {
                        assert_eq!(serve(guessing, &prompts[i], 30, false), want[i], "{alignment:?}, request {i}");
                    }
                });
            }
        });
        let stats = guessing.stats();
        assert!(stats.accepted_tokens > 0 && stats.rewinds > 0, "{stats:?}");
        assert_eq!((stats.finished, stats.failed), (30, 0));
    }
}
