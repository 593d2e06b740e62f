//! DeepSeek V4's prediction block against transformers' classes (tests/oracles/deepseek_v4_mtp.py), and decoding with guesses
//! against decoding without.

#[path = "support/seeded.rs"]
mod seeded;
#[path = "support/speculative.rs"]
mod speculative;
mod support;

use ds4_kernels::ops::KvNumerics;
use ds4_kernels::{BatchPlan, CpuDevice, Device};
use ds4_models::Model;
use ds4_models::deepseek_v4::{DeepseekV4, MtpAlignment, MtpSettings};
use ds4_models::speculation::{DraftCounts, DraftRequest, Drafter};
use serde_json::Value;
use speculative::{Limits, Rigged, Run, Script, generate};
use support::{fixture, json, tokens};

const BOUND: f64 = 1e-4;
const ALIGNMENTS: [(MtpAlignment, &str); 2] = [(MtpAlignment::SameToken, "same"), (MtpAlignment::NextToken, "next")];

fn build(
    case: &Value,
    numerics: KvNumerics,
    alignment: MtpAlignment,
    margin: f32,
) -> (CpuDevice, DeepseekV4<CpuDevice>) {
    let device = CpuDevice::default();
    let mut model = DeepseekV4::build(&device, &seeded::weights(case), numerics).unwrap();
    model.attach_mtp(&device, &seeded::mtp_weights(case), MtpSettings { alignment, margin }).unwrap();
    (device, model)
}

fn case(file: &str, name: &str) -> Value {
    let all = json(&format!("deepseek_v4/{file}.json"));
    all.as_array().unwrap().iter().find(|c| c["name"] == name).unwrap_or_else(|| panic!("no case {name}")).clone()
}

fn size(v: &Value) -> usize {
    usize::try_from(v.as_u64().unwrap()).unwrap()
}

/// A model that computed a whole sequence, and the drafter's bank.
struct Computed {
    device: CpuDevice,
    model: DeepseekV4<CpuDevice>,
    plan: BatchPlan,
    banks: Vec<<CpuDevice as Device>::Bank>,
}

impl Computed {
    fn new(case: &Value, alignment: MtpAlignment) -> Self {
        let ids = tokens(&case["ids"]);
        let (device, mut model) = build(case, KvNumerics::Reference, alignment, 0.0);
        let mut base = vec![device.bank(Model::state(&model), ids.len()).unwrap()];
        device.bank_commit(&mut base[0], ids.len()).unwrap();
        let mut plan = BatchPlan::default();
        plan.push(0, 0, &ids, true);
        model.forward(&device, &plan, &mut base).unwrap();
        let banks = vec![device.bank(Drafter::state(&model), ids.len() + 16).unwrap()];
        Self { device, model, plan, banks }
    }

    fn draft(&mut self, from: usize, to: usize, next: u32, drafts: usize) -> (Vec<u32>, Vec<f32>) {
        let request = DraftRequest { bank: 0, first_row: from, first_pos: from, rows: to - from, next, drafts };
        let mut got = self.model.draft(&self.device, &self.plan, &[request], &mut self.banks, &|_| false).unwrap();
        let mut logits = Vec::new();
        if drafts > 0 {
            self.model.mtp_logits(&self.device, 0, &mut logits);
        }
        (got.pop().unwrap(), logits)
    }

    fn forget(&mut self) {
        self.device.bank_trim(&mut self.banks[0], 0);
    }
}

fn error(got: &[f32], want: &[f32], spread: f64) -> f64 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(g, w)| (f64::from(*g) - f64::from(*w)).abs() / spread).fold(0.0, support::greater)
}

/// No token: the block's guess never agrees with it.
const NOBODY: u32 = u32::MAX;

fn agrees(name: &str) {
    let case = case("mtp", name);
    let bytes = std::fs::read(fixture(&format!("deepseek_v4/{name}.f32"))).unwrap();
    let values: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let mut reference = values.chunks_exact(size(&case["vocab"]));
    let ids = tokens(&case["ids"]);
    for (alignment, label) in ALIGNMENTS {
        let mut c = Computed::new(&case, alignment);
        let spread = case[label]["std"].as_f64().unwrap();
        let (mut worst, mut seen) = (0.0f64, 0);
        // Rows in pieces, from one reference row to the next.
        for row in tokens(&case[label]["rows"]) {
            let row = row as usize;
            let next = if alignment == MtpAlignment::SameToken { NOBODY } else { ids[row + 1] };
            let (_, logits) = c.draft(seen, row + 1, next, 1);
            worst = worst.max(error(&logits, reference.next().unwrap(), spread));
            seen = row + 1;
        }
        for p in case["prefixes"].as_array().unwrap().iter().filter(|p| p["alignment"] == label) {
            let (length, guesses) = (size(&p["length"]), tokens(&p["guesses"]));
            let logits: Vec<&[f32]> = reference.by_ref().take(guesses.len()).collect();
            c.forget();
            // Of this alignment's guesses the first is the next token itself.
            let (next, want) = match alignment {
                MtpAlignment::SameToken => (guesses[0], &guesses[1..]),
                MtpAlignment::NextToken => (ids[length], &guesses[..]),
            };
            let (got, last) = c.draft(0, length, next, want.len());
            assert_eq!(got, want, "{name}, {label}: guesses behind {length} tokens");
            worst = worst.max(error(&last, logits[guesses.len() - 1], spread));
        }
        println!("{name}, {label}: {worst:.2e}");
        assert!(worst <= BOUND, "{name}, {label}: {worst:.3e}");
    }
    assert!(reference.next().is_none(), "every reference row was used");
}

macro_rules! agreement {
    ($($test:ident: $name:literal;)*) => { $(
        #[test]
        fn $test() {
            agrees($name);
        }
    )* };
}

agreement! {
    deepseek_v4_mtp_behind_mixed_layers: "mtp-mixed";
    deepseek_v4_mtp_across_a_short_window: "mtp-window";
    deepseek_v4_mtp_production_geometry: "mtp-production-geometry";
}

#[test]
fn deepseek_v4_mtp_guesses_leave_no_trace_in_the_window() {
    // 16 guesses run ahead of a window of 16: rows that a ring of only the window would lose.
    let case = case("mtp", "mtp-window");
    let ids = tokens(&case["ids"]);
    for (alignment, label) in ALIGNMENTS {
        let logits_after = |guesses: usize| {
            let mut c = Computed::new(&case, alignment);
            for row in 0..60 {
                let (got, _) = c.draft(row, row + 1, ids[row + 1], guesses);
                assert!(got.len() <= guesses);
            }
            let next = if alignment == MtpAlignment::SameToken { NOBODY } else { ids[61] };
            c.draft(60, 61, next, 1).1
        };
        assert!(logits_after(0) == logits_after(16), "{label}");
    }
}

#[test]
fn deepseek_v4_mtp_batched_with_other_sequences_guesses_the_same() {
    let case = case("mtp", "mtp-mixed");
    let ids = tokens(&case["ids"]);
    let mut alone = Computed::new(&case, MtpAlignment::NextToken);
    let want: Vec<Vec<u32>> = [140, 37]
        .map(|n| {
            alone.forget();
            alone.draft(0, n, ids[n], 4).0
        })
        .into();
    // Both prefixes of the sequence in one call, each with a bank of its own.
    let mut c = Computed::new(&case, MtpAlignment::NextToken);
    c.banks.push(c.device.bank(Drafter::state(&c.model), 316).unwrap());
    let request =
        |bank: usize, rows: usize| DraftRequest { bank, first_row: 0, first_pos: 0, rows, next: ids[rows], drafts: 4 };
    let got = c.model.draft(&c.device, &c.plan, &[request(1, 140), request(0, 37)], &mut c.banks, &|_| false).unwrap();
    assert_eq!(got, want);
}

#[test]
fn deepseek_v4_mtp_margin_and_ends_stop_guessing() {
    let case = case("mtp", "mtp-mixed");
    let ids = tokens(&case["ids"]);
    let mut c = Computed::new(&case, MtpAlignment::NextToken);
    let (all, _) = c.draft(0, 40, ids[40], 5);
    assert_eq!(all.len(), 5);
    let third = all.iter().position(|t| *t == all[2]).unwrap();
    let request = DraftRequest { bank: 0, first_row: 0, first_pos: 0, rows: 40, next: ids[40], drafts: 5 };
    let got = c.model.draft(&c.device, &c.plan, &[request], &mut c.banks, &|t| t == all[2]).unwrap();
    assert_eq!(got, [all[..=third].to_vec()], "the token that ends is guessed, nothing behind it");
    let got = c.model.draft(&c.device, &c.plan, &[request], &mut c.banks, &|t| t == ids[40]).unwrap();
    assert_eq!(got, [Vec::<u32>::new()], "nothing follows the end");
    // Every lead is below a huge margin.
    let settings = MtpSettings { alignment: MtpAlignment::NextToken, margin: 1e6 };
    c.model.attach_mtp(&c.device, &seeded::mtp_weights(&case), settings).unwrap();
    assert_eq!(c.model.draft(&c.device, &c.plan, &[request], &mut c.banks, &|_| false).unwrap(), [Vec::<u32>::new()]);
}

#[test]
fn deepseek_v4_mtp_that_does_not_fit_is_refused() {
    let case = case("mtp", "mtp-mixed");
    let device = CpuDevice::default();
    let mut model = DeepseekV4::build(&device, &seeded::weights(&case), KvNumerics::Reference).unwrap();
    let mut refused = |weights: &ds4_attach::Weights| {
        model.attach_mtp(&device, weights, MtpSettings::default()).unwrap_err().to_string()
    };
    let without = |end: &str| {
        let mut w = seeded::mtp_weights(&case);
        w.manifest.tensors.retain(|t| !t.name.ends_with(end));
        w
    };
    assert!(refused(&without("exp_probs_b.bias")).contains("mtp.0.exp_probs_b.bias is missing"));
    assert!(refused(&without("h_proj.weight")).contains("mtp.0.h_proj.weight is missing"));
    let mut other = case.clone();
    other["hidden"] = 128.into();
    assert!(refused(&seeded::mtp_weights(&other)).contains("has shape [128, 128], not [64, 64]"));
    let mut more = seeded::mtp_weights(&case);
    let mut extra = more.manifest.tensors[0].clone();
    extra.name = "mtp.1.e_proj.weight".into();
    more.manifest.tensors.push(extra);
    assert!(refused(&more).contains("mtp.1.e_proj.weight is not one that"));
}

/// Tokens and logits are those of the run without guesses, bit for bit.
fn same(what: &str, got: &Run, want: &Run) {
    assert_eq!(got.tokens, want.tokens, "{what}");
    assert_eq!(got.logits.len(), want.logits.len(), "{what}");
    for (i, (g, w)) in got.logits.iter().zip(&want.logits).enumerate() {
        assert!(g == w, "{what}: the logits of token {i}");
    }
}

const NEVER: &dyn Fn(u32) -> bool = &|_| false;

#[test]
fn deepseek_v4_speculation_with_the_block_changes_nothing() {
    // Prompts that end before, at and behind window edges and compressor edges of 4 and 128.
    for (name, lengths) in [
        ("swa", &[1, 127, 128, 129][..]),
        ("csa", &[3, 4, 5, 130]),
        ("hca", &[126, 127, 128, 250]),
        ("mixed", &[3, 125, 255]),
        ("cut", &[31, 36, 130]),
        ("production-geometry", &[124]),
    ] {
        let case = case("cases", name);
        let ids = tokens(&case["ids"]);
        let mut total = DraftCounts::default();
        for (i, length) in lengths.iter().enumerate() {
            let prompt = &ids[..*length];
            let limits = |drafts| Limits { drafts, tokens: 24, context: 600, ends: NEVER };
            let numerics = if i % 2 == 0 { KvNumerics::Official } else { KvNumerics::Reference };
            let (device, mut model) = build(&case, numerics, MtpAlignment::SameToken, 0.0);
            let plain = generate(&device, &mut model, prompt, 64, &limits(0));
            assert_eq!((plain.counts, plain.steps), (DraftCounts::default(), 23));
            for (alignment, label) in ALIGNMENTS {
                let (device, mut model) = build(&case, numerics, alignment, 0.0);
                for drafts in if i == 0 { &[1, 2, 3, 5, 8, 16][..] } else { &[2, 7] } {
                    let run = generate(&device, &mut model, prompt, 50, &limits(*drafts));
                    same(&format!("{name}, {length} tokens, {label}, {drafts} guesses"), &run, &plain);
                    assert!(run.steps <= plain.steps, "guesses never cost a step");
                    total += run.counts;
                }
            }
        }
        println!("{name}: {total:?}");
        assert!(total.drafted > 0, "{name}: nothing was ever guessed");
    }
}

#[test]
fn deepseek_v4_speculation_with_a_block_that_guesses_well() {
    let case = case("cases", "mixed");
    let (base, block) = seeded::forgetful(&case);
    let prompt = &tokens(&case["ids"])[..100];
    let limits = |drafts| Limits { drafts, tokens: 80, context: 600, ends: NEVER };
    let device = CpuDevice::default();
    let mut model = DeepseekV4::build(&device, &base, KvNumerics::Official).unwrap();
    let plain = generate(&device, &mut model, prompt, 64, &limits(0));
    for (alignment, label) in ALIGNMENTS {
        model.attach_mtp(&device, &block, MtpSettings { alignment, margin: 0.0 }).unwrap();
        for drafts in [1, 2, 3, 4, 8, 16] {
            let run = generate(&device, &mut model, prompt, 64, &limits(drafts));
            same(&format!("{label}, {drafts}"), &run, &plain);
            println!("{label}, {drafts}: {:?}, {} steps", run.counts, run.steps);
            let DraftCounts { drafted, accepted } = run.counts;
            assert!(accepted < drafted && accepted * 4 > drafted.min(79), "{label}, {drafts}: {accepted} of {drafted}");
            assert!(run.steps < plain.steps);
        }
    }
}

/// A model whose guesses are made from its own plain continuation.
fn rigged(case: &Value, prompt: &[u32], tokens: usize, script: impl Fn(&[u32]) -> Script) -> (CpuDevice, Rigged, Run) {
    let device = CpuDevice::default();
    let model = DeepseekV4::build(&device, &seeded::weights(case), KvNumerics::Official).unwrap();
    let mut rigged = Rigged { model, script: Box::new(|_, _| Vec::new()) };
    let limits = Limits { drafts: 0, tokens, context: 600, ends: NEVER };
    let plain = generate(&device, &mut rigged, prompt, 64, &limits);
    let whole: Vec<u32> = prompt.iter().chain(&plain.tokens).copied().collect();
    rigged.script = script(&whole);
    (device, rigged, plain)
}

/// The right tokens from `at` on, wrong ones behind the first `right(at)`.
fn guesses(whole: &[u32], vocab: u32, at: usize, n: usize, right: usize) -> Vec<u32> {
    let truth = |i: usize| whole.get(at + i).copied().unwrap_or(0);
    (0..n).map(|i| if i < right { truth(i) } else { (truth(i) + 1) % vocab }).collect()
}

#[test]
fn deepseek_v4_speculation_with_perfect_guesses_takes_them_all() {
    for (name, length) in [("mixed", 120), ("cut", 30), ("hca", 250)] {
        let case = case("cases", name);
        let prompt = &tokens(&case["ids"])[..length];
        let vocab = u32::try_from(size(&case["vocab"])).unwrap();
        let (device, mut model, plain) = rigged(&case, prompt, 61, |whole| {
            let whole = whole.to_vec();
            Box::new(move |at, n| guesses(&whole, vocab, at, n, n))
        });
        for drafts in [1, 2, 4, 9, 16] {
            let limits = Limits { drafts, tokens: 61, context: 600, ends: NEVER };
            let run = generate(&device, &mut model, prompt, 64, &limits);
            same(&format!("{name}, {drafts}"), &run, &plain);
            assert_eq!(run.counts.accepted, run.counts.drafted, "{name}, {drafts}");
            // The first token is the prompt's, the second comes alone, the rest in steps of the guesses and one.
            assert_eq!(run.steps, 1 + 59usize.div_ceil(drafts + 1), "{name}, {drafts}");
        }
    }
}

#[test]
fn deepseek_v4_speculation_with_bad_guesses_loses_nothing() {
    for (name, length) in [("mixed", 120), ("cut", 30), ("csa", 2)] {
        let case = case("cases", name);
        let prompt = &tokens(&case["ids"])[..length];
        let vocab = u32::try_from(size(&case["vocab"])).unwrap();
        let (device, mut model, plain) = rigged(&case, prompt, 40, |whole| {
            let whole = whole.to_vec();
            Box::new(move |at, n| guesses(&whole, vocab, at, n, 0))
        });
        for drafts in [1, 2, 4, 16] {
            let limits = Limits { drafts, tokens: 40, context: 600, ends: NEVER };
            let run = generate(&device, &mut model, prompt, 64, &limits);
            same(&format!("{name}, {drafts}"), &run, &plain);
            assert_eq!((run.counts.accepted, run.steps), (0, plain.steps), "{name}, {drafts}");
            assert!(run.counts.drafted > 0);
        }
    }
}

#[test]
fn deepseek_v4_speculation_with_guesses_that_fail_anywhere_changes_nothing() {
    // The number of right guesses goes through all values, at all phases of the compressors' windows.
    for (name, length) in [("mixed", 118), ("pro-schedule", 1), ("hca", 126), ("cut", 31)] {
        let case = case("cases", name);
        let prompt = &tokens(&case["ids"])[..length];
        let vocab = u32::try_from(size(&case["vocab"])).unwrap();
        let (device, mut model, plain) = rigged(&case, prompt, 90, |whole| {
            let whole = whole.to_vec();
            Box::new(move |at, n| guesses(&whole, vocab, at, n, (at * 7 + at / 5) % (n + 1)))
        });
        for drafts in [1, 3, 5, 6] {
            let limits = Limits { drafts, tokens: 90, context: 600, ends: NEVER };
            let run = generate(&device, &mut model, prompt, 64, &limits);
            same(&format!("{name}, {drafts}"), &run, &plain);
            let DraftCounts { drafted, accepted } = run.counts;
            assert!(accepted > 0 && accepted < drafted && run.steps < plain.steps, "{name}: {accepted} of {drafted}");
        }
    }
}

#[test]
fn deepseek_v4_speculation_stops_where_decoding_stops() {
    let case = case("cases", "mixed");
    let prompt = &tokens(&case["ids"])[..100];
    let vocab = u32::try_from(size(&case["vocab"])).unwrap();
    let (device, mut model, plain) = rigged(&case, prompt, 40, |whole| {
        let whole = whole.to_vec();
        Box::new(move |at, n| guesses(&whole, vocab, at, n, n))
    });
    let silent = || -> Script { Box::new(|_, _| Vec::new()) };
    let perfect = std::mem::replace(&mut model.script, silent());
    let ends: Vec<u32> = plain.tokens[5..30].to_vec();
    let mut scripts = [silent(), perfect];
    let mut results: [Vec<Vec<u32>>; 2] = Default::default();
    for (script, results) in scripts.iter_mut().zip(&mut results) {
        std::mem::swap(&mut model.script, script);
        // Ends by number, by a token in the middle of the guesses, and by the context.
        for tokens in 1..20 {
            let limits = Limits { drafts: 4, tokens, context: 600, ends: NEVER };
            results.push(generate(&device, &mut model, prompt, 64, &limits).tokens);
            assert_eq!(results.last().unwrap().len(), tokens);
        }
        for end in &ends {
            let limits = Limits { drafts: 4, tokens: 40, context: 600, ends: &|t| t == *end };
            let got = generate(&device, &mut model, prompt, 64, &limits).tokens;
            assert_eq!(got.last(), Some(end));
            results.push(got);
        }
        for context in 100..112 {
            let limits = Limits { drafts: 4, tokens: 40, context, ends: NEVER };
            let got = generate(&device, &mut model, prompt, 64, &limits).tokens;
            assert_eq!(got.len(), context - 100 + 1, "a row for every token but the last");
            results.push(got);
        }
    }
    assert_eq!(results[0], results[1]);
}
