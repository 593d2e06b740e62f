// Activations as the products on tensor cores take them: 16-bit numbers with one scale per 256, each number as two bytes (see tiled.cuh).
#pragma once
#include "common.cuh"

constexpr int ACT_Q = 512, ACT_M = 64, ACT_SUMS = 8;

// Split activations; [rows][superblocks] of each. Laid out as `ActsArg` in kernels/src/cuda/split.rs.
struct Acts {
    uint8_t* q;    // [step of the mma][high or low][lane t][8 bytes]: what a column feeds in a step is contiguous
    uint8_t* m;    // sums over 16, each as 16 * a + b: [high or low][t][a of groups 4t..4t+3, b of the same]
    int* sums;     // sums over 32 of 256 * hi + lo
    float* scale;
};

// Which eight elements of a superblock lane t feeds in step s: the s-th group of 32 in order, or the order in which Q2_K packs its bytes.
enum Order { ORDER_PLAIN = 0, ORDER_Q2_K = 1 };

// Splits superblock `at`; a warp, whose lane l has elements 8l..8l+7 in v.
__device__ __forceinline__ void split(const float (&v)[8], int order, int64_t at, const Acts& to) {
    const int lane = threadIdx.x & 31;
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(v[i]));
    top = warp_max(top);
    const float s = __fdiv_rn(top, 32512.0f), inverse = top > 0.0f ? __fdiv_rn(32512.0f, top) : 0.0f;
    uint2 hi = make_uint2(0, 0), lo = make_uint2(0, 0);
    int sum_hi = 0, sum_lo = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int n = max(-32512, min(32512, __float2int_rn(__fmul_rn(v[i], inverse))));
        const int h = (n + 128) >> 8, l = n - 256 * h;
        (i < 4 ? hi.x : hi.y) |= uint32_t(h & 255) << (8 * (i & 3));
        (i < 4 ? lo.x : lo.y) |= uint32_t(l & 255) << (8 * (i & 3));
        sum_hi += h;
        sum_lo += l;
    }
    // Elements 8 * lane .. are fed in this step from this lane; for Q2_K see the element's byte and bits in its block.
    const int step = order == ORDER_PLAIN ? lane / 4 : lane % 16 / 4 * 2 + lane % 2;
    const int feeder = order == ORDER_PLAIN ? lane % 4 : lane / 16 * 2 + lane % 4 / 2;
    *reinterpret_cast<uint2*>(to.q + at * ACT_Q + step * 64 + feeder * 8) = hi;
    *reinterpret_cast<uint2*>(to.q + at * ACT_Q + step * 64 + 32 + feeder * 8) = lo;
    sum_hi += __shfl_xor_sync(~0u, sum_hi, 1);
    sum_lo += __shfl_xor_sync(~0u, sum_lo, 1);
    // Group lane / 2 of 16; the even lane writes the sum of high bytes and the odd one that of low bytes.
    const int g = lane / 2, part = lane & 1, z = part ? sum_lo : sum_hi, a = z >> 4;
    uint8_t* m = to.m + at * ACT_M + part * 32 + (g / 4) * 8 + g % 4;
    m[0] = uint8_t(a);
    m[4] = uint8_t(z - 16 * a);
    int all = 256 * sum_hi + sum_lo;
    all += __shfl_xor_sync(~0u, all, 2);
    if ((lane & 3) == 0) to.sums[at * ACT_SUMS + lane / 4] = all;
    if (lane == 0) to.scale[at] = s;
}

// Eight consecutive floats; 16-byte aligned.
__device__ __forceinline__ void load8f(const float* p, float (&v)[8]) {
    const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

__device__ __forceinline__ void store8f(float* p, const float (&v)[8]) {
    reinterpret_cast<float4*>(p)[0] = make_float4(v[0], v[1], v[2], v[3]);
    reinterpret_cast<float4*>(p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}
