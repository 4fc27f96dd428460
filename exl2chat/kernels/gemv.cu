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
//           64 * rows * (tiles of the largest part + 3) + 128 * rows * (WARPS + runs * (s - 1))
// limits    rows <= ROWS (1, 8 or 16); K a multiple of 32
// numerics  (code - zero) exact in float16, products exact, float32 sums; one float16 scale per group, multiplied in
//           float32; warps, then parts, added in fixed order: bit-equal at every call
// measured  H200, 2026-11-21, 8B shapes at 4.1 bits, us and share of the read bandwidth (4.53 TB/s), 1 / 5 / 16 rows:
//           q/k/v 5.6 52 %, 7.0, 10.8; o 4.7 41 %, 5.9, 8.2; gate/up 17.5 77 %, 20.5, 25.8; down 9.8 68 %, 11.3, 23.3;
//           a head of 6 bits 101 87 %, 107, 155; all 129 of a token 1.31 ms 68 %, 1.56, 2.33. 128 registers, 240
//           instructions per quad of 4 bits (1.9 per weight)
// reference exl2chat.model.dequant, and a product in float64; tests/gpu/test_gemv.py

#include "tiles.cuh"

constexpr int TILES = ROWS > 8 ? 2 : 1;  // of eight columns of B
constexpr int LIVE = ROWS > 1 ? 2 : 1;   // of a lane's two columns of C

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

// x of this part into shared memory; three tiles of zeros behind it, which the padding of the last quad multiplies.
__device__ __forceinline__ void stage(uint4* shared, const uint4* x, const Block& b, int rows) {
    const int count = b.tiles * rows * 4;
    for (int i = threadIdx.x; i < 12 * rows; i += WARPS * 32) shared[count + i] = make_uint4(0, 0, 0, 0);
    await_predecessor();
    release_successor();
    x += (size_t)b.tile * rows * 4;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += WARPS * 32) shared[i] = x[i];
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

// acc += scale * part for the tiles up to j, and part = 0.
template <int SPAN>
__device__ __forceinline__ void fold(Sums& acc, Sums& part, const Scales<SPAN>& scales, int j) {
#pragma unroll
    for (int column = 0; column < 4; column++) {
        const u32 both = scales.scale(j, column);
        const float scale = __low2float(*(const __half2*)&both);
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int e = 0; e < LIVE; e++) {
                const int at = (column & 1) * 2 + e;
                acc[t][column >> 1][at] += scale * part[t][column >> 1][at];
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

// The sums of all warps, in order, to `out`. The list of a piece has n = strips * quads quads; warp w of its `warps` has
// those from w n / warps on, so quad i belongs to warp ((i + 1) warps - 1) / n.
__device__ __forceinline__ void finish(const float* slots, const Block& b, float* out, int rows, int width) {
    const Matrix& m = *b.matrix;
    const int size = 32 * rows;
    for (int i = threadIdx.x; i < b.strips * size; i += WARPS * 32) {
        const int strip = i / size, at = i - strip * size, column = (b.first + strip) * 32 + (at & 31);
        if (column >= m.columns) continue;
        float sum = m.bias && b.part == 0 ? m.bias[column] : 0;
        for (int r = 0; r < m.runs && b.pieces[r].warps; r++) {
            const int quads = b.pieces[r].quads, warps = b.pieces[r].warps, n = b.strips * quads;
            const int from = ((strip * quads + 1) * warps - 1) / n, to = ((strip + 1) * quads * warps - 1) / n;
            const float* slot = slots + (b.pieces[r].warp + r * (b.strips - 1) + strip) * size + at;
            for (int w = from; w <= to; w++) sum += slot[w * size];
        }
        out[((size_t)b.part * rows + (at >> 5)) * width + m.offset + column] = sum;
    }
}

// This warp's share of piece r. AHEAD quads are on their way while one is multiplied; the first are asked for before the
// predecessor has ended.
template <int BITS, int SPAN>
__device__ __forceinline__ void run(const Block& b, int r, const uint4* x, uint4* shared, float* slots, int rows) {
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
    const uint4* staged[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++)
        staged[t] = shared + ((piece.tile - b.tile) * rows + min(t * 8 + g, rows - 1)) * 4 + (lane & 3);
    float* slot = slots + (piece.warp + own + r * (b.strips - 1) + strip) * 32 * rows;
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
                for (int k = 0; k < 4; k++) a[k] = decode<BITS, SPAN>(ring[0].chunks, scales, j, f, k);
#pragma unroll
                for (int t = 0; t < TILES; t++)
                    multiply(part[t][f >> 1], a, f & 1 ? rhs[t].z : rhs[t].x, f & 1 ? rhs[t].w : rhs[t].y);
            }
            if (AHEAD == 1 && more)
#pragma unroll
                for (int c = 0; c < BITS; c++)
                    if (last_tile<BITS>(c) == j) ring[0].chunks[c] = load_once(w + c * 32);
            if ((j + 1) % SPAN == 0) fold<SPAN>(acc, part, scales, j);
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
__device__ __forceinline__ void run_span(const Block& b, int r, const uint4* x, uint4* shared, float* slots, int rows) {
    const int span = b.pieces[r].span;
    if (span == 4) run<BITS, 4>(b, r, x, shared, slots, rows);
    else if (span == 2) run<BITS, 2>(b, r, x, shared, slots, rows);
    else run<BITS, 1>(b, r, x, shared, slots, rows);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
gemv(const __grid_constant__ Matrices matrices, const uint4* x, float* out, int rows, int width) {
    extern __shared__ uint4 shared[];
    const Block b = find_block(matrices);
    float* slots = (float*)(shared + (b.tiles + 3) * rows * 4);
    const int warp = threadIdx.x >> 5;
    int r = 0;
    while (r < b.matrix->runs && warp >= b.pieces[r].warp + b.pieces[r].warps) r++;
    switch (r < b.matrix->runs ? b.pieces[r].bits : 0) {
        case 0: stage(shared, x, b, rows); break;
        case 2: run_span<2>(b, r, x, shared, slots, rows); break;
        case 3: run_span<3>(b, r, x, shared, slots, rows); break;
        case 4: run_span<4>(b, r, x, shared, slots, rows); break;
#if !GPTQ
        case 5: run_span<5>(b, r, x, shared, slots, rows); break;
        case 6: run_span<6>(b, r, x, shared, slots, rows); break;
#endif
        default: run_span<8>(b, r, x, shared, slots, rows);
    }
    meet();
    finish(slots, b, out, rows, width);
}
