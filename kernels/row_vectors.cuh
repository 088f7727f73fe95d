// Rows of COLUMNS values of type MODE (0 float16, 1 bfloat16, 2 float32), read by one warp each in vectors of 16 bytes and kept as float32.
#pragma once
#include "instructions.cuh"

constexpr int kBytes = MODE == 2 ? 4 : 2;
constexpr int kWidth = 16 / kBytes;           // columns of a vector
constexpr int kVectors = COLUMNS / kWidth;    // vectors of a row
constexpr int kSteps = (kVectors + 31) / 32;  // vectors of a lane, the last perhaps outside
constexpr int kWarps = 8;
static_assert(COLUMNS % kWidth == 0, "rows are whole vectors");

__device__ __forceinline__ void spread(float (&to)[kWidth], const Vector<16>& from) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if constexpr (MODE == 2) {
            to[k] = __uint_as_float(from.w[k]);
        } else {
            to[2 * k] = widen((u16)from.w[k]);
            to[2 * k + 1] = widen((u16)(from.w[k] >> 16));
        }
    }
}

__device__ __forceinline__ Vector<16> rounded(const float (&values)[kWidth]) {
    Vector<16> to;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if constexpr (MODE == 2) to.w[k] = __float_as_uint(values[k]);
        else to.w[k] = round2(values[2 * k], values[2 * k + 1]);
    }
    return to;
}

__device__ __forceinline__ float over_warp_sum(float value) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) value += __shfl_xor_sync(0xffffffffu, value, lanes);
    return value;
}
