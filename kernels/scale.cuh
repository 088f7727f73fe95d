// Powers of two that keep float32 values in the range of fp16, as integers.
#pragma once
#include "instructions.cuh"

constexpr float kLargest = 65000.0f;  // below the largest fp16
constexpr int kTarget = 11;           // scaled maxima start near 2^11: room above, precision below

__device__ __forceinline__ float power(int e) { return e < -126 ? 0.0f : __uint_as_float((u32)(min(e, 127) + 127) << 23); }

// The exponent that brings a maximum near 2^kTarget. Zero gives the largest, so the next nonzero chunk sets it anew.
__device__ __forceinline__ int exponent_for(float maximum) {
    const int e = (int)(__float_as_uint(maximum) >> 23) - 127;
    return max(min(kTarget - e, 120), -116);
}

// The maximum over the four lanes that share a row.
__device__ __forceinline__ float over_quad(float v) {
    v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
    return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

__device__ __forceinline__ u32 scale2(u32 halves, float factor) {
    return round2(widen((u16)halves) * factor, widen((u16)(halves >> 16)) * factor);
}

// The larger magnitudes of two pairs of fp16, NaN ignored; and whether one of a pair is infinite.
__device__ __forceinline__ u32 max_halves(u32 a, u32 b) {
    u32 r;
    asm("{ .reg .b32 t; abs.f16x2 t, %2; max.f16x2 %0, %1, t; }" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ bool overflows(u32 halves) { return (halves & 0xffff) == 0x7c00 || halves >> 16 == 0x7c00; }
