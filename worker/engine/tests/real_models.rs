//! The engine over real models on the CPU device: what serving many at once must not change.

#[path = "../../models/tests/support/mod.rs"]
mod support;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ds4_engine::{
    Engine, EngineConfig, EngineHandle, Event, FinishReason, GenerateRequest, LogitsWanted, SamplingParams, Timings,
    Vocabulary,
};
use ds4_kernels::CpuDevice;
use support::{fixture, json, starter_path, tokens};

/// These tests compare token ids; text has its own tests.
struct NoText;

impl Vocabulary for NoText {
    fn token_bytes(&self, _: u32) -> &[u8] {
        &[]
    }
    fn is_eog(&self, _: u32) -> bool {
        false
    }
    fn is_control(&self, token: u32) -> bool {
        token < 3
    }
}

fn engine(path: &Path, config: EngineConfig) -> Engine<CpuDevice> {
    let device = CpuDevice::default();
    let model = ds4_models::build(&device, &support::weights(path)).unwrap();
    Engine::new(device, model, Arc::new(NoText), config).unwrap()
}

fn tiny(config: EngineConfig) -> EngineHandle {
    engine(&fixture("tiny-llama/tiny-llama.gguf"), config).spawn().unwrap()
}

fn request(prompt: Vec<u32>, max_tokens: usize) -> GenerateRequest {
    GenerateRequest {
        id: "test".into(),
        prompt,
        max_tokens,
        sampling: SamplingParams::greedy(),
        stop: Vec::new(),
        format: None,
        logprobs: None,
        ignore_eos: false,
        logits: LogitsWanted::default(),
    }
}

/// Serves a request; `leave_after` drops the receiver after so many tokens.
fn serve(engine: &EngineHandle, request: GenerateRequest, leave_after: usize) -> (Vec<u32>, Option<Timings>) {
    let mut rx = engine.submit(request).unwrap();
    let mut got = Vec::new();
    while got.len() < leave_after {
        match rx.blocking_recv() {
            Some(Event::Token { token, .. }) => got.push(token),
            Some(Event::Done { reason, timings, .. }) => {
                assert_eq!(reason, FinishReason::Length);
                return (got, Some(timings));
            }
            Some(Event::Failed(e)) => panic!("{e}"),
            Some(Event::Admitted | Event::Logits { .. }) => {}
            None => break,
        }
    }
    (got, None)
}

/// A deterministic prompt of printable tokens of the tiny model.
fn prompt(i: u32) -> Vec<u32> {
    let len = 1 + (i * 29) % 180;
    let mut x = u64::from(i) + 1;
    (0..len)
        .map(|_| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            3 + u32::try_from((x >> 33) % 509).unwrap()
        })
        .collect()
}

#[test]
fn sixty_four_simultaneous_requests_each_as_if_served_alone() {
    let length = |i: u32| 8 + (i as usize * 7) % 40;
    // Alone, without prefix reuse: a fresh bank each time.
    let lone = tiny(EngineConfig { max_batch: 1, idle_keep_bytes: Some(0), ..EngineConfig::default() });
    let alone: Vec<Vec<u32>> = (0..64).map(|i| serve(&lone, request(prompt(i), length(i)), usize::MAX).0).collect();
    assert_eq!(lone.stats().prefix_hits, 0);

    let config = EngineConfig { max_batch: 12, prefill_chunk: 48, prefill_chunk_busy: 20, ..EngineConfig::default() };
    let together = tiny(config);
    std::thread::scope(|scope| {
        for i in 0..64u32 {
            let (together, alone) = (&together, &alone);
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(u64::from(i % 4) * 8));
                let leaves = if i % 6 == 5 { i as usize % 5 } else { usize::MAX };
                let (got, timings) = serve(together, request(prompt(i), length(i)), leaves);
                assert_eq!(got, alone[i as usize][..got.len()], "request {i}");
                if leaves == usize::MAX {
                    assert_eq!(got.len(), length(i));
                    assert_eq!(timings.unwrap().completion_tokens, length(i));
                }
            });
        }
    });
    // A second round on the same banks, whose rows are now reused where prompts repeat.
    for i in [0, 17, 40, 63] {
        assert_eq!(serve(&together, request(prompt(i), length(i)), usize::MAX).0, alone[i as usize]);
    }
    let stats = together.stats();
    assert_eq!(stats.requests, 68);
    assert_eq!(stats.failed, 0);
}

#[test]
fn the_starter_models_eight_prompts_at_once_equal_the_reference() {
    let config = EngineConfig { prefill_chunk: 64, prefill_chunk_busy: 7, context: 2048, ..EngineConfig::default() };
    let mut engine = engine(&starter_path(), config);
    let head = json("smollm2/logits.json");
    let prompts: Vec<(Vec<u32>, Vec<u32>)> =
        head["prompts"].as_array().unwrap().iter().map(|p| (tokens(&p["tokens"]), tokens(&p["greedy"]))).collect();
    let report = engine.probe(&prompts[0].0[..4]).unwrap();
    println!("probe {report:?}");
    let engine = engine.spawn().unwrap();
    std::thread::scope(|scope| {
        for (prompt, greedy) in &prompts {
            let engine = &engine;
            scope.spawn(move || assert_eq!(serve(engine, request(prompt.clone(), 64), usize::MAX).0, *greedy));
        }
    });
    let stats = engine.stats();
    assert_eq!(stats.decode_tokens, 8 * 64);
    // 46,080 bytes of K and V a token: 2 slots, 30 layers, 192 halves.
    assert!(stats.bank_bytes < 150 << 20, "{} bytes in banks", stats.bank_bytes);

    // The next turn of a conversation computes only what is new, to the same result.
    let (first, greedy) = &prompts[0];
    let mut turn = first.clone();
    turn.extend(&greedy[..40]);
    let (got, timings) = serve(&engine, request(turn.clone(), 20), usize::MAX);
    assert_eq!(got, greedy[40..60]);
    assert_eq!(timings.unwrap().cached_tokens, turn.len() - 1);
}
