// 16 tokens of the cache as decoding reads them: from global to shared memory, to the operands of products. A row of
// the transposed scores is a token, a column a query:
//
//     scores[token, query] = keys[token, value] . queries[query, value], sums[value, query] = values' . weights'
//
// Cached<16, SIZE> is float16, Cached<4, 6 or 8, SIZE> the format of cache.cuh. Both hold
//   HALF               bytes of 16 tokens' keys (or values) in shared memory
//   PADDED             values of a head as the products see them
//   PITCH              of a query in shared memory, in numbers: 8 queries' rows lie in different banks
//   fetch              asks for the 16 tokens at `place` of the cache, of which `old` are there: of float16 the others
//                      become 0, of codes they are undefined
//   token              which of the 16 tokens row `row` of a product is
//   dimension          which value the lane's sums [m][i] are (of queries 2 (lane % 4) + i % 2)
//   keys, values       32 values (one span) of all tokens as two left operands; of values those beyond `end` are 0
//   queries            32 values of 8 queries as two right operands
//   keep               a new token's keys (kind 0) or values (1), row `row` of `rows`, into `fresh`, and where `head` is
//                      given into the cache at token `at`
//   patch              new tokens, which are not in global memory yet, from `fresh` among those that were fetched

#pragma once
#include "cache.cuh"
#include "fragments.cuh"

// Copies asked for since the last `commit` are a group; all but the `PENDING` latest groups have arrived.
__device__ __forceinline__ void commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int PENDING>
__device__ __forceinline__ void await_groups() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
    __syncwarp();
}

template <int BITS, int SIZE>
struct Cached;

template <int SIZE>
struct Cached<16, SIZE> {
    static constexpr int PADDED = SIZE, SPANS = (SIZE + 31) / 32, PITCH = SIZE + 8, CHUNKS = SIZE / 8;
    static constexpr int HALF = 16 * PITCH * 2;
    static constexpr int TOKEN_BYTES = SIZE * 2;

    static __device__ __forceinline__ int fresh_bytes(int rows) { return 2 * rows * PITCH * 2; }

    static __device__ __forceinline__ void fetch(u8* stage, const u8* head, int place, int old) {
        const int lane = threadIdx.x & 31;
        const u8* from = head + (size_t)place * SIZE * 2;
#pragma unroll
        for (int i = 0; i < 16 * CHUNKS / 32; i++) {
            const int chunk = i * 32 + lane, row = chunk / CHUNKS, column = chunk % CHUNKS * 16;
            copy16(stage + row * PITCH * 2 + column, from + (row < old ? chunk * 16 : 0), row < old);
        }
    }
    static __device__ __forceinline__ int token(int row) { return row; }
    static __device__ __forceinline__ int dimension(int m, int i) {
        return 16 * m + ((threadIdx.x & 31) >> 2) + 8 * (i >> 1);
    }
    static __device__ __forceinline__ void queries(u32 (&b)[4], const __half* rows, int span) {
        const int lane = threadIdx.x & 31;
        matrices(b, rows + (lane & 7) * PITCH + 32 * span + (lane >> 3) * 8);
    }
    static __device__ __forceinline__ void keys(u32 (&a)[2][4], const u8* stage, int span) {
        const int lane = threadIdx.x & 31;
        const __half* at = (const __half*)stage + (lane & 15) * PITCH + (lane >> 4) * 8 + 32 * span;
        matrices(a[0], at);
        if (2 * span + 1 < SIZE / 16) matrices(a[1], at + 16);
    }
    static __device__ __forceinline__ void values(u32 (&a)[2][4], const u8* stage, int span, int) {
        const int lane = threadIdx.x & 31;
        const int token = (lane >> 4) * 8 + (lane & 7);
        const __half* at = (const __half*)stage + token * PITCH + (lane >> 3 & 1) * 8 + 32 * span;
        transposed(a[0], at);
        if (2 * span + 1 < SIZE / 16) transposed(a[1], at + 16);
    }
    static __device__ __forceinline__ void keep(const float (&x)[(SIZE + 31) / 32], u8* fresh, u8* head, int kind,
                                                int row, int rows, int, int at) {
        __half* to = (__half*)fresh + (kind * rows + row) * PITCH;
#pragma unroll
        for (int j = 0; j < (SIZE + 31) / 32; j++) {
            const int i = (threadIdx.x & 31) + 32 * j;
            if (i >= SIZE) continue;
            to[i] = __float2half_rn(x[j]);
            if (head) ((__half*)head)[(size_t)at * SIZE + i] = to[i];
        }
    }
    static __device__ __forceinline__ void patch(u8* stage, const u8* fresh, int kind, int token, int position,
                                                 int rows) {
        const int first = max(token, position), count = min(token + 16, position + rows) - first;
        const __half* from = (const __half*)fresh + (kind * rows + first - position) * PITCH;
        __half* to = (__half*)stage + (first - token) * PITCH;
#pragma unroll 1
        for (int i = threadIdx.x & 31; i < count * (PITCH / 8); i += 32) ((uint4*)to)[i] = ((const uint4*)from)[i];
        __syncwarp();
    }
};

template <int BITS, int SIZE>
struct Cached {
    using T = Tile<BITS, SIZE>;
    static constexpr int SPANS = T::SPANS, PADDED = 32 * SPANS, PITCH = PADDED * 2 % 128 ? PADDED : PADDED + 32;
    static constexpr int HALF = T::BYTES;

    static __device__ __forceinline__ int fresh_bytes(int) { return 4 * T::BYTES; }

    static __device__ __forceinline__ void fetch(u8* stage, const u8* head, int place, int old) {
        const u8* from = head + (size_t)(place / 16) * T::BYTES;
        if (old <= 0) return;
#pragma unroll
        for (int i = 0; i < (T::BYTES + 511) / 512; i++) {
            const int at = i * 512 + (threadIdx.x & 31) * 16;
            if (at < T::BYTES) copy16(stage + at, from + at);
        }
    }
    // rows 2 t and 2 t + 1 are tokens t and t + 4: what four lanes load of values lies side by side
    static __device__ __forceinline__ int token(int row) { return (row & 8) + (row >> 1 & 3) + 4 * (row & 1); }
    static __device__ __forceinline__ int dimension(int m, int i) {
        const int g = (threadIdx.x & 31) >> 2;
        return 32 * (m >> 1) + 8 * (g >> 1) + (g & 1) + 4 * (m & 1) + 2 * (i >> 1);
    }
    static __device__ __forceinline__ void queries(u32 (&b)[4], const __half* rows, int span) {
        const int lane = threadIdx.x & 31;
        const uint4 v = *(const uint4*)(rows + (lane >> 2) * PITCH + 32 * span + (lane & 3) * 8);
        b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
    }
    static __device__ __forceinline__ void keys(u32 (&a)[2][4], const u8* stage, int span) {
        const int lane = threadIdx.x & 31, octet = lane & 3, block = (32 * span + 8 * octet) / T::BLOCK;
        u32 v[2][4] = {};
        if (octet < T::octets(span))
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const int row = token(lane >> 2) + 8 * n;
                dequantize<BITS>(v[n], octet_codes<BITS, SIZE>(stage, span, row, octet),
                                 __half2half2(T::scale(stage, block, row)));
            }
#pragma unroll
        for (int i = 0; i < 4; i++) a[i >> 1][i & 1] = v[i & 1][i & 2], a[i >> 1][2 + (i & 1)] = v[i & 1][(i & 2) + 1];
    }
    static __device__ __forceinline__ void values(u32 (&a)[2][4], const u8* stage, int span, int valid) {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, block = (32 * span + 8 * (g >> 1)) / T::BLOCK;
        u32 v[2][4] = {};
        if (g < 2 * T::octets(span))
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const int one = t + 8 * n, two = one + 4;
                const u32 both = ((const u32*)(stage + T::SCALES))[block * 8 + t + 4 * n];
                const u32 scales = both & ((one < valid ? 0xffff : 0) | (two < valid ? 0xffff0000 : 0));
                dequantize<BITS>(v[n], pair_codes<BITS, SIZE>(stage, span, one, two, g), *(const __half2*)&scales);
            }
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) a[m][i] = v[i >> 1][2 * m + (i & 1)];
    }
    // Fresh: tiles [2 kinds][2], the first that of `position`.
    static __device__ __forceinline__ void keep(const float (&x)[(SIZE + 31) / 32], u8* fresh, u8* head, int kind,
                                                int row, int, int position, int at) {
        const int token = position + row;
        u8* tile = fresh + (2 * kind + token / 16 - position / 16) * T::BYTES;
        quantize<BITS, SIZE>(x, tile, token % 16);
        if (!head) return;
        __syncwarp();
        copy_token<BITS, SIZE>(head + (size_t)(at / 16) * T::BYTES, tile, at % 16);
    }
    static __device__ __forceinline__ void patch(u8* stage, const u8* fresh, int kind, int token, int position,
                                                 int rows) {
        const u8* tile = fresh + (2 * kind + token / 16 - position / 16) * T::BYTES;
#pragma unroll 1
        for (int i = max(token, position); i < min(token + 16, position + rows); i++)
            copy_token<BITS, SIZE>(stage, tile, i % 16);
        __syncwarp();
    }
};
