//! `config.json` of a DeepSeek V4 checkpoint as GGUF metadata.
//!
//! Keys: transformers 5.24's `DeepseekV4Config`, and the spellings of the model hub's own files (`compress_ratios`,
//! `num_hash_layers`, `qk_rope_head_dim`, `rope_scaling`). A value that asks for something that the forward pass does not do
//! is refused by its key; so is a missing one, for a guess would convert but not answer.

use ds4_manifests::{Metadata, Value};
use serde_json::{Map, Value as Json};

use super::bad;

/// Keys of the two RoPE dictionaries that are understood.
const ROPE_KEYS: &[&str] = &[
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    // transformers and the official code multiply nothing by YaRN's magnitude scale.
    "mscale",
    "mscale_all_dim",
];

/// One dictionary of the file, with its name for messages.
struct Dict<'a> {
    name: &'a str,
    map: &'a Map<String, Json>,
}

impl<'a> Dict<'a> {
    fn refuse(&self, key: &str, expected: &str) -> anyhow::Error {
        let prefix = if self.name.is_empty() { String::new() } else { format!("{}.", self.name) };
        match self.map.get(key) {
            Some(v) => bad(format!("config.json: {prefix}{key} is {v}, expected {expected}")),
            None => bad(format!("config.json: {prefix}{key} is missing, expected {expected}")),
        }
    }

    /// A value that is not null.
    fn get(&self, key: &str) -> Option<&'a Json> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn int(&self, key: &str) -> anyhow::Result<u64> {
        self.get(key).and_then(Json::as_u64).ok_or_else(|| self.refuse(key, "a whole number"))
    }

    /// A number, rounded to f32 as files keep it.
    fn float(&self, key: &str) -> anyhow::Result<f64> {
        #[allow(clippy::cast_possible_truncation, reason = "files keep f32")]
        let narrow = |v: f64| f64::from(v as f32);
        let value = self.get(key).and_then(Json::as_f64).map(narrow).filter(|v| v.is_finite());
        value.ok_or_else(|| self.refuse(key, "a number"))
    }

    fn string(&self, key: &str) -> anyhow::Result<&'a str> {
        self.get(key).and_then(Json::as_str).ok_or_else(|| self.refuse(key, "a string"))
    }

    fn dict(&self, key: &'a str) -> Option<Dict<'a>> {
        self.get(key).and_then(Json::as_object).map(|map| Dict { name: key, map })
    }

    /// Refuses every value but one. A key that is not there has it.
    fn only(&self, key: &str, allowed: &Json) -> anyhow::Result<()> {
        match self.get(key) {
            Some(found) if found != allowed => {
                Err(self.refuse(key, &format!("{allowed}: nothing else is implemented")))
            }
            _ => Ok(()),
        }
    }
}

/// The architecture's keys, without name and tokenizer.
pub fn metadata(config: &Json) -> anyhow::Result<Metadata> {
    let map = config.as_object().ok_or_else(|| bad("config.json is not an object".into()))?;
    let c = Dict { name: "", map };
    if c.get("model_type").and_then(Json::as_str) != Some("deepseek_v4") {
        return Err(c.refuse("model_type", "\"deepseek_v4\": no other family is converted"));
    }
    if let Some(q) = c.dict("quantization_config") {
        // FP8 and FP4 weights have their scales beside them; which they are is read from the tensors.
        if q.string("quant_method")? != "fp8" {
            return Err(q.refuse("quant_method", "\"fp8\"; save the checkpoint dequantised"));
        }
        q.only("fmt", &Json::from("e4m3"))?;
    }
    for (key, allowed) in [
        ("hidden_act", Json::from("silu")),
        ("scoring_func", Json::from("sqrtsoftplus")),
        ("norm_topk_prob", Json::from(true)),
        ("attention_bias", Json::from(false)),
        ("mlp_bias", Json::from(false)),
        ("tie_word_embeddings", Json::from(false)),
        ("num_key_value_heads", Json::from(1)),
        ("n_shared_experts", Json::from(1)),
        ("hc_mult", Json::from(4)),
        ("n_group", Json::from(1)),
        ("topk_group", Json::from(1)),
    ] {
        c.only(key, &allowed)?;
    }

    let mut m = Metadata::default();
    m.set("general.architecture", Value::String("deepseek4".into()));
    let mut put = |key: &str, value: Value| m.set(&format!("deepseek4.{key}"), value);
    let layers = c.int("num_hidden_layers")?;
    let head_dim = c.int("head_dim")?;
    for (key, from) in [
        ("block_count", "num_hidden_layers"),
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("vocab_size", "vocab_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.key_length", "head_dim"),
        ("attention.value_length", "head_dim"),
        ("attention.q_lora_rank", "q_lora_rank"),
        ("attention.output_lora_rank", "o_lora_rank"),
        ("attention.output_group_count", "o_groups"),
        ("expert_count", "n_routed_experts"),
        ("expert_used_count", "num_experts_per_tok"),
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("attention.sliding_window", "sliding_window"),
        ("attention.indexer.head_count", "index_n_heads"),
        ("attention.indexer.key_length", "index_head_dim"),
        ("attention.indexer.top_k", "index_topk"),
        ("hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters"),
    ] {
        put(key, Value::U64(c.int(from)?));
    }
    for (key, value) in [
        ("attention.head_count_kv", 1),
        ("expert_shared_count", 1),
        ("hyper_connection.count", 4),
        // The square root of softplus.
        ("expert_gating_func", 4),
    ] {
        put(key, Value::U64(value));
    }
    for (key, from) in [
        ("hyper_connection.epsilon", "hc_eps"),
        ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        ("expert_weights_scale", "routed_scaling_factor"),
    ] {
        put(key, Value::F64(c.float(from)?));
    }
    put("expert_weights_norm", Value::Bool(true));

    let rope = Rope::read(&c, head_dim)?;
    put("rope.dimension_count", Value::U64(rope.dims));
    put("rope.freq_base", Value::F64(rope.base));
    put("attention.compress_rope_freq_base", Value::F64(rope.compress_base));
    put("rope.scaling.type", Value::String("yarn".into()));
    put("rope.scaling.factor", Value::F64(rope.factor));
    put("rope.scaling.original_context_length", Value::U64(rope.original_context));
    put("rope.scaling.yarn_beta_fast", Value::F64(rope.beta_fast));
    put("rope.scaling.yarn_beta_slow", Value::F64(rope.beta_slow));

    let count = usize::try_from(layers)?;
    put("hash_layer_count", Value::U64(hash_layers(&c, layers)?));
    put("attention.compress_ratios", Value::Ints(ratios(&c, count)?));
    let clamp = c.float("swiglu_limit")?;
    #[allow(clippy::cast_possible_truncation, reason = "it was rounded to f32")]
    put("swiglu_clamp_exp", Value::Floats(vec![clamp as f32; count]));
    Ok(m)
}

struct Rope {
    dims: u64,
    base: f64,
    compress_base: f64,
    factor: f64,
    original_context: u64,
    beta_fast: f64,
    beta_slow: f64,
}

impl Rope {
    /// Either `rope_parameters` with `main` and `compress` inside (transformers), or one dictionary of YaRN with the bases
    /// beside it (the hub's files).
    fn read(c: &Dict<'_>, head_dim: u64) -> anyhow::Result<Self> {
        let outer = c.dict("rope_parameters").or_else(|| c.dict("rope_scaling"));
        let outer = outer.ok_or_else(|| c.refuse("rope_parameters", "the YaRN figures of compressed layers"))?;
        let (main, compress) = match (outer.dict("main"), outer.dict("compress")) {
            (Some(main), Some(compress)) => (Some(main), compress),
            _ => (None, outer),
        };
        for dict in main.iter().chain([&compress]) {
            if let Some(key) = dict.map.keys().find(|k| !ROPE_KEYS.contains(&k.as_str())) {
                return Err(dict.refuse(key, "no such key: it is not implemented"));
            }
        }
        let kind = |d: &Dict<'_>| d.string("rope_type").or_else(|_| d.string("type")).map(str::to_owned);
        if let Some(main) = &main {
            match kind(main).as_deref() {
                Ok("default") | Err(_) => {}
                Ok(_) => return Err(main.refuse("rope_type", "\"default\" in sliding-window layers")),
            }
        }
        if compress.get("attention_factor").is_some_and(|v| v.as_f64() != Some(1.0)) {
            return Err(compress.refuse("attention_factor", "1: nothing else is implemented"));
        }
        let (factor, original_context, beta_fast, beta_slow) = match kind(&compress)?.as_str() {
            "yarn" => (
                compress.float("factor")?,
                compress.int("original_max_position_embeddings")?,
                compress.float("beta_fast")?,
                compress.float("beta_slow")?,
            ),
            // YaRN by a factor of one changes no frequency.
            "default" => (1.0, c.int("max_position_embeddings")?, 32.0, 1.0),
            _ => return Err(compress.refuse("rope_type", "\"yarn\" or \"default\"")),
        };
        let base = main.as_ref().filter(|m| m.get("rope_theta").is_some()).unwrap_or(c).float("rope_theta")?;
        let compress_base = match &main {
            Some(_) if compress.get("rope_theta").is_some() => compress.float("rope_theta")?,
            _ => c.float("compress_rope_theta")?,
        };
        let shares: Vec<f64> = main
            .iter()
            .chain([&compress, c])
            .filter_map(|d| d.get("partial_rotary_factor").and_then(Json::as_f64))
            .collect();
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "small"
        )]
        let of_share = |share: &f64| (head_dim as f64 * share) as u64;
        let explicit = c.get("qk_rope_head_dim").map(|_| c.int("qk_rope_head_dim")).transpose()?;
        let all: Vec<u64> = shares.iter().map(of_share).chain(explicit).collect();
        let dims = *all.first().ok_or_else(|| c.refuse("qk_rope_head_dim", "the rotary elements of a head"))?;
        if let Some(other) = all.iter().find(|d| **d != dims) {
            return Err(bad(format!(
                "config.json: partial_rotary_factor and qk_rope_head_dim mean {dims} and {other} rotary elements; one \
                 number is implemented"
            )));
        }
        Ok(Self { dims, base, compress_base, factor, original_context, beta_fast, beta_slow })
    }
}

/// The first layers are hashed; how many.
fn hash_layers(c: &Dict<'_>, layers: u64) -> anyhow::Result<u64> {
    let Some(kinds) = c.get("mlp_layer_types") else {
        return match c.get("num_hash_layers") {
            Some(_) => Ok(c.int("num_hash_layers")?.min(layers)),
            None => Err(c.refuse("mlp_layer_types", "\"hash_moe\" or \"moe\" for each layer, or num_hash_layers")),
        };
    };
    let wrong = || c.refuse("mlp_layer_types", &format!("{layers} of \"hash_moe\", then \"moe\""));
    let kinds: Vec<&str> = kinds.as_array().into_iter().flatten().filter_map(Json::as_str).collect();
    let hashed = kinds.iter().take_while(|k| **k == "hash_moe").count();
    let rest = kinds.iter().skip(hashed).all(|k| *k == "moe");
    if u64::try_from(kinds.len())? != layers || !rest {
        return Err(wrong());
    }
    Ok(u64::try_from(hashed)?)
}

/// Tokens per compressed row of each layer.
fn ratios(c: &Dict<'_>, layers: usize) -> anyhow::Result<Vec<i64>> {
    let Some(kinds) = c.get("layer_types") else {
        // transformers' default schedule is not that of the published models, so none is assumed.
        let Some(list) = c.get("compress_ratios") else {
            return Err(c.refuse("layer_types", "the kind of each layer, or compress_ratios"));
        };
        let list: Option<Vec<i64>> = list.as_array().and_then(|l| l.iter().map(Json::as_i64).collect());
        // One more is for the multi-token prediction block.
        let used = list.and_then(|l| l.get(..layers).map(<[i64]>::to_vec));
        return used.ok_or_else(|| c.refuse("compress_ratios", &format!("at least {layers} whole numbers")));
    };
    let rates = c.dict("compress_rates");
    let rate = |kind: &str, alone: &str| -> anyhow::Result<i64> {
        let value = match (&rates, c.get(alone)) {
            (_, Some(_)) => c.int(alone)?,
            (Some(rates), None) => rates.int(kind)?,
            (None, None) => return Err(c.refuse("compress_rates", "the tokens per row of each kind of layer")),
        };
        Ok(i64::try_from(value)?)
    };
    let kinds = kinds.as_array().ok_or_else(|| c.refuse("layer_types", "a list"))?;
    let ratios = kinds
        .iter()
        .map(|kind| match kind.as_str() {
            Some("sliding_attention") => Ok(0),
            Some("compressed_sparse_attention") => match rate("compressed_sparse_attention", "compress_rate_csa")? {
                4 => Ok(4),
                other => Err(bad(format!(
                    "config.json: compress_rates.compressed_sparse_attention is {other}, expected 4: layers with an \
                     indexer are recognised by it"
                ))),
            },
            Some("heavily_compressed_attention") => match rate("heavily_compressed_attention", "compress_rate_hca")? {
                v if v > 4 => Ok(v),
                other => Err(bad(format!(
                    "config.json: compress_rates.heavily_compressed_attention is {other}, expected more than 4"
                ))),
            },
            _ => Err(bad(format!("config.json: layer_types has {kind}, which is not a kind of layer"))),
        })
        .collect::<anyhow::Result<Vec<i64>>>()?;
    if ratios.len() == layers { Ok(ratios) } else { Err(c.refuse("layer_types", &format!("{layers} entries"))) }
}

#[cfg(test)]
pub mod tests {
    use ds4_manifests::Catalog;
    use serde_json::json;

    use super::*;

    /// As transformers saves it.
    pub fn saved() -> Json {
        let text = r#"{
            "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
            "attention_bias": false, "mlp_bias": false, "tie_word_embeddings": false, "hidden_act": "silu",
            "scoring_func": "sqrtsoftplus", "norm_topk_prob": true, "num_key_value_heads": 1, "n_shared_experts": 1,
            "num_hidden_layers": 43, "hidden_size": 4096, "vocab_size": 129280, "max_position_embeddings": 1048576,
            "num_attention_heads": 64, "head_dim": 512, "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8,
            "n_routed_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 2048, "sliding_window": 128,
            "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "hc_mult": 4, "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
            "rope_theta": 10000.0, "compress_rope_theta": 160000.0, "partial_rotary_factor": 0.125,
            "rope_parameters": {
                "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125},
                "compress": {"rope_type": "yarn", "rope_theta": 160000.0, "partial_rotary_factor": 0.125, "factor": 16,
                    "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.0}
            }
        }"#;
        let mut config: Json = serde_json::from_str(text).unwrap();
        let kind = |i| match i {
            0 | 1 => "sliding_attention",
            i if i % 2 == 0 => "compressed_sparse_attention",
            _ => "heavily_compressed_attention",
        };
        config["layer_types"] = (0..43).map(kind).collect();
        config["mlp_layer_types"] = (0..43).map(|i| if i < 3 { "hash_moe" } else { "moe" }).collect();
        config
    }

    /// The catalog's figures for Flash come from published GGUF files, not from this code.
    fn assert_flash(m: &Metadata) {
        let catalog = Catalog::builtin();
        catalog.expand(catalog.entry("deepseek-v4-flash").unwrap(), m).unwrap();
    }

    #[test]
    fn deepseek_v4_flash_config_gives_the_keys_of_the_published_file() {
        assert_flash(&metadata(&saved()).unwrap());
    }

    #[test]
    fn deepseek_v4_the_hubs_own_spellings_mean_the_same() {
        let mut c = saved();
        let map = c.as_object_mut().unwrap();
        for key in ["layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor"] {
            map.remove(key);
        }
        let ratios: Vec<u64> = (0..44).map(|i| [[4, 128][i % 2], 0][usize::from(i < 2 || i == 43)]).collect();
        map.insert("compress_ratios".into(), json!(ratios));
        map.insert("num_hash_layers".into(), json!(3));
        map.insert("qk_rope_head_dim".into(), json!(64));
        map.insert(
            "rope_scaling".into(),
            json!({"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}),
        );
        let m = metadata(&c).unwrap();
        assert_flash(&m);
        assert_eq!(m, metadata(&saved()).unwrap());
    }

    #[test]
    fn deepseek_v4_config_values_that_are_not_implemented_are_refused_by_key() {
        for (path, value) in [
            ("/model_type", json!("deepseek_v3")),
            ("/hidden_act", json!("gelu")),
            ("/scoring_func", json!("sigmoid")),
            ("/norm_topk_prob", json!(false)),
            ("/attention_bias", json!(true)),
            ("/tie_word_embeddings", json!(true)),
            ("/num_key_value_heads", json!(2)),
            ("/n_shared_experts", json!(2)),
            ("/hc_mult", json!(2)),
            ("/num_hidden_layers", json!("43")),
            ("/head_dim", json!(null)),
            ("/layer_types/3", json!("full_attention")),
            ("/layer_types", json!(["sliding_attention"])),
            ("/mlp_layer_types/5", json!("hash_moe")),
            ("/compress_rates/compressed_sparse_attention", json!(8)),
            ("/compress_rates/heavily_compressed_attention", json!(4)),
            ("/rope_parameters/compress/rope_type", json!("linear")),
            ("/rope_parameters/compress/attention_factor", json!(1.2)),
            ("/rope_parameters/compress/factor", json!("16")),
            ("/rope_parameters/main/rope_type", json!("yarn")),
            ("/rope_parameters/main/partial_rotary_factor", json!(0.25)),
        ] {
            let mut c = saved();
            *c.pointer_mut(path).unwrap() = value;
            let error = metadata(&c).unwrap_err().to_string();
            let key = path.split('/').rfind(|p| p.parse::<usize>().is_err()).unwrap();
            assert!(error.contains(key), "{path}: {error}");
        }
        let mut c = saved();
        c["quantization_config"] = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]});
        metadata(&c).unwrap();
        for (key, value) in [("quant_method", "gptq"), ("fmt", "e5m2")] {
            let mut c = c.clone();
            c["quantization_config"][key] = json!(value);
            assert!(metadata(&c).unwrap_err().to_string().contains(&format!("quantization_config.{key}")));
        }
        let mut c = saved();
        c["rope_parameters"]["compress"]["truncate"] = json!(false);
        assert!(metadata(&c).unwrap_err().to_string().contains("truncate"));
        for key in ["vocab_size", "index_topk", "swiglu_limit", "layer_types", "mlp_layer_types", "rope_parameters"] {
            let mut c = saved();
            c.as_object_mut().unwrap().remove(key);
            let error = metadata(&c).unwrap_err().to_string();
            assert!(error.contains(key) && error.contains("missing"), "{key}: {error}");
        }
    }
}
