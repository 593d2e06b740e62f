//! The llama forward pass: RMSNorm, grouped-query attention with RoPE, SwiGLU, pre-norm residuals.
//!
//! Source of the formulas: "LLaMA: Open and Efficient Foundation Language Models" (arXiv 2302.13971), section 2.2, and
//! grouped-query attention of arXiv 2305.13245.

use ds4_attach::Tensors;
use ds4_kernels::{Attention, BatchPlan, Device, Rope, StateKind, StateSpec, StateType};

use super::bind::LlamaWeights;
use super::params::LlamaParams;
use crate::{Model, ModelError, ModelShape};

/// Activations, all `[rows, width of the field]`; they grow with the largest step.
struct Buffers<D: Device> {
    /// Residual stream.
    x: D::Buffer,
    /// Residual stream of the wanted rows, from the last block's attention on.
    wanted_x: D::Buffer,
    /// Normalised input of a sublayer, then its output.
    h: D::Buffer,
    q: D::Buffer,
    k: D::Buffer,
    v: D::Buffer,
    attn: D::Buffer,
    wanted_attn: D::Buffer,
    gate: D::Buffer,
    up: D::Buffer,
    inner: D::Buffer,
    logits: D::Buffer,
}

/// A bound llama model.
pub struct Llama<D: Device> {
    shape: ModelShape,
    state: StateSpec,
    weights: LlamaWeights<D>,
    buffers: Buffers<D>,
    layer_attention: Vec<Attention>,
    rope: Rope,
    head_dim: usize,
    eps: f32,
}

impl<D: Device> Llama<D> {
    /// Binds the weights and prepares the buffers; computes nothing.
    ///
    /// # Errors
    /// [`ModelError`] naming the metadata key or tensor that does not fit.
    pub fn build(device: &D, weights: &dyn Tensors) -> Result<Self, ModelError> {
        let p = LlamaParams::from_metadata(&weights.manifest().metadata)?;
        let bound = LlamaWeights::bind(device, weights, &p)?;
        let row = StateKind::Append { width: p.kv_width(), ty: StateType::F16 };
        let layer_attention = (0..p.layers)
            .map(|i| Attention {
                k_slot: 2 * i,
                v_slot: 2 * i + 1,
                heads: p.heads,
                kv_heads: p.kv_heads,
                head_dim: p.head_dim,
                scale: scale(p.head_dim),
            })
            .collect();
        let buffers = Buffers {
            x: device.buffer(p.width),
            wanted_x: device.buffer(p.width),
            h: device.buffer(p.width),
            q: device.buffer(p.q_width()),
            k: device.buffer(p.kv_width()),
            v: device.buffer(p.kv_width()),
            attn: device.buffer(p.q_width()),
            wanted_attn: device.buffer(p.q_width()),
            gate: device.buffer(p.ffn),
            up: device.buffer(p.ffn),
            inner: device.buffer(p.ffn),
            logits: device.buffer(bound.vocab),
        };
        Ok(Self {
            shape: ModelShape { vocab: bound.vocab, context: p.context },
            state: StateSpec { slots: vec![row; 2 * p.layers] },
            buffers,
            layer_attention,
            rope: p.rope(),
            head_dim: p.head_dim,
            eps: p.eps,
            weights: bound,
        })
    }
}

/// `1/sqrt(head_dim)`.
#[allow(clippy::cast_precision_loss, reason = "a head has far fewer than 2^24 elements")]
fn scale(head_dim: usize) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}

impl<D: Device> Model<D> for Llama<D> {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn state(&self) -> &StateSpec {
        &self.state
    }

    fn forward(&mut self, device: &D, plan: &BatchPlan, banks: &mut [D::Bank]) -> Result<(), ModelError> {
        let step = device.step(plan, banks)?;
        let (w, b, eps) = (&self.weights, &mut self.buffers, self.eps);
        device.embed(&step, &w.embed, &mut b.x);
        let last = w.layers.len().saturating_sub(1);
        for (i, (layer, attention)) in w.layers.iter().zip(&self.layer_attention).enumerate() {
            device.rms_norm(&b.x, &layer.attn_norm, eps, &mut b.h);
            device.matmul(&b.h, &mut [(&layer.q, &mut b.q), (&layer.k, &mut b.k), (&layer.v, &mut b.v)]);
            device.rope(&step, &self.rope, self.head_dim, &mut b.q);
            device.rope(&step, &self.rope, self.head_dim, &mut b.k);
            device.state_write(&step, attention.k_slot, &b.k);
            device.state_write(&step, attention.v_slot, &b.v);
            if i == last && plan.wanted.is_empty() {
                // An inner prefill chunk is done once its keys and values are written.
                return Ok(());
            }
            device.attention(&step, attention, &b.q, &mut b.attn);
            // Rows without wanted logits end here: nothing reads the last block's output but the head.
            let (x, attn) = if i == last {
                device.gather_wanted(&step, &b.x, &mut b.wanted_x);
                device.gather_wanted(&step, &b.attn, &mut b.wanted_attn);
                (&mut b.wanted_x, &b.wanted_attn)
            } else {
                (&mut b.x, &b.attn)
            };
            device.matmul(attn, &mut [(&layer.o, &mut b.h)]);
            device.add(x, &b.h);
            device.rms_norm(x, &layer.ffn_norm, eps, &mut b.h);
            device.matmul(&b.h, &mut [(&layer.gate, &mut b.gate), (&layer.up, &mut b.up)]);
            device.swiglu(&b.gate, &b.up, &mut b.inner);
            device.matmul(&b.inner, &mut [(&layer.down, &mut b.h)]);
            device.add(x, &b.h);
        }
        device.rms_norm(&b.wanted_x, &w.norm, eps, &mut b.h);
        device.matmul(&b.h, &mut [(w.head.as_ref().unwrap_or(&w.embed), &mut b.logits)]);
        Ok(())
    }

    fn logits(&self) -> &D::Buffer {
        &self.buffers.logits
    }
}
