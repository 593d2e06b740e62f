// Gates and mixing weights of a hyper-connection with four streams. CPU reference: kernels/src/math/sinkhorn.rs.
//
// Operations are spelt out where rounding could differ between kernels: a row's weights have the same bits wherever they are computed.
#pragma once
#include "common.cuh"

constexpr int STREAMS = 4;
constexpr int MIXES = 2 * STREAMS + STREAMS * STREAMS;

// 1/x with an error of a unit in the last place, for x that is far from zero and from infinity.
__device__ __forceinline__ float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ float sigmoid(float x) { return reciprocal(__fadd_rn(1.0f, expf(-x))); }

__device__ __forceinline__ float sum4(float a, float b, float c, float d) { return __fadd_rn(__fadd_rn(a, b), __fadd_rn(c, d)); }

// Makes four rows of four doubly stochastic: columns first, then rows and columns in turn. A thread alone; every round waits for the
// one before it, so that its latency is all that counts.
__device__ __forceinline__ void sinkhorn(float (&v)[STREAMS][STREAMS], int iterations, float eps) {
#pragma unroll 1
    for (int it = 0; it < iterations; it++) {
        if (it > 0) {
#pragma unroll
            for (int r = 0; r < STREAMS; r++) {
                const float f = reciprocal(__fadd_rn(sum4(v[r][0], v[r][1], v[r][2], v[r][3]), eps));
#pragma unroll
                for (int c = 0; c < STREAMS; c++) v[r][c] = __fmul_rn(v[r][c], f);
            }
        }
#pragma unroll
        for (int c = 0; c < STREAMS; c++) {
            const float f = reciprocal(__fadd_rn(sum4(v[0][c], v[1][c], v[2][c], v[3][c]), eps));
#pragma unroll
            for (int r = 0; r < STREAMS; r++) v[r][c] = __fmul_rn(v[r][c], f);
        }
    }
}

// From the products with the normalised state (lane l has the l-th, scaled and based already), a warp: pre and post in lanes 0 to 7.
__device__ __forceinline__ float gates(float v, float eps) {
    const float g = sigmoid(v);
    return (threadIdx.x & 31) < STREAMS ? __fadd_rn(g, eps) : __fmul_rn(2.0f, g);
}

// And the softmax of each row of comb, from which the rounds begin, in lanes 8 to 23.
__device__ __forceinline__ float softmax(float v, float eps) {
    float top = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float e = expf(__fsub_rn(v, top));
    float sum = __fadd_rn(e, __shfl_xor_sync(~0u, e, 1));
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
    return __fmaf_rn(e, reciprocal(sum), eps);
}

// The weights of a row to `mix` (pre, post, comb); a warp, with what `gates` returned and what it took. Without iterations, comb is the
// softmax.
__device__ __forceinline__ void mixing_weights(float gate, float raw, int iterations, float eps, float* mix) {
    const int lane = threadIdx.x & 31;
    const float soft = softmax(raw, eps);
    if (iterations == 0) {
        if (lane < MIXES) mix[lane] = lane < 2 * STREAMS ? gate : soft;
        return;
    }
    float v[STREAMS][STREAMS];
#pragma unroll
    for (int i = 0; i < STREAMS * STREAMS; i++) v[i / STREAMS][i % STREAMS] = __shfl_sync(~0u, soft, 2 * STREAMS + i);
    if (lane < 2 * STREAMS) mix[lane] = gate;
    sinkhorn(v, iterations, eps);
    if (lane == 0)
#pragma unroll
        for (int r = 0; r < STREAMS; r++)
            *reinterpret_cast<float4*>(mix + 2 * STREAMS + r * STREAMS) = make_float4(v[r][0], v[r][1], v[r][2], v[r][3]);
}
