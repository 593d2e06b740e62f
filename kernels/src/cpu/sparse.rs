//! Sparse attention on the CPU: rotary tails, rounding, the indexer's selection, and attention over window and history.
//!
//! A few consecutive queries of a sequence are one unit of work (a *tile*): what they see overlaps, so its rows are widened to
//! f32 once for all of them. Each query then has a list of its own rows in a fixed order (window rows by position, then
//! compressed rows by index), so its result does not depend on how its prompt was cut.

#![allow(unsafe_code, reason = "units write disjoint parts of shared outputs")]

use std::cell::RefCell;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use crate::cpu::attend::attend;
use crate::cpu::attention::SpanView;
use crate::cpu::bank::BankView;
use crate::cpu::index_fp4::Query;
use crate::cpu::lanes::N;
use crate::cpu::matmul;
use crate::cpu::raw::RawRows;
use crate::cpu::{CpuBuffer, CpuDevice, CpuStep, CpuWeight, compress, elementwise, indexer, state_rows};
use crate::device::Device;
use crate::math::lowp;
use crate::ops::{Compressor, Indexer, KvNumerics, SparseAttention, SparseOps};

/// Queries per tile: the rows of a window of 128 are then widened for 17 instead of 128 positions' worth each.
const TILE: usize = 8;

/// Per row: `None` for all visible rows, or the selected ones in ascending order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CpuSelection {
    /// One entry per row of the step.
    pub rows: Vec<Option<Vec<usize>>>,
}

/// Consecutive queries of one span.
#[derive(Clone, Copy)]
struct Tile<'a> {
    span: &'a SpanView,
    /// First query, counted within the span.
    first: usize,
    rows: usize,
}

impl Tile<'_> {
    fn row(&self, i: usize) -> usize {
        self.span.first_row + self.first + i
    }

    fn pos(&self, i: usize) -> usize {
        self.span.first_pos + self.first + i
    }
}

fn tiles(step: &CpuStep) -> Vec<Tile<'_>> {
    let of = |span: &SpanView| (0..span.rows).step_by(TILE);
    step.spans
        .iter()
        .flat_map(|span| of(span).map(move |first| Tile { span, first, rows: TILE.min(span.rows - first) }))
        .collect()
}

#[derive(Default)]
struct Scratch {
    /// Window rows of the tile, then the compressed rows that any of its queries sees.
    keys: Vec<f32>,
    /// Where each compressed row lies among `keys`, or `ABSENT`.
    place: Vec<u32>,
    index: Vec<u32>,
    scores: Vec<[f32; N]>,
    part: Vec<[f32; N]>,
    indexer: indexer::Scratch,
    queries: Vec<Query>,
    totals: Vec<f32>,
}

const ABSENT: u32 = u32::MAX;

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

fn narrow(n: usize) -> u32 {
    u32::try_from(n).expect("fewer than 2^32 rows")
}

impl Scratch {
    /// Appends a row to the `n` that `keys` holds and returns its place.
    fn append(&mut self, n: &mut usize, dim: usize, fill: impl FnOnce(&mut [f32])) -> u32 {
        let at = *n * dim;
        if self.keys.len() < at + dim {
            self.keys.resize(at + 64 * dim, 0.0);
        }
        fill(&mut self.keys[at..at + dim]);
        *n += 1;
        narrow(*n - 1)
    }

    /// Widens everything that the tile's queries see; window rows come first, from the first query's first one on.
    fn gather(
        &mut self,
        device: &CpuDevice,
        p: &SparseAttention,
        bank: &BankView,
        tile: &Tile<'_>,
        kv: &CpuBuffer,
        selection: Option<&CpuSelection>,
    ) {
        let (isa, span) = (device.isa(), tile.span);
        let mut n = 0;
        for t in (tile.pos(0) + 1).saturating_sub(p.window)..=tile.pos(tile.rows - 1) {
            self.append(&mut n, p.head_dim, |row| {
                if t < span.first_pos {
                    state_rows::read(isa, bank, p.ring_slot, t, row);
                } else {
                    row.copy_from_slice(kv.row(span.first_row + t - span.first_pos));
                }
            });
        }
        let Some((slot, ratio)) = p.compressed else { return };
        self.place.clear();
        self.place.resize((tile.pos(tile.rows - 1) + 1) / ratio, ABSENT);
        for i in 0..tile.rows {
            let picked = selection.and_then(|s| s.rows[tile.row(i)].as_deref());
            let count = picked.map_or((tile.pos(i) + 1) / ratio, <[usize]>::len);
            for k in 0..count {
                let k = picked.map_or(k, |s| s[k]);
                if self.place[k] == ABSENT {
                    self.place[k] = self.append(&mut n, p.head_dim, |row| state_rows::read(isa, bank, slot, k, row));
                }
            }
        }
    }

    /// The list of query `i`.
    fn list(&mut self, p: &SparseAttention, tile: &Tile<'_>, i: usize, selection: Option<&CpuSelection>) {
        let first = |i: usize| (tile.pos(i) + 1).saturating_sub(p.window);
        let start = first(i) - first(0);
        self.index.clear();
        self.index.extend((start..=start + tile.pos(i) - first(i)).map(narrow));
        let Some((_, ratio)) = p.compressed else { return };
        match selection.and_then(|s| s.rows[tile.row(i)].as_deref()) {
            Some(picked) => self.index.extend(picked.iter().map(|k| self.place[*k])),
            None => self.index.extend_from_slice(&self.place[..(tile.pos(i) + 1) / ratio]),
        }
    }
}

impl CpuDevice {
    /// Rotates the trailing pairs of one head.
    pub(crate) fn rotate_tail(
        &self,
        frequencies: &[f64],
        pos: usize,
        head_dim: usize,
        inverse: bool,
        head: &mut [f32],
    ) {
        let dim = 2 * frequencies.len();
        let (pairs, _) = head[head_dim - dim..].as_chunks_mut::<2>();
        for (x, f) in pairs.iter_mut().zip(frequencies) {
            #[allow(clippy::cast_precision_loss, reason = "positions are far below 2^52")]
            let (sin, cos) = (pos as f64 * f).sin_cos();
            #[allow(clippy::cast_possible_truncation, reason = "rounded to the activations' precision")]
            let (sin, cos) = (if inverse { -sin } else { sin } as f32, cos as f32);
            *x = [x[0] * cos - x[1] * sin, x[0] * sin + x[1] * cos];
        }
    }
}

impl SparseOps for CpuDevice {
    type RopeTable = Vec<f64>;
    type Selection = CpuSelection;

    fn upload_rope(&self, frequencies: &[f64]) -> Vec<f64> {
        frequencies.to_vec()
    }

    fn lend_rows(&self, x: &CpuBuffer, rows: Range<usize>, out: &mut CpuBuffer) {
        assert_eq!(x.width(), out.width(), "rows of another width");
        out.resize(rows.len());
        out.data_mut().copy_from_slice(&x.data()[rows.start * x.width()..rows.end * x.width()]);
    }

    fn matmul_rows(&self, x: &CpuBuffer, w: &CpuWeight, first: usize, rows: usize, out: &mut CpuBuffer) {
        if x.rows() == rows {
            return self.matmul(x, &mut [(w, out)]);
        }
        let width = out.width();
        let mut part = self.buffer(width);
        self.matmul(x, &mut [(w, &mut part)]);
        if first == 0 {
            out.resize(rows);
        }
        out.data_mut()[first * width..][..part.data().len()].copy_from_slice(part.data());
    }

    fn head_rms(&self, x: &mut CpuBuffer, head_dim: usize, eps: f32) {
        assert!(x.width().is_multiple_of(head_dim), "whole heads");
        let isa = self.isa();
        self.for_rows(x, |_, row| {
            for head in row.chunks_exact_mut(head_dim) {
                let scale = elementwise::inverse_rms(isa, head, eps);
                head.iter_mut().for_each(|v| *v *= scale);
            }
        });
    }

    fn rope_tail(&self, step: &CpuStep, table: &Vec<f64>, head_dim: usize, inverse: bool, x: &mut CpuBuffer) {
        assert_eq!(x.rows(), step.positions().len(), "rows of another step");
        assert!(x.width().is_multiple_of(head_dim) && 2 * table.len() <= head_dim, "rotary shape");
        let dim = 2 * table.len();
        self.for_rows(x, |r, row| {
            // Sines once per row, not per head.
            #[allow(clippy::cast_precision_loss, reason = "positions are far below 2^52")]
            let pos = step.positions()[r] as f64;
            let turns: Vec<[f32; 2]> = table
                .iter()
                .map(|f| {
                    let (sin, cos) = (pos * f).sin_cos();
                    #[allow(clippy::cast_possible_truncation, reason = "rounded to the activations' precision")]
                    [if inverse { -sin } else { sin } as f32, cos as f32]
                })
                .collect();
            for head in row.chunks_exact_mut(head_dim) {
                for (x, [sin, cos]) in head[head_dim - dim..].as_chunks_mut::<2>().0.iter_mut().zip(&turns) {
                    *x = [x[0] * cos - x[1] * sin, x[0] * sin + x[1] * cos];
                }
            }
        });
    }

    fn round_kv(&self, numerics: KvNumerics, rope_dim: usize, x: &mut CpuBuffer) {
        if numerics == KvNumerics::Official {
            self.for_rows(x, |_, row| {
                let nope = row.len() - rope_dim;
                lowp::fp8_round_trip(&mut row[..nope]);
                lowp::f16_round_trip(row);
            });
        }
    }

    fn round_index(&self, numerics: KvNumerics, head_dim: usize, x: &mut CpuBuffer) {
        if numerics == KvNumerics::Official {
            self.for_rows(x, |_, row| {
                for head in row.chunks_exact_mut(head_dim) {
                    lowp::hadamard(head);
                    lowp::fp4_round_trip(head);
                }
            });
        }
    }

    fn compress(&self, step: &CpuStep, c: &Compressor<'_, Self>, values: &CpuBuffer, scores: &CpuBuffer) {
        compress::compress(self, step, c, values, scores);
    }

    fn index_select(&self, step: &CpuStep, p: &Indexer, q: &CpuBuffer, w: &CpuBuffer, out: &mut CpuSelection) {
        assert!(q.width() == p.heads * p.head_dim && w.width() == p.heads, "indexer shape");
        out.rows.clear();
        out.rows.resize(q.rows(), None);
        let visible = |pos: usize| (pos + 1) / p.ratio;
        let mut tiles = tiles(step);
        tiles.retain(|t| visible(t.pos(t.rows - 1)) > p.top_k);
        let results = Mutex::new(&mut out.rows);
        let pick = |tile: &Tile<'_>, totals: &[f32], width: usize| {
            for (i, scores) in totals.chunks_exact(width).enumerate().take(tile.rows) {
                let seen = visible(tile.pos(i));
                if seen > p.top_k {
                    let rows = indexer::top_rows(&scores[..seen], p.top_k);
                    results.lock().unwrap_or_else(PoisonError::into_inner)[tile.row(i)] = Some(rows);
                }
            }
        };
        // Enough tiles: each is one unit. Few of them (decode): the rows that they see are divided among the threads.
        let whole = tiles.len() >= self.pool.threads();
        let bank = |tile: &Tile<'_>| &step.banks[tile.span.bank];
        let queries = |tile: &Tile<'_>| tile.row(0)..tile.row(tile.rows);
        let score = |tile: &Tile<'_>,
                     panels: Range<usize>,
                     prepared: &[Query],
                     s: &mut indexer::Scratch,
                     target: &RawRows<'_>| {
            let seen = visible(tile.pos(tile.rows - 1));
            // SAFETY: each panel of each tile is scored once.
            unsafe {
                indexer::scores(self.isa, p, bank(tile), panels, seen, (q, w), queries(tile), prepared, s, target)
            };
        };
        let panels = |tile: &Tile<'_>| visible(tile.pos(tile.rows - 1)).div_ceil(N);
        if whole {
            self.pool.run(tiles.len(), 1, &|range| {
                SCRATCH.with_borrow_mut(|s| {
                    for tile in &tiles[range] {
                        let n = panels(tile);
                        let mut totals = std::mem::take(&mut s.totals);
                        totals.resize(tile.rows * n * N, 0.0);
                        indexer::prepare(self.isa, p, bank(tile), q, queries(tile), &mut s.queries);
                        let target = RawRows::new(&mut totals, n * N);
                        score(tile, 0..n, &s.queries, &mut s.indexer, &target);
                        pick(tile, &totals, n * N);
                        s.totals = totals;
                    }
                });
            });
            return;
        }
        for tile in &tiles {
            let n = panels(tile);
            let mut totals = vec![0.0; tile.rows * n * N];
            let target = RawRows::new(&mut totals, n * N);
            let mut prepared = Vec::new();
            indexer::prepare(self.isa, p, bank(tile), q, queries(tile), &mut prepared);
            self.pool.run(n, 8, &|range| {
                SCRATCH.with_borrow_mut(|s| score(tile, range, &prepared, &mut s.indexer, &target));
            });
            pick(tile, &totals, n * N);
        }
    }

    fn sparse_attention(
        &self,
        step: &CpuStep,
        p: &SparseAttention,
        sinks: &CpuWeight,
        q: &CpuBuffer,
        kv: &CpuBuffer,
        selection: Option<&CpuSelection>,
        out: &mut CpuBuffer,
    ) {
        assert!(
            q.width() == p.heads * p.head_dim && out.width() == q.width() && kv.width() == p.head_dim,
            "attention shape"
        );
        assert!(step.distinct_banks(), "two spans of one bank in a step of a model with a sliding window");
        out.resize(q.rows());
        let tiles = tiles(step);
        // Decode of a few sequences divides the heads too, at the price of widening the rows once per part.
        let blocks = self.pool.threads().div_ceil(tiles.len().max(1)).min(p.heads.div_ceil(4));
        let per_block = p.heads.div_ceil(blocks);
        let raw = RawRows::new(out.data_mut(), p.heads * p.head_dim);
        self.pool.run(tiles.len() * blocks, 1, &|range| {
            SCRATCH.with_borrow_mut(|s| {
                for unit in range {
                    let (tile, block) = (&tiles[unit / blocks], unit % blocks);
                    let heads = block * per_block..p.heads.min((block + 1) * per_block);
                    if heads.is_empty() {
                        continue;
                    }
                    s.gather(self, p, &step.banks[tile.span.bank], tile, kv, selection);
                    let (at, len) = (heads.start * p.head_dim, heads.len() * p.head_dim);
                    for i in 0..tile.rows {
                        s.list(p, tile, i, selection);
                        let row = tile.row(i);
                        let q = &q.row(row)[at..at + len];
                        // SAFETY: this unit alone has these heads of this row.
                        let out = unsafe { raw.part(row, at, len) };
                        let sinks = &sinks.vector()[heads.clone()];
                        let Scratch { keys, index, scores, part, .. } = s;
                        attend(self.isa, q, keys, p.head_dim, index, p.scale, sinks, scores, part, out);
                    }
                }
            });
        });
    }

    fn grouped_matmul(&self, x: &CpuBuffer, w: &CpuWeight, groups: usize, out: &mut CpuBuffer) {
        matmul::grouped(self, x, w, groups, out);
    }
}
