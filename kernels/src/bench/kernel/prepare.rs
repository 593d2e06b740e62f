//! What queries and key-value rows go through before an attention.

use std::ops::Range;

use super::sparse::{RING, ROPE_DIM};
use super::{Bench, Kernel, Line, Place, Timed, apart, floats};
use crate::device::DeviceError;
use crate::math::yarn;
use crate::ops::{KvNumerics, Operands};
use crate::state::{StateKind, StateSpec, StateType};

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
