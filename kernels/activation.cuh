// Activations of sums in float32, through the hardware's tanh: given z = h/2 they return act(h) = z + z * tanh(p(h)).
// The halves are exact powers of two, so the caller halves weights and bias instead of h.
#pragma once

__device__ __forceinline__ float fast_tanh(float v) {
    float r;
    asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

// 1: GELU by erf, p(h) fitted so that the error of act is at most 2.6e-5 beside that of tanh; h^2 is cut off at 64, where all is
// saturated. 2: GELU by tanh. 3: SiLU, p(h) = h/2. The hardware's tanh errs by 2^-11 of itself: act by 2^-12 |h|, half of
// what rounding h to float16 may change.
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
