// Decoders of the GGUF block types, one element at a time. kernels/src/quant is the reference, bit for bit: the same f32
// operations in the same order, never fused.
//
// These serve every type correctly; the types that carry large models have kernels of their own for speed.
#pragma once
#include "common.cuh"
#include "grids.h"

__device__ __forceinline__ uint32_t u16_at(const uint8_t* p) { return *reinterpret_cast<const uint16_t*>(p); }
__device__ __forceinline__ uint32_t u32_at(const uint8_t* p) { return u16_at(p) | (u16_at(p + 2) << 16); }
__device__ __forceinline__ float scaled(float d, int q) { return __fmul_rn(d, float(q)); }

// Signs of eight elements from a 7-bit index; the eighth bit makes the number of minus signs even.
__device__ __forceinline__ uint32_t even_signs(uint32_t i) {
    i &= 127;
    return i | ((__popc(i) & 1) << 7);
}

struct F32 {
    static constexpr int ELEMS = 1, BYTES = 4;
    static __device__ __forceinline__ float get(const uint8_t* b, int) { return *reinterpret_cast<const float*>(b); }
};
struct F16 {
    static constexpr int ELEMS = 1, BYTES = 2;
    static __device__ __forceinline__ float get(const uint8_t* b, int) { return half_at(b); }
};
struct BF16 {
    static constexpr int ELEMS = 1, BYTES = 2;
    static __device__ __forceinline__ float get(const uint8_t* b, int) { return __uint_as_float(u16_at(b) << 16); }
};

__device__ __forceinline__ int nibble32(const uint8_t* qs, int j) { return j < 16 ? qs[j] & 15 : qs[j - 16] >> 4; }

struct Q4_0 {
    static constexpr int ELEMS = 32, BYTES = 18;
    static __device__ __forceinline__ float get(const uint8_t* b, int j) { return scaled(half_at(b), nibble32(b + 2, j) - 8); }
};
struct Q4_1 {
    static constexpr int ELEMS = 32, BYTES = 20;
    static __device__ __forceinline__ float get(const uint8_t* b, int j) {
        return __fadd_rn(scaled(half_at(b), nibble32(b + 4, j)), half_at(b + 2));
    }
};
struct Q5_0 {
    static constexpr int ELEMS = 32, BYTES = 22;
    static __device__ __forceinline__ float get(const uint8_t* b, int j) {
        return scaled(half_at(b), (nibble32(b + 6, j) | (((u32_at(b + 2) >> j) & 1) << 4)) - 16);
    }
};
struct Q5_1 {
    static constexpr int ELEMS = 32, BYTES = 24;
    static __device__ __forceinline__ float get(const uint8_t* b, int j) {
        return __fadd_rn(scaled(half_at(b), nibble32(b + 8, j) | (((u32_at(b + 4) >> j) & 1) << 4)), half_at(b + 2));
    }
};
struct Q8_0 {
    static constexpr int ELEMS = 32, BYTES = 34;
    static __device__ __forceinline__ float get(const uint8_t* b, int j) { return scaled(half_at(b), int8_t(b[2 + j])); }
};

struct Q2_K {
    static constexpr int ELEMS = 256, BYTES = 84;
    static __device__ __forceinline__ float get(const uint8_t* b, int j) {
        const int g = j / 16, sc = b[g];
        const int q = (b[16 + 32 * (g / 8) + 16 * (g & 1) + j % 16] >> (2 * (g % 8 / 2))) & 3;
        return __fsub_rn(__fmul_rn(scaled(half_at(b + 80), sc & 15), float(q)), scaled(half_at(b + 82), sc >> 4));
    }
};
struct Q3_K {
    static constexpr int ELEMS = 256, BYTES = 110;
    static __device__ __forceinline__ float get(const uint8_t* b, int j) {
        const int g = j / 16, at = 16 * (g & 1) + j % 16;
        const uint8_t* p = b + 96;
        const int sc = (((p[g % 8] >> (4 * (g / 8))) & 15) | (((p[8 + g % 4] >> (2 * (g / 4))) & 3) << 4)) - 32;
        const int low = (b[32 + 32 * (g / 8) + at] >> (2 * (g % 8 / 2))) & 3;
        return __fmul_rn(scaled(half_at(b + 108), sc), float(low - (((b[at] >> (g / 2)) & 1) ? 0 : 4)));
    }
};

// The 6-bit scale and minimum of group g of a Q4_K or Q5_K block.
__device__ __forceinline__ void scale_min(const uint8_t* p, int g, int& s, int& m) {
    if (g < 4) {
        s = p[g] & 63;
        m = p[g + 4] & 63;
    } else {
        s = (p[g + 4] & 15) | ((p[g - 4] >> 6) << 4);
        m = (p[g + 4] >> 4) | ((p[g] >> 6) << 4);
    }
}

struct Q4_K {
    static constexpr int ELEMS = 256, BYTES = 144;
    static __device__ __forceinline__ float get(const uint8_t* b, int j) {
        const int g = j / 32;
        int s, m;
        scale_min(b + 4, g, s, m);
        const int q = (b[16 + 32 * (g / 2) + j % 32] >> (4 * (g & 1))) & 15;
        return __fsub_rn(__fmul_rn(scaled(half_at(b), s), float(q)), scaled(half_at(b + 2), m));
    }
};
struct Q5_K {
    static constexpr int ELEMS = 256, BYTES = 176;
    static __device__ __forceinline__ float get(const uint8_t* b, int j) {
        const int g = j / 32;
        int s, m;
        scale_min(b + 4, g, s, m);
        const int q = ((b[48 + 32 * (g / 2) + j % 32] >> (4 * (g & 1))) & 15) | (((b[16 + j % 32] >> g) & 1) << 4);
        return __fsub_rn(__fmul_rn(scaled(half_at(b), s), float(q)), scaled(half_at(b + 2), m));
    }
};
struct Q6_K {
    static constexpr int ELEMS = 256, BYTES = 210;
    static __device__ __forceinline__ float get(const uint8_t* b, int j) {
        const int g = j / 16, h = g / 8, s = g % 8 / 2, at = 16 * (g & 1) + j % 16;
        const int low = (b[64 * h + 32 * (s & 1) + at] >> (4 * (s / 2))) & 15;
        const int high = (b[128 + 32 * h + at] >> (2 * s)) & 3;
        return __fmul_rn(scaled(half_at(b + 208), int8_t(b[192 + g])), float((low | (high << 4)) - 32));
    }
};

__device__ __forceinline__ float signed_entry(float scale, uint64_t entry, uint32_t signs, int k) {
    const float v = __fmul_rn(scale, float(int8_t(entry >> (8 * k))));
    return (signs >> k) & 1 ? -v : v;
}

struct IQ2_XXS {
    static constexpr int ELEMS = 256, BYTES = 66;
    static __device__ __forceinline__ float get(const uint8_t* b, int j) {
        const uint8_t* p = b + 2 + 8 * (j / 32);
        const int k = j % 32 / 8;
        const uint32_t word = u32_at(p + 4);
        const float scale = __fmul_rn(__fmul_rn(half_at(b), 0.5f + float(word >> 28)), 0.25f);
        return signed_entry(scale, IQ2_XXS_GRID[p[k]], even_signs(word >> (7 * k)), j % 8);
    }
};
struct IQ2_XS {
    static constexpr int ELEMS = 256, BYTES = 74;
    static __device__ __forceinline__ float get(const uint8_t* b, int j) {
        const int g = j / 16;
        const float sc = 0.5f + float((b[66 + g / 2] >> (4 * (g & 1))) & 15);
        const uint32_t q = u16_at(b + 2 + 2 * (j / 8));
        return signed_entry(__fmul_rn(__fmul_rn(half_at(b), sc), 0.25f), IQ2_XS_GRID[q & 511], even_signs(q >> 9), j % 8);
    }
};
struct IQ3_XXS {
    static constexpr int ELEMS = 256, BYTES = 98;
    static __device__ __forceinline__ float get(const uint8_t* b, int j) {
        const int g = j / 32, k = j % 32 / 4;
        const uint32_t word = u32_at(b + 66 + 4 * g);
        const float scale = __fmul_rn(__fmul_rn(half_at(b), 0.5f + float(word >> 28)), 0.5f);
        const uint32_t signs = even_signs(word >> (7 * (k / 2))) >> (4 * (k & 1));
        return signed_entry(scale, IQ3_XXS_GRID[b[2 + 8 * g + k]], signs, j % 4);
    }
};
struct IQ4_NL {
    static constexpr int ELEMS = 32, BYTES = 18;
    static __device__ __forceinline__ float get(const uint8_t* b, int j) { return scaled(half_at(b), IQ4_GRID[nibble32(b + 2, j)]); }
};
struct IQ4_XS {
    static constexpr int ELEMS = 256, BYTES = 136;
    static __device__ __forceinline__ float get(const uint8_t* b, int j) {
        const int g = j / 32;
        const int sc = (((b[4 + g / 2] >> (4 * (g & 1))) & 15) | (((u16_at(b + 2) >> (2 * g)) & 3) << 4)) - 32;
        return __fmul_rn(scaled(half_at(b), sc), float(IQ4_GRID[nibble32(b + 8 + 16 * g, j % 32)]));
    }
};

__device__ __forceinline__ float shifted(float scale, int index, int k, bool minus) {
    return __fmul_rn(scale, float(int8_t(IQ1_GRID[index] >> (8 * k))) + (minus ? -0.125f : 0.125f));
}

struct IQ1_S {
    static constexpr int ELEMS = 256, BYTES = 50;
    static __device__ __forceinline__ float get(const uint8_t* b, int j) {
        const int g = j / 32, k = j % 32 / 8;
        const uint32_t word = u16_at(b + 34 + 2 * g);
        const int index = b[2 + 4 * g + k] | (((word >> (3 * k)) & 7) << 8);
        return shifted(scaled(half_at(b), 2 * ((word >> 12) & 7) + 1), index, j % 8, word & 0x8000);
    }
};
struct IQ1_M {
    static constexpr int ELEMS = 256, BYTES = 56;
    static __device__ __forceinline__ float get(const uint8_t* b, int j) {
        uint32_t bits = 0;
        for (int i = 0; i < 4; i++) bits |= (u16_at(b + 48 + 2 * i) >> 12) << (4 * i);
        const int g = j / 16, k = j % 16 / 8, high = b[32 + g] >> (4 * k);
        const int sc = 2 * ((u16_at(b + 48 + 2 * (g / 4)) >> (3 * (g % 4))) & 7) + 1;
        const int index = b[2 * g + k] | ((high & 7) << 8);
        return shifted(scaled(__half2float(__ushort_as_half(bits)), sc), index, j % 8, high & 8);
    }
};

#define FOR_EACH_TYPE(X) \
    X(F32) X(F16) X(BF16) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) \
    X(IQ2_XXS) X(IQ2_XS) X(IQ3_XXS) X(IQ4_NL) X(IQ4_XS) X(IQ1_S) X(IQ1_M)
