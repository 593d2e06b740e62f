//! Compressors: windows of tokens pooled into rows.

use std::ops::Range;

use super::sparse::{ROPE_DIM, ROWS, of_position};
use super::{Bench, Kernel, Line, Place, Timed, apart, floats};
use crate::device::DeviceError;
use crate::math::yarn;
use crate::ops::{Compressor, KvNumerics};
use crate::state::{StateKind, StateSpec, StateType};

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
