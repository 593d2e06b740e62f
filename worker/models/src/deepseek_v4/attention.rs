//! Attention of one layer: low-rank queries, one shared key-value row per token, compressed history, grouped output.
//!
//! Source: fact sheet sections 3.4 to 3.8 (transformers' `DeepseekV4Attention` and DeepSeek's own kernels).

use std::ops::Range;

use ds4_kernels::ops::{Compressor, Indexer, KvNumerics, Operands, SparseAttention, SparseOps};

use super::bind::{CompressorWeights, LayerWeights};
use super::params::{LayerKind, Params};
use super::state::{CompressorSlots, LayerSlots};
use super::steps::{Part, Steps};

/// Values and scores of a compressor's projections.
struct Projections<D: SparseOps> {
    values: D::Buffer,
    scores: D::Buffer,
}

impl<D: SparseOps> Projections<D> {
    fn new(device: &D, room: &D::Room, width: usize) -> Self {
        Self { values: device.buffer_in(room, width), scores: device.buffer_in(room, width) }
    }

    fn lend(&self, device: &D, rows: &Range<usize>, to: &mut Self) {
        device.lend_rows(&self.values, rows.clone(), &mut to.values);
        device.lend_rows(&self.scores, rows.clone(), &mut to.scores);
    }
}

/// What the sublayer's inputs are projected to, of a whole step or of a part of it.
struct Projected<D: SparseOps> {
    q_norm: D::Buffer,
    kv_raw: D::Buffer,
    plain: Projections<D>,
    overlapping: Projections<D>,
    index: Projections<D>,
    index_w: D::Buffer,
}

impl<D: SparseOps> Projected<D> {
    fn new(device: &D, room: &D::Room, p: &Params) -> Self {
        Self {
            q_norm: device.buffer_in(room, p.q_lora),
            kv_raw: device.buffer_in(room, p.head_dim),
            plain: Projections::new(device, room, p.head_dim),
            overlapping: Projections::new(device, room, 2 * p.head_dim),
            index: Projections::new(device, room, 2 * p.index_dim),
            index_w: device.buffer_in(room, p.index_heads),
        }
    }
}

/// From the queries to the output's groups.
struct Inner<D: SparseOps> {
    q: D::Buffer,
    kv: D::Buffer,
    index_q: D::Buffer,
    selection: D::Selection,
    heads: D::Buffer,
    groups: D::Buffer,
}

/// Buffers of the attention sublayer; reused by every layer. They are used in one turn of their room.
pub struct AttentionBuffers<D: SparseOps> {
    q_latent: D::Buffer,
    projected: Projected<D>,
    /// Rows of them that a part of a step has.
    part: Projected<D>,
    inner: Inner<D>,
}

impl<D: SparseOps> AttentionBuffers<D> {
    /// Buffers with no rows yet.
    pub fn new(device: &D, room: &D::Room, p: &Params) -> Self {
        Self {
            q_latent: device.buffer_in(room, p.q_lora),
            projected: Projected::new(device, room, p),
            part: Projected::new(device, room, p),
            inner: Inner {
                q: device.buffer_in(room, p.heads * p.head_dim),
                kv: device.buffer_in(room, p.head_dim),
                index_q: device.buffer_in(room, p.index_heads * p.index_dim),
                selection: D::Selection::default(),
                heads: device.buffer_in(room, p.heads * p.head_dim),
                groups: device.buffer_in(room, p.o_groups * p.o_lora),
            },
        }
    }

    /// What the last layer with an indexer selected in the last step, or its last part, that selects at all (see [`SparseOps::selects`]).
    pub fn selection(&self) -> &D::Selection {
        &self.inner.selection
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
    pub fn run(&self, device: &D, steps: &Steps<D>, b: &mut AttentionBuffers<D>, x: &D::Buffer, y: &mut D::Buffer) {
        self.project(device, &steps.whole, b, x);
        if steps.parts.is_empty() {
            return self.attend(device, &steps.whole, &b.projected, &mut b.inner, (0, steps.rows), y);
        }
        for part in &steps.parts {
            self.lend(device, part, &b.projected, &mut b.part);
            self.attend(device, &part.step, &b.part, &mut b.inner, (part.rows.start, steps.rows), y);
        }
    }

    /// Everything that `x` is projected to, in one group: its activations are prepared once.
    fn project(&self, device: &D, step: &D::Step, b: &mut AttentionBuffers<D>, x: &D::Buffer) {
        let (w, to) = (self.w, &mut b.projected);
        let mut group = vec![(&w.q_a, &mut b.q_latent), (&w.kv, &mut to.kv_raw)];
        if let Some(c) = &w.compressor {
            let main = if self.kind.indexed(self.p) { &mut to.overlapping } else { &mut to.plain };
            group.extend([(&c.values, &mut main.values), (&c.gate, &mut main.scores)]);
        }
        if let Some(i) = &w.indexer {
            let c = &i.compressor;
            group.extend([(&c.values, &mut to.index.values), (&c.gate, &mut to.index.scores)]);
            if self.indexer(device, step).is_some() {
                group.push((&i.head_weights, &mut to.index_w));
            }
        }
        device.matmul(x, &mut group);
        device.rms_norm(&b.q_latent, &w.q_a_norm, self.p.rms_eps, &mut to.q_norm);
    }

    /// The part's rows of what [`AttentionLayer::project`] made.
    fn lend(&self, device: &D, part: &Part<D>, from: &Projected<D>, to: &mut Projected<D>) {
        let rows = &part.rows;
        device.lend_rows(&from.q_norm, rows.clone(), &mut to.q_norm);
        device.lend_rows(&from.kv_raw, rows.clone(), &mut to.kv_raw);
        match &self.w.compressor {
            Some(_) if self.kind.indexed(self.p) => from.overlapping.lend(device, rows, &mut to.overlapping),
            Some(_) => from.plain.lend(device, rows, &mut to.plain),
            None => {}
        }
        if self.w.indexer.is_some() {
            from.index.lend(device, rows, &mut to.index);
        }
        if self.indexer(device, &part.step).is_some() {
            device.lend_rows(&from.index_w, rows.clone(), &mut to.index_w);
        }
    }

    /// Attention of a step, or of a part of one, with what its inputs were projected to; to the rows of `y`, of `rows` in all, from `first` on.
    fn attend(
        &self,
        device: &D,
        step: &D::Step,
        from: &Projected<D>,
        b: &mut Inner<D>,
        (first, rows): (usize, usize),
        y: &mut D::Buffer,
    ) {
        let Self { p, kind, w, slots, .. } = *self;
        let rope = if kind.ratio == 0 { &self.rotary.plain } else { &self.rotary.compressed };
        let indexer = self.indexer(device, step);
        let mut group = vec![(&w.q_b, &mut b.q)];
        if let (Some(i), Some(_)) = (&w.indexer, &indexer) {
            group.push((&i.q, &mut b.index_q));
        }
        device.matmul(&from.q_norm, &mut group);
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
            let overlap = kind.indexed(p);
            let x = if overlap { &from.overlapping } else { &from.plain };
            compressors.push((self.compressor(c, s, (p.head_dim, overlap, false)), &x.values, &x.scores));
        }
        if let (Some(i), Some(s)) = (&w.indexer, slots.index) {
            let c = self.compressor(&i.compressor, s, (p.index_dim, true, true));
            compressors.push((c, &from.index.values, &from.index.scores));
        }
        let index = indexer.as_ref().map(|i| (i, &mut b.index_q, &mut b.selection));
        let in_ring = device.prepare(step, &operands, &mut b.q, &from.kv_raw, &mut b.kv, index, &compressors);
        let selection = indexer.map(|i| {
            device.index_select(step, &i, &b.index_q, &from.index_w, &mut b.selection);
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
        device.matmul_rows(&b.groups, &w.output_b, first, rows, y);
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

    /// The indexer, where the step needs one: while no row sees more than it would keep, only its compressor runs.
    fn indexer(&self, device: &D, step: &D::Step) -> Option<Indexer> {
        let p = self.p;
        #[allow(clippy::cast_precision_loss, reason = "head counts and widths")]
        let scale = 1.0 / ((p.index_heads * p.index_dim) as f32).sqrt();
        let of = |slots: CompressorSlots| Indexer {
            heads: p.index_heads,
            head_dim: p.index_dim,
            top_k: p.index_top_k,
            ratio: self.kind.ratio,
            rows_slot: slots.rows,
            scale,
        };
        self.slots.index.map(of).filter(|i| device.selects(step, i))
    }
}
