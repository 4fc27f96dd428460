// One head of one token, from what the matrix gave to what attention takes.

#pragma once
#include "common.cuh"

// The tables of all positions: cos and sin [positions, 2, R / 2] (engine/rope.py); the norm of queries and keys
// [H + G, D] and its floor, 0 where there is none.
struct Turning {
    const float *scale, *floor, *cos, *sin;
    int rotary;
};

// A head on its way: a lane has its values lane + 32 j, 0 from SIZE on, and what they are turned by.
template <int SIZE>
struct Head {
    static constexpr int EACH = (SIZE + 31) / 32;
    float x[EACH], scale[EACH], cos[EACH], sin[EACH], floor;
    bool turns;
};

// One warp loads from[part * stride + i], i < SIZE, of up to four parts, and adds them. There is no branch in it, so
// that the loads of several heads are on their way at once.
template <int SIZE, typename T>
__device__ __forceinline__ void load_values(Head<SIZE>& h, const T* from, int parts, size_t stride) {
    constexpr int EACH = Head<SIZE>::EACH;
    float value[4][EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++)
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int i = (threadIdx.x & 31) + 32 * j;
            value[part][j] = part < parts && i < SIZE ? (float)from[part * stride + i] : 0.f;
        }
#pragma unroll
    for (int j = 0; j < EACH; j++) h.x[j] = value[0][j] + value[1][j] + value[2][j] + value[3][j];
}

// What turns head `head` at position `place`, which counts queries, keys, then values from `values` on: these stay as
// they are.
template <int SIZE>
__device__ __forceinline__ void load_turning(Head<SIZE>& h, const Turning& t, int head, int values, int place) {
    h.turns = head < values;
    const bool normed = h.turns && t.scale;
    h.floor = normed ? *t.floor : 0.f;
#pragma unroll
    for (int j = 0; j < Head<SIZE>::EACH; j++) {
        const int i = (threadIdx.x & 31) + 32 * j;
        const bool rotates = h.turns && i < t.rotary;
        h.scale[j] = normed && i < SIZE ? t.scale[head * SIZE + i] : 1.f;
        h.cos[j] = rotates ? t.cos[(size_t)place * t.rotary + i] : 1.f;
        h.sin[j] = rotates ? t.sin[(size_t)place * t.rotary + i] : 0.f;
    }
}

// The parts from the fifth on.
template <int SIZE, typename T>
__device__ __forceinline__ void add_rest(Head<SIZE>& h, const T* from, int parts, size_t stride) {
    for (int part = 4; part < parts; part++)
#pragma unroll
        for (int j = 0; j < Head<SIZE>::EACH; j++) {
            const int i = (threadIdx.x & 31) + 32 * j;
            if (i < SIZE) h.x[j] += (float)from[part * stride + i];
        }
}

// Head norm and RoPE of the head, in place. `v`: SIZE floats of shared memory for this warp.
template <int SIZE>
__device__ __forceinline__ void turn_head(Head<SIZE>& h, const Turning& t, float* v) {
    constexpr int EACH = Head<SIZE>::EACH;
    const int lane = threadIdx.x & 31, half = t.rotary / 2;
    float factor = 1;
    if (h.turns && t.scale) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < EACH; j++) sum = __fmaf_rn(h.x[j], h.x[j], sum);
#pragma unroll
        for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
        factor = rsqrtf(__fmaf_rn(h.floor, h.floor, sum));
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        h.x[j] *= factor * h.scale[j];
        if (lane + 32 * j < SIZE) v[lane + 32 * j] = h.x[j];
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int i = lane + 32 * j, other = i < half ? i + half : i - half;
        const float partner = h.turns && i < t.rotary ? v[other] : 0.f;
        h.x[j] = __fmaf_rn(h.x[j], h.cos[j], __fmul_rn(partner, h.sin[j]));
    }
    __syncwarp();
}
