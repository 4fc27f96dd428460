// What every kernel file shares: integer names, loads that bypass L1, the tensor-core product, programmatic launch.

#pragma once
#include <cuda_fp16.h>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

// Weights are read once: they must not push anything out of L1.
__device__ __forceinline__ uint4 load_once(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

// c[16, 8] += a[16, 16] b[16, 8], float32 sums of float16 products, in the fragments of mma.m16n8k16:
// lane = 4 g + t; a[0], a[1] row g, g + 8 of columns 2 t, 2 t + 1, and a[2], a[3] the same of columns 2 t + 8, + 9;
// b0 rows 2 t, 2 t + 1 and b1 rows 2 t + 8, + 9 of column g; c[0..3] = (g, 2 t), (g, 2 t + 1), (g + 8, ...).
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    const u32 b[2] = {b0, b1};
#pragma unroll
    for (int half = 0; half < 2; half++)
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
#endif
}

// The threads of a block meet. Warps may call this from different places in the code, unlike __syncthreads().
__device__ __forceinline__ void meet() { asm volatile("bar.sync 0;" ::: "memory"); }

// Programmatic dependent launch: what the kernels before this one wrote may be read after `await_predecessor`;
// `release_successor` lets the next kernel begin, which then waits in its own `await_predecessor` for our end.
__device__ __forceinline__ void await_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void release_successor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// a / b of 0 <= a < 2^16 and 0 < b <= 2^7, in 6 instructions; those of a division are 25, one after another.
__device__ __forceinline__ int quotient(int a, int b) { return (int)__fdividef(a + 0.5f, (float)b); }

// Within 2^-22 of its value; numbers below 2^-126 are 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
