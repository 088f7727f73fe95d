// What MODE means: 0 fp16, 1 bf16; 2 (tf32 grade) and 3 (fp32 grade) take float32, rounded to fp16 or split into pairs of fp16.
#pragma once
#include "instructions.cuh"

constexpr bool kFloat = MODE >= 2;
constexpr bool kPairs = MODE == 3;
constexpr int kElem = kFloat ? 4 : 2;    // bytes of an element of x and y
constexpr int kImages = kPairs ? 2 : 1;  // of the weights, and of what they are multiplied with: hi, lo

// hi and lo halves of two floats.
__device__ __forceinline__ void split2(float a, float b, u32& hi, u32& lo) {
    hi = round2(a, b);
    if constexpr (kPairs) lo = round2(a - widen((u16)hi), b - widen((u16)(hi >> 16)));
}
