// Compressors, the lightning indexer, and attention over window and history. CPU reference: kernels/src/cpu/compress.rs, sparse.rs.
#include "softmax.cuh"

// Laid out as `CompressArg` in kernels/src/cuda/sparse.rs.
struct Compress {
    int ratio, dim, overlap, rope_dim, official, indexer;
    float eps;
    int pad;
    const float* ape;           // [ratio, width]
    const float* norm;          // [dim]
    const double* frequencies;  // [rope_dim / 2]
    const float* values;        // [rows, width]
    const float* scores;        // [rows, width]
};

// The frontier: values then scores, each [slots, width]; with overlap, slots 0..ratio are the previous window and the rest the open one.
struct Frontier {
    float *values, *scores;
};

__device__ __forceinline__ Frontier frontier(const Slot& slot, uint64_t bank) {
    float* base = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(bank) + slot.offset);
    return {base, base + slot.width / 2};
}

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

// ---- the lightning indexer ----

// scores[row][k] = sum_h w_h * scale * max(0, q_h . K_k) for visible rows k. Blocks: (part of the keys, row); a warp per key.
template <int E>
__device__ __forceinline__ void index_scores(Step st, Slot rs, int heads, int head_dim, int top_k, int ratio, float scale, const float* q, const float* w, int stride, float* scores) {
    extern __shared__ float qs[];
    const int row = blockIdx.y, visible = (st.positions[row] + 1) / ratio, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    // Nothing to select, or none of this block's keys is visible.
    if (visible <= top_k || blockIdx.x * 64 >= visible) return;
    for (int i = threadIdx.x; i < heads * head_dim; i += blockDim.x) qs[i] = q[int64_t(row) * heads * head_dim + i];
    __syncthreads();
    const uint64_t bank = st.banks[st.span_of[row]];
    const int end = min(visible, int(blockIdx.x + 1) * 64);
    for (int k = blockIdx.x * 64 + (threadIdx.x >> 5); k < end; k += warps) {
        const uint8_t* key = slot_row(rs, bank, k);
        float ke[E];
#pragma unroll
        for (int e = 0; e < E; e++) ke[e] = lane + 32 * e < head_dim ? load_elem(rs, key, lane + 32 * e) : 0.0f;
        float total = 0.0f;
        for (int h = 0; h < heads; h++) {
            float dot = 0.0f;
#pragma unroll
            for (int e = 0; e < E; e++)
                if (lane + 32 * e < head_dim) dot = __fmaf_rn(qs[h * head_dim + lane + 32 * e], ke[e], dot);
            total = __fmaf_rn(__fmul_rn(w[int64_t(row) * heads + h], scale), fmaxf(warp_sum(dot), 0.0f), total);
        }
        if (lane == 0) scores[int64_t(row) * stride + k] = total;
    }
}

#define INDEX_KERNEL(E)                                                                                                     \
    extern "C" __global__ void index_scores_##E(Step st, Slot rs, int heads, int head_dim, int top_k, int ratio, float scale, \
                                                const float* q, const float* w, int stride, float* scores) {                  \
        index_scores<E>(st, rs, heads, head_dim, top_k, ratio, scale, q, w, stride, scores);                                  \
    }
INDEX_KERNEL(1) INDEX_KERNEL(2) INDEX_KERNEL(4) INDEX_KERNEL(8)

// A float's bits in an order that unsigned comparison knows.
__device__ __forceinline__ uint32_t ordered(float x) {
    const uint32_t b = __float_as_uint(x);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}

// Number of threads of the block with a lower index for which `take` holds; `total` gets the number of all.
__device__ __forceinline__ int block_rank(bool take, int* sums, int& total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const uint32_t votes = __ballot_sync(~0u, take);
    __syncthreads();
    if (lane == 0) sums[warp] = __popc(votes);
    __syncthreads();
    int before = 0;
    total = 0;
    for (int i = 0; i < warps; i++) {
        if (i < warp) before += sums[i];
        total += sums[i];
    }
    return before + __popc(votes & ((1u << lane) - 1));
}

// Indices of the top_k largest of scores[row][0..visible], ascending, ties to the lower index; counts[row] = -1 when all are seen.
// A block of 512 per row: the k-th largest key is found byte by byte, then one ordered pass writes the indices.
extern "C" __global__ void __launch_bounds__(512) index_top(Step st, int top_k, int ratio, const float* scores, int stride, int* rows, int* counts) {
    __shared__ int histogram[256], sums[32];
    __shared__ uint32_t chosen, left;
    const int row = blockIdx.x, visible = (st.positions[row] + 1) / ratio;
    if (visible <= top_k) {
        if (threadIdx.x == 0) counts[row] = -1;
        return;
    }
    const float* s = scores + int64_t(row) * stride;
    uint32_t prefix = 0, mask = 0;
    int want = top_k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x) histogram[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < visible; i += blockDim.x) {
            const uint32_t key = ordered(s[i]);
            if ((key & mask) == prefix) atomicAdd(&histogram[(key >> shift) & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int above = 0, b = 255;
            while (b > 0 && above + histogram[b] < want) above += histogram[b--];
            chosen = b;
            left = want - above;
        }
        __syncthreads();
        prefix |= chosen << shift;
        mask |= 255u << shift;
        want = left;
        __syncthreads();
    }
    // `want` of those equal to the threshold are taken, in index order, and all above it.
    int at = 0, equal = 0;
    for (int base = 0; base < visible; base += blockDim.x) {
        const int i = base + threadIdx.x;
        const uint32_t key = i < visible ? ordered(s[i]) : 0;
        int n, m;
        const int e = block_rank(i < visible && key == prefix, sums, n);
        const bool take = i < visible && (key > prefix || (key == prefix && equal + e < want));
        const int r = block_rank(take, sums, m);
        if (take) rows[int64_t(row) * top_k + at + r] = i;
        at += m;
        equal += n;
    }
    if (threadIdx.x == 0) counts[row] = top_k;
}

// ---- attention over the window and compressed rows, with a sink ----

// Laid out as `SparseArg` in kernels/src/cuda/sparse.rs.
struct Sparse {
    int heads, head_dim, window, ratio;   // ratio 0: no compressed rows
    float scale;
    int top_k;
    const float* sinks;    // [heads]
    const float* q;        // [rows, heads * head_dim]
    const float* kv;       // [rows, head_dim]
    const int* selected;   // [rows, top_k]; null: all visible rows
    const int* counts;     // [rows]; -1: all visible rows
};

constexpr int PIECE = 40;  // 640 keys (the window and 512 selected) of 64 heads are 128 blocks: one each for 132 multiprocessors
constexpr int TILE = 8;
constexpr int HEADS = 8;  // as many as keys of a tile: each of the block's warps fetches one key and computes one head

__device__ __forceinline__ int history(const Sparse& p, int row, int pos) {
    const int visible = p.ratio ? (pos + 1) / p.ratio : 0;
    return p.selected && p.counts[row] >= 0 ? p.counts[row] : visible;
}

// A key on its way: elements lane, lane + 32, ... as they are stored. Loads first and conversions later: a load whose value is needed
// inside a branch is waited for there, one after the other. Rows of exactly 32 * E elements whose rotary part begins at a multiple of
// 32 (the production shapes) have constant offsets; others are converted at once, slowly.
template <int E>
struct Key {
    uint32_t bits[E];
    int type;   // a StateType, or -1 for no key
    int nope;
    __device__ __forceinline__ void floats(const float* src, int n) {
        const int lane = threadIdx.x & 31;
        type = STATE_F32;
#pragma unroll
        for (int e = 0; e < E; e++) bits[e] = n == 32 * E || lane + 32 * e < n ? __float_as_uint(src[lane + 32 * e]) : 0;
    }
    __device__ __forceinline__ void row(int ty, int n, int rotary, const uint8_t* src) {
        const int lane = threadIdx.x & 31;
        type = ty;
        nope = n - rotary;
        const int tail = (nope + (nope + 63) / 64 + 1) & ~1;
        if (n != 32 * E || nope % 32 != 0) {
            type = STATE_F32;
#pragma unroll
            for (int e = 0; e < E; e++) {
                const int i = lane + 32 * e;
                float v = 0.0f;
                if (i < n) {
                    if (ty == STATE_F32) v = reinterpret_cast<const float*>(src)[i];
                    else if (ty == STATE_F16) v = half_at(src + 2 * i);
                    else if (i >= nope) v = half_at(src + tail + 2 * (i - nope));
                    else v = e4m3_value(src[i]) * __uint_as_float(uint32_t(src[nope + i / 64]) << 23);
                }
                bits[e] = __float_as_uint(v);
            }
        } else if (ty == STATE_FP8) {
            const uint16_t* end = reinterpret_cast<const uint16_t*>(src + tail) + (lane - nope);
#pragma unroll
            for (int e = 0; e < E; e++) bits[e] = 32 * e < nope ? src[lane + 32 * e] | uint32_t(src[nope + e / 2]) << 8 : end[32 * e];
        } else if (ty == STATE_F16) {
#pragma unroll
            for (int e = 0; e < E; e++) bits[e] = reinterpret_cast<const uint16_t*>(src)[lane + 32 * e];
        } else {
#pragma unroll
            for (int e = 0; e < E; e++) bits[e] = reinterpret_cast<const uint32_t*>(src)[lane + 32 * e];
        }
    }
    __device__ __forceinline__ float get(int e) const {
        if (type < 0) return 0.0f;
        if (type == STATE_F32) return __uint_as_float(bits[e]);
        if (type == STATE_F16 || 32 * e >= nope) return __half2float(__ushort_as_half(bits[e]));
        return e4m3_value(bits[e] & 0xff) * __uint_as_float((bits[e] >> 8) << 23);
    }
};

// A block has HEADS heads (a warp each) of one row and one piece of PIECE keys, or all pieces when gridDim.z is 1.
template <int E>
__device__ __forceinline__ void sparse_attention(Step st, Sparse p, Slot ring, Slot comp, float* partial, float* out) {
    __shared__ float tile[TILE][E * 32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = blockIdx.x, head = blockIdx.y * HEADS + warp;
    const int span = st.span_of[row], pos = st.positions[row], first_pos = st.first_pos[span], first_row = st.first_row[span];
    const uint64_t bank = st.banks[span];
    const int first = max(0, pos + 1 - p.window), recent = pos + 1 - first, hist = history(p, row, pos), keys = recent + hist;
    const bool listed = p.selected && p.counts[row] >= 0, mine = head < p.heads;
    const int pieces = (keys + PIECE - 1) / PIECE;
    const int64_t item = int64_t(row) * p.heads + head;
    float qe[E];
#pragma unroll
    for (int e = 0; e < E; e++) qe[e] = mine && lane + 32 * e < p.head_dim ? p.q[item * p.head_dim + lane + 32 * e] : 0.0f;
    const bool alone = gridDim.z == 1;
    // A warp fetches one key of each tile: its address is found once, and it arrives while the tile before is computed.
    const auto fetch = [&](int base, int end, Key<E>& k) {
        const int key = base + warp, t = first + key, h = key - recent;
        k.type = -1;
        if (key >= end) return;
        if (key < recent && t >= first_pos) {
            k.floats(p.kv + int64_t(first_row + t - first_pos) * p.head_dim, p.head_dim);
        } else {
            const bool old = key < recent;
            const uint8_t* src;
            if (old) src = slot_row(ring, bank, t);
            else src = slot_row(comp, bank, listed ? p.selected[int64_t(row) * p.top_k + h] : h);
            k.row(old ? ring.type : comp.type, p.head_dim, old ? ring.rotary : comp.rotary, src);
        }
    };
    Running<E> all;
    all.clear(mine ? p.sinks[head] : 0.0f, 1.0f);
    for (int piece = alone ? 0 : blockIdx.z; piece < pieces; piece += gridDim.z) {
        Running<E> part;
        part.clear(-CUDART_INF_F, 0.0f);
        const int end = min(keys, (piece + 1) * PIECE);
        Key<E> next;
        fetch(piece * PIECE, end, next);
        for (int base = piece * PIECE; base < end; base += TILE) {
            const int n = min(TILE, end - base);
            __syncthreads();
#pragma unroll
            for (int e = 0; e < E; e++) tile[warp][lane + 32 * e] = next.get(e);
            __syncthreads();
            if (base + TILE < end) fetch(base + TILE, end, next);
            float score[TILE];
#pragma unroll
            for (int k = 0; k < TILE; k++) {
                float dot = 0.0f;
#pragma unroll
                for (int e = 0; e < E; e++) dot = __fmaf_rn(qe[e], tile[k][lane + 32 * e], dot);
                score[k] = __fmul_rn(warp_sum(dot), p.scale);
                // Loads of the tile stay with their four keys: all of them at once would not fit the registers.
                if (k % 4 == 3) asm volatile("" ::: "memory");
            }
            part.take(score, n, [&](int k, int e) { return tile[k][lane + 32 * e]; });
        }
        if (alone) {
            all.merge(part.max, part.sum, part.acc);
        } else if (mine) {
            store_partial(part, partial + (item * gridDim.z + piece) * (p.head_dim + 2), p.head_dim);
        }
    }
    if (alone && mine) finish(all, out + item * p.head_dim, p.head_dim);
}

// Merges the pieces of a decode step, with the operations of Running::merge; blocks (row, head) of 512.
extern "C" __global__ void __launch_bounds__(512) sparse_merge(Step st, Sparse p, int pieces, const float* partial, float* out) {
    extern __shared__ float2 factors[];
    __shared__ float total;
    const int row = blockIdx.x, head = blockIdx.y, pos = st.positions[row], lane = threadIdx.x & 31;
    const int keys = min(pos + 1, p.window) + history(p, row, pos), mine = (keys + PIECE - 1) / PIECE, stride = p.head_dim + 2;
    const int64_t item = int64_t(row) * p.heads + head;
    const float* from = partial + item * pieces * stride;
    if (threadIdx.x < 32) {
        float max = p.sinks[head], sum = 1.0f;
        for (int base = 0; base < mine; base += 32) {
            const bool in = base + lane < mine;
            const float m = in ? from[int64_t(base + lane) * stride] : 0.0f, s = in ? from[int64_t(base + lane) * stride + 1] : 0.0f;
            for (int k = 0; k < min(32, mine - base); k++) {
                const float mk = __shfl_sync(~0u, m, k), sk = __shfl_sync(~0u, s, k);
                const float top = fmaxf(max, mk), c = expf(__fsub_rn(max, top)), d = expf(__fsub_rn(mk, top));
                max = top;
                sum = __fmaf_rn(sum, c, __fmul_rn(sk, d));
                if (lane == 0) factors[base + k] = make_float2(c, d);
            }
        }
        if (lane == 0) total = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.head_dim; i += blockDim.x) {
        float acc = 0.0f;
#pragma unroll 16
        for (int s = 0; s < mine; s++) acc = __fmaf_rn(acc, factors[s].x, __fmul_rn(from[int64_t(s) * stride + 2 + i], factors[s].y));
        out[item * p.head_dim + i] = __fdiv_rn(acc, total);
    }
}

#define SPARSE_KERNELS(E)                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256, E > 4 ? 1 : 2) sparse_attention_##E(Step st, Sparse p, Slot ring, Slot comp, float* partial, \
                                                                           float* out) {                                            \
        sparse_attention<E>(st, p, ring, comp, partial, out);                                                                       \
    }
FOR_EACH_WIDTH(SPARSE_KERNELS)
