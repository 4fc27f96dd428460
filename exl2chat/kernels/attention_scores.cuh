// Scores of a tile of tokens, their weights, and the weighed values of a warp (attention.cu).

#pragma once
#include "attention.cuh"

// What a warp knows of 8 queries: of a lane those of columns 2 (lane % 4) + {0, 1}; `sum` and `acc` of its own tokens
// and values (Cache::dimension).
struct Running {
    float most[2], sum[2];
    float acc[MTILES][4];
};

// c tanh(s / c) = c - 2 c / (exp(2 s / c) + 1), within 1e-6 c. tanhf is 80 instructions.
__device__ __forceinline__ float soften(float s, float cap) {
    return cap - 2 * cap * __fdividef(1, __expf(2 * s / cap) + 1);
}

// The scores of 16 tokens and 8 queries in fragments: scaled, capped, and NOTHING where a query must not look; own: the
// tokens that are the lane's two queries. Tokens that all may look at need no comparing.
__device__ __forceinline__ void mask(float (&s)[4], const Problem& p, const Part& part, int token,
                                     const int (&own)[2]) {
#pragma unroll
    for (int i = 0; i < 4; i++) s[i] *= p.scale;
    if (p.cap > 0)
#pragma unroll
        for (int i = 0; i < 4; i++) s[i] = soften(s[i], p.cap);
    if (token + 16 > part.position || p.window > 0)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int behind = own[i & 1] - token - Cache::token(((threadIdx.x & 31) >> 2) + 8 * (i >> 1));
            if (behind < 0 || (p.window > 0 && behind >= p.window)) s[i] = NOTHING;
        }
}

// Every query's scores into weights, as right operands; its sums so far scaled to the new maximum.
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
        r.sum[e] *= keep[e];
#pragma unroll
        for (int i = e; i < 4; i += 2) {
            s[i] = s[i] > NOTHING ? __expf(s[i] - most) : 0;
            r.sum[e] += s[i];
        }
    }
    if (__any_sync(~0u, keep[0] != 1 || keep[1] != 1))
#pragma unroll
        for (int m = 0; m < MTILES; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) r.acc[m][i] *= keep[i & 1];
#pragma unroll
    for (int i = 0; i < 2; i++)
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
                     : "=r"(weights[i]) : "r"(pair(s[2 * i], s[2 * i + 1])));
}

// The products of a tile's keys with all queries. Even and odd steps are summed apart, so that products wait less for
// each other.
__device__ __forceinline__ void score(float (&s)[QTILES][4], const __half* queries, const u8* keys) {
    float odd[QTILES][4] = {};
#pragma unroll
    for (int span = 0; span < Cache::SPANS; span++) {
        u32 a[2][4];
        Cache::keys(a, keys, span);
#pragma unroll
        for (int q = 0; q < QTILES; q++) {
            u32 b[4];
            Cache::queries(b, queries + q * 8 * Cache::PITCH, span);
            multiply(s[q], a[0], b[0], b[1]);
            if (2 * span + 1 < MTILES) multiply(odd[q], a[1], b[2], b[3]);
        }
    }
#pragma unroll
    for (int q = 0; q < QTILES; q++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[q][i] += odd[q][i];
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
