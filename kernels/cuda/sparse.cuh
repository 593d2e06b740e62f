// What the kernels of attention over the window and compressed rows share. CPU reference: kernels/src/cpu/sparse.rs.
#pragma once
#include "common.cuh"

// Laid out as `SparseArg` in kernels/src/cuda/sparse_attention.rs.
struct Sparse {
    int heads, head_dim, window, ratio;   // ratio 0: no compressed rows
    float scale;
    int top_k;
    const float* sinks;    // [heads]
    const float* q;        // [rows, heads * head_dim]
    const float* kv;       // [rows, head_dim]
    const int* selected;   // [rows, top_k]; null: all visible rows
    const int* counts;     // [rows]; -1: all visible rows
};

__device__ __forceinline__ int history(const Sparse& p, int row, int pos) {
    const int visible = p.ratio ? (pos + 1) / p.ratio : 0;
    if (!p.selected) return visible;
    const int count = __ldcg(p.counts + row);  // some kernels ask before they wait
    return count >= 0 ? count : visible;
}
