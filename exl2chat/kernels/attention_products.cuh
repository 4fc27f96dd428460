// The two products of prefill_attention.cu on tensor cores: with wgmma, which reads its operands from shared memory, where
// WGMMA is 1 (sm_90a, heads of 64, 128 or 256), else with mma.sync.
//
// A warp has MTILES times 16 queries; with wgmma the four warps of a group have 64 together and work together. Rows in
// shared memory lie PITCH apart (fragments.cuh), or for wgmma in panels of 64 columns [HEAD_DIM / 64][rows][64], whose
// chunks of 16 bytes are exchanged within eight rows: the swizzle of 128 bytes.

#pragma once
#include "fragments.cuh"

constexpr int PITCH = HEAD_DIM + (WGMMA ? 0 : 8);
constexpr int STEPS = HEAD_DIM / 16;

// Scores of 16 queries and KEYS tokens, then their weights; the weighed sums of 16 queries. Fragments as in common.cuh.
typedef float Scores[KEYS / 8][4];
typedef float Sums[2 * STEPS][4];

// Where `column`, a multiple of 8, of a row lies in shared memory that holds `rows`.
__device__ __forceinline__ int place(int rows, int row, int column) {
    return WGMMA ? (column / 64 * rows + row) * 64 + ((column / 8 ^ row) & 7) * 8 : row * PITCH + column;
}

// The fragments of weights that multiply tokens 16 k to 16 k + 15.
__device__ __forceinline__ void pack(u32 (&a)[4], const Scores& s, int k) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = pair(s[2 * k + (i >> 1)][2 * (i & 1)], s[2 * k + (i >> 1)][2 * (i & 1) + 1]);
}

#if WGMMA
static_assert(MTILES == 1 && KEYS == 64 && WARPS % 4 == 0 && HEAD_DIM % 64 == 0, "what wgmma is written for");
constexpr int GROUP = 64;  // queries that are worked on together

// Rows from `at` on: swizzle of 128 bytes, 1024 bytes from eight rows to the next eight.
__device__ __forceinline__ unsigned long long descriptor(const __half* at) {
    const u32 address = (u32)__cvta_generic_to_shared(at);
    return (1ull << 30 | 1024 / 16) << 32 | 1024 / 16 << 16 | address >> 4;
}

#define SUMS_1(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define SUMS_8 SUMS_1(0), SUMS_1(1), SUMS_1(2), SUMS_1(3), SUMS_1(4), SUMS_1(5), SUMS_1(6), SUMS_1(7)
#define NAMES_32                                                                                                       \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
    "%30,%31}"

// c[64, 64] += a[64, 16] b[64, 16]^T, both rows of shared memory. Runs until await_products.
__device__ __forceinline__ void multiply_rows(float (*c)[4], unsigned long long a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " NAMES_32 ", %32, %33, 1, 1, 1, 0, 0;"
                 : SUMS_8 : "l"(a), "l"(b));
}

// c[64, 64] += a[64, 16] b[16, 64], a in fragments, b rows of shared memory.
__device__ __forceinline__ void multiply_columns(float (*c)[4], const u32 (&a)[4], unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " NAMES_32 ", {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                 : SUMS_8 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void await_products() {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// s += the queries from `first` on times the keys.
__device__ __forceinline__ void score(Scores (&s)[MTILES], const __half* queries, int first, const __half* keys) {
    const unsigned long long a = descriptor(queries + first * 64), b = descriptor(keys);
    begin_products();
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int panel = step / 4 * 8, chunk = step % 4 * 2;  // in 16 bytes
        multiply_rows(s[0], a + panel * WARPS * 16 + chunk, b + panel * KEYS + chunk);
    }
    await_products();
}

__device__ __forceinline__ void add_values(Sums (&sums)[MTILES], const Scores (&s)[MTILES], const __half* values) {
    const unsigned long long b = descriptor(values);
    u32 a[KEYS / 16][4];
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) pack(a[k], s[0], k);
    begin_products();
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
        for (int panel = 0; panel < HEAD_DIM / 64; panel++)
            multiply_columns(sums[0] + 8 * panel, a[k], b + (panel * KEYS + k * 16) * 8);
    await_products();
}
#else
constexpr int GROUP = MTILES * 16;

__device__ __forceinline__ void score(Scores (&s)[MTILES], const __half* queries, int first, const __half* keys) {
    const int lane = threadIdx.x & 31;
    queries += (first + (lane & 15)) * PITCH + (lane >> 4) * 8;
    keys += ((lane >> 4) * 8 + (lane & 7)) * PITCH + ((lane >> 3) & 1) * 8;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        u32 a[MTILES][4];
#pragma unroll
        for (int m = 0; m < MTILES; m++) matrices(a[m], queries + m * 16 * PITCH + step * 16);
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            u32 b[4];
            matrices(b, keys + n * 16 * PITCH + step * 16);
#pragma unroll
            for (int m = 0; m < MTILES; m++) {
                multiply(s[m][2 * n], a[m], b[0], b[1]);
                multiply(s[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

__device__ __forceinline__ void add_values(Sums (&sums)[MTILES], const Scores (&s)[MTILES], const __half* values) {
    const int lane = threadIdx.x & 31;
    values += (((lane >> 3) & 1) * 8 + (lane & 7)) * PITCH + (lane >> 4) * 8;
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
        u32 a[MTILES][4];
#pragma unroll
        for (int m = 0; m < MTILES; m++) pack(a[m], s[m], k);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            u32 b[4];
            transposed(b, values + k * 16 * PITCH + step * 16);
#pragma unroll
            for (int m = 0; m < MTILES; m++) {
                multiply(sums[m][2 * step], a[m], b[0], b[1]);
                multiply(sums[m][2 * step + 1], a[m], b[2], b[3]);
            }
        }
    }
}
#endif
