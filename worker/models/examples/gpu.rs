//! The op-conformance suite, and whole models against transformers, on a device: the checks of `tests/`, for a machine that has
//! nothing but this binary and the fixtures.
//!
//! `gpu [cpu|cuda] [OUT.json] [FILTER]`; `DS4_FIXTURES` is the folder `tests/fixtures`, `DS4_STARTER_MODEL` the starter model.
//! Exit code 1 when a check failed.

#[path = "parts/attention.rs"]
mod attention;
#[path = "parts/families.rs"]
mod families;
#[path = "parts/flash.rs"]
mod flash;
#[cfg(feature = "cuda")]
#[path = "parts/hashes.rs"]
mod hashes;
#[path = "parts/layers.rs"]
mod layers;
#[path = "parts/lost.rs"]
mod lost;
#[path = "../tests/support/seeded.rs"]
mod seeded;
#[path = "parts/starts.rs"]
mod starts;
#[path = "parts/sublayers.rs"]
mod sublayers;
#[path = "../tests/support/mod.rs"]
mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use ds4_kernels::bench::kernel::{FAMILIES, Timed as Full};
use ds4_kernels::conformance::{self, Bounds, Random};
use ds4_kernels::ops::{Experts, KvNumerics, MoeOps, RouterParams, SparseOps};
use ds4_kernels::{BatchPlan, CpuDevice, Device, StateSpec, TensorSource};
use ds4_manifests::GgmlType;
use ds4_models::Model;
use ds4_models::deepseek_v4::DeepseekV4;
use ds4_os::SharedBytes;
use serde_json::{Value, json};
use support::{argmax, errors, fixture, floats, starter_path, tokens};

/// The bound of `tests/deepseek_v4.rs`.
const BOUND: f64 = 1e-4;
const CASES: [&str; 8] = ["swa", "csa", "hca", "hash", "mixed", "yarn", "pro-schedule", "production-geometry"];

/// A model with one bank.
struct Lone<'a, D: Device> {
    device: &'a D,
    model: Box<dyn Model<D>>,
    banks: Vec<D::Bank>,
    len: usize,
}

impl<'a, D: Device> Lone<'a, D> {
    fn new(device: &'a D, model: Box<dyn Model<D>>) -> Self {
        let bank = device.bank(model.state(), model.shape().context).unwrap();
        Self { device, model, banks: vec![bank], len: 0 }
    }

    fn feed(&mut self, tokens: &[u32], wanted: Vec<usize>) -> Vec<Vec<f32>> {
        let mut plan = BatchPlan::default();
        plan.push(0, self.len, tokens, false);
        plan.wanted = wanted;
        self.len += tokens.len();
        self.device.bank_commit(&mut self.banks[0], self.len).unwrap();
        self.model.forward(self.device, &plan, &mut self.banks).unwrap();
        (0..plan.wanted.len()).map(|i| row(self.device, &*self.model, i)).collect()
    }

    fn all_logits(&mut self, tokens: &[u32], chunk: usize) -> Vec<Vec<f32>> {
        self.len = 0;
        self.device.bank_trim(&mut self.banks[0], 0);
        tokens.chunks(chunk).flat_map(|c| self.feed(c, (0..c.len()).collect())).collect()
    }

    fn decode_greedy(&mut self, mut logits: Vec<f32>, n: usize) -> Vec<u32> {
        let mut out = vec![argmax(&logits)];
        while out.len() < n {
            logits = self.feed(&out[out.len() - 1..], vec![0]).remove(0);
            out.push(argmax(&logits));
        }
        out
    }
}

fn row<D: Device>(device: &D, model: &dyn Model<D>, i: usize) -> Vec<f32> {
    let mut row = Vec::new();
    device.read(model.logits(), i, &mut row);
    row
}

fn case(name: &str) -> Value {
    let all = support::json("deepseek_v4/cases.json");
    all.as_array().unwrap().iter().find(|c| c["name"] == name).unwrap().clone()
}

/// Reference rows of a case: position and logits.
fn reference(case: &Value) -> Vec<(usize, Vec<f64>)> {
    let bytes = std::fs::read(fixture(&format!("deepseek_v4/{}.f32", case["name"].as_str().unwrap()))).unwrap();
    let values: Vec<f64> = bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect();
    let vocab = usize::try_from(case["vocab"].as_u64().unwrap()).unwrap();
    tokens(&case["rows"]).iter().map(|r| *r as usize).zip(values.chunks_exact(vocab).map(<[f64]>::to_vec)).collect()
}

/// Largest and root mean square error over the reference rows, relative to the logits' spread.
fn distance(case: &Value, got: &[Vec<f32>]) -> (f64, f64) {
    let spread = case["std"].as_f64().unwrap();
    let (mut worst, mut sum, mut n) = (0.0f64, 0.0, 0.0);
    for (row, want) in reference(case) {
        for (g, w) in got[row].iter().zip(&want) {
            let e = (f64::from(*g) - w).abs() / spread;
            (worst, sum, n) = (worst.max(e), sum + e * e, n + 1.0);
        }
    }
    (worst, f64::sqrt(sum / n))
}

fn v4<'a, D: Full>(d: &'a D, case: &Value, numerics: KvNumerics) -> Lone<'a, D> {
    Lone::new(d, Box::new(DeepseekV4::build(d, &seeded::weights(case), numerics).unwrap()))
}

fn v4_agrees<D: Full>(d: &D, name: &str) -> Value {
    let case = case(name);
    let ids = tokens(&case["ids"]);
    let mut m = v4(d, &case, KvNumerics::Reference);
    let whole = m.all_logits(&ids, ids.len());
    let (error, _) = distance(&case, &whole);
    assert!(error <= BOUND, "{name}: {error:.3e}");
    for chunk in [1, 3, 64, 128] {
        assert!(m.all_logits(&ids, chunk) == whole, "{name}: chunks of {chunk} give other bits");
    }
    let greedy: Vec<u32> =
        case["greedy"].as_array().unwrap().iter().map(|g| u32::try_from(g[0].as_u64().unwrap()).unwrap()).collect();
    assert_eq!(m.decode_greedy(whole.last().unwrap().clone(), greedy.len()), greedy, "{name}: greedy");
    json!({"worst_relative_error": error, "bound": BOUND, "greedy_tokens_equal": greedy.len(), "bit_equal_chunks": [1, 3, 64, 128]})
}

fn v4_cut<D: Full>(d: &D) -> Value {
    let case = case("cut");
    let ids = tokens(&case["ids"]);
    let mut model = DeepseekV4::build(d, &seeded::weights(&case), KvNumerics::Reference).unwrap();
    let mut banks = vec![d.bank(model.state(), ids.len()).unwrap()];
    d.bank_commit(&mut banks[0], ids.len()).unwrap();
    let mut plan = BatchPlan::default();
    plan.push(0, 0, &ids, false);
    plan.wanted = (0..ids.len()).collect();
    model.forward(d, &plan, &mut banks).unwrap();
    let got = d.selected(model.last_selection());
    let mut cut = 0;
    for (pos, (want, got)) in case["picked"]["2"].as_array().unwrap().iter().zip(&got).enumerate() {
        let want: Vec<usize> = tokens(want).into_iter().map(|k| k as usize).collect();
        let got = got.clone().inspect(|_| cut += 1).unwrap_or_else(|| (0..(pos + 1) / 4).collect());
        assert_eq!(got, want, "position {pos}");
    }
    assert!(cut > 200, "{cut} positions are cut");
    let rows: Vec<_> = (0..ids.len()).map(|i| row(d, &model, i)).collect();
    let (error, _) = distance(&case, &rows);
    assert!(error <= BOUND, "{error:.3e}");
    json!({"worst_relative_error": error, "cut_positions_equal": cut})
}

fn v4_batched<D: Full>(d: &D) -> Value {
    let case = case("mixed");
    let ids = tokens(&case["ids"]);
    let want = v4(d, &case, KvNumerics::Reference).all_logits(&ids[..300], 64);
    let mut model = DeepseekV4::build(d, &seeded::weights(&case), KvNumerics::Reference).unwrap();
    let mut banks: Vec<_> = (0..2).map(|_| d.bank(model.state(), 600).unwrap()).collect();
    let mut done = [0usize; 2];
    while done[0] < 300 {
        let take = [37.min(300 - done[0]), 1];
        let mut plan = BatchPlan::default();
        for bank in 0..2 {
            let from = done[bank];
            d.bank_commit(&mut banks[bank], from + take[bank]).unwrap();
            plan.push(bank, from, &ids[from..from + take[bank]], true);
            done[bank] += take[bank];
        }
        model.forward(d, &plan, &mut banks).unwrap();
        for (bank, end) in done.iter().enumerate() {
            assert!(row(d, &model, bank) == want[end - 1], "bank {bank} at {end} has other bits than alone");
        }
    }
    json!({"steps": 300usize.div_ceil(37)})
}

/// The official profile rounds cached rows, so nearly equal values may fall to different codes on two devices: the drift from the
/// reference profile must be of the size that the CPU's is, and the two devices far closer to each other.
fn v4_official<D: Full>(d: &D, name: &str) -> Value {
    let case = case(name);
    let ids = tokens(&case["ids"]);
    let mut m = v4(d, &case, KvNumerics::Official);
    let whole = m.all_logits(&ids, ids.len());
    for chunk in [1, 64] {
        assert!(m.all_logits(&ids, chunk) == whole, "{name}: chunks of {chunk} give other bits");
    }
    let (_, drift) = distance(&case, &whole);
    let cpu = CpuDevice::default();
    let here = v4(&cpu, &case, KvNumerics::Official).all_logits(&ids, ids.len());
    let (_, cpu_drift) = distance(&case, &here);
    assert!(drift > 1e-3 && drift < 0.2, "{name}: {drift}");
    let spread = case["std"].as_f64().unwrap();
    let (mut sum, mut n) = (0.0, 0.0);
    for (a, b) in whole.iter().flatten().zip(here.iter().flatten()) {
        sum += (f64::from(a - b) / spread).powi(2);
        n += 1.0;
    }
    let apart = f64::sqrt(sum / n);
    assert!(apart < drift, "{name}: {apart} from the CPU");
    json!({"drift": drift, "cpu_drift": cpu_drift, "rms_from_cpu": apart})
}

fn tiny_llama<D: Full>(d: &D) -> Value {
    let weights = support::weights(&fixture("tiny-llama/tiny-llama.gguf"));
    let mut m = Lone::new(d, ds4_models::build(d, &weights).unwrap());
    let mut worst = 0.0f64;
    for case in support::json("tiny-llama/logits.json")["cases"].as_array().unwrap() {
        let prompt = tokens(&case["tokens"]);
        let ours = m.all_logits(&prompt, prompt.len());
        for (row, want) in case["rows"].as_object().unwrap() {
            let (rel, _) = errors(&ours[row.parse::<usize>().unwrap()], &floats(want));
            worst = worst.max(rel / case["int16_error"]["rel_worst"].as_f64().unwrap());
        }
        let want = tokens(&case["greedy"]);
        assert_eq!(m.decode_greedy(ours.last().unwrap().clone(), want.len()), want);
    }
    assert!(worst <= 2.0, "{worst} of the reference's own rounding error");
    json!({"error_over_rounding_error_of_reference": worst})
}

fn smollm2<D: Full>(d: &D) -> Value {
    let mut m = Lone::new(d, ds4_models::build(d, &support::weights(&starter_path())).unwrap());
    let head = support::json("smollm2/logits.json");
    let (mut equal, mut worst) = (0, 0.0f64);
    let vocab = usize::try_from(head["vocab"].as_u64().unwrap()).unwrap();
    let last = std::fs::read(fixture("smollm2/last.f32")).unwrap();
    let last: Vec<f64> = last.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect();
    for (case, want_last) in head["prompts"].as_array().unwrap().iter().zip(last.chunks_exact(vocab)) {
        let (prompt, greedy) = (tokens(&case["tokens"]), tokens(&case["greedy"]));
        let whole = m.all_logits(&prompt, prompt.len());
        let (rel, _) = errors(whole.last().unwrap(), want_last);
        let share = rel / case["int16_error"]["last_rel"].as_f64().unwrap();
        println!("    {}: {share:.3} of the reference's own rounding error", case["name"]);
        worst = worst.max(share);
        assert_eq!(m.decode_greedy(whole.last().unwrap().clone(), greedy.len()), greedy, "{}", case["name"]);
        for chunk in [1, 7, 64] {
            assert!(m.all_logits(&prompt, chunk) == whole, "{}: chunks of {chunk} give other bits", case["name"]);
        }
        equal += greedy.len();
    }
    assert!(worst <= 2.0, "{worst} of the reference's own rounding error");
    json!({"greedy_tokens_equal": equal, "error_over_rounding_error_of_reference": worst})
}

fn bind<D: Device>(d: &D, ty: GgmlType, rows: usize, cols: usize, bytes: &[u8]) -> D::Weight {
    let bytes = SharedBytes::from_vec(bytes.to_vec());
    d.bind(&TensorSource { name: format!("{ty}"), ty, cols, rows, bytes }).unwrap()
}

/// Rows of activations on the device: the op set's way in is a table of embeddings.
fn upload<D: Device>(d: &D, width: usize, x: &[f32]) -> D::Buffer {
    let rows = x.len() / width;
    let bytes: Vec<u8> = x.iter().flat_map(|v| v.to_le_bytes()).collect();
    let table = bind(d, GgmlType::F32, rows, width, &bytes);
    let mut banks = [d.bank(&StateSpec::default(), rows).unwrap()];
    d.bank_commit(&mut banks[0], rows).unwrap();
    let mut plan = BatchPlan::default();
    plan.push(0, 0, &(0..u32::try_from(rows).unwrap()).collect::<Vec<_>>(), false);
    let mut out = d.buffer(width);
    d.embed(&d.step(&plan, &mut banks).unwrap(), &table, &mut out);
    out
}

fn download<D: Device>(d: &D, x: &D::Buffer, rows: usize) -> Vec<f32> {
    let (mut all, mut row) = (Vec::new(), Vec::new());
    for r in 0..rows {
        d.read(x, r, &mut row);
        all.extend_from_slice(&row);
    }
    all
}

/// Largest difference relative to the root mean square of `want`.
fn apart(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let rms = (want.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>() / want.len() as f64).sqrt();
    got.iter().zip(want).map(|(g, w)| f64::from(g - w).abs()).fold(0.0, f64::max) / rms
}

/// Experts, routing included, and grouped products in the types of large models, against the CPU's: other code with the same definition.
/// Both round activations to 16 bits, the CPU per 32 and others per 256 with outliers 30 times the rest, which is 1.4e-4 of a product on
/// average; the largest of 300,000 after three products and a gate is some 20 times that. A wrong rule is off by 1.
fn experts<D: Full>(d: &D, gate: GgmlType, down: GgmlType) -> Value {
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
fn products<D: Full>(d: &D) -> Value {
    let mut rng = Random::new(Random::fresh_seed());
    let mut compared = 0;
    for ty in [GgmlType::Q8_0, GgmlType::Q2_K, GgmlType::Q4_K, GgmlType::IQ2_XXS] {
        for (cols, outputs) in [(256, 8464), (1280, 8464), (2048, 16400)] {
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

/// A check, which panics or tells what it saw.
type Check<D> = Box<dyn Fn(&D) -> Value>;

fn run<D: Full>(d: &D, activation: f64, out: Option<&str>, filter: &str) -> bool {
    println!("{}", d.describe());
    let mut checks: Vec<(String, Check<D>)> = vec![(
        "conformance".into(),
        Box::new(move |d| {
            conformance::run(d, Bounds { activation });
            json!({"activation_bound": activation})
        }),
    )];
    use GgmlType as T;
    for (gate, down) in [(T::IQ2_XXS, T::Q2_K), (T::Q4_K, T::Q4_K), (T::Q8_0, T::Q8_0), (T::F16, T::BF16)] {
        checks.push((format!("experts {gate} {down}"), Box::new(move |d| experts(d, gate, down))));
    }
    for hidden in [1024, 4096] {
        checks.push((format!("sublayers {hidden}"), Box::new(move |d| sublayers::check(d, hidden))));
    }
    checks.push(("products".into(), Box::new(products)));
    checks.push(("attention".into(), Box::new(attention::check)));
    checks.push(("starts".into(), Box::new(starts::check)));
    if d.describe().starts_with("cuda") {
        checks.push(("lost device".into(), Box::new(lost::check)));
        #[cfg(feature = "cuda")]
        checks.push(("hashes".into(), Box::new(|_| hashes::check())));
    }
    for (name, _) in FAMILIES {
        checks.push((format!("kernel {name}"), Box::new(move |d| families::check(d, name))));
    }
    for kind in layers::KINDS {
        checks.push((format!("layer {}", kind.0), Box::new(move |d| layers::check(d, kind))));
    }
    for name in CASES {
        checks.push((format!("deepseek_v4 {name}"), Box::new(move |d| v4_agrees(d, name))));
    }
    checks.push(("deepseek_v4 cut".into(), Box::new(v4_cut)));
    checks.push(("deepseek_v4 batched".into(), Box::new(v4_batched)));
    for name in ["mixed", "production-geometry"] {
        checks.push((format!("deepseek_v4 official {name}"), Box::new(move |d| v4_official(d, name))));
    }
    checks.push(("tiny-llama".into(), Box::new(tiny_llama)));
    // 92 MB that a machine with nothing but this binary may lack.
    let left_out = if support::starter_place().is_file() {
        checks.push(("smollm2".into(), Box::new(smollm2)));
        None
    } else {
        Some("smollm2: no model")
    };

    let mut results = Vec::new();
    let mut good = true;
    for (name, check) in checks.iter().filter(|(n, _)| n.contains(filter)) {
        let start = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| check(d)));
        let seconds = start.elapsed().as_secs_f64();
        let (passed, facts) = match result {
            Ok(facts) => (true, facts),
            Err(e) => {
                let text =
                    e.downcast_ref::<String>().cloned().or_else(|| e.downcast_ref::<&str>().map(|s| (*s).to_owned()));
                (false, json!({"error": text.unwrap_or_default().chars().take(600).collect::<String>()}))
            }
        };
        good &= passed;
        println!("{} {name} ({seconds:.2} s) {facts}", if passed { "PASS" } else { "FAIL" });
        results.push(json!({"check": name, "passed": passed, "seconds": seconds, "facts": facts}));
    }
    if let Some(path) = out {
        let all = json!({"device": d.describe(), "checks": results, "left_out": left_out});
        std::fs::write(path, serde_json::to_string_pretty(&all).unwrap()).unwrap();
    }
    good
}

fn main() -> std::process::ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |i: usize| args.get(i).map(String::as_str);
    let filter = arg(2).unwrap_or("");
    let good = match arg(0) {
        #[cfg(feature = "cuda")]
        None | Some("cuda") => match ds4_kernels::cuda::CudaDevice::open(0) {
            // Activations have 16 bits per 256, with outliers 30 times the rest: a 32nd of that may round to 30 half steps.
            Ok(d) => run(&d, 32.0 / 65024.0, arg(1), filter),
            Err(e) => {
                eprintln!("{e}");
                false
            }
        },
        #[cfg(feature = "cuda")]
        Some(lost::ARGUMENT) => {
            lost::fault(&ds4_kernels::cuda::CudaDevice::open(0).unwrap());
            true
        }
        Some("cpu") => run(&CpuDevice::default(), 1.0 / 65024.0, arg(1), filter),
        other => {
            eprintln!("no device {other:?}; there is cpu, and cuda when built with that feature");
            false
        }
    };
    if good { std::process::ExitCode::SUCCESS } else { std::process::ExitCode::FAILURE }
}
