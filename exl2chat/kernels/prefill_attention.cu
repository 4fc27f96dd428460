// Attention of many new tokens over the cache, which already holds them (rope_cache.cu): a chunk of a prompt.
//
//     out[t, h] = softmax(cap(q[t, h] . k[g] * scale) over the tokens that t may look at) . v[g],  g = h / (H / G)
//     token start + t looks at tokens <= start + t, with a window w > 0 only at those > start + t - w;
//     cap(s) = c * tanh(s / c) with a soft cap c > 0, else s
//
// layout    q        [T, H, D] float16; as the keys are turned where TURNED is 1, and out is then turned back
//           cache    [2, G, S, D] float16, or [2, G, S / 16] tiles (cache.cuh) of CACHE_BITS = 4, 6 or 8 bits; keys
//                    before values
//           pages    as rope_cache.cu has them, or 0
//           position, last  with REPEATED = 1, so that a graph can repeat the launch: [1] int32, `start`, and the last
//                    token that there is; those behind it in the chunk are taken for zeros
//           out      [T, H, D] float16
//           partial  [parts, T * H, D] float32, stats [parts, T * H] float2 (maximum, sum): work space of several parts
// launch    prefill_attention: grid (G * parts, ceil(T * H / G / QUERIES)), QUERIES = 16 MTILES WARPS; WARPS * 32
//           threads. A block has QUERIES queries (t, h) of one group, a warp MTILES times 16 of them, and of the tiles of
//           KEYS tokens that they may look at one of `parts` shares. The blocks with most to do begin first. Shared
//           bytes (QUERIES + 4 KEYS) * 2 * PITCH, two tiles at a time, or of a quantised cache one and the next as it is:
//           (QUERIES + 2 KEYS) * 2 * PITCH + 2 KEYS * ROW
//           merge_parts, with several parts: grid (ceil(T * H / 4), 1), 128 threads
// limits    D = HEAD_DIM, a multiple of 16 up to 256, with WGMMA of 64; rows aligned to 16 bytes; KEYS a multiple of 16
// numerics  float16 products, float32 sums; softmax in float32 to the base 2, its weights rounded to float16 for their
//           product with v. Tiles begin at multiples of KEYS whatever the chunk, and one without a visible token changes
//           nothing: with one part a query's result is the same to the bit however a prompt is cut into chunks. Parts are
//           added in fixed order: bit-equal at every call
// measured  NVIDIA H200, 2026-11-21, us, 32 / 8 heads of 128 (torch 2.11's flash attention in brackets): 2048 tokens at
//           the start 101 (164), after 6144 532 (764), that is 452 TFLOP/s; with a window of 1024 106, a soft cap 751;
//           8 / 4 bits, copied to float16 before, 581 / 590. 32 tokens after 8192 37 (44), after 32736 76 (140), 8 / 4
//           bits as they are 46 / 47 and 101 / 102. With mma.sync 2048 tokens take 132 and 777. merge_parts, 33 parts of 32
//           tokens, took 18 before its loads no longer waited for each other
// reference attends of exl2chat/ops/reference.py; tests/gpu/test_prefill_attention.py
// source    FlashAttention-2 (arXiv 2307.08691); a maximum that stays needs no rescaling (FlashAttention-4)

#include "attention_products.cuh"
#include "cache.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int QUERIES = WARPS * MTILES * 16;
constexpr int ENOUGH = WGMMA && HEAD_DIM <= 128 ? 16 / WARPS : 1;  // blocks of a multiprocessor, by their registers
constexpr int CHUNKS = HEAD_DIM / 8;                         // of 16 bytes in a row
constexpr bool QUANTISED = CACHE_BITS < 16;
typedef Tile<CACHE_BITS, HEAD_DIM> Packed;
constexpr int ROW = QUANTISED ? Packed::BYTES / 16 : 2 * HEAD_DIM;  // bytes of a token in the cache
constexpr float LOG2E = 1.44269504f;
constexpr float NOTHING = -1.f / 0.f;  // the score of a token that a query must not look at

struct Problem {
    const __half* q;
    const u8* cache;
    const int *pages, *position, *last;
    __half* out;
    float* partial;
    float2* stats;
    long long room;
    int start, rows, heads, groups, parts, window;
    float scale, cap;
};

// What a block does: `count` queries of a group, from `first` on, over the tiles [begin, end). The chunk begins at the
// token `start`, and there are `total` tokens.
struct Task {
    int share, group, part, first, count, begin, end, start, total;
};

__device__ __forceinline__ Task find_task(const Problem& p) {
    Task t;
    t.share = p.heads / p.groups;
    t.group = blockIdx.x % p.groups;
    t.part = blockIdx.x / p.groups;
    t.first = (gridDim.y - 1 - blockIdx.y) * QUERIES;
    t.count = min(QUERIES, p.rows * t.share - t.first);
    t.start = REPEATED ? *p.position : p.start;  // before the wait: no kernel of the step writes it
    t.total = REPEATED ? *p.last + 1 : p.start + p.rows;
    const int oldest = t.start + t.first / t.share, newest = t.start + (t.first + t.count - 1) / t.share;
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
        const size_t from = valid ? (size_t)row_of(p, t, query) * HEAD_DIM + column : 0;
        copy16(to + place(QUERIES, query, column), p.q + from, valid);
    }
}

// KEYS tokens as they are in the cache, from its token `at` on: rows of float16, zeros where there is no token, or tiles,
// of which some may lie behind the last token.
__device__ __forceinline__ void fetch_tile(void* to, const u8* from, int at, int token, int end) {
    constexpr int each = QUANTISED ? KEYS * ROW / 16 : KEYS * CHUNKS;
    from += (size_t)at * ROW;
#pragma unroll
    for (int i = 0; i < (each + THREADS - 1) / THREADS; i++) {
        const int chunk = i * THREADS + threadIdx.x, row = chunk / CHUNKS, column = chunk % CHUNKS * 8;
        if (each % THREADS && chunk >= each) break;
        if (QUANTISED) copy16((u8*)to + chunk * 16, from + chunk * 16);
        else copy16((__half*)to + place(KEYS, row, column), from + chunk * 16, token + row < end);
    }
}

// Tiles to rows of float16, zeros where there is no token.
__device__ __forceinline__ void expand(__half* to, const u8* from, int token, int end) {
    for (int i = threadIdx.x; i < KEYS * CHUNKS; i += THREADS) {
        const int row = i % 16 + i / (16 * CHUNKS) * 16, octet = i / 16 % CHUNKS;
        const u8* tile = from + row / 16 * 16 * ROW;
        const __half scale = Packed::scale(tile, 8 * octet / Packed::BLOCK, row % 16);
        u32 v[4];
        dequantize<CACHE_BITS>(v, octet_codes<CACHE_BITS, HEAD_DIM>(tile, octet / 4, row % 16, octet % 4),
                               __half2half2(scale));
        *(uint4*)(to + place(KEYS, row, 8 * octet)) =
            token + row < end ? make_uint4(v[0], v[1], v[2], v[3]) : make_uint4(0, 0, 0, 0);
    }
}

// What a lane knows of 16 queries: rows g = lane / 4 and g + 8.
struct Running {
    int own[2];  // the queries' tokens
    float most[2], sum[2];  // the largest score and the sum of weights, to the base 2
};

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

// Scores to weights, 2^(unit * s - maximum); what was summed so far to the new maximum.
__device__ __forceinline__ void weigh(Scores& s, Running& r, Sums& sums, float unit) {
    float keep[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = NOTHING;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) most = fmaxf(most, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(r.most[half], fmaxf(most, __shfl_xor_sync(~0u, most, 2)) * unit);
        const float base = most == NOTHING ? 0 : most;
        keep[half] = exp2_fast(r.most[half] - base);
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

// Sums of turned values to what they are: `rotate` of cache.cuh in fragments.
__device__ __forceinline__ void turn_back(Sums& sums) {
    constexpr int block = Tile<8, HEAD_DIM>::BLOCK;
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < 2 * STEPS; n++)
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            float low = sums[n][i] + sums[n][i + 1], high = sums[n][i] - sums[n][i + 1];
#pragma unroll
            for (int step = 1; step < 4; step *= 2) {
                const float l = __shfl_xor_sync(~0u, low, step), h = __shfl_xor_sync(~0u, high, step);
                low = lane & step ? l - low : low + l;
                high = lane & step ? h - high : high + h;
            }
            sums[n][i] = low * rsqrtf(block);
            sums[n][i + 1] = high * rsqrtf(block);
        }
#pragma unroll
    for (int step = 1; step < block / 8; step *= 2)
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (n & step) continue;
                const float low = sums[n][i], high = sums[n + step][i];
                sums[n][i] = low + high;
                sums[n + step][i] = low - high;
            }
}

// 16 queries, from `first` of the block on: what they came to, or of one part its sums.
__device__ __forceinline__ void write(const Problem& p, const Task& t, Running& r, Sums& sums, int first) {
    const int lane = threadIdx.x & 31;
    if (TURNED) turn_back(sums);
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

// The tokens that the queries of a group look at: some of (oldest - window, newest], all of (newest - window, oldest].
struct Sight {
    int oldest, newest, window;
    // of the tile that begins at `token`
    __device__ __forceinline__ bool some(int token) const {
        return token <= newest && token + KEYS - 1 > oldest - window;
    }
    __device__ __forceinline__ bool all(int token) const {
        return token + KEYS - 1 <= oldest && token > newest - window;
    }
};

__device__ __forceinline__ int token_of(const Problem& p, const Task& t, int query) {
    return t.start + (t.first + min(query, t.count - 1)) / t.share;
}

// The weights of the queries from `first` on for a tile of keys.
__device__ __forceinline__ void weigh_tile(const Problem& p, const Sight& sight, const __half* queries, int first,
                                           const __half* keys, int token, Scores (&s)[MTILES],
                                           Running (&running)[MTILES], Sums (&sums)[MTILES]) {
    score(s, queries, first, keys);
#pragma unroll
    for (int m = 0; m < MTILES; m++) {
        if (p.cap > 0) soften(s[m], p.scale, p.cap);
        if (!sight.all(token)) hide(s[m], running[m].own, token, sight.window);
        weigh(s[m], running[m], sums[m], p.cap > 0 ? LOG2E : p.scale * LOG2E);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, ENOUGH) prefill_attention(const __grid_constant__ Problem p) {
    extern __shared__ __align__(1024) uint4 shared[];
    const Task t = find_task(p);
    const int lane = threadIdx.x & 31, mine = (threadIdx.x >> 5) * MTILES * 16, group = WGMMA ? mine / GROUP * GROUP : mine;
    const Sight sight = {token_of(p, t, group), group < t.count ? token_of(p, t, group + GROUP - 1) : -1,
                         p.window > 0 ? p.window : 1 << 30};
    const u8 *from_keys = p.cache + t.group * p.room * ROW, *from_values = from_keys + p.groups * p.room * ROW;
    __half *queries = (__half*)shared, *rows = queries + QUERIES * PITCH;  // rows: keys, then values of each stage
    u8* packed = (u8*)(rows + 2 * KEYS * PITCH);                           // the same of a quantised cache

    Running running[MTILES];
    Sums sums[MTILES] = {};
#pragma unroll
    for (int m = 0; m < MTILES; m++)
        running[m] = {{token_of(p, t, mine + m * 16 + lane / 4), token_of(p, t, mine + m * 16 + 8 + lane / 4)},
                      {NOTHING, NOTHING}};
    await_predecessor();
    release_successor();
    fetch_queries(queries, p, t);
    int stage = 0;
    auto fetch = [&](int token) {
        if (token >= t.end * KEYS) return;
        __half* to = rows + stage * 2 * KEYS * PITCH;
        const int at = find_token(p.pages, REPEATED ? min(token, (t.total - 1) / KEYS * KEYS) : token);
        fetch_tile(QUANTISED ? (void*)packed : to, from_keys, at, token, t.total);
        fetch_tile(QUANTISED ? (void*)(packed + KEYS * ROW) : to + KEYS * PITCH, from_values, at, token, t.total);
    };
    fetch(t.begin * KEYS);
    for (int token = t.begin * KEYS; token < t.end * KEYS; token += KEYS) {
        const __half *keys = rows + stage * 2 * KEYS * PITCH, *values = keys + KEYS * PITCH;
        await_copies();
        if (QUANTISED) {
            expand(rows, packed, token, t.total);
            expand(rows + KEYS * PITCH, packed + KEYS * ROW, token, t.total);
            publish();
        } else {
            stage ^= 1;
        }
        fetch(token + KEYS);
        if (!sight.some(token)) continue;
        Scores s[MTILES] = {};
        weigh_tile(p, sight, queries, group, keys, token, s, running, sums);
        add_values(sums, s, values);
    }
#pragma unroll
    for (int m = 0; m < MTILES; m++) write(p, t, running[m], sums[m], mine + m * 16);
}

// One warp a row of [T * H]: a lane has some of the parts' sums, then some of the columns. Loads of several parts are on
// their way at once, for a row of 33 parts waits for nothing else.
extern "C" __global__ void __launch_bounds__(128) merge_parts(const __grid_constant__ Problem p) {
    const int rows = p.rows * p.heads, row = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    await_predecessor();
    release_successor();
    if (row >= rows) return;
    float most = NOTHING, sum = 0;
#pragma unroll 1
    for (int part = lane; part < p.parts; part += 32) most = fmaxf(most, p.stats[(size_t)part * rows + row].x);
#pragma unroll
    for (int step = 16; step; step >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
#pragma unroll 1
    for (int part = lane; part < p.parts; part += 32) {
        const float2 stats = p.stats[(size_t)part * rows + row];
        sum += stats.y * exp2_fast(stats.x - most);
    }
#pragma unroll
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    constexpr int PAIRS = (HEAD_DIM + 63) / 64;
    float2 total[PAIRS] = {};
#pragma unroll 8
    for (int part = 0; part < p.parts; part++) {
        const size_t at = (size_t)part * rows + row;
        const float weight = exp2_fast(p.stats[at].x - most);
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const int column = 2 * lane + 64 * i;
            if (column >= HEAD_DIM) break;
            const float2 v = *(const float2*)(p.partial + at * HEAD_DIM + column);
            total[i] = make_float2(total[i].x + weight * v.x, total[i].y + weight * v.y);
        }
    }
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const int column = 2 * lane + 64 * i;
        if (column < HEAD_DIM) *(u32*)(p.out + (size_t)row * HEAD_DIM + column) = pair(total[i].x / sum, total[i].y / sum);
    }
}
