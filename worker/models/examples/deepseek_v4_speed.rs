//! Prefill and decode steps of a DeepSeek V4 file in one process, without a server around them: for `perf record` and for
//! comparing two builds.
//!
//! `cargo run --release -p ds4-models --example deepseek_v4_speed -- FILE.gguf [threads] [isa] [repeats] [only]`
//!
//! Times are CPU seconds of the whole process divided by the threads, which other work on the machine disturbs little, and
//! the clock on the wall.

#[path = "../tests/support/mod.rs"]
mod support;

use std::path::Path;
use std::time::{Duration, Instant};

use ds4_kernels::cpu::{CpuDevice, Isa};
use ds4_kernels::ops::KvNumerics;
use ds4_kernels::{BatchPlan, Device};
use ds4_models::Model;
use ds4_models::deepseek_v4::DeepseekV4;

/// CPU time of all threads of this process, in seconds.
fn cpu() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let nanos: f64 = tasks
        .filter_map(|t| std::fs::read_to_string(t.path().join("schedstat")).ok())
        .filter_map(|s| s.split_whitespace().next().and_then(|n| n.parse::<f64>().ok()))
        .sum();
    nanos / 1e9
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let file = args.next().ok_or("which file?")?;
    let threads = args.next().map_or(Ok(usize::MAX), |t| t.parse())?;
    let isa = args.next().filter(|i| i != "best");
    let repeats: usize = args.next().map_or(Ok(5), |n| n.parse())?;
    let only = args.next();
    let isa = Isa::available().into_iter().find(|i| isa.as_ref().is_none_or(|n| i.name() == n)).ok_or("no such isa")?;
    let device = CpuDevice::with_isa(threads, isa);
    println!("{}", device.describe());
    let mut model = DeepseekV4::build(&device, &support::weights(Path::new(&file)), KvNumerics::Official)?;
    let context = 8192.min(model.shape().context);
    let mut banks = (0..4).map(|_| device.bank(model.state(), context)).collect::<Result<Vec<_>, _>>()?;
    for bank in &mut banks {
        device.bank_commit(bank, context)?;
    }
    let vocab = u32::try_from(model.shape().vocab)?;
    let token = |i: usize| u32::try_from(i * 7919 % 30011).unwrap_or(0) % vocab;
    // Name, streams, first position, rows of each stream's span, steps of a measurement.
    for (name, streams, pos, rows, steps) in [
        ("decode", 1, 512, 1, 24),
        ("decode of 4", 4, 512, 1, 8),
        ("decode at 7000", 1, 7000, 1, 24),
        ("prefill 64", 1, 0, 64, 2),
        ("prefill 512", 1, 0, 512, 1),
        ("prefill 512 at 4096", 1, 4096, 512, 1),
    ] {
        if only.as_ref().is_some_and(|o| o != name) || pos + rows * steps > context {
            continue;
        }
        let mut best = [f64::INFINITY; 2];
        // One measurement that is not counted: first touches.
        for run in 0..=repeats {
            let (from, busy) = (Instant::now(), cpu());
            for s in 0..steps {
                let mut plan = BatchPlan::default();
                for bank in 0..streams {
                    let ids: Vec<u32> = (0..rows).map(|i| token(run * 1000 + s * rows + i + bank)).collect();
                    plan.push(bank, pos + s * rows, &ids, true);
                }
                model.forward(&device, &plan, &mut banks)?;
            }
            let tokens = f64::from(u32::try_from(streams * rows * steps)?);
            let took =
                [from.elapsed(), Duration::from_secs_f64((cpu() - busy) / f64::from(u32::try_from(device.threads())?))];
            for (b, t) in best.iter_mut().zip(took) {
                *b = if run == 0 { *b } else { b.min(t.as_secs_f64() / tokens) };
            }
        }
        println!("{name:20} {:9.1} tok/s by CPU time {:9.1} by the clock", 1.0 / best[1], 1.0 / best[0]);
    }
    Ok(())
}
