//! DeepSeek V4 against transformers on small random models (tests/oracles/deepseek_v4.py), `reference` numerics.
//!
//! Bound: the largest difference of any logit, relative to the spread (standard deviation) of the model's logits, is at most
//! 1e-4. Both sides compute in f32 with sums in different orders; a wrong rule anywhere is off by 1e-2 and more.

#[path = "support/seeded.rs"]
mod seeded;
mod support;

use ds4_kernels::ops::KvNumerics;
use ds4_kernels::{BatchPlan, CpuDevice, Device};
use ds4_models::Model;
use ds4_models::deepseek_v4::DeepseekV4;
use serde_json::Value;
use support::{Lone, argmax, fixture, json, tokens};

const BOUND: f64 = 1e-4;

fn lone(case: &Value, numerics: KvNumerics) -> Lone {
    let device = CpuDevice::default();
    let model = DeepseekV4::build(&device, &seeded::weights(case), numerics).unwrap();
    Lone::new(device, Box::new(model))
}

fn case(name: &str) -> Value {
    let all = json("deepseek_v4/cases.json");
    all.as_array().unwrap().iter().find(|c| c["name"] == name).unwrap_or_else(|| panic!("no case {name}")).clone()
}

/// Rows of reference logits with their positions.
fn reference(case: &Value) -> Vec<(usize, Vec<f64>)> {
    let name = case["name"].as_str().unwrap();
    let bytes = std::fs::read(fixture(&format!("deepseek_v4/{name}.f32"))).unwrap();
    let values: Vec<f64> = bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect();
    let vocab = usize::try_from(case["vocab"].as_u64().unwrap()).unwrap();
    let rows = tokens(&case["rows"]);
    assert_eq!(values.len(), rows.len() * vocab);
    rows.iter().map(|r| *r as usize).zip(values.chunks_exact(vocab).map(<[f64]>::to_vec)).collect()
}

/// Largest error over all reference rows, relative to the logits' spread.
fn worst(case: &Value, got: &[Vec<f32>]) -> f64 {
    let spread = case["std"].as_f64().unwrap();
    let mut worst = 0.0f64;
    for (row, want) in reference(case) {
        for (g, w) in got[row].iter().zip(&want) {
            worst = support::greater(worst, (f64::from(*g) - w).abs() / spread);
        }
    }
    worst
}

fn agrees(name: &str) {
    let case = case(name);
    let ids = tokens(&case["ids"]);
    let mut m = lone(&case, KvNumerics::Reference);
    let whole = m.all_logits(&ids, ids.len());
    let error = worst(&case, &whole);
    println!("{name}: {error:.2e}");
    assert!(error <= BOUND, "{name}: {error:.3e}");
    // Row invariance: any chunking gives the very same bits, decode (chunks of 1) included.
    for chunk in [1, 3, 64, 128] {
        assert!(m.all_logits(&ids, chunk) == whole, "{name}: chunks of {chunk}");
    }
    let greedy = case["greedy"].as_array().unwrap();
    let want: Vec<u32> = greedy.iter().map(|g| u32::try_from(g[0].as_u64().unwrap()).unwrap()).collect();
    let end = m.last_logits(&ids, 64);
    assert_eq!(argmax(&end), want[0], "{name}");
    assert_eq!(m.decode_greedy(end, want.len()), want, "{name}: greedy");
}

macro_rules! agreement {
    ($($test:ident: $name:literal;)*) => { $(
        #[test]
        fn $test() {
            agrees($name);
        }
    )* };
}

agreement! {
    deepseek_v4_sliding_window: "swa";
    deepseek_v4_compressed_by_4: "csa";
    deepseek_v4_compressed_by_128: "hca";
    deepseek_v4_hash_routing: "hash";
    deepseek_v4_mixed_layers: "mixed";
    deepseek_v4_past_the_yarn_context: "yarn";
    deepseek_v4_pro_schedule: "pro-schedule";
    deepseek_v4_production_geometry: "production-geometry";
}

#[test]
fn deepseek_v4_the_indexer_cuts_where_the_reference_cuts() {
    let case = case("cut");
    let ids = tokens(&case["ids"]);
    let device = CpuDevice::default();
    let mut model = DeepseekV4::build(&device, &seeded::weights(&case), KvNumerics::Reference).unwrap();
    let mut banks = vec![device.bank(model.state(), ids.len()).unwrap()];
    device.bank_commit(&mut banks[0], ids.len()).unwrap();
    let mut plan = BatchPlan::default();
    plan.push(0, 0, &ids, false);
    plan.wanted = (0..ids.len()).collect();
    model.forward(&device, &plan, &mut banks).unwrap();

    // Both sides score in f32 with sums in different orders, so a tie within rounding may fall either way; there is none here.
    let top_k = usize::try_from(case["index_topk"].as_u64().unwrap()).unwrap();
    let picked = case["picked"]["2"].as_array().unwrap();
    assert_eq!(picked.len(), ids.len());
    let mut cut = 0;
    for (pos, (want, got)) in picked.iter().zip(&model.last_selection().rows).enumerate() {
        let want: Vec<usize> = tokens(want).into_iter().map(|k| k as usize).collect();
        match got {
            Some(got) => {
                assert_eq!(*got, want, "position {pos}");
                assert_eq!(got.len(), top_k);
                cut += 1;
            }
            None => assert_eq!(want, (0..(pos + 1) / 4).collect::<Vec<_>>(), "position {pos} sees everything"),
        }
    }
    assert_eq!(cut, ids.len() - (4 * (top_k + 1) - 1), "every position that sees more than top-k rows");
    let mut rows = Vec::new();
    for i in 0..ids.len() {
        let mut row = Vec::new();
        device.read(model.logits(), i, &mut row);
        rows.push(row);
    }
    let error = worst(&case, &rows);
    assert!(error <= BOUND, "{error:.3e}");
}

#[test]
fn deepseek_v4_batched_with_other_rows_computes_the_same() {
    let case = case("mixed");
    let ids = tokens(&case["ids"]);
    let mut alone = lone(&case, KvNumerics::Reference);
    let want = alone.all_logits(&ids[..300], 64);
    // Two sequences in one step, at different depths, one of them a chunk and the other single tokens.
    let device = CpuDevice::default();
    let mut model = DeepseekV4::build(&device, &seeded::weights(&case), KvNumerics::Reference).unwrap();
    let mut banks: Vec<_> = (0..2).map(|_| device.bank(model.state(), 600).unwrap()).collect();
    let mut done = [0usize; 2];
    while done[0] < 300 {
        let take = [37.min(300 - done[0]), 1];
        let mut plan = BatchPlan::default();
        for bank in 0..2 {
            let from = done[bank];
            device.bank_commit(&mut banks[bank], from + take[bank]).unwrap();
            plan.push(bank, from, &ids[from..from + take[bank]], true);
            done[bank] += take[bank];
        }
        model.forward(&device, &plan, &mut banks).unwrap();
        for (bank, end) in done.iter().enumerate() {
            let mut row = Vec::new();
            device.read(model.logits(), bank, &mut row);
            assert!(row == want[end - 1], "bank {bank} at {end}");
        }
    }
}

#[test]
fn deepseek_v4_official_numerics_drift_little_from_the_reference() {
    // FP8 rows (3 mantissa bits: 2^-4 at worst, half of that on average) and FP4 indexer rows change every logit, and in a random
    // model now and then the choice of an expert. The bound is on the root mean square over the reference rows.
    for name in ["mixed", "production-geometry"] {
        let case = case(name);
        let ids = tokens(&case["ids"]);
        let mut official = lone(&case, KvNumerics::Official);
        let whole = official.all_logits(&ids, ids.len());
        for chunk in [1, 64] {
            assert!(official.all_logits(&ids, chunk) == whole, "{name}: chunks of {chunk}");
        }
        let spread = case["std"].as_f64().unwrap();
        let (mut sum, mut n) = (0.0, 0.0);
        for (row, want) in reference(&case) {
            for (g, w) in whole[row].iter().zip(&want) {
                sum += ((f64::from(*g) - w) / spread).powi(2);
                n += 1.0;
            }
        }
        let drift = f64::sqrt(sum / n);
        println!("{name}: official drift {drift:.4}");
        assert!(drift > 1e-3, "{name}: the profile does something");
        assert!(drift < 0.2, "{name}: {drift}");
    }
}

#[test]
fn deepseek_v4_attention_in_parts_computes_the_same() {
    // Window and compressed layers of both ratios, an indexer that cuts, and a row of another sequence beside a prompt.
    for (name, numerics) in
        [("cut", KvNumerics::Reference), ("cut", KvNumerics::Official), ("mixed", KvNumerics::Official)]
    {
        let case = case(name);
        let ids = tokens(&case["ids"]);
        let device = CpuDevice::default();
        let run = |attention_rows: usize| {
            let mut model = DeepseekV4::build(&device, &seeded::weights(&case), numerics).unwrap();
            model.set_attention_rows(attention_rows);
            let mut banks: Vec<_> = (0..2).map(|_| device.bank(model.state(), ids.len()).unwrap()).collect();
            banks.iter_mut().for_each(|b| device.bank_commit(b, ids.len()).unwrap());
            let (mut logits, mut row) = (Vec::new(), Vec::new());
            let (early, late) = ids.split_at(ids.len() / 2);
            for (first, other, part) in [(0, 0, early), (early.len(), 1, late)] {
                let mut plan = BatchPlan::default();
                plan.push(1, other, &part[..1], true);
                plan.push(0, first, part, false);
                plan.wanted = (0..plan.rows()).collect();
                model.forward(&device, &plan, &mut banks).unwrap();
                for i in 0..plan.rows() {
                    device.read(model.logits(), i, &mut row);
                    logits.extend(row.iter().map(|v| v.to_bits()));
                }
            }
            let mut state = Vec::new();
            for (slot, kind) in model.state().slots.iter().enumerate() {
                device.bank_export(&banks[0], slot, 0..kind.rows(ids.len()), &mut state);
            }
            (logits, state)
        };
        let whole = run(usize::MAX);
        for rows in [1, 7, 32] {
            assert!(run(rows) == whole, "{name}, {numerics:?}: parts of {rows} rows give other bits");
        }
    }
}
