// What kernels for few activation rows have in common: weights that share a launch, and where the rows and tiles of their units of work are.
#pragma once
#include "tiled.cuh"

// Weights of one type and width that share their inputs. Laid out as `MembersArg` in kernels/src/cuda/narrow.rs.
constexpr int MEMBERS = 6;
struct Members {
    Tiled w[MEMBERS];
    float* out[MEMBERS];
    int start[MEMBERS + 1];   // tiles (of one matrix) of the members before; after the last one, of all
    int count;
    int superblocks;
    int pad;
};

// Neighbouring tiles of one item, with where its rows are: found by all threads for many units at once, because the divisions and the
// lists' latency would cost a warp more than a unit's products.
template <int ROWS>
struct Unit {
    int member;             // or -1 past the last
    int rows;
    int tile;               // of the member's weight: its first superblock
    int pad;
    int in[ROWS];           // first superblock of the input row
    int out[ROWS];          // place in the member's output
};
constexpr int PLANNED = 16;

// How many items a launch has. Lists and their lengths may be older than the kernel before this one, which may still run (see
// `after_previous`): from the second-level cache, as said there.
template <int ROWS>
__device__ __forceinline__ int items_of(const Items& items) {
    return items.list ? __ldcg(items.count) : (items.rows + ROWS - 1) / ROWS * items.matrices;
}

// Finds `n` units of TILES tiles from the block's (or group's) unit `from` on: every `stride`-th one after unit `first`; by THREADS threads,
// of which this is number `within`.
template <int ROWS, int TILES, int THREADS>
__device__ __forceinline__ void plan_units(const Members& p, const Items& items, int count, int first, int stride, int from, int n, int within,
                                           Unit<ROWS>* units) {
    const int tiles = p.start[p.count] / TILES;
    for (int i = within; i < n * ROWS; i += THREADS) {
        const int u = from + i / ROWS, j = i % ROWS, unit = u * stride + first, item = unit / tiles;
        Unit<ROWS>& to = units[u % PLANNED];
        if (item >= count) {
            to.member = -1;
            continue;
        }
        int tile = unit % tiles * TILES, m = 0, matrix, begin, rows;
        while (tile >= p.start[m + 1]) m++;
        tile -= p.start[m];
        if (items.list) {
            const int4 it = __ldcg(items.list + item);
            matrix = it.x, begin = it.y, rows = it.z;
        } else {
            matrix = item % items.matrices;
            begin = item / items.matrices * ROWS;
            rows = min(ROWS, items.rows - begin);
        }
        // Rows past the end repeat the last one; their sums are not written.
        const int r = begin + min(j, rows - 1), o = items.list ? __ldcg(items.order + r) : r * items.matrices + matrix;
        const int of = p.start[m + 1] - p.start[m];
        to.in[j] = (items.list ? o / items.per_row : o) * p.superblocks;
        to.out[j] = (o * of + tile) * 16;
        if (j == 0) {
            to.member = m;
            to.rows = rows;
            to.tile = (matrix * of + tile) * p.superblocks;
        }
    }
}
