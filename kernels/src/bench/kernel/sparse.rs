//! Sparse attention: compressors, the indexer, the attention itself.

use std::ops::Range;

use super::{Bench, Kernel, Line, Place, Timed, apart, floats};
use crate::conformance::Random;
use crate::device::DeviceError;
use crate::math::{lowp, yarn};
use crate::ops::{Compressor, Indexer, KvNumerics, Operands, SparseAttention};
use crate::state::{StateKind, StateSpec, StateType};

const ROPE_DIM: usize = 64;

/// `n` values that depend on the seed, the kind of row and its number only: rows of a sequence have them wherever a step begins.
fn of_position(seed: u64, kind: u64, row: usize, n: usize) -> Vec<f32> {
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

const RING: usize = 0;
const ROWS: usize = 1;
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

struct Compress {
    dim: usize,
    ratio: usize,
    overlap: bool,
    indexer: bool,
    depth: usize,
    seed: u64,
    ape: Vec<f32>,
    norm: Vec<f32>,
}

struct CompressorWeights<W, T> {
    ape: W,
    norm: W,
    table: T,
}

impl Compress {
    fn width(&self) -> usize {
        if self.overlap { 2 * self.dim } else { self.dim }
    }

    fn ty(&self) -> StateType {
        if self.indexer { StateType::Fp4 } else { StateType::Fp8 { rotary: ROPE_DIM } }
    }
}

const FRONTIER: usize = 0;

impl Kernel for Compress {
    type Bound<D: Timed> = CompressorWeights<D::Weight, D::RopeTable>;

    fn what(&self) -> String {
        format!("ratio {}, rows of {}{}", self.ratio, self.dim, if self.indexer { ", FP4" } else { ", FP8" })
    }

    fn bind<D: Timed>(&self, d: &D, _: usize) -> Result<Self::Bound<D>, DeviceError> {
        Ok(CompressorWeights {
            ape: floats(d, self.ratio, self.width(), &self.ape)?,
            norm: floats(d, 1, self.dim, &self.norm)?,
            table: d.upload_rope(&yarn::frequencies(ROPE_DIM, 1.6e5, None)),
        })
    }

    fn weight_bytes(&self) -> usize {
        (self.ape.len() + self.norm.len()) * 4
    }

    fn widths(&self) -> Vec<usize> {
        vec![self.width(); 2]
    }

    fn inputs(&self) -> usize {
        2
    }

    fn state(&self) -> StateSpec {
        let elems = 2 * self.ratio * self.dim * if self.overlap { 4 } else { 1 };
        StateSpec {
            slots: vec![
                StateKind::Fixed { elems },
                StateKind::Pooled { width: self.dim, ty: self.ty(), tokens: self.ratio },
            ],
        }
    }

    /// The last token of a window, so that one row of a step finishes it.
    fn depth(&self) -> usize {
        self.depth
    }

    fn stored(&self, slot: usize, _: usize, end: usize) -> Vec<u8> {
        if slot == FRONTIER {
            let elems = self.state().slots[FRONTIER].width();
            return of_position(self.seed, 9, 0, elems).iter().flat_map(|v| v.to_le_bytes()).collect();
        }
        // Rows that nobody finishes stay as they are.
        vec![0; end / self.ratio * self.ty().row_bytes(self.dim)]
    }

    /// The frontier is not that of the tokens before: only from the first row on is a chunk what its parts are.
    fn has_tail(&self) -> bool {
        false
    }

    fn run<D: Timed>(&self, d: &D, w: &Self::Bound<D>, _: usize, place: &mut Place<D>, buffers: &mut [D::Buffer]) {
        let [values, scores] = buffers else { return };
        let c = Compressor {
            ratio: self.ratio,
            dim: self.dim,
            overlap: self.overlap,
            frontier_slot: FRONTIER,
            rows_slot: ROWS,
            ape: &w.ape,
            norm: &w.norm,
            eps: 1e-6,
            rope: &w.table,
            rope_dim: ROPE_DIM,
            indexer: self.indexer,
            numerics: KvNumerics::Official,
        };
        d.compress_all(&place.step, &[(c, values, scores)]);
    }

    /// The compressed row that each row of the step has finished; zeros for the others.
    fn output<D: Timed>(&self, d: &D, place: &Place<D>, _: &[D::Buffer], rows: Range<usize>) -> Vec<f32> {
        let mut out = Vec::new();
        for r in rows {
            let apart = place.banks.len() > 1 || place.rows == 1;
            let (bank, pos) = if apart { (r, place.first) } else { (0, place.first + r) };
            let mut row = vec![0.0; self.dim];
            if (pos + 1) % self.ratio == 0 {
                let at = (pos + 1) / self.ratio - 1;
                let mut bytes = Vec::new();
                d.bank_export(&place.banks[bank], ROWS, at..at + 1, &mut bytes);
                self.ty().decode(&bytes, &mut row);
            }
            out.extend(row);
        }
        out
    }

    /// The share of elements that are not equal: values on the border of two codes may fall to either. A difference of more than one
    /// code (a third of the value in FP4, or what FP4's smallest values differ by) is infinite.
    #[allow(clippy::cast_precision_loss, reason = "a count")]
    fn distance(&self, got: &[f32], want: &[f32]) -> f64 {
        let code = if self.indexer { 0.5 } else { 0.13 };
        let size = want.iter().fold(0f32, |m, v| m.max(v.abs()));
        let far = |(g, w): (&f32, &f32)| (g - w).abs() > code * w.abs() + size / 8.0 * code || !g.is_finite();
        if got.len() != want.len() || size == 0.0 || got.iter().zip(want).any(far) {
            return apart(got, want).max(f64::INFINITY);
        }
        let filled = want.chunks(self.dim).filter(|row| row.iter().any(|v| *v != 0.0)).count() * self.dim;
        got.iter().zip(want).filter(|(g, w)| g != w).count() as f64 / filled.max(1) as f64
    }

    fn bound(&self) -> f64 {
        1e-2
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn bytes(&self, rows: usize) -> f64 {
        // Values and scores in; a decode step also reads the windows that it finishes.
        let windows = if rows <= super::DECODE { rows * self.state().slots[FRONTIER].width() * 4 } else { 0 };
        (2 * rows * self.width() * 4 + windows) as f64
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn macs(&self, rows: usize) -> f64 {
        (rows * self.width() * 2) as f64
    }
}

pub(super) fn compressors<D: Timed>(b: &Bench<'_, D>) -> Result<Vec<Line>, DeviceError> {
    let mut lines = Vec::new();
    for (dim, ratio, overlap, indexer) in
        [(b.size(512, 128), 4, true, false), (128, 4, true, true), (b.size(512, 128), b.size(128, 8), false, false)]
    {
        let mut rng = b.random();
        let width = if overlap { 2 * dim } else { dim };
        let kernel = Compress {
            dim,
            ratio,
            overlap,
            indexer,
            depth: b.size(8192, 256) - 1,
            seed: b.options.seed,
            ape: (0..ratio * width).map(|_| rng.unit()).collect(),
            norm: (0..dim).map(|_| 1.0 + 0.2 * rng.unit()).collect(),
        };
        lines.extend(b.sweep(&kernel)?);
    }
    Ok(lines)
}

/// What queries and key-value rows go through before an attention.
struct Prepare {
    heads: usize,
    head_dim: usize,
    window: usize,
    norm: Vec<f32>,
}

impl Kernel for Prepare {
    type Bound<D: Timed> = (D::Weight, D::RopeTable);

    fn what(&self) -> String {
        format!("{} heads and a row of {}, norms, rotation, rounding", self.heads, self.head_dim)
    }

    fn bind<D: Timed>(&self, d: &D, _: usize) -> Result<Self::Bound<D>, DeviceError> {
        Ok((floats(d, 1, self.head_dim, &self.norm)?, d.upload_rope(&yarn::frequencies(ROPE_DIM, 1e4, None))))
    }

    fn weight_bytes(&self) -> usize {
        self.norm.len() * 4
    }

    fn widths(&self) -> Vec<usize> {
        vec![self.heads * self.head_dim, self.head_dim, self.head_dim]
    }

    fn inputs(&self) -> usize {
        2
    }

    fn state(&self) -> StateSpec {
        StateSpec { slots: vec![StateKind::Ring { rows: self.window, width: self.head_dim, ty: StateType::F16 }] }
    }

    fn depth(&self) -> usize {
        8000
    }

    fn run<D: Timed>(
        &self,
        d: &D,
        (norm, rope): &Self::Bound<D>,
        _: usize,
        place: &mut Place<D>,
        buffers: &mut [D::Buffer],
    ) {
        let [q, kv_raw, kv] = buffers else { return };
        let p = Operands {
            head_dim: self.head_dim,
            rope_dim: ROPE_DIM,
            rope,
            kv_norm: norm,
            eps: 1e-6,
            numerics: KvNumerics::Official,
            ring_slot: RING,
        };
        d.prepare(&place.step, &p, q, kv_raw, kv, None, &[]);
    }

    fn output<D: Timed>(&self, d: &D, _: &Place<D>, buffers: &[D::Buffer], rows: Range<usize>) -> Vec<f32> {
        let (mut out, mut row) = (Vec::new(), Vec::new());
        for r in rows {
            for buffer in [&buffers[0], &buffers[2]] {
                d.read(buffer, r, &mut row);
                out.extend_from_slice(&row);
            }
        }
        out
    }

    /// Of the queries; and not more than one key-value element in 100 may have another code, none be further than that.
    fn distance(&self, got: &[f32], want: &[f32]) -> f64 {
        let (dim, q) = (self.head_dim, self.heads * self.head_dim);
        if got.len() != want.len() {
            return f64::INFINITY;
        }
        let (mut worst, mut other, mut all) = (0.0f64, 0usize, 0usize);
        for (got, want) in got.chunks(q + dim).zip(want.chunks(q + dim)) {
            worst = worst.max(apart(&got[..q], &want[..q]));
            let size = want[q..].iter().fold(0f32, |m, v| m.max(v.abs()));
            for (g, w) in got[q..].iter().zip(&want[q..]) {
                all += 1;
                other += usize::from(g != w);
                if (g - w).abs() > 0.13 * w.abs() + size / 512.0 || !g.is_finite() {
                    return f64::INFINITY;
                }
            }
        }
        if other * 100 > all { f64::INFINITY } else { worst }
    }

    fn bound(&self) -> f64 {
        3e-5
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn bytes(&self, rows: usize) -> f64 {
        (2 * rows * (self.heads + 1) * self.head_dim * 4) as f64
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn macs(&self, rows: usize) -> f64 {
        (2 * rows * (self.heads + 1) * self.head_dim) as f64
    }
}

pub(super) fn prepare<D: Timed>(b: &Bench<'_, D>) -> Result<Vec<Line>, DeviceError> {
    let mut rng = b.random();
    let (heads, head_dim, window) = (b.size(64, 4), b.size(512, 128), b.size(128, 16));
    let norm = (0..head_dim).map(|_| 1.0 + 0.2 * rng.unit()).collect();
    b.sweep(&Prepare { heads, head_dim, window, norm })
}
