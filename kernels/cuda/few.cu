// Products for decoding with IQ2_XXS of 4,096 columns: the experts' gate and up. See tiled.cuh for the tiles; the same floating-point
// operations in the same order as in narrow.cu, which has the other widths, so that the results have the same bits. CPU reference:
// kernels/src/cpu/matmul.rs, moe.rs.
//
// IQ2_XXS takes more instructions for a byte of weights than the device has while it reads one, and most experts of a few streams have
// one row. With one row in the eight columns of the tensor cores' second operand, six would be empty: here they have the row's bytes
// again, each pair for one group of four, and zeros for the others. So the sums of four groups stay apart, each in a lane of its own
// which multiplies them with its scale, where otherwise every lane does so for every group. A warp has tiles of its own, with all their
// superblocks, and waits for no other; weights come straight into registers.
#include "narrow.cuh"
#include "units.cuh"

constexpr int ROWS = 4, WARPS = 16, SUPERBLOCKS = 16;
// Superblocks that are on their way: a quarter of a tile.
constexpr int AHEAD = SUPERBLOCKS / SPLIT;

using Of = Narrow<TiledIQ2_XXS>;

struct Room {
    Selectors table;
    Unit<ROWS> units[WARPS][PLANNED];
    int items[WARPS];    // of the launch: kept here for the lack of registers
};
// As `FEW_SHARED` in kernels/src/cuda/narrow.rs.
static_assert(sizeof(Room) == 77888);

// Reads of weights, which keep their order, and are left out unless `go`.
__device__ __forceinline__ void load_if(uint4& v, const uint8_t* p, int go) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4]; }"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(p), "r"(go));
}
__device__ __forceinline__ void load_if(uint16_t& v, const uint8_t* p, int go) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p ld.global.nc.u16 %0, [%1]; }" : "+h"(v) : "l"(p), "r"(go));
}

// A lane's part of one superblock of a tile, and where that of the next ones is.
struct Part {
    uint4 q[2];
    uint16_t d[2];
};
struct Source {
    const uint8_t *q, *d;
    __device__ __forceinline__ void fetch(Part& to, int k, int go) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            load_if(to.q[h], q + k * 1024 + h * 512, go);
            load_if(to.d[h], d + k * 32 + h * 16, go);
        }
    }
    __device__ __forceinline__ void advance() { q += AHEAD * 1024, d += AHEAD * 32; }
};

// What the row's scale in this superblock is multiplied with, in lanes 0 and 1 of four for the first output, in 2 and 3 for the one 8 further
// on. `mine` has all bits for the one group of four that this lane feeds, whose bytes begin at `from`. `then` is called when the weights
// have been read.
template <class F>
__device__ __forceinline__ float one_row(const Part& w, const uint8_t* table, const Of::Kit& kit, const uint32_t (&mine)[4], const uint8_t* from,
                                         int lane, F then) {
    const int t = lane & 3;
    const bool second = t & 2;
    const uint32_t wa[4] = {w.q[0].x, w.q[0].y, w.q[0].z, w.q[0].w}, wb[4] = {w.q[1].x, w.q[1].y, w.q[1].z, w.q[1].w};
    const float d = __fmul_rn(low_half(second ? w.d[1] : w.d[0]), 0.125f);
    int total[4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint2 v = load8(from + i * 256);
        int c[4] = {0, 0, 0, 0};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t of_a = wa[2 * i + j / 2], of_b = wb[2 * i + j / 2];
            const uint2 a = j & 1 ? Of::eight<1>(table, of_a, kit) : Of::eight<0>(table, of_a, kit);
            const uint2 b = j & 1 ? Of::eight<1>(table, of_b, kit) : Of::eight<0>(table, of_b, kit);
            mma_s8(c, a.x, b.x, a.y, b.y, make_uint2(v.x & mine[j], v.y & mine[j]));
        }
        // Twice the scale of this lane's group and one more, of the second output 16 times.
        const uint32_t s = Of::scales(wa, wb, i, kit), of_lane = 2u << (8 * t);
        const int sa = __dp4a(s & 0x0f0f0f0fu, of_lane, 1u), sb = __dp4a(s & 0xf0f0f0f0u, of_lane, 16u);
#pragma unroll
        for (int j = 0; j < 4; j++) total[j] = (i ? total[j] : 0) + c[j] * (j < 2 ? sa : sb);
    }
    then();
    int high = second ? total[2] : total[0], low = second ? total[3] : total[1];
    high += __shfl_xor_sync(~0u, second ? total[0] : total[2], 2);
    low += __shfl_xor_sync(~0u, second ? total[1] : total[3], 2);
    high += __shfl_xor_sync(~0u, high, 1);
    low += __shfl_xor_sync(~0u, low, 1);
    if (second) high >>= 4, low >>= 4;
    return __fmul_rn(d, join(high, low));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    few_IQ2_XXS(const __grid_constant__ Members p, const __grid_constant__ Acts x, const __grid_constant__ Items items) {
    extern __shared__ __align__(16) uint8_t shared[];
    Room& room = *reinterpret_cast<Room*>(shared);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    Unit<ROWS>* units = room.units[warp];
    // Tiles that different multiprocessors compute at the same time are neighbours.
    const auto plan = [&](int from) {
        plan_units<ROWS, 1, 32>(p, items, room.items[warp], warp * gridDim.x + blockIdx.x, gridDim.x * WARPS, from, PLANNED / 2, lane, units);
        __syncwarp();
    };
    const auto seek = [&](const Unit<ROWS>& unit) {
        if (unit.member < 0) return Source{};
        const Tiled& of = p.w[unit.member];
        return Source{of.qs + int64_t(unit.tile) * 1024 + lane * 16, of.side2 + int64_t(unit.tile) * 32 + g * 2};
    };
    Part w[AHEAD];
    Source source{};
    const auto start = [&]() {
        if (lane == 0) room.items[warp] = items_of<ROWS>(items);
        __syncwarp();
        plan(0);
        source = seek(units[0]);
#pragma unroll
        for (int k = 0; k < AHEAD; k++) source.fetch(w[k], k, units[0].member >= 0);
        source.advance();
    };
    const bool known = !items.list || items.known;
    // The table first: its own reads are on their way while the list's are waited for.
    fill(&room.table);
    if (known) start();
    after_previous();
    if (!known) start();
    __syncthreads();
    const Of::Kit kit(lane);
    uint32_t mine[4];
#pragma unroll
    for (int i = 0; i < 4; i++) mine[i] = g >> 1 == i ? ~0u : 0;
#pragma unroll 1
    for (int u = 0;; u++) {
        const Unit<ROWS>& unit = units[u % PLANNED];
        if (unit.member < 0) break;
        if (u % (PLANNED / 2) == 0) plan(u + PLANNED / 2);
        int go = 1;
        // The last superblocks of a tile are computed while the first ones of the next are fetched.
        const auto turn = [&](int b) {
            if (b + AHEAD == SUPERBLOCKS) source = seek(units[(u + 1) % PLANNED]), go = source.q != nullptr;
        };
        // A sum of -0 is what changes no other.
        float all[1][2] = {{-0.0f, -0.0f}}, sum[1][2];
        float* out = p.out[unit.member] + g;
        if (unit.rows == 1) {
            const uint8_t* from = x.q + int64_t(unit.in[0]) * ACT_Q + (g >> 1) * 64 + (g & 1) * 32 + t * 8;
            const float* scale = x.scale + unit.in[0];
#pragma unroll 1
            for (int b = 0; b < SUPERBLOCKS; b += AHEAD) {
                turn(b);
                sum[0][0] = 0.0f;
#pragma unroll
                for (int k = 0; k < AHEAD; k++) {
                    const float part = one_row(w[k], shared, kit, mine, from + k * ACT_Q, lane, [&]() { source.fetch(w[k], k, go); });
                    sum[0][0] = __fmaf_rn(__ldg(scale + k), part, sum[0][0]);
                }
                all[0][0] = __fadd_rn(all[0][0], sum[0][0]);
                source.advance();
                from += AHEAD * ACT_Q;
                scale += AHEAD;
            }
            if (!(t & 1)) out[unit.out[0] + 4 * t] = all[0][0];
        } else {
            Feed<1> feed;
            feed.of[0] = unit.in[g >> 1];
            feed.at[0] = unit.in[t];
            feed.q[0] = x.q + int64_t(feed.of[0]) * ACT_Q + (g & 1) * 32 + t * 8;
            const Direct<1> direct{x, feed, lane};
#pragma unroll 1
            for (int b = 0; b < SUPERBLOCKS; b += AHEAD) {
                turn(b);
                sum[0][0] = sum[0][1] = 0.0f;
#pragma unroll
                for (int k = 0; k < AHEAD; k++) {
                    const Of::Frag f = {{w[k].q[0], w[k].q[1]}, w[k].d[0] | uint32_t(w[k].d[1]) << 16};
                    source.fetch(w[k], k, go);
                    Of::add(f, shared, direct, kit, sum);
                    feed.q[0] += ACT_Q, feed.at[0]++, feed.of[0]++;
                }
#pragma unroll
                for (int h = 0; h < 2; h++) all[0][h] = __fadd_rn(all[0][h], sum[0][h]);
                source.advance();
            }
            if (t < unit.rows) out[unit.out[t]] = all[0][0], out[unit.out[t] + 8] = all[0][1];
        }
    }
}
