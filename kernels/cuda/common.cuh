// What all kernels share: reductions in a fixed order, the step's arrays, and rows of bank memory.
//
// Row invariance (see kernels/src/device.rs): every sum has one order for a row, whatever else the launch computes. Where two
// kernels or two branches must agree bit for bit, operations are spelt out (__fmaf_rn, __fmul_rn, __fadd_rn), because the
// compiler may fuse a product and a sum in one place and not in the other.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>
#include <stdint.h>

// Programmatic dependent launch (compute capability 9.0 and later): a kernel may be started while the one before it in the stream runs.
// Every kernel calls `after_previous` before it touches memory that another kernel writes or reads; weights it may fetch earlier. The
// call also lets the kernel after this one be started, which then waits in the same way. Launches without the attribute do not
// know of it. The order of the two matters: because nobody is let in before the wait, a kernel that runs knows that the launch before
// the previous one has ended, and may read what that and earlier ones wrote without waiting (with __ldcg: an older copy may be in the
// first-level cache). route_few (which also writes what nobody else has before its wait), the streams' updates, decode products with
// lists, F16 products beside others, the indexer's scores and few rows' sums of values (their counts) do.
//
// Small kernels that stand before a product call `let_next_in` first: the product's blocks come in beside them and beside the kernel
// before them, and their weights are on the way all that time. After such a kernel one launch more must lie between writing and
// reading without a wait, after two of them (no more follow each other) two. Not those that stand between two products: blocks that
// come in as others leave lie unevenly, where a product has fewer than there is room for (256 blocks took 11.4 us instead of 9.5).
__device__ __forceinline__ void let_next_in() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // Many blocks' own places would be taken by others that wait.
    if (gridDim.x * gridDim.y * gridDim.z <= 256) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void after_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// One step's plan in device memory; laid out as `StepArg` in kernels/src/cuda/step.rs.
struct Step {
    const int* tokens;          // [rows]
    const int* positions;       // [rows]
    const int* span_of;         // [rows]
    const int* wanted;          // [wanted]
    const int* first_pos;       // [spans]
    const int* first_row;       // [spans]
    const int* span_rows;       // [spans]
    const uint64_t* banks;      // [spans] base addresses
};

enum StateType { STATE_F16 = 0, STATE_F32 = 1, STATE_FP8 = 2, STATE_FP4 = 3 };

// Where rows of a slot lie in a bank; laid out as `SlotArg` in kernels/src/cuda/bank.rs.
struct Slot {
    int64_t offset;         // of the first row from the bank's base
    int64_t block_stride;   // between blocks of rows
    int32_t rows_per_block;
    int32_t row_bytes;
    int32_t ring;           // rows of a ring, 0 for others
    int32_t type;
    int32_t rotary;         // trailing f16 elements of STATE_FP8
    int32_t width;
};

__device__ __forceinline__ uint8_t* slot_row(const Slot& s, uint64_t bank, int row) {
    if (s.ring) row %= s.ring;
    const int block = row / s.rows_per_block, at = row - block * s.rows_per_block;
    return reinterpret_cast<uint8_t*>(bank) + s.offset + block * s.block_stride + int64_t(at) * s.row_bytes;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, m));
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, m));
    return v;
}

// Sum over a block of up to 1024 threads (whole warps); all threads get it.
__device__ __forceinline__ float block_sum(float v) {
    __shared__ float part[32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    v = warp_sum(v);
    __syncthreads();
    if (lane == 0) part[warp] = v;
    __syncthreads();
    return warp_sum(lane < warps ? part[lane] : 0.0f);
}

__device__ __forceinline__ float half_at(const uint8_t* p) {
    return __half2float(__ushort_as_half(*reinterpret_cast<const uint16_t*>(p)));
}

// ---- low-precision round trips: kernels/src/math/lowp.rs and packed.rs are the reference, bit for bit ----

// Smallest power of two that is at least x, for positive x.
__device__ __forceinline__ float pow2_ceil(float x) {
    const uint32_t b = __float_as_uint(x);
    if (b < 0x00800000u) return __uint_as_float(b <= 1 ? b : 1u << (32 - __clz(b - 1)));
    return (b & 0x007fffffu) == 0 ? x : __uint_as_float((b & 0x7f800000u) + 0x00800000u);
}

__device__ __forceinline__ float round_e4m3(float x) {
    const float a = fminf(fabsf(x), 448.0f);
    const uint32_t e = max(__float_as_uint(a) >> 23, 127u - 6u);
    const float magic = __fmul_rn(__uint_as_float((e - 3) << 23), 12582912.0f);
    return copysignf(__fsub_rn(__fadd_rn(a, magic), magic), x);
}

__device__ __forceinline__ int e2m1_code(float x) {
    const float a = fabsf(x);
    const int c = a <= 0.25f ? 0 : a < 0.75f ? 1 : a <= 1.25f ? 2 : a < 1.75f ? 3 : a <= 2.5f ? 4 : a < 3.5f ? 5 : a <= 5.0f ? 6 : 7;
    return c | (signbit(x) ? 8 : 0);
}

__device__ __forceinline__ float e2m1_value(int code) {
    const int m = code & 7;
    const float v = m < 4 ? 0.5f * m : m == 7 ? 6.0f : float(m - 2);
    return code & 8 ? -v : v;
}

__device__ __forceinline__ float e4m3_value(int code) {
    // The same fields as a half's, whose exponent bias is larger by 8.
    return __half2float(__ushort_as_half(((code & 0x80) << 8) | ((code & 0x7f) << 7))) * 256.0f;
}

// The code of a value that is one.
__device__ __forceinline__ int e4m3_code(float x) {
    const int h = __half_as_ushort(__float2half_rn(x * 0.00390625f));
    return ((h >> 8) & 0x80) | ((h >> 7) & 0x7f);
}

__device__ __forceinline__ float f16_round(float x) { return __half2float(__float2half_rn(x)); }

// FP8 round trip of x[0..n] in shared memory, by a block of whole warps.
__device__ __forceinline__ void fp8_round_trip(float* x, int n) {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    for (int c = threadIdx.x >> 5; c * 64 < n; c += warps) {
        const int i = c * 64 + lane, j = i + 32;
        const float a = i < n ? x[i] : 0.0f, b = j < n ? x[j] : 0.0f;
        const float scale = pow2_ceil(__fdiv_rn(warp_max(fmaxf(1e-4f, fmaxf(fabsf(a), fabsf(b)))), 448.0f));
        if (i < n) x[i] = __fmul_rn(round_e4m3(__fdiv_rn(a, scale)), scale);
        if (j < n) x[j] = __fmul_rn(round_e4m3(__fdiv_rn(b, scale)), scale);
    }
    __syncthreads();
}

// FP4 round trip of x[0..n] in shared memory, by a block of whole warps.
__device__ __forceinline__ void fp4_round_trip(float* x, int n) {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    for (int c = threadIdx.x >> 5; c * 32 < n; c += warps) {
        const int i = c * 32 + lane;
        const float a = i < n ? x[i] : 0.0f;
        const float scale = pow2_ceil(__fdiv_rn(warp_max(fmaxf(7.0529664e-38f, fabsf(a))), 6.0f));
        if (i < n) x[i] = __fmul_rn(e2m1_value(e2m1_code(__fdiv_rn(a, scale))), scale);
    }
    __syncthreads();
}

// Walsh-Hadamard transform of x[0..n] in shared memory, scaled by 1/sqrt(n); n is a power of two.
__device__ __forceinline__ void hadamard(float* x, int n) {
    for (int half = 1; half < n; half *= 2) {
        __syncthreads();
        for (int k = threadIdx.x; k < n / 2; k += blockDim.x) {
            const int i = k / half * 2 * half + k % half;
            const float a = x[i], b = x[i + half];
            x[i] = __fadd_rn(a, b);
            x[i + half] = __fsub_rn(a, b);
        }
    }
    __syncthreads();
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn(float(n)));
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = __fmul_rn(x[i], scale);
    __syncthreads();
}

// Stores x[0..width] (shared or global memory) as one state row, by a block of whole warps.
__device__ __forceinline__ void store_row(const Slot& s, uint8_t* dst, const float* x) {
    const int n = s.width, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    if (s.type == STATE_F16) {
        for (int i = threadIdx.x; i < n; i += blockDim.x) reinterpret_cast<__half*>(dst)[i] = __float2half_rn(x[i]);
    } else if (s.type == STATE_F32) {
        for (int i = threadIdx.x; i < n; i += blockDim.x) reinterpret_cast<float*>(dst)[i] = x[i];
    } else if (s.type == STATE_FP8) {
        const int nope = n - s.rotary, scales = (nope + 63) / 64, tail = (nope + scales + 1) & ~1;
        for (int c = threadIdx.x >> 5; c < scales; c += warps) {
            const int i = c * 64 + lane, j = i + 32;
            const float a = i < nope ? x[i] : 0.0f, b = j < nope ? x[j] : 0.0f;
            const float amax = warp_max(fmaxf(fabsf(a), fabsf(b)));
            const float scale = pow2_ceil(fmaxf(__fdiv_rn(amax, 448.0f), 1.17549435e-38f));
            if (lane == 0) dst[nope + c] = uint8_t(__float_as_uint(scale) >> 23);
            if (i < nope) dst[i] = e4m3_code(round_e4m3(__fdiv_rn(a, scale)));
            if (j < nope) dst[j] = e4m3_code(round_e4m3(__fdiv_rn(b, scale)));
        }
        for (int i = threadIdx.x; i < s.rotary; i += blockDim.x)
            reinterpret_cast<__half*>(dst + tail)[i] = __float2half_rn(x[nope + i]);
    } else {
        const int codes = (n + 1) / 2;
        for (int c = threadIdx.x >> 5; c * 32 < n; c += warps) {
            const int i = c * 32 + lane;
            const float a = i < n ? x[i] : 0.0f;
            const float scale = pow2_ceil(fmaxf(__fdiv_rn(warp_max(fabsf(a)), 6.0f), 1.17549435e-38f));
            if (lane == 0) dst[codes + c] = uint8_t(__float_as_uint(scale) >> 23);
            const int code = i < n ? e2m1_code(__fdiv_rn(a, scale)) : 0;
            const int other = __shfl_down_sync(~0u, code, 1);
            if ((lane & 1) == 0 && i < n) dst[i / 2] = code | (other << 4);
        }
    }
}

// Element i of a state row.
__device__ __forceinline__ float load_elem(const Slot& s, const uint8_t* src, int i) {
    if (s.type == STATE_F16) return __half2float(reinterpret_cast<const __half*>(src)[i]);
    if (s.type == STATE_F32) return reinterpret_cast<const float*>(src)[i];
    if (s.type == STATE_FP8) {
        const int nope = s.width - s.rotary, scales = (nope + 63) / 64, tail = (nope + scales + 1) & ~1;
        if (i >= nope) return half_at(src + tail + 2 * (i - nope));
        return e4m3_value(src[i]) * __uint_as_float(uint32_t(src[nope + i / 64]) << 23);
    }
    const int codes = (s.width + 1) / 2;
    return e2m1_value(src[i / 2] >> (4 * (i & 1))) * __uint_as_float(uint32_t(src[codes + i / 32]) << 23);
}
