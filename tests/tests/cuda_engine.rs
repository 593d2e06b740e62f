//! The engine that serves, on the fake driver: between a step's plan and its summaries it asks the device for nothing, and 48 bytes a token
//! are all that comes back.

#[path = "../../worker/models/tests/support/mod.rs"]
mod support;

use std::sync::Arc;

use ds4_engine::{
    Engine, EngineConfig, EngineError, EngineHandle, Event, EventReceiver, GenerateRequest, LogitsWanted,
    SamplingParams, Vocabulary,
};
use ds4_kernels::cuda::CudaDevice;
use ds4_kernels::cuda::fatal;
use ds4_tests::calls::CallLog;
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
    let config = EngineConfig { context: 1024, max_batch: 16, event_capacity: 2 * TOKENS, ..EngineConfig::default() };
    let engine = Engine::new(device, model, Arc::new(NoText), config).unwrap().spawn().unwrap();
    let mut log = CallLog::open();
    log.new_calls();
    (engine, log)
}

fn request(i: usize, max_tokens: usize) -> GenerateRequest {
    GenerateRequest {
        id: format!("{i}"),
        // Prompts that have no beginning in common.
        prompt: (0..PROMPT).map(|k| u32::try_from(3 + i * 3 + k).unwrap()).collect(),
        max_tokens,
        sampling: SamplingParams::greedy(),
        stop: Vec::new(),
        format: None,
        logprobs: None,
        ignore_eos: true,
        logits: LogitsWanted::default(),
    }
}

/// Greedy answers to so many requests at once: how many tokens each had at its end, or why it failed.
fn serve(engine: &EngineHandle, requests: usize, tokens: usize) -> Vec<Result<usize, EngineError>> {
    let receivers: Vec<_> = (0..requests).map(|i| engine.submit(request(i, tokens)).unwrap()).collect();
    std::thread::scope(|scope| {
        let read = |mut receiver: EventReceiver| {
            let mut tokens = 0;
            loop {
                match receiver.blocking_recv().expect("an end") {
                    Event::Token { .. } => tokens += 1,
                    Event::Done { .. } => return Ok(tokens),
                    Event::Failed(e) => return Err(e),
                    _ => {}
                }
            }
        };
        let readers: Vec<_> = receivers.into_iter().map(|r| scope.spawn(move || read(r))).collect();
        readers.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// A card whose processes find the fixtures, and serve this model.
fn card(model: &str) -> Card {
    let card = Card::new().logged().with("FAKE_CUDA_PAGEABLE", 1).with("FAKE_CUDA_TEST_MODEL", model);
    card.with("DS4_FIXTURES", concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures"))
}

#[test]
fn a_served_token_costs_a_plan_graphs_and_one_summary() {
    let name = "a_served_token_costs_a_plan_graphs_and_one_summary";
    // A process each: the last engine's end would be among the calls of the next one.
    let Ok(model) = std::env::var("FAKE_CUDA_TEST_MODEL") else {
        MODELS.iter().for_each(|model| assert!(!card(model).is_here(name)));
        return;
    };
    let (engine, mut log) = engine(&model);
    for requests in [1, 16] {
        assert!(serve(&engine, requests, TOKENS).iter().all(|answer| matches!(answer, Ok(TOKENS))));
        let calls = log.new_calls();
        assert_eq!(calls.sum("cuMemcpyDtoHAsync_v2"), requests * TOKENS * SUMMARY, "{model}: all that came back");
        // A decode step of all requests: an address and three numbers a span, three numbers a row, one for each row of logits.
        let plan = requests * (8 + 3 * 4 + 3 * 4 + 4);
        let steps = calls.split("cuMemcpyHtoDAsync_v2");
        let full: Vec<_> = steps.iter().filter(|s| s.numbers("cuMemcpyHtoDAsync_v2") == [plan]).collect();
        assert!(full.len() > 20, "{model}: {} of {} steps of {requests} rows", full.len(), steps.len());
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

/// Memory that is refused while it serves ends the requests of a step and nothing else; a device that is lost ends the process.
#[test]
fn refused_memory_ends_requests_and_a_lost_device_the_process() {
    let name = "refused_memory_ends_requests_and_a_lost_device_the_process";
    if let Ok(model) = std::env::var("FAKE_CUDA_TEST_MODEL") {
        let (engine, _) = engine(&model);
        println!("serves");
        let mut failed = 0;
        for round in 0..3 {
            for answer in serve(&engine, 2, 20) {
                match answer {
                    Ok(tokens) => assert_eq!(tokens, 20, "round {round}"),
                    Err(EngineError::OutOfMemory(_)) => failed += 1,
                    Err(other) => panic!("{other}"),
                }
            }
        }
        println!("failed {failed}");
        assert!(failed <= 2, "requests of one step");
        return;
    }
    let all = card(MODELS[0]);
    assert_eq!(all.run_test(name).0, Some(0));
    let calls = all.calls();
    let allocations = ["cuMemAlloc_v2 ", "cuMemCreate ", "cuMemAddressReserve ", "cuMemHostAlloc "];
    let total = calls.lines().filter(|l| allocations.iter().any(|a| l.starts_with(a))).count();
    let (mut refused, mut failed) = (0, 0);
    for n in (1..=total).rev() {
        let card = card(MODELS[0]).with("DS4_CUDA_REFUSE", n);
        let (code, said) = card.run_test(name);
        // Back to the last allocation of its start.
        if !said.contains("serves") {
            break;
        }
        assert_eq!(code, Some(0), "{n} of {total}: {said}");
        // When requests meet decides how many there are.
        refused += usize::from(said.contains(&format!("DS4_CUDA_REFUSE={n}: cuMem")));
        failed += usize::from(!said.contains("failed 0"));
    }
    assert!(refused > 20 && failed > 10, "{refused} refused while it served, {failed} of them failed requests");

    let graphs = calls.lines().filter(|l| l.starts_with("cuGraphLaunch ")).count();
    let lost = card(MODELS[0]).with("FAKE_CUDA_FAIL", format!("cuGraphLaunch:{}:700", graphs / 2));
    let (code, said) = lost.run_test(name);
    assert!(code == Some(fatal::EXIT_CODE) && said.contains("serves"), "{said}");
    assert!(said.contains("cuGraphLaunch: CUDA_ERROR_ILLEGAL_ADDRESS (700)") && !said.contains("failed "), "{said}");
}
