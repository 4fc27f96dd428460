// A part of a quantised cache to float16, once for many queries (prefill_attention.cu).
//
// layout    cache    [2, G, S / 16] tiles (cache.cuh) of BITS = 4, 6 or 8 bits
//           pages    as rope_cache.cu has them, or 0
//           rows     [2, G, R, D] float16, still turned
// launch    grid (ceil(R / 16 / 4), 2 G), 128 threads, a warp a tile, from tile `first` on
// limits    D = HEAD_DIM, a multiple of 16; R a multiple of 16; tiles behind the last token are memory, too
// numerics  as cache.cuh
// reference CacheFormat.dequantize of exl2chat/ops/cache_format.py; tests/gpu/test_prefill_attention.py

#include "cache.cuh"

extern "C" __global__ void __launch_bounds__(128)
expand_cache(const u8* cache, const int* pages, __half* rows, long long room, int first, int tiles) {
    typedef Tile<CACHE_BITS, HEAD_DIM> Packed;
    const int tile = blockIdx.x * 4 + (threadIdx.x >> 5);
    await_predecessor();
    release_successor();
    if (tile >= tiles) return;
    const u8* from = cache + (blockIdx.y * (room / 16) + find_token(pages, (first + tile) * 16) / 16) * Packed::BYTES;
    __half* to = rows + ((size_t)blockIdx.y * tiles + tile) * 16 * HEAD_DIM;
    expand_tile<CACHE_BITS, HEAD_DIM>(from, to, HEAD_DIM, 16);
}
