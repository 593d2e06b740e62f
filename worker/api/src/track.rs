//! One request's life: where it stands, its completion line in the log, its share of the metrics.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ds4_engine::Timings;

use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::wire::ms;

/// Where a request stands; a client that leaves is counted under it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub enum Stage {
    /// Its body is being received or parsed.
    Receiving,
    /// It waits for a bank.
    Queued,
    /// Its prompt is being computed.
    Prefill,
    /// It generates.
    Decode,
}

impl Stage {
    fn as_str(self) -> &'static str {
        match self {
            Self::Receiving => "receiving",
            Self::Queued => "queued",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Follows one request. Whatever way it ends, exactly one completion line is logged; a tracker that is dropped without
/// an end belonged to a client that left.
#[derive(Debug)]
pub struct Tracker {
    metrics: Arc<Metrics>,
    id: String,
    surface: &'static str,
    stream: bool,
    started: Instant,
    stage: Stage,
    prompt: usize,
    completion: usize,
    cached: usize,
    queued: Duration,
    ttft: Option<Duration>,
    last_token: Vec<Option<Instant>>,
    decode: Duration,
    ended: bool,
}

impl Tracker {
    /// A request that just arrived.
    pub fn new(metrics: Arc<Metrics>, id: String, surface: &'static str) -> Self {
        metrics.in_flight.inc();
        Self {
            metrics,
            id,
            surface,
            stream: false,
            started: Instant::now(),
            stage: Stage::Receiving,
            prompt: 0,
            completion: 0,
            cached: 0,
            queued: Duration::ZERO,
            ttft: None,
            last_token: Vec::new(),
            decode: Duration::ZERO,
            ended: false,
        }
    }

    /// The request's id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// When it arrived.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// It was submitted.
    pub fn submitted(&mut self, prompt: usize, choices: usize, stream: bool) {
        self.stage = Stage::Queued;
        self.prompt = prompt;
        self.stream = stream;
        self.last_token = vec![None; choices];
    }

    /// A choice left the queue.
    pub fn admitted(&mut self) {
        if self.stage == Stage::Queued {
            self.stage = Stage::Prefill;
        }
    }

    /// A choice got a token.
    pub fn token(&mut self, index: usize) {
        let now = Instant::now();
        self.stage = Stage::Decode;
        self.completion += 1;
        if self.ttft.is_none() {
            let took = now - self.started;
            self.ttft = Some(took);
            self.metrics.first_token(self.surface, took);
        }
        if let Some(before) = self.last_token.get_mut(index).and_then(|last| last.replace(now)) {
            self.metrics.next_token(self.surface, now - before);
        }
    }

    /// A choice ended.
    pub fn choice_done(&mut self, timings: &Timings) {
        self.metrics.queued(self.surface, timings.queued);
        self.cached = self.cached.max(timings.cached_tokens);
        self.queued = self.queued.max(timings.queued);
        self.decode = self.decode.max(timings.decode);
    }

    /// The request ended well, `completion` being the engine's count of tokens.
    pub fn finish(&mut self, reason: &'static str, completion: usize) {
        self.completion = completion;
        self.end(200, reason);
    }

    /// The request ended in an error; after the head was sent the status that the client saw was 200.
    pub fn fail(&mut self, error: &ApiError) {
        self.end(error.status.as_u16(), error.code);
    }

    fn end(&mut self, status: u16, outcome: &'static str) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let total = self.started.elapsed();
        self.metrics.in_flight.dec();
        self.metrics.ended(self.surface, status, outcome, total);
        // Cancelled requests have no count of the engine's: there the times at which tokens came decide.
        let seen = || Some(*self.last_token.iter().flatten().max()? - (self.started + self.ttft?));
        let decode = if self.decode.is_zero() { seen().unwrap_or_default() } else { self.decode };
        let tok_s = (!decode.is_zero()).then(|| {
            let tokens = u32::try_from(self.completion.saturating_sub(self.last_token.len())).unwrap_or(u32::MAX);
            (f64::from(tokens) / decode.as_secs_f64() * 10.0).round() / 10.0
        });
        tracing::info!(
            target: "ds4::request",
            id = %self.id,
            surface = self.surface,
            stream = self.stream,
            status,
            outcome,
            stage = self.stage.as_str(),
            prompt = self.prompt,
            cached = self.cached,
            completion = self.completion,
            queued_ms = ms(self.queued),
            ttft_ms = self.ttft.map(ms),
            total_ms = ms(total),
            tok_s,
            "request"
        );
    }
}

impl Drop for Tracker {
    fn drop(&mut self) {
        if !self.ended {
            self.metrics.cancelled(self.stage.as_str());
            self.end(499, "cancelled");
        }
    }
}
