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

// Eight consecutive elements of a float row; 16-byte aligned.
template <class T>
__device__ __forceinline__ void eight(const uint8_t* p, float (&v)[8]);
template <>
__device__ __forceinline__ void eight<F32>(const uint8_t* p, float (&v)[8]) {
    const float4 a = __ldg(reinterpret_cast<const float4*>(p)), b = __ldg(reinterpret_cast<const float4*>(p) + 1);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
template <>
__device__ __forceinline__ void eight<F16>(const uint8_t* p, float (&v)[8]) {
    const uint4 a = __ldg(reinterpret_cast<const uint4*>(p));
    const uint32_t w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = __half2float(__ushort_as_half(w[i / 2] >> (16 * (i & 1)) & 0xffff));
}
template <>
__device__ __forceinline__ void eight<BF16>(const uint8_t* p, float (&v)[8]) {
    const uint4 a = __ldg(reinterpret_cast<const uint4*>(p));
    const uint32_t w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = __uint_as_float(i & 1 ? w[i / 2] & 0xffff0000u : w[i / 2] << 16);
}

// As matmul, for float weights whose rows are whole eights: a block of eight warps has OUTS outputs of R rows, each warp an eighth of
// the columns, each lane eight of 256 in turn. The order for one row and output is the same for every OUTS and R.
constexpr int PARTS = 8;

template <class T, int OUTS, int R>
__device__ __forceinline__ void dense(const uint8_t* w, int64_t row_bytes, int cols, int outputs, int rank, const float* x, int x_stride, int rows, float* out) {
    __shared__ float part[PARTS][OUTS][R];
    const int lane = threadIdx.x, warp = threadIdx.y, first = blockIdx.y * R, o0 = blockIdx.x * OUTS;
    const int eights = cols / 8, begin = eights * warp / PARTS, end = eights * (warp + 1) / PARTS;
    const float* in[R];
#pragma unroll
    for (int r = 0; r < R; r++) in[r] = x + int64_t(min(first + r, rows - 1)) * x_stride + o0 / rank * cols;
    float sum[OUTS][R];
#pragma unroll
    for (int o = 0; o < OUTS; o++)
#pragma unroll
        for (int r = 0; r < R; r++) sum[o][r] = 0.0f;
#pragma unroll (OUTS * R > 4 ? 1 : 4)
    for (int i = begin + lane; i < end; i += 32) {
        float a[OUTS][8];
#pragma unroll
        for (int o = 0; o < OUTS; o++) eight<T>(w + int64_t(min(o0 + o, outputs - 1)) * row_bytes + int64_t(i) * 8 * T::BYTES, a[o]);
#pragma unroll
        for (int r = 0; r < R; r++) {
            // Not through the read-only cache: such loads may be moved to before `after_previous`.
            const float4 lo = *reinterpret_cast<const float4*>(in[r] + i * 8), hi = *reinterpret_cast<const float4*>(in[r] + i * 8 + 4);
            const float b[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
            for (int o = 0; o < OUTS; o++)
#pragma unroll
                for (int k = 0; k < 8; k++) sum[o][r] = __fmaf_rn(a[o][k], b[k], sum[o][r]);
        }
    }
#pragma unroll
    for (int o = 0; o < OUTS; o++)
#pragma unroll
        for (int r = 0; r < R; r++) {
            const float v = warp_sum(sum[o][r]);
            if (lane == 0) part[warp][o][r] = v;
        }
    __syncthreads();
    const int at = warp * 32 + lane, o = at / R, r = at % R;
    if (o < OUTS && o0 + o < outputs && first + r < rows) {
        float v = part[0][o][r];
#pragma unroll
        for (int k = 1; k < PARTS; k++) v = __fadd_rn(v, part[k][o][r]);
        out[int64_t(first + r) * outputs + o0 + o] = v;
    }
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
                                                                 int rank, const float* x, int x_stride, int rows, float* out) { after_previous(); \
        matmul<T>(w, row_bytes, cols, outputs, rank, x, x_stride, rows, out);                                                    \
    }                                                                                                                            \
    extern "C" __global__ void __launch_bounds__(128) expert_matmul_##T(const uint8_t* w, int64_t row_bytes, int cols,           \
                                                                        int outputs, const int* experts, const float* x,         \
                                                                        int per_row, float* out) { after_previous();                               \
        expert_matmul<T>(w, row_bytes, cols, outputs, experts, x, per_row, out);                                                 \
    }                                                                                                                            \
    extern "C" __global__ void embed_##T(Step s, const uint8_t* table, int64_t row_bytes, int cols, float* out) { after_previous();                \
        embed<T>(s, table, row_bytes, cols, out);                                                                                \
    }
FOR_EACH_TYPE(KERNELS)

#define DENSE(T, OUTS, R)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(256) dense_##T##_##OUTS##_##R(const uint8_t* w, int64_t row_bytes, int cols,     \
                                                                               int outputs, int rank, const float* x,            \
                                                                               int x_stride, int rows, float* out) { after_previous();             \
        dense<T, OUTS, R>(w, row_bytes, cols, outputs, rank, x, x_stride, rows, out);                                            \
    }
#define DENSE_ALL(T) DENSE(T, 1, 1) DENSE(T, 1, 4) DENSE(T, 4, 4)
DENSE_ALL(F32) DENSE_ALL(F16) DENSE_ALL(BF16)
