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

struct TiledQ8_0 {
    static constexpr int CHUNKS = 4, SIDE = 16, SIDE2 = 0;
    using Block = Q8_0;
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
    using Block = Q2_K;
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
    using Block = Q4_K;
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
    using Block = IQ2_XXS;
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
