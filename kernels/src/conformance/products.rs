//! Products against exact arithmetic, in batches and groups of every kind.

use ds4_manifests::GgmlType;

use super::Suite;
use crate::device::Device;
use crate::quant;

/// The exact product of a row of weights of type `ty` with activations, and how far a device may be from it: half a step of its activation
/// format for each weight, and roundings of f32.
pub(crate) fn product(ty: GgmlType, w: &[f32], x: &[f32], activation: f64) -> (f64, f64) {
    let float = matches!(ty, GgmlType::F32 | GgmlType::F16 | GgmlType::BF16);
    let activation = if float { 0.0 } else { activation };
    let widest = f64::from(w.iter().fold(0f32, |m, v| m.max(v.abs())));
    let (mut want, mut bound) = (0.0, 1e-30);
    for (w, x) in w.chunks(32).zip(x.chunks(32)) {
        let step = f64::from(x.iter().fold(0f32, |m, v| m.max(v.abs()))) * activation;
        for (w, x) in w.iter().zip(x) {
            let (w, x) = (f64::from(*w), f64::from(*x));
            want += w * x;
            bound += w.abs() * step + (w.abs() + 2.0 * widest) * x.abs() / 524_288.0;
        }
    }
    (want, bound)
}

impl<D: Device> Suite<'_, D> {
    /// Bound: every activation off by half a step of its block, plus 2^-19 of the sum of magnitudes (of weights counted
    /// with their minimum) for rounding in any order of summation.
    pub(super) fn matmul(&self, ty: GgmlType) {
        let mut rng = self.random(4);
        for (outputs, cols, rows) in [(1, 256, 1), (40, 512, 1), (23, 768, 5), (64, 256, 37)] {
            let (bytes, x) = (rng.weights(ty, outputs, cols), rng.activations(rows * cols));
            let more = rng.weights(GgmlType::Q8_0, 3, cols);
            let (w, w2) = (self.weight(ty, outputs, cols, &bytes), self.weight(GgmlType::Q8_0, 3, cols, &more));
            let (mut out, mut out2) = (self.device.buffer(outputs), self.device.buffer(3));
            let buffer = self.upload(cols, &x);
            self.device.matmul(&buffer, &mut [(&w, &mut out), (&w2, &mut out2)]);
            self.product(ty, &bytes, cols, &x, &self.download(&out, rows));
            self.product(GgmlType::Q8_0, &more, cols, &x, &self.download(&out2, rows));
        }
    }

    /// A row's products have the same bits in batches of every size, wherever the row is in them: devices have other kernels for many rows
    /// than for few.
    pub(super) fn batches(&self, ty: GgmlType, outputs: &[usize], cols: usize, rows: usize) {
        let mut rng = self.random(11);
        let x = rng.activations(rows * cols);
        let weights: Vec<_> = outputs.iter().map(|n| self.weight(ty, *n, cols, &rng.weights(ty, *n, cols))).collect();
        let run = |x: &[f32]| -> Vec<Vec<f32>> {
            let mut out: Vec<_> = outputs.iter().map(|n| self.device.buffer(*n)).collect();
            self.device.matmul(&self.upload(cols, x), &mut weights.iter().zip(&mut out).collect::<Vec<_>>());
            out.iter().map(|o| self.download(o, x.len() / cols)).collect()
        };
        let all = run(&x);
        for n in [1, 2, 4, 5, 8, 9, 16, 17, 33, 64, 140] {
            let first = rng.below(rows - n + 1);
            let some = run(&x[first * cols..(first + n) * cols]);
            for ((some, all), width) in some.iter().zip(&all).zip(outputs) {
                let same = some.iter().zip(&all[first * width..]).all(|(a, b)| a.to_bits() == b.to_bits());
                let seed = self.seed;
                assert!(same, "{ty}, {width} outputs: other bits in a batch of {n} than of {rows} (DS4_SEED={seed})");
            }
        }
    }

    /// Rows of one value: the product of two numbers. In sums of many, activations that lack their last bits are not seen.
    pub(super) fn lone_values(&self, ty: GgmlType) {
        let mut rng = self.random(13);
        let (outputs, cols) = (700, 520);
        let bytes = rng.weights(ty, outputs, cols);
        let w = self.weight(ty, outputs, cols, &bytes);
        let mut floats = vec![0.0; outputs * cols];
        quant::dequantize_row(ty, &bytes, &mut floats);
        for rows in [1, 3, 20, 140] {
            let values = rng.activations(rows);
            let columns: Vec<usize> = (0..rows).map(|_| rng.below(cols)).collect();
            let mut x = vec![0.0; rows * cols];
            for (row, (value, column)) in x.chunks_exact_mut(cols).zip(values.iter().zip(&columns)) {
                row[*column] = *value;
            }
            let mut out = self.device.buffer(outputs);
            self.device.matmul(&self.upload(cols, &x), &mut [(&w, &mut out)]);
            for (r, got) in self.download(&out, rows).chunks_exact(outputs).enumerate() {
                for (o, got) in got.iter().enumerate() {
                    let want = f64::from(values[r]) * f64::from(floats[o * cols + columns[r]]);
                    self.close(
                        &format!("{ty} row {r} of {rows}, output {o}"),
                        *got,
                        want,
                        want.abs() / 1_048_576.0 + 1e-30,
                    );
                }
            }
        }
    }

    /// A device may keep what it made of a buffer for products beside it; a product must see what was written last.
    pub(super) fn changed(&self) {
        let mut rng = self.random(9);
        let (rows, cols, outputs, ty) = (5, 512, 32, GgmlType::Q8_0);
        let bytes = rng.weights(ty, outputs, cols);
        let (w, norm) = (self.weight(ty, outputs, cols, &bytes), self.floats(1, cols, &rng.activations(cols)));
        let (x, y) = (rng.activations(rows * cols), rng.activations(rows * cols));
        let (x, y) = (self.upload(cols, &x), self.upload(cols, &y));
        let (mut normed, mut out) = (self.device.buffer(cols), self.device.buffer(outputs));
        let check = |normed: &D::Buffer, out: &mut D::Buffer| {
            self.device.matmul(normed, &mut [(&w, &mut *out)]);
            self.product(ty, &bytes, cols, &self.download(normed, rows), &self.download(out, rows));
        };
        self.device.rms_norm(&x, &norm, 1e-5, &mut normed);
        check(&normed, &mut out);
        self.device.add(&mut normed, &y);
        check(&normed, &mut out);
        self.device.rms_norm(&y, &norm, 1e-5, &mut normed);
        check(&normed, &mut out);
        self.device.swiglu(&x, &y, &mut normed);
        check(&normed, &mut out);
    }

    /// Weights of all kinds that share their inputs, more of them than any launch takes: as exact as alone, and with the same bits.
    pub(super) fn groups(&self) {
        let mut rng = self.random(12);
        let types = [GgmlType::F16, GgmlType::Q8_0, GgmlType::BF16, GgmlType::F32, GgmlType::Q2_K];
        let shapes: Vec<_> = (0..24).map(|i| (types[[0, 1, 0, 2, 0, 3, 0, 4][i % 8]], 16 * (1 + i % 5))).collect();
        for (cols, rows) in [(512, 1), (1024, 3), (512, 6), (256, 50)] {
            let x = rng.activations(rows * cols);
            let bytes: Vec<_> = shapes.iter().map(|(ty, n)| rng.weights(*ty, *n, cols)).collect();
            let weights: Vec<_> = shapes.iter().zip(&bytes).map(|((ty, n), b)| self.weight(*ty, *n, cols, b)).collect();
            let buffer = self.upload(cols, &x);
            let mut out: Vec<_> = shapes.iter().map(|(_, n)| self.device.buffer(*n)).collect();
            self.device.matmul(&buffer, &mut weights.iter().zip(&mut out).collect::<Vec<_>>());
            for (i, (ty, n)) in shapes.iter().enumerate() {
                let got = self.download(&out[i], rows);
                self.product(*ty, &bytes[i], cols, &x, &got);
                let mut alone = self.device.buffer(*n);
                self.device.matmul(&buffer, &mut [(&weights[i], &mut alone)]);
                let same = got.iter().zip(self.download(&alone, rows)).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{ty}, {n} outputs, {rows} rows: other bits in a group (DS4_SEED={})", self.seed);
            }
        }
    }

    pub(super) fn product(&self, ty: GgmlType, bytes: &[u8], cols: usize, x: &[f32], got: &[f32]) {
        let row_bytes = quant::row_bytes(ty, cols);
        let outputs = bytes.len() / row_bytes;
        for (o, row) in bytes.chunks_exact(row_bytes).enumerate() {
            let mut w = vec![0.0; cols];
            quant::dequantize_row(ty, row, &mut w);
            for (r, x) in x.chunks_exact(cols).enumerate() {
                let (want, bound) = product(ty, &w, x, self.bounds.activation);
                self.close(&format!("matmul {ty} row {r} output {o}"), got[r * outputs + o], want, bound);
            }
        }
    }
}
