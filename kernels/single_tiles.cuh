// Tiles of x, weights and y between global and shared memory, for single_factor.cu.
#pragma once

#include "single_shape.cuh"

__device__ __forceinline__ void load_weights(char* to, const char* image, const Place& at, int chunk) {
    i64 block = (((i64)at.i * RANGES + at.range) * OUTPUT_TILES + at.output_tile) * CHUNKS + chunk;
    const char* from = image + IMAGE_HEADER + block * WEIGHT_CHUNK;
    for (int e = threadIdx.x * 16; e < WEIGHT_CHUNK; e += THREADS * 16) copy_async<16>(to + e, from + e, true);
}

__device__ __forceinline__ void load_x(char* to, const char* x, i64 ldx, i64 rows, i64 row0, const Place& at, int chunk) {
    const char* from = x + (row0 * ldx + (i64)at.i * PC * PD + at.range * J) * ES;
    load_features<BM, PC, KC, J, PD, ES, X_VECTOR, X_PITCH, THREADS>(to, from, ldx * ES, (int)min((i64)BM, rows - row0), chunk * KC, at.range * J);
}

__device__ __forceinline__ void store_slab(char* y, const char* slab, i64 rows, i64 row0, i64 y_stride, const Place& at) {
    constexpr int PER_ROW = BN * J * ES / Y_VECTOR;
    constexpr int PER_P = J * ES / Y_VECTOR > 0 ? J * ES / Y_VECTOR : 1;
    constexpr int LANYS = lanes_of_line(PER_ROW), AT_ONCE = THREADS / LANYS;
    int p0 = at.output_tile * BN, left = (int)min((i64)BM, rows - row0);
    int lane = threadIdx.x % LANYS, line0 = threadIdx.x / LANYS;
    char* origin = y + row0 * y_stride + (((i64)at.i * PB + p0) * PD + at.range * J) * ES;
#pragma unroll
    for (int first = 0; first < PER_ROW; first += LANYS) {
        int part = first + lane, offset;
        bool valid = PER_ROW % LANYS == 0 || part < PER_ROW;
        if constexpr (WHOLE) {
            offset = part * Y_VECTOR;
            if constexpr (PB % BN != 0) valid &= p0 * PD * ES + offset < PB * PD * ES;
        } else {
            int p = part / PER_P, within = part % PER_P * Y_VECTOR;
            offset = p * PD * ES + within;
            if constexpr (PB % BN != 0) valid &= p0 + p < PB;
            if constexpr (PD % J != 0) valid &= at.range * J * ES + within < PD * ES;
        }
#pragma unroll
        for (int n = 0; n < WM * 8; n += AT_ONCE) {
            int line = n + line0, row = line / 8 * MT * 16 + line % 8;
            if (valid && row < left && (WM * 8 % AT_ONCE == 0 || line < WM * 8))
                move<Y_VECTOR>(origin + row * y_stride + offset, slab + line * Y_PITCH + part * Y_VECTOR);
        }
    }
}
