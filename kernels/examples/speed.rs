//! Decode and prefill speed of the CPU device on a random model of SmolLM2-135M's shape, and products per type.
//!
//! `cargo run --release -p ds4-kernels --example speed -- [threads] [isa] [types]`

use std::time::{Duration, Instant};

use ds4_kernels::bench::{Profile, Shape, Synthetic, matmul};
use ds4_kernels::cpu::{CpuDevice, Isa};
use ds4_kernels::{BatchPlan, Device, quant};

/// Time that this thread has been on a CPU.
fn on_cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(stat.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let threads = args.next().map_or(Ok(usize::MAX), |t| t.parse())?;
    let isa = args.next().filter(|i| i != "best");
    let isa = Isa::available().into_iter().find(|i| isa.as_ref().is_none_or(|n| i.name() == n)).ok_or("no such isa")?;
    let device = CpuDevice::with_isa(threads, isa);
    println!("{}", device.describe());

    let mut model = Synthetic::new(&device, Shape::SMOLLM2_135M, 16, 2048)?;
    for (name, banks, pos, rows, repeat) in [
        ("decode 1 at 64", 1, 64, 1, 60),
        ("decode 1 at 512", 1, 512, 1, 60),
        ("decode 1 at 2000", 1, 2000, 1, 40),
        ("decode 16 at 512", 16, 512, 1, 20),
        ("prefill 64", 1, 0, 64, 20),
        ("prefill 512", 1, 0, 512, 6),
        ("prefill 512 at 1024", 1, 1024, 512, 6),
    ] {
        let mut plan = BatchPlan::default();
        for b in 0..banks {
            plan.push(b, pos, &(0..rows).map(|t| t * 7 + 1).collect::<Vec<_>>(), true);
        }
        model.step(&device, &plan, &mut Profile::new())?;
        let mut runs = Vec::new();
        for _ in 0..repeat {
            let (mut profile, start, cpu) = (Profile::new(), Instant::now(), on_cpu());
            model.step(&device, &plan, &mut profile)?;
            // On a busy machine, the time that one thread really had says more than the clock on the wall.
            runs.push((if threads == 1 { on_cpu() - cpu } else { start.elapsed() }, profile));
        }
        runs.sort_by_key(|(t, _)| *t);
        let rate = |t: Duration| plan.rows() as f64 / t.as_secs_f64();
        let (best, median) = (&runs[0], &runs[runs.len() / 2]);
        println!("{name}: median {:.0} best {:.0} tok/s ({:.2?} a step)", rate(median.0), rate(best.0), best.0);
        let parts: Vec<_> = best.1.iter().map(|(n, t)| format!("{n} {:.2}", t.as_secs_f64() * 1e3)).collect();
        println!("    ms: {}", parts.join(", "));
    }
    if args.next().is_some() {
        for ty in quant::SUPPORTED {
            let one = matmul(&device, ty, 16384, 4096, 1)?;
            let many = matmul(&device, ty, 1024, 4096, 256)?;
            println!(
                "{ty:8} 1 row: {:5.1} GB/s {:5.1} GMAC/s; 256 rows: {:5.1} GMAC/s",
                one.gbytes(),
                one.gmacs(),
                many.gmacs()
            );
        }
    }
    Ok(())
}
