//! The llama family against transformers on a tiny random model (tests/oracles/tiny_llama.py).
//!
//! Bounds: the fixture has the error that 16-bit activations and f16 K/V rows cause by themselves, emulated in the reference.
//! Ours rounds the same way at slightly different places, so its error is of the same size but not the same: twice that is
//! allowed. A wrong RoPE pairing, scale or head mapping is off by 1 and more.

mod support;

use support::{Lone, argmax, errors, fixture, floats, json, tokens};

const SLACK: f64 = 2.0;

fn tiny() -> Lone {
    Lone::load(&fixture("tiny-llama/tiny-llama.gguf"))
}

#[test]
fn logits_agree_with_transformers() {
    let mut lone = tiny();
    for case in json("tiny-llama/logits.json")["cases"].as_array().unwrap() {
        let prompt = tokens(&case["tokens"]);
        let ours = lone.all_logits(&prompt, prompt.len());
        let worst_rel = case["int16_error"]["rel_worst"].as_f64().unwrap();
        let worst_abs = case["int16_error"]["max_abs_worst"].as_f64().unwrap();
        for (row, want) in case["rows"].as_object().unwrap() {
            let (rel, abs) = errors(&ours[row.parse::<usize>().unwrap()], &floats(want));
            println!("{} row {row}: rel {rel:.4} of {worst_rel:.4}, abs {abs:.3} of {worst_abs:.3}", case["name"]);
            assert!(rel <= SLACK * worst_rel && abs <= SLACK * worst_abs, "row {row}: rel {rel}, abs {abs}");
        }
        for (position, (row, best)) in ours.iter().zip(case["top8"].as_array().unwrap()).enumerate() {
            for pair in best.as_array().unwrap() {
                let id = usize::try_from(pair[0].as_u64().unwrap()).unwrap();
                let off = (f64::from(row[id]) - pair[1].as_f64().unwrap()).abs();
                assert!(off <= SLACK * worst_abs, "position {position}, token {id}: off by {off}");
            }
        }
    }
}

#[test]
fn greedy_continuations_agree_with_transformers() {
    let mut lone = tiny();
    for case in json("tiny-llama/logits.json")["cases"].as_array().unwrap() {
        let (prompt, want) = (tokens(&case["tokens"]), tokens(&case["greedy"]));
        let logits = lone.last_logits(&prompt, prompt.len());
        assert_eq!(lone.decode_greedy(logits, want.len()), want, "{}", case["name"]);
    }
}

#[test]
fn chunks_steps_and_skipped_rows_change_no_bit() {
    let mut lone = tiny();
    let case = &json("tiny-llama/logits.json")["cases"][0];
    let mut sequence = tokens(&case["tokens"]);
    sequence.extend(tokens(&case["greedy"]));
    let whole = lone.all_logits(&sequence, sequence.len());
    for chunk in [1, 7, 64] {
        assert!(lone.all_logits(&sequence, chunk) == whole, "chunks of {chunk}");
        assert!(lone.last_logits(&sequence, chunk) == *whole.last().unwrap(), "last of chunks of {chunk}");
    }
    // The one-shot pass continues the prompt as decoding does.
    let from = tokens(&case["tokens"]).len() - 1;
    let want = tokens(&case["greedy"]);
    let got: Vec<u32> = whole[from..from + want.len()].iter().map(|r| argmax(r)).collect();
    assert_eq!(got, want);
}

#[test]
fn l2_a_manifest_that_does_not_fit_the_family_is_refused_by_name() {
    let device = ds4_kernels::CpuDevice::default();
    let refuse = |change: &dyn Fn(&mut ds4_attach::Weights)| {
        let mut w = support::weights(&fixture("tiny-llama/tiny-llama.gguf"));
        change(&mut w);
        ds4_models::build(&device, &w).err().expect("a refusal").to_string()
    };
    let find = |w: &ds4_attach::Weights, name: &str| w.manifest.tensors.iter().position(|t| t.name == name).unwrap();
    let gone = refuse(&|w| {
        let at = find(w, "blk.1.ffn_up.weight");
        w.manifest.tensors.remove(at);
    });
    assert_eq!(gone, "tensor blk.1.ffn_up.weight is missing from the manifest");
    let renamed = refuse(&|w| {
        let mut extra = w.manifest.tensors[find(w, "blk.0.attn_norm.weight")].clone();
        extra.name = "blk.0.attn_q.bias".into();
        w.manifest.tensors.push(extra);
    });
    assert!(renamed.contains("blk.0.attn_q.bias") && renamed.contains("llama"), "{renamed}");
    let shape = refuse(&|w| {
        let at = find(w, "blk.0.attn_k.weight");
        w.manifest.tensors[at].shape = vec![64, 64];
    });
    assert!(shape.contains("blk.0.attn_k.weight has shape [64, 64], not [64, 32]"), "{shape}");
    let outside = refuse(&|w| {
        let at = find(w, "output_norm.weight");
        w.manifest.tensors[at].offset = 1 << 40;
    });
    assert!(outside.contains("output_norm.weight lies outside chunk 0"), "{outside}");
    let family = refuse(&|w| w.manifest.model.family = "mamba".into());
    assert!(family.contains("\"mamba\""), "{family}");
}
