// Rows of COLUMNS values of type MODE (0 float16, 1 bfloat16, 2 float32), read in vectors of VECTOR_BYTES, 16 where a
// kernel does not define them, and kept as float32.
#pragma once
#include "instructions.cuh"

constexpr int kBytes = MODE == 2 ? 4 : 2;
#ifndef VECTOR_BYTES
#define VECTOR_BYTES 16
#endif
constexpr int kVectorBytes = VECTOR_BYTES;
constexpr int kWidth = kVectorBytes / kBytes;  // columns of a vector
constexpr int kVectors = COLUMNS / kWidth;     // vectors of a row
constexpr int kSteps = (kVectors + 31) / 32;   // vectors of a lane, the last perhaps outside
constexpr int kWarps = 8;
static_assert(COLUMNS % kWidth == 0, "rows are whole vectors");

__device__ __forceinline__ float over_warp_sum(float value) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) value += __shfl_xor_sync(0xffffffffu, value, lanes);
    return value;
}

// Subtracts the mean from a row, given the sum of what a lane has of it; gives the mean and the sum of the squares of what is left.
__device__ __forceinline__ float2 center(float (&values)[kSteps][kWidth], float sum, int lane) {
    const float mean = over_warp_sum(sum) * (1.0f / COLUMNS);
    float squares = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        if (step * 32 + lane < kVectors)
#pragma unroll
            for (int k = 0; k < kWidth; ++k) {
                values[step][k] -= mean;
                squares = fmaf(values[step][k], values[step][k], squares);
            }
    return make_float2(mean, over_warp_sum(squares));
}
