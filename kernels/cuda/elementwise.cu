// Row-wise operations. CPU reference: kernels/src/cpu/elementwise.rs, moe.rs (swiglu_clamped), sparse.rs (head_rms, rope_tail).
#include "norm.cuh"

// out = x / sqrt(mean(x^2) + eps) * weight; a block per row.
extern "C" __global__ void rms_norm(const float* x, const float* weight, float eps, int width, float* out) {
    after_previous();
    const float* in = x + int64_t(blockIdx.x) * width;
    float* o = out + int64_t(blockIdx.x) * width;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum = __fmaf_rn(in[i], in[i], sum);
    const float scale = 1.0f / sqrtf(block_sum(sum) / float(width) + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) o[i] = in[i] * scale * weight[i];
}

// As rms_norm, for widths that are multiples of 4; a block of 256 per row.
extern "C" __global__ void __launch_bounds__(256) rms_norm_4(const float* x, const float* weight, float eps, int width, float* out) {
    after_previous();
    const float4* in = reinterpret_cast<const float4*>(x + int64_t(blockIdx.x) * width);
    const float4* w = reinterpret_cast<const float4*>(weight);
    float4* o = reinterpret_cast<float4*>(out + int64_t(blockIdx.x) * width);
    float sum = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < width / 4; i += 256) {
        const float4 a = in[i];
        sum = __fmaf_rn(a.x, a.x, __fmaf_rn(a.y, a.y, __fmaf_rn(a.z, a.z, __fmaf_rn(a.w, a.w, sum))));
    }
    const float scale = 1.0f / sqrtf(block_sum(sum) / float(width) + eps);
#pragma unroll 4
    for (int i = threadIdx.x; i < width / 4; i += 256) {
        const float4 a = in[i], b = w[i];
        o[i] = make_float4(a.x * scale * b.x, a.y * scale * b.y, a.z * scale * b.z, a.w * scale * b.w);
    }
}

// As rms_norm, for widths that are multiples of 8 and at most 8192, with the splitting for products (where `acts` has an address; whole
// superblocks then). A block per row, eight columns a thread.
extern "C" __global__ void __launch_bounds__(1024) rms_norm_8(const float* x, const float* weight, float eps, int width, float* out, Acts acts) {
    __shared__ float part[32];
    let_next_in();
    const int column = threadIdx.x * 8, warps = blockDim.x >> 5;
    float v[8], w[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = w[i] = 0.0f;
    if (column < width) load8f(weight + column, w);
    after_previous();
    if (column < width) load8f(x + int64_t(blockIdx.x) * width + column, v);
    norm_row(v, w, width, warps, eps, part, out + int64_t(blockIdx.x) * width, acts, int64_t(blockIdx.x) * warps);
}

// Divides each of the row's heads by its RMS; a block per head.
extern "C" __global__ void head_rms(float* x, int head_dim, float eps) {
    after_previous();
    float* h = x + int64_t(blockIdx.x) * head_dim;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < head_dim; i += blockDim.x) sum = __fmaf_rn(h[i], h[i], sum);
    const float scale = 1.0f / sqrtf(block_sum(sum) / float(head_dim) + eps);
    for (int i = threadIdx.x; i < head_dim; i += blockDim.x) h[i] *= scale;
}

extern "C" __global__ void add(float* x, const float* y, int64_t n) {
    after_previous();
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) x[i] = __fadd_rn(x[i], y[i]);
}

// out = silu(min(gate, clamp)) * clamp(up, +-clamp); no clamping with an infinite clamp.
extern "C" __global__ void swiglu(const float* gate, const float* up, float clamp, float* out, int64_t n) {
    after_previous();
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float g = fminf(gate[i], clamp), u = fmaxf(-clamp, fminf(up[i], clamp));
    out[i] = g / (1.0f + expf(-g)) * u;
}

// As swiglu, times one weight per row of `width`.
extern "C" __global__ void swiglu_weighted(const float* gate, const float* up, float clamp, const float* weights, int width, float* out, int64_t n) {
    after_previous();
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float g = fminf(gate[i], clamp), u = fmaxf(-clamp, fminf(up[i], clamp));
    out[i] = g / (1.0f + expf(-g)) * u * weights[i / width];
}

// Blocks (wanted row, part of the width).
extern "C" __global__ void gather_wanted(Step s, const float* x, int width, float* out) {
    after_previous();
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i < width) out[int64_t(blockIdx.x) * width + i] = x[int64_t(s.wanted[blockIdx.x]) * width + i];
}

// Rotates pairs (2i, 2i+1) (split = 0) or (i, i + dim/2) of every head's first `dim` elements; a block per row. Angles in f64:
// positions reach a million, where an f32 angle is off by hundredths.
extern "C" __global__ void rope(Step s, int split, int dim, double base, int head_dim, int heads, float* x) {
    after_previous();
    extern __shared__ float2 turns[];
    const double pos = s.positions[blockIdx.x];
    const int half = dim / 2;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        double sn, cs;
        sincos(pos * pow(base, -2.0 * i / dim), &sn, &cs);
        turns[i] = make_float2(float(sn), float(cs));
    }
    __syncthreads();
    float* row = x + int64_t(blockIdx.x) * heads * head_dim;
    for (int k = threadIdx.x; k < heads * half; k += blockDim.x) {
        float* h = row + k / half * head_dim;
        const int i = k % half;
        float& a = h[split ? i : 2 * i];
        float& b = h[split ? i + half : 2 * i + 1];
        const float2 t = turns[i];
        const float p = a, q = b;
        a = p * t.y - q * t.x;
        b = p * t.x + q * t.y;
    }
}

// Sines and cosines of every row's position times every frequency, in f64: once a step.
extern "C" __global__ void rope_turns(Step s, const double* frequencies, int pairs, int total, float2* turns) {
    after_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) return;
    double sn, cs;
    sincos(double(s.positions[i / pairs]) * frequencies[i % pairs], &sn, &cs);
    turns[i] = make_float2(float(sn), float(cs));
}

// Rotates the interleaved pairs of every head's last 2 * pairs elements by the row's turn (or back); a thread per pair.
extern "C" __global__ void rope_tail(const float2* turns, int pairs, int head_dim, int heads, int inverse, float* x, int64_t total) {
    after_previous();
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= total) return;
    const int pair = i % pairs;
    const int64_t head = i / pairs;
    float2 t = turns[head / heads * pairs + pair];
    if (inverse) t.x = -t.x;
    float* h = x + head * head_dim + head_dim - 2 * pairs + 2 * pair;
    const float p = h[0], q = h[1];
    h[0] = p * t.y - q * t.x;
    h[1] = p * t.x + q * t.y;
}
