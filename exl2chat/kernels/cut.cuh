// Where top-k and top-p end: first the bin, then the token in it.

#pragma once
#include "sample.cuh"

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
    u64 counted = 0, weighed = 0, count = 0, weight = 0;
#pragma unroll
    for (int i = 0; i < Bins::COUNT; i++) counted += own.counts[i], weighed += own.weights[i];
    if (row.top_k) counted = sum_to(counted, count) - counted;
    if (row.top_p < 1) weighed = sum_to(weighed, weight) - weighed;
    if (threadIdx.x == 0) cut = {BINS, -1, false, 0, 0, weight};
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

// Tokens between two bins: where they are, and the bits of a key less `base` that may be other than 0.
struct List {
    const u64* keys;
    int length, bits;
    u64 base;
    float best;

    __device__ List(const u64* keys, int length, const Cut& cut, float best) : keys(keys), length(length), best(best) {
        // Further by a bin than the bins are, so that nothing that was rounded lies beyond.
        const float high = __fsub_ru(best, max(cut.first - 1, 0) / BINS_PER_NAT);
        base = key_of(__fsub_rd(best, (cut.last + 2) / BINS_PER_NAT), LAST_ID);
        bits = 64 - __clzll(key_of(high, 0) - base);
    }
};

// The likeliest tokens of a list that together reach `wanted`, in number or in weight, out of those with keys from `least`
// on: the key of the last of them, found 8 bits at a time.
__device__ __noinline__ u64 find_key(const List& list, u64 least, bool by_weight, u64 wanted) {
    constexpr int BITS = 8, DIGITS = 1 << BITS, OWN = DIGITS / 32;
    __shared__ u32 counts[DIGITS], low[DIGITS], high[DIGITS];
    __shared__ u64 rest;
    __shared__ int digit, alone;
    u64 found = 0;
    int open = list.bits;  // bits that are not found yet
    while (open) {
        const int shift = max(open - BITS, 0);
        if (threadIdx.x < DIGITS) counts[threadIdx.x] = low[threadIdx.x] = high[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < list.length; i += THREADS) {
            const u64 key = list.keys[i] - list.base;
            if (list.keys[i] < least || key >> open != found >> open) continue;
            const int at = (int)(key >> shift) & ((1 << (open - shift)) - 1);
            atomicAdd(counts + at, 1);
            if (by_weight) add(low + at, high + at, weight_of(list.best - score_of(list.keys[i])));
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            u64 amounts[OWN], sum = 0;  // the first lane looks at the likeliest
            const int first = DIGITS - 1 - threadIdx.x * OWN;
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                amounts[i] = by_weight ? (u64)high[first - i] << 32 | low[first - i] : counts[first - i];
                sum += amounts[i];
            }
            u64 before = warp_sum_to(sum) - sum;
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                if (before < wanted && before + amounts[i] >= wanted)
                    digit = first - i, alone = counts[first - i] == 1, rest = wanted - before;
                before += amounts[i];
            }
        }
        __syncthreads();
        found |= (u64)digit << shift, wanted = rest, open = alone ? 0 : shift;
    }
    return max(found + list.base, least);
}

// The smallest key of `list` that is kept.
__device__ __forceinline__ u64 least_key(const Row& row, const Cut& cut, const List& list) {
    u64 least = 0, total = cut.total;
    if (cut.limited) least = find_key(list, 0, false, row.top_k - cut.counted);
    if (row.top_p >= 1) return least;
    if (cut.limited) {
        u64 weight = 0;
#pragma unroll 1
        for (int i = threadIdx.x; i < list.length; i += THREADS)
            if (list.keys[i] >= least) weight += weight_of(list.best - score_of(list.keys[i]));
        sum_to(weight, total);
        total += cut.weighed;
    }
    return find_key(list, least, true, share(row.top_p, total) - cut.weighed);
}
