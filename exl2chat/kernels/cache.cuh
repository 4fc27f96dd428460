// The quantised KV cache: keys and values of a head in 4, 6 or 8 bits, as one head's tokens lie in memory.
//
//     stored    y = H x per block of 32 values (of 16 where 32 does not divide D), H: Walsh-Hadamard / sqrt(32)
//               scale = float16(max |y| / 2^(BITS-1)) per block; code = floor(y * (1 / scale)) + 2^(BITS-1), clamped
//     read      y = float16((code - 2^(BITS-1) + 1/2) * scale): never farther than half a step from what was stored
//
// H is its own inverse, and q . k is the same if both are turned: queries are turned as well, keys never back, and of
// the values only what attention makes of them, once.
//
// layout    a tile is 16 tokens of one head's keys (or values) in one run of Tile::BYTES bytes, a multiple of 16:
//               low     [spans][16 tokens][octets of the span][4 bytes, with BITS = 8: 8]
//               high    [spans][16 tokens][octets of the span][2 bytes], with BITS = 6 only
//               scales  [D / BLOCK][16 slots] float16, the tokens in the order 0 4 1 5 2 6 3 7 8 12 9 13 10 14 11 15
//           A span is 32 values, so 4 octets, the last of D = 80 16. An octet holds 8 values x0 .. x7, first the even
//           ones, then the odd: 4 bits each, in the order of the fields x0 x2 x4 x6 x1 x3 x5 x7 from the lowest bit on;
//           with BITS = 8 a byte each; with BITS = 6 the low 4 bits so and the high 2 bits in `high` in the same order.
//           So a lane's share of a product (8 values of a key, 4 of two tokens' values) is one load and comes out as
//           pairs, and the 32 lanes of a warp read consecutive bytes: no bank conflict, no padding.
//           The tiles of a head follow each other: token t is token t % 16 of tile t / 16; 16 tiles are a page.
// numerics  equal bits to exl2chat/ops/cache_format.py, which states the format in torch and is tested against this
// error     root mean square over that of Gaussian numbers: 4 bits 8.9 %, 6 bits 2.2 %, 8 bits 0.55 %. SmolLM2-135M, KL
//           divergence of its predictions over 3000 tokens: 4 bits 0.0755 (without rotation 0.182, rotated over the
//           whole head 0.089, with a zero level in place of the half step 0.078), 6 bits 0.0063 (keys in 8 bits and
//           values in 4, as exllamav2 spends the same: 0.0124), 8 bits 0.0017
// source    the rotation: QuaRot (arXiv 2404.00456)

#pragma once
#include "common.cuh"

constexpr int PAGE = 256;

// Where a token of a sequence lies in a head's memory: in the `pages` of the sequence, or without them in order.
__device__ __forceinline__ int find_token(const int* pages, int token) {
    return pages ? pages[token / PAGE] * PAGE + token % PAGE : token;
}

// One head's tile of 16 tokens in numbers.
template <int BITS, int SIZE>
struct Tile {
    static constexpr int TOKENS = 16;
    static constexpr int BLOCK = SIZE % 32 ? 16 : 32;  // values that share a scale and are turned together
    static constexpr int OCTETS = SIZE / 8, BLOCKS = SIZE / BLOCK, SPANS = (SIZE + 31) / 32;
    static constexpr int LOW = BITS == 8 ? 8 : 4;  // bytes of an octet
    static constexpr int HIGH = BITS == 6 ? 2 : 0;
    static constexpr int HIGHS = TOKENS * OCTETS * LOW;  // where `high` begins, in bytes
    static constexpr int SCALES = HIGHS + TOKENS * OCTETS * HIGH;
    static constexpr int BYTES = SCALES + TOKENS * BLOCKS * 2;

    static __device__ __forceinline__ int octets(int span) { return min(4, OCTETS - 4 * span); }
    // The place of an octet of a token among all, in octets.
    static __device__ __forceinline__ int place(int span, int token, int octet) {
        return TOKENS * 4 * span + token * octets(span) + octet;
    }
    // Where the scale of a token lies among those of a block: in the order of products' rows (attention.cu).
    static __device__ __forceinline__ int slot(int token) { return (token & 8) + 2 * (token & 3) + (token >> 2 & 1); }
    static __device__ __forceinline__ __half scale(const u8* tile, int block, int token) {
        return ((const __half*)(tile + SCALES))[block * TOKENS + slot(token)];
    }
};

// Eight codes: the even and the odd values of an octet, or four values of two tokens. BITS = 8: a byte each, the first
// four in `low`, the others in `high`. Else 4 bits each in the halves of `low`; BITS = 6: 2 bits in bytes 0 and 2 of
// `high`.
struct Codes {
    u32 low, high;
};

// The codes of one octet, 0 <= octet < octets(span). `tile` in shared or global memory.
template <int BITS, int SIZE>
__device__ __forceinline__ Codes octet_codes(const u8* tile, int span, int token, int octet) {
    using T = Tile<BITS, SIZE>;
    const int at = T::place(span, token, octet);
    if constexpr (BITS == 8) {
        const uint2 both = ((const uint2*)tile)[at];
        return {both.x, both.y};
    } else {
        const u32 high = BITS == 6 ? __byte_perm(((const u16*)(tile + T::HIGHS))[at], 0, 0x4140) : 0;
        return {((const u32*)tile)[at], high};
    }
}

// Of two tokens the same four values, those of half an octet: 0 <= half < 2 octets(span).
template <int BITS, int SIZE>
__device__ __forceinline__ Codes pair_codes(const u8* tile, int span, int first, int second, int half) {
    using T = Tile<BITS, SIZE>;
    const int a = 2 * T::place(span, first, 0) + half, b = 2 * T::place(span, second, 0) + half;
    if constexpr (BITS == 8) {
        return {((const u32*)tile)[a], ((const u32*)tile)[b]};
    } else {
        const u32 low = __byte_perm(((const u16*)tile)[a], ((const u16*)tile)[b], 0x5410);
        return {low, BITS == 6 ? (u32)(tile + T::HIGHS)[a] | (u32)(tile + T::HIGHS)[b] << 16 : 0};
    }
}

// (from & mask) | bits, which the compiler makes two instructions of.
__device__ __forceinline__ u32 and_or(u32 from, u32 mask, u32 bits) {
    u32 v;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(from), "r"(mask), "r"(bits));
    return v;
}

// v[j] = the pair j of the codes as float16: with HIGH = 0x64 1024 + code, with HIGH = 0 the subnormal 2^-24 code; unless
// BITS = 8, of odd j 16 times the code, for want of a shift.
template <int BITS, u32 HIGH>
__device__ __forceinline__ void raise(u32 (&v)[4], const Codes& codes) {
    constexpr u32 base = HIGH * 0x01000100;
    if constexpr (BITS == 8) {
        const u32 some = __byte_perm(codes.low, codes.high, 0x5140);
        const u32 others = __byte_perm(codes.low, codes.high, 0x7362);
        v[0] = __byte_perm(some, base | base >> 8, 0x4140);
        v[1] = __byte_perm(some, base | base >> 8, 0x4342);
        v[2] = __byte_perm(others, base | base >> 8, 0x4140);
        v[3] = __byte_perm(others, base | base >> 8, 0x4342);
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = and_or(codes.low >> j / 2 * 8, j % 2 ? 0x00f000f0 : 0x000f000f, base);
        if constexpr (BITS == 6) {
            v[0] = and_or(codes.high << 4, 0x00300030, v[0]);
            v[1] = and_or(codes.high << 6, 0x03000300, v[1]);
            v[2] = and_or(codes.high, 0x00300030, v[2]);
            v[3] = and_or(codes.high << 2, 0x03000300, v[3]);
        }
    }
}

// v[j] = the pair j of the values: of an octet (x0, x1), (x2, x3) ...; of two tokens (a0, b0), (a2, b2) ... or
// (a1, b1), (a3, b3) ... `scale`: that of the first and of the second of a pair.
template <int BITS>
__device__ __forceinline__ void dequantize(u32 (&v)[4], const Codes& codes, __half2 scale) {
    constexpr float middle = 1 << (BITS - 1);
    const __half2 half = __hmul2(scale, __float2half2_rn(0.5f));
    raise<BITS, 0x64>(v, codes);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const __half2 raised = *(const __half2*)&v[j];  // both ways exact
        const __half2 code = BITS == 8 || j % 2 == 0
                                 ? __hsub2(raised, __float2half2_rn(1024 + middle))
                                 : __hfma2(raised, __float2half2_rn(1.f / 16), __float2half2_rn(-64 - middle));
        const __half2 y = __hfma2(code, scale, half);
        v[j] = *(const u32*)&y;
    }
}

// One warp turns a head, of which a lane has the values lane + 32 j; those from SIZE on are 0.
template <int SIZE>
__device__ __forceinline__ void rotate(float (&x)[(SIZE + 31) / 32]) {
    constexpr int block = Tile<8, SIZE>::BLOCK;
#pragma unroll
    for (int step = 1; step < block; step *= 2)
#pragma unroll
        for (int j = 0; j < (SIZE + 31) / 32; j++) {
            const float other = __shfl_xor_sync(~0u, x[j], step);
            x[j] = threadIdx.x & step ? other - x[j] : x[j] + other;
        }
#pragma unroll
    for (int j = 0; j < (SIZE + 31) / 32; j++) x[j] *= block == 32 ? 0.17677669529663687f : 0.25f;
}

// One warp writes a rotated head, of which a lane has the values lane + 32 j, as a token of a tile. `tile` in shared or
// global memory.
template <int BITS, int SIZE>
__device__ __forceinline__ void quantize(const float (&x)[(SIZE + 31) / 32], u8* tile, int token) {
    using T = Tile<BITS, SIZE>;
    constexpr int middle = 1 << (BITS - 1);
    const int lane = threadIdx.x & 31, octet = lane >> 3, field = (lane & 7) >> 1, odd = lane & 1;
#pragma unroll
    for (int span = 0; span < T::SPANS; span++) {
        float most = fabsf(x[span]);
#pragma unroll
        for (int step = 1; step < T::BLOCK; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        const __half rounded = __float2half_rn(most * (1.f / middle));
        const float scale = __half2float(rounded);
        const float inverse = scale > 0 ? __frcp_rn(scale) : 0;
        const int code = min(max((int)floorf(x[span] * inverse) + middle, 0), 2 * middle - 1);
        // the codes of an octet together: each lane's at its place, joined over the lanes
        u32 low = BITS == 8 ? code << 8 * field : (code & 15) << (4 * field + 16 * odd);
        u32 high = BITS == 6 ? code >> 4 << (2 * field + 8 * odd) : 0;
#pragma unroll
        for (int step = BITS == 8 ? 2 : 1; step < 8; step *= 2) {
            low |= __shfl_xor_sync(~0u, low, step);
            if (BITS == 6) high |= __shfl_xor_sync(~0u, high, step);
        }
        if (32 * span + lane >= SIZE) continue;
        const int at = T::place(span, token, octet);
        if (BITS == 8 && (lane & 7) < 2) ((u32*)tile)[2 * at + odd] = low;
        if (BITS != 8 && (lane & 7) == 0) ((u32*)tile)[at] = low;
        if (BITS == 6 && (lane & 7) == 0) ((u16*)(tile + T::HIGHS))[at] = high;
        if (lane % T::BLOCK == 0)
            ((__half*)(tile + T::SCALES))[(32 * span + lane) / T::BLOCK * T::TOKENS + T::slot(token)] = rounded;
    }
}

// One warp copies a token from tile to tile.
template <int BITS, int SIZE>
__device__ __forceinline__ void copy_token(u8* to, const u8* from, int token) {
    using T = Tile<BITS, SIZE>;
    const int octet = threadIdx.x & 31;
    if (octet < T::OCTETS) {
        const int at = T::place(octet >> 2, token, octet & 3);
#pragma unroll
        for (int i = at * (T::LOW / 4); i < (at + 1) * (T::LOW / 4); i++) ((u32*)to)[i] = ((const u32*)from)[i];
        if (BITS == 6) ((u16*)(to + T::HIGHS))[at] = ((const u16*)(from + T::HIGHS))[at];
    }
    if (octet < T::BLOCKS) {
        const int at = octet * T::TOKENS + T::slot(token);
        ((u16*)(to + T::SCALES))[at] = ((const u16*)(from + T::SCALES))[at];
    }
}

// One warp turns a tile into rows of float16, `pitch` numbers apart and aligned to 16 bytes: [16 tokens][SIZE], still
// rotated. Tokens from `valid` on become zeros: nothing that lies there unwritten gets into a product.
template <int BITS, int SIZE>
__device__ __forceinline__ void expand_tile(const u8* tile, __half* to, int pitch, int valid) {
    using T = Tile<BITS, SIZE>;
#pragma unroll
    for (int span = 0; span < T::SPANS; span++)
        for (int i = threadIdx.x & 31; i < T::TOKENS * T::octets(span); i += 32) {
            const int token = i / T::octets(span), octet = i % T::octets(span);
            const __half scale = T::scale(tile, (32 * span + 8 * octet) / T::BLOCK, token);
            u32 v[4];
            dequantize<BITS>(v, octet_codes<BITS, SIZE>(tile, span, token, octet), __half2half2(scale));
            *(uint4*)(to + token * pitch + 32 * span + 8 * octet) =
                token < valid ? make_uint4(v[0], v[1], v[2], v[3]) : make_uint4(0, 0, 0, 0);
        }
}
