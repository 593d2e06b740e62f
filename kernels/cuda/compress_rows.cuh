// Compressors whose rows are 128, 256 or 512 wide: all of a layer's in one launch, rows and frontiers. CPU reference:
// kernels/src/cpu/compress.rs. Other widths take compress_rows and compress_frontier in compress.cu.
#pragma once
#include "frontier.cuh"
#include "warp_row.cuh"

// Laid out as `CompressorsArg` in kernels/src/cuda/compress.rs.
struct Compressors {
    Compress compress[2];
    Slot frontier[2], rows[2];
};

// Softmax over scores per channel, of some of the candidates.
struct Pooled {
    float top[4], sum[4], acc[4];
};

// Where a token's values and scores for a row's channels lie.
struct Place {
    const float *values, *scores, *bias;   // no bias: the scores have theirs
};

__device__ __forceinline__ Place place(const Compress& p, const Frontier& f, int width, int first_pos, int first_row, int t, int c) {
    const int j = t - t / p.ratio * p.ratio;
    if (t >= first_pos) {
        const int64_t at = int64_t(first_row + t - first_pos) * width + c;
        return {p.values + at, p.scores + at, p.ape + j * width + c};
    }
    const int at = (!p.overlap ? j : t / p.ratio == first_pos / p.ratio ? p.ratio + j : j) * width + c;
    return {f.values + at, f.scores + at, nullptr};
}

// Takes candidates i, i + step, ... below count, U at a time: their loads are under way together.
template <int U>
__device__ __forceinline__ void pool(const Compress& p, const Frontier& f, int width, int first_pos, int first_row, int first, int count, int i,
                                     int step, int c, Pooled& all) {
#pragma unroll
    for (int k = 0; k < 4; k++) all.top[k] = -CUDART_INF_F, all.sum[k] = all.acc[k] = 0.0f;
    for (; i < count; i += U * step) {
        float v[U][4], s[U][4];
#pragma unroll
        for (int u = 0; u < U; u++) {
            const int n = i + u * step, t = first + n;
#pragma unroll
            for (int k = 0; k < 4; k++) v[u][k] = 0.0f, s[u][k] = -CUDART_INF_F;
            // Tokens before the sequence take no part.
            if (n < count && t >= 0) {
                // With overlap the previous window's first half takes part, and the own window's second half.
                const Place at = place(p, f, width, first_pos, first_row, t, p.overlap && n >= p.ratio ? p.dim + c : c);
                const float4 x = *reinterpret_cast<const float4*>(at.values), y = *reinterpret_cast<const float4*>(at.scores);
                float4 b = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (at.bias) b = *reinterpret_cast<const float4*>(at.bias);
                v[u][0] = x.x, v[u][1] = x.y, v[u][2] = x.z, v[u][3] = x.w;
                s[u][0] = __fadd_rn(y.x, b.x), s[u][1] = __fadd_rn(y.y, b.y), s[u][2] = __fadd_rn(y.z, b.z), s[u][3] = __fadd_rn(y.w, b.w);
            }
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float top = all.top[k];
#pragma unroll
            for (int u = 0; u < U; u++) top = fmaxf(top, s[u][k]);
            const float c = top == all.top[k] ? 1.0f : expf(__fsub_rn(all.top[k], top));
            all.top[k] = top;
            all.sum[k] = __fmul_rn(all.sum[k], c);
            all.acc[k] = __fmul_rn(all.acc[k], c);
#pragma unroll
            for (int u = 0; u < U; u++) {
                const float e = s[u][k] == -CUDART_INF_F ? 0.0f : expf(__fsub_rn(s[u][k], top));
                all.sum[k] = __fadd_rn(all.sum[k], e);
                all.acc[k] = __fmaf_rn(e, v[u][k], all.acc[k]);
            }
        }
    }
}

// What follows the pooling of a row, whose sums of squares are in parts: a warp has the 128 elements from `from` on. Indexer rows are
// 128 wide.
__device__ __forceinline__ void finish(const Compress& p, const Slot& rs, uint8_t* to, const float* row, const float* squares,
                                       const float2* turns, int from) {
    const int lane = threadIdx.x & 31;
    const float sum = warp_sum(lane < p.dim / 32 ? squares[lane] : 0.0f);
    WarpRow<1> x;
    x.load(row + from);
    x.scale(__fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, float(p.dim)), p.eps))), p.norm + from);
    x.rotate(turns, p.dim - p.rope_dim - from);
    if (p.official && p.indexer) {
        x.hadamard();
        x.fp4_round_trip(CUDART_INF_F);
    } else if (p.official) {
        x.fp8_round_trip(p.dim - p.rope_dim - from);
        x.f16_round_trip();
    }
    x.store_state(rs, to, from);
}

// The row of window w, by a block of T. The order of sums depends on the compressor's shape and T, which follows from it (`block` in
// kernels/src/cuda/compress.rs). `parts` is 12 T floats.
template <int T>
__device__ __forceinline__ void emit(float* parts, const Compress& p, const Frontier& f, const Slot& rs, uint64_t bank, int width,
                                     int first_pos, int first_row, int w) {
    __shared__ __align__(16) float row[512];
    __shared__ float squares[16];
    __shared__ __align__(16) float2 turns[256];
    const int count = p.overlap ? 2 * p.ratio : p.ratio, first = (w + 1) * p.ratio - count;
    const int columns = p.dim / 4, groups = T / columns, column = threadIdx.x % columns, group = threadIdx.x / columns;
    Pooled part;
    if (count <= 2 * groups) pool<2>(p, f, width, first_pos, first_row, first, count, group, groups, 4 * column, part);
    else pool<4>(p, f, width, first_pos, first_row, first, count, group, groups, 4 * column, part);
    // The last warp has the angles meanwhile: f64 functions take longer than a pooling of 8.
    const int turn = int(threadIdx.x) - (T - 32);
    for (int i = turn; turn >= 0 && i < p.rope_dim / 2; i += 32) {
        double sn, cs;
        sincos(double(w) * p.ratio * p.frequencies[i], &sn, &cs);
        turns[i] = make_float2(float(sn), float(cs));
    }
    const int at = group * p.dim + 4 * column;
    *reinterpret_cast<float4*>(&parts[at]) = make_float4(part.top[0], part.top[1], part.top[2], part.top[3]);
    *reinterpret_cast<float4*>(&parts[4 * T + at]) = make_float4(part.sum[0], part.sum[1], part.sum[2], part.sum[3]);
    *reinterpret_cast<float4*>(&parts[8 * T + at]) = make_float4(part.acc[0], part.acc[1], part.acc[2], part.acc[3]);
    __syncthreads();
    if (int(threadIdx.x) < p.dim) {
        const int used = min(groups, count);
        float top = -CUDART_INF_F, sum = 0.0f, acc = 0.0f;
        for (int g = 0; g < used; g++) top = fmaxf(top, parts[g * p.dim + threadIdx.x]);
        for (int g = 0; g < used; g++) {
            const float e = expf(__fsub_rn(parts[g * p.dim + threadIdx.x], top));
            sum = __fmaf_rn(parts[4 * T + g * p.dim + threadIdx.x], e, sum);
            acc = __fmaf_rn(parts[8 * T + g * p.dim + threadIdx.x], e, acc);
        }
        const float v = __fdiv_rn(acc, sum), square = warp_sum(__fmul_rn(v, v));
        row[threadIdx.x] = v;
        if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;
    }
    __syncthreads();
    const int from = threadIdx.x / 32 * 128;
    if (from < p.dim) finish(p, rs, slot_row(rs, bank, w), row, squares, turns, from);
    __syncthreads();
}

// Brings the frontier up to the end of the step. A thread has the same channels of a slot of both windows, so it writes nothing that
// another one reads.
template <int T>
__device__ __forceinline__ void advance(const Compress& p, const Frontier& f, int width, int first_pos, int first_row, int end) {
    const int open = end / p.ratio, before = first_pos / p.ratio, columns = width / 4;
    const bool moved = p.overlap && (open != before || first_pos == 0), all = moved || first_pos == 0;
    // A decode step inside a window has one slot to write.
    const int from = all ? 0 : max(first_pos - open * p.ratio, 0), until = all ? p.ratio : min(end - open * p.ratio, p.ratio);
    const auto copy = [&](int t, int c, int slot) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f), s = make_float4(-CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F, -CUDART_INF_F);
        if (t >= 0) {
            const Place at = place(p, f, width, first_pos, first_row, t, c);
            v = *reinterpret_cast<const float4*>(at.values);
            s = *reinterpret_cast<const float4*>(at.scores);
            if (at.bias) {
                const float4 b = *reinterpret_cast<const float4*>(at.bias);
                s = make_float4(__fadd_rn(s.x, b.x), __fadd_rn(s.y, b.y), __fadd_rn(s.z, b.z), __fadd_rn(s.w, b.w));
            }
        }
        *reinterpret_cast<float4*>(f.values + slot * width + c) = v;
        *reinterpret_cast<float4*>(f.scores + slot * width + c) = s;
    };
    for (int i = from * columns + threadIdx.x; i < until * columns; i += T) {
        const int j = i / columns, c = 4 * (i - j * columns), t = open * p.ratio + j;
        if (moved) copy((open - 1) * p.ratio + j, c, j);
        const int slot = p.overlap ? p.ratio + j : j;
        if (t < end) {
            if (t >= first_pos) copy(t, c, slot);
        } else if (first_pos == 0) {
            copy(-1, c, slot);
        }
    }
}

// What block `block` of span `span` does: block 0 has the windows that need the frontier as it was before the step, and the frontier; the
// others one window each.
template <int T>
__device__ __forceinline__ void compress_part(float* parts, const Step& st, const Compress& p, const Slot& fs, const Slot& rs, int block, int span) {
    const int first_pos = st.first_pos[span], end = first_pos + st.span_rows[span], first_row = st.first_row[span];
    const int width = p.overlap ? 2 * p.dim : p.dim, lead = p.overlap ? 2 : 1, open = first_pos / p.ratio;
    const uint64_t bank = st.banks[span];
    const Frontier f = frontier(fs, bank);
    const int from = block ? open + lead - 1 + block : open, until = block ? from + 1 : open + lead;
    for (int w = from; w < until && (w + 1) * p.ratio <= end; w++) emit<T>(parts, p, f, rs, bank, width, first_pos, first_row, w);
    if (block == 0) advance<T>(p, f, width, first_pos, first_row, end);
}
