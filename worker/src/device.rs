//! Starting on a CUDA device, where the owner put the weights there.

#[cfg(feature = "cuda")]
pub use with_kernels::start;
#[cfg(not(feature = "cuda"))]
pub use without_kernels::start;

#[cfg(feature = "cuda")]
mod with_kernels {
    use std::time::Instant;

    use ds4_attach::{Claim, DeviceAttached};
    use ds4_kernels::cuda::CudaDevice;
    use ds4_kernels::cuda::driver::{DeviceInfo, Driver};
    use ds4_manifests::{Backend, WeightManifest};
    use ds4_os::memory::Available;

    use crate::boot::{self, Attached, Booted, Ground, Phases};
    use crate::config::Options;
    use crate::failure::Failure;

    /// Prompt tokens of a step where nothing was asked for: enough rows for every expert of a large model to have some. Activations of
    /// so many take 0.6 GiB in Flash's shape.
    const PREFILL_CHUNK: usize = 2048;

    /// Starts on the device that holds the weights.
    ///
    /// # Errors
    /// As [`boot::boot`]; or this process does not see that device.
    pub fn start(
        options: &Options,
        claim: Claim,
        block: Option<Claim>,
        phases: Phases,
        since: Instant,
    ) -> Result<Booted, Failure> {
        let mut options = options.clone();
        options.engine = options.engine.with_prefill_chunk(options.prefill_chunk.unwrap_or(PREFILL_CHUNK));
        let device = open(&claim.manifest)?;
        if !options.cuda_graphs {
            device.replay(false);
        }
        let context = device.context().clone();
        tracing::info!(
            device = %context.device().name, uuid = %context.device().uuid_text(), graphs = options.cuda_graphs,
            "computing on a CUDA device"
        );
        let map = move |claim: Claim| {
            let DeviceAttached { weights, lease } = claim.map_device(&context)?;
            Ok(Attached { weights: Box::new(weights), lease })
        };
        boot::start(&options, claim, block, Ground { device, map, available }, phases, since)
    }

    /// Opens the device that the manifest names; when it is not to be seen, the first one, which refuses the weights by both names.
    fn open(manifest: &WeightManifest) -> Result<CudaDevice, Failure> {
        let driver = Driver::open()?;
        let holds = |ordinal: &u32| {
            let info = DeviceInfo::query(driver, *ordinal);
            matches!((&manifest.backend, info), (Backend::CudaVmm { device, .. }, Ok(info)) if info.uuid == *device)
        };
        Ok(CudaDevice::open((0..driver.devices()).find(holds).unwrap_or(0))?)
    }

    /// What is free, by the driver; on a device that shares the machine's memory, the smaller of both estimates.
    fn available(device: &CudaDevice) -> Option<Available> {
        let context = device.context();
        let (free, total) = context.memory().ok()?;
        let info = context.device();
        let machine = ds4_os::memory::available().filter(|m| info.integrated && m.bytes < free);
        Some(machine.unwrap_or_else(|| Available {
            bytes: free,
            source: format!("the driver of {}", info.name),
            total,
        }))
    }
}

#[cfg(not(feature = "cuda"))]
mod without_kernels {
    use std::time::Instant;

    use ds4_attach::Claim;
    use ds4_kernels::cuda::driver::device::uuid_text;
    use ds4_manifests::Backend;

    use crate::boot::{Booted, Phases};
    use crate::config::Options;
    use crate::failure::Failure;

    /// Refuses: this build has no kernels.
    ///
    /// # Errors
    /// Always.
    pub fn start(_: &Options, claim: Claim, _: Option<Claim>, _: Phases, _: Instant) -> Result<Booted, Failure> {
        let model = &claim.manifest.model.name;
        let device = match &claim.manifest.backend {
            Backend::CudaVmm { device, device_name, .. } => format!("{device_name} ({})", uuid_text(device)),
            Backend::Memfd { .. } => "no device".into(),
        };
        Err(Failure::usage(format!(
            "the owner holds `{model}` in the memory of {device}, and this ds4-worker was built without CUDA kernels: use one that \
             was built with `--features cuda`, or start the owner with --backend memfd [no_cuda_kernels]"
        )))
    }
}
