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
//   query              a number of a query (lane's number i % 32) as it is to be in shared memory
//   score              adds the products of 16 tokens with 8 N queries, in units of UNIT
//   absorb             adds the values of 16 tokens, `valid` of which count, times weights 2^LIFT times as large
//   complete           Sums to the sums of values
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
    static constexpr int PADDED = SIZE, STEPS = SIZE / 16, SPANS = (STEPS + 1) / 2, PITCH = SIZE + 8, CHUNKS = SIZE / 8;
    static constexpr int HALF = 16 * PITCH * 2;
    static constexpr float UNIT = 1, LIFT = 0;

    template <int N>
    struct Levels {
        __device__ __forceinline__ void find(const __half*) {}
    };
    struct Sums {
        float v[STEPS][4];
    };

    static __device__ __forceinline__ void fetch(u8* stage, const u8* head, int place, int old) {
        const int lane = threadIdx.x & 31;
        const u8* from = head + (size_t)place * SIZE * 2 + lane * 16;
        u8* to = stage + lane / CHUNKS * PITCH * 2 + lane % CHUNKS * 16;
#pragma unroll
        for (int i = 0; i < 16 * CHUNKS / 32; i++) {
            const int chunk = i * 32 + lane, row = chunk / CHUNKS, column = chunk % CHUNKS * 16;
            if (32 % CHUNKS == 0) copy16(to + i * (32 / CHUNKS) * PITCH * 2, from + i * 512, row < old);
            else copy16(stage + row * PITCH * 2 + column, from + i * 512, row < old);
        }
    }
    static __device__ __forceinline__ int token(int row) { return row; }
    static __device__ __forceinline__ int dimension(int m, int i) {
        return 16 * m + ((threadIdx.x & 31) >> 2) + 8 * (i >> 1);
    }
    static __device__ __forceinline__ float query(float x) { return x; }

    // Even and odd steps are summed apart, so that products wait less for each other.
    template <int N>
    static __device__ __forceinline__ void score(float (&s)[N][4], const Levels<N>&, const __half* queries,
                                                 const u8* stage) {
        const int lane = threadIdx.x & 31;
        const __half* keys = (const __half*)stage + (lane & 15) * PITCH + (lane >> 4) * 8;
        queries += (lane & 7) * PITCH + (lane >> 3) * 8;
        float odd[N][4] = {};
#pragma unroll
        for (int span = 0; span < SPANS; span++) {
            u32 a[2][4];
            matrices(a[0], keys + 32 * span);
            if (2 * span + 1 < STEPS) matrices(a[1], keys + 32 * span + 16);
#pragma unroll
            for (int q = 0; q < N; q++) {
                u32 b[4];
                matrices(b, queries + q * 8 * PITCH + 32 * span);
                multiply(s[q], a[0], b[0], b[1]);
                if (2 * span + 1 < STEPS) multiply(odd[q], a[1], b[2], b[3]);
            }
        }
#pragma unroll
        for (int q = 0; q < N; q++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[q][i] += odd[q][i];
    }
    template <int N>
    static __device__ __forceinline__ void absorb(Sums (&sums)[N], const u32 (&weights)[N][2], const u8* stage, int) {
        const int lane = threadIdx.x & 31;
        const __half* values = (const __half*)stage + ((lane >> 4) * 8 + (lane & 7)) * PITCH + (lane >> 3 & 1) * 8;
#pragma unroll
        for (int m = 0; m < STEPS; m++) {
            u32 a[4];
            transposed(a, values + 16 * m);
#pragma unroll
            for (int q = 0; q < N; q++) multiply(sums[q].v[m], a, weights[q][0], weights[q][1]);
        }
    }
    static __device__ __forceinline__ void complete(Sums&) {}

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
    static constexpr int EACH = 32 / T::BLOCK;                   // blocks of a span
    static constexpr float UNIT = 1 << 24;                       // codes are multiplied as they are, as subnormal numbers
    static constexpr float LEVEL = (1 << (BITS - 1)) - 0.5f;     // of code 0 under zero
    static constexpr float LIFT = 8;                             // weights are 2^8 times as large, as they are multiplied by scales

    static __device__ __forceinline__ bool is_of(int block, int span, int octet) {
        return EACH == 1 || (32 * span + 8 * octet) / T::BLOCK == block;
    }

    // What the level of the codes makes of each query, per block: 8 N queries, of a lane columns 2 (lane % 4) + {0, 1}.
    template <int N>
    struct Levels {
        float v[N][T::BLOCKS][2];

        __device__ __forceinline__ void find(const __half* rows) {
            constexpr u32 once = ((1 << BITS) - 1) * 0x00010001, odd = BITS < 8 ? 16 * once : once;  // twice the level
#pragma unroll
            for (int q = 0; q < N; q++)
#pragma unroll
                for (int block = 0; block < T::BLOCKS; block++) {
                    const u32 mask = is_of(block, block / EACH, threadIdx.x & 3) ? ~0u : 0;
                    const u32 a[4] = {once & mask, once & mask, odd & mask, odd & mask};
                    float c[4] = {};
                    u32 b[4];
                    queries(b, rows + q * 8 * PITCH, block / EACH);
                    multiply(c, a, b[0], b[1]);
                    multiply(c, a, b[2], b[3]);
                    v[q][block][0] = -0.5f * c[0];
                    v[q][block][1] = -0.5f * c[1];
                }
        }
    };
    // Of values' codes times weights times scales, and of weights times scales per block, in row `block` of a product.
    struct Sums {
        float v[2 * SPANS][4], weights[4];
    };

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
    // Where raised codes come 16 times too large, queries come as much smaller.
    static __device__ __forceinline__ float query(float x) { return BITS < 8 && threadIdx.x & 2 ? x * (1 / 16.f) : x; }

    static __device__ __forceinline__ void queries(u32 (&b)[4], const __half* rows, int span) {
        const int lane = threadIdx.x & 31;
        const uint4 v = *(const uint4*)(rows + (lane >> 2) * PITCH + 32 * span + (lane & 3) * 8);
        b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
    }
    template <int N>
    static __device__ __forceinline__ void score(float (&s)[N][4], const Levels<N>& levels, const __half* rows,
                                                 const u8* stage) {
        const int lane = threadIdx.x & 31, g = lane >> 2, octet = lane & 3;
#pragma unroll
        for (int span = 0; span < SPANS; span++) {
            u32 v[2][4] = {}, b[N][4];
            if (octet < T::octets(span))
#pragma unroll
                for (int n = 0; n < 2; n++)
                    raise<BITS, 0>(v[n], octet_codes<BITS, SIZE>(stage, span, token(g) + 8 * n, octet));
#pragma unroll
            for (int q = 0; q < N; q++) queries(b[q], rows + q * 8 * PITCH, span);
#pragma unroll
            for (int block = span * EACH; block < min((span + 1) * EACH, T::BLOCKS); block++) {
                const u32 mask = is_of(block, span, octet) ? ~0u : 0;
                const __half* scales = (const __half*)(stage + T::SCALES) + block * T::TOKENS + g;
                const float low = __half2float(scales[0]), high = __half2float(scales[8]);
#pragma unroll
                for (int q = 0; q < N; q++) {
                    const float* level = levels.v[q][block];
                    float c[4] = {level[0], level[1], level[0], level[1]};
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        const u32 a[4] = {v[0][2 * m] & mask, v[1][2 * m] & mask, v[0][2 * m + 1] & mask,
                                          v[1][2 * m + 1] & mask};
                        multiply(c, a, b[q][2 * m], b[q][2 * m + 1]);
                    }
#pragma unroll
                    for (int i = 0; i < 4; i++) s[q][i] = __fmaf_rn(i < 2 ? low : high, c[i], s[q][i]);
                }
            }
        }
    }
    template <int N>
    static __device__ __forceinline__ void absorb(Sums (&sums)[N], const u32 (&weights)[N][2], const u8* stage,
                                                  int valid) {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        u32 there[2];  // what lies behind the last token may be no number
#pragma unroll
        for (int n = 0; n < 2; n++)
            there[n] = (t + 8 * n < valid ? 0xffff : 0) | (t + 8 * n + 4 < valid ? 0xffff0000 : 0);
#pragma unroll
        for (int span = 0; span < SPANS; span++) {
            u32 v[2][4] = {};
            if (g < 2 * T::octets(span))
#pragma unroll
                for (int n = 0; n < 2; n++)
                    raise<BITS, 0>(v[n], pair_codes<BITS, SIZE>(stage, span, t + 8 * n, t + 8 * n + 4, g));
#pragma unroll
            for (int block = span * EACH; block < min((span + 1) * EACH, T::BLOCKS); block++) {
                const u32 mask = is_of(block, span, g >> 1) ? ~0u : 0, one = g == block ? 0x3c003c00 : 0;
                const u32* scales = (const u32*)(stage + T::SCALES) + block * 8 + t;
                const u32 both[2] = {scales[0] & there[0], scales[4] & there[1]}, ones[4] = {one, 0, one, 0};
#pragma unroll
                for (int q = 0; q < N; q++) {
                    u32 b[2];
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        const __half2 scaled = __hmul2(*(const __half2*)&weights[q][n], *(const __half2*)&both[n]);
                        b[n] = *(const u32*)&scaled;
                    }
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        const u32 a[4] = {v[0][2 * m] & mask, v[0][2 * m + 1] & mask, v[1][2 * m] & mask,
                                          v[1][2 * m + 1] & mask};
                        multiply(sums[q].v[2 * span + m], a, b[0], b[1]);
                    }
                    multiply(sums[q].weights, ones, b[0], b[1]);
                }
            }
        }
    }
    // To what the sums would be of the values themselves.
    static __device__ __forceinline__ void complete(Sums& sums) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int m = 0; m < 2 * SPANS; m++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int block = (32 * (m >> 1) + 8 * (lane >> 3)) / T::BLOCK;
                const float level = __fmul_rn(LEVEL, __shfl_sync(~0u, sums.weights[e], (block & 7) * 4 + (lane & 3)));
                sums.v[m][e] = __fmaf_rn(UNIT, sums.v[m][e], -level);
                sums.v[m][2 + e] = __fmaf_rn(BITS < 8 ? UNIT / 16 : UNIT, sums.v[m][2 + e], -level);
            }
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
        const int lane = threadIdx.x & 31, first = max(position - token, 0), count = position + rows - token - first;
        const u8* tile = fresh + (2 * kind + token / 16 - position / 16) * T::BYTES;
#pragma unroll 2
        for (int i = lane; i < T::TOKENS * T::OCTETS; i += 32) {
            const int span = i / (4 * T::TOKENS), one = (i - span * 4 * T::TOKENS) / T::octets(span);
            if ((u32)(one - first) >= (u32)count) continue;
            if (BITS == 8) ((uint2*)stage)[i] = ((const uint2*)tile)[i];
            else ((u32*)stage)[i] = ((const u32*)tile)[i];
            if (BITS == 6) ((u16*)(stage + T::HIGHS))[i] = ((const u16*)(tile + T::HIGHS))[i];
        }
#pragma unroll
        for (int i = lane; i < T::TOKENS * T::BLOCKS; i += 32)
            if ((u32)(Cached::token(i % 16) - first) < (u32)count)
                ((u16*)(stage + T::SCALES))[i] = ((const u16*)(tile + T::SCALES))[i];
        __syncwarp();
    }
};
