//! One block (attention and experts, each inside a hyper-connection) and the output head: what the layers of the model and
//! the prediction block have in common.
//!
//! Source: fact sheet sections 3.2 and 3.3.

use ds4_kernels::ops::{HyperOps, HyperWeights, MoeOps, SparseOps};

use super::attention::{AttentionBuffers, AttentionLayer};
use super::ffn::{self, FfnBuffers};
use super::params::Params;
use super::steps::Steps;

/// Activations that live no longer than one block; shared by all.
pub struct Scratch<D: SparseOps + HyperOps + MoeOps> {
    /// `[rows, D]`.
    pub x: D::Buffer,
    /// `[rows, D]`.
    pub normed: D::Buffer,
    /// `[rows, D]`, of a turn of the room.
    pub y: D::Buffer,
    /// Of the attention sublayer.
    pub attention: AttentionBuffers<D>,
    mix: D::Buffer,
    ffn: FfnBuffers<D>,
    wanted: D::Buffer,
    /// What attention has is done with when the experts begin.
    room: D::Room,
}

impl<D: SparseOps + HyperOps + MoeOps> Scratch<D> {
    /// Buffers with no rows yet.
    pub fn new(device: &D, p: &Params) -> Self {
        let n = p.hyper.streams;
        let room = device.room();
        Self {
            x: device.buffer(p.hidden),
            normed: device.buffer(p.hidden),
            y: device.buffer_in(&room, p.hidden),
            attention: AttentionBuffers::new(device, &room, p),
            mix: device.buffer(2 * n + n * n),
            ffn: FfnBuffers::new(device, &room, p),
            wanted: device.buffer(n * p.hidden),
            room,
        }
    }

    /// Begins a turn: before `y`, attention or the feed-forward sublayer is used for something new.
    pub fn turn(&self, device: &D) {
        device.turn(&self.room);
    }
}

/// Runs one block on the residual streams (`[rows, n·D]`) in place; writes this step's state. `next` is the mixer that meets the streams
/// after the block, if it is known.
pub fn run<D: SparseOps + HyperOps + MoeOps>(
    device: &D,
    steps: &Steps<D>,
    layer: &AttentionLayer<'_, D>,
    s: &mut Scratch<D>,
    streams: &mut D::Buffer,
    next: Option<&HyperWeights<D::Weight>>,
) {
    let (p, w, kind) = (layer.p, layer.w, layer.kind);
    let norm = (&w.attn_norm, p.rms_eps);
    device.hyper_pre_norm(&p.hyper, &w.attn_hyper, streams, norm, &mut s.mix, &mut s.x, &mut s.normed);
    s.turn(device);
    layer.run(device, steps, &mut s.attention, &s.normed, &mut s.y);
    device.hyper_post_toward(&p.hyper, &s.mix, &s.y, streams, Some(&w.ffn_hyper));

    let norm = (&w.ffn_norm, p.rms_eps);
    device.hyper_pre_norm(&p.hyper, &w.ffn_hyper, streams, norm, &mut s.mix, &mut s.x, &mut s.normed);
    s.turn(device);
    ffn::run(device, &steps.whole, p, kind, w, &mut s.ffn, &s.normed);
    device.hyper_post_terms(&p.hyper, &s.mix, s.ffn.output(), streams, next);
}

/// Tensors of an output head.
pub struct Head<'a, W> {
    /// Combination of the streams.
    pub hyper: &'a HyperWeights<W>,
    /// RMSNorm weight.
    pub norm: &'a W,
    /// `[D → vocabulary]`.
    pub output: &'a W,
}

/// Logits (`[wanted rows, vocabulary]`) of the step's wanted rows; there must be some.
pub fn head<D: SparseOps + HyperOps + MoeOps>(
    device: &D,
    step: &D::Step,
    p: &Params,
    head: &Head<'_, D::Weight>,
    s: &mut Scratch<D>,
    streams: &D::Buffer,
    logits: &mut D::Buffer,
) {
    device.gather_wanted(step, streams, &mut s.wanted);
    device.hyper_head_norm(&p.hyper, head.hyper, &s.wanted, (head.norm, p.rms_eps), &mut s.x, &mut s.normed);
    device.matmul(&s.normed, &mut [(head.output, logits)]);
}
