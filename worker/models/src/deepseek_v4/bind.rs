//! Binding of the tensors, by the names and shapes of the catalog's table.

use ds4_kernels::Device;
use ds4_kernels::ops::{Experts, HyperWeights};

use super::params::{LayerKind, Params};
use crate::ModelError;
use crate::binder::Binder;

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

/// Binds one mixer: `outputs` rows over the flattened streams.
///
/// # Errors
/// [`ModelError`] naming the tensor.
pub fn hyper<D: Device>(
    b: &mut Binder<'_, D>,
    prefix: &str,
    cols: usize,
    outputs: usize,
    scales: usize,
) -> Result<HyperWeights<D::Weight>, ModelError> {
    // llama.cpp's converter spells the head's three tensors `hc_head_fn` and so on, without a suffix.
    let alternative = prefix == "output_hc" && b.shape("output_hc_fn.weight").is_none();
    let name = |part: &str| if alternative { format!("hc_head_{part}") } else { format!("{prefix}_{part}.weight") };
    Ok(HyperWeights {
        mixer: b.matrix(&name("fn"), outputs, cols)?,
        scale: b.vector(&name("scale"), scales)?,
        base: b.vector(&name("base"), outputs)?,
    })
}

fn compressor<D: Device>(
    b: &mut Binder<'_, D>,
    prefix: &str,
    hidden: usize,
    dim: usize,
    overlap: bool,
    ratio: usize,
) -> Result<CompressorWeights<D::Weight>, ModelError> {
    let width = if overlap { 2 * dim } else { dim };
    Ok(CompressorWeights {
        values: b.matrix(&format!("{prefix}_kv.weight"), width, hidden)?,
        gate: b.matrix(&format!("{prefix}_gate.weight"), width, hidden)?,
        ape: b.matrix(&format!("{prefix}_ape.weight"), ratio, width)?,
        norm: b.vector(&format!("{prefix}_norm.weight"), dim)?,
    })
}

/// Binds the tensors outside the layers.
///
/// # Errors
/// [`ModelError`] naming the tensor.
pub fn bind_global<D: Device>(b: &mut Binder<'_, D>, p: &Params) -> Result<GlobalWeights<D::Weight>, ModelError> {
    let n = p.hyper.streams;
    Ok(GlobalWeights {
        embedding: b.matrix("token_embd.weight", p.vocab, p.hidden)?,
        head_hyper: hyper(b, "output_hc", n * p.hidden, n, 1)?,
        norm: b.vector("output_norm.weight", p.hidden)?,
        output: b.matrix("output.weight", p.vocab, p.hidden)?,
    })
}

/// Binds one block of kind `layer`, whose tensors are called `prefix.…`.
///
/// # Errors
/// [`ModelError`] naming the tensor.
pub fn bind_block<D: Device>(
    b: &mut Binder<'_, D>,
    p: &Params,
    prefix: &str,
    layer: LayerKind,
) -> Result<LayerWeights<D::Weight>, ModelError> {
    let t = |suffix: &str| format!("{prefix}.{suffix}");
    let n = p.hyper.streams;
    let outputs = 2 * n + n * n;
    let overlap = layer.indexed(p);
    let group_in = p.heads * p.head_dim / p.o_groups;
    let attn_hyper = hyper(b, &t("hc_attn"), n * p.hidden, outputs, 3)?;
    let ffn_hyper = hyper(b, &t("hc_ffn"), n * p.hidden, outputs, 3)?;
    let main = if layer.ratio == 0 {
        None
    } else {
        Some(compressor(b, &t("attn_compressor"), p.hidden, p.head_dim, overlap, layer.ratio)?)
    };
    let indexer = if overlap {
        Some(IndexerWeights {
            q: b.matrix(&t("indexer.attn_q_b.weight"), p.index_heads * p.index_dim, p.q_lora)?,
            head_weights: b.matrix(&t("indexer.proj.weight"), p.index_heads, p.hidden)?,
            compressor: compressor(b, &t("indexer_compressor"), p.hidden, p.index_dim, true, layer.ratio)?,
        })
    } else {
        None
    };
    let bias = t("exp_probs_b.bias");
    let router_bias = if !layer.hashed && b.shape(&bias).is_some() { Some(b.vector(&bias, p.experts)?) } else { None };
    let router_table =
        if layer.hashed { Some(b.matrix(&t("ffn_gate_tid2eid.weight"), p.vocab, p.router.used)?) } else { None };
    Ok(LayerWeights {
        attn_hyper,
        attn_norm: b.vector(&t("attn_norm.weight"), p.hidden)?,
        q_a: b.matrix(&t("attn_q_a.weight"), p.q_lora, p.hidden)?,
        q_a_norm: b.vector(&t("attn_q_a_norm.weight"), p.q_lora)?,
        q_b: b.matrix(&t("attn_q_b.weight"), p.heads * p.head_dim, p.q_lora)?,
        kv: b.matrix(&t("attn_kv.weight"), p.head_dim, p.hidden)?,
        kv_norm: b.vector(&t("attn_kv_a_norm.weight"), p.head_dim)?,
        sinks: b.vector(&t("attn_sinks.weight"), p.heads)?,
        output_a: b.matrix(&t("attn_output_a.weight"), p.o_groups * p.o_lora, group_in)?,
        output_b: b.matrix(&t("attn_output_b.weight"), p.hidden, p.o_groups * p.o_lora)?,
        compressor: main,
        indexer,
        ffn_hyper,
        ffn_norm: b.vector(&t("ffn_norm.weight"), p.hidden)?,
        router: b.matrix(&t("ffn_gate_inp.weight"), p.experts, p.hidden)?,
        router_bias,
        router_table,
        experts: Experts {
            gate: b.stacked(&t("ffn_gate_exps.weight"), p.experts, p.ff, p.hidden)?,
            up: b.stacked(&t("ffn_up_exps.weight"), p.experts, p.ff, p.hidden)?,
            down: b.stacked(&t("ffn_down_exps.weight"), p.experts, p.hidden, p.ff)?,
            count: p.experts,
        },
        shared_gate: b.matrix(&t("ffn_gate_shexp.weight"), p.ff, p.hidden)?,
        shared_up: b.matrix(&t("ffn_up_shexp.weight"), p.ff, p.hidden)?,
        shared_down: b.matrix(&t("ffn_down_shexp.weight"), p.hidden, p.ff)?,
    })
}
