// Attention of few new tokens over the cache, split along the cache (flash-decoding), from what the matrix of queries,
// keys and values gave: head norm, RoPE, the new keys and values into the cache, then
//
//     out[t, h] = softmax(cap(q[t, h] . k[g] * scale) over the tokens that t may look at) . v[g],  g = h / (H / G)
//     token p + t (p = position) looks at tokens <= p + t, with a window w > 0 only at those > p + t - w;
//     cap(s) = c * tanh(s / c) with a soft cap c > 0, else s
//
// layout    qkv      [parts, T, H + 2 G, D] float16 or float32, parts to be added; turning: see rope.cuh
//           cache    CACHE_BITS = 16: [2, G, S, D] float16, keys before values, the pages of a sequence after one
//                    another; 4, 6, 8: [2, G, S / 16] tiles (cache.cuh), read as they are. `stride`: bytes from group
//                    to group
//           position [1] int32, how many tokens came before
//           out      [T, H * D] float16, or fragments by places [H * D] int32 (rows.cuh) where these are not 0
//           partial  [Z * G, splits, QUERIES, D] float32, stats [Z * G, splits, QUERIES] float2 (maximum, sum): work
//                    space
//           arrived  [Z * G] int32, zero before the first call; zero again after every call
// launch    grid (splits, Z * G), Z = ceil(T * H / G / QUERIES), QUERIES = 8 QTILES; WARPS * 32 threads. Block
//           (s, z * G + g) has QUERIES queries (t, h) of group g, and of the pages of 256 tokens every splits-th; of a
//           page warp w has every WARPS-th TILE = 16 TILES tokens. The last block of a row of the grid to arrive adds
//           the parts. One grid serves all lengths. Shared bytes (cached.cuh): QUERIES * PITCH * 2 + fresh_bytes and
//           WARPS times the larger of RING * TILES * HALF and QUERIES * (D + 4) * 4
// limits    D = HEAD_DIM, a multiple of 16 up to 256; rows aligned to 16 bytes; splits <= 128; T <= 16; RING >= 2;
//           WARPS a power of two, WARPS * TILES <= 16. Calls whose results are to be the same agree in WARPS, TILES
//           and splits
// numerics  float16 products, float32 sums, softmax in float32, its weights rounded to float16 for their product with
//           v; warps, then parts, added in fixed order: bit-equal at every call. A token's place among blocks and warps
//           depends on its position alone, and tokens that a query may not look at change nothing: a query's result
//           does not depend on how many are asked at once
// measured  benchmarks/NOTES.md: of the version before this one; see there what is left to be measured
// reference attends of exl2chat/ops/reference.py; tests/gpu/test_attention.py
// source    FlashAttention-2 (arXiv 2307.08691) and flash-decoding (Dao et al. 2023)

#include "attention_sums.cuh"

// One of the heads that a block turns: the queries of its group, then, where it has the tokens, their keys and values.
struct Place {
    int row, head, kind;  // kind: 0 a key, 1 a value, -1 a query
};

__device__ __forceinline__ Place find_place(const Problem& p, int share, int count, int i) {
    const int query = first_query(p) + i, other = i - count;
    if (i < count) return {query / share, group_of(p) * share + query % share, -1};
    return {other >> 1, p.heads + group_of(p) + (other & 1) * p.groups, other & 1};
}

__device__ __forceinline__ void keep_query(const float (&x)[(HEAD_DIM + 31) / 32], __half* to) {
#pragma unroll
    for (int j = 0; j < (Cache::PADDED + 31) / 32; j++) {
        const int i = (threadIdx.x & 31) + 32 * j;
        if (i < Cache::PADDED) to[i] = __float2half_rn(x[j]);
    }
}

// The block's queries into shared memory, zeros beyond the last; the group's new keys and values that this block has
// into `fresh` and into the cache. A warp has BATCH heads on their way at once; while the first are, `begin` finds the
// part.
template <int BATCH, typename T, typename F>
__device__ __forceinline__ void turn_heads(const Problem& p, const Part& part, int share, int count, __half* queries,
                                           u8* fresh, float* v, F begin) {
    const int warp = threadIdx.x >> 5, all = p.heads + 2 * p.groups, last = count + 2 * p.rows;
    const size_t stride = (size_t)p.rows * all * HEAD_DIM;
    for (int first = warp; first < last || first == warp; first += BATCH * WARPS) {
        Place places[BATCH];
        const T* from[BATCH];
        Head<HEAD_DIM> heads[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            places[i] = find_place(p, share, count, min(first + i * WARPS, last - 1));
            from[i] = (const T*)p.qkv + ((size_t)places[i].row * all + places[i].head) * HEAD_DIM;
            load_values<HEAD_DIM>(heads[i], from[i], p.parts, stride);
        }
        if (first == warp) begin();
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            load_turning(heads[i], p.turning, places[i].head, p.heads + p.groups, part.position + places[i].row);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int place = part.position + places[i].row, kind = places[i].kind;
            if (first + i * WARPS >= last || (kind >= 0 && !has(part, place))) continue;
            add_rest(heads[i], from[i], p.parts, stride);
            turn_head(heads[i], p.turning, v + warp * HEAD_DIM);
            if (CACHE_BITS < 16) rotate<HEAD_DIM>(heads[i].x);
            if (kind < 0) {
                keep_query(heads[i].x, queries + (first + i * WARPS) * Cache::PITCH);
            } else {
                u8* head = p.cache + (kind * p.groups + group_of(p)) * p.stride;
                Cache::keep(heads[i].x, fresh, first_query(p) ? 0 : head, kind, places[i].row, p.rows, part.position,
                            place);
            }
        }
    }
}

// A warp's ring of tokens in shared memory: keys and values in turns, each asked for RING turns before it is used, and
// of memory, where the L2 cache does not have it, EARLY turns before that.
struct Ring {
    u8* stages;
    const u8 *keys, *values;
    int slot, ahead;

    __device__ __forceinline__ u8* now() const { return stages + slot * (TILES * Cache::HALF); }

    // What comes after all that was asked for, into the slot that is free.
    __device__ __forceinline__ void ask(const Part& part, int to) {
        const int token = token_of(part, ahead / 2), later = token_of(part, (ahead + EARLY) / 2);
        const u8* head = ahead % 2 ? values : keys;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            if (token + 16 * n < part.end)
                Cache::fetch(stages + (to * TILES + n) * Cache::HALF, head, token + 16 * n, part.position);
            Cache::prefetch(head, later + 16 * n, part.position);
        }
        commit();
        ahead++;
    }
    __device__ __forceinline__ void turn(const Part& part) {
        __syncwarp();
        ask(part, slot);
        slot = slot + 1 == RING ? 0 : slot + 1;
    }
};

// New tokens among those that were fetched.
__device__ __forceinline__ void patch(const Problem& p, const Part& part, u8* stage, const u8* fresh, int kind,
                                      int token) {
#pragma unroll 1
    for (int n = 0; n < TILES; n++, token += 16, stage += Cache::HALF)
        if (token + 16 > part.position && token < part.end)
            Cache::patch(stage, fresh, kind, token, part.position, p.rows);
}

// All of this warp's tokens into `running`.
__device__ __forceinline__ void attend_tokens(const Problem& p, const Part& part, Ring& ring, int share,
                                              const __half* queries, const u8* fresh, Running (&running)[QTILES]) {
    const int column = (threadIdx.x & 3) * 2;
    int own[QTILES][2];
#pragma unroll
    for (int q = 0; q < QTILES; q++) {
        running[q] = {{NOTHING, NOTHING}};
#pragma unroll
        for (int e = 0; e < 2; e++)
            own[q][e] = min(part.end - 1, part.position + (first_query(p) + q * 8 + column + e) / share);
    }
#pragma unroll 1
    for (int n = 0, token; (token = token_of(part, n)) < part.end; n++) {
        const bool is_new = token + TILE > part.position;
        float s[QTILES][TILES][4] = {};
        u32 weights[QTILES][TILES][2];
        await_groups<RING - 1>();
        if (is_new) patch(p, part, ring.now(), fresh, 0, token);
        score(s, queries, ring.now());
        ring.turn(part);
#pragma unroll
        for (int q = 0; q < QTILES; q++) {
#pragma unroll
            for (int i = 0; i < TILES; i++) mask(s[q][i], p, part, token + 16 * i, own[q]);
            weigh(running[q], s[q], weights[q]);
        }
        await_groups<RING - 1>();
        if (is_new) patch(p, part, ring.now(), fresh, 1, token);
        absorb(running, weights, ring.now(), part.end - token);
        ring.turn(part);
    }
    await_groups<0>();
}

template <typename T>
__device__ __forceinline__ void attend(const Problem& p) {
    extern __shared__ uint4 shared[];
    __shared__ float2 stats[WARPS * QUERIES];
    __shared__ float v[WARPS * HEAD_DIM];
    release_successor();
    const int warp = threadIdx.x >> 5, share = p.heads / p.groups;
    const int count = min(QUERIES, p.rows * share - first_query(p));
    __half* queries = (__half*)shared;
    u8* stages = (u8*)(queries + QUERIES * Cache::PITCH);
    u8* fresh = stages + ROOM;
    const u8* keys = p.cache + group_of(p) * p.stride;
    Ring ring = {stages + warp * RING_BYTES, keys, keys + p.groups * p.stride};
    for (int i = count * Cache::PITCH + threadIdx.x; i < QUERIES * Cache::PITCH; i += WARPS * 32)
        queries[i] = __float2half_rn(0);
    await_predecessor();
    const int position = *p.position;
    Part part;
    auto begin = [&] {
        part = find_part(p, position);
        for (int i = 0; i < RING; i++) ring.ask(part, i);
    };
    // one head a warp without the code for several
    if (count + 2 * p.rows <= WARPS) turn_heads<1, T>(p, part, share, count, queries, fresh, v, begin);
    else turn_heads<(HEAD_DIM > 128 ? 2 : 4), T>(p, part, share, count, queries, fresh, v, begin);
    if (part.page * PAGE * TILE >= part.end) return;
    __syncthreads();
    Running running[QTILES];
    attend_tokens(p, part, ring, share, queries, fresh, running);
    gather_warps(running, count, (float*)stages, stats);
    finish(p, part, share, count, (float*)stages, stats);
}

// Registers for as many threads: half of a multiprocessor's for one tile of queries, where the next kernel can begin
// beside this one; more where sums would not fit.
constexpr int MANY = HEAD_DIM * QTILES, FITTING = CACHE_BITS == 16 ? 384 : 256;
constexpr int BOUND = MANY <= 128 ? 512 : MANY <= FITTING ? 384 : WARPS * 32;

#define ATTENTION(name, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(BOUND)                                                              \
    name(const __grid_constant__ Problem p) {                                                                         \
        attend<T>(p);                                                                                                 \
    }
ATTENTION(attention_half, __half)
ATTENTION(attention_float, float)
