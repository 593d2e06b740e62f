//! What lies between sublayers: hyper-connections with their norms, and the experts' small kernels.

use ds4_kernels::CpuDevice;
use ds4_kernels::conformance::Random;
use ds4_kernels::ops::{Experts, HyperParams, HyperWeights, RouterParams, SharedExpert};
use ds4_manifests::GgmlType;
use serde_json::{Value, json};

use crate::{Full, apart, bind, download, upload};

/// What lies between sublayers, at widths whose rows are split where they are made: two sublayers of four streams, the second one with
/// experts, then a head. Against the CPU's, within the bound of `experts`; the first rows' bits must not depend on the batch.
pub fn check<D: Full>(d: &D, hidden: usize) -> Value {
    const T: GgmlType = GgmlType::Q8_0;
    let mut rng = Random::new(Random::fresh_seed());
    let (count, ff, n) = (48, 512, 4);
    #[rustfmt::skip]
    let shapes = [
        (GgmlType::F16, 24, n * hidden), (GgmlType::F16, 24, n * hidden), (GgmlType::F16, n, n * hidden),
        (T, hidden, hidden), (T, ff, hidden), (T, ff, hidden), (T, hidden, ff),
        (GgmlType::IQ2_XXS, count * ff, hidden), (GgmlType::IQ2_XXS, count * ff, hidden), (GgmlType::Q2_K, count * hidden, ff),
    ];
    let size = 4.0 / (hidden as f32).sqrt();
    let mut bytes: Vec<Vec<u8>> = Vec::new();
    for (ty, rows, cols) in shapes {
        bytes.push(match ty {
            GgmlType::F16 => {
                (0..rows * cols).flat_map(|_| half::f16::from_f32(rng.unit() * size).to_le_bytes()).collect()
            }
            _ => rng.weights(ty, rows, cols),
        });
    }
    let floats: Vec<Vec<f32>> = [3, 24, 3, 24, 1, n, hidden, hidden]
        .map(|len| (0..len).map(|_| 1.0 + 0.5 * rng.unit()).collect())
        .into_iter()
        .collect();
    let rows = 300;
    let (x, logits) = (rng.activations(rows * hidden), rng.activations(rows * count));
    type Shapes = [(GgmlType, usize, usize); 10];
    fn one<D: Full>(
        d: &D,
        shapes: &Shapes,
        bytes: &[Vec<u8>],
        floats: &[Vec<f32>],
        x: &[f32],
        logits: &[f32],
    ) -> [Vec<f32>; 2] {
        let (hidden, n, rows) = (shapes[3].1, shapes[2].1, logits.len() / 48);
        let mut w: Vec<_> =
            shapes.iter().zip(bytes).map(|((ty, rows, cols), b)| bind(d, *ty, *rows, *cols, b)).collect();
        let mut f: Vec<_> = floats
            .iter()
            .map(|v| {
                let bytes: Vec<u8> = v.iter().flat_map(|v| v.to_le_bytes()).collect();
                bind(d, GgmlType::F32, 1, v.len(), &bytes)
            })
            .collect();
        let experts = {
            let down = w.pop().unwrap();
            let up = w.pop().unwrap();
            Experts { gate: w.pop().unwrap(), up, down, count: 48 }
        };
        let norms = f.split_off(6);
        let matrices = w.split_off(3);
        let mut f = f.into_iter();
        let mixers: Vec<_> = w
            .into_iter()
            .map(|mixer| HyperWeights { mixer, scale: f.next().unwrap(), base: f.next().unwrap() })
            .collect();
        let p = HyperParams { streams: n, iterations: 20, eps: 1e-6, rms_eps: 1e-6 };
        let new = |width| d.buffer(width);
        let (mut state, mut mix, mut room, mut normed) =
            (new(n * hidden), new(2 * n + n * n), new(hidden), new(hidden));
        let (mut y, mut gate, mut up, mut act, mut out) = (new(hidden), new(512), new(512), new(512), new(hidden));
        d.hyper_start(n, &upload(d, hidden, x), &mut state);
        d.hyper_pre_norm(&p, &mixers[0], &state, (&norms[0], 1e-6), &mut mix, &mut room, &mut normed);
        d.matmul(&normed, &mut [(&matrices[0], &mut y)]);
        d.hyper_post_toward(&p, &mix, &y, &mut state, Some(&mixers[1]));
        d.hyper_pre_norm(&p, &mixers[1], &state, (&norms[1], 1e-6), &mut mix, &mut room, &mut normed);
        d.matmul(&normed, &mut [(&matrices[1], &mut gate), (&matrices[2], &mut up)]);
        let mut routing = D::Routing::default();
        let router = RouterParams { used: 6, scale: 1.5, floor: 1e-5 };
        d.route_learned(&router, &upload(d, 48, logits), None, &mut routing);
        let shared = SharedExpert { gate: &gate, up: &up, down: &matrices[3], act: &mut act, out: &mut out };
        d.ffn_terms(&experts, &routing, 10.0, &normed, shared, &mut y);
        d.hyper_post_terms(&p, &mix, (&mut y, &out), &mut state, Some(&mixers[0]));
        // Another mixer than the one that was announced.
        d.hyper_head_norm(&p, &mixers[2], &state, (&norms[0], 1e-6), &mut room, &mut normed);
        [download(d, &state, rows), download(d, &normed, rows)]
    }
    let run = |rows: usize| one(d, &shapes, &bytes, &floats, &x[..rows * hidden], &logits[..rows * count]);
    let whole = run(rows);
    for few in [1, 3, 16, 17, 40, 70] {
        for (got, whole) in run(few).iter().zip(&whole) {
            assert!(got[..] == whole[..got.len()], "{few} rows have other bits than in {rows}");
        }
    }
    let checked = 40;
    let want = one(&CpuDevice::default(), &shapes, &bytes, &floats, &x[..checked * hidden], &logits[..checked * count]);
    let [state, head] = [0, 1].map(|i| apart(&whole[i][..want[i].len()], &want[i]));
    assert!(state < 1e-2 && head < 1e-2, "state {state:e}, head {head:e}");
    json!({"hidden": hidden, "state_over_rms": state, "head_over_rms": head, "bound": 1e-2})
}
