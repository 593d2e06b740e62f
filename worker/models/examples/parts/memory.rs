//! What a worker takes of a device beside weights: by cause, and for each size of the parts in which attention takes a prefill chunk,
//! with the time that it costs. The results of all sizes must have the same bits.

use std::time::Instant;

use ds4_kernels::BatchPlan;
use ds4_kernels::Device;
use ds4_kernels::cuda::CudaDevice;
use ds4_kernels::ops::{KvNumerics, RowQuery};
use ds4_models::Model;
use ds4_models::deepseek_v4::{ATTENTION_ROWS, DeepseekV4};

use crate::flash::{self, flash};

const PROMPT: usize = 8192;
const CHUNK: usize = 2048;
const STREAMS: usize = 16;

/// Of a model of `layers` layers, the first of each kind among them from 4 on: activations do not depend on their number.
pub(crate) fn memory(d: &CudaDevice, layers: u64) {
    let used = || {
        d.synchronize().unwrap();
        let (free, total) = d.context().memory().unwrap();
        (total - free) as f64 / f64::from(1 << 20)
    };
    let at_start = used();
    println!("the device's own, the context and the modules: {at_start:.0} MiB");
    let weights = flash(layers, flash::VOCABULARY);
    let mut model = DeepseekV4::build(d, &weights, KvNumerics::Official).unwrap();
    let bound = used();
    println!("{layers} layers' weights: {:.0} MiB", bound - at_start);
    let mut banks: Vec<_> = (0..STREAMS).map(|_| d.bank(model.state(), PROMPT + 64).unwrap()).collect();
    banks.iter_mut().for_each(|b| d.bank_commit(b, PROMPT + 64).unwrap());
    let kept = used();
    let bytes: usize = banks.iter().map(|b| d.bank_committed(b)).sum();
    let counted = bytes as f64 / f64::from(1 << 20);
    println!("{STREAMS} banks of {} tokens: {:.0} MiB, {counted:.0} counted", PROMPT + 64, kept - bound);
    let tokens: Vec<u32> = (0..PROMPT).map(|i| u32::try_from(1000 + i * 104_729 % 100_003).unwrap()).collect();
    let mut first: Option<Vec<f32>> = None;
    for rows in [256, ATTENTION_ROWS, 1024, CHUNK] {
        model.set_attention_rows(rows);
        let mut row = Vec::new();
        // The first time allocates.
        for timed in [false, true] {
            d.bank_trim(&mut banks[0], 0);
            d.bank_commit(&mut banks[0], PROMPT + 64).unwrap();
            let mut times = Vec::new();
            for (i, chunk) in tokens.chunks(CHUNK).enumerate() {
                let mut plan = BatchPlan::default();
                plan.push(0, i * CHUNK, chunk, (i + 1) * CHUNK == PROMPT);
                let start = Instant::now();
                model.forward(d, &plan, &mut banks).unwrap();
                d.synchronize().unwrap();
                times.push(format!("{:.2}", start.elapsed().as_secs_f64() * 1e3));
            }
            d.read(model.logits(), 0, &mut row);
            if timed {
                println!("parts of {rows}: {:.0} MiB more; ms a chunk: {}", used() - kept, times.join(" "));
            }
        }
        let want = first.get_or_insert_with(|| row.clone());
        let same = want.iter().map(|v| v.to_bits()).eq(row.iter().map(|v| v.to_bits()));
        assert!(same && row.iter().all(|v| v.is_finite()), "parts of {rows} rows give other bits");
    }
    let before = used();
    let mut out = Vec::new();
    for i in 0..40 {
        let mut plan = BatchPlan::default();
        (0..STREAMS).for_each(|b| {
            plan.push(b, PROMPT + i, &[tokens[b + i]], true);
        });
        model.forward(d, &plan, &mut banks).unwrap();
        let greedy = |row| RowQuery { row, best: 1, scale: None, draw: None, norm: false };
        d.summarise(model.logits(), &(0..STREAMS).map(greedy).collect::<Vec<_>>(), &mut out);
    }
    println!("decoding of {STREAMS} streams: {:.0} MiB more", used() - before);
}
