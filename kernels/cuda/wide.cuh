// What the wide kernels (wide.cu) do with a superblock of a warp's outputs, of one type each: weights become bytes for the tensor cores once
// and stay in registers, while the sums of 16 rows after the other are computed. The order of a row's sums is that of `add` in
// tiled.cuh and of narrow.cu, so that the results have the same bits.
#pragma once
#include "tiled.cuh"

// Rows of an item, and tiles of 16 outputs of a warp. With two tiles a warp reads activations half as often, but there are registers for
// half as many warps: as fast for 64 rows an item, and slower for fewer (16 rows an expert: 1.9 ms and 1.7).
constexpr int WIDE_ROWS = 64, TILES = 1;

// The compiler's schedules for sm_121 need more registers, so that fewer columns are computed at once there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr bool ROOMY = false;
#else
constexpr bool ROOMY = true;
#endif

// As mma_s8 with sums that begin at 0: as an operand of its own it is the zero register, and not four moves.
__device__ __forceinline__ void mma_s8_new(int (&c)[4], const uint32_t (&a)[4], uint2 b) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(0));
}
__device__ __forceinline__ void mma_u8_new(int (&c)[4], const uint32_t (&a)[4], uint2 b) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(0));
}

// One superblock of 64 activation rows in shared memory. Steps of odd rows are swapped in pairs, so that the two rows that half a warp
// reads lie in different banks.
template <bool MINS>
struct WideStage {
    uint8_t q[WIDE_ROWS * ACT_Q];
    float scale[WIDE_ROWS];
    uint8_t m[MINS ? WIDE_ROWS * ACT_M : 16];
};

__device__ __forceinline__ int wide_at(int row, int step) { return row * ACT_Q + ((step ^ (row & 1)) * 64); }

// A `WideStage` as a warp's lane reads it, from row `first` on: what column n * 8 + g feeds in step s; its sums over 16; and the
// scale of row n * 4 + t.
struct WideActs {
    const uint8_t* even;
    const uint8_t* odd;
    const uint8_t* mins;
    const float* scales;
    template <bool MINS>
    __device__ __forceinline__ WideActs(const WideStage<MINS>& s, int lane, int first) {
        const int g = lane >> 2, t = lane & 3, feed = (g & 1) * 32 + t * 8;
        even = s.q + wide_at(g >> 1, 0) + feed + first * ACT_Q;
        odd = s.q + wide_at(g >> 1, 1) + feed + first * ACT_Q;
        mins = s.m + (g >> 1) * ACT_M + feed + first * ACT_M;
        scales = s.scale + first + t;
    }
    __device__ __forceinline__ uint2 q(int n, int s) const {
        return *reinterpret_cast<const uint2*>((s & 1 ? odd : even) + n * (4 * ACT_Q) + (s >> 1) * 128);
    }
    __device__ __forceinline__ uint2 m(int n) const { return *reinterpret_cast<const uint2*>(mins + n * (4 * ACT_M)); }
    __device__ __forceinline__ float scale(int n) const { return scales[4 * n]; }
};

__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(selector));
    return v;
}

// Where row r of an item is in a list that a lane reads four of at once: r, r + 4, r + 8 and r + 12, of 16 rows.
__device__ __forceinline__ int by_fours(int r) { return (r & ~15) | (r & 3) * 4 | (r >> 2 & 3); }

// A number of columns of 8, that is 4 rows, as a type.
template <int N>
struct Columns {
    static constexpr int value = N;
};

// Each type has: `Raw`, what a lane has of its tiles' superblock in memory, and `load`, which loads its part j of 8; tables `Luts` in
// shared memory; and `add`, which adds a superblock's sums for n rows. While it computes, `add` calls middle() once, when about half
// of the rows are done, and then(j) for j = 0 .. 7 when the parts of `raw` may be loaded anew.
struct WideQ2_K {
    static constexpr bool MINS = true, SINGLE = false;
    // Columns of 8 (4 rows) that are computed at once, and those whose results are written at once.
    static constexpr int C = ROOMY ? 4 : 2, AT = 8;
    struct Luts {};
    static __device__ __forceinline__ void fill(Luts*) {}
    struct Raw {
        uint4 q[TILES][2];
        uint2 s[TILES][2];
        uint32_t m[TILES][2], d[TILES][2];
    };
    static __device__ __forceinline__ void load(Raw& r, const Tiled& w, const int (&at)[TILES], int lane, int j) {
        const int t = lane & 3;
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int64_t row = int64_t(at[i]) * 16 + h * 8 + lane / 4;
                if (j == 3) r.q[i][h] = load16(w.qs + int64_t(at[i]) * 1024 + h * 512 + lane * 16);
                if (j == 5) r.s[i][h] = load8(w.side + row * 16 + (t >> 1) * 8);
                if (j == 6) r.m[i][h] = load4(w.side + row * 16 + t * 4);
                if (j == 7) r.d[i][h] = load4(w.side2 + row * 4);
            }
    }
    template <class Middle, class Then>
    static __device__ __forceinline__ void add(const Raw& raw, const WideStage<true>& stage, const Luts*, int lane, int n, bool, uint32_t,
                                               float (&sum)[TILES][16][2], Middle middle, Then then) {
        uint32_t a[8][TILES][4], rm[TILES][2], rd[TILES][2];
        const int sub = lane & 1;
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int s = 0; s < 4; s++) {
                // Group 8 * (t / 2) + 2 * s + sub of each row: the quants times their scale fit a byte (3 * 15).
                const uint32_t sa = ((s < 2 ? raw.s[i][0].x : raw.s[i][0].y) >> (16 * (s & 1) + 8 * sub)) & 15;
                const uint32_t sc = ((s < 2 ? raw.s[i][1].x : raw.s[i][1].y) >> (16 * (s & 1) + 8 * sub)) & 15;
#pragma unroll
                for (int u = 0; u < 2; u++) {
                    uint32_t(&to)[4] = a[2 * s + u][i];
                    to[0] = (((u ? raw.q[i][0].z : raw.q[i][0].x) >> (2 * s)) & 0x03030303u) * sa;
                    to[2] = (((u ? raw.q[i][0].w : raw.q[i][0].y) >> (2 * s)) & 0x03030303u) * sa;
                    to[1] = (((u ? raw.q[i][1].z : raw.q[i][1].x) >> (2 * s)) & 0x03030303u) * sc;
                    to[3] = (((u ? raw.q[i][1].w : raw.q[i][1].y) >> (2 * s)) & 0x03030303u) * sc;
                }
            }
#pragma unroll
            for (int h = 0; h < 2; h++) rm[i][h] = raw.m[i][h], rd[i][h] = raw.d[i][h];
        }
        const auto pass = [&](int first, auto columns, auto after) {
            constexpr int C = decltype(columns)::value;
            const WideActs x(stage, lane, 4 * first);
            int total[TILES][C][4];
#pragma unroll
            for (int s = 0; s < 8; s++) {
                // Without it the compiler fetches many steps' activations at once, for which there are no registers.
                __syncwarp();
#pragma unroll
                for (int m = 0; m < C; m++) {
                    const uint2 v = x.q(m, s);
#pragma unroll
                    for (int i = 0; i < TILES; i++) {
                        if (s == 0) mma_u8_new(total[i][m], a[s][i], v);
                        else mma_u8(total[i][m], a[s][i][0], a[s][i][1], a[s][i][2], a[s][i][3], v);
                    }
                }
                after(s);
            }
#pragma unroll
            for (int m = 0; m < C; m++) {
                const uint2 v = x.m(m);
                const float scale = x.scale(m);
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    const uint32_t min[4] = {rm[i][0] & 0xf0f0f0f0u, rm[i][1] & 0xf0f0f0f0u, (rm[i][0] >> 4) & 0x0f0f0f0fu, (rm[i][1] >> 4) & 0x0f0f0f0fu};
                    int mins[4];
                    mma_u8_new(mins, min, v);
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const float v = __fmul_rn(low_half(rd[i][h]), float(256 * total[i][m][2 * h] + total[i][m][2 * h + 1]));
                        float& to = sum[i][first + m][h];
                        to = __fmaf_rn(scale, __fmaf_rn(-high_half(rd[i][h]), float(256 * mins[2 * h] + mins[2 * h + 1]), v), to);
                    }
                }
            }
        };
#pragma unroll
        for (int k = 16 / C - 1; k > 0; k--) {
            if (k == 8 / C - 1) middle();
            if (n > 4 * C * k + 2 * C) pass(C * k, Columns<C>(), [](int) {});
            else if (n > 4 * C * k) pass(C * k, Columns<C / 2>(), [](int) {});
        }
        pass(0, Columns<C>(), then);
    }
};

struct WideQ4_K {
    static constexpr bool MINS = true, SINGLE = false;
    static constexpr int C = ROOMY ? 4 : 2, AT = 8;
    struct Luts {};
    static __device__ __forceinline__ void fill(Luts*) {}
    struct Raw {
        uint4 q[TILES][2][2], s[TILES][2];
    };
    static __device__ __forceinline__ void load(Raw& r, const Tiled& w, const int (&at)[TILES], int lane, int j) {
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (j == 3 || j == 6) r.q[i][j / 6][h] = load16(w.qs + int64_t(at[i]) * 2048 + (j / 6 * 2 + h) * 512 + lane * 16);
                if (j == 7) r.s[i][h] = load16(w.side + (int64_t(at[i]) * 16 + h * 8 + lane / 4) * 16);
            }
    }
    template <class Middle, class Then>
    static __device__ __forceinline__ void add(const Raw& raw, const WideStage<true>& stage, const Luts*, int lane, int n, bool, uint32_t,
                                               float (&sum)[TILES][16][2], Middle middle, Then then) {
        uint32_t a[8][TILES][4], of_group[TILES][2][2], least[TILES][2], rd[TILES][2];
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int g = 0; g < 8; g++) {
                    const uint4 q = raw.q[i][g / 4][h];
                    a[g][i][h] = ((g & 2 ? q.z : q.x) >> (4 * (g & 1))) & 0x0f0f0f0fu;
                    a[g][i][2 + h] = ((g & 2 ? q.w : q.y) >> (4 * (g & 1))) & 0x0f0f0f0fu;
                }
                // Six bits of scale and of minimum a group, a byte each: groups 0 to 3, then 4 to 7.
                const uint4 s = raw.s[i][h];
                of_group[i][h][0] = s.y & 0x3f3f3f3fu;
                of_group[i][h][1] = (s.w & 0x0f0f0f0fu) | ((s.y >> 2) & 0x30303030u);
                const uint32_t low = s.z & 0x3f3f3f3fu, high = ((s.w >> 4) & 0x0f0f0f0fu) | ((s.z >> 2) & 0x30303030u);
                // This lane has groups 4t .. 4t + 3 of 16, each the half of one of 32.
                least[i][h] = permute(lane & 2 ? high : low, 0, lane & 1 ? 0x3322 : 0x1100);
                rd[i][h] = s.x;
            }
        const auto pass = [&](int first, auto columns, auto after) {
            constexpr int C = decltype(columns)::value;
            const WideActs x(stage, lane, 4 * first);
            int total[TILES][C][4];
#pragma unroll
            for (int g = 0; g < 8; g++) {
                __syncwarp();
                int k[TILES][2];
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int h = 0; h < 2; h++) k[i][h] = permute(of_group[i][h][g / 4], 0, 0x4440 + g % 4);
#pragma unroll
                for (int m = 0; m < C; m++) {
                    const uint2 v = x.q(m, g);
#pragma unroll
                    for (int i = 0; i < TILES; i++) {
                        int c[4];
                        mma_s8_new(c, a[g][i], v);
#pragma unroll
                        for (int h = 0; h < 4; h++) total[i][m][h] = (g ? total[i][m][h] : 0) + c[h] * k[i][h / 2];
                    }
                }
                after(g);
            }
#pragma unroll
            for (int m = 0; m < C; m++) {
                const uint2 v = x.m(m);
                const float scale = x.scale(m);
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    // A sum over 16 is 16 * a + b; a minimum times 16 has more than eight bits, so that these are two sums.
                    const uint32_t first_half[4] = {least[i][0], least[i][1], 0, 0}, second_half[4] = {0, 0, least[i][0], least[i][1]};
                    int tens[4], ones[4];
                    mma_u8_new(tens, first_half, v);
                    mma_u8_new(ones, second_half, v);
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const int hi = 16 * tens[2 * h] + ones[2 * h], lo = 16 * tens[2 * h + 1] + ones[2 * h + 1];
                        const float v = __fmul_rn(low_half(rd[i][h]), join(total[i][m][2 * h], total[i][m][2 * h + 1]));
                        float& to = sum[i][first + m][h];
                        to = __fmaf_rn(scale, __fmaf_rn(-high_half(rd[i][h]), float(256 * hi + lo), v), to);
                    }
                }
            }
        };
#pragma unroll
        for (int k = 16 / C - 1; k > 0; k--) {
            if (k == 8 / C - 1) middle();
            if (n > 4 * C * k + 2 * C) pass(C * k, Columns<C>(), [](int) {});
            else if (n > 4 * C * k) pass(C * k, Columns<C / 2>(), [](int) {});
        }
        pass(0, Columns<C>(), then);
    }
};

struct WideIQ2_XXS {
    static constexpr bool MINS = false, SINGLE = false;
    static constexpr int C = ROOMY ? 4 : 2, AT = 8;
    // Copies of the tables, of which lane l reads copy l % COPIES.
    static constexpr int COPIES = 16;
    // Selectors for `prmt` of eight weights, a nibble each: the codebook's level (8, 25 or 43) in two bits, the sign in the third.
    struct Luts {
        uint32_t level[256 * COPIES];
        uint32_t sign[128 * COPIES];
    };
    static __device__ __forceinline__ void fill(Luts* l) {
        for (int i = threadIdx.x; i < 256 * COPIES; i += blockDim.x) {
            const uint64_t e = IQ2_XXS_GRID[i / COPIES];
            uint32_t v = 0;
#pragma unroll
            for (int k = 0; k < 8; k++) v |= uint32_t((e >> (8 * k + 4)) & 3) << (4 * k);   // 0, 1, 2 are in their high halves
            l->level[i] = v;
        }
        for (int i = threadIdx.x; i < 128 * COPIES; i += blockDim.x) {
            const uint32_t s = even_signs(i / COPIES);
            uint32_t v = 0;
#pragma unroll
            for (int k = 0; k < 8; k++) v |= ((s >> k) & 1) << (4 * k + 2);
            l->sign[i] = v;
        }
    }
    // The selectors of index byte B of a word, or of sign byte B. The entry's address is a dot product of the word's bytes with (0, .., 64, ..):
    // shift, mask and sum in one instruction.
    template <int B>
    static __device__ __forceinline__ uint32_t levels(uint32_t luts, uint32_t word) {
        uint32_t v;
        asm("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(__dp4a(word, 64u << (8 * B), luts)));
        return v;
    }
    template <int B>
    static __device__ __forceinline__ uint32_t signs(uint32_t luts, uint32_t word) {
        uint32_t v;
        asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(v) : "r"(__dp4a(word, 64u << (8 * B), luts)), "n"(256 * COPIES * 4));
        return v;
    }
    struct Raw {
        uint4 q[TILES][2];
        uint32_t d[TILES];
    };
    static __device__ __forceinline__ void load(Raw& r, const Tiled& w, const int (&at)[TILES], int lane, int j) {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            if (j == 4 || j == 5) r.q[i][j - 4] = load16(w.qs + int64_t(at[i]) * 1024 + (j - 4) * 512 + lane * 16);
            if (j == 6) {
                const uint8_t* d = w.side2 + (int64_t(at[i]) * 16 + lane / 4) * 2;
                r.d[i] = u16_at(d) | (u16_at(d + 16) << 16);
            }
        }
    }
    template <class Middle, class Then>
    static __device__ __forceinline__ void add(const Raw& raw, const WideStage<false>& stage, const Luts* l, int lane, int n, bool, uint32_t,
                                               float (&sum)[TILES][16][2], Middle middle, Then then) {
        uint32_t a[8][TILES][4], odd[TILES][2][2], rd[TILES];
        const uint32_t luts = uint32_t(__cvta_generic_to_shared(l)) + lane % COPIES * 4;
        static_assert(COPIES == 16);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            uint32_t bits[2][2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint32_t w[4] = {raw.q[i][h].x, raw.q[i][h].y, raw.q[i][h].z, raw.q[i][h].w};
#pragma unroll
                for (int g = 0; g < 8; g++) {
                    const uint32_t v = w[g / 2] & 0x7fff7fffu, which = g & 1 ? levels<2>(luts, v) | signs<3>(luts, v) : levels<0>(luts, v) | signs<1>(luts, v);
                    a[g][i][h] = permute(0x002b1908, 0x00d5e7f8, which);
                    a[g][i][2 + h] = permute(0x002b1908, 0x00d5e7f8, which >> 16);
                }
                // Lane t has bit t of each group's scale, the highest of the group's 16: spread over a byte, of which this lane's bit stays.
                bits[h][0] = permute(w[0], w[1], 0xfdb9) & (0x02020202u << (lane & 3));
                bits[h][1] = permute(w[2], w[3], 0xfdb9) & (0x02020202u << (lane & 3));
            }
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    // Twice the scale and one more, a byte for each group.
                    uint32_t v = bits[h][k];
                    v |= __shfl_xor_sync(~0u, v, 1);
                    v |= __shfl_xor_sync(~0u, v, 2);
                    odd[i][h][k] = v | 0x01010101u;
                }
            rd[i] = raw.d[i];
        }
        const auto pass = [&](int first, auto columns, auto after) {
            constexpr int C = decltype(columns)::value;
            const WideActs x(stage, lane, 4 * first);
            int total[TILES][C][4];
#pragma unroll
            for (int g = 0; g < 8; g++) {
                __syncwarp();
                int k[TILES][2];
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int h = 0; h < 2; h++) k[i][h] = permute(odd[i][h][g / 4], 0, 0x4440 + g % 4);
#pragma unroll
                for (int m = 0; m < C; m++) {
                    const uint2 v = x.q(m, g);
#pragma unroll
                    for (int i = 0; i < TILES; i++) {
                        int c[4];
                        mma_s8_new(c, a[g][i], v);
#pragma unroll
                        for (int h = 0; h < 4; h++) total[i][m][h] = (g ? total[i][m][h] : 0) + c[h] * k[i][h / 2];
                    }
                }
                after(g);
            }
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                const float da = __fmul_rn(low_half(rd[i]), 0.125f), db = __fmul_rn(high_half(rd[i]), 0.125f);
#pragma unroll
                for (int m = 0; m < C; m++) {
                    const float s = x.scale(m);
                    float(&to)[2] = sum[i][first + m];
                    to[0] = __fmaf_rn(s, __fmul_rn(da, join(total[i][m][0], total[i][m][1])), to[0]);
                    to[1] = __fmaf_rn(s, __fmul_rn(db, join(total[i][m][2], total[i][m][3])), to[1]);
                }
            }
        };
#pragma unroll
        for (int k = 16 / C - 1; k > 0; k--) {
            if (k == 8 / C - 1) middle();
            if (n > 4 * C * k + 2 * C) pass(C * k, Columns<C>(), [](int) {});
            else if (n > 4 * C * k) pass(C * k, Columns<C / 2>(), [](int) {});
        }
        pass(0, Columns<C>(), then);
    }
};

// The low or high half of v. Not for the compiler to look into: it would split all of them once and keep the halves in twice the registers.
__device__ __forceinline__ float half_of(uint32_t v, bool high) {
    float f;
    if (high) asm volatile("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "r"(v));
    else asm volatile("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(f) : "r"(v));
    return f;
}

struct WideQ8_0 {
    static constexpr bool MINS = false, SINGLE = true;
    static constexpr int C = ROOMY ? 4 : 2, AT = 8;
    struct Luts {};
    static __device__ __forceinline__ void fill(Luts*) {}
    struct Raw {
        uint4 q[4][TILES][2], d[TILES][2];
    };
    static __device__ __forceinline__ void load(Raw& r, const Tiled& w, const int (&at)[TILES], int lane, int j) {
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (j & 1) r.q[j / 2][i][h] = load16(w.qs + int64_t(at[i]) * 4096 + (j / 2 * 2 + h) * 512 + lane * 16);
                if (j == 7) r.d[i][h] = load16(w.side + (int64_t(at[i]) * 16 + h * 8 + lane / 4) * 16);
            }
    }
    // `single`: each quarter is one superblock, so that `sum` is that of all quarters. `zero` is 0, which the compiler does not know.
    template <class Middle, class Then>
    static __device__ __forceinline__ void add(const Raw& raw, const WideStage<false>& stage, const Luts*, int lane, int n, bool single,
                                               uint32_t zero, float (&sum)[TILES][16][2], Middle middle, Then then) {
        uint32_t a[8][TILES][4];
        uint4 rd[TILES][2];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
#pragma unroll
            for (int b = 0; b < 8; b++) {
                // The tensor cores take four neighbouring registers of two rows. Without an operation here, the compiler gathers them anew for
                // each use, with four moves.
                const uint4 q = raw.q[b / 2][i][0], r = raw.q[b / 2][i][1];
                a[b][i][0] = (b & 1 ? q.z : q.x) ^ zero, a[b][i][1] = (b & 1 ? r.z : r.x) ^ zero;
                a[b][i][2] = (b & 1 ? q.w : q.y) ^ zero, a[b][i][3] = (b & 1 ? r.w : r.y) ^ zero;
            }
            rd[i][0] = raw.d[i][0], rd[i][1] = raw.d[i][1];
        }
        const auto pass = [&](int first, auto columns, auto after) {
            constexpr int C = decltype(columns)::value;
            const WideActs x(stage, lane, 4 * first);
            float p[TILES][C][2];
#pragma unroll
            for (int b = 0; b < 8; b++) {
                __syncwarp();
                float d[TILES][2];
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const uint32_t both = (&rd[i][h].x)[b / 2];
                        d[i][h] = half_of(both, b & 1);
                    }
#pragma unroll
                for (int m = 0; m < C; m++) {
                    const uint2 v = x.q(m, b);
#pragma unroll
                    for (int i = 0; i < TILES; i++) {
                        int c[4];
                        mma_s8_new(c, a[b][i], v);
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            // The first product is rounded as if 0 were added; that its -0 stays -0 is lost in `sum`.
                            const float z = float(256 * c[2 * h] + c[2 * h + 1]);
                            p[i][m][h] = b == 0 ? __fmul_rn(d[i][h], z) : __fmaf_rn(d[i][h], z, p[i][m][h]);
                        }
                    }
                }
                // The next weights on their way while these are used: where there are registers for both.
                if (ROOMY) after(b);
            }
            if (!ROOMY)
#pragma unroll
                for (int b = 0; b < 8; b++) after(b);
#pragma unroll
            for (int m = 0; m < C; m++) {
                const float s = x.scale(m);
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        float& to = sum[i][first + m][h];
                        to = single ? __fadd_rn(to, __fmaf_rn(s, p[i][m][h], 0.0f)) : __fmaf_rn(s, p[i][m][h], to);
                    }
            }
        };
#pragma unroll
        for (int k = 16 / C - 1; k > 0; k--) {
            if (k == 8 / C - 1) middle();
            if (n > 4 * C * k) pass(C * k, Columns<C>(), [](int) {});
        }
        pass(0, Columns<C>(), then);
    }
};
