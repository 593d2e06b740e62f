//! Multi-token prediction: one more block behind the model, fed with its last residual streams and the embedding of a token.
//!
//! Source: fact sheet sections 2.6 and 4.1. Its tensors come in a file of their own and use the base model's embedding table and
//! output matrix.

mod draft;

use ds4_attach::Tensors;
use ds4_kernels::ops::{HyperOps, HyperWeights, KvNumerics, MoeOps, SparseOps};
use ds4_kernels::{Device, StateKind, StateSpec};

use super::attention::{AttentionLayer, Rotary};
use super::bind::{GlobalWeights, LayerWeights, bind_block, hyper};
use super::block::{self, Head, Scratch};
use super::forward::DeepseekV4;
use super::params::{LayerKind, Params};
use super::state::{LayerSlots, ring_type};
use super::steps::Steps;
use crate::ModelError;
use crate::binder::Binder;
use crate::speculation::MAX_DRAFTS;

/// Which token a state is paired with. Published descriptions differ, and no reference for V4 settles it: both are here, for a
/// test on real weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MtpAlignment {
    /// The state at position p with the token at p, at position p: a guess for the token at p + 1, which the model itself
    /// decides too. Guesses are only made while both agree. What the ds4 program does.
    SameToken,
    /// The state at position p with the token at p + 1, at position p: a guess for the token at p + 2. The formulation of
    /// DeepSeek V3's report.
    #[default]
    NextToken,
}

/// How the block is used.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MtpSettings {
    /// Pairing of states and tokens.
    pub alignment: MtpAlignment,
    /// Guessing stops when the best guess's logit leads the second's by less; 0 never stops.
    pub margin: f32,
}

/// The block's tensors.
struct MtpWeights<W> {
    /// `[D → D]`, of the token's embedding.
    embedding: W,
    embedding_norm: W,
    /// `[D → D]`, of each stream.
    state: W,
    state_norm: W,
    block: LayerWeights<W>,
    head_hyper: HyperWeights<W>,
    norm: W,
}

/// The bound block with its activations.
pub(super) struct Mtp<D: SparseOps + HyperOps + MoeOps> {
    w: MtpWeights<D::Weight>,
    settings: MtpSettings,
    kind: LayerKind,
    slots: LayerSlots,
    spec: StateSpec,
    /// Streams as rows of their own, `[rows · n, D]`.
    split: D::Buffer,
    split_normed: D::Buffer,
    /// The block's residual streams, `[rows, n·D]`: input, then output.
    streams: D::Buffer,
    logits: D::Buffer,
}

/// What the block uses of its base model.
struct Base<'a, D: SparseOps + HyperOps + MoeOps> {
    p: &'a Params,
    global: &'a GlobalWeights<D::Weight>,
    rotary: &'a Rotary<D::RopeTable>,
    numerics: KvNumerics,
}

fn bind<D: Device>(b: &mut Binder<'_, D>, p: &Params, kind: LayerKind) -> Result<MtpWeights<D::Weight>, ModelError> {
    let (d, n) = (p.hidden, p.hyper.streams);
    let w = MtpWeights {
        embedding: b.matrix("mtp.0.e_proj.weight", d, d)?,
        embedding_norm: b.vector("mtp.0.enorm.weight", d)?,
        state: b.matrix("mtp.0.h_proj.weight", d, d)?,
        state_norm: b.vector("mtp.0.hnorm.weight", d)?,
        block: bind_block(b, p, "mtp.0", kind)?,
        head_hyper: hyper(b, "mtp.0.hc_head", n * d, n, 1)?,
        norm: b.vector("mtp.0.norm.weight", d)?,
    };
    match w.block.router_bias {
        Some(_) => Ok(w),
        None => Err(ModelError::Bind("tensor mtp.0.exp_probs_b.bias is missing; the block's router needs it".into())),
    }
}

impl<D: SparseOps + HyperOps + MoeOps> Mtp<D> {
    fn build(
        device: &D,
        p: &Params,
        numerics: KvNumerics,
        weights: &dyn Tensors,
        settings: MtpSettings,
    ) -> Result<Self, ModelError> {
        let kind = p.mtp_kind()?;
        let mut b = Binder::new(device, weights);
        let w = bind(&mut b, p, kind)?;
        b.finish()?;
        // Guesses are written ahead of the window; without room for them they would overwrite rows that are still in it.
        let rows = p.window + MAX_DRAFTS;
        let ring = StateKind::Ring { rows, width: p.head_dim, ty: ring_type(numerics) };
        let n = p.hyper.streams;
        Ok(Self {
            w,
            settings,
            kind,
            slots: LayerSlots { ring: 0, main: None, index: None },
            spec: StateSpec { slots: vec![ring] },
            split: device.buffer(p.hidden),
            split_normed: device.buffer(p.hidden),
            streams: device.buffer(n * p.hidden),
            logits: device.buffer(p.vocab),
        })
    }

    /// Takes rows of `from` (residual streams of the base, `[rows, n·D]`), as the states of the next [`Mtp::run`].
    fn take(&mut self, device: &D, streams: usize, from: &D::Buffer, rows: &[usize]) {
        device.hyper_split(streams, from, rows, &mut self.split);
    }

    /// Takes rows of its own last output.
    fn take_own(&mut self, device: &D, streams: usize, rows: &[usize]) {
        device.hyper_split(streams, &self.streams, rows, &mut self.split);
    }

    /// Runs the block on the states taken and the step's tokens, one of each a row; logits of the wanted rows.
    fn run(&mut self, device: &D, steps: &Steps<D>, base: &Base<'_, D>, s: &mut Scratch<D>, wanted: bool) {
        let Base { p, global, rotary, numerics } = *base;
        let (n, w) = (p.hyper.streams, &self.w);
        s.turn(device);
        device.embed(&steps.whole, &global.embedding, &mut s.x);
        device.rms_norm(&s.x, &w.embedding_norm, p.rms_eps, &mut s.normed);
        device.matmul(&s.normed, &mut [(&w.embedding, &mut s.y)]);
        device.hyper_start(n, &s.y, &mut self.streams);
        device.rms_norm(&self.split, &w.state_norm, p.rms_eps, &mut self.split_normed);
        device.matmul(&self.split_normed, &mut [(&w.state, &mut self.split)]);
        device.hyper_join(n, &self.split, &mut self.streams);
        let layer = AttentionLayer { p, kind: &self.kind, w: &w.block, slots: &self.slots, rotary, numerics };
        block::run(device, steps, &layer, s, &mut self.streams, None);
        if wanted {
            let head = Head { hyper: &w.head_hyper, norm: &w.norm, output: &global.output };
            block::head(device, &steps.whole, p, &head, s, &self.streams, &mut self.logits);
        }
    }
}

impl<D: SparseOps + HyperOps + MoeOps> DeepseekV4<D> {
    /// Gives the model its prediction block, from a manifest that holds the block's tensors and nothing else.
    ///
    /// # Errors
    /// [`ModelError`] when a tensor is missing, does not fit the model, or is not one of the block's.
    pub fn attach_mtp(&mut self, device: &D, weights: &dyn Tensors, settings: MtpSettings) -> Result<(), ModelError> {
        self.mtp = Some(Mtp::build(device, &self.p, self.numerics, weights, settings)?);
        Ok(())
    }
}
