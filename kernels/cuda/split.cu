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

// silu(min(gate, clamp)) * clamp(up, +-clamp), times the row's weight if there are weights, split at once: what the down products take.
// Rows are `superblocks` long; laid out as `SwigluArg` in kernels/src/cuda/split.rs.
struct Swiglu {
    const float* gate;
    const float* up;
    const float* weights;
    Acts to;
    int64_t total;      // superblocks of all rows
    int superblocks;
    int order;
};

// Of two sets of rows, the routed experts' and the shared expert's; a warp a superblock.
extern "C" __global__ void __launch_bounds__(256) split_swiglu(Swiglu a, Swiglu b, float clamp) {
    after_previous();
    int64_t at = int64_t(blockIdx.x) * 8 + threadIdx.x / 32;
    const bool second = at >= a.total;
    if (second) at -= a.total;
    if (at >= (second ? b.total : a.total)) return;
    const int64_t from = at * 256 + (threadIdx.x & 31) * 8;
    const float* weights = second ? b.weights : a.weights;
    const float weight = weights ? weights[at / (second ? b.superblocks : a.superblocks)] : 1.0f;
    float gate[8], up[8], v[8];
    load8f((second ? b.gate : a.gate) + from, gate);
    load8f((second ? b.up : a.up) + from, up);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float g = fminf(gate[i], clamp), u = fmaxf(-clamp, fminf(up[i], clamp));
        v[i] = __fmul_rn(__fmul_rn(__fdiv_rn(g, __fadd_rn(1.0f, expf(-g))), u), weight);
    }
    const Acts to = {second ? b.to.q : a.to.q, second ? b.to.m : a.to.m, second ? b.to.sums : a.to.sums, second ? b.to.scale : a.to.scale};
    split(v, second ? b.order : a.order, at, to);
}
