// Activations of two sums or of two halves, rounded to halves, through the hardware's tanh: given z = h/2 they return act(h) = z + z * tanh(p(h)).
// The halves are exact powers of two, so the caller halves weights and bias instead of h. float16 calculates in pairs of halves,
// bfloat16, whose halves are too coarse for that, in float32.
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

__device__ __forceinline__ u32 multiply_halves(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 multiply_add_halves(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
__device__ __forceinline__ u32 fast_tanh_halves(u32 v) {
    u32 r;
    asm("tanh.approx.f16x2 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}

template <int KIND>
__device__ __forceinline__ u32 activate_pair(float z0, float z1) {
    if constexpr (MODE == 1) return round2(activate_half<KIND>(z0), activate_half<KIND>(z1));
    const u32 z = round2(z0, z1);
    u32 p = z;
    if constexpr (KIND == 1) p = multiply_halves(z, multiply_add_halves(0x34883488u, multiply_halves(z, z), 0x3e643e64u));  // 0.2832, 1.5977
    if constexpr (KIND == 2) p = multiply_halves(z, multiply_add_halves(0x34913491u, multiply_halves(z, z), 0x3e623e62u));  // 0.2854, 1.5957
    return multiply_add_halves(z, fast_tanh_halves(p), z);
}

// The same of two halves z = h / kHiddenUnit, which spares GELU a multiplication: p(h) = z (z^2 + c). Gives act(h) less a factor of
// kHiddenUnit / 2, which halves and bfloat16 hold. Roundings apart, GELU errs by at most 4.3e-4 by erf and 1.4e-4 by tanh. With them and the hardware's
// tanh a block by erf is as exact as with the coefficients above; with the next smaller c it is less so.
constexpr float kHiddenUnit = 3.046875f;
template <int KIND>
__device__ __forceinline__ float activate_in_units(float z) {
    return fmaf(z, fast_tanh(z * (KIND == 3 ? kHiddenUnit / 2.0f : fmaf(z, z, KIND == 1 ? 2.435546875f : 2.43359375f))), z);
}
template <int KIND>
__device__ __forceinline__ u32 activate_in_units(u32 z) {
    if constexpr (MODE == 1) return round2(activate_in_units<KIND>(low_half(z)), activate_in_units<KIND>(high_half(z)));
    const u32 p = multiply_halves(z, KIND == 3 ? 0x3e183e18u : multiply_add_halves(z, z, KIND == 1 ? 0x40df40dfu : 0x40de40deu));
    return multiply_add_halves(z, fast_tanh_halves(p), z);
}
