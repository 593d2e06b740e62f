//! What a DeepSeek V4 sequence keeps: per layer a ring of raw rows, and for compressed layers finished rows and a frontier.

use ds4_kernels::ops::KvNumerics;
use ds4_kernels::{StateKind, StateSpec, StateType};

use super::params::Params;

/// Slots of a compressor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressorSlots {
    /// Finished rows.
    pub rows: usize,
    /// Projected values and scores of the open windows.
    pub frontier: usize,
}

/// Slots of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSlots {
    /// Raw rows of the last `window` tokens.
    pub ring: usize,
    /// Compressed history.
    pub main: Option<CompressorSlots>,
    /// Indexer rows.
    pub index: Option<CompressorSlots>,
}

/// Storage type of raw rows.
pub fn ring_type(numerics: KvNumerics) -> StateType {
    match numerics {
        KvNumerics::Reference => StateType::F32,
        KvNumerics::Official => StateType::F16,
    }
}

/// The state spec of all layers and where each layer's pieces are.
pub fn state_spec(p: &Params, numerics: KvNumerics) -> (StateSpec, Vec<LayerSlots>) {
    // Official rows are rounded before they are stored, so the packed types lose nothing.
    let window = ring_type(numerics);
    let (rows, index_rows) = match numerics {
        KvNumerics::Reference => (StateType::F32, StateType::F32),
        KvNumerics::Official => (StateType::Fp8 { rotary: p.rope_dim }, StateType::Fp4),
    };
    let mut spec = StateSpec::default();
    let mut push = |kind: StateKind| {
        spec.slots.push(kind);
        spec.slots.len() - 1
    };
    let layers = p
        .layers
        .iter()
        .map(|layer| {
            let ring = push(StateKind::Ring { rows: p.window, width: p.head_dim, ty: window });
            let mut compressor = |width: usize, ty: StateType, overlap: bool| CompressorSlots {
                rows: push(StateKind::Pooled { width, ty, tokens: layer.ratio }),
                // Two windows of double-width projections when they overlap; values and scores.
                frontier: push(StateKind::Fixed { elems: 2 * layer.ratio * width * if overlap { 4 } else { 1 } }),
            };
            let main = (layer.ratio != 0).then(|| compressor(p.head_dim, rows, layer.indexed(p)));
            let index = layer.indexed(p).then(|| compressor(p.index_dim, index_rows, true));
            LayerSlots { ring, main, index }
        })
        .collect();
    (spec, layers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deepseek_v4::LayerKind;
    use ds4_kernels::math::yarn::Yarn;
    use ds4_kernels::ops::{HyperParams, RouterParams};

    /// The published Flash shape, as far as state depends on it.
    fn flash() -> Params {
        let ratio = |i: usize| {
            if i < 2 {
                0
            } else if i.is_multiple_of(2) {
                4
            } else {
                128
            }
        };
        Params {
            vocab: 129_280,
            context: 1 << 20,
            hidden: 4096,
            layers: (0..43).map(|i| LayerKind { ratio: ratio(i), hashed: i < 3, clamp: 10.0 }).collect(),
            heads: 64,
            head_dim: 512,
            rope_dim: 64,
            q_lora: 1024,
            o_groups: 8,
            o_lora: 1024,
            experts: 256,
            ff: 2048,
            window: 128,
            index_heads: 64,
            index_dim: 128,
            index_top_k: 512,
            indexed_ratio: 4,
            rms_eps: 1e-6,
            hyper: HyperParams { streams: 4, iterations: 20, eps: 1e-6, rms_eps: 1e-6 },
            router: RouterParams { used: 6, scale: 1.5, floor: 6.1e-5 },
            rope_base: 1e4,
            compress_base: 1.6e5,
            yarn: Yarn { factor: 16.0, original_context: 65536.0, beta_fast: 32.0, beta_slow: 1.0 },
            beyond: (Some(0), Some(10.0)),
        }
    }

    #[test]
    fn deepseek_v4_flash_state_is_at_most_5_kib_a_token_at_depth() {
        let (spec, _) = state_spec(&flash(), KvNumerics::Official);
        // Per token: 21 ratio-4 layers of 584 bytes of row and 68 of indexer row per 4 tokens, 20 layers of 584 per 128.
        let exact = 21.0 * (584.0 + 68.0) / 4.0 + 20.0 * 584.0 / 128.0;
        let measured = (spec.bytes(1 << 20) - spec.bytes(1 << 19)) as f64 / f64::from(1u32 << 19);
        assert!((measured - exact).abs() < 0.01, "{measured} {exact}");
        assert!(spec.bytes_per_token() <= 5 * 1024, "{}", spec.bytes_per_token());
        // A checkpoint: 128 raw rows a layer in f16, and frontiers of values and scores in f32, 8 slots of 1024 and 256 for
        // ratio 4, 128 of 512 for ratio 128.
        let checkpoint = 43 * 128 * 512 * 2 + 21 * 8 * (1024 + 256) * 8 + 20 * 128 * 512 * 8;
        assert_eq!([128, 1 << 20].map(|n| spec.checkpoint_bytes(n)), [checkpoint; 2]);
        assert_eq!(checkpoint, 17_842_176);
    }
}
