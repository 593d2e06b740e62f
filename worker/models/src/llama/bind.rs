//! The llama weights, bound.

use ds4_attach::Tensors;
use ds4_kernels::Device;

use super::params::LlamaParams;
use crate::ModelError;
use crate::binder::Binder;

/// Weights of one transformer block. Matrices are `[outputs, inputs]`.
pub struct Layer<D: Device> {
    /// `attn_norm.weight`
    pub attn_norm: D::Weight,
    /// `attn_q.weight`
    pub q: D::Weight,
    /// `attn_k.weight`
    pub k: D::Weight,
    /// `attn_v.weight`
    pub v: D::Weight,
    /// `attn_output.weight`
    pub o: D::Weight,
    /// `ffn_norm.weight`
    pub ffn_norm: D::Weight,
    /// `ffn_gate.weight`
    pub gate: D::Weight,
    /// `ffn_up.weight`
    pub up: D::Weight,
    /// `ffn_down.weight`
    pub down: D::Weight,
}

/// All weights of a model.
pub struct LlamaWeights<D: Device> {
    /// `token_embd.weight`, `[vocab, width]`
    pub embed: D::Weight,
    /// Blocks in order.
    pub layers: Vec<Layer<D>>,
    /// `output_norm.weight`
    pub norm: D::Weight,
    /// `output.weight`; `None` when the head is tied to the embedding.
    pub head: Option<D::Weight>,
    /// Rows of the embedding table.
    pub vocab: usize,
}

impl<D: Device> LlamaWeights<D> {
    /// Binds everything; a tensor too few or too many is an error.
    ///
    /// # Errors
    /// [`ModelError`] naming the tensor.
    pub fn bind(device: &D, weights: &dyn Tensors, p: &LlamaParams) -> Result<Self, ModelError> {
        let mut b = Binder::new(device, weights);
        let vocab = match b.shape("token_embd.weight") {
            Some([_, rows]) => usize::try_from(*rows).unwrap_or(0),
            _ => return Err(ModelError::Bind("tensor token_embd.weight is missing or no matrix".into())),
        };
        let embed = b.matrix("token_embd.weight", vocab, p.width)?;
        let mut layers = Vec::with_capacity(p.layers);
        for i in 0..p.layers {
            let name = |part: &str| format!("blk.{i}.{part}.weight");
            layers.push(Layer {
                attn_norm: b.vector(&name("attn_norm"), p.width)?,
                q: b.matrix(&name("attn_q"), p.q_width(), p.width)?,
                k: b.matrix(&name("attn_k"), p.kv_width(), p.width)?,
                v: b.matrix(&name("attn_v"), p.kv_width(), p.width)?,
                o: b.matrix(&name("attn_output"), p.width, p.q_width())?,
                ffn_norm: b.vector(&name("ffn_norm"), p.width)?,
                gate: b.matrix(&name("ffn_gate"), p.ffn, p.width)?,
                up: b.matrix(&name("ffn_up"), p.ffn, p.width)?,
                down: b.matrix(&name("ffn_down"), p.width, p.ffn)?,
            });
        }
        let norm = b.vector("output_norm.weight", p.width)?;
        let head = match b.shape("output.weight") {
            Some(_) => Some(b.matrix("output.weight", vocab, p.width)?),
            None => None,
        };
        b.finish()?;
        Ok(Self { embed, layers, norm, head, vocab })
    }
}
