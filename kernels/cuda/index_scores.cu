// The lightning indexer's scores on tensor cores: queries and keys are FP4 values, which f16 holds exactly. CPU reference:
// kernels/src/cpu/indexer.rs. Other shapes and storage types take index_scores_* in indexer.cu.
#include "common.cuh"

constexpr int WARPS = 8, STAGES = 3, STEPS = 8;   // 8 steps of 16 elements: rows of 128

// c += a * b for one tile of 16 heads and 8 keys.
__device__ __forceinline__ void mma(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes16) {
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    if (bytes16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from) : "memory");
}

__device__ __forceinline__ uint32_t times(uint32_t a, __half2 b) {
    const __half2 r = __hmul2(*reinterpret_cast<const __half2*>(&a), b);
    return *reinterpret_cast<const uint32_t*>(&r);
}

// Two FP4 codes (the low byte of w) as f16 with exponents smaller by 14.
__device__ __forceinline__ uint32_t two_codes(uint32_t w) {
    return (w & 0x07) << 9 | (w & 0x08) << 12 | (w & 0x70) << 21 | (w & 0x80) << 24;
}

// scores[row][k] = sum_h w_h * scale * max(0, q_h . K_k) for the visible rows k of rows that see more than top_k. q is what prepare_* in
// qkv.cu wrote. Only rows row0 .. row1 of the step, whose scores begin with those of row0. Blocks: (8 * N * WARPS keys, `tile` rows of the
// span, span); a warp has 8 * N keys in registers and all heads of one row after the other. One order of sums for any N: a thread adds its
// heads tile by tile, then lanes are added.
template <int N>
__device__ __forceinline__ void scores_of(Step st, Slot rs, int heads, int top_k, int ratio, float scale, const uint4* q, const float* w,
                                          int tile, int row0, int row1, int stride, float* scores) {
    extern __shared__ uint4 shared[];
    const int span = blockIdx.z, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int first_pos = st.first_pos[span], first_row = st.first_row[span], span_rows = st.span_rows[span];
    const int block_key = blockIdx.x * (8 * N * WARPS), end = min(min(span_rows, row1 - first_row), int(blockIdx.y + 1) * tile);
    // The first row that sees more than top_k rows, and the block's first key.
    const int begin = max(max(int(blockIdx.y) * tile, row0 - first_row), (max(top_k, block_key) + 1) * ratio - 1 - first_pos);
    if (begin >= end) return after_previous();
    const int words = heads * 16;   // of 16 bytes, a row's queries
    float* weights = reinterpret_cast<float*>(shared + STAGES * words);
    const auto fetch = [&](int r, int stage) {
        if (r < end) {
            const int64_t row = first_row + r;
            for (int i = threadIdx.x; i < words; i += 32 * WARPS) copy_async(shared + stage * words + i, q + row * words + i, 1);
            if (int(threadIdx.x) < heads) copy_async(weights + stage * heads + threadIdx.x, w + row * heads + threadIdx.x, 0);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    // Thread (g, t) has elements 32 t .. 32 t + 31 of keys g, g + 8, ...: four of them a step.
    const int last = (first_pos + end) / ratio, key = block_key + (threadIdx.x >> 5) * (8 * N) + g;
    const uint64_t bank = st.banks[span];
    uint32_t b[N][STEPS][2];
    const auto load = [&](int n) {
        const uint8_t* from = slot_row(rs, bank, min(key + 8 * n, last - 1));
        const int exponent = min(max(int(from[64 + t]), 127 - 24), 127 + 13);
        // 2^-24 .. 2^13: what f16 holds, subnormals included.
        const __half2 factor = __float2half2_rn(__uint_as_float(uint32_t(exponent) << 23)), up = __float2half2_rn(16384.0f);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t codes = reinterpret_cast<const uint32_t*>(from)[4 * t + i];
#pragma unroll
            for (int k = 0; k < 4; k++) b[n][2 * i + k / 2][k % 2] = times(times(two_codes(codes >> (8 * k)), up), factor);
        }
    };
    // Keys of earlier steps do not change: they are fetched while the kernel before this one ends. This step's come after that.
#pragma unroll
    for (int n = 0; n < N; n++) load(n);
    after_previous();
    fetch(begin, 0);
    fetch(begin + 1, 1);
    const int old = first_pos / ratio;
#pragma unroll
    for (int n = 0; n < N; n++)
        if (min(key + 8 * n, last - 1) >= old) load(n);

    int stage = 0;
    for (int r = begin; r < end; r++) {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        fetch(r + 2, stage == 0 ? 2 : stage - 1);
        const uint4* a = shared + stage * words + lane;
        const float* ws = weights + stage * heads + g;
        float total[N][2];
#pragma unroll
        for (int n = 0; n < N; n++) total[n][0] = total[n][1] = 0.0f;
        for (int m = 0; m < heads / 16; m++, a += STEPS * 32) {
            float c[N][4];
#pragma unroll
            for (int n = 0; n < N; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                const uint4 x = a[32 * s];
#pragma unroll
                for (int n = 0; n < N; n++) mma(c[n], x, b[n][s][0], b[n][s][1]);
            }
            const float w0 = __fmul_rn(ws[16 * m], scale), w1 = __fmul_rn(ws[16 * m + 8], scale);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    total[n][i] = __fmaf_rn(w1, fmaxf(c[n][2 + i], 0.0f), __fmaf_rn(w0, fmaxf(c[n][i], 0.0f), total[n][i]));
        }
        const int visible = (first_pos + r + 1) / ratio;
        float* out = scores + int64_t(first_row + r - row0) * stride;
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int k = 4; k < 32; k <<= 1) total[n][i] = __fadd_rn(total[n][i], __shfl_xor_sync(~0u, total[n][i], k));
            const int at = key - g + 8 * n + 2 * t;
            if (g == n && at < visible) {
                // Within the row of `stride` elements, a multiple of 8, also when the second one is not visible.
                *reinterpret_cast<float2*>(out + at) = make_float2(total[n][0], total[n][1]);
            }
        }
        stage = stage == 2 ? 0 : stage + 1;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

#define SCORES_KERNEL(N)                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)                                                                               \
        index_scores_fp4_##N(Step st, Slot rs, int heads, int top_k, int ratio, float scale, const uint4* q, const float* w, int tile, int row0, int row1, int stride, \
                             float* scores) {                                                                                                \
        scores_of<N>(st, rs, heads, top_k, ratio, scale, q, w, tile, row0, row1, stride, scores);                                                        \
    }
SCORES_KERNEL(1) SCORES_KERNEL(2) SCORES_KERNEL(4)
