//! What the tests of models and of the engine share: a GGUF as [`Weights`], and the committed fixtures.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ds4_attach::Weights;
use ds4_kernels::{BatchPlan, CpuDevice, Device};
use ds4_manifests::gguf::GgufModel;
use ds4_manifests::{Backend, Chunk, ModelIdentity, TensorEntry, WeightManifest};
use ds4_models::Model;
use ds4_os::SharedBytes;
use serde_json::Value;

/// A file under `tests/fixtures` of the workspace, or of `DS4_FIXTURES` (a machine without the source tree).
pub fn fixture(path: &str) -> PathBuf {
    if let Some(folder) = std::env::var_os("DS4_FIXTURES") {
        return Path::new(&folder).join(path);
    }
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(path)
}

/// A JSON fixture.
pub fn json(path: &str) -> Value {
    let path = fixture(path);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The starter model's path: `DS4_STARTER_MODEL`, else the user's cache.
pub fn starter_path() -> PathBuf {
    let path = starter_place();
    assert!(path.is_file(), "the starter model is not at {}: run scripts/test, which fetches it", path.display());
    path
}

/// Where the starter model is looked for.
pub fn starter_place() -> PathBuf {
    std::env::var_os("DS4_STARTER_MODEL").map(PathBuf::from).unwrap_or_else(|| {
        let cache = std::env::var_os("XDG_CACHE_HOME")
            .map(PathBuf::from)
            .unwrap_or_else(|| PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache"));
        cache.join("ds4/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    })
}

/// A model file read into memory, as an owner would publish it.
pub fn weights(path: &Path) -> Weights {
    let model = GgufModel::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let chunks: Vec<SharedBytes> = model
        .shards
        .iter()
        .map(|s| {
            let file = std::fs::File::open(&s.path).unwrap();
            let mut bytes = Vec::new();
            std::io::Read::read_to_end(&mut &file, &mut bytes).unwrap();
            SharedBytes::new(Arc::new(bytes))
        })
        .collect();
    Weights {
        manifest: WeightManifest {
            model: ModelIdentity {
                family: model.metadata.str("general.architecture").unwrap_or_default().to_owned(),
                artifact: "test".into(),
                name: "test".into(),
                content: [0; 32],
                known: false,
            },
            epoch: 1,
            backend: Backend::Memfd { page: 4096 },
            chunks: chunks.iter().map(|c| Chunk { len: c.len() as u64, blake3: [0; 32] }).collect(),
            tensors: model
                .tensors
                .iter()
                .map(|t| TensorEntry {
                    name: t.name.clone(),
                    ty: t.ty,
                    shape: t.shape.clone(),
                    chunk: u32::try_from(t.shard).unwrap(),
                    offset: t.offset,
                    len: t.len,
                })
                .collect(),
            metadata: model.metadata,
        },
        chunks,
    }
}

/// A model on a device with one bank.
pub struct Lone {
    pub device: CpuDevice,
    pub model: Box<dyn Model<CpuDevice>>,
    banks: Vec<<CpuDevice as Device>::Bank>,
    len: usize,
}

impl Lone {
    pub fn load(path: &Path) -> Self {
        let device = CpuDevice::default();
        let model = ds4_models::build(&device, &weights(path)).unwrap();
        Self::new(device, model)
    }

    pub fn new(device: CpuDevice, model: Box<dyn Model<CpuDevice>>) -> Self {
        let context = model.shape().context;
        let banks = vec![device.bank(model.state(), context).unwrap()];
        Self { device, model, banks, len: 0 }
    }

    /// Forgets the sequence.
    pub fn reset(&mut self) {
        self.len = 0;
        self.device.bank_trim(&mut self.banks[0], 0);
    }

    /// Appends tokens in one step; returns the logits of those whose index within `tokens` is in `wanted`.
    pub fn feed(&mut self, tokens: &[u32], wanted: &[usize]) -> Vec<Vec<f32>> {
        let mut plan = BatchPlan::default();
        plan.push(0, self.len, tokens, false);
        plan.wanted = wanted.to_vec();
        self.len += tokens.len();
        self.device.bank_commit(&mut self.banks[0], self.len).unwrap();
        self.model.forward(&self.device, &plan, &mut self.banks).unwrap();
        let mut rows = Vec::new();
        for i in 0..wanted.len() {
            let mut row = Vec::new();
            self.device.read(self.model.logits(), i, &mut row);
            rows.push(row);
        }
        rows
    }

    /// Logits of every token of a fresh sequence fed `chunk` at a time.
    pub fn all_logits(&mut self, tokens: &[u32], chunk: usize) -> Vec<Vec<f32>> {
        self.reset();
        tokens.chunks(chunk).flat_map(|c| self.feed(c, &(0..c.len()).collect::<Vec<_>>())).collect()
    }

    /// Logits of the last token of a fresh sequence fed `chunk` at a time, as serving does it.
    pub fn last_logits(&mut self, tokens: &[u32], chunk: usize) -> Vec<f32> {
        self.reset();
        let mut last = Vec::new();
        let chunks = tokens.len().div_ceil(chunk);
        for (i, c) in tokens.chunks(chunk).enumerate() {
            let wanted: &[usize] = if i + 1 == chunks { &[c.len() - 1] } else { &[] };
            last = self.feed(c, wanted).pop().unwrap_or_default();
        }
        last
    }

    /// Greedy tokens by decode steps, from the logits of the last token fed.
    pub fn decode_greedy(&mut self, mut logits: Vec<f32>, n: usize) -> Vec<u32> {
        let mut out = Vec::new();
        while out.len() < n {
            out.push(argmax(&logits));
            if out.len() < n {
                logits = self.feed(&out[out.len() - 1..], &[0]).remove(0);
            }
        }
        out
    }
}

pub fn argmax(row: &[f32]) -> u32 {
    let mut best = 0;
    for (i, x) in row.iter().enumerate() {
        if *x > row[best] {
            best = i;
        }
    }
    u32::try_from(best).unwrap()
}

pub fn tokens(v: &Value) -> Vec<u32> {
    v.as_array().unwrap().iter().map(|t| u32::try_from(t.as_u64().unwrap()).unwrap()).collect()
}

pub fn floats(v: &Value) -> Vec<f64> {
    v.as_array().unwrap().iter().map(|t| t.as_f64().unwrap()).collect()
}

/// Error of a row as the fixture generator measures it: root mean square relative to the spread of `want`, and the largest.
pub fn errors(got: &[f32], want: &[f64]) -> (f64, f64) {
    assert_eq!(got.len(), want.len());
    let n = want.len() as f64;
    let mean = want.iter().sum::<f64>() / n;
    let spread = (want.iter().map(|w| (w - mean).powi(2)).sum::<f64>() / n).sqrt();
    let diff = || got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).abs());
    ((diff().map(|d| d * d).sum::<f64>() / n).sqrt() / spread, diff().fold(0.0, greater))
}

/// The greater of two; what is no number is greater than all, where `f64::max` passes over it.
pub fn greater(a: f64, b: f64) -> f64 {
    if b.is_nan() { f64::INFINITY } else { a.max(b) }
}
