//! Experts and products against the CPU's, and their rows alone against rows in batches.

use ds4_kernels::conformance::Random;
use ds4_kernels::ops::{Experts, MoeOps, RouterParams, SparseOps};
use ds4_kernels::{CpuDevice, Device};
use ds4_manifests::GgmlType;
use serde_json::{Value, json};

use crate::{Full, apart, bind, download, upload};

/// Experts, routing included, and grouped products in the types of large models, against the CPU's: other code with the same definition.
/// Both round activations to 16 bits, the CPU per 32 and others per 256 with outliers 30 times the rest, which is 1.4e-4 of a product on
/// average; the largest of 300,000 after three products and a gate is some 20 times that. A wrong rule is off by 1.
pub(crate) fn experts<D: Full>(d: &D, gate: GgmlType, down: GgmlType) -> Value {
    let mut rng = Random::new(Random::fresh_seed());
    let cpu = CpuDevice::default();
    let (count, hidden, ff, used) = (16, 1024, 512, 3);
    let mut worst = 0.0f64;
    let bytes = [(gate, count * ff, hidden), (gate, count * ff, hidden), (down, count * hidden, ff)];
    let bytes = bytes.map(|(ty, rows, cols)| rng.weights(ty, rows, cols));
    fn all<D: Device>(
        d: &D,
        b: &[Vec<u8>; 3],
        (gate, down, count, hidden, ff): (GgmlType, GgmlType, usize, usize, usize),
    ) -> Experts<D::Weight> {
        Experts {
            gate: bind(d, gate, count * ff, hidden, &b[0]),
            up: bind(d, gate, count * ff, hidden, &b[1]),
            down: bind(d, down, count * hidden, ff, &b[2]),
            count,
        }
    }
    let shape = (gate, down, count, hidden, ff);
    let (here, there) = (all(&cpu, &bytes, shape), all(d, &bytes, shape));
    let p = RouterParams { used, scale: 1.5, floor: 1e-5 };
    let mut first = Vec::new();
    for rows in [1, 3, 40, 300] {
        let mut x = rng.activations(rows * hidden);
        let mut logits = rng.activations(rows * count);
        if rows == 1 {
            first = [x.clone(), logits.clone()].concat();
        } else {
            // Row 1 is always the same: it must have the same bits in every batch.
            x[hidden..2 * hidden].copy_from_slice(&first[..hidden]);
            logits[count..2 * count].copy_from_slice(&first[hidden..hidden + count]);
        }
        fn one<D: MoeOps>(
            d: &D,
            e: &Experts<D::Weight>,
            p: &RouterParams,
            x: &[f32],
            logits: &[f32],
            rows: usize,
        ) -> Vec<f32> {
            let mut routing = D::Routing::default();
            let (hidden, count) = (x.len() / rows, e.count);
            d.route_learned(p, &upload(d, count, logits), None, &mut routing);
            let mut out = d.buffer(hidden);
            d.expert_ffn(e, &routing, 10.0, &upload(d, hidden, x), &mut out);
            download(d, &out, rows)
        }
        let want = one(&cpu, &here, &p, &x, &logits, rows);
        let got = one(d, &there, &p, &x, &logits, rows);
        worst = worst.max(apart(&got, &want));
        if rows == 1 {
            first.extend_from_slice(&got);
        } else {
            assert!(got[hidden..2 * hidden] == first[hidden + count..], "{rows} rows: row 1 has other bits than alone");
        }
    }
    let grouped = rng.weights(gate, 256, 512);
    for rows in [1, 5, 33] {
        let x = rng.activations(rows * 2048);
        fn one<D: SparseOps>(d: &D, ty: GgmlType, bytes: &[u8], x: &[f32], rows: usize) -> Vec<f32> {
            let mut out = d.buffer(256);
            d.grouped_matmul(&upload(d, 2048, x), &bind(d, ty, 256, 512, bytes), 4, &mut out);
            download(d, &out, rows)
        }
        worst = worst.max(apart(&one(d, gate, &grouped, &x, rows), &one(&cpu, gate, &grouped, &x, rows)));
    }
    assert!(worst < 1e-2, "{worst:e}");
    json!({"worst_over_rms": worst, "bound": 1e-2})
}

/// Products of many rows have the bits that the same rows have alone and in small batches, whatever kernel takes them; uneven quarters of a
/// row, empty ones, and outputs that no kernel's blocks divide.
pub(crate) fn products<D: Full>(d: &D) -> Value {
    let mut rng = Random::new(Random::fresh_seed());
    let mut compared = 0;
    for ty in [GgmlType::Q8_0, GgmlType::Q2_K, GgmlType::Q4_K, GgmlType::IQ2_XXS] {
        // Of IQ2_XXS, 4,096 columns have a kernel of their own.
        let shapes = [(256, 8464), (1280, 8464), (2048, 16400), (4096, 8464)];
        let shapes = &shapes[..if ty == GgmlType::IQ2_XXS { 4 } else { 3 }];
        for (cols, outputs) in shapes.iter().copied() {
            // Two of one shape, and a small one that shares a launch with them.
            let widths = [outputs, outputs, 48];
            let w = widths.map(|n| bind(d, ty, n, cols, &rng.weights(ty, n, cols)));
            let x = rng.activations(200 * cols);
            let of = |rows: std::ops::Range<usize>| {
                let n = rows.len();
                let x = upload(d, cols, &x[rows.start * cols..rows.end * cols]);
                let mut out = widths.map(|n| d.buffer(n));
                let mut group: Vec<_> = w.iter().zip(&mut out).collect();
                d.matmul(&x, &mut group);
                out.map(|o| download(d, &o, n))
            };
            let all = of(0..200);
            assert!(all.iter().flatten().all(|v| v.is_finite()) && all.iter().all(|o| o.iter().any(|v| *v != 0.0)));
            for (from, n) in [(0, 1), (63, 3), (100, 16), (128, 64), (10, 48), (20, 47), (150, 50), (199, 1)] {
                for ((part, whole), width) in of(from..from + n).iter().zip(&all).zip(widths) {
                    let same = *part == whole[from * width..(from + n) * width];
                    assert!(same, "{ty}, {cols} columns, {width} outputs: {n} rows from {from} have other bits alone");
                    compared += part.len();
                }
            }
        }
    }
    json!({"values_equal": compared})
}
