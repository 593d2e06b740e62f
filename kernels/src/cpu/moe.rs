//! Mixture of experts on the CPU: rows are gathered per expert, so that each expert's weights are read once a step.

use crate::cpu::elementwise;
use crate::cpu::hyper::axpy;
use crate::cpu::isa::multiversion;
use crate::cpu::lanes::{Lanes, N};
use crate::cpu::{CpuBuffer, CpuDevice, CpuStep, CpuWeight};
use crate::device::Device;
use crate::ops::{Experts, MoeOps, RouterParams};

/// Per row: `used` experts and their weights, flattened.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CpuRouting {
    /// Experts per row.
    pub used: usize,
    /// Expert ids, `[rows, used]`.
    pub experts: Vec<usize>,
    /// Weights, `[rows, used]`.
    pub weights: Vec<f32>,
}

impl CpuRouting {
    fn reset(&mut self, used: usize) {
        self.used = used;
        self.experts.clear();
        self.weights.clear();
    }

    /// Appends one row's experts, weighted by their normalised probabilities.
    fn push(&mut self, p: &RouterParams, experts: &[usize], probability: impl Fn(usize) -> f32) {
        let sum: f32 = experts.iter().map(|e| probability(*e)).sum();
        let factor = p.scale / sum.max(p.floor);
        self.experts.extend_from_slice(experts);
        self.weights.extend(experts.iter().map(|e| probability(*e) * factor));
    }
}

/// `sqrt(ln(1 + e^x))`.
pub(crate) fn sqrt_softplus(x: f32) -> f32 {
    let s = if x > 20.0 {
        x
    } else if x < -20.0 {
        x.exp()
    } else {
        x.exp().ln_1p()
    };
    s.sqrt()
}

#[inline(always)]
fn swiglu_clamped_impl<L: Lanes>(gate: &[f32], up: &[f32], clamp: f32, factor: f32, out: &mut [f32]) {
    let (hi, lo) = (L::splat(clamp), L::splat(-clamp));
    let one = |g: &[f32; N], u: &[f32; N], o: &mut [f32; N]| {
        let g = hi.min(L::load(g));
        let u = lo.max(hi.min(L::load(u)));
        let e = elementwise::exp(L::splat(0.0).sub(g));
        g.div(L::splat(1.0).add(e)).mul(u).mul(L::splat(factor)).store(o);
    };
    let (gs, g_rest) = gate.as_chunks::<N>();
    let (us, u_rest) = up.as_chunks::<N>();
    let (os, o_rest) = out.as_chunks_mut::<N>();
    for ((g, u), o) in gs.iter().zip(us).zip(os) {
        one(g, u, o);
    }
    if !g_rest.is_empty() {
        let (mut g, mut u, mut o) = ([0.0; N], [0.0; N], [0.0; N]);
        g[..g_rest.len()].copy_from_slice(g_rest);
        u[..u_rest.len()].copy_from_slice(u_rest);
        one(&g, &u, &mut o);
        o_rest.copy_from_slice(&o[..g_rest.len()]);
    }
}

multiversion! {
    /// `out = silu(min(gate, clamp)) · clamp(up, ±clamp) · factor`.
    fn swiglu_clamped_row = swiglu_clamped_impl(gate: &[f32], up: &[f32], clamp: f32, factor: f32, out: &mut [f32]);
}

impl MoeOps for CpuDevice {
    type Routing = CpuRouting;

    fn route_learned(&self, p: &RouterParams, logits: &CpuBuffer, bias: Option<&CpuWeight>, out: &mut CpuRouting) {
        out.reset(p.used);
        let mut order: Vec<usize> = Vec::with_capacity(logits.width());
        for r in 0..logits.rows() {
            let probabilities: Vec<f32> = logits.row(r).iter().map(|x| sqrt_softplus(*x)).collect();
            let score = |e: usize| probabilities[e] + bias.map_or(0.0, |b| b.vector()[e]);
            order.clear();
            order.extend(0..logits.width());
            let by_score = |a: &usize, b: &usize| score(*b).total_cmp(&score(*a)).then(a.cmp(b));
            if p.used < order.len() {
                order.select_nth_unstable_by(p.used, by_score);
                order.truncate(p.used);
            }
            order.sort_unstable_by(by_score);
            out.push(p, &order, |e| probabilities[e]);
        }
    }

    fn route_table(
        &self,
        p: &RouterParams,
        step: &CpuStep,
        table: &CpuWeight,
        logits: &CpuBuffer,
        out: &mut CpuRouting,
    ) {
        assert_eq!(table.cols(), p.used, "{}: table of another width", table.name());
        out.reset(p.used);
        for (r, token) in step.tokens().iter().enumerate() {
            let experts: Vec<usize> =
                table.i32_row(*token).iter().map(|e| usize::try_from(*e).unwrap_or(usize::MAX)).collect();
            assert!(experts.iter().all(|e| *e < logits.width()), "{}: expert out of range", table.name());
            out.push(p, &experts, |e| sqrt_softplus(logits.row(r)[e]));
        }
    }

    fn expert_ffn(
        &self,
        experts: &Experts<CpuWeight>,
        routing: &CpuRouting,
        clamp: f32,
        x: &CpuBuffer,
        out: &mut CpuBuffer,
    ) {
        assert_eq!(routing.experts.len(), x.rows() * routing.used, "routing of another step");
        let ff = experts.gate.rows() / experts.count;
        let hidden = experts.down.rows() / experts.count;
        assert_eq!(hidden, out.width(), "expert output of another width");
        let isa = self.isa();
        // Assignments ordered by expert; within one, by row.
        let mut order: Vec<usize> = (0..routing.experts.len()).collect();
        order.sort_by_key(|a| routing.experts[*a]);
        let mut results = self.buffer(hidden);
        results.resize(order.len());
        let (mut input, mut gate, mut up, mut act, mut part) =
            (self.buffer(x.width()), self.buffer(ff), self.buffer(ff), self.buffer(ff), self.buffer(hidden));
        for group in order.chunk_by(|a, b| routing.experts[*a] == routing.experts[*b]) {
            let expert = routing.experts[group[0]];
            input.resize(group.len());
            for (assignment, row) in group.iter().zip(input.data_mut().chunks_exact_mut(x.width())) {
                row.copy_from_slice(x.row(assignment / routing.used));
            }
            let (wg, wu, wd) = (
                experts.gate.row_range(expert * ff, ff),
                experts.up.row_range(expert * ff, ff),
                experts.down.row_range(expert * hidden, hidden),
            );
            self.matmul(&input, &mut [(&wg, &mut gate), (&wu, &mut up)]);
            act.resize(group.len());
            self.for_rows(&mut act, |i, out| {
                swiglu_clamped_row(isa, gate.row(i), up.row(i), clamp, routing.weights[group[i]], out);
            });
            self.matmul(&act, &mut [(&wd, &mut part)]);
            for (i, assignment) in group.iter().enumerate() {
                results.data_mut()[assignment * hidden..(assignment + 1) * hidden].copy_from_slice(part.row(i));
            }
        }
        // Summed in slot order, whatever order the experts ran in: the row's result must not depend on its neighbours.
        out.resize(x.rows());
        self.for_rows(out, |r, out| {
            for j in 0..routing.used {
                axpy(isa, 1.0, results.row(r * routing.used + j), j == 0, out);
            }
        });
    }

    fn swiglu_clamped(&self, gate: &CpuBuffer, up: &CpuBuffer, clamp: f32, out: &mut CpuBuffer) {
        assert!(gate.width() == up.width() && gate.rows() == up.rows() && out.width() == gate.width(), "swiglu shape");
        out.resize(gate.rows());
        let isa = self.isa();
        self.for_rows(out, |r, out| swiglu_clamped_row(isa, gate.row(r), up.row(r), clamp, 1.0, out));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_values_of_sqrt_softplus() {
        // Fact sheet on DeepSeek V4, section 3.9.
        for (x, want) in [
            (-5.0, 0.081_947_23),
            (-1.0, 0.559_697_85),
            (0.0, 0.832_554_6),
            (1.0, 1.145_976_3),
            (5.0, 2.237_569),
            (20.0, 4.472_136),
        ] {
            let got = sqrt_softplus(x);
            assert!((got / want - 1.0).abs() < 1e-6, "{x}: {got} {want}");
        }
    }
}
