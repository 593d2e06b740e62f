//! The llama family against transformers on the starter model (tests/oracles/smollm2_logits.py).
//!
//! Bounds as in tiny_llama.rs: twice the error that 16-bit activations and f16 K/V rows cause in the reference itself.

mod support;

use support::{Lone, argmax, errors, fixture, json, starter_path, tokens};

const SLACK: f64 = 2.0;

#[test]
fn logits_and_greedy_continuations_agree_with_transformers() {
    let mut lone = Lone::load(&starter_path());
    let head = json("smollm2/logits.json");
    let vocab = usize::try_from(head["vocab"].as_u64().unwrap()).unwrap();
    let last: Vec<f64> = std::fs::read(fixture("smollm2/last.f32"))
        .unwrap()
        .chunks_exact(4)
        .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
        .collect();
    let prompts = head["prompts"].as_array().unwrap();
    assert_eq!(prompts.len(), 8);
    assert_eq!(last.len(), 8 * vocab);
    for (case, want_last) in prompts.iter().zip(last.chunks_exact(vocab)) {
        let name = case["name"].as_str().unwrap();
        let (prompt, greedy) = (tokens(&case["tokens"]), tokens(&case["greedy"]));
        assert_eq!(greedy.len(), 64);
        let bound = |key: &str| SLACK * case["int16_error"][key].as_f64().unwrap();

        // One shot over prompt and continuation: every position's logits.
        let mut sequence = prompt.clone();
        sequence.extend(&greedy[..63]);
        let whole = lone.all_logits(&sequence, sequence.len());
        let (rel, abs) = errors(&whole[prompt.len() - 1], want_last);
        println!("{name}: {} tokens, rel {rel:.4} of {:.4}, abs {abs:.3}", prompt.len(), bound("last_rel") / SLACK);
        assert!(rel <= bound("last_rel") && abs <= bound("last_max_abs"), "{name}: rel {rel}, abs {abs}");
        for (position, best) in case["inside"].as_object().unwrap() {
            for pair in best.as_array().unwrap() {
                let id = usize::try_from(pair[0].as_u64().unwrap()).unwrap();
                let row = &whole[position.parse::<usize>().unwrap()];
                let off = (f64::from(row[id]) - pair[1].as_f64().unwrap()).abs();
                assert!(off <= bound("max_abs_worst"), "{name}: position {position}, token {id}: off by {off}");
            }
        }
        let one_shot: Vec<u32> = whole[prompt.len() - 1..].iter().map(|r| argmax(r)).collect();
        assert_eq!(one_shot, greedy, "{name}: one shot");

        // Any chunking ends in the same bits, so one decode run stands for all.
        let end = &whole[prompt.len() - 1];
        for chunk in [1, 7, 64] {
            assert!(lone.last_logits(&prompt, chunk) == *end, "{name}: chunks of {chunk}");
        }
        let logits = lone.last_logits(&prompt, prompt.len());
        assert!(logits == *end, "{name}: skipping unwanted rows");
        assert_eq!(lone.decode_greedy(logits, 64), greedy, "{name}: decode");
    }
}
