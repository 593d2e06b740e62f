//! Scheduler tests over the mock model.

mod answers;
mod batching;
mod cancel;
mod failure;
mod logits;
mod pressure;
mod short;
mod speculation;
mod text;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use ds4_kernels::BatchPlan;

use crate::mock::{BeforeStep, MockDevice, MockModel, MockVocabulary};
use crate::{
    Engine, EngineConfig, EngineError, EngineHandle, EngineStats, Event, EventReceiver, FinishReason, GenerateRequest,
    LogitsWanted, SamplingParams, Timings,
};

const PATIENCE: Duration = Duration::from_secs(10);

fn start(model: MockModel, config: EngineConfig) -> EngineHandle {
    start_on(MockDevice::default(), model, config)
}

fn start_on(device: MockDevice, model: MockModel, config: EngineConfig) -> EngineHandle {
    Engine::new(device, Box::new(model), Arc::new(MockVocabulary), config).unwrap().spawn().unwrap()
}

fn small() -> EngineConfig {
    EngineConfig { context: 2048, max_batch: 4, max_queue: 8, ..EngineConfig::default() }
}

fn request(prompt: &[u32], max_tokens: usize) -> GenerateRequest {
    GenerateRequest {
        id: "test".into(),
        prompt: prompt.to_vec(),
        max_tokens,
        sampling: SamplingParams::greedy(),
        stop: Vec::new(),
        format: None,
        logprobs: None,
        ignore_eos: false,
        logits: LogitsWanted::default(),
    }
}

/// All that a request's receiver heard.
#[derive(Debug, Default)]
struct Heard {
    tokens: Vec<u32>,
    text: String,
    rows: Vec<(usize, Vec<f32>)>,
    end: Option<Result<(FinishReason, Timings), EngineError>>,
}

impl Heard {
    fn take(&mut self, event: Event) {
        match event {
            Event::Admitted => {}
            Event::Logits { position, row } => self.rows.push((position, row)),
            Event::Token { token, read, .. } => {
                self.tokens.push(token);
                self.text += &read.text();
            }
            Event::Done { read, reason, timings } => {
                self.text += &read.text();
                self.end = Some(Ok((reason, timings)));
            }
            Event::Failed(e) => self.end = Some(Err(e)),
        }
    }

    fn done(&self) -> (FinishReason, Timings) {
        self.end.clone().expect("an end").expect("not a failure")
    }

    fn error(&self) -> EngineError {
        self.end.clone().expect("an end").expect_err("a failure")
    }
}

fn hear(mut rx: EventReceiver) -> Heard {
    let mut heard = Heard::default();
    while let Some(event) = rx.blocking_recv() {
        heard.take(event);
    }
    heard
}

/// Serves one request on an engine of its own.
fn alone(request: GenerateRequest) -> Heard {
    hear(start(MockModel::hashing(), small()).submit(request).unwrap())
}

/// Waits until the counters satisfy `is`.
fn eventually(engine: &EngineHandle, what: &str, is: impl Fn(&EngineStats) -> bool) -> EngineStats {
    let end = Instant::now() + PATIENCE;
    loop {
        let stats = engine.stats();
        if is(&stats) {
            return stats;
        }
        assert!(Instant::now() < end, "{what}: {stats:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Holds every step of a model until the test lets it go. Dropping the gate lets all go.
struct Gate {
    plans: Receiver<BatchPlan>,
    permits: Sender<()>,
}

fn gate() -> (Gate, BeforeStep) {
    let (plan_tx, plans) = channel::<BatchPlan>();
    let (permits, permit_rx) = channel();
    let before: BeforeStep = Box::new(move |plan| {
        // Either end may be gone: then steps run freely.
        if plan_tx.send(plan.clone()).is_ok() {
            let _ = permit_rx.recv();
        }
        Ok(())
    });
    (Gate { plans, permits }, before)
}

impl Gate {
    /// The plan of the step that is now held.
    fn held(&self) -> BatchPlan {
        self.plans.recv_timeout(PATIENCE).expect("a step")
    }

    fn let_go(&self) {
        self.permits.send(()).expect("an engine");
    }
}
