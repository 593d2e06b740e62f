// A row of 128 * E elements in the registers of one warp, and what is done to rows before they are stored: nothing here waits for other
// warps. CPU reference: kernels/src/math/lowp.rs, packed.rs; the bits are those of the block-wide functions in common.cuh, but for sums of squares.
#pragma once
#include "common.cuh"

// 1 / s for a power of two from 2^-126 to 2^126: dividing by s and multiplying by this give the same bits.
__device__ __forceinline__ float pow2_inverse(float s) { return __uint_as_float(0x7f000000u - __float_as_uint(s)); }

// Lane l has elements 128 e + 4 l .. 128 e + 4 l + 3 as v[e]. It may be a piece of a wider row: then `from`, a multiple of 128, is where.
template <int E>
struct WarpRow {
    float v[E][4];

    __device__ __forceinline__ void load(const float* x) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int e = 0; e < E; e++) {
            const float4 a = reinterpret_cast<const float4*>(x)[32 * e + lane];
            v[e][0] = a.x, v[e][1] = a.y, v[e][2] = a.z, v[e][3] = a.w;
        }
    }

    __device__ __forceinline__ void store(float* x) const {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int e = 0; e < E; e++) reinterpret_cast<float4*>(x)[32 * e + lane] = make_float4(v[e][0], v[e][1], v[e][2], v[e][3]);
    }

    // 1 / RMS.
    __device__ __forceinline__ float inverse_rms(float eps) const {
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < E; e++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum = __fmaf_rn(v[e][i], v[e][i], sum);
        return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(warp_sum(sum), float(128 * E)), eps)));
    }

    __device__ __forceinline__ void scale(float by) {
#pragma unroll
        for (int e = 0; e < E; e++)
#pragma unroll
            for (int i = 0; i < 4; i++) v[e][i] = __fmul_rn(v[e][i], by);
    }

    // Times `by` times the weight of each element.
    __device__ __forceinline__ void scale(float by, const float* weight) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int e = 0; e < E; e++) {
            const float4 w = reinterpret_cast<const float4*>(weight)[32 * e + lane];
            v[e][0] = __fmul_rn(__fmul_rn(v[e][0], by), w.x);
            v[e][1] = __fmul_rn(__fmul_rn(v[e][1], by), w.y);
            v[e][2] = __fmul_rn(__fmul_rn(v[e][2], by), w.z);
            v[e][3] = __fmul_rn(__fmul_rn(v[e][3], by), w.w);
        }
    }

    // Rotates the interleaved pairs from element `first` (a multiple of 4) on by (sine, cosine).
    __device__ __forceinline__ void rotate(const float2* turns, int first) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int e = 0; e < E; e++) {
            const int i = 128 * e + 4 * lane - first;
            if (i < 0) continue;
            const float4 t = *reinterpret_cast<const float4*>(turns + i / 2);
            const float a = v[e][0], b = v[e][1], c = v[e][2], d = v[e][3];
            v[e][0] = __fmaf_rn(a, t.y, -__fmul_rn(b, t.x));
            v[e][1] = __fmaf_rn(a, t.x, __fmul_rn(b, t.y));
            v[e][2] = __fmaf_rn(c, t.w, -__fmul_rn(d, t.z));
            v[e][3] = __fmaf_rn(c, t.z, __fmul_rn(d, t.w));
        }
    }

    // Greatest magnitude of the lane's four elements e among LANES lanes (a power of two).
    template <int LANES>
    __device__ __forceinline__ float widest(int e, float least) const {
        float m = fmaxf(fmaxf(least, fmaxf(fabsf(v[e][0]), fabsf(v[e][1]))), fmaxf(fabsf(v[e][2]), fabsf(v[e][3])));
#pragma unroll
        for (int k = LANES / 2; k > 0; k >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, k));
        return m;
    }

    // FP8 round trip of the first `nope` elements, a multiple of 64: 16 lanes have a scale.
    __device__ __forceinline__ void fp8_round_trip(int nope) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int e = 0; e < E; e++) {
            const float s = pow2_ceil(__fdiv_rn(widest<16>(e, 1e-4f), 448.0f));
            if (128 * e + 4 * lane >= nope) continue;
            const float inverse = pow2_inverse(s);
#pragma unroll
            for (int i = 0; i < 4; i++) v[e][i] = __fmul_rn(round_e4m3(__fmul_rn(v[e][i], inverse)), s);
        }
    }

    __device__ __forceinline__ void f16_round_trip() {
#pragma unroll
        for (int e = 0; e < E; e++)
#pragma unroll
            for (int i = 0; i < 4; i++) v[e][i] = f16_round(v[e][i]);
    }

    // FP4 round trip: 8 lanes have a scale, which is at most `most`.
    __device__ __forceinline__ void fp4_round_trip(float most) {
#pragma unroll
        for (int e = 0; e < E; e++) {
            const float s = fminf(pow2_ceil(__fdiv_rn(widest<8>(e, 7.0529664e-38f), 6.0f)), most);
            const float inverse = pow2_inverse(s);
#pragma unroll
            for (int i = 0; i < 4; i++) v[e][i] = __fmul_rn(e2m1_value(e2m1_code(__fmul_rn(v[e][i], inverse))), s);
        }
    }

    // Walsh-Hadamard transform scaled by 1 / sqrt(128 E), its stages in the order of the reference.
    __device__ __forceinline__ void hadamard() {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int e = 0; e < E; e++) {
            const float a = __fadd_rn(v[e][0], v[e][1]), b = __fsub_rn(v[e][0], v[e][1]);
            const float c = __fadd_rn(v[e][2], v[e][3]), d = __fsub_rn(v[e][2], v[e][3]);
            v[e][0] = __fadd_rn(a, c), v[e][2] = __fsub_rn(a, c);
            v[e][1] = __fadd_rn(b, d), v[e][3] = __fsub_rn(b, d);
#pragma unroll
            for (int k = 1; k < 32; k <<= 1)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float other = __shfl_xor_sync(~0u, v[e][i], k);
                    v[e][i] = lane & k ? __fsub_rn(other, v[e][i]) : __fadd_rn(v[e][i], other);
                }
        }
#pragma unroll
        for (int k = 1; k < E; k <<= 1)
#pragma unroll
            for (int e = 0; e < E; e++)
                if (!(e & k))
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float a = v[e][i], b = v[e | k][i];
                        v[e][i] = __fadd_rn(a, b);
                        v[e | k][i] = __fsub_rn(a, b);
                    }
        scale(__fdiv_rn(1.0f, __fsqrt_rn(float(128 * E))));
    }

    // Writes it as a state row. Rows lie at even addresses.
    __device__ __forceinline__ void store_state(const Slot& s, uint8_t* dst, int from = 0) const {
        const int lane = threadIdx.x & 31;
        if (s.type == STATE_F32) {
            store(reinterpret_cast<float*>(dst) + from);
        } else if (s.type == STATE_F16) {
#pragma unroll
            for (int e = 0; e < E; e++)
#pragma unroll
                for (int i = 0; i < 4; i += 2)
                    reinterpret_cast<__half2*>(dst)[from / 2 + 64 * e + 2 * lane + i / 2] = __floats2half2_rn(v[e][i], v[e][i + 1]);
        } else if (s.type == STATE_FP8) {
            const int nope = s.width - s.rotary, tail = (nope + nope / 64 + 1) & ~1;
#pragma unroll
            for (int e = 0; e < E; e++) {
                const float sc = pow2_ceil(fmaxf(__fdiv_rn(widest<16>(e, 0.0f), 448.0f), 1.17549435e-38f));
                const float inverse = pow2_inverse(sc);
                const int at = from + 128 * e + 4 * lane;
                uint16_t* to = reinterpret_cast<uint16_t*>(at < nope ? dst + at : dst + tail + 2 * (at - nope));
                if (at < nope) {
                    if (lane % 16 == 0) dst[nope + at / 64] = uint8_t(__float_as_uint(sc) >> 23);
#pragma unroll
                    for (int i = 0; i < 4; i += 2)
                        to[i / 2] = e4m3_code(round_e4m3(__fmul_rn(v[e][i], inverse))) | e4m3_code(round_e4m3(__fmul_rn(v[e][i + 1], inverse))) << 8;
                } else {
#pragma unroll
                    for (int i = 0; i < 4; i++) to[i] = __half_as_ushort(__float2half_rn(v[e][i]));
                }
            }
        } else {
#pragma unroll
            for (int e = 0; e < E; e++) {
                const float sc = pow2_ceil(fmaxf(__fdiv_rn(widest<8>(e, 0.0f), 6.0f), 1.17549435e-38f));
                if (lane % 8 == 0) dst[s.width / 2 + from / 32 + 4 * e + lane / 8] = uint8_t(__float_as_uint(sc) >> 23);
                const float inverse = pow2_inverse(sc);
                int codes = 0;
#pragma unroll
                for (int i = 0; i < 4; i++) codes |= e2m1_code(__fmul_rn(v[e][i], inverse)) << (4 * i);
                reinterpret_cast<uint16_t*>(dst)[from / 4 + 32 * e + lane] = uint16_t(codes);
            }
        }
    }
};
