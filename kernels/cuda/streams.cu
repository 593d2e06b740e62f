// Hyper-connections of four streams, what lies between two sublayers in two kernels: the streams' update with the next mixer's
// products, then gates, mixing weights, the combination, its norm and the splitting for products. CPU reference:
// kernels/src/cpu/hyper.rs. Other numbers of streams: hyper.cu.
//
// The row of a state is 4 * width floats. A block has SLICE columns of all streams; to `partial` [row][slice][SUMS] go its products with
// the mixer's outputs, 0 to 23, and the streams' products with each other (see `pair`), 24 to 33. Those give the state's RMS and, once
// the gates are known, the RMS of the combination, so that no block needs another's columns. Sums of a row go lane by lane, then slice
// by slice, whatever the number of rows.
#include "mixing.cuh"
#include "split.cuh"
#include "quant.cuh"

constexpr int SLICE = 256;
constexpr int SUMS = 64, PAIRS = 10;
constexpr int WARPS = 8;

// Eight weights of a mixer's row, as they are in memory. They are constants and may be fetched before the kernel's inputs exist. The
// loads are volatile for that; the compiler still moves them behind the wait in the kernels of many rows.
template <class T>
struct Eight {
    uint4 raw[T::BYTES / 2];
    __device__ __forceinline__ void load(const uint8_t* p) {
#pragma unroll
        for (int i = 0; i < T::BYTES / 2; i++)
            asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(raw[i].x), "=r"(raw[i].y), "=r"(raw[i].z), "=r"(raw[i].w) : "l"(p + 16 * i));
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < T::BYTES / 2; i++) raw[i] = make_uint4(0, 0, 0, 0);
    }
    // Keeps the compiler from making floats of all weights before a loop over rows, for which there are no registers.
    __device__ __forceinline__ void stay() {
#pragma unroll
        for (int i = 0; i < T::BYTES / 2; i++) asm volatile("" : "+r"(raw[i].x), "+r"(raw[i].y), "+r"(raw[i].z), "+r"(raw[i].w));
    }
    __device__ __forceinline__ float get(int i) const {
        const uint4& v = raw[i * T::BYTES / 16];
        const int at = i * T::BYTES % 16;
        const uint32_t w = at / 4 == 0 ? v.x : at / 4 == 1 ? v.y : at / 4 == 2 ? v.z : v.w;
        if constexpr (T::BYTES == 4) return __uint_as_float(w);
        else if constexpr (T::HALF) return __half2float(__ushort_as_half(at % 4 ? w >> 16 : w & 0xffff));
        else return __uint_as_float(at % 4 ? w & 0xffff0000u : w << 16);
    }
};

// Pair i of streams: each with itself, then the six others.
__device__ __forceinline__ int2 pair(int i) { return make_int2(int(0x2110003210ull >> (4 * i)) & 15, int(0x3323213210ull >> (4 * i)) & 15); }

// What the streams are updated with: mix (pre, post, comb) of each row and y, to which `terms` rows of `parts` a row are added, in
// order and before y itself. With `iterations`, comb is where the rounds begin, and they are done here. With `early`, several launches
// lie between the one that wrote mix and this one, so that it is there before the previous kernel has ended (see common.cuh).
// Laid out as `UpdateArg` in kernels/src/cuda/streams.rs.
struct Update {
    const float* mix;
    const float* y;
    const float* parts;
    int terms;
    int iterations;
    float eps;
    int early;
};

constexpr int MAX_TERMS = 8;

// Weights of the update of `rows` rows from `first` on to `out`, MIXES - STREAMS each (post, comb); a warp, at most 32 rows.
__device__ __forceinline__ void load_mix(const Update& u, int first, int rows, float* out) {
    const int lane = threadIdx.x & 31;
    if (lane >= rows) return;
    const float4* m = reinterpret_cast<const float4*>(u.mix + int64_t(first + lane) * MIXES) + 1;
    float4* to = reinterpret_cast<float4*>(out + lane * (MIXES - STREAMS));
    to[0] = __ldcg(m);
    float v[STREAMS][STREAMS];
#pragma unroll
    for (int k = 0; k < STREAMS; k++) {
        const float4 comb = __ldcg(m + 1 + k);
        v[k][0] = comb.x, v[k][1] = comb.y, v[k][2] = comb.z, v[k][3] = comb.w;
    }
    if (u.iterations) sinkhorn(v, u.iterations, u.eps);
#pragma unroll
    for (int k = 0; k < STREAMS; k++) to[1 + k] = make_float4(v[k][0], v[k][1], v[k][2], v[k][3]);
}

// y of a column: the terms in order, then y itself.
__device__ __forceinline__ float total(const float (&part)[MAX_TERMS], float y, int terms) {
    if (terms == 0) return y;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < MAX_TERMS; k++)
        if (k < terms) sum = __fadd_rn(sum, part[k]);
    return __fadd_rn(sum, y);
}

// S'[d] = post[d] * y + sum_s comb[s][d] * S[s]; `mix` is post, comb.
__device__ __forceinline__ void update(float (&s)[STREAMS], float y, const float* mix) {
    const float4* m = reinterpret_cast<const float4*>(mix);
    const float4 post = m[0];
    float v[STREAMS] = {__fmul_rn(post.x, y), __fmul_rn(post.y, y), __fmul_rn(post.z, y), __fmul_rn(post.w, y)};
#pragma unroll
    for (int k = 0; k < STREAMS; k++) {
        const float4 comb = m[1 + k];
        v[0] = __fmaf_rn(comb.x, s[k], v[0]);
        v[1] = __fmaf_rn(comb.y, s[k], v[1]);
        v[2] = __fmaf_rn(comb.z, s[k], v[2]);
        v[3] = __fmaf_rn(comb.w, s[k], v[3]);
    }
#pragma unroll
    for (int k = 0; k < STREAMS; k++) s[k] = v[k];
}

// Sums of four values over a warp; each in eight lanes: `a` in 0.., `b` in 16.., `c` in 8.., `d` in 24...
__device__ __forceinline__ float four_sums(float a, float b, float c, float d) {
    const int lane = threadIdx.x & 31;
    const bool second = lane & 16, last = lane & 8;
    const float ab = __fadd_rn(second ? b : a, __shfl_xor_sync(~0u, second ? a : b, 16));
    const float cd = __fadd_rn(second ? d : c, __shfl_xor_sync(~0u, second ? c : d, 16));
    float v = __fadd_rn(last ? cd : ab, __shfl_xor_sync(~0u, last ? ab : cd, 8));
#pragma unroll
    for (int m = 4; m > 0; m >>= 1) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, m));
    return v;
}

// Columns of one stream in shared memory: even fours, then odd ones, so that lanes that read eight columns each meet in no bank.
constexpr int ODD = SLICE / 2 + 16, STRIDE = SLICE + 32;
__device__ __forceinline__ int place(int column) { return (column & 4 ? ODD : 0) + column / 8 * 4 + column % 4; }

// A warp's weights: OUTS / WARPS outputs, of each stream eight columns a lane.
template <class T, int OUTS>
struct Weights {
    static constexpr int PER = OUTS ? (OUTS + WARPS - 1) / WARPS : 0;
    Eight<T> w[PER ? PER : 1][STREAMS];
    __device__ __forceinline__ void load(const uint8_t* mixer, int width, int slice) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, at = slice * SLICE + 8 * lane;
#pragma unroll
        for (int p = 0; p < PER; p++)
#pragma unroll
            for (int s = 0; s < STREAMS; s++) {
                const int o = warp * PER + p;
                if (o < OUTS && at < width) w[p][s].load(mixer + (int64_t(o * STREAMS + s) * width + at) * T::BYTES);
                else w[p][s].clear();
            }
    }
    // A pair's product of eight columns a lane.
    static __device__ __forceinline__ float pair_product(const float* streams, int i) {
        const int2 p = pair(i);
        const float* a = streams + p.x * STRIDE + 4 * (threadIdx.x & 31);
        const float* b = streams + p.y * STRIDE + 4 * (threadIdx.x & 31);
        float sum = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float4 u = *reinterpret_cast<const float4*>(a + half * ODD), v = *reinterpret_cast<const float4*>(b + half * ODD);
            sum = __fmaf_rn(u.w, v.w, __fmaf_rn(u.z, v.z, __fmaf_rn(u.y, v.y, __fmaf_rn(u.x, v.x, sum))));
        }
        return sum;
    }
    // Products of R rows' streams in shared memory with this warp's outputs, stream by stream, and of this warp's pairs of streams; those
    // of the first `rows` go to `partial`, `stride` apart.
    template <int R>
    __device__ __forceinline__ void products(const float* streams, int rows, int stride, float* partial) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        float sum[3][R];
#pragma unroll
        for (int p = 0; p < 3; p++)
#pragma unroll
            for (int r = 0; r < R; r++) sum[p][r] = 0.0f;
#pragma unroll
        for (int s = 0; s < STREAMS; s++) {
            float x[R][8];
#pragma unroll
            for (int r = 0; r < R; r++) {
                const float* all = streams + (r * STREAMS + s) * STRIDE;
                const float4 a = *reinterpret_cast<const float4*>(all + 4 * lane), b = *reinterpret_cast<const float4*>(all + ODD + 4 * lane);
                x[r][0] = a.x, x[r][1] = a.y, x[r][2] = a.z, x[r][3] = a.w, x[r][4] = b.x, x[r][5] = b.y, x[r][6] = b.z, x[r][7] = b.w;
            }
#pragma unroll
            for (int p = 0; p < PER; p++)
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float v = w[p][s].get(i);
#pragma unroll
                    for (int r = 0; r < R; r++) sum[p][r] = __fmaf_rn(v, x[r][i], sum[p][r]);
                }
        }
        const int which = (lane >> 4) + (lane >> 3 & 1) * 2, o = which < 3 ? warp * PER + which : MIXES + warp;
#pragma unroll
        for (int r = 0; r < R; r++) {
            const float* all = streams + r * STREAMS * STRIDE;
            float* to = partial + r * stride;
            const float own = pair_product(all, warp);
            // Of one row, all warps do what two have to: it costs no time beside the other sums, and a branch would.
            const bool two = R == 1 || warp < PAIRS - WARPS;
            float more = 0.0f;
            if (two) more = warp_sum(pair_product(all, WARPS + warp % (PAIRS - WARPS)));
            const float v = four_sums(sum[0][r], sum[1][r], sum[2][r], own);
            if (r < rows) {
                if (lane % 8 == 0 && (which == 3 || (which < PER && o < OUTS))) to[o] = v;
                if (lane == 0 && warp < PAIRS - WARPS) to[MIXES + WARPS + warp] = more;
            }
        }
    }
};

// Updates the streams (with POST) and begins the products with OUTS rows of `mixer` (unless there are none). Blocks: (row, slice).
template <class T, int OUTS, bool POST>
__device__ __forceinline__ void mix_slice(const uint8_t* mixer, int width, int rows, const Update& u, float* state, float* partial) {
    __shared__ float streams[OUTS ? STREAMS * STRIDE : 1];
    __shared__ __align__(16) float mix[POST ? MIXES - STREAMS : 1];
    const int slice = blockIdx.y, column = slice * SLICE + threadIdx.x, row = blockIdx.x;
    Weights<T, OUTS> w;
    w.load(mixer, width, slice);
    if (POST && u.early && threadIdx.x < 32) load_mix(u, row, 1, mix);
    after_previous();
    const bool mine = column < width;
    float s[STREAMS] = {0.0f, 0.0f, 0.0f, 0.0f}, y = 0.0f;
    float* at = state + int64_t(row) * STREAMS * width + column;
    if (mine) {
#pragma unroll
        for (int k = 0; k < STREAMS; k++) s[k] = at[k * width];
        if constexpr (POST) {
            float part[MAX_TERMS];
            y = u.y[int64_t(row) * width + column];
#pragma unroll
            for (int k = 0; k < MAX_TERMS; k++)
                if (k < u.terms) part[k] = u.parts[(int64_t(row) * u.terms + k) * width + column];
            y = total(part, y, u.terms);
        }
    }
    if constexpr (POST) {
        if (!u.early && threadIdx.x < 32) load_mix(u, row, 1, mix);
        __syncthreads();
        update(s, y, mix);
        if (mine)
#pragma unroll
            for (int k = 0; k < STREAMS; k++) at[k * width] = s[k];
    }
    if constexpr (OUTS > 0) {
#pragma unroll
        for (int k = 0; k < STREAMS; k++) streams[k * STRIDE + place(threadIdx.x)] = mine ? s[k] : 0.0f;
        __syncthreads();
        w.template products<1>(streams, 1, 0, partial + (int64_t(row) * gridDim.y + slice) * SUMS);
    }
}

__device__ __forceinline__ void copy4(float* to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}

// As above for many rows: a block meets its weights, converted once for R of them, with `per_block` rows. A thread copies what its column
// needs ahead into a ring of STAGES groups of R rows in shared memory, and nobody else reads that. WIDTH and TERMS are those of the
// launch, or 0 and -1 for any: addresses are half of the loop's instructions where they are not constants.
constexpr int MOST_PER_BLOCK = 32;

template <class T, int WIDTH, int TERMS, int R, int STAGES>
__device__ __forceinline__ void mix_slice_wide(const uint8_t* mixer, int any_width, int rows, int per_block, const Update& u, float* state, float* partial, float* memory) {
    const int width = WIDTH ? WIDTH : any_width, terms = TERMS >= 0 ? TERMS : u.terms, each = STREAMS + 1 + terms;
    float* streams = memory;                                        // [2][R][STREAMS][STRIDE]
    float* mix = streams + 2 * R * STREAMS * STRIDE;                // [MOST_PER_BLOCK][MIXES - STREAMS]
    float* ring = mix + MOST_PER_BLOCK * (MIXES - STREAMS);         // [STAGES][R][each][SLICE]
    const int slice = blockIdx.y, column = slice * SLICE + threadIdx.x, first = blockIdx.x * per_block, count = min(rows - first, per_block);
    const int groups = (count + R - 1) / R;
    Weights<T, MIXES> w;
    w.load(mixer, width, slice);
    after_previous();
    const bool mine = WIDTH % SLICE == 0 && WIDTH ? true : column < width;
    float* at = state + int64_t(first) * STREAMS * width + column;
    const float* y = u.y + int64_t(first) * width + column;
    const float* parts = TERMS == 0 ? nullptr : u.parts + int64_t(first) * terms * width + column;
    const float* from = at;
    int left = count;
    // Rows past the end are not copied; what is computed of them is not written.
    const auto start = [&](int stage) {
        float* to = ring + stage * (R * each * SLICE) + threadIdx.x;
#pragma unroll
        for (int r = 0; r < R; r++)
            if (mine && r < left) {
#pragma unroll
                for (int k = 0; k < STREAMS; k++) copy4(to + (r * each + k) * SLICE, from + (r * STREAMS + k) * width);
                copy4(to + (r * each + STREAMS) * SLICE, y + r * width);
#pragma unroll
                for (int k = 0; k < (TERMS >= 0 ? TERMS : MAX_TERMS); k++)
                    if (k < terms) copy4(to + (r * each + STREAMS + 1 + k) * SLICE, parts + (r * terms + k) * width);
            }
        asm volatile("cp.async.commit_group;" ::: "memory");
        from += R * STREAMS * width, y += R * width, parts += R * terms * width, left -= R;
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) start(i);
    if (threadIdx.x < 32) load_mix(u, first, count, mix);
    __syncthreads();
    int stage = 0, ahead = STAGES - 1;
    const int stride = (WIDTH ? WIDTH / SLICE : gridDim.y) * SUMS;
    float* to = partial + int64_t(first) * stride + slice * SUMS;
#pragma unroll 1
    for (int g = 0; g < groups; g++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        float* all = streams + (g & 1) * (R * STREAMS * STRIDE);
        const float* here = ring + stage * (R * each * SLICE) + threadIdx.x;
#pragma unroll
        for (int r = 0; r < R; r++) {
            float s[STREAMS] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (mine) {
                float part[MAX_TERMS];
#pragma unroll
                for (int k = 0; k < STREAMS; k++) s[k] = here[(r * each + k) * SLICE];
#pragma unroll
                for (int k = 0; k < (TERMS >= 0 ? TERMS : MAX_TERMS); k++)
                    if (k < terms) part[k] = here[(r * each + STREAMS + 1 + k) * SLICE];
                update(s, total(part, here[(r * each + STREAMS) * SLICE], terms), mix + (g * R + r) * (MIXES - STREAMS));
                if (g * R + r < count)
#pragma unroll
                    for (int k = 0; k < STREAMS; k++) at[(r * STREAMS + k) * width] = s[k];
            }
#pragma unroll
            for (int k = 0; k < STREAMS; k++) all[(r * STREAMS + k) * STRIDE + place(threadIdx.x)] = s[k];
        }
        at += R * STREAMS * width;
        start(ahead);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        ahead = ahead + 1 == STAGES ? 0 : ahead + 1;
#pragma unroll
        for (int p = 0; p < Weights<T, MIXES>::PER; p++)
#pragma unroll
            for (int k = 0; k < STREAMS; k++) w.w[p][k].stay();
        // Two buffers: who writes one again has passed the barrier after everybody's reads.
        __syncthreads();
        w.template products<R>(all, count - g * R, stride, to);
        to += R * stride;
    }
}

// What `Eight` makes of a weight's type.
struct MixF32 : F32 { static constexpr bool HALF = false; };
struct MixF16 : F16 { static constexpr bool HALF = true; };
struct MixBF16 : BF16 { static constexpr bool HALF = false; };

#define MIX(NAME, T, OUTS, POST)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(256) NAME(const uint8_t* mixer, int width, int rows, Update u, float* state, float* partial) { \
        mix_slice<T, OUTS, POST>(mixer, width, rows, u, state, partial);                                                            \
    }
#define MIX_ALL(T)                                                                                                                  \
    MIX(streams_mix_##T, Mix##T, MIXES, false) MIX(streams_post_mix_##T, Mix##T, MIXES, true) MIX(streams_head_##T, Mix##T, STREAMS, false) \
    WIDE(streams_post_mix_wide_##T, Mix##T, 0, -1, 2, 3)
#define WIDE(NAME, T, WIDTH, TERMS, R, STAGES)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256, T::BYTES == 4 ? 1 : 2) NAME(const uint8_t* mixer, int width, int rows, int per_block, Update u, float* state, float* partial) { \
        extern __shared__ __align__(16) float memory[];                                                                             \
        mix_slice_wide<T, WIDTH, TERMS, R, STAGES>(mixer, width, rows, per_block, u, state, partial, memory);                       \
    }
MIX_ALL(F32) MIX_ALL(F16) MIX_ALL(BF16)
MIX(streams_post, MixF32, 0, true)
WIDE(streams_post_mix_4096_0_F16, MixF16, 4096, 0, 4, 2)
WIDE(streams_post_mix_4096_6_F16, MixF16, 4096, 6, 2, 3)

// What becomes of the products of one row's mixer.
struct Finish {
    const float* partial;
    const float* scale;     // three, or the head's one
    const float* base;
    const float* weight;    // of the norm; without it x is the combination as it is
    const float* state;
    float* mix;             // null for a head; without iterations, comb is where the rounds begin
    float* x;
    Acts acts;              // null without splitting
    int slices, width, iterations;
    float eps, rms_eps, norm_eps;
};

// A warp has 256 columns of a row, a superblock, eight a lane; a block's last warp has the mixer's sums, gates and mixing weights. That
// warp's rounds go on beside the norm, and nothing in the kernel waits for them. Blocks: (row, part of the width).
extern "C" __global__ void __launch_bounds__(128) streams_finish(Finish f) {
    __shared__ float pre[STREAMS], shared_scale;
    let_next_in();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x >> 5) - 1, r = blockIdx.x;
    if (warp == warps) {
        const bool head = !f.mix;
        const int n = head ? STREAMS : MIXES;
        float scale = 0.0f, base = 0.0f;
        if (lane < n) scale = f.scale[lane < STREAMS ? 0 : lane < 2 * STREAMS ? 1 : 2], base = f.base[lane];
        const float each = __fdiv_rn(1.0f, float(f.width));
        after_previous();
        const float* p = f.partial + int64_t(r) * f.slices * SUMS + lane;
        float v = 0.0f, more = 0.0f;
#pragma unroll 16
        for (int i = 0; i < f.slices; i++) {
            v = __fadd_rn(v, p[i * SUMS]);
            if (lane < PAIRS - WARPS) more = __fadd_rn(more, p[i * SUMS + 32]);
        }
        // Each stream's own product is in lanes 24 to 27.
        float squares = __fadd_rn(v, __shfl_xor_sync(~0u, v, 1));
        squares = __fadd_rn(squares, __shfl_xor_sync(~0u, squares, 2));
        squares = __shfl_sync(~0u, squares, MIXES);
        const float inverse = rsqrtf(__fmaf_rn(squares, 0.25f * each, f.rms_eps));
        const float raw = __fmaf_rn(__fmul_rn(v, inverse), scale, base), gate = gates(raw, f.eps);
        // The combination's square: each pair's product times both gates, twice for two different streams.
        const int2 a = pair(max(lane - MIXES, 0)), b = pair(WARPS + (lane & 1));
        const float ga = __fmul_rn(__shfl_sync(~0u, gate, a.x), __shfl_sync(~0u, gate, a.y));
        const float gb = __fmul_rn(__shfl_sync(~0u, gate, b.x), __shfl_sync(~0u, gate, b.y));
        const float first = lane < MIXES ? 0.0f : __fmul_rn(a.x == a.y ? v : 2.0f * v, ga);
        const float second = lane < PAIRS - WARPS ? __fmul_rn(2.0f * more, gb) : 0.0f;
        const float square = fmaxf(warp_sum(__fadd_rn(first, second)), 0.0f);
        if (lane < STREAMS) pre[lane] = gate;
        if (lane == 0) shared_scale = rsqrtf(__fmaf_rn(square, each, f.norm_eps));
        __syncthreads();
        if (!head && blockIdx.y == 0) mixing_weights(gate, raw, f.iterations, f.eps, f.mix + int64_t(r) * MIXES);
        return;
    }
    const int superblock = blockIdx.y * warps + warp, column = superblock * SLICE + lane * 8;
    const bool mine = column < f.width;
    float weight[8];
#pragma unroll
    for (int i = 0; i < 8; i++) weight[i] = 0.0f;
    if (mine && f.weight) load8f(f.weight + column, weight);
    after_previous();
    float s[STREAMS][8];
#pragma unroll
    for (int k = 0; k < STREAMS; k++) {
        if (mine) load8f(f.state + (int64_t(r) * STREAMS + k) * f.width + column, s[k]);
        else
#pragma unroll
            for (int i = 0; i < 8; i++) s[k][i] = 0.0f;
    }
    __syncthreads();
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] = 0.0f;
#pragma unroll
        for (int k = 0; k < STREAMS; k++) x[i] = __fmaf_rn(pre[k], s[k][i], x[i]);
        if (f.weight) x[i] = __fmul_rn(__fmul_rn(x[i], shared_scale), weight[i]);
    }
    if (mine) store8f(f.x + int64_t(r) * f.width + column, x);
    if (f.acts.q && superblock < f.slices) split(x, ORDER_PLAIN, int64_t(r) * f.slices + superblock, f.acts);
}
