//! The compiled-in catalog against models built from its own tables, each then made wrong in one way.

use super::*;
use crate::metadata::{StringTable, Value};

fn vocabulary(n: usize) -> Value {
    let mut table = StringTable::default();
    (0..n).for_each(|i| table.push(format!("t{i}").as_bytes()).unwrap());
    Value::Strings(table)
}

/// Metadata of SmolLM2 with the figures of the 135M's config.json.
fn smollm2_metadata() -> Metadata {
    let mut m = Metadata::default();
    m.set("general.architecture", Value::String("llama".into()));
    for (key, value) in [
        ("block_count", 30),
        ("context_length", 8192),
        ("embedding_length", 576),
        ("feed_forward_length", 1536),
        ("attention.head_count", 9),
        ("attention.head_count_kv", 3),
        ("rope.dimension_count", 64),
        ("vocab_size", 49152),
    ] {
        m.set(&format!("llama.{key}"), Value::U64(value));
    }
    m.set("llama.rope.freq_base", Value::F64(100_000.0));
    m.set("llama.attention.layer_norm_rms_epsilon", Value::F64(f64::from(1e-5_f32)));
    m.set("tokenizer.ggml.model", Value::String("gpt2".into()));
    m.set("tokenizer.ggml.pre", Value::String("smollm".into()));
    m.set("tokenizer.ggml.tokens", vocabulary(49152));
    m.set("tokenizer.chat_template", Value::String("{{ messages }}".into()));
    m
}

fn tensor(name: &str, ty: GgmlType, shape: &[u64]) -> TensorInfo {
    let len = ty.tensor_bytes(shape).unwrap();
    TensorInfo { name: name.into(), ty, shape: shape.to_vec(), shard: 0, offset: 0, len }
}

/// The tensors of a llama, written out by hand: not taken from the table under test.
fn llama_tensors(layers: u64, hidden: u64, ffn: u64, kv: u64, vocab: u64) -> Vec<TensorInfo> {
    let mut out = vec![tensor("token_embd.weight", GgmlType::Q8_0, &[hidden, vocab])];
    for i in 0..layers {
        let mut add = |part: &str, ty, shape: &[u64]| out.push(tensor(&format!("blk.{i}.{part}.weight"), ty, shape));
        add("attn_norm", GgmlType::F32, &[hidden]);
        add("ffn_down", GgmlType::Q4_1, &[ffn, hidden]);
        add("ffn_gate", GgmlType::Q4_1, &[hidden, ffn]);
        add("ffn_up", GgmlType::Q4_1, &[hidden, ffn]);
        add("ffn_norm", GgmlType::F32, &[hidden]);
        add("attn_k", GgmlType::Q4_1, &[hidden, kv]);
        add("attn_output", GgmlType::Q4_1, &[hidden, hidden]);
        add("attn_q", GgmlType::Q4_1, &[hidden, hidden]);
        add("attn_v", GgmlType::Q4_1, &[hidden, kv]);
    }
    out.push(tensor("output_norm.weight", GgmlType::F32, &[hidden]));
    out
}

fn smollm2_tensors() -> Vec<TensorInfo> {
    llama_tensors(30, 576, 1536, 192, 49152)
}

/// A refusal's nearest entry and difference.
fn refused(m: &Metadata, t: &[TensorInfo], dev: bool) -> (String, String) {
    match Catalog::builtin().identify(m, t, dev) {
        Err(CatalogError::NoMatch { nearest, difference, .. }) => (nearest, difference),
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[test]
fn the_builtin_catalog_is_well_formed() {
    let catalog = Catalog::builtin();
    let ids: Vec<&str> = catalog.entries().iter().map(|e| e.id.as_str()).collect();
    let deepseek = ["deepseek-v4-flash", "deepseek-v4-pro", "dev-deepseek4"];
    assert_eq!(ids, [&["smollm2-135m", "smollm2-360m", "dev-llama"][..], &deepseek].concat());
    assert_eq!(catalog.entry("smollm2-135m").unwrap().known.len(), 1);
}

#[test]
fn smollm2_135m_is_recognised() {
    let found = Catalog::builtin().identify(&smollm2_metadata(), &smollm2_tensors(), false).unwrap();
    assert_eq!((found.entry.id.as_str(), found.served_name.as_str()), ("smollm2-135m", "smollm2-135m-instruct"));
    assert_eq!(found.entry.class, Class::Validated);
    let h = &found.hyper;
    for (name, value) in
        [("layers", 30), ("hidden", 576), ("heads", 9), ("kv_heads", 3), ("head_dim", 64), ("rope_dim", 64)]
    {
        assert_eq!(h.int(name), Some(value), "{name}");
    }
    assert_eq!(h.float("rope_base"), Some(100_000.0));
    assert_eq!(h.float("layers"), None);
    let expected = found.tensors();
    assert_eq!(expected.len(), 30 * 9 + 2);
    let k = expected.iter().find(|t| t.name == "blk.29.attn_k.weight").unwrap();
    assert_eq!((k.shape.as_slice(), k.layer, k.optional, k.role), (&[576, 192][..], Some(29), false, "matrix"));
    assert!(k.types.contains(&GgmlType::Q4_1) && !k.types.contains(&GgmlType::I32));
}

#[test]
fn smollm2_360m_is_recognised_by_its_figures() {
    let mut m = smollm2_metadata();
    for (key, value) in [
        ("llama.block_count", 32),
        ("llama.embedding_length", 960),
        ("llama.feed_forward_length", 2560),
        ("llama.attention.head_count", 15),
        ("llama.attention.head_count_kv", 5),
    ] {
        m.set(key, Value::U64(value));
    }
    let found = Catalog::builtin().identify(&m, &llama_tensors(32, 960, 2560, 320, 49152), false).unwrap();
    assert_eq!(found.entry.id, "smollm2-360m");
}

#[test]
fn keys_that_files_leave_out_have_their_defaults() {
    let mut m = smollm2_metadata();
    m.entries.retain(|(k, _)| k != "llama.vocab_size" && k != "llama.rope.dimension_count");
    assert!(Catalog::builtin().identify(&m, &smollm2_tensors(), false).is_ok());
    m.entries.retain(|(k, _)| k != "llama.attention.head_count_kv");
    let (nearest, difference) = refused(&m, &smollm2_tensors(), false);
    assert_eq!(nearest, "smollm2-135m");
    assert_eq!(difference, "llama.attention.head_count_kv is 9, expected 3");
}

#[test]
fn the_nearest_entry_and_the_first_difference_are_named() {
    let mut m = smollm2_metadata();
    m.set("llama.block_count", Value::U64(31));
    let e = Catalog::builtin().identify(&m, &smollm2_tensors(), false).unwrap_err();
    assert_eq!(e.code(), "no_catalog_entry");
    assert_eq!(
        e.to_string(),
        "no catalog entry matches; nearest is smollm2-135m: llama.block_count is 31, expected 30"
    );
    m.set("llama.embedding_length", Value::U64(960));
    m.set("llama.attention.head_count", Value::U64(15));
    m.set("llama.attention.head_count_kv", Value::U64(5));
    assert_eq!(refused(&m, &[], false), ("smollm2-360m".into(), "llama.block_count is 31, expected 32".into()));
}

#[test]
fn every_hyper_parameter_counts() {
    let family = Catalog::builtin().family("llama").unwrap();
    for (name, key) in family.data.hyper.iter().map(|h| (h.name.as_str(), h.key.as_str())) {
        for wrong in
            [Value::U64(7), Value::F64(7.5), Value::I64(-1), Value::Ints(vec![9; 30]), Value::String("9".into())]
        {
            let mut m = smollm2_metadata();
            m.set(key, wrong.clone());
            let (nearest, difference) = refused(&m, &smollm2_tensors(), false);
            assert_eq!(nearest, "smollm2-135m", "{name}");
            assert!(difference.starts_with(&format!("{key} is ")), "{name} {wrong:?}: {difference}");
        }
    }
}

#[test]
fn unsupported_families_are_told_what_is_supported() {
    let mut m = smollm2_metadata();
    m.set("general.architecture", Value::String("gpt-j".into()));
    let e = Catalog::builtin().identify(&m, &smollm2_tensors(), true).unwrap_err();
    assert_eq!(e.code(), "unsupported_family");
    assert_eq!(e.to_string(), "architecture \"gpt-j\" is not supported; supported: llama, deepseek4");
    let e = Catalog::builtin().identify(&Metadata::default(), &smollm2_tensors(), true).unwrap_err();
    assert_eq!(e.code(), "no_architecture");
}

#[test]
fn the_tokenizer_counts() {
    for (key, value, said) in [
        ("tokenizer.ggml.model", Value::String("llama".into()), "tokenizer.ggml.model is \"llama\", expected \"gpt2\""),
        (
            "tokenizer.ggml.pre",
            Value::String("default".into()),
            "tokenizer.ggml.pre is \"default\", expected \"smollm\"",
        ),
        ("tokenizer.ggml.tokens", vocabulary(100), "tokenizer.ggml.tokens has 100 tokens, expected 49152"),
        ("tokenizer.ggml.tokens", Value::Bool(true), "tokenizer.ggml.tokens is missing"),
        ("tokenizer.chat_template", Value::Bool(true), "tokenizer.chat_template is missing"),
    ] {
        let mut m = smollm2_metadata();
        m.set(key, value);
        let (_, difference) = refused(&m, &smollm2_tensors(), false);
        assert!(difference.contains(said), "{difference}");
    }
}

#[test]
fn tensors_missing_misshapen_mistyped_or_unknown_are_named() {
    let m = smollm2_metadata();
    let with = |change: &dyn Fn(&mut Vec<TensorInfo>)| {
        let mut t = smollm2_tensors();
        change(&mut t);
        refused(&m, &t, false).1
    };
    let at = |t: &[TensorInfo], name: &str| t.iter().position(|t| t.name == name).unwrap();
    let q = "blk.7.attn_q.weight";
    assert_eq!(with(&|t| drop(t.remove(at(t, q)))), "tensor blk.7.attn_q.weight is missing");
    assert_eq!(
        with(&|t| {
            let i = at(t, q);
            t[i].shape = vec![576, 577];
        }),
        "tensor blk.7.attn_q.weight has shape [576, 577], expected [576, 576]"
    );
    let difference = with(&|t| {
        let i = at(t, q);
        t[i].ty = GgmlType::I32;
    });
    assert!(
        difference.starts_with("tensor blk.7.attn_q.weight has type I32, expected one of F32, F16"),
        "{difference}"
    );
    let bias = tensor("blk.7.attn_q.bias", GgmlType::F32, &[576]);
    assert_eq!(with(&|t| t.push(bias.clone())), "tensor \"blk.7.attn_q.bias\" is not in the table of smollm2-135m");
    // SmolLM2's head is its embedding: a separate one belongs to another model.
    let head = tensor("output.weight", GgmlType::Q8_0, &[576, 49152]);
    assert_eq!(with(&|t| t.push(head.clone())), "tensor \"output.weight\" is not in the table of smollm2-135m");
}

fn tiny_metadata() -> Metadata {
    let mut m = Metadata::default();
    m.set("general.architecture", Value::String("llama".into()));
    m.set("general.name", Value::String("Tiny Random (test)".into()));
    for (key, value) in [
        ("block_count", 2),
        ("context_length", 128),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("vocab_size", 300),
    ] {
        m.set(&format!("llama.{key}"), Value::U64(value));
    }
    m.set("llama.attention.layer_norm_rms_epsilon", Value::F64(1e-5));
    m
}

#[test]
fn dev_models_need_the_flag_and_may_have_a_head_of_their_own() {
    let m = tiny_metadata();
    let mut t = llama_tensors(2, 64, 96, 32, 300);
    let e = Catalog::builtin().identify(&m, &t, false).unwrap_err();
    assert!(e.to_string().contains("--allow-dev-models"), "{e}");
    for _ in 0..2 {
        let found = Catalog::builtin().identify(&m, &t, true).unwrap();
        assert_eq!((found.entry.id.as_str(), found.served_name.as_str()), ("dev-llama", "tiny-random-test"));
        assert_eq!(found.entry.class, Class::Dev);
        assert_eq!((found.hyper.int("head_dim"), found.hyper.float("rope_base")), (Some(16), Some(10_000.0)));
        t.push(tensor("output.weight", GgmlType::F16, &[64, 300]));
    }
}

#[test]
fn dev_models_must_be_consistent() {
    let t = llama_tensors(2, 64, 96, 32, 300);
    for (key, value, said) in [
        ("llama.attention.head_count_kv", Value::U64(3), "heads is 4, expected a multiple of kv_heads (3)"),
        ("llama.attention.head_count", Value::U64(5), "llama.attention.key_length is missing"),
        ("llama.rope.dimension_count", Value::U64(18), "rope_dim is 18, expected at most head_dim (16)"),
        ("llama.rope.dimension_count", Value::U64(15), "rope_dim is 15, expected a multiple of 2"),
        ("llama.attention.value_length", Value::U64(8), "value_dim is 8, expected to equal head_dim (16)"),
        ("llama.block_count", Value::U64(1 << 31), "llama.block_count is 2147483648, but there are only 20 tensors"),
        ("llama.block_count", Value::U64(0), "llama.block_count is 0, expected a whole number"),
        ("llama.rope.freq_base", Value::F64(f64::NAN), "llama.rope.freq_base is NaN, expected a finite number"),
        ("llama.rope.scaling.type", Value::String("yarn".into()), "scaled RoPE is not implemented"),
        ("llama.expert_count", Value::U64(8), "llama.expert_count is 8: mixtures"),
        ("tokenizer.ggml.tokens", vocabulary(299), "tokenizer.ggml.tokens has 299 tokens, expected 300"),
    ] {
        let mut m = tiny_metadata();
        m.set(key, value);
        let (nearest, difference) = refused(&m, &t, true);
        assert_eq!(nearest, "dev-llama");
        assert!(difference.contains(said), "{difference}");
    }
}

#[test]
fn data_files_with_mistakes_are_refused_by_name() {
    let family = FAMILIES[0];
    let entry = ENTRIES[0];
    let fails = |family: &str, entry: &str, said: &str| {
        let e = Catalog::from_toml(&[family], &[entry]).unwrap_err();
        assert!(e.contains(said), "{e}");
    };
    fails(family, &entry.replace("layers = 30", "layers = 30\nlayerz = 30"), "hyper.layerz is not used");
    fails(family, &entry.replace("layers = 30", ""), "hyper.layers is missing");
    fails(family, &entry.replace("family = \"llama\"", "family = \"lama\""), "family \"lama\" is unknown");
    fails(family, &entry.replace("\"Q4_1\"", "\"Q4_7\""), "Q4_7");
    fails(family, &entry.replace("vector = [", "vektor = ["), "no types for role \"vector\"");
    fails(family, &entry.replace("output.weight", "token_embd.weight"), "is not an optional one");
    fails(family, &entry.replace("content = \"f", "content = \"x"), "64 hexadecimal digits");
    fails(&family.replace("\"heads * head_dim\"", "\"heads * head_dimm\""), entry, "unknown \"head_dimm\"");
    fails(&family.replace("\"hidden / heads\"", "\"hidden - heads\""), entry, "neither * nor /");
    let e = Catalog::from_toml(&[family], &[entry, entry]).unwrap_err();
    assert!(e.contains("smollm2-135m occurs twice"), "{e}");
}
