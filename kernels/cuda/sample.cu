// What the sampler needs of rows of logits, so that they need not be read back. Reference: kernels/src/ops/sample.rs.
//
// A row is cut into chunks of 2,048 logits, a block each. `sample_best` finds the best logit, and from the best ones of groups of 128 a
// threshold that at least as many logits reach as best ones are wanted: of k groups whose best reaches it, each has one. `sample_rows`
// lists what reaches it (few more than wanted, where good tokens do not all lie side by side), sums weights, sorts the list and draws.
// What is done for the row as a whole, its last block does.
//
// Keys order floats as integers: NaN counts as -inf, +inf as the largest number, both zeros are equal. Behind a key stands the
// complement of the token, so that the larger of two such pairs is the better candidate and no two are equal.
#include "common.cuh"

constexpr int CHUNK = 2048, GROUPS = 16, MAX_CHUNKS = 256, MAX_GROUPS = MAX_CHUNKS * GROUPS, LIST = 1024, QUERIES = 64;

// One row's query; laid out as `Query` in kernels/src/cuda/sample.rs.
struct SampleQuery {
    double draw;    // in 0..1, negative: none
    int row;
    int best;       // how many
    float scale;    // 0: no weights
    int norm;       // whether weights at scale 1 are summed
};

struct SampleQueries {
    SampleQuery q[QUERIES];
};

// Laid out as `Head` in kernels/src/cuda/sample.rs.
struct SampleHead {
    double norm, total;
    double margin;      // of what was drawn; negative: nothing was
    uint64_t best;      // key and complement of the token
    uint64_t drawn;     // likewise
    uint32_t threshold; // a key that at least as many logits reach as are wanted
    uint32_t unused;
};

// The key of -inf.
constexpr uint32_t NOTHING = 0x007fffffu;

__device__ __forceinline__ uint32_t order_key(float x) {
    if (!(x > -CUDART_INF_F)) return NOTHING;
    const uint32_t b = __float_as_uint(__fadd_rn(fminf(x, CUDART_MAX_NORMAL_F), 0.0f));
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}

__device__ __forceinline__ float key_value(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

__device__ __forceinline__ uint64_t candidate(uint32_t key, int token) { return uint64_t(key) << 32 | ~uint32_t(token); }

// The value that x counts as.
__device__ __forceinline__ float ordered(float x) { return x > -CUDART_INF_F ? fminf(x, CUDART_MAX_NORMAL_F) : -CUDART_INF_F; }

// Logits i .. i + 4, -inf behind the row's end.
__device__ __forceinline__ void load_four(const float* x, int i, int width, float v[4]) {
    if ((width & 3) == 0 && i < width) {
        const float4 f = *reinterpret_cast<const float4*>(x + i);
        v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
    } else {
        for (int j = 0; j < 4; j++) v[j] = i + j < width ? x[i + j] : -CUDART_INF_F;
    }
}

// exp(x) for x <= 0, in the very operations of `exp_nonpositive` in kernels/src/math/exp.rs: the sampler draws by the same weights on
// the host.
__device__ __forceinline__ float weight_of(float x) {
    const float clamped = x > -87.0f ? x : -87.0f;
    const float t = __fadd_rn(__fmul_rn(clamped, 1.44269504088896340736f), 12582912.0f);
    const float n = __fsub_rn(t, 12582912.0f);
    const float r = __fsub_rn(__fsub_rn(clamped, __fmul_rn(n, 0.6933594f)), __fmul_rn(n, -2.1219444e-4f));
    float p = 1.0f / 5040.0f;
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 720.0f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 120.0f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 24.0f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f / 6.0f);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f);
    p = __fadd_rn(__fmul_rn(p, r), 1.0f);
    return x > -87.0f ? __uint_as_float(__float_as_uint(p) + (__float_as_uint(t) << 23)) : 0.0f;
}

// The sum of v of this lane and those below.
__device__ __forceinline__ double warp_prefix_f64(double v) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 1; m < 32; m *= 2) {
        const double other = __shfl_up_sync(~0u, v, m);
        if (lane >= m) v += other;
    }
    return v;
}

__device__ __forceinline__ double warp_sum_f64(double v) {
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) v += __shfl_xor_sync(~0u, v, m);
    return v;
}

// Whether this block is the last of the row's to come here; what the others wrote before is then there to be read (past the L1 cache).
__device__ __forceinline__ bool last_of_row(uint32_t* tickets) {
    __shared__ bool last;
    // The barrier orders the block's writes before this thread's release, and its acquire before the block's reads.
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t before;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(tickets + blockIdx.y) : "memory");
        last = before == gridDim.x - 1;
        if (last) tickets[blockIdx.y] = 0;
    }
    __syncthreads();
    return last;
}

// Where in a histogram, from its uppermost bin down, the `wanted`-th is: its bin (-1: there are fewer), which of that bin's it is, and how
// many that bin has.
struct Found {
    int bin, rest, count;
};

// For a block, of whose warps each finds it.
__device__ __forceinline__ Found nth_from_top(const int* histogram, int wanted) {
    // Lane 0 has the uppermost eight bins.
    const int lane = threadIdx.x & 31, first = 248 - 8 * lane;
    const int4 low = *reinterpret_cast<const int4*>(histogram + first), high = *reinterpret_cast<const int4*>(histogram + first + 4);
    const int h[8] = {high.w, high.z, high.y, high.x, low.w, low.z, low.y, low.x};
    int sum = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) sum += h[j];
    int above = sum;
#pragma unroll
    for (int m = 1; m < 32; m *= 2) {
        const int other = __shfl_up_sync(~0u, above, m);
        if (lane >= m) above += other;
    }
    const int owner = __ffs(__ballot_sync(~0u, above >= wanted)) - 1;
    if (owner < 0) return {-1, wanted, 0};
    Found mine = {first + 7, wanted - (above - sum), h[0]};
#pragma unroll
    for (int j = 0; j < 7; j++)
        if (mine.bin == first + 7 - j && mine.rest > h[j]) mine = {mine.bin - 1, mine.rest - h[j], h[j + 1]};
    return {__shfl_sync(~0u, mine.bin, owner), __shfl_sync(~0u, mine.rest, owner), __shfl_sync(~0u, mine.count, owner)};
}

// A key that at least `wanted` of n keys reach, and few more; 0 where there are not so many that are more than -inf. For a block; `top` and
// `bottom` are the largest key and the smallest of those. Values are counted in 256 bins of equal width, and where many share the bin of
// the `wanted`-th, it is cut into bins of its own. (Bit by bit, with counts of the whole block, it took 5.8 us; with histograms of the
// key's digits, which are alike in most keys, 2.3; so it takes 0.9.)
__device__ __forceinline__ uint32_t group_threshold(const uint32_t* keys, int n, int wanted, uint32_t top, uint32_t bottom, int* histogram) {
    __shared__ uint32_t lows[8], highs[8];
    constexpr int FEW = 128, ROUNDS = 4;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (bottom > top) return 0;
    for (int round = 0;; round++) {
        const float high = key_value(top), low = key_value(bottom);
        // Equal ones fall into one bin.
        const float scale = high > low ? fminf(255.0f / (high - low), 3e38f) : 3e38f;
        auto bin_of = [&](float v) { return 255 - min(int(__fmul_rn(__fsub_rn(high, v), scale)), 255); };
        for (int i = threadIdx.x; i < n; i += 256) {
            const float v = key_value(keys[i]);
            if (v <= high && v >= low) atomicAdd(&histogram[bin_of(v)], 1);
        }
        __syncthreads();
        const Found found = nth_from_top(histogram, wanted);
        if (found.bin < 0) return 0;
        if (found.count <= FEW || top == bottom || round == ROUNDS) {
            // The bin's lower end, and a little less: whatever fell into it must reach this.
            const float end = high - __fdiv_rn(float(256 - found.bin), scale) * 1.000001f;
            return max(order_key(end), NOTHING + 3) - 2;
        }
        wanted = found.rest;
        uint32_t least = ~0u, most = 0;
        for (int i = threadIdx.x; i < n; i += 256) {
            const uint32_t key = keys[i];
            const float v = key_value(key);
            if (v <= high && v >= low && bin_of(v) == found.bin) least = min(least, key), most = max(most, key);
        }
        bottom = __reduce_min_sync(~0u, least), top = __reduce_max_sync(~0u, most);
        if (lane == 0) lows[warp] = bottom, highs[warp] = top;
        __syncthreads();
        histogram[threadIdx.x] = 0;
        for (int w = 0; w < 8; w++) bottom = min(bottom, lows[w]), top = max(top, highs[w]);
        __syncthreads();
    }
}

// Blocks: (chunk, query). `groups` has GROUPS values a chunk.
extern "C" __global__ void __launch_bounds__(256) sample_best(const __grid_constant__ SampleQueries queries, const float* logits, int width, uint64_t* groups, uint32_t* tickets, SampleHead* heads) {
    after_previous();
    __shared__ uint32_t keys[MAX_GROUPS];
    __shared__ uint64_t parts[8];
    __shared__ uint32_t bottoms[8];
    __shared__ __align__(16) int histogram[256];
    const SampleQuery& q = queries.q[blockIdx.y];
    const float* x = logits + int64_t(q.row) * width;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = gridDim.x * GROUPS;
    uint64_t* all = groups + int64_t(blockIdx.y) * n;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int i = blockIdx.x * CHUNK + h * (CHUNK / 2) + threadIdx.x * 4;
        float v[4];
        load_four(x, i, width, v);
        uint32_t key = order_key(v[0]);
        int at = i;
#pragma unroll
        for (int j = 1; j < 4; j++) {
            const uint32_t k = order_key(v[j]);
            if (k > key) key = k, at = i + j;
        }
        const uint32_t top = __reduce_max_sync(~0u, key);
        const uint32_t who = __reduce_max_sync(~0u, key == top ? ~uint32_t(at) : 0u);
        if (lane == 0) all[blockIdx.x * GROUPS + h * 8 + warp] = uint64_t(top) << 32 | who;
    }
    if (!last_of_row(tickets)) return;

    uint64_t best = 0;
    uint32_t bottom = ~0u;
    for (int i = threadIdx.x; i < n; i += 256) {
        const uint64_t g = __ldcg(&all[i]);
        const uint32_t key = uint32_t(g >> 32);
        keys[i] = key;
        best = max(best, g);
        if (key > NOTHING) bottom = min(bottom, key);
    }
    const uint32_t top = __reduce_max_sync(~0u, uint32_t(best >> 32));
    const uint32_t who = __reduce_max_sync(~0u, uint32_t(best >> 32) == top ? uint32_t(best) : 0u);
    bottom = __reduce_min_sync(~0u, bottom);
    if (lane == 0) parts[warp] = uint64_t(top) << 32 | who, bottoms[warp] = bottom;
    histogram[threadIdx.x] = 0;
    __syncthreads();
    best = parts[0], bottom = bottoms[0];
    for (int w = 1; w < 8; w++) best = max(best, parts[w]), bottom = min(bottom, bottoms[w]);
    const uint32_t threshold = q.best > 1 ? group_threshold(keys, n, q.best, uint32_t(best >> 32), bottom, histogram) : 0;
    if (threadIdx.x == 0) {
        SampleHead& head = heads[blockIdx.y];
        head.norm = head.total = 0.0;
        head.margin = -1.0;
        head.best = best;
        head.drawn = 0;
        head.threshold = threshold;
    }
}

// The `wanted`-th largest candidate of a row, for rows of which too many reach the threshold (many equal logits); a block.
__device__ __forceinline__ uint64_t select_candidate(const float* x, int width, int wanted, int* histogram) {
    uint64_t prefix = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        __syncthreads();
        histogram[threadIdx.x] = 0;
        __syncthreads();
        int run = 0, bin = 0;
#pragma unroll 4
        for (int i = threadIdx.x * 4; i < width; i += 1024) {
            float v[4];
            load_four(x, i, width, v);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint64_t c = candidate(order_key(v[j]), i + j);
                if (i + j >= width || (shift < 56 && c >> (shift + 8) != prefix >> (shift + 8))) continue;
                const int b = int(c >> shift) & 255;
                // Equal ones follow each other here, and would queue at one counter.
                if (b != bin) {
                    if (run) atomicAdd(&histogram[bin], run);
                    run = 0, bin = b;
                }
                run++;
            }
        }
        if (run) atomicAdd(&histogram[bin], run);
        __syncthreads();
        const Found found = nth_from_top(histogram, wanted);
        prefix |= uint64_t(found.bin) << shift;
        wanted = found.rest;
    }
    return prefix;
}

// Writes the `wanted` best of n candidates in their order, by a block: SHARE threads count how many are better than OWN of them. Behind the
// list there are zeros up to a multiple of 32.
template <int SHARE, int OWN>
__device__ __forceinline__ void write_best(const uint64_t* list, int n, int wanted, uint64_t* to) {
    constexpr int STEP = 256 / SHARE;
    for (int i = threadIdx.x / SHARE; i < (n + 31) / 32 * 32; i += STEP * OWN) {
        uint64_t mine[OWN];
        int rank[OWN];
#pragma unroll
        for (int o = 0; o < OWN; o++) mine[o] = i + o * STEP < n ? list[i + o * STEP] : 0, rank[o] = 0;
        for (int k = threadIdx.x % SHARE; k < n; k += 8 * SHARE) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const uint64_t other = list[k + j * SHARE];
#pragma unroll
                for (int o = 0; o < OWN; o++) rank[o] += other > mine[o];
            }
        }
#pragma unroll
        for (int o = 0; o < OWN; o++) {
            for (int m = 1; m < SHARE; m *= 2) rank[o] += __shfl_xor_sync(~0u, rank[o], m);
            if (mine[o] != 0 && rank[o] < wanted && threadIdx.x % SHARE == 0) to[rank[o]] = mine[o];
        }
    }
}

// Blocks: (chunk, query), after `sample_best` of the same queries. `lists` has LIST candidates a query, `sums` two values a chunk,
// `best` `most` candidates a query.
extern "C" __global__ void __launch_bounds__(256, 4) sample_rows(const __grid_constant__ SampleQueries queries, const float* logits, int width, int most, uint64_t* lists, uint32_t* listed, double* sums, uint32_t* tickets, SampleHead* heads, uint64_t* best) {
    after_previous();
    __shared__ uint64_t stage[CHUNK];
    __shared__ double parts[2][256];
    __shared__ __align__(16) int histogram[256];
    __shared__ int count, base, chosen;
    const SampleQuery& q = queries.q[blockIdx.y];
    const float* x = logits + int64_t(q.row) * width;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, chunks = gridDim.x;
    SampleHead& head = heads[blockIdx.y];
    const int at = blockIdx.x * CHUNK + threadIdx.x * 4;
    float v[8];
    load_four(x, at, width, v);
    load_four(x, at + CHUNK / 2, width, v + 4);
    const uint32_t threshold = head.threshold;
    const float top = key_value(uint32_t(head.best >> 32));
    if (threadIdx.x == 0) count = 0;
    __syncthreads();

    // At scale 1 the weights are those of the norm.
    const bool weighs = q.scale > 0.0f, norms = q.norm && q.scale != 1.0f;
    double scaled = 0.0, plain = 0.0;
    if (q.best > 1) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int i = at + j % 4 + j / 4 * (CHUNK / 2);
            const uint32_t key = order_key(v[j]);
            if (key >= threshold && i < width) stage[atomicAdd(&count, 1)] = candidate(key, i);
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const float below = __fsub_rn(ordered(v[j]), top);
        if (weighs) scaled += double(weight_of(__fmul_rn(below, q.scale)));
        if (norms) plain += double(weight_of(below));
    }
    if (weighs) {
        scaled = warp_sum_f64(scaled);
        if (lane == 0) parts[0][warp] = scaled;
    }
    if (norms) {
        plain = warp_sum_f64(plain);
        if (lane == 0) parts[1][warp] = plain;
    }
    __syncthreads();
    uint64_t* list = lists + int64_t(blockIdx.y) * LIST;
    double* own = sums + int64_t(blockIdx.y) * 2 * chunks;
    if (threadIdx.x < 64 && (weighs || norms)) {
        double sum = lane < 8 ? parts[warp][lane] : 0.0;
        for (int m = 4; m > 0; m >>= 1) sum += __shfl_xor_sync(~0u, sum, m);
        if (lane == 0) own[warp * chunks + blockIdx.x] = sum;
    }
    if (count > 0) {
        if (threadIdx.x == 0) base = int(atomicAdd(&listed[blockIdx.y], uint32_t(count)));
        __syncthreads();
        for (int i = threadIdx.x; i < count && base + i < LIST; i += 256) list[base + i] = stage[i];
    }
    if (!last_of_row(tickets)) return;

    // Chunks' weights, with the request's scale for the first warp, with 1 for the second. Fetched first: the list takes longer.
    double fetched[MAX_CHUNKS / 32];
    const bool adds = warp < 2 && (weighs || norms);
#pragma unroll
    for (int k = 0; k < MAX_CHUNKS / 32; k++) fetched[k] = adds && k * 32 + lane < chunks ? __ldcg(&own[warp * chunks + k * 32 + lane]) : 0.0;
    int n = 0;
    if (q.best > 1) {
        // Before it is known how many there are: mostly these are all.
        const uint64_t early = __ldcg(&list[threadIdx.x]);
        n = int(__ldcg(&listed[blockIdx.y]));
        __syncthreads();
        if (threadIdx.x == 0) listed[blockIdx.y] = 0, count = 0;
        if (n <= LIST) {
            if (threadIdx.x < n) stage[threadIdx.x] = early;
            for (int i = threadIdx.x + 256; i < n; i += 256) stage[i] = __ldcg(&list[i]);
        } else {
            const uint64_t least = select_candidate(x, width, q.best, histogram);
#pragma unroll 4
            for (int i = threadIdx.x * 4; i < width; i += 1024) {
                float v[4];
                load_four(x, i, width, v);
                for (int j = 0; j < 4; j++) {
                    const uint64_t c = candidate(order_key(v[j]), i + j);
                    if (i + j < width && c >= least) stage[atomicAdd(&count, 1)] = c;
                }
            }
            n = q.best;
        }
    }
    if (threadIdx.x < 32 && q.best > 1) stage[n + threadIdx.x] = 0;
    if (threadIdx.x == 64) chosen = chunks;
    if (adds) {
        double sum = 0.0;
#pragma unroll
        for (int k = 0; k < MAX_CHUNKS / 32; k++) {
            if (k * 32 >= chunks) break;
            const double prefix = warp_prefix_f64(fetched[k]) + sum;
            parts[warp][k * 32 + lane] = prefix;
            sum = __shfl_sync(~0u, prefix, 31);
        }
        if (lane == 0 && warp == 0 && weighs) head.total = sum;
        if (lane == 0 && q.norm && warp == int(norms)) head.norm = sum;
    }
    __syncthreads();
    uint64_t* to = best + int64_t(blockIdx.y) * most;
    if (n <= 64)
        write_best<4, 1>(stage, n, q.best, to);
    else if (n <= 128)
        write_best<2, 1>(stage, n, q.best, to);
    else if (n <= 256)
        write_best<1, 1>(stage, n, q.best, to);
    else
        write_best<1, 2>(stage, n, q.best, to);
    if (!weighs || q.draw < 0.0) return;

    // The token at which the running sum of weights in token order passes `draw` of the total: its chunk, its eight, itself. Prefix sums
    // may fall by a rounding error; a target between two of these finds nothing, or something with next to no margin.
    const double target = q.draw * parts[0][chunks - 1];
    if (threadIdx.x < chunks && parts[0][threadIdx.x] > target) atomicMin(&chosen, int(threadIdx.x));
    __syncthreads();
    if (chosen == chunks) return;
    const double before = chosen ? parts[0][chosen - 1] : 0.0;
    const int first = chosen * CHUNK + threadIdx.x * 8;
    float w[8];
    load_four(x, first, width, v);
    load_four(x, first + 4, width, v + 4);
    double sum = 0.0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        w[j] = weight_of(__fmul_rn(__fsub_rn(ordered(v[j]), top), q.scale));
        sum += double(w[j]);
    }
    sum = warp_prefix_f64(sum);
    double* ends = parts[1];
    __shared__ double warps[8];
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    double offset = before;
    for (int k = 0; k < warp; k++) offset += warps[k];
    ends[threadIdx.x] = offset + sum;
    __syncthreads();
    double reached = threadIdx.x ? ends[threadIdx.x - 1] : before;
    if (!(reached <= target && target < ends[threadIdx.x])) return;
    for (int j = 0; j < 8; j++) {
        const double next = reached + double(w[j]);
        if (next > target) {
            head.margin = min(target - reached, next - target);
            head.drawn = candidate(order_key(v[j]), first + j);
            return;
        }
        reached = next;
    }
}
