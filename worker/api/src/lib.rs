//! The HTTP side of a worker: OpenAI's chat completions and completions, models, health, metrics, stats.
//!
//! There is one internal request ([`job::Job`]) and one internal event stream (the engine's). A surface is two pure
//! projections of them: its parser ([`chat`], [`completions`]) and its wire ([`chat_wire`], [`completions_wire`]).
//! [`run`] joins them; [`server`] owns connections, deadlines and request ids.

// They panic where nobody can read them: `ds4_os::say!` and `ds4_os::show!` do not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

use std::sync::Arc;

use tokio::sync::{Semaphore, watch};

pub mod backend;
pub mod body;
pub mod chat;
pub mod chat_wire;
pub mod completions;
pub mod completions_wire;
pub mod conn;
pub mod error;
pub mod hosts;
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
pub use hosts::Hosts;
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
    parsing: Arc<Semaphore>,
    grammars: Arc<Semaphore>,
    phase: watch::Sender<Phase>,
    /// Accepted requests that are not the engine's yet.
    entering: watch::Sender<usize>,
}

/// A request on its way to the engine.
pub(crate) struct Entering(Arc<Api>);

impl Drop for Entering {
    fn drop(&mut self) {
        self.0.entering.send_modify(|n| *n -= 1);
    }
}

impl Api {
    /// An API over `backend`, ready to serve.
    pub fn new(backend: Arc<dyn Backend>, config: ApiConfig) -> Arc<Self> {
        Arc::new(Self {
            metrics: Arc::new(metrics::Metrics::new(Arc::clone(&backend))),
            budget: body::Budget::new(config.max_body_total),
            parsing: Arc::new(Semaphore::new(config.max_parsing)),
            grammars: Arc::new(Semaphore::new(config.max_grammars)),
            phase: watch::Sender::new(Phase::Ready),
            entering: watch::Sender::new(0),
            backend,
            config,
        })
    }

    /// The phase, now and as it changes.
    pub fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Counts a request that is on its way to the engine, or says why there is none.
    pub(crate) fn enter(self: &Arc<Self>) -> Result<Entering, Phase> {
        // Counted before the phase is looked at: who changes the phase and then waits misses none.
        self.entering.send_modify(|n| *n += 1);
        let entering = Entering(Arc::clone(self));
        match *self.phase.borrow() {
            Phase::Ready => Ok(entering),
            phase => Err(phase),
        }
    }

    /// Completes when the engine has all requests that were accepted before the phase changed, or when one of them takes its time.
    pub async fn entered(&self) {
        let mut entering = self.entering.subscribe();
        let none = entering.wait_for(|n| *n == 0);
        // Who waits longer has been told nothing yet, so that another worker can have the request.
        let _ = tokio::time::timeout(server::DRAIN_PATIENCE, none).await.map(drop);
    }

    /// Changes the phase. A server that is told to drain ends after its last connection.
    pub fn set_phase(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }
}
