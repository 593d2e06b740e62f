//! The forward pass: residual streams through layers of attention and experts, then the head.

use ds4_attach::Weights;
use ds4_kernels::math::yarn;
use ds4_kernels::ops::{HyperOps, KvNumerics, MoeOps, SparseOps};
use ds4_kernels::{BatchPlan, StateSpec};

use super::attention::{AttentionBuffers, AttentionLayer, Rotary};
use super::bind::{GlobalWeights, LayerWeights, bind_global, bind_layer};
use super::ffn::{self, FfnBuffers};
use super::params::Params;
use super::state::{LayerSlots, state_spec};
use crate::binder::Binder;
use crate::{Model, ModelError, ModelShape};

/// A bound DeepSeek V4 model.
pub struct DeepseekV4<D: SparseOps + HyperOps + MoeOps> {
    p: Params,
    shape: ModelShape,
    numerics: KvNumerics,
    spec: StateSpec,
    slots: Vec<LayerSlots>,
    global: GlobalWeights<D::Weight>,
    layers: Vec<LayerWeights<D::Weight>>,
    rotary: Rotary<D::RopeTable>,
    attention: AttentionBuffers<D>,
    ffn: FfnBuffers<D>,
    x: D::Buffer,
    normed: D::Buffer,
    y: D::Buffer,
    streams: D::Buffer,
    mix: D::Buffer,
    wanted: D::Buffer,
    logits: D::Buffer,
}

impl<D: SparseOps + HyperOps + MoeOps> DeepseekV4<D> {
    /// Binds every tensor and allocates the buffers.
    pub fn build(device: &D, weights: &Weights, numerics: KvNumerics) -> Result<Self, ModelError> {
        let p = Params::from_metadata(&weights.manifest.metadata)?;
        let (spec, slots) = state_spec(&p, numerics);
        let mut b = Binder::new(device, weights);
        let global = bind_global(&mut b, &p)?;
        let layers = (0..p.layers.len()).map(|i| bind_layer(&mut b, &p, i)).collect::<Result<Vec<_>, _>>()?;
        b.finish()?;
        let n = p.hyper.streams;
        Ok(Self {
            shape: ModelShape { vocab: p.vocab, context: p.context },
            numerics,
            spec,
            slots,
            global,
            layers,
            rotary: Rotary {
                plain: device.upload_rope(&yarn::frequencies(p.rope_dim, p.rope_base, None)),
                compressed: device.upload_rope(&yarn::frequencies(p.rope_dim, p.compress_base, Some(&p.yarn))),
            },
            attention: AttentionBuffers::new(device, &p),
            ffn: FfnBuffers::new(device, &p),
            x: device.buffer(p.hidden),
            normed: device.buffer(p.hidden),
            y: device.buffer(p.hidden),
            streams: device.buffer(n * p.hidden),
            mix: device.buffer(2 * n + n * n),
            wanted: device.buffer(n * p.hidden),
            logits: device.buffer(p.vocab),
            p,
        })
    }
}

impl<D: SparseOps + HyperOps + MoeOps> DeepseekV4<D> {
    /// What the last layer with an indexer selected in the last step: for tests and debugging.
    pub fn last_selection(&self) -> &D::Selection {
        self.attention.selection()
    }
}

impl<D: SparseOps + HyperOps + MoeOps> Model<D> for DeepseekV4<D> {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn state(&self) -> &StateSpec {
        &self.spec
    }

    fn forward(&mut self, device: &D, plan: &BatchPlan, banks: &mut [D::Bank]) -> Result<(), ModelError> {
        let step = device.step(plan, banks)?;
        let p = &self.p;
        device.embed(&step, &self.global.embedding, &mut self.x);
        device.hyper_start(p.hyper.streams, &self.x, &mut self.streams);
        for (i, (w, kind)) in self.layers.iter().zip(&p.layers).enumerate() {
            let hyper = &p.hyper;
            device.hyper_pre(hyper, &w.attn_hyper, &self.streams, &mut self.mix, &mut self.x);
            device.rms_norm(&self.x, &w.attn_norm, p.rms_eps, &mut self.normed);
            let layer =
                AttentionLayer { p, kind, w, slots: &self.slots[i], rotary: &self.rotary, numerics: self.numerics };
            layer.run(device, &step, &mut self.attention, &self.normed, &mut self.y);
            device.hyper_post(hyper, &self.mix, &self.y, &mut self.streams);

            device.hyper_pre(hyper, &w.ffn_hyper, &self.streams, &mut self.mix, &mut self.x);
            device.rms_norm(&self.x, &w.ffn_norm, p.rms_eps, &mut self.normed);
            ffn::run(device, &step, p, kind, w, &mut self.ffn, &self.normed, &mut self.y);
            device.hyper_post(hyper, &self.mix, &self.y, &mut self.streams);
        }
        if !plan.wanted.is_empty() {
            device.gather_wanted(&step, &self.streams, &mut self.wanted);
            device.hyper_head(&p.hyper, &self.global.head_hyper, &self.wanted, &mut self.x);
            device.rms_norm(&self.x, &self.global.norm, p.rms_eps, &mut self.normed);
            device.matmul(&self.normed, &mut [(&self.global.output, &mut self.logits)]);
        }
        Ok(())
    }

    fn logits(&self) -> &D::Buffer {
        &self.logits
    }
}
