// y = x W + bias for some dozens to hundreds of rows of x and up to three packed matrices that share x, decoded on the
// way to the tensor cores: wgmma on sm_90, mma.sync elsewhere.
//
// layout    x        [tiles][rows][32] float16: the rows of K in the order of the tiles (tiles.cuh)
//           out      [parts][rows][width] float32: one partial sum per part of K, to be added in order
//           matrices see tiles.cuh; Matrix.pieces[part * runs + i] in order of K, those without quads last;
//           Matrix.begin is the first of the column tiles of the grid that are this matrix's
// launch    grid (row tiles of ROWS, column tiles of WARPS strips * parts), WARPS * 32 + 128 threads, WARPS 4 or 8;
//           shared bytes stages * slot, slot = 256 * ROWS + WARPS * (512 * most bits + 128 (EXL2) or 512 (GPTQ))
// limits    sm_80 and newer; ROWS 32, 64, 96 or 128; K a multiple of 32; 2 <= stages <= 8
// numerics  W as exl2chat.model.dequant rounds it, float16((code - zero) * scale); products exact, float32 sums in the
//           order of K, then parts in order: bit-equal at every call, and for a row whatever rows are beside it as long
//           as `parts` is the same. Against float64 on W: 1.5e-7 to 3.5e-7 (rms over rms, K = 2048). A scale per group
//           in float32, as gemv.cu has it, would need a second set of sums, for which there are no registers
// measured  H200, 2026-11-21, 8B shapes at 4.1 bits, us for 32 / 64 / 128 / 256 rows: q/k/v 11.6, 13.1, 16.1, 30.2;
//           o 8.6, 10.0, 13.3, 18.7; gate/up 40.6, 48.5, 58.2, 113.6 (529 TFLOP/s); down 20.7, 24.2, 30.4, 52.6; all
//           128 of a model 2.61, 3.07, 3.77, 6.88 ms, where torch.mm in float16 takes 4.05, 4.10, 5.55, 5.93. A block
//           takes 1.15 us for a quad of 32 rows and 1.64 us for one of 128, of which wgmma needs 0.3 and 1.2
// reference exl2chat.model.dequant, and a product in float64; tests/gpu/test_gemm.py

#include "tiles.cuh"

typedef unsigned long long u64;

constexpr int PRODUCERS = 4;  // warps that copy, behind the WARPS that multiply
constexpr int TILE_BYTES = 64 * ROWS;  // 32 of K of every row
constexpr int SCALE_BYTES = SCALE_WORDS * 16;

// Column half nt of the warp's strip times the rows: [nt][4 i + k], number k of C for rows 8 i to 8 i + 7.
typedef float Sums[2][ROWS / 2];

struct Block {
    const Matrix* matrix;
    const Piece* pieces;
    int part, strip, row;  // the first strip and the first row; the last ones may be missing
};

__device__ __forceinline__ Block find_block(const Matrices& all, int parts) {
    const int tile = blockIdx.y / parts, part = blockIdx.y - tile * parts;
    int i = 0;
    if (all.item[1].strips && tile >= all.item[1].begin) i = 1;
    if (all.item[2].strips && tile >= all.item[2].begin) i = 2;
    const Matrix& m = all.item[i];
    return {&m, m.pieces + part * m.runs, part, (tile - m.begin) * WARPS, (int)blockIdx.x * ROWS};
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Barriers in shared memory, which complete a phase with every `count` arrivals.
__device__ __forceinline__ void set_up(u64* barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(barrier))
                 : "memory");
}

// Arrives when all that this thread copies so far is there.
__device__ __forceinline__ void arrive_with_copies(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

#if __CUDA_ARCH__ >= 900
#define TRY_WAIT "mbarrier.try_wait.parity.shared.b64"
#else
#define TRY_WAIT "mbarrier.test_wait.parity.shared.b64"
#endif

// Until the phase of that parity is complete; of a new barrier, the one before its first is, of parity 1.
__device__ __forceinline__ void await(u64* barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\n" TRY_WAIT " p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    } while (!done);
}

// The stages of a block: slots that the producers fill and the other warps empty. A slot holds x [4 tiles][ROWS][64
// bytes], its chunks of 16 bytes exchanged as wgmma's 64-byte swizzle has it, so that eight rows of one chunk lie in
// different banks; then scales and weights [bits][32 lanes] of every warp.
struct Ring {
    u8* slots;
    u64 *filled, *emptied;  // [stages]
    int slot, stages;       // bytes of a slot
    int stage;
    u32 parity;

    __device__ __forceinline__ u8* at(int stage) const { return slots + stage * slot; }
    __device__ __forceinline__ u8* weights(u8* at, int warp) const {
        return at + 4 * TILE_BYTES + warp * ((slot - 4 * TILE_BYTES) / WARPS);
    }
    __device__ __forceinline__ void next() {
        if (++stage < stages) return;
        stage = 0;
        parity ^= 1;
    }
};

// What one of the producers copies: of quad after quad of the block's part of K a tile of x, and the weights for every
// fourth warp.
struct Producer {
    const Block& b;
    int warp;
    int piece, left, tile;  // left: quads of the piece, 0 at the end
    size_t quad;            // of the first strip's of this run

    __device__ __forceinline__ void enter() {
        const Piece& p = b.pieces[piece];
        left = piece < b.matrix->runs ? p.quads : 0;
        tile = p.tile;
        quad = 0;
    }

    __device__ __forceinline__ void next() {
        tile += 4;
        quad++;
        if (--left) return;
        piece++;
        enter();
    }

    __device__ __forceinline__ void copy_weights(const Ring& ring, u8* slot) const {
        const Piece& p = b.pieces[piece];
        const int lane = threadIdx.x & 31, bits = p.bits, words = SCALE_WORDS * 4 / p.span;
        const bool scaled = lane * 4 < words;
        for (int to_warp = warp; to_warp < WARPS; to_warp += PRODUCERS) {
            const size_t from = (size_t)min(b.strip + to_warp, b.matrix->strips - 1) * p.stride + quad;
            const uint4* weights = b.matrix->weights + p.weights + from * bits * 32 + lane;
            u8* to = ring.weights(slot, to_warp) + lane * 16;
            if (scaled) copy16(to, b.matrix->scales + p.scales + from * words + lane * 4);
#pragma unroll
            for (int c = 0; c < 8; c++)
                if (c < bits) copy16(to + SCALE_BYTES + c * 512, weights + c * 32);
        }
    }

    // Rows past the last repeat it, tiles past the last one, too: their weights are zero.
    __device__ __forceinline__ void copy_x(u8* slot, const uint4* x, int rows) const {
        const int chunk = threadIdx.x & 3, first = (threadIdx.x & 31) >> 2, last = b.matrix->tiles - 1;
        u8* to = slot + warp * TILE_BYTES + first * 64 + (chunk ^ (first >> 1 & 3)) * 16;
        const uint4* from = x + (size_t)min(tile + warp, last) * rows * 4 + chunk;
#pragma unroll
        for (int row = 0; row < ROWS; row += 8) copy16(to + row * 64, from + min(b.row + first + row, rows - 1) * 4);
    }
};

// The first quads' weights, which no earlier kernel writes, at once; x when the kernel before has ended.
__device__ __forceinline__ void produce(const Block& b, int warp, Ring ring, const uint4* x, int rows) {
    Producer ahead = {b, warp};
    ahead.enter();
    Producer now = ahead;
    for (int i = 0; i < ring.stages && ahead.left; i++, ahead.next()) ahead.copy_weights(ring, ring.at(i));
    await_predecessor();
    for (int i = 0; now.left; i++, now.next(), ring.next()) {
        u8* slot = ring.at(ring.stage);
        if (i >= ring.stages) {
            await(ring.emptied + ring.stage, ring.parity ^ 1);
            now.copy_weights(ring, slot);
        }
        now.copy_x(slot, x, rows);
        arrive_with_copies(ring.filled + ring.stage);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");  // a warp must not end before its copies
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define SUMS_4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)
#define NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_32 NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_48 NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES_64 NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA(n, names, inputs, ...)                                                                           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" names "}, " inputs ", 1, 1, 1, 0;"  \
                 : __VA_ARGS__                                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// c += a x^T for 16 of K, half h of tile j: a as in common.cuh, x the slot. Runs until await_products.
__device__ __forceinline__ void product(float (&c)[ROWS / 2], const u32 (&a)[4], u32 x, int j, int h) {
    // 512 bytes from eight rows to the next eight, swizzle of 64 bytes; start, where 1 << 16 says nothing
    const u64 b = (32ull | 2u << 30) << 32 | ((x >> 4 | 1 << 16) + (j * TILE_BYTES + 32 * h >> 4));
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

// Of the 168 registers that 384 threads begin with, those that copy leave 128 to each two that multiply.
__device__ __forceinline__ void leave_registers() {
    if (WARPS == 8) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
}
__device__ __forceinline__ void take_registers() {
    if (WARPS == 8) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
}

// What threads have copied to shared memory wgmma reads through another proxy.
__device__ __forceinline__ void accept_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#else

__device__ __forceinline__ void product(float (&c)[ROWS / 2], const u32 (&a)[4], u32 x, int j, int h) {
    const int lane = threadIdx.x & 31, row = (lane & 7) + (lane >> 4) * 8, chunk = 2 * h + (lane >> 3 & 1);
    const u32 from = x + j * TILE_BYTES + row * 64 + (chunk ^ (row >> 1 & 3)) * 16;
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
__device__ __forceinline__ void accept_copies() {}
__device__ __forceinline__ void leave_registers() {}
__device__ __forceinline__ void take_registers() {}

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

// c += a quad times x, then the ring moves on. Registers of one step of 16 rows of K are decoded while the step before
// is multiplied, so the slot of the quad before is empty once the first step is on its way.
template <int BITS>
__device__ __forceinline__ void multiply_quad(Sums& c, Ring& ring, u64*& done, int shift) {
    await(ring.filled + ring.stage, ring.parity);
    accept_copies();
    u8* slot = ring.at(ring.stage);
    const u8* weights = ring.weights(slot, threadIdx.x >> 5);
    const u32 x = shared_address(slot);
    uint4 chunks[BITS];
#pragma unroll
    for (int i = 0; i < BITS; i++)
        chunks[i] = *(const uint4*)(weights + SCALE_BYTES + i * 512 + (threadIdx.x & 31) * 16);
    u32 a[2][2][4], scale[4];
    Scales<4> scales;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j == 0 || shift < 2 - (j & 1)) {
            scales = read_scales(weights, j, shift);
#pragma unroll
            for (int n = 0; n < 4; n++) scale[n] = scales.scale(j, n);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int nt = 0; nt < 2; nt++)
#pragma unroll
                for (int k = 0; k < 4; k++)
                    a[h][nt][k] = mul2(decode<BITS, 4>(chunks, scales, j, 2 * nt + h, k), scale[2 * nt + (k & 1)]);
            begin_products();
            product(c[0], a[h][0], x, j, h);
            product(c[1], a[h][1], x, j, h);
            end_products();
            await_products<1>();
            if (j == 0 && h == 0) {
                if (done && (threadIdx.x & 31) == 0) arrive(done);
                done = ring.emptied + ring.stage;
            }
        }
    }
    ring.next();
}

template <int BITS>
__device__ __forceinline__ void multiply_piece(Sums& c, Ring& ring, u64*& done, const Piece& p) {
    const int shift = p.span >> 1, quads = p.quads;
    for (int q = 0; q < quads; q++) multiply_quad<BITS>(c, ring, done, shift);
    await_products<0>();
}

__device__ __forceinline__ void consume(Sums& c, const Block& b, Ring ring) {
    u64* done = 0;  // barrier of the slot of the quad before
    for (int i = 0; i < b.matrix->runs && b.pieces[i].quads; i++) {
        const Piece& p = b.pieces[i];
        switch (p.bits) {
            case 2: multiply_piece<2>(c, ring, done, p); break;
            case 3: multiply_piece<3>(c, ring, done, p); break;
            case 4: multiply_piece<4>(c, ring, done, p); break;
#if !GPTQ
            case 5: multiply_piece<5>(c, ring, done, p); break;
            case 6: multiply_piece<6>(c, ring, done, p); break;
#endif
            default: multiply_piece<8>(c, ring, done, p);
        }
    }
}

// This warp's sums to `out`; a warp without a strip, or a column or row that is not there, has nothing to write.
__device__ __forceinline__ void write(const Sums& c, const Block& b, float* out, int rows, int width) {
    const Matrix& m = *b.matrix;
    const int lane = threadIdx.x & 31, column = (b.strip + (threadIdx.x >> 5)) * 32 + (lane >> 2);
    const int row = b.row + (lane & 3) * 2;
    float bias[4];
#pragma unroll
    for (int n = 0; n < 4; n++)
        bias[n] = m.bias && b.part == 0 && column + n * 8 < m.columns ? m.bias[column + n * 8] : 0;
    await_predecessor();
    float* to = out + ((size_t)b.part * rows + row) * width + m.offset + column;
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++, to += 6 * (size_t)width)
#pragma unroll
        for (int e = 0; e < 2; e++, to += width)
            if (row + i * 8 + e < rows)
#pragma unroll
                for (int n = 0; n < 4; n++)
                    if (column + n * 8 < m.columns) to[n * 8] = c[n >> 1][i * 4 + (n & 1) * 2 + e] + bias[n];
}

extern "C" __global__ void __launch_bounds__((WARPS + PRODUCERS) * 32, 1)
gemm(const __grid_constant__ Matrices matrices, const uint4* x, float* out, int rows, int width, int parts, int stages,
     int slot) {
#if __CUDA_ARCH__ >= 800
    constexpr int MOST_STAGES = 8;
    extern __shared__ __align__(1024) u8 slots[];
    __shared__ u64 filled[MOST_STAGES], emptied[MOST_STAGES];
    // No release_successor: no product follows whose weights could be fetched meanwhile, and blocks of another kernel
    // would only wait beside this one's last wave.
    if (threadIdx.x < stages) {
        set_up(filled + threadIdx.x, PRODUCERS * 32);
        set_up(emptied + threadIdx.x, WARPS);
    }
    __syncthreads();
    const Block b = find_block(matrices, parts);
    const Ring ring = {slots, filled, emptied, slot, stages, 0, 0};
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // which the compiler takes to be the same in all lanes
    if (warp >= WARPS) {
        leave_registers();
        produce(b, warp - WARPS, ring, x, rows);
    } else {
        take_registers();
        Sums c = {};
        consume(c, b, ring);
        write(c, b, out, rows, width);
    }
#endif
}
