// What the parts of attention.cu share: its arguments, and who has what of the cache.

#pragma once
#include "cached.cuh"
#include "rope.cuh"
#include "rows.cuh"

typedef Cached<CACHE_BITS, HEAD_DIM> Cache;

constexpr int TILE = 16 * TILES;            // tokens a warp takes at a time
constexpr int PAGE = 256 / TILE;            // times as many that one block takes together
constexpr int PER_WARP = PAGE / WARPS;      // of a page
constexpr int QUERIES = 8 * QTILES;         // of a block
constexpr int SUMS = HEAD_DIM + 4;          // pitch of a query's sums: the lanes of a warp write to different banks
// Bytes of the ring of all warps, which their sums take over.
constexpr int RING_BYTES = RING * TILES * Cache::HALF, SUMS_BYTES = QUERIES * SUMS * 4;
constexpr int ROOM = WARPS * (RING_BYTES > SUMS_BYTES ? RING_BYTES : SUMS_BYTES);
constexpr int MTILES = Cache::PADDED / 16;  // of the sums
constexpr int EARLY = 6;                    // turns of a ring
constexpr float NOTHING = -1e30f;           // a maximum over no token; finite, so that differences are

struct Problem {
    const void* qkv;
    Turning turning;
    u8* cache;
    const int *position, *places;
    __half* out;
    float* partial;
    float2* stats;
    int* arrived;
    long long stride;  // bytes of the cache from group to group
    int parts, rows, heads, groups, window;
    float scale, cap;
};

__device__ __forceinline__ int group_of(const Problem& p) { return blockIdx.y % p.groups; }

__device__ __forceinline__ int first_query(const Problem& p) { return blockIdx.y / p.groups * QUERIES; }

// What this block has of the cache: every splits-th page from `page` on. The blocks of its group that have any are
// `active` in a row, around the end, from block `first` on.
struct Part {
    int position, end;  // the new tokens
    int page, first, active;
};

__device__ __forceinline__ Part find_part(const Problem& p, int position) {
    const int end = position + p.rows, start = p.window > 0 ? max(0, position + 1 - p.window) : 0;
    const int page = start / (PAGE * TILE), pages = (end - 1) / (PAGE * TILE) + 1 - page, splits = (int)gridDim.x;
    const int first = page % splits;
    return {position, end, page + ((int)blockIdx.x + splits - first) % splits, first, min(pages, splits)};
}

__device__ __forceinline__ bool is_active(const Part& part, int block) {
    const int after = block - part.first;
    return after + (after < 0 ? (int)gridDim.x : 0) < part.active;
}

// The n-th 16 tokens of this warp.
__device__ __forceinline__ int token_of(const Part& part, int n) {
    const int page = part.page + n / PER_WARP * gridDim.x;
    return (page * PAGE + n % PER_WARP * WARPS + (threadIdx.x >> 5)) * TILE;
}

__device__ __forceinline__ bool has(const Part& part, int place) {
    return place / (PAGE * TILE) % gridDim.x == blockIdx.x;
}
