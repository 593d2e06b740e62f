// The compressors of a layer in a launch of their own: prefill's, see compress_rows.cuh.
#include "compress_rows.cuh"

// Blocks: (part of the span's windows, span, compressor).
#define COMPRESS_KERNEL(T, BLOCKS)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(T, BLOCKS) compress_all_##T(Step st, const __grid_constant__ Compressors all) {        \
        after_previous();                                                                                                              \
        extern __shared__ __align__(16) float parts[];                                                                                 \
        const int z = blockIdx.z;                                                                                                      \
        compress_part<T>(parts, st, all.compress[z], all.frontier[z], all.rows[z], blockIdx.x, blockIdx.y);                            \
    }
COMPRESS_KERNEL(512, 2) COMPRESS_KERNEL(1024, 1)
