//! Whose memory a load fills: the choice, and what is free there.

use ds4_kernels::cuda::driver::{Context, CudaError, DeviceInfo, Driver, vmm};
use ds4_manifests::{Backend, LAYOUT_GGUF, LAYOUT_TILES};
use ds4_os::memory::{self, Available};
use ds4_settings::EXIT_USAGE;
use serde::{Deserialize, Serialize};

use crate::Failure;

/// How tensors are arranged on a device: as the kernels take them, where this build has the kernel that does it.
const DEVICE_LAYOUT: &str = if cfg!(feature = "cuda") { LAYOUT_TILES } else { LAYOUT_GGUF };

/// What was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Choice {
    /// The first CUDA device where there is one, else the machine's memory.
    Auto,
    /// The machine's memory.
    #[default]
    Memfd,
    /// The first CUDA device, or no load.
    CudaVmm,
}

impl Choice {
    /// As users write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Memfd => "memfd",
            Self::CudaVmm => "cuda-vmm",
        }
    }
}

/// The memory that a load fills.
pub enum Memory {
    /// Sealed memfds.
    Host,
    /// A device.
    Device {
        /// Its context in this process.
        context: Context,
        /// What allocations are multiples of, in bytes.
        granularity: u64,
    },
}

/// The memory, and why that one.
pub struct Chosen {
    /// The memory.
    pub memory: Memory,
    /// For the log.
    pub why: String,
}

/// Decides. Initialises CUDA in this process unless told not to, which is why the daemon never calls it.
///
/// # Errors
/// `cuda-vmm` was asked for and is not to be had, or a device is there and does not work.
pub fn choose(choice: Choice) -> Result<Chosen, Failure> {
    let host = |why: String| Ok(Chosen { memory: Memory::Host, why });
    let device = match choice {
        Choice::Memfd => return host("as configured".into()),
        Choice::Auto | Choice::CudaVmm => open(),
    };
    match (device, choice) {
        (Ok((memory, why)), _) => Ok(Chosen { memory, why }),
        (Err(Absent::No(why)), Choice::Auto) => host(why),
        (Err(Absent::No(why)), _) => {
            let text = format!("--backend cuda-vmm is not possible: {why}; or take --backend memfd");
            Err(Failure::new(EXIT_USAGE, "no_cuda_device", text))
        }
        (Err(Absent::Broken(e)), _) => Err(e.into()),
    }
}

enum Absent {
    /// There is nothing to use.
    No(String),
    /// There is, and it fails.
    Broken(CudaError),
}

fn open() -> Result<(Memory, String), Absent> {
    let sort = |e: CudaError| if e.is_absence() { Absent::No(e.to_string()) } else { Absent::Broken(e) };
    let driver = Driver::open().map_err(sort)?;
    let info = DeviceInfo::query(driver, 0).map_err(sort)?;
    if !info.vmm {
        let text = format!("{} has no virtual memory management with descriptors", info.name);
        return Err(Absent::No(text));
    }
    let context = Context::new(driver, 0).map_err(Absent::Broken)?;
    let granularity = vmm::granularity(&context).map_err(Absent::Broken)?;
    let (version, more) = (driver.version(), driver.devices() - 1);
    let others = if more == 0 { String::new() } else { format!(", the first of {}", more + 1) };
    let why = format!(
        "{} ({}){others} is there, its driver supports CUDA {}.{}",
        info.name,
        info.uuid_text(),
        version / 1000,
        version % 1000 / 10
    );
    Ok((Memory::Device { context, granularity }, why))
}

impl Memory {
    /// What goes into the manifest.
    pub fn facts(&self, page: u64) -> Backend {
        match self {
            Self::Host => Backend::Memfd { page },
            Self::Device { context, granularity } => Backend::CudaVmm {
                device: context.device().uuid,
                device_name: context.device().name.clone(),
                granularity: *granularity,
                driver: context.driver().version(),
                layout: DEVICE_LAYOUT.into(),
            },
        }
    }

    /// Bytes that a chunk of `len` bytes takes.
    pub fn rounded(&self, len: u64) -> u64 {
        match self {
            Self::Host => len,
            // No allocation is empty. Lengths lie inside files, so this cannot overflow; saturate anyway.
            Self::Device { granularity, .. } => len.max(1).checked_next_multiple_of(*granularity).unwrap_or(u64::MAX),
        }
    }

    /// What is free, by whose estimate. A device that shares the machine's memory has what both think is free; NVML is
    /// not asked, because such devices (GB10) have no figures there.
    ///
    /// # Errors
    /// Nobody can say.
    pub fn available(&self) -> Result<Available, Failure> {
        let machine = memory::available().ok_or_else(|| {
            Failure::other("no_meminfo", "/proc/meminfo cannot be read, so no plan can be judged; mount /proc")
        })?;
        let Self::Device { context, .. } = self else { return Ok(machine) };
        let (free, total) = context.memory()?;
        let device = context.device();
        if device.integrated && machine.bytes < free {
            return Ok(machine);
        }
        let source = format!("the driver of {} ({})", device.name, device.uuid_text());
        Ok(Available { bytes: free, source, total })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_chunks_take_what_they_hold() {
        assert_eq!(Memory::Host.rounded(768), 768);
        assert!(matches!(Memory::Host.facts(4096), Backend::Memfd { page: 4096 }));
        assert!(matches!(choose(Choice::Memfd), Ok(Chosen { memory: Memory::Host, .. })));
    }

    #[test]
    fn choices_are_written_as_users_write_them() {
        for (choice, text) in [(Choice::Auto, "auto"), (Choice::Memfd, "memfd"), (Choice::CudaVmm, "cuda-vmm")] {
            assert_eq!(serde_json::to_string(&choice).unwrap(), format!("{text:?}"));
            assert_eq!(choice.name(), text);
            assert_eq!(<Choice as clap::ValueEnum>::from_str(text, false), Ok(choice));
        }
    }
}
