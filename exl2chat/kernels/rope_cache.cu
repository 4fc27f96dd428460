// Queries, keys and values of many new tokens: head norm, RoPE, and keys and values into the cache. (attention.cu does
// the same for few.)
//
//     q, k: v -> v / sqrt(sum(v^2) + floor^2) * scale (where there is a head norm), then the first R dimensions as two
//     halves (a, b) -> (a * cos0 + b * sin0, b * cos1 + a * sin1); v as it is
//
// layout    qkv      [parts, T, H + 2 G, D] float16 or float32, parts to be added: queries, keys, values
//           turning  see rope.cuh
//           position [1] int32: where the first of the tokens goes
//           q        [T, H, D] float16
//           cache    [2, G, S, D] float16, keys before values: the pages of a sequence follow one another
// launch    grid (ceil((H + 2 G) / WARPS), T), WARPS * 32 threads, a warp a head; D = HEAD_DIM, a macro
// limits    R even, R <= D; position + T <= S, and <= positions
// numerics  float32, results rounded once to float16
// reference attends of exl2chat/ops/reference.py; tests/gpu/test_attention.py

#include "rope.cuh"

constexpr int WARPS = 8;  // blocks of one warp took 120 us for 2048 tokens of 32 / 8 heads of 128

template <typename T>
__device__ __forceinline__ void rope_cache(const T* qkv, int parts, const Turning& turning, const int* position,
                                           __half* q, __half* cache, int heads, int groups, long long room) {
    __shared__ float v[WARPS][HEAD_DIM];
    constexpr int size = HEAD_DIM;
    const int warp = threadIdx.x >> 5, head = blockIdx.x * WARPS + warp, row = blockIdx.y, all = heads + 2 * groups;
    release_successor();
    await_predecessor();
    if (head >= all) return;
    const int place = *position + row;
    // the heads of the cache, keys and values, follow the queries in qkv
    __half* to = head < heads ? q + ((size_t)row * heads + head) * size
                              : cache + ((head - heads) * room + place) * size;
    const size_t stride = (size_t)gridDim.y * all * size;
    qkv += ((size_t)row * all + head) * size;
    auto loaded = load_head<size>(qkv, parts, stride, turning, head, heads + groups, place, true);
    add_rest(loaded, qkv, parts, stride);
    turn_head(loaded, turning, v[warp], to);
}

#define ROPE_CACHE(name, T)                                                                                \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                               \
    name(const T* qkv, int parts, const __grid_constant__ Turning turning, const int* position, __half* q, \
         __half* cache, int heads, int groups, long long room) {                                           \
        rope_cache(qkv, parts, turning, position, q, cache, heads, groups, room);                          \
    }
ROPE_CACHE(rope_cache_half, __half)
ROPE_CACHE(rope_cache_float, float)
