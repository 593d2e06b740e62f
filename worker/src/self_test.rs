//! `ds4-worker --self-test`: whether this machine can attach to the owner and read what it holds, and how fast.
//!
//! No model is built. The weights are mapped, some chunks are read back (copied back from a device) and compared with the
//! hashes of the manifest, then everything is let go; more cycles show whether attaching loses memory.

use std::time::{Duration, Instant};

use ds4_attach::Claim;
use ds4_kernels::cuda::driver::{Context, Driver};
use ds4_manifests::{Backend, WeightManifest};
use ds4_settings::BROKER_SOCKET;

use crate::config::Options;
use crate::failure::Failure;

/// Chunks that are compared without --verify-weights: the first, the last, and some between.
const SAMPLE: usize = 4;

/// What was seen.
#[derive(Debug, Default)]
struct Figures {
    chunks: usize,
    bytes: u64,
    verified_bytes: u64,
    verify: Duration,
    context: Duration,
    attach: Vec<Duration>,
    /// Free device memory before the first cycle, after it, and after the last.
    free: Option<[u64; 3]>,
}

/// Runs `cycles` cycles and returns the figures as a JSON object.
///
/// # Errors
/// The attach failed, bytes differ from the owner's hashes, or the cycles lost device memory.
pub fn run(options: &Options, cycles: u32) -> Result<String, Failure> {
    let attach = ds4_attach::Options {
        model: options.model.clone(),
        expected: options.expected,
        verify: false,
        wait: options.owner_wait,
        client: format!("ds4-worker --self-test {}", std::process::id()),
        ..ds4_attach::Options::new(options.runtime_dir.join(BROKER_SOCKET))
    };
    let begun = Instant::now();
    let claim = ds4_attach::claim(&attach)?;
    let claimed = begun.elapsed();
    let backend = claim.manifest.backend.name();
    let figures = match &claim.manifest.backend {
        Backend::Memfd { .. } => host(&attach, options.verify, claim, claimed, cycles)?,
        Backend::CudaVmm { .. } => device(&attach, options.verify, claim, claimed, cycles)?,
    };
    Ok(figures.to_json(backend))
}

fn sample(manifest: &WeightManifest, all: bool) -> Vec<usize> {
    let n = manifest.chunks.len();
    if all || n <= SAMPLE {
        return (0..n).collect();
    }
    (0..SAMPLE).map(|k| k * (n - 1) / (SAMPLE - 1)).collect()
}

fn host(
    attach: &ds4_attach::Options,
    all: bool,
    claim: Claim,
    claimed: Duration,
    cycles: u32,
) -> Result<Figures, Failure> {
    let mut figures = Figures::of(&claim.manifest);
    let begun = Instant::now();
    let attached = claim.map()?;
    figures.attach.push(claimed + begun.elapsed());
    let begun = Instant::now();
    for k in sample(&attached.weights.manifest, all) {
        let (Some(chunk), Some(bytes)) = (attached.weights.manifest.chunks.get(k), attached.weights.chunks.get(k))
        else {
            continue;
        };
        if ds4_attach::hash(bytes) != chunk.blake3 {
            return Err(Failure::self_test(format!("chunk {k} does not have the hash that the owner published")));
        }
        figures.verified_bytes += chunk.len;
    }
    figures.verify = begun.elapsed();
    drop(attached);
    for _ in 1..cycles {
        let begun = Instant::now();
        drop(ds4_attach::attach(attach)?);
        figures.attach.push(begun.elapsed());
    }
    Ok(figures)
}

fn device(
    attach: &ds4_attach::Options,
    all: bool,
    claim: Claim,
    claimed: Duration,
    cycles: u32,
) -> Result<Figures, Failure> {
    let mut figures = Figures::of(&claim.manifest);
    let begun = Instant::now();
    let context = Context::new(Driver::open()?, 0)?;
    figures.context = begun.elapsed();
    let (before, _) = context.memory()?;
    let begun = Instant::now();
    let attached = claim.map_device(&context)?;
    figures.attach.push(claimed + begun.elapsed());
    let begun = Instant::now();
    figures.verified_bytes = attached.weights.verify(sample(&attached.weights.manifest, all))?;
    figures.verify = begun.elapsed();
    drop(attached);
    let (first, _) = context.memory()?;
    for _ in 1..cycles {
        let begun = Instant::now();
        let attached = ds4_attach::attach_device(attach, &context)?;
        figures.attach.push(begun.elapsed());
        drop(attached);
    }
    let (last, _) = context.memory()?;
    if last < first {
        return Err(Failure::self_test(format!(
            "{} bytes of device memory are gone after {cycles} attaches (free: {first} after the first, {last} after the last)",
            first - last
        )));
    }
    figures.free = Some([before, first, last]);
    Ok(figures)
}

impl Figures {
    fn of(manifest: &WeightManifest) -> Self {
        Self { chunks: manifest.chunks.len(), bytes: manifest.chunks.iter().map(|c| c.len).sum(), ..Self::default() }
    }

    fn to_json(&self, backend: &str) -> String {
        let ms = |d: Duration| d.as_secs_f64() * 1e3;
        let mut sorted: Vec<f64> = self.attach.iter().map(|d| ms(*d)).collect();
        sorted.sort_by(f64::total_cmp);
        let median = sorted.get(sorted.len() / 2).copied().unwrap_or(0.0);
        let worst = sorted.last().copied().unwrap_or(0.0);
        let first = self.attach.first().map_or(0.0, |d| ms(*d));
        let free = self.free.map_or_else(|| "null".into(), |[a, b, c]| format!("[{a}, {b}, {c}]"));
        format!(
            "{{\"backend\": \"{backend}\", \"chunks\": {}, \"bytes\": {}, \"verified_bytes\": {}, \"verify_ms\": {:.1}, \
             \"context_ms\": {:.1}, \"cycles\": {}, \"attach_first_ms\": {first:.2}, \"attach_median_ms\": {median:.2}, \
             \"attach_worst_ms\": {worst:.2}, \"device_free_bytes\": {free}}}",
            self.chunks,
            self.bytes,
            self.verified_bytes,
            ms(self.verify),
            ms(self.context),
            self.attach.len(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_one_json_object() {
        let figures = Figures {
            attach: [5, 1, 9].map(Duration::from_millis).to_vec(),
            free: Some([3, 2, 2]),
            ..Figures::default()
        };
        let text = figures.to_json("cuda-vmm");
        for part in [
            "\"backend\": \"cuda-vmm\"",
            "\"cycles\": 3",
            "\"attach_first_ms\": 5.00",
            "\"attach_median_ms\": 5.00",
            "\"attach_worst_ms\": 9.00",
            "\"device_free_bytes\": [3, 2, 2]",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
