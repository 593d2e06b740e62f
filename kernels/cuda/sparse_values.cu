// Weights of scores, and the sums of values, on tensor cores: see sparse_tensor.cuh. Of few rows: sparse_values_narrow.cu.
#include "sparse_tensor.cuh"

// How a step's rows are stored, for 64 dimensions of theirs: f16, codes and a scale, or the f16 at the end of an FP8 row.
enum Stored { ROW_F16, ROW_CODES, ROW_TAIL };

constexpr uint32_t ONES = 0x3c003c00;  // two f16: the weights' sum is their product with ones

// Greatest score of a head, from those of its tiles of places, by a warp.
__device__ __forceinline__ float greatest(const float* tops, int tiles, int lane) {
    float top = NONE;
    for (int i = lane; i < tiles; i += 32) top = fmaxf(top, tops[i]);
    return warp_max(top);
}

// ---- many heads a warp: prefill ----

// A warp computes 64 dimensions of the sums: column n of tile j is dimension 8n + j, so that a lane's eight columns are neighbours in memory.
// Of a step of 16 places it feeds rows 2t, 2t+1, 2t+8 and 2t+9.
template <int STORED>
struct Values {
    uint32_t r[4][4];  // of each of the four rows: eight f16, or eight codes
    uint32_t scale[2];  // of rows 2t and 2t+1, of rows 2t+8 and 2t+9, in f16
    // `keys` and `scales` are the lane's in shared memory.
    __device__ __forceinline__ void load(const uint64_t* keys, const __half* scales, int slice, int g) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(keys + 8 * h);
            if (STORED == ROW_CODES) scale[h] = *reinterpret_cast<const uint32_t*>(scales + 8 * h);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint8_t* from = reinterpret_cast<const uint8_t*>(i ? two.y : two.x);
                uint32_t(&to)[4] = r[2 * h + i];
                if (STORED == ROW_F16) {
                    const uint4 v = fetch<uint4>(from + 128 * slice + 16 * g);
                    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
                } else if (STORED == ROW_TAIL) {
                    const uint2 v = fetch<uint2>(from + TAIL + 16 * g), w = fetch<uint2>(from + TAIL + 8 + 16 * g);
                    to[0] = v.x, to[1] = v.y, to[2] = w.x, to[3] = w.y;
                } else {
                    const uint2 v = fetch<uint2>(from + 64 * slice + 8 * g);
                    to[0] = v.x, to[1] = v.y;
                }
            }
        }
    }
    // The b fragments of the eight tiles.
    __device__ __forceinline__ void columns(uint32_t (&b)[8][2]) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t(&x)[4] = r[2 * h], (&y)[4] = r[2 * h + 1];
            if (STORED == ROW_CODES) {
                const __half2 two = halves(scale[h]);
#pragma unroll
                for (int w = 0; w < 2; w++) {
                    const uint32_t c = __byte_perm(x[w], y[w], 0x5140), d = __byte_perm(x[w], y[w], 0x7362);
                    b[4 * w][h] = fp8_pair(c, two);
                    b[4 * w + 1][h] = fp8_pair(c >> 16, two);
                    b[4 * w + 2][h] = fp8_pair(d, two);
                    b[4 * w + 3][h] = fp8_pair(d >> 16, two);
                }
            } else {
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    b[2 * w][h] = __byte_perm(x[w], y[w], 0x5410);
                    b[2 * w + 1][h] = __byte_perm(x[w], y[w], 0x7632);
                }
            }
        }
    }
};

constexpr int WIDE_HEADS = 32, WIDE_PLACES = 32, TILE = 64, TILE_PITCH = TILE + 8;

// In shared memory. Addresses and scales are there two tiles ahead, weights one.
struct Wide {
    float4 stash[8][16][32];                        // sums of the pieces before, as the warps have them in registers
    __half weights[2][2][WIDE_HEADS * TILE_PITCH];  // [buffer][high or low]
    uint64_t keys[4][TILE];
    __half scales[4][CHUNKS][TILE];
    float sums[WIDE_HEADS], bases[WIDE_HEADS];
};

static_assert(sizeof(Wide) == 90368, "known to kernels/src/cuda/sparse_tensor.rs");

extern __shared__ __align__(16) uint8_t shared[];

// Two blocks share a multiprocessor where they fit; the compiler's schedules for sm_121 need more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int WIDE_BLOCKS = 1;
#else
constexpr int WIDE_BLOCKS = 2;
#endif

// Blocks (query, 32 heads) of 256: the weights of 64 places at a time are made by all of the block, and each warp sums 64 dimensions.
extern "C" __global__ void __launch_bounds__(256, WIDE_BLOCKS) sparse_values_wide(Step st, Sparse p, Places f, float* out) {
    Wide& w = *reinterpret_cast<Wide*>(shared);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int parts = p.heads / WIDE_HEADS, local = blockIdx.x / parts, part = blockIdx.x % parts, row = f.first + local;
    const int pos = st.positions[row];
    after_previous();
    const Seen s(p, row, pos);
    const int steps = s.steps(), window_tiles = s.window / TILE, tiles = (steps + 3) / 4;
    // Each warp makes the weights of four heads.
    const int64_t first_head = int64_t(local) * p.heads + part * WIDE_HEADS;
    const float* scores = f.scores + (first_head + 4 * warp) * f.stride + 2 * lane;
    // A thread stages the address of a place, and two of its scales.
    const uint8_t* const* keys = f.keys + int64_t(local) * f.stride + (threadIdx.x & (TILE - 1));
    const auto stage_keys = [&](int tile) {
        const int place = threadIdx.x & (TILE - 1), two = threadIdx.x / TILE * 2;
        if (tile * TILE + place >= steps * 16) return;
        const uint8_t* key = keys[tile * TILE];
        if (two == 0) w.keys[tile & 3][place] = reinterpret_cast<uint64_t>(key);
        if (tile >= window_tiles) {
            const uint32_t exponents = fetch<uint16_t>(key + NOPE + two);
            w.scales[tile & 3][two][place] = scale_of(exponents & 0xff);
            w.scales[tile & 3][two + 1][place] = scale_of(exponents >> 8);
        }
    };
    stage_keys(0);
    stage_keys(1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int per_head = f.stride / WIDE_PLACES;
        const float top = greatest(f.tops + (first_head + 4 * warp + i) * per_head, (steps + 1) / 2, lane);
        if (lane == 0) w.bases[4 * warp + i] = weight_base(top);
    }
    __syncwarp();
    const auto stage_weights = [&](int tile) {
        // The last tile may have places whose scores nobody wrote.
        const bool in = tile * TILE + 2 * lane < steps * 16;
        float2 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = *reinterpret_cast<const float2*>(scores + i * f.stride + tile * TILE);
        __half* to = &w.weights[tile & 1][0][4 * warp * TILE_PITCH + 2 * lane];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float base = w.bases[4 * warp + i];
            uint32_t hi, lo;
            split2(weight_of(in ? v[i].x : NONE, base), weight_of(in ? v[i].y : NONE, base), hi, lo);
            *reinterpret_cast<uint32_t*>(to + i * TILE_PITCH) = hi;
            *reinterpret_cast<uint32_t*>(to + i * TILE_PITCH + WIDE_HEADS * TILE_PITCH) = lo;
        }
    };
    stage_weights(0);

    float sum[2][8][4], ones[4];  // two warps sum the weights of 16 heads each
    const auto clear = [&]() {
#pragma unroll
        for (int i = 0; i < 64; i++) (&sum[0][0][0])[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) ones[i] = 0.0f;
    };
    clear();
    int piece_end = s.piece();
    const auto put_ones = [&](bool first) {
        if (warp > 1 || t != 0) return;
        float* to = &w.sums[16 * warp + g];
        to[0] = first ? ones[0] : __fadd_rn(to[0], ones[0]);
        to[8] = first ? ones[2] : __fadd_rn(to[8], ones[2]);
    };
    const auto end_piece = [&]() {
        const bool first = piece_end == s.piece();
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float4& to = w.stash[warp][i][lane];
            const float* v = &sum[0][0][0] + 4 * i;
            const float4 old = first ? make_float4(-0.0f, -0.0f, -0.0f, -0.0f) : to;  // which changes nothing
            to = make_float4(__fadd_rn(old.x, v[0]), __fadd_rn(old.y, v[1]), __fadd_rn(old.z, v[2]), __fadd_rn(old.w, v[3]));
        }
        put_ones(first);
        clear();
        piece_end += s.piece();
    };
    const uint32_t a_at = uint32_t(__cvta_generic_to_shared(&w.weights[0][0][0])) + ((lane & 15) * TILE_PITCH + (lane >> 4) * 8) * 2;
    const auto run = [&](auto stored, int from, int to) {
        constexpr int STORED = decltype(stored)::value;
        constexpr bool AHEAD = STORED == ROW_CODES;  // a step's rows while the one before is computed, where registers allow
        const int last = min(4 * to, steps) - 1;
        Values<STORED> raw;
        const auto load = [&](int step) {
            const int ring = step / 4 & 3, place = (step & 3) * 16 + 2 * t;
            raw.load(&w.keys[ring][place], &w.scales[ring][warp][place], warp, g);
        };
#pragma unroll 1
        for (int tile = from; tile < to; tile++) {
            __syncthreads();
            if (AHEAD && tile == from) load(4 * tile);
            const uint32_t at = a_at + (tile & 1) * (2 * WIDE_HEADS * TILE_PITCH * 2);
#pragma unroll 1
            for (int k = 0; k < 4; k++) {
                const int step = tile * 4 + k;
                if (step > last) break;
                if (step == piece_end) end_piece();
                if (!AHEAD) load(step);
                uint32_t c[8][2];
                raw.columns(c);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    // High halves of the weights, then low ones, in the same registers.
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        uint32_t w16[4];
                        ldmatrix4(w16, at + m * (16 * TILE_PITCH * 2) + k * 32 + half * (WIDE_HEADS * TILE_PITCH * 2));
#pragma unroll
                        for (int j = 0; j < 8; j++) mma_f16(sum[m][j], w16, c[j][0], c[j][1]);
                        if (warp == m) mma_f16(ones, w16, ONES, ONES);
                    }
                    // The next step's rows.
                    if (AHEAD && m == 0) load(min(step + 1, last));
                }
            }
            if (tile + 1 < tiles) stage_weights(tile + 1);
            if (tile + 2 < tiles) stage_keys(tile + 2);
        }
    };
    run(std::integral_constant<int, ROW_F16>(), 0, window_tiles);
    if (window_tiles < tiles) {
        if (warp == CHUNKS - 1) run(std::integral_constant<int, ROW_TAIL>(), window_tiles, tiles);
        else run(std::integral_constant<int, ROW_CODES>(), window_tiles, tiles);
    }
    put_ones(false);
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int head = 16 * m + 8 * h + g;
            const float inverse = inverse_of(w.sums[head], w.bases[head], p.sinks[part * WIDE_HEADS + head]);
            float4* to = reinterpret_cast<float4*>(out + (int64_t(row) * p.heads + part * WIDE_HEADS + head) * DIM + 64 * warp + 16 * t);
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int j = 0; j < 8; j += 4) {
                    float v[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float first = reinterpret_cast<const float*>(&w.stash[warp][m * 8 + j + i][lane])[2 * h + c];
                        v[i] = __fmul_rn(__fadd_rn(first, sum[m][j + i][2 * h + c]), inverse);
                    }
                    to[2 * c + j / 4] = make_float4(v[0], v[1], v[2], v[3]);
                }
        }
}
