//! The worker's side of the broker protocol.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ds4_kernels::cuda::driver::Context;
use ds4_manifests::{Backend, WeightManifest, content_hash, decode};
use ds4_os::seqpacket::{Connection, Received, SocketError};
use ds4_os::{Mapping, SharedBytes};
use ds4_proto::broker::{MAX_FRAME, Message};

use crate::{AttachError, Attached, DeviceAttached, DeviceWeights, Lease, Options, Weights};

/// Most chunks that an owner may announce: 1 GiB each, they would be more than any machine has.
const MAX_CHUNKS: u32 = 1 << 16;

/// A lease with its manifest and descriptors, before anything is mapped: whoever computes decides by
/// [`Claim::manifest`] which device must map it.
pub struct Claim {
    /// What the owner published, checked.
    pub manifest: WeightManifest,
    chunks: Vec<OwnedFd>,
    lease: Lease,
    verify: bool,
}

/// Attaches to an owner whose weights are in the machine's memory: [`claim`], then [`Claim::map`].
///
/// # Errors
/// See [`AttachError`]. While the owner is absent or asks for a retry, tries again for at most `options.wait`.
pub fn attach(options: &Options) -> Result<Attached, AttachError> {
    claim(options)?.map()
}

/// Attaches to an owner whose weights are in the memory of `context`'s device: [`claim`], then [`Claim::map_device`].
///
/// # Errors
/// As [`attach`].
pub fn attach_device(options: &Options, context: &Context) -> Result<DeviceAttached, AttachError> {
    claim(options)?.map_device(context)
}

impl Claim {
    /// Maps chunks in the machine's memory read-only.
    ///
    /// # Errors
    /// They are on a device, or a descriptor cannot be trusted or mapped, or does not have the manifest's hash (when that
    /// was asked for).
    pub fn map(self) -> Result<Attached, AttachError> {
        let Self { manifest, chunks, lease, verify } = self;
        if let Backend::CudaVmm { device, device_name, .. } = &manifest.backend {
            return Err(AttachError::OnDevice {
                model: manifest.model.name.clone(),
                device: format!("{device_name} ({})", ds4_kernels::cuda::driver::device::uuid_text(device)),
            });
        }
        let chunks = map_chunks(&manifest, chunks, verify)?;
        Ok(Attached { weights: Weights { manifest, chunks }, lease })
    }

    /// Maps chunks in a device's memory, for reading only, side by side in the order of the manifest.
    ///
    /// # Errors
    /// They are not on the device of `context`, or in a layout that this version does not know, or the driver refuses
    /// them, or they do not have the manifest's hashes (when that was asked for).
    pub fn map_device(self, context: &Context) -> Result<DeviceAttached, AttachError> {
        let Self { manifest, chunks, lease, verify } = self;
        let weights = DeviceWeights::map(manifest, chunks, context)?;
        if verify {
            weights.verify(0..weights.manifest.chunks.len())?;
        }
        Ok(DeviceAttached { weights, lease })
    }
}

/// Takes a lease: receives the manifest and all descriptors, checks the manifest, maps nothing.
///
/// # Errors
/// As [`attach`].
pub fn claim(options: &Options) -> Result<Claim, AttachError> {
    let give_up = Instant::now() + options.wait;
    loop {
        let error = match attempt(options) {
            Ok(claim) => return Ok(claim),
            Err(e) => e,
        };
        match error.retry_after() {
            Some(pause) if Instant::now() < give_up => {
                std::thread::sleep(pause.min(give_up.saturating_duration_since(Instant::now())));
            }
            _ => return Err(error),
        }
    }
}

/// One handshake.
struct Handshake<'a> {
    options: &'a Options,
    connection: Connection,
    deadline: Instant,
}

fn attempt(options: &Options) -> Result<Claim, AttachError> {
    let deadline = Instant::now() + options.timeout;
    let connection = connect(options)?;
    let handshake = Handshake { options, connection, deadline };
    let hello = Message::Hello {
        model: options.model.clone().unwrap_or_default(),
        expected: options.expected,
        client: options.client.clone(),
    };
    handshake.limit()?;
    match handshake.connection.send(&hello.encode(), &[]) {
        // The owner may have refused before it read: its reason is waiting.
        Ok(()) | Err(SocketError::Io { .. }) => {}
        Err(e) => return Err(e.into()),
    }
    let (message, mut fds) = handshake.receive()?;
    let Message::Welcome { lease, epoch, chunks, manifest_len, model } = message else {
        return Err(AttachError::Unexpected(format!("it answered {message:?} to a Hello")));
    };
    let (Some(manifest_fd), true) = (fds.pop(), fds.is_empty()) else {
        return Err(AttachError::Unexpected("a Welcome must carry exactly one descriptor".into()));
    };
    let manifest = read_manifest(manifest_fd, manifest_len)?;
    check_identity(&manifest, epoch, &model, options)?;
    if u64::from(chunks) != manifest.chunks.len() as u64 || chunks > MAX_CHUNKS {
        let listed = manifest.chunks.len();
        return Err(AttachError::Unexpected(format!("{chunks} chunks announced, {listed} in the manifest")));
    }
    let chunks = handshake.receive_chunks(chunks)?;
    let lease = Lease::new(handshake.connection, lease, epoch);
    Ok(Claim { manifest, chunks, lease, verify: options.verify })
}

fn connect(options: &Options) -> Result<Connection, AttachError> {
    Connection::connect(&options.socket).map_err(|e| match e.kind() {
        Some(ErrorKind::NotFound) => {
            AttachError::OwnerAbsent { socket: options.socket.clone(), cause: "there is no such socket".into() }
        }
        Some(ErrorKind::ConnectionRefused) => AttachError::OwnerAbsent {
            socket: options.socket.clone(),
            cause: "the socket is a leftover that nobody listens on".into(),
        },
        Some(ErrorKind::PermissionDenied) => AttachError::OwnerForbidden { socket: options.socket.clone() },
        _ => e.into(),
    })
}

impl Handshake<'_> {
    fn silent(&self) -> AttachError {
        AttachError::OwnerSilent { socket: self.options.socket.clone(), waited: self.options.timeout }
    }

    /// Bounds the next operation by what is left of the deadline.
    fn limit(&self) -> Result<(), AttachError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(self.silent());
        }
        Ok(self.connection.set_timeout(Some(left))?)
    }

    fn receive(&self) -> Result<(Message, Vec<OwnedFd>), AttachError> {
        let Received { bytes, fds } = loop {
            self.limit()?;
            match self.connection.recv(MAX_FRAME) {
                Ok(Some(received)) => break received,
                Ok(None) => return Err(AttachError::OwnerClosed),
                Err(e) if e.would_block() => return Err(self.silent()),
                Err(e) if e.kind() == Some(ErrorKind::Interrupted) => {}
                Err(e) if e.kind() == Some(ErrorKind::ConnectionReset) => return Err(AttachError::OwnerClosed),
                Err(e) => return Err(e.into()),
            }
        };
        match Message::decode(&bytes)? {
            Message::Refused { code, sentence, retry_after_ms } => {
                Err(AttachError::Refused { code, sentence, retry_after: Duration::from_millis(retry_after_ms.into()) })
            }
            message => Ok((message, fds)),
        }
    }

    fn receive_chunks(&self, chunks: u32) -> Result<Vec<OwnedFd>, AttachError> {
        let mut all = Vec::new();
        let mut next = 0;
        while next < chunks {
            let (message, fds) = self.receive()?;
            let Message::Chunks { first, count } = message else {
                return Err(AttachError::Unexpected(format!("{message:?} instead of chunk {next} of {chunks}")));
            };
            if first != next || count == 0 || count > chunks - next || u64::from(count) != fds.len() as u64 {
                return Err(AttachError::Unexpected(format!(
                    "chunks {first} + {count} with {} descriptors where chunk {next} of {chunks} was due",
                    fds.len()
                )));
            }
            next += count;
            all.extend(fds);
        }
        Ok(all)
    }
}

fn read_manifest(fd: OwnedFd, len: u64) -> Result<WeightManifest, AttachError> {
    let map = Mapping::read_only(fd, len).map_err(|source| AttachError::Map { what: "the manifest".into(), source })?;
    Ok(decode(map.as_ref())?)
}

/// Holds what the manifest says against what was asked for and what was announced.
fn check_identity(m: &WeightManifest, epoch: u64, announced: &str, options: &Options) -> Result<(), AttachError> {
    let name = &m.model.name;
    for expected in [Some(announced), options.model.as_deref()].into_iter().flatten() {
        if expected != name {
            return Err(AttachError::ModelMismatch { expected: expected.into(), actual: name.clone() });
        }
    }
    for expected in [Some(epoch), options.epoch].into_iter().flatten() {
        if expected != m.epoch {
            return Err(AttachError::EpochMismatch { model: name.clone(), expected, actual: m.epoch });
        }
    }
    if let Some(expected) = options.expected
        && expected != m.model.content
    {
        return Err(AttachError::ContentMismatch {
            model: name.clone(),
            expected: blake3::Hash::from(expected).to_hex().to_string(),
            actual: blake3::Hash::from(m.model.content).to_hex().to_string(),
        });
    }
    // The model's hash covers the hash of every chunk, so an owner cannot pass old bytes under a new name by accident.
    if content_hash(&m.chunks, &m.tensors, &m.metadata) != m.model.content {
        return Err(AttachError::HashMismatch { model: name.clone(), what: "the manifest's content".into() });
    }
    Ok(())
}

fn map_chunks(m: &WeightManifest, fds: Vec<OwnedFd>, verify: bool) -> Result<Vec<SharedBytes>, AttachError> {
    let mut chunks = Vec::with_capacity(fds.len());
    for (k, (chunk, fd)) in m.chunks.iter().zip(fds).enumerate() {
        let what = || format!("chunk {k} of model `{}`", m.model.name);
        let map = Mapping::read_only(fd, chunk.len).map_err(|source| AttachError::Map { what: what(), source })?;
        if verify && blake3::hash(map.as_ref()) != chunk.blake3 {
            return Err(AttachError::HashMismatch { model: m.model.name.clone(), what: format!("chunk {k}") });
        }
        chunks.push(SharedBytes::new(Arc::new(map)));
    }
    Ok(chunks)
}

#[cfg(test)]
mod tests;
