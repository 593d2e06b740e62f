//! Plain device memory, and copies of it in a stream's order.

use cudarc::driver::sys;

use super::error::{check, check_alloc};
use super::vmm::DevicePtr;
use super::{Context, CudaError, Pinned, Stream, refuse};

/// Device memory that nobody else sees, aligned to 256 bytes. Freed on drop, which waits for the device by itself.
#[derive(Debug)]
pub struct Memory {
    start: DevicePtr,
    len: usize,
    context: Context,
}

impl Memory {
    /// `len` bytes; nobody has defined what is in them.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn new(context: &Context, len: usize) -> Result<Self, CudaError> {
        context.bind()?;
        refuse::check("cuMemAlloc_v2", len as u64)?;
        let mut start = 0;
        // SAFETY: the pointer is valid for the call. The driver refuses 0 bytes.
        check_alloc("cuMemAlloc_v2", len as u64, unsafe { sys::cuMemAlloc_v2(&raw mut start, len.max(1)) })?;
        Ok(Self { start, len, context: context.clone() })
    }

    /// Address of its first byte.
    pub fn start(&self) -> DevicePtr {
        self.start
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            self.context.flush_quietly();
            // SAFETY: allocated once, freed once; the driver waits for work that still uses it.
            let _ = unsafe { sys::cuMemFree_v2(self.start) };
        }
    }
}

impl Stream {
    /// Copies `bytes` to device memory at `to` and waits until that is done.
    ///
    /// # Safety
    /// `to` is the start of `bytes.len()` bytes of mapped, writable device memory that nothing else uses meanwhile.
    ///
    /// # Errors
    /// What the copy, or something before it in the stream, failed with.
    pub unsafe fn upload(&self, to: DevicePtr, bytes: &[u8]) -> Result<(), CudaError> {
        self.ready()?;
        // SAFETY: the source lives until the wait below, the destination is the caller's promise.
        let started = check("cuMemcpyHtoDAsync_v2", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.raw())
        });
        let done = self.synchronize();
        started.and(done)
    }

    /// Starts copying the first `len` bytes of `from` to device memory at `to`.
    ///
    /// # Safety
    /// As for [`Stream::upload`]; and `from` is neither changed nor freed before the copy has happened.
    ///
    /// # Errors
    /// `len` is more than `from` has, or the context is lost.
    pub unsafe fn upload_pinned(&self, to: DevicePtr, from: &Pinned, len: usize) -> Result<(), CudaError> {
        let Some(source) = from.get(..len) else {
            return Err(CudaError::Range(format!("{len} bytes of a buffer of {}", from.len())));
        };
        self.ready()?;
        // SAFETY: the caller's promise.
        check("cuMemcpyHtoDAsync_v2", unsafe { sys::cuMemcpyHtoDAsync_v2(to, source.as_ptr().cast(), len, self.raw()) })
    }

    /// Copies device memory at `from` into `out` and waits until that is done.
    ///
    /// # Safety
    /// `from` is the start of `out.len()` bytes of mapped, readable device memory.
    ///
    /// # Errors
    /// What the copy, or something before it in the stream, failed with.
    pub unsafe fn download(&self, from: DevicePtr, out: &mut [u8]) -> Result<(), CudaError> {
        self.ready()?;
        // SAFETY: the target is ours until the wait below, the source is the caller's promise.
        let started = check("cuMemcpyDtoHAsync_v2", unsafe {
            sys::cuMemcpyDtoHAsync_v2(out.as_mut_ptr().cast(), from, out.len(), self.raw())
        });
        let done = self.synchronize();
        started.and(done)
    }

    /// Starts copying `len` bytes of device memory.
    ///
    /// # Safety
    /// Both are mapped ranges of `len` bytes, and do not overlap.
    ///
    /// # Errors
    /// The context is lost.
    pub unsafe fn copy(&self, to: DevicePtr, from: DevicePtr, len: usize) -> Result<(), CudaError> {
        self.context().bind()?;
        if self.queue().is_holding() {
            return self.queue().copy(self.context(), to, from, len);
        }
        // SAFETY: the caller's promise.
        check("cuMemcpyDtoDAsync_v2", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, len, self.raw()) })
    }

    /// Starts filling `len` bytes of device memory with `value`.
    ///
    /// # Safety
    /// `to` is the start of `len` bytes of mapped, writable device memory.
    ///
    /// # Errors
    /// The context is lost.
    pub unsafe fn fill(&self, to: DevicePtr, value: u8, len: usize) -> Result<(), CudaError> {
        self.ready()?;
        // SAFETY: the caller's promise.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(to, value, len, self.raw()) })
    }
}
