//! Read-only mappings of sealed memory.
#![allow(unsafe_code, reason = "a mapping of memory that other processes hold too; the seals make it immutable")]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use memmap2::{Advice, Mmap, MmapOptions};

use crate::memfd::{MemfdError, check_sealed};

/// Why memory could not be mapped.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The descriptor cannot be trusted.
    #[error(transparent)]
    Memfd(#[from] MemfdError),
    /// The kernel refused the mapping.
    #[error("cannot map {len} bytes: {source}")]
    Map {
        /// Bytes that were asked for.
        len: u64,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// `len` bytes of a sealed memfd, mapped `PROT_READ`.
pub struct Mapping {
    map: Mmap,
}

impl Mapping {
    /// Maps the first `len` bytes of a memfd after checking its seals and size, so that no byte can change and no access
    /// can fault while the mapping lives. The descriptor may be closed afterwards.
    ///
    /// # Errors
    /// The descriptor is no sealed memfd or too short, or the kernel refuses.
    pub fn read_only(fd: impl AsFd, len: u64) -> Result<Self, MapError> {
        let fd = fd.as_fd();
        check_sealed(fd, len)?;
        let size = usize::try_from(len).map_err(|_| MemfdError::TooLong(len))?;
        // Private, because kernels before 6.7 refuse shared mappings of F_SEAL_WRITE memory even for reading. A page that
        // is never written is never copied, so all processes still share the same physical pages.
        // SAFETY: F_SEAL_WRITE and F_SEAL_SHRINK were just checked and cannot be taken back, so the bytes are immutable
        // and present for the life of the mapping.
        let map = unsafe { MmapOptions::new().len(size).map_copy_read_only(fd.as_raw_fd()) }
            .map_err(|source| MapError::Map { len, source })?;
        // Only a hint; the kernel may lack the option.
        let _ = map.advise(Advice::HugePage);
        Ok(Self { map })
    }

    /// Enters all present pages into this process's page tables at once (`MADV_POPULATE_READ`), which is cheaper than a
    /// fault per 64 KiB later. False when the kernel (before 5.14) cannot.
    pub fn prefault(&self) -> bool {
        self.map.advise(Advice::PopulateRead).is_ok()
    }
}

impl AsRef<[u8]> for Mapping {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SharedBytes;
    use crate::memfd::{Filling, sealed};
    use std::sync::Arc;

    #[test]
    fn bytes_outlive_the_descriptor() {
        let fd = sealed("test", b"0123456789").unwrap();
        let map = Mapping::read_only(&fd, 8).unwrap();
        drop(fd);
        assert!(map.prefault());
        let shared = SharedBytes::new(Arc::new(map));
        assert_eq!(&*shared, b"01234567");
        assert_eq!(&*shared.slice(2, 3).unwrap(), b"234");
    }

    #[test]
    fn many_mappings_share_their_pages() {
        let mut filling = Filling::create("test", 64 << 20).unwrap();
        filling.fill(7);
        let fd = filling.seal().unwrap();
        let before = crate::stats::memory(None).unwrap();
        let maps: Vec<Mapping> = (0..4).map(|_| Mapping::read_only(&fd, 64 << 20).unwrap()).collect();
        assert!(maps.iter().all(|m| m.as_ref().iter().all(|b| *b == 7)));
        let after = crate::stats::memory(None).unwrap();
        let grown = after.anonymous.saturating_sub(before.anonymous);
        assert!(grown < 16 << 20, "reading four mappings of 64 MiB made {grown} bytes of private memory");
    }

    #[test]
    fn an_unsealed_or_short_descriptor_is_not_mapped() {
        let fd = sealed("test", b"0123").unwrap();
        assert!(matches!(Mapping::read_only(&fd, 5), Err(MapError::Memfd(MemfdError::Short { .. }))));
        let file = std::fs::File::open("/dev/zero").unwrap();
        assert!(Mapping::read_only(&file, 0).is_err());
    }
}
