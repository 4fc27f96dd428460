// What the warps and blocks of attention.cu found, together.

#pragma once
#include "attention_scores.cuh"

// Every warp's sums of `count` queries into shared memory, [WARPS][QUERIES][SUMS], and their (maximum, sum) into
// `stats`.
__device__ __forceinline__ void gather_warps(Running (&running)[QTILES], Cache::Sums (&found)[QTILES], int count,
                                             float* sums, float2* stats) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    __syncthreads();  // everybody's tokens are read: their memory becomes `sums`
#pragma unroll
    for (int q = 0; q < QTILES; q++) {
        Cache::complete(found[q]);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int query = q * 8 + (lane & 3) * 2 + e;
            Running& r = running[q];
#pragma unroll
            for (int step = 4; step < 32; step *= 2) r.sum[e] += __shfl_xor_sync(~0u, r.sum[e], step);
            if (query >= count) continue;
            if (lane < 4) stats[warp * QUERIES + query] = make_float2(r.most[e], r.sum[e]);
#pragma unroll
            for (int m = 0; m < MTILES; m++)
#pragma unroll
                for (int i = e; i < 4; i += 2)
                    if (Cache::dimension(m, i) < HEAD_DIM)
                        sums[(warp * QUERIES + query) * SUMS + Cache::dimension(m, i)] = found[q].v[m][i];
        }
    }
    __syncthreads();
}

// Four values of one query: their weighed sum, and (maximum, sum of weights).
struct Total {
    float4 acc;
    float2 stats;
};

__device__ __forceinline__ void add(Total& total, float most, float4 v, float2 stats) {
    const float weight = exp2_fast(stats.x - most);
    total.acc = make_float4(__fmaf_rn(weight, v.x, total.acc.x), __fmaf_rn(weight, v.y, total.acc.y),
                            __fmaf_rn(weight, v.z, total.acc.z), __fmaf_rn(weight, v.w, total.acc.w));
    total.stats.y = __fmaf_rn(weight, stats.y, total.stats.y);
}

__device__ __forceinline__ Total add_warps(const float* sums, const float2* stats, int query, int column) {
    float most = NOTHING;
#pragma unroll
    for (int i = 0; i < WARPS; i++) most = fmaxf(most, stats[i * QUERIES + query].x);
    Total total = {make_float4(0, 0, 0, 0), make_float2(most, 0)};
#pragma unroll
    for (int i = 0; i < WARPS; i++)
        add(total, most, *(const float4*)(sums + (i * QUERIES + query) * SUMS + column), stats[i * QUERIES + query]);
    return total;
}

// The parts of the active blocks, in the order of blocks; 16 are on their way at once.
__device__ __forceinline__ Total add_blocks(const Problem& p, const Part& part, const float* sums, const float2* stats,
                                            int query, int column) {
    constexpr int batch = 16;
    const int count = part.first ? gridDim.x : part.active;
    float4 v[batch];
    float2 s[batch];
    auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < batch; i++) {
            const int from = (first + i) * QUERIES + query;
            const bool there = first + i < count && is_active(p, part, first + i);
            v[i] = there ? __ldcg((const float4*)(sums + from * HEAD_DIM + column)) : make_float4(0, 0, 0, 0);
            s[i] = there ? __ldcg(stats + from) : make_float2(NOTHING, 0);
        }
    };
    load(0);
    float most = NOTHING;
#pragma unroll
    for (int i = 0; i < batch; i++) most = fmaxf(most, s[i].x);
    for (int i = batch; i < count; i++)
        if (is_active(p, part, i)) most = fmaxf(most, __ldcg(stats + i * QUERIES + query).x);
    Total total = {make_float4(0, 0, 0, 0), make_float2(most, 0)};
    for (int first = 0; first < count; first += batch) {
        if (first) load(first);
#pragma unroll
        for (int i = 0; i < batch; i++) add(total, most, v[i], s[i]);
    }
    return total;
}

// Turn back what the rotated values gave: 4 of a block of 32 (or 16) are here, the others in the next lanes.
__device__ __forceinline__ float4 turn_back(float4 v) {
    constexpr int block = Tile<8, HEAD_DIM>::BLOCK;
    const u32 lanes = ((1u << block / 4) - 1) << (threadIdx.x & 31 & ~(block / 4 - 1));
    v = make_float4(v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w);
    v = make_float4(v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w);
#pragma unroll
    for (int step = 1; step < block / 4; step *= 2) {
        const float sign = threadIdx.x & step ? -1.f : 1.f;
        v.x = __shfl_xor_sync(lanes, v.x, step) + sign * v.x;
        v.y = __shfl_xor_sync(lanes, v.y, step) + sign * v.y;
        v.z = __shfl_xor_sync(lanes, v.z, step) + sign * v.z;
        v.w = __shfl_xor_sync(lanes, v.w, step) + sign * v.w;
    }
    return v;
}

__device__ __forceinline__ void write(const Total& total, const Problem& p, int share, int query, int column) {
    query += first_query(p);
    const int row = quotient(query, share);
    const float factor = (CACHE_BITS == 16 ? 1 : HEAD_DIM % 32 ? 0.25f : 0.17677669529663687f) / total.stats.y;
    const float4 a = CACHE_BITS == 16 ? total.acc : turn_back(total.acc);
    const int4 to = places4(p.places, (group_of(p) * share + query - row * share) * HEAD_DIM + column);
    put4(p.out, p.places, to, first_row(p) + row, gridDim.z * p.rows, p.heads * HEAD_DIM,
         make_float4(a.x * factor, a.y * factor, a.z * factor, a.w * factor));
}

// True in the block that arrives last, which then sees what all have written (around L1).
__device__ __forceinline__ bool is_last(int* arrived, int active) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(arrived, 1) == active - 1;
        if (last) *arrived = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

// The parts of all warps, and where there are several blocks of all blocks, to `out`.
__device__ __forceinline__ void finish(const Problem& p, const Part& part, int share, int count, const float* sums,
                                       const float2* stats) {
    const int row = blockIdx.z * gridDim.y + blockIdx.y;
    float* all = p.partial + (size_t)row * gridDim.x * QUERIES * HEAD_DIM;
    float2* all_stats = p.stats + (size_t)row * gridDim.x * QUERIES;
    count *= HEAD_DIM / 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const int query = i / (HEAD_DIM / 4), column = i % (HEAD_DIM / 4) * 4;
        const Total total = add_warps(sums, stats, query, column);
        if (part.active == 1) {
            write(total, p, share, query, column);
            continue;
        }
        *(float4*)(all + (blockIdx.x * QUERIES + query) * HEAD_DIM + column) = total.acc;
        if (column == 0) all_stats[blockIdx.x * QUERIES + query] = total.stats;
    }
    if (part.active == 1 || !is_last(p.arrived + row, part.active)) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const int query = i / (HEAD_DIM / 4), column = i % (HEAD_DIM / 4) * 4;
        write(add_blocks(p, part, all, all_stats, query, column), p, share, query, column);
    }
}
