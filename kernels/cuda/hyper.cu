// Hyper-connections of any number of streams up to five. Four of them, in widths that are multiples of 8, have the kernels of streams.cu
// instead. CPU reference: kernels/src/cpu/hyper.rs, math/sinkhorn.rs.
#include "common.cuh"

// Copies x into every stream; blocks (row, part of the width).
extern "C" __global__ void hyper_start(const float* x, int width, int streams, float* state) {
    after_previous();
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= width) return;
    const float v = x[int64_t(blockIdx.x) * width + i];
    for (int s = 0; s < streams; s++) state[(int64_t(blockIdx.x) * streams + s) * width + i] = v;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Turns raw mixer outputs of one row into gates and the doubly stochastic mixer, in place; a warp, n <= 5. Lane i < n*n holds
// comb[i / n][i % n]; sums go over the lanes of a row or a column in index order.
__device__ __forceinline__ void mixing_weights(float* m, const float* scale, const float* base, int n, int iterations, float eps) {
    const int lane = threadIdx.x & 31;
    for (int i = lane; i < 2 * n; i += 32) {
        const float v = sigmoid(m[i] * scale[i < n ? 0 : 1] + base[i]);
        m[i] = i < n ? v + eps : 2.0f * v;
    }
    const bool mine = lane < n * n;
    const int row = lane / n * n, col = lane % n;
    float v = mine ? m[2 * n + lane] * scale[2] + base[2 * n + lane] : 0.0f;
    float top = -CUDART_INF_F;
    for (int k = 0; k < n; k++) top = fmaxf(top, __shfl_sync(~0u, v, (row + k) & 31));
    v = expf(v - top);
    float sum = 0.0f;
    for (int k = 0; k < n; k++) sum += __shfl_sync(~0u, v, (row + k) & 31);
    v = v / sum + eps;
    for (int it = 0; it < iterations; it++) {
        if (it > 0) {
            sum = 0.0f;
            for (int k = 0; k < n; k++) sum += __shfl_sync(~0u, v, (row + k) & 31);
            v /= sum + eps;
        }
        sum = 0.0f;
        for (int k = 0; k < n; k++) sum += __shfl_sync(~0u, v, (k * n + col) & 31);
        v /= sum + eps;
    }
    if (mine) m[2 * n + lane] = v;
}

// 1/x to the last bit or two: the exact function is a subroutine, and forty of them follow each other.
__device__ __forceinline__ float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}

// As above for four streams, a thread alone: sixteen numbers in registers, reciprocals of the sums.
__device__ __forceinline__ void mixing_weights_4(float* m, const float* scale, const float* base, int iterations, float eps) {
    for (int i = 0; i < 8; i++) {
        const float v = sigmoid(m[i] * scale[i / 4] + base[i]);
        m[i] = i < 4 ? v + eps : 2.0f * v;
    }
    float v[4][4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float top = -CUDART_INF_F, sum = 0.0f;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            v[r][c] = m[8 + 4 * r + c] * scale[2] + base[8 + 4 * r + c];
            top = fmaxf(top, v[r][c]);
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            v[r][c] = expf(v[r][c] - top);
            sum += v[r][c];
        }
#pragma unroll
        for (int c = 0; c < 4; c++) v[r][c] = v[r][c] / sum + eps;
    }
    for (int it = 0; it < iterations; it++) {
        if (it > 0) {
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const float f = reciprocal((v[r][0] + v[r][1]) + (v[r][2] + v[r][3]) + eps);
#pragma unroll
                for (int c = 0; c < 4; c++) v[r][c] *= f;
            }
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float f = reciprocal((v[0][c] + v[1][c]) + (v[2][c] + v[3][c]) + eps);
#pragma unroll
            for (int r = 0; r < 4; r++) v[r][c] *= f;
        }
    }
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) m[8 + 4 * r + c] = v[r][c];
}

// Sum of squares of a row, by a block of 256; n is a multiple of 4.
__device__ __forceinline__ float squares(const float* x, int n) {
    const float4* v = reinterpret_cast<const float4*>(x);
    float sum = 0.0f;
#pragma unroll 16
    for (int i = threadIdx.x; i < n / 4; i += 256) {
        const float4 a = v[i];
        sum = __fmaf_rn(a.x, a.x, __fmaf_rn(a.y, a.y, __fmaf_rn(a.z, a.z, __fmaf_rn(a.w, a.w, sum))));
    }
    return block_sum(sum);
}

extern "C" __global__ void __launch_bounds__(256) hyper_squares(const float* state, int n, float* out) {
    after_previous();
    const float s = squares(state + int64_t(blockIdx.x) * n, n);
    if (threadIdx.x == 0) out[blockIdx.x] = s;
}

// From the mixer's products with the state as it is (`raw`, dividing by the state's RMS here): x = sum_h pre[h] * S[h], and, unless it is
// the head's (outputs = n), the mixing weights to `mix`. Blocks (row, 256 of the width), and a last one per row for the mixing weights.
// `sums` has the rows' sums of squares; without it each block finds its row's.
extern "C" __global__ void __launch_bounds__(256) hyper_finish(const float* raw, const float* sums, const float* scale, const float* base, int n, int outputs, int iterations, float eps, float rms_eps, const float* state, int width, float* mix, float* x) {
    after_previous();
    __shared__ float m[64];
    const int r = blockIdx.x;
    const float* s = state + int64_t(r) * n * width;
    const float sq = sums ? sums[r] : squares(s, n * width);
    const float inverse = 1.0f / sqrtf(sq / float(n * width) + rms_eps);
    if (threadIdx.x < outputs) m[threadIdx.x] = raw[int64_t(r) * outputs + threadIdx.x] * inverse;
    __syncthreads();
    if (outputs > n && blockIdx.y + 1 == gridDim.y) {
        if (n == 4) {
            if (threadIdx.x == 0) mixing_weights_4(m, scale, base, iterations, eps);
        } else if (threadIdx.x < 32) {
            mixing_weights(m, scale, base, n, iterations, eps);
        }
        __syncthreads();
        if (threadIdx.x < outputs) mix[int64_t(r) * outputs + threadIdx.x] = m[threadIdx.x];
        return;
    }
    if (threadIdx.x < n) m[threadIdx.x] = sigmoid(m[threadIdx.x] * scale[0] + base[threadIdx.x]) + eps;
    __syncthreads();
    const int d = blockIdx.y * 256 + threadIdx.x;
    if (d >= width) return;
    float sum = 0.0f;
    for (int h = 0; h < n; h++) sum = __fmaf_rn(m[h], s[int64_t(h) * width + d], sum);
    x[int64_t(r) * width + d] = sum;
}

// S'[d] = post[d] * y + sum_s comb[s][d] * S[s], in place.
extern "C" __global__ void hyper_post(const float* mix, const float* y, int n, int width, float* state) {
    after_previous();
    const int i = blockIdx.y * blockDim.x + threadIdx.x, r = blockIdx.x;
    if (i >= width) return;
    const float* m = mix + r * (2 * n + n * n);
    float* s = state + int64_t(r) * n * width + i;
    const float in = y[int64_t(r) * width + i];
    float old[8];
#pragma unroll
    for (int k = 0; k < 8; k++) old[k] = k < n ? s[int64_t(k) * width] : 0.0f;
    for (int d = 0; d < n; d++) {
        float v = __fmul_rn(m[n + d], in);
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (k < n) v = __fmaf_rn(m[2 * n + k * n + d], old[k], v);
        s[int64_t(d) * width] = v;
    }
}
