//! A bounded little-endian reader: knows how many bytes are left in the file, and refuses before it allocates.

use std::io::{BufRead, ErrorKind};

use super::GgufError;
use crate::metadata::StringTable;

/// Longest header (everything before the tensor data) that is read: 256 MiB. The largest known vocabulary (256,000
/// tokens with merges) takes about 12 MiB.
pub(super) const HEADER_LIMIT: u64 = 256 << 20;

/// Bytes read at once from a numeric array.
const BATCH: usize = 64 << 10;

/// Reads a header from `inner`, at most `file_len` bytes.
pub(super) struct Reader<R> {
    inner: R,
    pos: u64,
    file_len: u64,
}

impl<R: BufRead> Reader<R> {
    pub fn new(inner: R, file_len: u64) -> Self {
        Self { inner, pos: 0, file_len }
    }

    /// Offset of the next byte.
    pub fn pos(&self) -> u64 {
        self.pos
    }

    /// Bytes between here and the end of the file.
    pub fn left(&self) -> u64 {
        self.file_len.saturating_sub(self.pos)
    }

    /// Up to `max` first bytes, without consuming them. Only meaningful before anything was read.
    pub fn head(&mut self, max: usize) -> Result<&[u8], GgufError> {
        let available = self.inner.fill_buf().map_err(GgufError::Unreadable)?;
        Ok(&available[..available.len().min(max)])
    }

    /// Refuses `count` items of at least `each` bytes when the file cannot hold them.
    pub fn check_count(&self, what: &'static str, count: u64, each: u64) -> Result<usize, GgufError> {
        let need = count.saturating_mul(each);
        let left = self.left();
        match usize::try_from(count) {
            Ok(_) if need <= left && self.pos.saturating_add(need) > HEADER_LIMIT => {
                Err(GgufError::HeaderTooLarge { limit: HEADER_LIMIT })
            }
            Ok(n) if need <= left => Ok(n),
            _ => Err(GgufError::CountTooLarge { what, count, need, left }),
        }
    }

    fn check_span(&self, what: &'static str, need: u64) -> Result<(), GgufError> {
        if need > self.left() {
            return Err(GgufError::TruncatedHeader { what, at: self.pos, need, file_len: self.file_len });
        }
        if self.pos.saturating_add(need) > HEADER_LIMIT {
            return Err(GgufError::HeaderTooLarge { limit: HEADER_LIMIT });
        }
        Ok(())
    }

    fn fill(&mut self, what: &'static str, out: &mut [u8]) -> Result<(), GgufError> {
        let need = len_u64(out.len());
        self.check_span(what, need)?;
        self.inner.read_exact(out).map_err(|e| match e.kind() {
            // The file shrank under us, or `parse` was given fewer bytes than `file_len`.
            ErrorKind::UnexpectedEof => {
                GgufError::TruncatedHeader { what, at: self.pos, need, file_len: self.file_len }
            }
            _ => GgufError::Unreadable(e),
        })?;
        self.pos += need;
        Ok(())
    }

    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        self.fill(what, &mut out)?;
        Ok(out)
    }

    pub fn u8(&mut self, what: &'static str) -> Result<u8, GgufError> {
        self.array::<1>(what).map(|[b]| b)
    }

    pub fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, what: &'static str) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A u64 length and that many bytes, appended to `out`; returns how many.
    fn string_into(&mut self, what: &'static str, out: &mut Vec<u8>) -> Result<usize, GgufError> {
        let len = self.u64(what)?;
        self.check_span(what, len)?;
        let len = usize::try_from(len).map_err(|_| GgufError::HeaderTooLarge { limit: HEADER_LIMIT })?;
        let start = out.len();
        out.resize(start + len, 0);
        self.fill(what, &mut out[start..])?;
        Ok(len)
    }

    /// A length-prefixed string as bytes.
    pub fn string(&mut self, what: &'static str) -> Result<Vec<u8>, GgufError> {
        let mut out = Vec::new();
        self.string_into(what, &mut out)?;
        Ok(out)
    }

    /// `count` length-prefixed strings, packed.
    pub fn strings(&mut self, count: u64) -> Result<StringTable, GgufError> {
        let n = self.check_count("array strings", count, 8)?;
        // Four bytes a string, for which at least eight are in the file.
        let mut table = StringTable { bytes: Vec::new(), ends: Vec::with_capacity(n) };
        for _ in 0..n {
            self.string_into("an array string", &mut table.bytes)?;
            // HEADER_LIMIT keeps the blob below 4 GiB.
            let end =
                u32::try_from(table.bytes.len()).map_err(|_| GgufError::HeaderTooLarge { limit: HEADER_LIMIT })?;
            table.ends.push(end);
        }
        Ok(table)
    }

    /// `count` numbers of `N` bytes each, converted by `convert`.
    pub fn numbers<const N: usize, T, E>(
        &mut self,
        count: u64,
        mut convert: impl FnMut([u8; N]) -> Result<T, E>,
    ) -> Result<Result<Vec<T>, E>, GgufError> {
        let mut n = self.check_count("array elements", count, len_u64(N))?;
        // The elements exist in the file, so this is at most size_of::<T>() / N times the bytes left.
        let mut out = Vec::with_capacity(n);
        let mut batch = vec![0; (n * N).min(BATCH / N * N)];
        while n > 0 {
            let take = n.min(batch.len() / N);
            let bytes = &mut batch[..take * N];
            self.fill("an array", bytes)?;
            for element in bytes.as_chunks::<N>().0 {
                match convert(*element) {
                    Ok(v) => out.push(v),
                    Err(e) => return Ok(Err(e)),
                }
            }
            n -= take;
        }
        Ok(Ok(out))
    }
}

/// `usize` to `u64`, which never loses on the platforms that this builds for.
pub(super) fn len_u64(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}
