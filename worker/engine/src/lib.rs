//! The engine: banks, batch plans, scheduler and sampler. One thread owns all of it.
//!
//! [`Engine::new`] → [`Engine::probe`] → [`Engine::spawn`] gives an [`EngineHandle`]; [`EngineHandle::submit`] gives an
//! [`EventReceiver`] whose events end with [`Event::Done`] or [`Event::Failed`], and whose drop cancels the request.

mod active;
mod banks;
mod channel;
mod checkpoints;
mod config;
mod drafting;
mod engine;
mod handle;
mod logprobs;
mod params;
mod probe;
pub mod request;
mod row;
pub mod sampler;
mod scheduler;
pub mod short;
mod stats;
mod vocab;

#[cfg(any(test, feature = "mock"))]
pub mod mock;

pub use ds4_kernels::math::select;

pub use channel::EventReceiver;
pub use config::EngineConfig;
pub use engine::Engine;
pub use handle::{EngineHandle, EngineState};
pub use logprobs::LogSoftmax;
pub use probe::{ProbeError, ProbeReport};
pub use request::{
    EngineError, Event, FinishReason, GenerateRequest, LogitsWanted, SamplingParams, Timings, TokenLogprob,
};
pub use stats::{EngineStats, STEP_BOUNDS};
pub use vocab::Vocabulary;

#[cfg(test)]
mod tests;
