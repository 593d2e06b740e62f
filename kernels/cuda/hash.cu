// BLAKE3 of bytes in device memory: a tree over leaves of 1 KiB whose nodes have chaining values of 32 bytes (BLAKE3 paper, sections
// 2.1 to 2.5). References: the crate blake3, and weight-owner/src/loader/tree.rs for the tree above what is hashed here.
//
// A thread compresses a leaf, a block the subtree of its 256 leaves.
#include "common.cuh"

constexpr uint32_t LEAF_START = 1, LEAF_END = 2, PARENT = 4;
constexpr int LEAF = 1024, BLOCK = 64, LEAVES = 256;

__device__ __forceinline__ void quarter(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, uint32_t x, uint32_t y) {
    a += b + x;
    d = __byte_perm(d ^ a, 0, 0x1032);
    c += d;
    b = __funnelshift_r(b ^ c, b ^ c, 12);
    a += b + y;
    d = __byte_perm(d ^ a, 0, 0x0321);
    c += d;
    b = __funnelshift_r(b ^ c, b ^ c, 7);
}

__device__ __forceinline__ void initial(uint32_t* v) {
    constexpr uint32_t iv[8] = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                                0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = iv[i];
}

// Takes `cv` to the chaining value after one more block `m`, of which `len` bytes count.
__device__ __forceinline__ void compress(uint32_t (&cv)[8], uint32_t (&m)[16], uint64_t counter, uint32_t len, uint32_t flags) {
    constexpr int order[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
    uint32_t v[16];
    initial(v + 8);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = cv[i];
    v[12] = uint32_t(counter);
    v[13] = uint32_t(counter >> 32);
    v[14] = len;
    v[15] = flags;
    // Unrolled, so that the words' new order after each round costs nothing.
#pragma unroll
    for (int round = 0; round < 7; round++) {
#pragma unroll
        for (int i = 0; i < 4; i++) quarter(v[i], v[4 + i], v[8 + i], v[12 + i], m[2 * i], m[2 * i + 1]);
#pragma unroll
        for (int i = 0; i < 4; i++)
            quarter(v[i], v[4 + (i + 1) % 4], v[8 + (i + 2) % 4], v[12 + (i + 3) % 4], m[8 + 2 * i], m[9 + 2 * i]);
        uint32_t next[16];
#pragma unroll
        for (int i = 0; i < 16; i++) next[i] = m[order[i]];
#pragma unroll
        for (int i = 0; i < 16; i++) m[i] = next[i];
    }
#pragma unroll
    for (int i = 0; i < 8; i++) cv[i] = v[i] ^ v[8 + i];
}

// The value of the tree over the first `n` of `values`, of which thread t has written the t-th. Pair by pair: the last of an odd number
// goes up alone, and so every left side is the largest power of two that leaves something for the right. `top` is added to the
// flags of the last pair.
__device__ __forceinline__ void subtree(uint32_t (&values)[8][LEAVES], int n, uint32_t top, uint32_t* out) {
    const int t = threadIdx.x;
    for (; n > 1; n = (n + 1) / 2) {
        uint32_t cv[8], m[16];
        __syncthreads();
        if (2 * t + 1 < n) {
            initial(cv);
#pragma unroll
            for (int i = 0; i < 16; i++) m[i] = values[i % 8][2 * t + i / 8];
            compress(cv, m, 0, BLOCK, PARENT | (n == 2 ? top : 0));
        } else if (2 * t < n) {
#pragma unroll
            for (int i = 0; i < 8; i++) cv[i] = values[i][2 * t];
        }
        __syncthreads();
        if (2 * t < n) {
#pragma unroll
            for (int i = 0; i < 8; i++) values[i][t] = cv[i];
        }
    }
    __syncthreads();
    if (t < 8) out[t] = values[t][0];
}

// `out[8 * block]`: the value of 256 leaves (fewer at the end) of `len` bytes, the first of which is leaf `first` of the whole input. `data`
// is aligned to 64 bytes and may be read up to the next multiple of 64. `top`: flags of a block's topmost node.
extern "C" __global__ void __launch_bounds__(LEAVES)
hash_leaves(const uint4* data, int64_t len, uint64_t first, uint32_t top, uint32_t* out) {
    after_previous();
    __shared__ uint32_t values[8][LEAVES];
    const int64_t begin = int64_t(blockIdx.x) * LEAVES, leaf = begin + threadIdx.x;
    // No bytes are a leaf too.
    const int n = int(min(int64_t(LEAVES), max(int64_t(1), (len + LEAF - 1) / LEAF) - begin));
    if (threadIdx.x < n) {
        uint32_t cv[8], flags = LEAF_START;
        initial(cv);
        const uint4* from = data + leaf * (LEAF / 16);
        int left = int(min(int64_t(LEAF), len - leaf * LEAF));
        do {
            uint32_t m[16];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint4 four = __ldcs(from + i);
                m[4 * i] = four.x, m[4 * i + 1] = four.y, m[4 * i + 2] = four.z, m[4 * i + 3] = four.w;
            }
            if (left < BLOCK) {
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    const int have = left - 4 * i;
                    if (have < 4) m[i] &= have <= 0 ? 0 : (1u << (8 * have)) - 1;
                }
            }
            if (left <= BLOCK) flags |= LEAF_END | (n == 1 ? top : 0);
            compress(cv, m, first + leaf, min(left, BLOCK), flags);
            flags = 0;
            from += BLOCK / 16;
            left -= BLOCK;
        } while (left > 0);
#pragma unroll
        for (int i = 0; i < 8; i++) values[i][threadIdx.x] = cv[i];
    }
    subtree(values, n, top, out + 8 * blockIdx.x);
}

// `out`: the value of the tree over `n` values, 256 at most, by one block.
extern "C" __global__ void __launch_bounds__(LEAVES) hash_parents(const uint32_t* in, int n, uint32_t top, uint32_t* out) {
    after_previous();
    __shared__ uint32_t values[8][LEAVES];
    if (threadIdx.x < n) {
#pragma unroll
        for (int i = 0; i < 8; i++) values[i][threadIdx.x] = in[8 * threadIdx.x + i];
    }
    subtree(values, n, top, out);
}
