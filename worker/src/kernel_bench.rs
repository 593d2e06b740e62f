//! `ds4-worker --bench-kernel`: the kernels that this binary would serve with, checked and timed. `ds4 bench kernel` shows the result.

use ds4_kernels::CpuDevice;
use ds4_kernels::bench::kernel::{self, FAMILIES, Line, Options, Size, Timed};
use ds4_kernels::conformance::Random;
use ds4_models::ModelError;
use ds4_settings::KERNEL_PROGRESS;

use crate::failure::Failure;

/// Flags of `--bench-kernel`.
#[derive(clap::Args, Clone, Debug)]
pub struct KernelBench {
    /// Check and time one family of kernels, or `all`, print the figures as JSON and exit; `list` names the families
    #[arg(long, value_name = "FAMILY")]
    pub bench_kernel: Option<String>,
    /// With --bench-kernel: numbers of rows
    #[arg(long, value_name = "N,...", value_delimiter = ',', requires = "bench_kernel", default_values_t = [1, 4, 16, 512, 2048],
        value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub bench_rows: Vec<u32>,
    /// With --bench-kernel: where; auto is the first CUDA device that there is, else the CPU
    #[arg(long, value_enum, value_name = "DEVICE", requires = "bench_kernel", default_value = "auto")]
    pub bench_device: Where,
    /// With --bench-kernel: shapes of a few hundred elements instead of DeepSeek V4 Flash's
    #[arg(long, requires = "bench_kernel")]
    pub bench_tiny: bool,
    /// With --bench-kernel: of the random inputs [default: another one each time]
    #[arg(long, value_name = "N", requires = "bench_kernel")]
    pub bench_seed: Option<u64>,
}

/// Values of `--bench-device`.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// The first CUDA device that there is, else the CPU
    Auto,
    /// The CPU
    Cpu,
    /// The first CUDA device
    Cuda,
}

/// Runs the family `name` and returns the figures as a JSON object.
///
/// # Errors
/// There is no such family or device, or not enough memory.
pub fn run(args: &KernelBench, name: &str, threads: usize) -> Result<String, Failure> {
    if name == "list" {
        let all: Vec<String> =
            FAMILIES.iter().map(|(n, about)| format!("{{\"name\": {n:?}, \"about\": {about:?}}}")).collect();
        return Ok(format!("{{\"families\": [{}]}}", all.join(", ")));
    }
    #[cfg(feature = "cuda")]
    if args.bench_device != Where::Cpu {
        match ds4_kernels::cuda::CudaDevice::open(0) {
            Ok(device) => return on(&device, args, name),
            Err(e) if args.bench_device == Where::Cuda => return Err(e.into()),
            Err(_) => {}
        }
    }
    #[cfg(not(feature = "cuda"))]
    if args.bench_device == Where::Cuda {
        return Err(Failure::usage(
            "this ds4-worker was built without CUDA kernels: use one that was built with `--features cuda` [no_cuda_kernels]",
        ));
    }
    on(&CpuDevice::new(threads), args, name)
}

fn on<D: Timed>(device: &D, args: &KernelBench, name: &str) -> Result<String, Failure> {
    let options = Options {
        rows: args.bench_rows.iter().filter_map(|n| usize::try_from(*n).ok()).collect(),
        size: if args.bench_tiny { Size::Tiny } else { Size::Flash },
        seed: args.bench_seed.unwrap_or_else(Random::fresh_seed),
    };
    let names: Vec<&str> = FAMILIES.iter().map(|(n, _)| *n).filter(|n| name == "all" || *n == name).collect();
    if names.is_empty() {
        let all: Vec<&str> = FAMILIES.iter().map(|(n, _)| *n).collect();
        return Err(Failure::usage(format!(
            "there is no family of kernels {name:?}; there are {}, and all",
            all.join(", ")
        )));
    }
    let mut lines = Vec::new();
    for (i, name) in names.iter().enumerate() {
        ds4_os::say!("{KERNEL_PROGRESS}{name} ({} of {})", i + 1, names.len());
        let Some(found) = kernel::run(device, name, &options) else { continue };
        lines.extend(found.map_err(ModelError::Device)?.iter().map(|line| json(name, line)));
    }
    Ok(format!(
        "{{\"device\": {:?}, \"size\": \"{}\", \"seed\": {}, \"lines\": [{}]}}",
        device.describe(),
        if args.bench_tiny { "tiny" } else { "flash" },
        options.seed,
        lines.join(", ")
    ))
}

/// JSON has no infinity: an error without measure is 1e300.
fn number(v: f64) -> String {
    format!("{:e}", if v.is_finite() { v } else { 1e300 })
}

fn json(family: &str, line: &Line) -> String {
    let ceiling = line.of_ceiling.map_or_else(
        || "\"of_read_ceiling\": null, \"of_compute_ceiling\": null".into(),
        |(b, m)| format!("\"of_read_ceiling\": {b:.4}, \"of_compute_ceiling\": {m:.4}"),
    );
    format!(
        "{{\"family\": {family:?}, \"what\": {:?}, \"rows\": {}, \"us\": {:.2}, \"bytes\": {:.0}, \"flops\": {:.0}, {ceiling}, \
         \"error\": {}, \"bound\": {}, \"varying_rows\": {}, \"passed\": {}}}",
        line.what,
        line.rows,
        line.microseconds,
        line.bytes,
        2.0 * line.macs,
        number(line.error),
        number(line.bound),
        line.varying_rows,
        line.passed()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(device: Where) -> KernelBench {
        let rows = vec![1, 20];
        KernelBench {
            bench_kernel: None,
            bench_rows: rows,
            bench_device: device,
            bench_tiny: true,
            bench_seed: Some(5),
        }
    }

    #[test]
    fn families_are_listed_and_run_by_name() {
        let list = run(&args(Where::Cpu), "list", 1).unwrap();
        assert!(FAMILIES.iter().all(|(n, _)| list.contains(&format!("\"name\": {n:?}"))), "{list}");
        let one = run(&args(Where::Cpu), "hyper", 1).unwrap();
        // Not `hyper_post_toward`, whose products the CPU does not begin: they would be counted and not be done.
        assert_eq!(one.matches("\"passed\": true").count(), 4, "{one}");
        assert!(one.contains("\"device\": \"cpu (") && one.contains("\"seed\": 5"), "{one}");
        let e = run(&args(Where::Cpu), "hype", 1).unwrap_err();
        assert!(e.exit == 2 && e.message.contains("indexer, attention, sampling, and all"), "{e}");
    }

    #[test]
    fn a_line_says_when_it_failed() {
        let line = Line {
            what: "x".into(),
            rows: 3,
            microseconds: 2.0,
            bytes: 8.0,
            macs: 4.0,
            of_ceiling: Some((0.5, 0.25)),
            error: f64::INFINITY,
            bound: 1e-5,
            varying_rows: 0,
        };
        let text = json("f", &line);
        for part in ["\"passed\": false", "\"error\": 1e300", "\"of_read_ceiling\": 0.5000", "\"flops\": 8"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
