//! Anonymous memory with a descriptor: filled by one process, sealed, then passed to others.
//!
//! Sealing is what lets a reader trust a descriptor that it received: with `F_SEAL_SHRINK` no page can vanish under a
//! mapping (no SIGBUS), with `F_SEAL_WRITE` nobody, the creator included, can change a byte after it was hashed.
//! Source: memfd_create(2), fcntl(2) "File Sealing".
#![allow(unsafe_code, reason = "a writable mapping of the memory being filled")]

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use memfd::{FileSeal, Memfd, MemfdOptions};
use memmap2::{Advice, MmapMut, MmapOptions};

/// The seals that a published descriptor carries.
pub const SEALS: [FileSeal; 4] = [FileSeal::SealWrite, FileSeal::SealShrink, FileSeal::SealGrow, FileSeal::SealSeal];

/// Why a memfd could not be made or trusted.
#[derive(Debug, thiserror::Error)]
pub enum MemfdError {
    /// The kernel refused the memory.
    #[error(
        "cannot get {len} bytes of anonymous memory: {source} (free memory or raise the memory limit of this cgroup)"
    )]
    Allocate {
        /// Bytes that were asked for.
        len: u64,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A step that should not fail did.
    #[error("{what} of a memfd failed: {source}")]
    Step {
        /// Which step.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A received descriptor is not a sealable memfd.
    #[error("the descriptor is not a sealed memfd: {0}")]
    NotMemfd(io::Error),
    /// A received descriptor lacks seals.
    #[error("the descriptor lacks the seals {missing:?}; its bytes could change or vanish under a reader")]
    Unsealed {
        /// Seals that are absent.
        missing: Vec<FileSeal>,
    },
    /// A received descriptor is shorter than promised.
    #[error("the descriptor holds {actual} bytes, {expected} were promised")]
    Short {
        /// Promised length.
        expected: u64,
        /// Real length.
        actual: u64,
    },
    /// Longer than this machine's address space.
    #[error("{0} bytes do not fit the address space")]
    TooLong(u64),
}

fn seal_error(what: &'static str) -> impl FnOnce(memfd::Error) -> MemfdError {
    move |e| MemfdError::Step { what, source: io::Error::other(e) }
}

/// Memory that is being filled. Its descriptor is not handed out before [`Filling::seal`], so the mapping is exclusive.
pub struct Filling {
    // Field order matters: the mapping goes before the descriptor.
    map: MmapMut,
    memfd: Memfd,
}

impl Filling {
    /// Reserves `len` zero bytes (every page is allocated now, so that a lack of memory is an error here and not a
    /// SIGBUS later) and maps them writable, with transparent huge pages where the kernel's `shmem_enabled` allows them.
    ///
    /// # Errors
    /// [`MemfdError::Allocate`] when the kernel has not got the memory.
    pub fn create(name: &str, len: u64) -> Result<Self, MemfdError> {
        let memfd = MemfdOptions::default()
            .close_on_exec(true)
            .allow_sealing(true)
            .create(name)
            .map_err(seal_error("creation"))?;
        let size = usize::try_from(len).map_err(|_| MemfdError::TooLong(len))?;
        let offset = i64::try_from(len).map_err(|_| MemfdError::TooLong(len))?;
        let allocate = |e: nix::Error| MemfdError::Allocate { len, source: e.into() };
        nix::unistd::ftruncate(memfd.as_file(), offset).map_err(allocate)?;
        // SAFETY: the descriptor is private to `self` until `seal` consumes the mapping, and the size was just set.
        let map = unsafe { MmapOptions::new().len(size).map_mut(memfd.as_file().as_raw_fd()) }
            .map_err(|source| MemfdError::Allocate { len, source })?;
        // Before the pages exist, so that they can be huge. Kernels without the option say EINVAL; small pages serve too.
        let _ = map.advise(Advice::HugePage);
        if len > 0 {
            use nix::fcntl::{FallocateFlags, fallocate};
            fallocate(memfd.as_file(), FallocateFlags::empty(), 0, offset).map_err(allocate)?;
        }
        Ok(Self { map, memfd })
    }

    /// Ends the writable mapping and seals the memory; the descriptor is close-on-exec.
    ///
    /// # Errors
    /// The kernel refused a seal (EBUSY: something, e.g. an unfinished direct read, still pins a page).
    pub fn seal(self) -> Result<OwnedFd, MemfdError> {
        let Self { map, memfd } = self;
        drop(map);
        memfd.add_seals(&SEALS).map_err(seal_error("sealing"))?;
        Ok(memfd.into_file().into())
    }
}

impl Deref for Filling {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

impl DerefMut for Filling {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.map
    }
}

/// A sealed memfd with a copy of `bytes`, for small things such as a manifest.
///
/// # Errors
/// As [`Filling::create`] and [`Filling::seal`].
pub fn sealed(name: &str, bytes: &[u8]) -> Result<OwnedFd, MemfdError> {
    let mut filling = Filling::create(name, bytes.len() as u64)?;
    filling.copy_from_slice(bytes);
    filling.seal()
}

/// Checks that a received descriptor is a memfd with all of [`SEALS`] and at least `len` bytes; returns its real length.
///
/// # Errors
/// Which of these does not hold.
pub fn check_sealed(fd: impl AsFd, len: u64) -> Result<u64, MemfdError> {
    let fd = fd.as_fd();
    let owned = fd.try_clone_to_owned().map_err(|source| MemfdError::Step { what: "duplication", source })?;
    let actual = nix::sys::stat::fstat(fd).map_err(|e| MemfdError::Step { what: "fstat", source: e.into() })?.st_size;
    let memfd = Memfd::try_from_file(owned.into())
        .map_err(|_| MemfdError::NotMemfd(io::Error::new(io::ErrorKind::InvalidInput, "its seals cannot be read")))?;
    let seals = memfd.seals().map_err(seal_error("reading the seals"))?;
    let missing: Vec<FileSeal> = SEALS.into_iter().filter(|s| !seals.contains(s)).collect();
    if !missing.is_empty() {
        return Err(MemfdError::Unsealed { missing });
    }
    let actual = u64::try_from(actual).unwrap_or(0);
    if actual < len {
        return Err(MemfdError::Short { expected: len, actual });
    }
    Ok(actual)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn sealed_memory_cannot_be_written_resized_or_mapped_writable() {
        let fd = sealed("test", b"weights").unwrap();
        assert_eq!(check_sealed(&fd, 7).unwrap(), 7);
        let file = std::fs::File::from(fd);
        assert_eq!(file.write_at(b"x", 0).unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert_eq!(file.set_len(1).unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert_eq!(file.set_len(100).unwrap_err().raw_os_error(), Some(libc::EPERM));
        // SAFETY: the mapping is expected to fail.
        assert!(unsafe { MmapOptions::new().len(7).map_mut(&file) }.is_err());
        let mut back = [0; 7];
        file.read_exact_at(&mut back, 0).unwrap();
        assert_eq!(&back, b"weights");
    }

    #[test]
    fn a_descriptor_without_seals_is_refused() {
        let filling = Filling::create("test", 10).unwrap();
        assert!(
            matches!(check_sealed(filling.memfd.as_file(), 10), Err(MemfdError::Unsealed { missing }) if missing.len() == 4)
        );
        filling.memfd.add_seals(&[FileSeal::SealShrink, FileSeal::SealGrow]).unwrap();
        let err = check_sealed(filling.memfd.as_file(), 10).unwrap_err().to_string();
        assert!(err.contains("SealWrite") && !err.contains("SealShrink"), "{err}");
    }

    #[test]
    fn other_files_are_refused() {
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let err = check_sealed(&file, 1).unwrap_err();
        // An ordinary file on tmpfs answers F_GET_SEALS with F_SEAL_SEAL alone; on a disk file system it is EINVAL.
        assert!(
            matches!(err, MemfdError::NotMemfd(_) | MemfdError::Unsealed { .. } | MemfdError::Step { .. }),
            "{err}"
        );
    }

    #[test]
    fn a_short_descriptor_is_refused_with_both_lengths() {
        let fd = sealed("test", b"12345").unwrap();
        let err = check_sealed(&fd, 6).unwrap_err().to_string();
        assert_eq!(err, "the descriptor holds 5 bytes, 6 were promised");
    }

    #[test]
    fn absurd_lengths_are_errors() {
        assert!(Filling::create("test", u64::MAX).is_err());
        assert!(Filling::create("test", 1 << 62).is_err());
    }

    #[test]
    fn empty_memory_can_be_sealed() {
        assert_eq!(check_sealed(sealed("test", b"").unwrap(), 0).unwrap(), 0);
    }
}
