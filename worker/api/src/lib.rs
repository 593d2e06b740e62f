//! The HTTP side of a worker: OpenAI's chat completions and completions, models, health, metrics, stats.
//!
//! There is one internal request ([`job::Job`]) and one internal event stream (the engine's). A surface is two pure
//! projections of them: its parser ([`chat`], [`completions`]) and its wire ([`chat_wire`], [`completions_wire`]).
//! [`run`] joins them; [`server`] owns connections, deadlines and request ids.

use std::sync::Arc;

use tokio::sync::watch;

pub mod backend;
pub mod body;
pub mod chat;
pub mod chat_wire;
pub mod completions;
pub mod completions_wire;
pub mod conn;
pub mod error;
pub mod job;
pub mod json;
pub mod messages;
pub mod metrics;
pub mod params;
pub mod routes;
pub mod run;
pub mod server;
pub mod thinking;
pub mod tools;
pub mod track;
pub mod wire;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use backend::{ApiConfig, Backend, Events, ModelInfo, Prompt, PromptError};
pub use server::serve;

/// Where the worker is in its life, as its clients see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not yet.
    Starting,
    /// Serves.
    Ready,
    /// Refuses new work and finishes what runs.
    Draining,
}

/// What all connections share.
pub struct Api {
    backend: Arc<dyn Backend>,
    config: ApiConfig,
    metrics: Arc<metrics::Metrics>,
    budget: body::Budget,
    phase: watch::Sender<Phase>,
}

impl Api {
    /// An API over `backend`, ready to serve.
    pub fn new(backend: Arc<dyn Backend>, config: ApiConfig) -> Arc<Self> {
        Arc::new(Self {
            metrics: Arc::new(metrics::Metrics::new(Arc::clone(&backend))),
            budget: body::Budget::new(config.max_body_total),
            phase: watch::Sender::new(Phase::Ready),
            backend,
            config,
        })
    }

    /// The phase, now and as it changes.
    pub fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Changes the phase. A server that is told to drain ends after its last connection.
    pub fn set_phase(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }
}
