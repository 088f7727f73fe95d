// The product of a chunk by FFMA in float32, q ascending, and its sums.
#pragma once

#include "single_shape.cuh"

struct Sums {  // thread (t = lane / 8, g = lane % 8) holds rows t + 4s and outputs g + 8u of its warp's tile
    float value[MT * 4][R][NT];
};

__device__ __forceinline__ void start_sums(Sums& sums) {
#pragma unroll
    for (int s = 0; s < MT * 4; ++s)
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int u = 0; u < NT; ++u) sums.value[s][r][u] = 0.0f;
}

__device__ __forceinline__ void multiply_chunk(Sums& sums, const char* x, const char* weights, const Place& at, bool) {
    const float* w = (const float*)weights + at.wj * R * KC * BN + at.wn * NT * 8 + at.lane % 8;
    const char* rows = x + (at.wm * MT * 16 + at.lane / 8) * X_PITCH + at.wj * R * 4;
#pragma unroll 2
    for (int q = 0; q < KC; ++q) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
            float own_x[MT * 4], own_w[NT];
#pragma unroll
            for (int s = 0; s < MT * 4; ++s) own_x[s] = *(const float*)(rows + 4 * s * X_PITCH + (q * J + r) * 4);
#pragma unroll
            for (int u = 0; u < NT; ++u) own_w[u] = w[(r * KC + q) * BN + 8 * u];
#pragma unroll
            for (int s = 0; s < MT * 4; ++s)
#pragma unroll
                for (int u = 0; u < NT; ++u) sums.value[s][r][u] = fmaf(own_x[s], own_w[u], sums.value[s][r][u]);
        }
    }
}

__device__ __forceinline__ void finish_sums(Sums& sums, const float* bias, int, const Place& at) {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int u = 0; u < NT; ++u) {
            float own = bias[((at.wn * NT + u) * 8 + at.lane % 8) * J + at.wj * R + r];
#pragma unroll
            for (int s = 0; s < MT * 4; ++s) sums.value[s][r][u] += own;
        }
}

__device__ __forceinline__ void write_slab(char* slab, const Sums& sums, int mt, int h, const Place& at) {
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int u = 0; u < NT; ++u) {
                char* row = slab + (at.wm * 8 + at.lane / 8 + 4 * s) * Y_PITCH;
                int p = (at.wn * NT + u) * 8 + at.lane % 8;
                *(float*)(row + (p * J + at.wj * R + r) * 4) = sums.value[mt * 4 + h * 2 + s][r][u];
            }
}
