//! Which tensors of a checkpoint make up a GGUF tensor.
//!
//! transformers has its own names in memory and (5.24) saves most of them under the names of DeepSeek's checkpoints; both are
//! known here, with and without the `model.` in front. Nothing is transposed or permuted: a GGUF shape is the PyTorch shape
//! reversed over the same bytes. Only experts differ: transformers keeps gate and up of all experts in one tensor, DeepSeek
//! each expert's matrices alone, GGUF all experts of one matrix stacked. DeepSeek's FP8 and FP4 matrices have their scales beside
//! them.

use std::collections::HashSet;

use ds4_manifests::catalog::ExpectedTensor;
use safetensors::Dtype;

use super::bad;
use super::checkpoint::Checkpoint;

/// How elements are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    F32,
    F16,
    Bf16,
    /// E4M3 (no infinities), with scales.
    Fp8,
    /// E2M1, two in a byte, the first one low, with scales.
    Fp4,
    I32,
    I64,
}

impl Form {
    fn of(dtype: Dtype, table: bool) -> Option<Self> {
        Some(match (table, dtype) {
            (true, Dtype::I64) => Self::I64,
            (true, Dtype::I32) => Self::I32,
            (false, Dtype::F32) => Self::F32,
            (false, Dtype::F16) => Self::F16,
            (false, Dtype::BF16) => Self::Bf16,
            (false, Dtype::F8_E4M3) => Self::Fp8,
            // A byte of two numbers has no type of its own in older files.
            (false, Dtype::F4 | Dtype::I8 | Dtype::U8) => Self::Fp4,
            _ => return None,
        })
    }

    /// Bits of an element.
    pub fn bits(self) -> u64 {
        match self {
            Self::I64 => 64,
            Self::F32 | Self::I32 => 32,
            Self::F16 | Self::Bf16 => 16,
            Self::Fp8 => 8,
            Self::Fp4 => 4,
        }
    }

    fn scaled(self) -> bool {
        matches!(self, Self::Fp8 | Self::Fp4)
    }
}

/// The scales of an FP8 or FP4 matrix: a grid of equal blocks, each with a factor. How large a block is follows from the grid:
/// DeepSeek's FP8 has 128 × 128, its FP4 1 × 32.
#[derive(Clone, Debug, PartialEq)]
pub struct Scales {
    pub source: usize,
    /// Absolute offset in the file.
    pub offset: u64,
    /// F32, or one byte with the exponent of two plus 127 (E8M0).
    pub wide: bool,
    /// Rows and columns of the grid.
    pub grid: [u64; 2],
    /// Rows and columns of a block.
    pub block: [u64; 2],
}

/// A run of a stored tensor's elements.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// Name in the checkpoint.
    pub name: String,
    /// Index of the file.
    pub source: usize,
    pub form: Form,
    /// What FP8 and FP4 are multiplied by.
    pub scales: Option<Scales>,
    /// Absolute offset in the file.
    pub offset: u64,
    /// Elements.
    pub elements: u64,
    /// Elements of the stored tensor before the first.
    pub skipped: u64,
}

/// A GGUF tensor and where its elements come from, in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    pub name: String,
    /// Role in the family's table.
    pub role: String,
    pub layer: Option<u64>,
    /// Dimensions, contiguous first.
    pub shape: Vec<u64>,
    pub segments: Vec<Segment>,
}

/// GGUF name outside the layers, names in checkpoints.
const GLOBAL: &[(&str, &[&str])] = &[
    ("token_embd.weight", &["embed.weight", "embed_tokens.weight"]),
    ("output_norm.weight", &["norm.weight"]),
    ("output.weight", &["head.weight", "lm_head.weight"]),
    ("output_hc_fn.weight", &["hc_head_fn", "hc_head.hc_fn"]),
    ("output_hc_base.weight", &["hc_head_base", "hc_head.hc_base"]),
    ("output_hc_scale.weight", &["hc_head_scale", "hc_head.hc_scale"]),
];

/// GGUF name after `blk.N.`, names in checkpoints after `layers.N.`.
const LAYER: &[(&str, &[&str])] = &[
    ("hc_attn_fn.weight", &["hc_attn_fn", "attn_hc.fn"]),
    ("hc_attn_scale.weight", &["hc_attn_scale", "attn_hc.scale"]),
    ("hc_attn_base.weight", &["hc_attn_base", "attn_hc.base"]),
    ("attn_norm.weight", &["attn_norm.weight", "input_layernorm.weight"]),
    ("attn_q_a.weight", &["attn.wq_a.weight", "self_attn.q_a_proj.weight"]),
    ("attn_q_a_norm.weight", &["attn.q_norm.weight", "self_attn.q_a_norm.weight"]),
    ("attn_q_b.weight", &["attn.wq_b.weight", "self_attn.q_b_proj.weight"]),
    ("attn_kv.weight", &["attn.wkv.weight", "self_attn.kv_proj.weight"]),
    // transformers 5.24 saves it as attn.norm.
    ("attn_kv_a_norm.weight", &["attn.kv_norm.weight", "attn.norm.weight", "self_attn.kv_norm.weight"]),
    ("attn_sinks.weight", &["attn.attn_sink", "self_attn.sinks"]),
    ("attn_output_a.weight", &["attn.wo_a.weight", "self_attn.o_a_proj.weight"]),
    ("attn_output_b.weight", &["attn.wo_b.weight", "self_attn.o_b_proj.weight"]),
    ("hc_ffn_fn.weight", &["hc_ffn_fn", "ffn_hc.fn"]),
    ("hc_ffn_scale.weight", &["hc_ffn_scale", "ffn_hc.scale"]),
    ("hc_ffn_base.weight", &["hc_ffn_base", "ffn_hc.base"]),
    ("ffn_norm.weight", &["ffn_norm.weight", "post_attention_layernorm.weight"]),
    ("ffn_gate_inp.weight", &["ffn.gate.weight", "mlp.gate.weight"]),
    ("ffn_gate_shexp.weight", &["ffn.shared_experts.w1.weight", "mlp.shared_experts.gate_proj.weight"]),
    ("ffn_up_shexp.weight", &["ffn.shared_experts.w3.weight", "mlp.shared_experts.up_proj.weight"]),
    ("ffn_down_shexp.weight", &["ffn.shared_experts.w2.weight", "mlp.shared_experts.down_proj.weight"]),
    ("exp_probs_b.bias", &["ffn.gate.bias", "mlp.gate.e_score_correction_bias"]),
    ("ffn_gate_tid2eid.weight", &["ffn.gate.tid2eid", "mlp.gate.tid2eid"]),
    ("attn_compressor_ape.weight", &["attn.compressor.ape", "self_attn.compressor.position_bias"]),
    ("attn_compressor_kv.weight", &["attn.compressor.wkv.weight", "self_attn.compressor.kv_proj.weight"]),
    ("attn_compressor_gate.weight", &["attn.compressor.wgate.weight", "self_attn.compressor.gate_proj.weight"]),
    ("attn_compressor_norm.weight", &["attn.compressor.norm.weight", "self_attn.compressor.kv_norm.weight"]),
    ("indexer.attn_q_b.weight", &["attn.indexer.wq_b.weight", "self_attn.compressor.indexer.q_b_proj.weight"]),
    (
        "indexer.proj.weight",
        &["attn.indexer.weights_proj.weight", "self_attn.compressor.indexer.scorer.weights_proj.weight"],
    ),
    ("indexer_compressor_ape.weight", &["attn.indexer.compressor.ape", "self_attn.compressor.indexer.position_bias"]),
    (
        "indexer_compressor_kv.weight",
        &["attn.indexer.compressor.wkv.weight", "self_attn.compressor.indexer.kv_proj.weight"],
    ),
    (
        "indexer_compressor_gate.weight",
        &["attn.indexer.compressor.wgate.weight", "self_attn.compressor.indexer.gate_proj.weight"],
    ),
    (
        "indexer_compressor_norm.weight",
        &["attn.indexer.compressor.norm.weight", "self_attn.compressor.indexer.kv_norm.weight"],
    ),
];

/// GGUF name after `blk.N.`, DeepSeek's matrix, transformers' tensor, and which share of its rows (of how many).
const EXPERTS: &[(&str, &str, &str, u64, u64)] = &[
    ("ffn_gate_exps.weight", "w1", "gate_up_proj", 0, 2),
    ("ffn_up_exps.weight", "w3", "gate_up_proj", 1, 2),
    ("ffn_down_exps.weight", "w2", "down_proj", 0, 1),
];

/// What was found, and what was left.
pub struct Resolved {
    pub tensors: Vec<Planned>,
    /// Tensors of the multi-token prediction block, which belongs into a file of its own.
    pub drafter: usize,
}

/// Finds every tensor of the model's table in the checkpoint.
///
/// # Errors
/// A tensor that is missing, misshapen, there twice or of a type that is not read, and one that has no place, by name.
pub fn resolve(checkpoint: &Checkpoint, expected: &[ExpectedTensor<'_>]) -> anyhow::Result<Resolved> {
    let is_drafter = |name: &str| name.strip_prefix("model.").unwrap_or(name).starts_with("mtp.");
    let mut finder = Finder { checkpoint, used: HashSet::new() };
    let mut tensors = Vec::new();
    let mut missing = Vec::new();
    for tensor in expected {
        match finder.find(tensor)? {
            Ok(segments) => tensors.push(Planned {
                name: tensor.name.clone(),
                role: tensor.role.to_owned(),
                layer: tensor.layer,
                shape: tensor.shape.clone(),
                segments,
            }),
            Err(_) if tensor.optional => {}
            Err(name) => missing.push(name),
        }
    }
    let spare = checkpoint.tensors.keys().filter(|n| !finder.used.contains(n.as_str()));
    let (drafter, extra): (Vec<&String>, Vec<&String>) = spare.partition(|n| is_drafter(n));
    let more = |n: usize| if n > 1 { format!(", and {} more", n - 1) } else { String::new() };
    if let Some(first) = missing.first() {
        return Err(bad(format!("tensor {first} is missing{}", more(missing.len()))));
    }
    if let Some(first) = extra.first() {
        return Err(bad(format!(
            "tensor {first} has no place in the model that config.json describes{}",
            more(extra.len())
        )));
    }
    Ok(Resolved { tensors, drafter: drafter.len() })
}

struct Finder<'a> {
    checkpoint: &'a Checkpoint,
    used: HashSet<&'a str>,
}

impl<'a> Finder<'a> {
    /// The segments of one tensor; the inner error is a name that the missing tensor could have.
    fn find(&mut self, tensor: &ExpectedTensor<'_>) -> anyhow::Result<Result<Vec<Segment>, String>> {
        let Some(layer) = tensor.layer else {
            let names = GLOBAL.iter().find(|(gguf, _)| *gguf == tensor.name).map_or(&[][..], |(_, names)| names);
            return self.whole(tensor, names.iter().map(|n| (*n).to_owned()).collect());
        };
        let prefix = format!("blk.{layer}.");
        let own = tensor.name.strip_prefix(&prefix).unwrap_or(&tensor.name);
        if let Some((_, matrix, fused, part, parts)) = EXPERTS.iter().find(|(gguf, ..)| *gguf == own) {
            return self.experts(tensor, layer, (matrix, fused), (*part, *parts));
        }
        let names = LAYER.iter().find(|(gguf, _)| *gguf == own).map_or(&[][..], |(_, names)| names);
        self.whole(tensor, names.iter().map(|n| format!("layers.{layer}.{n}")).collect())
    }

    /// The one of these names that is there, with `model.` in front or not.
    fn one(&mut self, names: &[String]) -> anyhow::Result<Option<&'a str>> {
        let stored = &self.checkpoint.tensors;
        let with = names.iter().map(|n| format!("model.{n}"));
        let found: Vec<&'a str> = with
            .chain(names.iter().cloned())
            .filter_map(|n| stored.get_key_value(&n).map(|(name, _)| name.as_str()))
            .collect();
        if let [a, b, ..] = found[..] {
            return Err(bad(format!("tensors {a} and {b} are the same one under two names")));
        }
        self.used.extend(&found);
        Ok(found.first().copied())
    }

    fn whole(
        &mut self,
        tensor: &ExpectedTensor<'_>,
        names: Vec<String>,
    ) -> anyhow::Result<Result<Vec<Segment>, String>> {
        let Some(name) = self.one(&names)? else {
            return Ok(Err(names.into_iter().next().unwrap_or_else(|| tensor.name.clone())));
        };
        let shape: Vec<u64> = tensor.shape.iter().rev().copied().collect();
        Ok(Ok(vec![self.segment(name, &shape, 0, shape.iter().product(), tensor.role == "table")?]))
    }

    fn experts(
        &mut self,
        tensor: &ExpectedTensor<'_>,
        layer: u64,
        (matrix, fused): (&str, &str),
        (part, parts): (u64, u64),
    ) -> anyhow::Result<Result<Vec<Segment>, String>> {
        let &[cols, rows, count] = tensor.shape.as_slice() else {
            return Err(bad(format!("{} has not three dimensions", tensor.name)));
        };
        let each = cols * rows;
        if let Some(name) = self.one(&[format!("layers.{layer}.mlp.experts.{fused}")])? {
            let shape = [count, parts * rows, cols];
            let mut of = |e: u64| self.segment(name, &shape, (e * parts + part) * each, each, false);
            return (0..count).map(&mut of).collect::<anyhow::Result<_>>().map(Ok);
        }
        let mut segments = Vec::new();
        for e in 0..count {
            let alone = format!("layers.{layer}.ffn.experts.{e}.{matrix}.weight");
            let Some(name) = self.one(std::slice::from_ref(&alone))? else { return Ok(Err(alone)) };
            segments.push(self.segment(name, &[rows, cols], 0, each, false)?);
        }
        Ok(Ok(segments))
    }

    fn segment(
        &mut self,
        name: &'a str,
        shape: &[u64],
        skipped: u64,
        elements: u64,
        table: bool,
    ) -> anyhow::Result<Segment> {
        let stored = &self.checkpoint.tensors[name];
        let Some(form) = Form::of(stored.dtype, table) else {
            let expected = if table { "I64 or I32" } else { "F32, F16, BF16, or FP8 or FP4 with scales" };
            return Err(bad(format!("tensor {name} is {:?}, expected {expected}", stored.dtype)));
        };
        let mut found = stored.shape.clone();
        if let (Form::Fp4, Dtype::I8 | Dtype::U8, Some(last)) = (form, stored.dtype, found.last_mut()) {
            *last *= 2;
        }
        if found != shape {
            return Err(bad(format!("tensor {name} has shape {found:?}, config.json makes it {shape:?}")));
        }
        Ok(Segment {
            name: name.to_owned(),
            source: stored.source,
            form,
            scales: form.scaled().then(|| self.scales(name, shape)).transpose()?,
            offset: stored.offset + skipped * form.bits() / 8,
            elements,
            skipped,
        })
    }

    /// The scales of a matrix: `X.scale` (DeepSeek) or `X.weight_scale_inv` (transformers) of `X.weight`.
    fn scales(&mut self, name: &str, shape: &[u64]) -> anyhow::Result<Scales> {
        let base = name.strip_suffix(".weight").unwrap_or(name);
        let names = [format!("{base}.scale"), format!("{base}.weight_scale_inv")];
        let found = names.iter().find_map(|n| self.checkpoint.tensors.get_key_value(n));
        let (own, stored) =
            found.ok_or_else(|| bad(format!("tensor {name} is FP8 or FP4, but {} is missing", names[0])))?;
        self.used.insert(own);
        let wide = match stored.dtype {
            Dtype::F8_E8M0 | Dtype::U8 => false,
            Dtype::F32 => true,
            other => return Err(bad(format!("tensor {own} is {other:?}, expected F8_E8M0 or F32"))),
        };
        match (shape, stored.shape.as_slice()) {
            (&[rows, cols], &[r, c]) if r > 0 && c > 0 && rows % r == 0 && cols % c == 0 => Ok(Scales {
                source: stored.source,
                offset: stored.offset,
                wide,
                grid: [r, c],
                block: [rows / r, cols / c],
            }),
            (_, grid) => {
                Err(bad(format!("tensor {own} has shape {grid:?}, which does not divide {shape:?} into blocks")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ds4_manifests::Catalog;

    use super::*;

    #[test]
    fn deepseek_v4_every_tensor_of_the_catalogs_table_has_names_in_checkpoints() {
        let catalog = Catalog::builtin();
        for id in ["deepseek-v4-flash", "deepseek-v4-pro"] {
            let entry = catalog.entry(id).unwrap();
            let found = catalog.expand(entry, &catalog.metadata_of(entry)).unwrap();
            for tensor in found.tensors() {
                let own = tensor.name.splitn(3, '.').nth(2).unwrap_or("");
                let known = GLOBAL.iter().any(|(n, _)| *n == tensor.name)
                    || LAYER.iter().any(|(n, _)| *n == own)
                    || EXPERTS.iter().any(|(n, ..)| *n == own);
                assert!(known, "{}", tensor.name);
            }
        }
    }

    #[test]
    fn deepseek_v4_no_two_tensors_share_a_name_in_checkpoints() {
        for table in [GLOBAL, LAYER] {
            let all: Vec<&str> = table.iter().flat_map(|(_, names)| *names).copied().collect();
            let different: HashSet<&str> = all.iter().copied().collect();
            assert_eq!(all.len(), different.len());
        }
    }
}
