// The rounding of a float32 to the type TARGET: 0 float16, 1 bfloat16, 2 float32.
#pragma once

#if TARGET == 2
typedef float Target;
__device__ __forceinline__ float round_to_target(float value) { return value; }
#else
typedef unsigned short Target;
__device__ __forceinline__ Target round_to_target(float value) {
    Target bits;
    if constexpr (TARGET == 0)
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    else
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif
