//! The forward pass: residual streams through the blocks, then the head.

use ds4_attach::Tensors;
use ds4_kernels::math::yarn;
use ds4_kernels::ops::{HyperOps, KvNumerics, MoeOps, SparseOps};
use ds4_kernels::{BatchPlan, StateSpec};

use super::attention::{AttentionLayer, Rotary};
use super::bind::{GlobalWeights, LayerWeights, bind_block, bind_global};
use super::block::{self, Head, Scratch};
use super::mtp::{Mtp, MtpSettings};
use super::params::Params;
use super::state::{LayerSlots, state_spec};
use super::steps::{ATTENTION_ROWS, Steps};
use crate::binder::Binder;
use crate::session::SessionFormat;
use crate::speculation::Drafter;
use crate::{Model, ModelError, ModelShape};

/// A bound DeepSeek V4 model.
pub struct DeepseekV4<D: SparseOps + HyperOps + MoeOps> {
    pub(super) p: Params,
    shape: ModelShape,
    pub(super) numerics: KvNumerics,
    pub(super) spec: StateSpec,
    pub(super) slots: Vec<LayerSlots>,
    pub(super) global: GlobalWeights<D::Weight>,
    layers: Vec<LayerWeights<D::Weight>>,
    pub(super) rotary: Rotary<D::RopeTable>,
    pub(super) scratch: Scratch<D>,
    /// Residual streams of the last step after the last block: what the prediction block starts from.
    pub(super) streams: D::Buffer,
    logits: D::Buffer,
    pub(super) attention_rows: usize,
    pub(super) mtp: Option<Mtp<D>>,
}

impl<D: SparseOps + HyperOps + MoeOps> DeepseekV4<D> {
    /// Binds every tensor and allocates the buffers.
    pub fn build(device: &D, weights: &dyn Tensors, numerics: KvNumerics) -> Result<Self, ModelError> {
        let p = Params::from_metadata(&weights.manifest().metadata)?;
        let (spec, slots) = state_spec(&p, numerics);
        let mut b = Binder::new(device, weights);
        let global = bind_global(&mut b, &p)?;
        let bind = |(i, kind): (usize, _)| bind_block(&mut b, &p, &format!("blk.{i}"), kind);
        let layers = p.layers.iter().copied().enumerate().map(bind).collect::<Result<Vec<_>, _>>()?;
        b.finish()?;
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
            scratch: Scratch::new(device, &p),
            streams: device.buffer(p.hyper.streams * p.hidden),
            logits: device.buffer(p.vocab),
            attention_rows: ATTENTION_ROWS,
            mtp: None,
            p,
        })
    }

    /// Lets attention take at most `rows` rows at once, instead of [`ATTENTION_ROWS`]: for tests and measurements. Results do not depend on
    /// it.
    pub fn set_attention_rows(&mut self, rows: usize) {
        self.attention_rows = rows.max(1);
    }

    /// What the last layer with an indexer selected in the last step: for tests and debugging.
    pub fn last_selection(&self) -> &D::Selection {
        self.scratch.attention.selection()
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
        let steps = Steps::new(device, plan, banks, self.attention_rows)?;
        let p = &self.p;
        self.scratch.turn(device);
        device.embed(&steps.whole, &self.global.embedding, &mut self.scratch.y);
        device.hyper_start(p.hyper.streams, &self.scratch.y, &mut self.streams);
        for (i, ((w, kind), slots)) in self.layers.iter().zip(&p.layers).zip(&self.slots).enumerate() {
            let next = self.layers.get(i + 1).map(|next| &next.attn_hyper);
            let layer = AttentionLayer { p, kind, w, slots, rotary: &self.rotary, numerics: self.numerics };
            block::run(device, &steps, &layer, &mut self.scratch, &mut self.streams, next);
        }
        if !plan.wanted.is_empty() {
            let g = &self.global;
            let head = Head { hyper: &g.head_hyper, norm: &g.norm, output: &g.output };
            block::head(device, &steps.whole, p, &head, &mut self.scratch, &self.streams, &mut self.logits);
        }
        Ok(())
    }

    fn logits(&self) -> &D::Buffer {
        &self.logits
    }

    fn sessions(&self) -> Option<&dyn SessionFormat<D>> {
        Some(self)
    }

    fn attach_drafter(&mut self, device: &D, weights: &dyn Tensors, settings: MtpSettings) -> Result<(), ModelError> {
        self.attach_mtp(device, weights, settings)
    }

    fn drafter(&mut self) -> Option<&mut dyn Drafter<D>> {
        if self.mtp.is_some() { Some(self) } else { None }
    }
}
