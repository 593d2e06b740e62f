// Tiles from blocks, embeddings from tiles, and products of many activation rows: see tiled.cuh. Those of few rows are in narrow.cu.
// CPU reference: kernels/src/cpu/matmul.rs, moe.rs.
#include "tiled.cuh"

// Rows of blocks, as in the file, into tiles. A thread has one lane's share of one row's superblock.
template <class T>
__device__ __forceinline__ void repack(const uint8_t* from, int64_t rows, int superblocks, uint8_t* qs, uint8_t* side, uint8_t* side2) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, t = i & 3, item = i >> 2;
    const int64_t row = item / superblocks, sb = item % superblocks;
    if (row >= rows) return;
    constexpr int BYTES = 256 / T::Block::ELEMS * T::Block::BYTES;
    uint4 out[T::CHUNKS], s = make_uint4(0, 0, 0, 0);
    uint32_t s2 = 0;
    T::pack(from + item * BYTES, t, out, s, s2);
    const int64_t at = row / 16 * superblocks + sb, r = row % 16;
    for (int c = 0; c < T::CHUNKS; c++)
        *reinterpret_cast<uint4*>(qs + at * (T::CHUNKS * 1024) + ((c * 2 + r / 8) * 32 + r % 8 * 4 + t) * 16) = out[c];
    if (t == 0) {
        if (T::SIDE == 16) *reinterpret_cast<uint4*>(side + (at * 16 + r) * 16) = s;
        if (T::SIDE2 == 4) *reinterpret_cast<uint32_t*>(side2 + (at * 16 + r) * 4) = s2;
        if (T::SIDE2 == 2) *reinterpret_cast<uint16_t*>(side2 + (at * 16 + r) * 2) = s2;
    }
}

// out[r] = dequantised table[token of r], from tiles.
template <class T>
__device__ __forceinline__ void embed(Step s, Tiled w, int cols, float* out) {
    const int64_t row = s.tokens[blockIdx.x];
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        const int64_t at = row / 16 * (cols / 256) + i / 256, r = row % 16;
        const uint8_t* qs = w.qs + at * (T::CHUNKS * 1024) + (r / 8 * 32 + r % 8 * 4) * 16;
        const auto q = [&](int chunk, int lane, int byte) { return qs[(chunk * 64 + lane) * 16 + byte]; };
        out[int64_t(blockIdx.x) * cols + i] = T::element(q, w.side + (at * 16 + r) * T::SIDE, w.side2 + (at * 16 + r) * T::SIDE2, i % 256);
    }
}

struct Pair {
    Tiled w[2];
    float* out[2];
    int count;            // 1 or 2 weights of one shape with the same inputs
    int outputs;          // rows of one matrix
    int superblocks;
};

// As `narrow` (narrow.cu), for many rows: an item is up to 64, whose activations a block of 8 warps holds in shared memory, one superblock at a
// time with the next on its way. A warp has a tile of 16 outputs and all superblocks, so a weight is decoded once for 64 rows; it ends a
// sum at each quarter of the row, as the warps of `narrow` do, and does the same operations on it in the same order.
constexpr int WARPS = 8;

template <class T>
struct Shared {
    Stage<T::MINS> stages[2];
    int2 rows[2][STAGE_ROWS];   // of this unit and the next: first superblock of the input row, output row
    float all[T::ASIDE ? WARPS * 2 * (STAGE_ROWS / 4) * 32 : 4];
    Luts<T::LUT ? 8 : 0> luts;  // eight copies, for which there is room
};
// As `tile_shape` in kernels/src/cuda/quantized.rs has them.
static_assert(sizeof(Shared<TiledQ8_0>) == 99888 && sizeof(Shared<TiledQ2_K>) == 75296 && sizeof(Shared<TiledIQ2_XXS>) == 91696);

// A unit of up to 4 * NT rows and 8 tiles. `next(sb)` starts the copies of what comes after superblock sb, and `stage` counts superblocks.
template <class T, int NT, class Next>
__device__ __forceinline__ void unit_of(const Tiled w, float* out, int outputs, int nsb, int at, int tile, int n, const int2* rows, Shared<T>* shared, int& stage, Next next) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const bool mine = tile * 16 < outputs;
    typename T::Frag frag;
    if (mine) T::load(frag, w, at, lane);
    constexpr int PASSES = NT > T::PASS ? NT / T::PASS : 1, M = NT / PASSES;
    float kept[T::ASIDE ? 1 : 2 * NT], sum[PASSES][M][2];
    const auto all = [&](int i) -> float& {
        if constexpr (T::ASIDE) return shared->all[((threadIdx.x >> 5) * (STAGE_ROWS / 2) + i) * 32 + lane];
        else return kept[i];
    };
#pragma unroll
    for (int i = 0; i < 2 * NT; i++) all(i) = 0.0f;
    int sb = 0;
#pragma unroll 1
    for (int s = 0; s < SPLIT; s++) {
#pragma unroll
        for (int k = 0; k < NT; k++) sum[k / M][k % M][0] = sum[k / M][k % M][1] = 0.0f;
#pragma unroll 1
        for (const int end = nsb * (s + 1) / SPLIT; sb < end; sb++) {
            // This superblock's copies have arrived, and no warp reads the buffer that the next ones go to.
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
            next(sb);
            if (mine) {
                typename T::Frag now = frag;
                if (T::AHEAD && sb + 1 < nsb) T::load(frag, w, at + sb + 1, lane);
#pragma unroll
                for (int k = 0; k < PASSES; k++) T::add(now, &shared->luts, Staged(shared->stages[stage & 1], lane, k * M), lane, sum[k]);
                if (!T::AHEAD && sb + 1 < nsb) T::load(frag, w, at + sb + 1, lane);
            }
            stage++;
        }
#pragma unroll
        for (int k = 0; k < NT; k++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float& v = all(2 * k + i);
                v = s == 0 ? sum[k / M][k % M][i] : __fadd_rn(v, sum[k / M][k % M][i]);
            }
    }
    if (!mine) return;
    float* to = out + tile * 16 + g;
#pragma unroll
    for (int k = 0; k < NT; k++)
        if (4 * k + t < n) {
            float* row = to + int64_t(rows[4 * k + t].y) * outputs;
            row[0] = all(2 * k);
            row[8] = all(2 * k + 1);
        }
}

template <class T>
__device__ __forceinline__ void wide_product(const Pair& p, const Acts& x, const Items& items, uint8_t* memory) {
    Shared<T>* shared = reinterpret_cast<Shared<T>*>(memory);
    if constexpr (T::LUT) fill(&shared->luts);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int tiles = p.outputs / 16, groups = (tiles + WARPS - 1) / WARPS, nsb = p.superblocks;
    const int count = items.list ? *items.count : (items.rows + STAGE_ROWS - 1) / STAGE_ROWS * items.matrices;
    const int units = count * groups * p.count;
    struct Where {
        int group, which, matrix, first, n;
    };
    // Units that run together share weights, of plain products; of listed ones, the rows, because their weights differ.
    const auto locate = [&](int unit) {
        Where at;
        const int item = items.list ? unit / groups % count : unit % count;
        at.group = items.list ? unit % groups : unit / count % groups;
        at.which = unit / groups / count;
        if (items.list) {
            const int4 it = items.list[item];
            at.matrix = it.x, at.first = it.y, at.n = it.z;
        } else {
            at.matrix = item % items.matrices;
            at.first = item / items.matrices * STAGE_ROWS;
            at.n = min(STAGE_ROWS, items.rows - at.first);
        }
        return at;
    };
    // Rows past the end repeat the last one; their sums are not written.
    const auto find_rows = [&](const Where& at, int2* rows) {
        const int j = threadIdx.x;
        if (j < STAGE_ROWS) {
            const int r = at.first + min(j, at.n - 1), o = items.list ? items.order[r] : r * items.matrices + at.matrix;
            rows[j] = make_int2((items.list ? o / items.per_row : o) * nsb, o);
        }
    };
    // Starts the copies of superblock sb for 32 or 64 rows. A warp copies whole rows.
    const auto start = [&](int n, const int2* rows, int sb, Stage<T::MINS>& to) {
        const int padded = T::HALF && n <= STAGE_ROWS / 2 ? STAGE_ROWS / 2 : STAGE_ROWS;
#pragma unroll 2
        for (int j = warp; j < padded; j += WARPS) {
            const int64_t from = rows[j].x + sb;
            copy16(to.q + stage_at(j, lane / 4) + lane % 4 * 16, x.q + from * ACT_Q + lane * 16);
            if (T::MINS && lane < ACT_M / 16) copy16(to.m + j * ACT_M + lane * 16, x.m + from * ACT_M + lane * 16);
            if (lane == 31) copy4(to.scale + j, x.scale + from);
        }
    };
    int unit = blockIdx.x, stage = 0;
    if (unit >= units) return;
    Where here = locate(unit);
    find_rows(here, shared->rows[0]);
    __syncthreads();
    start(here.n, shared->rows[0], 0, shared->stages[0]);
    for (int turn = 0; unit < units; turn++) {
        const Where at = here;
        const bool more = unit + gridDim.x < units;
        if (more) here = locate(unit + gridDim.x);
        const int2* rows = shared->rows[turn & 1];
        int2* after = shared->rows[(turn + 1) & 1];
        // All warps have written the results of the unit before this one, whose rows these were. The next unit's are read after the
        // barrier of this one's first superblock.
        __syncthreads();
        if (more) find_rows(here, after);
        const auto next = [&](int sb) {
            Stage<T::MINS>& to = shared->stages[(stage + 1) & 1];
            if (sb + 1 < nsb) start(at.n, rows, sb + 1, to);
            else if (more) start(here.n, after, 0, to);
        };
        Tiled w = p.w[0];
        if (at.which) w = p.w[1];
        float* out = at.which ? p.out[1] : p.out[0];
        const int tile = at.group * WARPS + warp, first = (at.matrix * tiles + tile) * nsb;
        if (T::HALF && at.n <= STAGE_ROWS / 2)
            unit_of<T, 8>(w, out, p.outputs, nsb, first, tile, at.n, rows, shared, stage, next);
        else
            unit_of<T, 16>(w, out, p.outputs, nsb, first, tile, at.n, rows, shared, stage, next);
        unit += gridDim.x;
    }
}

#define KERNELS(T)                                                                                                                 \
    extern "C" __global__ void repack_##T(const uint8_t* from, int64_t rows, int superblocks, uint8_t* qs, uint8_t* side,           \
                                          uint8_t* side2) { after_previous();                                                                         \
        repack<Tiled##T>(from, rows, superblocks, qs, side, side2);                                                                 \
    }                                                                                                                               \
    extern "C" __global__ void embed_tiled_##T(Step s, Tiled w, int cols, float* out) { after_previous(); embed<Tiled##T>(s, w, cols, out); }
FOR_EACH_TILED(KERNELS)

#define WIDE_KERNEL(T)                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256, 1) product_##T##_16(Pair p, Acts x, Items items) { after_previous();                            \
        extern __shared__ __align__(16) uint8_t aligned[];                                                                          \
        wide_product<Tiled##T>(p, x, items, aligned);                                                                               \
    }
FOR_EACH_WIDE(WIDE_KERNEL)
