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

__device__ __forceinline__ Cut find_cut(const Row& row, const Shared& shared) {
    __shared__ Cut cut;
    constexpr int OWN = BINS / THREADS;
    u64 counts[OWN], weights[OWN], count = 0, weight = 0;
    if (threadIdx.x == 0) cut = {BINS, -1, false, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        count += counts[i] = shared.counts[threadIdx.x * OWN + i];
        weight += weights[i] = shared.weights[threadIdx.x * OWN + i];
    }
    const u64 counted = row.top_k ? sum_to(count) - count : 0, weighed = row.top_p < 1 ? sum_to(weight) - weight : 0;
    __syncthreads();
    if (threadIdx.x == THREADS - 1) cut.total = weighed + weight;
    __syncthreads();
    u64 before = counted, weight_before = weighed;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (row.top_k && before < row.top_k && before + counts[i] >= row.top_k) {
            const int bin = threadIdx.x * OWN + i;
            cut = {bin, bin, true, (u32)before, weight_before, weight_before};
        }
        before += counts[i], weight_before += weights[i];
    }
    __syncthreads();
    if (row.top_p >= 1) return cut;
    const u64 wanted = share(row.top_p, cut.total);
    before = counted, weight_before = weighed;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (weight_before < wanted && weight_before + weights[i] >= wanted) {
            cut.first = threadIdx.x * OWN + i, cut.counted = (u32)before, cut.weighed = weight_before;
            if (!cut.limited) cut.last = cut.first;
        }
        before += counts[i], weight_before += weights[i];
    }
    __syncthreads();
    return cut;
}

// The key of the last of the likeliest tokens of `list` that together reach `wanted`, in number or in weight, among those
// with keys from `least` on. Digit by digit of the key, from the first in which the list differs.
__device__ __forceinline__ u64 find_key(const u64* list, int length, u64 least, bool by_weight, u64 wanted, float best) {
    __shared__ u32 counts[1 << DIGIT];
    __shared__ u64 weights[1 << DIGIT], rest;
    __shared__ int digit, alone;
    const u64 some = __ldcg(list);
    u64 differing = 0;
    for (int i = threadIdx.x; i < length; i += THREADS) differing |= __ldcg(list + i) ^ some;
    differing = reduce(differing, [](u64 a, u64 b) { return a | b; });
    int high = 64 - __clzll(differing);
    u64 found = some >> high << high;
    while (high > 0) {
        const int shift = max(high - DIGIT, 0), own = (1 << DIGIT) - 1 - threadIdx.x;
        counts[threadIdx.x] = weights[threadIdx.x] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < length; i += THREADS) {
            const u64 key = __ldcg(list + i);
            if (key < least || key >> high != found >> high) continue;
            const int at = (int)(key >> shift) & ((1 << (high - shift)) - 1);
            atomicAdd(counts + at, 1);
            if (by_weight) atomicAdd(weights + at, weight_of(best - score_of(key)));
        }
        __syncthreads();
        const u64 amount = by_weight ? weights[own] : counts[own], reached = sum_to(amount);
        if (reached >= wanted && reached - amount < wanted)
            digit = own, alone = counts[own] == 1, rest = wanted - (reached - amount);
        __syncthreads();
        found |= (u64)digit << shift, wanted = rest, high = alone ? 0 : shift;
        __syncthreads();
    }
    return found;
}

// The smallest key of `list` that is kept, given what its bins are.
__device__ __forceinline__ u64 least_key(const Row& row, const Cut& cut, const u64* list, int length, float best) {
    u64 least = 0;
    if (cut.limited) least = find_key(list, length, 0, false, row.top_k - cut.counted, best);
    if (row.top_p >= 1) return least;
    u64 total = cut.total;
    if (cut.limited) {
        u64 more = 0;
        for (int i = threadIdx.x; i < length; i += THREADS) {
            const u64 key = __ldcg(list + i);
            if (key >= least) more += weight_of(best - score_of(key));
        }
        total = cut.weighed + reduce(more, [](u64 a, u64 b) { return a + b; });
    }
    return find_key(list, length, least, true, share(row.top_p, total) - cut.weighed, best);
}
