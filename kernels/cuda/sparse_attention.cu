// Attention over the window and compressed rows, with a sink, for rows of any type and width. CPU reference: kernels/src/cpu/sparse.rs.
#include "softmax.cuh"
#include "sparse.cuh"

constexpr int PIECE = 40;  // 640 keys (the window and 512 selected) of 64 heads are 128 blocks: one each for 132 multiprocessors
constexpr int TILE = 8;
constexpr int HEADS = 8;  // as many as keys of a tile: each of the block's warps fetches one key and computes one head

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
    after_previous();
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
                                                                           float* out) { after_previous();                                            \
        sparse_attention<E>(st, p, ring, comp, partial, out);                                                                       \
    }
FOR_EACH_WIDTH(SPARSE_KERNELS)
