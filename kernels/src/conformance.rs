//! The conformance suite: what every [`Device`] must compute, checked on fresh random inputs.
//!
//! Each operation is compared with a plain f64 version of its definition, within the bound stated at its check; a small
//! one-layer model is then run whole, in chunks and in mixed batches, and every row must agree bit for bit (see "row
//! invariance" in [`crate::device`]). [`run`] panics with the operation, the place and the seed; `DS4_SEED` repeats a run.

mod products;
mod random;
mod sample;

pub(crate) use products::product;
pub use random::Random;

use ds4_manifests::GgmlType;
use ds4_os::SharedBytes;

use crate::device::{Attention, Device, Rope, RopeKind, TensorSource};
use crate::plan::BatchPlan;
use crate::quant;
use crate::state::{StateKind, StateSpec, StateType};

/// How far a device may be from exact arithmetic.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Largest error of an activation as a product with quantised weights sees it, relative to the greatest magnitude in
    /// its block of 32: half a step of the activation format. 1/254 for int8, 1/65024 for the CPU's 16-bit format.
    pub activation: f64,
}

/// Runs every check on `device`.
///
/// # Panics
/// When the device breaks its contract.
pub fn run<D: Device>(device: &D, bounds: Bounds) {
    run_operations(device, bounds);
    run_invariance(device, 300);
}

/// Checks every operation alone.
///
/// # Panics
/// When one is outside its bound.
pub fn run_operations<D: Device>(device: &D, bounds: Bounds) {
    let seed = Random::fresh_seed();
    let suite = Suite { device, bounds, seed };
    suite.elementwise();
    suite.rope();
    for ty in quant::SUPPORTED {
        suite.embed(ty);
        suite.matmul(ty);
    }
    use GgmlType as T;
    for ty in [T::F32, T::F16, T::BF16, T::Q8_0, T::Q4_K, T::Q2_K, T::IQ2_XXS] {
        suite.batches(ty, &[2816, 48], 512, 150);
    }
    // Enough for the kernels with the largest tiles; columns that are not whole tiles of anything.
    for ty in [T::F16, T::BF16] {
        suite.batches(ty, &[5200, 24, 1], 264, 260);
        // Columns that are no whole loads.
        suite.batches(ty, &[600, 48], 260, 150);
        // More columns than a block has room for at once.
        suite.batches(ty, &[16], 6152, 150);
    }
    [T::F32, T::F16, T::BF16].into_iter().for_each(|ty| suite.lone_values(ty));
    suite.groups();
    suite.changed();
    suite.attention(StateType::F16);
    suite.attention(StateType::F32);
    suite.bank();
    suite.state();
    suite.summaries();
}

/// Checks row invariance with a prompt of `tokens` tokens.
///
/// # Panics
/// When a row's bits depend on its batch.
pub fn run_invariance<D: Device>(device: &D, tokens: usize) {
    let seed = Random::fresh_seed();
    Suite { device, bounds: Bounds { activation: 0.0 }, seed }.invariance(tokens);
}

struct Suite<'a, D: Device> {
    device: &'a D,
    bounds: Bounds,
    seed: u64,
}

fn tokens(n: usize) -> Vec<u32> {
    (0..u32::try_from(n).unwrap_or(u32::MAX)).collect()
}

impl<D: Device> Suite<'_, D> {
    fn random(&self, salt: u64) -> Random {
        Random::new(self.seed ^ salt.wrapping_mul(0x2545_f491_4f6c_dd1d))
    }

    fn close(&self, what: &str, got: f32, want: f64, bound: f64) {
        let error = (f64::from(got) - want).abs();
        assert!(error <= bound, "{what}: got {got}, want {want}, error {error:e} > {bound:e} (DS4_SEED={})", self.seed);
    }

    fn weight(&self, ty: GgmlType, rows: usize, cols: usize, bytes: &[u8]) -> D::Weight {
        let source =
            TensorSource { name: format!("test.{ty}"), ty, cols, rows, bytes: SharedBytes::from_vec(bytes.to_vec()) };
        self.device.bind(&source).expect("a supported type binds")
    }

    fn floats(&self, rows: usize, cols: usize, x: &[f32]) -> D::Weight {
        let bytes: Vec<u8> = x.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.weight(GgmlType::F32, rows, cols, &bytes)
    }

    /// Uploads `x` by embedding its rows: the op set has no other way in.
    fn upload(&self, width: usize, x: &[f32]) -> D::Buffer {
        let rows = x.len() / width;
        let mut banks = [self.bank_of(&StateSpec::default(), rows)];
        let mut plan = BatchPlan::default();
        plan.push(0, 0, &tokens(rows), false);
        let step = self.device.step(&plan, &mut banks).expect("a step");
        let mut out = self.device.buffer(width);
        self.device.embed(&step, &self.floats(rows, width, x), &mut out);
        out
    }

    fn download(&self, x: &D::Buffer, rows: usize) -> Vec<f32> {
        let (mut all, mut row) = (Vec::new(), Vec::new());
        for r in 0..rows {
            self.device.read(x, r, &mut row);
            all.extend_from_slice(&row);
        }
        all
    }

    fn bank_of(&self, spec: &StateSpec, tokens: usize) -> D::Bank {
        let mut bank = self.device.bank(spec, tokens.max(1)).expect("address space");
        self.device.bank_commit(&mut bank, tokens).expect("memory");
        bank
    }

    fn elementwise(&self) {
        let mut rng = self.random(1);
        for (rows, width) in [(1, 16), (3, 100), (33, 576)] {
            let (a, b) = (rng.activations(rows * width), rng.activations(rows * width));
            let w: Vec<f32> = rng.activations(width);
            let (mut x, y) = (self.upload(width, &a), self.upload(width, &b));
            let mut out = self.device.buffer(width);

            self.device.swiglu(&x, &y, &mut out);
            for (i, got) in self.download(&out, rows).into_iter().enumerate() {
                let (g, u) = (f64::from(a[i]), f64::from(b[i]));
                let want = g / (1.0 + (-g).exp()) * u;
                self.close("swiglu", got, want, want.abs() * 1e-6 + 1e-30);
            }

            self.device.rms_norm(&x, &self.floats(1, width, &w), 1e-5, &mut out);
            for (r, (got, row)) in self.download(&out, rows).chunks(width).zip(a.chunks(width)).enumerate() {
                #[allow(clippy::cast_precision_loss, reason = "small widths")]
                let mean = row.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>() / width as f64;
                for ((got, x), w) in got.iter().zip(row).zip(&w) {
                    let want = f64::from(*x) / (mean + 1e-5).sqrt() * f64::from(*w);
                    self.close(&format!("rms_norm row {r}"), *got, want, want.abs() * 2e-6 + 1e-30);
                }
            }

            self.device.add(&mut x, &y);
            let want: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
            assert_eq!(self.download(&x, rows), want, "add is one rounding per element (DS4_SEED={})", self.seed);

            let mut plan = BatchPlan::default();
            plan.push(0, 0, &tokens(rows), false);
            plan.wanted = (0..rows).filter(|r| r % 2 == 0).collect();
            let mut banks = [self.bank_of(&StateSpec::default(), rows)];
            let step = self.device.step(&plan, &mut banks).expect("a step");
            self.device.gather_wanted(&step, &y, &mut out);
            let want: Vec<f32> = plan.wanted.iter().flat_map(|r| b[r * width..(r + 1) * width].to_vec()).collect();
            assert_eq!(self.download(&out, plan.wanted.len()), want, "gather_wanted");
        }
    }

    fn rope(&self) {
        let mut rng = self.random(2);
        for kind in [RopeKind::Interleaved, RopeKind::Split] {
            for (head_dim, dim, base) in [(64, 64, 1e4f32), (80, 32, 1e6)] {
                let (heads, rows, first) = (3, 5, 1000 + rng.below(1000));
                let x = rng.activations(rows * heads * head_dim);
                let mut buffer = self.upload(heads * head_dim, &x);
                let mut banks = [self.bank_of(&StateSpec::default(), first + rows)];
                let mut plan = BatchPlan::default();
                plan.push(0, first, &tokens(rows), false);
                let step = self.device.step(&plan, &mut banks).expect("a step");
                self.device.rope(&step, &Rope { kind, dim, base }, head_dim, &mut buffer);
                for (i, got) in self.download(&buffer, rows).into_iter().enumerate() {
                    let (row, j) = (i / (heads * head_dim), i % head_dim);
                    if j >= dim {
                        assert_eq!(got, x[i], "rope leaves the rest of the head alone");
                        continue;
                    }
                    let (pair, other, second) = match kind {
                        RopeKind::Interleaved => (j / 2, i ^ 1, j % 2 == 1),
                        RopeKind::Split if j < dim / 2 => (j, i + dim / 2, false),
                        RopeKind::Split => (j - dim / 2, i - dim / 2, true),
                    };
                    #[allow(clippy::cast_precision_loss, reason = "small numbers")]
                    let angle = (first + row) as f64 * f64::from(base).powf(-2.0 * pair as f64 / dim as f64);
                    let (a, b) = (f64::from(x[i]), f64::from(x[other]));
                    let want = a * angle.cos() + if second { b } else { -b } * angle.sin();
                    self.close("rope", got, want, (a.abs() + b.abs()) * 3e-7);
                }
            }
        }
    }

    fn embed(&self, ty: GgmlType) {
        let mut rng = self.random(3);
        let (rows, cols) = (9, 512);
        let bytes = rng.weights(ty, rows, cols);
        let table = self.weight(ty, rows, cols, &bytes);
        let mut plan = BatchPlan::default();
        plan.push(0, 0, &[7, 0, 8, 7], false);
        let mut banks = [self.bank_of(&StateSpec::default(), 4)];
        let step = self.device.step(&plan, &mut banks).expect("a step");
        let mut out = self.device.buffer(cols);
        self.device.embed(&step, &table, &mut out);
        let row_bytes = quant::row_bytes(ty, cols);
        for (r, got) in [7, 0, 8, 7].into_iter().zip(self.download(&out, 4).chunks(cols)) {
            let mut want = vec![0.0; cols];
            quant::dequantize_row(ty, &bytes[r * row_bytes..(r + 1) * row_bytes], &mut want);
            assert_eq!(got, want, "embed {ty} (DS4_SEED={})", self.seed);
        }
    }

    /// Bound: 2e-5 of the greatest value, for rounding of scores (of order 10 here) and sums in f32.
    fn attention(&self, ty: StateType) {
        let mut rng = self.random(5);
        for (heads, kv_heads, head_dim, before, rows) in
            [(9, 3, 64, 0, 70), (9, 3, 64, 515, 1), (4, 4, 80, 250, 9), (8, 1, 24, 300, 40), (2, 1, 128, 0, 1)]
        {
            let (total, width, kv_width) = (before + rows, heads * head_dim, kv_heads * head_dim);
            let spec = StateSpec { slots: vec![StateKind::Append { width: kv_width, ty }; 2] };
            let mut banks = [self.bank_of(&spec, total)];
            let (k, v) = (rng.activations(total * kv_width), rng.activations(total * kv_width));
            let q = rng.activations(rows * width);
            for (first, n) in [(0, before), (before, rows)] {
                if n == 0 {
                    continue;
                }
                let mut plan = BatchPlan::default();
                plan.push(0, first, &tokens(n), false);
                let step = self.device.step(&plan, &mut banks).expect("a step");
                let part = first * kv_width..(first + n) * kv_width;
                self.device.state_write(&step, 0, &self.upload(kv_width, &k[part.clone()]));
                self.device.state_write(&step, 1, &self.upload(kv_width, &v[part]));
                if first == before {
                    let scale = 0.125;
                    let p = Attention { k_slot: 0, v_slot: 1, heads, kv_heads, head_dim, scale };
                    let mut out = self.device.buffer(width);
                    self.device.attention(&step, &p, &self.upload(width, &q), &mut out);
                    let got = self.download(&out, rows);
                    self.attention_reference(ty, &p, before, [&q, &k, &v], &got);
                }
            }
        }
    }

    fn attention_reference(&self, ty: StateType, p: &Attention, before: usize, qkv: [&[f32]; 3], got: &[f32]) {
        let [q, k, v] = qkv;
        let stored = |x: f32| match ty {
            StateType::F16 => f64::from(half::f16::from_f32(x).to_f32()),
            StateType::F32 => f64::from(x),
            StateType::Fp8 { .. } | StateType::Fp4 => unreachable!("dense attention has no packed rows"),
        };
        let (width, kv_width) = (p.heads * p.head_dim, p.kv_heads * p.head_dim);
        for (r, q) in q.chunks_exact(width).enumerate() {
            for (h, q) in q.chunks_exact(p.head_dim).enumerate() {
                let kv = h / (p.heads / p.kv_heads) * p.head_dim;
                let keys = before + r + 1;
                let scores: Vec<f64> = (0..keys)
                    .map(|t| {
                        let k = &k[t * kv_width + kv..][..p.head_dim];
                        q.iter().zip(k).map(|(q, k)| f64::from(*q) * stored(*k)).sum::<f64>() * f64::from(p.scale)
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for d in 0..p.head_dim {
                    let value = |t: usize| stored(v[t * kv_width + kv + d]);
                    let want = weights.iter().enumerate().map(|(t, w)| w * value(t)).sum::<f64>() / sum;
                    let what = format!("attention {ty:?} {p:?} row {r} head {h} element {d}");
                    self.close(&what, got[r * width + h * p.head_dim + d], want, 30.0 * 2e-5);
                }
            }
        }
    }

    fn bank(&self) {
        let spec = StateSpec { slots: vec![StateKind::Append { width: 64, ty: StateType::F16 }; 3] };
        let mut bank = self.device.bank(&spec, 100_000).expect("address space");
        assert_eq!(self.device.bank_committed(&bank), 0, "a new bank commits nothing");
        self.device.bank_commit(&mut bank, 50_000).expect("memory");
        assert!(self.device.bank_committed(&bank) >= 50_000 * spec.bytes_per_token());
        self.device.bank_trim(&mut bank, 0);
        assert_eq!(self.device.bank_committed(&bank), 0, "a trim gives everything back");
    }

    /// State rows out and in again bit for bit, and a rewind that leaves what a checkpoint saw.
    fn state(&self) {
        let d = self.device;
        let ty = StateType::F16;
        let spec = StateSpec {
            slots: vec![
                StateKind::Append { width: 8, ty: StateType::F32 },
                StateKind::Pooled { width: 6, ty: StateType::Fp8 { rotary: 2 }, tokens: 4 },
                StateKind::Ring { rows: 5, width: 8, ty },
                StateKind::Fixed { elems: 11 },
            ],
        };
        let export = |bank: &D::Bank, slot: usize, tokens: usize| {
            let mut out = Vec::new();
            d.bank_export(bank, slot, 0..spec.slots[slot].rows(tokens), &mut out);
            out
        };
        let all = |bank: &D::Bank, tokens| (0..spec.slots.len()).map(|s| export(bank, s, tokens)).collect::<Vec<_>>();
        let mut rng = self.random(8);
        for tokens in [1, 5, 13] {
            let mut bank = self.bank_of(&spec, 40);
            for (slot, kind) in spec.slots.iter().enumerate() {
                let len = kind.bytes(tokens).unwrap_or(0);
                let bytes: Vec<u8> = (0..len).map(|_| rng.bits().to_le_bytes()[0]).collect();
                d.bank_import(&mut bank, slot, 0..kind.rows(tokens), &bytes);
                assert!(export(&bank, slot, tokens) == bytes, "export of imported {kind:?} (DS4_SEED={})", self.seed);
            }
            let before = all(&bank, tokens);
            let checkpoint = d.bank_checkpoint(&bank, tokens).expect("memory");
            for (slot, kind) in spec.slots.iter().enumerate() {
                // Of pieces that are not in a checkpoint, a step leaves the rows before it alone.
                let from = if kind.checkpointed() { 0 } else { kind.rows(tokens) };
                let rows = kind.rows(40) - from;
                let bytes = vec![0x5a; rows * kind.ty().row_bytes(kind.width())];
                d.bank_import(&mut bank, slot, from..from + rows, &bytes);
            }
            d.bank_rewind(&mut bank, &checkpoint);
            assert!(all(&bank, tokens) == before, "rewind to {tokens} tokens (DS4_SEED={})", self.seed);
        }
        // What a step writes is what an export reads: position p of a ring in row p mod 5.
        let x: Vec<f32> = (0..13 * 8).map(|_| half::f16::from_f32(rng.unit()).to_f32()).collect();
        let buffer = self.upload(8, &x);
        let mut banks = vec![self.bank_of(&spec, 13)];
        let mut plan = BatchPlan::default();
        plan.push(0, 0, &tokens(13), false);
        let step = d.step(&plan, &mut banks).expect("step");
        d.state_write(&step, 0, &buffer);
        d.state_write(&step, 2, &buffer);
        drop(step);
        let read = |slot: usize, row: usize| {
            let ty = spec.slots[slot].ty();
            let mut bytes = Vec::new();
            d.bank_export(&banks[0], slot, row..row + 1, &mut bytes);
            let mut out = vec![0.0; 8];
            ty.decode(&bytes, &mut out);
            out
        };
        for (pos, want) in x.chunks(8).enumerate() {
            assert_eq!(read(0, pos), want, "append row {pos}");
            if pos >= 8 {
                assert_eq!(read(2, pos % 5), want, "ring row of position {pos}");
            }
        }
    }

    /// One layer with every kind of operation, as a model would run it.
    fn invariance(&self, n: usize) {
        let model = Layer::new(self, &mut self.random(6));
        let mut rng = self.random(7);
        let prompt: Vec<u32> = (0..n).map(|_| u32::try_from(rng.below(Layer::<D>::VOCAB)).unwrap_or(0)).collect();
        let whole = model.run(self, &prompt, &[n], 0);
        let check = |got: &[f32], how: &str| {
            let width = got.len() / n;
            for (r, (a, b)) in got.chunks(width).zip(whole.chunks(width)).enumerate() {
                let same = a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "row {r} differs between one prefill and {how} (DS4_SEED={})", self.seed);
            }
        };
        for size in [1, 2, 3, 7, 16, 64] {
            let chunks: Vec<usize> = (0..n).step_by(size).map(|at| size.min(n - at)).collect();
            check(&model.run(self, &prompt, &chunks, 0), &format!("chunks of {size}"));
            check(&model.run(self, &prompt, &chunks, 13), &format!("chunks of {size} in a batch with others"));
        }
        let mut chunks = Vec::new();
        while chunks.iter().sum::<usize>() < n {
            chunks.push((1 + rng.below(40)).min(n - chunks.iter().sum::<usize>()));
        }
        check(&model.run(self, &prompt, &chunks, 5), &format!("chunks {chunks:?}"));
    }
}

/// A one-layer model whose weights have different types.
struct Layer<D: Device> {
    embed: D::Weight,
    norm: D::Weight,
    q: D::Weight,
    k: D::Weight,
    v: D::Weight,
    o: D::Weight,
    gate: D::Weight,
    up: D::Weight,
    down: D::Weight,
}

impl<D: Device> Layer<D> {
    const VOCAB: usize = 50;
    const WIDTH: usize = 256;
    const HEADS: usize = 8;
    const KV_HEADS: usize = 2;
    const HEAD: usize = 32;

    fn new(s: &Suite<'_, D>, rng: &mut Random) -> Self {
        let mut weight = |ty, rows, cols| {
            let bytes = rng.weights(ty, rows, cols);
            s.weight(ty, rows, cols, &bytes)
        };
        let kv = Self::KV_HEADS * Self::HEAD;
        Self {
            embed: weight(GgmlType::Q8_0, Self::VOCAB, Self::WIDTH),
            norm: weight(GgmlType::F32, 1, Self::WIDTH),
            q: weight(GgmlType::Q4_1, Self::WIDTH, Self::WIDTH),
            k: weight(GgmlType::Q6_K, kv, Self::WIDTH),
            v: weight(GgmlType::F16, kv, Self::WIDTH),
            o: weight(GgmlType::Q4_0, Self::WIDTH, Self::WIDTH),
            gate: weight(GgmlType::Q4_K, 512, Self::WIDTH),
            up: weight(GgmlType::IQ2_XXS, 512, Self::WIDTH),
            down: weight(GgmlType::Q2_K, Self::WIDTH, 512),
        }
    }

    /// Runs `prompt` cut into `chunks`, each step together with `others` rows of another sequence; all rows' outputs.
    fn run(&self, s: &Suite<'_, D>, prompt: &[u32], chunks: &[usize], others: usize) -> Vec<f32> {
        let d = s.device;
        let kv = Self::KV_HEADS * Self::HEAD;
        let spec = StateSpec { slots: vec![StateKind::Append { width: kv, ty: StateType::F16 }; 2] };
        let mut banks = [s.bank_of(&spec, prompt.len()), s.bank_of(&spec, others * chunks.len())];
        let b = |width| d.buffer(width);
        let [mut x, mut h, mut q, mut a, mut o] = [(); 5].map(|()| b(Self::WIDTH));
        let (mut k, mut v, mut gate, mut up, mut act) = (b(kv), b(kv), b(512), b(512), b(512));
        let rope = Rope { kind: RopeKind::Interleaved, dim: Self::HEAD, base: 1e4 };
        let p = Attention {
            k_slot: 0,
            v_slot: 1,
            heads: Self::HEADS,
            kv_heads: Self::KV_HEADS,
            head_dim: Self::HEAD,
            scale: 0.177,
        };
        let (mut at, mut all) = (0, Vec::new());
        for (i, n) in chunks.iter().enumerate() {
            let mut plan = BatchPlan::default();
            if others > 0 {
                plan.push(1, i * others, &vec![7; others], false);
            }
            let first = plan.rows();
            plan.push(0, at, &prompt[at..at + n], false);
            at += n;
            let step = d.step(&plan, &mut banks).expect("a step");
            d.embed(&step, &self.embed, &mut x);
            d.rms_norm(&x, &self.norm, 1e-5, &mut h);
            d.matmul(&h, &mut [(&self.q, &mut q), (&self.k, &mut k), (&self.v, &mut v)]);
            d.rope(&step, &rope, Self::HEAD, &mut q);
            d.rope(&step, &rope, Self::HEAD, &mut k);
            d.state_write(&step, 0, &k);
            d.state_write(&step, 1, &v);
            d.attention(&step, &p, &q, &mut a);
            d.matmul(&a, &mut [(&self.o, &mut o)]);
            d.add(&mut x, &o);
            d.rms_norm(&x, &self.norm, 1e-5, &mut h);
            d.matmul(&h, &mut [(&self.gate, &mut gate), (&self.up, &mut up)]);
            d.swiglu(&gate, &up, &mut act);
            d.matmul(&act, &mut [(&self.down, &mut o)]);
            d.add(&mut x, &o);
            let mut row = Vec::new();
            for r in first..plan.rows() {
                d.read(&x, r, &mut row);
                all.extend_from_slice(&row);
            }
        }
        all
    }
}
