//! Devices whose operations can be timed and compared.

use std::time::{Duration, Instant};

use crate::CpuDevice;
use crate::cpu::Isa;
use crate::device::DeviceError;
use crate::ops::{HyperOps, MoeOps, SparseOps};

/// A device with every op set, whose operations can be timed.
pub trait Timed: HyperOps + MoeOps + SparseOps {
    /// Median microseconds of `run(i)`, `i` = 0, 1, …, at the speed of `n` of them in a row.
    fn time(&self, n: usize, run: &mut dyn FnMut(usize)) -> Result<f64, DeviceError>;

    /// What a selection holds, per row: `None` for all visible rows.
    fn selected(&self, selection: &Self::Selection) -> Vec<Option<Vec<usize>>>;

    /// Half a step of its activations, as [`crate::conformance::Bounds`] counts it.
    fn activation(&self) -> f64;

    /// Bytes of the largest cache.
    fn cache(&self) -> usize;

    /// What it is known to reach: bytes a second, and multiply-adds a second of products in 16 bits.
    fn ceiling(&self) -> Option<(f64, f64)>;

    /// Chooses how operations are started, if it has more than one way: before the one before has ended, and replayed as graphs. Results
    /// must not depend on it.
    fn starts(&self, _early: bool, _replayed: bool) -> bool {
        false
    }

    /// Whether it begins a mixer's products in [`HyperOps::hyper_post_toward`]: else that is [`HyperOps::hyper_post`].
    fn begins_mixers(&self) -> bool {
        true
    }

    /// What its results are compared with.
    fn reference(&self) -> CpuDevice {
        CpuDevice::default()
    }
}

impl Timed for CpuDevice {
    fn time(&self, _: usize, run: &mut dyn FnMut(usize)) -> Result<f64, DeviceError> {
        run(0);
        let (mut all, begun) = (Vec::new(), Instant::now());
        while all.len() < 3 || (begun.elapsed() < Duration::from_millis(100) && all.len() < 1000) {
            let one = Instant::now();
            run(all.len() + 1);
            all.push(one.elapsed().as_secs_f64() * 1e6);
        }
        Ok(median(all))
    }

    fn selected(&self, selection: &Self::Selection) -> Vec<Option<Vec<usize>>> {
        selection.rows.clone()
    }

    fn activation(&self) -> f64 {
        1.0 / 65024.0
    }

    fn cache(&self) -> usize {
        0
    }

    fn ceiling(&self) -> Option<(f64, f64)> {
        None
    }

    fn begins_mixers(&self) -> bool {
        false
    }

    fn reference(&self) -> CpuDevice {
        let scalar = Isa::available().pop().unwrap_or_else(Isa::detect);
        CpuDevice::with_isa(self.threads(), scalar)
    }
}

#[cfg(feature = "cuda")]
impl Timed for crate::cuda::CudaDevice {
    fn time(&self, n: usize, run: &mut dyn FnMut(usize)) -> Result<f64, DeviceError> {
        use crate::cuda::driver::{CudaError, Event};
        let failed = |e: CudaError| DeviceError::Weight { name: "a timing".into(), reason: e.to_string() };
        let mut all = Vec::new();
        // The first rounds allocate, and record what is replayed as a graph from the third on.
        for round in 0..8 {
            let (a, b) = (Event::timed(self.context()).map_err(failed)?, Event::timed(self.context()).map_err(failed)?);
            a.record(self.stream()).map_err(failed)?;
            for i in 0..n {
                run(i);
            }
            b.record(self.stream()).map_err(failed)?;
            self.synchronize().map_err(failed)?;
            if round > 2 {
                #[allow(clippy::cast_precision_loss, reason = "a small count")]
                all.push(f64::from(b.since_ms(&a).map_err(failed)?) * 1e3 / n as f64);
            }
        }
        Ok(median(all))
    }

    fn selected(&self, selection: &Self::Selection) -> Vec<Option<Vec<usize>>> {
        selection.download(self)
    }

    fn activation(&self) -> f64 {
        // 16 bits per 256, with outliers 30 times the rest: a 32nd of that may round to 30 half steps.
        32.0 / 65024.0
    }

    fn cache(&self) -> usize {
        64 << 20
    }

    fn starts(&self, early: bool, replayed: bool) -> bool {
        self.replay(replayed);
        self.early(early).is_ok()
    }

    fn ceiling(&self) -> Option<(f64, f64)> {
        // Measured on an H200: device reads, and bf16 products. GB10: measured by others, and nominal.
        let name = &self.context().device().name;
        match () {
            () if name.contains("H200") => Some((4.14e12, 394e12)),
            () if name.contains("GB10") => Some((220e9, 62e12)),
            () => None,
        }
    }
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(0.0)
}
