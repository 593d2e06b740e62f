//! Why an attach failed: each with a stable code and a sentence that says what to do.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ds4_kernels::cuda::driver::CudaError;
use ds4_manifests::ManifestError;
use ds4_os::mapping::MapError;
use ds4_os::seqpacket::SocketError;
use ds4_proto::broker::{DecodeError, codes};

/// Errors of [`crate::attach`].
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// Nobody listens.
    #[error(
        "no weight owner at {}: {cause}; start the owner with `ds4-weight-owner --runtime-dir {}` (or `ds4 serve`), or name its directory with --runtime-dir",
        socket.display(),
        parent(socket)
    )]
    OwnerAbsent {
        /// The socket that was tried.
        socket: PathBuf,
        /// What the kernel said.
        cause: String,
    },
    /// The socket is another user's.
    #[error("the weight owner's socket {} may not be used by this user; run as the owner's user or join its group", .socket.display())]
    OwnerForbidden {
        /// The socket that was tried.
        socket: PathBuf,
    },
    /// The owner said no.
    #[error("the weight owner refused: {sentence} ({code})")]
    Refused {
        /// The owner's code.
        code: String,
        /// The owner's sentence.
        sentence: String,
        /// When the owner thinks a retry makes sense; zero: never.
        retry_after: Duration,
    },
    /// The owner did not answer in time.
    #[error("the weight owner at {} did not answer within {} s; look at its log, or restart it", .socket.display(), .waited.as_secs_f64())]
    OwnerSilent {
        /// The socket that was tried.
        socket: PathBuf,
        /// The deadline.
        waited: Duration,
    },
    /// The owner closed the connection without a reason.
    #[error("the weight owner closed the connection during the handshake; look at its log")]
    OwnerClosed,
    /// The socket failed.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The peer does not speak the protocol.
    #[error("the peer at the broker socket: {0}")]
    Protocol(#[from] DecodeError),
    /// The peer speaks it wrongly.
    #[error("the peer at the broker socket broke the protocol: {0}")]
    Unexpected(String),
    /// The manifest cannot be used.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// Memory could not be mapped.
    #[error("{what}: {source}")]
    Map {
        /// The manifest, or which chunk.
        what: String,
        /// Why.
        source: MapError,
    },
    /// The weights are on a device, and this worker computes without one.
    #[error(
        "the owner holds `{model}` in the memory of {device}, which a worker on the CPU cannot map; start the owner with \
         --backend memfd"
    )]
    OnDevice {
        /// The model.
        model: String,
        /// Its device.
        device: String,
    },
    /// The weights are in the machine's memory, and this worker computes on a device.
    #[error(
        "the owner holds `{model}` in the machine's memory, but this worker computes on {device}; start the owner with \
         --backend cuda-vmm"
    )]
    NotOnDevice {
        /// The model.
        model: String,
        /// The worker's device.
        device: String,
    },
    /// The weights are on another device.
    #[error(
        "the owner holds `{model}` on {held}, but this worker computes on {own}: give both the same CUDA_VISIBLE_DEVICES"
    )]
    OtherDevice {
        /// The model.
        model: String,
        /// The device that holds it.
        held: String,
        /// The worker's device.
        own: String,
    },
    /// The tensors are arranged in a way that this version does not know.
    #[error(
        "`{model}` is held in the layout `{layout}`, this worker knows {known}; run the owner and the worker from the \
         same release of ds4"
    )]
    UnknownLayout {
        /// The model.
        model: String,
        /// The tag.
        layout: String,
        /// Tags that are known.
        known: &'static str,
    },
    /// The driver refused.
    #[error("{what}: {source}")]
    Device {
        /// What was being done.
        what: String,
        /// The driver's answer.
        source: CudaError,
    },
    /// The owner holds something else than what was asked for.
    #[error("the owner serves `{actual}` where `{expected}` was asked for")]
    ModelMismatch {
        /// Asked for.
        expected: String,
        /// Served.
        actual: String,
    },
    /// Another epoch.
    #[error("model `{model}` has epoch {actual} where {expected} was expected")]
    EpochMismatch {
        /// The model.
        model: String,
        /// Expected.
        expected: u64,
        /// Served.
        actual: u64,
    },
    /// Other content.
    #[error(
        "model `{model}` has content {actual} where --expect-blake3 says {expected}: the owner holds another file; \
         reload it with `ds4 ctl load`, or correct the hash"
    )]
    ContentMismatch {
        /// The model.
        model: String,
        /// Expected, in hex.
        expected: String,
        /// Served, in hex.
        actual: String,
    },
    /// The manifest's hashes do not add up, or memory does not have them.
    #[error("model `{model}`: {what} does not have the BLAKE3 that the manifest says; reload the model")]
    HashMismatch {
        /// The model.
        model: String,
        /// What was hashed.
        what: String,
    },
}

impl AttachError {
    /// Stable code for logs and scripts.
    pub fn code(&self) -> &str {
        match self {
            Self::OwnerAbsent { .. } => "owner_absent",
            Self::OwnerForbidden { .. } => "owner_forbidden",
            Self::Refused { code, .. } => code,
            Self::OwnerSilent { .. } => "owner_silent",
            Self::OwnerClosed => "owner_closed",
            Self::Socket(_) => "socket",
            Self::Protocol(DecodeError::Version(_)) => codes::PROTOCOL_VERSION,
            Self::Protocol(_) | Self::Unexpected(_) => "protocol",
            Self::Manifest(e) => e.code(),
            Self::Map { .. } => "map",
            Self::OnDevice { .. } | Self::NotOnDevice { .. } => "backend_mismatch",
            Self::OtherDevice { .. } => "device_mismatch",
            Self::UnknownLayout { .. } => "unknown_layout",
            Self::Device { source, .. } => source.code(),
            Self::ModelMismatch { .. } => "model_mismatch",
            Self::EpochMismatch { .. } => "epoch_mismatch",
            Self::ContentMismatch { .. } => codes::CONTENT_MISMATCH,
            Self::HashMismatch { .. } => "hash_mismatch",
        }
    }

    /// True when the model is at fault and not the owner or the way to it.
    pub fn is_about_the_model(&self) -> bool {
        match self {
            Self::Refused { code, .. } => [codes::CONTENT_MISMATCH, codes::MODEL_FAILED].contains(&&**code),
            Self::ContentMismatch { .. } | Self::HashMismatch { .. } => true,
            _ => false,
        }
    }

    /// How long to wait before another try makes sense; `None`: never.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::OwnerAbsent { .. } => Some(Duration::from_millis(50)),
            Self::Refused { retry_after, .. } if !retry_after.is_zero() => Some(*retry_after),
            _ => None,
        }
    }
}

fn parent(socket: &Path) -> String {
    socket.parent().unwrap_or(Path::new(".")).display().to_string()
}
