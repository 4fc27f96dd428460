// Scores of a tile of tokens, their weights, and the weighed values of a warp (attention.cu).

#pragma once
#include "attention.cuh"

// What a warp knows of the scores of 8 queries: of a lane those of columns 2 (lane % 4) + {0, 1}; `sum` of its own tokens.
struct Running {
    float most[2], sum[2];
};

// c tanh(s / c) = c - 2 c / (exp(2 s / c) + 1), within 1e-6 c. tanhf is 80 instructions.
__device__ __forceinline__ float soften(float s, float cap) {
    return cap - __fdividef(2 * cap, exp2_fast(__fdividef(2 * LOG2E * s, cap)) + 1);
}

// The scores of 16 tokens and 8 queries in fragments: scaled, capped, to the base 2, and NOTHING where a query must not
// look; own: the tokens that are the lane's two queries. Tokens that all may look at need no comparing.
__device__ __forceinline__ void mask(float (&s)[4], const Problem& p, const Part& part, int token,
                                     const int (&own)[2]) {
    const float scale = p.scale * Cache::UNIT;
    if (p.cap > 0) {
#pragma unroll
        for (int i = 0; i < 4; i++) s[i] = __fmul_rn(LOG2E, soften(__fmul_rn(s[i], scale), p.cap));
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) s[i] = __fmul_rn(s[i], LOG2E * scale);
    }
    if (token + 16 > part.position || p.window > 0)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int behind = own[i & 1] - token - Cache::token(((threadIdx.x & 31) >> 2) + 8 * (i >> 1));
            if (behind < 0 || (p.window > 0 && behind >= p.window)) s[i] = NOTHING;
        }
}

// Every query's scores into weights, as right operands; its sums so far scaled to the new maximum.
__device__ __forceinline__ void weigh(Running& r, Cache::Sums& sums, float (&s)[4], u32 (&weights)[2]) {
    float most[2], keep[2];
#pragma unroll
    for (int e = 0; e < 2; e++) most[e] = fmaxf(r.most[e], fmaxf(s[e], s[2 + e]));
#pragma unroll
    for (int step = 4; step < 32; step *= 2)
#pragma unroll
        for (int e = 0; e < 2; e++) most[e] = fmaxf(most[e], __shfl_xor_sync(~0u, most[e], step));
#pragma unroll
    for (int e = 0; e < 2; e++) {
        keep[e] = exp2_fast(r.most[e] - most[e]);
        r.most[e] = most[e];
        const float base = most[e] > NOTHING ? most[e] - Cache::LIFT : 0;
        s[e] = exp2_fast(s[e] - base);
        s[2 + e] = exp2_fast(s[2 + e] - base);
        r.sum[e] = __fmaf_rn(r.sum[e], keep[e], s[e]) + s[2 + e];
    }
    if (__any_sync(~0u, keep[0] != 1 || keep[1] != 1))
#pragma unroll
        for (int i = 0; i < (int)(sizeof(sums) / 4); i++) ((float*)&sums)[i] *= keep[i & 1];
#pragma unroll
    for (int i = 0; i < 2; i++)
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
                     : "=r"(weights[i]) : "r"(pair(s[2 * i], s[2 * i + 1])));
}
