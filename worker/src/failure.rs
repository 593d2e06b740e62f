//! Why a worker ends: a sentence, and the exit code that tells supervisors what kind it is.

use std::io;

use ds4_attach::AttachError;
use ds4_engine::{EngineError, ProbeError};
use ds4_kernels::DeviceError;
use ds4_kernels::cuda::driver::CudaError;
use ds4_models::ModelError;
use ds4_os::mapping::MapError;
use ds4_settings::{EXIT_MEMORY, EXIT_MODEL, EXIT_PEER, EXIT_SELF_TEST, EXIT_USAGE};
use ds4_text::TextError;

/// A reason to end, with its exit code.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// Exit code.
    pub exit: u8,
    /// What happened and what to do.
    pub message: String,
}

impl Failure {
    fn new(exit: u8, message: impl ToString) -> Self {
        Self { exit, message: message.to_string() }
    }

    /// Bad configuration, or a resource that the configuration names is not to be had.
    pub fn usage(message: impl ToString) -> Self {
        Self::new(EXIT_USAGE, message)
    }

    /// Not enough memory.
    pub fn memory(message: impl ToString) -> Self {
        Self::new(EXIT_MEMORY, message)
    }

    /// A check of what this worker would compute with failed.
    pub fn self_test(message: impl ToString) -> Self {
        Self::new(EXIT_SELF_TEST, message)
    }

    /// The model, or what was given to it, is not usable.
    pub fn model(message: impl ToString) -> Self {
        Self::new(EXIT_MODEL, message)
    }

    /// Anything without a code of its own.
    pub fn other(message: impl ToString) -> Self {
        Self::new(1, message)
    }
}

impl From<AttachError> for Failure {
    fn from(e: AttachError) -> Self {
        let message = format!("{e} [{}]", e.code());
        match &e {
            AttachError::Map { source: MapError::Map { source, .. }, .. }
                if source.kind() == io::ErrorKind::OutOfMemory =>
            {
                Self::memory(message)
            }
            AttachError::Device { source: CudaError::OutOfMemory { .. }, .. } => Self::memory(message),
            e if e.is_about_the_model() => Self::new(EXIT_MODEL, message),
            _ => Self::new(EXIT_PEER, message),
        }
    }
}

impl From<CudaError> for Failure {
    fn from(e: CudaError) -> Self {
        let message = format!("{e} [{}]", e.code());
        match e {
            CudaError::OutOfMemory { .. } => Self::memory(message),
            e if e.is_absence() => Self::usage(message),
            _ => Self::other(message),
        }
    }
}

impl From<TextError> for Failure {
    fn from(e: TextError) -> Self {
        Self::new(EXIT_MODEL, format!("the model is refused: {e}"))
    }
}

impl From<ModelError> for Failure {
    fn from(e: ModelError) -> Self {
        match e {
            ModelError::Device(DeviceError::OutOfMemory { .. }) => Self::memory(e),
            e => Self::new(EXIT_MODEL, format!("the model is refused: {e}")),
        }
    }
}

impl From<EngineError> for Failure {
    fn from(e: EngineError) -> Self {
        match e {
            EngineError::OutOfMemory(_) => Self::memory(e),
            e => Self::other(e),
        }
    }
}

impl From<ProbeError> for Failure {
    fn from(e: ProbeError) -> Self {
        match e {
            ProbeError::NoPrompt { .. } => Self::usage(e),
            ProbeError::OutOfMemory(_) => Self::memory(e),
            e => Self::new(EXIT_SELF_TEST, e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn every_kind_has_its_exit_code() {
        let refused =
            |code: &str| AttachError::Refused { code: code.into(), sentence: "no".into(), retry_after: Duration::ZERO };
        let cases: Vec<(Failure, u8)> = vec![
            (refused("unknown_model").into(), 3),
            (refused("content_mismatch").into(), 4),
            (AttachError::OwnerClosed.into(), 3),
            (TextError::MissingKey { key: "k" }.into(), 4),
            (ModelError::Bind("no".into()).into(), 4),
            (ModelError::Device(DeviceError::OutOfMemory { what: "x", missing: 1 }).into(), 5),
            (EngineError::OutOfMemory("banks".into()).into(), 5),
            (ProbeError::Constant { vocab: 1 }.into(), 6),
            (ProbeError::NoPrompt { context: 1 }.into(), 2),
            (ProbeError::OutOfMemory("activations".into()).into(), 5),
            (EngineError::Internal("x".into()).into(), 1),
        ];
        for (failure, exit) in cases {
            assert_eq!(failure.exit, exit, "{failure}");
        }
    }
}
