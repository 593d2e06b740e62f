// Products for decoding (up to 16 activation rows an item) with tiled weights: see tiled.cuh for the tiles and the order of the sums.
// CPU reference: kernels/src/cpu/matmul.rs, moe.rs.
//
// What counts here is that the memory is never idle. Each warp copies its weights ahead through a ring of its own in shared memory
// (cp.async), across tiles and matrices, so that several superblocks are on their way while one is computed and no register waits
// for them. Plain products fetch their first weights before the kernel that makes their activations has ended.
#include "tiled.cuh"

// Weights of one type and width that share their inputs. Laid out as `MembersArg` in kernels/src/cuda/narrow.rs.
constexpr int MEMBERS = 6;
struct Members {
    Tiled w[MEMBERS];
    float* out[MEMBERS];
    int start[MEMBERS + 1];   // tiles (of one matrix) of the members before; after the last one, of all
    int count;
    int superblocks;
    int pad;
};

// IQ2_XXS: a selector for `prmt` has, for each of eight weights, the level (8, 25 or 43) in two bits of a nibble and the sign in the
// third. Entry i is 32 copies of the codebook's selector i, then 32 of the signs of byte i (whose highest bit is a scale's and does
// not count): a lane reads its own bank, and its address is one byte of the weights beside one of its own.
struct Selectors {
    uint32_t of[256][2][32];
};

__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(selector));
    return v;
}

// By whole warps; a warp writes all copies of four entries at once.
__device__ __forceinline__ void fill(Selectors* to) {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    for (int base = (threadIdx.x >> 5) * 32; base < 256; base += warps * 32) {
        const uint64_t e = IQ2_XXS_GRID[base + lane];
        const uint32_t s = even_signs((base + lane) & 127);
        uint32_t level = 0, sign = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            // 8, 25 and 43 have 0, 1 and 2 in their high halves.
            level |= uint32_t((e >> (8 * i + 4)) & 3) << (4 * i);
            sign |= ((s >> i) & 1) << (4 * i + 2);
        }
#pragma unroll
        for (int k = lane / 8; k < 32; k += 4) {
            const uint32_t l = __shfl_sync(~0u, level, k), n = __shfl_sync(~0u, sign, k);
            *reinterpret_cast<uint4*>(&to->of[base + k][0][lane % 8 * 4]) = make_uint4(l, l, l, l);
            *reinterpret_cast<uint4*>(&to->of[base + k][1][lane % 8 * 4]) = make_uint4(n, n, n, n);
        }
    }
}

// What the sums of most types need to know.
struct Lane {
    int lane;
    __device__ __forceinline__ explicit Lane(int lane) : lane(lane) {}
};

// How a type's tiles come out of the ring and are computed.
template <class T>
struct Narrow {
    using Frag = typename T::Frag;
    using Kit = Lane;
    static constexpr int TABLE = 0;
    // `slot` has the chunks, then what `side` and `side2` have of the tile.
    static __device__ __forceinline__ void take(Frag& f, const uint8_t* slot, int lane);
    template <int NT, class X>
    static __device__ __forceinline__ void add(const Frag& f, const uint8_t*, const X& x, const Kit& kit, float (&sum)[NT][2]) {
        T::add(f, static_cast<const Luts<0>*>(nullptr), x, kit.lane, sum);
    }
};

__device__ __forceinline__ uint4 shared16(const uint8_t* p) { return *reinterpret_cast<const uint4*>(p); }

template <>
__device__ __forceinline__ void Narrow<TiledQ8_0>::take(Frag& f, const uint8_t* slot, int lane) {
#pragma unroll
    for (int c = 0; c < 4; c++)
#pragma unroll
        for (int h = 0; h < 2; h++) f.q[c][h] = shared16(slot + (c * 2 + h) * 512 + lane * 16);
#pragma unroll
    for (int h = 0; h < 2; h++) f.d[h] = shared16(slot + 4096 + (h * 8 + lane / 4) * 16);
}

template <>
__device__ __forceinline__ void Narrow<TiledQ4_K>::take(Frag& f, const uint8_t* slot, int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int c = 0; c < 2; c++) f.q[c][h] = shared16(slot + (c * 2 + h) * 512 + lane * 16);
        f.s[h] = shared16(slot + 2048 + (h * 8 + lane / 4) * 16);
    }
}

template <>
struct Narrow<TiledQ2_K> {
    using Frag = TiledQ2_K::Frag;
    using Kit = Lane;
    static constexpr int TABLE = 0;
    static __device__ __forceinline__ void take(Frag& f, const uint8_t* slot, int lane) {
        const int t = lane & 3;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint8_t* side = slot + 1024 + (h * 8 + lane / 4) * 16;
            f.q[h] = shared16(slot + h * 512 + lane * 16);
            f.s[h] = *reinterpret_cast<const uint2*>(side + (t >> 1) * 8);
            f.m[h] = *reinterpret_cast<const uint32_t*>(side + t * 4);
            f.d[h] = *reinterpret_cast<const uint32_t*>(slot + 1024 + 256 + (h * 8 + lane / 4) * 4);
        }
    }
    // As `TiledQ2_K::add`, whose sums are exact integers until the same last steps. Quants in bits 2 and 3 stay there, which saves most
    // shifts: four times a quant and its scale fit a byte (180), and their sums have an accumulator of their own.
    template <int NT, class X>
    static __device__ __forceinline__ void add(const Frag& f, const uint8_t*, const X& x, const Kit& kit, float (&sum)[NT][2]) {
        int total[2][NT][4], mins[NT][4];
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) total[0][n][i] = total[1][n][i] = mins[n][i] = 0;
        const uint32_t first = 0x4440 | (kit.lane & 1), second = first + 2;
#pragma unroll
        for (int v = 0; v < 2; v++) {
            const uint32_t wa[2][2] = {{f.q[0].x >> (4 * v), f.q[0].y >> (4 * v)}, {f.q[0].z >> (4 * v), f.q[0].w >> (4 * v)}};
            const uint32_t wb[2][2] = {{f.q[1].x >> (4 * v), f.q[1].y >> (4 * v)}, {f.q[1].z >> (4 * v), f.q[1].w >> (4 * v)}};
            const uint32_t sa = (v ? f.s[0].y : f.s[0].x) & 0x0f0f0f0fu, sc = (v ? f.s[1].y : f.s[1].x) & 0x0f0f0f0fu;
#pragma unroll
            for (int o = 0; o < 2; o++) {
                // Group 8 * (t / 2) + 2 * (2 * v + o) + sub of each row.
                const uint32_t ka = permute(sa, 0, o ? second : first), kb = permute(sc, 0, o ? second : first);
                const uint32_t mask = o ? 0x0c0c0c0cu : 0x03030303u;
#pragma unroll
                for (int u = 0; u < 2; u++)
#pragma unroll
                    for (int n = 0; n < NT; n++)
                        mma_u8(total[o][n], (wa[u][0] & mask) * ka, (wb[u][0] & mask) * kb, (wa[u][1] & mask) * ka, (wb[u][1] & mask) * kb,
                               x.q(n, 2 * (2 * v + o) + u));
            }
        }
        const float da = low_half(f.d[0]), ma = high_half(f.d[0]), db = low_half(f.d[1]), mb = high_half(f.d[1]);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint2 v = x.m(n);
            mma_u8(mins[n], f.m[0] & 0xf0f0f0f0u, f.m[1] & 0xf0f0f0f0u, (f.m[0] >> 4) & 0x0f0f0f0fu, (f.m[1] >> 4) & 0x0f0f0f0fu, v);
            int all[4];
#pragma unroll
            for (int i = 0; i < 4; i++) all[i] = total[0][n][i] + (total[1][n][i] >> 2);
            const float s = x.scale(n);
            const float ta = __fmul_rn(da, float(256 * all[0] + all[1])), tb = __fmul_rn(db, float(256 * all[2] + all[3]));
            sum[n][0] = __fmaf_rn(s, __fmaf_rn(-ma, float(256 * mins[n][0] + mins[n][1]), ta), sum[n][0]);
            sum[n][1] = __fmaf_rn(s, __fmaf_rn(-mb, float(256 * mins[n][2] + mins[n][3]), tb), sum[n][1]);
        }
    }
};

template <>
struct Narrow<TiledIQ2_XXS> {
    using Frag = TiledIQ2_XXS::Frag;
    static constexpr int TABLE = sizeof(Selectors);
    static __device__ __forceinline__ void take(Frag& f, const uint8_t* slot, int lane) {
        const uint8_t* d = slot + 1024 + lane / 4 * 2;
#pragma unroll
        for (int h = 0; h < 2; h++) f.q[h] = shared16(slot + h * 512 + lane * 16);
        f.d = u16_at(d) | (u16_at(d + 16) << 16);
    }
    // What a lane needs for it. The levels are made of something that the compiler does not know, so that they stay in a register: it
    // would make them anew for each use.
    struct Kit {
        uint32_t own;       // lane * 4, 128 + lane * 4, 0, 0
        uint32_t plus;      // the levels
        uint32_t bit;       // of this lane's bit of a scale, in each byte
        __device__ __forceinline__ explicit Kit(int lane) : own(lane * 4 | (128 + lane * 4) << 8), bit(0x01010101u << (lane & 3)) {
            uint32_t id;
            asm volatile("mov.u32 %0, %%laneid;" : "=r"(id));
            plus = (8 | 25 << 8 | 43 << 16) + (id >> 5);
        }
    };
    // Eight weights: byte 2 * K of w is their index, the one after it their signs. Sum and shift are written as products, because the
    // pipe of shifts and permutes is the one that is full: with a logical or and a shift it takes a quarter longer.
    template <int K>
    static __device__ __forceinline__ uint2 eight(const uint8_t* table, uint32_t w, const Kit& kit) {
        const uint32_t g = *reinterpret_cast<const uint32_t*>(table + permute(w, kit.own, 0x6604 | (2 * K) << 4));
        const uint32_t s = *reinterpret_cast<const uint32_t*>(table + permute(w, kit.own, 0x6605 | (2 * K + 1) << 4));
        const uint32_t selector = g + s, high = __dp2a_lo(selector, 0x0100u, 0u);
        constexpr uint32_t minus = 0xf8u | 0xe7u << 8 | 0xd5u << 16;
        return make_uint2(permute(kit.plus, minus, selector), permute(kit.plus, minus, high));
    }
    // As `TiledIQ2_XXS::add`, whose sums are exact integers until the same last steps.
    template <int NT, class X>
    static __device__ __forceinline__ void add(const Frag& f, const uint8_t* table, const X& x, const Kit& kit, float (&sum)[NT][2]) {
        const uint32_t wa[4] = {f.q[0].x, f.q[0].y, f.q[0].z, f.q[0].w}, wb[4] = {f.q[1].x, f.q[1].y, f.q[1].z, f.q[1].w};
        // The scales of each group, a byte each, those of the second row 16 times. Lane t has bit t of them; the highest bit of a
        // group's 16 is spread over a byte.
        uint32_t ka[2], kb[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t v = (permute(wa[2 * i], wa[2 * i + 1], 0xfdb9) & kit.bit) | (permute(wb[2 * i], wb[2 * i + 1], 0xfdb9) & (kit.bit << 4));
            v |= __shfl_xor_sync(~0u, v, 1);
            v |= __shfl_xor_sync(~0u, v, 2);
            ka[i] = v & 0x0f0f0f0fu;
            kb[i] = v & 0xf0f0f0f0u;
        }
        int total[NT][4];
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) total[n][i] = 0;
#pragma unroll
        for (int g = 0; g < 8; g++) {
            const uint2 a = g & 1 ? eight<1>(table, wa[g / 2], kit) : eight<0>(table, wa[g / 2], kit);
            const uint2 b = g & 1 ? eight<1>(table, wb[g / 2], kit) : eight<0>(table, wb[g / 2], kit);
            // 2 * scale + 1, of the second row 16 times.
            const int sa = __dp4a(ka[g / 4], 2u << (8 * (g & 3)), 1u), sc = __dp4a(kb[g / 4], 2u << (8 * (g & 3)), 16u);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                int c[4] = {0, 0, 0, 0};
                mma_s8(c, a.x, b.x, a.y, b.y, x.q(n, g));
                total[n][0] += c[0] * sa;
                total[n][1] += c[1] * sa;
                total[n][2] += c[2] * sc;
                total[n][3] += c[3] * sc;
            }
        }
#pragma unroll
        for (int n = 0; n < NT; n++) total[n][2] >>= 4, total[n][3] >>= 4;
        const float da = __fmul_rn(low_half(f.d), 0.125f), db = __fmul_rn(high_half(f.d), 0.125f);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const float s = x.scale(n);
            sum[n][0] = __fmaf_rn(s, __fmul_rn(da, join(total[n][0], total[n][1])), sum[n][0]);
            sum[n][1] = __fmaf_rn(s, __fmul_rn(db, join(total[n][2], total[n][3])), sum[n][1]);
        }
    }
};

// Where activations of one superblock are, as `add` reads them (`Global` in tiled.cuh says what they are): per four rows, the first byte
// that this lane feeds, and what belongs to the row of its sums.
template <int NT>
struct Feed {
    const uint8_t* q[NT];
    const uint8_t* m;
    int at[NT];             // superblock of the activations whose sums this lane has
    int of[NT];             // and of those it feeds
};

// From memory, when they are wanted.
template <int NT>
struct Direct {
    const Acts& x;
    const Feed<NT>& feed;
    int lane;
    __device__ __forceinline__ void step(int) const {}
    __device__ __forceinline__ uint2 q(int n, int s) const { return load8(feed.q[n] + s * 64); }
    __device__ __forceinline__ uint2 m(int n) const { return load8(x.m + int64_t(feed.of[n]) * ACT_M + (lane >> 2 & 1) * 32 + (lane & 3) * 8); }
    __device__ __forceinline__ const int* sums(int n) const { return x.sums + int64_t(feed.at[n]) * ACT_SUMS; }
    __device__ __forceinline__ int sum(const int* of, int g) const { return __ldg(of + g); }
    __device__ __forceinline__ float scale(int n) const { return __ldg(x.scale + feed.at[n]); }
};

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
        if constexpr (T::WANTS == 1) mins = x.m(0);
        if constexpr (T::WANTS == 2) of = x.sums(0);
    }
    __device__ __forceinline__ void step(int) const {}
    __device__ __forceinline__ uint2 q(int, int i) const { return v[i]; }
    __device__ __forceinline__ uint2 m(int) const { return mins; }
    __device__ __forceinline__ const int* sums(int) const { return of; }
    __device__ __forceinline__ int sum(const int* from, int g) const { return __ldg(from + g); }
    __device__ __forceinline__ float scale(int) const { return s; }
};

// A tile of one item, with where its rows are: found by all threads for many units at once, because the divisions and the lists'
// latency would cost a warp more than a unit's products.
template <int ROWS>
struct Unit {
    int member;             // or -1 past the last
    int rows;
    int tile;               // of the member's weight: its first superblock
    int pad;
    int in[ROWS];           // first superblock of the input row
    int out[ROWS];          // place in the member's output
};
constexpr int PLANNED = 16;

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
    // Finds `n` of this group's units from unit `from` on.
    const auto plan = [&](int from, int n, int count) {
        const int tiles = p.start[p.count] / TILES;
        for (int i = within; i < n * ROWS; i += THREADS) {
            const int u = from + i / ROWS, j = i % ROWS, unit = u * (gridDim.x * GROUPS) + blockIdx.x * GROUPS + group, item = unit / tiles;
            Unit<ROWS>& to = room.units[u % PLANNED];
            if (item >= count) {
                to.member = -1;
                continue;
            }
            int tile = unit % tiles * TILES, m = 0, matrix, first, rows;
            while (tile >= p.start[m + 1]) m++;
            tile -= p.start[m];
            if (items.list) {
                const int4 it = __ldcg(items.list + item);
                matrix = it.x, first = it.y, rows = it.z;
            } else {
                matrix = item % items.matrices;
                first = item / items.matrices * ROWS;
                rows = min(ROWS, items.rows - first);
            }
            // Rows past the end repeat the last one; their sums are not written.
            const int r = first + min(j, rows - 1), o = items.list ? __ldcg(items.order + r) : r * items.matrices + matrix, of = p.start[m + 1] - p.start[m];
            to.in[j] = (items.list ? o / items.per_row : o) * nsb;
            to.out[j] = (o * of + tile) * 16;
            if (j == 0) {
                to.member = m;
                to.rows = rows;
                to.tile = (matrix * of + tile) * nsb;
            }
        }
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
    // Weights do not change while kernels run, and some lists are older than the kernel before this one, which may still run (see
    // `after_previous`; from the second-level cache, as said there). Activations are made by it.
    int count = 0;
    const auto read_count = [&]() { return items.list ? __ldcg(items.count) : (items.rows + ROWS - 1) / ROWS * items.matrices; };
    const bool known = !items.list || items.known;
    if (known) {
        count = read_count();
        start(count);
    }
    if constexpr (Narrow<T>::TABLE != 0) fill(reinterpret_cast<Selectors*>(shared));
    after_previous();
    if (!known) {
        count = read_count();
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
                typename T::Frag frag;
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

// Blocks per multiprocessor are what registers and shared memory of sm_90 allow; kernels/src/cuda/narrow.rs launches as many.
#define NARROW(T, NT, SHARES, TILES, STAGES, GROUPS, BLOCKS)                                                                       \
    extern "C" __global__ void __launch_bounds__(32 * SPLIT * SHARES * GROUPS, BLOCKS) narrow_##T##_##NT##_##SHARES##_##TILES(      \
        const __grid_constant__ Members p, const __grid_constant__ Acts x, const __grid_constant__ Items items) {                   \
        extern __shared__ __align__(16) uint8_t shared[];                                                                           \
        narrow<Tiled##T, NT, SHARES, TILES, STAGES, GROUPS>(p, x, items, shared);                                                   \
    }                                                                                                                               \
    static_assert(NARROW_SHARED<Tiled##T, 4 * NT * SHARES, TILES, STAGES, GROUPS> <= 99 * 1024);
#ifndef NARROW_TEST
NARROW(Q8_0, 1, 1, 1, 3, 1, 4)
NARROW(Q8_0, 1, 2, 1, 2, 1, 2)
NARROW(Q8_0, 2, 2, 1, 3, 1, 2)
NARROW(Q8_0, 2, 2, 2, 3, 1, 2)
NARROW(Q2_K, 1, 1, 1, 4, 2, 2)
NARROW(Q2_K, 1, 1, 2, 4, 2, 2)
NARROW(Q2_K, 4, 1, 1, 4, 1, 4)
NARROW(Q4_K, 1, 1, 1, 3, 1, 4)
NARROW(Q4_K, 4, 1, 1, 3, 1, 2)
NARROW(IQ2_XXS, 1, 1, 1, 3, 2, 2)
NARROW(IQ2_XXS, 1, 1, 2, 2, 2, 2)
NARROW(IQ2_XXS, 4, 1, 1, 3, 1, 2)
#endif
