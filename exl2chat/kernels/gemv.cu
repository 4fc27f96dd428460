// y = x W + bias for few rows of x and up to three packed matrices that share x.
//
// layout    x        [tiles][rows][4] uint4: of tile i, row r and t = 0..3 the eight float16 that lane 4 g + t of
//                    mma.m16n8k16 takes as B: rows of K 32 i + 16 h + 8 e + 2 t + pair, in the order (h, e, pair)
//           out      [2^split][rows][width] float32: one partial sum per part of K, to be added in order
//           matrices see tiles.cuh; Matrix.pieces[part * runs + i] in order of K
// launch    block begin + (column << split) + part of a matrix multiplies a range of its strips by one part of K; the
//           blocks of a matrix end where the next one begins, or with the grid. The quads of a piece, strip by strip,
//           are one list that its warps share evenly; what a warp has of a strip goes to a slot of its own. Each piece
//           has no more warps than quads. WARPS * 32 threads; shared bytes, with s the most strips of a block:
//           (tiles of the largest part + 3) * (64 * rows + 4 * PITCH) + 128 * rows * (WARPS + runs * (s - 1))
//           + 4 * runs * s
// limits    rows <= ROWS (1, 8 or 16); K a multiple of 32
// numerics  a code q enters the tensor cores as the subnormal float16 2^-24 q, exactly; products exact, float32 sums;
//           y += scale (2^24 sum - zero (sum of x)) per group, all float32, scales rounded as the format has it; warps,
//           then parts, added in fixed order: bit-equal at every call. Multiply-adds are written as such: which of
//           two products becomes part of one is otherwise the compiler's choice, in each variant anew
// measured  H200, 2026-11-21, 8B shapes at 4.1 bits, us and share of the read bandwidth (4.53 TB/s), 1 / 5 / 16 rows:
//           q/k/v 5.8 50 %, 6.6, 9.7; o 4.8 40 %, 5.8, 8.2; gate/up 17.4 78 %, 20.7, 27.5; down 9.9 68 %, 12.0, 16.9;
//           a head of 6 bits 98 89 %, 104, 128; all 129 of a token 1.31 ms 68 %, 1.56, 2.12. 128 registers, 190
//           instructions per quad of 4 bits (1.5 per weight). benchmarks/NOTES.md: where the time goes, what was tried
// reference exl2chat.model.dequant, and a product in float64; tests/gpu/test_gemv.py

#include "tiles.cuh"

constexpr int TILES = ROWS > 8 ? 2 : 1;          // of eight columns of B
constexpr int LIVE = ROWS > 1 ? 2 : 1;           // of a lane's two columns of C
constexpr int PITCH = ROWS > 1 ? TILES * 8 : 1;  // of the sums of x over a tile

struct Block {
    const Matrix* matrix;
    const Piece* pieces;
    int part, first, strips;  // of this block: strips first, first + 1, ...
    int tile, tiles;          // of this part
};

__device__ __forceinline__ Block find_block(const Matrices& all) {
    int i = 0, end = gridDim.x;
    if (all.item[1].strips && blockIdx.x >= all.item[1].begin) i = 1;
    if (all.item[2].strips && blockIdx.x >= all.item[2].begin) i = 2;
    if (i < 2 && all.item[i + 1].strips) end = all.item[i + 1].begin;
    const Matrix& m = all.item[i];
    const int local = blockIdx.x - m.begin, parts = 1 << m.split, part = local & (parts - 1);
    const int column = local >> m.split, columns = (end - m.begin) >> m.split;
    const int first = column * m.strips / columns, after = (column + 1) * m.strips / columns;
    const Piece* pieces = m.pieces + part * m.runs;
    const int next = part + 1 < parts ? pieces[m.runs].tile : m.tiles;
    return {&m, pieces, part, first, after - first, pieces->tile, next - pieces->tile};
}

// The warps of a piece, from..to, that have something of a strip.
struct Range {
    u16 from, to;
};

struct Shared {
    uint4* x;       // [tiles + 3][rows][4] of this part
    float* sums;    // [tiles + 3][PITCH] of x over each tile and row
    float* slots;   // [WARPS + runs * (strips - 1)][rows][32], the sums of the warps
    Range* ranges;  // [strips][runs]
};

__device__ __forceinline__ Shared divide(const Block& b, int rows) {
    extern __shared__ uint4 memory[];
    float* sums = (float*)(memory + (b.tiles + 3) * rows * 4);
    float* slots = sums + (b.tiles + 3) * PITCH;
    return {memory, sums, slots, (Range*)(slots + (WARPS + b.matrix->runs * (b.strips - 1)) * rows * 32)};
}

__device__ __forceinline__ float sum2(u32 pair) {
    const float2 v = __half22float2(*(const __half2*)&pair);
    return v.x + v.y;
}

// What does not wait for the predecessor: three tiles of zeros behind x, which the padding of the last quad multiplies,
// and who has what. The list of a piece has n = strips * quads quads; warp w of its `warps` has those from w n / warps
// on, so quad i belongs to warp ((i + 1) warps - 1) / n.
__device__ __forceinline__ void prepare(const Shared& shared, const Block& b, int rows) {
    for (int i = threadIdx.x; i < 12 * rows; i += WARPS * 32)
        shared.x[b.tiles * rows * 4 + i] = make_uint4(0, 0, 0, 0);
    for (int i = threadIdx.x; i < 3 * PITCH; i += WARPS * 32) shared.sums[b.tiles * PITCH + i] = 0;
    const int runs = b.matrix->runs;
    for (int i = threadIdx.x; i < b.strips * runs; i += WARPS * 32) {
        const int strip = i / runs;
        const Piece& piece = b.pieces[i - strip * runs];
        const int quads = piece.quads, warps = piece.warps, n = b.strips * quads;
        if (warps)
            shared.ranges[i] = {u16(((strip * quads + 1) * warps - 1) / n), u16(((strip + 1) * quads * warps - 1) / n)};
        else shared.ranges[i] = {1, 0};
    }
}

// x of this part into shared memory, and its sums over tiles.
__device__ __forceinline__ void stage(const Shared& shared, const uint4* x, const Block& b, int rows) {
    constexpr int STEP = WARPS * 32, BATCH = 4;  // BATCH loads of a thread are on their way at once
    const int count = b.tiles * rows * 4;
    prepare(shared, b, rows);
    await_predecessor();
    release_successor();
    x += (size_t)b.tile * rows * 4;
    for (int base = 0; base < count; base += BATCH * STEP) {  // the same for all lanes: they exchange sums
        uint4 v[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const int i = base + k * STEP + threadIdx.x;
            v[k] = i < count ? x[i] : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const int i = base + k * STEP + threadIdx.x, place = i >> 2;
            float sum = (sum2(v[k].x) + sum2(v[k].y)) + (sum2(v[k].z) + sum2(v[k].w));
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (i >= count) continue;
            shared.x[i] = v[k];
            if ((i & 3) == 0) shared.sums[ROWS == 1 ? place : place / rows * PITCH + place % rows] = sum;
        }
    }
    meet();
}

template <int BITS, int SPAN>
struct Quad {
    uint4 chunks[BITS];
    Scales<SPAN> scales;

    __device__ __forceinline__ void load(const uint4* w, const u32* s, int g) {
#pragma unroll
        for (int c = 0; c < BITS; c++) chunks[c] = load_once(w + c * 32);
        scales.load(s, g);
    }
};

typedef float Sums[TILES][2][4];

// acc += scale * (part / unit - zero * sum of x) over the SPAN tiles up to j, and part = 0. `sums`: those of x over the
// tiles of this quad, from this lane's first row on.
template <int BITS, int SPAN>
__device__ __forceinline__ void fold(Sums& acc, Sums& part, const Scales<SPAN>& scales, const float* sums, int j) {
    float total[TILES][LIVE] = {};
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < LIVE; e++)
#pragma unroll
            for (int k = j - SPAN + 1; k <= j; k++) total[t][e] += sums[k * PITCH + t * 8 + e];
#pragma unroll
    for (int column = 0; column < 4; column++) {
        const u32 both = scales.scale(j, column);
        const float scale = __low2float(*(const __half2*)&both), zero = scales.zero_point(j, column, BITS);
        const float inverse = (1 << 24) >> offset<BITS>(column);
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int e = 0; e < LIVE; e++) {
                const int at = (column & 1) * 2 + e;
                const float codes = __fmul_rn(inverse, part[t][column >> 1][at]);
                float& sum = acc[t][column >> 1][at];
                sum = __fmaf_rn(scale, __fmaf_rn(-zero, total[t][e], codes), sum);
            }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < 8; i++) part[t][i >> 2][i & 3] = 0;
}

// What this warp has of one strip to its slot [rows][32].
__device__ __forceinline__ void put(float* slot, const Sums& acc, int rows) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int e = 0; e < LIVE; e++) {
            const int row = t * 8 + (lane & 3) * 2 + e;
            if (row < rows)
#pragma unroll
                for (int c = 0; c < 4; c++) slot[row * 32 + c * 8 + (lane >> 2)] = acc[t][c >> 1][(c & 1) * 2 + e];
        }
}

// The sums of all warps, in order, to `out`.
__device__ __forceinline__ void finish(const Shared& shared, const Block& b, float* out, int rows, int width) {
    const Matrix& m = *b.matrix;
    const int runs = m.runs, size = 32 * rows;
    for (int i = threadIdx.x; i < b.strips * size; i += WARPS * 32) {
        const int strip = ROWS == 1 ? i >> 5 : i / size, at = i - strip * size;
        const int column = (b.first + strip) * 32 + (at & 31);
        if (column >= m.columns) continue;
        float sum = m.bias && b.part == 0 ? m.bias[column] : 0;
        for (int r = 0; r < runs; r++) {
            const Range range = shared.ranges[strip * runs + r];
            const float* slot = shared.slots + (b.pieces[r].warp + r * (b.strips - 1) + strip) * size + at;
#pragma unroll 4
            for (int w = range.from; w <= range.to; w++) sum += slot[w * size];
        }
        out[((size_t)b.part * rows + (at >> 5)) * width + m.offset + column] = sum;
    }
}

// This warp's share of piece r. AHEAD quads are on their way while one is multiplied; the first are asked for before the
// predecessor has ended.
template <int BITS, int SPAN>
__device__ __forceinline__ void run(const Block& b, int r, const uint4* x, const Shared& shared, int rows) {
    constexpr int AHEAD = CHUNKS / BITS > 1 ? CHUNKS / BITS : 1;
    constexpr int SCALES = SCALE_WORDS * 4 / SPAN;
    const Piece& piece = b.pieces[r];
    const int lane = threadIdx.x & 31, g = lane >> 2;
    const int quads = piece.quads, own = (threadIdx.x >> 5) - piece.warp, n = b.strips * quads;
    const int begin = own * n / piece.warps, count = (own + 1) * n / piece.warps - begin;
    const int strip = begin / quads;
    int quad = begin - strip * quads;
    const size_t at = (size_t)(b.first + strip) * piece.stride + quad;
    const uint4* w = b.matrix->weights + piece.weights + at * BITS * 32 + lane;
    const u32* s = b.matrix->scales + piece.scales + at * SCALES;
    const int gap = piece.stride - quads;
    int left = count, until_gap = quads - quad;  // of the loads
    auto next = [&]() {
        left--;
        const bool jump = --until_gap == 0;
        if (jump) until_gap = quads;
        w += (jump ? gap + 1 : 1) * BITS * 32;
        s += (jump ? gap + 1 : 1) * SCALES;
    };
    Quad<BITS, SPAN> ring[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (left > 0) {
            ring[i].load(w, s, g);
            next();
        }
    stage(shared, x, b, rows);
    const int tile = piece.tile - b.tile;
    const uint4* staged[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++)
        staged[t] = shared.x + (tile * rows + min(t * 8 + g, rows - 1)) * 4 + (lane & 3);
    const float* sums = shared.sums + tile * PITCH + (ROWS > 1 ? (lane & 3) * 2 : 0);
    float* slot = shared.slots + (piece.warp + own + r * (b.strips - 1) + strip) * 32 * rows;
    Sums acc = {}, part = {};
    for (int i = 0; i < count; i++) {
        const bool more = left > 0;
        const Scales<SPAN> scales = ring[0].scales;
        if (AHEAD == 1 && more) ring[0].scales.load(s, g);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint4 rhs[TILES];
#pragma unroll
            for (int t = 0; t < TILES; t++) rhs[t] = staged[t][(quad * 4 + j) * rows * 4];
#pragma unroll
            for (int f = 0; f < 4; f++) {
                u32 a[4];
#pragma unroll
                for (int k = 0; k < 4; k++) a[k] = bare<BITS>(ring[0].chunks, j, f, k);
#pragma unroll
                for (int t = 0; t < TILES; t++)
                    multiply(part[t][f >> 1], a, f & 1 ? rhs[t].z : rhs[t].x, f & 1 ? rhs[t].w : rhs[t].y);
            }
            if (AHEAD == 1 && more)
#pragma unroll
                for (int c = 0; c < BITS; c++)
                    if (last_tile<BITS>(c) == j) ring[0].chunks[c] = load_once(w + c * 32);
            if ((j + 1) % SPAN == 0) fold<BITS, SPAN>(acc, part, scales, sums + quad * 4 * PITCH, j);
        }
        if (AHEAD > 1) {
#pragma unroll
            for (int k = 0; k + 1 < AHEAD; k++) ring[k] = ring[k + 1];
            if (more) ring[AHEAD - 1].load(w, s, g);
        }
        if (more) next();
        if (++quad == quads || i + 1 == count) {
            put(slot, acc, rows);
            slot += 32 * rows;
            quad = 0;
#pragma unroll
            for (int k = 0; k < TILES * 8; k++) acc[k >> 3][k >> 2 & 1][k & 3] = 0;
        }
    }
}

template <int BITS>
__device__ __forceinline__ void run_span(const Block& b, int r, const uint4* x, const Shared& shared, int rows) {
    const int span = b.pieces[r].span;
    if (span == 4) run<BITS, 4>(b, r, x, shared, rows);
    else if (span == 2) run<BITS, 2>(b, r, x, shared, rows);
    else run<BITS, 1>(b, r, x, shared, rows);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
gemv(const __grid_constant__ Matrices matrices, const uint4* x, float* out, int rows, int width) {
    const Block b = find_block(matrices);
    const Shared shared = divide(b, rows);
    const int warp = threadIdx.x >> 5;
    int r = 0;
    while (r < b.matrix->runs && warp >= b.pieces[r].warp + b.pieces[r].warps) r++;
    switch (r < b.matrix->runs ? b.pieces[r].bits : 0) {
        case 0: stage(shared, x, b, rows); break;
        case 2: run_span<2>(b, r, x, shared, rows); break;
        case 3: run_span<3>(b, r, x, shared, rows); break;
        case 4: run_span<4>(b, r, x, shared, rows); break;
#if !GPTQ
        case 5: run_span<5>(b, r, x, shared, rows); break;
        case 6: run_span<6>(b, r, x, shared, rows); break;
#endif
        default: run_span<8>(b, r, x, shared, rows);
    }
    meet();
    finish(shared, b, out, rows, width);
}
