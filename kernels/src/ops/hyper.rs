//! Hyper-connections: several residual streams per token, mixed around every sublayer.

use crate::device::Device;

/// Sizes and constants of the mixer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HyperParams {
    /// Residual streams `n`.
    pub streams: usize,
    /// Sinkhorn rounds, the softmax's column normalisation included.
    pub iterations: usize,
    /// Added to gates and sums.
    pub eps: f32,
    /// Of the un-weighted RMS over the `n·D` state.
    pub rms_eps: f32,
}

/// The three tensors of one mixer.
pub struct HyperWeights<W> {
    /// `[n·D → 2n + n²]`, or `[n·D → n]` for the head.
    pub mixer: W,
    /// Three scales (pre, post, comb), or one for the head.
    pub scale: W,
    /// As many as the mixer has outputs.
    pub base: W,
}

/// Hyper-connection operations. The state is a buffer `[rows, n·D]`, stream-major.
pub trait HyperOps: Device {
    /// `state[row] = x[row]` copied into every stream.
    fn hyper_start(&self, streams: usize, x: &Self::Buffer, state: &mut Self::Buffer);

    /// Computes the mixing weights of every row into `mix` (`[rows, 2n + n²]`: pre, post, comb) from the RMS-normalised state, and
    /// the sublayer's input `x = Σ_h pre[h] · S[h]` from the state as it is.
    fn hyper_pre(
        &self,
        p: &HyperParams,
        w: &HyperWeights<Self::Weight>,
        state: &Self::Buffer,
        mix: &mut Self::Buffer,
        x: &mut Self::Buffer,
    );

    /// `S'[d] = post[d] · y + Σ_s comb[s][d] · S[s]`.
    fn hyper_post(&self, p: &HyperParams, mix: &Self::Buffer, y: &Self::Buffer, state: &mut Self::Buffer);

    /// The head's combination: `x = Σ_h (sigmoid(mixer·flat · scale + base)[h] + eps) · S[h]`.
    fn hyper_head(&self, p: &HyperParams, w: &HyperWeights<Self::Weight>, state: &Self::Buffer, x: &mut Self::Buffer);

    /// [`HyperOps::hyper_pre`] and the RMS norm of its `x` to `out`: what a sublayer begins with. `x` is room for the combination; its
    /// content is unspecified afterwards.
    #[allow(clippy::too_many_arguments, reason = "buffers in, buffers out")]
    fn hyper_pre_norm(
        &self,
        p: &HyperParams,
        w: &HyperWeights<Self::Weight>,
        state: &Self::Buffer,
        norm: (&Self::Weight, f32),
        mix: &mut Self::Buffer,
        x: &mut Self::Buffer,
        out: &mut Self::Buffer,
    ) {
        self.hyper_pre(p, w, state, mix, x);
        self.rms_norm(x, norm.0, norm.1, out);
    }

    /// [`HyperOps::hyper_head`] and the RMS norm of its `x` to `out`; `x` as in [`HyperOps::hyper_pre_norm`].
    fn hyper_head_norm(
        &self,
        p: &HyperParams,
        w: &HyperWeights<Self::Weight>,
        state: &Self::Buffer,
        norm: (&Self::Weight, f32),
        x: &mut Self::Buffer,
        out: &mut Self::Buffer,
    ) {
        self.hyper_head(p, w, state, x);
        self.rms_norm(x, norm.0, norm.1, out);
    }

    /// [`HyperOps::hyper_post`], where `next` is the mixer that the state meets next: a device may begin its products while it has the
    /// state at hand. They are the same results without it.
    fn hyper_post_toward(
        &self,
        p: &HyperParams,
        mix: &Self::Buffer,
        y: &Self::Buffer,
        state: &mut Self::Buffer,
        next: Option<&HyperWeights<Self::Weight>>,
    ) {
        let _ = next;
        self.hyper_post(p, mix, y, state);
    }

    /// [`HyperOps::hyper_post_toward`] for the output of [`MoeOps::ffn_terms`](super::MoeOps::ffn_terms), which are `terms` and
    /// `shared`; their content is unspecified afterwards.
    fn hyper_post_terms(
        &self,
        p: &HyperParams,
        mix: &Self::Buffer,
        (terms, shared): (&mut Self::Buffer, &Self::Buffer),
        state: &mut Self::Buffer,
        next: Option<&HyperWeights<Self::Weight>>,
    ) {
        self.add(terms, shared);
        self.hyper_post_toward(p, mix, terms, state, next);
    }

    /// Every stream of the given rows of `state` as a row of its own: `out` is `[rows.len() · n, D]`, the streams of a row one after
    /// the other. For what treats streams alike (a norm and a projection that they share).
    fn hyper_split(&self, streams: usize, state: &Self::Buffer, rows: &[usize], out: &mut Self::Buffer);

    /// `state += x`, where `x` is as [`HyperOps::hyper_split`] makes it.
    fn hyper_join(&self, streams: usize, x: &Self::Buffer, state: &mut Self::Buffer);
}
