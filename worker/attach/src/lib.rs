//! Attaching to a weight owner: socket → lease → descriptors → read-only mapping → verified manifest.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ds4_manifests::{TensorEntry, WeightManifest};
use ds4_os::SharedBytes;

mod client;
mod device;
mod error;
mod lease;

/// BLAKE3 of bytes, as the manifest has them per chunk.
pub fn hash(bytes: &[u8]) -> [u8; 32] {
    *blake3::hash(bytes).as_bytes()
}

pub use client::{Claim, attach, attach_device, claim};
pub use device::{DeviceAttached, DeviceWeights};
pub use error::AttachError;
pub use lease::{Lease, Notice};

/// A model's weights as this process sees them: the manifest and the mapped chunks.
pub struct Weights {
    /// What the owner published.
    pub manifest: WeightManifest,
    /// Mapped chunks, one per `manifest.chunks` entry.
    pub chunks: Vec<SharedBytes>,
}

impl Weights {
    /// The entry and bytes of a tensor, or `None` when the manifest has no such tensor or its range lies outside its chunk.
    pub fn tensor(&self, name: &str) -> Option<(&TensorEntry, SharedBytes)> {
        let entry = self.manifest.tensors.iter().find(|t| t.name == name)?;
        let chunk = self.chunks.get(entry.chunk as usize)?;
        Some((entry, chunk.slice(entry.offset, entry.len)?))
    }
}

/// Where a tensor's bytes are.
#[derive(Clone)]
pub enum Place {
    /// In this process's memory.
    Host(SharedBytes),
    /// In a device's memory.
    Device {
        /// Address of the first byte, for the device.
        address: u64,
        /// Whether it lies in the device's tiles, where it has them ([`ds4_manifests::LAYOUT_TILES`]).
        tiled: bool,
        /// Keeps the mapping.
        keep: Arc<dyn Send + Sync>,
    },
}

/// Weights that a model can be bound to, wherever they are.
pub trait Tensors {
    /// What the owner published.
    fn manifest(&self) -> &WeightManifest;

    /// Where the tensor of this entry is; `None` when its range lies outside its chunk.
    fn place(&self, entry: &TensorEntry) -> Option<Place>;
}

impl Tensors for Weights {
    fn manifest(&self) -> &WeightManifest {
        &self.manifest
    }

    fn place(&self, entry: &TensorEntry) -> Option<Place> {
        let chunk = self.chunks.get(usize::try_from(entry.chunk).ok()?)?;
        Some(Place::Host(chunk.slice(entry.offset, entry.len)?))
    }
}

/// What to attach to, and what to accept.
#[derive(Clone, Debug)]
pub struct Options {
    /// The owner's broker socket.
    pub socket: PathBuf,
    /// Name of the model; `None`: the only one that the owner has.
    pub model: Option<String>,
    /// BLAKE3 that the model's content must have.
    pub expected: Option<[u8; 32]>,
    /// Epoch that the model must have.
    pub epoch: Option<u64>,
    /// What this process calls itself in the owner's listings.
    pub client: String,
    /// The whole exchange must be done after this.
    pub timeout: Duration,
    /// How long to retry while the owner is absent, starting, or loading the model. Zero: try once.
    pub wait: Duration,
    /// Hash every byte again instead of trusting the owner's hashes of its sealed memory. Costs a read of all weights.
    pub verify: bool,
}

impl Options {
    /// Attaching to the only model behind `socket`, with a deadline of 4 s and no retries.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            model: None,
            expected: None,
            epoch: None,
            client: format!("ds4-worker {}", std::process::id()),
            timeout: Duration::from_secs(4),
            wait: Duration::ZERO,
            verify: false,
        }
    }
}

/// A successful attach.
pub struct Attached {
    /// The weights. They stay valid after the lease ended: the kernel keeps the memory while it is mapped.
    pub weights: Weights,
    /// The lease; dropping it ends it. Keep it for as long as the weights are used, so that the owner knows.
    pub lease: Lease,
}
