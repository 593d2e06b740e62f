//! Weights in a device's memory, mapped by this process for reading.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ds4_kernels::cuda::driver::{Access, Context, CudaError, DeviceInfo, Physical, Space, Staging, device, vmm};
use ds4_kernels::tiles;
use ds4_manifests::{Backend, LAYOUT_GGUF, LAYOUT_TILES, TensorEntry, WeightManifest};

use crate::{AttachError, Lease, Place, Tensors};

/// Layout tags whose tensors this version can compute with.
const KNOWN_LAYOUTS: [&str; 2] = [LAYOUT_GGUF, LAYOUT_TILES];
/// Bytes that are copied back at a time when hashes are compared.
const READ_BACK: usize = 4 << 20;
/// Threads that hash what is copied back; the bus is full by then. Of tiles a thread holds a whole chunk, twice.
const MAX_HASHERS: [usize; 2] = [16, 6];

/// A model's weights at one range of device addresses: chunk after chunk in the order of the manifest, each at the next
/// multiple of the granularity.
///
/// The device may read them and not write: a write fails and takes the context with it, and the owner's bytes stay as
/// they are.
#[derive(Debug)]
pub struct DeviceWeights {
    /// What the owner published.
    pub manifest: WeightManifest,
    offsets: Vec<u64>,
    space: Arc<Space>,
}

impl Tensors for DeviceWeights {
    fn manifest(&self) -> &WeightManifest {
        &self.manifest
    }

    fn place(&self, entry: &TensorEntry) -> Option<Place> {
        let keep = Arc::clone(&self.space) as _;
        Some(Place::Device { address: self.address(entry)?, tiled: self.tiled(), keep })
    }
}

/// A successful attach to weights on a device.
pub struct DeviceAttached {
    /// The weights. They stay valid after the lease ended: the driver keeps the memory while it is mapped.
    pub weights: DeviceWeights,
    /// The lease; dropping it ends it.
    pub lease: Lease,
}

impl DeviceWeights {
    pub(crate) fn map(manifest: WeightManifest, fds: Vec<OwnedFd>, context: &Context) -> Result<Self, AttachError> {
        let granularity = check_backend(&manifest, context.device())?;
        let model = manifest.model.name.clone();
        let failed = |what: String| move |source: CudaError| AttachError::Device { what, source };
        // A multiple of what the owner's driver asked for must be one of what ours asks for.
        let own = vmm::granularity(context).map_err(failed(format!("the weights of `{model}`")))?;
        if granularity % own != 0 {
            let text = format!("granularity {granularity} of the manifest, {own} of this driver");
            return Err(AttachError::Unexpected(text));
        }
        let overflow = || AttachError::Unexpected(format!("the chunks of `{model}` are larger than any memory"));
        let mut offsets = Vec::with_capacity(manifest.chunks.len());
        let mut rounded = Vec::with_capacity(manifest.chunks.len());
        let mut end = 0_u64;
        for chunk in &manifest.chunks {
            let len = chunk.len.max(1).checked_next_multiple_of(granularity).ok_or_else(overflow)?;
            offsets.push(end);
            rounded.push(len);
            end = end.checked_add(len).ok_or_else(overflow)?;
        }
        let what = format!("{end} bytes of addresses for `{model}`");
        // A model without tensors has no chunks, but a space cannot be empty.
        let mut space = Space::reserve(context, end.max(granularity)).map_err(failed(what))?;
        for (k, ((fd, len), offset)) in fds.into_iter().zip(&rounded).zip(&offsets).enumerate() {
            let what = || format!("chunk {k} of model `{model}`");
            let physical = Physical::import(context, &fd, *len).map_err(failed(what()))?;
            space.map(*offset, physical).map_err(failed(what()))?;
        }
        if end > 0 {
            space.allow(0, end, Access::Read).map_err(failed(format!("read access to `{model}`")))?;
        }
        Ok(Self { manifest, offsets, space: Arc::new(space) })
    }

    /// Whether matrices lie in tiles.
    pub fn tiled(&self) -> bool {
        matches!(&self.manifest.backend, Backend::CudaVmm { layout, .. } if layout == LAYOUT_TILES)
    }

    /// The entry and device address of a tensor, or `None` when the manifest has no such tensor.
    pub fn tensor(&self, name: &str) -> Option<(&TensorEntry, vmm::DevicePtr)> {
        let entry = self.manifest.tensor(name)?;
        Some((entry, self.address(entry)?))
    }

    /// The device address of a tensor of this manifest.
    pub fn address(&self, entry: &TensorEntry) -> Option<vmm::DevicePtr> {
        let chunk = self.offsets.get(usize::try_from(entry.chunk).ok()?)?;
        self.space.address(chunk.checked_add(entry.offset)?, entry.len).ok()
    }

    /// First address and length of the whole range.
    pub fn range(&self) -> (vmm::DevicePtr, u64) {
        (self.space.start(), self.space.len())
    }

    /// Copies `chunks` back and compares them with the manifest's hashes; returns the bytes that were compared.
    ///
    /// # Errors
    /// [`AttachError::HashMismatch`] names the first chunk that differs, or the driver refuses.
    pub fn verify(&self, chunks: impl IntoIterator<Item = usize>) -> Result<u64, AttachError> {
        let chunks: Vec<usize> = chunks.into_iter().filter(|k| *k < self.offsets.len()).collect();
        let next = AtomicUsize::new(0);
        let threads = std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(MAX_HASHERS[usize::from(self.tiled())])
            .min(chunks.len());
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads)
                .map(|_| {
                    let (next, chunks) = (&next, &chunks);
                    scope.spawn(move || {
                        let mut done = 0;
                        while let Some(k) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
                            done += self.verify_chunk(*k)?;
                        }
                        Ok(done)
                    })
                })
                .collect();
            let died = |_| Err(AttachError::Unexpected("a hashing thread panicked".into()));
            workers.into_iter().map(|w| w.join().unwrap_or_else(died)).sum()
        })
    }

    /// Puts the tensors of chunk `k` back into the order of the file.
    fn untile(&self, k: usize, chunk: &mut [u8]) {
        let own = self.manifest.tensors.iter().filter(|t| self.tiled() && usize::try_from(t.chunk) == Ok(k));
        for t in own {
            let size = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
            let cols = size(t.shape.first().copied().unwrap_or(0));
            let rows = t.shape.iter().skip(1).fold(1, |n: usize, d| n.saturating_mul(size(*d)));
            let bytes = chunk.get_mut(size(t.offset)..).and_then(|rest| rest.get_mut(..size(t.len)));
            if let (true, Some(bytes)) = (tiles::is_tiled(t.ty, rows, cols), bytes) {
                bytes.copy_from_slice(&tiles::untile(t.ty, rows, cols, bytes));
            }
        }
    }

    fn verify_chunk(&self, k: usize) -> Result<u64, AttachError> {
        let (Some(chunk), Some(offset)) = (self.manifest.chunks.get(k), self.offsets.get(k)) else { return Ok(0) };
        let what = || format!("chunk {k} of model `{}`", self.manifest.model.name);
        let failed = |source| AttachError::Device { what: what(), source };
        let mut staging = Staging::new(&self.space, 1, READ_BACK).map_err(failed)?;
        let mut hasher = blake3::Hasher::new();
        let mut whole = Vec::new();
        let ranges = |len: u64| {
            let step = READ_BACK as u64;
            (0..len.div_ceil(step)).map(move |i| Range { start: i * step, end: len.min((i + 1) * step) })
        };
        for range in ranges(chunk.len) {
            let n = usize::try_from(range.end - range.start).unwrap_or(READ_BACK);
            let bytes = staging.download(offset + range.start, n).map_err(failed)?;
            if self.tiled() {
                whole.extend_from_slice(bytes);
            } else {
                hasher.update(bytes);
            }
        }
        self.untile(k, &mut whole);
        hasher.update(&whole);
        if hasher.finalize() != chunk.blake3 {
            return Err(AttachError::HashMismatch {
                model: self.manifest.model.name.clone(),
                what: format!("chunk {k}"),
            });
        }
        Ok(chunk.len)
    }
}

/// Refuses weights that this process cannot map or read; returns the granularity.
fn check_backend(manifest: &WeightManifest, own: &DeviceInfo) -> Result<u64, AttachError> {
    let model = || manifest.model.name.clone();
    let shown = |name: &str, uuid: &[u8; 16]| format!("{name} ({})", device::uuid_text(uuid));
    match &manifest.backend {
        Backend::Memfd { .. } => Err(AttachError::NotOnDevice { model: model(), device: shown(&own.name, &own.uuid) }),
        Backend::CudaVmm { device, device_name, granularity, layout, .. } => {
            if *device != own.uuid {
                let (held, own) = (shown(device_name, device), shown(&own.name, &own.uuid));
                return Err(AttachError::OtherDevice { model: model(), held, own });
            }
            if !KNOWN_LAYOUTS.contains(&layout.as_str()) {
                let known = "`gguf` and `tiles-16x256`";
                return Err(AttachError::UnknownLayout { model: model(), layout: layout.clone(), known });
            }
            Ok(*granularity)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ds4_manifests::{Metadata, ModelIdentity};

    fn manifest(backend: Backend) -> WeightManifest {
        WeightManifest {
            model: ModelIdentity {
                family: "llama".into(),
                artifact: "a".into(),
                name: "m".into(),
                content: [0; 32],
                known: false,
            },
            epoch: 1,
            backend,
            chunks: vec![],
            tensors: vec![],
            metadata: Metadata::default(),
        }
    }

    fn own() -> DeviceInfo {
        DeviceInfo {
            ordinal: 0,
            name: "NVIDIA GB10".into(),
            uuid: [1; 16],
            capability: (12, 1),
            total_bytes: 1 << 37,
            integrated: true,
            multiprocessors: 48,
            shared_bytes: 99 << 10,
            vmm: true,
        }
    }

    fn on(device: [u8; 16], layout: &str) -> Backend {
        Backend::CudaVmm {
            device,
            device_name: "NVIDIA H200".into(),
            granularity: 2 << 20,
            driver: 13_000,
            layout: layout.into(),
        }
    }

    #[test]
    fn another_device_an_unknown_layout_and_the_machine_s_memory_are_refused_by_name() {
        assert_eq!(check_backend(&manifest(on([1; 16], "gguf")), &own()).unwrap(), 2 << 20);
        let e = check_backend(&manifest(on([2; 16], "gguf")), &own()).unwrap_err();
        let text = e.to_string();
        assert_eq!(e.code(), "device_mismatch");
        for part in ["NVIDIA H200 (GPU-0202", "NVIDIA GB10 (GPU-0101", "CUDA_VISIBLE_DEVICES"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let e = check_backend(&manifest(on([1; 16], "soa-3")), &own()).unwrap_err();
        assert_eq!(e.code(), "unknown_layout");
        assert!(e.to_string().contains("`soa-3`") && e.to_string().contains("`gguf`"), "{e}");
        let e = check_backend(&manifest(Backend::Memfd { page: 4096 }), &own()).unwrap_err();
        assert_eq!(e.code(), "backend_mismatch");
        assert!(e.to_string().contains("--backend cuda-vmm"), "{e}");
    }
}
