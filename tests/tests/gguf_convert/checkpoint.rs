//! Checkpoints to convert: the committed ones, and one of random weights that K and IQ blocks fit.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ds4_tests::Sandbox;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};

/// A file of the fixture.
pub fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/deepseek_v4/convert").join(path)
}

/// A checkpoint in memory.
#[derive(Clone)]
pub struct Checkpoint {
    pub config: Value,
    pub tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Checkpoint {
    /// The committed one, as transformers saved it.
    pub fn saved() -> Self {
        Self::read("saved")
    }

    pub fn read(name: &str) -> Self {
        let bytes = std::fs::read(fixture(&format!("{name}/model.safetensors"))).unwrap();
        let stored = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = stored.tensors().into_iter();
        let tensors = tensors.map(|(n, v)| (n, (v.dtype(), v.shape().to_vec(), v.data().to_vec()))).collect();
        let config = serde_json::from_slice(&std::fs::read(fixture(&format!("{name}/config.json"))).unwrap()).unwrap();
        Self { config, tensors }
    }

    /// Writes it into a fresh directory.
    pub fn write(&self, sandbox: &Sandbox, name: &str) -> PathBuf {
        let dir = sandbox.dir().join(name);
        std::fs::create_dir(&dir).unwrap();
        let view = |(name, (ty, shape, bytes)): (&String, &(Dtype, Vec<usize>, Vec<u8>))| {
            (
                name.clone(),
                TensorView::new(*ty, shape.clone(), bytes).map(|v| v.data().to_vec()).unwrap(),
                *ty,
                shape.clone(),
            )
        };
        let owned: Vec<_> = self.tensors.iter().map(view).collect();
        let views = owned.iter().map(|(n, b, ty, s)| (n.as_str(), TensorView::new(*ty, s.clone(), b).unwrap()));
        safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        std::fs::copy(fixture("saved/tokenizer.json"), dir.join("tokenizer.json")).unwrap();
        dir
    }

    /// One of hidden size and expert width 256, which K and IQ blocks need, under DeepSeek's own names. Uniform random weights.
    pub fn large() -> Self {
        let mut c = Self::saved();
        let (d, ff, vocab) = (256, 256, 275);
        c.config["hidden_size"] = json!(d);
        c.config["moe_intermediate_size"] = json!(ff);
        c.tensors.clear();
        for (name, shape) in
            [("embed.weight", vec![vocab, d]), ("norm.weight", vec![d]), ("head.weight", vec![vocab, d])]
        {
            c.random(name, shape);
        }
        for (name, shape) in [("fn", vec![4, 4 * d]), ("base", vec![4]), ("scale", vec![1])] {
            c.random(&format!("hc_head_{name}"), shape);
        }
        for i in 0..3 {
            let mut put = |name: &str, shape: &[usize]| c.random(&format!("layers.{i}.{name}"), shape.to_vec());
            for part in ["attn", "ffn"] {
                put(&format!("hc_{part}_fn"), &[24, 4 * d]);
                put(&format!("hc_{part}_base"), &[24]);
                put(&format!("hc_{part}_scale"), &[3]);
                put(&format!("{part}_norm.weight"), &[d]);
            }
            put("attn.wq_a.weight", &[32, d]);
            put("attn.q_norm.weight", &[32]);
            put("attn.wq_b.weight", &[128, 32]);
            put("attn.wkv.weight", &[32, d]);
            put("attn.kv_norm.weight", &[32]);
            put("attn.attn_sink", &[4]);
            put("attn.wo_a.weight", &[32, 64]);
            put("attn.wo_b.weight", &[d, 32]);
            put("ffn.gate.weight", &[4, d]);
            for e in (0..4).map(|e| format!("experts.{e}")).chain(["shared_experts".into()]) {
                put(&format!("ffn.{e}.w1.weight"), &[ff, d]);
                put(&format!("ffn.{e}.w3.weight"), &[ff, d]);
                put(&format!("ffn.{e}.w2.weight"), &[d, ff]);
            }
            if i > 0 {
                put("ffn.gate.bias", &[4]);
                let (ratio, w) = if i == 1 { (4, 2) } else { (32, 1) };
                put("attn.compressor.ape", &[ratio, w * 32]);
                put("attn.compressor.wkv.weight", &[w * 32, d]);
                put("attn.compressor.wgate.weight", &[w * 32, d]);
                put("attn.compressor.norm.weight", &[32]);
            }
            if i == 1 {
                put("attn.indexer.wq_b.weight", &[64, 32]);
                put("attn.indexer.weights_proj.weight", &[4, d]);
                put("attn.indexer.compressor.ape", &[4, 32]);
                put("attn.indexer.compressor.wkv.weight", &[32, d]);
                put("attn.indexer.compressor.wgate.weight", &[32, d]);
                put("attn.indexer.compressor.norm.weight", &[16]);
            }
        }
        let table = (0..i64::try_from(vocab).unwrap())
            .flat_map(|t| [t % 4, (t + 1 + t / 4 % 3) % 4])
            .flat_map(i64::to_le_bytes)
            .collect();
        c.tensors.insert("layers.0.ffn.gate.tid2eid".into(), (Dtype::I64, vec![vocab, 2], table));
        c
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "random weights")]
    fn random(&mut self, name: &str, shape: Vec<usize>) {
        let (mean, scale) = match name {
            n if n.contains("norm") || n.contains("scale") => (1.0, 0.25),
            "embed.weight" => (0.0, 1.0),
            _ if shape.len() == 1 => (0.0, 0.3),
            // Products with unit inputs come out near one.
            _ => (0.0, (3.0 / shape[1] as f32).sqrt()),
        };
        let mut state =
            name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        let mut unit = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / 8_388_608.0 - 1.0
        };
        let bytes = (0..shape.iter().product()).flat_map(|_| (mean + scale * unit()).to_le_bytes()).collect();
        self.tensors.insert(name.into(), (Dtype::F32, shape, bytes));
    }
}
