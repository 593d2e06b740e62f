//! A `libcuda.so.1` without a GPU: the part of the driver API that owner and workers use to hold, pass and map weights.
//!
//! It is meant to be stricter than the real driver, so that code which passes here does not rely on luck:
//!
//! * "device memory" is memfds; a descriptor that is exported keeps them, as with the real driver, and what is free is
//!   counted over all processes that hold a descriptor (so leaks and killed processes show);
//! * copies run as late as allowed, when somebody waits for them: a buffer that is reused too early corrupts data;
//! * host memory that is not page-locked, ranges that are not mapped or not accessible, memory that was imported and is
//!   exported again, and calls without a current context are errors;
//! * kernels do nothing, those of a load excepted ([`kernels`]); but a launch is refused that does not fit the kernel as it was
//!   compiled (its parameters are what its image says, see [`image`]); what a real stream cannot do while it is recorded is an error.
//!
//! Environment:
//!
//! | variable | meaning |
//! |---|---|
//! | `FAKE_CUDA_TAG` | names this card: processes with the same tag share its memory |
//! | `FAKE_CUDA_TOTAL_MIB` | its memory (1024) |
//! | `FAKE_CUDA_DEVICES` | number of devices, 0 or 1 (1) |
//! | `FAKE_CUDA_UUID` | every byte of the UUID, decimal (17) |
//! | `FAKE_CUDA_INTEGRATED`, `FAKE_CUDA_VMM` | attributes, 0 or 1 (0, 1) |
//! | `FAKE_CUDA_ARCH` | 90, as an H200, or 121, as a GB10: multiprocessors, shared memory, and which machine code is read (90) |
//! | `FAKE_CUDA_VERSION` | what cuDriverGetVersion says (13000) |
//! | `FAKE_CUDA_FAIL` | `function:n:code,…`: the n-th call of a function in a process fails; 700 and above stay |
//! | `FAKE_CUDA_COPY_US` | every copy takes at least this many microseconds |
//! | `FAKE_CUDA_PAGEABLE` | 1: copies from and to memory that is not page-locked happen at once, as the real driver does them |
//! | `FAKE_CUDA_FLIP` | the n-th copy to the device of a process arrives with one bit wrong |
//! | `FAKE_CUDA_LOG` | a file that gets a line for every call: its name, and what [`State::said`] says of it |
#![allow(unsafe_code, reason = "a C interface that trades in raw pointers")]
#![allow(non_snake_case, reason = "the driver's names")]
#![allow(missing_docs, clippy::missing_safety_doc, reason = "the driver's reference describes these functions")]

mod card;
mod graphs;
mod image;
mod kernels;
mod memory;
mod modules;
mod streams;

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::io::Write as _;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A CUresult that is no success.
type Code = c_int;
pub(crate) const INVALID_VALUE: Code = 1;
pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NOT_INITIALIZED: Code = 3;
pub(crate) const NO_DEVICE: Code = 100;
pub(crate) const INVALID_DEVICE: Code = 101;
pub(crate) const INVALID_CONTEXT: Code = 201;
pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const ILLEGAL_ADDRESS: Code = 700;
pub(crate) const CAPTURE_UNSUPPORTED: Code = 900;

/// The only context's handle.
const CONTEXT: usize = 0x00c0_ffee;

#[derive(Default)]
struct State {
    initialised: bool,
    contexts: u32,
    calls: Vec<(&'static str, u32)>,
    memory: memory::Memory,
    streams: streams::Streams,
    modules: modules::Modules,
    graphs: graphs::Graphs,
    /// Of the call under way, for the log: bytes of a copy or an allocation, a kernel's name, operations of a graph, operations that
    /// had not happened when somebody began to wait for them.
    said: String,
    log: Option<Option<File>>,
}

impl State {
    fn say(&mut self, what: impl ToString) {
        self.said = what.to_string();
    }

    fn write_log(&mut self, name: &str) {
        if let Some(file) = self.log.get_or_insert_with(card::log) {
            // A log that cannot be written lacks the line that a test looks for.
            let _ = file.write_all(format!("{name} {}\n", self.said).as_bytes());
        }
        self.said.clear();
    }
}

static STATE: Mutex<Option<State>> = Mutex::new(None);
static STICKY: AtomicI32 = AtomicI32::new(0);

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// Counts the call, fails it when told to, then runs `body` on the state.
fn call(name: &'static str, needs_context: bool, body: impl FnOnce(&mut State) -> Result<(), Code>) -> c_int {
    let sticky = STICKY.load(Ordering::Relaxed);
    if sticky != 0 {
        return sticky;
    }
    let mut guard: MutexGuard<'_, Option<State>> = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    let state = guard.get_or_insert_default();
    let nth = match state.calls.iter_mut().find(|(known, _)| *known == name) {
        Some((_, count)) => {
            *count += 1;
            *count
        }
        None => {
            state.calls.push((name, 1));
            1
        }
    };
    let result = match card::failure(name, nth) {
        Some(code) => Err(code),
        None if needs_context && !state.initialised => Err(NOT_INITIALIZED),
        None if needs_context && CURRENT.get() != CONTEXT => Err(INVALID_CONTEXT),
        None => body(state),
    };
    state.write_log(name);
    match result {
        Ok(()) => 0,
        Err(code) => {
            if code >= ILLEGAL_ADDRESS {
                STICKY.store(code, Ordering::Relaxed);
            }
            code
        }
    }
}

/// Writes a result through a pointer of the caller.
fn put<T>(to: *mut T, value: T) -> Result<(), Code> {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller of the driver's function passes a pointer to a `T`, which its reference asks for.
    unsafe { to.write(value) };
    Ok(())
}

fn device(ordinal: c_int) -> Result<(), Code> {
    if ordinal >= 0 && ordinal < card::devices() { Ok(()) } else { Err(INVALID_DEVICE) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> c_int {
    call("cuInit", false, |state| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if card::devices() == 0 {
            return Err(NO_DEVICE);
        }
        state.initialised = true;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    call("cuDriverGetVersion", false, |_| put(version, card::version()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    call("cuDeviceGetCount", false, |_| put(count, card::devices()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(to: *mut c_int, ordinal: c_int) -> c_int {
    call("cuDeviceGet", false, |_| device(ordinal).and_then(|()| put(to, ordinal)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, of: c_int) -> c_int {
    call("cuDeviceGetName", false, |_| {
        device(of)?;
        const NAME: &[u8] = b"Fake H200\0";
        if name.is_null() || usize::try_from(len).unwrap_or(0) < NAME.len() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's buffer has `len` bytes, which are enough.
        unsafe { name.cast::<u8>().copy_from_nonoverlapping(NAME.as_ptr(), NAME.len()) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], of: c_int) -> c_int {
    call("cuDeviceGetUuid_v2", false, |_| device(of).and_then(|()| put(uuid, [card::uuid(); 16])))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, of: c_int) -> c_int {
    call("cuDeviceTotalMem_v2", false, |_| device(of).and_then(|()| put(bytes, card::total())))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, of: c_int) -> c_int {
    call("cuDeviceGetAttribute", false, |_| device(of).and_then(|()| put(value, card::attribute(attribute))))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, of: c_int) -> c_int {
    call("cuDevicePrimaryCtxRetain", false, |state| {
        device(of)?;
        if !state.initialised {
            return Err(NOT_INITIALIZED);
        }
        state.contexts += 1;
        put(context, CONTEXT)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(of: c_int) -> c_int {
    call("cuDevicePrimaryCtxRelease_v2", false, |state| {
        device(of)?;
        state.contexts = state.contexts.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: usize) -> c_int {
    call("cuCtxSetCurrent", false, |state| {
        if context != 0 && (context != CONTEXT || state.contexts == 0) {
            return Err(INVALID_CONTEXT);
        }
        CURRENT.set(context);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetLimit(_limit: c_int, _value: usize) -> c_int {
    call("cuCtxSetLimit", true, |_| Ok(()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> c_int {
    call("cuCtxSynchronize", true, |state| {
        let ran = state.streams.run_all(&state.memory)?;
        state.say(ran);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    call("cuMemGetInfo_v2", true, |state| {
        put(free, state.memory.free())?;
        put(total, card::total())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAllocationGranularity(
    granularity: *mut usize,
    properties: *const memory::Properties,
    _option: c_int,
) -> c_int {
    call("cuMemGetAllocationGranularity", true, |_| {
        memory::check_properties(properties)?;
        put(granularity, memory::GRANULARITY)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemCreate(
    handle: *mut u64,
    size: usize,
    properties: *const memory::Properties,
    flags: u64,
) -> c_int {
    call("cuMemCreate", true, |state| {
        memory::check_properties(properties)?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        put(handle, state.memory.create(size)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemRelease(handle: u64) -> c_int {
    call("cuMemRelease", true, |state| state.memory.release(handle))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemExportToShareableHandle(to: *mut c_int, handle: u64, kind: c_int, flags: u64) -> c_int {
    call("cuMemExportToShareableHandle", true, |state| {
        if kind != memory::POSIX || flags != 0 {
            return Err(INVALID_VALUE);
        }
        put(to, state.memory.export(handle)?)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemImportFromShareableHandle(handle: *mut u64, fd: *mut c_void, kind: c_int) -> c_int {
    call("cuMemImportFromShareableHandle", true, |state| {
        if kind != memory::POSIX {
            return Err(INVALID_VALUE);
        }
        let fd = c_int::try_from(fd.addr()).map_err(|_| INVALID_VALUE)?;
        put(handle, state.memory.import(fd)?)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAddressReserve(to: *mut u64, size: usize, _align: usize, at: u64, flags: u64) -> c_int {
    call("cuMemAddressReserve", true, |state| {
        if at != 0 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        put(to, state.memory.reserve(size)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressFree(at: u64, size: usize) -> c_int {
    call("cuMemAddressFree", true, |state| state.memory.unreserve(at, size))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemMap(at: u64, size: usize, offset: usize, handle: u64, flags: u64) -> c_int {
    call("cuMemMap", true, |state| {
        if offset != 0 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        state.memory.map(at, size, handle)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemUnmap(at: u64, size: usize) -> c_int {
    call("cuMemUnmap", true, |state| state.memory.unmap(at, size))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemSetAccess(at: u64, size: usize, access: *const memory::Access, count: usize) -> c_int {
    call("cuMemSetAccess", true, |state| {
        if access.is_null() || count != 1 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller passes `count` descriptors.
        let access = unsafe { access.read() };
        state.memory.allow(at, size, access)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(to: *mut *mut c_void, size: usize, _flags: c_uint) -> c_int {
    call("cuMemHostAlloc", true, |state| put(to, state.memory.pin(size)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(start: *mut c_void) -> c_int {
    call("cuMemFreeHost", true, |state| {
        let range = state.memory.pinned(start.addr())?;
        // The real driver lets a copy go on reading memory that is gone.
        if state.streams.uses(&range) {
            return Err(ILLEGAL_ADDRESS);
        }
        state.memory.unpin(start)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(to: *mut u64, _flags: c_uint) -> c_int {
    call("cuStreamCreate", true, |state| put(to, state.streams.create()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: u64) -> c_int {
    call("cuStreamDestroy_v2", true, |state| state.streams.destroy(stream, &state.memory))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: u64) -> c_int {
    call("cuStreamSynchronize", true, |state| {
        let ran = state.streams.run(stream, u64::MAX, &state.memory)?;
        state.say(ran);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, _flags: c_uint) -> c_int {
    call("cuStreamWaitEvent", true, |state| {
        state.streams.check(stream)?;
        state.streams.wait(event, &state.memory).map(drop)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(to: *mut u64, _flags: c_uint) -> c_int {
    call("cuEventCreate", true, |state| put(to, state.streams.create_event()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: u64) -> c_int {
    call("cuEventDestroy_v2", true, |state| state.streams.destroy_event(event))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: u64, stream: u64) -> c_int {
    call("cuEventRecord", true, |state| state.streams.record(event, stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: u64) -> c_int {
    call("cuEventSynchronize", true, |state| {
        let ran = state.streams.wait(event, &state.memory)?;
        state.say(ran);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(to: *mut u64, size: usize) -> c_int {
    call("cuMemAlloc_v2", true, |state| {
        state.say(size);
        state.streams.refuse_while_recording()?;
        put(to, state.memory.alloc(size)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(at: u64) -> c_int {
    call("cuMemFree_v2", true, |state| {
        let ran = state.streams.run_all(&state.memory)?;
        state.say(ran);
        state.memory.free_plain(at)
    })
}

/// Nothing takes time here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime_v2(to: *mut f32, _start: u64, _end: u64) -> c_int {
    call("cuEventElapsedTime_v2", true, |_| put(to, 0.001))
}

/// A copy between device and host.
fn host_copy(state: &mut State, host: usize, len: usize, stream: u64, op: streams::Op) -> Result<(), Code> {
    state.say(len);
    if state.memory.check_pinned(host, len).is_ok() {
        return state.streams.push(stream, op);
    }
    if !card::pageable() {
        return Err(INVALID_VALUE);
    }
    let ran = state.streams.run(stream, u64::MAX, &state.memory)?;
    state.say(format!("{len} pageable, after {ran}"));
    op.run_pageable(&state.memory)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, len: usize, stream: u64) -> c_int {
    call("cuMemcpyHtoDAsync_v2", true, |state| {
        state.memory.check_access(to, len, true)?;
        host_copy(state, from.addr(), len, stream, streams::Op::Upload { to, from: from.expose_provenance(), len })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, len: usize, stream: u64) -> c_int {
    call("cuMemcpyDtoHAsync_v2", true, |state| {
        state.memory.check_access(from, len, false)?;
        host_copy(state, to.addr(), len, stream, streams::Op::Download { to: to.expose_provenance(), from, len })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: u64) -> c_int {
    call("cuMemcpyDtoDAsync_v2", true, |state| {
        state.say(len);
        state.memory.check_access(from, len, false)?;
        state.memory.check_access(to, len, true)?;
        state.streams.push(stream, streams::Op::Copy { to, from, len })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(to: u64, value: u8, len: usize, stream: u64) -> c_int {
    call("cuMemsetD8Async", true, |state| {
        state.memory.check_access(to, len, true)?;
        state.streams.push(stream, streams::Op::Fill { to, value, len })
    })
}
