// Rows of numbers between the matrices: partial sums as they come out of one, float16 as the next takes them.

#pragma once
#include "common.cuh"

__device__ __forceinline__ float4 read4(const float* from) { return *(const float4*)from; }

__device__ __forceinline__ float4 read4(const __half* from) {
    const uint2 raw = *(const uint2*)from;
    const float2 low = __half22float2(*(const __half2*)&raw.x), high = __half22float2(*(const __half2*)&raw.y);
    return make_float4(low.x, low.y, high.x, high.y);
}

__device__ __forceinline__ float4 read4(const u16* from) {  // bfloat16
    const uint2 raw = *(const uint2*)from;
    return make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u),
                       __uint_as_float(raw.y << 16), __uint_as_float(raw.y & 0xffff0000u));
}

__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Four numbers of a sum whose `parts` lie `stride` numbers apart, added in order. Four loads are on their way at once.
template <typename T>
__device__ __forceinline__ float4 sum4(const T* from, int parts, size_t stride) {
    float4 sum = read4(from);
    for (int first = 1; first < parts; first += 4) {
        float4 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = first + i < parts ? read4(from + (first + i) * stride) : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 4; i++) sum = sum + v[i];
    }
    return sum;
}

// Where a number of a row goes: to column `place` of [rows, width], or, by place = 32 tile + offset, into the fragments
// [tiles][rows][32] that gemv.cu multiplies.
__device__ __forceinline__ void put(__half* y, bool placed, int place, int row, int rows, int width, float value) {
    const size_t at = placed ? ((size_t)(place >> 5) * rows + row) * 32 + (place & 31) : (size_t)row * width + place;
    y[at] = __float2half_rn(value);
}

// The places of columns k to k + 3, k a multiple of 4.
__device__ __forceinline__ int4 places4(const int* places, int k) {
    return places ? *(const int4*)(places + k) : make_int4(k, k + 1, k + 2, k + 3);
}

__device__ __forceinline__ void put4(__half* y, bool placed, int4 four, int row, int rows, int width, float4 v) {
    if (placed) {
        put(y, true, four.x, row, rows, width, v.x);
        put(y, true, four.y, row, rows, width, v.y);
        put(y, true, four.z, row, rows, width, v.z);
        put(y, true, four.w, row, rows, width, v.w);
    } else {
        const __half2 both[2] = {__floats2half2_rn(v.x, v.y), __floats2half2_rn(v.z, v.w)};
        *(uint2*)(y + (size_t)row * width + four.x) = *(const uint2*)both;
    }
}
