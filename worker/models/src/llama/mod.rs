//! The llama architecture: LLaMA 1 and 2, SmolLM, SmolLM2 and whatever else says `general.architecture = llama` without
//! scaled RoPE or biases.

mod bind;
mod forward;
mod params;

pub use forward::Llama;
pub use params::LlamaParams;
