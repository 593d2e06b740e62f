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

// A thread's share of queries: N times four values, as many as the block has threads apart.
template <int N>
struct Queries {
    float4 v[N];
    // From value `first` on; those from `end` on are left out.
    __device__ __forceinline__ void load(const float* q, int first = 0, int end = 1 << 30) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int at = first + 4 * (threadIdx.x + i * blockDim.x);
            v[i] = at < end ? *reinterpret_cast<const float4*>(q + at) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
    // As two f16 each: [high or low][head][PITCH].
    template <int HEADS>
    __device__ __forceinline__ void store(__half* to, int first = 0) const {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int dim = first + 4 * (threadIdx.x + i * blockDim.x), at = dim / DIM * PITCH + column_of(dim % DIM);
            if (dim >= HEADS * DIM) continue;
            uint32_t h0, h1, l0, l1;
            split2(v[i].x, v[i].y, h0, l0);
            split2(v[i].z, v[i].w, h1, l1);
            *reinterpret_cast<uint32_t*>(to + at) = h0;
            *reinterpret_cast<uint32_t*>(to + at + 8) = h1;
            *reinterpret_cast<uint32_t*>(to + HEADS * PITCH + at) = l0;
            *reinterpret_cast<uint32_t*>(to + HEADS * PITCH + at + 8) = l1;
        }
    }
};

// Where a query comes from: of the step's arrays, which no kernel writes.
struct Origin {
    int pos, first_pos, first_row;
    uint64_t bank;
    __device__ __forceinline__ Origin(const Step& st, int row) {
        const int span = st.span_of[row];
        pos = st.positions[row];
        first_pos = st.first_pos[span];
        first_row = st.first_row[span];
        bank = st.banks[span];
    }
};

// The row at a place; places that hold nothing get one that exists.
struct Finder {
    const Sparse& p;
    const Slot& ring;
    const Slot& comp;
    const Seen& s;
    const Origin& from;
    int row;
    bool listed;
    __device__ __forceinline__ Finder(const Sparse& p, const Slot& ring, const Slot& comp, const Seen& s, const Origin& from, int row)
        : p(p), ring(ring), comp(comp), s(s), from(from), row(row), listed(p.selected && p.counts[row] >= 0) {}
    // The step's row that it is, or -1 and the address of a stored row.
    __device__ __forceinline__ int find(int place, const uint8_t*& stored) const {
        if (place < s.window) {
            const int t = s.first + min(place, s.recent - 1);
            if (t >= from.first_pos) return from.first_row + t - from.first_pos;
            stored = slot_row(ring, from.bank, t);
        } else {
            const int h = min(place - s.window, s.hist - 1);
            stored = slot_row(comp, from.bank, listed ? __ldg(p.selected + int64_t(row) * p.top_k + h) : h);
        }
        return -1;
    }
};

__device__ __forceinline__ float quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
    return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}

// ---- many heads and keys a warp: prefill ----

constexpr int WIDE_HEADS = 32, TILES = 4, WIDE_PLACES = 8 * TILES;  // a warp has 32 heads and 4 tiles of 8 keys at once

// This lane's columns of two steps (half a chunk of 64) of TILES tiles.
struct Half {
    uint32_t b[TILES][4];
    // Rows of f16, of which 16 bytes are at `at`; ALIGN 8 in an FP8 row.
    template <int ALIGN>
    __device__ __forceinline__ void halves_at(const uint8_t* const (&key)[TILES], int at) {
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            if (ALIGN == 16) {
                *reinterpret_cast<uint4*>(b[n]) = fetch<uint4>(key[n] + at);
            } else {
                *reinterpret_cast<uint2*>(b[n]) = fetch<uint2>(key[n] + at);
                *reinterpret_cast<uint2*>(b[n] + 2) = fetch<uint2>(key[n] + at + 8);
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
    const Origin origin(st, row);
    after_previous();
    const float* q_at = p.q + (int64_t(row) * p.heads + part * WIDE_HEADS) * DIM;
#pragma unroll 1
    for (int i = 0; i < WIDE_HEADS * DIM; i += WARPS * 32 * 32) {
        Queries<8> some;
        some.load(q_at, i, WIDE_HEADS * DIM);
        some.store<WIDE_HEADS>(queries, i);
    }
    const uint32_t q = uint32_t(__cvta_generic_to_shared(queries)) + ((lane & 15) * PITCH + (lane >> 4) * 8) * 2;
    const Seen s(p, row, origin.pos);
    const Finder finder(p, ring, comp, s, origin, row);
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
                raw[0][n] = fetch<uint2>(key[n] + 8 * t);
                raw[1][n] = fetch<uint2>(key[n] + 32 + 8 * t);
                scales[n] = fetch<uint2>(key[n] + NOPE);
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
                    for (int n = 0; n < TILES; n++) raw[j][n] = fetch<uint2>(key[n] + ahead + 32 * j);
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
        const int64_t head = int64_t(local) * p.heads + part * WIDE_HEADS + g;
        float* out = f.scores + head * f.stride + base + 2 * t;
#pragma unroll
        for (int i = 0; i < 8 * TILES; i++) (&total[0][0][0])[i] = __fmul_rn((&total[0][0][0])[i], p.scale);
        if (!s.holds(base) || !s.holds(base + 8 * TILES - 1)) {
#pragma unroll
            for (int n = 0; n < TILES; n++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const bool in = s.holds(base + 8 * n + 2 * t + c);
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        if (!in) total[m][n][c] = NONE;
                        if (!in) total[m][n][2 + c] = NONE;
                    }
                }
        }
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float top = NONE;
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    const float2 v = make_float2(total[m][n][2 * h], total[m][n][2 * h + 1]);
                    top = fmaxf(top, fmaxf(v.x, v.y));
                    *reinterpret_cast<float2*>(out + (m * 16 + h * 8) * f.stride + 8 * n) = v;
                }
                top = quad_max(top);
                if (t == 0) f.tops[(head + m * 16 + h * 8) * (f.stride / WIDE_PLACES) + base / WIDE_PLACES] = top;
            }
    }
}

// ---- few heads and keys a warp: decode ----

constexpr int NARROW_HEADS = 16, NARROW_WARPS = 4, NARROW_PLACES = 8;

// Blocks (row, 16 heads, 32 places) of 128: each warp has a tile of 8 places, whose keys it loads at once.
extern "C" __global__ void __launch_bounds__(32 * NARROW_WARPS, 3) sparse_scores_narrow(Step st, Sparse p, Places f, Slot ring, Slot comp) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int local = blockIdx.x, part = blockIdx.y, row = f.first + local, base = (blockIdx.z * NARROW_WARPS + warp) * 8;
    const Origin origin(st, row);
    after_previous();
    // The queries are on their way while the keys are looked for.
    const float* q_at = p.q + (int64_t(row) * p.heads + part * NARROW_HEADS) * DIM;
    Queries<NARROW_HEADS * DIM / (128 * NARROW_WARPS)> staged;
    staged.load(q_at);
    const Seen s(p, row, origin.pos);
    const int end = s.steps() * 16;
    if (int(blockIdx.z) * NARROW_WARPS * 8 >= end) return;
    const bool some = base < end, window = base < s.window;
    // [half a chunk][columns of two steps]
    uint32_t b[2 * CHUNKS][4];
    uint2 codes[2 * CHUNKS - 2], scales;
    const uint8_t* key;
    int own = -1;
    if (some) {
        const Finder finder(p, ring, comp, s, origin, row);
        own = finder.find(base + g, key);
        if (own >= 0) key = reinterpret_cast<const uint8_t*>(f.recent + int64_t(own) * DIM);
        if (part == 0 && t == 0) f.keys[int64_t(local) * f.stride + base + g] = key;
        if (!window) {
            scales = fetch<uint2>(key + NOPE);
#pragma unroll
            for (int h = 0; h < 2 * CHUNKS - 2; h++) codes[h] = fetch<uint2>(key + 32 * h + 8 * t);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint2 x = fetch<uint2>(key + TAIL + 64 * h + 16 * t), y = fetch<uint2>(key + TAIL + 64 * h + 16 * t + 8);
                const int to = 2 * CHUNKS - 2 + h;
                b[to][0] = x.x, b[to][1] = x.y, b[to][2] = y.x, b[to][3] = y.y;
            }
        }
    }
    staged.store<NARROW_HEADS>(queries);
    if (some && window) {
        if (own >= 0) {
            // In f32; the query's own row goes to `recent` for the values' kernel and later queries of the step.
            const float* from = p.kv + int64_t(own) * DIM + 8 * t;
#pragma unroll
            for (int h = 0; h < 2 * CHUNKS; h++) {
                const float4* at = reinterpret_cast<const float4*>(from + 32 * h);
                const float4 x = at[0], y = at[1];
                b[h][0] = bits(__floats2half2_rn(x.x, x.y));
                b[h][1] = bits(__floats2half2_rn(x.z, x.w));
                b[h][2] = bits(__floats2half2_rn(y.x, y.y));
                b[h][3] = bits(__floats2half2_rn(y.z, y.w));
                if (h % 4 == 3) asm volatile("" ::: "memory");  // more at once would not fit the registers
            }
            if (own == row && part == 0 && base + g < s.recent) {
#pragma unroll
                for (int h = 0; h < 2 * CHUNKS; h++)
                    *reinterpret_cast<uint4*>(f.recent + int64_t(own) * DIM + 32 * h + 8 * t) = make_uint4(b[h][0], b[h][1], b[h][2], b[h][3]);
            }
        } else {
#pragma unroll
            for (int h = 0; h < 2 * CHUNKS; h++) {
                const uint4 v = fetch<uint4>(key + 64 * h + 16 * t);
                b[h][0] = v.x, b[h][1] = v.y, b[h][2] = v.z, b[h][3] = v.w;
            }
        }
    }
    __syncthreads();
    if (!some) return;
    // Side by side, where the values' kernel would meet a line of the cache for each.
    if (part == 0 && t == 0 && !window) *reinterpret_cast<uint2*>(f.exponents + (int64_t(local) * f.stride + base + g) * 8) = scales;
    const uint32_t q = uint32_t(__cvta_generic_to_shared(queries)) + ((lane & 15) * PITCH + (lane >> 4) * 8) * 2;
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    // Four chunks side by side: one is a chain of eight products that wait for each other.
    const auto dot = [&](auto columns) {
#pragma unroll
        for (int four = 0; four < CHUNKS; four += 4) {
            float sum[4][4];
#pragma unroll
            for (int i = 0; i < 16; i++) (&sum[0][0])[i] = 0.0f;
#pragma unroll
            for (int step = 0; step < 4; step++) {
                uint2 k[4];
#pragma unroll
                for (int c = 0; c < 4; c++) k[c] = columns(four + c, step);
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        uint32_t a[4];
                        ldmatrix4(a, q + half * (NARROW_HEADS * PITCH * 2) + (four + c) * 128 + step * 32);
                        mma_f16(sum[c], a, k[c].x, k[c].y);
                    }
            }
#pragma unroll
            for (int c = 0; c < 4; c++)
#pragma unroll
                for (int i = 0; i < 4; i++) total[i] = __fadd_rn(total[i], sum[c][i]);
        }
    };
    const auto stored16 = [&](int c, int step) {
        const uint32_t (&from)[4] = b[2 * c + step / 2];
        return make_uint2(from[2 * (step % 2)], from[2 * (step % 2) + 1]);
    };
    if (window) {
        dot(stored16);
    } else {
        dot([&](int c, int step) {
            if (c == CHUNKS - 1) return stored16(c, step);
            const __half2 scale = __half2half2(scale_of((c < 4 ? scales.x >> (8 * c) : scales.y >> (8 * (c - 4))) & 0xff));
            const uint32_t raw = step % 2 ? codes[2 * c + step / 2].y : codes[2 * c + step / 2].x;
            return make_uint2(fp8_pair(raw, scale), fp8_pair(raw >> 16, scale));
        });
    }
    const int64_t head = int64_t(local) * p.heads + part * NARROW_HEADS + g;
    float* out = f.scores + head * f.stride + base + 2 * t;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float2 v = make_float2(s.holds(base + 2 * t) ? __fmul_rn(total[2 * h], p.scale) : NONE,
                                     s.holds(base + 2 * t + 1) ? __fmul_rn(total[2 * h + 1], p.scale) : NONE);
        *reinterpret_cast<float2*>(out + h * 8 * f.stride) = v;
        const float top = quad_max(fmaxf(v.x, v.y));
        if (t == 0) f.tops[(head + h * 8) * (f.stride / NARROW_PLACES) + base / NARROW_PLACES] = top;
    }
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

constexpr int WIDE_WARPS = 4;
extern "C" __global__ void __launch_bounds__(32 * WIDE_WARPS, 3) sparse_scores_wide(Step st, Sparse p, Places f, Slot ring, Slot comp) {
    scores_wide<WIDE_WARPS>(st, p, f, ring, comp);
}
