//! `/metrics`: what the HTTP side counts, and what the engine counts, as OpenMetrics text. No model call is made for it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ds4_engine::EngineStats;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::backend::Backend;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RequestLabels {
    surface: &'static str,
    status: u16,
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct SurfaceLabels {
    surface: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StageLabels {
    stage: &'static str,
}

/// The HTTP side's own counters.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    cancelled: Family<StageLabels, Counter>,
    ttft: Family<SurfaceLabels, Histogram>,
    inter_token: Family<SurfaceLabels, Histogram>,
    total: Family<SurfaceLabels, Histogram>,
    queued: Family<SurfaceLabels, Histogram>,
    /// Open connections.
    pub connections: Gauge,
    /// Generation requests being served.
    pub in_flight: Gauge,
}

fn seconds(start: f64) -> Histogram {
    // Factor 2 over 16 buckets: 1 ms … 32 s, or 5 ms … 160 s.
    Histogram::new(exponential_buckets(start, 2.0, 16))
}

impl Metrics {
    /// Counters of a server before `backend`.
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        let fine: fn() -> Histogram = || seconds(0.001);
        let coarse: fn() -> Histogram = || seconds(0.005);
        let mut registry = Registry::with_prefix("ds4");
        let requests = Family::default();
        let cancelled = Family::default();
        let ttft = Family::new_with_constructor(coarse);
        let inter_token = Family::new_with_constructor(fine);
        let total = Family::new_with_constructor(coarse);
        let queued = Family::new_with_constructor(coarse);
        let connections = Gauge::default();
        let in_flight = Gauge::default();
        registry.register(
            "requests",
            "Generation requests by surface, HTTP status (499: the client left) and outcome",
            requests.clone(),
        );
        registry.register(
            "http_cancelled",
            "Generation requests whose client left, by the stage that they were in",
            cancelled.clone(),
        );
        registry.register("ttft_seconds", "From the request's arrival to its first token", ttft.clone());
        registry.register("inter_token_seconds", "Between consecutive tokens of a choice", inter_token.clone());
        registry.register("request_seconds", "From the request's arrival to its end", total.clone());
        registry.register("queued_seconds", "From submission to admission", queued.clone());
        registry.register("http_connections", "Open connections", connections.clone());
        registry.register("http_in_flight", "Generation requests being served", in_flight.clone());
        registry.register_collector(Box::new(EngineCollector(backend)));
        Self { registry, requests, cancelled, ttft, inter_token, total, queued, connections, in_flight }
    }

    /// OpenMetrics text.
    pub fn encode(&self) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut out, &self.registry);
        out
    }

    /// Counts a request's end.
    pub fn ended(&self, surface: &'static str, status: u16, outcome: &'static str, took: Duration) {
        self.requests.get_or_create(&RequestLabels { surface, status, outcome }).inc();
        self.total.get_or_create(&SurfaceLabels { surface }).observe(took.as_secs_f64());
    }

    /// Counts a client that left.
    pub fn cancelled(&self, stage: &'static str) {
        self.cancelled.get_or_create(&StageLabels { stage }).inc();
    }

    /// Records a time to first token.
    pub fn first_token(&self, surface: &'static str, took: Duration) {
        self.ttft.get_or_create(&SurfaceLabels { surface }).observe(took.as_secs_f64());
    }

    /// Records the gap before a later token.
    pub fn next_token(&self, surface: &'static str, gap: Duration) {
        self.inter_token.get_or_create(&SurfaceLabels { surface }).observe(gap.as_secs_f64());
    }

    /// Records a wait for admission.
    pub fn queued(&self, surface: &'static str, took: Duration) {
        self.queued.get_or_create(&SurfaceLabels { surface }).observe(took.as_secs_f64());
    }
}

/// Reads the engine's counters at every scrape.
struct EngineCollector(Arc<dyn Backend>);

impl fmt::Debug for EngineCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EngineCollector")
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ModelLabels {
    model: String,
    family: String,
    blake3: String,
    epoch: u64,
    device: String,
}

impl Collector for EngineCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let s = self.0.stats();
        for (name, help, value) in gauges(&s) {
            let metric = ConstGauge::new(value);
            metric.encode(encoder.encode_descriptor(name, help, None, metric.metric_type())?)?;
        }
        for (name, help, value) in counters(&s) {
            let metric = ConstCounter::new(value);
            metric.encode(encoder.encode_descriptor(name, help, None, metric.metric_type())?)?;
        }
        let by_stage = [("queued", s.reaped), ("prefill", s.cancelled_prefill), ("decode", s.cancelled_decode)];
        let kind = ConstCounter::new(0u64).metric_type();
        let mut family = encoder.encode_descriptor(
            "engine_cancelled",
            "Sequences reaped because their client left, by stage",
            None,
            kind,
        )?;
        for (stage, value) in by_stage {
            ConstCounter::new(value).encode(family.encode_family(&StageLabels { stage })?)?;
        }
        let m = self.0.model();
        let labels = ModelLabels {
            model: m.name.clone(),
            family: m.family.clone(),
            blake3: m.blake3.clone(),
            epoch: m.epoch,
            device: m.device.clone(),
        };
        let one = ConstGauge::new(1i64);
        let mut info =
            encoder.encode_descriptor("model_served", "Always 1: what is served", None, one.metric_type())?;
        one.encode(info.encode_family(&labels)?)?;
        Ok(())
    }
}

fn gauges(s: &EngineStats) -> [(&'static str, &'static str, f64); 7] {
    [
        ("engine_running", "Sequences that hold a bank", count(s.running)),
        ("engine_queue_depth", "Sequences waiting for a bank", count(s.queued)),
        ("engine_paused", "Running sequences whose client reads too slowly", count(s.paused)),
        ("engine_bank_bytes", "Bytes committed by all banks, checkpoints included", count(s.bank_bytes)),
        ("engine_checkpoint_bytes", "Bytes of checkpoints", count(s.checkpoint_bytes)),
        ("engine_idle_banks", "Banks that keep an ended sequence for reuse", count(s.idle_banks)),
        (
            "engine_decode_tokens_per_second",
            "Tokens generated per second over the last busy second",
            s.decode_tokens_per_second,
        ),
    ]
}

fn counters(s: &EngineStats) -> [(&'static str, &'static str, f64); 14] {
    [
        ("engine_sequences", "Sequences accepted", total(s.requests)),
        ("engine_finished", "Sequences that ended well", total(s.finished)),
        ("engine_failed", "Sequences that failed after they were accepted", total(s.failed)),
        ("engine_refused", "Sequences refused because the queue was full", total(s.refused)),
        ("engine_stalled", "Sequences cancelled because their client stopped reading", total(s.stalled)),
        ("engine_prefill_tokens", "Prompt tokens computed", total(s.prefill_tokens)),
        ("engine_decode_tokens", "Tokens generated", total(s.decode_tokens)),
        ("engine_drafted_tokens", "Tokens guessed ahead", total(s.drafted_tokens)),
        ("engine_accepted_tokens", "Tokens guessed ahead that came true", total(s.accepted_tokens)),
        ("engine_prefix_hits", "Admissions that reused a prefix", total(s.prefix_hits)),
        ("engine_rewinds", "Admissions that took a bank back to a checkpoint", total(s.rewinds)),
        ("engine_cached_tokens", "Prompt tokens that were not computed anew", total(s.cached_tokens)),
        ("engine_steps", "Batch steps run", total(s.steps)),
        ("engine_step_seconds", "Time spent in batch steps", s.step_seconds),
    ]
}

#[allow(clippy::cast_precision_loss, reason = "metrics are f64; counts stay far below 2^52")]
fn count(n: usize) -> f64 {
    n as f64
}

#[allow(clippy::cast_precision_loss, reason = "metrics are f64; counts stay far below 2^52")]
fn total(n: u64) -> f64 {
    n as f64
}
