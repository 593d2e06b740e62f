// Attention on tensor cores, for rows of 512 whose last 64 are rotary: raw rows in f16, compressed ones in FP8 (the official profile).
//
// A query's keys have places: the window's rows first, padded to a multiple of 64, then the compressed ones. Scores of all places go to
// scratch memory with the address of each place's row; a second kernel makes weights of them and sums the values. Every sum has an order
// that depends on the query's own keys alone: a dot product is summed by parts of 64 dimensions, values by pieces of up to 20
// steps of 16 places. So blocks of many heads (prefill) and of few (decode) give the same bits.
//
// Keys are exact in f16: e4m3 times a power of two, f16, and this step's rows, which the profile has rounded. (A chunk of 64 values that
// are all below 1.4e-5 would lose its scale; the profile's rows are normed.) Queries and weights are two f16 each, which is 22 bits.
#pragma once
#include <type_traits>

#include "sparse.cuh"

constexpr int DIM = 512, NOPE = 448, TAIL = 456;  // bytes of an FP8 row: codes, 7 scales and one unused, f16
constexpr int CHUNKS = DIM / 64;
constexpr int MOST_STEPS = 20;  // of a piece
constexpr float WEIGHT_ONE = 15.0f;  // the greatest weight is 2^15, so that low halves of others are not subnormal
constexpr float LOG2_E = 1.44269504f;

// Laid out as `PlacesArg` in kernels/src/cuda/sparse_tensor.rs.
struct Places {
    int first;               // first query row of the launch
    int stride;              // places of a query: a multiple of 64
    float* scores;           // [rows of the launch, heads, stride]
    float* tops;             // [rows of the launch, heads, stride / places of a warp's tile]: the greatest of each tile
    const uint8_t** keys;    // [rows of the launch, stride]
    __half* recent;          // [rows of the step, 512]: this step's rows
    uint8_t* exponents;      // [rows of the launch, stride, 8]: scales of compressed places as they are stored, for few rows
};

// What a query sees.
struct Seen {
    int first, recent;   // position of the window's first row, and rows
    int window, hist;    // places of the window, and compressed rows
    // Of `row` at `pos`: positions may be read before the kernel before this one is done.
    __device__ __forceinline__ Seen(const Sparse& p, int row, int pos) {
        first = max(0, pos + 1 - p.window);
        recent = pos + 1 - first;
        window = (recent + 63) & ~63;
        hist = history(p, row, pos);
    }
    __device__ __forceinline__ bool holds(int place) const { return place < recent || (place >= window && place < window + hist); }
    // Steps of 16 places.
    __device__ __forceinline__ int steps() const { return window / 16 + (hist + 15) / 16; }
    // Steps whose sums of values are added up before they are added to those before: tensor cores cut what does not fit the sum. Two pieces
    // at least.
    __device__ __forceinline__ int piece() const { return min(MOST_STEPS, (steps() + 1) / 2); }
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

// x and y, each as f16 plus f16.
__device__ __forceinline__ void split2(float x, float y, uint32_t& hi, uint32_t& lo) {
    const __half2 h = __floats2half2_rn(x, y);
    const float2 back = __half22float2(h);
    hi = bits(h);
    lo = bits(__floats2half2_rn(__fsub_rn(x, back.x), __fsub_rn(y, back.y)));
}

// A load from global memory: the compiler does not know it of addresses that come from memory.
template <class T>
__device__ __forceinline__ T fetch(const void* p) {
    __builtin_assume(__isGlobal(p));
    return *reinterpret_cast<const T*>(p);
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

// What all weights of a head have in common, from its greatest score. Its rounding falls out when they are divided by their sum.
__device__ __forceinline__ float weight_base(float top) { return __fmaf_rn(-LOG2_E, top, WEIGHT_ONE); }

// e^(score - top) * 2^15. The error of the exponent's product grows with the distance from the top, and the weight falls faster.
__device__ __forceinline__ float weight_of(float score, float base) {
    float w;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(w) : "f"(__fmaf_rn(score, LOG2_E, base)));
    return w;
}

// What a head's sum of values is multiplied with. The sink takes part in the sum of weights and not in the greatest score: it may be far
// above all scores, and the weights' bits are few.
__device__ __forceinline__ float inverse_of(float sum, float base, float sink) {
    return __fdiv_rn(1.0f, __fadd_rn(sum, weight_of(sink, base)));
}

#define NONE (-CUDART_INF_F)  // score of a place that holds nothing
