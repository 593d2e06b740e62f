//! Reading a model's files past the page cache: O_DIRECT where the file system can, ordinary reads where it cannot.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// What O_DIRECT wants offsets, lengths and addresses to be multiples of. 512 would do on many disks, 4096 does on all.
pub const BLOCK: u64 = 4096;

/// Bytes of one read: a quarter of an L2 cache of 2 MiB.
const STEP: usize = 512 << 10;

/// One file.
#[derive(Debug)]
pub struct Source {
    file: File,
    direct: bool,
}

impl Source {
    /// Opens `path`; `scratch` is memory of the kind that will be read into, at least [`BLOCK`] bytes at a multiple of it.
    /// The second value says why the page cache must be used, when it must.
    ///
    /// # Errors
    /// The file cannot be opened at all.
    pub fn open(path: &Path, scratch: &mut [u8]) -> io::Result<(Self, Option<String>)> {
        let direct = File::options().read(true).custom_flags(nix::libc::O_DIRECT).open(path);
        let trial = direct.and_then(|file| {
            let block = scratch.get_mut(..4096).ok_or(io::ErrorKind::InvalidInput)?;
            file.read_at(block, 0)?;
            Ok(file)
        });
        match trial {
            Ok(file) => Ok((Self { file, direct: true }, None)),
            Err(e) => Ok((Self { file: File::open(path)?, direct: false }, Some(e.to_string()))),
        }
    }

    /// Reads `len` bytes at `offset` into `buffer`, which has room for them and two blocks; returns where in it they begin.
    /// `seen` gets them piece by piece as they arrive, while a core's cache still holds them.
    ///
    /// # Errors
    /// `UnexpectedEof` when the file has become shorter.
    pub fn read(&self, offset: u64, len: usize, buffer: &mut [u8], mut seen: impl FnMut(&[u8])) -> io::Result<usize> {
        let skew = if self.direct { offset % BLOCK } else { 0 };
        let begin = usize::try_from(skew).map_err(io::Error::other)?;
        let wanted = begin.checked_add(len).ok_or(io::ErrorKind::InvalidInput)?;
        let whole = if self.direct { wanted.next_multiple_of(4096) } else { wanted };
        let target = buffer.get_mut(..whole).ok_or(io::ErrorKind::InvalidInput)?;
        let mut have = 0;
        while have < wanted {
            let stop = whole.min(have.saturating_add(STEP));
            let rest = target.get_mut(have..stop).ok_or(io::ErrorKind::InvalidInput)?;
            match self.file.read_at(rest, offset - skew + have as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                // A direct read ends within a block only at the end of the file, so the next one is aligned again.
                Ok(n) => {
                    let fresh = have.max(begin)..(have + n).min(wanted);
                    seen(target.get(fresh).unwrap_or_default());
                    have += n;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(begin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Page-aligned memory without unsafe code: part of a larger allocation.
    fn aligned(memory: &mut [u8]) -> &mut [u8] {
        let skip = memory.as_ptr().align_offset(4096);
        &mut memory[skip..]
    }

    /// procfs has no O_DIRECT.
    #[test]
    fn files_that_cannot_be_read_directly_are_read_through_the_page_cache() {
        let mut memory = vec![0; 20_000];
        let (source, why) = Source::open(Path::new("/proc/version"), aligned(&mut memory)).unwrap();
        assert!(!source.direct && why.is_some_and(|w| w.contains("os error 22")), "{source:?}");
        let at = source.read(1, 4, aligned(&mut memory), |_| {}).unwrap();
        assert_eq!(&aligned(&mut memory)[at..at + 4], b"inux");
        assert_eq!(
            Source::open(Path::new("/nonexistent"), aligned(&mut memory)).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }

    #[test]
    fn any_range_reads_the_same_with_and_without_the_page_cache() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        // More than two steps.
        const BIG: u64 = 1_200_001;
        let bytes: Vec<u8> = (0..BIG).map(|i| u8::try_from(i % 253).unwrap()).collect();
        std::fs::write(&path, &bytes).unwrap();
        let mut memory = vec![0; 1_300_000];
        let (source, _) = Source::open(&path, aligned(&mut memory)).unwrap();
        let plain = Source { file: File::open(&path).unwrap(), direct: false };
        for (offset, len) in
            [(0, 1), (32, 4096), (4095, 2), (4096, 8192), (1, 1_200_000), (4095, 1_100_000), (BIG - 10, 10), (5, 0)]
        {
            for source in [&source, &plain] {
                let buffer = aligned(&mut memory);
                let mut seen = Vec::new();
                let at = source.read(offset, len, buffer, |fresh| seen.extend_from_slice(fresh)).unwrap();
                let from = usize::try_from(offset).unwrap();
                assert!(buffer[at..at + len] == bytes[from..from + len], "{len} bytes at {offset}");
                assert!(seen == bytes[from..from + len], "{len} bytes at {offset}");
            }
        }
        for source in [&source, &plain] {
            let e = source.read(BIG - 10, 12, aligned(&mut memory), |_| {}).unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::UnexpectedEof);
        }
    }
}
