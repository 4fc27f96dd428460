// Where top-k and top-p end: first the bin, then the token in it.

#pragma once
#include "sample.cuh"

// What top-k and top-p leave of the bins: those before `first` are kept, those after `last` are not, and of those
// between the tokens must be looked at. `counted` and `weighed` are the tokens and the weight before `first`.
struct Cut {
    int first, last, limited;  // limited: whether top-k leaves any token out
    u32 counted;
    u64 weighed, total;        // total: the weight that top-p takes its share of, unless that is cut by top-k
};

// The weight that the kept tokens must reach.
__device__ __forceinline__ u64 share(double p, u64 total) {
    return max(min((u64)ceil(p * (double)total), total), (u64)1);
}

// The bins that a thread looks at.
struct Bins {
    static constexpr int COUNT = BINS / THREADS;
    u32 counts[COUNT];
    u64 weights[COUNT];

    __device__ __forceinline__ explicit Bins(const Shared& shared) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            counts[i] = shared.counts[threadIdx.x * COUNT + i];
            weights[i] = shared.weights[threadIdx.x * COUNT + i];
        }
    }
};

__device__ __forceinline__ Cut find_cut(const Row& row, const Bins& own) {
    __shared__ Cut cut;
    u64 counted = 0, weighed = 0;
#pragma unroll
    for (int i = 0; i < Bins::COUNT; i++) counted += own.counts[i], weighed += own.weights[i];
    if (threadIdx.x == 0) cut = {BINS, -1, false, 0, 0, 0};
    const u64 count = row.top_k ? sum_to(counted) : 0, weight = row.top_p < 1 ? sum_to(weighed) : 0;
    counted = count - counted, weighed = weight - weighed;
    __syncthreads();
    if (threadIdx.x == THREADS - 1) cut.total = weight;
    __syncthreads();
    u64 before = counted, lighter = weighed;
#pragma unroll
    for (int i = 0; i < Bins::COUNT; i++) {
        const int bin = threadIdx.x * Bins::COUNT + i;
        if (before < row.top_k && before + own.counts[i] >= row.top_k) cut = {bin, bin, true, (u32)before, lighter, lighter};
        before += own.counts[i], lighter += own.weights[i];
    }
    __syncthreads();
    if (row.top_p >= 1) return cut;
    const u64 wanted = share(row.top_p, cut.total);
    __syncthreads();
    before = counted, lighter = weighed;
#pragma unroll
    for (int i = 0; i < Bins::COUNT; i++) {
        const int bin = threadIdx.x * Bins::COUNT + i;
        if (lighter < wanted && lighter + own.weights[i] >= wanted)
            cut = {bin, cut.limited ? cut.last : bin, cut.limited, (u32)before, lighter, cut.total};
        before += own.counts[i], lighter += own.weights[i];
    }
    __syncthreads();
    return cut;
}

// The key of the last of the likeliest tokens of `list` that together reach `wanted`, in number or in weight, among those
// with keys from `least` on. Digit by digit of the key, from the first in which the list differs.
__device__ __noinline__ u64 find_key(const u64* list, int length, u64 least, bool by_weight, u64 wanted, float best) {
    constexpr int BITS = 8, DIGITS = 1 << BITS;
    __shared__ u32 counts[DIGITS], low[DIGITS], high[DIGITS];
    __shared__ u64 rest;
    __shared__ int digit, alone;
    const int own = DIGITS - 1 - threadIdx.x;  // the first thread looks at the likeliest
    u64 differing = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < length; i += THREADS) differing |= list[i] ^ list[0];
    differing = reduce(differing, [](u64 a, u64 b) { return a | b; });
    int open = 64 - __clzll(differing);  // the bits of the key that are not found yet
    u64 found = list[0] >> open << open;
    while (open) {
        const int shift = max(open - BITS, 0);
        if (own >= 0) counts[own] = low[own] = high[own] = 0;
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < length; i += THREADS) {
            const u64 key = list[i];
            if (key < least || key >> open != found >> open) continue;
            const int at = (int)(key >> shift) & ((1 << (open - shift)) - 1);
            atomicAdd(counts + at, 1);
            if (by_weight) add(low + at, high + at, weight_of(best - score_of(key)));
        }
        __syncthreads();
        const u32 count = own >= 0 ? counts[own] : 0;
        const u64 amount = own < 0 ? 0 : by_weight ? (u64)high[own] << 32 | low[own] : count, reached = sum_to(amount);
        if (reached >= wanted && reached - amount < wanted)
            digit = own, alone = count == 1, rest = wanted - (reached - amount);
        __syncthreads();
        found |= (u64)digit << shift, wanted = rest, open = alone ? 0 : shift;
        __syncthreads();
    }
    return max(found, least);
}

// The smallest key of `list` that is kept, given what its bins are.
__device__ __forceinline__ u64 least_key(const Row& row, const Cut& cut, const u64* list, int length, float best) {
    u64 least = 0;
    if (cut.limited) least = find_key(list, length, 0, false, row.top_k - cut.counted, best);
    if (row.top_p >= 1) return least;
    u64 total = cut.total;
    if (cut.limited) {
        u64 more = 0;
#pragma unroll 1
        for (int i = threadIdx.x; i < length; i += THREADS) {
            const u64 key = list[i];
            if (key >= least) more += weight_of(best - score_of(key));
        }
        total = cut.weighed + reduce(more, [](u64 a, u64 b) { return a + b; });
    }
    return find_key(list, length, least, true, share(row.top_p, total) - cut.weighed, best);
}
