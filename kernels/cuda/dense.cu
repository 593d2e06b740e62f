// Products with F16 weights on the tensor cores, for all weights that one input meets in one launch. CPU reference:
// kernels/src/cpu/matmul.rs.
//
// An activation x is scale * (hi + lo), two halves: scale is a power of two per row and chunk of 256 columns, which brings the chunk's
// greatest value to 2^14..2^15, so that hi + lo have 22 bits of it, and of what is 2^-25 of the greatest still some. Weights are halves
// already, products are exact, and the tensor cores add them up in f32 (they cut where a sum of floats would round: seen, an error of 7e-7
// of a result, where a sum in f32 has 1e-7).
//
// The order is one for all kernels here. For each chunk: groups of 32 columns in order, each four steps of m16n8k16 into one
// accumulator: hi of the columns that lie at 0..3 of their eight, hi of those at 4..7, then lo likewise. Chunks are then added in order,
// each times its scale. Columns past the end are zeros. A row of a step's result does not depend on its other rows, so results have the
// same bits in every kernel.
//
// Activations are the 16 rows of a step, eight weights its columns. Lane 4 * g + t feeds what lies at 8t..8t+7 of a group: of weight g
// 16 bytes as they lie in memory, of activation rows g and g + 8 what `dense_split` has put side by side.
#include "common.cuh"

constexpr int CHUNK = 256, GROUP = 32, GROUPS = CHUNK / GROUP;
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

// Eight floats at `p` where there are any.
__device__ __forceinline__ void load8(const float* p, bool is, float4& a, float4& b) {
    a = b = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (is) a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
}

// As load8, for kernels that may run beside the one before them: only waiting is known to clear the first-level cache.
__device__ __forceinline__ void load8_beside(const float* p, bool is, float4& a, float4& b) {
    a = b = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (is) a = __ldcg(reinterpret_cast<const float4*>(p)), b = __ldcg(reinterpret_cast<const float4*>(p) + 1);
}

// Weights are read once, and may be fetched before the kernel before has ended; a volatile load stays where it is.
__device__ __forceinline__ uint4 weights(const __half* p, bool is) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (is) asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// What a warp found for a chunk of `8 * NB` outputs and `8 * HALVES` rows.
template <int NB, int HALVES>
struct Sums {
    float acc[NB][2 * HALVES][32];
};

// Adds up the chunks in order: `sums` gives a chunk's. acc[.][k] of lane 4 * g + t is output 2 * t + k % 2 of row g + 8 * (k / 2).
template <int NB, int HALVES, class Found, class Scale>
__device__ __forceinline__ void add_up(Found sums, int chunks, Scale scale, int o0, int outputs, int row0, int rows, float* out) {
    for (int i = threadIdx.y * 32 + threadIdx.x; i < 64 * NB * HALVES; i += blockDim.y * 32) {
        const int r = i / (8 * NB), n = i % (8 * NB), o = o0 + n, row = row0 + r;
        if (o >= outputs || row >= rows) continue;
        const int k = r / 8 * 2 + n % 2, at = r % 8 * 4 + n % 8 / 2;
        float v = 0.0f;
#pragma unroll 8
        for (int c = 0; c < chunks; c++) v = __fmaf_rn(scale(c, r), sums(c).acc[n / 8][k][at], v);
        out[int64_t(row) * outputs + o] = v;
    }
}

// ---- up to 4 rows: a warp splits the activations of its chunk ----
//
// `dense_few` and `dense_some` may run beside the kernel before them: what they read was written by the one before that, or earlier (see
// `after_previous`). Their sums are done when they wait. Compressors of 8.4 MB after a product of 6.7: 3.6 us more for one row, where a warp
// that held its weights in registers took 7.4.

constexpr int SLOT = GROUPS * 32;  // a chunk of eight outputs, 16 bytes a lane; when it is done with, its sums lie there

// Where piece `i` of output `o` lies in a slot: a row's pieces together, so that a warp's copy has whole lines; lanes that read pieces of two
// rows meet in no bank.
__device__ __forceinline__ int place(int o, int i) { return o * 32 + (i ^ (o & 1) * 4); }

__device__ __forceinline__ void copy16(uint4* to, const __half* from, bool is) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from), "r"(is ? 16 : 0) : "memory");
}

// A block has 8 outputs for each of its blockDim.z slices, whose blockDim.y warps have every blockDim.y-th chunk. All weights of a block
// are asked for at once, before its inputs are there; each warp has its own. Dynamic shared memory: slots of each slice's chunks, 8 scales of
// each, and 64 * rows pieces of each warp.
extern "C" __global__ void __launch_bounds__(512) dense_few(Members m, const float* x, int x_stride, int rows, int beside) {
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x, g = lane >> 2, t = lane & 3, cols = m.cols, chunks = (cols + CHUNK - 1) / CHUNK;
    uint4* slots = shared + threadIdx.z * chunks * SLOT;
    float* scale = reinterpret_cast<float*>(shared + blockDim.z * chunks * SLOT);
    uint4* pieces = reinterpret_cast<uint4*>(scale + blockDim.z * chunks * 8) + (threadIdx.z * blockDim.y + threadIdx.y) * 64 * rows;
    scale += threadIdx.z * chunks * 8;
    int tile = blockIdx.x;
    const int which = member_of(m, 8 * blockDim.z, tile), outputs = m.outputs[which], o0 = (tile * blockDim.z + threadIdx.z) * 8;
    const __half* from = m.all[which].w + 8 * lane;
    for (int c = threadIdx.y; c < chunks; c += blockDim.y) {
        const int k = c * CHUNK;
#pragma unroll
        for (int o = 0; o < 8; o++) copy16(slots + c * SLOT + place(o, lane), from + int64_t(min(o0 + o, outputs - 1)) * cols + k, k + 8 * lane < cols);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    if (!beside) after_previous();
    // Rows that do not exist are the last one again: nothing of them is kept.
    const uint4* mine = pieces + min(g, rows - 1) * 4 + t;
    for (int c = threadIdx.y; c < chunks; c += blockDim.y) {
        const int k = c * CHUNK + 8 * lane;
        for (int r = 0; r < rows; r += 2) {
            float4 v[2][2];
#pragma unroll
            for (int q = 0; q < 2; q++) load8_beside(x + int64_t(r + q) * x_stride + k, r + q < rows && k < cols, v[q][0], v[q][1]);
#pragma unroll
            for (int q = 0; q < 2; q++) {
                if (r + q >= rows) break;
                float up, down;
                scales(warp_max(most8(v[q][0], v[q][1])), up, down);
                uint4* to = pieces + (lane >> 2) * 4 * rows + (r + q) * 4 + t;
                split8(v[q][0], v[q][1], up, to[0], to[32 * rows]);
                if (lane == 0) scale[c * 8 + r + q] = down;
            }
        }
        // All chunks after this one but the next have to come too, which costs nothing where there are two.
        if (c + blockDim.y < chunks) asm volatile("cp.async.wait_group 1;" ::: "memory");
        else asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncwarp();
        uint4* slot = slots + c * SLOT;
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            if (c * CHUNK + i * GROUP >= cols) break;
            const uint4 w = slot[place(g, 4 * i + t)];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 a = mine[(half * 8 + i) * 4 * rows];
                mma(acc, a.x, 0, a.y, 0, w.x, w.y);
                mma(acc, a.z, 0, a.w, 0, w.z, w.w);
            }
        }
        __syncwarp();
        Sums<1, 1>& sums = *reinterpret_cast<Sums<1, 1>*>(slot);
#pragma unroll
        for (int q = 0; q < 2; q++) sums.acc[0][q][lane] = acc[q];
    }
    if (beside) after_previous();
    __syncthreads();
    const auto found = [&](int c) -> const Sums<1, 1>& { return *reinterpret_cast<const Sums<1, 1>*>(slots + c * SLOT); };
    add_up<1, 1>(found, chunks, [&](int c, int r) { return scale[c * 8 + r]; }, o0, outputs, 0, rows, m.all[which].out);
}

// ---- more rows: activations split once ----

// A block has a chunk of 16 rows, a warp one of them. pieces: [16 rows][groups][hi or lo][step][lane]; scale: [16 rows][chunks][row]. Rows
// that do not exist are zeros.
extern "C" __global__ void __launch_bounds__(512) dense_split(const float* x, int x_stride, int cols, int rows, uint4* pieces, float* scale) {
    after_previous();
    __shared__ uint4 part[2][GROUPS][16 * 4 + 4];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int c = blockIdx.x, tile = blockIdx.y, chunks = (cols + CHUNK - 1) / CHUNK, groups = (cols + GROUP - 1) / GROUP;
    const int row = tile * 16 + warp, k = c * CHUNK + 8 * lane;
    float4 a, b;
    load8(x + int64_t(row) * x_stride + k, row < rows && k < cols, a, b);
    float up, down;
    scales(warp_max(most8(a, b)), up, down);
    split8(a, b, up, part[0][g][warp * 4 + t], part[1][g][warp * 4 + t]);
    if (lane == 0) scale[(int64_t(tile) * chunks + c) * 16 + warp] = down;
    __syncthreads();
    const int group = warp >> 1, half = warp & 1;
    if (c * GROUPS + group >= groups) return;
    const uint4 p = part[half][group][g * 4 + t], q = part[half][group][(g + 8) * 4 + t];
    uint4* to = pieces + (int64_t(tile) * groups + c * GROUPS + group) * 128 + half * 64 + lane;
    to[0] = make_uint4(p.x, q.x, p.y, q.y);
    to[32] = make_uint4(p.z, q.z, p.w, q.w);
}

// 16 rows a block, each weight read once for them: as `few`.
extern "C" __global__ void __launch_bounds__(512) dense_some(Members m, const uint4* pieces, const float* scale, int rows, int beside) {
    constexpr int NB = 2;
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x, g = lane >> 2, t = lane & 3, cols = m.cols;
    const int chunks = (cols + CHUNK - 1) / CHUNK, groups = (cols + GROUP - 1) / GROUP;
    Sums<NB, 2>* sums = reinterpret_cast<Sums<NB, 2>*>(shared) + threadIdx.z * chunks;
    int tile = blockIdx.x;
    const int which = member_of(m, 8 * NB * blockDim.z, tile), outputs = m.outputs[which];
    const int o0 = (tile * blockDim.z + threadIdx.z) * 8 * NB;
    const __half* from[NB];
#pragma unroll
    for (int n = 0; n < NB; n++) from[n] = m.all[which].w + int64_t(min(o0 + 8 * n + g, outputs - 1)) * cols + 8 * t;
    // Blocks of a multiprocessor share what they read (with __ldcg, 16 rows take 1.4 times as long), so older copies go first.
    if (beside) __threadfence();
    bool waited = false;
    for (int c = threadIdx.y; c < chunks; c += blockDim.y) {
        uint4 w[NB][GROUPS];
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
#pragma unroll
            for (int n = 0; n < NB; n++) w[n][i] = weights(from[n] + c * CHUNK + i * GROUP, c * CHUNK + i * GROUP + 8 * t < cols);
        if (!waited && !beside) after_previous();
        waited = true;
        const uint4* in = pieces + (int64_t(blockIdx.y) * groups + c * GROUPS) * 128 + lane;
        float acc[NB][4];
#pragma unroll
        for (int n = 0; n < NB; n++)
#pragma unroll
            for (int q = 0; q < 4; q++) acc[n][q] = 0.0f;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            if (c * GROUPS + i >= groups) break;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 a = in[i * 128 + half * 64], b = in[i * 128 + half * 64 + 32];
#pragma unroll
                for (int n = 0; n < NB; n++) mma(acc[n], a.x, a.y, a.z, a.w, w[n][i].x, w[n][i].y);
#pragma unroll
                for (int n = 0; n < NB; n++) mma(acc[n], b.x, b.y, b.z, b.w, w[n][i].z, w[n][i].w);
            }
        }
#pragma unroll
        for (int n = 0; n < NB; n++)
#pragma unroll
            for (int q = 0; q < 4; q++) sums[c].acc[n][q][lane] = acc[n][q];
    }
    if (!waited || beside) after_previous();
    __syncthreads();
    const float* by = scale + int64_t(blockIdx.y) * chunks * 16;
    add_up<NB, 2>([&](int c) -> const Sums<NB, 2>& { return sums[c]; }, chunks, [&](int c, int r) { return by[c * 16 + r]; }, o0, outputs, blockIdx.y * 16, rows, m.all[which].out);
}

__device__ __forceinline__ void copy16(void* to, const void* from, bool is) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from), "r"(is ? 16 : 0) : "memory");
}

// A block has ROWS rows and OUTS outputs, a warp 16 * MT by 8 * NT of them. STAGES groups of columns are in shared memory or on their way;
// pieces and scales of a whole block of rows exist, whatever is in those past the end.
template <int ROWS, int OUTS, int MT, int NT, int STAGES>
__device__ __forceinline__ void many(const Members& m, const uint4* pieces, const float* scale, int rows) {
    constexpr int WARPS_R = ROWS / (16 * MT), WARPS_O = OUTS / (8 * NT), THREADS = 32 * WARPS_R * WARPS_O;
    constexpr int STAGE = 4 * OUTS + 8 * ROWS;
    static_assert(OUTS * 4 % THREADS == 0 && ROWS * 8 % THREADS == 0, "whole copies");
    extern __shared__ uint4 shared[];
    after_previous();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int cols = m.cols, chunks = (cols + CHUNK - 1) / CHUNK, groups = (cols + GROUP - 1) / GROUP;
    int tile = blockIdx.x;
    const int which = member_of(m, OUTS, tile), outputs = m.outputs[which];
    const int o0 = tile * OUTS, r0 = blockIdx.y * ROWS;

    // Thread i copies piece i % 4 of weights i / 4, i / 4 + THREADS / 4, ...
    const __half* w[OUTS * 4 / THREADS];
#pragma unroll
    for (int i = 0; i < OUTS * 4 / THREADS; i++)
        w[i] = m.all[which].w + int64_t(min(o0 + int(threadIdx.x >> 2) + i * (THREADS / 4), outputs - 1)) * cols + 8 * (threadIdx.x & 3);
    pieces += int64_t(r0 / 16) * groups * 128;
    int next = 0;
    auto fetch = [&]() {
        if (next < groups) {
            uint4* to = shared + next % STAGES * STAGE + threadIdx.x;
            const bool is = next * GROUP + 8 * (threadIdx.x & 3) < cols;
#pragma unroll
            for (int i = 0; i < OUTS * 4 / THREADS; i++) copy16(to + i * THREADS, w[i] + (is ? next * GROUP : 0), is);
#pragma unroll
            for (int i = 0; i < ROWS * 8 / THREADS; i++) {
                const int at = i * THREADS + threadIdx.x;
                copy16(to + OUTS * 4 + i * THREADS, pieces + (at / 128 * groups + next) * 128 + at % 128, true);
            }
        }
        next++;
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) fetch();

    const int wr = warp % WARPS_R * 16 * MT, wo = warp / WARPS_R * 8 * NT;
    const uint4* mine_b = shared + 4 * wo + lane;
    const uint4* mine_a = shared + 4 * OUTS + 8 * wr + lane;
    const float* by = scale + (int64_t(r0 + wr) / 16 * chunks) * 16 + g;
    float sum[MT][NT][4], acc[MT][NT][4], down[MT][2];
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int k = 0; k < 4; k++) sum[i][n][k] = acc[i][n][k] = 0.0f;
    uint4 b0[NT], b1[NT], a[2][MT];
    auto load_a = [&](uint4(&to)[MT], int group, int phase) {
#pragma unroll
        for (int i = 0; i < MT; i++) to[i] = mine_a[group % STAGES * STAGE + i * 128 + phase * 32];
    };
    auto load_b = [&](uint4(&to)[NT], int group) {
#pragma unroll
        for (int n = 0; n < NT; n++) to[n] = mine_b[group % STAGES * STAGE + n * 32];
    };
    // One group: its weights are in `b`, its first activations in a[0]; those of the next group are fetched before its last step, so
    // that no step waits for shared memory.
    auto stage = [&](int group, const uint4(&b)[NT], uint4(&b_next)[NT]) {
#pragma unroll
        for (int phase = 0; phase < 4; phase++) {
            if (phase < 3) {
                load_a(a[(phase + 1) & 1], group, phase + 1);
            } else {
                asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
                __syncthreads();
                fetch();
                load_b(b_next, group + 1);
                load_a(a[0], group + 1, 0);
            }
            const uint4(&x)[MT] = a[phase & 1];
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int n = 0; n < NT; n++)
                    if (phase & 1)
                        mma(acc[i][n], x[i].x, x[i].y, x[i].z, x[i].w, b[n].z, b[n].w);
                    else
                        mma(acc[i][n], x[i].x, x[i].y, x[i].z, x[i].w, b[n].x, b[n].y);
        }
    };
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
    __syncthreads();
    load_b(b0, 0);
    load_a(a[0], 0, 0);
#pragma unroll 1
    for (int group = 0; group < groups; group += 2) {
        if (group % GROUPS == 0)
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int h = 0; h < 2; h++) down[i][h] = by[(i * chunks + group / GROUPS) * 16 + 8 * h];
        stage(group, b0, b1);
        if (group + 1 < groups) stage(group + 1, b1, b0);
        if (group % GROUPS == GROUPS - 2 || group + 2 >= groups)
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int k = 0; k < 4; k++) sum[i][n][k] = __fmaf_rn(down[i][k >> 1], acc[i][n][k], sum[i][n][k]), acc[i][n][k] = 0.0f;
    }
    float* out = m.all[which].out;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = r0 + wr + 16 * i + 8 * h + g;
            if (row < rows)
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int k = 0; k < 2; k++) {
                        const int o = o0 + wo + 8 * n + 2 * t + k;
                        if (o < outputs) out[int64_t(row) * outputs + o] = sum[i][n][2 * h + k];
                    }
        }
}

#define MANY(ROWS, OUTS, MT, NT, STAGES, BLOCKS)                                                                      \
    extern "C" __global__ void __launch_bounds__(ROWS* OUTS / (4 * MT * NT), BLOCKS)                                  \
        dense_many_##ROWS##_##OUTS(Members m, const uint4* pieces, const float* scale, int rows) {                   \
        many<ROWS, OUTS, MT, NT, STAGES>(m, pieces, scale, rows);                                                    \
    }
// By how much a launch has to do: shared memory of two blocks of the largest on a multiprocessor of 228 KiB, of one on sm_121.
MANY(64, 128, 2, 8, 3, 2)
MANY(64, 64, 2, 4, 4, 3)
MANY(32, 32, 1, 4, 4, 4)
