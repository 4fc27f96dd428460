// Attention of many new tokens over the cache, which already holds them (rope_cache.cu): a chunk of a prompt.
//
//     out[t, h] = softmax(cap(q[t, h] . k[g] * scale) over the tokens that t may look at) . v[g],  g = h / (H / G)
//     token start + t looks at tokens <= start + t, with a window w > 0 only at those > start + t - w;
//     cap(s) = c * tanh(s / c) with a soft cap c > 0, else s
//
// layout    q        [T, H, D] float16
//           cache    [2, G, S, D] float16, keys before values: the pages of a sequence follow one another
//           out      [T, H, D] float16
//           partial  [parts, T * H, D] float32, stats [parts, T * H] float2 (maximum, sum): work space of several parts
// launch    prefill_attention: grid (G * parts, ceil(T * H / G / QUERIES)), QUERIES = 16 MTILES WARPS; WARPS * 32
//           threads. A block has QUERIES queries (t, h) of one group, a warp MTILES times 16 of them, and of the tiles of
//           KEYS tokens that they may look at one of `parts` shares. The blocks with most to do begin first. Shared bytes
//           (QUERIES + 2 KEYS) * 2 * (HEAD_DIM + 8)
//           merge_parts, with several parts: grid (ceil(T * H / 4), 1), 128 threads
// limits    D = HEAD_DIM, a multiple of 16 up to 256; rows aligned to 16 bytes; KEYS a multiple of 16
// numerics  float16 products, float32 sums; softmax in float32 to the base 2, its weights rounded to float16 for their
//           product with v. Tiles begin at multiples of KEYS whatever the chunk, and one without a visible token changes
//           nothing: with one part a query's result is the same to the bit however a prompt is cut into chunks. Parts are
//           added in fixed order: bit-equal at every call
// measured  see below
// reference attends of exl2chat/ops/reference.py; tests/gpu/test_prefill_attention.py
// source    FlashAttention-2 (arXiv 2307.08691); a maximum that stays needs no rescaling (FlashAttention-4)

#include "fragments.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int QUERIES = WARPS * MTILES * 16;
constexpr int PITCH = HEAD_DIM + 8;
constexpr int CHUNKS = HEAD_DIM / 8;  // of 16 bytes in a row
constexpr int STEPS = HEAD_DIM / 16;
constexpr float LOG2E = 1.44269504f;
constexpr float NOTHING = -1.f / 0.f;  // the score of a token that a query must not look at

struct Problem {
    const __half *q, *cache;
    __half* out;
    float* partial;
    float2* stats;
    long long room;
    int start, rows, heads, groups, parts, window;
    float scale, cap;
};

// What a block does: `count` queries of a group, from `first` on, over the tiles [begin, end).
struct Task {
    int share, group, part, first, count, begin, end;
};

__device__ __forceinline__ Task find_task(const Problem& p) {
    Task t;
    t.share = p.heads / p.groups;
    t.group = blockIdx.x % p.groups;
    t.part = blockIdx.x / p.groups;
    t.first = (gridDim.y - 1 - blockIdx.y) * QUERIES;
    t.count = min(QUERIES, p.rows * t.share - t.first);
    const int oldest = p.start + t.first / t.share, newest = p.start + (t.first + t.count - 1) / t.share;
    const int begin = p.window > 0 ? max(0, oldest + 1 - p.window) / KEYS : 0, end = newest / KEYS + 1;
    const int each = (end - begin + p.parts - 1) / p.parts;
    t.begin = begin + t.part * each;
    t.end = min(end, t.begin + each);
    return t;
}

// Where a query is in q and out: its row of [T * H].
__device__ __forceinline__ int row_of(const Problem& p, const Task& t, int query) {
    query += t.first;
    return query / t.share * p.heads + t.group * t.share + query % t.share;
}

// The block's queries, zeros beyond the last.
__device__ __forceinline__ void fetch_queries(__half* to, const Problem& p, const Task& t) {
    for (int i = threadIdx.x; i < QUERIES * CHUNKS; i += THREADS) {
        const int query = i / CHUNKS, column = i % CHUNKS * 8;
        const bool valid = query < t.count;
        copy16(to + query * PITCH + column, p.q + (valid ? (size_t)row_of(p, t, query) * HEAD_DIM + column : 0), valid);
    }
}

// KEYS tokens of keys or values, zeros where there is no token.
__device__ __forceinline__ void fetch_tile(__half* to, const __half* from, int token, int end) {
#pragma unroll
    for (int i = 0; i < (KEYS * CHUNKS + THREADS - 1) / THREADS; i++) {
        const int chunk = i * THREADS + threadIdx.x, row = chunk / CHUNKS, column = chunk % CHUNKS * 8;
        if (KEYS * CHUNKS % THREADS && row >= KEYS) break;
        const bool valid = token + row < end;
        copy16(to + row * PITCH + column, from + (valid ? (size_t)(token + row) * HEAD_DIM + column : 0), valid);
    }
}

// Scores of 16 queries and KEYS tokens, then their weights; in fragments, like the sums of values.
typedef float Scores[KEYS / 8][4];
typedef float Sums[2 * STEPS][4];

// What a lane knows of 16 queries: rows g = lane / 4 and g + 8.
struct Running {
    int own[2];  // the queries' tokens
    float most[2], sum[2];
};

__device__ __forceinline__ void score(Scores (&s)[MTILES], const __half* queries, const __half* keys) {
    const int lane = threadIdx.x & 31;
    queries += (lane & 15) * PITCH + (lane >> 4) * 8;
    keys += ((lane >> 4) * 8 + (lane & 7)) * PITCH + ((lane >> 3) & 1) * 8;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        u32 a[MTILES][4];
#pragma unroll
        for (int m = 0; m < MTILES; m++) matrices(a[m], queries + m * 16 * PITCH + step * 16);
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            u32 b[4];
            matrices(b, keys + n * 16 * PITCH + step * 16);
#pragma unroll
            for (int m = 0; m < MTILES; m++) {
                multiply(s[m][2 * n], a[m], b[0], b[1]);
                multiply(s[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// s = c tanh(s * scale / c) = c - 2 c / (exp(2 s * scale / c) + 1): within 1e-6 c. tanhf takes three times as long.
__device__ __forceinline__ void soften(Scores& s, float scale, float cap) {
    const float factor = 2 * LOG2E * scale / cap;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] = cap - 2 * cap * __fdividef(1, exp2_fast(s[n][i] * factor) + 1);
}

__device__ __forceinline__ void hide(Scores& s, const int (&own)[2], int token, int window) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int behind = own[i >> 1] - (token + n * 8 + (lane & 3) * 2 + (i & 1));
            if (behind < 0 || behind >= window) s[n][i] = NOTHING;
        }
}

// Scores to weights, 2^(unit * (s - maximum)); what was summed so far to the new maximum.
__device__ __forceinline__ void weigh(Scores& s, Running& r, Sums& sums, float unit) {
    float keep[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = r.most[half];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) most = fmaxf(most, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float base = most == NOTHING ? 0 : most * unit;
        keep[half] = exp2_fast(fmaf(r.most[half], unit, -base));
        r.most[half] = most;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; i++) {
                s[n][i] = exp2_fast(fmaf(s[n][i], unit, -base));
                sum += s[n][i];
            }
        r.sum[half] = r.sum[half] * keep[half] + sum;
    }
    if (!__any_sync(~0u, keep[0] < 1 || keep[1] < 1)) return;
#pragma unroll
    for (int n = 0; n < 2 * STEPS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[n][i] *= keep[i >> 1];
}

__device__ __forceinline__ void add_values(Sums (&sums)[MTILES], const Scores (&s)[MTILES], const __half* values) {
    const int lane = threadIdx.x & 31;
    values += (((lane >> 3) & 1) * 8 + (lane & 7)) * PITCH + (lane >> 4) * 8;
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
        u32 a[MTILES][4];
#pragma unroll
        for (int m = 0; m < MTILES; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[m][i] = pair(s[m][2 * k + (i >> 1)][2 * (i & 1)], s[m][2 * k + (i >> 1)][2 * (i & 1) + 1]);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            u32 b[4];
            transposed(b, values + k * 16 * PITCH + step * 16);
#pragma unroll
            for (int m = 0; m < MTILES; m++) {
                multiply(sums[m][2 * step], a[m], b[0], b[1]);
                multiply(sums[m][2 * step + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// 16 queries, from `first` of the block on: what they came to, or of one part its sums.
__device__ __forceinline__ void write(const Problem& p, const Task& t, Running& r, const Sums& sums, int first) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = r.sum[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int query = first + half * 8 + (lane >> 2);
        if (query >= t.count) continue;
        const size_t row = row_of(p, t, query), part = (size_t)t.part * p.rows * p.heads + row;
        const float factor = p.parts == 1 ? 1 / sum : 1;
        if (p.parts > 1 && (lane & 3) == 0) p.stats[part] = make_float2(r.most[half], sum);
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n++) {
            const int column = n * 8 + (lane & 3) * 2;
            const float low = sums[n][2 * half] * factor, high = sums[n][2 * half + 1] * factor;
            if (p.parts == 1) *(u32*)(p.out + row * HEAD_DIM + column) = pair(low, high);
            else *(float2*)(p.partial + part * HEAD_DIM + column) = make_float2(low, high);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) prefill_attention(const __grid_constant__ Problem p) {
    extern __shared__ uint4 shared[];
    release_successor();
    const Task t = find_task(p);
    const int lane = threadIdx.x & 31, mine = (threadIdx.x >> 5) * MTILES * 16;
    const int total = p.start + p.rows, window = p.window > 0 ? p.window : 1 << 30;
    const __half* from_keys = p.cache + (size_t)t.group * p.room * HEAD_DIM;
    const __half* from_values = from_keys + (size_t)p.groups * p.room * HEAD_DIM;
    __half *queries = (__half*)shared, *keys = queries + QUERIES * PITCH, *values = keys + KEYS * PITCH;
    auto token_of = [&](int query) { return p.start + (t.first + min(query, t.count - 1)) / t.share; };
    const int oldest = token_of(mine), newest = token_of(mine + MTILES * 16 - 1);  // of this warp

    Running running[MTILES];
    Sums sums[MTILES] = {};
#pragma unroll
    for (int m = 0; m < MTILES; m++)
        running[m] = {{token_of(mine + m * 16 + (lane >> 2)), token_of(mine + m * 16 + 8 + (lane >> 2))},
                      {NOTHING, NOTHING}};
    await_predecessor();
    fetch_queries(queries, p, t);
    fetch_tile(keys, from_keys, t.begin * KEYS, total);
    for (int tile = t.begin; tile < t.end; tile++) {
        const int token = tile * KEYS;
        const bool some = mine < t.count && token <= newest && token + KEYS - 1 > oldest - window;
        const bool all = token + KEYS - 1 <= oldest && token > newest - window;
        await_copies();
        fetch_tile(values, from_values, token, total);
        Scores s[MTILES] = {};
        if (some) {
            score(s, queries + mine * PITCH, keys);
#pragma unroll
            for (int m = 0; m < MTILES; m++) {
                if (p.cap > 0) soften(s[m], p.scale, p.cap);
                if (!all) hide(s[m], running[m].own, token, window);
                weigh(s[m], running[m], sums[m], p.cap > 0 ? LOG2E : p.scale * LOG2E);
            }
        }
        await_copies();
        if (tile + 1 < t.end) fetch_tile(keys, from_keys, token + KEYS, total);
        if (some) add_values(sums, s, values);
    }
#pragma unroll
    for (int m = 0; m < MTILES; m++) write(p, t, running[m], sums[m], mine + m * 16);
}

// One warp a row of [T * H].
extern "C" __global__ void __launch_bounds__(128) merge_parts(const __grid_constant__ Problem p) {
    release_successor();
    const int rows = p.rows * p.heads, row = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    await_predecessor();
    if (row >= rows) return;
    const float unit = p.cap > 0 ? LOG2E : p.scale * LOG2E;
    float most = NOTHING, sum = 0;
    for (int part = 0; part < p.parts; part++) most = fmaxf(most, p.stats[(size_t)part * rows + row].x);
    for (int part = 0; part < p.parts; part++) {
        const float2 stats = p.stats[(size_t)part * rows + row];
        sum += stats.y * exp2_fast((stats.x - most) * unit);
    }
    for (int column = 2 * lane; column < HEAD_DIM; column += 64) {
        float2 total = make_float2(0, 0);
        for (int part = 0; part < p.parts; part++) {
            const size_t at = (size_t)part * rows + row;
            const float weight = exp2_fast((p.stats[at].x - most) * unit);
            const float2 v = *(const float2*)(p.partial + at * HEAD_DIM + column);
            total = make_float2(total.x + weight * v.x, total.y + weight * v.y);
        }
        *(u32*)(p.out + (size_t)row * HEAD_DIM + column) = pair(total.x / sum, total.y / sum);
    }
}
