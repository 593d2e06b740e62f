// Products for prefill: weights in tiles, many activation rows at a time. See tiled.cuh for tiles, activations and the order of sums,
// wide.cuh for the types. CPU reference: kernels/src/cpu/matmul.rs, moe.rs.
//
// A block of 16 warps holds up to 64 rows of activations in shared memory, one superblock at a time with the next on its way. A warp has 16
// outputs and all superblocks. At the end of each quarter of the row its sums are added to what `out` has, because there are no registers
// for both; no other thread touches them, and the order is that of the warps of narrow.cu, which have a quarter each.
#include "wide.cuh"

// Warps, rows that one copies, and tiles of a block.
constexpr int WARPS = 16, MINE = WIDE_ROWS / WARPS, BLOCK_TILES = WARPS * TILES;

// Laid out as `PairArg` in kernels/src/cuda/wide.rs.
struct Pair {
    Tiled w[2];
    float* out[2];
    int count;            // 1 or 2 weights of one shape with the same inputs
    int outputs;          // rows of one matrix
    int superblocks;
};

// A unit of work: an item's rows and neighbouring tiles of its matrix.
struct Where {
    int which, n;    // weight; rows
    int tile, at;    // the first tile, and the matrix's first one in the weight
};

// The units of a launch: their number, and that of its items.
struct Units {
    int all, count;
};

__device__ __forceinline__ int groups_of(const Pair& p) { return (p.outputs / 16 + BLOCK_TILES - 1) / BLOCK_TILES; }

// The rows of a unit: first superblock of the input row; output row, by_fours, which takes one load for four rows.
struct Places {
    int in[WIDE_ROWS], out[WIDE_ROWS];
};

// Which unit that is, and for each of its rows the first superblock of the input row and the output row. Rows past the end repeat the last
// one; their sums are not written. Units that run together share weights, of plain products; of listed ones, the rows, because their
// weights differ. By at least 65 threads.
__device__ __forceinline__ void locate(const Pair& p, const Items& items, int count, int unit, Where& to, Places& rows) {
    const int groups = groups_of(p), item = items.list ? unit / groups % count : unit % count;
    int matrix, first, n;
    if (items.list) {
        const int4 it = items.list[item];
        matrix = it.x, first = it.y, n = it.z;
    } else {
        matrix = item % items.matrices;
        first = item / items.matrices * WIDE_ROWS;
        n = min(WIDE_ROWS, items.rows - first);
    }
    // Read anew each time, so that nothing made of it takes a register in between.
    int j;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(j));
    if (j < WIDE_ROWS) {
        const int r = first + min(j, n - 1), o = items.list ? items.order[r] : r * items.matrices + matrix;
        rows.in[j] = (items.list ? o / items.per_row : o) * p.superblocks;
        rows.out[by_fours(j)] = o;
    } else if (j == WIDE_ROWS) {
        to = Where{unit / groups / count, n, (items.list ? unit % groups : unit / count % groups) * BLOCK_TILES, matrix * (p.outputs / 16)};
    }
}

// Barriers in shared memory: a thread that arrives goes on, and one that waits knows that all have arrived. So warps may be as much as half
// a superblock apart, and one's decoding runs beside another's sums.
__device__ __forceinline__ uint32_t shared_at(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void barrier_init(uint64_t* b, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_at(b)), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* b) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(shared_at(b)) : "memory");
}
// Arrives when this thread's copies so far have arrived.
__device__ __forceinline__ void barrier_arrive_copies(uint64_t* b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_at(b)) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* b, int parity) {
    asm volatile("{ .reg .pred p; again%=: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra again%=; }" ::"r"(shared_at(b)), "r"(parity)
                 : "memory");
}

// Ends a quarter: the first one's sums are written, the others' added to what is there. `out` is where this lane's outputs begin. Of a
// lane's 16 rows AT at a time, whose loads are on their way together; rows from n on repeat the last one, and are read but not written.
template <int AT>
__device__ __forceinline__ void end_quarter(float (&sum)[TILES][16][2], float* out, int outputs, const Places& rows, int n, bool add) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int from = 0; from < 16; from += AT) {
        if (from * 4 >= n) return;
        float* row[AT];
#pragma unroll
        for (int m = 0; m < AT; m += 4) {
            const int4 at = *reinterpret_cast<const int4*>(&rows.out[(from + m) * 4 + t * 4]);
            row[m] = out + int64_t(at.x) * outputs, row[m + 1] = out + int64_t(at.y) * outputs;
            row[m + 2] = out + int64_t(at.z) * outputs, row[m + 3] = out + int64_t(at.w) * outputs;
        }
        if (add) {
            float v[AT][TILES][2];
#pragma unroll
            for (int m = 0; m < AT; m++)
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int h = 0; h < 2; h++) v[m][i][h] = row[m][i * 16 + h * 8];
#pragma unroll
            for (int m = 0; m < AT; m++)
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int h = 0; h < 2; h++) sum[i][from + m][h] = __fadd_rn(v[m][i][h], sum[i][from + m][h]);
        }
#pragma unroll
        for (int m = 0; m < AT; m++)
            if ((from + m) * 4 + t < n)
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int h = 0; h < 2; h++) row[m][i * 16 + h * 8] = sum[i][from + m][h];
#pragma unroll
        for (int m = 0; m < AT; m++)
#pragma unroll
            for (int i = 0; i < TILES; i++) sum[i][from + m][0] = sum[i][from + m][1] = 0.0f;
    }
}

// Units whose places are known at a time: warps are in two neighbouring units at most, and the next one's is written.
constexpr int PLACES = 4;

template <class W>
struct Shared {
    WideStage<W::MINS> stages[2];
    Places rows[PLACES];
    Where where[PLACES];
    uint64_t full[2], empty[2];
    Units units;
    typename W::Luts luts;
};
// As `shared` in kernels/src/cuda/wide.rs has them.
static_assert(sizeof(Shared<WideQ8_0>) == 68240 && sizeof(Shared<WideQ2_K>) == 76400 && sizeof(Shared<WideQ4_K>) == 76400 && sizeof(Shared<WideIQ2_XXS>) == 92808);

template <class W>
__device__ __forceinline__ void wide_product(const Pair& p, const Acts& x, const Items& items, uint8_t* memory) {
    Shared<W>* shared = reinterpret_cast<Shared<W>*>(memory);
    W::fill(&shared->luts);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, nsb = p.superblocks;
    // A quarter that is one superblock needs no sum of its own.
    const bool single = W::SINGLE && nsb == SPLIT;
    // 0, which the compiler does not know.
    const uint32_t zero = uint32_t(p.count) >> 2;
    // SPLIT, which the compiler does not know: it would need more registers.
    const int quarters = SPLIT + int(zero);
    // Starts the copies of superblock sb of n rows, or some more up to 16. A warp copies every 16th row.
    const auto start = [&](int n, const Places& rows, int sb, WideStage<W::MINS>& to) {
        const int padded = (n + 15) & ~15;
        const uint8_t* q = x.q + int64_t(sb) * ACT_Q + lane * 16;
        uint8_t* row = to.q + wide_at(warp, lane / 4) + lane % 4 * 16;
        // All places are read before the first copy: the compiler leaves their order as it is.
        int place[MINE];
#pragma unroll
        for (int i = 0; i < MINE; i++) place[i] = rows.in[min(warp + i * WARPS, WIDE_ROWS - 1)];
        const int j = lane / 4 * WARPS + warp;
        const int64_t from = rows.in[min(j, WIDE_ROWS - 1)] + sb;
#pragma unroll
        for (int i = 0; i < MINE; i++)
            if (warp + i * WARPS < padded) copy16(row + i * (WARPS * ACT_Q), q + int64_t(place[i]) * ACT_Q);
        if (j < padded) {
            if (lane % 4 == 0) copy4(to.scale + j, x.scale + from);
            if (W::MINS) copy16(to.m + j * ACT_M + lane % 4 * 16, x.m + from * ACT_M + lane % 4 * 16);
        }
    };
    // Where superblock sb of this warp's tiles lies. A tile past the last is the last one again, whose sums are not written.
    const auto locate_tiles = [&](const Where& of, int sb, int (&to)[TILES]) {
#pragma unroll
        for (int i = 0; i < TILES; i++) to[i] = (of.at + min(of.tile + warp * TILES + i, p.outputs / 16 - 1)) * nsb + sb;
    };
    {
        Units units;
        units.count = items.list ? *items.count : (items.rows + WIDE_ROWS - 1) / WIDE_ROWS * items.matrices;
        units.all = units.count * groups_of(p) * p.count;
        if (blockIdx.x >= units.all) return;
        locate(p, items, units.count, blockIdx.x, shared->where[0], shared->rows[0]);
        if (threadIdx.x == 0) shared->units = units;
    }
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; i++) barrier_init(&shared->full[i], 32 * WARPS), barrier_init(&shared->empty[i], 32 * WARPS);
    __syncthreads();
    start(shared->where[0].n, shared->rows[0], 0, shared->stages[0]);
    barrier_arrive_copies(&shared->full[0]);
    typename W::Raw raw;
    {
        int at[TILES];
        locate_tiles(shared->where[0], 0, at);
#pragma unroll
        for (int j = 0; j < 8; j++) W::load(raw, p.w[shared->where[0].which], at, lane, j);
    }
    int stage = 0;    // superblocks so far
#pragma unroll 1
    for (int turn = 0; blockIdx.x + turn * gridDim.x < shared->units.all; turn++) {
        const int following = blockIdx.x + (turn + 1) * gridDim.x;
        const bool more = following < shared->units.all;
        const Places& rows = shared->rows[turn % PLACES];
        // A warp comes here after all have read the last superblock but one of the unit before, and looks at the next one's place
        // after all have read the first one of this unit: where there are two.
        if (nsb == 1) __syncthreads();
        if (more) locate(p, items, shared->units.count, following, shared->where[(turn + 1) % PLACES], shared->rows[(turn + 1) % PLACES]);
        if (nsb == 1) __syncthreads();
        const int n = shared->where[turn % PLACES].n;
        float sum[TILES][16][2];
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int m = 0; m < 16; m++) sum[i][m][0] = sum[i][m][1] = single ? -0.0f : 0.0f;
        int sb = 0;
#pragma unroll 1
        for (int s = 0; s < quarters; s++) {
#pragma unroll 1
            for (const int end = nsb * (s + 1) / SPLIT; sb < end; sb++) {
                barrier_wait(&shared->full[stage & 1], stage >> 1 & 1);
                const bool last = sb + 1 == nsb;
                // After this superblock comes the same unit's next, or another unit's first; after the very last, itself again.
                const int after = (last && more ? turn + 1 : turn) % PLACES, next_sb = last ? more ? 0 : sb : sb + 1;
                const auto middle = [&]() {
                    if (last && !more) return;
                    // All warps have read the superblock before this one, which the next one's copies take the place of.
                    if (stage > 0) barrier_wait(&shared->empty[(stage + 1) & 1], (stage - 1) >> 1 & 1);
                    start(shared->where[after].n, shared->rows[after], next_sb, shared->stages[(stage + 1) & 1]);
                    barrier_arrive_copies(&shared->full[(stage + 1) & 1]);
                };
                int next[TILES];
                Tiled w;
                W::add(raw, shared->stages[stage & 1], &shared->luts, lane, n, single, zero, sum, middle, [&](int j) {
                    if (j == 0) {
                        locate_tiles(shared->where[after], next_sb, next);
                        w = p.w[shared->where[after].which];
                    }
                    W::load(raw, w, next, lane, j);
                });
                barrier_arrive(&shared->empty[stage & 1]);
                stage++;
            }
            if (single && s < SPLIT - 1) continue;
            const Where& at = shared->where[turn % PLACES];
            const int tile = at.tile + warp;
            if (tile < p.outputs / 16) end_quarter<W::AT>(sum, p.out[at.which] + tile * 16 + g, p.outputs, rows, n, s > 0 && !single);
        }
    }
}

#define WIDE_KERNEL(T)                                                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) wide_##T(const __grid_constant__ Pair p, const __grid_constant__ Acts x, \
                                                                         const __grid_constant__ Items items) {                     \
        after_previous();                                                                                                           \
        extern __shared__ __align__(16) uint8_t aligned[];                                                                          \
        wide_product<Wide##T>(p, x, items, aligned);                                                                                \
    }
WIDE_KERNEL(Q8_0)
WIDE_KERNEL(Q2_K)
WIDE_KERNEL(Q4_K)
WIDE_KERNEL(IQ2_XXS)
