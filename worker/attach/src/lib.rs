//! Attaching to a weight owner: socket → lease → descriptors → read-only mapping → verified manifest.

use ds4_manifests::{TensorEntry, WeightManifest};
use ds4_os::SharedBytes;

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
