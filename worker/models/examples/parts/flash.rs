//! DeepSeek V4 Flash with random weights, for the examples: whole, or one layer of a kind. All layers share host bytes.

use std::sync::Arc;

use ds4_attach::Weights;
use ds4_kernels::conformance::Random;
use ds4_kernels::quant;
use ds4_manifests::catalog::Catalog;
use ds4_manifests::{Backend, Chunk, GgmlType, ModelIdentity, TensorEntry, Value, WeightManifest};
use ds4_os::SharedBytes;

/// Flash's vocabulary.
pub const VOCABULARY: u64 = 129_280;

/// Elements that repeat: neither time nor error depends on how far apart equal blocks are. An odd number of superblocks, so that rows differ.
const DISTINCT: usize = (1 << 22) + 37 * 256;

/// Random blocks of `elems` values whose standard deviation is about `std`.
fn blocks(rng: &mut Random, ty: GgmlType, elems: usize, std: f32) -> Vec<u8> {
    let mut some = rng.weights(ty, 1, elems.min(DISTINCT));
    // Where a block's scale (and minimum) is, the deviation of its values at scale 1 when all other bits are uniform, and the minimum for
    // a mean of zero.
    let (at, deviation, min) = match ty {
        GgmlType::Q8_0 => (0, 73.9, None),
        GgmlType::Q2_K => (80, 13.9, Some(1.5)),
        GgmlType::IQ2_XXS => (0, 53.4, None),
        other => panic!("no blocks of {other}"),
    };
    for b in some.chunks_exact_mut(usize::try_from(ty.block_bytes()).unwrap()) {
        let d = half::f16::from_f32(std / deviation * (1.0 + rng.unit() / 3.0));
        b[at..at + 2].copy_from_slice(&d.to_le_bytes());
        if let Some(min) = min {
            b[at + 2..at + 4].copy_from_slice(&half::f16::from_f32(d.to_f32() * min).to_le_bytes());
        }
    }
    repeated(&some, quant::row_bytes(ty, elems))
}

/// `some` again and again, `len` bytes.
fn repeated(some: &[u8], len: usize) -> Vec<u8> {
    let mut all = Vec::with_capacity(len);
    while all.len() < len {
        all.extend_from_slice(&some[..some.len().min(len - all.len())]);
    }
    all
}

/// Flash with `layers` layers and a vocabulary of `vocabulary` tokens.
pub fn flash(layers: u64, vocabulary: u64) -> Weights {
    let catalog = Catalog::builtin();
    let entry = catalog.entry("deepseek-v4-flash").unwrap();
    let mut metadata = catalog.metadata_of(entry);
    metadata.set("deepseek4.expert_weights_norm", Value::Bool(true));
    let found = catalog.expand(entry, &metadata).unwrap();
    let mut rng = Random::new(3);
    let mut host: Vec<u8> = Vec::new();
    let mut seen: Vec<(String, u64)> = Vec::new();
    let mut tensors = Vec::new();
    for mut t in found.tensors() {
        let (layer, suffix) = match t.name.strip_prefix("blk.").and_then(|n| n.split_once('.')) {
            Some((n, suffix)) => (n.parse::<u64>().ok(), suffix.to_owned()),
            None => (None, t.name.clone()),
        };
        if layer.is_some_and(|l| l >= layers) {
            continue;
        }
        t.shape.iter_mut().filter(|n| **n == VOCABULARY).for_each(|n| *n = vocabulary);
        let ty = match t.role {
            "table" => GgmlType::I32,
            "vector" => GgmlType::F32,
            "experts" if t.name.contains("down") => GgmlType::Q2_K,
            "experts" => GgmlType::IQ2_XXS,
            "shared" | "matrix" => GgmlType::Q8_0,
            _ => GgmlType::F16,
        };
        let elems = usize::try_from(t.shape.iter().product::<u64>()).unwrap();
        let size = 1.0 / (t.shape[0] as f32).sqrt();
        let key = format!("{suffix} {:?}", t.shape);
        let offset = match seen.iter().find(|(k, _)| *k == key) {
            Some((_, offset)) => *offset,
            None => {
                host.resize(host.len().next_multiple_of(256), 0);
                let offset = host.len() as u64;
                match ty {
                    GgmlType::I32 => {
                        // Experts that differ within a row: slot j takes one of its own residue class.
                        let used = usize::try_from(t.shape[0]).unwrap();
                        host.extend((0..elems).flat_map(|i| {
                            let e = rng.below(256 / used) * used + i % used;
                            i32::try_from(e).unwrap().to_le_bytes()
                        }));
                    }
                    GgmlType::F32 => {
                        let norm = suffix.ends_with("norm.weight") || suffix.contains("scale");
                        let middle = if norm { 1.0 } else { 0.0 };
                        host.extend((0..elems).flat_map(|_| (middle + 0.1 * rng.unit()).to_le_bytes()));
                    }
                    GgmlType::F16 => {
                        let some: Vec<u8> = (0..elems.min(DISTINCT))
                            .flat_map(|_| half::f16::from_f32(1.7 * rng.unit() * size).to_le_bytes())
                            .collect();
                        host.extend_from_slice(&repeated(&some, elems * 2));
                    }
                    _ => host.extend_from_slice(&blocks(&mut rng, ty, elems, size)),
                }
                seen.push((key, offset));
                offset
            }
        };
        let len = ty.tensor_bytes(&t.shape).unwrap();
        tensors.push(TensorEntry { name: t.name, ty, shape: t.shape, chunk: 0, offset, len });
    }
    drop(found);
    metadata.set("deepseek4.block_count", Value::U64(layers));
    metadata.set("deepseek4.vocab_size", Value::U64(vocabulary));
    let chunk = SharedBytes::new(Arc::new(host));
    let identity = ModelIdentity {
        family: "deepseek4".into(),
        artifact: "random".into(),
        name: "random".into(),
        content: [0; 32],
        known: false,
    };
    Weights {
        manifest: WeightManifest {
            model: identity,
            epoch: 1,
            backend: Backend::Memfd { page: 4096 },
            chunks: vec![Chunk { len: chunk.len() as u64, blake3: [0; 32] }],
            tensors,
            metadata,
        },
        chunks: vec![chunk],
    }
}
