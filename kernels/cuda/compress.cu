// Compressors of any shape: windows of tokens pooled into rows. CPU reference: kernels/src/cpu/compress.rs. The widths of large models have
// compress_rows.cu.
#include "frontier.cuh"

// Value and score of token t, channel c of the projection's width: from this step's rows, else from the frontier as it was before
// the step. Tokens before the sequence take no part.
__device__ __forceinline__ void candidate(const Compress& p, const Frontier& f, int width, int first_pos, int first_row, int t, int c, float& v, float& s) {
    const int j = t - t / p.ratio * p.ratio;
    if (t < 0) {
        v = 0.0f;
        s = -CUDART_INF_F;
    } else if (t >= first_pos) {
        const int64_t at = int64_t(first_row + t - first_pos) * width + c;
        v = p.values[at];
        s = __fadd_rn(p.scores[at], p.ape[j * width + c]);
    } else {
        // The window that is open before the step is in the second half, the one before it in the first.
        const int slot = !p.overlap ? j : t / p.ratio == first_pos / p.ratio ? p.ratio + j : j;
        v = f.values[slot * width + c];
        s = f.scores[slot * width + c];
    }
}

// Emits the rows of the windows that end in this step. Blocks: (window of the span, span).
extern "C" __global__ void compress_rows(Step st, Compress p, Slot fs, Slot rs) {
    after_previous();
    extern __shared__ float row[];
    const int span = blockIdx.y, first_pos = st.first_pos[span], end = first_pos + st.span_rows[span];
    const int w = first_pos / p.ratio + blockIdx.x;
    if ((w + 1) * p.ratio > end) return;
    const uint64_t bank = st.banks[span];
    const Frontier f = frontier(fs, bank);
    const int width = p.overlap ? 2 * p.dim : p.dim, count = p.overlap ? 2 * p.ratio : p.ratio;
    const int first = (w + 1) * p.ratio - count, first_row = st.first_row[span];
    float squares = 0.0f;
    for (int c = threadIdx.x; c < p.dim; c += blockDim.x) {
        float v, s, top = -CUDART_INF_F, sum = 0.0f, acc = 0.0f;
        // With overlap the previous window's first half takes part, and the own window's second half.
        for (int i = 0; i < count; i++) {
            candidate(p, f, width, first_pos, first_row, first + i, p.overlap && i >= p.ratio ? p.dim + c : c, v, s);
            top = fmaxf(top, s);
        }
        for (int i = 0; i < count; i++) {
            candidate(p, f, width, first_pos, first_row, first + i, p.overlap && i >= p.ratio ? p.dim + c : c, v, s);
            const float e = expf(__fsub_rn(s, top));
            sum = __fadd_rn(sum, e);
            acc = __fmaf_rn(e, v, acc);
        }
        row[c] = __fdiv_rn(acc, sum);
        squares = __fmaf_rn(row[c], row[c], squares);
    }
    const float scale = 1.0f / sqrtf(block_sum(squares) / float(p.dim) + p.eps);
    for (int c = threadIdx.x; c < p.dim; c += blockDim.x) row[c] = row[c] * scale * p.norm[c];
    __syncthreads();
    float* tail = row + p.dim - p.rope_dim;
    for (int i = threadIdx.x; i < p.rope_dim / 2; i += blockDim.x) {
        double sn, cs;
        sincos(double(w) * p.ratio * p.frequencies[i], &sn, &cs);
        const float a = tail[2 * i], b = tail[2 * i + 1], sf = float(sn), cf = float(cs);
        tail[2 * i] = a * cf - b * sf;
        tail[2 * i + 1] = a * sf + b * cf;
    }
    __syncthreads();
    if (p.official && p.indexer) {
        hadamard(row, p.dim);
        fp4_round_trip(row, p.dim);
    } else if (p.official) {
        fp8_round_trip(row, p.dim - p.rope_dim);
        for (int c = threadIdx.x; c < p.dim; c += blockDim.x) row[c] = f16_round(row[c]);
        __syncthreads();
    }
    store_row(rs, slot_row(rs, bank, w), row);
}

// Brings the frontier up to the end of the step; after compress_rows. A thread has one channel of one slot of the window and writes
// nothing that another one reads. Blocks: (slots * width / block, span).
extern "C" __global__ void compress_frontier(Step st, Compress p, Slot fs) {
    after_previous();
    const int width = p.overlap ? 2 * p.dim : p.dim, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.ratio * width) return;
    const int span = blockIdx.y, first_pos = st.first_pos[span], end = first_pos + st.span_rows[span], first_row = st.first_row[span];
    const Frontier f = frontier(fs, st.banks[span]);
    const int j = i / width, c = i % width, open = end / p.ratio;
    float v, s;
    if (p.overlap) {
        candidate(p, f, width, first_pos, first_row, (open - 1) * p.ratio + j, c, v, s);
        f.values[i] = v;
        f.scores[i] = s;
    }
    const int t = open * p.ratio + j, at = p.overlap ? i + p.ratio * width : i;
    if (t < end) {
        if (t >= first_pos) {
            candidate(p, f, width, first_pos, first_row, t, c, v, s);
            f.values[at] = v;
            f.scores[at] = s;
        }
    } else if (first_pos == 0) {
        f.values[at] = 0.0f;
        f.scores[at] = -CUDART_INF_F;
    }
}
