//! Modules (compiled kernels), their functions, and launches.

use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction_attribute_enum as Attribute, CUlaunchAttributeID_enum as LaunchAttribute};

use super::error::check;
use super::{Context, CudaError, Stream};

/// Shared memory that a block may have on every device that this program supports (GB10: 99 KiB).
pub const MAX_SHARED: u32 = 99 * 1024;

#[derive(Debug)]
struct Inner {
    raw: sys::CUmodule,
    context: Context,
}

// SAFETY: a module is a handle that any thread with the context current may use.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: loaded once, unloaded once, when no function of it is left.
            let _ = unsafe { sys::cuModuleUnload(self.raw) };
        }
    }
}

/// A loaded image of compiled kernels.
#[derive(Clone, Debug)]
pub struct Module(Arc<Inner>);

impl Module {
    /// Loads a fatbin.
    ///
    /// # Errors
    /// It has neither machine code nor PTX for the device (`CUDA_ERROR_NO_BINARY_FOR_GPU`), or it is damaged.
    pub fn load(context: &Context, image: &'static [u8]) -> Result<Self, CudaError> {
        context.bind()?;
        let mut raw = null_mut();
        // SAFETY: the image is a complete fatbin, which states its own length, and lives for ever.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut raw, image.as_ptr().cast()) })?;
        Ok(Self(Arc::new(Inner { raw, context: context.clone() })))
    }

    /// The kernel `name`.
    ///
    /// # Errors
    /// There is none.
    pub fn function(&self, name: &str) -> Result<Function, CudaError> {
        self.0.context.bind()?;
        let c_name = CString::new(name).map_err(|_| CudaError::Range(format!("kernel name {name:?}")))?;
        let mut raw = null_mut();
        // SAFETY: the pointers are valid for the call.
        check("cuModuleGetFunction", unsafe { sys::cuModuleGetFunction(&raw mut raw, self.0.raw, c_name.as_ptr()) })
            .map_err(|e| CudaError::Range(format!("kernel {name}: {e}")))?;
        let mut params = Vec::new();
        loop {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: the pointers are valid for the call; an index past the last parameter is an error, which ends the loop.
            let rc = unsafe { sys::cuFuncGetParamInfo(raw, params.len(), &raw mut offset, &raw mut size) };
            if check("cuFuncGetParamInfo", rc).is_err() {
                break;
            }
            params.push(size);
        }
        let mut shared = 0;
        // SAFETY: the pointer is valid for the call.
        check("cuFuncGetAttribute", unsafe {
            sys::cuFuncGetAttribute(&raw mut shared, Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, raw)
        })?;
        let fixed_shared = u32::try_from(shared).unwrap_or(u32::MAX);
        let room = i32::try_from(MAX_SHARED.saturating_sub(fixed_shared)).unwrap_or(0);
        // SAFETY: a function of ours; raises the limit from 48 KiB to what all devices have.
        check("cuFuncSetAttribute", unsafe {
            sys::cuFuncSetAttribute(raw, Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, room)
        })?;
        Ok(Function { raw, params, fixed_shared, name: name.to_owned(), module: self.clone() })
    }
}

/// A kernel. It knows the sizes of its parameters, and a launch with others is refused.
#[derive(Clone, Debug)]
pub struct Function {
    raw: sys::CUfunction,
    params: Vec<usize>,
    fixed_shared: u32,
    name: String,
    module: Module,
}

// SAFETY: a handle into the module, which it keeps.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// A value that a kernel takes as it lies in memory.
///
/// # Safety
/// The type is `repr(C)` or primitive, has no padding that matters and means the same to the device.
pub unsafe trait KernelArg {
    /// Its size.
    fn size(&self) -> usize;
    /// Its address.
    fn address(&self) -> *mut c_void;
}

/// Makes types kernel arguments.
#[macro_export]
#[doc(hidden)]
macro_rules! kernel_args {
    ($($t:ty),*) => { $(
        #[allow(unsafe_code, reason = "a promise about a type's layout")]
        // SAFETY: a primitive, or a `repr(C)` struct that mirrors the device's declaration.
        unsafe impl $crate::cuda::driver::module::KernelArg for $t {
            fn size(&self) -> usize { std::mem::size_of::<$t>() }
            fn address(&self) -> *mut std::ffi::c_void { std::ptr::from_ref(self).cast_mut().cast() }
        }
    )* };
}
kernel_args!(i32, u32, i64, u64, f32, f64);

/// How many blocks of how many threads, and each block's dynamic shared memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) shared: u32,
}

/// Whether a device of this compute capability starts kernels while the one before them runs (programmatic dependent launch).
pub(super) fn can_start_early(capability: (u32, u32)) -> bool {
    capability.0 >= 9
}

/// Starts a kernel, or records it where the stream is being recorded; the context is current.
///
/// `early`: as soon as every block of the kernel before it has called `after_previous` (common.cuh), so that its launch costs nothing
/// while that one runs. In the same call it waits for that kernel's end. Since every block of every kernel waits in this way before it
/// ends, a kernel ends after all those before it, not only after the last one. Recorded, this is a programmatic edge; what is not
/// a kernel (a copy) is waited for as a whole, before and after.
///
/// # Safety
/// The function takes as many parameters, of the sizes that lie at these addresses; the driver copies them in this call. Addresses of
/// device memory among them are of memory that the kernel may use as it does, until it has run. With `early`, the kernel calls
/// `after_previous` before it touches what the kernel before it writes, or writes what that one touches.
pub(super) unsafe fn start(
    function: sys::CUfunction,
    shape: Shape,
    stream: sys::CUstream,
    params: &mut [*mut c_void],
    early: bool,
) -> Result<(), CudaError> {
    let Shape { grid, block, shared } = shape;
    let mut attribute = sys::CUlaunchAttribute {
        id: LaunchAttribute::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let config = sys::CUlaunchConfig {
        gridDimX: grid[0],
        gridDimY: grid[1],
        gridDimZ: grid[2],
        blockDimX: block[0],
        blockDimY: block[1],
        blockDimZ: block[2],
        sharedMemBytes: shared,
        hStream: stream,
        attrs: &raw mut attribute,
        numAttrs: u32::from(early),
    };
    // SAFETY: the configuration and its attribute live for the call; the rest is the caller's promise.
    check("cuLaunchKernelEx", unsafe {
        sys::cuLaunchKernelEx(&raw const config, function, params.as_mut_ptr(), null_mut())
    })
}

impl Stream {
    /// Starts `function` on `grid` blocks of `block` threads with `shared` bytes of dynamic shared memory.
    ///
    /// # Safety
    /// Addresses among the arguments are of memory that the kernel may use as it does, until it has run.
    ///
    /// # Errors
    /// Number or sizes of the arguments are not the kernel's, more than [`MAX_SHARED`] is asked for, or what the driver says.
    pub unsafe fn launch(
        &self,
        function: &Function,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        args: &[&dyn KernelArg],
    ) -> Result<(), CudaError> {
        let sizes = args.iter().map(|a| a.size());
        if args.len() != function.params.len() || !sizes.eq(function.params.iter().copied()) {
            let sizes: Vec<_> = args.iter().map(|a| a.size()).collect();
            let text = format!("kernel {} takes {:?} bytes, not {sizes:?}", function.name, function.params);
            return Err(CudaError::Range(text));
        }
        if shared.saturating_add(function.fixed_shared) > MAX_SHARED {
            let text = format!("kernel {} with {shared} bytes of shared memory; {MAX_SHARED} at most", function.name);
            return Err(CudaError::Range(text));
        }
        if grid.contains(&0) {
            return Ok(());
        }
        self.context().bind()?;
        if self.queue().is_holding() {
            let args = args.iter().map(|a| (a.address().cast_const().cast(), a.size()));
            // SAFETY: arguments are alive and of their sizes, which were compared with the function's.
            return unsafe { self.queue().launch(self.context(), function.raw, Shape { grid, block, shared }, args) };
        }
        let mut params: Vec<*mut c_void> = args.iter().map(|a| a.address()).collect();
        let shape = Shape { grid, block, shared };
        // SAFETY: the function is of this context; as many parameters as it has, each of its size, alive for the call; what they
        // point to is the caller's promise.
        unsafe { start(function.raw, shape, self.raw(), &mut params, self.queue().is_early()) }.map_err(|e| match e {
            CudaError::Call { call, code, name, sticky } => {
                CudaError::Call { call, code, name: format!("{name}, kernel {}", function.name), sticky }
            }
            other => other,
        })
    }
}

impl Function {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its module.
    pub fn module(&self) -> &Module {
        &self.module
    }
}
