// Weights of scores, and the sums of values, on tensor cores: see sparse_tensor.cuh.
#include "sparse_tensor.cuh"

// A warp computes 64 dimensions of the sums: column n of tile j is dimension 8n + j, so that a lane's eight columns are neighbours in memory.
// Of a step of 16 places it feeds rows 2t, 2t+1, 2t+8 and 2t+9.
struct Values {
    uint32_t r[4][4];  // of each of the four rows: eight f16, or eight codes and an exponent
    // `slice` is which 64 dimensions, `stored16` whether the row is f16; the last slice of an FP8 row is f16, too.
    __device__ __forceinline__ void load(const ulonglong2& a, const ulonglong2& b, int slice, int g, bool stored16) {
        const uint8_t* const row[4] = {reinterpret_cast<const uint8_t*>(a.x), reinterpret_cast<const uint8_t*>(a.y),
                                       reinterpret_cast<const uint8_t*>(b.x), reinterpret_cast<const uint8_t*>(b.y)};
        if (stored16) {
#pragma unroll
            for (int i = 0; i < 4; i++) *reinterpret_cast<uint4*>(r[i]) = *reinterpret_cast<const uint4*>(row[i] + 128 * slice + 16 * g);
        } else if (slice == CHUNKS - 1) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                *reinterpret_cast<uint2*>(r[i]) = *reinterpret_cast<const uint2*>(row[i] + TAIL + 16 * g);
                *reinterpret_cast<uint2*>(r[i] + 2) = *reinterpret_cast<const uint2*>(row[i] + TAIL + 16 * g + 8);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                *reinterpret_cast<uint2*>(r[i]) = *reinterpret_cast<const uint2*>(row[i] + 64 * slice + 8 * g);
                r[i][2] = row[i][NOPE + slice];
            }
        }
    }
    // The b fragments of the eight tiles.
    __device__ __forceinline__ void columns(uint32_t (&b)[8][2], int slice, bool stored16) const {
        if (stored16 || slice == CHUNKS - 1) {
#pragma unroll
            for (int w = 0; w < 4; w++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    b[2 * w][h] = __byte_perm(r[2 * h][w], r[2 * h + 1][w], 0x5410);
                    b[2 * w + 1][h] = __byte_perm(r[2 * h][w], r[2 * h + 1][w], 0x7632);
                }
        } else {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const __half2 scale = __halves2half2(scale_of(r[2 * h][2]), scale_of(r[2 * h + 1][2]));
#pragma unroll
                for (int w = 0; w < 2; w++) {
                    const uint32_t x = __byte_perm(r[2 * h][w], r[2 * h + 1][w], 0x5140), y = __byte_perm(r[2 * h][w], r[2 * h + 1][w], 0x7362);
                    b[4 * w][h] = fp8_pair(x, scale);
                    b[4 * w + 1][h] = fp8_pair(x >> 16, scale);
                    b[4 * w + 2][h] = fp8_pair(y, scale);
                    b[4 * w + 3][h] = fp8_pair(y >> 16, scale);
                }
            }
        }
    }
};

constexpr uint32_t ONES = 0x3c003c00;  // two f16: the weights' sum is their product with ones
#define NONE (-CUDART_INF_F)

__device__ __forceinline__ const ulonglong2* key_pairs(const Places& f, int local) {
    return reinterpret_cast<const ulonglong2*>(f.keys + int64_t(local) * f.stride);
}

// Greatest score of a head, by a warp. Scores of places that hold nothing are not even written.
__device__ __forceinline__ float greatest(const float* scores, const Seen& s, int end, int lane) {
    float top = NONE;
#pragma unroll 4
    for (int place = 2 * lane; place < end; place += 64) {
        const float2 v = *reinterpret_cast<const float2*>(scores + place);
        top = fmaxf(top, fmaxf(s.holds(place) ? v.x : NONE, s.holds(place + 1) ? v.y : NONE));
    }
    return warp_max(top);
}

// ---- many heads a warp: prefill ----

constexpr int WIDE_HEADS = 32, TILE = 64, TILE_PITCH = TILE + 8;

// Blocks (query, 32 heads) of 256: the weights of 64 places at a time are made by all of the block, and each warp sums 64 dimensions.
extern "C" __global__ void __launch_bounds__(256, 1) sparse_values_wide(Step st, Sparse p, Places f, float* out) {
    after_previous();
    __shared__ __align__(16) __half weights[2][2][WIDE_HEADS * TILE_PITCH];  // [buffer][high or low]
    __shared__ float sums[SPLITS][WIDE_HEADS], tops[WIDE_HEADS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int parts = p.heads / WIDE_HEADS, local = blockIdx.x / parts, part = blockIdx.x % parts, row = f.first + local;
    const Seen s(st, p, row);
    const int steps = s.steps(), tiles = (steps + 3) / 4, window_steps = s.window / 16;
    // Each warp makes the weights of four heads.
    const float* scores = f.scores + (int64_t(local) * p.heads + part * WIDE_HEADS + 4 * warp) * f.stride;
    const ulonglong2* keys = key_pairs(f, local);
    ulonglong2 ahead[2] = {keys[t], keys[t + 4]};
    Values raw;
    raw.load(ahead[0], ahead[1], warp, g, true);
    ahead[0] = keys[min(1, steps - 1) * 8 + t], ahead[1] = keys[min(1, steps - 1) * 8 + t + 4];

    float top[4];
#pragma unroll
    for (int i = 0; i < 4; i++) top[i] = greatest(scores + i * f.stride, s, steps * 16, lane);
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < 4; i++) tops[4 * warp + i] = top[i];
    }
    const auto fetch = [&](int tile, float2 (&v)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = *reinterpret_cast<const float2*>(scores + i * f.stride + tile * TILE + 2 * lane);
    };
    const auto stage = [&](int tile, const float2 (&v)[4]) {
        const int place = tile * TILE + 2 * lane;
        const bool a = s.holds(place), b = s.holds(place + 1);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t hi, lo;
            split2(weight_of(a ? v[i].x : NONE, top[i]), weight_of(b ? v[i].y : NONE, top[i]), hi, lo);
            const int at = (4 * warp + i) * TILE_PITCH + 2 * lane;
            *reinterpret_cast<uint32_t*>(&weights[tile & 1][0][at]) = hi;
            *reinterpret_cast<uint32_t*>(&weights[tile & 1][1][at]) = lo;
        }
    };
    float2 next[4];
    fetch(0, next);
    stage(0, next);

    float total[2][8][4], sum[2][8][4], ones[2][4];
#pragma unroll
    for (int i = 0; i < 64; i++) (&total[0][0][0])[i] = 0.0f, (&sum[0][0][0])[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) (&ones[0][0])[i] = 0.0f;
    int split = 0, split_end = steps / SPLITS;
    // Ends a split. Its sum of weights is computed by one of the warps.
    const auto flush = [&]() {
#pragma unroll
        for (int i = 0; i < 64; i++) {
            (&total[0][0][0])[i] = __fadd_rn((&total[0][0][0])[i], (&sum[0][0][0])[i]);
            (&sum[0][0][0])[i] = 0.0f;
        }
        if (split == warp && t == 0) {
#pragma unroll
            for (int m = 0; m < 2; m++) sums[warp][16 * m + g] = ones[m][0], sums[warp][16 * m + 8 + g] = ones[m][2];
        }
        split++;
        split_end = (split + 1) * steps / SPLITS;
    };
    const uint32_t a_at = uint32_t(__cvta_generic_to_shared(&weights[0][0][0])) + ((lane & 15) * TILE_PITCH + (lane >> 4) * 8) * 2;
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile++) {
        __syncthreads();
        fetch(min(tile + 1, tiles - 1), next);
        const uint32_t at = a_at + (tile & 1) * (2 * WIDE_HEADS * TILE_PITCH * 2);
#pragma unroll 1
        for (int k = 0; k < 4; k++) {
            const int step = tile * 4 + k;
            if (step >= steps) break;
            while (step == split_end) flush();
            uint32_t b[8][2];
            raw.columns(b, warp, step < window_steps);
            const int then = min(step + 1, steps - 1), later = min(step + 2, steps - 1);
            raw.load(ahead[0], ahead[1], warp, g, then < window_steps);
            ahead[0] = keys[later * 8 + t], ahead[1] = keys[later * 8 + t + 4];
#pragma unroll
            for (int m = 0; m < 2; m++) {
                uint32_t hi[4], lo[4];
                ldmatrix4(hi, at + m * (16 * TILE_PITCH * 2) + k * 32);
                ldmatrix4(lo, at + m * (16 * TILE_PITCH * 2) + k * 32 + WIDE_HEADS * TILE_PITCH * 2);
#pragma unroll
                for (int j = 0; j < 8; j++) mma_f16(sum[m][j], hi, b[j][0], b[j][1]);
#pragma unroll
                for (int j = 0; j < 8; j++) mma_f16(sum[m][j], lo, b[j][0], b[j][1]);
                if (split == warp) {
                    mma_f16(ones[m], hi, ONES, ONES);
                    mma_f16(ones[m], lo, ONES, ONES);
                }
            }
        }
        if (tile + 1 < tiles) stage(tile + 1, next);
    }
    while (split < SPLITS) flush();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int head = 16 * m + 8 * h + g;
            const float inverse = inverse_of(&sums[0][head], WIDE_HEADS, tops[head], p.sinks[part * WIDE_HEADS + head]);
            float4* to = reinterpret_cast<float4*>(out + (int64_t(row) * p.heads + part * WIDE_HEADS + head) * DIM + 64 * warp + 16 * t);
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int j = 0; j < 8; j += 4)
                    to[2 * c + j / 4] = make_float4(__fmul_rn(total[m][j][2 * h + c], inverse), __fmul_rn(total[m][j + 1][2 * h + c], inverse),
                                                    __fmul_rn(total[m][j + 2][2 * h + c], inverse), __fmul_rn(total[m][j + 3][2 * h + c], inverse));
        }
}

// ---- few heads a warp: decode ----

constexpr int NARROW_HEADS = 16, SUM_PITCH = 64 + 4;
constexpr int BATCH = 3;  // steps whose rows and scores are on their way together

// Blocks (row, 16 heads, 64 dimensions) of 256: a warp for each split.
extern "C" __global__ void __launch_bounds__(32 * SPLITS, 1) sparse_values_narrow(Step st, Sparse p, Places f, float* out) {
    after_previous();
    __shared__ __align__(16) float parts[SPLITS][NARROW_HEADS * SUM_PITCH];
    __shared__ float sums[SPLITS][NARROW_HEADS], tops[NARROW_HEADS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int local = blockIdx.x, part = blockIdx.y, slice = blockIdx.z, row = f.first + local;
    const Seen s(st, p, row);
    const int steps = s.steps(), window_steps = s.window / 16, from = warp * steps / SPLITS, to = (warp + 1) * steps / SPLITS;
    const float* scores = f.scores + (int64_t(local) * p.heads + part * NARROW_HEADS) * f.stride;
    const ulonglong2* keys = key_pairs(f, local);
    Values raw[BATCH];
    const auto fetch = [&](int first) {
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int step = min(first + i, steps - 1);
            raw[i].load(keys[step * 8 + t], keys[step * 8 + t + 4], slice, g, step < window_steps);
        }
    };
    fetch(from);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float top = greatest(scores + (2 * warp + i) * f.stride, s, steps * 16, lane);
        if (lane == 0) tops[2 * warp + i] = top;
    }
    __syncthreads();
    const float top[2] = {tops[g], tops[g + 8]};
    float sum[8][4], ones[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 32; i++) (&sum[0][0])[i] = 0.0f;
#pragma unroll 1
    for (int first = from; first < to; first += BATCH) {
        float2 v[BATCH][4];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float* at = scores + g * f.stride + min(first + i, steps - 1) * 16 + 2 * t;
#pragma unroll
            for (int a = 0; a < 4; a++) v[i][a] = *reinterpret_cast<const float2*>(at + (a & 1) * 8 * f.stride + (a >> 1) * 8);
        }
        uint32_t hi[BATCH][4], lo[BATCH][4];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int place = (first + i) * 16 + 2 * t;
#pragma unroll
            for (int a = 0; a < 4; a++) {
                const int at = place + (a >> 1) * 8;
                split2(weight_of(s.holds(at) ? v[i][a].x : NONE, top[a & 1]), weight_of(s.holds(at + 1) ? v[i][a].y : NONE, top[a & 1]), hi[i][a], lo[i][a]);
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (first + i >= to) break;
            uint32_t b[8][2];
            raw[i].columns(b, slice, first + i < window_steps);
#pragma unroll
            for (int j = 0; j < 8; j++) mma_f16(sum[j], hi[i], b[j][0], b[j][1]);
            mma_f16(ones, hi[i], ONES, ONES);
#pragma unroll
            for (int j = 0; j < 8; j++) mma_f16(sum[j], lo[i], b[j][0], b[j][1]);
            mma_f16(ones, lo[i], ONES, ONES);
        }
        if (first + BATCH < to) fetch(first + BATCH);
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int j = 0; j < 8; j += 4)
                *reinterpret_cast<float4*>(&parts[warp][(8 * h + g) * SUM_PITCH + 16 * t + 8 * c + j]) =
                    make_float4(sum[j][2 * h + c], sum[j + 1][2 * h + c], sum[j + 2][2 * h + c], sum[j + 3][2 * h + c]);
    if (t == 0) sums[warp][g] = ones[0], sums[warp][g + 8] = ones[2];
    __syncthreads();
    const int head = threadIdx.x >> 4, at = (threadIdx.x & 15) * 4;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < SPLITS; i++) {
        const float4 v = *reinterpret_cast<const float4*>(&parts[i][head * SUM_PITCH + at]);
        total = make_float4(__fadd_rn(total.x, v.x), __fadd_rn(total.y, v.y), __fadd_rn(total.z, v.z), __fadd_rn(total.w, v.w));
    }
    const float inverse = inverse_of(&sums[0][head], NARROW_HEADS, tops[head], p.sinks[part * NARROW_HEADS + head]);
    *reinterpret_cast<float4*>(out + (int64_t(row) * p.heads + part * NARROW_HEADS + head) * DIM + 64 * slice + at) =
        make_float4(__fmul_rn(total.x, inverse), __fmul_rn(total.y, inverse), __fmul_rn(total.z, inverse), __fmul_rn(total.w, inverse));
}
