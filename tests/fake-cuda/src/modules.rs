//! Modules, their kernels, and launches.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::image::{self, Kernel};
use crate::kernels::Work;
use crate::streams::Op;
use crate::{Code, INVALID_HANDLE, INVALID_VALUE, call, card, put};

const NOT_FOUND: Code = 500;
/// Numbers of CUfunction_attribute.
const SHARED_SIZE: c_int = 1;
const MAX_DYNAMIC_SHARED: c_int = 8;
/// Shared memory that a block may have without asking.
const USUAL_SHARED: usize = 48 << 10;

struct Function {
    module: u64,
    kernel: Kernel,
    dynamic: usize,
}

#[derive(Default)]
pub struct Modules {
    last: u64,
    modules: HashMap<u64, Vec<Kernel>>,
    functions: HashMap<u64, Function>,
}

impl Modules {
    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn function(&mut self, function: u64) -> Result<&mut Function, Code> {
        self.functions.get_mut(&function).ok_or(INVALID_HANDLE)
    }
}

/// CUlaunchConfig. What its attributes ask for makes no difference here.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Launch {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: u64,
    attributes: *const c_void,
    count: c_uint,
}

impl Launch {
    fn check(&self, function: &Function) -> Result<(), Code> {
        let most = function.kernel.threads.unwrap_or([1024; 3]);
        let threads = |block: [c_uint; 3]| block.iter().fold(1u32, |n, b| n.saturating_mul(*b));
        let fits =
            self.grid.iter().zip([i32::MAX.cast_unsigned(), 65_535, 65_535]).all(|(n, most)| (1..=most).contains(n))
                && (1..=threads(most).min(1024)).contains(&threads(self.block))
                && usize::try_from(self.shared).is_ok_and(|n| n <= function.dynamic);
        if fits { Ok(()) } else { Err(INVALID_VALUE) }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(to: *mut u64, image: *const c_void) -> c_int {
    call("cuModuleLoadData", true, |state| {
        if image.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller passes a fatbin, which begins with this header.
        let header = unsafe { image.cast::<[u8; 16]>().read() };
        // SAFETY: a fatbin is as long as its header says.
        let image = unsafe { std::slice::from_raw_parts(image.cast::<u8>(), image::len(&header)?) };
        let id = state.modules.next();
        state.modules.modules.insert(id, image::kernels(image, card::architecture())?);
        put(to, id)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: u64) -> c_int {
    call("cuModuleUnload", true, |state| {
        state.modules.functions.retain(|_, f| f.module != module);
        state.modules.modules.remove(&module).map(drop).ok_or(INVALID_HANDLE)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(to: *mut u64, module: u64, name: *const c_char) -> c_int {
    call("cuModuleGetFunction", true, |state| {
        if name.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller passes a C string.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let kernels = state.modules.modules.get(&module).ok_or(INVALID_HANDLE)?;
        let kernel = kernels.iter().find(|k| k.name == name).cloned().ok_or(NOT_FOUND)?;
        let dynamic = USUAL_SHARED.saturating_sub(kernel.shared);
        let id = state.modules.next();
        state.modules.functions.insert(id, Function { module, kernel, dynamic });
        put(to, id)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetParamInfo(
    function: u64,
    index: usize,
    offset: *mut usize,
    size: *mut usize,
) -> c_int {
    call("cuFuncGetParamInfo", true, |state| {
        let param = state.modules.function(function)?.kernel.params.get(index).copied().ok_or(INVALID_VALUE)?;
        put(offset, param.0)?;
        put(size, param.1)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: u64) -> c_int {
    call("cuFuncGetAttribute", true, |state| {
        let shared = c_int::try_from(state.modules.function(function)?.kernel.shared).map_err(|_| INVALID_VALUE)?;
        if attribute == SHARED_SIZE { put(value, shared) } else { Err(INVALID_VALUE) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(function: u64, attribute: c_int, value: c_int) -> c_int {
    call("cuFuncSetAttribute", true, |state| {
        let function = state.modules.function(function)?;
        let value = usize::try_from(value).map_err(|_| INVALID_VALUE)?;
        if attribute != MAX_DYNAMIC_SHARED || value + function.kernel.shared > card::shared() {
            return Err(INVALID_VALUE);
        }
        function.dynamic = value;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernelEx(
    launch: *const Launch,
    function: u64,
    params: *const *const c_void,
    extra: *const c_void,
) -> c_int {
    call("cuLaunchKernelEx", true, |state| {
        if launch.is_null() || !extra.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller passes a CUlaunchConfig.
        let launch = unsafe { launch.read() };
        let function = state.modules.function(function)?;
        launch.check(function)?;
        let name = function.kernel.name.clone();
        let mut args = Vec::new();
        for (i, (_, size)) in function.kernel.params.iter().enumerate() {
            // SAFETY: the caller passes as many pointers as the kernel has parameters.
            let arg = if params.is_null() { std::ptr::null() } else { unsafe { params.add(i).read() } };
            if arg.is_null() {
                return Err(INVALID_VALUE);
            }
            // SAFETY: each of them leads to an argument of the parameter's size.
            args.push(unsafe { std::slice::from_raw_parts(arg.cast::<u8>(), *size) }.to_vec());
        }
        let work = Work::of(&name, launch.grid, &args)?;
        state.say(name);
        state.streams.push(launch.stream, Op::Kernel(work))
    })
}
