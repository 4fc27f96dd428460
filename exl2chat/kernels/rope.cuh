// One head of one token, from what the matrix gave to what attention takes.

#pragma once
#include "common.cuh"

// The tables of all positions: cos and sin [positions, 2, R / 2] (engine/rope.py); the norm of queries and keys [H + G, D]
// and its floor, 0 where there is none.
struct Turning {
    const float *scale, *floor, *cos, *sin;
    int rotary;
};

// One warp writes to[i] = head norm and RoPE of the sum over parts of from[part * stride + i], i < SIZE, rounded once. `head`
// counts queries, keys, then values from `values` on, which stay as they are. `v`: SIZE floats of shared memory for this
// warp. All loads of up to four parts are on their way at once: with one after the other it takes 5 us.
template <int SIZE, typename T>
__device__ __forceinline__ void turn_head(const T* from, int parts, size_t stride, const Turning& t, int head, int values,
                                          int place, float* v, __half* to) {
    constexpr int EACH = (SIZE + 31) / 32;
    const int lane = threadIdx.x & 31, half = t.rotary / 2;
    const bool turns = head < values, normed = turns && t.scale;
    const float floor = normed ? *t.floor : 0;
    float x[EACH] = {}, scale[EACH], cos[EACH], sin[EACH];
    for (int first = 0; first < parts; first += 4) {
        float value[4][EACH];
#pragma unroll
        for (int part = 0; part < 4; part++)
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                const int i = lane + 32 * j;
                value[part][j] = first + part < parts && i < SIZE ? (float)from[(first + part) * stride + i] : 0.f;
            }
        if (first == 0)
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                const int i = lane + 32 * j;
                const bool rotates = turns && i < t.rotary;
                scale[j] = normed && i < SIZE ? t.scale[head * SIZE + i] : 1.f;
                cos[j] = rotates ? t.cos[(size_t)place * t.rotary + i] : 1.f;
                sin[j] = rotates ? t.sin[(size_t)place * t.rotary + i] : 0.f;
            }
#pragma unroll
        for (int part = 0; part < 4; part++)
#pragma unroll
            for (int j = 0; j < EACH; j++) x[j] += value[part][j];
    }
    float factor = 1;
    if (normed) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < EACH; j++) sum += x[j] * x[j];
#pragma unroll
        for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
        factor = rsqrtf(sum + floor * floor);
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        x[j] *= factor * scale[j];
        if (lane + 32 * j < SIZE) v[lane + 32 * j] = x[j];
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int i = lane + 32 * j, other = i < half ? i + half : i - half;
        const float partner = turns && i < t.rotary ? v[other] : 0.f;
        if (i < SIZE) to[i] = __float2half_rn(x[j] * cos[j] + partner * sin[j]);
    }
    __syncwarp();
}
