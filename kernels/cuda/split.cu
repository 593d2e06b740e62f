// Splitting of activations for the products on tensor cores. CPU reference: kernels/src/cpu/q16.rs.
#include "split.cuh"

// Rows of x, superblock by superblock; a warp each.
extern "C" __global__ void __launch_bounds__(256) quantize_rows(const float* x, int order, int64_t total, Acts to) {
    after_previous();
    const int64_t at = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    if (at >= total) return;
    float v[8];
    load8f(x + at * 256 + (threadIdx.x & 31) * 8, v);
    split(v, order, at, to);
}
