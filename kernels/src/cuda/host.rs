//! Host memory that results are copied into.

use super::driver::{Context, CudaError, Pinned};
use super::fatal::OrFatal;

/// Page-locked memory that is kept: into fresh memory, a row of 129,280 logits costs the driver a copy and the kernel its pages. Where the
/// machine cannot lock more, ordinary memory does the same more slowly.
#[derive(Debug, Default)]
pub(super) struct Host {
    pinned: Option<Pinned>,
    plain: Vec<u8>,
}

impl Host {
    /// `len` bytes; what is in them is unspecified.
    pub(super) fn at_least(&mut self, context: &Context, len: usize) -> &mut [u8] {
        if self.pinned.as_ref().is_none_or(|p| p.len() < len) && self.plain.len() < len {
            self.pinned = None;
            match Pinned::new(context, len) {
                Ok(new) => self.pinned = Some(new),
                Err(CudaError::OutOfMemory { .. }) => self.plain.resize(len, 0),
                Err(other) => Err(other).or_fatal("a buffer for results"),
            }
        }
        match &mut self.pinned {
            Some(pinned) => &mut pinned[..len],
            None => &mut self.plain[..len],
        }
    }
}
