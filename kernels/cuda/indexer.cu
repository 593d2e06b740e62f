// The lightning indexer: scores of compressed rows and the choice of the best. CPU reference: kernels/src/cpu/indexer.rs.
#include "common.cuh"

// scores[row][k] = sum_h w_h * scale * max(0, q_h . K_k) for visible rows k. Blocks: (part of the keys, row); a warp per key.
template <int E>
__device__ __forceinline__ void index_scores(Step st, Slot rs, int heads, int head_dim, int top_k, int ratio, float scale, const float* q, const float* w, int stride, float* scores) {
    extern __shared__ float qs[];
    const int row = blockIdx.y, visible = (st.positions[row] + 1) / ratio, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
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
        if (lane == 0) scores[int64_t(row) * stride + k] = total;
    }
}

#define INDEX_KERNEL(E)                                                                                                     \
    extern "C" __global__ void index_scores_##E(Step st, Slot rs, int heads, int head_dim, int top_k, int ratio, float scale, \
                                                const float* q, const float* w, int stride, float* scores) { after_previous();                  \
        index_scores<E>(st, rs, heads, head_dim, top_k, ratio, scale, q, w, stride, scores);                                  \
    }
INDEX_KERNEL(1) INDEX_KERNEL(2) INDEX_KERNEL(4) INDEX_KERNEL(8)

// A float's bits in an order that unsigned comparison knows.
__device__ __forceinline__ uint32_t ordered(float x) {
    const uint32_t b = __float_as_uint(x);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}

// Number of threads of the block with a lower index for which `take` holds; `total` gets the number of all.
__device__ __forceinline__ int block_rank(bool take, int* sums, int& total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const uint32_t votes = __ballot_sync(~0u, take);
    __syncthreads();
    if (lane == 0) sums[warp] = __popc(votes);
    __syncthreads();
    int before = 0;
    total = 0;
    for (int i = 0; i < warps; i++) {
        if (i < warp) before += sums[i];
        total += sums[i];
    }
    return before + __popc(votes & ((1u << lane) - 1));
}

// Indices of the top_k largest of scores[row][0..visible], ascending, ties to the lower index; counts[row] = -1 when all are seen.
// A block of 512 per row: the k-th largest key is found byte by byte, then one ordered pass writes the indices.
extern "C" __global__ void __launch_bounds__(512) index_top(Step st, int top_k, int ratio, const float* scores, int stride, int* rows, int* counts) {
    after_previous();
    __shared__ int histogram[256], sums[32];
    __shared__ uint32_t chosen, left;
    const int row = blockIdx.x, visible = (st.positions[row] + 1) / ratio;
    if (visible <= top_k) {
        if (threadIdx.x == 0) counts[row] = -1;
        return;
    }
    const float* s = scores + int64_t(row) * stride;
    uint32_t prefix = 0, mask = 0;
    int want = top_k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x) histogram[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < visible; i += blockDim.x) {
            const uint32_t key = ordered(s[i]);
            if ((key & mask) == prefix) atomicAdd(&histogram[(key >> shift) & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int above = 0, b = 255;
            while (b > 0 && above + histogram[b] < want) above += histogram[b--];
            chosen = b;
            left = want - above;
        }
        __syncthreads();
        prefix |= chosen << shift;
        mask |= 255u << shift;
        want = left;
        __syncthreads();
    }
    // `want` of those equal to the threshold are taken, in index order, and all above it.
    int at = 0, equal = 0;
    for (int base = 0; base < visible; base += blockDim.x) {
        const int i = base + threadIdx.x;
        const uint32_t key = i < visible ? ordered(s[i]) : 0;
        int n, m;
        const int e = block_rank(i < visible && key == prefix, sums, n);
        const bool take = i < visible && (key > prefix || (key == prefix && equal + e < want));
        const int r = block_rank(take, sums, m);
        if (take) rows[int64_t(row) * top_k + at + r] = i;
        at += m;
        equal += n;
    }
    if (threadIdx.x == 0) counts[row] = top_k;
}
