// Routing, lists of assignments and the sum over experts. CPU reference: kernels/src/cpu/moe.rs. The expert products are in quantized.cu
// and matmul.cu.
#include "common.cuh"

__device__ __forceinline__ float sqrt_softplus(float x) {
    return sqrtf(x > 20.0f ? x : x < -20.0f ? expf(x) : log1pf(expf(x)));
}

// Normalised weights of a row's experts from their probabilities, in slot order.
__device__ __forceinline__ void weigh(float* w, int used, float scale, float floor) {
    float sum = 0.0f;
    for (int j = 0; j < used; j++) sum += w[j];
    const float f = scale / fmaxf(sum, floor);
    for (int j = 0; j < used; j++) w[j] *= f;
}

// The `used` largest of p + bias, largest first, ties to the lower index; a block per row, `experts` <= 1024.
extern "C" __global__ void route_learned(const float* logits, const float* bias, int experts, int used, float scale, float floor, int* ids, float* weights) {
    after_previous();
    __shared__ float p[1024], score[1024], best[32];
    __shared__ int at[32];
    const int r = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        p[e] = sqrt_softplus(logits[int64_t(r) * experts + e]);
        score[e] = bias ? p[e] + bias[e] : p[e];
    }
    for (int j = 0; j < used; j++) {
        __syncthreads();
        float v = -CUDART_INF_F;
        int k = 1 << 30;
        for (int e = threadIdx.x; e < experts; e += blockDim.x)
            if (score[e] > v || k == 1 << 30) v = score[e], k = e;
        for (int m = 16; m > 0; m >>= 1) {
            const float w = __shfl_xor_sync(~0u, v, m);
            const int o = __shfl_xor_sync(~0u, k, m);
            if (w > v || (w == v && o < k)) v = w, k = o;
        }
        if (lane == 0) best[warp] = v, at[warp] = k;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int i = 1; i < warps; i++)
                if (best[i] > v || (best[i] == v && at[i] < k)) v = best[i], k = at[i];
            ids[r * used + j] = k;
            weights[r * used + j] = p[k];
            score[k] = -CUDART_INF_F;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) weigh(weights + r * used, used, scale, floor);
}

// Experts from the token table; a thread per row.
extern "C" __global__ void route_table(Step s, int rows, const int* table, const float* logits, int experts, int used, float scale, float floor, int* ids, float* weights) {
    after_previous();
    const int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows) return;
    for (int j = 0; j < used; j++) {
        const int e = table[int64_t(s.tokens[r]) * used + j];
        ids[r * used + j] = e;
        weights[r * used + j] = sqrt_softplus(logits[int64_t(r) * experts + e]);
    }
    weigh(weights + r * used, used, scale, floor);
}

// out[r] = the row's expert results, summed in slot order. Blocks: (row, part of the width).
extern "C" __global__ void expert_sum(const float* parts, int used, int width, float* out) {
    after_previous();
    const int i = blockIdx.y * blockDim.x + threadIdx.x, r = blockIdx.x;
    if (i >= width) return;
    float sum = 0.0f;
    for (int j = 0; j < used; j++) sum = __fadd_rn(sum, parts[(int64_t(r) * used + j) * width + i]);
    out[int64_t(r) * width + i] = sum;
}

// Groups assignments (row * used + slot) by expert: `order` lists them expert by expert, items are at most `rows` of one expert. The
// order within an expert is that of arrival, which no result depends on. One block.
extern "C" __global__ void __launch_bounds__(1024) group_experts(const int* ids, int assignments, int experts, int rows, int4* list, int* count, int* order) {
    after_previous();
    __shared__ int counts[1024], starts[1024], item_starts[1024];
    for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    for (int a = threadIdx.x; a < assignments; a += blockDim.x) atomicAdd(&counts[ids[a]], 1);
    __syncthreads();
    // Prefix sums over up to 1024 experts, in place of each thread's own.
    const int e = threadIdx.x, mine = e < experts ? counts[e] : 0, blocks = (mine + rows - 1) / rows;
    starts[e] = mine;
    item_starts[e] = blocks;
    for (int d = 1; d < 1024; d *= 2) {
        __syncthreads();
        const int s = e >= d ? starts[e - d] : 0, i = e >= d ? item_starts[e - d] : 0;
        __syncthreads();
        starts[e] += s;
        item_starts[e] += i;
    }
    __syncthreads();
    const int start = starts[e] - mine, first = item_starts[e] - blocks;
    if (e == 1023) *count = item_starts[1023];
    for (int i = 0; i < blocks; i++) list[first + i] = make_int4(e, start + i * rows, min(rows, mine - i * rows), 0);
    __syncthreads();
    if (e < experts) counts[e] = start;
    __syncthreads();
    for (int a = threadIdx.x; a < assignments; a += blockDim.x) order[atomicAdd(&counts[ids[a]], 1)] = a;
}
