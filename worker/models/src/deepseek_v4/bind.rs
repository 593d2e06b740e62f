//! Binding of the tensors, by the names and shapes of the catalog's table.

use ds4_attach::Weights;
use ds4_kernels::ops::{Experts, HyperWeights, SparseOps};
use ds4_kernels::{Device, TensorSource};

use super::params::Params;
use crate::ModelError;

/// Projections of one compressor.
pub struct CompressorWeights<W> {
    /// `[D → width]`.
    pub values: W,
    /// `[D → width]`.
    pub gate: W,
    /// `[width, ratio]`.
    pub ape: W,
    /// `[dim]`.
    pub norm: W,
}

/// The indexer of one layer.
pub struct IndexerWeights<W> {
    /// `[q_lora → heads · dim]`.
    pub q: W,
    /// `[D → heads]`.
    pub head_weights: W,
    /// Its own compressor.
    pub compressor: CompressorWeights<W>,
}

/// All tensors of one layer.
pub struct LayerWeights<W> {
    pub attn_hyper: HyperWeights<W>,
    pub attn_norm: W,
    pub q_a: W,
    pub q_a_norm: W,
    pub q_b: W,
    pub kv: W,
    pub kv_norm: W,
    pub sinks: W,
    pub output_a: W,
    pub output_b: W,
    pub compressor: Option<CompressorWeights<W>>,
    pub indexer: Option<IndexerWeights<W>>,
    pub ffn_hyper: HyperWeights<W>,
    pub ffn_norm: W,
    pub router: W,
    /// Selection bias of learned layers.
    pub router_bias: Option<W>,
    /// Token-id table of hashed layers, I32 `[used, vocab]`.
    pub router_table: Option<W>,
    pub experts: Experts<W>,
    pub shared_gate: W,
    pub shared_up: W,
    pub shared_down: W,
}

/// Tensors outside the layers.
pub struct GlobalWeights<W> {
    pub embedding: W,
    pub head_hyper: HyperWeights<W>,
    pub norm: W,
    pub output: W,
}

struct Binder<'a, D: Device> {
    device: &'a D,
    weights: &'a Weights,
}

impl<D: Device> Binder<'_, D> {
    /// Binds `name` and checks that it is `[rows, cols]` (a 3-D tensor counts as `experts · out` rows).
    fn get(&self, name: &str, cols: usize, rows: usize) -> Result<D::Weight, ModelError> {
        let (entry, bytes) = self
            .weights
            .tensor(name)
            .ok_or_else(|| ModelError::Bind(format!("tensor {name} is missing from the manifest")))?;
        let have_cols = entry.shape.first().copied().unwrap_or(0);
        let have_rows: u64 = entry.shape.iter().skip(1).product();
        if usize::try_from(have_cols) != Ok(cols) || usize::try_from(have_rows) != Ok(rows) {
            return Err(ModelError::Bind(format!("tensor {name} is {:?}, expected [{cols}, {rows}]", entry.shape)));
        }
        Ok(self.device.bind(&TensorSource { name: name.to_owned(), ty: entry.ty, cols, rows, bytes })?)
    }

    fn vector(&self, name: &str, len: usize) -> Result<D::Weight, ModelError> {
        self.get(name, len, 1)
    }

    fn hyper(&self, prefix: &str, cols: usize, outputs: usize, scales: usize) -> Result<HyperWeights<D::Weight>, ModelError> {
        // llama.cpp's converter writes the head's three tensors without the suffix.
        let name = |part: &str| {
            let full = format!("{prefix}_{part}.weight");
            let head = format!("hc_head_{part}");
            if self.weights.tensor(&full).is_none() && prefix == "output_hc" && self.weights.tensor(&head).is_some() {
                head
            } else {
                full
            }
        };
        Ok(HyperWeights {
            mixer: self.get(&name("fn"), cols, outputs)?,
            scale: self.vector(&name("scale"), scales)?,
            base: self.vector(&name("base"), outputs)?,
        })
    }

    fn compressor(
        &self,
        prefix: &str,
        hidden: usize,
        dim: usize,
        overlap: bool,
        ratio: usize,
    ) -> Result<CompressorWeights<D::Weight>, ModelError> {
        let width = if overlap { 2 * dim } else { dim };
        Ok(CompressorWeights {
            values: self.get(&format!("{prefix}_kv.weight"), hidden, width)?,
            gate: self.get(&format!("{prefix}_gate.weight"), hidden, width)?,
            ape: self.get(&format!("{prefix}_ape.weight"), width, ratio)?,
            norm: self.vector(&format!("{prefix}_norm.weight"), dim)?,
        })
    }
}

/// Binds the tensors outside the layers.
pub fn bind_global<D: SparseOps>(device: &D, weights: &Weights, p: &Params) -> Result<GlobalWeights<D::Weight>, ModelError> {
    let b = Binder { device, weights };
    let n = p.hyper.streams;
    Ok(GlobalWeights {
        embedding: b.get("token_embd.weight", p.hidden, p.vocab)?,
        head_hyper: b.hyper("output_hc", n * p.hidden, n, 1)?,
        norm: b.vector("output_norm.weight", p.hidden)?,
        output: b.get("output.weight", p.hidden, p.vocab)?,
    })
}

/// Binds layer `i`.
pub fn bind_layer<D: SparseOps>(
    device: &D,
    weights: &Weights,
    p: &Params,
    i: usize,
) -> Result<LayerWeights<D::Weight>, ModelError> {
    let b = Binder { device, weights };
    let layer = &p.layers[i];
    let t = |suffix: &str| format!("blk.{i}.{suffix}");
    let n = p.hyper.streams;
    let outputs = 2 * n + n * n;
    let overlap = layer.indexed(p);
    let group_in = p.heads * p.head_dim / p.o_groups;
    let shared = |name: &str, cols, rows| b.get(&t(name), cols, rows);
    Ok(LayerWeights {
        attn_hyper: b.hyper(&t("hc_attn"), n * p.hidden, outputs, 3)?,
        attn_norm: b.vector(&t("attn_norm.weight"), p.hidden)?,
        q_a: b.get(&t("attn_q_a.weight"), p.hidden, p.q_lora)?,
        q_a_norm: b.vector(&t("attn_q_a_norm.weight"), p.q_lora)?,
        q_b: b.get(&t("attn_q_b.weight"), p.q_lora, p.heads * p.head_dim)?,
        kv: b.get(&t("attn_kv.weight"), p.hidden, p.head_dim)?,
        kv_norm: b.vector(&t("attn_kv_a_norm.weight"), p.head_dim)?,
        sinks: b.vector(&t("attn_sinks.weight"), p.heads)?,
        output_a: b.get(&t("attn_output_a.weight"), group_in, p.o_groups * p.o_lora)?,
        output_b: b.get(&t("attn_output_b.weight"), p.o_groups * p.o_lora, p.hidden)?,
        compressor: (layer.ratio != 0)
            .then(|| b.compressor(&t("attn_compressor"), p.hidden, p.head_dim, overlap, layer.ratio))
            .transpose()?,
        indexer: overlap
            .then(|| {
                Ok::<_, ModelError>(IndexerWeights {
                    q: b.get(&t("indexer.attn_q_b.weight"), p.q_lora, p.index_heads * p.index_dim)?,
                    head_weights: b.get(&t("indexer.proj.weight"), p.hidden, p.index_heads)?,
                    compressor: b.compressor(&t("indexer_compressor"), p.hidden, p.index_dim, true, layer.ratio)?,
                })
            })
            .transpose()?,
        ffn_hyper: b.hyper(&t("hc_ffn"), n * p.hidden, outputs, 3)?,
        ffn_norm: b.vector(&t("ffn_norm.weight"), p.hidden)?,
        router: b.get(&t("ffn_gate_inp.weight"), p.hidden, p.experts)?,
        router_bias: match weights.tensor(&t("exp_probs_b.bias")) {
            Some(_) if !layer.hashed => Some(b.vector(&t("exp_probs_b.bias"), p.experts)?),
            _ => None,
        },
        router_table: layer
            .hashed
            .then(|| b.get(&t("ffn_gate_tid2eid.weight"), p.router.used, p.vocab))
            .transpose()?,
        experts: Experts {
            gate: b.get(&t("ffn_gate_exps.weight"), p.hidden, p.experts * p.ff)?,
            up: b.get(&t("ffn_up_exps.weight"), p.hidden, p.experts * p.ff)?,
            down: b.get(&t("ffn_down_exps.weight"), p.ff, p.experts * p.hidden)?,
            count: p.experts,
        },
        shared_gate: shared("ffn_gate_shexp.weight", p.hidden, p.ff)?,
        shared_up: shared("ffn_up_shexp.weight", p.hidden, p.ff)?,
        shared_down: shared("ffn_down_shexp.weight", p.ff, p.hidden)?,
    })
}
