// Attention of few new tokens over the cache, split along the cache (flash-decoding), from what the matrix of queries,
// keys and values gave: head norm, RoPE, the new keys and values into the cache, then
//
//     out[t, h] = softmax(cap(q[t, h] . k[g] * scale) over the tokens that t may look at) . v[g],  g = h / (H / G)
//     token p + t (p = position) looks at tokens <= p + t, with a window w > 0 only at those > p + t - w;
//     cap(s) = c * tanh(s / c) with a soft cap c > 0, else s
//
// layout    B sequences of T new tokens each
//           qkv      [parts, B * T, H + 2 G, D] float16 or float32, parts to be added; turning: see rope.cuh
//           cache    CACHE_BITS = 16: [2, G, S, D] float16, keys before values; 4, 6, 8: [2, G, S / 16] tiles
//                    (cache.cuh), read as they are. `stride`: bytes from group to group
//           position [B] int32, how many tokens came before
//           pages    [B, most] int32: page i of sequence b is page pages[b, i] of the cache, 256 tokens; only the pages
//                    of tokens there are, the new ones included, are looked up. 0: B = 1, pages in order
//           out      [B * T, H * D] float16, or fragments by places [H * D] int32 (rows.cuh) where these are not 0
//           partial  [B, Z * G, grid, QUERIES, D] float32, stats [B, Z * G, grid, QUERIES] float2 (maximum, sum): work
//                    space
//           arrived  [B * Z * G] int32, zero before the first call; zero again after every call
// launch    grid (min(splits, pages that a sequence may have), Z * G, B), Z = ceil(T * H / G / QUERIES), QUERIES =
//           8 QTILES; WARPS * 32 threads. Block (s, z * G + g, b) has QUERIES queries (t, h) of group g, and of the
//           pages every splits-th; of a page warp w has every WARPS-th 16 tokens. The last block of a row of the grid
//           to arrive adds the parts. One grid serves all lengths. Shared bytes: those of attend below
// limits    D = HEAD_DIM, a multiple of 16 up to 256; rows aligned to 16 bytes; splits <= 128; T <= 16; RING >= 2;
//           WARPS a power of two up to 16. Calls whose results are to be the same agree in WARPS and splits. Position,
//           pages and the old part of the cache are read before the predecessor has ended: nothing of them may come from
//           the kernel just before this one, which itself must not release its successor before it has waited. With
//           that, all that was queued before that kernel has ended once this one begins. (gemv.cu, norm.cu, gate.cu,
//           rope_cache.cu, expand_cache.cu and prefill_attention.cu wait first, so does this kernel; kernels that
//           never release do by ending)
// numerics  float16 products, float32 sums; softmax in float32 to the base 2, its weights rounded to float16 for their
//           product with v. Codes are multiplied as they are, as subnormal numbers: the scale of a key multiplies its
//           sum, that of a value its weight. Warps, then parts, added in fixed order: bit-equal at every call. A token's
//           place among blocks and warps depends on its position alone, and tokens that a query may not look at change
//           nothing: a query's result does not depend on how many are asked at once, of which sequences, nor on pages.
//           A product that is added to something is an explicit fma, or __fmul_rn: left to the compiler, it became one in
//           the kernel of 1 row and not in that of 16, and rows of 8 bits differed in their last bits
// measured  benchmarks/NOTES.md
// reference attends of exl2chat/ops/reference.py; tests/gpu/test_attention.py
// source    FlashAttention-2 (arXiv 2307.08691) and flash-decoding (Dao et al. 2023)

#include "attention_sums.cuh"

// One of the heads that a block turns: the queries of its group, then their new keys and values.
struct Place {
    int row, head;  // of the sequence, of qkv
    int kind;       // 0 a key, 1 a value, -1 a query
    int at;         // of a key or value: where it goes in the cache; -1 where another block has it
};

__device__ __forceinline__ Place find_place(const Problem& p, const Part& part, int share, int count, int i) {
    const int query = first_query(p) + i, row = (i - count) >> 1, kind = (i - count) & 1, token = part.position + row;
    const int of = quotient(query, share);
    if (i < count) return {of, group_of(p) * share + query - of * share, -1, 0};
    const int at = has(p, token) ? find_token(pages_of(p), token) : -1;
    return {row, p.heads + group_of(p) + kind * p.groups, kind, at};
}

// The heads of all places into shared memory, [places][HEAD_DIM], their parts added.
template <typename T>
__device__ __forceinline__ void load_heads(const Problem& p, const Place* places, int last, float* heads) {
    constexpr int EACH = HEAD_DIM / 4, PARTS = 4;  // of a head; on their way at once
    const int all = p.heads + 2 * p.groups;
    const size_t stride = (size_t)gridDim.z * p.rows * all * HEAD_DIM;
    const T* qkv = (const T*)p.qkv + (size_t)first_row(p) * all * HEAD_DIM;
#pragma unroll 4
    for (int i = threadIdx.x; i < last * EACH; i += THREADS) {
        const Place& place = places[i / EACH];
        const T* from = qkv + ((size_t)place.row * all + place.head) * HEAD_DIM + i % EACH * 4;
        float4 v[PARTS];
#pragma unroll
        for (int n = 0; n < PARTS; n++) v[n] = n < p.parts ? read4(from + n * stride) : make_float4(0, 0, 0, 0);
        float4 sum = v[0] + v[1] + v[2] + v[3];
#pragma unroll 1
        for (int n = PARTS; n < p.parts; n++) sum = sum + read4(from + n * stride);
        ((float4*)heads)[i] = sum;
    }
}

__device__ __forceinline__ void keep_query(const float (&x)[(HEAD_DIM + 31) / 32], __half* to) {
#pragma unroll
    for (int j = 0; j < (Cache::PADDED + 31) / 32; j++) {
        const int i = (threadIdx.x & 31) + 32 * j;
        if (i < Cache::PADDED) to[i] = __float2half_rn(Cache::query(x[j]));
    }
}

// The block's queries into shared memory, zeros beyond the last; the group's new keys and values that this block has
// into `fresh` and into the cache. `heads`: shared memory for all of them.
template <typename T>
__device__ __forceinline__ void turn_heads(const Problem& p, const Part& part, int share, int count, __half* queries,
                                           u8* fresh, float* heads) {
    __shared__ Place places[QUERIES + 2 * MOST_ROWS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, last = count + 2 * p.rows;
    for (int i = threadIdx.x; i < last; i += THREADS) places[i] = find_place(p, part, share, count, i);
    for (int i = count * Cache::PITCH + threadIdx.x; i < QUERIES * Cache::PITCH; i += THREADS)
        queries[i] = __float2half_rn(0);
    __syncthreads();
    Head<HEAD_DIM> head, next;
    auto prepare = [&](int i) {
        load_turning(next, p.turning, places[i].head, p.heads + p.groups, part.position + places[i].row);
    };
    prepare(min(warp, last - 1));
    await_predecessor();
    release_successor();
    load_heads<T>(p, places, last, heads);
    __syncthreads();
#pragma unroll 1
    for (int i = warp; i < last; i += WARPS) {
        const Place place = places[i];
        head = next;
        if (i + WARPS < last) prepare(i + WARPS);
        if (place.at < 0) continue;
        float* v = heads + i * HEAD_DIM;
#pragma unroll
        for (int j = 0; j < (HEAD_DIM + 31) / 32; j++) head.x[j] = lane + 32 * j < HEAD_DIM ? v[lane + 32 * j] : 0;
        turn_head(head, p.turning, v);
        if (CACHE_BITS < 16) rotate<HEAD_DIM>(head.x);
        if (place.kind < 0) {
            keep_query(head.x, queries + i * Cache::PITCH);
        } else {
            u8* to = p.cache + (place.kind * p.groups + group_of(p)) * p.stride;
            Cache::keep(head.x, fresh, first_query(p) ? 0 : to, place.kind, place.row, p.rows, part.position, place.at);
        }
    }
}

// A warp's ring of tokens in shared memory: keys and values in turns, each asked for RING turns before it is used.
struct Ring {
    u8* stages;
    const u8 *keys, *values;
    int slot, ahead;
    int pages, found;  // the first tokens of 32 pages of this block, a lane each, from the block's page `found` on

    // What comes after all that was asked for, into the slot that is free.
    __device__ __forceinline__ void ask(const Problem& p, const Part& part, int to) {
        const int n = ahead / 2, token = token_of(p, part, n), page = n / PER_WARP;
        if (token < part.end) {
            if (page >= found + 32) find_pages(p, part, page);
            const int place = __shfl_sync(~0u, pages, page & 31) + token % PAGE;
            Cache::fetch(stages + to * Cache::HALF, ahead % 2 ? values : keys, place, part.position - token);
        }
        commit();
        ahead++;
    }
    __device__ __forceinline__ void find_pages(const Problem& p, const Part& part, int first) {
        const int page = part.page + (first + (threadIdx.x & 31)) * p.splits;
        found = first;
        pages = page * PAGE < part.end ? find_token(pages_of(p), page * PAGE) : 0;
    }
    __device__ __forceinline__ void begin(const Problem& p, const Part& part) {
        find_pages(p, part, 0);
#pragma unroll 1
        for (int i = 0; i < RING; i++) ask(p, part, i);
    }
    __device__ __forceinline__ u8* now() const { return stages + slot * Cache::HALF; }

    __device__ __forceinline__ void turn(const Problem& p, const Part& part) {
        __syncwarp();
        ask(p, part, slot);
        slot = slot + 1 == RING ? 0 : slot + 1;
    }
};

// All of this warp's tokens into `running`.
__device__ __forceinline__ void attend_tokens(const Problem& p, const Part& part, Ring& ring, int share,
                                              const __half* queries, const u8* fresh, Running (&running)[QTILES],
                                              Cache::Sums (&sums)[QTILES]) {
    const int column = (threadIdx.x & 3) * 2;
    int own[QTILES][2];
    Cache::Levels<QTILES> levels;
    levels.find(queries);
#pragma unroll
    for (int q = 0; q < QTILES; q++) {
        running[q] = {{NOTHING, NOTHING}};
        sums[q] = {};
#pragma unroll
        for (int e = 0; e < 2; e++)
            own[q][e] = min(part.end - 1, part.position + quotient(first_query(p) + q * 8 + column + e, share));
    }
#pragma unroll 1
    for (int n = 0, token; (token = token_of(p, part, n)) < part.end; n++) {
        const bool is_new = token + TILE > part.position;
        float s[QTILES][4] = {};
        u32 weights[QTILES][2];
        await_groups<RING - 1>();
        if (is_new) Cache::patch(ring.now(), fresh, 0, token, part.position, p.rows);
        Cache::score(s, levels, queries, ring.now());
        ring.turn(p, part);
#pragma unroll
        for (int q = 0; q < QTILES; q++) {
            mask(s[q], p, part, token, own[q]);
            weigh(running[q], sums[q], s[q], weights[q]);
        }
        await_groups<RING - 1>();
        if (is_new) Cache::patch(ring.now(), fresh, 1, token, part.position, p.rows);
        Cache::absorb(sums, weights, ring.now(), part.end - token);
        ring.turn(p, part);
    }
    await_groups<0>();
}

template <typename T>
__device__ __forceinline__ void attend(const Problem& p) {
    extern __shared__ uint4 shared[];
    __shared__ float2 stats[WARPS * QUERIES];
    const Part part = find_part(p);
    if (part.page * PAGE >= part.end) return;
    const int warp = threadIdx.x >> 5, share = quotient(p.heads, p.groups);
    const int count = min(QUERIES, p.rows * share - first_query(p));
    u8* stages = (u8*)shared;
    __half* queries = (__half*)(stages + ROOM);
    float* heads = (float*)(queries + QUERIES * Cache::PITCH);
    u8* fresh = (u8*)(heads + (QUERIES + 2 * p.rows) * HEAD_DIM);
    const u8* keys = p.cache + group_of(p) * p.stride;
    Ring ring = {stages + warp * RING_BYTES, keys, keys + p.groups * p.stride};
    ring.begin(p, part);
    turn_heads<T>(p, part, share, count, queries, fresh, heads);
    __syncthreads();
    Running running[QTILES];
    Cache::Sums sums[QTILES];
    attend_tokens(p, part, ring, share, queries, fresh, running, sums);
    gather_warps(running, sums, count, (float*)stages, stats);
    finish(p, part, share, count, (float*)stages, stats);
}

#define ATTENTION(name, T)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) name(const __grid_constant__ Problem p) {       \
        attend<T>(p);                                                                                               \
    }
ATTENTION(attention_half, __half)
ATTENTION(attention_float, float)
