//! A model's results do not depend on how its operations are started: early or one after the other, replayed as graphs or launched one by
//! one; nor on the steps that a prompt is computed in. What is started too early, or reads what is not there yet, shows as other bits.

use ds4_kernels::ops::KvNumerics;
use ds4_kernels::{BatchPlan, StateKind};
use ds4_models::Model;
use ds4_models::deepseek_v4::DeepseekV4;
use serde_json::{Value, json};

use crate::{Full, layers, row};

const BANKS: usize = 16;
/// A prompt in one chunk, which attention takes in parts, or in chunks that end elsewhere, and then decode steps of so many sequences, each
/// often enough that its graphs are replayed. Decode ends a window of 128 tokens that the prompt began.
const PROMPT: usize = 1530;
const WHOLE: &[usize] = &[PROMPT];
const CHUNKS: [&[usize]; 2] = [&[512, 512, 506], &[1, 1100, 429]];
const DECODE: [usize; 5] = [1, 4, 5, 8, BANKS];
const STEPS: usize = 4;

/// Every wanted row of logits, and the rows that the first sequence keeps at the end. Not its frontiers: slots of a window that no token has
/// reached hold what an earlier step left there, which is never read.
fn run<D: Full>(d: &D, model: &mut DeepseekV4<D>, prompt: &[usize]) -> (Vec<Vec<f32>>, Vec<Vec<u8>>) {
    let mut banks: Vec<_> = (0..BANKS).map(|_| d.bank(model.state(), PROMPT + 100).unwrap()).collect();
    let mut done = [0usize; BANKS];
    let mut logits = Vec::new();
    let mut step = |banks: &mut [D::Bank], done: &mut [usize], counts: &[usize], wanted: bool| {
        let mut plan = BatchPlan::default();
        for (b, n) in counts.iter().enumerate().filter(|(_, n)| **n > 0) {
            let id = |i: usize| u32::try_from((i * 7919 + b * 104_729) as u64 % layers::VOCABULARY).unwrap();
            let ids: Vec<u32> = (done[b]..done[b] + n).map(id).collect();
            d.bank_commit(&mut banks[b], done[b] + n).unwrap();
            plan.push(b, done[b], &ids, wanted);
            done[b] += n;
        }
        model.forward(d, &plan, banks).unwrap();
        logits.extend((0..plan.wanted.len()).map(|i| row(d, &*model, i)));
    };
    for n in prompt {
        let last = done[0] + n == PROMPT;
        step(&mut banks, &mut done, &[*n], last);
    }
    step(&mut banks, &mut done, &[0, 5, 1, 130, 7, 3, 64, 2, 1, 9, 4, 4, 128, 1, 6, 40], true);
    for n in DECODE {
        for _ in 0..STEPS {
            step(&mut banks, &mut done, &vec![1; n], true);
        }
    }
    let slots = &model.state().slots;
    let rows = (0..slots.len()).filter(|s| !matches!(slots[*s], StateKind::Fixed { .. }));
    let kept = rows.map(|slot| {
        let mut bytes = Vec::new();
        d.bank_export(&banks[0], slot, 0..slots[slot].rows(done[0]), &mut bytes);
        bytes
    });
    (logits, kept.collect())
}

pub(crate) fn check<D: Full>(d: &D) -> Value {
    if !d.starts(false, false) {
        return json!({"ways": 1});
    }
    let mut rows = 0;
    for numerics in [KvNumerics::Reference, KvNumerics::Official] {
        let mut model = DeepseekV4::build(d, layers::all(), numerics).unwrap();
        d.starts(false, false);
        let want = run(d, &mut model, WHOLE);
        let ways = [(true, true), (true, false), (false, true)].map(|(early, replayed)| (early, replayed, WHOLE));
        for (early, replayed, prompt) in ways.into_iter().chain(CHUNKS.map(|chunks| (true, true, chunks))) {
            d.starts(early, replayed);
            let got = run(d, &mut model, prompt);
            d.starts(true, true);
            let way = format!("{numerics:?}, early {early}, replayed {replayed}, prompt in {prompt:?}");
            assert_eq!(got.0.len(), want.0.len(), "{way}");
            let other =
                got.0.iter().zip(&want.0).position(|(a, b)| a.iter().zip(b).any(|(a, b)| a.to_bits() != b.to_bits()));
            assert_eq!(other, None, "{way}: row of logits with other bits");
            let other: Vec<_> = (0..want.1.len()).filter(|slot| got.1[*slot] != want.1[*slot]).collect();
            assert!(
                other.is_empty(),
                "{way}: rows of the sequence have other bits in {other:?} of {} slots",
                want.1.len()
            );
            rows += got.0.len();
        }
    }
    json!({"ways": 6, "rows_bit_equal": rows})
}
