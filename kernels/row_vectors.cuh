// Rows of COLUMNS values of type MODE (0 float16, 1 bfloat16, 2 float32), read by one warp each in vectors of 16 bytes and kept as float32.
#pragma once
#include "instructions.cuh"

constexpr int kBytes = MODE == 2 ? 4 : 2;
constexpr int kWidth = 16 / kBytes;           // columns of a vector
constexpr int kVectors = COLUMNS / kWidth;    // vectors of a row
constexpr int kSteps = (kVectors + 31) / 32;  // vectors of a lane, the last perhaps outside
constexpr int kWarps = 8;
static_assert(COLUMNS % kWidth == 0, "rows are whole vectors");

__device__ __forceinline__ float over_warp_sum(float value) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) value += __shfl_xor_sync(0xffffffffu, value, lanes);
    return value;
}
