// Routing, lists of assignments and the sum over experts. CPU reference: kernels/src/cpu/moe.rs. The expert products are in quantized.cu
// and matmul.cu.
#include "common.cuh"

// sqrt(ln(1 + e^x)), without branches: several are computed at once.
__device__ __forceinline__ float sqrt_softplus(float x) {
    return __fsqrt_rn(__fadd_rn(fmaxf(x, 0.0f), log1pf(expf(-fabsf(x)))));
}

// Normalised weights of a row's experts from their probabilities, in slot order.
__device__ __forceinline__ void weigh(float* w, int used, float scale, float floor) {
    float sum = 0.0f;
    for (int j = 0; j < used; j++) sum += w[j];
    const float f = scale / fmaxf(sum, floor);
    for (int j = 0; j < used; j++) w[j] *= f;
}

// The `used` largest of p + bias, largest first, ties to the lower index; a block per row, `experts` <= 1024.
extern "C" __global__ void route_learned(const float* logits, const float* bias, int experts, int used, float scale, float floor, int* ids, float* weights) {
    after_previous();
    __shared__ float p[1024], score[1024], best[32];
    __shared__ int at[32];
    const int r = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        p[e] = sqrt_softplus(logits[int64_t(r) * experts + e]);
        score[e] = bias ? p[e] + bias[e] : p[e];
    }
    for (int j = 0; j < used; j++) {
        __syncthreads();
        float v = -CUDART_INF_F;
        int k = 1 << 30;
        for (int e = threadIdx.x; e < experts; e += blockDim.x)
            if (score[e] > v || k == 1 << 30) v = score[e], k = e;
        for (int m = 16; m > 0; m >>= 1) {
            const float w = __shfl_xor_sync(~0u, v, m);
            const int o = __shfl_xor_sync(~0u, k, m);
            if (w > v || (w == v && o < k)) v = w, k = o;
        }
        if (lane == 0) best[warp] = v, at[warp] = k;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int i = 1; i < warps; i++)
                if (best[i] > v || (best[i] == v && at[i] < k)) v = best[i], k = at[i];
            ids[r * used + j] = k;
            weights[r * used + j] = p[k];
            score[k] = -CUDART_INF_F;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) weigh(weights + r * used, used, scale, floor);
}

// Experts from the token table; a thread per row.
extern "C" __global__ void route_table(Step s, int rows, const int* table, const float* logits, int experts, int used, float scale, float floor, int* ids, float* weights) {
    after_previous();
    const int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows) return;
    for (int j = 0; j < used; j++) {
        const int e = table[int64_t(s.tokens[r]) * used + j];
        ids[r * used + j] = e;
        weights[r * used + j] = sqrt_softplus(logits[int64_t(r) * experts + e]);
    }
    weigh(weights + r * used, used, scale, floor);
}

// out[r] = the row's expert results, summed in slot order. Blocks: (row, part of the width).
extern "C" __global__ void expert_sum(const float* parts, int used, int width, float* out) {
    after_previous();
    const int i = blockIdx.y * blockDim.x + threadIdx.x, r = blockIdx.x;
    if (i >= width) return;
    float sum = 0.0f;
    for (int j = 0; j < used; j++) sum = __fadd_rn(sum, parts[(int64_t(r) * used + j) * width + i]);
    out[int64_t(r) * width + i] = sum;
}

// Groups assignments (row * used + slot) by expert: `order` lists them expert by expert, items are at most `rows` of one expert. The
// order within an expert is that of arrival, which no result depends on. One block.
extern "C" __global__ void __launch_bounds__(1024) group_experts(const int* ids, int assignments, int experts, int rows, int4* list, int* count, int* order) {
    after_previous();
    __shared__ int counts[1024];
    __shared__ int2 ends[32];
    const int e = threadIdx.x, lane = e & 31, warp = e >> 5;
    // Several ids at once: each is a wait for memory.
    const auto each = [&](auto act) {
        for (int first = e; first < assignments; first += 4096) {
            int id[4];
#pragma unroll
            for (int i = 0; i < 4; i++) id[i] = first + 1024 * i < assignments ? ids[first + 1024 * i] : -1;
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (id[i] >= 0) act(id[i], first + 1024 * i);
        }
    };
    counts[e] = 0;
    __syncthreads();
    each([&](int id, int) { atomicAdd(&counts[id], 1); });
    __syncthreads();
    // Sums over the experts up to this thread's, of its assignments and of its items: in the warp, then over the warps before it.
    const int mine = e < experts ? counts[e] : 0, blocks = (mine + rows - 1) / rows;
    int2 sum = make_int2(mine, blocks);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int x = __shfl_up_sync(~0u, sum.x, d), y = __shfl_up_sync(~0u, sum.y, d);
        if (lane >= d) sum.x += x, sum.y += y;
    }
    if (lane == 31) ends[warp] = sum;
    __syncthreads();
    int2 before = lane < warp ? ends[lane] : make_int2(0, 0);
    sum.x += __reduce_add_sync(~0u, before.x);
    sum.y += __reduce_add_sync(~0u, before.y);
    const int start = sum.x - mine, first = sum.y - blocks;
    if (e == 1023) *count = sum.y;
    for (int i = 0; i < blocks; i++) list[first + i] = make_int4(e, start + i * rows, min(rows, mine - i * rows), 0);
    counts[e] = start;
    __syncthreads();
    each([&](int id, int a) { order[atomicAdd(&counts[id], 1)] = a; });
}

constexpr int FEW_ROWS = 16;
constexpr int FEW = 128;    // assignments

// A float's bits in an order in which unsigned integers compare as the floats do.
__device__ __forceinline__ uint32_t ordered(float v) {
    const uint32_t b = __float_as_uint(v);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}

// The experts of a row with probabilities `p` and their weights, lane j those of slot j; a warp. Lane l has experts l, l + 32, ...: PER
// of them at most.
template <int PER>
__device__ __forceinline__ void choose(const float* p, const float* bias, const int* listed, int experts, int used, int& id, float& weight) {
    const int lane = threadIdx.x & 31;
    if (listed) {
        if (lane < used) id = listed[lane], weight = p[id];
        return;
    }
    uint32_t key[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = i * 32 + lane;
        key[i] = e < experts ? ordered(bias ? p[e] + bias[e] : p[e]) : 0;
    }
    for (int j = 0; j < used; j++) {
        uint32_t top = 0;
#pragma unroll
        for (int i = 0; i < PER; i++) top = max(top, key[i]);
        top = __reduce_max_sync(~0u, top);
        uint32_t at = ~0u;
#pragma unroll
        for (int i = PER - 1; i >= 0; i--)
            if (key[i] == top && i * 32 + lane < experts) at = i * 32 + lane;
        at = __reduce_min_sync(~0u, at);
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (int(at) == i * 32 + lane) key[i] = 0;
        if (lane == j) id = at, weight = p[at];
    }
}

// What `route_few` has of a step; laid out as `RouteArg` in kernels/src/cuda/moe.rs.
struct Route {
    const float* logits;    // [rows, experts]
    const float* bias;      // or null
    const int* table;       // or null: [tokens, used]
    const int* tokens;      // of the rows, with a table
    int* ids;
    float* weights;
    int4* list;
    int* count;
    int* order;
    int rows, experts, used, per;
    float scale, floor;
    int early;              // the launch before the previous one wrote the logits
    int pad;
};

// The normalised weight of a lane's expert; sums in slot order.
__device__ __forceinline__ float weigh(float w, const Route& r) {
    float sum = 0.0f;
    for (int j = 0; j < r.used; j++) sum += __shfl_sync(~0u, w, j);
    return w * (r.scale / fmaxf(sum, r.floor));
}

// As route_learned (or, with a table, route_table), and then as group_experts with `per` rows an item; one block, a warp per row.
// With `early`, all of it beside the previous kernel, which reads none of what is written here, nor do the kernels before it that may
// still run.
template <int PER>
__device__ __forceinline__ void route_few(const Route& r) {
    __shared__ float p[FEW_ROWS * PER * 32];
    __shared__ __align__(16) int all[FEW];
    __shared__ int starts[FEW];
    __shared__ uint32_t masks[FEW / 32];
    if (!r.early) after_previous();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, assignments = r.rows * r.used;
    for (int i = threadIdx.x; i < r.rows * r.experts; i += blockDim.x) p[i] = sqrt_softplus(__ldcg(r.logits + i));
    if (threadIdx.x < FEW) all[threadIdx.x] = 1 << 30;
    __syncthreads();
    if (warp < r.rows) {
        int id = 0;
        float w = 0.0f;
        const int* listed = r.table ? r.table + int64_t(__ldcg(r.tokens + warp)) * r.used : nullptr;
        choose<PER>(p + warp * r.experts, r.bias, listed, r.experts, r.used, id, w);
        const float f = weigh(w, r);
        if (lane < r.used) {
            const int a = warp * r.used + lane;
            all[a] = r.ids[a] = id;
            r.weights[a] = f;
        }
    }
    __syncthreads();
    const int a = threadIdx.x;
    if (a < FEW) {
        // Entries before this one in order of (expert, assignment), and of the same expert. Those past the end are of no expert.
        int before = 0, rank = 0, same = 0;
        const int e = all[a];
        for (int b = 0; b < assignments; b += 4) {
            const int4 four = *reinterpret_cast<const int4*>(all + b);
            const int others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const bool equal = others[k] == e, earlier = equal && b + k < a;
                before += others[k] < e || earlier;
                rank += earlier;
                same += equal;
            }
        }
        const bool start = a < assignments && rank % r.per == 0;
        if (a < assignments) r.order[before] = a, starts[before] = start;
        else starts[a] = 0;
        asm volatile("bar.sync 1, %0;" ::"r"(FEW) : "memory");
        const uint32_t mask = __ballot_sync(~0u, starts[a]);
        if (lane == 0) masks[warp] = mask;
        asm volatile("bar.sync 1, %0;" ::"r"(FEW) : "memory");
        int item = 0, total = 0;
#pragma unroll
        for (int i = 0; i < FEW / 32; i++) {
            const int n = before - 32 * i;
            item += __popc(masks[i] & (n >= 32 ? ~0u : n > 0 ? (1u << n) - 1 : 0));
            total += __popc(masks[i]);
        }
        if (start) r.list[item] = make_int4(e, before, min(r.per, same - rank), 0);
        if (a == 0) *r.count = total;
    }
    if (r.early) after_previous();
}

// As route_learned or route_table for many rows, a warp each.
template <int PER>
__device__ __forceinline__ void route_rows(const Route& r) {
    __shared__ float shared[8][PER * 32];
    const int lane = threadIdx.x & 31, row = blockIdx.x * 8 + (threadIdx.x >> 5);
    after_previous();
    if (row >= r.rows) return;
    float* p = shared[threadIdx.x >> 5];
    for (int e = lane; e < r.experts; e += 32) p[e] = sqrt_softplus(r.logits[int64_t(row) * r.experts + e]);
    __syncwarp();
    int id = 0;
    float w = 0.0f;
    choose<PER>(p, r.bias, r.table ? r.table + int64_t(r.tokens[row]) * r.used : nullptr, r.experts, r.used, id, w);
    const float f = weigh(w, r);
    if (lane < r.used) {
        r.ids[int64_t(row) * r.used + lane] = id;
        r.weights[int64_t(row) * r.used + lane] = f;
    }
}

extern "C" __global__ void __launch_bounds__(256) route_rows_8(Route r) { route_rows<8>(r); }
extern "C" __global__ void __launch_bounds__(256) route_rows_16(Route r) { route_rows<16>(r); }
extern "C" __global__ void __launch_bounds__(32 * FEW_ROWS) route_few_8(Route r) { route_few<8>(r); }
extern "C" __global__ void __launch_bounds__(32 * FEW_ROWS) route_few_16(Route r) { route_few<16>(r); }
