// What the warps and blocks of attention.cu found, together. All of it runs once, so that what it costs are its
// instructions on their way from memory: few, in loops.

#pragma once
#include "attention_scores.cuh"

// Every warp's sums of `count` queries into shared memory, [WARPS][QUERIES][SUMS], and their (maximum, sum) into
// `stats`.
__device__ __forceinline__ void gather_warps(Running (&running)[QTILES], int count, float* sums, float2* stats) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    __syncthreads();  // everybody's tokens are read: their memory becomes `sums`
#pragma unroll
    for (int q = 0; q < QTILES; q++)
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
                        sums[(warp * QUERIES + query) * SUMS + Cache::dimension(m, i)] = r.acc[m][i];
        }
    __syncthreads();
}

// Of every query's `parts`, whose (maximum, sum) are in `stats` [parts][QUERIES]: by what their sums are to be multiplied,
// in place of the maximum, and the (maximum, sum) of all.
__device__ __forceinline__ void find_factors(float2* stats, float2* totals, int parts, int count) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int query = threadIdx.x >> 5; query < count; query += WARPS) {
        float most = NOTHING, sum = 0;
#pragma unroll 1
        for (int i = lane; i < parts; i += 32) most = fmaxf(most, stats[i * QUERIES + query].x);
#pragma unroll
        for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
#pragma unroll 1
        for (int i = lane; i < parts; i += 32) {
            float2& one = stats[i * QUERIES + query];
            one.x = __expf(one.x - most);
            sum += one.x * one.y;
        }
#pragma unroll
        for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane == 0) totals[query] = make_float2(most, sum);
    }
    __syncthreads();
}

// Four values of a query, of which every part has some.
struct Item {
    int query, column;
};

__device__ __forceinline__ Item find_item(int i) { return {i / (HEAD_DIM / 4), i % (HEAD_DIM / 4) * 4}; }

__device__ __forceinline__ void add(float4& total, float factor, float4 v) {
    total.x += factor * v.x;
    total.y += factor * v.y;
    total.z += factor * v.z;
    total.w += factor * v.w;
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

__device__ __forceinline__ void write(float4 a, float sum, const Problem& p, int share, const Item& item) {
    const int query = first_query(p) + item.query;
    const float factor = (CACHE_BITS == 16 ? 1 : HEAD_DIM % 32 ? 0.25f : 0.17677669529663687f) / sum;
    if (CACHE_BITS < 16) a = turn_back(a);
    const int4 to = places4(p.places, (group_of(p) * share + query % share) * HEAD_DIM + item.column);
    put4(p.out, p.places, to, first_row(p) + query / share, gridDim.z * p.rows, p.heads * HEAD_DIM,
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

// What all blocks have left in memory, to `out`. Blocks are added in their order, 16 on their way at once. `stats`:
// shared memory for all parts.
__device__ __forceinline__ void finish_blocks(const Problem& p, const Part& part, int share, int count,
                                              const float* sums, const float2* from, float2* stats, float2* totals) {
    constexpr int AT_ONCE = 16;
    const int blocks = gridDim.x;
    float4 v[AT_ONCE];
    auto load = [&](const Item& item, int first) {
        const float4* at = (const float4*)(sums + item.query * HEAD_DIM + item.column);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i < blocks) v[i] = __ldcg(at + (size_t)(first + i) * (QUERIES * HEAD_DIM / 4));
    };
    load(find_item(threadIdx.x), 0);
    for (int i = threadIdx.x; i < blocks * QUERIES; i += THREADS)
        stats[i] = is_active(p, part, i / QUERIES) ? __ldcg(from + i) : make_float2(NOTHING, 0);
    __syncthreads();
    find_factors(stats, totals, blocks, count);
#pragma unroll 1
    for (int i = threadIdx.x; i < count * (HEAD_DIM / 4); i += THREADS) {
        const Item item = find_item(i);
        float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 1
        for (int first = 0; first < blocks; first += AT_ONCE) {
            if (first || i != threadIdx.x) load(item, first);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {  // nobody has written what inactive blocks have
                const float factor = first + k < blocks ? stats[(first + k) * QUERIES + item.query].x : 0;
                if (factor > 0) add(total, factor, v[k]);
            }
        }
        write(total, totals[item.query].y, p, share, item);
    }
}

// The parts of all warps, and where there are several blocks of all blocks, to `out`.
__device__ __forceinline__ void finish(const Problem& p, const Part& part, int share, int count, float* sums,
                                       float2* stats) {
    __shared__ float2 totals[QUERIES];
    const int row = blockIdx.z * gridDim.y + blockIdx.y;
    float* all = p.partial + (size_t)row * gridDim.x * QUERIES * HEAD_DIM;
    float2* all_stats = p.stats + (size_t)row * gridDim.x * QUERIES;
    find_factors(stats, totals, WARPS, count);
#pragma unroll 1
    for (int i = threadIdx.x; i < count * (HEAD_DIM / 4); i += THREADS) {
        const Item item = find_item(i);
        float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const int at = w * QUERIES + item.query;
            add(total, stats[at].x, *(const float4*)(sums + at * SUMS + item.column));
        }
        if (part.active == 1) write(total, totals[item.query].y, p, share, item);
        else *(float4*)(all + (blockIdx.x * QUERIES + item.query) * HEAD_DIM + item.column) = total;
    }
    if (part.active == 1) return;
    if (threadIdx.x < count) all_stats[blockIdx.x * QUERIES + threadIdx.x] = totals[threadIdx.x];
    if (is_last(p.arrived + row, part.active))
        finish_blocks(p, part, share, count, all, all_stats, (float2*)sums, totals);
}
