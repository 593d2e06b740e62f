//! DeepSeek V4 (Flash, PRO and small models of the same structure).
//!
//! Specification: the project's fact sheet on DeepSeek V4, sections 1 to 4.

mod attention;
mod bind;
mod block;
mod ffn;
mod forward;
mod mtp;
mod params;
mod session;
mod state;
mod steps;

pub use forward::DeepseekV4;
pub use mtp::{MtpAlignment, MtpSettings};
pub use params::{LayerKind, Params};
pub use steps::ATTENTION_ROWS;
