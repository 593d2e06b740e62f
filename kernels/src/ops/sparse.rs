//! Attention over a sliding window plus compressed history: compressors, the lightning indexer and the attention itself.
//!
//! Keys and values are the same rows (one KV head). `nope` is the un-rotated head part, the rotary part trails it.

use std::ops::Range;

use crate::device::Device;

/// What is done to rows before they are stored and used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvNumerics {
    /// Nothing: f32 as computed.
    Reference,
    /// As DeepSeek's own kernels: FP8 round trip of the un-rotated part of KV rows with the rest in f16; Hadamard and FP4 in
    /// the indexer.
    Official,
}

/// One compressor: pools windows of `ratio` tokens into rows.
pub struct Compressor<'a, D: SparseOps> {
    /// Tokens per row.
    pub ratio: usize,
    /// Row width.
    pub dim: usize,
    /// Projections are `2·dim` wide: the first half feeds the next window's row, the second half its own.
    pub overlap: bool,
    /// State slot of the frontier (projected values and scores of the open windows).
    pub frontier_slot: usize,
    /// State slot of the finished rows.
    pub rows_slot: usize,
    /// Position biases `[width, ratio]`, channel contiguous; added to the scores.
    pub ape: &'a D::Weight,
    /// RMSNorm weight of a finished row.
    pub norm: &'a D::Weight,
    /// RMSNorm epsilon.
    pub eps: f32,
    /// Frequencies of the trailing rotary part; rows are rotated at their window's first position.
    pub rope: &'a D::RopeTable,
    /// Elements of that part.
    pub rope_dim: usize,
    /// True for indexer rows (Hadamard and FP4 instead of FP8 when official).
    pub indexer: bool,
    /// Numeric profile.
    pub numerics: KvNumerics,
}

/// The lightning indexer's selection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Indexer {
    /// Indexer heads.
    pub heads: usize,
    /// Elements per indexer head and row.
    pub head_dim: usize,
    /// Rows to keep.
    pub top_k: usize,
    /// Tokens per row: the query at `t` sees rows `k < (t + 1) / ratio`.
    pub ratio: usize,
    /// State slot of the indexer rows.
    pub rows_slot: usize,
    /// Factor on the head weights.
    pub scale: f32,
}

/// What an attention's operands go through between their projections and their use.
pub struct Operands<'a, D: SparseOps> {
    /// Elements per query head and per key-value row.
    pub head_dim: usize,
    /// Trailing elements that are rotary, of indexer queries too.
    pub rope_dim: usize,
    /// Their frequencies.
    pub rope: &'a D::RopeTable,
    /// RMSNorm weight of key-value rows.
    pub kv_norm: &'a D::Weight,
    /// RMSNorm epsilon, of queries and key-value rows.
    pub eps: f32,
    /// Numeric profile.
    pub numerics: KvNumerics,
    /// Ring of key-value rows, at least as long as the attention's window.
    pub ring_slot: usize,
}

/// Attention over window rows and compressed rows, with a per-head sink logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SparseAttention {
    /// Query heads.
    pub heads: usize,
    /// Elements per head and row.
    pub head_dim: usize,
    /// Score scale.
    pub scale: f32,
    /// The query at `t` sees raw rows `max(0, t - window + 1) ..= t`.
    pub window: usize,
    /// Ring slot of the raw rows of earlier steps.
    pub ring_slot: usize,
    /// Compressed rows: slot and tokens per row.
    pub compressed: Option<(usize, usize)>,
}

/// Operations of sparse attention.
pub trait SparseOps: Device {
    /// Frequencies on the device.
    type RopeTable: Send + Sync;
    /// Per row: which compressed rows take part.
    type Selection: Default + Send;

    /// Uploads angular frequencies, one per pair.
    fn upload_rope(&self, frequencies: &[f64]) -> Self::RopeTable;

    /// Makes `out` the rows `rows` of `x`, for reading: a copy, or the same memory, so that it is good until `x` is written.
    fn lend_rows(&self, x: &Self::Buffer, rows: Range<usize>, out: &mut Self::Buffer);

    /// Writes `x · wᵀ` to the rows of `out` from `first` on. With the first ones, `out` gets `rows` rows; later ones leave the others as they are.
    fn matmul_rows(&self, x: &Self::Buffer, w: &Self::Weight, first: usize, rows: usize, out: &mut Self::Buffer);

    /// Divides every head of `x` by its RMS (no weight).
    fn head_rms(&self, x: &mut Self::Buffer, head_dim: usize, eps: f32);

    /// Rotates the interleaved pairs of each head's trailing part by the row's position (`inverse`: by its negative).
    fn rope_tail(
        &self,
        step: &Self::Step,
        table: &Self::RopeTable,
        head_dim: usize,
        inverse: bool,
        x: &mut Self::Buffer,
    );

    /// Applies the profile to KV rows whose trailing `rope_dim` elements are rotary.
    fn round_kv(&self, numerics: KvNumerics, rope_dim: usize, x: &mut Self::Buffer);

    /// Applies the profile to indexer queries, per head.
    fn round_index(&self, numerics: KvNumerics, head_dim: usize, x: &mut Self::Buffer);

    /// Makes projections into what attention takes: queries divided by their heads' RMS and rotated; `kv` the normed, rotated and
    /// rounded `kv_raw`; indexer queries, if they are given, rotated and rounded for [`SparseOps::index_select`] with the same
    /// selection; and [`SparseOps::compress_all`] of the compressors. True when `kv` has been written into the ring as well, as a device may where no row of the step needs what is
    /// replaced; otherwise that is left to do, after attention.
    #[allow(clippy::too_many_arguments, reason = "all that is made before an attention")]
    fn prepare(
        &self,
        step: &Self::Step,
        p: &Operands<'_, Self>,
        q: &mut Self::Buffer,
        kv_raw: &Self::Buffer,
        kv: &mut Self::Buffer,
        index: Option<(&Indexer, &mut Self::Buffer, &mut Self::Selection)>,
        compressors: &[(Compressor<'_, Self>, &Self::Buffer, &Self::Buffer)],
    ) -> bool
    where
        Self: Sized,
    {
        self.head_rms(q, p.head_dim, p.eps);
        self.rope_tail(step, p.rope, p.head_dim, false, q);
        self.rms_norm(kv_raw, p.kv_norm, p.eps, kv);
        self.rope_tail(step, p.rope, p.head_dim, false, kv);
        self.round_kv(p.numerics, p.rope_dim, kv);
        if let Some((indexer, index_q, _)) = index {
            self.rope_tail(step, p.rope, indexer.head_dim, false, index_q);
            self.round_index(p.numerics, indexer.head_dim, index_q);
        }
        self.compress_all(step, compressors);
        false
    }

    /// Whether a row of the step may see more rows than the indexer keeps. Where none does, all visible rows take part, and neither
    /// indexer queries nor [`SparseOps::index_select`] are needed.
    fn selects(&self, _step: &Self::Step, _p: &Indexer) -> bool {
        true
    }

    /// [`SparseOps::compress`] with several compressors of different slots.
    fn compress_all(&self, step: &Self::Step, all: &[(Compressor<'_, Self>, &Self::Buffer, &Self::Buffer)])
    where
        Self: Sized,
    {
        all.iter().for_each(|(c, values, scores)| self.compress(step, c, values, scores));
    }

    /// Takes the step's projected values and scores (`[rows, width]`) into the frontiers and emits finished rows.
    fn compress(&self, step: &Self::Step, c: &Compressor<'_, Self>, values: &Self::Buffer, scores: &Self::Buffer)
    where
        Self: Sized;

    /// Selects, per row, the `top_k` visible rows of highest score `Σ_h w_h · scale · max(0, q_h · K)`; all of them when there are
    /// no more than `top_k`. Ties: lower row index.
    fn index_select(
        &self,
        step: &Self::Step,
        p: &Indexer,
        q: &Self::Buffer,
        w: &Self::Buffer,
        out: &mut Self::Selection,
    );

    /// Attention of `q` (`[rows, heads · head_dim]`) over the ring's rows before this step, this step's `kv` rows
    /// (`[rows, head_dim]`) and the visible (selected) compressed rows. The ring is not written: do that afterwards.
    #[allow(clippy::too_many_arguments, reason = "an attention has this many operands")]
    fn sparse_attention(
        &self,
        step: &Self::Step,
        p: &SparseAttention,
        sinks: &Self::Weight,
        q: &Self::Buffer,
        kv: &Self::Buffer,
        selection: Option<&Self::Selection>,
        out: &mut Self::Buffer,
    );

    /// Block-diagonal matmul: output rows `g·r .. (g+1)·r` of `w` consume the `g`-th of `groups` equal parts of each row of `x`.
    fn grouped_matmul(&self, x: &Self::Buffer, w: &Self::Weight, groups: usize, out: &mut Self::Buffer);
}
