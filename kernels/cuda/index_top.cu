// The choice of the best compressed rows from the indexer's scores. CPU reference: kernels/src/cpu/indexer.rs (top_rows). Integers and
// comparisons only: all kernels here choose the same rows.
#include "common.cuh"

// A float's bits in an order that unsigned comparison knows; 0 is less than any of them.
__device__ __forceinline__ uint32_t ordered(float x) {
    const uint32_t b = __float_as_uint(x);
    return b & 0x80000000u ? max(~b, 1u) : b | 0x80000000u;
}

// Number of all threads' `n`, added up, for a block of T. Calls take turns with two buffers (`turn`): who is a call ahead does not
// overwrite what others still add.
template <int T>
__device__ __forceinline__ uint32_t block_count(uint32_t n, uint32_t (&parts)[2][32], int turn) {
    n = __reduce_add_sync(~0u, n);
    if ((threadIdx.x & 31) == 0) parts[turn & 1][threadIdx.x >> 5] = n;
    __syncthreads();
    return __reduce_add_sync(~0u, int(threadIdx.x & 31) < T / 32 ? parts[turn & 1][threadIdx.x & 31] : 0);
}

// The greatest number of bits `first` to LAST that at least `want` of the block's keys reach; `exact` when just as many do, which ends
// the search. Otherwise, with LAST = 0, it is the want-th largest key, and `above` keys are greater.
template <int T, int V, int LAST>
__device__ __forceinline__ uint32_t border(const uint32_t (&key)[V], int first, uint32_t want, uint32_t (&parts)[2][32], uint32_t& above,
                                           bool& exact) {
    uint32_t least = 0;
    above = 0;
    exact = false;
    for (int bit = first; bit >= LAST && !exact; bit--) {
        const uint32_t at = least | 1u << bit;
        uint32_t n = 0;
#pragma unroll
        for (int v = 0; v < V; v++) n += key[v] >= at;
        n = block_count<T>(n, parts, bit);
        if (n >= want) least = at;
        else above = n;   // the last border that is refused is least + 1
        exact = n == want;
    }
    return least;
}

// Sum of the `n` of threads before this one.
template <int T>
__device__ __forceinline__ uint32_t block_before(uint32_t n, uint32_t (&parts)[2][32]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint32_t upto = n;
#pragma unroll
    for (int k = 1; k < 32; k <<= 1) {
        const uint32_t o = __shfl_up_sync(~0u, upto, k);
        if (lane >= k) upto += o;
    }
    __syncthreads();
    if (lane == 31) parts[0][warp] = upto;
    __syncthreads();
    return upto - n + __reduce_add_sync(~0u, lane < warp ? parts[0][lane] : 0);
}

// Writes the indices of the `want` largest of the block's keys, of which a thread has V with ascending indices; keys that are not there
// are 0 and have an index of `visible` or more.
template <int T, int V, class Index>
__device__ __forceinline__ void choose(uint32_t (&key)[V], Index index, int visible, uint32_t want, uint32_t (&parts)[2][32], int* to) {
    uint32_t low = ~0u, high = 0;
    if (V <= 8) {
        // Scores of one sign and size share their first bits: counted from the smallest of them, keys are shorter.
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
        for (int v = 0; v < V; v++)
            if (index(v) < visible) low = min(low, key[v]), high = max(high, key[v]);
        low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
        __syncthreads();
        if (lane == 0) parts[0][warp] = low, parts[1][warp] = high;
        __syncthreads();
        low = __reduce_min_sync(~0u, lane < T / 32 ? parts[0][lane] : ~0u), high = __reduce_max_sync(~0u, lane < T / 32 ? parts[1][lane] : 0);
        __syncthreads();
#pragma unroll
        for (int v = 0; v < V; v++) key[v] = index(v) < visible ? key[v] - low : 0;
    }
    uint32_t above;
    bool exact;
    const uint32_t least = border<T, V, 0>(key, V <= 8 ? 31 - __clz(high - low) : 31, want, parts, above, exact), ties = exact ? 0 : want - above;
    const auto greater = [&](int v) { return exact ? key[v] >= least : key[v] > least; };
    const auto equal = [&](int v) { return !exact && key[v] == least && (V > 8 || index(v) < visible); };
    uint32_t mine = 0;   // greater ones, and equal ones in the upper half
#pragma unroll
    for (int v = 0; v < V; v++) mine += greater(v) ? 1u : equal(v) ? 0x10000u : 0u;
    const uint32_t before = block_before<T>(mine, parts);
    uint32_t tied = before >> 16;
    to += (before & 0xffff) + min(tied, ties);
#pragma unroll
    for (int v = 0; v < V; v++)
        if (greater(v) || (equal(v) && tied++ < ties)) *to++ = index(v);
}

// Indices of the top_k largest of scores[row - row0][0..visible], ascending, ties to the lower index; counts[row] = -1 when all are seen.
// A block of T per row holds V scores a thread in registers, at most T * V of them. The k-th largest is found bit by bit: in as many
// steps whatever the scores are (a histogram's counters collide when scores share their exponent, as they do). With many scores, a
// bound that the threads' largest have is found first, and what reaches it is left to one score a thread.
template <int T, int V>
__device__ __forceinline__ void top_of(Step st, int top_k, int ratio, const float* scores, int row0, int stride, int* rows, int* counts) {
    __shared__ uint32_t parts[2][32];
    const int row = row0 + blockIdx.x, visible = (st.positions[row] + 1) / ratio;
    if (visible <= top_k) {
        if (threadIdx.x == 0) counts[row] = -1;
        return;
    }
    const float* s = scores + int64_t(blockIdx.x) * stride;
    const int first = threadIdx.x * V;
    uint32_t key[V];
    if (V % 4 == 0) {
#pragma unroll
        for (int v = 0; v < V; v += 4) {
            // The row is a multiple of 4 long, at a multiple of 16 bytes.
            const float4 x = first + v < visible ? *reinterpret_cast<const float4*>(s + first + v) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            key[v] = ordered(x.x), key[v + 1] = ordered(x.y), key[v + 2] = ordered(x.z), key[v + 3] = ordered(x.w);
        }
    } else {
#pragma unroll
        for (int v = 0; v < V; v++) key[v] = first + v < visible ? ordered(s[first + v]) : 0;
    }
#pragma unroll
    for (int v = 0; v < V; v++)
        if (first + v >= visible) key[v] = 0;
    if (threadIdx.x == 0) counts[row] = top_k;
    int* to = rows + int64_t(row) * top_k;
    if (V >= 16 && top_k <= T / 2) {
        __shared__ uint32_t left_key[T];
        __shared__ int left_index[T];
        // Half of the threads have a score that reaches their largest scores' median; few scores are greater than that.
        uint32_t most[1] = {0}, above;
        bool exact;
#pragma unroll
        for (int v = 0; v < V; v++) most[0] = max(most[0], key[v]);
        const uint32_t bound = max(border<T, 1, 18>(most, 31, max(uint32_t(top_k), T / 2u), parts, above, exact), 1u);
        uint32_t mine = 0;
#pragma unroll
        for (int v = 0; v < V; v++) mine += key[v] >= bound;
        uint32_t at = block_before<T>(mine, parts);
        __syncthreads();
        const uint32_t left = block_count<T>(mine, parts, 1);
        if (left <= T && left >= uint32_t(top_k)) {
#pragma unroll
            for (int v = 0; v < V; v++)
                if (key[v] >= bound) left_key[at] = key[v], left_index[at++] = first + v;
            __syncthreads();
            const bool there = threadIdx.x < left;
            uint32_t one[1] = {there ? left_key[threadIdx.x] : 0};
            const int place = there ? left_index[threadIdx.x] : visible;
            choose<T, 1>(one, [&](int) { return place; }, visible, top_k, parts, to);
            return;
        }
        __syncthreads();
    }
    choose<T, V>(key, [&](int v) { return first + v; }, visible, top_k, parts, to);
}

#define TOP_KERNEL(T, V)                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(T) index_top_##T##_##V(Step st, int top_k, int ratio, const float* scores, int row0, int stride, int* rows, \
                                                                        int* counts) {                                                          \
        after_previous();                                                                                                                       \
        top_of<T, V>(st, top_k, ratio, scores, row0, stride, rows, counts);                                                                           \
    }
// Few rows want the threads, many rows the registers.
TOP_KERNEL(512, 2) TOP_KERNEL(512, 4) TOP_KERNEL(512, 8) TOP_KERNEL(512, 16) TOP_KERNEL(1024, 16) TOP_KERNEL(1024, 32)

// Number of threads of the block with a lower index for which `take` holds; `total` gets the number of all.
__device__ __forceinline__ int block_rank(bool take, int* sums, int& total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const uint32_t votes = __ballot_sync(~0u, take);
    __syncthreads();
    if (lane == 0) sums[warp] = __popc(votes);
    __syncthreads();
    int before = 0;
    total = 0;
    for (int i = 0; i < warps; i++) {
        if (i < warp) before += sums[i];
        total += sums[i];
    }
    return before + __popc(votes & ((1u << lane) - 1));
}

// For any number of scores, which are read from memory five times. A block of 512 per row: the k-th largest is found byte by byte,
// then one ordered pass writes the indices.
extern "C" __global__ void __launch_bounds__(512) index_top(Step st, int top_k, int ratio, const float* scores, int row0, int stride,
    int* rows, int* counts) {
    after_previous();
    __shared__ int histogram[256], sums[32];
    __shared__ uint32_t chosen, left;
    const int row = row0 + blockIdx.x, visible = (st.positions[row] + 1) / ratio;
    if (visible <= top_k) {
        if (threadIdx.x == 0) counts[row] = -1;
        return;
    }
    const float* s = scores + int64_t(blockIdx.x) * stride;
    uint32_t prefix = 0, mask = 0;
    int want = top_k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += blockDim.x) histogram[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < visible; i += blockDim.x) {
            const uint32_t key = ordered(s[i]);
            if ((key & mask) == prefix) atomicAdd(&histogram[(key >> shift) & 255], 1);
        }
        __syncthreads();
        // Lane l has bins 255 - 8 l downwards; the first one that fills what is wanted is chosen.
        if (threadIdx.x < 32) {
            const int lane = threadIdx.x, top = 255 - 8 * lane;
            int sum = 0;
            for (int i = 0; i < 8; i++) sum += histogram[top - i];
            int upto = sum;
            for (int k = 1; k < 32; k <<= 1) {
                const int o = __shfl_up_sync(~0u, upto, k);
                if (lane >= k) upto += o;
            }
            int above = upto - sum;
            if (above < want && upto >= want) {
                int b = top;
                while (above + histogram[b] < want) above += histogram[b--];
                chosen = b;
                left = want - above;
            }
        }
        __syncthreads();
        prefix |= chosen << shift;
        mask |= 255u << shift;
        want = left;
        __syncthreads();
    }
    // `want` of those equal to the threshold are taken, in index order, and all above it.
    int at = 0, equal = 0;
    for (int base = 0; base < visible; base += blockDim.x) {
        const int i = base + threadIdx.x;
        const uint32_t key = i < visible ? ordered(s[i]) : 0;
        int n, m;
        const int e = block_rank(i < visible && key == prefix, sums, n);
        const bool take = i < visible && (key > prefix || (key == prefix && equal + e < want));
        const int r = block_rank(take, sums, m);
        if (take) rows[int64_t(row) * top_k + at + r] = i;
        at += m;
        equal += n;
    }
    if (threadIdx.x == 0) counts[row] = top_k;
}
