// What stands before and after gemv.cu: activations into fragment order, and partial sums into one.
//
// arrange_*  to[tile][row][t] = the eight values of x [rows, K] (float16 or float32, rounded to float16) that lane 4 g + t
//            of mma.m16n8k16 takes as B (gemv.cu); order [tiles * 4][8] int32 says from which columns of x
// add_parts  y[i] = parts[0][i] + parts[1][i] + ... + parts[n - 1][i], float32, in this order
// launch     128 threads a block, one thread per 16 bytes (arrange_*) or per sum; no shared memory
// limits     pointers aligned to 16 bytes
// reference  tests/gpu/test_gemv.py

#include "common.cuh"

template <typename T>
__device__ __forceinline__ void arrange(const T* x, const int4* order, uint4* to, int entries, int rows, int k) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= entries * rows) return;
    const int t = i & 3, row = (i >> 2) % rows, tile = (i >> 2) / rows;
    const int4 low = order[(tile * 4 + t) * 2], high = order[(tile * 4 + t) * 2 + 1];
    await_predecessor();
    release_successor();
    x += (size_t)row * k;
    __half2 v[4] = {__floats2half2_rn((float)x[low.x], (float)x[low.y]), __floats2half2_rn((float)x[low.z], (float)x[low.w]),
                    __floats2half2_rn((float)x[high.x], (float)x[high.y]),
                    __floats2half2_rn((float)x[high.z], (float)x[high.w])};
    to[i] = *(uint4*)v;
}

extern "C" __global__ void __launch_bounds__(128)
arrange_half(const __half* x, const int4* order, uint4* to, int entries, int rows, int k) {
    arrange(x, order, to, entries, rows, k);
}

extern "C" __global__ void __launch_bounds__(128)
arrange_float(const float* x, const int4* order, uint4* to, int entries, int rows, int k) {
    arrange(x, order, to, entries, rows, k);
}

extern "C" __global__ void __launch_bounds__(128) add_parts(const float* parts, float* y, int count, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    await_predecessor();
    release_successor();
    if (i >= count) return;
    float sum = parts[i];
    for (int p = 1; p < n; p++) sum += parts[(size_t)p * count + i];
    y[i] = sum;
}
