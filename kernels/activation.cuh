// Activations of two sums or of two halves, rounded to halves, through the hardware's tanh: given z = h/2 they return act(h) = z + z * tanh(p(h)).
// The halves are exact powers of two, so the caller halves weights and bias instead of h. float16 calculates in pairs of halves,
// bfloat16, whose halves are too coarse for these coefficients, in float32.
//
// p(h): 1: GELU by erf. In float32 fitted so that the error of act is at most 2.6e-5 beside that of tanh; h^2 is cut off at 64, where all is
// saturated. For float16 two coefficients do, act errs by at most 4.3e-4 and, roundings included, by 2.4e-4 in the root mean square over normal h,
// where rounding h before and after, as separate operators do, makes 2.1e-4. 2: GELU by tanh. 3: SiLU, p(h) = h/2. The hardware's
// tanh errs by 2^-11 of itself: act by 2^-12 |h|, half of what rounding h to float16 may change.
#pragma once
#include "instructions.cuh"

__device__ __forceinline__ float fast_tanh(float v) {
    float r;
    asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

template <int KIND>
__device__ __forceinline__ float activate_half(float z) {
    float p = z;
    if constexpr (KIND == 1) {
        const float s = fminf(z * z, 16.0f);
        p *= fmaf(fmaf(-0.0112683984f, s, 0.29607574f), s, 1.59500737f);
    }
    if constexpr (KIND == 2) {
        const float s = z * z;
        p *= fmaf(0.28541920f, s, 1.59576912f);
    }
    return fmaf(z, fast_tanh(p), z);
}

// Of two halves each, as MODE says.
__device__ __forceinline__ u32 multiply2(u32 a, u32 b) {
    u32 r;
    if constexpr (MODE == 1) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    else asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 tanh2(u32 v) {
    u32 r;
    if constexpr (MODE == 1) asm("tanh.approx.bf16x2 %0, %1;" : "=r"(r) : "r"(v));
    else asm("tanh.approx.f16x2 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}

template <int KIND>
__device__ __forceinline__ u32 activate_pair(float z0, float z1) {
    if constexpr (MODE == 1) return round2(activate_half<KIND>(z0), activate_half<KIND>(z1));
    const u32 z = round2(z0, z1);
    u32 p = z;
    if constexpr (KIND == 1) p = multiply2(z, fma2(0x34883488u, multiply2(z, z), 0x3e643e64u));  // 0.2832, 1.5977
    if constexpr (KIND == 2) p = multiply2(z, fma2(0x34913491u, multiply2(z, z), 0x3e623e62u));  // 0.2854, 1.5957
    return fma2(z, tanh2(p), z);
}

// The same of two halves z = h / kHiddenUnit, which spares GELU a multiplication: p(h) = z (z^2 + c). Gives act(h) less a factor of
// kHiddenUnit / 2, which halves and bfloat16 hold. Roundings apart, GELU errs by at most 4.3e-4 by erf and 1.4e-4 by tanh in float16. With them and
// the hardware's tanh a block by erf is as exact as with the coefficients above; with the next smaller c it is less so. bfloat16 calculates in pairs
// here too: its blocks err by 1.06 times what separate operators do, as float16's (recipes/results/kernels_h200.csv).
constexpr float kHiddenUnit = 3.046875f;
template <int KIND>
__device__ __forceinline__ u32 activate_in_units(u32 z) {
    constexpr u32 kHalfUnit = MODE == 1 ? 0x3fc33fc3u : 0x3e183e18u;
    constexpr u32 kC = MODE == 1 ? 0x401c401cu : KIND == 1 ? 0x40df40dfu : 0x40de40deu;  // 2.4375; 2.435546875, 2.43359375
    const u32 p = multiply2(z, KIND == 3 ? kHalfUnit : fma2(z, z, kC));
    return fma2(z, tanh2(p), z);
}
