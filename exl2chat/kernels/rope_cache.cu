// Queries, keys and values of many new tokens: head norm, RoPE, and keys and values into the cache. (attention.cu does
// the same for few.)
//
//     q, k: v -> v / sqrt(sum(v^2) + floor^2) * scale (where there is a head norm), then the first R dimensions as two
//     halves (a, b) -> (a * cos0 + b * sin0, b * cos1 + a * sin1); v as it is
//
// layout    qkv      [parts, T, H + 2 G, D] float16 or float32, parts to be added: queries, keys, values
//           turning  see rope.cuh
//           position [1] int32: where the first of the tokens goes; pages [most] int32: page i of the sequence is page
//                    pages[i] of the cache, or 0 where they follow one another; last [1] int32: the position of the
//                    last token, or 0: queries behind it are turned as that one, keys and values not written
//           q        [T, H, D] float16, rotated as the keys are where the cache is quantised
//           cache    CACHE_BITS = 16: [2, G, S, D] float16, keys before values; 4, 6, 8: [2, G, S / 16] tiles
//                    (cache.cuh). `stride`: bytes from group to group
// launch    grid (ceil((H + 2 G) / WARPS), T), WARPS * 32 threads, a warp a head; D = HEAD_DIM and CACHE_BITS, macros
// limits    R even, R <= D; position + T <= S, and <= positions
// numerics  float32, results rounded once, to float16 or to codes
// reference attends of exl2chat/ops/reference.py; tests/gpu/test_attention.py

#include "cache.cuh"
#include "rope.cuh"

constexpr int WARPS = 8;  // blocks of one warp took 120 us for 2048 tokens of 32 / 8 heads of 128

// Where a warp's head goes: q, or a token of the cache, whose heads follow the queries in qkv.
struct Target {
    __half* q;
    u8* cache;
    long long stride;
    const int *pages, *last;
};

__device__ __forceinline__ void store(const float (&x)[(HEAD_DIM + 31) / 32], const Target& to, int head, int heads,
                                      int row, int place) {
    const bool query = head < heads;
    if (!query) place = find_token(to.pages, place);
    u8* cached = to.cache + (head - heads) * to.stride;
    if constexpr (CACHE_BITS < 16) {
        if (!query) {
            quantize<CACHE_BITS, HEAD_DIM>(x, cached + place / 16 * Tile<CACHE_BITS, HEAD_DIM>::BYTES, place % 16);
            return;
        }
    }
    __half* rows = query ? to.q + ((size_t)row * heads + head) * HEAD_DIM : (__half*)cached + (size_t)place * HEAD_DIM;
#pragma unroll
    for (int j = 0; j < (HEAD_DIM + 31) / 32; j++) {
        const int i = (threadIdx.x & 31) + 32 * j;
        if (i < HEAD_DIM) rows[i] = __float2half_rn(x[j]);
    }
}

template <typename T>
__device__ __forceinline__ void rope_cache(const T* qkv, int parts, const Turning& turning, const int* position,
                                           const Target& to, int heads, int groups) {
    __shared__ float v[WARPS][HEAD_DIM];
    const int warp = threadIdx.x >> 5, head = blockIdx.x * WARPS + warp, row = blockIdx.y, all = heads + 2 * groups;
    await_predecessor();
    release_successor();
    if (head >= all) return;
    const int last = to.last ? *to.last : *position + row, place = min(*position + row, last);
    const size_t stride = (size_t)gridDim.y * all * HEAD_DIM;
    qkv += ((size_t)row * all + head) * HEAD_DIM;
    Head<HEAD_DIM> h;
    load_values(h, qkv, parts, stride);
    load_turning(h, turning, head, heads + groups, place);
    add_rest(h, qkv, parts, stride);
    turn_head(h, turning, v[warp]);
    if (CACHE_BITS < 16) rotate<HEAD_DIM>(h.x);
    if (head < heads || *position + row <= last) store(h.x, to, head, heads, row, place);
}

#define ROPE_CACHE(name, T)                                                                                \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                               \
    name(const T* qkv, int parts, const __grid_constant__ Turning turning, const int* position,            \
         const int* pages, const int* last, __half* q, u8* cache, long long stride, int heads,             \
         int groups) {                                                                                     \
        rope_cache(qkv, parts, turning, position, Target{q, cache, stride, pages, last}, heads, groups);   \
    }
ROPE_CACHE(rope_cache_half, __half)
ROPE_CACHE(rope_cache_float, float)
