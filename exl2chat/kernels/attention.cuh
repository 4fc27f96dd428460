// What the parts of attention.cu share: its arguments, and who has what of the cache.

#pragma once
#include "cached.cuh"
#include "rope.cuh"
#include "rows.cuh"

typedef Cached<CACHE_BITS, HEAD_DIM> Cache;

constexpr int TILE = 16;                    // tokens a warp takes at a time
constexpr int PER_WARP = PAGE / TILE / WARPS;
constexpr int THREADS = WARPS * 32;
constexpr int MOST_ROWS = 16;
constexpr int QUERIES = 8 * QTILES;         // of a block
constexpr int SUMS = HEAD_DIM + 4;          // pitch of a query's sums: the lanes of a warp write to different banks
// Bytes of the ring of all warps, which their sums take over.
constexpr int RING_BYTES = RING * Cache::HALF, SUMS_BYTES = QUERIES * SUMS * 4;
constexpr int ROOM = WARPS * (RING_BYTES > SUMS_BYTES ? RING_BYTES : SUMS_BYTES);
constexpr int MTILES = Cache::PADDED / 16;  // of the sums
constexpr float NOTHING = -1e30f;           // a maximum over no token; finite, so that differences are
constexpr float LOG2E = 1.44269504f;

struct Problem {
    const void* qkv;
    Turning turning;
    u8* cache;
    const int *position, *pages, *places;
    __half* out;
    float* partial;
    float2* stats;
    int* arrived;
    long long stride;  // bytes of the cache from group to group
    int parts, rows, heads, groups, window, splits, most;
    float scale, cap;
};

// What this block computes: queries of the group in this sequence, from `first_query` on.
__device__ __forceinline__ int group_of(const Problem& p) {
    return blockIdx.y - quotient(blockIdx.y, p.groups) * p.groups;
}

__device__ __forceinline__ int first_query(const Problem& p) { return quotient(blockIdx.y, p.groups) * QUERIES; }

// The row of qkv and out where the sequence begins.
__device__ __forceinline__ int first_row(const Problem& p) { return blockIdx.z * p.rows; }

// What this block has of the cache: every splits-th page from `page` on. The blocks of its group that have any are
// `active` in a row, around the end, from block `first` on.
struct Part {
    int position, end;  // the new tokens
    int page, first, active;
};

__device__ __forceinline__ Part find_part(const Problem& p) {
    const int position = p.position[blockIdx.z], end = position + p.rows;
    const int start = p.window > 0 ? max(0, position + 1 - p.window) : 0;
    const int page = start / PAGE, pages = (end - 1) / PAGE + 1 - page;
    const int first = page - quotient(page, p.splits) * p.splits, after = (int)blockIdx.x - first;
    return {position, end, page + after + (after < 0 ? p.splits : 0), first, min(pages, p.splits)};
}

__device__ __forceinline__ bool is_active(const Problem& p, const Part& part, int block) {
    const int after = block - part.first;
    return after + (after < 0 ? p.splits : 0) < part.active;
}

// The pages of the sequence.
__device__ __forceinline__ const int* pages_of(const Problem& p) {
    return p.pages ? p.pages + (size_t)blockIdx.z * p.most : 0;
}

// The n-th TILE tokens of this warp.
__device__ __forceinline__ int token_of(const Problem& p, const Part& part, int n) {
    return (part.page + n / PER_WARP * p.splits) * PAGE + (n % PER_WARP * WARPS + (threadIdx.x >> 5)) * TILE;
}

__device__ __forceinline__ bool has(const Problem& p, int token) {
    const int page = token / PAGE;
    return page - quotient(page, p.splits) * p.splits == blockIdx.x;
}
