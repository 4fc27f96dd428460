// Attention of few new tokens over the cache, split along the cache (flash-decoding), from what the matrix of queries,
// keys and values gave: head norm, RoPE, the new keys and values into the cache, then
//
//     out[t, h] = softmax(cap(q[t, h] . k[g] * scale) over the tokens that t may look at) . v[g],  g = h / (H / G)
//     token p + t (p = position) looks at tokens <= p + t, with a window w > 0 only at those > p + t - w;
//     cap(s) = c * tanh(s / c) with a soft cap c > 0, else s
//
// layout    qkv      [parts, T, H + 2 G, D] float16 or float32, parts to be added; turning: see rope.cuh
//           cache    CACHE_BITS = 16: [2, G, S, D] float16, keys before values, the pages of a sequence after one another;
//                    CACHE_BITS = 4, 6, 8: [2, G, S / 16] tiles (cache.cuh), read as they are
//           position [1] int32, how many tokens came before
//           out      [T, H * D] float16, or fragments by places [H * D] int32 (rows.cuh) where these are not 0
//           partial  [Z * G, splits, QUERIES, D] float32, stats [Z * G, splits, QUERIES] float2 (maximum, sum): work
//                    space
//           arrived  [Z * G] int32, zero before the first call; zero again after every call
// launch    grid (splits, Z * G), Z = ceil(T * H / G / QUERIES), QUERIES = 8 QTILES; WARPS * 32 threads, WARPS a power
//           of two up to 16. Block (s, z * G + g) has QUERIES queries (t, h) of group g, and of the pages of 256 tokens
//           every splits-th; of a page warp w has every WARPS-th 16 tokens, of which RING / 2 are on their way. The last
//           block of a row of the grid to arrive adds the parts. One grid serves all lengths. Shared bytes:
//           QUERIES * PITCH * 2 + the larger of WARPS * RING * HALF and WARPS * QUERIES * (D + 4) * 4 + fresh_bytes
//           (cached.cuh)
// limits    D = HEAD_DIM, a multiple of 16 up to 256; rows aligned to 16 bytes; splits <= 128; T <= 16; RING >= 2
// numerics  float16 products, float32 sums, softmax in float32, its weights rounded to float16 for their product with
//           v; warps, then parts, added in fixed order: bit-equal at every call. A token's place among blocks and warps
//           depends on its position alone, and tokens that a query may not look at change nothing: a query's result
//           does not depend on how many are asked at once
// measured  NVIDIA H200, 2026-11-21, 32 / 8 heads of 128, float32 qkv in 4 parts: see benchmarks/NOTES.md
// reference attends of exl2chat/ops/reference.py; tests/gpu/test_attention.py
// source    FlashAttention-2 (arXiv 2307.08691) and flash-decoding (Dao et al. 2023)

#include "cached.cuh"
#include "rope.cuh"
#include "rows.cuh"

typedef Cached<CACHE_BITS, HEAD_DIM> Cache;

constexpr int TILE = 16;                    // tokens a warp takes at a time
constexpr int PAGE = 16;                    // tiles that one block takes together
constexpr int PER_WARP = PAGE / WARPS;      // of a page
constexpr int QUERIES = 8 * QTILES;         // of a block
constexpr int SUMS = HEAD_DIM + 4;          // pitch of a query's sums: the lanes of a warp write to different banks
// Bytes of the ring of all warps, which their sums take over.
constexpr int ROOM = WARPS * (RING * Cache::HALF > QUERIES * SUMS * 4 ? RING * Cache::HALF : QUERIES * SUMS * 4);
constexpr int MTILES = Cache::PADDED / 16;  // of the sums
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
    return (block + gridDim.x - part.first) % gridDim.x < part.active;
}

// The n-th 16 tokens of this warp.
__device__ __forceinline__ int token_of(const Part& part, int n) {
    const int page = part.page + n / PER_WARP * gridDim.x;
    return (page * PAGE + n % PER_WARP * WARPS + (threadIdx.x >> 5)) * TILE;
}

__device__ __forceinline__ bool has(const Part& part, int place) {
    return place / (PAGE * TILE) % gridDim.x == blockIdx.x;
}

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
                Cache::keep(heads[i].x, fresh, first_query(p) ? 0 : head, kind, places[i].row, p.rows, part.position, place);
            }
        }
    }
}

// What a warp knows of 8 queries: of a lane those of columns 2 (lane % 4) + {0, 1}; `sum` and `acc` of its own tokens
// and values (Cache::dimension).
struct Running {
    float most[2], sum[2];
    float acc[MTILES][4];
};

// The scores of 16 tokens and 8 queries in fragments, from `both` halves of the products, scaled, capped, and NOTHING
// where a query must not look; own: the tokens that are the lane's two queries.
__device__ __forceinline__ void mask(float (&s)[4], const float (&other)[4], const Problem& p, int token,
                                     const int (&own)[2]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int at = token + Cache::token(((threadIdx.x & 31) >> 2) + 8 * (i >> 1)), mine = own[i & 1];
        float v = (s[i] + other[i]) * p.scale;
        if (p.cap > 0) v = p.cap * tanhf(v / p.cap);
        const bool visible = at <= mine && (p.window <= 0 || at > mine - p.window);
        s[i] = visible ? v : NOTHING;
    }
}

// Every query's scores into weights, as a right operand; its sums so far scaled to the new maximum.
__device__ __forceinline__ void weigh(Running& r, float (&s)[4], u32 (&weights)[2]) {
    float keep[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float most = fmaxf(s[e], s[2 + e]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        most = fmaxf(most, r.most[e]);
        keep[e] = __expf(r.most[e] - most);
        r.most[e] = most;
#pragma unroll
        for (int i = e; i < 4; i += 2) s[i] = s[i] > NOTHING ? __expf(s[i] - most) : 0;
        r.sum[e] = r.sum[e] * keep[e] + s[e] + s[2 + e];
    }
    if (__any_sync(~0u, keep[0] != 1 || keep[1] != 1))
#pragma unroll
        for (int m = 0; m < MTILES; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) r.acc[m][i] *= keep[i & 1];
#pragma unroll
    for (int n = 0; n < 2; n++)
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(weights[n]) : "r"(pair(s[2 * n], s[2 * n + 1])));
}

// The products of 16 tokens' keys with all queries.
__device__ __forceinline__ void score(float (&s)[QTILES][2][4], const __half* queries, const u8* keys) {
#pragma unroll
    for (int span = 0; span < Cache::SPANS; span++) {
        u32 a[2][4];
        Cache::keys(a, keys, span);
#pragma unroll
        for (int q = 0; q < QTILES; q++) {
            u32 b[4];
            Cache::queries(b, queries + q * 8 * Cache::PITCH, span);
            multiply(s[q][0], a[0], b[0], b[1]);
            if (2 * span + 1 < MTILES) multiply(s[q][1], a[1], b[2], b[3]);
        }
    }
}

__device__ __forceinline__ void absorb(Running (&r)[QTILES], const u32 (&weights)[QTILES][2], const u8* values,
                                       int valid) {
#pragma unroll
    for (int span = 0; span < Cache::SPANS; span++) {
        u32 a[2][4];
        Cache::values(a, values, span, valid);
#pragma unroll
        for (int q = 0; q < QTILES; q++)
#pragma unroll
            for (int m = 0; m < 2; m++)
                if (2 * span + m < MTILES) multiply(r[q].acc[2 * span + m], a[m], weights[q][0], weights[q][1]);
    }
}

// Every warp's sums of `count` queries into shared memory, [WARPS][QUERIES][SUMS], and their (maximum, sum) into `stats`.
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

// Four values of one query: their weighed sum, and (maximum, sum of weights).
struct Total {
    float4 acc;
    float2 stats;
};

__device__ __forceinline__ void add(Total& total, float most, float4 v, float2 stats) {
    const float weight = __expf(stats.x - most);
    total.acc = total.acc + make_float4(weight * v.x, weight * v.y, weight * v.z, weight * v.w);
    total.stats.y += weight * stats.y;
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
__device__ __forceinline__ Total add_blocks(const Part& part, const float* sums, const float2* stats, int query,
                                            int column) {
    constexpr int batch = 16;
    const int count = part.first ? gridDim.x : part.active;
    float4 v[batch];
    float2 s[batch];
    auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < batch; i++) {
            const int from = (first + i) * QUERIES + query;
            const bool there = first + i < count && is_active(part, first + i);
            v[i] = there ? __ldcg((const float4*)(sums + from * HEAD_DIM + column)) : make_float4(0, 0, 0, 0);
            s[i] = there ? __ldcg(stats + from) : make_float2(NOTHING, 0);
        }
    };
    load(0);
    float most = NOTHING;
#pragma unroll
    for (int i = 0; i < batch; i++) most = fmaxf(most, s[i].x);
    for (int i = batch; i < count; i++)
        if (is_active(part, i)) most = fmaxf(most, __ldcg(stats + i * QUERIES + query).x);
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
    const float factor = (CACHE_BITS == 16 ? 1 : HEAD_DIM % 32 ? 0.25f : 0.17677669529663687f) / total.stats.y;
    const float4 a = CACHE_BITS == 16 ? total.acc : turn_back(total.acc);
    const int4 to = places4(p.places, (group_of(p) * share + query % share) * HEAD_DIM + column);
    put4(p.out, p.places, to, query / share, p.rows, p.heads * HEAD_DIM,
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
    count *= HEAD_DIM / 4;
    float* all = p.partial + (size_t)blockIdx.y * gridDim.x * QUERIES * HEAD_DIM;
    float2* all_stats = p.stats + (size_t)blockIdx.y * gridDim.x * QUERIES;
    for (int i = threadIdx.x; i < count; i += WARPS * 32) {
        const int query = i / (HEAD_DIM / 4), column = i % (HEAD_DIM / 4) * 4;
        const Total total = add_warps(sums, stats, query, column);
        if (part.active == 1) {
            write(total, p, share, query, column);
            continue;
        }
        *(float4*)(all + (blockIdx.x * QUERIES + query) * HEAD_DIM + column) = total.acc;
        if (column == 0) all_stats[blockIdx.x * QUERIES + query] = total.stats;
    }
    if (part.active == 1 || !is_last(p.arrived + blockIdx.y, part.active)) return;
    for (int i = threadIdx.x; i < count; i += WARPS * 32) {
        const int query = i / (HEAD_DIM / 4), column = i % (HEAD_DIM / 4) * 4;
        write(add_blocks(part, all, all_stats, query, column), p, share, query, column);
    }
}

// A warp's ring of tokens in shared memory: keys and values in turns, each asked for RING turns before it is used.
struct Ring {
    u8* stages;
    const u8 *keys, *values;
    int slot, ahead;

    __device__ __forceinline__ u8* now() const { return stages + slot * Cache::HALF; }

    // What comes after all that was asked for, into the slot that is free.
    __device__ __forceinline__ void ask(const Part& part, int to) {
        const int token = token_of(part, ahead / 2);
        if (token < part.end)
            Cache::fetch(stages + to * Cache::HALF, ahead % 2 ? values : keys, token, part.position);
        commit();
        ahead++;
    }
    __device__ __forceinline__ void turn(const Part& part) {
        __syncwarp();
        ask(part, slot);
        slot = slot + 1 == RING ? 0 : slot + 1;
    }
};

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
    for (int n = 0, token; (token = token_of(part, n)) < part.end; n++) {
        const bool is_new = token + TILE > part.position;
        float s[QTILES][2][4] = {};
        u32 weights[QTILES][2];
        await_groups<RING - 1>();
        if (is_new) Cache::patch(ring.now(), fresh, 0, token, part.position, p.rows);
        score(s, queries, ring.now());
        ring.turn(part);
#pragma unroll
        for (int q = 0; q < QTILES; q++) {
            mask(s[q][0], s[q][1], p, token, own[q]);
            weigh(running[q], s[q][0], weights[q]);
        }
        await_groups<RING - 1>();
        if (is_new) Cache::patch(ring.now(), fresh, 1, token, part.position, p.rows);
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
    Ring ring = {stages + warp * RING * Cache::HALF, keys, keys + p.groups * p.stride};
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
constexpr int BOUND = HEAD_DIM * QTILES <= 128 ? 512 : HEAD_DIM * QTILES <= 384 ? 384 : WARPS * 32;

#define ATTENTION(name, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(BOUND)                                                              \
    name(const __grid_constant__ Problem p) {                                                                         \
        attend<T>(p);                                                                                                 \
    }
ATTENTION(attention_half, __half)
ATTENTION(attention_float, float)
