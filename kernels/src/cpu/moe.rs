//! Mixture of experts on the CPU.
//!
//! The assignments (row, expert) are sorted by expert, so that an expert's weights are unpacked once a step whatever the
//! number of its rows, and all experts of a step run in two dispatches: gate, up and activation, then down.

#![allow(unsafe_code, reason = "items write disjoint parts of shared outputs")]

use std::ops::Range;
use std::sync::PoisonError;

use crate::cpu::elementwise;
use crate::cpu::hyper::axpy;
use crate::cpu::isa::multiversion;
use crate::cpu::lanes::{Lanes, N};
use crate::cpu::matmul::{Inputs, ROW_BLOCK, SCRATCH, STRIP, grain, grow, is_float, put, quantize};
use crate::cpu::q16::{Activations, Meta, Quants};
use crate::cpu::raw::RawRows;
use crate::cpu::{CpuBuffer, CpuDevice, CpuStep, CpuWeight};
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
    // A function and not a closure: a closure is compiled without the vector instructions of its surroundings, and every
    // operation in it became a call (14 % of a prefill).
    #[inline(always)]
    fn one<L: Lanes>(g: &[f32; N], u: &[f32; N], clamp: f32, factor: f32, o: &mut [f32; N]) {
        let (hi, lo) = (L::splat(clamp), L::splat(-clamp));
        let g = hi.min(L::load(g));
        let u = lo.max(hi.min(L::load(u)));
        let e = elementwise::exp(L::splat(0.0).sub(g));
        g.div(L::splat(1.0).add(e)).mul(u).mul(L::splat(factor)).store(o);
    }
    let (gs, g_rest) = gate.as_chunks::<N>();
    let (us, u_rest) = up.as_chunks::<N>();
    let (os, o_rest) = out.as_chunks_mut::<N>();
    for ((g, u), o) in gs.iter().zip(us).zip(os) {
        one::<L>(g, u, clamp, factor, o);
    }
    if !g_rest.is_empty() {
        let (mut g, mut u, mut o) = ([0.0; N], [0.0; N], [0.0; N]);
        g[..g_rest.len()].copy_from_slice(g_rest);
        u[..u_rest.len()].copy_from_slice(u_rest);
        one::<L>(&g, &u, clamp, factor, &mut o);
        o_rest.copy_from_slice(&o[..g_rest.len()]);
    }
}

multiversion! {
    /// `out = silu(min(gate, clamp)) · clamp(up, ±clamp) · factor`.
    fn swiglu_clamped_row = swiglu_clamped_impl(gate: &[f32], up: &[f32], clamp: f32, factor: f32, out: &mut [f32]);
}

/// Consecutive sorted assignments of one expert.
#[derive(Clone, Copy)]
struct Group {
    expert: usize,
    first: usize,
    rows: usize,
}

/// Work memory of the experts of one step.
#[derive(Default)]
pub(crate) struct ExpertScratch {
    /// Assignments (`row * used + slot`) ordered by expert; within one, by row.
    order: Vec<usize>,
    /// Where each assignment is in `order`.
    place: Vec<usize>,
    groups: Vec<Group>,
    /// Inputs per sorted assignment.
    sorted: Activations,
    floats: Vec<f32>,
    /// `[assignments, ff]` and `[assignments, hidden]`, sorted.
    act: Vec<f32>,
    results: Vec<f32>,
}

impl ExpertScratch {
    fn sort(&mut self, routing: &CpuRouting) {
        let n = routing.experts.len();
        self.order.clear();
        self.order.extend(0..n);
        self.order.sort_by_key(|a| routing.experts[*a]);
        self.place.resize(n, 0);
        for (i, a) in self.order.iter().enumerate() {
            self.place[*a] = i;
        }
        self.groups.clear();
        let mut first = 0;
        for group in self.order.chunk_by(|a, b| routing.experts[*a] == routing.experts[*b]) {
            self.groups.push(Group { expert: routing.experts[group[0]], first, rows: group.len() });
            first += group.len();
        }
    }
}

/// Copies the quantised row of every assignment in `order` to its place.
fn gather(device: &CpuDevice, from: &Activations, order: &[usize], used: usize, to: &mut Activations) {
    let blocks = from.blocks;
    to.resize(order.len(), blocks * crate::cpu::q16::BLOCK);
    let (quants, meta) = (RawRows::<Quants>::new(&mut to.quants, blocks), RawRows::<Meta>::new(&mut to.meta, blocks));
    device.pool.run(order.len(), 32, &|range| {
        for i in range {
            let at = order[i] / used * blocks;
            // SAFETY: the pool gives each row to one item.
            unsafe {
                quants.part(i, 0, blocks).copy_from_slice(&from.quants[at..at + blocks]);
                meta.part(i, 0, blocks).copy_from_slice(&from.meta[at..at + blocks]);
            }
        }
    });
}

/// What is done with `(group, first output, outputs, sorted rows)`.
type StripWork<'a> = dyn Fn(&Group, usize, usize, Range<usize>) + Sync + 'a;

impl CpuDevice {
    /// Runs `f(group, first output, outputs, sorted rows)` for every strip of `width` outputs and row block of every group.
    fn for_strips(&self, groups: &[Group], width: usize, f: &StripWork<'_>) {
        let strips = width.div_ceil(STRIP);
        let mut ends = Vec::with_capacity(groups.len());
        let mut items = 0;
        for g in groups {
            items += strips * g.rows.div_ceil(ROW_BLOCK);
            ends.push(items);
        }
        self.pool.run(items, grain(self, strips), &|range| {
            for item in range {
                let at = ends.partition_point(|end| *end <= item);
                let g = &groups[at];
                let item = item - if at == 0 { 0 } else { ends[at - 1] };
                let (block, first) = (item / strips * ROW_BLOCK, item % strips * STRIP);
                f(g, first, STRIP.min(width - first), g.first + block..g.first + g.rows.min(block + ROW_BLOCK));
            }
        });
    }
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
        let used = routing.used;
        assert_eq!(routing.experts.len(), x.rows() * used, "routing of another step");
        let ff = experts.gate.rows() / experts.count;
        let hidden = experts.down.rows() / experts.count;
        assert_eq!(hidden, out.width(), "expert output of another width");
        out.resize(x.rows());
        if x.rows() == 0 {
            return;
        }
        let mut scratch = self.experts.lock().unwrap_or_else(PoisonError::into_inner);
        let s = &mut *scratch;
        s.sort(routing);
        let assignments = s.order.len();
        let mut quants = self.activations.lock().unwrap_or_else(PoisonError::into_inner);
        grow(&mut s.act, assignments * ff, 0.0);
        grow(&mut s.results, assignments * hidden, 0.0);

        // Rows in the order of their experts; a lone row serves all of its experts as it is.
        let lone = x.rows() == 1;
        s.floats.clear();
        if is_float(experts.gate.ty) || is_float(experts.up.ty) {
            for a in s.order.iter().take(if lone { 1 } else { assignments }) {
                s.floats.extend_from_slice(x.row(a / used));
            }
        } else {
            quantize(self, x.rows(), x.width(), &|r| x.row(r), &mut quants);
            if !lone {
                gather(self, &quants, &s.order, used, &mut s.sorted);
            }
        }
        let sorted = if lone { &*quants } else { &s.sorted };
        let inputs = Inputs { floats: &s.floats, quants: sorted, cols: x.width() };
        let act = RawRows::new(&mut s.act, ff);
        let (groups, order) = (&s.groups, &s.order);
        self.for_strips(groups, ff, &|g, first, outputs, rows| {
            SCRATCH.with_borrow_mut(|t| {
                let at = if lone { 0..1 } else { rows.clone() };
                inputs.strip(self.isa, t, &experts.gate, g.expert * ff + first, outputs, at.clone());
                std::mem::swap(&mut t.out, &mut t.other);
                inputs.strip(self.isa, t, &experts.up, g.expert * ff + first, outputs, at);
                for ((i, gate), up) in rows.zip(&t.other).zip(&t.out) {
                    // SAFETY: this item alone has these rows of this strip.
                    let out = unsafe { act.part(i, first, outputs) };
                    let weight = routing.weights[order[i]];
                    swiglu_clamped_row(self.isa, &gate[..outputs], &up[..outputs], clamp, weight, out);
                }
            });
        });

        if !is_float(experts.down.ty) {
            let act = &s.act;
            quantize(self, assignments, ff, &|i| &act[i * ff..(i + 1) * ff], &mut quants);
        }
        let inputs = Inputs { floats: &s.act[..assignments * ff], quants: &quants, cols: ff };
        let results = RawRows::new(&mut s.results, hidden);
        self.for_strips(groups, hidden, &|g, first, outputs, rows| {
            SCRATCH.with_borrow_mut(|t| {
                inputs.strip(self.isa, t, &experts.down, g.expert * hidden + first, outputs, rows.clone());
                for (i, o) in rows.zip(&t.out) {
                    // SAFETY: this item alone has these rows of this strip.
                    put(unsafe { results.part(i, first, outputs) }, o);
                }
            });
        });
        // Summed in slot order, whatever order the experts ran in: the row's result must not depend on its neighbours.
        let (isa, place, results) = (self.isa, &s.place, &s.results);
        self.for_rows(out, |r, out| {
            for j in 0..used {
                let at = place[r * used + j] * hidden;
                axpy(isa, 1.0, &results[at..at + hidden], j == 0, out);
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
