// Weights of scores, and the sums of values, on tensor cores: see sparse_tensor.cuh.
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

// ---- few heads a warp: decode ----

constexpr int NARROW_HEADS = 16, NARROW_PLACES = 8;
constexpr int PIECE_PLACES = MOST_STEPS * 16, PIECE_PITCH = PIECE_PLACES + 8;
constexpr int BATCH = 4;  // steps whose values are on their way together

// In shared memory, for each of two pieces.
struct Narrow {
    __half weights[2][2][NARROW_HEADS * PIECE_PITCH];  // [piece][high or low]
    uint64_t keys[2][PIECE_PLACES];
    __half scales[2][PIECE_PLACES];
    float4 second[4][2][32];  // sums of the second piece, as the warps have them in registers
    float sums[2][NARROW_HEADS], bases[NARROW_HEADS];
};

static_assert(sizeof(Narrow) == 52672, "known to kernels/src/cuda/sparse_tensor.rs");

// Blocks (row, 16 heads, 64 dimensions) of 256: two pieces at a time by four warps each, 16 dimensions a warp. Column n of tile j is
// dimension 2n + j.
extern "C" __global__ void __launch_bounds__(256, 2) sparse_values_narrow(Step st, Sparse p, Places f, float* out) {
    Narrow& w = *reinterpret_cast<Narrow*>(shared);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, side = warp >> 2, quarter = warp & 3;
    const int local = blockIdx.x, part = blockIdx.y, slice = blockIdx.z, row = f.first + local, pos = st.positions[row];
    let_next_in();
    after_previous();
    const Seen s(p, row, pos);
    const int steps = s.steps(), piece = s.piece(), window_steps = s.window / 16, rounds = (steps + 2 * piece - 1) / (2 * piece);
    const int64_t first_head = int64_t(local) * p.heads + part * NARROW_HEADS + 4 * quarter;
    float base[4], total[2][4], total_ones[2];
    const uint32_t a_at = uint32_t(__cvta_generic_to_shared(&w.weights[side][0][0])) + ((lane & 15) * PIECE_PITCH + (lane >> 4) * 8) * 2;
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        const int first = (2 * round + side) * piece, n = max(0, min(piece, steps - first)), places = n * 16;
        if (round > 0) __syncthreads();
        // Everything is asked for before anything is waited for: a place's address, scores, and the greatest scores.
        constexpr int OWN = (PIECE_PLACES + 127) / 128, PAIRS = PIECE_PLACES / 64;
        const uint8_t* key[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int place = (threadIdx.x & 127) + 128 * i;
            key[i] = place < places ? f.keys[int64_t(local) * f.stride + first * 16 + place] : nullptr;
        }
        float2 v[PAIRS][4];
        const float* scores = f.scores + first_head * f.stride + first * 16 + 2 * lane;
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
#pragma unroll
            for (int h = 0; h < 4; h++)
                v[i][h] = 64 * i + 2 * lane < places ? *reinterpret_cast<const float2*>(scores + h * f.stride + 64 * i) : make_float2(NONE, NONE);
        if (round == 0) {
            // Each warp makes the weights of four heads for its piece.
            const float* tops = f.tops + first_head * (f.stride / NARROW_PLACES) + lane;
            float top[4] = {NONE, NONE, NONE, NONE};
            for (int i = 0; i < steps * 2; i += 128) {
#pragma unroll
                for (int k = 0; k < 4; k++)
#pragma unroll
                    for (int h = 0; h < 4; h++)
                        if (i + 32 * k + lane < steps * 2) top[h] = fmaxf(top[h], tops[h * (f.stride / NARROW_PLACES) + i + 32 * k]);
            }
#pragma unroll
            for (int h = 0; h < 4; h++) {
                base[h] = weight_base(warp_max(top[h]));
                if (lane == 0 && side == 0) w.bases[4 * quarter + h] = base[h];
            }
        }
        uint32_t exponent[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int place = (threadIdx.x & 127) + 128 * i;
            exponent[i] = key[i] && first * 16 + place >= s.window ? fetch<uint8_t>(key[i] + NOPE + min(slice, CHUNKS - 2)) : 0;
            if (key[i]) w.keys[side][place] = reinterpret_cast<uint64_t>(key[i]);
        }
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
#pragma unroll
            for (int h = 0; h < 4; h++) {
                uint32_t hi, lo;
                split2(weight_of(v[i][h].x, base[h]), weight_of(v[i][h].y, base[h]), hi, lo);
                *reinterpret_cast<uint32_t*>(&w.weights[side][0][(4 * quarter + h) * PIECE_PITCH + 64 * i + 2 * lane]) = hi;
                *reinterpret_cast<uint32_t*>(&w.weights[side][1][(4 * quarter + h) * PIECE_PITCH + 64 * i + 2 * lane]) = lo;
            }
#pragma unroll
        for (int i = 0; i < OWN; i++)
            if (key[i]) w.scales[side][(threadIdx.x & 127) + 128 * i] = scale_of(exponent[i]);
        __syncthreads();

        uint32_t raw[BATCH][4];
        const auto load = [&](int from) {
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int step = min(from + i, n - 1);
                const ulonglong2 a = *reinterpret_cast<const ulonglong2*>(&w.keys[side][step * 16 + 2 * t]);
                const ulonglong2 b = *reinterpret_cast<const ulonglong2*>(&w.keys[side][step * 16 + 2 * t + 8]);
                const uint64_t rows[4] = {a.x, a.y, b.x, b.y};
                const bool window = first + step < window_steps;
                const bool stored16 = window || slice == CHUNKS - 1;
                const int at = stored16 ? (window ? 128 * slice : TAIL) + 32 * quarter + 4 * g : 64 * slice + 16 * quarter + 2 * g;
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const uint8_t* const from_row = reinterpret_cast<const uint8_t*>(rows[k]) + at;
                    raw[i][k] = stored16 ? fetch<uint32_t>(from_row) : fetch<uint16_t>(from_row);
                }
            }
        };
        float sum[2][4], ones[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 8; i++) (&sum[0][0])[i] = 0.0f;
        if (n > 0) load(0);
#pragma unroll 1
        for (int from = 0; from < n; from += BATCH) {
            uint32_t b[BATCH][2][2];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int step = min(from + i, n - 1);
                const bool stored16 = first + step < window_steps || slice == CHUNKS - 1;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint32_t x = raw[i][2 * h], y = raw[i][2 * h + 1];
                    if (stored16) {
                        b[i][0][h] = __byte_perm(x, y, 0x5410);
                        b[i][1][h] = __byte_perm(x, y, 0x7632);
                    } else {
                        const __half2 scale = *reinterpret_cast<const __half2*>(&w.scales[side][step * 16 + 2 * t + 8 * h]);
                        const uint32_t c = __byte_perm(x, y, 0x5140);
                        b[i][0][h] = fp8_pair(c, scale);
                        b[i][1][h] = fp8_pair(c >> 16, scale);
                    }
                }
            }
            if (from + BATCH < n) load(from + BATCH);
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                if (from + i >= n) break;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint32_t w16[4];
                    ldmatrix4(w16, a_at + (from + i) * 32 + half * (NARROW_HEADS * PIECE_PITCH * 2));
                    mma_f16(sum[0], w16, b[i][0][0], b[i][0][1]);
                    mma_f16(sum[1], w16, b[i][1][0], b[i][1][1]);
                    if (quarter == 0) mma_f16(ones, w16, ONES, ONES);
                }
            }
        }
        // The pieces' sums are added in order.
        if (side == 1) {
#pragma unroll
            for (int h = 0; h < 2; h++)
                w.second[quarter][h][lane] = make_float4(sum[0][2 * h], sum[1][2 * h], sum[0][2 * h + 1], sum[1][2 * h + 1]);
            if (quarter == 0 && t == 0) w.sums[1][g] = ones[0], w.sums[1][g + 8] = ones[2];
        }
        __syncthreads();
        if (side == 0) {
            const bool more = first + piece < steps;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float4 second = w.second[quarter][h][lane];
                const float v[4] = {sum[0][2 * h], sum[1][2 * h], sum[0][2 * h + 1], sum[1][2 * h + 1]};
                const float u[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    total[h][i] = round ? __fadd_rn(total[h][i], v[i]) : v[i];
                    if (more) total[h][i] = __fadd_rn(total[h][i], u[i]);
                }
                total_ones[h] = round ? __fadd_rn(total_ones[h], ones[2 * h]) : ones[2 * h];
                if (more) total_ones[h] = __fadd_rn(total_ones[h], w.sums[1][8 * h + g]);
            }
        }
    }
    if (side == 0 && quarter == 0 && t == 0) w.sums[0][g] = total_ones[0], w.sums[0][g + 8] = total_ones[1];
    __syncthreads();
    if (side == 1) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int head = 8 * h + g;
        const float inverse = inverse_of(w.sums[0][head], w.bases[head], p.sinks[part * NARROW_HEADS + head]);
        *reinterpret_cast<float4*>(out + (int64_t(row) * p.heads + part * NARROW_HEADS + head) * DIM + 64 * slice + 16 * quarter + 4 * t) =
            make_float4(__fmul_rn(total[h][0], inverse), __fmul_rn(total[h][1], inverse), __fmul_rn(total[h][2], inverse), __fmul_rn(total[h][3], inverse));
    }
}
