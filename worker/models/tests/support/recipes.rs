//! A seeded model in the tensor types of a published recipe, and the same model with those very weights as F32.
//!
//! Quantised blocks are random bits with a chosen scale, not encodings of anything: what is tested is that the kernels read
//! them as the reference decoders do.

use std::sync::Arc;

use ds4_attach::Weights;
use ds4_kernels::conformance::Random;
use ds4_kernels::quant;
use ds4_manifests::GgmlType;
use ds4_os::SharedBytes;

/// The experts of one layer: type of gate and up, type of down.
pub type ExpertTypes = (GgmlType, GgmlType);

/// Published recipe "q2".
pub const Q2: ExpertTypes = (GgmlType::IQ2_XXS, GgmlType::Q2_K);
/// Published recipe "q4".
pub const Q4: ExpertTypes = (GgmlType::Q4_K, GgmlType::Q4_K);

/// The type that a published file stores a tensor in (fact sheet, sections 2.1 to 2.5). `experts` has one entry a layer.
fn type_of(name: &str, experts: &[ExpertTypes]) -> GgmlType {
    if let Some(rest) = name.strip_prefix("blk.").filter(|_| name.ends_with("_exps.weight")) {
        let layer: usize = rest.split('.').next().and_then(|n| n.parse().ok()).unwrap();
        return if name.contains("_down_") { experts[layer].1 } else { experts[layer].0 };
    }
    let ends = |list: &[&str]| list.iter().any(|end| name.ends_with(end));
    if ends(&["norm.weight", "_base.weight", "_scale.weight", "sinks.weight", ".bias"]) {
        GgmlType::F32
    } else if name.ends_with("tid2eid.weight") {
        GgmlType::I32
    } else if ends(&["_fn.weight", "gate_inp.weight", "token_embd.weight"])
        || name.contains("compressor")
        || name.contains("indexer")
    {
        GgmlType::F16
    } else {
        GgmlType::Q8_0
    }
}

/// Random blocks whose values have a standard deviation of about `std`.
fn blocks(ty: GgmlType, name: &str, elems: usize, std: f32) -> Vec<u8> {
    let seed = name.bytes().fold(7u64, |h, b| h.wrapping_mul(0x100_0000_01b3) ^ u64::from(b));
    let mut bytes = Random::new(seed).weights(ty, 1, elems);
    // Where the scale (and minimum) of a block is, the deviation of its values at scale 1 when all other bits are uniform, and
    // what the minimum must be for a mean of zero. Scales vary by a factor of two so that mixing blocks up would show.
    let (at, deviation, min) = match ty {
        GgmlType::Q8_0 => (0, 73.9, None),
        GgmlType::Q2_K => (80, 13.9, Some(1.5)),
        GgmlType::Q4_K => (0, 258.0, Some(7.5)),
        GgmlType::IQ2_XXS => (0, 53.4, None),
        other => panic!("no blocks of {other}"),
    };
    let size = usize::try_from(ty.block_bytes()).unwrap();
    let mut rng = Random::new(!seed);
    for b in bytes.chunks_exact_mut(size) {
        let d = half(std / deviation * (1.0 + rng.unit() / 3.0));
        b[at..at + 2].copy_from_slice(&d.0);
        if let Some(min) = min {
            b[at + 2..at + 4].copy_from_slice(&half(d.1 * min).0);
        }
    }
    bytes
}

/// The F16 nearest to a positive `x` below 65504 and above 2^-14 (smaller: a multiple of 2^-24), and its bytes.
fn half(x: f32) -> ([u8; 2], f32) {
    let bytes = quant::quantize_row(GgmlType::F16, &[x]);
    let mut back = [0.0];
    quant::dequantize_row(GgmlType::F16, &bytes, &mut back);
    ([bytes[0], bytes[1]], back[0])
}

/// The same model; bytes are shared.
pub fn copy(weights: &Weights) -> Weights {
    Weights { manifest: weights.manifest.clone(), chunks: weights.chunks.clone() }
}

/// `weights` (all F32) in a recipe's types, and what those types hold as F32.
pub fn in_recipe(weights: &Weights, experts: &[ExpertTypes]) -> (Weights, Weights) {
    let (mut stored, mut plain) = (copy(weights), copy(weights));
    let (mut stored_bytes, mut plain_bytes) = (Vec::new(), Vec::new());
    for i in 0..weights.manifest.tensors.len() {
        let t = &weights.manifest.tensors[i];
        let at = usize::try_from(t.offset).unwrap();
        let bytes = &weights.chunks[0][at..at + usize::try_from(t.len).unwrap()];
        let ty = type_of(&t.name, experts);
        let (own, float) = if matches!(ty, GgmlType::I32 | GgmlType::F32) {
            (bytes.to_vec(), bytes.to_vec())
        } else {
            let elems = bytes.len() / 4;
            let own = if ty == GgmlType::F16 {
                let x: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
                quant::quantize_row(ty, &x)
            } else {
                blocks(ty, &t.name, elems, if t.name.contains("exp") { 0.144 } else { 0.108 })
            };
            let mut x = vec![0.0; elems];
            quant::dequantize_row(ty, &own, &mut x);
            (own, x.iter().flat_map(|v| v.to_le_bytes()).collect())
        };
        for (w, all, bytes, ty) in [
            (&mut stored, &mut stored_bytes, own, ty),
            (&mut plain, &mut plain_bytes, float, if ty == GgmlType::I32 { ty } else { GgmlType::F32 }),
        ] {
            let t = &mut w.manifest.tensors[i];
            (t.ty, t.offset, t.len) = (ty, all.len() as u64, bytes.len() as u64);
            all.extend_from_slice(&bytes);
        }
    }
    for (w, bytes) in [(&mut stored, stored_bytes), (&mut plain, plain_bytes)] {
        w.manifest.chunks[0].len = bytes.len() as u64;
        w.chunks = vec![SharedBytes::new(Arc::new(bytes))];
    }
    (stored, plain)
}
