//! Whole models: what the checks of `worker/models/tests` compare with transformers, on a device.

use ds4_kernels::ops::KvNumerics;
use ds4_kernels::{BatchPlan, CpuDevice, Device};
use ds4_models::Model;
use ds4_models::deepseek_v4::DeepseekV4;
use serde_json::{Value, json};

use crate::support::{self, argmax, errors, fixture, floats, starter_path, tokens};
use crate::{Full, row, seeded};

/// The bound of `tests/deepseek_v4.rs`.
const BOUND: f64 = 1e-4;
pub(crate) const CASES: [&str; 8] =
    ["swa", "csa", "hca", "hash", "mixed", "yarn", "pro-schedule", "production-geometry"];

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
            (worst, sum, n) = (support::greater(worst, e), sum + e * e, n + 1.0);
        }
    }
    (worst, f64::sqrt(sum / n))
}

fn v4<'a, D: Full>(d: &'a D, case: &Value, numerics: KvNumerics) -> Lone<'a, D> {
    Lone::new(d, Box::new(DeepseekV4::build(d, &seeded::weights(case), numerics).unwrap()))
}

pub(crate) fn v4_agrees<D: Full>(d: &D, name: &str) -> Value {
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

pub(crate) fn v4_cut<D: Full>(d: &D) -> Value {
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

pub(crate) fn v4_batched<D: Full>(d: &D) -> Value {
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
pub(crate) fn v4_official<D: Full>(d: &D, name: &str) -> Value {
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

pub(crate) fn tiny_llama<D: Full>(d: &D) -> Value {
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

pub(crate) fn smollm2<D: Full>(d: &D) -> Value {
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
