//! Handles, address space, mappings and page-locked host memory.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, c_int, c_void};
use std::ops::Range;
use std::ptr::null_mut;

use crate::{Code, ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_VALUE, OUT_OF_MEMORY, card};

pub const GRANULARITY: usize = 2 << 20;
const SMALL: usize = 1 << 20;
/// CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.
pub const POSIX: c_int = 1;
const PINNED: c_int = 1;
const DEVICE: c_int = 1;

/// CUmemLocation.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    kind: c_int,
    id: c_int,
}

/// CUmemAllocationProp up to what is looked at.
#[repr(C)]
pub struct Properties {
    kind: c_int,
    handles: c_int,
    location: Location,
}

/// CUmemAccessDesc.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Access {
    location: Location,
    flags: c_int,
}

pub fn check_properties(properties: *const Properties) -> Result<(), Code> {
    if properties.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller passes a CUmemAllocationProp, which begins with these fields.
    let p = unsafe { properties.read() };
    let fits = p.kind == PINNED && p.handles == POSIX && p.location.kind == DEVICE && p.location.id == 0;
    if fits { Ok(()) } else { Err(INVALID_VALUE) }
}

struct Handle {
    fd: c_int,
    size: usize,
    imported: bool,
}

struct Mapping {
    size: usize,
    /// Negative for memory that was not mapped but allocated.
    fd: c_int,
    /// 0 none, 1 read, 3 read and write.
    access: c_int,
}

#[derive(Default)]
pub struct Memory {
    last: u64,
    handles: HashMap<u64, Handle>,
    reserved: BTreeMap<u64, usize>,
    mapped: BTreeMap<u64, Mapping>,
    pinned: BTreeMap<usize, usize>,
    /// Bytes of memory that no descriptor leads to. Other processes do not see that they are taken.
    plain: usize,
}

fn address(at: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(at).unwrap_or(0))
}

fn close(fd: c_int) {
    // SAFETY: the fake's own descriptor, closed once.
    unsafe { libc::close(fd) };
}

fn duplicate(fd: c_int) -> Result<c_int, Code> {
    // SAFETY: no memory is involved; a bad descriptor is an error.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    if copy < 0 { Err(INVALID_VALUE) } else { Ok(copy) }
}

fn map_at(at: *mut c_void, size: usize, protection: c_int, flags: c_int, fd: c_int) -> Result<usize, Code> {
    // SAFETY: either nothing is at `at` (null), or it lies in a range that this fake reserved.
    let got = unsafe { libc::mmap(at, size, protection, flags, fd, 0) };
    if got == libc::MAP_FAILED { Err(OUT_OF_MEMORY) } else { Ok(got.expose_provenance()) }
}

/// Real memory is not zero: whoever wants zeros must write them.
fn soil(at: usize, size: usize) {
    for page in (0..size).step_by(4096) {
        // SAFETY: inside a mapping of whole pages that was just made.
        unsafe { address((at + page) as u64).cast::<u8>().write_bytes(0xa5, 512) };
    }
}

impl Memory {
    /// What is free on the card.
    pub fn free(&self) -> usize {
        card::free().saturating_sub(self.plain)
    }

    /// Memory of this process alone.
    pub fn alloc(&mut self, size: usize) -> Result<u64, Code> {
        if size == 0 {
            return Err(INVALID_VALUE);
        }
        // Counting what is free looks at every process, which takes milliseconds: small pieces need not fit what others left.
        let free = if size > SMALL { self.free() } else { card::total().saturating_sub(self.plain) };
        if size > free {
            return Err(OUT_OF_MEMORY);
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let at = map_at(null_mut(), size, libc::PROT_READ | libc::PROT_WRITE, flags, -1)?;
        soil(at, size.min(SMALL));
        self.plain += size;
        self.mapped.insert(at as u64, Mapping { size, fd: -1, access: 3 });
        Ok(at as u64)
    }

    pub fn free_plain(&mut self, at: u64) -> Result<(), Code> {
        let size = self.mapped.get(&at).filter(|m| m.fd < 0).ok_or(INVALID_VALUE)?.size;
        self.mapped.remove(&at);
        self.plain -= size;
        // SAFETY: mapped by `alloc` with this size.
        unsafe { libc::munmap(address(at), size) };
        Ok(())
    }

    fn handle(&self, handle: u64) -> Result<&Handle, Code> {
        self.handles.get(&handle).ok_or(INVALID_HANDLE)
    }

    fn insert(&mut self, handle: Handle) -> u64 {
        self.last += 1;
        self.handles.insert(self.last, handle);
        self.last
    }

    pub fn create(&mut self, size: usize) -> Result<u64, Code> {
        if size == 0 || !size.is_multiple_of(GRANULARITY) {
            return Err(INVALID_VALUE);
        }
        if size > self.free() {
            return Err(OUT_OF_MEMORY);
        }
        let name = CString::new(card::memfd_name()).map_err(|_| INVALID_VALUE)?;
        // SAFETY: the name is a C string that lives through the call.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
        let len = libc::off_t::try_from(size).map_err(|_| INVALID_VALUE)?;
        // SAFETY: no memory is involved.
        if fd < 0 || unsafe { libc::ftruncate(fd, len) } < 0 {
            return Err(OUT_OF_MEMORY);
        }
        let at = map_at(null_mut(), size, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd)?;
        soil(at, size);
        // SAFETY: the mapping that was just made.
        unsafe { libc::munmap(address(at as u64), size) };
        Ok(self.insert(Handle { fd, size, imported: false }))
    }

    pub fn release(&mut self, handle: u64) -> Result<(), Code> {
        let handle = self.handles.remove(&handle).ok_or(INVALID_HANDLE)?;
        close(handle.fd);
        Ok(())
    }

    pub fn export(&self, handle: u64) -> Result<c_int, Code> {
        let handle = self.handle(handle)?;
        if handle.imported { Err(INVALID_VALUE) } else { duplicate(handle.fd) }
    }

    pub fn import(&mut self, fd: c_int) -> Result<u64, Code> {
        let link = std::fs::read_link(format!("/proc/self/fd/{fd}")).map_err(|_| INVALID_VALUE)?;
        if !link.to_string_lossy().starts_with(&format!("/memfd:{} ", card::memfd_name())) {
            return Err(INVALID_VALUE);
        }
        let len = std::fs::metadata(format!("/proc/self/fd/{fd}")).map_err(|_| INVALID_VALUE)?.len();
        let size = usize::try_from(len).map_err(|_| INVALID_VALUE)?;
        let fd = duplicate(fd)?;
        Ok(self.insert(Handle { fd, size, imported: true }))
    }

    pub fn reserve(&mut self, size: usize) -> Result<u64, Code> {
        if size == 0 || !size.is_multiple_of(GRANULARITY) {
            return Err(INVALID_VALUE);
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let at = map_at(null_mut(), size, libc::PROT_NONE, flags, -1)? as u64;
        self.reserved.insert(at, size);
        Ok(at)
    }

    pub fn unreserve(&mut self, at: u64, size: usize) -> Result<(), Code> {
        let end = at.saturating_add(size as u64);
        if self.reserved.get(&at) != Some(&size) || self.mapped.range(at..end).next().is_some() {
            return Err(INVALID_VALUE);
        }
        self.reserved.remove(&at);
        // SAFETY: reserved as a whole, nothing of the fake's is left in it.
        unsafe { libc::munmap(address(at), size) };
        Ok(())
    }

    pub fn map(&mut self, at: u64, size: usize, handle: u64) -> Result<(), Code> {
        let end = at.checked_add(size as u64).ok_or(INVALID_VALUE)?;
        let (start, len) = self.reserved.range(..=at).next_back().ok_or(INVALID_VALUE)?;
        let free = self.mapped.range(..end).next_back().is_none_or(|(other, m)| other + m.size as u64 <= at);
        let handle = self.handle(handle)?;
        if size == 0
            || size != handle.size
            || end > start + *len as u64
            || !free
            || !(at - start).is_multiple_of(GRANULARITY as u64)
        {
            return Err(INVALID_VALUE);
        }
        let fd = duplicate(handle.fd)?;
        map_at(address(at), size, libc::PROT_NONE, libc::MAP_SHARED | libc::MAP_FIXED, fd)?;
        self.mapped.insert(at, Mapping { size, fd, access: 0 });
        Ok(())
    }

    pub fn unmap(&mut self, at: u64, size: usize) -> Result<(), Code> {
        if self.mapped.get(&at).is_none_or(|m| m.size != size || m.fd < 0) {
            return Err(INVALID_VALUE);
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        map_at(address(at), size, libc::PROT_NONE, flags, -1)?;
        if let Some(mapping) = self.mapped.remove(&at) {
            close(mapping.fd);
        }
        Ok(())
    }

    /// The mappings that make up exactly or partly `at .. at + size`, without gaps.
    fn covering(&self, at: u64, size: usize) -> Result<Vec<u64>, Code> {
        let end = at.checked_add(size as u64).ok_or(INVALID_VALUE)?;
        let mut next = at;
        let mut found = Vec::new();
        while next < end {
            let (start, mapping) = self.mapped.range(..=next).next_back().ok_or(INVALID_VALUE)?;
            let stop = start + mapping.size as u64;
            if stop <= next {
                return Err(INVALID_VALUE);
            }
            found.push(*start);
            next = stop;
        }
        Ok(found)
    }

    pub fn allow(&mut self, at: u64, size: usize, access: Access) -> Result<(), Code> {
        let protection = match access.flags {
            1 => libc::PROT_READ,
            3 => libc::PROT_READ | libc::PROT_WRITE,
            _ => return Err(INVALID_VALUE),
        };
        if access.location.kind != DEVICE || access.location.id != 0 || size == 0 {
            return Err(INVALID_VALUE);
        }
        let found = self.covering(at, size)?;
        // SAFETY: the range is made of mappings of this fake.
        if unsafe { libc::mprotect(address(at), size, protection) } < 0 {
            return Err(INVALID_VALUE);
        }
        for start in found {
            if let Some(mapping) = self.mapped.get_mut(&start) {
                mapping.access = access.flags;
            }
        }
        Ok(())
    }

    pub fn check_access(&self, at: u64, len: usize, write: bool) -> Result<(), Code> {
        let wanted = if write { 3 } else { 1 };
        let found = self.covering(at, len)?;
        let allowed = found.iter().all(|s| self.mapped.get(s).is_some_and(|m| m.access & wanted == wanted));
        if allowed { Ok(()) } else { Err(INVALID_VALUE) }
    }

    /// Bytes of the device that may be read, as a stream reads them.
    pub fn bytes(&self, at: u64, len: usize) -> Result<&[u8], Code> {
        self.check_access(at, len, false).map_err(|_| ILLEGAL_ADDRESS)?;
        // SAFETY: the range is mapped by this fake, which is behind a lock: nobody changes it meanwhile. No bytes may be anywhere.
        Ok(if len == 0 { &[] } else { unsafe { std::slice::from_raw_parts(address(at).cast::<u8>(), len) } })
    }

    /// Writes to the device as a stream does.
    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Code> {
        self.check_access(at, bytes.len(), true).map_err(|_| ILLEGAL_ADDRESS)?;
        // SAFETY: the range is mapped by this fake and writable.
        unsafe { address(at).cast::<u8>().copy_from(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    pub fn pin(&mut self, size: usize) -> Result<*mut c_void, Code> {
        if size == 0 {
            return Err(INVALID_VALUE);
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let at = map_at(null_mut(), size, libc::PROT_READ | libc::PROT_WRITE, flags, -1)?;
        self.pinned.insert(at, size);
        Ok(address(at as u64))
    }

    pub fn pinned(&self, start: usize) -> Result<Range<usize>, Code> {
        self.pinned.get(&start).map(|size| start..start + size).ok_or(INVALID_VALUE)
    }

    pub fn unpin(&mut self, start: *mut c_void) -> Result<(), Code> {
        let size = self.pinned.remove(&start.addr()).ok_or(INVALID_VALUE)?;
        // SAFETY: mapped by `pin` with this size.
        unsafe { libc::munmap(address(start.addr() as u64), size) };
        Ok(())
    }

    pub fn check_pinned(&self, at: usize, len: usize) -> Result<(), Code> {
        let (start, size) = self.pinned.range(..=at).next_back().ok_or(INVALID_VALUE)?;
        let inside = at.checked_add(len).is_some_and(|end| end <= start + size);
        if inside { Ok(()) } else { Err(INVALID_VALUE) }
    }
}
