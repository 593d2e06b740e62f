// Products for decoding (up to 16 activation rows an item) with tiled weights: see tiled.cuh for the tiles and the order of the sums.
// CPU reference: kernels/src/cpu/matmul.rs, moe.rs.
//
// What counts here is that the memory is never idle. Each warp copies its weights ahead through a ring of its own in shared memory
// (cp.async), across tiles and matrices, so that several superblocks are on their way while one is computed and no register waits
// for them. Plain products fetch their first weights before the kernel that makes their activations has ended.
#include "narrow.cuh"
#include "units.cuh"

// Of four rows, fetched before the weights are waited for.
template <class T>
struct Fetched {
    uint2 v[8], mins;
    float s;
    const int* of;
    __device__ __forceinline__ explicit Fetched(const Direct<1>& x) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v[i].x), "=r"(v[i].y) : "l"(x.feed.q[0] + i * 64) : "memory");
        s = x.scale(0);
        if constexpr (Narrow<T>::WANTS == SUMS_OVER_16) mins = x.m(0);
        if constexpr (Narrow<T>::WANTS == SUMS_OVER_32) of = x.sums(0);
    }
    __device__ __forceinline__ uint2 q(int, int i) const { return v[i]; }
    __device__ __forceinline__ uint2 m(int) const { return mins; }
    __device__ __forceinline__ const int* sums(int) const { return of; }
    __device__ __forceinline__ int sum(const int* from, int g) const { return __ldg(from + g); }
    __device__ __forceinline__ float scale(int) const { return s; }
};

// Bytes of one tile's superblock, and of a block's shared memory; as `shape` in kernels/src/cuda/narrow.rs has them.
template <class T>
constexpr int SLOT = T::CHUNKS * 1024 + 16 * (T::SIDE + T::SIDE2);
template <int ROWS, int TILES>
struct Room {
    Unit<ROWS> units[PLANNED];
    float parts[2][SPLIT][ROWS][16 * TILES];
};
template <class T, int ROWS, int TILES, int STAGES, int GROUPS>
constexpr int NARROW_SHARED = Narrow<T>::TABLE + GROUPS * (SPLIT * STAGES * SLOT<T> + int(sizeof(Room<ROWS, TILES>)));

// What a lane copies of neighbouring tiles' superblocks, one after the other, where warp `share` of SHARES copies its part.
template <class T, int SHARES, int TILES>
struct Source {
    const uint8_t* q;
    const uint8_t* rest;    // of `side`, or of `side2`
    __device__ __forceinline__ void seek(const Tiled& w, int at, int lane) {
        q = w.qs + int64_t(at) * (T::CHUNKS * 1024) + lane * 16;
        if (lane < T::SIDE) rest = w.side + int64_t(at) * (16 * T::SIDE) + lane * 16;
        else rest = w.side2 + int64_t(at) * (16 * T::SIDE2) + (lane - T::SIDE) * 16;
    }
    // Of tile `k`; the last one's is the end of a superblock.
    __device__ __forceinline__ void copy(uint8_t* slot, int k, int superblocks, int lane, int share) {
        constexpr int PIECES = 2 * T::CHUNKS / SHARES;
        const int each = lane < T::SIDE ? 16 * T::SIDE : 16 * T::SIDE2;
        const uint8_t* from = q + k * superblocks * (T::CHUNKS * 1024);
#pragma unroll
        for (int i = 0; i < PIECES; i++) copy16(slot + (share * PIECES + i) * 512 + lane * 16, from + (share * PIECES + i) * 512);
        if (share == 0 && lane < T::SIDE + T::SIDE2) copy16(slot + T::CHUNKS * 1024 + lane * 16, rest + k * superblocks * each);
        if (k == TILES - 1) {
            q += T::CHUNKS * 1024;
            rest += each;
        }
    }
};

template <int N>
struct Int {
    static constexpr int value = N;
};

// Four warps, or four for each of SHARES parts of an item's rows (a group), do TILES tiles of 16 outputs: each has a quarter of the
// superblocks. Those of one quarter share a ring. A unit is so many (1 or 2) tiles of one item; units of an item follow each other, so that groups
// that run together read neighbouring memory.
template <class T, int NT, int SHARES, int TILES, int STAGES, int GROUPS>
__device__ __forceinline__ void narrow(const Members& p, const Acts& x, const Items& items, uint8_t* shared) {
    constexpr int ROWS = 4 * NT * SHARES, THREADS = 32 * SPLIT * SHARES;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, split = warp % SPLIT, share = warp / SPLIT % SHARES;
    const int group = warp / (SPLIT * SHARES), within = threadIdx.x - group * THREADS, g = lane >> 2, t = lane & 3;
    uint8_t* ring = shared + Narrow<T>::TABLE + (group * SPLIT + split) * (STAGES * SLOT<T>);
    Room<ROWS, TILES>& room = reinterpret_cast<Room<ROWS, TILES>*>(shared + Narrow<T>::TABLE + GROUPS * SPLIT * STAGES * SLOT<T>)[group];
    const int nsb = p.superblocks, first_sb = nsb * split / SPLIT, each = nsb * (split + 1) / SPLIT - first_sb;
    const auto meet = [&]() {
        if constexpr (GROUPS == 1) __syncthreads();
        else asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(THREADS) : "memory");
    };
    const auto meet_at_ring = [&]() {
        if constexpr (SHARES == 1) __syncwarp();
        else asm volatile("bar.sync %0, %1;" ::"r"(GROUPS + 1 + group * SPLIT + split), "n"(32 * SHARES) : "memory");
    };
    const auto plan = [&](int from, int n, int count) {
        plan_units<ROWS, TILES, THREADS>(p, items, count, blockIdx.x * GROUPS + group, gridDim.x * GROUPS, from, n, within, room.units);
    };
    // What is copied next, tile after tile: `left` superblocks of unit `ahead`, unless that is past the last.
    Source<T, SHARES, TILES> source{};
    int ahead = 0, left = 0;
    const auto seek = [&]() {
        const Unit<ROWS>& unit = room.units[ahead % PLANNED];
        left = unit.member < 0 ? 0 : each;
        if (left > 0) source.seek(p.w[unit.member], unit.tile + first_sb, lane);
    };
    const auto copy_next = [&](int to, auto k) {
        if (left > 0) {
            source.copy(ring + to, k.value, nsb, lane, share);
            if (k.value == TILES - 1 && --left == 0) {
                ahead++;
                seek();
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    const auto start = [&](int count) {
        plan(0, PLANNED, count);
        meet();
        seek();
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) {
            if (i % TILES == 0) copy_next(i * SLOT<T>, Int<0>());
            else copy_next(i * SLOT<T>, Int<TILES - 1>());
        }
    };
    // Weights do not change while kernels run, and some lists are older than the kernel before this one. Activations are made by it.
    int count = 0;
    const bool known = !items.list || items.known;
    if (known) {
        count = items_of<ROWS>(items);
        start(count);
    }
    if constexpr (Narrow<T>::TABLE != 0) fill(reinterpret_cast<Selectors*>(shared));
    after_previous();
    if (!known) {
        count = items_of<ROWS>(items);
        start(count);
    }
    if constexpr (Narrow<T>::TABLE != 0) __syncthreads();
    const typename Narrow<T>::Kit kit(lane);
    int of = 0, before = (STAGES - 1) * SLOT<T>, buffer = 0;
#pragma unroll 1
    for (int u = 0;; u++) {
        const Unit<ROWS>& unit = room.units[u % PLANNED];
        const int member = unit.member;
        if (member < 0) break;
        Feed<NT> feed;
        float sum[TILES][NT][2];
#pragma unroll
        for (int k = 0; k < NT; k++) {
            feed.of[k] = unit.in[4 * (share * NT + k) + (g >> 1)] + first_sb;
            feed.at[k] = unit.in[4 * (share * NT + k) + t] + first_sb;
            feed.q[k] = x.q + int64_t(feed.of[k]) * ACT_Q + (g & 1) * 32 + t * 8;
#pragma unroll
            for (int i = 0; i < TILES; i++) sum[i][k][0] = sum[i][k][1] = 0.0f;
        }
#pragma unroll 1
        for (int i = 0; i < each; i++) {
            const Direct<NT> direct{x, feed, lane};
            const auto acts = [&] {
                if constexpr (NT == 1) return Fetched<T>(direct);
                else return direct;
            }();
            const auto tile = [&](auto k) {
                // This one has arrived, and all lanes are done with the one before it, in whose place the next copy goes.
                asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
                meet_at_ring();
                copy_next(before, Int<(k.value + STAGES - 1) % TILES>());
                typename Narrow<T>::Frag frag;
                Narrow<T>::take(frag, ring + of, lane);
                before = of;
                of = of == (STAGES - 1) * SLOT<T> ? 0 : of + SLOT<T>;
                Narrow<T>::add(frag, shared, acts, kit, sum[k.value]);
            };
            tile(Int<0>());
            if constexpr (TILES == 2) tile(Int<1>());
#pragma unroll
            for (int k = 0; k < NT; k++) {
                feed.q[k] += ACT_Q;
                feed.at[k]++;
                feed.of[k]++;
            }
        }
        float(*part)[ROWS][16 * TILES] = room.parts[buffer];
#pragma unroll
        for (int k = 0; k < NT; k++)
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) part[split][4 * (share * NT + k) + t][g + 8 * i] = sum[i / 2][k][i % 2];
        const int rows = unit.rows;
        // One barrier a unit: the other buffer is written next, and this one only after the next unit's barrier.
        meet();
        float* out = p.out[member];
        for (int i = within; i < rows * 16 * TILES; i += THREADS) {
            const int j = i / (16 * TILES), c = i % (16 * TILES);
            float v = part[0][j][c];
#pragma unroll
            for (int s = 1; s < SPLIT; s++) v = __fadd_rn(v, part[s][j][c]);
            out[unit.out[j] + c] = v;
        }
        buffer ^= 1;
        // Places of units that all warps are done with, but for this one; the next barriers come long before they are wanted.
        if (u % (PLANNED / 2) == PLANNED / 2 - 1) {
            meet();
            plan(u + 1 + PLANNED / 2, PLANNED / 2, count);
        }
    }
}

// Blocks per multiprocessor are what registers and shared memory of sm_90 allow; kernels/src/cuda/narrow.rs launches as many, with so
// many bytes of shared memory.
#define NARROW(T, NT, SHARES, TILES, STAGES, GROUPS, BLOCKS, BYTES)                                                                \
    extern "C" __global__ void __launch_bounds__(32 * SPLIT * SHARES * GROUPS, BLOCKS) narrow_##T##_##NT##_##SHARES##_##TILES(      \
        const __grid_constant__ Members p, const __grid_constant__ Acts x, const __grid_constant__ Items items) {                   \
        extern __shared__ __align__(16) uint8_t shared[];                                                                           \
        narrow<Tiled##T, NT, SHARES, TILES, STAGES, GROUPS>(p, x, items, shared);                                                   \
    }                                                                                                                               \
    static_assert(NARROW_SHARED<Tiled##T, 4 * NT * SHARES, TILES, STAGES, GROUPS> == BYTES && BYTES <= 99 * 1024);
NARROW(Q8_0, 1, 1, 1, 3, 1, 4, 55040)
NARROW(Q8_0, 1, 2, 1, 2, 1, 2, 40192)
NARROW(Q8_0, 2, 2, 1, 2, 1, 2, 45312)
NARROW(Q8_0, 2, 2, 2, 2, 1, 2, 53504)
NARROW(Q2_K, 1, 1, 1, 4, 2, 2, 48640)
NARROW(Q2_K, 1, 1, 2, 4, 2, 2, 52736)
NARROW(Q2_K, 4, 1, 1, 4, 1, 4, 32000)
NARROW(Q4_K, 1, 1, 1, 3, 1, 4, 30464)
NARROW(Q4_K, 4, 1, 1, 3, 1, 2, 38144)
NARROW(IQ2_XXS, 1, 1, 1, 3, 2, 2, 96512)
NARROW(IQ2_XXS, 4, 1, 1, 3, 1, 2, 88704)
