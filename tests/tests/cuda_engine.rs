//! The engine that serves, on the fake driver: between a step's plan and its summaries it asks the device for nothing, and 48 bytes a token
//! are all that comes back.

#[path = "../../worker/models/tests/support/mod.rs"]
mod support;

use std::sync::Arc;

use ds4_engine::{
    Engine, EngineConfig, EngineHandle, Event, GenerateRequest, LogitsWanted, SamplingParams, Vocabulary,
};
use ds4_kernels::cuda::CudaDevice;
use ds4_tests::calls::{CallLog, Calls};
use ds4_tests::card::Card;
use support::{fixture, weights};

const MODELS: [&str; 2] = ["deepseek_v4/tiny-v4.gguf", "tiny-llama/tiny-llama.gguf"];
const PROMPT: usize = 20;
const TOKENS: usize = 400;
/// Two sums, a margin, two candidates, a threshold and what aligns it (`SampleHead` in sample.cu).
const SUMMARY: usize = 48;

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

fn engine(model: &str) -> (EngineHandle, CallLog) {
    let device = CudaDevice::open(0).unwrap();
    let model = ds4_models::build(&device, &weights(&fixture(model))).unwrap();
    let config = EngineConfig { context: 1024, max_batch: 16, ..EngineConfig::default() };
    let engine = Engine::new(device, model, Arc::new(NoText), config).unwrap().spawn().unwrap();
    let mut log = CallLog::open();
    log.new_calls();
    (engine, log)
}

/// Greedy answers to so many requests at once; calls of the driver until the last one ended.
fn serve(engine: &EngineHandle, log: &mut CallLog, requests: usize) -> Calls {
    let receivers: Vec<_> = (0..requests)
        .map(|i| {
            let sampling = SamplingParams::greedy();
            // Prompts that have no beginning in common.
            let prompt = (0..PROMPT).map(|k| u32::try_from(3 + i * 3 + k).unwrap()).collect();
            let (stop, format, logprobs, logits) = (Vec::new(), None, None, LogitsWanted::default());
            let id = format!("{i}");
            engine
                .submit(GenerateRequest {
                    id,
                    prompt,
                    max_tokens: TOKENS,
                    sampling,
                    stop,
                    format,
                    logprobs,
                    ignore_eos: true,
                    logits,
                })
                .unwrap()
        })
        .collect();
    // Each has a reader: an answer that nobody reads waits, and its row with it.
    std::thread::scope(|scope| {
        for mut receiver in receivers {
            scope.spawn(move || {
                let mut tokens = 0;
                loop {
                    match receiver.blocking_recv() {
                        Some(Event::Token { .. }) => tokens += 1,
                        Some(Event::Done { .. }) => break,
                        Some(Event::Failed(e)) => panic!("{e}"),
                        Some(_) => {}
                        None => panic!("no end"),
                    }
                }
                assert_eq!(tokens, TOKENS);
            });
        }
    });
    log.new_calls()
}

#[test]
fn a_served_token_costs_a_plan_graphs_and_one_summary() {
    let name = "a_served_token_costs_a_plan_graphs_and_one_summary";
    // A process each: the last engine's end would be among the calls of the next one.
    let Ok(model) = std::env::var("MODEL") else {
        for model in MODELS {
            let card = Card::new().logged().with("FAKE_CUDA_PAGEABLE", 1).with("MODEL", model);
            card.with("DS4_FIXTURES", concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures")).is_here(name);
        }
        return;
    };
    let (engine, mut log) = engine(&model);
    for requests in [1, 16] {
        let calls = serve(&engine, &mut log, requests);
        assert_eq!(calls.sum("cuMemcpyDtoHAsync_v2"), requests * TOKENS * SUMMARY, "{model}: all that came back");
        // A decode step of all requests: an address and three numbers a span, three numbers a row, one for each row of logits.
        let plan = requests * (8 + 3 * 4 + 3 * 4 + 4);
        let steps = calls.split("cuMemcpyHtoDAsync_v2");
        let full: Vec<_> = steps.iter().filter(|s| s.numbers("cuMemcpyHtoDAsync_v2") == [plan]).collect();
        assert!(full.len() > TOKENS / 4, "{model}: {} of {} steps of {requests} rows", full.len(), steps.len());
        // The first ones of their kind take memory and are recorded.
        for step in &full[4..full.len() - 1] {
            step.only(&[
                "cuMemcpyHtoDAsync_v2",
                "cuEventRecord",
                "cuEventSynchronize",
                "cuGraphLaunch",
                "cuLaunchKernelEx",
                "cuMemcpyDtoHAsync_v2",
                "cuStreamSynchronize",
            ]);
            assert_eq!(step.numbers("cuMemcpyDtoHAsync_v2"), [requests * SUMMARY]);
            assert_eq!((step.sum("cuEventSynchronize"), step.count("cuStreamSynchronize")), (0, 1), "{step:?}");
            let alone: Vec<_> = step.of("cuLaunchKernelEx").collect();
            // What is too short for a graph, and the sampler.
            assert!(alone.len() <= 8 && alone.last() == Some(&"sample_best"), "{alone:?}");
            assert!(step.sum("cuGraphLaunch") > 40, "{step:?}");
        }
    }
}
