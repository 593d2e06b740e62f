//! Little-endian reading with the bytes that are left as the only bound, and writing.

/// Reads from the front of a slice.
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Offset of the next byte.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// Bytes that are left.
    pub(crate) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `n` bytes.
    pub(crate) fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let out = self.bytes.get(self.at..self.at.checked_add(n)?)?;
        self.at += n;
        Some(out)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    /// `n` values; nothing is allocated before the bytes are known to be there.
    pub(crate) fn u32s(&mut self, n: usize) -> Option<Vec<u32>> {
        let (words, _) = self.take(n.checked_mul(4)?)?.as_chunks::<4>();
        Some(words.iter().map(|b| u32::from_le_bytes(*b)).collect())
    }

    /// `n` values; nothing is allocated before the bytes are known to be there.
    pub(crate) fn f32s(&mut self, n: usize) -> Option<Vec<f32>> {
        let (words, _) = self.take(n.checked_mul(4)?)?.as_chunks::<4>();
        Some(words.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }
}

pub(crate) fn put_u32s(out: &mut Vec<u8>, values: &[u32]) {
    out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
}

pub(crate) fn put_f32s(out: &mut Vec<u8>, values: &[f32]) {
    out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
}
