//! A decode step launch by launch: see `ds4_kernels::cuda::driver::timeline`.

use std::time::Instant;

use ds4_kernels::BatchPlan;
use ds4_kernels::Device;
use ds4_kernels::cuda::CudaDevice;
use ds4_kernels::ops::{KvNumerics, RowQuery};
use ds4_models::Model;
use ds4_models::deepseek_v4::DeepseekV4;

use crate::flash::{self, flash};

const ROUNDS: usize = 15;

/// Decode of so many `streams` at position `at` of a model of `layers` layers (5 at least): what each launch of layers 3 (ratio 128) and
/// 4 (ratio 4, with the indexer) and of the head adds to the step, and what the step would gain without it.
pub(crate) fn timeline(d: &CudaDevice, layers: u64, at: usize, streams: &[usize]) {
    let weights = flash(layers, flash::VOCABULARY);
    let mut model = DeepseekV4::build(d, &weights, KvNumerics::Official).unwrap();
    streams.iter().for_each(|n| one(d, &mut model, layers, at, *n));
}

fn one(d: &CudaDevice, model: &mut DeepseekV4<CudaDevice>, layers: u64, at: usize, streams: usize) {
    let mut banks: Vec<_> = (0..streams).map(|_| d.bank(model.state(), at + 200).unwrap()).collect();
    banks.iter_mut().for_each(|b| d.bank_commit(b, at + 100).unwrap());
    let mut drawn = Vec::new();
    let queries: Vec<_> =
        (0..streams).map(|row| RowQuery { row, best: 1, scale: None, draw: None, norm: false }).collect();
    let mut step = |i: usize| {
        let start = Instant::now();
        let mut plan = BatchPlan::default();
        for b in 0..streams {
            plan.push(b, at + i, &[u32::try_from(i * 7919 + b * 104_729).unwrap() % 120_000], true);
        }
        model.forward(d, &plan, &mut banks).unwrap();
        let launched = start.elapsed().as_secs_f64() * 1e6;
        d.summarise(model.logits(), &queries, &mut drawn);
        (start.elapsed().as_secs_f64() * 1e6, launched)
    };
    let mut whole: Vec<_> = (0..40).map(&mut step).collect();
    whole.sort_by(|a, b| a.0.total_cmp(&b.0));
    d.synchronize().unwrap();
    d.stream().keep();
    step(40);
    let all = d.stream().kept().unwrap();
    let names = all.names();
    let time = |wanted: &dyn Fn(usize) -> bool| all.time(d.stream(), ROUNDS, wanted).unwrap();
    let full = time(&|_| true);
    println!(
        "{layers} layers, {streams} streams at {at}: {} launches; step until the host has its tokens {:.1} us (launched after {:.1}), \
         in one graph {full:.1} us",
        names.len(),
        whole[20].0,
        whole[20].1
    );
    // Two mixers a layer, and the head's.
    let mixers: Vec<usize> = (0..names.len()).filter(|i| names[*i].0 == "streams_finish").collect();
    let (head, end) = (mixers[mixers.len() - 1] - 1, names.len());
    for (part, range) in [("ratio 128", mixers[6]..mixers[8]), ("ratio 4", mixers[8]..mixers[10]), ("head", head..end)]
    {
        let from = time(&|i| i < range.start);
        let mut before = from;
        for n in range {
            let now = time(&|i| i <= n);
            let (name, [x, y, z]) = &names[n];
            print!("{n:4} {name:30} {:>12} {:7.2}", format!("{x}x{y}x{z}"), now - before);
            // Without the scores' kernel the one after it has no addresses of keys.
            match name.contains("scores") {
                true => println!(),
                false => println!(" {:7.2}", full - time(&|i| i != n)),
            }
            before = now;
        }
        println!("     {part}: {:.1} us", before - from);
    }
}
