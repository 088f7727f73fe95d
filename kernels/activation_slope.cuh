// Activations with their slopes, in float32: 1 GELU by erf, 2 GELU by tanh, 3 SiLU. GELU by erf of bfloat16, and its slope, take the hardware's tanh, as
// activation.cuh has it; all else is as exact as float32.
#pragma once
#include "exact_activation.cuh"

constexpr float kLog2e = 1.4426950408889634f;

// act(v) and, in `slope`, its derivative.
__device__ __forceinline__ float with_slope(float v, float& slope) {
    if constexpr (ACTIVATION == 1 && MODE == 1) {  // as activation.cuh has it: bfloat16 is coarser than the hardware's tanh
        const float square = v * v, s = fminf(0.25f * square, 16.0f);
        const float share = fmaf(0.5f, fast_tanh(0.5f * v * fmaf(fmaf(-0.0112683984f, s, 0.29607574f), s, 1.59500737f)), 0.5f);
        slope = fmaf(v, 0.39894228040143268f * exp2_fast(-0.5f * kLog2e * square), share);
        return v * share;
    }
    if constexpr (ACTIVATION == 1) {
        const float y = gelu(v), density = 0.39894228040143268f * exp2_fast(-0.5f * kLog2e * v * v);
        // act(v) = v * share, for the share of a normal variable below v
        const float share = fabsf(v) > 1e-3f ? __fdividef(y, v) : 0.5f + 0.39894228040143268f * v;
        slope = fmaf(v, density, share);
        return y;
    }
    if constexpr (ACTIVATION == 2) {
        // the larger of share and rest, of sum 1, loses nothing beside the smaller
        const float twice = 1.5957691216057308f * fmaf(0.044715f * v, v * v, v), e = __expf(-fabsf(twice)), larger = 1.0f / (1.0f + e);
        const float share = twice > 0.0f ? larger : e * larger, rest = twice > 0.0f ? e * larger : larger;
        const float rise = 1.5957691216057308f * fmaf(0.134145f * v, v, 1.0f);
        slope = fmaf(v * share * rest, rise, share);
        return v * share;
    }
    const float share = __fdividef(1.0f, 1.0f + __expf(-v));
    slope = share * fmaf(v, 1.0f - share, 1.0f);
    return v * share;
}
