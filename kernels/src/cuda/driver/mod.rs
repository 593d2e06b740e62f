//! The CUDA driver API behind safe owners. Nothing here needs nvcc or a CUDA installation to build: libcuda is opened at
//! run time, and a machine without it gets [`CudaError::NoDriver`], never a panic.
//!
//! | module | owns |
//! |---|---|
//! | [`device`] | nothing: what a device is and can do |
//! | [`context`] | the device's primary context |
//! | [`stream`] | streams and events |
//! | [`pinned`] | page-locked host memory, and staging that copies through it |
//! | [`memory`] | plain device memory; copies in a stream's order |
//! | [`module`] | compiled kernels and their launches |
//! | [`graph`] | recorded runs of a stream |
//! | [`queue`] | launches held back, and the graphs that they are replayed as |
//! | [`timeline`] | what a step put into a stream, to be timed launch by launch |
//! | [`refuse`] | nothing: allocations that fail on purpose, for tests |
//! | [`vmm`] | physical memory with descriptors, address space, and the mappings between them |
//!
//! Every owner holds the context that it lives in, and frees what it owns on drop; fields are declared in the order in
//! which they must go.
#![allow(unsafe_code, reason = "calls of the driver's C interface")]

pub mod context;
pub mod device;
pub mod error;
pub mod graph;
pub mod memory;
pub mod module;
pub mod pinned;
pub mod queue;
pub mod refuse;
pub mod stream;
pub mod timeline;
pub mod vmm;

use std::sync::OnceLock;

use cudarc::driver::sys;

pub use context::Context;
pub use device::DeviceInfo;
pub use error::CudaError;
pub use graph::Graph;
pub use memory::Memory;
pub use module::{Function, KernelArg, Module};
pub use pinned::{Pinned, Staging};
pub use queue::Held;
pub use stream::{Event, Stream};
pub use timeline::Timeline;
pub use vmm::{Access, Physical, Space};

use error::check;

/// Oldest driver that has every function which this layer calls (CUDA 12.8; drivers number 1000 × major + 10 × minor).
pub const MIN_VERSION: u32 = 12_080;

/// The driver, present and initialised.
#[derive(Clone, Copy, Debug)]
pub struct Driver {
    version: u32,
    devices: u32,
}

impl Driver {
    /// Opens libcuda and initialises it; later calls are free.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`] without a libcuda, [`CudaError::OldDriver`], [`CudaError::NoDevice`] when it drives
    /// nothing, or what the driver said.
    pub fn open() -> Result<Self, CudaError> {
        static OPENED: OnceLock<Result<Driver, CudaError>> = OnceLock::new();
        OPENED.get_or_init(Self::open_once).clone()
    }

    fn open_once() -> Result<Self, CudaError> {
        // cudarc panics when it does not find the library, so it is asked first.
        // SAFETY: opens a shared library by its well-known name; the driver's initialisers are as trusted as the driver.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        let mut version = 0;
        // SAFETY: the pointer is valid for the call, which is allowed before cuInit.
        check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
        let version = u32::try_from(version).unwrap_or(0);
        if version < MIN_VERSION {
            return Err(CudaError::OldDriver { found: version });
        }
        // SAFETY: no arguments but the flags, which must be 0.
        check("cuInit", unsafe { sys::cuInit(0) })?;
        let mut devices = 0;
        // SAFETY: the pointer is valid for the call.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut devices) })?;
        match u32::try_from(devices) {
            Ok(devices) if devices > 0 => Ok(Self { version, devices }),
            _ => Err(CudaError::NoDevice),
        }
    }

    /// 1000 × major + 10 × minor of the CUDA version that the driver supports.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// How many devices it drives (CUDA_VISIBLE_DEVICES applied); at least 1.
    pub fn devices(&self) -> u32 {
        self.devices
    }
}
