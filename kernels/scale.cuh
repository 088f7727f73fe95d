// Powers of two that keep float32 values in the range of fp16, as integers.
#pragma once
#include "mode.cuh"

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

constexpr int kWeightShift = 13;  // weights of [2^11, 2^12) count as [1/4, 1/2): a sum then overflows where the result does

// A lane's operands of 32 floats of its two rows, scaled by a power of two each. at(h, s) is where its four neighbours of a k16 step lie.
template <int STEPS, int LOW, class Address>
__device__ __forceinline__ void scale_rows(u32 (&hi)[STEPS][4], u32 (&lo)[LOW][4], int (&exponent)[2], Address at) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        u32 raw[STEPS][4];
        float largest = 0.0f;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            load_shared(raw[s], at(h, s));
#pragma unroll
            for (int e = 0; e < 4; ++e) largest = fmaxf(largest, fabsf(__uint_as_float(raw[s][e])));
        }
        exponent[h] = min(exponent_for(over_quad(largest)), 126 - kWeightShift);
        const float scale = power(exponent[h]);
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
#pragma unroll
            for (int k = 0; k < 4; k += 2)
                split2(__uint_as_float(raw[s][k]) * scale, __uint_as_float(raw[s][k + 1]) * scale, hi[s][k + h], lo[kPairs ? s : 0][k + h]);
    }
}
