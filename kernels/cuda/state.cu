// Writing state rows, and the numeric profile of cached rows. CPU reference: kernels/src/cpu/state_rows.rs, sparse.rs, math/lowp.rs.
#include "common.cuh"

// Writes row r of x at its position in its bank; a block per row.
extern "C" __global__ void state_write(Step s, Slot slot, const float* x) {
    after_previous();
    const int r = blockIdx.x;
    // A ring keeps the last rows only: an earlier row of the same step would race with the one that replaces it.
    const int span = s.span_of[r], end = s.first_pos[span] + s.span_rows[span];
    if (slot.ring && s.positions[r] + slot.ring < end) return;
    store_row(slot, slot_row(slot, s.banks[span], s.positions[r]), x + int64_t(r) * slot.width);
}

// FP8 round trip of the un-rotated part of each row, then f16 for all of it; a block per row.
extern "C" __global__ void round_kv(float* x, int width, int rope_dim) {
    after_previous();
    extern __shared__ float row[];
    float* g = x + int64_t(blockIdx.x) * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) row[i] = g[i];
    __syncthreads();
    fp8_round_trip(row, width - rope_dim);
    for (int i = threadIdx.x; i < width; i += blockDim.x) g[i] = f16_round(row[i]);
}

// Hadamard and FP4 round trip of each head; a block per head.
extern "C" __global__ void round_index(float* x, int head_dim) {
    after_previous();
    extern __shared__ float row[];
    float* g = x + int64_t(blockIdx.x) * head_dim;
    for (int i = threadIdx.x; i < head_dim; i += blockDim.x) row[i] = g[i];
    hadamard(row, head_dim);
    fp4_round_trip(row, head_dim);
    for (int i = threadIdx.x; i < head_dim; i += blockDim.x) g[i] = row[i];
}
