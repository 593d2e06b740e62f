// What products on the tensor cores do by the type of their weights (dense.cu): how an activation is cut into parts of that type, and the
// step that multiplies them. Products are exact, and tensor cores add them up in f32: they cut where a sum of floats would round (seen: an
// error of 7e-7 of a result, where a sum in f32 has 1e-7).
#pragma once
#include "common.cuh"

#define MMA(TYPE, c, a0, a1, a2, a3, b0, b1)                                                                                \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                                    \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))

__device__ __forceinline__ float most8(const float4& a, const float4& b) {
    return fmaxf(fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(a.z), fabsf(a.w))), fmaxf(fmaxf(fabsf(b.x), fabsf(b.y)), fmaxf(fabsf(b.z), fabsf(b.w))));
}

// An activation is scale * (high + low), two halves: scale is a power of two per row and chunk of 256 columns, which brings the chunk's
// greatest value to 2^14..2^15, so that both parts have 22 bits of it, and of what is 2^-25 of the greatest still some.
struct F16 {
    static constexpr int PARTS = 2;

    // The scale of a chunk of which a lane has eight columns, and one over it. For finite values.
    static __device__ __forceinline__ void scales(const float4& a, const float4& b, float& up, float& down) {
        const int k = min(14 - (int(__float_as_uint(warp_max(most8(a, b))) >> 23) - 127), 126);
        up = __uint_as_float(uint32_t(127 + k) << 23);
        down = __uint_as_float(uint32_t(127 - k) << 23);
    }

    // Parts of two neighbours.
    static __device__ __forceinline__ void split(float a, float b, float up, uint32_t (&part)[PARTS]) {
        const float u = __fmul_rn(a, up), v = __fmul_rn(b, up);
        const __half2 high = __floats2half2_rn(u, v);
        const float2 f = __half22float2(high);
        const __half2 low = __floats2half2_rn(__fsub_rn(u, f.x), __fsub_rn(v, f.y));
        part[0] = reinterpret_cast<const uint32_t&>(high);
        part[1] = reinterpret_cast<const uint32_t&>(low);
    }

    static __device__ __forceinline__ void mma(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) { MMA("f16", c, a.x, a.y, a.z, a.w, b0, b1); }
};

// An activation is the sum of three numbers of eight bits each, cut off one after the other: exactly. They have the exponents of floats.
struct BF16 {
    static constexpr int PARTS = 3;

    static __device__ __forceinline__ void scales(const float4&, const float4&, float& up, float& down) { up = down = 1.0f; }

    static __device__ __forceinline__ void split(float a, float b, float, uint32_t (&part)[PARTS]) {
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            const uint32_t u = __float_as_uint(a), v = __float_as_uint(b);
            part[i] = __byte_perm(u, v, 0x7632);
            a = __fsub_rn(a, __uint_as_float(u & 0xffff0000u));
            b = __fsub_rn(b, __uint_as_float(v & 0xffff0000u));
        }
    }

    static __device__ __forceinline__ void mma(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) { MMA("bf16", c, a.x, a.y, a.z, a.w, b0, b1); }
};

// Parts of eight neighbours.
template <class T>
__device__ __forceinline__ void split8(const float4& a, const float4& b, float up, uint4 (&part)[T::PARTS]) {
    uint32_t p[4][T::PARTS];
    T::split(a.x, a.y, up, p[0]);
    T::split(a.z, a.w, up, p[1]);
    T::split(b.x, b.y, up, p[2]);
    T::split(b.z, b.w, up, p[3]);
#pragma unroll
    for (int i = 0; i < T::PARTS; i++) part[i] = make_uint4(p[0][i], p[1][i], p[2][i], p[3][i]);
}
