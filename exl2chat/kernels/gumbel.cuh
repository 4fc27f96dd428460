// The draw: the largest score plus noise, a hash of (seed, position, token) as in engine/sampler.py.

#pragma once
#include "sample.cuh"

__device__ __forceinline__ u64 splitmix(u64 seed, u64 index) {
    u64 z = seed + (index + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

// Gumbel noise -log(-log((h + 1/2) / 2^52)) of 52 bits h.
__device__ __noinline__ double noise_of(u64 bits) {
    double noise = __dmul_rn(__dadd_rn((double)bits, 0.5), 0x1p-52);
#pragma unroll 1
    for (int i = 0; i < 2; i++) noise = -log(noise);
    return noise;
}

// The same to within 1e-5, in float32: float64 is 32 to 64 times slower on most GPUs.
__device__ __forceinline__ float rough_noise(u64 bits) {
    const u64 end = 1ull << 52;
    const float to_start = ((float)bits + 0.5f) * 0x1p-52f, to_end = ((float)(end - 1 - bits) + 0.5f) * 0x1p-52f;
    const float series = to_end * (1 + to_end * (0.5f + to_end * (1.f / 3 + to_end * 0.25f)));
    return -__logf(to_end < 0.05f ? series : -__logf(to_start));
}

__device__ __forceinline__ u64 order_of(double x) {
    const u64 bits = __double_as_longlong(x), sign = 1ull << 63;
    return bits & sign ? ~bits : bits | sign;
}

__device__ __forceinline__ double number_of(u64 order) {
    const u64 sign = 1ull << 63;
    return __longlong_as_double(order & sign ? order ^ sign : ~order);
}

// A draw by one block: every thread offers its tokens, at a rough value; what may win is then taken at its exact one.
struct Draw {
    u64 seed;
    float best, bound;
    Pick pick;

    __device__ Draw(u64 seed, float best) : seed(seed), best(best), bound(LOWEST), pick{0, 0, 0} {}
    __device__ u64 bits(int id) const { return splitmix(seed, id) >> 12; }
    __device__ float rough(float score, int id) const { return rough_noise(bits(id)) - (best - score); }
    __device__ float rough(const Pick& other) const { return (float)(number_of(other.value) - best); }

    __device__ void offer(float value) { bound = max(bound, value); }
    __device__ void close() { bound = number_of(largest(order_of(bound))) - ROUGH; }
    __device__ void take(const Pick& other) {
        if (other.value > pick.value || (other.value == pick.value && other.id < pick.id)) pick = other;
    }
    __device__ void take(float score, int id) {
        if (rough(score, id) >= bound) take({order_of(__dadd_rn(score, noise_of(bits(id)))), id, 0});
    }

    // The pick of the block; of value 0 where nothing was taken.
    __device__ Pick settle() const {
        __shared__ Pick won;
        if (threadIdx.x == 0) won = {0, LAST_ID, 0};
        __syncthreads();
        if (pick.value) atomicMax(&won.value, pick.value);
        __syncthreads();
        if (pick.value && pick.value == won.value) atomicMin(&won.id, pick.id);
        __syncthreads();
        return won;
    }
};
