//! DeepSeek V4 past position 65,536, where YaRN's original context ends: 66,048 tokens, really run.
//!
//! Reference: transformers with rotary angles in f64 (`tests/oracles/deepseek_v4_long.py`, which says why). Bound as in
//! `deepseek_v4.rs`: 1e-4 of the logits' spread.

#[path = "support/seeded.rs"]
mod seeded;
mod support;

use ds4_kernels::ops::KvNumerics;
use ds4_kernels::{BatchPlan, CpuDevice, Device};
use ds4_models::Model;
use ds4_models::deepseek_v4::DeepseekV4;
use support::{fixture, json, tokens};

/// The oracle's prompt: outputs of splitmix64 seeded with the FNV-1a hash of "prompt" and the model's seed, modulo the vocabulary.
fn prompt(n: usize, vocab: u64, seed: u64) -> Vec<u32> {
    let hash =
        b"prompt".iter().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
    (1..=n as u64)
        .map(|i| {
            let mut z = (hash ^ seed).wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            u32::try_from((z ^ (z >> 31)) % vocab).unwrap()
        })
        .collect()
}

#[test]
fn deepseek_v4_past_position_65536() {
    let case = json("deepseek_v4/long.json");
    let n = |key: &str| case[key].as_u64().unwrap();
    let mut weights = seeded::weights(&case);
    weights.manifest.metadata.set("deepseek4.context_length", ds4_manifests::Value::U64(131_072));
    let ids = prompt(usize::try_from(n("tokens")).unwrap(), n("vocab"), n("seed"));
    let rows: Vec<usize> = tokens(&case["rows"]).into_iter().map(|r| r as usize).collect();
    assert!(rows.iter().filter(|r| **r > 65_536).count() >= 10 && rows[0] < 65_536);

    let device = CpuDevice::default();
    let mut model = DeepseekV4::build(&device, &weights, KvNumerics::Reference).unwrap();
    let mut banks = vec![device.bank(model.state(), ids.len()).unwrap()];
    device.bank_commit(&mut banks[0], ids.len()).unwrap();
    let bytes = std::fs::read(fixture("deepseek_v4/long.f32")).unwrap();
    let want: Vec<f64> = bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect();
    let vocab = usize::try_from(n("vocab")).unwrap();
    assert_eq!(want.len(), rows.len() * vocab);
    let (mut got, mut row) = (Vec::new(), Vec::new());
    // Chunks that fit neither windows nor the reference's own chunks, and single tokens where the rows lie.
    let mut at = 0;
    while at < ids.len() {
        let take = if at < 65_000 {
            1000
        } else if at < 65_400 {
            77
        } else {
            1
        }
        .min(ids.len() - at);
        let mut plan = BatchPlan::default();
        plan.push(0, at, &ids[at..at + take], rows.contains(&(at + take - 1)));
        model.forward(&device, &plan, &mut banks).unwrap();
        if !plan.wanted.is_empty() {
            device.read(model.logits(), 0, &mut row);
            got.extend(row.iter().map(|v| f64::from(*v)));
        }
        at += take;
    }
    assert_eq!(got.len(), want.len());
    let spread = case["std"].as_f64().unwrap();
    let worst = got.iter().zip(&want).map(|(g, w)| (g - w).abs() / spread).fold(0.0, support::greater);
    println!("{} rows around 65,536: {worst:.2e}", rows.len());
    assert!(worst <= 1e-4, "{worst:.3e}");
}
