// W of one packed matrix as float16, for products with many rows through cuBLAS.
//
// layout    matrix  tiles.cuh; its pieces are its runs
//           order   [tiles * 32] int32: the row of W that each packed row is
//           to      [K, width] float16: columns 32 * first ... of W
// launch    grid (strips, quads / 4 rounded up), 128 threads: a warp decodes one quad; 10 KB static shared memory
// numerics  exactly exl2chat.model.dequant: float16((code - zero) * scale), one rounding
// measured  H200, 2026-11-21: gate or up of an 8B model (4096 x 14336, 4.1 bits) 49.7 us, 52 % of the memory
//           bandwidth; warps wait for loads three quarters of the time
// reference exl2chat.model.dequant; tests/gpu/test_gemv.py

#include "tiles.cuh"

constexpr int PITCH = 40;  // halves between rows: 16-byte aligned, and rows 2 t, 2 t + 1 of all g in other banks

template <int BITS, int SPAN>
__device__ __forceinline__ void write_quad(const Matrix& m, const Piece& p, int strip, int quad, int tiles,
                                           const int* order, __half* to, int column, int width, __half* scratch) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const size_t at = (size_t)strip * p.stride + quad;
    const uint4* w = m.weights + p.weights + at * BITS * 32 + lane;
    uint4 chunks[BITS];
#pragma unroll
    for (int c = 0; c < BITS; c++) chunks[c] = load_once(w + c * 32);
    Scales<SPAN> scales;
    scales.load(m.scales + p.scales + at * SCALE_WORDS * (4 / SPAN), g);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int tile = quad * 4 + j;
        if (tile >= tiles) return;
#pragma unroll
        for (int f = 0; f < 4; f++)
#pragma unroll
            for (int a = 0; a < 4; a++) {
                const u32 v = mul2(decode<BITS, SPAN>(chunks, scales, j, f, a), scales.scale(j, (f >> 1) * 2 + (a & 1)));
                const int row = (f & 1) * 16 + (a >> 1) * 8 + 2 * t, c = (f >> 1) * 16 + (a & 1) * 8 + g;
                scratch[row * PITCH + c] = __low2half(*(const __half2*)&v);
                scratch[(row + 1) * PITCH + c] = __high2half(*(const __half2*)&v);
            }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = i * 8 + g;
            const size_t place = (size_t)order[(p.tile + tile) * 32 + row] * width + column + t * 8;
            *(uint4*)(to + place) = *(const uint4*)(scratch + row * PITCH + t * 8);
        }
        __syncwarp();
    }
}

template <int BITS>
__device__ __forceinline__ void write_span(const Matrix& m, const Piece& p, int strip, int quad, int tiles,
                                           const int* order, __half* to, int column, int width, __half* scratch) {
    if (p.span == 4) write_quad<BITS, 4>(m, p, strip, quad, tiles, order, to, column, width, scratch);
    else if (p.span == 2) write_quad<BITS, 2>(m, p, strip, quad, tiles, order, to, column, width, scratch);
    else write_quad<BITS, 1>(m, p, strip, quad, tiles, order, to, column, width, scratch);
}

extern "C" __global__ void __launch_bounds__(128)
reconstruct(const __grid_constant__ Matrix m, const int* order, __half* to, int first, int width) {
    __shared__ __align__(16) __half scratch[4][32 * PITCH];
    release_successor();
    await_predecessor();  // the product of the matrix before may still read what is overwritten here
    const int warp = threadIdx.x >> 5;
    int quad = blockIdx.y * 4 + warp, run = 0;
    while (run < m.runs && quad >= m.pieces[run].quads) quad -= m.pieces[run++].quads;
    if (run == m.runs) return;
    const Piece p = m.pieces[run];
    const int tiles = (run + 1 < m.runs ? m.pieces[run + 1].tile : m.tiles) - p.tile;
    const int strip = first + blockIdx.x, column = blockIdx.x * 32;
    switch (p.bits) {
        case 2: return write_span<2>(m, p, strip, quad, tiles, order, to, column, width, scratch[warp]);
        case 3: return write_span<3>(m, p, strip, quad, tiles, order, to, column, width, scratch[warp]);
        case 4: return write_span<4>(m, p, strip, quad, tiles, order, to, column, width, scratch[warp]);
#if !GPTQ
        case 5: return write_span<5>(m, p, strip, quad, tiles, order, to, column, width, scratch[warp]);
        case 6: return write_span<6>(m, p, strip, quad, tiles, order, to, column, width, scratch[warp]);
#endif
        default: return write_span<8>(m, p, strip, quad, tiles, order, to, column, width, scratch[warp]);
    }
}
