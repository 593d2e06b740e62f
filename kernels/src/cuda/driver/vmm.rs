//! Virtual memory management: physical memory that can be passed on as a descriptor, address space, and mappings.
//!
//! Measured on an H200 (driver 580): memory lives as long as any process holds a descriptor or a mapping of it, its
//! creator's death included; 96 handles of 1 GiB are imported, mapped and made readable in 11.6 ms; a write through a
//! read-only mapping fails; a handle that was imported cannot be exported again, so the original descriptor is what is
//! passed on.
//!
//! Source: CUDA driver API reference, "Virtual Memory Management".

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use cudarc::driver::sys::{
    self, CUmemAccess_flags, CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationType,
    CUmemLocationType,
};

use super::error::{check, check_alloc};
use super::{Context, CudaError, refuse};

/// An address in device memory.
pub type DevicePtr = u64;

const POSIX: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

fn location(context: &Context) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: i32::try_from(context.device().ordinal).unwrap_or(i32::MAX),
    }
}

fn properties(context: &Context) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: POSIX,
        location: location(context),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// What lengths and offsets of physical memory and mappings must be multiples of, in bytes (2 MiB on all known devices).
///
/// # Errors
/// The context is lost.
pub fn granularity(context: &Context) -> Result<u64, CudaError> {
    context.bind()?;
    let properties = properties(context);
    let mut bytes = 0_usize;
    let option = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: both pointers are valid for the call.
    check("cuMemGetAllocationGranularity", unsafe {
        sys::cuMemGetAllocationGranularity(&raw mut bytes, &raw const properties, option)
    })?;
    Ok((bytes as u64).max(1))
}

fn size(bytes: u64) -> Result<usize, CudaError> {
    usize::try_from(bytes).map_err(|_| CudaError::Range(format!("{bytes} bytes do not fit the address space")))
}

/// Physical device memory without an address.
#[derive(Debug)]
pub struct Physical {
    handle: sys::CUmemGenericAllocationHandle,
    len: u64,
    imported: bool,
    // Last: the handle is released while the context still is.
    context: Context,
}

impl Physical {
    /// Takes `len` bytes (a multiple of [`granularity`]) that can be exported. Nobody has defined what is in them.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], or `len` is no multiple.
    pub fn create(context: &Context, len: u64) -> Result<Self, CudaError> {
        context.bind()?;
        refuse::check("cuMemCreate", len)?;
        let properties = properties(context);
        let mut handle = 0;
        // SAFETY: both pointers are valid for the call.
        check_alloc("cuMemCreate", len, unsafe {
            sys::cuMemCreate(&raw mut handle, size(len)?, &raw const properties, 0)
        })?;
        Ok(Self { handle, len, imported: false, context: context.clone() })
    }

    /// Takes over memory that another process exported. `len` is what that process says: the driver checks it when the
    /// memory is mapped. The descriptor may be closed afterwards.
    ///
    /// # Errors
    /// The descriptor is not device memory of this driver and device.
    pub fn import(context: &Context, fd: impl AsFd, len: u64) -> Result<Self, CudaError> {
        context.bind()?;
        let raw = fd.as_fd().as_raw_fd();
        let mut handle = 0;
        // The driver takes the descriptor's number in place of a pointer.
        let os_handle = std::ptr::without_provenance_mut(usize::try_from(raw).unwrap_or(usize::MAX));
        // SAFETY: the pointer is valid for the call and the descriptor is open; the driver does not keep or close it.
        check("cuMemImportFromShareableHandle", unsafe {
            sys::cuMemImportFromShareableHandle(&raw mut handle, os_handle, POSIX)
        })?;
        Ok(Self { handle, len, imported: true, context: context.clone() })
    }

    /// A descriptor that keeps the memory and can be passed to other processes; close-on-exec.
    ///
    /// # Errors
    /// The memory was imported itself, or the process has no descriptors left.
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        if self.imported {
            let text = "memory that was imported cannot be exported again; pass the original descriptor on";
            return Err(CudaError::Descriptor(text.into()));
        }
        self.context.bind()?;
        let mut raw: std::ffi::c_int = -1;
        // SAFETY: the handle is ours and the pointer is that of an int, which this handle type asks for.
        check("cuMemExportToShareableHandle", unsafe {
            sys::cuMemExportToShareableHandle((&raw mut raw).cast(), self.handle, POSIX, 0)
        })?;
        if raw < 0 {
            return Err(CudaError::Descriptor(format!("the driver exported the descriptor {raw}")));
        }
        // SAFETY: the driver has just made this descriptor for us, nobody else knows it.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        // SAFETY: fcntl on a descriptor that we own, with an integer argument.
        if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
            return Err(CudaError::Descriptor(std::io::Error::last_os_error().to_string()));
        }
        Ok(fd)
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True when it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created or imported once, released once; mappings and descriptors keep the memory by themselves.
            let _ = unsafe { sys::cuMemRelease(self.handle) };
        }
    }
}

/// What the device may do with a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads only; a write is an error of the context.
    Read,
    /// Reads and writes.
    ReadWrite,
}

/// Reserved address space.
#[derive(Debug)]
struct Reservation {
    start: DevicePtr,
    len: u64,
    context: Context,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let (Ok(()), Ok(len)) = (self.context.bind(), size(self.len)) {
            // SAFETY: reserved once, freed once, after all mappings in it (field order of `Space`).
            let _ = unsafe { sys::cuMemAddressFree(self.start, len) };
        }
    }
}

/// One mapping. Unmapped on drop, before its memory is released.
#[derive(Debug)]
struct Mapped {
    start: DevicePtr,
    unmapped: bool,
    physical: Option<Physical>,
}

impl Mapped {
    fn unmap(&mut self) -> Result<(), CudaError> {
        let Some(physical) = self.physical.as_ref().filter(|_| !self.unmapped) else { return Ok(()) };
        self.unmapped = true;
        physical.context.bind()?;
        let len = size(physical.len)?;
        // SAFETY: mapped once with just this range, unmapped once. Work on the device that still uses the range ends in
        // an error of the context, which is why owners synchronise first.
        check("cuMemUnmap", unsafe { sys::cuMemUnmap(self.start, len) })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let _ = self.unmap();
    }
}

/// A range of addresses, into which memory is mapped piece by piece.
///
/// Dropping it waits for the device first: kernels and copies that still use the addresses would lose the context.
#[derive(Debug)]
pub struct Space {
    mapped: BTreeMap<u64, Mapped>,
    reservation: Reservation,
}

impl Space {
    /// Reserves `len` bytes of addresses (a multiple of [`granularity`]); no memory yet.
    ///
    /// # Errors
    /// `len` is 0 or no multiple, or the address space is used up.
    pub fn reserve(context: &Context, len: u64) -> Result<Self, CudaError> {
        context.bind()?;
        refuse::check("cuMemAddressReserve", len)?;
        let mut start = 0;
        // SAFETY: the pointer is valid for the call; alignment and address are left to the driver.
        check_alloc("cuMemAddressReserve", len, unsafe {
            sys::cuMemAddressReserve(&raw mut start, size(len)?, 0, 0, 0)
        })?;
        let reservation = Reservation { start, len, context: context.clone() };
        Ok(Self { mapped: BTreeMap::new(), reservation })
    }

    /// Maps all of `physical` at `offset`. Not even reading is allowed before [`Space::allow`].
    ///
    /// # Errors
    /// It would leave the range or overlap another mapping, or the memory is shorter than it claims.
    pub fn map(&mut self, offset: u64, physical: Physical) -> Result<(), CudaError> {
        let end = offset.checked_add(physical.len).filter(|end| *end <= self.reservation.len);
        let Some(end) = end else {
            return Err(CudaError::Range(format!(
                "{} bytes at {offset} leave a space of {} bytes",
                physical.len, self.reservation.len
            )));
        };
        let before = self.mapped.range(..end).next_back();
        if let Some((at, other)) = before
            && at + other.physical.as_ref().map_or(0, Physical::len) > offset
        {
            return Err(CudaError::Range(format!("{} bytes at {offset} overlap the mapping at {at}", physical.len)));
        }
        physical.context.bind()?;
        let start = self.reservation.start + offset;
        let len = size(physical.len)?;
        // SAFETY: the range lies in our reservation, where nothing is mapped; the handle is ours.
        check("cuMemMap", unsafe { sys::cuMemMap(start, len, 0, physical.handle, 0) })?;
        self.mapped.insert(offset, Mapped { start, unmapped: false, physical: Some(physical) });
        Ok(())
    }

    /// Lets the device use `len` bytes at `offset`, all of which must be mapped.
    ///
    /// # Errors
    /// They are not.
    pub fn allow(&self, offset: u64, len: u64, access: Access) -> Result<(), CudaError> {
        let context = &self.reservation.context;
        context.bind()?;
        self.check_range(offset, len)?;
        let flags = match access {
            Access::Read => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
            Access::ReadWrite => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let descriptor = sys::CUmemAccessDesc { location: location(context), flags };
        // SAFETY: the range lies in our reservation; the pointer is valid for the call and is one descriptor.
        check("cuMemSetAccess", unsafe {
            sys::cuMemSetAccess(self.reservation.start + offset, size(len)?, &raw const descriptor, 1)
        })
    }

    /// Maps `len` bytes of new memory at `offset`, for the device to read and write.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] or what [`Space::map`] refuses; nothing is mapped there then.
    pub fn fill(&mut self, offset: u64, len: u64) -> Result<(), CudaError> {
        let memory = Physical::create(&self.reservation.context, len)?;
        self.map(offset, memory)?;
        let allowed = self.allow(offset, len, Access::ReadWrite);
        if allowed.is_err() {
            let _ = self.unmap(offset);
        }
        allowed
    }

    /// Undoes the mapping that begins at `offset` and gives its memory back; `None` when there is none.
    ///
    /// # Errors
    /// The context is lost.
    pub fn unmap(&mut self, offset: u64) -> Result<Option<Physical>, CudaError> {
        let Some(mut mapped) = self.mapped.remove(&offset) else { return Ok(None) };
        mapped.unmap()?;
        Ok(mapped.physical.take())
    }

    /// The memory that is mapped, by offset.
    pub fn pieces(&self) -> impl Iterator<Item = (u64, &Physical)> {
        self.mapped.iter().filter_map(|(offset, mapped)| Some((*offset, mapped.physical.as_ref()?)))
    }

    /// Address of its first byte.
    pub fn start(&self) -> DevicePtr {
        self.reservation.start
    }

    /// Bytes reserved.
    pub fn len(&self) -> u64 {
        self.reservation.len
    }

    /// True when nothing is reserved, which the driver does not do.
    pub fn is_empty(&self) -> bool {
        self.reservation.len == 0
    }

    /// Its context.
    pub fn context(&self) -> &Context {
        &self.reservation.context
    }

    /// The address of `len` bytes at `offset`.
    ///
    /// # Errors
    /// They leave the range.
    pub fn address(&self, offset: u64, len: u64) -> Result<DevicePtr, CudaError> {
        self.check_range(offset, len)?;
        Ok(self.reservation.start + offset)
    }

    fn check_range(&self, offset: u64, len: u64) -> Result<(), CudaError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.reservation.len => Ok(()),
            _ => Err(CudaError::Range(format!(
                "{len} bytes at {offset} leave a space of {} bytes",
                self.reservation.len
            ))),
        }
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        let _ = self.reservation.context.synchronize();
    }
}
