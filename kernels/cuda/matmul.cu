// Products with weights of every type, in f32: the exact path. CPU reference: kernels/src/cpu/matmul.rs, kernels/src/quant.
//
// A warp computes one output of up to ROWS activation rows: lane l takes elements l, l + 32, ... in order, then the lanes are
// summed by a butterfly. The order does not depend on the number of rows.
#include "quant.cuh"

constexpr int ROWS = 4;
constexpr int WARPS = 4;

template <class T>
__device__ __forceinline__ void product(const uint8_t* w, int cols, const float* const (&x)[ROWS], float (&sum)[ROWS]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum[r] = 0.0f;
    for (int i = lane; i < cols; i += 32) {
        const float v = T::get(w + int64_t(i / T::ELEMS) * T::BYTES, i % T::ELEMS);
#pragma unroll
        for (int r = 0; r < ROWS; r++) sum[r] = __fmaf_rn(v, x[r][i], sum[r]);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) sum[r] = warp_sum(sum[r]);
}

// out[r][o] = x[r] . w[o]. Outputs g*rank .. (g+1)*rank consume the g-th `cols` elements of each row of x (rank = outputs: one group).
template <class T>
__device__ __forceinline__ void matmul(const uint8_t* w, int64_t row_bytes, int cols, int outputs, int rank, const float* x, int x_stride, int rows, float* out) {
    const int o = blockIdx.x * WARPS + threadIdx.y;
    if (o >= outputs) return;
    const int first = blockIdx.y * ROWS;
    const float* in[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) in[r] = x + int64_t(min(first + r, rows - 1)) * x_stride + o / rank * cols;
    float sum[ROWS];
    product<T>(w + o * row_bytes, cols, in, sum);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        if (threadIdx.x == r && first + r < rows) out[int64_t(first + r) * outputs + o] = sum[r];
}

// out[a][o] = x[a / per_row] . w[expert[a] * outputs + o] for assignment a = blockIdx.y.
template <class T>
__device__ __forceinline__ void expert_matmul(const uint8_t* w, int64_t row_bytes, int cols, int outputs, const int* experts, const float* x, int per_row, float* out) {
    const int o = blockIdx.x * WARPS + threadIdx.y, a = blockIdx.y;
    if (o >= outputs) return;
    const uint8_t* row = w + (int64_t(experts[a]) * outputs + o) * row_bytes;
    const float* in = x + int64_t(a / per_row) * cols;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < cols; i += 32)
        sum = __fmaf_rn(T::get(row + int64_t(i / T::ELEMS) * T::BYTES, i % T::ELEMS), in[i], sum);
    sum = warp_sum(sum);
    if (threadIdx.x == 0) out[int64_t(a) * outputs + o] = sum;
}

// out[r] = dequantised table[token of r].
template <class T>
__device__ __forceinline__ void embed(Step s, const uint8_t* table, int64_t row_bytes, int cols, float* out) {
    const uint8_t* row = table + int64_t(s.tokens[blockIdx.x]) * row_bytes;
    for (int i = threadIdx.x; i < cols; i += blockDim.x)
        out[int64_t(blockIdx.x) * cols + i] = T::get(row + int64_t(i / T::ELEMS) * T::BYTES, i % T::ELEMS);
}

#define KERNELS(T)                                                                                                               \
    extern "C" __global__ void __launch_bounds__(128) matmul_##T(const uint8_t* w, int64_t row_bytes, int cols, int outputs,     \
                                                                 int rank, const float* x, int x_stride, int rows, float* out) { \
        matmul<T>(w, row_bytes, cols, outputs, rank, x, x_stride, rows, out);                                                    \
    }                                                                                                                            \
    extern "C" __global__ void __launch_bounds__(128) expert_matmul_##T(const uint8_t* w, int64_t row_bytes, int cols,           \
                                                                        int outputs, const int* experts, const float* x,         \
                                                                        int per_row, float* out) {                               \
        expert_matmul<T>(w, row_bytes, cols, outputs, experts, x, per_row, out);                                                 \
    }                                                                                                                            \
    extern "C" __global__ void embed_##T(Step s, const uint8_t* table, int64_t row_bytes, int cols, float* out) {                \
        embed<T>(s, table, row_bytes, cols, out);                                                                                \
    }
FOR_EACH_TYPE(KERNELS)
