// Attention of few new tokens over the cache, split along the cache (flash-decoding), from what the matrix of queries,
// keys and values gave: head norm, RoPE, the new keys and values into the cache, then
//
//     out[t, h] = softmax(cap(q[t, h] . k[g] * scale) over the tokens that t may look at) . v[g],  g = h / (H / G)
//     token p + t (p = position) looks at tokens <= p + t, with a window w > 0 only at those > p + t - w;
//     cap(s) = c * tanh(s / c) with a soft cap c > 0, else s
//
// layout    qkv      [parts, T, H + 2 G, D] float16 or float32, parts to be added; turning: see rope.cuh
//           cache    [2, G, S, D] float16, keys before values: the pages of a sequence follow one another
//           position [1] int32, how many tokens came before
//           out      [T, H * D] float16, or fragments by places [H * D] int32 (rows.cuh) where these are not 0
//           partial  [Z * G, splits, QUERIES, D] float32, stats [Z * G, splits, QUERIES] float2 (maximum, sum): work
//                    space
//           arrived  [Z * G] int32, zero before the first call; zero again after every call
// launch    grid (splits, Z * G), Z = ceil(T * H / G / QUERIES), QUERIES = 16 QTILES; WARPS * 32 threads. Block
//           (s, z * G + g) has QUERIES queries (t, h) of group g and one part of the cache, of which warp w takes every
//           WARPS-th 16 tokens, STAGES - 1 of them on their way. The last block of a row of the grid to arrive adds the
//           parts. One grid serves all lengths. Shared bytes (QUERIES + WARPS * STAGES * 32) * 2 * (HEAD_DIM + 8)
// limits    D = HEAD_DIM, a multiple of 16 up to 256; rows aligned to 16 bytes; splits <= 128; STAGES >= QTILES
// numerics  float16 products, float32 sums, softmax in float32, its weights rounded to float16 for their product with
//           v; warps, then parts, added in fixed order: bit-equal at every call
// measured  NVIDIA H200, 2026-11-21, 32 / 8 heads of 128, float32 qkv in 4 parts: 1 row over 128 / 4096 / 32768 tokens
//           5.4 / 11.5 / 39.5 us, the last 3.4 TB/s of 4.5; 5 rows 12.3 / 21.1 / 55.5 us
// reference attends of exl2chat/ops/reference.py; tests/gpu/test_attention.py
// source    FlashAttention-2 (arXiv 2307.08691) and flash-decoding (Dao et al. 2023)

#include "rope.cuh"
#include "rows.cuh"

constexpr int TILE = 16;               // tokens a warp takes at a time
constexpr int QUERIES = 16 * QTILES;   // of a block
constexpr int PITCH = HEAD_DIM + 8;    // of a row in shared memory: 8 rows of a matrix lie in 32 different banks
constexpr int CHUNKS = HEAD_DIM / 8;   // of 16 bytes in a row
constexpr int STEPS = HEAD_DIM / 16;
constexpr int LEAST = (STAGES - 1) * WARPS * TILE;  // tokens of a part: fewer would take a block as long
constexpr float NOTHING = -1e30f;      // a maximum over no token; finite, so that differences are

struct Problem {
    const void* qkv;
    Turning turning;
    __half* cache;
    const int *position, *places;
    __half* out;
    float* partial;
    float2* stats;
    int* arrived;
    long long room;
    int parts, rows, heads, groups, window;
    float scale, cap;
};

__device__ __forceinline__ int group_of(const Problem& p) { return blockIdx.y % p.groups; }

__device__ __forceinline__ int first_query(const Problem& p) { return blockIdx.y / p.groups * QUERIES; }

struct Part {        // of the cache, for this block
    int first, end;  // tokens [first, end)
    int active;      // blocks of this group that have a part
};

__device__ __forceinline__ Part find_part(const Problem& p, int position) {
    const int end = position + p.rows, start = p.window > 0 ? max(0, position + 1 - p.window) : 0;
    const int tiles = (end - start + TILE - 1) / TILE;
    const int each = max(LEAST, (tiles + gridDim.x - 1) / gridDim.x * TILE);
    const int first = start + blockIdx.x * each;
    return {first, min(end, first + each), (end - start + each - 1) / each};
}

__device__ __forceinline__ void copy16(__half* to, const __half* from, bool valid) {
    const u32 address = (u32)__cvta_generic_to_shared(to);
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0));
#else
    *(uint4*)to = valid ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
#endif
}

__device__ __forceinline__ void commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int PENDING>
__device__ __forceinline__ void await_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
    __syncwarp();
}

// 16 tokens of keys and values from `token` on into a stage of this warp; zeros where there is no token.
__device__ __forceinline__ void fetch(__half* stage, const __half* keys, const __half* values, int token, int end) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < TILE * CHUNKS / 32; i++) {
        const int chunk = i * 32 + lane, row = chunk / CHUNKS, column = chunk % CHUNKS * 8;
        const bool valid = token + row < end;
        const size_t from = valid ? (size_t)(token + row) * HEAD_DIM + column : 0;
        copy16(stage + row * PITCH + column, keys + from, valid);
        copy16(stage + (TILE + row) * PITCH + column, values + from, valid);
    }
}

__device__ __forceinline__ void matrices(u32 (&r)[4], const __half* at) {
    const u32 address = (u32)__cvta_generic_to_shared(at);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ void transposed(u32 (&r)[4], const __half* at) {
    const u32 address = (u32)__cvta_generic_to_shared(at);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ u32 pair(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return *(const u32*)&both;
}

// What a warp knows of 16 queries; of a lane: rows g = lane / 4 and g + 8, columns 2 (lane % 4) + {0, 1} + 8 n.
struct Running {
    float most[2], sum[2];
    float acc[2 * STEPS][4];
};

// One of the heads that a block turns: its queries, to shared memory, then keys and values of its group, to the cache.
struct Place {
    int row, head;
    __half* to;  // 0 where there is nothing to do
};

__device__ __forceinline__ Place find_place(const Problem& p, const Part& part, int position, int share, int count,
                                            int i, __half* queries) {
    const int query = first_query(p) + i, other = i - count;
    if (i < count) return {query / share, group_of(p) * share + query % share, queries + i * PITCH};
    const int row = other >> 1, place = position + row, cached = group_of(p) + (other & 1) * p.groups;
    const bool ours = row < p.rows && place >= part.first && place < part.end;
    return {row, p.heads + cached, ours ? p.cache + ((size_t)cached * p.room + place) * HEAD_DIM : 0};
}

// The block's queries into shared memory, zeros beyond the last; the group's new keys and values that lie in this part
// into the cache. A warp has BATCH heads on their way at once.
template <int BATCH, typename T>
__device__ __forceinline__ void turn_heads(const Problem& p, const Part& part, int position, int share,
                                           __half* queries, float* v) {
    const int warp = threadIdx.x >> 5, all = p.heads + 2 * p.groups;
    const int count = min(QUERIES, p.rows * share - first_query(p));
    const size_t stride = (size_t)p.rows * all * HEAD_DIM;
    for (int i = count * PITCH + threadIdx.x; i < QUERIES * PITCH; i += WARPS * 32) queries[i] = __float2half_rn(0);
    for (int first = warp; first < count + 2 * p.rows; first += BATCH * WARPS) {
        Place places[BATCH];
        const T* from[BATCH];
        Head<HEAD_DIM> heads[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            places[i] = find_place(p, part, position, share, count, first + i * WARPS, queries);
            from[i] = (const T*)p.qkv + ((size_t)places[i].row * all + places[i].head) * HEAD_DIM;
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            heads[i] = load_head<HEAD_DIM>(from[i], p.parts, stride, p.turning, places[i].head, p.heads + p.groups,
                                           position + places[i].row, places[i].to);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (!places[i].to) continue;
            add_rest(heads[i], from[i], p.parts, stride);
            turn_head(heads[i], p.turning, v + warp * HEAD_DIM, places[i].to);
        }
    }
}

// The scores of 16 queries and 16 tokens, scaled, capped, and NOTHING where a query must not look; own: the tokens that
// are the lane's two queries.
__device__ __forceinline__ void score(float (&s)[2][4], const __half* queries, const __half* keys, const Problem& p,
                                      int token, int end, const int (&own)[2]) {
    const int lane = threadIdx.x & 31;
    const __half* rows = queries + (lane & 15) * PITCH + (lane >> 4) * 8;
    const __half* columns = keys + ((lane >> 4) * 8 + (lane & 7)) * PITCH + ((lane >> 3) & 1) * 8;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        u32 a[4], b[4];
        matrices(a, rows + step * 16);
        matrices(b, columns + step * 16);
        multiply(s[0], a, b[0], b[1]);
        multiply(s[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int other = token + n * 8 + (lane & 3) * 2 + (i & 1), mine = own[i >> 1];
            float v = s[n][i] * p.scale;
            if (p.cap > 0) v = p.cap * tanhf(v / p.cap);
            const bool visible = other < end && other <= mine && (p.window <= 0 || other > mine - p.window);
            s[n][i] = visible ? v : NOTHING;
        }
}

__device__ __forceinline__ void absorb(Running& r, float (&s)[2][4], const __half* values) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = fmaxf(fmaxf(s[0][2 * half], s[0][2 * half + 1]), fmaxf(s[1][2 * half], s[1][2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(fmaxf(most, __shfl_xor_sync(~0u, most, 2)), r.most[half]);
        const float keep = __expf(r.most[half] - most);
        r.most[half] = most;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; i++) {
                s[n][i] = s[n][i] > NOTHING ? __expf(s[n][i] - most) : 0;
                sum += s[n][i];
            }
        r.sum[half] = r.sum[half] * keep + sum;
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n++) {
            r.acc[n][2 * half] *= keep;
            r.acc[n][2 * half + 1] *= keep;
        }
    }
    const u32 a[4] = {pair(s[0][0], s[0][1]), pair(s[0][2], s[0][3]), pair(s[1][0], s[1][1]), pair(s[1][2], s[1][3])};
    const __half* at = values + (((lane >> 3) & 1) * 8 + (lane & 7)) * PITCH + (lane >> 4) * 8;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        u32 b[4];
        transposed(b, at + step * 16);
        multiply(r.acc[2 * step], a, b[0], b[1]);
        multiply(r.acc[2 * step + 1], a, b[2], b[3]);
    }
}

// Every warp's sums of `count` queries into shared memory, [WARPS][QUERIES][D], and their (maximum, sum) into `stats`.
__device__ __forceinline__ void gather_warps(Running (&running)[QTILES], int count, float* sums, float2* stats) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    __syncthreads();  // everybody's stages are read: their memory becomes `sums`
#pragma unroll
    for (int q = 0; q < QTILES; q++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (q * 16 + half * 8 >= count) continue;
            Running& r = running[q];
            r.sum[half] += __shfl_xor_sync(~0u, r.sum[half], 1);
            r.sum[half] += __shfl_xor_sync(~0u, r.sum[half], 2);
            const int query = warp * QUERIES + q * 16 + half * 8 + (lane >> 2);
            if ((lane & 3) == 0) stats[query] = make_float2(r.most[half], r.sum[half]);
#pragma unroll
            for (int n = 0; n < 2 * STEPS; n++)
                *(float2*)(sums + query * HEAD_DIM + n * 8 + (lane & 3) * 2) =
                    make_float2(r.acc[n][2 * half], r.acc[n][2 * half + 1]);
        }
    __syncthreads();
}

// Four columns of one query: their weighed sum, and (maximum, sum of weights).
struct Total {
    float4 acc;
    float2 stats;
};

__device__ __forceinline__ Total add_parts(const float* sums, const float2* stats, int count, int query, int column) {
    float most = NOTHING;
#pragma unroll 8
    for (int i = 0; i < count; i++) most = fmaxf(most, stats[i * QUERIES + query].x);
    Total total = {make_float4(0, 0, 0, 0), make_float2(most, 0)};
#pragma unroll 8
    for (int i = 0; i < count; i++) {
        const float2 part = stats[i * QUERIES + query];
        const float weight = __expf(part.x - most);
        const float4 v = *(const float4*)(sums + (i * QUERIES + query) * HEAD_DIM + column);
        total.acc = total.acc + make_float4(weight * v.x, weight * v.y, weight * v.z, weight * v.w);
        total.stats.y += weight * part.y;
    }
    return total;
}

__device__ __forceinline__ void write(const Total& total, const Problem& p, int share, int query, int column) {
    query += first_query(p);
    const float inverse = 1 / total.stats.y;
    const float4 a = total.acc, v = make_float4(a.x * inverse, a.y * inverse, a.z * inverse, a.w * inverse);
    const int4 to = places4(p.places, (group_of(p) * share + query % share) * HEAD_DIM + column);
    put4(p.out, p.places, to, query / share, p.rows, p.heads * HEAD_DIM, v);
}

// True in the block that arrives last, which then sees what all have written.
__device__ __forceinline__ bool is_last(int* arrived, int active) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(arrived, 1) == active - 1;
        if (last) *arrived = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// The parts of all warps, and where there are several blocks of all blocks, to `out`.
__device__ __forceinline__ void finish(const Problem& p, const Part& part, int share, int count, float* sums,
                                       float2* stats) {
    count *= HEAD_DIM / 4;
    float* all = p.partial + (size_t)blockIdx.y * gridDim.x * QUERIES * HEAD_DIM;
    float2* all_stats = p.stats + (size_t)blockIdx.y * gridDim.x * QUERIES;
    for (int i = threadIdx.x; i < count; i += WARPS * 32) {
        const int query = i / (HEAD_DIM / 4), column = i % (HEAD_DIM / 4) * 4;
        const Total total = add_parts(sums, stats, WARPS, query, column);
        if (part.active == 1) {
            write(total, p, share, query, column);
            continue;
        }
        *(float4*)(all + (blockIdx.x * QUERIES + query) * HEAD_DIM + column) = total.acc;
        if (column == 0) all_stats[blockIdx.x * QUERIES + query] = total.stats;
    }
    if (part.active == 1 || !is_last(p.arrived + blockIdx.y, part.active)) return;
    for (int i = threadIdx.x; i < part.active * QUERIES; i += WARPS * 32) ((float2*)sums)[i] = all_stats[i];
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += WARPS * 32) {
        const int query = i / (HEAD_DIM / 4), column = i % (HEAD_DIM / 4) * 4;
        write(add_parts(all, (float2*)sums, part.active, query, column), p, share, query, column);
    }
}

template <typename T>
__device__ __forceinline__ void attend(const Problem& p) {
    extern __shared__ uint4 shared[];
    __shared__ float2 stats[WARPS * QUERIES];
    __shared__ float v[WARPS * HEAD_DIM];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, share = p.heads / p.groups, position = *p.position;
    const Part part = find_part(p, position);
    if (part.first >= part.end) return;
    const __half* keys = p.cache + (size_t)group_of(p) * p.room * HEAD_DIM;
    const __half* values = keys + (size_t)p.groups * p.room * HEAD_DIM;
    __half* queries = (__half*)shared;
    __half* stages = queries + (QUERIES + warp * STAGES * 2 * TILE) * PITCH;
    const int begin = part.first + warp * TILE, step = WARPS * TILE;
    int started = 0;
    auto start = [&](int old) {  // what lies below `old`, up to STAGES - 1 tiles
        for (; started < STAGES - 1; started++) {
            const int token = begin + started * step;
            if (token + TILE > old && token < part.end) return;
            if (token < part.end) fetch(stages + started * 2 * TILE * PITCH, keys, values, token, part.end);
            commit();
        }
    };
    start(position);
    await_predecessor();
    release_successor();
    // one head a warp without the code for four: 4.8 us for one row instead of 6.2
    if (p.rows * (share + 2) <= WARPS) turn_heads<1, T>(p, part, position, share, queries, v);
    else turn_heads<(HEAD_DIM > 128 ? 2 : 4), T>(p, part, position, share, queries, v);
    __syncthreads();
    start(1 << 30);

    int own[QTILES][2];
    Running running[QTILES];
#pragma unroll
    for (int q = 0; q < QTILES; q++) {
        running[q] = {{NOTHING, NOTHING}};
#pragma unroll
        for (int half = 0; half < 2; half++)
            own[q][half] = position + (first_query(p) + q * 16 + half * 8 + (lane >> 2)) / share;
    }
    int stage = 0;
    for (int token = begin; token < part.end; token += step) {
        await_copies<STAGES - 2>();
        const int ahead = token + (STAGES - 1) * step, next = stage == 0 ? STAGES - 1 : stage - 1;
        if (ahead < part.end) fetch(stages + next * 2 * TILE * PITCH, keys, values, ahead, part.end);
        commit();
        const __half* now = stages + stage * 2 * TILE * PITCH;
#pragma unroll
        for (int q = 0; q < QTILES; q++) {
            float s[2][4] = {};
            score(s, queries + q * 16 * PITCH, now, p, token, part.end, own[q]);
            absorb(running[q], s, now + TILE * PITCH);
        }
        __syncwarp();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    await_copies<0>();
    const int count = min(QUERIES, p.rows * share - first_query(p));
    gather_warps(running, count, (float*)shared, stats);
    finish(p, part, share, count, (float*)shared, stats);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) attention_half(const __grid_constant__ Problem p) {
    attend<__half>(p);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) attention_float(const __grid_constant__ Problem p) {
    attend<float>(p);
}
