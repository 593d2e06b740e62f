//! DeepSeek V4 in the published recipes (q2, q4 and a mixed file) against the same weights as F32.
//!
//! Both sides share the model code and the float kernels, which transformers vouches for (`deepseek_v4.rs`); what differs is
//! every product with a quantised tensor. Its activations are 16-bit: an error of at most half a step, `max / 65024` in a block
//! of 32, uniform, so its deviation is `max / 112624`, and a block's maximum is at most `sqrt(32)` times its root mean square.
//! Relative to the activations that is at most [`NOISE`] = 5.0e-5, and no product makes the relative noise of independent
//! terms larger. How much of it reaches the logits depends on the model alone, and is measured on the F32 side: its embedding
//! table is disturbed by noise of a known size, and the logits' relative change divided by it is the model's gain. `P` products
//! in line, each adding [`NOISE`] of its own, then change the logits by at most `NOISE · gain · sqrt(P)`, root mean square. A scale,
//! sign or codebook entry read wrongly changes them by 1e-1 and more.

#[path = "support/recipes.rs"]
mod recipes;
#[path = "support/seeded.rs"]
mod seeded;
mod support;

use std::sync::Arc;

use ds4_attach::Weights;
use ds4_kernels::CpuDevice;
use ds4_kernels::conformance::Random;
use ds4_kernels::cpu::Isa;
use ds4_kernels::ops::KvNumerics;
use ds4_manifests::GgmlType;
use ds4_models::deepseek_v4::DeepseekV4;
use ds4_os::SharedBytes;
use recipes::{ExpertTypes, Q2, Q4, copy, in_recipe};
use serde_json::{Value, json};
use support::{Lone, argmax};

/// Relative deviation of 16-bit activations, at most: `sqrt(32) / 112624`.
const NOISE: f64 = 5.0e-5;
/// Quantised products in line per layer: q_a or kv, q_b, output_a, output_b, gate or up, down, and the shared expert's two.
const PRODUCTS: f64 = 8.0;
/// Size of the disturbance that measures the gain.
const PROBE: f64 = 1e-4;

/// Blocks of 256 force hidden and expert width to multiples of it.
fn small() -> Value {
    json!({"vocab": 160, "hidden": 256, "ff": 256, "heads": 4, "head_dim": 32, "rope": 8, "q_lora": 32, "groups": 2,
        "o_lora": 32, "experts": 8, "used": 2, "hash_layers": 1, "window": 128, "ratio_c": 4, "ratio_h": 128, "index_heads": 4,
        "index_dim": 16, "index_topk": 512, "yarn_ctx": 65536, "seed": 31, "layers": "SCH"})
}

/// The production geometry: heads of 512 with 64 rotary, indexer rows of 128, window 128, ratios 4 and 128, four streams.
fn production() -> Value {
    let mut case = small();
    for (key, value) in [
        ("heads", 4),
        ("head_dim", 512),
        ("rope", 64),
        ("q_lora", 64),
        ("index_heads", 8),
        ("index_dim", 128),
        ("seed", 32),
    ] {
        case[key] = value.into();
    }
    case
}

fn lone(weights: &Weights, isa: Isa) -> Lone {
    let device = CpuDevice::with_isa(2, isa);
    let model = DeepseekV4::build(&device, weights, KvNumerics::Reference).unwrap();
    Lone::new(device, Box::new(model))
}

fn prompt(n: usize, vocab: usize) -> Vec<u32> {
    let mut rng = Random::new(77);
    (0..n).map(|_| u32::try_from(rng.below(vocab)).unwrap()).collect()
}

/// Root mean square of the difference, relative to the spread of `want`.
fn rms(got: &[Vec<f32>], want: &[Vec<f32>]) -> f64 {
    let n = (want.len() * want[0].len()) as f64;
    let mean = want.iter().flatten().map(|w| f64::from(*w)).sum::<f64>() / n;
    let spread = want.iter().flatten().map(|w| (f64::from(*w) - mean).powi(2)).sum::<f64>();
    let diff = got.iter().flatten().zip(want.iter().flatten()).map(|(g, w)| (f64::from(*g) - f64::from(*w)).powi(2));
    (diff.sum::<f64>() / spread).sqrt()
}

/// `weights` with noise of deviation [`PROBE`], relative, on the embedding table.
#[allow(clippy::cast_possible_truncation, reason = "the weights' type")]
fn disturbed(weights: &Weights) -> Weights {
    let mut w = copy(weights);
    let mut bytes = w.chunks[0].to_vec();
    let table = w.manifest.tensors.iter().find(|t| t.name == "token_embd.weight").unwrap();
    let (at, len) = (usize::try_from(table.offset).unwrap(), usize::try_from(table.len).unwrap());
    let mut rng = Random::new(5);
    for b in bytes[at..at + len].as_chunks_mut::<4>().0 {
        let noise = f64::from(rng.unit()) * 3f64.sqrt() * PROBE;
        *b = (f32::from_le_bytes(*b) * (1.0 + noise) as f32).to_le_bytes();
    }
    w.chunks = vec![SharedBytes::new(Arc::new(bytes))];
    w
}

fn agrees(name: &str, case: &Value, experts: &[ExpertTypes]) {
    let (stored, plain) = in_recipe(&seeded::weights(case), experts);
    let types = |w: &Weights| w.manifest.tensors.iter().map(|t| t.ty).collect::<Vec<_>>();
    assert!(types(&stored).contains(&experts[0].0) && !types(&plain).contains(&GgmlType::Q8_0));
    let ids = prompt(264, 160);
    let want = lone(&plain, Isa::detect()).all_logits(&ids, ids.len());
    let gain = rms(&lone(&disturbed(&plain), Isa::detect()).all_logits(&ids, ids.len()), &want) / PROBE;
    let mut m = lone(&stored, Isa::detect());
    let got = m.all_logits(&ids, ids.len());
    let (error, bound) = (rms(&got, &want), NOISE * gain * (PRODUCTS * experts.len() as f64).sqrt());
    println!("{name}: error {error:.2e}, gain {gain:.1}, bound {bound:.2e}");
    assert!(bound < 0.02, "{name}: the gain {gain} makes the bound meaningless");
    assert!(error <= bound, "{name}: {error:.3e} > {bound:.3e}");
    // The same tokens wherever the best logit leads by more than six deviations of that error.
    let n = (want.len() * want[0].len()) as f64;
    let spread = (want.iter().flatten().map(|w| f64::from(*w).powi(2)).sum::<f64>() / n).sqrt();
    let mut clear = 0;
    for (g, w) in got.iter().zip(&want) {
        let best = argmax(w);
        let second =
            w.iter().enumerate().filter(|(i, _)| *i != best as usize).map(|(_, v)| *v).fold(f32::MIN, f32::max);
        if f64::from(w[best as usize] - second) > 6.0 * bound * spread {
            assert_eq!(argmax(g), best, "{name}");
            clear += 1;
        }
    }
    assert!(clear * 2 > want.len(), "{name}: {clear} clear rows");
    for chunk in [1, 3, 64, 128] {
        assert!(m.all_logits(&ids, chunk) == got, "{name}: chunks of {chunk}");
    }
    // Scalar code has no fused multiply-add on x86-64 and emulates it: fewer tokens.
    let few = &ids[..24];
    for isa in Isa::available() {
        assert!(lone(&stored, isa).all_logits(few, few.len()) == got[..few.len()], "{name} on {}", isa.name());
    }
}

#[test]
fn deepseek_v4_q2_computes_as_its_dequantised_weights() {
    agrees("q2", &small(), &[Q2; 3]);
}

#[test]
fn deepseek_v4_q4_computes_as_its_dequantised_weights() {
    agrees("q4", &small(), &[Q4; 3]);
}

#[test]
fn deepseek_v4_mixed_experts_compute_as_their_dequantised_weights() {
    agrees("mixed", &small(), &[Q2, Q4, (GgmlType::Q2_K, GgmlType::IQ2_XXS)]);
}

#[test]
fn deepseek_v4_q2_in_production_geometry_computes_as_its_dequantised_weights() {
    agrees("production geometry", &production(), &[Q2; 3]);
}
