//! Speed of whole steps of a model of DeepSeek V4 Flash's shape with random weights on a CUDA device, and of what samplers ask. Single
//! kernels: `ds4 bench kernel`.
//!
//! `gpu_speed sampling`, `gpu_speed model [LAYERS] [late]`, `gpu_speed decode [LAYERS]` (few steps, for a profiler), `gpu_speed timeline
//! LAYERS POSITION STREAMS..` (a decode step launch by launch), `gpu_speed memory [LAYERS]` (what is taken of the device). Weights are random blocks, each layer's a device copy of its own (the host has one layer's bytes); `late` also times decoding without early starts.

#[path = "parts/flash.rs"]
mod flash;
#[path = "parts/memory.rs"]
mod memory;
#[path = "parts/timeline.rs"]
mod timeline;

use std::time::Instant;

use ds4_kernels::conformance::Random;
use ds4_kernels::cuda::CudaDevice;
use ds4_kernels::ops::{KvNumerics, RowQuery};
use ds4_kernels::{BatchPlan, Device, StateSpec, TensorSource};
use ds4_manifests::GgmlType;
use ds4_models::Model;
use ds4_models::deepseek_v4::DeepseekV4;
use ds4_os::SharedBytes;
use flash::flash;

fn bind(d: &CudaDevice, ty: GgmlType, rows: usize, cols: usize, bytes: &SharedBytes) -> <CudaDevice as Device>::Weight {
    d.bind(&TensorSource { name: format!("{ty}"), ty, cols, rows, bytes: bytes.clone() }).unwrap()
}

fn activations(d: &CudaDevice, rng: &mut Random, rows: usize, width: usize) -> <CudaDevice as Device>::Buffer {
    let bytes = rng.activations(rows * width).iter().flat_map(|v| v.to_le_bytes()).collect();
    let table = bind(d, GgmlType::F32, rows, width, &SharedBytes::from_vec(bytes));
    let mut banks = [d.bank(&StateSpec::default(), rows).unwrap()];
    d.bank_commit(&mut banks[0], rows).unwrap();
    let mut plan = BatchPlan::default();
    plan.push(0, 0, &(0..u32::try_from(rows).unwrap()).collect::<Vec<_>>(), false);
    let mut out = d.buffer(width);
    d.embed(&d.step(&plan, &mut banks).unwrap(), &table, &mut out);
    out
}

fn model(d: &CudaDevice, layers: u64, prefill: bool, late: bool) {
    let start = Instant::now();
    let weights = flash(layers, flash::VOCABULARY);
    println!(
        "host bytes {:.1} GB, made in {:.1} s",
        weights.chunks[0].len() as f64 / 1e9,
        start.elapsed().as_secs_f64()
    );
    let start = Instant::now();
    let mut model = DeepseekV4::build(d, &weights, KvNumerics::Official).unwrap();
    d.synchronize().unwrap();
    let (free, total) = d.context().memory().unwrap();
    println!(
        "bound in {:.1} s, {:.1} GB of device memory used",
        start.elapsed().as_secs_f64(),
        (total - free) as f64 / 1e9
    );
    let mut rng = Random::new(4);
    let mut token = || u32::try_from(rng.below(120_000)).unwrap();
    let context = 70_000;
    let streams = 16;
    let mut banks: Vec<_> = (0..streams).map(|_| d.bank(model.state(), context).unwrap()).collect();
    let mut row = Vec::new();
    let mut done = 0;
    for (chunk, until) in [(512, 2048), (2048, 8192)].into_iter().filter(|_| prefill) {
        let start = Instant::now();
        let from = done;
        while done < until {
            let tokens: Vec<u32> = (0..chunk).map(|_| token()).collect();
            d.bank_commit(&mut banks[0], done + chunk).unwrap();
            let mut plan = BatchPlan::default();
            plan.push(0, done, &tokens, done + chunk == until);
            model.forward(d, &plan, &mut banks).unwrap();
            done += chunk;
        }
        d.read(model.logits(), 0, &mut row);
        let s = start.elapsed().as_secs_f64();
        println!(
            "prefill {from}..{until} in chunks of {chunk}: {:.0} tok/s; finite logits: {}",
            (until - from) as f64 / s,
            row.iter().all(|v| v.is_finite())
        );
    }
    let mut drawn = Vec::new();
    let all = [(1usize, 2048usize), (1, 8192), (1, 65_536), (4, 2048), (16, 2048)];
    // The same steps with each kernel started after the one before it has ended, for comparison.
    let late = if late { all.as_slice() } else { &[] };
    for (i, (banks_used, at)) in all.iter().chain(late).copied().enumerate() {
        if i == all.len() {
            d.early(false).unwrap();
            println!("kernels started one after the other:");
        }
        // Rows that no step wrote hold whatever memory had; timing does not depend on it.
        for b in &mut banks[..banks_used] {
            d.bank_commit(b, at + 100).unwrap();
        }
        let mut best = f64::INFINITY;
        let (mut all, mut host) = (Vec::new(), Vec::new());
        for i in 0..if prefill { 24 } else { 2 } {
            let start = Instant::now();
            let mut plan = BatchPlan::default();
            for b in 0..banks_used {
                plan.push(b, at + i, &[token()], true);
            }
            model.forward(d, &plan, &mut banks).unwrap();
            host.push(start.elapsed().as_secs_f64());
            // As the engine asks for greedy requests.
            let greedy = |row| RowQuery { row, best: 1, scale: None, draw: None, norm: false };
            d.summarise(model.logits(), &(0..banks_used).map(greedy).collect::<Vec<_>>(), &mut drawn);
            let s = start.elapsed().as_secs_f64();
            best = best.min(s);
            all.push(s);
        }
        all.sort_by(f64::total_cmp);
        host.sort_by(f64::total_cmp);
        let (median, launched) = (all[all.len() / 2], host[host.len() / 2]);
        println!(
            "decode {banks_used} at {at}: median {:.3} ms (launched after {:.3}), best {:.3} ms, {:.1} tok/s",
            median * 1e3,
            launched * 1e3,
            best * 1e3,
            banks_used as f64 / median
        );
    }
}

/// What the sampler asks of rows of logits, and the rows themselves: times until the host has them.
fn sampling(d: &CudaDevice) {
    let mut rng = Random::new(5);
    let vocab = 129_280;
    let logits = activations(d, &mut rng, 16, vocab);
    let (mut out, mut row) = (Vec::new(), Vec::new());
    let host = |name: &str, rows: usize, run: &mut dyn FnMut()| {
        let mut all: Vec<f64> = (0..40)
            .map(|_| {
                let start = Instant::now();
                run();
                start.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        all.sort_by(f64::total_cmp);
        println!("{name:34} rows {rows:5}  {:9.1} us to the host", all[20]);
    };
    for rows in [1, 4, 16] {
        for (name, best, scale, norm) in [
            ("greedy", 1, None, false),
            ("temperature 0.7", 1, Some(0.7f32.recip()), false),
            ("top-k 40", 40, None, false),
            ("top-p", 128, Some(1.0), false),
            ("temperature 1 with log-probabilities", 20, Some(1.0), true),
        ] {
            let draw = scale.filter(|_| best < 100).map(|_| 0.37);
            let queries: Vec<_> = (0..rows).map(|row| RowQuery { row, best, scale, draw, norm }).collect();
            host(name, rows, &mut || d.summarise(&logits, &queries, &mut out));
        }
        host("whole rows", rows, &mut || (0..rows).for_each(|r| d.read(&logits, r, &mut row)));
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let d = CudaDevice::open(0).unwrap_or_else(|e| {
        eprintln!("{e}");
        std::process::exit(1)
    });
    println!("{}", d.describe());
    match args.first().map(String::as_str) {
        Some("sampling") => sampling(&d),
        Some(kind @ ("model" | "decode")) => {
            model(
                &d,
                args.get(1).and_then(|n| n.parse().ok()).unwrap_or(43),
                kind == "model",
                args.iter().any(|a| a == "late"),
            );
        }
        Some("memory") => memory::memory(&d, args.get(1).and_then(|n| n.parse().ok()).unwrap_or(5)),
        Some("timeline") => {
            let numbers: Vec<usize> = args[1..].iter().filter_map(|n| n.parse().ok()).collect();
            let [layers, at, streams @ ..] = numbers.as_slice() else {
                eprintln!("timeline LAYERS POSITION STREAMS..");
                std::process::exit(1)
            };
            timeline::timeline(&d, *layers as u64, *at, streams);
        }
        other => {
            eprintln!("{other:?}: sampling, model, decode, memory or timeline");
            std::process::exit(1)
        }
    }
}
