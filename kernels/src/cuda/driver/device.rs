//! What a device is: name, UUID, and the attributes that decisions are made by.

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::error::check;
use super::{CudaError, Driver};

/// A device as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Position in the driver's list.
    pub ordinal: u32,
    /// E.g. `NVIDIA H200`.
    pub name: String,
    /// Identifies the card (or the MIG instance) across processes and boots.
    pub uuid: [u8; 16],
    /// Compute capability, e.g. (9, 0).
    pub capability: (u32, u32),
    /// All of its memory in bytes.
    pub total_bytes: u64,
    /// Shares the machine's memory (GB10): what the CPU takes is gone for it too.
    pub integrated: bool,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Largest shared memory of one block, in bytes, opted in.
    pub shared_bytes: u32,
    /// Has virtual memory management with POSIX descriptors.
    pub vmm: bool,
}

impl DeviceInfo {
    /// Describes device `ordinal`.
    ///
    /// # Errors
    /// There is none of that number, or the driver refuses to describe it.
    pub fn query(driver: Driver, ordinal: u32) -> Result<Self, CudaError> {
        let device = raw(driver, ordinal)?;
        let mut name = [0_u8; 256];
        let len = i32::try_from(name.len()).unwrap_or(0);
        // SAFETY: the buffer is as long as said; the driver terminates the name within it.
        check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), len, device) })?;
        let name = CStr::from_bytes_until_nul(&name).map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: the pointer is valid for the call.
        check("cuDeviceGetUuid_v2", unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) })?;
        let mut total = 0_usize;
        // SAFETY: the pointer is valid for the call.
        check("cuDeviceTotalMem_v2", unsafe { sys::cuDeviceTotalMem_v2(&raw mut total, device) })?;
        let get = |attribute: Attribute| {
            let mut value = 0;
            // SAFETY: the pointer is valid for the call.
            check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) })
                .map(|()| u32::try_from(value).unwrap_or(0))
        };
        Ok(Self {
            ordinal,
            name,
            uuid: uuid.bytes.map(|b| u8::from_ne_bytes(b.to_ne_bytes())),
            capability: (
                get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            total_bytes: total as u64,
            integrated: get(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0,
            multiprocessors: get(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            vmm: get(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? != 0
                && get(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)? != 0,
        })
    }

    /// The UUID as `nvidia-smi -L` prints it.
    pub fn uuid_text(&self) -> String {
        uuid_text(&self.uuid)
    }
}

/// `GPU-` and the UUID in groups of 8, 4, 4, 4 and 12 hexadecimal digits, as `nvidia-smi -L` prints it.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (k, byte) in uuid.iter().enumerate() {
        if [0, 4, 6, 8, 10].contains(&k) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

pub(super) fn raw(driver: Driver, ordinal: u32) -> Result<sys::CUdevice, CudaError> {
    let missing = || CudaError::NoSuchDevice { ordinal, count: driver.devices() };
    let index = i32::try_from(ordinal).ok().filter(|_| ordinal < driver.devices()).ok_or_else(missing)?;
    let mut device = 0;
    // SAFETY: the pointer is valid for the call, and a Driver exists only after cuInit.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, index) })?;
    Ok(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_reads_as_nvidia_smi_prints_it() {
        let uuid = std::array::from_fn(|k| u8::try_from(k).unwrap() * 0x11);
        assert_eq!(uuid_text(&uuid), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }
}
