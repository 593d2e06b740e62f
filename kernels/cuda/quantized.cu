// Tiles from blocks, and embeddings from tiles: see tiled.cuh. Products of few activation rows are in narrow.cu, those of many in wide.cu.
// CPU reference: kernels/src/cpu/matmul.rs, moe.rs.
#include "tiled.cuh"

// Rows of blocks, as in the file, into tiles. A thread has one lane's share of one row's superblock.
template <class T>
__device__ __forceinline__ void repack(const uint8_t* from, int64_t rows, int superblocks, uint8_t* qs, uint8_t* side, uint8_t* side2) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, t = i & 3, item = i >> 2;
    const int64_t row = item / superblocks, sb = item % superblocks;
    if (row >= rows) return;
    constexpr int BYTES = 256 / T::Block::ELEMS * T::Block::BYTES;
    uint4 out[T::CHUNKS], s = make_uint4(0, 0, 0, 0);
    uint32_t s2 = 0;
    T::pack(from + item * BYTES, t, out, s, s2);
    const int64_t at = row / 16 * superblocks + sb, r = row % 16;
    for (int c = 0; c < T::CHUNKS; c++)
        *reinterpret_cast<uint4*>(qs + at * (T::CHUNKS * 1024) + ((c * 2 + r / 8) * 32 + r % 8 * 4 + t) * 16) = out[c];
    if (t == 0) {
        if (T::SIDE == 16) *reinterpret_cast<uint4*>(side + (at * 16 + r) * 16) = s;
        if (T::SIDE2 == 4) *reinterpret_cast<uint32_t*>(side2 + (at * 16 + r) * 4) = s2;
        if (T::SIDE2 == 2) *reinterpret_cast<uint16_t*>(side2 + (at * 16 + r) * 2) = s2;
    }
}

// out[r] = dequantised table[token of r], from tiles.
template <class T>
__device__ __forceinline__ void embed(Step s, Tiled w, int cols, float* out) {
    const int64_t row = s.tokens[blockIdx.x];
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        const int64_t at = row / 16 * (cols / 256) + i / 256, r = row % 16;
        const uint8_t* qs = w.qs + at * (T::CHUNKS * 1024) + (r / 8 * 32 + r % 8 * 4) * 16;
        const auto q = [&](int chunk, int lane, int byte) { return qs[(chunk * 64 + lane) * 16 + byte]; };
        out[int64_t(blockIdx.x) * cols + i] = T::element(q, w.side + (at * 16 + r) * T::SIDE, w.side2 + (at * 16 + r) * T::SIDE2, i % 256);
    }
}

#define KERNELS(T)                                                                                                                 \
    extern "C" __global__ void repack_##T(const uint8_t* from, int64_t rows, int superblocks, uint8_t* qs, uint8_t* side,           \
                                          uint8_t* side2) { after_previous();                                                                         \
        repack<Tiled##T>(from, rows, superblocks, qs, side, side2);                                                                 \
    }                                                                                                                               \
    extern "C" __global__ void embed_tiled_##T(Step s, Tiled w, int cols, float* out) { after_previous(); embed<Tiled##T>(s, w, cols, out); }
FOR_EACH_TILED(KERNELS)
