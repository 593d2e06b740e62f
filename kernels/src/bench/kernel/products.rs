//! Products with matrices, alone and block-diagonal.

use ds4_manifests::GgmlType;
use ds4_os::SharedBytes;

use super::{Bench, Kernel, Line, Place, Timed, blocks, weight};
use crate::conformance;
use crate::device::DeviceError;
use crate::quant;

/// Outputs that are compared with exact arithmetic: all of a matrix would take longer than anything else.
const OUTPUTS: usize = 48;

struct Product {
    name: &'static str,
    ty: GgmlType,
    outputs: usize,
    cols: usize,
    groups: usize,
    bytes: SharedBytes,
}

impl Product {
    /// The outputs that are checked: the first ones, the last ones and some between.
    fn checked(&self) -> Vec<usize> {
        let (n, step) = (self.outputs, (self.outputs / OUTPUTS).max(1) | 1);
        let mut all: Vec<usize> = (0..n).step_by(step).chain([n - 1]).collect();
        all.dedup();
        all
    }
}

impl Kernel for Product {
    type Bound<D: Timed> = Vec<D::Weight>;

    fn what(&self) -> String {
        format!("{} {} ({} x {})", self.name, self.ty, self.outputs, self.cols)
    }

    fn bind<D: Timed>(&self, d: &D, copies: usize) -> Result<Vec<D::Weight>, DeviceError> {
        (0..copies).map(|_| weight(d, self.ty, self.outputs, self.cols, &self.bytes)).collect()
    }

    fn weight_bytes(&self) -> usize {
        self.bytes.len()
    }

    fn widths(&self) -> Vec<usize> {
        vec![self.cols * self.groups, self.outputs]
    }

    fn inputs(&self) -> usize {
        1
    }

    fn run<D: Timed>(&self, d: &D, bound: &Vec<D::Weight>, i: usize, _: &mut Place<D>, buffers: &mut [D::Buffer]) {
        let [x, out] = buffers else { return };
        let w = &bound[i % bound.len()];
        if self.groups == 1 {
            d.matmul(x, &mut [(w, out)]);
        } else {
            d.grouped_matmul(x, w, self.groups, out);
        }
    }

    /// Largest error over the conformance suite's bound for that value.
    fn exact(&self, inputs: &[Vec<f32>], got: &[f32], activation: f64) -> Option<f64> {
        let row_bytes = quant::row_bytes(self.ty, self.cols);
        let mut worst = 0.0f64;
        let mut w = vec![0.0; self.cols];
        for o in self.checked() {
            quant::dequantize_row(self.ty, &self.bytes[o * row_bytes..(o + 1) * row_bytes], &mut w);
            let group = o / (self.outputs / self.groups);
            for (x, got) in inputs[0].chunks_exact(self.cols * self.groups).zip(got.chunks_exact(self.outputs)) {
                let x = &x[group * self.cols..(group + 1) * self.cols];
                let (want, bound) = conformance::product(self.ty, &w, x, activation);
                let error = (f64::from(got[o]) - want).abs() / bound;
                worst = worst.max(if error.is_finite() { error } else { f64::INFINITY });
            }
        }
        Some(worst)
    }

    fn bound(&self) -> f64 {
        1.0
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn bytes(&self, _: usize) -> f64 {
        self.bytes.len() as f64
    }

    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    fn macs(&self, rows: usize) -> f64 {
        (self.outputs * self.cols * rows) as f64
    }
}

/// Name, type, Flash's outputs and columns, groups.
type Shape = (&'static str, GgmlType, usize, usize, usize);

fn all<D: Timed>(b: &Bench<'_, D>, shapes: &[Shape]) -> Result<Vec<Line>, DeviceError> {
    let mut lines = Vec::new();
    for &(name, ty, outputs, cols, groups) in shapes {
        lines.extend(b.sweep(&product(b, (name, ty, outputs, cols, groups)))?);
    }
    Ok(lines)
}

fn product<D: Timed>(b: &Bench<'_, D>, (name, ty, outputs, cols, groups): Shape) -> Product {
    let (outputs, cols) = (b.size(outputs, 64), b.size(cols, 512));
    Product { name, ty, outputs, cols, groups, bytes: blocks(&mut b.random(), ty, outputs * cols) }
}

pub(super) fn quantised<D: Timed>(b: &Bench<'_, D>) -> Result<Vec<Line>, DeviceError> {
    use GgmlType as T;
    all(
        b,
        &[
            ("q_b", T::Q8_0, 32_768, 1024, 1),
            ("output_b", T::Q8_0, 4096, 8192, 1),
            ("shared", T::Q8_0, 2048, 4096, 1),
            ("head", T::Q8_0, 129_280, 4096, 1),
            ("matrix", T::Q4_K, 32_768, 4096, 1),
            ("matrix", T::Q2_K, 65_536, 2048, 1),
            ("matrix", T::IQ2_XXS, 65_536, 4096, 1),
        ],
    )
}

pub(super) fn dense<D: Timed>(b: &Bench<'_, D>) -> Result<Vec<Line>, DeviceError> {
    use GgmlType as T;
    all(
        b,
        &[
            ("compressor", T::F16, 1024, 4096, 1),
            ("index q", T::F16, 8192, 1024, 1),
            ("router", T::F16, 256, 4096, 1),
            ("mixer", T::F16, 24, 16_384, 1),
            ("matrix", T::BF16, 4096, 4096, 1),
            ("matrix", T::F32, 1024, 4096, 1),
        ],
    )
}

pub(super) fn grouped<D: Timed>(b: &Bench<'_, D>) -> Result<Vec<Line>, DeviceError> {
    all(b, &[GgmlType::Q8_0, GgmlType::F16, GgmlType::BF16].map(|ty| ("output_a", ty, 8192, 4096, 8)))
}

/// What the check says of a product with one wrong output.
#[cfg(test)]
pub(super) fn exact_of_wrong<D: Timed>(b: &Bench<'_, D>) -> f64 {
    let p = product(b, ("wrong", GgmlType::Q8_0, 0, 0, 1));
    let x = b.random().activations(p.cols);
    let mut w = vec![0.0; p.cols];
    let row = quant::row_bytes(p.ty, p.cols);
    let mut got: Vec<f32> = (0..p.outputs)
        .map(|o| {
            quant::dequantize_row(p.ty, &p.bytes[o * row..(o + 1) * row], &mut w);
            w.iter().zip(&x).map(|(w, x)| w * x).sum()
        })
        .collect();
    assert!(p.exact(std::slice::from_ref(&x), &got, 1.0 / 65024.0) <= Some(1.0));
    let last = got.len() - 1;
    got[last] += 0.05 * got.iter().fold(0f32, |m, v| m.max(v.abs()));
    p.exact(&[x], &got, 1.0 / 65024.0).unwrap_or(0.0)
}
