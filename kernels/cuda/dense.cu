// Products with F16 and BF16 weights on the tensor cores, for all weights that one input meets in one launch. CPU reference:
// kernels/src/cpu/matmul.rs.
//
// Activations are cut into parts of the weights' type, the high one first (dense_parts.cuh), for chunks of 256 columns with one scale.
//
// The order is one for all kernels of a type. For each chunk: groups of 32 columns in order; of each, the activations' parts in order; of
// each, two steps of m16n8k16 into one accumulator: the columns that lie at 0..3 of their eight, then those at 4..7. Chunks are then added in
// order, each times its scale. Columns past the end are zeros. A row of a step's result does not depend on its other rows, so results have
// the same bits in every kernel.
//
// Activations are the 16 rows of a step, eight weights its columns. Lane 4 * g + t feeds what lies at 8t..8t+7 of a group: of weight g
// 16 bytes as they lie in memory, of activation rows g and g + 8 what `dense_split` has put side by side.
#include "dense_parts.cuh"

constexpr int CHUNK = 256, GROUP = 32, GROUPS = CHUNK / GROUP;
constexpr int MOST = 8;
constexpr int STEP = 32, PIECES = 2 * STEP;  // of one part of a group: a step's pieces, one a lane; both steps'

// Weights of one launch; laid out as `MemberArg` and `GroupArg` in kernels/src/cuda/products.rs.
struct Member {
    const uint16_t* w;  // [outputs][cols], each row 16-byte aligned
    float* out;         // [rows][outputs], a row every `stride` floats
    int outputs, stride;
    int from, unused;  // first column of the inputs that it meets, in whole chunks
};
struct Members {
    Member all[MOST];
    int count;
    int cols;   // whole eights
    int width;  // of a row of inputs
};

// The member that tile `at` of `size` outputs belongs to; `at` becomes the tile's number in it.
__device__ __forceinline__ int member_of(const Members& m, int size, int& at) {
    int i = 0;
    while (i < m.count - 1) {
        const int tiles = (m.all[i].outputs + size - 1) / size;
        if (at < tiles) break;
        at -= tiles;
        i++;
    }
    return i;
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
__device__ __forceinline__ uint4 weights(const uint16_t* p, bool is) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (is) asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// Adds up the chunks in order, for `O` outputs and at most `most` rows: `sum` is what was found of a chunk for a row and an output.
template <int O, class Sum, class Scale>
__device__ __forceinline__ void add_up(Sum sum, int chunks, Scale scale, int o0, const Member& m, int row0, int rows, int most) {
    for (int i = threadIdx.y * 32 + threadIdx.x; i < O * most; i += blockDim.y * 32) {
        const int r = i / O, n = i % O, o = o0 + n, row = row0 + r;
        if (o >= m.outputs || row >= rows) continue;
        float v = 0.0f;
#pragma unroll 8
        for (int c = 0; c < chunks; c++) v = __fmaf_rn(scale(c, r), sum(c, r, n), v);
        m.out[int64_t(row) * m.stride + o] = v;
    }
}

// ---- up to 4 rows: a warp splits the activations of its chunk ----
//
// `dense_few` and `dense_some` may run beside the kernel before them: what they read was written by the one before that, or earlier (see
// `after_previous`). Their sums are done when they wait. Compressors of 8.4 MB after a product of 6.7: 3.6 us more for one row, where a warp
// that held its weights in registers took 7.4.

constexpr int SLOT = GROUPS * 32;  // a chunk of eight outputs, 16 bytes a lane

// Where piece `i` of output `o` lies in a slot: a row's pieces together, so that a warp's copy has whole lines; lanes that read pieces of two
// rows meet in no bank.
__device__ __forceinline__ int place(int o, int i) { return o * 32 + (i ^ (o & 1) * 4); }

__device__ __forceinline__ void copy16(uint4* to, const void* from, bool is) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from), "r"(is ? 16 : 0) : "memory");
}

// A block has 8 outputs for each of its blockDim.z slices, whose blockDim.y warps have every blockDim.y-th chunk. A warp has `held` slots,
// for which it asks before its inputs are there; with fewer than its chunks, further chunks follow in them. Dynamic shared memory: slots and
// GROUPS * 4 * PARTS * rows pieces of each warp; of each slice's chunks and rows a scale and 8 sums.
template <class T>
__device__ __forceinline__ void few(const Members& m, const float* x, int rows, int held, int beside) {
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x, g = lane >> 2, t = lane & 3, cols = m.cols, chunks = (cols + CHUNK - 1) / CHUNK;
    const int warp = threadIdx.z * blockDim.y + threadIdx.y, warps = blockDim.z * blockDim.y, in_pieces = GROUPS * 4 * T::PARTS * rows;
    uint4* slots = shared + warp * held * SLOT;
    uint4* pieces = shared + warps * held * SLOT + warp * in_pieces;
    float* scale = reinterpret_cast<float*>(shared + warps * (held * SLOT + in_pieces)) + threadIdx.z * chunks * rows * 9;
    float* sums = scale + chunks * rows;
    int tile = blockIdx.x;
    const Member& member = m.all[member_of(m, 8 * blockDim.z, tile)];
    const int outputs = member.outputs, o0 = (tile * blockDim.z + threadIdx.z) * 8;
    const uint16_t* from = member.w + 8 * lane;
    int next = threadIdx.y, into = 0;
    const auto fetch = [&]() {
        const int k = next * CHUNK;
#pragma unroll 4
        for (int o = 0; o < 8; o++) copy16(slots + into * SLOT + place(o, lane), from + int64_t(min(o0 + o, outputs - 1)) * cols + k, k + 8 * lane < cols);
        asm volatile("cp.async.commit_group;" ::: "memory");
        next += blockDim.y;
        if (++into == held) into = 0;
    };
    for (int i = 0; i < held && next < chunks; i++) fetch();
    if (!beside) after_previous();
    x += member.from;
    // Rows that do not exist are the last one again: nothing of them is kept.
    const uint4* mine = pieces + min(g, rows - 1) * 4 + t;
    int slot = 0;
    for (int c = threadIdx.y; c < chunks; c += blockDim.y) {
        const int k = c * CHUNK + 8 * lane;
        for (int r = 0; r < rows; r += 2) {
            float4 v[2][2];
#pragma unroll
            for (int q = 0; q < 2; q++) load8_beside(x + int64_t(r + q) * m.width + k, r + q < rows && k < cols, v[q][0], v[q][1]);
#pragma unroll
            for (int q = 0; q < 2; q++) {
                if (r + q >= rows) break;
                float up, down;
                T::scales(v[q][0], v[q][1], up, down);
                uint4 part[T::PARTS];
                split8<T>(v[q][0], v[q][1], up, part);
#pragma unroll
                for (int p = 0; p < T::PARTS; p++) pieces[((p * GROUPS + g) * rows + r + q) * 4 + t] = part[p];
                if (lane == 0) scale[c * rows + r + q] = down;
            }
        }
        // Of those that are on their way, all but the newest have to come.
        if (held > 1 && c + blockDim.y < chunks) asm volatile("cp.async.wait_group 1;" ::: "memory");
        else asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncwarp();
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            if (c * CHUNK + i * GROUP >= cols) break;
            const uint4 w = slots[slot * SLOT + place(g, 4 * i + t)];
#pragma unroll
            for (int p = 0; p < T::PARTS; p++) {
                const uint4 a = mine[(p * GROUPS + i) * 4 * rows];
                T::mma(acc, make_uint4(a.x, 0, a.y, 0), w.x, w.y);
                T::mma(acc, make_uint4(a.z, 0, a.w, 0), w.z, w.w);
            }
        }
        __syncwarp();
        if (next < chunks) fetch();
        if (++slot == held) slot = 0;
        if (g < rows)
#pragma unroll
            for (int q = 0; q < 2; q++) sums[(c * rows + g) * 8 + 2 * t + q] = acc[q];
    }
    if (beside) after_previous();
    __syncthreads();
    const auto sum = [&](int c, int r, int n) { return sums[(c * rows + r) * 8 + n]; };
    add_up<8>(sum, chunks, [&](int c, int r) { return scale[c * rows + r]; }, o0, member, 0, rows, rows);
}

// ---- more rows: activations split once ----

// A block has a chunk of 16 rows, a warp one of them. pieces: [16 rows][groups][part][step][lane]; scale: [16 rows][chunks][row]. Rows that
// do not exist are zeros.
template <class T>
__device__ __forceinline__ void split_rows(const float* x, int cols, int rows, uint4* pieces, float* scale) {
    __shared__ uint4 part[T::PARTS][GROUPS][16 * 4 + 4];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int c = blockIdx.x, tile = blockIdx.y, chunks = (cols + CHUNK - 1) / CHUNK, groups = (cols + GROUP - 1) / GROUP;
    const int row = tile * 16 + warp, k = c * CHUNK + 8 * lane;
    float4 a, b;
    load8(x + int64_t(row) * cols + k, row < rows && k < cols, a, b);
    float up, down;
    T::scales(a, b, up, down);
    uint4 of_row[T::PARTS];
    split8<T>(a, b, up, of_row);
#pragma unroll
    for (int p = 0; p < T::PARTS; p++) part[p][g][warp * 4 + t] = of_row[p];
    if (lane == 0) scale[(int64_t(tile) * chunks + c) * 16 + warp] = down;
    __syncthreads();
    for (int i = warp; i < T::PARTS * min(GROUPS, groups - c * GROUPS); i += 16) {
        const int group = i / T::PARTS, p = i % T::PARTS;
        const uint4 u = part[p][group][g * 4 + t], v = part[p][group][(g + 8) * 4 + t];
        uint4* to = pieces + ((int64_t(tile) * groups + c * GROUPS + group) * T::PARTS + p) * PIECES + lane;
        to[0] = make_uint4(u.x, v.x, u.y, v.y);
        to[STEP] = make_uint4(u.z, v.z, u.w, v.w);
    }
}

// 16 rows a block, each weight read once for them: as `few`.
template <class T>
__device__ __forceinline__ void some(const Members& m, const uint4* pieces, const float* scale, int rows, int beside) {
    constexpr int NB = 2;
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x, g = lane >> 2, t = lane & 3, cols = m.cols;
    const int chunks = (cols + CHUNK - 1) / CHUNK, groups = (cols + GROUP - 1) / GROUP;
    const int all_chunks = (m.width + CHUNK - 1) / CHUNK, all_groups = (m.width + GROUP - 1) / GROUP;
    float* sums = reinterpret_cast<float*>(shared) + threadIdx.z * chunks * NB * 4 * 32;
    int tile = blockIdx.x;
    const Member& member = m.all[member_of(m, 8 * NB * blockDim.z, tile)];
    const int o0 = (tile * blockDim.z + threadIdx.z) * 8 * NB;
    const uint16_t* from[NB];
#pragma unroll
    for (int n = 0; n < NB; n++) from[n] = member.w + int64_t(min(o0 + 8 * n + g, member.outputs - 1)) * cols + 8 * t;
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
        const uint4* in = pieces + (int64_t(blockIdx.y) * all_groups + member.from / GROUP + c * GROUPS) * T::PARTS * PIECES + lane;
        float acc[NB][4];
#pragma unroll
        for (int n = 0; n < NB; n++)
#pragma unroll
            for (int q = 0; q < 4; q++) acc[n][q] = 0.0f;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            if (c * GROUPS + i >= groups) break;
#pragma unroll
            for (int p = 0; p < T::PARTS; p++) {
                const uint4 a = in[(i * T::PARTS + p) * PIECES], b = in[(i * T::PARTS + p) * PIECES + STEP];
#pragma unroll
                for (int n = 0; n < NB; n++) T::mma(acc[n], a, w[n][i].x, w[n][i].y);
#pragma unroll
                for (int n = 0; n < NB; n++) T::mma(acc[n], b, w[n][i].z, w[n][i].w);
            }
        }
#pragma unroll
        for (int n = 0; n < NB; n++)
#pragma unroll
            for (int q = 0; q < 4; q++) sums[((c * NB + n) * 4 + q) * 32 + lane] = acc[n][q];
    }
    if (!waited || beside) after_previous();
    __syncthreads();
    const float* by = scale + (int64_t(blockIdx.y) * all_chunks + member.from / CHUNK) * 16;
    // acc[k] of lane 4 * g + t is output 2 * t + k % 2 of row g + 8 * (k / 2).
    const auto sum = [&](int c, int r, int n) { return sums[((c * NB + n / 8) * 4 + r / 8 * 2 + n % 2) * 32 + r % 8 * 4 + n % 8 / 2]; };
    add_up<8 * NB>(sum, chunks, [&](int c, int r) { return by[c * 16 + r]; }, o0, member, blockIdx.y * 16, rows, 16);
}

// A block has ROWS rows and OUTS outputs, a warp 16 * MT by 8 * NT of them. STAGES groups of columns are in shared memory or on their way;
// pieces and scales of a whole block of rows exist, whatever is in those past the end.
template <class T, int ROWS, int OUTS, int MT, int NT, int STAGES>
__device__ __forceinline__ void many(const Members& m, const uint4* pieces, const float* scale, int rows) {
    constexpr int WARPS_R = ROWS / (16 * MT), WARPS_O = OUTS / (8 * NT), THREADS = 32 * WARPS_R * WARPS_O;
    constexpr int TILE = T::PARTS * PIECES;  // pieces of 16 rows of a group
    constexpr int STAGE = 4 * OUTS + ROWS / 16 * TILE, PHASES = 2 * T::PARTS;
    static_assert(OUTS * 4 % THREADS == 0 && ROWS / 16 * TILE % THREADS == 0, "whole copies");
    extern __shared__ uint4 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int cols = m.cols, groups = (cols + GROUP - 1) / GROUP;
    const int all_chunks = (m.width + CHUNK - 1) / CHUNK, all_groups = (m.width + GROUP - 1) / GROUP;
    int tile = blockIdx.x;
    const Member& member = m.all[member_of(m, OUTS, tile)];
    const int o0 = tile * OUTS, r0 = blockIdx.y * ROWS;

    // Thread i copies piece i % 4 of weights i / 4, i / 4 + THREADS / 4, ...
    const uint16_t* w[OUTS * 4 / THREADS];
#pragma unroll
    for (int i = 0; i < OUTS * 4 / THREADS; i++)
        w[i] = member.w + int64_t(min(o0 + int(threadIdx.x >> 2) + i * (THREADS / 4), member.outputs - 1)) * cols + 8 * (threadIdx.x & 3);
    pieces += (int64_t(r0 / 16) * all_groups + member.from / GROUP) * TILE;
    int next = 0;
    auto fetch = [&]() {
        if (next < groups) {
            uint4* to = shared + next % STAGES * STAGE + threadIdx.x;
            const bool is = next * GROUP + 8 * (threadIdx.x & 3) < cols;
#pragma unroll
            for (int i = 0; i < OUTS * 4 / THREADS; i++) copy16(to + i * THREADS, w[i] + (is ? next * GROUP : 0), is);
#pragma unroll
            for (int i = 0; i < ROWS / 16 * TILE / THREADS; i++) {
                const int at = i * THREADS + threadIdx.x;
                copy16(to + OUTS * 4 + i * THREADS, pieces + (at / TILE * all_groups + next) * TILE + at % TILE, true);
            }
        }
        next++;
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll
    for (int i = 0; i < STAGES; i++) fetch();

    const int wr = warp % WARPS_R * 16 * MT, wo = warp / WARPS_R * 8 * NT;
    const uint4* mine_b = shared + 4 * wo + lane;
    const uint4* mine_a = shared + 4 * OUTS + wr / 16 * TILE + lane;
    const float* by = scale + (int64_t(r0 + wr) / 16 * all_chunks + member.from / CHUNK) * 16 + g;
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
        for (int i = 0; i < MT; i++) to[i] = mine_a[group % STAGES * STAGE + i * TILE + phase * STEP];
    };
    auto load_b = [&](uint4(&to)[NT], int group) {
#pragma unroll
        for (int n = 0; n < NT; n++) to[n] = mine_b[group % STAGES * STAGE + n * 32];
    };
    // One group: its weights are in `b`, its first activations in a[0]; those of the next group are fetched before its last step, so
    // that no step waits for shared memory.
    auto stage = [&](int group, const uint4(&b)[NT], uint4(&b_next)[NT]) {
#pragma unroll
        for (int phase = 0; phase < PHASES; phase++) {
            if (phase < PHASES - 1) {
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
                        T::mma(acc[i][n], x[i], b[n].z, b[n].w);
                    else
                        T::mma(acc[i][n], x[i], b[n].x, b[n].y);
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
                for (int h = 0; h < 2; h++) down[i][h] = by[(i * all_chunks + group / GROUPS) * 16 + 8 * h];
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
                        if (o < member.outputs) member.out[int64_t(row) * member.stride + o] = sum[i][n][2 * h + k];
                    }
        }
}

#define MANY(T, ROWS, OUTS, MT, NT, STAGES, BLOCKS)                                                                        \
    extern "C" __global__ void __launch_bounds__(ROWS* OUTS / (4 * MT * NT), BLOCKS)                                      \
        dense_many_##T##_##ROWS##_##OUTS(Members m, const uint4* pieces, const float* scale, int rows) {                  \
        after_previous();                                                                                                \
        many<T, ROWS, OUTS, MT, NT, STAGES>(m, pieces, scale, rows);                                                      \
    }
// The kernels of a type. Of `many` by how much a launch has to do: shared memory of two blocks of the largest on a multiprocessor of 228 KiB,
// of one on sm_121.
#define KERNELS(T)                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(512) dense_few_##T(Members m, const float* x, int rows, int held, int beside) {            \
        few<T>(m, x, rows, held, beside);                                                                                                       \
    }                                                                                                                                       \
    extern "C" __global__ void __launch_bounds__(512) dense_split_##T(const float* x, int cols, int rows, uint4* pieces, float* scale) {    \
        after_previous();                                                                                                                   \
        split_rows<T>(x, cols, rows, pieces, scale);                                                                                        \
    }                                                                                                                                       \
    extern "C" __global__ void __launch_bounds__(512)                                                                                       \
        dense_some_##T(Members m, const uint4* pieces, const float* scale, int rows, int beside) {                                         \
        some<T>(m, pieces, scale, rows, beside);                                                                                            \
    }                                                                                                                                       \
    MANY(T, 64, 128, 2, 8, 3, 2)                                                                                                            \
    MANY(T, 64, 64, 2, 4, 4, 3)                                                                                                             \
    MANY(T, 32, 32, 1, 4, 4, 4)
KERNELS(F16) KERNELS(BF16)
