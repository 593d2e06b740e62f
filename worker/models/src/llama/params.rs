//! Hyper-parameters of the llama architecture, from GGUF metadata.

use ds4_kernels::{Rope, RopeKind};
use ds4_manifests::Metadata;

use crate::ModelError;

/// What the forward pass needs to know. Keys are those of the GGUF specification, section "LLaMA".
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaParams {
    /// Transformer blocks (`llama.block_count`).
    pub layers: usize,
    /// Residual width (`llama.embedding_length`).
    pub width: usize,
    /// Inner width of the feed-forward network (`llama.feed_forward_length`).
    pub ffn: usize,
    /// Query heads (`llama.attention.head_count`).
    pub heads: usize,
    /// Key-value heads (`llama.attention.head_count_kv`; all heads when absent).
    pub kv_heads: usize,
    /// Elements per head (`llama.attention.key_length`; `width / heads` when absent).
    pub head_dim: usize,
    /// RMSNorm epsilon (`llama.attention.layer_norm_rms_epsilon`).
    pub eps: f32,
    /// RoPE base (`llama.rope.freq_base`; 10000 when absent).
    pub rope_base: f32,
    /// Rotated elements per head (`llama.rope.dimension_count`; all when absent).
    pub rope_dim: usize,
    /// Context that the model was trained for (`llama.context_length`).
    pub context: usize,
}

impl LlamaParams {
    /// Reads and cross-checks the parameters.
    ///
    /// # Errors
    /// [`ModelError::Bind`] naming the key that is missing, out of range or contradicts another.
    pub fn from_metadata(meta: &Metadata) -> Result<Self, ModelError> {
        let optional = |key: &str| -> Result<Option<usize>, ModelError> {
            let key = format!("llama.{key}");
            if meta.get(&key).is_none() {
                return Ok(None);
            }
            match meta.u64(&key).and_then(|v| usize::try_from(v).ok()) {
                Some(v) if (1..=1 << 24).contains(&v) => Ok(Some(v)),
                _ => Err(ModelError::Bind(format!("metadata key {key} is not a number from 1 to 2^24"))),
            }
        };
        let required =
            |key: &str| optional(key)?.ok_or_else(|| ModelError::Bind(format!("metadata key llama.{key} is missing")));
        let (width, heads) = (required("embedding_length")?, required("attention.head_count")?);
        let kv_heads = optional("attention.head_count_kv")?.unwrap_or(heads);
        let head_dim = optional("attention.key_length")?.unwrap_or(width / heads);
        let params = Self {
            layers: required("block_count")?,
            width,
            ffn: required("feed_forward_length")?,
            heads,
            kv_heads,
            head_dim,
            eps: float(meta, "llama.attention.layer_norm_rms_epsilon")?
                .ok_or_else(|| missing("llama.attention.layer_norm_rms_epsilon"))?,
            rope_base: float(meta, "llama.rope.freq_base")?.unwrap_or(10_000.0),
            rope_dim: optional("rope.dimension_count")?.unwrap_or(head_dim),
            context: required("context_length")?,
        };
        params.check(meta)?;
        Ok(params)
    }

    fn check(&self, meta: &Metadata) -> Result<(), ModelError> {
        let bad = |what: String| Err(ModelError::Bind(what));
        if self.width == 0 || self.head_dim == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return bad(format!(
                "{} heads over a width of {} with {} key-value heads do not divide",
                self.heads, self.width, self.kv_heads
            ));
        }
        if self.rope_dim > self.head_dim || !self.rope_dim.is_multiple_of(2) {
            return bad(format!("llama.rope.dimension_count is {} for heads of {}", self.rope_dim, self.head_dim));
        }
        if let Some(value_length) = meta.u64("llama.attention.value_length")
            && usize::try_from(value_length) != Ok(self.head_dim)
        {
            return bad(format!(
                "llama.attention.value_length is {value_length} and keys have {}: not supported",
                self.head_dim
            ));
        }
        // A scaling that is ignored gives fluent nonsense far into a context: refuse rather than ignore.
        if let Some(scaling) = meta.str("llama.rope.scaling.type").filter(|s| *s != "none") {
            return bad(format!("llama.rope.scaling.type is {scaling:?}: only unscaled RoPE is supported"));
        }
        Ok(())
    }

    /// RoPE as the op set takes it. llama GGUFs have the rows of q and k permuted for interleaved pairs.
    pub fn rope(&self) -> Rope {
        Rope { kind: RopeKind::Interleaved, dim: self.rope_dim, base: self.rope_base }
    }

    /// Width of all query heads.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key (or value) heads: the width of a KV row.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

fn missing(key: &str) -> ModelError {
    ModelError::Bind(format!("metadata key {key} is missing"))
}

#[allow(clippy::cast_possible_truncation, reason = "f32 in the file, widened by the reader")]
fn float(meta: &Metadata, key: &str) -> Result<Option<f32>, ModelError> {
    if meta.get(key).is_none() {
        return Ok(None);
    }
    match meta.f64(key) {
        Some(v) if v.is_finite() && v > 0.0 => Ok(Some(v as f32)),
        _ => Err(ModelError::Bind(format!("metadata key {key} is not a positive number"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ds4_manifests::Value;

    fn smollm2() -> Metadata {
        let mut m = Metadata::default();
        for (key, value) in [
            ("block_count", 30),
            ("embedding_length", 576),
            ("feed_forward_length", 1536),
            ("attention.head_count", 9),
            ("attention.head_count_kv", 3),
            ("rope.dimension_count", 64),
            ("context_length", 8192),
        ] {
            m.set(&format!("llama.{key}"), Value::U64(value));
        }
        m.set("llama.attention.layer_norm_rms_epsilon", Value::F64(f64::from(1e-5f32)));
        m.set("llama.rope.freq_base", Value::F64(100_000.0));
        m
    }

    #[test]
    fn reads_smollm2() {
        let p = LlamaParams::from_metadata(&smollm2()).unwrap();
        assert_eq!((p.layers, p.head_dim, p.q_width(), p.kv_width()), (30, 64, 576, 192));
        assert_eq!((p.eps, p.rope_base), (1e-5, 100_000.0));
    }

    #[test]
    fn refusals_name_the_key() {
        let refuse = |key: &str, value: Option<Value>| {
            let mut m = Metadata::default();
            for (k, v) in smollm2().iter() {
                if k != key {
                    m.set(k, v.clone());
                }
            }
            if let Some(v) = value {
                m.set(key, v);
            }
            LlamaParams::from_metadata(&m).unwrap_err().to_string()
        };
        assert!(refuse("llama.block_count", None).contains("llama.block_count is missing"));
        assert!(refuse("llama.embedding_length", Some(Value::U64(1 << 40))).contains("llama.embedding_length"));
        assert!(refuse("llama.attention.head_count", Some(Value::U64(0))).contains("head_count"));
        assert!(refuse("llama.attention.head_count_kv", Some(Value::U64(4))).contains("do not divide"));
        assert!(refuse("llama.rope.dimension_count", Some(Value::U64(65))).contains("dimension_count is 65"));
        assert!(refuse("llama.rope.scaling.type", Some(Value::String("yarn".into()))).contains("yarn"));
        assert!(refuse("llama.attention.layer_norm_rms_epsilon", Some(Value::F64(f64::NAN))).contains("epsilon"));
        assert!(refuse("llama.attention.value_length", Some(Value::U64(32))).contains("value_length is 32"));
    }
}
