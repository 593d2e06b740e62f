//! The engine: banks, batch plans, scheduler and sampler. One thread owns all of it.

pub mod request;

pub use request::{EngineError, Event, FinishReason, GenerateRequest, SamplingParams, Timings, TokenLogprob};
