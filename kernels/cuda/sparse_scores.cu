// Scores of queries and keys on tensor cores: see sparse_tensor.cuh.
#include "sparse_tensor.cuh"

constexpr int PITCH = DIM + 8;  // of a head's query in shared memory, in f16: ldmatrix then meets no bank twice

extern __shared__ __align__(16) __half queries[];

// Which place of a chunk of 64 a dimension has among the columns of the tensor cores' four steps: a lane feeds a step's columns 2t, 2t+1,
// 2t+8 and 2t+9, and they are four neighbours of its eight (bytes of FP8, one load) of each half of the chunk. For dim a multiple of four:
// columns of dim and dim + 1; those of dim + 2 and dim + 3 are eight later.
__device__ __forceinline__ int column_of(int dim) {
    const int half = dim >> 5 & 1, t = dim >> 3 & 3, i = dim >> 2 & 1;
    return (dim & ~63) + (2 * half + i) * 16 + 2 * t;
}

// Queries of HEADS heads as two f16 each, by the whole block: [high or low][head][PITCH].
template <int HEADS>
__device__ __forceinline__ void stage_queries(const float* q, __half* to) {
    for (int i = threadIdx.x * 4; i < HEADS * DIM; i += blockDim.x * 4) {
        const float4 v = __ldg(reinterpret_cast<const float4*>(q + i));
        const int at = i / DIM * PITCH + column_of(i % DIM);
        uint32_t h0, h1, l0, l1;
        split2(v.x, v.y, h0, l0);
        split2(v.z, v.w, h1, l1);
        *reinterpret_cast<uint32_t*>(to + at) = h0;
        *reinterpret_cast<uint32_t*>(to + at + 8) = h1;
        *reinterpret_cast<uint32_t*>(to + HEADS * PITCH + at) = l0;
        *reinterpret_cast<uint32_t*>(to + HEADS * PITCH + at + 8) = l1;
    }
}

// The row at a place; places that hold nothing get one that exists. `mine` is set for this step's own rows, which lie elsewhere in f32.
struct Finder {
    const Step& st;
    const Sparse& p;
    const Slot& ring;
    const Slot& comp;
    const Seen& s;
    int row, first_pos, first_row;
    uint64_t bank;
    bool listed;
    __device__ __forceinline__ Finder(const Step& st, const Sparse& p, const Slot& ring, const Slot& comp, const Seen& s, int row)
        : st(st), p(p), ring(ring), comp(comp), s(s), row(row) {
        const int span = st.span_of[row];
        first_pos = st.first_pos[span];
        first_row = st.first_row[span];
        bank = st.banks[span];
        listed = p.selected && p.counts[row] >= 0;
    }
    // The row of the step, or -1, and the address of a stored row.
    __device__ __forceinline__ int find(int place, const uint8_t*& stored) const {
        if (place < s.window) {
            const int t = s.first + min(place, s.recent - 1);
            if (t >= first_pos) return first_row + t - first_pos;
            stored = slot_row(ring, bank, t);
        } else {
            const int h = min(place - s.window, s.hist - 1);
            stored = slot_row(comp, bank, listed ? __ldg(p.selected + int64_t(row) * p.top_k + h) : h);
        }
        return -1;
    }
};

// ---- many heads and keys a warp: prefill ----

constexpr int WIDE_HEADS = 32, TILES = 4;  // a warp has 32 heads and 4 tiles of 8 keys at once

// This lane's columns of two steps (half a chunk of 64) of TILES tiles.
struct Half {
    uint32_t b[TILES][4];
    // Rows of f16, of which 16 bytes are at `at`; ALIGN 8 in an FP8 row.
    template <int ALIGN>
    __device__ __forceinline__ void halves_at(const uint8_t* const (&key)[TILES], int at) {
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            if (ALIGN == 16) {
                *reinterpret_cast<uint4*>(b[n]) = *reinterpret_cast<const uint4*>(key[n] + at);
            } else {
                *reinterpret_cast<uint2*>(b[n]) = *reinterpret_cast<const uint2*>(key[n] + at);
                *reinterpret_cast<uint2*>(b[n] + 2) = *reinterpret_cast<const uint2*>(key[n] + at + 8);
            }
        }
    }
    __device__ __forceinline__ void codes(const uint2 (&raw)[TILES], const __half2 (&scale)[TILES]) {
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            b[n][0] = fp8_pair(raw[n].x, scale[n]);
            b[n][1] = fp8_pair(raw[n].x >> 16, scale[n]);
            b[n][2] = fp8_pair(raw[n].y, scale[n]);
            b[n][3] = fp8_pair(raw[n].y >> 16, scale[n]);
        }
    }
};

// Adds two steps to the sums; `q` is the lane's address in the queries.
__device__ __forceinline__ void add_half(float (&sum)[2][TILES][4], uint32_t q, const Half& k) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
            uint32_t hi[4], lo[4];
            ldmatrix4(hi, q + m * (16 * PITCH * 2) + i * 32);
            ldmatrix4(lo, q + m * (16 * PITCH * 2) + i * 32 + WIDE_HEADS * PITCH * 2);
#pragma unroll
            for (int n = 0; n < TILES; n++) mma_f16(sum[m][n], hi, k.b[n][2 * i], k.b[n][2 * i + 1]);
#pragma unroll
            for (int n = 0; n < TILES; n++) mma_f16(sum[m][n], lo, k.b[n][2 * i], k.b[n][2 * i + 1]);
        }
    }
}

__device__ __forceinline__ void clear(float (&sum)[2][TILES][4]) {
#pragma unroll
    for (int i = 0; i < 8 * TILES; i++) (&sum[0][0][0])[i] = 0.0f;
}

__device__ __forceinline__ void take(float (&total)[2][TILES][4], const float (&sum)[2][TILES][4]) {
#pragma unroll
    for (int i = 0; i < 8 * TILES; i++) (&total[0][0][0])[i] = __fadd_rn((&total[0][0][0])[i], (&sum[0][0][0])[i]);
}

// Blocks of WARPS warps: 32 heads of a query, each warp 32 places at a time.
template <int WARPS>
__device__ __forceinline__ void scores_wide(const Step& st, const Sparse& p, const Places& f, const Slot& ring, const Slot& comp) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int parts = p.heads / WIDE_HEADS, local = blockIdx.x / parts, part = blockIdx.x % parts, row = f.first + local;
    stage_queries<WIDE_HEADS>(p.q + (int64_t(row) * p.heads + part * WIDE_HEADS) * DIM, queries);
    const Seen s(st, p, row);
    const Finder finder(st, p, ring, comp, s, row);
    const uint32_t q = uint32_t(__cvta_generic_to_shared(queries)) + ((lane & 15) * PITCH + (lane >> 4) * 8) * 2;
    const int end = s.steps() * 16;
    __syncthreads();
#pragma unroll 1
    for (int base = warp * 8 * TILES; base < end; base += WARPS * 8 * TILES) {
        const uint8_t* key[TILES];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const int own = finder.find(base + 8 * n + g, key[n]);
            if (own >= 0) key[n] = reinterpret_cast<const uint8_t*>(f.recent + int64_t(own) * DIM);
            if (part == 0 && t == 0) f.keys[int64_t(local) * f.stride + base + 8 * n + g] = key[n];
        }
        float total[2][TILES][4], sum[2][TILES][4];
        clear(total);
        if (base < s.window) {
            Half now, next;
            now.halves_at<16>(key, 16 * t);
#pragma unroll 1
            for (int c = 0; c < CHUNKS; c++) {
                clear(sum);
                next.halves_at<16>(key, 128 * c + 64 + 16 * t);
                add_half(sum, q + c * 128, now);
                now.halves_at<16>(key, 128 * min(c + 1, CHUNKS - 1) + 16 * t);
                add_half(sum, q + c * 128 + 64, next);
                take(total, sum);
            }
        } else {
            uint2 raw[2][TILES], scales[TILES];
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                raw[0][n] = *reinterpret_cast<const uint2*>(key[n] + 8 * t);
                raw[1][n] = *reinterpret_cast<const uint2*>(key[n] + 32 + 8 * t);
                scales[n] = *reinterpret_cast<const uint2*>(key[n] + NOPE);
            }
#pragma unroll 1
            for (int c = 0; c < CHUNKS - 1; c++) {
                const int ahead = 64 * min(c + 1, CHUNKS - 2) + 8 * t;
                __half2 scale[TILES];
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    scale[n] = __half2half2(scale_of(scales[n].x & 0xff));
                    scales[n].x = __funnelshift_r(scales[n].x, scales[n].y, 8);
                    scales[n].y >>= 8;
                }
                clear(sum);
                Half k;
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    k.codes(raw[j], scale);
#pragma unroll
                    for (int n = 0; n < TILES; n++) raw[j][n] = *reinterpret_cast<const uint2*>(key[n] + ahead + 32 * j);
                    add_half(sum, q + c * 128 + j * 64, k);
                }
                take(total, sum);
            }
            Half now, next;
            now.halves_at<8>(key, TAIL + 16 * t);
            next.halves_at<8>(key, TAIL + 64 + 16 * t);
            clear(sum);
            add_half(sum, q + (CHUNKS - 1) * 128, now);
            add_half(sum, q + (CHUNKS - 1) * 128 + 64, next);
            take(total, sum);
        }
        float* out = f.scores + (int64_t(local) * p.heads + part * WIDE_HEADS + g) * f.stride + base + 2 * t;
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const float* c = total[m][n];
                *reinterpret_cast<float2*>(out + m * 16 * f.stride + 8 * n) = make_float2(__fmul_rn(c[0], p.scale), __fmul_rn(c[1], p.scale));
                *reinterpret_cast<float2*>(out + (m * 16 + 8) * f.stride + 8 * n) = make_float2(__fmul_rn(c[2], p.scale), __fmul_rn(c[3], p.scale));
            }
    }
}

// ---- few heads and keys a warp: decode ----

constexpr int NARROW_HEADS = 16, NARROW_WARPS = 8;

// Blocks (row, 16 heads, 64 places) of 256: each warp has 8 places, whose keys it loads at once.
extern "C" __global__ void __launch_bounds__(32 * NARROW_WARPS, 1) sparse_scores_narrow(Step st, Sparse p, Places f, Slot ring, Slot comp) {
    after_previous();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int local = blockIdx.x, part = blockIdx.y, row = f.first + local, base = (blockIdx.z * NARROW_WARPS + warp) * 8;
    const Seen s(st, p, row);
    const int end = s.steps() * 16;
    if (int(blockIdx.z) * NARROW_WARPS * 8 >= end) return;
    const bool some = base < end, window = base < s.window;
    // [half a chunk][columns of two steps]
    uint32_t b[2 * CHUNKS][4];
    uint2 codes[2 * CHUNKS - 2], scales;
    if (some) {
        const Finder finder(st, p, ring, comp, s, row);
        const uint8_t* key;
        const int place = base + g, own = finder.find(place, key);
        if (own >= 0) key = reinterpret_cast<const uint8_t*>(f.recent + int64_t(own) * DIM);
        if (part == 0 && t == 0) f.keys[int64_t(local) * f.stride + place] = key;
        if (window) {
            if (own >= 0) {
                // In f32; the query's own row goes to `recent` for the values' kernel and later queries of the step.
                const float* from = p.kv + int64_t(own) * DIM + 8 * t;
#pragma unroll
                for (int h = 0; h < 2 * CHUNKS; h++) {
                    const float4 x = *reinterpret_cast<const float4*>(from + 32 * h), y = *reinterpret_cast<const float4*>(from + 32 * h + 4);
                    b[h][0] = bits(__floats2half2_rn(x.x, x.y));
                    b[h][1] = bits(__floats2half2_rn(x.z, x.w));
                    b[h][2] = bits(__floats2half2_rn(y.x, y.y));
                    b[h][3] = bits(__floats2half2_rn(y.z, y.w));
                }
                if (own == row && part == 0 && place < s.recent) {
#pragma unroll
                    for (int h = 0; h < 2 * CHUNKS; h++)
                        *reinterpret_cast<uint4*>(f.recent + int64_t(own) * DIM + 32 * h + 8 * t) = make_uint4(b[h][0], b[h][1], b[h][2], b[h][3]);
                }
            } else {
#pragma unroll
                for (int h = 0; h < 2 * CHUNKS; h++) {
                    const uint4 v = *reinterpret_cast<const uint4*>(key + 64 * h + 16 * t);
                    b[h][0] = v.x, b[h][1] = v.y, b[h][2] = v.z, b[h][3] = v.w;
                }
            }
        } else {
            scales = *reinterpret_cast<const uint2*>(key + NOPE);
#pragma unroll
            for (int h = 0; h < 2 * CHUNKS - 2; h++) codes[h] = *reinterpret_cast<const uint2*>(key + 32 * h + 8 * t);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint2 x = *reinterpret_cast<const uint2*>(key + TAIL + 64 * h + 16 * t);
                const uint2 y = *reinterpret_cast<const uint2*>(key + TAIL + 64 * h + 16 * t + 8);
                const int to = 2 * CHUNKS - 2 + h;
                b[to][0] = x.x, b[to][1] = x.y, b[to][2] = y.x, b[to][3] = y.y;
            }
        }
    }
    stage_queries<NARROW_HEADS>(p.q + (int64_t(row) * p.heads + part * NARROW_HEADS) * DIM, queries);
    __syncthreads();
    if (!some) return;
    if (!window) {
#pragma unroll
        for (int c = 0; c < CHUNKS - 1; c++) {
            const __half2 scale = __half2half2(scale_of((c < 4 ? scales.x >> (8 * c) : scales.y >> (8 * (c - 4))) & 0xff));
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint2 raw = codes[2 * c + j];
                b[2 * c + j][0] = fp8_pair(raw.x, scale);
                b[2 * c + j][1] = fp8_pair(raw.x >> 16, scale);
                b[2 * c + j][2] = fp8_pair(raw.y, scale);
                b[2 * c + j][3] = fp8_pair(raw.y >> 16, scale);
            }
        }
    }
    const uint32_t q = uint32_t(__cvta_generic_to_shared(queries)) + ((lane & 15) * PITCH + (lane >> 4) * 8) * 2;
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    // Four chunks side by side: one is a chain of eight products that wait for each other.
#pragma unroll
    for (int four = 0; four < CHUNKS; four += 4) {
        float sum[4][4];
#pragma unroll
        for (int i = 0; i < 16; i++) (&sum[0][0])[i] = 0.0f;
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint32_t a[4][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int c = 0; c < 4; c++) ldmatrix4(a[c], q + half * (NARROW_HEADS * PITCH * 2) + (four + c) * 128 + step * 32);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const uint32_t (&k)[4] = b[2 * (four + c) + step / 2];
                    mma_f16(sum[c], a[c], k[2 * (step % 2)], k[2 * (step % 2) + 1]);
                }
            }
        }
#pragma unroll
        for (int c = 0; c < 4; c++)
#pragma unroll
            for (int i = 0; i < 4; i++) total[i] = __fadd_rn(total[i], sum[c][i]);
    }
    float* out = f.scores + (int64_t(local) * p.heads + part * NARROW_HEADS + g) * f.stride + base + 2 * t;
    *reinterpret_cast<float2*>(out) = make_float2(__fmul_rn(total[0], p.scale), __fmul_rn(total[1], p.scale));
    *reinterpret_cast<float2*>(out + 8 * f.stride) = make_float2(__fmul_rn(total[2], p.scale), __fmul_rn(total[3], p.scale));
}

// This step's rows in f16, for kernels that read each of them for many queries; a thread for eight values.
extern "C" __global__ void __launch_bounds__(256) sparse_recent(const float* kv, __half* to, int64_t n) {
    after_previous();
    const int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
    if (i >= n) return;
    const float4 x = *reinterpret_cast<const float4*>(kv + i), y = *reinterpret_cast<const float4*>(kv + i + 4);
    const uint4 v = make_uint4(bits(__floats2half2_rn(x.x, x.y)), bits(__floats2half2_rn(x.z, x.w)), bits(__floats2half2_rn(y.x, y.y)),
                               bits(__floats2half2_rn(y.z, y.w)));
    *reinterpret_cast<uint4*>(to + i) = v;
}

#ifndef WIDE_WARPS
#define WIDE_WARPS 4
#endif
#ifndef WIDE_BLOCKS
#define WIDE_BLOCKS 3
#endif
extern "C" __global__ void __launch_bounds__(32 * WIDE_WARPS, WIDE_BLOCKS) sparse_scores_wide(Step st, Sparse p, Places f, Slot ring, Slot comp) {
    after_previous();
    scores_wide<WIDE_WARPS>(st, p, f, ring, comp);
}
