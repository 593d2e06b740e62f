// Softmax over keys in pieces that are merged in order: the same operations whether one block does all pieces of a query or many
// blocks do one each.
#pragma once
#include "common.cuh"

// A warp's share of a running softmax: maximum, sum, and E accumulated values per lane (element lane + 32 * e).
template <int E>
struct Running {
    float max, sum, acc[E];
    __device__ __forceinline__ void clear(float m, float s) {
        max = m;
        sum = s;
#pragma unroll
        for (int e = 0; e < E; e++) acc[e] = 0.0f;
    }
    __device__ __forceinline__ void merge(float m, float s, const float (&a)[E]) {
        const float top = fmaxf(max, m), c = expf(__fsub_rn(max, top)), d = expf(__fsub_rn(m, top));
        max = top;
        sum = __fmaf_rn(sum, c, __fmul_rn(s, d));
#pragma unroll
        for (int e = 0; e < E; e++) acc[e] = __fmaf_rn(acc[e], c, __fmul_rn(a[e], d));
    }
    // Takes n <= N keys: their scores are known to all lanes, value(k, e) gives this lane's element e of key k.
    template <int N, class V>
    __device__ __forceinline__ void take(const float (&score)[N], int n, V value) {
        float top = max;
#pragma unroll
        for (int k = 0; k < N; k++)
            if (k < n) top = fmaxf(top, score[k]);
        const float c = expf(__fsub_rn(max, top));
        max = top;
        sum = __fmul_rn(sum, c);
#pragma unroll
        for (int e = 0; e < E; e++) acc[e] = __fmul_rn(acc[e], c);
#pragma unroll
        for (int k = 0; k < N; k++) {
            if (k >= n) break;
            const float p = expf(__fsub_rn(score[k], top));
            sum = __fadd_rn(sum, p);
#pragma unroll
            for (int e = 0; e < E; e++) acc[e] = __fmaf_rn(p, value(k, e), acc[e]);
            if (k % 4 == 3) asm volatile("" ::: "memory");
        }
    }
};

// Partial results in scratch memory: per (query row, head, piece) [max, sum, head_dim values].
template <int E>
__device__ __forceinline__ void store_partial(const Running<E>& r, float* to, int head_dim) {
    const int lane = threadIdx.x & 31;
    if (lane == 0) to[0] = r.max, to[1] = r.sum;
#pragma unroll
    for (int e = 0; e < E; e++)
        if (lane + 32 * e < head_dim) to[2 + lane + 32 * e] = r.acc[e];
}

template <int E>
__device__ __forceinline__ void finish(const Running<E>& r, float* out, int head_dim) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int e = 0; e < E; e++)
        if (lane + 32 * e < head_dim) out[lane + 32 * e] = __fdiv_rn(r.acc[e], r.sum);
}

// Merges `pieces` partial results after a start of (max, sum) and writes the head's output.
template <int E>
__device__ __forceinline__ void merge_partials(const float* from, int pieces, int head_dim, float max, float sum, float* out) {
    const int lane = threadIdx.x & 31;
    Running<E> run;
    run.clear(max, sum);
    for (int s = 0; s < pieces; s++, from += head_dim + 2) {
        float a[E];
#pragma unroll
        for (int e = 0; e < E; e++) a[e] = lane + 32 * e < head_dim ? from[2 + lane + 32 * e] : 0.0f;
        run.merge(from[0], from[1], a);
    }
    finish(run, out, head_dim);
}

#define FOR_EACH_WIDTH(X) X(1) X(2) X(4) X(8) X(16)
