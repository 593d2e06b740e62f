// Hyper-connections. CPU reference: kernels/src/cpu/hyper.rs, math/sinkhorn.rs.
#include "common.cuh"

// Copies x into every stream; a block per row.
extern "C" __global__ void hyper_start(const float* x, int width, int streams, float* state) {
    const float* in = x + int64_t(blockIdx.x) * width;
    float* out = state + int64_t(blockIdx.x) * width * streams;
    for (int i = threadIdx.x; i < width * streams; i += blockDim.x) out[i] = in[i % width];
}

// out = x / rms(x), without a weight; a block per row.
extern "C" __global__ void hyper_norm(const float* x, float eps, int width, float* out) {
    const float* in = x + int64_t(blockIdx.x) * width;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum = __fmaf_rn(in[i], in[i], sum);
    const float scale = 1.0f / sqrtf(block_sum(sum) / float(width) + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[int64_t(blockIdx.x) * width + i] = in[i] * scale;
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

// Mixing weights of every row; a warp per row.
extern "C" __global__ void hyper_weights(float* mix, const float* scale, const float* base, int n, int iterations, float eps) {
    mixing_weights(mix + int64_t(blockIdx.x) * (2 * n + n * n), scale, base, n, iterations, eps);
}

// Gates of the head: sigmoid(mix * scale + base) + eps, in place.
extern "C" __global__ void hyper_gates(float* mix, const float* scale, const float* base, int n, float eps, int total) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < total) mix[i] = sigmoid(mix[i] * scale[0] + base[i % n]) + eps;
}

// x = sum_h gate[h] * S[h]; gates lie `stride` apart per row. Blocks: (row, part of the width).
extern "C" __global__ void hyper_combine(const float* gates, int stride, const float* state, int n, int width, float* x) {
    const int d = blockIdx.y * blockDim.x + threadIdx.x, r = blockIdx.x;
    if (d >= width) return;
    const float* s = state + int64_t(r) * n * width + d;
    float sum = 0.0f;
    for (int h = 0; h < n; h++) sum = __fmaf_rn(gates[r * stride + h], s[int64_t(h) * width], sum);
    x[int64_t(r) * width + d] = sum;
}

// S'[d] = post[d] * y + sum_s comb[s][d] * S[s], in place.
extern "C" __global__ void hyper_post(const float* mix, const float* y, int n, int width, float* state) {
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
