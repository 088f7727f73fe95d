// The values of factors of dtype MODE (0 fp16, 1 bf16, 2 float32), one by one, as float32.
#pragma once
#include "instructions.cuh"

#if MODE == 2
typedef float Weight;
__device__ __forceinline__ float value_of(float weight) { return weight; }
#else
typedef u16 Weight;
__device__ __forceinline__ float value_of(u16 weight) { return widen(weight); }
#endif
