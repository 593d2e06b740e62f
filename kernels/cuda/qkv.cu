// Kernels around attention that have a warp per head or superblock: its operands (qkv.cuh), alone or together with a layer's compressors
// (compress_rows.cuh), and its output.
#include "compress_rows.cuh"
#include "qkv.cuh"
#include "split.cuh"

// Indexer queries that are rounded already, in the order of the tensor cores. A warp per pair of heads.
extern "C" __global__ void __launch_bounds__(128) index_pack(const float* q, int tiles, uint4* out) {
    after_previous();
    const int item = blockIdx.x * 4 + threadIdx.x / 32;
    if (item < 8 * tiles) pack_index(q, item / 8, item % 8, out, [](WarpRow<1>&) {});
}

// Rotates the interleaved pairs of every head's last 2 * pairs elements (a multiple of 8) back by the row's turn, and splits rows for the
// product that follows; a warp per superblock. Heads are a multiple of 8 wide, rows one of 256.
extern "C" __global__ void __launch_bounds__(256) unrotate_split(const float2* turns, int pairs, int head_dim, int superblocks, float* x,
                                                                    int64_t total, Acts to) {
    let_next_in();
    after_previous();
    const int64_t at = int64_t(blockIdx.x) * 8 + threadIdx.x / 32;
    if (at >= total) return;
    const int64_t row = at / superblocks;
    const int first = (int(at - row * superblocks) * 256 + int(threadIdx.x & 31) * 8) % head_dim - (head_dim - 2 * pairs);
    float* from = x + at * 256 + (threadIdx.x & 31) * 8;
    float v[8];
    load8f(from, v);
    if (first >= 0) {
        float t[8];
        load8f(reinterpret_cast<const float*>(turns + row * pairs + first / 2), t);
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const float a = v[i], b = v[i + 1];
            v[i] = __fmaf_rn(a, t[i + 1], __fmul_rn(b, t[i]));
            v[i + 1] = __fmaf_rn(b, t[i + 1], -__fmul_rn(a, t[i]));
        }
        store8f(from, v);
    }
    split(v, ORDER_PLAIN, at, to);
}

#define PREPARE_KERNEL(E)                                                                        \
    extern "C" __global__ void __launch_bounds__(128) prepare_##E(Step st, Prepare p, Slot ring) { \
        after_previous();                                                                        \
        prepare<E>(st, p, ring, blockIdx.x * 4 + threadIdx.x / 32);                              \
    }
PREPARE_KERNEL(1) PREPARE_KERNEL(2) PREPARE_KERNEL(4)

// The same and the compressors, which do not need each other, in one launch: for few rows, where launches are the larger part. The first
// `parts` * `spans` blocks of each of `count` compressors compress, the others have four warps at work.
#define PREPARE_COMPRESS_KERNEL(T, BLOCKS)                                                                                             \
    extern "C" __global__ void __launch_bounds__(T, BLOCKS)                                                                             \
        prepare_compress_##T(Step st, const __grid_constant__ Prepare p, const __grid_constant__ Slot ring,                             \
                             const __grid_constant__ Compressors all, int parts, int spans, int count) {                                \
        after_previous();                                                                                                              \
        extern __shared__ __align__(16) float shared[];                                                                                \
        const int compress = parts * spans * count, block = blockIdx.x;                                                                \
        if (block < compress) {                                                                                                        \
            const int z = block % count, span = block / count % spans;                                                                 \
            compress_part<T>(shared, st, all.compress[z], all.frontier[z], all.rows[z], block / count / spans, span);                  \
        } else if (threadIdx.x < 128) {                                                                                                \
            prepare<4>(st, p, ring, (block - compress) * 4 + threadIdx.x / 32);                                                        \
        }                                                                                                                              \
    }
PREPARE_COMPRESS_KERNEL(512, 2) PREPARE_COMPRESS_KERNEL(1024, 1)
