//! Timings of kernels, for `ds4 bench` and for whoever tunes them.

pub mod kernel;

use std::time::{Duration, Instant};

use ds4_manifests::GgmlType;
use ds4_os::SharedBytes;

use crate::conformance::Random;
use crate::device::{Attention, Device, DeviceError, Rope, RopeKind, TensorSource};
use crate::plan::BatchPlan;
use crate::quant;
use crate::state::{StateKind, StateSpec, StateType};

/// What one kind of product costs.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Fastest of the repetitions.
    pub best: Duration,
    /// Median of the repetitions.
    pub median: Duration,
    /// Weight bytes read per product.
    pub bytes: usize,
    /// Multiply-adds per product.
    pub macs: u64,
}

impl Timing {
    /// Multiply-adds per second at the median, in units of 10^9.
    pub fn gmacs(&self) -> f64 {
        #[allow(clippy::cast_precision_loss, reason = "a rate")]
        let n = self.macs as f64;
        n / self.median.as_secs_f64() / 1e9
    }

    /// Weight bytes per second at the median, in units of 10^9.
    pub fn gbytes(&self) -> f64 {
        #[allow(clippy::cast_precision_loss, reason = "a rate")]
        let n = self.bytes as f64;
        n / self.median.as_secs_f64() / 1e9
    }
}

fn timings(mut run: impl FnMut(), budget: Duration) -> (Duration, Duration) {
    run();
    let (mut all, start) = (Vec::new(), Instant::now());
    while all.len() < 5 || (start.elapsed() < budget && all.len() < 10_000) {
        let t = Instant::now();
        run();
        all.push(t.elapsed());
    }
    all.sort_unstable();
    (all[0], all[all.len() / 2])
}

fn bind<D: Device>(
    device: &D,
    rng: &mut Random,
    ty: GgmlType,
    rows: usize,
    cols: usize,
) -> Result<D::Weight, DeviceError> {
    let bytes = SharedBytes::from_vec(rng.weights(ty, rows, cols));
    device.bind(&TensorSource { name: format!("bench.{ty}"), ty, cols, rows, bytes })
}

fn random_buffer<D: Device>(device: &D, rng: &mut Random, rows: usize, width: usize) -> Result<D::Buffer, DeviceError> {
    let table = bind(device, rng, GgmlType::F32, rows, width)?;
    let mut banks = [device.bank(&StateSpec::default(), rows)?];
    device.bank_commit(&mut banks[0], rows)?;
    let mut plan = BatchPlan::default();
    plan.push(0, 0, &(0..u32::try_from(rows).unwrap_or(u32::MAX)).collect::<Vec<_>>(), false);
    let mut out = device.buffer(width);
    device.embed(&device.step(&plan, &mut banks)?, &table, &mut out);
    Ok(out)
}

/// Times `x · wᵀ` for a random weight `[rows, cols]` of `ty` and `batch` activation rows. With few rows the weight stays in
/// the cache when it fits there: use a weight larger than the cache to see memory speed.
pub fn matmul<D: Device>(
    device: &D,
    ty: GgmlType,
    rows: usize,
    cols: usize,
    batch: usize,
) -> Result<Timing, DeviceError> {
    let mut rng = Random::new(1);
    let w = bind(device, &mut rng, ty, rows, cols)?;
    let x = random_buffer(device, &mut rng, batch, cols)?;
    let mut out = device.buffer(rows);
    let (best, median) = timings(|| device.matmul(&x, &mut [(&w, &mut out)]), Duration::from_millis(300));
    let macs = [rows, cols, batch].into_iter().map(|n| u64::try_from(n).unwrap_or(u64::MAX)).product();
    Ok(Timing { best, median, bytes: rows * quant::row_bytes(ty, cols), macs })
}

/// Shape of a llama-like model with random weights, for whole-step timings without a model file.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Width of the feed-forward part.
    pub ffn: usize,
    /// Vocabulary.
    pub vocab: usize,
    /// Type of the layers' matrices.
    pub ty: GgmlType,
    /// Type of the output head.
    pub head_ty: GgmlType,
}

impl Shape {
    /// SmolLM2-135M as Q4_1 with a Q8_0 head.
    pub const SMOLLM2_135M: Self = Self {
        layers: 30,
        hidden: 576,
        heads: 9,
        kv_heads: 3,
        ffn: 1536,
        vocab: 49152,
        ty: GgmlType::Q4_1,
        head_ty: GgmlType::Q8_0,
    };
}

/// Time spent per kind of operation in one step, by name, in order of first use.
pub type Profile = Vec<(&'static str, Duration)>;

/// A random model of a [`Shape`] that can be stepped.
pub struct Synthetic<D: Device> {
    shape: Shape,
    head: D::Weight,
    norm: D::Weight,
    layers: Vec<[D::Weight; 7]>,
    buffers: [D::Buffer; 10],
    banks: Vec<D::Bank>,
}

impl<D: Device> Synthetic<D> {
    /// Binds random weights and `banks` banks of `context` tokens.
    pub fn new(device: &D, shape: Shape, banks: usize, context: usize) -> Result<Self, DeviceError> {
        let mut rng = Random::new(2);
        let kv = shape.hidden / shape.heads * shape.kv_heads;
        let (h, f) = (shape.hidden, shape.ffn);
        let mut layers = Vec::new();
        for _ in 0..shape.layers {
            let mut w = |rows, cols| bind(device, &mut rng, shape.ty, rows, cols);
            layers.push([w(h, h)?, w(kv, h)?, w(kv, h)?, w(h, h)?, w(f, h)?, w(f, h)?, w(h, f)?]);
        }
        let spec = StateSpec { slots: vec![StateKind::Append { width: kv, ty: StateType::F16 }; 2 * shape.layers] };
        let banks = (0..banks)
            .map(|_| {
                let mut bank = device.bank(&spec, context)?;
                device.bank_commit(&mut bank, context)?;
                Ok(bank)
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            shape,
            head: bind(device, &mut rng, shape.head_ty, shape.vocab, h)?,
            norm: bind(device, &mut rng, GgmlType::F32, 1, h)?,
            layers,
            buffers: [h, h, h, kv, kv, h, f, f, f, shape.vocab].map(|w| device.buffer(w)),
            banks,
        })
    }

    /// Runs one step; adds the time of each kind of operation to `profile`.
    pub fn step(&mut self, d: &D, plan: &BatchPlan, profile: &mut Profile) -> Result<(), DeviceError> {
        let head_dim = self.shape.hidden / self.shape.heads;
        let rope = Rope { kind: RopeKind::Interleaved, dim: head_dim, base: 1e5 };
        let mut last = Instant::now();
        let mut lap = |name: &'static str| {
            let now = Instant::now();
            match profile.iter_mut().find(|(n, _)| *n == name) {
                Some((_, t)) => *t += now - last,
                None => profile.push((name, now - last)),
            }
            last = now;
        };
        let step = d.step(plan, &mut self.banks)?;
        let [x, h, q, k, v, a, gate, up, act, logits] = &mut self.buffers;
        d.embed(&step, &self.head, x);
        lap("embed");
        for (i, [wq, wk, wv, wo, wg, wu, wd]) in self.layers.iter().enumerate() {
            d.rms_norm(x, &self.norm, 1e-5, h);
            lap("norm");
            d.matmul(h, &mut [(wq, q), (wk, k), (wv, v)]);
            lap("qkv");
            d.rope(&step, &rope, head_dim, q);
            d.rope(&step, &rope, head_dim, k);
            lap("rope");
            d.state_write(&step, 2 * i, k);
            d.state_write(&step, 2 * i + 1, v);
            lap("state");
            let p = Attention {
                k_slot: 2 * i,
                v_slot: 2 * i + 1,
                heads: self.shape.heads,
                kv_heads: self.shape.kv_heads,
                head_dim,
                scale: 0.125,
            };
            d.attention(&step, &p, q, a);
            lap("attention");
            d.matmul(a, &mut [(wo, h)]);
            lap("o");
            d.add(x, h);
            lap("add");
            d.rms_norm(x, &self.norm, 1e-5, h);
            lap("norm");
            d.matmul(h, &mut [(wg, gate), (wu, up)]);
            lap("gate_up");
            d.swiglu(gate, up, act);
            lap("swiglu");
            d.matmul(act, &mut [(wd, h)]);
            lap("down");
            d.add(x, h);
            lap("add");
        }
        d.gather_wanted(&step, x, h);
        d.rms_norm(h, &self.norm, 1e-5, a);
        lap("norm");
        d.matmul(a, &mut [(&self.head, logits)]);
        lap("head");
        Ok(())
    }
}
