//! The feed-forward sublayer: routed experts and one shared expert, both with clamped SwiGLU.

use ds4_kernels::ops::MoeOps;

use super::bind::LayerWeights;
use super::params::{LayerKind, Params};

/// Buffers of the sublayer; reused by every layer.
pub struct FfnBuffers<D: MoeOps> {
    logits: D::Buffer,
    routing: D::Routing,
    gate: D::Buffer,
    up: D::Buffer,
    act: D::Buffer,
    shared: D::Buffer,
}

impl<D: MoeOps> FfnBuffers<D> {
    /// Buffers with no rows yet.
    pub fn new(device: &D, p: &Params) -> Self {
        Self {
            logits: device.buffer(p.experts),
            routing: D::Routing::default(),
            gate: device.buffer(p.ff),
            up: device.buffer(p.ff),
            act: device.buffer(p.ff),
            shared: device.buffer(p.hidden),
        }
    }
}

/// `y = experts(x) + shared(x)` for normed inputs `x` (`[rows, D]`).
#[allow(clippy::too_many_arguments, reason = "buffers in, buffers out")]
pub fn run<D: MoeOps>(
    device: &D,
    step: &D::Step,
    p: &Params,
    kind: &LayerKind,
    w: &LayerWeights<D::Weight>,
    b: &mut FfnBuffers<D>,
    x: &D::Buffer,
    y: &mut D::Buffer,
) {
    device.matmul(x, &mut [(&w.router, &mut b.logits), (&w.shared_gate, &mut b.gate), (&w.shared_up, &mut b.up)]);
    match &w.router_table {
        Some(table) => device.route_table(&p.router, step, table, &b.logits, &mut b.routing),
        None => device.route_learned(&p.router, &b.logits, w.router_bias.as_ref(), &mut b.routing),
    }
    device.expert_ffn(&w.experts, &b.routing, kind.clamp, x, y);
    device.swiglu_clamped(&b.gate, &b.up, kind.clamp, &mut b.act);
    device.matmul(&b.act, &mut [(&w.shared_down, &mut b.shared)]);
    device.add(y, &b.shared);
}
