// Activations of sums in float32: 0 none, 1 GELU by erf, 2 GELU by tanh, 3 SiLU. Exact, as the name says, for float32: by the functions of
// CUDA's own library. What is rounded to halves anyway (HALF) takes the hardware's tanh, whose error activation.cuh tells.
#pragma once
#include "activation.cuh"

template <int KIND, bool HALF = false>
__device__ __forceinline__ float activate(float v) {
    if constexpr (KIND != 0 && HALF) return activate_half<KIND>(0.5f * v);
    if constexpr (KIND == 1) return 0.5f * v * (1.0f + erff(v * 0.70710678118654752f));
    if constexpr (KIND == 2) return 0.5f * v * (1.0f + tanhf(0.79788456080286536f * (v + 0.044715f * v * v * v)));
    if constexpr (KIND == 3) return __fdividef(v, 1.0f + __expf(-v));  // within 2 ulp: a rounded division costs a call
    return v;
}
