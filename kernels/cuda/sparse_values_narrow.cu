// Weights of scores, and the sums of values, on tensor cores, of few rows: see sparse_tensor.cuh. The sums are those of sparse_values.cu.
#include "sparse_tensor.cuh"

constexpr uint32_t ONES = 0x3c003c00;  // two f16: the weights' sum is their product with ones
constexpr int NARROW_HEADS = 16, NARROW_PLACES = 8;
constexpr int PIECE_PLACES = MOST_STEPS * 16, PIECE_PITCH = PIECE_PLACES + 8;
// Steps whose values are fetched together, and bytes from one row's to the next in shared memory: lanes that read four rows meet in no bank.
constexpr int BATCH = 5, HALF_PITCH = 128 + 16, CODE_PITCH = 64 + 8;

// In shared memory, for each of two pieces.
struct Narrow {
    __half weights[2][2][NARROW_HEADS * PIECE_PITCH];  // [piece][high or low]
    uint8_t values[2][2][BATCH][16 * HALF_PITCH];      // [piece][batch % 2][step]: 64 dimensions of 16 rows
    uint64_t keys[2][PIECE_PLACES];
    __half scales[2][PIECE_PLACES];
    float4 second[4][2][32];  // sums of the second piece, as the warps have them in registers
    float sums[2][NARROW_HEADS], bases[NARROW_HEADS];
};

static_assert(sizeof(Narrow) == 98752, "known to kernels/src/cuda/sparse_tensor.rs");

extern __shared__ __align__(16) uint8_t shared[];

// Blocks (row, 16 heads, 64 dimensions) of 256: two pieces at a time by four warps each, 16 dimensions a warp. Column n of tile j is
// dimension 2n + j. A row's 64 dimensions are fetched by neighbouring lanes: where each warp fetched its own 16, a load met four lines of
// the cache for 64 bytes. Steps of a batch have no branches, and all fragments of its weights are loaded before the first product. Seen
// with 640 and 144 keys, one row: 7.2 and 4.4 us, where each product waited for its fragment 8.9 and 5.4.
extern "C" __global__ void __launch_bounds__(256, 2) sparse_values_narrow(Step st, Sparse p, Places f, float* out) {
    Narrow& w = *reinterpret_cast<Narrow*>(shared);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, side = warp >> 2, quarter = warp & 3;
    const int me = threadIdx.x & 127, local = blockIdx.x, part = blockIdx.y, slice = blockIdx.z, row = f.first + local;
    const Seen s(p, row, st.positions[row]);  // counts are older than the kernel before this one
    const int steps = s.steps(), piece = s.piece(), window_steps = s.window / 16, rounds = (steps + 2 * piece - 1) / (2 * piece);
    const int64_t first_head = int64_t(local) * p.heads + part * NARROW_HEADS + 4 * quarter;
    const float* sinks = p.sinks + part * NARROW_HEADS + g;
    const float sink[2] = {sinks[0], sinks[8]};
    float base[4], total[2][4], total_ones[2];
    const uint32_t a_at = uint32_t(__cvta_generic_to_shared(&w.weights[side][0][0])) + ((lane & 15) * PIECE_PITCH + (lane >> 4) * 8) * 2;
    const auto meet = [&]() { asm volatile("bar.sync %0, 128;" ::"r"(1 + side) : "memory"); };
    let_next_in();
    after_previous();
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        const int first = (2 * round + side) * piece, n = max(0, min(piece, steps - first)), places = n * 16;
        if (round > 0) __syncthreads();
        // Everything is asked for before anything is waited for: a place's address, scale and scores, and the greatest scores.
        constexpr int OWN = (PIECE_PLACES + 127) / 128, PAIRS = PIECE_PLACES / 64;
        const int64_t at = int64_t(local) * f.stride + first * 16;
        const uint8_t* key[OWN];
        uint32_t exponent[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int place = me + 128 * i;
            key[i] = place < places ? f.keys[at + place] : nullptr;
            exponent[i] = place < places ? f.exponents[(at + place) * 8 + min(slice, CHUNKS - 2)] : 0;
        }
        float2 v[PAIRS][4];
        const float* scores = f.scores + first_head * f.stride + first * 16 + 2 * lane;
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
#pragma unroll
            for (int h = 0; h < 4; h++)
                v[i][h] = 64 * i + 2 * lane < places ? *reinterpret_cast<const float2*>(scores + h * f.stride + 64 * i) : make_float2(NONE, NONE);
        float top[4] = {NONE, NONE, NONE, NONE};
        if (round == 0) {
            const float* tops = f.tops + first_head * (f.stride / NARROW_PLACES) + lane;
            for (int i = 0; i < steps * 2; i += 128) {
#pragma unroll
                for (int k = 0; k < 4; k++)
#pragma unroll
                    for (int h = 0; h < 4; h++)
                        if (i + 32 * k + lane < steps * 2) top[h] = fmaxf(top[h], tops[h * (f.stride / NARROW_PLACES) + i + 32 * k]);
            }
        }
#pragma unroll
        for (int i = 0; i < OWN; i++)
            if (key[i]) w.keys[side][me + 128 * i] = reinterpret_cast<uint64_t>(key[i]);
        meet();
        const auto stored16 = [&](int step) { return first + step < window_steps || slice == CHUNKS - 1; };
        // Rows of a batch: 8 bytes a lane, of a row's 64 codes or of 64 f16 of two rows. Steps past the end repeat the last one; their weights
        // are zeros.
        uint2 raw[BATCH][2];
        const auto load = [&](int from) {
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int step = min(from + i, n - 1);
                const bool whole = stored16(step);
                const uint64_t* rows = w.keys[side] + step * 16 + (whole ? me / 16 : me / 8);
                const int skip = whole ? (first + step < window_steps ? 128 * slice : TAIL) + me % 16 * 8 : 64 * slice + me % 8 * 8;
                raw[i][0] = fetch<uint2>(reinterpret_cast<const uint8_t*>(rows[0]) + skip);
                if (whole) raw[i][1] = fetch<uint2>(reinterpret_cast<const uint8_t*>(rows[8]) + skip);
            }
        };
        const auto store = [&](int from) {
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const bool whole = stored16(min(from + i, n - 1));
                uint8_t* to = w.values[side][from / BATCH & 1][i] + (whole ? me / 16 * HALF_PITCH + me % 16 * 8 : me / 8 * CODE_PITCH + me % 8 * 8);
                *reinterpret_cast<uint2*>(to) = raw[i][0];
                if (whole) *reinterpret_cast<uint2*>(to + 8 * HALF_PITCH) = raw[i][1];
            }
        };
        if (n > 0) load(0);
        // Each warp makes the weights of four heads for its piece.
        if (round == 0) {
#pragma unroll
            for (int h = 0; h < 4; h++) {
                base[h] = weight_base(warp_max(top[h]));
                if (lane == 0 && side == 0) w.bases[4 * quarter + h] = base[h];
            }
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
            if (key[i]) w.scales[side][me + 128 * i] = scale_of(exponent[i]);

        if (n > 0) store(0);
        float sum[2][4], ones[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 8; i++) (&sum[0][0])[i] = 0.0f;
#pragma unroll 1
        for (int from = 0; from < n; from += BATCH) {
            // The next batch is on its way while this one is computed.
            if (from + BATCH < n) load(from + BATCH);
            meet();
            uint32_t b[BATCH][2][2], a[BATCH][2][4];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
#pragma unroll
                for (int half = 0; half < 2; half++) ldmatrix4(a[i][half], a_at + (from + i) * 32 + half * (NARROW_HEADS * PIECE_PITCH * 2));
                const int step = min(from + i, n - 1);
                const bool whole = stored16(step);
                const int pitch = whole ? HALF_PITCH : CODE_PITCH;
                const uint8_t* mine = w.values[side][from / BATCH & 1][i] + 2 * t * pitch + (whole ? 32 * quarter + 4 * g : 16 * quarter + 2 * (g & 6));
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint32_t x = *reinterpret_cast<const uint32_t*>(mine + 8 * h * pitch);
                    const uint32_t y = *reinterpret_cast<const uint32_t*>(mine + (8 * h + 1) * pitch);
                    const __half2 scale = *reinterpret_cast<const __half2*>(&w.scales[side][step * 16 + 2 * t + 8 * h]);
                    const uint32_t c = __byte_perm(x, y, g & 1 ? 0x7362 : 0x5140), first_two = fp8_pair(c, scale), second_two = fp8_pair(c >> 16, scale);
                    b[i][0][h] = whole ? __byte_perm(x, y, 0x5410) : first_two;
                    b[i][1][h] = whole ? __byte_perm(x, y, 0x7632) : second_two;
                }
            }
            const auto products = [&](auto all) {
#pragma unroll
                for (int i = 0; i < BATCH; i++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        mma_f16(sum[0], a[i][half], b[i][0][0], b[i][0][1]);
                        mma_f16(sum[1], a[i][half], b[i][1][0], b[i][1][1]);
                        if constexpr (decltype(all)::value) mma_f16(ones, a[i][half], ONES, ONES);
                    }
            };
            if (quarter == 0) products(std::true_type());
            else products(std::false_type());
            if (from + BATCH < n) store(from + BATCH);
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
        const float inverse = inverse_of(w.sums[0][head], w.bases[head], sink[h]);
        *reinterpret_cast<float4*>(out + (int64_t(row) * p.heads + part * NARROW_HEADS + head) * DIM + 64 * slice + 16 * quarter + 4 * t) =
            make_float4(__fmul_rn(total[h][0], inverse), __fmul_rn(total[h][1], inverse), __fmul_rn(total[h][2], inverse), __fmul_rn(total[h][3], inverse));
    }
}
