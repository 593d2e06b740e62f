//! Hyper-parameters of DeepSeek V4, read from `deepseek4.*` metadata.

use ds4_kernels::math::yarn::Yarn;
use ds4_kernels::ops::{HyperParams, RouterParams};
use ds4_manifests::Metadata;

use crate::ModelError;

/// What one layer is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerKind {
    /// Tokens per compressed row; 0: sliding window only.
    pub ratio: usize,
    /// Experts come from the token-id table instead of the learned router.
    pub hashed: bool,
    /// SwiGLU clamp.
    pub clamp: f32,
}

impl LayerKind {
    /// Whether the layer selects compressed rows with the lightning indexer.
    pub fn indexed(&self, p: &Params) -> bool {
        self.ratio == p.indexed_ratio
    }
}

/// Everything that the forward pass needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct Params {
    /// Vocabulary size.
    pub vocab: usize,
    /// Longest context, tokens.
    pub context: usize,
    /// Hidden size `D`.
    pub hidden: usize,
    /// Per layer.
    pub layers: Vec<LayerKind>,
    /// Query heads.
    pub heads: usize,
    /// Elements per head (keys are values).
    pub head_dim: usize,
    /// Rotary elements at the end of each head.
    pub rope_dim: usize,
    /// Rank of the query projection.
    pub q_lora: usize,
    /// Output groups.
    pub o_groups: usize,
    /// Rank of each output group.
    pub o_lora: usize,
    /// Routed experts.
    pub experts: usize,
    /// Expert width, routed and shared.
    pub ff: usize,
    /// Sliding window, tokens.
    pub window: usize,
    /// Indexer heads.
    pub index_heads: usize,
    /// Elements per indexer head.
    pub index_dim: usize,
    /// Rows that the indexer keeps.
    pub index_top_k: usize,
    /// The ratio whose layers have overlapping windows and an indexer (the smallest non-zero one).
    pub indexed_ratio: usize,
    /// RMSNorm epsilon.
    pub rms_eps: f32,
    /// Hyper-connections.
    pub hyper: HyperParams,
    /// Router.
    pub router: RouterParams,
    /// RoPE base of sliding-window layers.
    pub rope_base: f64,
    /// RoPE base of compressed layers.
    pub compress_base: f64,
    /// YaRN of compressed layers.
    pub yarn: Yarn,
    /// What the arrays with an entry a layer say of the block behind the layers, where they are longer: ratio and clamp.
    pub beyond: (Option<i64>, Option<f32>),
}

fn missing(key: &str) -> ModelError {
    ModelError::Bind(format!("metadata key deepseek4.{key} is missing or of another type"))
}

impl Params {
    /// Reads and cross-checks the metadata.
    pub fn from_metadata(m: &Metadata) -> Result<Self, ModelError> {
        let int = |key: &str| -> Result<usize, ModelError> {
            m.u64(&format!("deepseek4.{key}")).and_then(|v| usize::try_from(v).ok()).ok_or_else(|| missing(key))
        };
        let float =
            |key: &str| -> Result<f64, ModelError> { m.f64(&format!("deepseek4.{key}")).ok_or_else(|| missing(key)) };
        #[allow(clippy::cast_possible_truncation, reason = "kernels compute in f32")]
        let float32 = |key: &str| -> Result<f32, ModelError> { float(key).map(|v| v as f32) };

        let count = int("block_count")?;
        let ratios =
            m.ints("deepseek4.attention.compress_ratios").ok_or_else(|| missing("attention.compress_ratios"))?;
        let clamps = m.floats("deepseek4.swiglu_clamp_exp").ok_or_else(|| missing("swiglu_clamp_exp"))?;
        if ratios.len() < count || clamps.len() < count {
            return Err(ModelError::Bind(format!(
                "deepseek4.block_count is {count}, but attention.compress_ratios has {} entries and swiglu_clamp_exp {}",
                ratios.len(),
                clamps.len()
            )));
        }
        let hashed = int("hash_layer_count")?;
        let layers = (0..count)
            .map(|i| {
                let ratio = usize::try_from(ratios[i]).map_err(|_| {
                    ModelError::Bind(format!("compress_ratios[{i}] is {}, expected 0 or more", ratios[i]))
                })?;
                Ok(LayerKind { ratio, hashed: i < hashed, clamp: clamps[i] })
            })
            .collect::<Result<Vec<_>, ModelError>>()?;
        let streams = int("hyper_connection.count")?;
        let eps = float32("hyper_connection.epsilon")?;
        let rms_eps = float32("attention.layer_norm_rms_epsilon")?;
        Ok(Self {
            vocab: int("vocab_size")?,
            context: int("context_length")?,
            hidden: int("embedding_length")?,
            heads: int("attention.head_count")?,
            head_dim: int("attention.key_length")?,
            rope_dim: int("rope.dimension_count")?,
            q_lora: int("attention.q_lora_rank")?,
            o_groups: int("attention.output_group_count")?,
            o_lora: int("attention.output_lora_rank")?,
            experts: int("expert_count")?,
            ff: int("expert_feed_forward_length")?,
            window: int("attention.sliding_window")?,
            index_heads: int("attention.indexer.head_count")?,
            index_dim: int("attention.indexer.key_length")?,
            index_top_k: int("attention.indexer.top_k")?,
            indexed_ratio: 4,
            rms_eps,
            hyper: HyperParams { streams, iterations: int("hyper_connection.sinkhorn_iterations")?, eps, rms_eps },
            // The floor is the smallest normal f16, as the published kernels have it.
            router: RouterParams {
                used: int("expert_used_count")?,
                scale: float32("expert_weights_scale")?,
                floor: 6.103_515_6e-5,
            },
            rope_base: float("rope.freq_base")?,
            compress_base: float("attention.compress_rope_freq_base")?,
            yarn: Yarn {
                factor: float("rope.scaling.factor")?,
                original_context: float("rope.scaling.original_context_length")?,
                beta_fast: float("rope.scaling.yarn_beta_fast")?,
                beta_slow: float("rope.scaling.yarn_beta_slow")?,
            },
            beyond: (ratios.get(count).copied(), clamps.get(count).copied()),
            layers,
        })
    }

    /// The prediction block's kind: no compressed rows, a learned router, and the clamp of the entry behind the layers, else of the
    /// last layer.
    ///
    /// # Errors
    /// [`ModelError::Bind`] when the metadata gives the block compressed rows.
    pub fn mtp_kind(&self) -> Result<LayerKind, ModelError> {
        let count = self.layers.len();
        match self.beyond {
            (Some(ratio), _) if ratio != 0 => Err(ModelError::Bind(format!(
                "compress_ratios[{count}] is {ratio}: a prediction block with compressed rows is not implemented"
            ))),
            (_, clamp) => {
                let clamp = clamp.or_else(|| self.layers.last().map(|l| l.clamp)).unwrap_or(f32::INFINITY);
                Ok(LayerKind { ratio: 0, hashed: false, clamp })
            }
        }
    }
}
