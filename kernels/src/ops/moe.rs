//! Mixture of experts: routing and the grouped expert feed-forward.

use crate::device::Device;

/// How router outputs become expert weights: `p = sqrt(softplus(logit))`, the selected ones divided by their sum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterParams {
    /// Experts per token.
    pub used: usize,
    /// Factor on the normalised weights.
    pub scale: f32,
    /// Smallest divisor.
    pub floor: f32,
}

/// The three stacked expert matrices of a layer, bound as `[experts · out, in]`.
pub struct Experts<W> {
    /// `[experts · ff, D]`.
    pub gate: W,
    /// `[experts · ff, D]`.
    pub up: W,
    /// `[experts · D, ff]`.
    pub down: W,
    /// Number of experts.
    pub count: usize,
}

/// How a layer's experts are chosen.
pub enum RouteBy<'a, D: Device> {
    /// As [`MoeOps::route_learned`] does, with a bias or without.
    Learned(Option<&'a D::Weight>),
    /// As [`MoeOps::route_table`] does.
    Table(&'a D::Step, &'a D::Weight),
}

impl<D: Device> Clone for RouteBy<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D: Device> Copy for RouteBy<'_, D> {}

/// The shared expert from its gate and up products on, with room for what lies between.
pub struct SharedExpert<'a, D: Device> {
    /// `gate · x`.
    pub gate: &'a D::Buffer,
    /// `up · x`.
    pub up: &'a D::Buffer,
    /// `[D, ff]`.
    pub down: &'a D::Weight,
    /// Room for the activation, `[rows, ff]`; unspecified afterwards.
    pub act: &'a mut D::Buffer,
    /// Its output.
    pub out: &'a mut D::Buffer,
}

/// Mixture-of-experts operations.
pub trait MoeOps: Device {
    /// Per row: `used` expert ids and weights.
    type Routing: Default + Send;

    /// Selects the `used` largest of `p + bias` per row (ties: lower index); weights come from `p` alone.
    /// `logits` is `[rows, experts]`, `bias` a vector of as many.
    fn route_learned(
        &self,
        p: &RouterParams,
        logits: &Self::Buffer,
        bias: Option<&Self::Weight>,
        out: &mut Self::Routing,
    );

    /// Takes the experts that `table` (I32, `[used, vocab]`) lists for each row's token id; weights from `p`.
    fn route_table(
        &self,
        p: &RouterParams,
        step: &Self::Step,
        table: &Self::Weight,
        logits: &Self::Buffer,
        out: &mut Self::Routing,
    );

    /// The router's product with `x`, the routing that follows from it, and other products with `x`, which a device may compute beside the
    /// routing.
    fn project_and_route(
        &self,
        x: &Self::Buffer,
        p: &RouterParams,
        (router, logits): (&Self::Weight, &mut Self::Buffer),
        by: RouteBy<'_, Self>,
        others: &mut [(&Self::Weight, &mut Self::Buffer)],
        out: &mut Self::Routing,
    ) where
        Self: Sized,
    {
        self.matmul(x, &mut [(router, &mut *logits)]);
        self.matmul(x, others);
        match by {
            RouteBy::Learned(bias) => self.route_learned(p, logits, bias, out),
            RouteBy::Table(step, table) => self.route_table(p, step, table, logits, out),
        }
    }

    /// `out = Σ_j down_j · (silu(min(gate_j·x, clamp)) · clamp(up_j·x, ±clamp) · weight_j)` over the row's experts.
    /// The weight is applied before `down`, whose input is what gets quantised.
    fn expert_ffn(
        &self,
        experts: &Experts<Self::Weight>,
        routing: &Self::Routing,
        clamp: f32,
        x: &Self::Buffer,
        out: &mut Self::Buffer,
    );

    /// [`MoeOps::expert_ffn`] and the shared expert. Their sum is the sublayer's output: the shared expert's part is `shared.out`, the
    /// other is left in `terms` in whatever form the device's [`hyper_post_terms`](super::HyperOps::hyper_post_terms) takes it, which is
    /// the only operation that may read it.
    fn ffn_terms(
        &self,
        experts: &Experts<Self::Weight>,
        routing: &Self::Routing,
        clamp: f32,
        x: &Self::Buffer,
        shared: SharedExpert<'_, Self>,
        terms: &mut Self::Buffer,
    ) where
        Self: Sized,
    {
        self.expert_ffn(experts, routing, clamp, x, terms);
        self.swiglu_clamped(shared.gate, shared.up, clamp, shared.act);
        self.matmul(shared.act, &mut [(shared.down, shared.out)]);
    }

    /// `out = silu(min(gate, clamp)) · clamp(up, ±clamp)`.
    fn swiglu_clamped(&self, gate: &Self::Buffer, up: &Self::Buffer, clamp: f32, out: &mut Self::Buffer);
}
