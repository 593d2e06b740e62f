// Attention on tensor cores, for rows of 512 whose last 64 are rotary: raw rows in f16, compressed ones in FP8 (the official profile).
//
// A query's keys have places: the window's rows first, padded to a multiple of 64, then the compressed ones. Scores of all places go to
// scratch memory with the address of each place's row; a second kernel makes weights of them and sums the values. Every sum has an order
// that depends on the query's own keys alone: a dot product is summed by parts of 64 dimensions, values by eight equal runs of steps of 16
// places. So blocks of many heads (prefill) and of few (decode) give the same bits.
//
// Keys are exact in f16: e4m3 times a power of two, f16, and this step's rows, which the profile has rounded. (A chunk of 64 values that
// are all below 1.4e-5 would lose its scale; the profile's rows are normed.) Queries and weights are two f16 each, which is 22 bits.
#pragma once
#include "sparse.cuh"

constexpr int DIM = 512, NOPE = 448, TAIL = 456;  // bytes of an FP8 row: codes, 7 scales and one unused, f16
constexpr int CHUNKS = DIM / 64;
constexpr int SPLITS = 8;
constexpr float WEIGHT_ONE = 32768.0f;  // weights are scaled so that their low halves are not subnormal

// Laid out as `TensorArg` in kernels/src/cuda/sparse_tensor.rs.
struct Places {
    int first;               // first query row of the launch
    int stride;              // places of a query: a multiple of 64
    float* scores;           // [rows of the launch, heads, stride]
    const uint8_t** keys;    // [rows of the launch, stride]
    __half* recent;          // [rows of the step, 512]: this step's rows
};

// What a query sees.
struct Seen {
    int first, recent;   // position of the window's first row, and rows
    int window, hist;    // places of the window, and compressed rows
    __device__ __forceinline__ Seen(const Step& st, const Sparse& p, int row) {
        const int pos = st.positions[row];
        first = max(0, pos + 1 - p.window);
        recent = pos + 1 - first;
        window = (recent + 63) & ~63;
        hist = history(p, row, pos);
    }
    __device__ __forceinline__ bool holds(int place) const { return place < recent || (place >= window && place < window + hist); }
    // Steps of 16 places.
    __device__ __forceinline__ int steps() const { return window / 16 + (hist + 15) / 16; }
};

__device__ __forceinline__ uint32_t bits(__half2 h) { return *reinterpret_cast<const uint32_t*>(&h); }
__device__ __forceinline__ __half2 halves(uint32_t v) { return *reinterpret_cast<const __half2*>(&v); }

// Two e4m3 codes (in the low bytes) as f16, times scale.
__device__ __forceinline__ uint32_t fp8_pair(uint32_t codes, __half2 scale) {
    uint32_t h;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"(uint16_t(codes)));
    return bits(__hmul2(halves(h), scale));
}

// The scale whose f32 exponent is stored.
__device__ __forceinline__ __half scale_of(uint32_t exponent) { return __float2half_rn(__uint_as_float(exponent << 23)); }

// x as f16 plus f16.
__device__ __forceinline__ void split(float x, __half& hi, __half& lo) {
    hi = __float2half_rn(x);
    lo = __float2half_rn(__fsub_rn(x, __half2float(hi)));
}

__device__ __forceinline__ void split2(float x, float y, uint32_t& hi, uint32_t& lo) {
    __half a, b, c, d;
    split(x, a, c);
    split(y, b, d);
    hi = bits(__halves2half2(a, b));
    lo = bits(__halves2half2(c, d));
}

__device__ __forceinline__ void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices: the a fragment of 16 rows and 16 columns when lane l points to row l % 16, column l / 16 * 8.
__device__ __forceinline__ void ldmatrix4(uint32_t (&a)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(at));
}

// A weight from a score and the greatest one.
__device__ __forceinline__ float weight_of(float score, float top) { return __fmul_rn(expf(__fsub_rn(score, top)), WEIGHT_ONE); }

// What a head's sum of values is multiplied with. The sink takes part in the sum of weights and not in the greatest score: it may be far
// above all scores, and the weights' bits are few.
__device__ __forceinline__ float inverse_of(const float* sums, int pitch, float top, float sink) {
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < SPLITS; s++) sum = __fadd_rn(sum, sums[s * pitch]);
    return __fdiv_rn(1.0f, __fadd_rn(sum, __fmul_rn(expf(__fsub_rn(sink, top)), WEIGHT_ONE)));
}
