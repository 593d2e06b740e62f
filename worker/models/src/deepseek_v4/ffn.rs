//! The feed-forward sublayer: routed experts and one shared expert, both with clamped SwiGLU.

use ds4_kernels::ops::{MoeOps, RouteBy, SharedExpert};

use super::bind::LayerWeights;
use super::params::{LayerKind, Params};

/// Buffers of the sublayer; reused by every layer. They are used in one turn of their room.
pub struct FfnBuffers<D: MoeOps> {
    logits: D::Buffer,
    routing: D::Routing,
    gate: D::Buffer,
    up: D::Buffer,
    act: D::Buffer,
    shared: D::Buffer,
    terms: D::Buffer,
}

impl<D: MoeOps> FfnBuffers<D> {
    /// Buffers with no rows yet.
    pub fn new(device: &D, room: &D::Room, p: &Params) -> Self {
        Self {
            logits: device.buffer_in(room, p.experts),
            routing: D::Routing::default(),
            gate: device.buffer_in(room, p.ff),
            up: device.buffer_in(room, p.ff),
            act: device.buffer_in(room, p.ff),
            shared: device.buffer_in(room, p.hidden),
            terms: device.buffer_in(room, p.hidden),
        }
    }

    /// The two terms of the output: the experts' and the shared expert's.
    pub fn output(&mut self) -> (&mut D::Buffer, &D::Buffer) {
        (&mut self.terms, &self.shared)
    }
}

/// `experts(x) + shared(x)` for normed inputs `x` (`[rows, D]`), as the two terms that [`MoeOps::ffn_terms`] leaves in
/// [`FfnBuffers::output`].
#[allow(clippy::too_many_arguments, reason = "buffers in, buffers out")]
pub fn run<D: MoeOps>(
    device: &D,
    step: &D::Step,
    p: &Params,
    kind: &LayerKind,
    w: &LayerWeights<D::Weight>,
    b: &mut FfnBuffers<D>,
    x: &D::Buffer,
) {
    let by = match &w.router_table {
        Some(table) => RouteBy::Table(step, table),
        None => RouteBy::Learned(w.router_bias.as_ref()),
    };
    let mut others = [(&w.shared_gate, &mut b.gate), (&w.shared_up, &mut b.up)];
    device.project_and_route(x, &p.router, (&w.router, &mut b.logits), by, &mut others, &mut b.routing);
    let shared = SharedExpert { gate: &b.gate, up: &b.up, down: &w.shared_down, act: &mut b.act, out: &mut b.shared };
    device.ffn_terms(&w.experts, &b.routing, kind.clamp, x, shared, &mut b.terms);
}
