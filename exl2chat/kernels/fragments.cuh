// Rows of float16 in shared memory: copies into it, and fragments of mma.m16n8k16 (common.cuh) out of it.
//
// Rows lie 16 bytes further apart than they are long, a multiple of 32 bytes: eight of them at the same column then lie
// in 32 different banks.

#pragma once
#include "common.cuh"

// 16 bytes into shared memory, zeros where they are not `valid`; done after await_copies.
__device__ __forceinline__ void copy16(void* to, const void* from, bool valid = true) {
#if __CUDA_ARCH__ >= 800
    const u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0));
#else
    *(uint4*)to = valid ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
#endif
}

// What the threads of the block have written to shared memory can be read by all, and through the proxy of wgmma.
__device__ __forceinline__ void publish() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    __syncthreads();
}

// The copies of all threads of the block have arrived.
__device__ __forceinline__ void await_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    publish();
}

// Four matrices of 8 x 8, each lane with the address of one of the 32 rows.
__device__ __forceinline__ void matrices(u32 (&r)[4], const __half* at) {
    const u32 address = (u32)__cvta_generic_to_shared(at);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ void transposed(u32 (&r)[4], const __half* at) {
    const u32 address = (u32)__cvta_generic_to_shared(at);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ u32 pair(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return *(const u32*)&both;
}
