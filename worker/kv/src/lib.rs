//! Saved sessions: the DSV4 payload (a sequence's state) and the KVC container that it travels in.
//!
//! Both are pure codecs: bytes in, checked values out. Nothing live is touched before everything was verified.

pub mod container;
pub mod payload;
mod wire;

pub use container::{Container, ContainerError, Reason};
pub use payload::{CompressorState, LayerState, Payload, PayloadError, PayloadShape};
