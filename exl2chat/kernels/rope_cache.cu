// Queries, keys and values of new tokens: head norm, RoPE, and keys and values into the cache.
//
//     q, k: v -> v / sqrt(sum(v^2) + floor^2) * scale (where there is a head norm), then the first R dimensions as two
//     halves (a, b) -> (a * cos0 + b * sin0, b * cos1 + a * sin1); v as it is
//
// layout    qkv     [parts, T, H + 2 G, D] float16 or float32, parts to be added: queries, keys, values
//           scale   [H + G, D] float32, 0 without a head norm; floor [1]
//           cos,sin [positions, 2, R / 2] float32 (engine/rope.py)
//           position [1] int32: where the first of the tokens goes
//           q       [T, H, D] float16
//           cache   [2, G, S, D] float16, keys before values: the pages of a sequence follow one another
// launch    grid (H + 2 G, T), 32 threads, shared bytes 4 * D
// limits    D, R even, R <= D; position + T <= S, and <= positions
// numerics  float32, results rounded once to float16
// reference attend of exl2chat/ops/reference.py; tests/gpu/test_attention.py

#include "common.cuh"

template <typename T>
__device__ __forceinline__ void rope_cache(const T* qkv, int parts, const float* scale, const float* floor, const float* cos,
                                           const float* sin, const int* position, __half* q, __half* cache, int heads,
                                           int groups, int size, int rotary, long long room) {
    extern __shared__ float v[];
    const int head = blockIdx.x, row = blockIdx.y, lane = threadIdx.x;
    const long long place = *position + row;
    await_predecessor();
    release_successor();
    const size_t stride = (size_t)gridDim.y * (heads + 2 * groups) * size;
    qkv += ((size_t)row * (heads + 2 * groups) + head) * size;
    float sum = 0;
    for (int i = lane; i < size; i += 32) {
        float value = (float)qkv[i];
        for (int part = 1; part < parts; part++) value += (float)qkv[part * stride + i];
        v[i] = value;
        sum += value * value;
    }
    if (scale && head < heads + groups) {
#pragma unroll
        for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
        const float factor = rsqrtf(sum + *floor * *floor);
        for (int i = lane; i < size; i += 32) v[i] *= factor * scale[head * size + i];
    }
    __syncwarp();
    if (head < heads + groups) {
        cos += place * rotary;
        sin += place * rotary;
        const int half = rotary / 2;
        for (int i = lane; i < half; i += 32) {
            const float a = v[i], b = v[i + half];
            v[i] = a * cos[i] + b * sin[i];
            v[i + half] = b * cos[i + half] + a * sin[i + half];
        }
        __syncwarp();
    }
    // cache head 0 .. G - 1 are keys, G .. 2 G - 1 values: just as they follow the queries in qkv
    __half* to = head < heads ? q + ((size_t)row * heads + head) * size : cache + ((head - heads) * room + place) * size;
    for (int i = lane; i < size; i += 32) to[i] = __float2half_rn(v[i]);
}

extern "C" __global__ void __launch_bounds__(32)
rope_cache_half(const __half* qkv, int parts, const float* scale, const float* floor, const float* cos, const float* sin,
                const int* position, __half* q, __half* cache, int heads, int groups, int size, int rotary, long long room) {
    rope_cache(qkv, parts, scale, floor, cos, sin, position, q, cache, heads, groups, size, rotary, room);
}

extern "C" __global__ void __launch_bounds__(32)
rope_cache_float(const float* qkv, int parts, const float* scale, const float* floor, const float* cos, const float* sin,
                 const int* position, __half* q, __half* cache, int heads, int groups, int size, int rotary, long long room) {
    rope_cache(qkv, parts, scale, floor, cos, sin, position, q, cache, heads, groups, size, rotary, room);
}
