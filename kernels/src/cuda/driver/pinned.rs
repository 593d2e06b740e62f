//! Page-locked host memory, and copies between it and device memory that overlap with whatever fills or empties it.

use std::ops::{Deref, DerefMut};
use std::ptr::{NonNull, null_mut};

use cudarc::driver::sys;

use super::error::{check, check_alloc};
use super::{Context, CudaError, Event, Space, Stream, refuse};

/// Page-locked host memory, aligned to a page. Copies from and to it run at the bus's speed (55.5 GB/s to an H200) and
/// without the CPU.
#[derive(Debug)]
pub struct Pinned {
    start: NonNull<u8>,
    len: usize,
    context: Context,
}

// SAFETY: it is plain memory with one owner.
unsafe impl Send for Pinned {}
// SAFETY: shared references only read.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `len` zero bytes.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] when the machine cannot lock that much.
    pub fn new(context: &Context, len: usize) -> Result<Self, CudaError> {
        context.bind()?;
        refuse::check("cuMemHostAlloc", len as u64)?;
        let mut start = null_mut();
        // SAFETY: the pointer is valid for the call, and a context is current.
        check_alloc("cuMemHostAlloc", len as u64, unsafe {
            sys::cuMemHostAlloc(&raw mut start, len, sys::CU_MEMHOSTALLOC_PORTABLE)
        })?;
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| CudaError::Range(format!("cuMemHostAlloc of {len} bytes gave no address")))?;
        // SAFETY: the driver has just given us these `len` bytes; nobody promises what is in them.
        unsafe { start.as_ptr().write_bytes(0, len) };
        Ok(Self { start, len, context: context.clone() })
    }
}

impl Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes that live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated once, freed once.
            let _ = unsafe { sys::cuMemFreeHost(self.start.as_ptr().cast()) };
        }
    }
}

/// A ring of page-locked buffers in front of a [`Space`]: while one is being copied, the next is filled.
///
/// A buffer is lent for filling only after the copy out of it has ended, and freed only after that too.
#[derive(Debug)]
pub struct Staging<'a> {
    slots: Vec<Slot>,
    next: usize,
    stream: Stream,
    space: &'a Space,
}

#[derive(Debug)]
struct Slot {
    buffer: Pinned,
    copied: Event,
}

impl<'a> Staging<'a> {
    /// `count` buffers of `len` bytes each, for copies to and from `space`.
    ///
    /// # Errors
    /// The machine cannot lock that much memory.
    pub fn new(space: &'a Space, count: usize, len: usize) -> Result<Self, CudaError> {
        let context = space.context();
        let slots = (0..count.max(1))
            .map(|_| Ok(Slot { buffer: Pinned::new(context, len)?, copied: Event::new(context)? }))
            .collect::<Result<_, CudaError>>()?;
        Ok(Self { slots, next: 0, stream: Stream::new(context)?, space })
    }

    /// The buffer that was used longest ago, when the copy out of it is over.
    ///
    /// # Errors
    /// A copy failed.
    pub fn buffer(&mut self) -> Result<&mut [u8], CudaError> {
        let index = self.next;
        let slot = self.slots.get_mut(index).ok_or_else(|| CudaError::Range("staging without buffers".into()))?;
        slot.copied.synchronize()?;
        Ok(&mut slot.buffer)
    }

    /// Starts copying `len` bytes from position `from` of the buffer that [`Staging::buffer`] gives, to `offset` in the
    /// space, and goes on to the next buffer.
    ///
    /// # Errors
    /// The bytes leave the buffer or the space, or an earlier copy failed.
    pub fn upload(&mut self, from: usize, len: usize, offset: u64) -> Result<(), CudaError> {
        let to = self.space.address(offset, len as u64)?;
        let index = self.next;
        let slot = self.slots.get_mut(index).ok_or_else(|| CudaError::Range("staging without buffers".into()))?;
        let source = from.checked_add(len).and_then(|end| slot.buffer.get(from..end)).ok_or_else(|| {
            CudaError::Range(format!("{len} bytes at {from} leave a buffer of {} bytes", slot.buffer.len))
        })?;
        self.stream.context().bind()?;
        // SAFETY: the destination lies in the space, which outlives `self`. The source is not touched before the event
        // below has happened (`buffer` waits for it) and is freed after it (`drop` waits for the stream).
        check("cuMemcpyHtoDAsync_v2", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, source.as_ptr().cast(), len, self.stream.raw())
        })?;
        slot.copied.record(&self.stream)?;
        self.next = (index + 1) % self.slots.len();
        Ok(())
    }

    /// Makes `len` bytes at `offset` of the space zero, in order with the copies.
    ///
    /// # Errors
    /// The bytes leave the space, or an earlier copy failed.
    pub fn zero(&self, offset: u64, len: u64) -> Result<(), CudaError> {
        let to = self.space.address(offset, len)?;
        let bytes = usize::try_from(len).map_err(|_| CudaError::Range(format!("{len} bytes")))?;
        self.stream.context().bind()?;
        // SAFETY: the destination lies in the space, which outlives `self`.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(to, 0, bytes, self.stream.raw()) })
    }

    /// Copies `len` bytes at `offset` of the space into a buffer and waits for them.
    ///
    /// # Errors
    /// The bytes leave the buffer or the space, or the copy failed.
    pub fn download(&mut self, offset: u64, len: usize) -> Result<&[u8], CudaError> {
        let from = self.space.address(offset, len as u64)?;
        let index = self.next;
        let slot = self.slots.get_mut(index).ok_or_else(|| CudaError::Range("staging without buffers".into()))?;
        slot.copied.synchronize()?;
        let full = slot.buffer.len;
        let target = slot
            .buffer
            .get_mut(..len)
            .ok_or_else(|| CudaError::Range(format!("{len} bytes do not fit a buffer of {full} bytes")))?;
        self.stream.context().bind()?;
        // SAFETY: the source lies in the space; the target is exclusively ours until the wait below is over.
        let started = check("cuMemcpyDtoHAsync_v2", unsafe {
            sys::cuMemcpyDtoHAsync_v2(target.as_mut_ptr().cast(), from, len, self.stream.raw())
        });
        // Also after an error: the buffer must not be lent while anything may still write to it.
        let done = self.stream.synchronize();
        started.and(done)?;
        Ok(target)
    }

    /// The stream of its copies, for what is to happen after those that were started.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Waits for all copies.
    ///
    /// # Errors
    /// A copy failed.
    pub fn finish(&self) -> Result<(), CudaError> {
        self.stream.synchronize()
    }
}

impl Drop for Staging<'_> {
    fn drop(&mut self) {
        // The buffers go only when no copy reads from them.
        let _ = self.stream.synchronize();
    }
}
