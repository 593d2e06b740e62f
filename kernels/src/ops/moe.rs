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

    /// `out = silu(min(gate, clamp)) · clamp(up, ±clamp)`.
    fn swiglu_clamped(&self, gate: &Self::Buffer, up: &Self::Buffer, clamp: f32, out: &mut Self::Buffer);
}
