//! Small DeepSeek V4 models whose weights are a function of a seed; `tests/oracles/deepseek_v4.py` has the same one.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::sync::Arc;

use ds4_attach::Weights;
use ds4_manifests::{Backend, Chunk, GgmlType, Metadata, ModelIdentity, TensorEntry, Value, WeightManifest};
use ds4_os::SharedBytes;
use serde_json::Value as Json;

/// Offset and scale by the end of a tensor's name; the first match counts.
const RULES: &[(&str, f64, f64)] = &[
    ("norm.weight", 1.0, 0.125),
    ("_base.weight", 0.0, 0.25),
    ("_scale.weight", 1.0, 0.25),
    ("attn_sinks.weight", 0.0, 0.5),
    ("exp_probs_b.bias", 0.0, 0.125),
    ("_ape.weight", 0.0, 0.5),
    ("token_embd.weight", 0.0, 1.0),
    ("_fn.weight", 0.0, 0.125),
    ("ffn_gate_inp.weight", 0.0, 0.25),
    ("_exps.weight", 0.0, 0.25),
    ("_shexp.weight", 0.0, 0.25),
    ("", 0.0, 0.1875),
];

/// Output `i` of splitmix64 seeded with the name's FNV-1a hash and the model's seed.
fn random(name: &str, seed: u64) -> impl Iterator<Item = u64> {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    (1u64..).map(move |i| {
        let mut z = (hash ^ seed).wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

struct Builder<'a> {
    case: &'a Json,
    bytes: Vec<u8>,
    tensors: Vec<TensorEntry>,
}

impl Builder<'_> {
    fn n(&self, key: &str) -> u64 {
        self.case[key].as_u64().unwrap_or_else(|| panic!("{key}"))
    }

    fn push(&mut self, name: &str, ty: GgmlType, shape: &[u64], bytes: &[u8]) {
        let offset = self.bytes.len() as u64;
        self.bytes.extend_from_slice(bytes);
        let (shape, len) = (shape.to_vec(), bytes.len() as u64);
        self.tensors.push(TensorEntry { name: name.into(), ty, shape, chunk: 0, offset, len });
    }

    #[allow(clippy::cast_possible_truncation, reason = "the weight's storage type")]
    fn f32(&mut self, name: &str, shape: &[u64]) {
        let count = usize::try_from(shape.iter().product::<u64>()).unwrap();
        let (_, offset, scale) = RULES.iter().find(|(end, ..)| name.ends_with(end)).unwrap();
        let bytes: Vec<u8> = random(name, self.n("seed"))
            .take(count)
            .flat_map(|h| {
                let u = (h >> 40) as f64 / f64::from(1u32 << 23) - 1.0;
                ((offset + scale * u) as f32).to_le_bytes()
            })
            .collect();
        self.push(name, GgmlType::F32, shape, &bytes);
    }

    /// Slot `j` of token `t` takes the (r mod remaining)-th expert not yet taken.
    fn table(&mut self, name: &str) {
        let (vocab, experts, used) = (self.n("vocab"), self.n("experts"), self.n("used"));
        let mut r = random(name, self.n("seed"));
        let mut bytes = Vec::new();
        for _ in 0..vocab {
            let mut left: Vec<u64> = (0..experts).collect();
            for _ in 0..used {
                let at = usize::try_from(r.next().unwrap() % left.len() as u64).unwrap();
                bytes.extend_from_slice(&i32::try_from(left.remove(at)).unwrap().to_le_bytes());
            }
        }
        self.push(name, GgmlType::I32, &[used, vocab], &bytes);
    }

    /// A block whose tensors are called `prefix.…`.
    fn block(&mut self, prefix: &str, hashed: bool, kind: char) {
        let t = |s: &str| format!("{prefix}.{s}");
        let [d, ff, heads, hd, ql, groups, ol, experts] =
            ["hidden", "ff", "heads", "head_dim", "q_lora", "groups", "o_lora", "experts"].map(|k| self.n(k));
        for part in ["attn", "ffn"] {
            self.f32(&t(&format!("hc_{part}_fn.weight")), &[4 * d, 24]);
            self.f32(&t(&format!("hc_{part}_scale.weight")), &[3]);
            self.f32(&t(&format!("hc_{part}_base.weight")), &[24]);
            self.f32(&t(&format!("{part}_norm.weight")), &[d]);
        }
        self.f32(&t("attn_q_a.weight"), &[d, ql]);
        self.f32(&t("attn_q_a_norm.weight"), &[ql]);
        self.f32(&t("attn_q_b.weight"), &[ql, heads * hd]);
        self.f32(&t("attn_kv.weight"), &[d, hd]);
        self.f32(&t("attn_kv_a_norm.weight"), &[hd]);
        self.f32(&t("attn_sinks.weight"), &[heads]);
        self.f32(&t("attn_output_a.weight"), &[heads * hd / groups, groups * ol]);
        self.f32(&t("attn_output_b.weight"), &[groups * ol, d]);
        self.f32(&t("ffn_gate_inp.weight"), &[d, experts]);
        self.f32(&t("ffn_gate_exps.weight"), &[d, ff, experts]);
        self.f32(&t("ffn_up_exps.weight"), &[d, ff, experts]);
        self.f32(&t("ffn_down_exps.weight"), &[ff, d, experts]);
        self.f32(&t("ffn_gate_shexp.weight"), &[d, ff]);
        self.f32(&t("ffn_up_shexp.weight"), &[d, ff]);
        self.f32(&t("ffn_down_shexp.weight"), &[ff, d]);
        if hashed {
            self.table(&t("ffn_gate_tid2eid.weight"));
        } else {
            self.f32(&t("exp_probs_b.bias"), &[experts]);
        }
        let (ratio, w) = match kind {
            'C' => (self.n("ratio_c"), 2 * hd),
            'H' => (self.n("ratio_h"), hd),
            _ => return,
        };
        self.f32(&t("attn_compressor_kv.weight"), &[d, w]);
        self.f32(&t("attn_compressor_gate.weight"), &[d, w]);
        self.f32(&t("attn_compressor_ape.weight"), &[w, ratio]);
        self.f32(&t("attn_compressor_norm.weight"), &[hd]);
        if kind == 'C' {
            let (ih, id) = (self.n("index_heads"), self.n("index_dim"));
            self.f32(&t("indexer.attn_q_b.weight"), &[ql, ih * id]);
            self.f32(&t("indexer.proj.weight"), &[d, ih]);
            self.f32(&t("indexer_compressor_kv.weight"), &[d, 2 * id]);
            self.f32(&t("indexer_compressor_gate.weight"), &[d, 2 * id]);
            self.f32(&t("indexer_compressor_ape.weight"), &[2 * id, ratio]);
            self.f32(&t("indexer_compressor_norm.weight"), &[id]);
        }
    }

    fn metadata(&self) -> Metadata {
        let layers = self.case["layers"].as_str().unwrap();
        let mut m = Metadata::default();
        m.set("general.architecture", Value::String("deepseek4".into()));
        let mut put = |key: &str, v: Value| m.set(&format!("deepseek4.{key}"), v);
        for (key, value) in [
            ("block_count", layers.len() as u64),
            ("context_length", 4096),
            ("embedding_length", self.n("hidden")),
            ("vocab_size", self.n("vocab")),
            ("attention.head_count", self.n("heads")),
            ("attention.head_count_kv", 1),
            ("attention.key_length", self.n("head_dim")),
            ("attention.value_length", self.n("head_dim")),
            ("rope.dimension_count", self.n("rope")),
            ("attention.q_lora_rank", self.n("q_lora")),
            ("attention.output_lora_rank", self.n("o_lora")),
            ("attention.output_group_count", self.n("groups")),
            ("expert_count", self.n("experts")),
            ("expert_used_count", self.n("used")),
            ("expert_feed_forward_length", self.n("ff")),
            ("expert_shared_count", 1),
            ("hash_layer_count", self.n("hash_layers")),
            ("attention.sliding_window", self.n("window")),
            ("attention.indexer.head_count", self.n("index_heads")),
            ("attention.indexer.key_length", self.n("index_dim")),
            ("attention.indexer.top_k", self.n("index_topk")),
            ("hyper_connection.count", 4),
            ("hyper_connection.sinkhorn_iterations", 20),
            ("rope.scaling.original_context_length", self.n("yarn_ctx")),
        ] {
            put(key, Value::U64(value));
        }
        for (key, value) in [
            ("hyper_connection.epsilon", 1e-6),
            ("attention.layer_norm_rms_epsilon", 1e-6),
            ("rope.freq_base", 10_000.0),
            ("attention.compress_rope_freq_base", 160_000.0),
            ("rope.scaling.factor", 16.0),
            ("rope.scaling.yarn_beta_fast", 32.0),
            ("rope.scaling.yarn_beta_slow", 1.0),
            ("expert_weights_scale", 1.5),
        ] {
            put(key, Value::F64(value));
        }
        put("expert_weights_norm", Value::Bool(true));
        put("swiglu_clamp_exp", Value::Floats(vec![10.0; layers.len()]));
        let ratio = |k| match k {
            'C' => i64::try_from(self.n("ratio_c")).unwrap(),
            'H' => i64::try_from(self.n("ratio_h")).unwrap(),
            _ => 0,
        };
        put("attention.compress_ratios", Value::Ints(layers.chars().map(ratio).collect()));
        m
    }
}

/// The model of one entry of `tests/fixtures/deepseek_v4/cases.json`.
pub fn weights(case: &Json) -> Weights {
    let mut b = Builder { case, bytes: Vec::new(), tensors: Vec::new() };
    let (d, vocab) = (b.n("hidden"), b.n("vocab"));
    b.f32("token_embd.weight", &[d, vocab]);
    b.f32("output_norm.weight", &[d]);
    b.f32("output.weight", &[d, vocab]);
    b.f32("output_hc_fn.weight", &[4 * d, 4]);
    b.f32("output_hc_base.weight", &[4]);
    b.f32("output_hc_scale.weight", &[1]);
    for (i, kind) in case["layers"].as_str().unwrap().chars().enumerate() {
        b.block(&format!("blk.{i}"), (i as u64) < b.n("hash_layers"), kind);
    }
    let metadata = b.metadata();
    finish(b, metadata)
}

/// The prediction block of the same entry: `tests/oracles/deepseek_v4_mtp.py` has the same one.
pub fn mtp_weights(case: &Json) -> Weights {
    let mut b = Builder { case, bytes: Vec::new(), tensors: Vec::new() };
    let d = b.n("hidden");
    for part in ["e_proj", "h_proj"] {
        b.f32(&format!("mtp.0.{part}.weight"), &[d, d]);
    }
    for part in ["enorm", "hnorm", "norm"] {
        b.f32(&format!("mtp.0.{part}.weight"), &[d]);
    }
    b.f32("mtp.0.hc_head_fn.weight", &[4 * d, 4]);
    b.f32("mtp.0.hc_head_base.weight", &[4]);
    b.f32("mtp.0.hc_head_scale.weight", &[1]);
    b.block("mtp.0", false, 'S');
    finish(b, Metadata::default())
}

/// Passes every F32 value through `f(tensor, index, value)`.
pub fn edit(weights: &mut Weights, f: impl Fn(&str, usize, f32) -> f32) {
    let mut bytes = weights.chunks[0].to_vec();
    for t in weights.manifest.tensors.iter().filter(|t| t.ty == GgmlType::F32) {
        let at = usize::try_from(t.offset).unwrap();
        let values = bytes[at..at + usize::try_from(t.len).unwrap()].as_chunks_mut::<4>().0;
        for (i, v) in values.iter_mut().enumerate() {
            *v = f(&t.name, i, f32::from_le_bytes(*v)).to_le_bytes();
        }
    }
    weights.chunks = vec![SharedBytes::new(Arc::new(bytes))];
}

/// A model of the entry's structure that nearly ignores everything but the last token (its sublayers add little to the
/// embedding), and a block that does the same (it passes the embedding on and the state not). So guesses are good, and often
/// enough not.
pub fn forgetful(case: &Json) -> (Weights, Weights) {
    let mut case = case.clone();
    case["seed"] = 4.into();
    let hidden = usize::try_from(case["hidden"].as_u64().unwrap()).unwrap();
    let quiet = |name: &str, v: f32| {
        let output = ["attn_output_b.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight"];
        if output.iter().any(|o| name.ends_with(o)) { v / 64.0 } else { v }
    };
    let mut base = weights(&case);
    edit(&mut base, |name, _, v| if name == "output_norm.weight" { 1.0 } else { quiet(name, v) });
    let mut block = mtp_weights(&case);
    edit(&mut block, |name, i, v| match name {
        "mtp.0.e_proj.weight" => f32::from(u8::from(i % (hidden + 1) == 0)),
        "mtp.0.h_proj.weight" => 0.0,
        "mtp.0.enorm.weight" | "mtp.0.norm.weight" => 1.0,
        _ => quiet(name, v),
    });
    (base, block)
}

fn finish(b: Builder<'_>, metadata: Metadata) -> Weights {
    let chunk = SharedBytes::new(Arc::new(b.bytes));
    Weights {
        manifest: WeightManifest {
            model: ModelIdentity {
                family: "deepseek4".into(),
                artifact: "test".into(),
                name: "test".into(),
                content: [0; 32],
                known: false,
            },
            epoch: 1,
            backend: Backend::Memfd { page: 4096 },
            chunks: vec![Chunk { len: chunk.len() as u64, blake3: [0; 32] }],
            tensors: b.tensors,
            metadata,
        },
        chunks: vec![chunk],
    }
}
