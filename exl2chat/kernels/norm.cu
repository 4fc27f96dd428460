// The residual stream: tokens to rows, and sums of rows followed by RMSNorm.
//
//     embed_*       x = table[token] * factor
//     add_norm_*    x += out, or x += norm(out, post) with a sandwich norm; then y = norm(x, scale)
//     norm_only     y = norm(x, scale);   norm(v, s) = v / sqrt(sum(v^2) + floor^2) * s, the Norm of ops/packed.py
//
// layout    x [T, D] float32; out [parts, T, D] float16 or float32, to be added; scale, post [D] float32; floor [1]
//           y [T, D] float16, or fragments by places [D] int32 (rows.cuh) where these are not 0
//           table [V, D] float16, bfloat16 (its bits) or float32; tokens [T] int64. All rows contiguous.
// launch    one block per row; THREADS = blockDim.x with 4 * UNITS * THREADS >= D, UNITS a macro; shared bytes 2 * D
// limits    D a multiple of 4, of 32 with places; rows aligned to 16 bytes; tokens below V (the engine checks them)
// numerics  float32; sums over lanes, then warps, in fixed order: bit-equal at every call; y rounded once
// measured  NVIDIA H200, 2026-11-21: 2.0 us for 1 row of 4096 in 4 parts, in a chain of graph nodes
// reference embed, norm, add_norm of exl2chat/ops/reference.py; tests/gpu/test_rows.py

#include "rows.cuh"

struct Row {
    float4 part[UNITS];
};

template <typename T>
__device__ __forceinline__ Row read(const T* from, int size, int parts = 1) {
    Row row;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int i = (u * blockDim.x + threadIdx.x) * 4;
        row.part[u] = i < size ? sum4(from + i, parts, (size_t)gridDim.x * size) : make_float4(0, 0, 0, 0);
    }
    return row;
}

__device__ __forceinline__ void write(float* to, const Row& row, int size) {
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int i = (u * blockDim.x + threadIdx.x) * 4;
        if (i < size) *(float4*)(to + i) = row.part[u];
    }
}

// Where a row of activations goes, known before its numbers are.
struct Places {
    int4 part[UNITS];
    bool placed;
};

__device__ __forceinline__ Places find(const int* places, int size) {
    Places found;
    found.placed = places;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int i = (u * blockDim.x + threadIdx.x) * 4;
        if (i < size) found.part[u] = places4(places, i);
    }
    return found;
}

// The fragments of a row are put together in shared memory: 2-byte stores to 32 places a warp would take one
// multiprocessor 2.3 us for 4096 numbers.
__device__ __forceinline__ void write(__half* y, const Places& places, const Row& row, int size) {
    extern __shared__ uint4 fragments[];
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if ((u * blockDim.x + threadIdx.x) * 4 < size) {
            if (places.placed) put4((__half*)fragments, true, places.part[u], 0, 1, size, row.part[u]);
            else put4(y, false, places.part[u], blockIdx.x, gridDim.x, size, row.part[u]);
        }
    if (!places.placed) return;
    __syncthreads();
    for (int i = threadIdx.x; i < size / 8; i += blockDim.x)
        ((uint4*)y)[((size_t)(i >> 2) * gridDim.x + blockIdx.x) * 4 + (i & 3)] = fragments[i];
}

// The sum of v^2 over the block, in every thread; `sums` are 32 floats in shared memory, used once.
__device__ __forceinline__ float sum_squares(const Row& row, float* sums) {
    float sum = 0;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const float4 v = row.part[u];
        sum = __fmaf_rn(v.w, v.w, __fmaf_rn(v.z, v.z, __fmaf_rn(v.y, v.y, __fmaf_rn(v.x, v.x, sum))));
    }
#pragma unroll
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = (threadIdx.x & 31) < (blockDim.x >> 5) ? sums[threadIdx.x & 31] : 0;
#pragma unroll
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
}

__device__ __forceinline__ void normalise(Row& row, const Row& scale, float floor, float* sums) {
    const float factor = rsqrtf(__fmaf_rn(floor, floor, sum_squares(row, sums)));
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        float4& v = row.part[u];
        const float4 s = scale.part[u];
        v = make_float4(v.x * factor * s.x, v.y * factor * s.y, v.z * factor * s.z, v.w * factor * s.w);
    }
}

template <typename T>
__device__ __forceinline__ void add_norm(float* x, const T* out, int parts, const float* post, const float* post_floor,
                                         const float* scale, const float* floor, const int* places, __half* y,
                                         int size) {
    __shared__ float sums[2][32];
    const size_t offset = (size_t)blockIdx.x * size;
    const Row weights = read(scale, size);
    const Places to = find(places, size);
    const float least = *floor;
    await_predecessor();
    release_successor();
    Row row = read(x + offset, size), more = read(out + offset, size, parts);
    if (post) normalise(more, read(post, size), *post_floor, sums[1]);
#pragma unroll
    for (int u = 0; u < UNITS; u++) row.part[u] = row.part[u] + more.part[u];
    write(x + offset, row, size);
    normalise(row, weights, least, sums[0]);
    write(y, to, row, size);
}

extern "C" __global__ void __launch_bounds__(1024)
add_norm_half(float* x, const __half* out, int parts, const float* post, const float* post_floor, const float* scale,
              const float* floor, const int* places, __half* y, int size) {
    add_norm(x, out, parts, post, post_floor, scale, floor, places, y, size);
}

extern "C" __global__ void __launch_bounds__(1024)
add_norm_float(float* x, const float* out, int parts, const float* post, const float* post_floor, const float* scale,
               const float* floor, const int* places, __half* y, int size) {
    add_norm(x, out, parts, post, post_floor, scale, floor, places, y, size);
}

extern "C" __global__ void __launch_bounds__(1024)
norm_only(const float* x, const float* scale, const float* floor, const int* places, __half* y, int size) {
    __shared__ float sums[32];
    const Row weights = read(scale, size);
    const Places to = find(places, size);
    const float least = *floor;
    await_predecessor();
    release_successor();
    Row row = read(x + (size_t)blockIdx.x * size, size);
    normalise(row, weights, least, sums);
    write(y, to, row, size);
}

template <typename T>
__device__ __forceinline__ void embed(const long long* tokens, const T* table, float factor, float* x, int size) {
    await_predecessor();
    release_successor();
    Row row = read(table + (size_t)tokens[blockIdx.x] * size, size);
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const float4 v = row.part[u];
        row.part[u] = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
    }
    write(x + (size_t)blockIdx.x * size, row, size);
}

extern "C" __global__ void __launch_bounds__(1024)
embed_half(const long long* tokens, const __half* table, float factor, float* x, int size) {
    embed(tokens, table, factor, x, size);
}

extern "C" __global__ void __launch_bounds__(1024)
embed_bfloat(const long long* tokens, const u16* table, float factor, float* x, int size) {
    embed(tokens, table, factor, x, size);
}

extern "C" __global__ void __launch_bounds__(1024)
embed_float(const long long* tokens, const float* table, float factor, float* x, int size) {
    embed(tokens, table, factor, x, size);
}
