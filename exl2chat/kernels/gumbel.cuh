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

__device__ __forceinline__ Pick likelier(const Pick& a, const Pick& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id) ? a : b;
}

__device__ __forceinline__ Pick __shfl_xor_sync(u32 mask, const Pick& pick, int step) {
    return {::__shfl_xor_sync(mask, pick.value, step), ::__shfl_xor_sync(mask, pick.id, step), 0};
}

// A draw from tokens that several threads look at in turn: first `rough` of each, then `exact` of those that may win.
struct Draw {
    u64 seed;
    float best, bound;
    Pick pick;

    __device__ Draw(u64 seed, float best) : seed(seed), best(best), bound(LOWEST), pick{LOWEST, 0, 0} {}
    __device__ u64 bits(int id) const { return splitmix(seed, id) >> 12; }
    __device__ float value(float score, int id) const { return rough_noise(bits(id)) - (best - score); }
    __device__ void rough(float score, int id) { bound = max(bound, value(score, id)); }
    __device__ void share() {
        bound = reduce(bound, [](float a, float b) { return max(a, b); }) - ROUGH;
    }
    __device__ void exact(float score, int id) {
        if (value(score, id) >= bound) pick = likelier({__dadd_rn(score, noise_of(bits(id))), id, 0}, pick);
    }
};
