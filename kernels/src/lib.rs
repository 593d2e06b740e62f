//! Arithmetic: quant block formats, the op set and its implementations.

pub mod bench;
pub mod conformance;
pub mod cpu;
#[cfg(feature = "cuda-driver")]
pub mod cuda;
pub mod device;
pub mod math;
pub mod ops;
pub mod plan;
pub mod quant;
pub mod state;
pub mod tiles;

pub use cpu::CpuDevice;
pub use device::{Attention, Device, DeviceError, DeviceTensor, Rope, RopeKind, TensorSource};
pub use plan::{BatchPlan, Span};
pub use state::{StateKind, StateSpec, StateType};
