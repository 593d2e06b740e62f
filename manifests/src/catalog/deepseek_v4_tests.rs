//! The DeepSeek V4 tables against the published counts, sizes and shapes.

use super::*;
use crate::metadata::{StringTable, Value};

fn tokenizer(m: &mut Metadata, tokens: u64) {
    let mut table = StringTable::default();
    (0..tokens).for_each(|i| table.push(format!("t{i}").as_bytes()).unwrap());
    m.set("tokenizer.ggml.tokens", Value::Strings(table));
    m.set("tokenizer.ggml.model", Value::String("gpt2".into()));
    m.set("tokenizer.ggml.pre", Value::String("joyai-llm".into()));
}

/// Metadata and tensors of an entry in a recipe: types of gate and up, and of down.
fn model(id: &str, gate_up: GgmlType, down: GgmlType) -> (Metadata, Vec<TensorInfo>) {
    let catalog = Catalog::builtin();
    let entry = catalog.entry(id).unwrap();
    let mut m = catalog.metadata_of(entry);
    tokenizer(&mut m, 129_280);
    let tensors = tensors(&catalog.expand(entry, &m).unwrap(), gate_up, down);
    (m, tensors)
}

fn tensors(found: &Match<'_>, gate_up: GgmlType, down: GgmlType) -> Vec<TensorInfo> {
    let one = |t: ExpectedTensor<'_>| {
        let ty = match t.role {
            "experts" if t.name.contains("down") => down,
            "experts" => gate_up,
            _ => t.types[0],
        };
        let len = ty.tensor_bytes(&t.shape).unwrap();
        TensorInfo { name: t.name, ty, shape: t.shape, shard: 0, offset: 0, len }
    };
    found.tensors().into_iter().map(one).collect()
}

fn difference(m: &Metadata, t: &[TensorInfo], dev: bool) -> String {
    Catalog::builtin().identify(m, t, dev).unwrap_err().to_string()
}

fn named<'a>(t: &'a mut [TensorInfo], name: &str) -> &'a mut TensorInfo {
    t.iter_mut().find(|t| t.name == name).unwrap()
}

#[test]
fn deepseek_v4_flash_has_the_published_count_and_sizes() {
    for (gate_up, down, bytes) in
        [(GgmlType::IQ2_XXS, GgmlType::Q2_K, 86_714_775_900_u64), (GgmlType::Q4_K, GgmlType::Q4_K, 164_628_167_004)]
    {
        let (m, t) = model("deepseek-v4-flash", gate_up, down);
        assert_eq!(t.len(), 1328);
        assert_eq!(t.iter().map(|t| t.len).sum::<u64>(), bytes);
        let found = Catalog::builtin().identify(&m, &t, false).unwrap();
        assert_eq!((found.entry.id.as_str(), found.served_name.as_str()), ("deepseek-v4-flash", "deepseek-v4-flash"));
        assert_eq!((found.hyper.at("ratio", 1), found.hyper.at("ratio", 2)), (Some(0), Some(4)));
    }
}

#[test]
fn deepseek_v4_pro_has_the_derived_count() {
    let (m, t) = model("deepseek-v4-pro", GgmlType::IQ2_XXS, GgmlType::Q2_K);
    assert_eq!(t.len(), 1894);
    // "About 432.7 GiB" was derived from the same shapes by hand.
    let gib = t.iter().map(|t| t.len).sum::<u64>() >> 20;
    assert!((443_033..443_137).contains(&gib), "{gib} MiB");
    assert_eq!(Catalog::builtin().identify(&m, &t, false).unwrap().entry.id, "deepseek-v4-pro");
}

#[test]
fn deepseek_v4_tensors_of_each_kind_of_layer() {
    let (_, t) = model("deepseek-v4-flash", GgmlType::Q4_K, GgmlType::Q4_K);
    let shape = |name: &str| t.iter().find(|t| t.name == name).map(|t| t.shape.clone());
    assert_eq!(shape("output_hc_fn.weight"), Some(vec![16384, 4]));
    assert_eq!(shape("blk.7.hc_ffn_fn.weight"), Some(vec![16384, 24]));
    assert_eq!(shape("blk.0.attn_output_a.weight"), Some(vec![4096, 8192]));
    assert_eq!(shape("blk.42.ffn_down_exps.weight"), Some(vec![2048, 4096, 256]));
    assert_eq!(shape("blk.1.attn_compressor_kv.weight"), None);
    assert_eq!(shape("blk.2.attn_compressor_ape.weight"), Some(vec![1024, 4]));
    assert_eq!(shape("blk.3.attn_compressor_ape.weight"), Some(vec![512, 128]));
    assert_eq!(shape("blk.2.indexer.attn_q_b.weight"), Some(vec![1024, 8192]));
    assert_eq!(shape("blk.3.indexer.attn_q_b.weight"), None);
    assert_eq!(shape("blk.2.ffn_gate_tid2eid.weight"), Some(vec![6, 129_280]));
    assert_eq!((shape("blk.2.exp_probs_b.bias"), shape("blk.3.exp_probs_b.bias")), (None, Some(vec![256])));
}

#[test]
fn deepseek_v4_types_are_read_per_layer_and_gate_goes_with_up() {
    let (m, mut t) = model("deepseek-v4-flash", GgmlType::IQ2_XXS, GgmlType::Q2_K);
    for layer in 37..43 {
        for part in ["gate", "up", "down"] {
            named(&mut t, &format!("blk.{layer}.ffn_{part}_exps.weight")).ty = GgmlType::Q4_K;
        }
    }
    assert!(Catalog::builtin().identify(&m, &t, false).is_ok(), "the mixed recipe");
    named(&mut t, "blk.40.ffn_up_exps.weight").ty = GgmlType::IQ2_XXS;
    let said = difference(&m, &t, false);
    assert!(said.contains("tensor blk.40.ffn_up_exps.weight has type IQ2_XXS, expected that of blk.40.ffn_gate_exps"));
    named(&mut t, "blk.40.ffn_up_exps.weight").ty = GgmlType::Q4_K;
    named(&mut t, "blk.0.attn_kv.weight").ty = GgmlType::Q4_K;
    assert!(difference(&m, &t, false).contains("blk.0.attn_kv.weight has type Q4_K, expected one of Q8_0"));
}

#[test]
fn deepseek_v4_head_tensors_have_two_spellings_and_the_bias_is_optional() {
    let (m, mut t) = model("deepseek-v4-flash", GgmlType::IQ2_XXS, GgmlType::Q2_K);
    for part in ["fn", "base", "scale"] {
        named(&mut t, &format!("output_hc_{part}.weight")).name = format!("hc_head_{part}");
    }
    t.retain(|t| !t.name.ends_with("exp_probs_b.bias"));
    assert!(Catalog::builtin().identify(&m, &t, false).is_ok());
    let both = TensorInfo { name: "output_hc_base.weight".into(), ..named(&mut t, "hc_head_base").clone() };
    t.push(both);
    assert!(difference(&m, &t, false).contains("\"hc_head_base\" is not in the table"));
    t.retain(|t| !t.name.contains("base"));
    assert!(difference(&m, &t, false).contains("output_hc_base.weight is missing"));
}

#[test]
fn deepseek_v4_schedules_and_clamps_count() {
    let (good, t) = model("deepseek-v4-flash", GgmlType::IQ2_XXS, GgmlType::Q2_K);
    let ratios = good.ints("deepseek4.attention.compress_ratios").unwrap().to_vec();
    let clamps = |n: usize, last: f32| {
        let mut v = vec![10.0_f32; n];
        v[n - 1] = last;
        Value::Floats(v)
    };
    let ratio = |at: usize, value: i64| {
        let mut v = ratios.clone();
        v[at] = value;
        Value::Ints(v)
    };
    // Real files: one entry more, for the block that is in another file.
    let mut longer = good.clone();
    longer.set("deepseek4.attention.compress_ratios", Value::Ints([ratios.clone(), vec![0]].concat()));
    longer.set("deepseek4.swiglu_clamp_exp", clamps(44, 7.0));
    assert!(Catalog::builtin().identify(&longer, &t, false).is_ok());
    for (key, value, said) in [
        ("attention.compress_ratios", ratio(3, 64), "compress_ratios[3] is 64, expected 128"),
        ("attention.compress_ratios", ratio(3, 2), "compress_ratios has 2, expected 0 or 4 to 2^31"),
        ("attention.compress_ratios", ratio(0, -1), "compress_ratios has -1"),
        (
            "attention.compress_ratios",
            Value::Ints(ratios[..42].to_vec()),
            "has 42 entries, expected one for each of 43",
        ),
        ("attention.compress_ratios", Value::U64(4), "compress_ratios is 4, expected an array"),
        ("swiglu_clamp_exp", clamps(43, 7.0), "swiglu_clamp_exp[42] is 7, expected 10"),
        ("swiglu_clamp_exp", clamps(43, f32::NAN), "swiglu_clamp_exp is an array, expected an array of finite numbers"),
        ("swiglu_clamp_exp", Value::Ints(vec![7; 43]), "swiglu_clamp_exp[0] is 7, expected 10"),
        ("swiglu_clamp_exp", Value::Ints(vec![i64::MAX; 43]), "expected an array of finite numbers that f32 has"),
        ("rope.freq_base", Value::U64(20_000), "rope.freq_base is 20000, expected 10000"),
        ("rope.freq_base", Value::U64(u64::MAX), "rope.freq_base is 18446744073709551615"),
        ("rope.freq_base", Value::Bool(true), "rope.freq_base is true"),
        ("expert_weights_norm", Value::Bool(false), "not renormalised"),
        ("expert_group_count", Value::U64(8), "group-limited"),
        ("attention.indexer.top_k", Value::U64(1024), "top_k is 1024, expected 512"),
    ] {
        let mut m = good.clone();
        m.set(&format!("deepseek4.{key}"), value);
        let found = difference(&m, &t, false);
        assert!(found.contains(said) && found.contains("deepseek-v4-flash"), "{found}");
    }
    let mut m = good.clone();
    m.entries.retain(|(k, _)| k != "deepseek4.swiglu_clamp_exp");
    assert!(difference(&m, &t, false).contains("swiglu_clamp_exp is missing"));
}

#[test]
fn deepseek_v4_floats_that_a_writer_stored_as_integers_are_read() {
    let (mut m, t) = model("deepseek-v4-flash", GgmlType::IQ2_XXS, GgmlType::Q2_K);
    for (key, value) in [
        ("rope.freq_base", Value::U64(10_000)),
        ("attention.compress_rope_freq_base", Value::I64(160_000)),
        ("rope.scaling.factor", Value::U64(16)),
        ("rope.scaling.yarn_beta_fast", Value::U64(32)),
        ("rope.scaling.yarn_beta_slow", Value::U64(1)),
        ("swiglu_clamp_exp", Value::Ints(vec![10; 44])),
    ] {
        m.set(&format!("deepseek4.{key}"), value);
    }
    let found = Catalog::builtin().identify(&m, &t, false).unwrap();
    assert_eq!((found.entry.id.as_str(), found.hyper.float("yarn_factor")), ("deepseek-v4-flash", Some(16.0)));
}

#[test]
fn deepseek_v4_mixers_may_be_f32_as_other_converters_write_them() {
    for id in ["deepseek-v4-flash", "deepseek-v4-pro"] {
        let (m, mut t) = model(id, GgmlType::IQ2_XXS, GgmlType::Q2_K);
        let mixers = |t: &mut [TensorInfo], ty| {
            for mixer in t.iter_mut().filter(|t| t.name.contains("hc_") && t.name.ends_with("fn.weight")) {
                mixer.ty = ty;
            }
        };
        mixers(&mut t, GgmlType::F32);
        assert_eq!(Catalog::builtin().identify(&m, &t, false).unwrap().entry.id, id);
        // Some of each kind is no difference either.
        named(&mut t, "output_hc_fn.weight").ty = GgmlType::F16;
        assert!(Catalog::builtin().identify(&m, &t, false).is_ok());
        mixers(&mut t, GgmlType::Q8_0);
        assert!(difference(&m, &t, false).contains("hc_fn.weight has type Q8_0, expected one of F16, F32"));
    }
}

/// Flash's keys with small numbers: layers S C H.
fn small() -> Metadata {
    let catalog = Catalog::builtin();
    let mut m = catalog.metadata_of(catalog.entry("deepseek-v4-flash").unwrap());
    for (key, value) in [
        ("block_count", 3),
        ("embedding_length", 256),
        ("vocab_size", 300),
        ("attention.head_count", 4),
        ("attention.key_length", 64),
        ("attention.value_length", 64),
        ("rope.dimension_count", 32),
        ("attention.q_lora_rank", 64),
        ("attention.output_lora_rank", 32),
        ("attention.output_group_count", 2),
        ("expert_count", 4),
        ("expert_used_count", 2),
        ("expert_feed_forward_length", 256),
        ("hash_layer_count", 1),
        ("attention.indexer.head_count", 2),
        ("attention.indexer.key_length", 64),
        ("attention.indexer.top_k", 8),
    ] {
        m.set(&format!("deepseek4.{key}"), Value::U64(value));
    }
    m.set("deepseek4.attention.compress_ratios", Value::Ints(vec![0, 4, 16]));
    tokenizer(&mut m, 300);
    m
}

#[test]
fn deepseek_v4_dev_models_need_the_flag_and_consistent_dimensions() {
    let catalog = Catalog::builtin();
    let entry = catalog.entry("dev-deepseek4").unwrap();
    let good = small();
    let t = tensors(&catalog.expand(entry, &good).unwrap(), GgmlType::Q2_K, GgmlType::F32);
    assert!(t.iter().any(|t| t.name == "blk.2.attn_compressor_ape.weight" && t.shape == [64, 16]));
    let found = catalog.identify(&good, &t, true).unwrap();
    assert_eq!((found.entry.class, found.hyper.int("layers")), (Class::Dev, Some(3)));
    assert!(difference(&good, &t, false).contains("--allow-dev-models"));
    let mut unhashed = good.clone();
    unhashed.set("deepseek4.hash_layer_count", Value::U64(0));
    let without = tensors(&catalog.expand(entry, &unhashed).unwrap(), GgmlType::Q2_K, GgmlType::F32);
    assert!(catalog.identify(&unhashed, &without, true).is_ok());
    for (key, value, said) in [
        ("attention.indexer.key_length", 48, "index_dim is 48, expected a power of two"),
        ("rope.dimension_count", 128, "rope_dim is 128, expected at most head_dim (64)"),
        ("attention.output_group_count", 3, "heads * head_dim is 256, expected a multiple of groups (3)"),
        ("expert_used_count", 5, "experts_used is 5, expected at most experts (4)"),
        ("hyper_connection.count", 2, "streams is 2, expected to equal 4"),
        ("hash_layer_count", 4, "hash_layers is 4, expected at most layers (3)"),
        ("expert_shared_count", 2, "experts_shared is 2"),
        ("hash_layer_count", 2, "tensor blk.1.ffn_gate_tid2eid.weight is missing"),
        ("block_count", 1 << 31, "compress_ratios has 3 entries"),
    ] {
        let mut m = good.clone();
        m.set(&format!("deepseek4.{key}"), Value::U64(value));
        let found = difference(&m, &t, true);
        assert!(found.contains(said), "{key}: {found}");
    }
}
