// Products with F16 weights on the tensor cores, for all weights that one input meets in one launch. CPU reference:
// kernels/src/cpu/matmul.rs.
//
// An activation x is scale * (hi + lo), two halves: scale is a power of two per row and chunk of 256 columns, which brings the chunk's
// greatest value to 2^14..2^15, so that hi + lo have 22 bits of it and what is 2^-25 of the greatest still has some. Weights are halves
// already, products are exact, and the tensor cores add them up in f32.
//
// The order is one for all kernels here. For each chunk: groups of 32 columns in order, each four steps of m16n8k16 into one
// accumulator: hi with columns of the group that lie at 0..3 of their eight, hi with those at 4..7, then lo likewise. Chunks are then added in
// order, each times its scale. Columns past the end are zeros. A step's column is a row of activations, and does not depend on the step's
// other columns, so a row's results have the same bits in every kernel.
//
// Lane 4 * g + t feeds eight neighbouring columns, 8t..8t+7 of a group: 16 bytes of a weight's row and of an activation's.
#include "common.cuh"

constexpr int CHUNK = 256, GROUP = 32;
constexpr int MOST = 8;

// Weights that share their inputs; laid out as `GroupArg` in kernels/src/cuda/products.rs.
struct Member {
    const __half* w;  // [outputs][cols], each row 16-byte aligned
    float* out;       // [rows][outputs]
};
struct Members {
    Member all[MOST];
    int outputs[MOST];
    int count;
    int cols;  // whole eights
};

// The member that tile `at` of `size` outputs belongs to; `at` becomes the tile's number in it.
__device__ __forceinline__ int member_of(const Members& m, int size, int& at) {
    int i = 0;
    while (i < m.count - 1) {
        const int tiles = (m.outputs[i] + size - 1) / size;
        if (at < tiles) break;
        at -= tiles;
        i++;
    }
    return i;
}

__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The two steps of a group with one half of the activations: rows g and g + 8 of the weights, row g of the activations.
__device__ __forceinline__ void two_steps(float (&c)[4], const uint4& a, const uint4& b, const uint4& x) {
    mma(c, a.x, b.x, a.y, b.y, x.x, x.y);
    mma(c, a.z, b.z, a.w, b.w, x.z, x.w);
}

// 2^k that brings values of at most `most` below 2^15, for finite `most`, and 2^-k.
__device__ __forceinline__ void scales(float most, float& up, float& down) {
    const int k = min(14 - (int(__float_as_uint(most) >> 23) - 127), 126);
    up = __uint_as_float(uint32_t(127 + k) << 23);
    down = __uint_as_float(uint32_t(127 - k) << 23);
}

// Two neighbours as halves, and what is left of them as halves.
__device__ __forceinline__ void split(float a, float b, float up, uint32_t& hi, uint32_t& lo) {
    const float u = __fmul_rn(a, up), v = __fmul_rn(b, up);
    const __half2 h = __floats2half2_rn(u, v);
    const float2 f = __half22float2(h);
    const __half2 l = __floats2half2_rn(__fsub_rn(u, f.x), __fsub_rn(v, f.y));
    hi = reinterpret_cast<const uint32_t&>(h);
    lo = reinterpret_cast<const uint32_t&>(l);
}

__device__ __forceinline__ void split8(const float4& a, const float4& b, float up, uint4& hi, uint4& lo) {
    split(a.x, a.y, up, hi.x, lo.x);
    split(a.z, a.w, up, hi.y, lo.y);
    split(b.x, b.y, up, hi.z, lo.z);
    split(b.z, b.w, up, hi.w, lo.w);
}

__device__ __forceinline__ float most8(const float4& a, const float4& b) {
    return fmaxf(fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(a.z), fabsf(a.w))), fmaxf(fmaxf(fabsf(b.x), fabsf(b.y)), fmaxf(fabsf(b.z), fabsf(b.w))));
}

// ---- few rows: the activations are split where they are used ----

// Weights are read once, and may be fetched before the kernel before has ended; a volatile load stays where it is.
__device__ __forceinline__ uint4 weights(const __half* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// 8 * NT rows from blockIdx.y on, 16 outputs per blockDim.z; a warp has one of `blockDim.y` chunks at a time. Dynamic shared memory: `Sums`
// for every chunk and blockDim.z.
template <int NT>
struct Sums {
    float acc[NT][4][32];
    float scale[NT][8];
};

template <int NT>
__device__ __forceinline__ void few(const Members& m, const float* x, int x_stride, int rows) {
    extern __shared__ uint4 shared[];
    Sums<NT>* sums = reinterpret_cast<Sums<NT>*>(shared);
    const int lane = threadIdx.x, g = lane >> 2, t = lane & 3, cols = m.cols, chunks = (cols + CHUNK - 1) / CHUNK;
    int tile = blockIdx.x;
    const int which = member_of(m, 16 * blockDim.z, tile), outputs = m.outputs[which];
    const int o0 = (tile * blockDim.z + threadIdx.z) * 16;
    const __half* wa = m.all[which].w + int64_t(min(o0 + g, outputs - 1)) * cols;
    const __half* wb = m.all[which].w + int64_t(min(o0 + g + 8, outputs - 1)) * cols;
    bool waited = false;
    for (int c = threadIdx.y; c < chunks; c += blockDim.y) {
        uint4 a[CHUNK / GROUP], b[CHUNK / GROUP];
#pragma unroll
        for (int i = 0; i < CHUNK / GROUP; i++) {
            const int k = c * CHUNK + i * GROUP + 8 * t;
            a[i] = k < cols ? weights(wa + k) : make_uint4(0, 0, 0, 0);
            b[i] = k < cols ? weights(wb + k) : make_uint4(0, 0, 0, 0);
        }
        if (!waited) after_previous();
        waited = true;
        Sums<NT>& to = sums[threadIdx.z * chunks + c];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const int row = (blockIdx.y * NT + n) * 8 + g;
            const float* in = x + int64_t(row) * x_stride + c * CHUNK + 8 * t;
            const int left = row < rows ? cols - c * CHUNK - 8 * t : 0;
            const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            float most = 0.0f;
            // Not all at once: the weights have half of the registers.
#pragma unroll 4
            for (int i = 0; i < CHUNK / GROUP; i++)
                if (i * GROUP < left) {
                    const float4* p = reinterpret_cast<const float4*>(in + i * GROUP);
                    most = fmaxf(most, most8(p[0], p[1]));
                }
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            float up, down;
            scales(most, up, down);
            float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < CHUNK / GROUP; i++) {
                if (c * CHUNK + i * GROUP >= cols) break;
                const float4* p = reinterpret_cast<const float4*>(in + i * GROUP);
                float4 v = zero, u = zero;
                if (i * GROUP < left) v = p[0], u = p[1];
                uint4 hi, lo;
                split8(v, u, up, hi, lo);
                two_steps(acc, a[i], b[i], hi);
                two_steps(acc, a[i], b[i], lo);
            }
#pragma unroll
            for (int k = 0; k < 4; k++) to.acc[n][k][lane] = acc[k];
            if (t == 0) to.scale[n][g] = down;
        }
    }
    if (!waited) after_previous();
    __syncthreads();
    // acc[k] of lane 4 * g + t is output g + 8 * (k / 2) of row 2 * t + k % 2.
    const int in_slice = threadIdx.y * 32 + lane;
    for (int i = in_slice; i < NT * 128; i += blockDim.y * 32) {
        const int n = i / 128, r = i / 16 % 8, out = i % 16, o = o0 + out, row = (blockIdx.y * NT + n) * 8 + r;
        if (o >= outputs || row >= rows) continue;
        const int k = out / 8 * 2 + r % 2, at = out % 8 * 4 + r / 2;
        float v = 0.0f;
        for (int c = 0; c < chunks; c++) {
            const Sums<NT>& s = sums[threadIdx.z * chunks + c];
            v = __fmaf_rn(s.scale[n][r], s.acc[n][k][at], v);
        }
        m.all[which].out[int64_t(row) * outputs + o] = v;
    }
}

extern "C" __global__ void __launch_bounds__(512) dense_few_1(Members m, const float* x, int x_stride, int rows) { few<1>(m, x, x_stride, rows); }
extern "C" __global__ void __launch_bounds__(512) dense_few_2(Members m, const float* x, int x_stride, int rows) { few<2>(m, x, x_stride, rows); }

// ---- many rows: activations split once, tiles through shared memory ----

// A warp per chunk of a row. hi and lo: [rows][cols, up to a whole group]; scale: [chunks][rows].
extern "C" __global__ void __launch_bounds__(256) dense_split(const float* x, int x_stride, int cols, int rows, uint4* hi, uint4* lo, float* scale) {
    after_previous();
    const int lane = threadIdx.x & 31, chunks = (cols + CHUNK - 1) / CHUNK, stride = (cols + GROUP - 1) / GROUP * 4;
    const int64_t at = int64_t(blockIdx.x) * 8 + (threadIdx.x >> 5);
    if (at >= int64_t(rows) * chunks) return;
    const int row = int(at / chunks), c = int(at % chunks), k = c * CHUNK + 8 * lane;
    float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b = a;
    if (k < cols) {
        const float4* p = reinterpret_cast<const float4*>(x + int64_t(row) * x_stride + k);
        a = p[0], b = p[1];
    }
    float up, down;
    scales(warp_max(most8(a, b)), up, down);
    uint4 h, l;
    split8(a, b, up, h, l);
    if (k / 8 < stride) {
        hi[int64_t(row) * stride + k / 8] = h;
        lo[int64_t(row) * stride + k / 8] = l;
    }
    if (lane == 0) scale[int64_t(c) * rows + row] = down;
}

__device__ __forceinline__ void copy16(void* to, const void* from, bool is) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from), "r"(is ? 16 : 0) : "memory");
}

// A block has OUTS outputs of ROWS rows, a warp 16 * MT of 8 * NT of them; STAGES groups of columns are in shared memory or on their way.
template <int OUTS, int ROWS, int MT, int NT, int STAGES>
__device__ __forceinline__ void many(const Members& m, const uint4* hi, const uint4* lo, const float* scale, int rows) {
    constexpr int WARPS_M = OUTS / (16 * MT), WARPS_N = ROWS / (8 * NT), THREADS = 32 * WARPS_M * WARPS_N;
    constexpr int STAGE = 4 * (OUTS + 2 * ROWS);
    static_assert(OUTS * 4 % THREADS == 0 && ROWS * 4 % THREADS == 0, "whole copies");
    extern __shared__ uint4 shared[];
    after_previous();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int cols = m.cols, chunks = (cols + CHUNK - 1) / CHUNK, groups = (cols + GROUP - 1) / GROUP;
    int tile = blockIdx.x;
    const int which = member_of(m, OUTS, tile), outputs = m.outputs[which];
    const int o0 = tile * OUTS, r0 = blockIdx.y * ROWS;
    const __half* w = m.all[which].w;

    // Thread i copies piece i % 4 of rows i / 4, i / 4 + THREADS / 4, ...
    const int piece = threadIdx.x & 3, first = threadIdx.x >> 2;
    auto fetch = [&](int group) {
        if (group < groups) {
            uint4* to = shared + group % STAGES * STAGE + threadIdx.x;
            const int k = group * GROUP + 8 * piece;
#pragma unroll
            for (int i = 0; i < OUTS * 4 / THREADS; i++)
                copy16(to + i * THREADS, w + int64_t(min(o0 + first + i * (THREADS / 4), outputs - 1)) * cols + min(k, cols - 8), k < cols);
#pragma unroll
            for (int i = 0; i < ROWS * 4 / THREADS; i++) {
                const int64_t at = int64_t(min(r0 + first + i * (THREADS / 4), rows - 1)) * (groups * 4) + group * 4 + piece;
                copy16(to + OUTS * 4 + i * THREADS, hi + at, true);
                copy16(to + OUTS * 4 + ROWS * 4 + i * THREADS, lo + at, true);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch(i);

    const int wm = warp % WARPS_M * 16 * MT, wn = warp / WARPS_M * 8 * NT;
    float sum[MT][NT][4];
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int k = 0; k < 4; k++) sum[i][n][k] = 0.0f;

    for (int c = 0; c < chunks; c++) {
        float by[NT][2];
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int k = 0; k < 2; k++) by[n][k] = scale[int64_t(c) * rows + min(r0 + wn + 8 * n + 2 * t + k, rows - 1)];
        float acc[MT][NT][4];
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int k = 0; k < 4; k++) acc[i][n][k] = 0.0f;
        const int end = min(groups, (c + 1) * (CHUNK / GROUP));
#pragma unroll 1
        for (int group = c * (CHUNK / GROUP); group < end; group++) {
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
            __syncthreads();
            fetch(group + STAGES - 1);
            const uint4* from = shared + group % STAGES * STAGE + lane;
            uint4 a[MT][2], b[NT];
#pragma unroll
            for (int i = 0; i < MT; i++) a[i][0] = from[4 * (wm + 16 * i)], a[i][1] = from[4 * (wm + 16 * i + 8)];
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int n = 0; n < NT; n++) b[n] = from[4 * (OUTS + half * ROWS + wn + 8 * n)];
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int n = 0; n < NT; n++) mma(acc[i][n], a[i][0].x, a[i][1].x, a[i][0].y, a[i][1].y, b[n].x, b[n].y);
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int n = 0; n < NT; n++) mma(acc[i][n], a[i][0].z, a[i][1].z, a[i][0].w, a[i][1].w, b[n].z, b[n].w);
            }
        }
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int k = 0; k < 4; k++) sum[i][n][k] = __fmaf_rn(by[n][k & 1], acc[i][n][k], sum[i][n][k]);
    }
    float* out = m.all[which].out;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int row = r0 + wn + 8 * n + 2 * t + (k & 1);
            if (row < rows)
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    const int o = o0 + wm + 16 * i + g + (k >> 1) * 8;
                    if (o < outputs) out[int64_t(row) * outputs + o] = sum[i][n][k];
                }
        }
}

#define MANY(OUTS, ROWS, MT, NT, STAGES, BLOCKS)                                                                                        \
    extern "C" __global__ void __launch_bounds__(OUTS* ROWS / (4 * MT * NT), BLOCKS)                                                    \
        dense_many_##OUTS##_##ROWS(Members m, const uint4* hi, const uint4* lo, const float* scale, int rows) {                         \
        many<OUTS, ROWS, MT, NT, STAGES>(m, hi, lo, scale, rows);                                                                       \
    }
MANY(128, 128, 4, 4, 4, 1)
MANY(64, 64, 2, 4, 4, 3)
#ifdef DENSE_TRIALS
MANY(128, 64, 4, 4, 4, 2)
MANY(64, 32, 2, 2, 4, 4)
MANY(64, 128, 2, 4, 4, 1)
MANY(32, 64, 2, 2, 4, 4)
#endif
