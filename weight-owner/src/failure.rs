//! One kind of failure for everything that a load or a start can die of: a stable code, a sentence, an exit code.

use ds4_kernels::cuda::driver::CudaError;
use ds4_manifests::GgufError;
use ds4_os::memfd::MemfdError;
use ds4_settings::{EXIT_MEMORY, EXIT_MODEL, EXIT_USAGE};

/// Exit code for what has no code of its own.
pub const EXIT_OTHER: u8 = 1;

/// Why something failed. It travels from the loader to the daemon and on to clients.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, serde::Serialize, serde::Deserialize)]
#[error("{message} [{code}]")]
pub struct Failure {
    /// Stable, e.g. `truncated_file`.
    pub code: String,
    /// A sentence that names the offending value and the lever.
    pub message: String,
    /// Exit code of a process that ends because of it.
    pub exit: u8,
}

impl Failure {
    /// A failure with a given exit code.
    pub fn new(exit: u8, code: &str, message: impl Into<String>) -> Self {
        Self { code: code.into(), message: message.into(), exit }
    }

    /// The model's file is bad or refused.
    pub fn model(code: &str, message: impl Into<String>) -> Self {
        Self::new(EXIT_MODEL, code, message)
    }

    /// Not enough memory.
    pub fn memory(message: impl Into<String>) -> Self {
        Self::new(EXIT_MEMORY, "not_enough_memory", message)
    }

    /// Bad configuration or environment of a start.
    pub fn usage(code: &str, message: impl Into<String>) -> Self {
        Self::new(EXIT_USAGE, code, message)
    }

    /// Anything else.
    pub fn other(code: &str, message: impl Into<String>) -> Self {
        Self::new(EXIT_OTHER, code, message)
    }
}

impl From<GgufError> for Failure {
    fn from(e: GgufError) -> Self {
        Self::model(e.code(), e.to_string())
    }
}

impl From<CudaError> for Failure {
    fn from(e: CudaError) -> Self {
        match e {
            CudaError::OutOfMemory { .. } => Self::memory(e.to_string()),
            e if e.is_absence() => Self::usage(e.code(), e.to_string()),
            e => Self::other(e.code(), e.to_string()),
        }
    }
}

impl From<MemfdError> for Failure {
    fn from(e: MemfdError) -> Self {
        match e {
            MemfdError::Allocate { .. } | MemfdError::TooLong(_) => Self::memory(e.to_string()),
            _ => Self::other("memfd", e.to_string()),
        }
    }
}
