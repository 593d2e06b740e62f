// What the kernels of compressors share: their arguments, and where a frontier lies.
#pragma once
#include "common.cuh"

// Laid out as `CompressArg` in kernels/src/cuda/sparse.rs.
struct Compress {
    int ratio, dim, overlap, rope_dim, official, indexer;
    float eps;
    int pad;
    const float* ape;           // [ratio, width]
    const float* norm;          // [dim]
    const double* frequencies;  // [rope_dim / 2]
    const float* values;        // [rows, width]
    const float* scores;        // [rows, width]
};

// The frontier: values then scores, each [slots, width]; with overlap, slots 0..ratio are the previous window and the rest the open one.
struct Frontier {
    float *values, *scores;
};

__device__ __forceinline__ Frontier frontier(const Slot& slot, uint64_t bank) {
    float* base = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(bank) + slot.offset);
    return {base, base + slot.width / 2};
}
