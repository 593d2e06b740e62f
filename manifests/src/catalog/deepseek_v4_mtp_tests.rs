//! The prediction block's table against the published counts, sizes and types, and against its bases.

use super::*;
use crate::metadata::Value;

fn base(id: &str) -> Match<'static> {
    let catalog = Catalog::builtin();
    let entry = catalog.entry(id).unwrap();
    catalog.expand(entry, &catalog.metadata_of(entry)).unwrap()
}

fn drafter() -> &'static Drafter {
    Catalog::builtin().drafter_of("deepseek4").unwrap()
}

/// The block for `base`: Q4_K experts, and mixers of the given type.
fn block(base: &Match<'_>, mixer: GgmlType) -> Vec<TensorInfo> {
    let one = |t: ExpectedTensor<'_>| {
        let ty = match t.role {
            "experts" => GgmlType::Q4_K,
            "mixer" | "small" => mixer,
            "matrix" | "shared" => GgmlType::Q8_0,
            _ => GgmlType::F32,
        };
        let len = ty.tensor_bytes(&t.shape).unwrap();
        TensorInfo { name: t.name, ty, shape: t.shape, shard: 0, offset: 0, len }
    };
    drafter().tensors(base).into_iter().map(one).collect()
}

fn identify(tensors: &[TensorInfo], dev: bool) -> Result<DrafterMatch<'static>, CatalogError> {
    Catalog::builtin().identify_drafter(&Metadata::default(), tensors, dev).expect("recognised by its names")
}

fn named<'a>(t: &'a mut [TensorInfo], name: &str) -> &'a mut TensorInfo {
    t.iter_mut().find(|t| t.name == format!("mtp.0.{name}")).unwrap()
}

#[test]
fn deepseek_v4_mtp_has_the_published_count_and_size() {
    let t = block(&base("deepseek-v4-flash"), GgmlType::F16);
    assert_eq!(t.len(), 32);
    // "About 3.80 GB = 3.54 GiB", to the last digit given.
    let bytes = t.iter().map(|t| t.len).sum::<u64>();
    assert!((3_795_000_000..3_805_000_000).contains(&bytes), "{bytes}");
    let shape = |name: &str| t.iter().find(|t| t.name == format!("mtp.0.{name}")).unwrap().shape.clone();
    assert_eq!(shape("h_proj.weight"), [4096, 4096]);
    assert_eq!(shape("hc_head_fn.weight"), [16384, 4]);
    assert_eq!(shape("hc_head_scale.weight"), [1]);
    assert_eq!(shape("attn_q_b.weight"), [1024, 32768]);
    assert_eq!(shape("attn_output_a.weight"), [4096, 8192]);
    assert_eq!(shape("ffn_down_exps.weight"), [2048, 4096, 256]);
    assert_eq!(shape("exp_probs_b.bias"), [256]);
}

#[test]
fn deepseek_v4_mtp_is_told_by_its_tensors_and_its_base_by_their_shapes() {
    for (id, name) in [("deepseek-v4-flash", "deepseek-v4-flash-mtp"), ("deepseek-v4-pro", "deepseek-v4-pro-mtp")] {
        for mixer in [GgmlType::F16, GgmlType::F32] {
            let found = identify(&block(&base(id), mixer), false).unwrap();
            assert_eq!((found.family, found.artifact.as_str(), found.name.as_str()), ("deepseek4-mtp", name, name));
            assert_eq!(found.class, Class::Validated);
        }
    }
    let catalog = Catalog::builtin();
    assert!(catalog.identify_drafter::<TensorInfo>(&Metadata::default(), &[], true).is_none());
    let mut mixed = block(&base("deepseek-v4-flash"), GgmlType::F16);
    named(&mut mixed, "norm.weight").name = "output_norm.weight".into();
    assert!(catalog.identify_drafter(&Metadata::default(), &mixed, true).is_none(), "a model with a block in it");
}

#[test]
fn deepseek_v4_mtp_refusals_name_the_first_difference() {
    type Change = fn(&mut Vec<TensorInfo>);
    let changes: [(Change, &str); 7] = [
        (|t| t.retain(|t| !t.name.ends_with("exp_probs_b.bias")), "tensor mtp.0.exp_probs_b.bias is missing"),
        (|t| t.retain(|t| !t.name.contains("hc_head_fn")), "tensor mtp.0.hc_head_fn.weight is missing"),
        (
            |t| named(t, "attn_kv.weight").shape = vec![4096, 576],
            "tensor mtp.0.attn_kv.weight has shape [4096, 576], expected [4096, 512]",
        ),
        (
            |t| named(t, "e_proj.weight").ty = GgmlType::Q4_K,
            "tensor mtp.0.e_proj.weight has type Q4_K, expected one of Q8_0",
        ),
        (
            |t| named(t, "hc_attn_fn.weight").ty = GgmlType::Q8_0,
            "hc_attn_fn.weight has type Q8_0, expected one of F16, F32",
        ),
        (
            |t| named(t, "ffn_up_exps.weight").ty = GgmlType::Q2_K,
            "tensor mtp.0.ffn_up_exps.weight has type Q2_K, expected that of mtp.0.ffn_gate_exps.weight, Q4_K",
        ),
        (
            |t| {
                let more = TensorInfo { name: "mtp.0.attn_compressor_kv.weight".into(), ..t[0].clone() };
                t.push(more);
            },
            "tensor \"mtp.0.attn_compressor_kv.weight\" is not in the table of deepseek4-mtp",
        ),
    ];
    for (change, said) in changes {
        let mut t = block(&base("deepseek-v4-flash"), GgmlType::F16);
        change(&mut t);
        let e = identify(&t, false).unwrap_err();
        let text = e.to_string();
        assert!(text.contains(said) && text.contains("nearest is deepseek-v4-flash-mtp"), "{text}");
        assert_eq!(e.code(), "no_catalog_entry");
    }
}

/// A development base: PRO's keys with small numbers.
fn small(heads: u64) -> Match<'static> {
    let catalog = Catalog::builtin();
    let mut m = catalog.metadata_of(catalog.entry("deepseek-v4-pro").unwrap());
    for (key, value) in [
        ("block_count", 3),
        ("embedding_length", 256),
        ("attention.head_count", heads),
        ("attention.key_length", 64),
        ("attention.value_length", 64),
        ("attention.q_lora_rank", 64),
        ("attention.output_lora_rank", 32),
        ("attention.output_group_count", 2),
        ("expert_count", 8),
        ("expert_feed_forward_length", 256),
    ] {
        m.set(&format!("deepseek4.{key}"), Value::U64(value));
    }
    catalog.expand(catalog.entry("dev-deepseek4").unwrap(), &m).unwrap()
}

#[test]
fn deepseek_v4_mtp_of_development_models_needs_the_flag_and_consistent_dimensions() {
    let good = block(&small(4), GgmlType::F32);
    let refused = identify(&good, false).unwrap_err().to_string();
    assert!(refused.contains("--allow-dev-models"), "{refused}");
    let found = identify(&good, true).unwrap();
    assert_eq!((found.artifact.as_str(), found.class), ("dev-deepseek4-mtp", Class::Dev));
    let mut named_file = Metadata::default();
    named_file.set("general.name", Value::String("My MTP (synthetic)".into()));
    let found = Catalog::builtin().identify_drafter(&named_file, &good, true).unwrap().unwrap();
    assert_eq!(found.name, "my-mtp-synthetic");
    for (name, shape, said) in [
        ("h_proj.weight", vec![256, 128], "tensor mtp.0.h_proj.weight has shape [256, 128], expected [256, 256]"),
        ("attn_q_b.weight", vec![64, 512], "attn_q_b.weight has shape [64, 512], expected [64, 256]"),
        ("attn_output_b.weight", vec![96, 256], "attn_output_b.weight has shape [96, 256], expected [64, 256]"),
        ("exp_probs_b.bias", vec![4], "exp_probs_b.bias has shape [4], expected [8]"),
        ("attn_sinks.weight", vec![4, 1], "attn_sinks.weight has shape [4, 1], expected [4]"),
    ] {
        let mut t = good.clone();
        named(&mut t, name).shape = shape;
        let text = identify(&t, true).unwrap_err().to_string();
        assert!(text.contains(said) && text.contains("dev-deepseek4-mtp"), "{text}");
    }
}

#[test]
fn deepseek_v4_mtp_is_held_against_the_model_that_it_is_given_to() {
    let flash = base("deepseek-v4-flash");
    let t = block(&flash, GgmlType::F32);
    assert_eq!(drafter().difference(&flash, &t), None);
    let said = drafter().difference(&base("deepseek-v4-pro"), &t).unwrap();
    assert_eq!(said, "tensor mtp.0.norm.weight has shape [4096], expected [7168]");
    // Consistent in itself, but with other heads.
    let said = drafter().difference(&small(8), &block(&small(4), GgmlType::F32)).unwrap();
    assert_eq!(said, "tensor mtp.0.attn_sinks.weight has shape [4], expected [8]");
    let catalog = Catalog::builtin();
    let llama = catalog.entry("smollm2-135m").unwrap();
    let llama = catalog.expand(llama, &catalog.metadata_of(llama)).unwrap();
    assert!(drafter().difference(&llama, &t).unwrap().contains("for models of family deepseek4, not llama"));
}

#[test]
fn deepseek_v4_mtp_tables_that_are_malformed_are_refused_with_the_row() {
    let good = DRAFTERS[0];
    let load = |text: &str| Catalog::from_toml(FAMILIES, ENTRIES).unwrap().with_drafters(&[text]).map(|_| ());
    assert_eq!(load(good), Ok(()));
    for (from, to, said) in [
        ("base = \"deepseek4\"", "base = \"deepseek5\"", "base \"deepseek5\" is unknown"),
        ("\"q_lora\"]", "\"q_lore\"]", "the row of \"mtp.0.attn_q_a.weight\" uses unknown \"q_lore\""),
        ("name = \"mtp.0.enorm.weight\"", "name = \"enorm.weight\"", "\"enorm.weight\" does not begin with \"mtp.0.\""),
        ("role = \"shared\"", "role = \"common\"", "no types for role \"common\""),
        ("same_type = [[\"mtp.0.ffn_gate_exps.weight\"", "same_type = [[\"mtp.0.gate\"", "unknown row \"mtp.0.gate\""),
        ("prefix = \"mtp.0.\"", "prefiks = \"mtp.0.\"", "prefiks"),
    ] {
        assert!(good.contains(from), "{from}");
        let e = load(&good.replacen(from, to, 1)).unwrap_err();
        assert!(e.contains(said), "{said} in {e}");
    }
}
