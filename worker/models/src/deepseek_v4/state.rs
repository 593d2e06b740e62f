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

/// The state spec of all layers and where each layer's pieces are.
pub fn state_spec(p: &Params, numerics: KvNumerics) -> (StateSpec, Vec<LayerSlots>) {
    let ty = match numerics {
        KvNumerics::Reference => StateType::F32,
        KvNumerics::Official => StateType::F16,
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
            let ring = push(StateKind::Ring { rows: p.window, width: p.head_dim, ty });
            let mut compressor = |width: usize, overlap: bool| CompressorSlots {
                rows: push(StateKind::Pooled { width, ty, tokens: layer.ratio }),
                // Two windows of double-width projections when they overlap; values and scores.
                frontier: push(StateKind::Fixed { elems: 2 * layer.ratio * width * if overlap { 4 } else { 1 } }),
            };
            let main = (layer.ratio != 0).then(|| compressor(p.head_dim, layer.indexed(p)));
            let index = layer.indexed(p).then(|| compressor(p.index_dim, true));
            LayerSlots { ring, main, index }
        })
        .collect();
    (spec, layers)
}
