//! Attention of one layer: low-rank queries, one shared key-value row per token, compressed history, grouped output.
//!
//! Source: fact sheet sections 3.4 to 3.8 (transformers' `DeepseekV4Attention` and DeepSeek's own kernels).

use ds4_kernels::ops::{Compressor, Indexer, KvNumerics, Operands, SparseAttention, SparseOps};

use super::bind::{CompressorWeights, LayerWeights};
use super::params::{LayerKind, Params};
use super::state::{CompressorSlots, LayerSlots};

/// Values and scores of a compressor's projections.
struct Projections<D: SparseOps> {
    values: D::Buffer,
    scores: D::Buffer,
}

impl<D: SparseOps> Projections<D> {
    fn new(device: &D, width: usize) -> Self {
        Self { values: device.buffer(width), scores: device.buffer(width) }
    }
}

/// Buffers of the attention sublayer; reused by every layer.
pub struct AttentionBuffers<D: SparseOps> {
    q_latent: D::Buffer,
    q_norm: D::Buffer,
    q: D::Buffer,
    kv_raw: D::Buffer,
    kv: D::Buffer,
    plain: Projections<D>,
    overlapping: Projections<D>,
    index: Projections<D>,
    index_q: D::Buffer,
    index_w: D::Buffer,
    selection: D::Selection,
    heads: D::Buffer,
    groups: D::Buffer,
}

impl<D: SparseOps> AttentionBuffers<D> {
    /// Buffers with no rows yet.
    pub fn new(device: &D, p: &Params) -> Self {
        Self {
            q_latent: device.buffer(p.q_lora),
            q_norm: device.buffer(p.q_lora),
            q: device.buffer(p.heads * p.head_dim),
            kv_raw: device.buffer(p.head_dim),
            kv: device.buffer(p.head_dim),
            plain: Projections::new(device, p.head_dim),
            overlapping: Projections::new(device, 2 * p.head_dim),
            index: Projections::new(device, 2 * p.index_dim),
            index_q: device.buffer(p.index_heads * p.index_dim),
            index_w: device.buffer(p.index_heads),
            selection: D::Selection::default(),
            heads: device.buffer(p.heads * p.head_dim),
            groups: device.buffer(p.o_groups * p.o_lora),
        }
    }
}

impl<D: SparseOps> AttentionBuffers<D> {
    /// What the last layer with an indexer selected in the last step that selects at all (see [`SparseOps::selects`]).
    pub fn selection(&self) -> &D::Selection {
        &self.selection
    }
}

/// Rotary tables of the two layer kinds.
pub struct Rotary<T> {
    /// Sliding-window layers.
    pub plain: T,
    /// Compressed layers: queries, raw rows, compressed rows and the indexer.
    pub compressed: T,
}

/// One layer's attention: everything that stays the same between steps.
pub struct AttentionLayer<'a, D: SparseOps> {
    /// Hyper-parameters.
    pub p: &'a Params,
    /// Kind of this layer.
    pub kind: &'a LayerKind,
    /// Its tensors.
    pub w: &'a LayerWeights<D::Weight>,
    /// Its state.
    pub slots: &'a LayerSlots,
    /// Rotary tables.
    pub rotary: &'a Rotary<D::RopeTable>,
    /// Numeric profile.
    pub numerics: KvNumerics,
}

impl<D: SparseOps> AttentionLayer<'_, D> {
    /// `y = attention(x)` for normed inputs `x` (`[rows, D]`); writes this step's state.
    pub fn run(&self, device: &D, step: &D::Step, b: &mut AttentionBuffers<D>, x: &D::Buffer, y: &mut D::Buffer) {
        let Self { p, kind, w, slots, .. } = *self;
        let rope = if kind.ratio == 0 { &self.rotary.plain } else { &self.rotary.compressed };

        // While no row sees more than the indexer would keep, only its compressor runs.
        let indexer = slots.index.map(|s| self.indexer(s)).filter(|i| device.selects(step, i));

        // Everything that `x` is projected to, in one group: its activations are prepared once.
        let overlap = kind.indexed(p);
        let main = if overlap { &mut b.overlapping } else { &mut b.plain };
        let mut group = vec![(&w.q_a, &mut b.q_latent), (&w.kv, &mut b.kv_raw)];
        if let Some(c) = &w.compressor {
            group.extend([(&c.values, &mut main.values), (&c.gate, &mut main.scores)]);
        }
        if let Some(i) = &w.indexer {
            let c = &i.compressor;
            group.extend([(&c.values, &mut b.index.values), (&c.gate, &mut b.index.scores)]);
            if indexer.is_some() {
                group.push((&i.head_weights, &mut b.index_w));
            }
        }
        device.matmul(x, &mut group);

        device.rms_norm(&b.q_latent, &w.q_a_norm, p.rms_eps, &mut b.q_norm);
        let mut group = vec![(&w.q_b, &mut b.q)];
        if let (Some(i), Some(_)) = (&w.indexer, &indexer) {
            group.push((&i.q, &mut b.index_q));
        }
        device.matmul(&b.q_norm, &mut group);
        let operands = Operands {
            head_dim: p.head_dim,
            rope_dim: p.rope_dim,
            rope,
            kv_norm: &w.kv_norm,
            eps: p.rms_eps,
            numerics: self.numerics,
            ring_slot: slots.ring,
        };
        let mut compressors = Vec::with_capacity(2);
        if let (Some(c), Some(s)) = (&w.compressor, slots.main) {
            let x = if overlap { &b.overlapping } else { &b.plain };
            compressors.push((self.compressor(c, s, (p.head_dim, overlap, false)), &x.values, &x.scores));
        }
        if let (Some(i), Some(s)) = (&w.indexer, slots.index) {
            let c = self.compressor(&i.compressor, s, (p.index_dim, true, true));
            compressors.push((c, &b.index.values, &b.index.scores));
        }
        let index = indexer.as_ref().map(|i| (i, &mut b.index_q, &mut b.selection));
        let in_ring = device.prepare(step, &operands, &mut b.q, &b.kv_raw, &mut b.kv, index, &compressors);
        let selection = indexer.map(|i| {
            device.index_select(step, &i, &b.index_q, &b.index_w, &mut b.selection);
            &b.selection
        });

        #[allow(clippy::cast_precision_loss, reason = "a head width")]
        let scale = 1.0 / (p.head_dim as f32).sqrt();
        let attention = SparseAttention {
            heads: p.heads,
            head_dim: p.head_dim,
            scale,
            window: p.window,
            ring_slot: slots.ring,
            compressed: slots.main.map(|s| (s.rows, kind.ratio)),
        };
        device.sparse_attention(step, &attention, &w.sinks, &b.q, &b.kv, selection, &mut b.heads);
        if !in_ring {
            device.state_write(step, slots.ring, &b.kv);
        }
        device.rope_tail(step, rope, p.head_dim, true, &mut b.heads);
        device.grouped_matmul(&b.heads, &w.output_a, p.o_groups, &mut b.groups);
        device.matmul(&b.groups, &mut [(&w.output_b, y)]);
    }

    fn compressor<'a>(
        &'a self,
        c: &'a CompressorWeights<D::Weight>,
        slots: CompressorSlots,
        (dim, overlap, indexer): (usize, bool, bool),
    ) -> Compressor<'a, D> {
        Compressor {
            ratio: self.kind.ratio,
            dim,
            overlap,
            frontier_slot: slots.frontier,
            rows_slot: slots.rows,
            ape: &c.ape,
            norm: &c.norm,
            eps: self.p.rms_eps,
            rope: &self.rotary.compressed,
            rope_dim: self.p.rope_dim.min(dim),
            indexer,
            numerics: self.numerics,
        }
    }

    fn indexer(&self, slots: CompressorSlots) -> Indexer {
        let p = self.p;
        #[allow(clippy::cast_precision_loss, reason = "head counts and widths")]
        let scale = 1.0 / ((p.index_heads * p.index_dim) as f32).sqrt();
        Indexer {
            heads: p.index_heads,
            head_dim: p.index_dim,
            top_k: p.index_top_k,
            ratio: self.kind.ratio,
            rows_slot: slots.rows,
            scale,
        }
    }
}
