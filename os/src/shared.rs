//! Read-only bytes that are shared by reference: a slice of a mapping, or of heap memory in tests.

use std::ops::{Deref, Range};
use std::sync::Arc;

/// A cheaply cloned range of read-only memory. The backing mapping lives as long as any clone.
#[derive(Clone)]
pub struct SharedBytes {
    backing: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl SharedBytes {
    /// All of `backing`.
    pub fn new(backing: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        let range = 0..(*backing).as_ref().len();
        Self { backing, range }
    }

    /// Heap memory, for tests and small things.
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Self::new(Arc::new(bytes))
    }

    /// A sub-range, or `None` when it does not lie inside.
    pub fn slice(&self, offset: u64, len: u64) -> Option<Self> {
        let offset = usize::try_from(offset).ok()?;
        let len = usize::try_from(len).ok()?;
        let start = self.range.start.checked_add(offset)?;
        let end = start.checked_add(len)?;
        (end <= self.range.end).then(|| Self { backing: Arc::clone(&self.backing), range: start..end })
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &(*self.backing).as_ref()[self.range.clone()]
    }
}
