// What queries, the key-value row and the indexer's queries go through between their projections and attention: a warp per head. CPU
// reference: kernels/src/cpu/sparse.rs (head_rms, rope_tail, round_kv, round_index), elementwise.rs (rms_norm).
#pragma once
#include "warp_row.cuh"

// Laid out as `PrepareArg` in kernels/src/cuda/qkv.rs.
struct Prepare {
    const float2* turns;   // [rows, pairs]
    float* q;              // [rows, heads * head_dim]
    const float* kv_raw;   // [rows, head_dim]
    const float* kv_norm;  // [head_dim]
    float* kv;             // [rows, head_dim]
    const float* index_q;  // [rows, index_tiles * 16 * 128]
    uint4* index_out;      // the same as f16 in the order of the tensor cores' steps
    int pairs, heads, index_tiles, official, write_ring, rows;
    float eps;
    int pad;
};

// Keeps f16 finite: 6 * 2^13 is the greatest FP4 magnitude it can hold.
constexpr float MOST_F16_SCALE = 8192.0f;

__device__ __forceinline__ uint32_t halves(float a, float b) {
    const __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&h);
}

// Heads g and g + 8 of tile `tile`, each after `round`: together a lane's share of the A operands of mma.m16n8k16. Lane l has elements
// 4 l .. 4 l + 3 of both; step l % 8 of the product takes them as thread l / 8 of group g (index_scores.cu has keys in this order).
template <class Round>
__device__ __forceinline__ void pack_index(const float* q, int64_t tile, int g, uint4* out, Round round) {
    const int lane = threadIdx.x & 31;
    WarpRow<1> a, b;
    a.load(q + tile * 2048 + g * 128);
    b.load(q + tile * 2048 + (g + 8) * 128);
    round(a);
    round(b);
    out[(tile * 8 + lane % 8) * 32 + g * 4 + lane / 8] =
        make_uint4(halves(a.v[0][0], a.v[0][1]), halves(b.v[0][0], b.v[0][1]), halves(a.v[0][2], a.v[0][3]), halves(b.v[0][2], b.v[0][3]));
}

// What warp `warp` of all that there are does.
template <int E>
__device__ __forceinline__ void prepare(const Step& st, const Prepare& p, const Slot& ring, int warp) {
    constexpr int DIM = 128 * E;
    const int items = p.heads + 1 + 8 * p.index_tiles;
    const int row = warp / items, item = warp - row * items;
    if (row >= p.rows) return;
    const float2* turns = p.turns + row * p.pairs;
    if (item > p.heads) {
        const int i = item - p.heads - 1;
        pack_index(p.index_q, int64_t(row) * p.index_tiles + i / 8, i % 8, p.index_out, [&](WarpRow<1>& x) {
            x.rotate(turns, 128 - 2 * p.pairs);
            x.hadamard();
            x.fp4_round_trip(MOST_F16_SCALE);
        });
    } else if (item == p.heads) {
        WarpRow<E> x;
        x.load(p.kv_raw + int64_t(row) * DIM);
        x.scale(x.inverse_rms(p.eps), p.kv_norm);
        x.rotate(turns, DIM - 2 * p.pairs);
        if (p.official) {
            x.fp8_round_trip(DIM - 2 * p.pairs);
            x.f16_round_trip();
        }
        x.store(p.kv + int64_t(row) * DIM);
        if (p.write_ring) x.store_state(ring, slot_row(ring, st.banks[st.span_of[row]], st.positions[row]));
    } else {
        float* at = p.q + (int64_t(row) * p.heads + item) * DIM;
        WarpRow<E> x;
        x.load(at);
        x.scale(x.inverse_rms(p.eps));
        x.rotate(turns, DIM - 2 * p.pairs);
        x.store(at);
    }
}
