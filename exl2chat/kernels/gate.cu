// What works on one number at a time: the gate of the feed-forward layer, and the logits.
//
//     gate_*     y = act(g) * u, x = (g, u); act is SiLU (GELU 0) or the tanh formula of GELU (GELU 1)
//     logits_*   y = x, with a soft cap > 0 y = cap * tanh(x / cap)
//
// layout    gate: x [parts, T, 2 * I] float16 or float32, g before u, parts to be added; y [T, I] float16, or fragments
//           by places [I] int32 (rows.cuh) where these are not 0
//           logits: x [parts, n] float16 or float32, parts to be added; y [n] float32
// launch    gate: grid (ceil(I / 4 / THREADS), T), logits: grid ceil(n / THREADS), THREADS = blockDim.x
// limits    gate: I a multiple of 4, rows aligned to 16 bytes
// numerics  float32, y rounded once
// measured  NVIDIA H200, 2026-11-21: gate 1.8 us for 1 row of 14336, in a chain of graph nodes
// reference gate and logits of exl2chat/ops/reference.py; tests/gpu/test_rows.py

#include "rows.cuh"

template <bool GELU>
__device__ __forceinline__ float opened(float g) {
    if (GELU) return 0.5f * g * (1 + tanhf(0.7978845608f * (g + 0.044715f * g * g * g)));
    return g / (1 + __expf(-g));
}

template <bool GELU, typename T>
__device__ __forceinline__ void gate(const T* x, int parts, const int* places, __half* y, int inner) {
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4, row = blockIdx.y, rows = gridDim.y;
    if (i >= inner) return;
    const int4 to = places4(places, i);
    await_predecessor();
    release_successor();
    const size_t stride = (size_t)rows * 2 * inner;
    x += (size_t)row * 2 * inner + i;
    const float4 g = sum4(x, parts, stride), u = sum4(x + inner, parts, stride);
    const float4 v = make_float4(opened<GELU>(g.x) * u.x, opened<GELU>(g.y) * u.y, opened<GELU>(g.z) * u.z,
                                 opened<GELU>(g.w) * u.w);
    put4(y, places, to, row, rows, inner, v);
}

template <typename T>
__device__ __forceinline__ void logits(const T* x, int parts, float* y, float cap, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    await_predecessor();
    release_successor();
    if (i >= count) return;
    float sum = x[i];
    for (int part = 1; part < parts; part++) sum += (float)x[(size_t)part * count + i];
    y[i] = cap > 0 ? cap * tanhf(sum / cap) : sum;
}

#define GATE(name, GELU, T)                                                                              \
    extern "C" __global__ void name(const T* x, int parts, const int* places, __half* y, int inner) { \
        gate<GELU>(x, parts, places, y, inner);                                                          \
    }
GATE(silu_half, false, __half)
GATE(silu_float, false, float)
GATE(gelu_tanh_half, true, __half)
GATE(gelu_tanh_float, true, float)

extern "C" __global__ void logits_half(const __half* x, int parts, float* y, float cap, int count) {
    logits(x, parts, y, cap, count);
}

extern "C" __global__ void logits_float(const float* x, int parts, float* y, float cap, int count) {
    logits(x, parts, y, cap, count);
}
