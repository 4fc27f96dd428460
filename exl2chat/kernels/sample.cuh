// What the kernels of sample.cu share: the memory they are given, the order of tokens, sums over a block.

#pragma once
#include "common.cuh"

typedef unsigned long long u64;

// A sequence, and how its next token is drawn. Settings do not change within a step: they are read before the wait.
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

constexpr int THREADS = 512, WARPS = THREADS / 32, EACH = 2, BINS = 1024;
constexpr int ID_BITS = 20, LAST_ID = (1 << ID_BITS) - 1;
constexpr float BINS_PER_NAT = 24, UNIT = 4398046511104.f;
constexpr int NEAR = 2048;  // listed tokens that shared memory holds; more are read from where they are
constexpr float LOWEST = -3.4e38f;
constexpr float ROUGH = 1e-3f;  // what the rough noise may be wrong by, many times over

// What top-k and top-p leave of the bins: those before `first` are kept, those after `last` are not, and of those
// between the tokens must be looked at. `counted` and `weighed` are the tokens and the weight before `first`.
struct Cut {
    int first, last, limited;  // limited: whether top-k leaves any token out
    u32 counted;
    u64 weighed, total;        // total: the weight that top-p takes its share of, unless that is cut by top-k
};

// What the blocks of a row share. Zero between steps, but for the cut.
struct Shared {
    u64 best;
    u32 listed, unused;
    Cut cut;
    u32 counts[BINS];
    u64 weights[BINS];
};

// A token, and its score with the noise, as integers of the same order: the largest value, then the smallest id wins.
struct Pick {
    u64 value;
    int id, unused;
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

// The bits of a number as an integer of the same order; NaN is the largest.
__device__ __forceinline__ u32 order_of(float x) {
    const u32 bits = __float_as_uint(x);
    return isnan(x) ? ~0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float number_of(u32 order) {
    return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

// Keys fall as tokens get less likely, and among equals as ids rise.
__device__ __forceinline__ u64 key_of(float score, int id) { return (u64)order_of(score) << ID_BITS | (LAST_ID - id); }
__device__ __forceinline__ int id_of(u64 key) { return LAST_ID - (int)(key & LAST_ID); }
__device__ __forceinline__ float score_of(u64 key) { return number_of((u32)(key >> ID_BITS)); }

__device__ __forceinline__ int bin_of(float below) {
    const float bin = below * BINS_PER_NAT;
    return bin < BINS ? (int)bin : BINS;
}

__device__ __forceinline__ u64 weight_of(float below) { return __float2ull_rn(expf(-below) * UNIT); }

__device__ __forceinline__ u32 warp_largest(u32 value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, value);
#else
    for (int step = 16; step; step >>= 1) value = max(value, __shfl_xor_sync(~0u, value, step));
    return value;
#endif
}

// Adds to a sum of 64 bits in shared memory, which adds 32 at a time.
__device__ __forceinline__ void add(u32* low, u32* high, u64 value) {
    const u32 before = atomicAdd(low, (u32)value), more = (u32)(value >> 32) + (before + (u32)value < before);
    if (more) atomicAdd(high, more);
}

// The largest value of all threads, in every thread.
__device__ __forceinline__ u32 largest(u32 value) {
    __shared__ u32 warps[WARPS];
    value = warp_largest(value);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = value;
    __syncthreads();
    return warp_largest(warps[threadIdx.x % WARPS]);
}

// The sum of the values of the lanes up to this one.
__device__ __forceinline__ u64 warp_sum_to(u64 value) {
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        const u64 before = __shfl_up_sync(~0u, value, step);
        if ((threadIdx.x & 31) >= step) value += before;
    }
    return value;
}

// The sum of the values of the threads up to this one; `total` is that of all.
__device__ __forceinline__ u64 sum_to(u64 value, u64& total) {
    __shared__ u64 warps[WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    value = warp_sum_to(value);
    __syncthreads();
    if (lane == 31) warps[warp] = value;
    __syncthreads();
    const u64 sums = warp_sum_to(lane < WARPS ? warps[lane] : 0), before = __shfl_sync(~0u, sums, max(warp - 1, 0));
    total = __shfl_sync(~0u, sums, 31);
    return warp ? value + before : value;
}
