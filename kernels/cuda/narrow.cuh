// How tiles of each type are computed in products for decoding: `take` reads one superblock of a tile from shared memory, `add` adds its
// products with some activation rows to `sum`. Kernels for more rows (wide.cuh) do the same floating-point operations in the same order; what
// is summed as integers is exact.
#pragma once
#include "tiled.cuh"

// What `add` wants to know of activations beside their bytes and scales.
enum Wanted { NO_SUMS, SUMS_OVER_16, SUMS_OVER_32 };

// Where activations of one superblock are, as `add` reads them: per four rows, the first byte that this lane feeds, and what belongs to
// the row of its sums.
template <int NT>
struct Feed {
    const uint8_t* q[NT];
    int at[NT];             // superblock of the activations whose sums this lane has
    int of[NT];             // and of those it feeds
};

// From memory, when they are wanted.
template <int NT>
struct Direct {
    const Acts& x;
    const Feed<NT>& feed;
    int lane;
    __device__ __forceinline__ uint2 q(int n, int s) const { return load8(feed.q[n] + s * 64); }
    __device__ __forceinline__ uint2 m(int n) const { return load8(x.m + int64_t(feed.of[n]) * ACT_M + (lane >> 2 & 1) * 32 + (lane & 3) * 8); }
    __device__ __forceinline__ const int* sums(int n) const { return x.sums + int64_t(feed.at[n]) * ACT_SUMS; }
    __device__ __forceinline__ int sum(const int* of, int g) const { return __ldg(of + g); }
    __device__ __forceinline__ float scale(int n) const { return __ldg(x.scale + feed.at[n]); }
};

// What the sums of most types need to know.
struct Lane {
    int lane;
    __device__ __forceinline__ explicit Lane(int lane) : lane(lane) {}
};

// A slot in shared memory has a tile's chunks, then what `side` and `side2` have of it. TABLE is the size of tables that a type wants,
// Kit what its sums want to know of a lane.
template <class T>
struct Narrow;

__device__ __forceinline__ uint4 shared16(const uint8_t* p) { return *reinterpret_cast<const uint4*>(p); }

__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(selector));
    return v;
}

template <>
struct Narrow<TiledQ8_0> {
    using Kit = Lane;
    static constexpr int TABLE = 0;
    static constexpr Wanted WANTS = NO_SUMS;
    struct Frag {
        uint4 q[4][2], d[2];
    };
    static __device__ __forceinline__ void take(Frag& f, const uint8_t* slot, int lane) {
#pragma unroll
        for (int c = 0; c < 4; c++)
#pragma unroll
            for (int h = 0; h < 2; h++) f.q[c][h] = shared16(slot + (c * 2 + h) * 512 + lane * 16);
#pragma unroll
        for (int h = 0; h < 2; h++) f.d[h] = shared16(slot + 4096 + (h * 8 + lane / 4) * 16);
    }
    template <int NT, class X>
    static __device__ __forceinline__ void add(const Frag& f, const uint8_t*, const X& x, const Kit&, float (&sum)[NT][2]) {
        float p[NT][2];
#pragma unroll
        for (int n = 0; n < NT; n++) p[n][0] = p[n][1] = 0.0f;
#pragma unroll
        for (int b = 0; b < 8; b++) {
            const uint4 qa = f.q[b / 2][0], qb = f.q[b / 2][1];
            const uint32_t wa = (&f.d[0].x)[b / 2], wb = (&f.d[1].x)[b / 2];
            const float da = b & 1 ? high_half(wa) : low_half(wa), db = b & 1 ? high_half(wb) : low_half(wb);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                int c[4] = {0, 0, 0, 0};
                const uint2 v = x.q(n, b);
                mma_s8(c, b & 1 ? qa.z : qa.x, b & 1 ? qb.z : qb.x, b & 1 ? qa.w : qa.y, b & 1 ? qb.w : qb.y, v);
                p[n][0] = __fmaf_rn(da, float(256 * c[0] + c[1]), p[n][0]);
                p[n][1] = __fmaf_rn(db, float(256 * c[2] + c[3]), p[n][1]);
            }
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const float s = x.scale(n);
            sum[n][0] = __fmaf_rn(s, p[n][0], sum[n][0]);
            sum[n][1] = __fmaf_rn(s, p[n][1], sum[n][1]);
        }
    }
};

template <>
struct Narrow<TiledQ4_K> {
    using Kit = Lane;
    static constexpr int TABLE = 0;
    static constexpr Wanted WANTS = SUMS_OVER_32;
    struct Frag {
        uint4 q[2][2], s[2];
    };
    static __device__ __forceinline__ void take(Frag& f, const uint8_t* slot, int lane) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int c = 0; c < 2; c++) f.q[c][h] = shared16(slot + (c * 2 + h) * 512 + lane * 16);
            f.s[h] = shared16(slot + 2048 + (h * 8 + lane / 4) * 16);
        }
    }
    // 6-bit scale and minimum of group g (a constant after unrolling) from the block's 12 bytes.
    static __device__ __forceinline__ void six(const uint4& s, int g, int& sc, int& mn) {
        const int at = 8 * (g & 3);
        if (g < 4) {
            sc = (s.y >> at) & 63;
            mn = (s.z >> at) & 63;
        } else {
            sc = ((s.w >> at) & 15) | (((s.y >> at) >> 2) & 48);
            mn = ((s.w >> (at + 4)) & 15) | (((s.z >> at) >> 2) & 48);
        }
    }
    template <int NT, class X>
    static __device__ __forceinline__ void add(const Frag& f, const uint8_t*, const X& x, const Kit&, float (&sum)[NT][2]) {
        int total[NT][4], mins[NT][2];
        const int* sums[NT];
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) total[n][i] = 0;
            mins[n][0] = mins[n][1] = 0;
            sums[n] = x.sums(n);
        }
#pragma unroll
        for (int g = 0; g < 8; g++) {
            const int h = g / 2, shift = 4 * (g & 1);
            const uint4 qa = f.q[h / 2][0], qb = f.q[h / 2][1];
            const uint32_t a0 = ((h & 1 ? qa.z : qa.x) >> shift) & 0x0f0f0f0fu, a2 = ((h & 1 ? qa.w : qa.y) >> shift) & 0x0f0f0f0fu;
            const uint32_t a1 = ((h & 1 ? qb.z : qb.x) >> shift) & 0x0f0f0f0fu, a3 = ((h & 1 ? qb.w : qb.y) >> shift) & 0x0f0f0f0fu;
            int sa, na, sc, nb;
            six(f.s[0], g, sa, na);
            six(f.s[1], g, sc, nb);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                int c[4] = {0, 0, 0, 0};
                mma_s8(c, a0, a1, a2, a3, x.q(n, g));
                total[n][0] += c[0] * sa;
                total[n][1] += c[1] * sa;
                total[n][2] += c[2] * sc;
                total[n][3] += c[3] * sc;
                const int z = x.sum(sums[n], g);
                mins[n][0] += na * z;
                mins[n][1] += nb * z;
            }
        }
        const float da = low_half(f.s[0].x), ma = high_half(f.s[0].x), db = low_half(f.s[1].x), mb = high_half(f.s[1].x);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const float s = x.scale(n);
            const float ta = __fmul_rn(da, join(total[n][0], total[n][1])), tb = __fmul_rn(db, join(total[n][2], total[n][3]));
            sum[n][0] = __fmaf_rn(s, __fmaf_rn(-ma, float(mins[n][0]), ta), sum[n][0]);
            sum[n][1] = __fmaf_rn(s, __fmaf_rn(-mb, float(mins[n][1]), tb), sum[n][1]);
        }
    }
};

template <>
struct Narrow<TiledQ2_K> {
    using Kit = Lane;
    static constexpr int TABLE = 0;
    static constexpr Wanted WANTS = SUMS_OVER_16;
    struct Frag {
        uint4 q[2];
        uint2 s[2];
        uint32_t m[2], d[2];
    };
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
    // Quants in bits 2 and 3 stay there, which saves most
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

// IQ2_XXS: a selector for `prmt` has, for each of eight weights, the level (8, 25 or 43) in two bits of a nibble and the sign in the
// third. Entry i is 32 copies of the codebook's selector i, then 32 of the signs of byte i (whose highest bit is a scale's and does
// not count): a lane reads its own bank, and its address is one byte of the weights beside one of its own.
struct Selectors {
    uint32_t of[256][2][32];
};

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

template <>
struct Narrow<TiledIQ2_XXS> {
    static constexpr int TABLE = sizeof(Selectors);
    static constexpr Wanted WANTS = NO_SUMS;
    struct Frag {
        uint4 q[2];
        uint32_t d;  // both rows' scales
    };
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
    // Eight weights: byte 2 * K of w is their index, the one after it their signs. Sum and shift are written for the pipe of products
    // (a dot product with 0, 1), because that of shifts, logic and permutes is the fuller one: with `|` and `>> 16`, and scales taken by
    // permutes, all of it took 6 % longer.
    template <int K>
    static __device__ __forceinline__ uint2 eight(const uint8_t* table, uint32_t w, const Kit& kit) {
        const uint32_t g = *reinterpret_cast<const uint32_t*>(table + permute(w, kit.own, 0x6604 | (2 * K) << 4));
        const uint32_t s = *reinterpret_cast<const uint32_t*>(table + permute(w, kit.own, 0x6605 | (2 * K + 1) << 4));
        const uint32_t selector = g + s, high = __dp2a_lo(selector, 0x0100u, 0u);
        constexpr uint32_t minus = 0xf8u | 0xe7u << 8 | 0xd5u << 16;
        return make_uint2(permute(kit.plus, minus, selector), permute(kit.plus, minus, high));
    }
    // The scales of groups 4 * i and on, a byte each, those of the second row 16 times. Lane t has bit t of them; the highest bit of a
    // group's 16 is spread over a byte.
    static __device__ __forceinline__ uint32_t scales(const uint32_t (&wa)[4], const uint32_t (&wb)[4], int i, const Kit& kit) {
        uint32_t v = (permute(wa[2 * i], wa[2 * i + 1], 0xfdb9) & kit.bit) | (permute(wb[2 * i], wb[2 * i + 1], 0xfdb9) & (kit.bit << 4));
        v |= __shfl_xor_sync(~0u, v, 1);
        v |= __shfl_xor_sync(~0u, v, 2);
        return v;
    }
    template <int NT, class X>
    static __device__ __forceinline__ void add(const Frag& f, const uint8_t* table, const X& x, const Kit& kit, float (&sum)[NT][2]) {
        const uint32_t wa[4] = {f.q[0].x, f.q[0].y, f.q[0].z, f.q[0].w}, wb[4] = {f.q[1].x, f.q[1].y, f.q[1].z, f.q[1].w};
        uint32_t ka[2], kb[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t v = scales(wa, wb, i, kit);
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
