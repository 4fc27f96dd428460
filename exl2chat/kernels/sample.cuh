// What the kernels of sample.cu share: the memory they are given, the order of tokens, sums over a block.

#pragma once
#include "common.cuh"

typedef unsigned long long u64;

// A sequence. The token drawn is at position + 1 of it. Fields below `greedy` are read only where a token is drawn.
struct Row {
    u64 seed;
    double repetition, presence, frequency, top_p;
    int* position;         // tokens in the cache when the step began; then one more
    long long* token;      // the step's token; then the next
    int* results;          // pinned memory of the host: the token at position p goes to results[p & mask]
    int4* seen;            // [count] full, fading, latest: the counts of penalties.py; null where there are no penalties
    long long* positions;  // [count] the sum of the positions that fade
    int* history;          // the tokens so far, by position
    float temperature, least;  // least: log of min-p, or -inf
    int top_k, greedy, reach, decay, mask, unused;  // top_k 0 and top_p 1 are off
};

constexpr int THREADS = 512, WARPS = THREADS / 32, EACH = 2, BINS = 1024, ID_BITS = 20;
constexpr float BINS_PER_NAT = 24, UNIT = 4398046511104.f;
constexpr int NEAR = 2048;  // listed tokens that shared memory holds; more are read from where they are
constexpr float LOWEST = -3.4e38f;
constexpr float ROUGH = 1e-3f;  // what the rough noise may be wrong by, many times over

// What the blocks of a row share; zero between steps.
struct Shared {
    u64 best;
    u32 listed, arrived;
    u32 counts[BINS];
    u64 weights[BINS];
};

struct Pick {
    double value;
    int id;
    int unused;
};

struct Problem {
    const Row* rows;
    const float* logits;
    float* scores;   // [rows, count]
    u64* list;       // [rows, count]
    Pick* picks;     // [rows, blocks]
    Shared* shared;  // [rows]
    int count, stride;
};

// Keys fall as tokens get less likely, and among equals as ids rise.
__device__ __forceinline__ u64 key_of(float score, int id) {
    const u32 bits = __float_as_uint(score);
    const u32 order = isnan(score) ? ~0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)order << ID_BITS | ((1u << ID_BITS) - 1 - id);
}

__device__ __forceinline__ int id_of(u64 key) { return (1 << ID_BITS) - 1 - (int)(key & ((1u << ID_BITS) - 1)); }

__device__ __forceinline__ float score_of(u64 key) {
    const u32 order = (u32)(key >> ID_BITS);
    return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

__device__ __forceinline__ int bin_of(float below) {
    const float bin = below * BINS_PER_NAT;
    return bin < BINS ? (int)bin : BINS;
}

__device__ __forceinline__ u64 weight_of(float below) { return __float2ull_rn(expf(-below) * UNIT); }

// Adds to a sum of 64 bits in shared memory, which adds 32 at a time.
__device__ __forceinline__ void add(u32* low, u32* high, u64 value) {
    const u32 before = atomicAdd(low, (u32)value), more = (u32)(value >> 32) + (before + (u32)value < before);
    if (more) atomicAdd(high, more);
}

// What `join` makes of the values of all threads, in every thread.
template <typename T, typename Join>
__device__ __forceinline__ T reduce(T value, Join join) {
    __shared__ T warps[WARPS];
#pragma unroll
    for (int step = 16; step; step >>= 1) value = join(value, __shfl_xor_sync(~0u, value, step));
    __syncthreads();
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = value;
    __syncthreads();
    value = warps[threadIdx.x % WARPS];
#pragma unroll
    for (int step = WARPS / 2; step; step >>= 1) value = join(value, __shfl_xor_sync(~0u, value, step));
    return value;
}

// The sum of the values of the threads up to this one.
__device__ __forceinline__ u64 sum_to(u64 value) {
    __shared__ u64 warps[WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const u64 before = __shfl_up_sync(~0u, value, step);
        if (lane >= step) value += before;
    }
    __syncthreads();
    if (lane == 31) warps[warp] = value;
    __syncthreads();
    for (int other = 0; other < warp; other++) value += warps[other];
    return value;
}
