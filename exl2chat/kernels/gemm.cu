// y = x W + bias for some dozens to hundreds of rows of x and up to three packed matrices that share x, decoded on the way
// to the tensor cores: wgmma on sm_90, mma.sync elsewhere.
//
// layout    x        [tiles][rows][32] float16: the rows of K in the order of the tiles (tiles.cuh)
//           out      [parts][rows][width] float32: one partial sum per part of K, to be added in order
//           matrices see tiles.cuh; Matrix.pieces[part * runs + i] in order of K, those without quads last;
//           Matrix.begin is the first of the column tiles of the grid that are this matrix's
// launch    grid (row tiles of ROWS, column tiles of WARPS strips * parts), WARPS * 32 threads, WARPS a multiple of 4;
//           shared bytes stages * slot, slot = 256 * ROWS + WARPS * (512 * most bits + 512 / span least (EXL2 128))
// limits    ROWS 32, 64, 96 or 128; K a multiple of 32; 3 <= stages <= 8; out below 2^31 numbers
// numerics  W as exl2chat.model.dequant rounds it, float16((code - zero) * scale); products exact, float32 sums in the
//           order of K, then parts in order: bit-equal at every call, and for a row whatever rows are beside it as long as
//           `parts` is the same
// reference exl2chat.model.dequant, and a product in float64; tests/gpu/test_gemm.py

#include "tiles.cuh"

typedef unsigned long long u64;

constexpr int THREADS = WARPS * 32;
constexpr int TILE_BYTES = 64 * ROWS;  // 32 of K of every row
constexpr int SCALE_BYTES = SCALE_WORDS * 16;

// Column half nt of the warp's strip times the rows: [nt][4 i + k], number k of C for rows 8 i to 8 i + 7.
typedef float Sums[2][ROWS / 2];

struct Block {
    const Matrix* matrix;
    const Piece* pieces;
    int part, strip, row;  // strip of this warp, past the last one where there is none; row: the first
    int slot;              // bytes of a stage
};

__device__ __forceinline__ Block find_block(const Matrices& all, int parts, int slot) {
    const int tile = blockIdx.y / parts, part = blockIdx.y - tile * parts;
    int i = 0;
    if (all.item[1].strips && tile >= all.item[1].begin) i = 1;
    if (all.item[2].strips && tile >= all.item[2].begin) i = 2;
    const Matrix& m = all.item[i];
    const int strip = (tile - m.begin) * WARPS + (threadIdx.x >> 5);
    return {&m, m.pieces + part * m.runs, part, strip, (int)blockIdx.x * ROWS, slot};
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy16(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
#else
    *(uint4*)to = *(const uint4*)from;
#endif
}

__device__ __forceinline__ void end_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int PENDING>
__device__ __forceinline__ void await_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Until no more than the last `pending` groups of copies are under way.
__device__ __forceinline__ void await_copies(int pending) {
    switch (pending) {
        case 0: return await_copies<0>();
        case 1: return await_copies<1>();
        case 2: return await_copies<2>();
        case 3: return await_copies<3>();
        case 4: return await_copies<4>();
        default: return await_copies<5>();
    }
}

// A slot: x [4 tiles][ROWS][64 bytes], its chunks of 16 bytes exchanged as wgmma's 64-byte swizzle has it, so that eight
// rows of one chunk lie in different banks; then scales and weights [bits][32 lanes] of every warp.
__device__ __forceinline__ u8* weights_of(u8* slot, const Block& b) {
    return slot + 4 * TILE_BYTES + (threadIdx.x >> 5) * ((b.slot - 4 * TILE_BYTES) / WARPS);
}

// The next quad to be fetched, and the stage that it goes to.
struct Cursor {
    int piece, left, tile, stage;  // left: quads of the piece, 0 at the end
    const uint4* weights;          // of this lane
    const u32* scales;

    __device__ __forceinline__ void enter(const Block& b) {
        const Piece& p = b.pieces[piece];
        left = piece < b.matrix->runs ? p.quads : 0;
        if (!left) return;
        const size_t quad = (size_t)min(b.strip, b.matrix->strips - 1) * p.stride;
        const int lane = threadIdx.x & 31;
        weights = b.matrix->weights + p.weights + quad * p.bits * 32 + lane;
        scales = b.matrix->scales + p.scales + quad * (SCALE_WORDS * 4 / p.span) + lane * 4;
        tile = p.tile;
    }

    __device__ __forceinline__ void next(const Block& b, int stages) {
        const Piece& p = b.pieces[piece];
        stage = stage + 1 == stages ? 0 : stage + 1;
        weights += p.bits * 32;
        scales += SCALE_WORDS * 4 / p.span;
        tile += 4;
        if (--left) return;
        piece++;
        enter(b);
    }

    __device__ __forceinline__ void fetch_weights(const Block& b, u8* slot) const {
        const int lane = threadIdx.x & 31, bits = b.pieces[piece].bits;
        u8* to = weights_of(slot, b) + lane * 16;
        if (lane * b.pieces[piece].span < SCALE_WORDS) copy16(to, scales);
#pragma unroll
        for (int c = 0; c < 8; c++)
            if (c < bits) copy16(to + SCALE_BYTES + c * 512, weights + c * 32);
    }

    // Rows past the last repeat it, tiles past the last one, too: their weights are zero.
    __device__ __forceinline__ void fetch_x(const Block& b, u8* slot, const uint4* x, int rows) const {
        const int chunk = threadIdx.x & 3, last = b.matrix->tiles - 1;
#pragma unroll
        for (int first = 0; first < ROWS; first += THREADS / 4) {
            const int row = first + (threadIdx.x >> 2);
            if (ROWS % (THREADS / 4) && row >= ROWS) break;
            const uint4* from = x + min(b.row + row, rows - 1) * 4 + chunk;
            u8* to = slot + row * 64 + (chunk ^ (row >> 1 & 3)) * 16;
#pragma unroll
            for (int j = 0; j < 4; j++) copy16(to + j * TILE_BYTES, from + (size_t)(u32)(min(tile + j, last) * rows) * 4);
        }
    }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define SUMS_4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)
#define NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_32 NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_48 NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES_64 NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA(n, names, inputs, ...)                                                                 \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" names "}, " inputs ", 1, 1, 1, 0;" \
                 : __VA_ARGS__                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// c += a x^T for 16 of K: a as in common.cuh, x from `tile` on. Runs until await_products.
__device__ __forceinline__ void product(float (&c)[ROWS / 2], const u32 (&a)[4], u32 tile, int h) {
    // 512 bytes from eight rows to the next eight, swizzle of 64 bytes; start, where 1 << 16 says nothing
    const u64 b = (32ull | 2u << 30) << 32 | (tile + 32 * h) >> 4 | 1 << 16;
#if ROWS == 32
    WGMMA("32", NAMES_16, "{%16,%17,%18,%19},%20", SUMS_16(0));
#elif ROWS == 64
    WGMMA("64", NAMES_32, "{%32,%33,%34,%35},%36", SUMS_16(0), SUMS_16(16));
#elif ROWS == 96
    WGMMA("96", NAMES_48, "{%48,%49,%50,%51},%52", SUMS_16(0), SUMS_16(16), SUMS_16(32));
#else
    WGMMA("128", NAMES_64, "{%64,%65,%66,%67},%68", SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48));
#endif
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// What threads have copied to shared memory, wgmma reads through another proxy.
__device__ __forceinline__ void publish_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#else

__device__ __forceinline__ void product(float (&c)[ROWS / 2], const u32 (&a)[4], u32 tile, int h) {
    const int lane = threadIdx.x & 31, row = (lane & 7) + (lane >> 4) * 8, chunk = 2 * h + (lane >> 3 & 1);
    const u32 from = tile + row * 64 + (chunk ^ (row >> 1 & 3)) * 16;
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++) {
        u32 b[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(from + i * 1024) : "memory");
        multiply(*(float (*)[4])(c + 8 * i), a, b[0], b[1]);
        multiply(*(float (*)[4])(c + 8 * i + 4), a, b[2], b[3]);
    }
}

__device__ __forceinline__ void begin_products() {}
__device__ __forceinline__ void end_products() {}
template <int PENDING>
__device__ __forceinline__ void await_products() {}
__device__ __forceinline__ void publish_copies() {}

#endif

// The scales of tile j for the columns of this lane.
__device__ __forceinline__ Scales<4> read_scales(const u8* from, int j, int shift) {
    const int g = threadIdx.x >> 2 & 7;
    Scales<4> scales;
#if GPTQ
    scales.at[0] = ((const uint4*)from)[(j >> shift) * 8 + g];
#else
    scales.at[0] = ((const u32*)from)[(g << (2 - shift)) + (j >> shift)];
#endif
    return scales;
}

// c += a quad times x. Registers of one step of 16 rows of K are decoded while the step before is multiplied; the last one
// still is when this returns.
template <int BITS>
__device__ __forceinline__ void multiply_quad(Sums& c, u32 x, const u8* weights, int shift) {
    uint4 chunks[BITS];
#pragma unroll
    for (int i = 0; i < BITS; i++) chunks[i] = *(const uint4*)(weights + SCALE_BYTES + i * 512 + (threadIdx.x & 31) * 16);
    u32 a[2][2][4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const Scales<4> scales = read_scales(weights, j, shift);
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int nt = 0; nt < 2; nt++)
#pragma unroll
                for (int k = 0; k < 4; k++)
                    a[h][nt][k] = mul2(decode<BITS, 4>(chunks, scales, j, 2 * nt + h, k), scales.scale(j, 2 * nt + (k & 1)));
            begin_products();
            product(c[0], a[h][0], x + j * TILE_BYTES, h);
            product(c[1], a[h][1], x + j * TILE_BYTES, h);
            end_products();
            await_products<1>();
        }
    }
}

struct Pipeline {
    u8* slots;
    const uint4* x;
    int rows, stages, stage;  // stage: that is multiplied next
    Cursor fetched;

    __device__ __forceinline__ u8* slot(const Block& b, int stage) const { return slots + stage * b.slot; }

    // The first quads: weights, which no earlier kernel writes, at once; x when the one before has ended.
    __device__ __forceinline__ void begin(const Block& b) {
        Cursor at = fetched;
        for (int i = 0; i < stages - 2 && at.left; i++) {
            at.fetch_weights(b, slot(b, at.stage));
            at.next(b, stages);
        }
        await_predecessor();
        for (int i = 0; i < stages - 2; i++) {
            if (fetched.left) {
                fetched.fetch_x(b, slot(b, fetched.stage), x, rows);
                fetched.next(b, stages);
            }
            end_copies();
        }
    }

    // The slot of the next quad, filled. Fetches another into that of the quad before the last: all warps are done with
    // it, while products of the last may still run.
    __device__ __forceinline__ u8* next(const Block& b) {
        await_copies(stages - 3);
        publish_copies();
        meet();
        if (fetched.left) {
            fetched.fetch_weights(b, slot(b, fetched.stage));
            fetched.fetch_x(b, slot(b, fetched.stage), x, rows);
            fetched.next(b, stages);
        }
        end_copies();
        u8* filled = slot(b, stage);
        stage = stage + 1 == stages ? 0 : stage + 1;
        return filled;
    }
};

template <int BITS>
__device__ __forceinline__ void multiply_piece(Sums& c, const Block& b, const Piece& p, Pipeline& pipeline) {
    const int shift = p.span >> 1, quads = p.quads;
    for (int q = 0; q < quads; q++) {
        u8* slot = pipeline.next(b);
        multiply_quad<BITS>(c, shared_address(slot), weights_of(slot, b), shift);
    }
    await_products<0>();
}

__device__ __forceinline__ void write(const Sums& c, const Block& b, float* out, int rows, int width) {
    const Matrix& m = *b.matrix;
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int column = b.strip * 32 + n * 8 + (lane >> 2);
        if (column >= m.columns) return;
        const float bias = m.bias && b.part == 0 ? m.bias[column] : 0;
        float* to = out + (size_t)b.part * rows * width + m.offset + column;
#pragma unroll
        for (int i = 0; i < ROWS / 4; i++) {
            const int row = b.row + (i >> 1) * 8 + (lane & 3) * 2 + (i & 1);
            if (row < rows) to[(size_t)row * width] = c[n >> 1][(i >> 1) * 4 + (n & 1) * 2 + (i & 1)] + bias;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gemm(const __grid_constant__ Matrices matrices, const uint4* x, float* out, int rows, int width, int parts, int stages,
     int slot) {
    extern __shared__ __align__(1024) u8 slots[];
    release_successor();
    const Block b = find_block(matrices, parts, slot);
    Pipeline pipeline = {slots, x, rows, stages, 0, {}};
    pipeline.fetched.enter(b);
    pipeline.begin(b);
    Sums c = {};
    for (int i = 0; i < b.matrix->runs && b.pieces[i].quads; i++) {
        const Piece& p = b.pieces[i];
        switch (p.bits) {
            case 2: multiply_piece<2>(c, b, p, pipeline); break;
            case 3: multiply_piece<3>(c, b, p, pipeline); break;
            case 4: multiply_piece<4>(c, b, p, pipeline); break;
#if !GPTQ
            case 5: multiply_piece<5>(c, b, p, pipeline); break;
            case 6: multiply_piece<6>(c, b, p, pipeline); break;
#endif
            default: multiply_piece<8>(c, b, p, pipeline);
        }
    }
    write(c, b, out, rows, width);
}
