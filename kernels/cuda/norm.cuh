// RMS norm of a row that a block has in registers, eight columns a thread.
#pragma once
#include "split.cuh"

// Sum over the block's first `warps` warps, which alone call it; all their threads get it. `part` is one float a warp.
__device__ __forceinline__ float first_warps_sum(float v, int warps, float* part) {
    const int lane = threadIdx.x & 31;
    v = warp_sum(v);
    if (lane == 0) part[threadIdx.x >> 5] = v;
    asm volatile("bar.sync 1, %0;" ::"r"(warps * 32) : "memory");
    return warp_sum(lane < warps ? part[lane] : 0.0f);
}

// Threads of whole warps have columns 8 * threadIdx.x .. of a row in x (zeros beyond `width`): divides by the RMS, times `weight`, to
// `out`; and to `acts`, where there are any, as superblock `superblock` + warp.
__device__ __forceinline__ void norm_row(float (&x)[8], const float (&weight)[8], int width, int warps, float eps, float* part, float* out, const Acts& acts, int64_t superblock) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum = __fmaf_rn(x[i], x[i], sum);
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(first_warps_sum(sum, warps, part), float(width)), eps)));
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = __fmul_rn(__fmul_rn(x[i], scale), weight[i]);
    const int column = threadIdx.x * 8;
    if (column < width) store8f(out + column, x);
    if (acts.q) split(x, ORDER_PLAIN, superblock + (threadIdx.x >> 5), acts);
}
