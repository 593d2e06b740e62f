// Grouped-query attention over append-only rows of f16 or f32, causal. CPU reference: kernels/src/cpu/attention.rs.
//
// A warp has one head of one query row and one piece of PIECE keys, or all pieces of it when gridDim.z is 1.
#include "softmax.cuh"

constexpr int PIECE = 256;
constexpr int TILE = 4;
constexpr int WARPS = 4;

__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(float x) { return x; }

template <int E, class T>
__device__ __forceinline__ void attention(Step s, Slot ks, Slot vs, int heads, int per_kv, int head_dim, float scale, const float* q, float* partial, float* out) {
    const int lane = threadIdx.x, row = blockIdx.x, head = blockIdx.y * WARPS + threadIdx.y;
    if (head >= heads) return;
    const uint64_t bank = s.banks[s.span_of[row]];
    const int keys = s.positions[row] + 1, pieces = (keys + PIECE - 1) / PIECE, at = head / per_kv * head_dim;
    const int64_t item = int64_t(row) * heads + head;
    float qe[E];
#pragma unroll
    for (int e = 0; e < E; e++) qe[e] = lane + 32 * e < head_dim ? q[item * head_dim + lane + 32 * e] : 0.0f;
    const bool alone = gridDim.z == 1;
    Running<E> all;
    all.clear(-CUDART_INF_F, 0.0f);
    for (int piece = alone ? 0 : blockIdx.z; piece < pieces; piece += gridDim.z) {
        Running<E> part;
        part.clear(-CUDART_INF_F, 0.0f);
        const int end = min(keys, (piece + 1) * PIECE);
        for (int first = piece * PIECE; first < end; first += TILE) {
            const int n = min(TILE, end - first);
            float score[TILE], value[TILE][E];
#pragma unroll
            for (int k = 0; k < TILE; k++) {
                const int key = min(first + k, end - 1);
                const T* kr = reinterpret_cast<const T*>(slot_row(ks, bank, key)) + at;
                const T* vr = reinterpret_cast<const T*>(slot_row(vs, bank, key)) + at;
                float dot = 0.0f;
#pragma unroll
                for (int e = 0; e < E; e++) {
                    // Past the head's end q is zero and the accumulated value is not written.
                    const int i = min(lane + 32 * e, head_dim - 1);
                    dot = __fmaf_rn(qe[e], widen(kr[i]), dot);
                    value[k][e] = widen(vr[i]);
                }
                score[k] = __fmul_rn(warp_sum(dot), scale);
            }
            part.take(score, n, [&](int k, int e) { return value[k][e]; });
        }
        if (alone) {
            // The first merge is with the empty softmax, whose factor is exp(-inf) = 0.
            all.merge(part.max, part.sum, part.acc);
        } else {
            store_partial(part, partial + (item * gridDim.z + piece) * (head_dim + 2), head_dim);
        }
    }
    if (alone) finish(all, out + item * head_dim, head_dim);
}

// Merges the pieces of a decode step; blocks (row, head).
template <int E>
__device__ __forceinline__ void attention_merge(Step s, int heads, int head_dim, int pieces, const float* partial, float* out) {
    const int row = blockIdx.x;
    const int64_t item = int64_t(row) * heads + blockIdx.y;
    const int mine = (s.positions[row] + PIECE) / PIECE;
    merge_partials<E>(partial + item * pieces * (head_dim + 2), mine, head_dim, -CUDART_INF_F, 0.0f, out + item * head_dim);
}

#define KERNEL(E, T, NAME)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128, E > 4 ? 2 : 4) attention_##NAME##_##E(Step s, Slot k, Slot v, int heads, int per_kv,  \
                                                                             int head_dim, float scale, const float* q,      \
                                                                             float* partial, float* out) { after_previous();                   \
        attention<E, T>(s, k, v, heads, per_kv, head_dim, scale, q, partial, out);                                           \
    }
#define KERNELS(E)                                                                                                               \
    KERNEL(E, __half, f16)                                                                                                       \
    KERNEL(E, float, f32)                                                                                                        \
    extern "C" __global__ void attention_merge_##E(Step s, int heads, int head_dim, int pieces, const float* partial, float* out) { after_previous(); \
        attention_merge<E>(s, heads, head_dim, pieces, partial, out);                                                            \
    }
KERNELS(1) KERNELS(2) KERNELS(4) KERNELS(8)
