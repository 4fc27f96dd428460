// Packed weights as the kernels read them, and their decoding. Packed by exl2chat/ops/tiles.py.
//
// A tile is 32 columns x 32 rows (of K, sorted by width), four A fragments f = 2 (column / 16) + (row / 16 % 2) of
// mma.m16n8k16; a quad is four tiles j below one another. Of a quad of b bits each lane holds 128 codes, numbered
// v = ((4 j + f) 4 + a) 2 + pair with a the register and pair the half of it, in b chunks of 16 bytes:
//
//     quad = [chunk 0: lane 0 .. lane 31][chunk 1: ...] ... [chunk b - 1], 512 bytes each
//     weights = [run of one width][strip of 32 columns][quad]
//
// Codes are split into planes of 4, 2 and 1 bits (8 bits: one plane of bytes) so that a code lies within one half-word
// and one shift serves many; bit positions within a 32-bit word, + 16 for the second of a pair:
//
//     bits  plane   codes per word   position of code (f, a)
//     4 5 6  4 low   8  (a, pair)     4 a
//     5      1 high  32 (f, a, pair)  (a odd ? 8 : 4) + s,  s = -4 -3 -2 -1 4 5 6 7 at 2 f + a / 2
//     6      2 high  16 (f % 2, ...)  (a odd ? 8 : 4) + s,  s = -4 -2 4 6 at 2 (f % 2) + a / 2
//     2 3    2 low   16 (f % 2, ...)  2 a + 8 (f % 2)
//     3      1 high  32 (f, a, pair)  2 a + 2 + s,  s = -2 -1 6 7 at f
//     8      8       4  (a % 2, pair) 8 (a % 2)
//
// A code q at bit k of a half 0x6400 is the float16 1024 + 2^k q, and fma(that, 2^-k, -(1024 / 2^k + zero)) is q - zero
// exactly. (The magic number is that of Kim et al. 2022, arXiv:2211.10017.)
//
// Scales, per `span` tiles (1, 2 or 4) of a quad and per g = column % 8, for the columns g, g + 8, g + 16, g + 24:
//     EXL2  u32 [run][strip][quad][g][4 / span]: codes of 4 bits at bits 0, 16, 4, 20; bytes 1 and 3 the float16 unit.
//           scale = float16((code + 1)^2 unit), rounded once, as the format defines it; zero = 2^(b - 1)
//     GPTQ  uint4 [run][strip][quad][4 / span][g]: float16 scale | float16 zero << 16 of each column

#pragma once
#include "common.cuh"

// What some warps of a block multiply (gemv.cu), or a run of quads of one width (reconstruct.cu): `quads` of every strip,
// which lie `stride` quads after those of the strip before.
struct Piece {
    u32 weights;  // where the first quad begins, in chunks of 16 bytes
    u32 scales;   // where its scales begin, in u32
    u16 tile, quads, stride;
    u8 bits, span;
    u8 warp, warps;  // first warp of the block, and how many
    u16 unused;
};

// Strips of 32 columns: for every run of one width all strips, one after the other.
struct Matrix {
    const uint4* weights;
    const u32* scales;
    const float* bias;    // [columns], or null
    int strips, columns;  // columns of the result; the last strip may have more
    int offset;           // of the first column in the result
    int tiles;
    int begin, split;     // first block; log2 of the parts that K is cut into
    int runs;             // pieces of a part, the last may have no warps
    int unused;
    Piece pieces[48];
};

struct Matrices {
    Matrix item[3];
};

__device__ __forceinline__ constexpr u32 pack2(u32 half) { return half | half << 16; }

// The bits of -n as float16, n an integer up to 2048.
__device__ __forceinline__ u32 minus(int n) {
    const int exponent = 31 - __clz(n);
    return 0x8000u | (15 + exponent) << 10 | (((u32)n << 10 >> exponent) & 0x3ff);
}

__device__ __forceinline__ u32 merge(u32 x, u32 mask, u32 into) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(x), "r"(mask), "r"(into));
    return r;
}

__device__ __forceinline__ u32 add2(u32 a, u32 b) {
    u32 r;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

__device__ __forceinline__ u32 shifted(u32 x, int right) { return right >= 0 ? x >> right : x << -right; }

__device__ __forceinline__ u32 word(const uint4* chunks, int index) {
    const uint4& c = chunks[index >> 2];
    return (index & 3) == 0 ? c.x : (index & 3) == 1 ? c.y : (index & 3) == 2 ? c.z : c.w;
}

// The half-words 0x6400 | code << `position` of register a of fragment f of tile j.
template <int BITS>
__device__ __forceinline__ u32 biased(const uint4* chunks, int j, int f, int a) {
    const u32 magic = 0x64006400u;
    if (BITS == 8) {
        const u32 w = word(chunks, 8 * j + 2 * f + (a >> 1));
        return __byte_perm(w, 0x64646464u, a & 1 ? 0x4341 : 0x4240);
    }
    if (BITS < 4) {
        const u32 w = word(chunks, 2 * j + (f >> 1));
        const u32 low = merge(f & 1 ? w >> 8 : w, 0x00030003u << (2 * a), magic);
        if (BITS == 2) return low;
        const int s = f < 2 ? f - 2 : f + 4;
        return merge(shifted(word(chunks + 2, j), s), 0x00040004u << (2 * a), low);
    }
    const u32 w = word(chunks, 4 * j + f);
    const u32 low = merge(a & 2 ? w >> 8 : w, a & 1 ? 0x00f000f0u : 0x000f000fu, magic);
    if (BITS == 4) return low;
    if (BITS == 5) {
        const int i = 2 * f + (a >> 1), s = i < 4 ? i - 4 : i;
        return merge(shifted(word(chunks + 4, j), s), a & 1 ? 0x01000100u : 0x00100010u, low);
    }
    const int i = 2 * (f & 1) + (a >> 1), s = i < 2 ? 2 * i - 4 : 2 * i;
    return merge(shifted(word(chunks + 4, 2 * j + (f >> 1)), s), a & 1 ? 0x03000300u : 0x00300030u, low);
}

// As `biased` without the magic number: a code q at bit k of a half-word is the subnormal float16 2^(k - 24) q, exact on
// tensor cores, one instruction for two codes. k = offset(a), the same for a and a + 2, which lie in one column.
template <int BITS>
__device__ __forceinline__ u32 bare(const uint4* chunks, int j, int f, int a) {
    if (BITS == 8) {
        const u32 w = word(chunks, 8 * j + 2 * f + (a >> 1));
        return __byte_perm(w, 0, a & 1 ? 0x4341 : 0x4240);
    }
    if (BITS < 4) {
        const int right = 8 * (f & 1) + 4 * (a >> 1);
        const u32 low = word(chunks, 2 * j + (f >> 1)) >> right & 0x00030003u << 2 * (a & 1);
        if (BITS == 2) return low;
        const int s = (f < 2 ? f - 2 : f + 4) + 4 * (a >> 1);
        return merge(shifted(word(chunks + 2, j), s), 0x00040004u << 2 * (a & 1), low);
    }
    const u32 w = word(chunks, 4 * j + f);
    const u32 low = (a & 2 ? w >> 8 : w) & (a & 1 ? 0x00f000f0u : 0x000f000fu);
    if (BITS == 4) return low;
    if (BITS == 5) {
        const int i = 2 * f + (a >> 1), s = i < 4 ? i - 4 : i;
        return merge(shifted(word(chunks + 4, j), s), a & 1 ? 0x01000100u : 0x00100010u, low);
    }
    const int i = 2 * (f & 1) + (a >> 1), s = i < 2 ? 2 * i - 4 : 2 * i;
    return merge(shifted(word(chunks + 4, 2 * j + (f >> 1)), s), a & 1 ? 0x03000300u : 0x00300030u, low);
}

template <int BITS>
__device__ constexpr int offset(int a) {
    return BITS == 8 || !(a & 1) ? 0 : BITS < 4 ? 2 : 4;
}

template <int BITS>
__device__ constexpr int position(int a) {
    return BITS == 8 ? 0 : BITS < 4 ? 2 * a : 4 * (a & 1);
}

#if GPTQ

template <int SPAN>
struct Scales {
    uint4 at[4 / SPAN];

    __device__ __forceinline__ void load(const u32* quad, int g) {
#pragma unroll
        for (int i = 0; i < 4 / SPAN; i++) at[i] = ((const uint4*)quad)[i * 8 + g];
    }
    __device__ __forceinline__ u32 zero(int j, int column) const {
        return __byte_perm(word(at + j / SPAN, column), 0, 0x3232);
    }
    __device__ __forceinline__ float zero_point(int j, int column, int) const {
        const u32 both = zero(j, column);
        return __low2float(*(const __half2*)&both);
    }
    // The scale of column g + 8 `column`, twice.
    __device__ __forceinline__ u32 scale(int j, int column) const {
        return __byte_perm(word(at + j / SPAN, column), 0, 0x1010);
    }
};

constexpr int SCALE_WORDS = 32;  // u32 per quad and span

#else

template <int SPAN>
struct Scales {
    u32 at[4 / SPAN];

    __device__ __forceinline__ void load(const u32* quad, int g) {
        if (SPAN == 4) at[0] = quad[g];
        if (SPAN == 2) *(uint2*)at = ((const uint2*)quad)[g];
        if (SPAN == 1) *(uint4*)at = ((const uint4*)quad)[g];
    }
    __device__ __forceinline__ float zero_point(int, int, int bits) const { return 1 << (bits - 1); }
    __device__ __forceinline__ u32 scale(int j, int column) const {
        const u32 s = at[j / SPAN];
        const u32 root = add2(merge(column & 2 ? s >> 4 : s, 0x000f000fu, 0x64006400u), pack2(minus(1023)));
        const u32 both = mul2(mul2(root, root), __byte_perm(s, 0, 0x3131));
        return __byte_perm(both, 0, column & 1 ? 0x3232 : 0x1010);
    }
};

constexpr int SCALE_WORDS = 8;

#endif

// The tile after which chunk c of a quad is used up, for loads that refill it.
template <int BITS>
__device__ constexpr int last_tile(int c) {
    return BITS == 8 ? c / 2 : BITS < 4 ? (c < 2 ? 2 * c + 1 : 3) : c < 4 ? c : BITS == 5 ? 3 : 2 * (c - 4) + 1;
}

// Register a of fragment f of tile j: two codes less their zero point, as float16.
template <int BITS, int SPAN>
__device__ __forceinline__ u32 decode(const uint4* chunks, const Scales<SPAN>& scales, int j, int f, int a) {
    const int k = position<BITS>(a);
    const u32 code = biased<BITS>(chunks, j, f, a);
#if GPTQ
    const u32 shift = add2(pack2(minus(1024 >> k)), scales.zero(j, (f >> 1) * 2 + (a & 1)) ^ 0x80008000u);
#else
    const u32 shift = pack2(minus((1024 >> k) + (1 << (BITS - 1))));
#endif
    return k ? fma2(code, pack2((15 - k) << 10), shift) : add2(code, shift);
}
