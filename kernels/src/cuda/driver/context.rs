//! The primary context of a device, shared by everything in a process that uses the device.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::sys;

use super::error::check;
use super::queue::Queue;
use super::{CudaError, DeviceInfo, Driver, device};

/// Bytes of stack that the driver keeps for every thread that the device can run. Its own choice, 1 KiB, is 264 MiB of an H200; our kernels
/// have no call whose depth is unknown, and memory for those with a stack (40 bytes, for sines in f64) grows when they are launched.
const STACK: usize = 64;

/// A retained primary context. Clones share it; the last one gives it back, and with it all memory of the process on the
/// device. Creating it costs 115–150 ms on an H200.
#[derive(Clone, Debug)]
pub struct Context {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    raw: sys::CUcontext,
    device: sys::CUdevice,
    info: DeviceInfo,
    driver: Driver,
    /// Of streams that have ever been held.
    queues: Mutex<Vec<Weak<Queue>>>,
    watching: AtomicBool,
}

// SAFETY: a context may be current in, and used by, any number of threads at once (driver API reference, "Context
// Management"); what changes is behind a mutex.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: retained once by `Context::new`, released once here. A failure leaves nothing to do.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl Context {
    /// Retains the primary context of device `ordinal` and makes it current in this thread.
    ///
    /// # Errors
    /// There is no such device, or the driver cannot set it up (another process may hold all of its memory).
    pub fn new(driver: Driver, ordinal: u32) -> Result<Self, CudaError> {
        let info = DeviceInfo::query(driver, ordinal)?;
        let device = device::raw(driver, ordinal)?;
        let mut raw = null_mut();
        // SAFETY: the pointer is valid for the call; the device is the driver's own.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut raw, device) })?;
        let context = Self {
            inner: Arc::new(Inner {
                raw,
                device,
                info,
                driver,
                queues: Mutex::default(),
                watching: AtomicBool::new(false),
            }),
        };
        context.bind()?;
        // SAFETY: a context is current.
        check("cuCtxSetLimit", unsafe { sys::cuCtxSetLimit(sys::CUlimit::CU_LIMIT_STACK_SIZE, STACK) })?;
        Ok(context)
    }

    /// Makes it current in this thread. Every operation of this layer does that by itself; it costs well under a
    /// microsecond.
    ///
    /// # Errors
    /// The context is lost.
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained as long as `self` lives.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.inner.raw) })
    }

    /// Lets [`Context::flush_quietly`] know of a queue.
    pub(super) fn watch(&self, queue: &Arc<Queue>) {
        let mut queues = self.inner.queues.lock().unwrap_or_else(PoisonError::into_inner);
        if !queues.iter().any(|q| std::ptr::eq(q.as_ptr(), Arc::as_ptr(queue))) {
            queues.retain(|q| q.strong_count() > 0);
            queues.push(Arc::downgrade(queue));
            self.inner.watching.store(true, Ordering::Relaxed);
        }
    }

    /// Starts what streams hold back: to be called before memory that it may use is given back. The context is current.
    pub(super) fn flush_quietly(&self) {
        if self.inner.watching.load(Ordering::Relaxed) {
            let queues = self.inner.queues.lock().unwrap_or_else(PoisonError::into_inner).clone();
            queues.iter().filter_map(Weak::upgrade).for_each(|q| q.flush_quietly(self));
        }
    }

    /// The device.
    pub fn device(&self) -> &DeviceInfo {
        &self.inner.info
    }

    /// The driver.
    pub fn driver(&self) -> Driver {
        self.inner.driver
    }

    /// Bytes of device memory that are free and that there are, as the driver sees them now.
    ///
    /// # Errors
    /// The context is lost.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: both pointers are valid for the call, and a context is current.
        check("cuMemGetInfo_v2", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok((free as u64, total as u64))
    }

    /// Waits for everything that was started in this context, by any thread.
    ///
    /// # Errors
    /// What one of these operations failed with.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        self.flush_quietly();
        // SAFETY: a context is current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }
}
