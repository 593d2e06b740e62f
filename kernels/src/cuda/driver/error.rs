//! What the driver can say no with.

use cudarc::driver::sys::CUresult;

/// Errors of the driver layer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// There is no libcuda.
    #[error(
        "no CUDA driver: libcuda.so.1 was not found; install the NVIDIA driver, or add its directory to LD_LIBRARY_PATH"
    )]
    NoDriver,
    /// A driver that lacks functions.
    #[error(
        "the CUDA driver supports CUDA {}.{}, but {}.{} is needed; install a newer NVIDIA driver",
        found / 1000, found % 1000 / 10, super::MIN_VERSION / 1000, super::MIN_VERSION % 1000 / 10
    )]
    OldDriver {
        /// 1000 × major + 10 × minor.
        found: u32,
    },
    /// A driver without devices.
    #[error(
        "the CUDA driver has no device; check nvidia-smi, the permissions of /dev/nvidia*, and CUDA_VISIBLE_DEVICES"
    )]
    NoDevice,
    /// No such device.
    #[error("there is no CUDA device {ordinal}: the driver has {count}")]
    NoSuchDevice {
        /// Asked for.
        ordinal: u32,
        /// Present.
        count: u32,
    },
    /// The device has not got the memory (device memory, or page-locked host memory).
    #[error("{call}: not enough memory for {bytes} bytes")]
    OutOfMemory {
        /// The function that said so.
        call: &'static str,
        /// What was asked for.
        bytes: u64,
    },
    /// A function failed.
    #[error("{call}: {name} ({code}){}", if *sticky { "; the process can use the device no more" } else { "" })]
    Call {
        /// The function.
        call: &'static str,
        /// The driver's number.
        code: u32,
        /// The driver's name for it, e.g. `CUDA_ERROR_INVALID_VALUE`.
        name: String,
        /// The context is lost: every further call fails, only a new process helps.
        sticky: bool,
    },
    /// Lengths or offsets that do not fit.
    #[error("device memory: {0}")]
    Range(String),
    /// A descriptor could not be made or passed on.
    #[error("a descriptor of device memory: {0}")]
    Descriptor(String),
}

impl CudaError {
    /// Stable code for logs and scripts.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoDriver => "cuda_no_driver",
            Self::OldDriver { .. } => "cuda_old_driver",
            Self::NoDevice | Self::NoSuchDevice { .. } => "cuda_no_device",
            Self::OutOfMemory { .. } => "cuda_out_of_memory",
            Self::Call { sticky: true, .. } => "cuda_device_lost",
            Self::Call { .. } => "cuda_error",
            Self::Range(_) => "cuda_range",
            Self::Descriptor(_) => "cuda_descriptor",
        }
    }

    /// True when the context is lost and only a new process helps.
    pub fn is_sticky(&self) -> bool {
        matches!(self, Self::Call { sticky: true, .. })
    }

    /// True when this machine cannot do CUDA at all, as opposed to a device that fails.
    pub fn is_absence(&self) -> bool {
        matches!(self, Self::NoDriver | Self::OldDriver { .. } | Self::NoDevice)
    }
}

/// Turns a result into an error that names the function.
///
/// Hazard: the bindings declare results as a Rust enum of the codes of CUDA 13.0, and a code that is not among them would
/// be undefined behaviour: the bindings go up with the driver's major version.
pub(crate) fn check(call: &'static str, result: CUresult) -> Result<(), CudaError> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        CUresult::CUDA_ERROR_NO_DEVICE => Err(CudaError::NoDevice),
        // The toolkit's libcuda for linking, found before a real one.
        CUresult::CUDA_ERROR_STUB_LIBRARY => Err(CudaError::NoDriver),
        other => Err(CudaError::Call { call, code: other as u32, name: format!("{other:?}"), sticky: sticky(other) }),
    }
}

/// As [`check`], for functions that allocate `bytes`.
pub(crate) fn check_alloc(call: &'static str, bytes: u64, result: CUresult) -> Result<(), CudaError> {
    match result {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(CudaError::OutOfMemory { call, bytes }),
        other => check(call, other),
    }
}

/// The errors after which, in the words of the driver API's reference, "the process must be terminated and relaunched".
fn sticky(result: CUresult) -> bool {
    use CUresult as R;
    matches!(
        result,
        R::CUDA_ERROR_DEINITIALIZED
            | R::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | R::CUDA_ERROR_ECC_UNCORRECTABLE
            | R::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | R::CUDA_ERROR_ILLEGAL_ADDRESS
            | R::CUDA_ERROR_LAUNCH_TIMEOUT
            | R::CUDA_ERROR_ASSERT
            | R::CUDA_ERROR_HARDWARE_STACK_ERROR
            | R::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | R::CUDA_ERROR_MISALIGNED_ADDRESS
            | R::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | R::CUDA_ERROR_INVALID_PC
            | R::CUDA_ERROR_LAUNCH_FAILED
            | R::CUDA_ERROR_EXTERNAL_DEVICE
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_function_and_the_driver_s_word() {
        let e = check("cuMemMap", CUresult::CUDA_ERROR_INVALID_VALUE).unwrap_err();
        assert_eq!(e.to_string(), "cuMemMap: CUDA_ERROR_INVALID_VALUE (1)");
        assert!(!e.is_sticky());
        assert!(check("cuInit", CUresult::CUDA_ERROR_STUB_LIBRARY).unwrap_err().is_absence());
        let e = check("cuStreamSynchronize", CUresult::CUDA_ERROR_ILLEGAL_ADDRESS).unwrap_err();
        assert!(e.is_sticky() && e.to_string().contains("(700)") && e.code() == "cuda_device_lost", "{e}");
    }

    #[test]
    fn lack_of_memory_names_the_bytes() {
        let e = check_alloc("cuMemCreate", 5, CUresult::CUDA_ERROR_OUT_OF_MEMORY).unwrap_err();
        assert_eq!(e, CudaError::OutOfMemory { call: "cuMemCreate", bytes: 5 });
        assert_eq!(check_alloc("cuMemCreate", 5, CUresult::CUDA_SUCCESS), Ok(()));
    }

    #[test]
    fn versions_read_as_people_write_them() {
        let text = CudaError::OldDriver { found: 11_080 }.to_string();
        assert!(text.contains("CUDA 11.8") && text.contains("12.8 is needed"), "{text}");
    }
}
