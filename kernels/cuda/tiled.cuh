// Weights in tiles of 16 rows, as tensor cores take them, and activations of 16 bits in two bytes. Byte-neutral: a tile has the bytes
// that its blocks have in a GGUF, in another order.
//
// For each tile of 16 rows and each superblock of 256 columns, `qs` has CHUNKS * 2 * 32 * 16 bytes: [chunk][rows 0-7 or 8-15][lane][16],
// where lane 4 * g + t has what row g (or g + 8) feeds to the tensor cores from that lane. `side` and `side2` have scales per row.
//
// The product is mma.m16n8k32 on bytes with exact 32-bit sums. An activation x is scale * (256 * hi + lo), one scale per 256: its two
// bytes are two columns of the mma, so eight columns are four activation rows. Sums become floats once per superblock (once per 32
// for Q8_0), in order of k within a quarter of the row, and the four quarters are added in order; none of this depends on how many rows
// are computed at once.
#pragma once
#include "quant.cuh"
#include "split.cuh"

struct Tiled {
    const uint8_t* qs;
    const uint8_t* side;
    const uint8_t* side2;
};

__device__ __forceinline__ void mma_s8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint2 b) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
}

__device__ __forceinline__ void mma_u8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint2 b) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
}

__device__ __forceinline__ uint4 load16(const uint8_t* p) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ uint32_t load4(const uint8_t* p) { return __ldg(reinterpret_cast<const uint32_t*>(p)); }
__device__ __forceinline__ uint2 load8(const uint8_t* p) { return __ldg(reinterpret_cast<const uint2*>(p)); }
__device__ __forceinline__ float low_half(uint32_t v) { return __half2float(__ushort_as_half(v & 0xffff)); }
__device__ __forceinline__ float high_half(uint32_t v) { return __half2float(__ushort_as_half(v >> 16)); }

// 256 * hi + lo of a pair of sums whose high one may not fit 24 bits.
__device__ __forceinline__ float join(int hi, int lo) { return __fmaf_rn(256.0f, float(hi), float(lo)); }

// Work of a product: activation rows of one matrix. Without a list of items, item i is up to so many rows (4, 16 or 64, as the kernel has
// them) of matrix i % matrices from row i / matrices times that on, and row j of matrix k is row j * matrices + k of both sides. Laid
// out as `ItemsArg` in kernels/src/cuda/quantized.rs.
struct Items {
    const int4* list;     // matrix, first entry of `order`, entries; or null
    const int* count;     // items in the list
    const int* order;     // output rows; the input row is the output row / per_row
    int per_row;
    int matrices;
    int rows;             // per matrix, without a list
    int known;            // whether the list was made before the kernel before this one, so that it need not be waited for
};

// Parts of a row whose sums are made one by one.
constexpr int SPLIT = 4;

__device__ __forceinline__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}

// Tables of a type that has some: narrow.cu and wide.cuh have their own.
template <int WIDTH>
struct Luts;

struct TiledQ8_0 {
    static constexpr int CHUNKS = 4, SIDE = 16, SIDE2 = 0;
    static constexpr int WANTS = 0;         // of activations: nothing more, sums over 16, or sums over 32
    static constexpr bool LUT = false;
    static constexpr bool MINS = false;     // whether it takes sums of activations over 16
    using Block = Q8_0;
    struct Frag {
        uint4 q[4][2], d[2];
    };
    static __device__ __forceinline__ void load(Frag& f, const Tiled& w, int at, int lane) {
        const uint8_t* p = w.qs + int64_t(at) * (CHUNKS * 1024) + lane * 16;
#pragma unroll
        for (int c = 0; c < 4; c++)
#pragma unroll
            for (int h = 0; h < 2; h++) f.q[c][h] = load16(p + (c * 2 + h) * 512);
#pragma unroll
        for (int h = 0; h < 2; h++) f.d[h] = *reinterpret_cast<const uint4*>(w.side + (int64_t(at) * 16 + h * 8 + lane / 4) * 16);
    }
    template <int NT, class L, class X>
    static __device__ __forceinline__ void add(const Frag& f, const L*, const X& x, int lane, float (&sum)[NT][2]) {
        float p[NT][2];
#pragma unroll
        for (int n = 0; n < NT; n++) p[n][0] = p[n][1] = 0.0f;
#pragma unroll
        for (int b = 0; b < 8; b++) {
            x.step(b);
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
    static __device__ __forceinline__ void pack(const uint8_t* row, int t, uint4 (&out)[CHUNKS], uint4& side, uint32_t&) {
        for (int c = 0; c < 4; c++)
            for (int i = 0; i < 16; i++) reinterpret_cast<uint8_t*>(&out[c])[i] = row[(2 * c + i / 8) * 34 + 2 + 8 * t + i % 8];
        for (int b = 0; b < 8; b++) reinterpret_cast<uint16_t*>(&side)[b] = u16_at(row + b * 34);
    }
    // Element e of a row's superblock, whose lanes' chunks `q` gives.
    template <class F>
    static __device__ __forceinline__ float element(F q, const uint8_t* side, const uint8_t*, int e) {
        const int b = e / 32, i = e % 32;
        return scaled(half_at(side + 2 * b), int8_t(q(b / 2, i / 8, (b & 1) * 8 + i % 8)));
    }
};

struct TiledQ2_K {
    static constexpr int CHUNKS = 1, SIDE = 16, SIDE2 = 4;
    static constexpr int WANTS = 1;         // of activations: nothing more, sums over 16, or sums over 32
    static constexpr bool LUT = false;
    static constexpr bool MINS = true;      // whether it takes sums of activations over 16
    using Block = Q2_K;
    struct Frag {
        uint4 q[2];
        uint2 s[2];
        uint32_t m[2], d[2];
    };
    static __device__ __forceinline__ void load(Frag& f, const Tiled& w, int at, int lane) {
        const int t = lane & 3;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int64_t row = int64_t(at) * 16 + h * 8 + lane / 4;
            f.q[h] = load16(w.qs + int64_t(at) * 1024 + h * 512 + lane * 16);
            f.s[h] = load8(w.side + row * 16 + (t >> 1) * 8);
            f.m[h] = load4(w.side + row * 16 + t * 4);
            f.d[h] = load4(w.side2 + row * 4);
        }
    }
    template <int NT, class L, class X>
    static __device__ __forceinline__ void add(const Frag& f, const L*, const X& x, int lane, float (&sum)[NT][2]) {
        const int sub = lane & 1;
        int total[NT][4], mins[NT][4];
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) total[n][i] = mins[n][i] = 0;
#pragma unroll
        for (int s = 0; s < 4; s++) {
            // Group 8 * (t / 2) + 2 * s + sub of each row: the quants times their scale fit a byte (3 * 15).
            const uint32_t sa = ((s < 2 ? f.s[0].x : f.s[0].y) >> (16 * (s & 1) + 8 * sub)) & 15;
            const uint32_t sc = ((s < 2 ? f.s[1].x : f.s[1].y) >> (16 * (s & 1) + 8 * sub)) & 15;
#pragma unroll
            for (int u = 0; u < 2; u++) {
                x.step(2 * s + u);
                const uint32_t a0 = (((u ? f.q[0].z : f.q[0].x) >> (2 * s)) & 0x03030303u) * sa;
                const uint32_t a2 = (((u ? f.q[0].w : f.q[0].y) >> (2 * s)) & 0x03030303u) * sa;
                const uint32_t a1 = (((u ? f.q[1].z : f.q[1].x) >> (2 * s)) & 0x03030303u) * sc;
                const uint32_t a3 = (((u ? f.q[1].w : f.q[1].y) >> (2 * s)) & 0x03030303u) * sc;
#pragma unroll
                for (int n = 0; n < NT; n++)
                    mma_u8(total[n], a0, a1, a2, a3, x.q(n, 2 * s + u));
            }
        }
        const float da = low_half(f.d[0]), ma = high_half(f.d[0]), db = low_half(f.d[1]), mb = high_half(f.d[1]);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint2 v = x.m(n);
            mma_u8(mins[n], f.m[0] & 0xf0f0f0f0u, f.m[1] & 0xf0f0f0f0u, (f.m[0] >> 4) & 0x0f0f0f0fu, (f.m[1] >> 4) & 0x0f0f0f0fu, v);
            const float s = x.scale(n);
            const float ta = __fmul_rn(da, float(256 * total[n][0] + total[n][1])), tb = __fmul_rn(db, float(256 * total[n][2] + total[n][3]));
            sum[n][0] = __fmaf_rn(s, __fmaf_rn(-ma, float(256 * mins[n][0] + mins[n][1]), ta), sum[n][0]);
            sum[n][1] = __fmaf_rn(s, __fmaf_rn(-mb, float(256 * mins[n][2] + mins[n][3]), tb), sum[n][1]);
        }
    }
    static __device__ __forceinline__ void pack(const uint8_t* row, int t, uint4 (&out)[CHUNKS], uint4& side, uint32_t& side2) {
        for (int i = 0; i < 16; i++) reinterpret_cast<uint8_t*>(&out[0])[i] = row[16 + 16 * t + i];
        for (int i = 0; i < 16; i++) reinterpret_cast<uint8_t*>(&side)[i] = row[i];
        side2 = u32_at(row + 80);
    }
    template <class F>
    static __device__ __forceinline__ float element(F q, const uint8_t* side, const uint8_t* side2, int e) {
        const int g = e / 16, at = 32 * (g / 8) + 16 * (g & 1) + e % 16, sc = side[g];
        const int v = (q(0, at / 16, at % 16) >> (2 * (g % 8 / 2))) & 3;
        return __fsub_rn(__fmul_rn(scaled(half_at(side2), sc & 15), float(v)), scaled(half_at(side2 + 2), sc >> 4));
    }
};

struct TiledQ4_K {
    static constexpr int CHUNKS = 2, SIDE = 16, SIDE2 = 0;
    static constexpr int WANTS = 2;         // of activations: nothing more, sums over 16, or sums over 32
    static constexpr bool LUT = false;
    using Block = Q4_K;
    struct Frag {
        uint4 q[2][2], s[2];
    };
    static __device__ __forceinline__ void load(Frag& f, const Tiled& w, int at, int lane) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int c = 0; c < 2; c++) f.q[c][h] = load16(w.qs + int64_t(at) * 2048 + (c * 2 + h) * 512 + lane * 16);
            f.s[h] = *reinterpret_cast<const uint4*>(w.side + (int64_t(at) * 16 + h * 8 + lane / 4) * 16);
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
    template <int NT, class L, class X>
    static __device__ __forceinline__ void add(const Frag& f, const L*, const X& x, int lane, float (&sum)[NT][2]) {
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
            x.step(g);
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
    static __device__ __forceinline__ void pack(const uint8_t* row, int t, uint4 (&out)[CHUNKS], uint4& side, uint32_t&) {
        for (int c = 0; c < 2; c++)
            for (int i = 0; i < 16; i++) reinterpret_cast<uint8_t*>(&out[c])[i] = row[16 + 32 * (2 * c + i / 8) + 8 * t + i % 8];
        for (int i = 0; i < 16; i++) reinterpret_cast<uint8_t*>(&side)[i] = row[i];
    }
    template <class F>
    static __device__ __forceinline__ float element(F q, const uint8_t* side, const uint8_t*, int e) {
        const int g = e / 32, h = g / 2, j = e % 32;
        int s, m;
        scale_min(side + 4, g, s, m);
        const int v = (q(h / 2, j / 8, (h & 1) * 8 + j % 8) >> (4 * (g & 1))) & 15;
        return __fsub_rn(__fmul_rn(scaled(half_at(side), s), float(v)), scaled(half_at(side + 2), m));
    }
};

// A lane's 16 bytes are eight 16-bit values, one for each group of 32: codebook index, 7 sign bits, and bit t of the group's scale.
struct TiledIQ2_XXS {
    static constexpr int CHUNKS = 1, SIDE = 0, SIDE2 = 2;
    static constexpr int WANTS = 0;         // of activations: nothing more, sums over 16, or sums over 32
    static constexpr bool LUT = true;
    static constexpr bool MINS = false;
    using Block = IQ2_XXS;
    struct Frag {
        uint4 q[2];
        uint32_t d;  // both rows' scales
    };
    static __device__ __forceinline__ void load(Frag& f, const Tiled& w, int at, int lane) {
#pragma unroll
        for (int h = 0; h < 2; h++) f.q[h] = load16(w.qs + int64_t(at) * 1024 + h * 512 + lane * 16);
        const uint8_t* d = w.side2 + (int64_t(at) * 16 + lane / 4) * 2;
        f.d = u16_at(d) | (u16_at(d + 16) << 16);
    }
    // Scales of a row's eight groups, nibble g for group g.
    static __device__ __forceinline__ uint32_t scales(const uint4& q, int t) {
        const uint32_t w[4] = {q.x, q.y, q.z, q.w};
        uint32_t v = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) v |= (((w[k] >> 15) & 1) | ((w[k] >> 27) & 16)) << (8 * k);
        v <<= t;
        v |= __shfl_xor_sync(~0u, v, 1);
        v |= __shfl_xor_sync(~0u, v, 2);
        return v;
    }
    static __device__ __forceinline__ void pack(const uint8_t* row, int t, uint4 (&out)[CHUNKS], uint4&, uint32_t& side2) {
        for (int g = 0; g < 8; g++) {
            const uint8_t* p = row + 2 + 8 * g;
            const uint32_t word = u32_at(p + 4);
            reinterpret_cast<uint16_t*>(&out[0])[g] = p[t] | (((word >> (7 * t)) & 127) << 8) | (((word >> (28 + t)) & 1) << 15);
        }
        side2 = u16_at(row);
    }
    template <class F>
    static __device__ __forceinline__ float element(F q, const uint8_t*, const uint8_t* side2, int e) {
        const int g = e / 32, t = e % 32 / 8;
        int sc = 0;
        for (int i = 0; i < 4; i++) sc |= (q(0, i, 2 * g + 1) >> 7) << i;
        const float scale = __fmul_rn(__fmul_rn(half_at(side2), 0.5f + float(sc)), 0.25f);
        return signed_entry(scale, IQ2_XXS_GRID[q(0, t, 2 * g)], even_signs(q(0, t, 2 * g + 1)), e % 8);
    }
};

#define FOR_EACH_TILED(X) X(Q8_0) X(Q2_K) X(Q4_K) X(IQ2_XXS)
