//! Sparse attention: the indexer, the attention itself.

use std::ops::Range;

use super::{Bench, Kernel, Line, Place, Timed, floats};
use crate::conformance::Random;
use crate::device::DeviceError;
use crate::math::lowp;
use crate::ops::{Indexer, SparseAttention};
use crate::state::{StateKind, StateSpec, StateType};

pub(super) const ROPE_DIM: usize = 64;

/// `n` values that depend on the seed, the kind of row and its number only: rows of a sequence have them wherever a step begins.
pub(super) fn of_position(seed: u64, kind: u64, row: usize, n: usize) -> Vec<f32> {
    let mut rng = Random::new(seed ^ kind.wrapping_mul(0x9e37_79b9) ^ ((row as u64) << 24));
    (0..n).map(|_| rng.unit()).collect()
}

fn encoded(ty: StateType, row: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; ty.row_bytes(row.len())];
    ty.encode(row, &mut bytes);
    bytes
}

/// Whether row `row` is a key of a window or of the compressed history.
const WINDOW: u64 = 1;
const HISTORY: u64 = 2;

/// A key-value row as it is stored: rounded already.
fn kv_row(seed: u64, kind: u64, row: usize, dim: usize) -> Vec<f32> {
    let mut values = of_position(seed, kind, row, dim);
    lowp::fp8_round_trip(&mut values[..dim - ROPE_DIM]);
    lowp::f16_round_trip(&mut values);
    values
}

struct Attend {
    p: SparseAttention,
    index: Option<Indexer>,
    ratio: usize,
    depth: usize,
    seed: u64,
    sinks: Vec<f32>,
}

pub(super) const RING: usize = 0;
pub(super) const ROWS: usize = 1;
const INDEX: usize = 2;

impl Attend {
    fn new<D: Timed>(b: &Bench<'_, D>, selected: bool) -> Self {
        let (heads, head_dim, window) = (b.size(64, 4), b.size(512, 128), b.size(128, 16));
        let top_k = b.size(512, 16);
        // Without an indexer, as many rows are visible as the indexer would choose.
        let ratio = if selected { 4 } else { b.size(128, 8) };
        let depth = if selected { b.size(8192, 256) } else { top_k * ratio };
        let mut rng = b.random();
        Self {
            #[allow(clippy::cast_precision_loss, reason = "a head width")]
            p: SparseAttention {
                heads,
                head_dim,
                scale: 1.0 / (head_dim as f32).sqrt(),
                window,
                ring_slot: RING,
                compressed: Some((ROWS, ratio)),
            },
            index: selected.then(|| index_params(heads, b.size(128, 64), top_k, INDEX)),
            ratio,
            depth,
            seed: b.options.seed,
            sinks: (0..heads).map(|_| rng.unit()).collect(),
        }
    }
}

/// Scores that are exact in f32 whatever the order of their sums: FP4 values of one scale or two, weights of three bits, and a factor that
/// is a power of two. So two devices select the same rows.
fn index_params(heads: usize, head_dim: usize, top_k: usize, rows_slot: usize) -> Indexer {
    Indexer { heads, head_dim, top_k, ratio: 4, rows_slot, scale: 1.0 / 64.0 }
}

fn fp4_row(seed: u64, kind: u64, row: usize, dim: usize) -> Vec<f32> {
    let mut values = of_position(seed, kind, row, dim);
    lowp::fp4_round_trip(&mut values);
    values
}

fn index_queries(p: &Indexer, rng: &mut Random, rows: usize) -> Vec<f32> {
    let mut q: Vec<f32> = (0..rows * p.heads * p.head_dim).map(|_| rng.unit()).collect();
    q.chunks_exact_mut(p.head_dim).for_each(lowp::fp4_round_trip);
    q
}

fn index_weights(p: &Indexer, rng: &mut Random, rows: usize) -> Vec<f32> {
    (0..rows * p.heads).map(|_| (rng.unit() * 4.0).round() / 4.0).collect()
}

impl Kernel for Attend {
    type Bound<D: Timed> = D::Weight;

    fn what(&self) -> String {
        let how = if self.index.is_some() { "selected" } else { "all" };
        format!("{} heads of {}, ratio {}, {how}, at {}", self.p.heads, self.p.head_dim, self.ratio, self.depth)
    }

    fn bind<D: Timed>(&self, d: &D, _: usize) -> Result<D::Weight, DeviceError> {
        floats(d, 1, self.p.heads, &self.sinks)
    }

    fn weight_bytes(&self) -> usize {
        self.sinks.len() * 4
    }

    fn widths(&self) -> Vec<usize> {
        let q = self.p.heads * self.p.head_dim;
        let (index_q, index_w) = self.index.map_or((1, 1), |p| (p.heads * p.head_dim, p.heads));
        vec![q, self.p.head_dim, index_q, index_w, q]
    }

    fn inputs(&self) -> usize {
        4
    }

    fn input(&self, k: usize, rng: &mut Random, first: usize, rows: usize) -> Vec<f32> {
        match (k, &self.index) {
            (1, _) => (first..first + rows).flat_map(|at| kv_row(self.seed, WINDOW, at, self.p.head_dim)).collect(),
            (2, Some(p)) => index_queries(p, rng, rows),
            (3, Some(p)) => index_weights(p, rng, rows),
            // Scores of some units: a softmax that is neither even nor one row's.
            _ => (0..rows * self.widths()[k]).map(|_| 4.0 * rng.unit()).collect(),
        }
    }

    fn state(&self) -> StateSpec {
        let (width, tokens) = (self.p.head_dim, self.ratio);
        let mut slots = vec![
            StateKind::Ring { rows: self.p.window, width, ty: StateType::F16 },
            StateKind::Pooled { width, ty: StateType::Fp8 { rotary: ROPE_DIM }, tokens },
        ];
        slots.extend(self.index.map(|p| StateKind::Pooled { width: p.head_dim, ty: StateType::Fp4, tokens }));
        StateSpec { slots }
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn stored(&self, slot: usize, first: usize, end: usize) -> Vec<u8> {
        match slot {
            RING => {
                // Row p mod window, of the last window positions before the step.
                let window = self.p.window;
                let latest = |r: usize| first - 1 - (first - 1 + window - r) % window;
                let row = |r| encoded(StateType::F16, &kv_row(self.seed, WINDOW, latest(r), self.p.head_dim));
                (0..window.min(first)).flat_map(row).collect()
            }
            ROWS => {
                let ty = StateType::Fp8 { rotary: ROPE_DIM };
                let row = |r| encoded(ty, &kv_row(self.seed, HISTORY, r, self.p.head_dim));
                (0..end / self.ratio).flat_map(row).collect()
            }
            _ => {
                let dim = self.index.map_or(0, |p| p.head_dim);
                let row = |r| encoded(StateType::Fp4, &fp4_row(self.seed, INDEX as u64 + 1, r, dim));
                (0..end / self.ratio).flat_map(row).collect()
            }
        }
    }

    fn prepare<D: Timed>(&self, d: &D, _: &D::Weight, place: &mut Place<D>, buffers: &mut [D::Buffer]) {
        if let Some(p) = &self.index {
            d.index_select(&place.step, p, &buffers[2], &buffers[3], &mut place.selection);
        }
    }

    fn run<D: Timed>(&self, d: &D, sinks: &D::Weight, _: usize, place: &mut Place<D>, buffers: &mut [D::Buffer]) {
        let [q, kv, _, _, out] = buffers else { return };
        let selection = self.index.map(|_| &place.selection);
        d.sparse_attention(&place.step, &self.p, sinks, q, kv, selection, out);
    }

    /// Relative to the greatest value, which is 1: 2e-5, as the conformance suite has it for attention.
    fn distance(&self, got: &[f32], want: &[f32]) -> f64 {
        if got.len() != want.len() || got.iter().any(|v| !v.is_finite()) {
            return f64::INFINITY;
        }
        got.iter().zip(want).map(|(g, w)| f64::from((g - w).abs())).fold(0.0, f64::max)
    }

    fn bound(&self) -> f64 {
        2e-5
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn bytes(&self, rows: usize) -> f64 {
        let (keys, dim) = (self.keys(), self.p.head_dim);
        let once = if rows <= super::DECODE { rows } else { 1 };
        let row = StateType::Fp8 { rotary: ROPE_DIM }.row_bytes(dim);
        (rows * 2 * self.p.heads * dim * 4 + once * (keys * row + self.p.window * dim * 2)) as f64
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn macs(&self, rows: usize) -> f64 {
        (2 * rows * self.p.heads * self.p.head_dim * (self.keys() + self.p.window)) as f64
    }
}

impl Attend {
    /// Compressed rows that a query meets.
    fn keys(&self) -> usize {
        self.index.map_or(self.depth / self.ratio, |p| p.top_k.min(self.depth / self.ratio))
    }
}

pub(super) fn attention<D: Timed>(b: &Bench<'_, D>) -> Result<Vec<Line>, DeviceError> {
    let mut lines = b.sweep(&Attend::new(b, false))?;
    lines.extend(b.sweep(&Attend::new(b, true))?);
    Ok(lines)
}

/// With a reference whose state is another.
#[cfg(test)]
pub(super) fn against<D: Timed>(b: &Bench<'_, D>, other: &Bench<'_, D>) -> Vec<Line> {
    let [kernel, model] = [b, other].map(|b| Attend::new(b, false));
    b.against(&kernel, &model).expect("memory")
}

struct Select {
    p: Indexer,
    depth: usize,
    seed: u64,
}

impl Kernel for Select {
    type Bound<D: Timed> = ();

    fn what(&self) -> String {
        let p = &self.p;
        format!("{} heads of {}, {} of {} rows", p.heads, p.head_dim, p.top_k, self.depth / p.ratio)
    }

    fn bind<D: Timed>(&self, _: &D, _: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn weight_bytes(&self) -> usize {
        0
    }

    fn widths(&self) -> Vec<usize> {
        vec![self.p.heads * self.p.head_dim, self.p.heads]
    }

    fn inputs(&self) -> usize {
        2
    }

    fn input(&self, k: usize, rng: &mut Random, _: usize, rows: usize) -> Vec<f32> {
        if k == 0 { index_queries(&self.p, rng, rows) } else { index_weights(&self.p, rng, rows) }
    }

    fn state(&self) -> StateSpec {
        let tokens = self.p.ratio;
        StateSpec { slots: vec![StateKind::Pooled { width: self.p.head_dim, ty: StateType::Fp4, tokens }] }
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn stored(&self, _: usize, _: usize, end: usize) -> Vec<u8> {
        let row = |r| encoded(StateType::Fp4, &fp4_row(self.seed, 7, r, self.p.head_dim));
        (0..end / self.p.ratio).flat_map(row).collect()
    }

    fn run<D: Timed>(&self, d: &D, (): &(), _: usize, place: &mut Place<D>, buffers: &mut [D::Buffer]) {
        let [q, w] = buffers else { return };
        d.index_select(&place.step, &self.p, q, w, &mut place.selection);
    }

    /// 1 where a row is selected.
    fn output<D: Timed>(&self, d: &D, place: &Place<D>, _: &[D::Buffer], rows: Range<usize>) -> Vec<f32> {
        let all = d.selected(&place.selection);
        let (most, each) = ((place.first + place.rows) / self.p.ratio + 1, usize::from(place.banks.len() == 1));
        let mut out = Vec::new();
        for r in rows {
            let visible = (place.first + r * each + 1) / self.p.ratio;
            let chosen = all.get(r).cloned().flatten().unwrap_or_else(|| (0..visible).collect());
            let at = out.len();
            // As wide for every number of rows.
            out.resize(at + (self.depth + 4096) / self.p.ratio, 0.0);
            chosen.iter().filter(|k| **k < most).for_each(|k| out[at + k] += 1.0);
        }
        out
    }

    /// Rows that only one of them has selected.
    fn distance(&self, got: &[f32], want: &[f32]) -> f64 {
        if got.len() != want.len() {
            return f64::INFINITY;
        }
        got.iter().zip(want).map(|(g, w)| f64::from((g - w).abs())).sum()
    }

    /// Scores are exact (see [`index_params`]), so the selections are equal.
    fn bound(&self) -> f64 {
        0.0
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn bytes(&self, rows: usize) -> f64 {
        let once = if rows <= super::DECODE { rows } else { 1 };
        let row = StateType::Fp4.row_bytes(self.p.head_dim);
        (once * self.depth / self.p.ratio * row + rows * self.p.heads * self.p.head_dim * 4) as f64
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn macs(&self, rows: usize) -> f64 {
        (rows * self.depth / self.p.ratio * self.p.heads * self.p.head_dim) as f64
    }
}

pub(super) fn indexer<D: Timed>(b: &Bench<'_, D>) -> Result<Vec<Line>, DeviceError> {
    let mut lines = Vec::new();
    for depth in [b.size(8192, 256), b.size(65_536, 512)] {
        let p = index_params(b.size(64, 4), b.size(128, 64), b.size(512, 16), 0);
        lines.extend(b.sweep(&Select { p, depth, seed: b.options.seed })?);
    }
    Ok(lines)
}
