// The lightning indexer's scores of compressed rows, for any shape and storage type. CPU reference: kernels/src/cpu/indexer.rs. The shape of
// large models has index_scores.cu.
#include "common.cuh"

// scores[row - row0][k] = sum_h w_h * scale * max(0, q_h . K_k) for visible rows k. Blocks: (part of the keys, row); a warp per key.
template <int E>
__device__ __forceinline__ void index_scores(Step st, Slot rs, int heads, int head_dim, int top_k, int ratio, float scale, const float* q,
                                             const float* w, int row0, int stride, float* scores) {
    extern __shared__ float qs[];
    const int row = row0 + blockIdx.y, visible = (st.positions[row] + 1) / ratio, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    // Nothing to select, or none of this block's keys is visible.
    if (visible <= top_k || blockIdx.x * 64 >= visible) return;
    for (int i = threadIdx.x; i < heads * head_dim; i += blockDim.x) qs[i] = q[int64_t(row) * heads * head_dim + i];
    __syncthreads();
    const uint64_t bank = st.banks[st.span_of[row]];
    const int end = min(visible, int(blockIdx.x + 1) * 64);
    for (int k = blockIdx.x * 64 + (threadIdx.x >> 5); k < end; k += warps) {
        const uint8_t* key = slot_row(rs, bank, k);
        float ke[E];
#pragma unroll
        for (int e = 0; e < E; e++) ke[e] = lane + 32 * e < head_dim ? load_elem(rs, key, lane + 32 * e) : 0.0f;
        float total = 0.0f;
        for (int h = 0; h < heads; h++) {
            float dot = 0.0f;
#pragma unroll
            for (int e = 0; e < E; e++)
                if (lane + 32 * e < head_dim) dot = __fmaf_rn(qs[h * head_dim + lane + 32 * e], ke[e], dot);
            total = __fmaf_rn(__fmul_rn(w[int64_t(row) * heads + h], scale), fmaxf(warp_sum(dot), 0.0f), total);
        }
        if (lane == 0) scores[int64_t(blockIdx.y) * stride + k] = total;
    }
}

#define INDEX_KERNEL(E)                                                                                                     \
    extern "C" __global__ void index_scores_##E(Step st, Slot rs, int heads, int head_dim, int top_k, int ratio, float scale, \
                                                const float* q, const float* w, int row0, int stride, float* scores) { after_previous();                  \
        index_scores<E>(st, rs, heads, head_dim, top_k, ratio, scale, q, w, row0, stride, scores);                                  \
    }
INDEX_KERNEL(1) INDEX_KERNEL(2) INDEX_KERNEL(4) INDEX_KERNEL(8)
