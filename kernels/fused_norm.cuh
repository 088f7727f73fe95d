// Layer norm of rows inside the layer. Nothing waits for it: the products are those of x - shift, and the outputs are corrected afterwards,
//   y = (K1 K2 (x - shift) - (mean - shift) * K1 K2 1) / deviation + bias.
// The norm's weight and bias lie in the image and the bias; K1 K2 1, the sum of each output's weights, lies behind the bias. Halves stay
// halves: (x - shift) / 2, which is finite, is multiplied, and its sums are products too, with ones and of rows with themselves.
#pragma once
#include "fused_rows.cuh"

// The sums of x - shift and of its squares, for the rows that a lane multiplies. `shift` is the mean of the row's first values: the
// difference of the sums then loses no more than a factor of columns / first values of the variance, and halves, which are rounded once more,
// no more than its root.
struct RowNorm {
    static constexpr float kColumns = kRowBytes / kElem;
    static constexpr u32 kOnes = MODE == 1 ? 0x3f803f80u : 0x3c003c00u, kHalf = MODE == 1 ? 0x3f003f00u : 0x38003800u;  // pairs of halves
    u32 center[2];                        // of halves: -shift / 2, twice
    float sums[4], grams[2][4];
    float shift[2], sum[2], squares[2];   // of floats
    float factor[2], rest[2];             // what the products are multiplied by, and what times K1 K2 1 is added

    // The first batch of halves, as operands, and then each, which becomes what is multiplied.
    __device__ __forceinline__ void begin(const u32 (&a)[kBatch1][4]) {
        float start[4] = {};
#pragma unroll
        for (int s = 0; s < kBatch1; ++s) mma(start, a[s], kOnes, kOnes);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float middle = start[2 * h] * (-0.5f / (16 * kBatch1));
            center[h] = round2(middle, middle);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[e] = grams[0][e] = grams[1][e] = 0.0f;
    }

    __device__ __forceinline__ void take(u32 (&a)[kBatch1][4]) {
#pragma unroll
        for (int s = 0; s < kBatch1; ++s) {
            u32(&d)[4] = a[s];
#pragma unroll
            for (int k = 0; k < 4; ++k) d[k] = fma2(d[k], kHalf, center[k % 2]);
            mma(sums, d, kOnes, kOnes);
            mma(grams[0], d, d[0], d[2]);
            mma(grams[1], d, d[1], d[3]);
        }
    }
    // The first batch of floats, as they lie in memory, and then each.
    __device__ __forceinline__ void begin(const u32 (&raw)[kBatch1][2][kLaneBytes / 4]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float start = 0.0f;
#pragma unroll
            for (int s = 0; s < kBatch1; ++s)
#pragma unroll
                for (int e = 0; e < kLaneBytes / 4; ++e) start += __uint_as_float(raw[s][h][e]);
            shift[h] = over_quad_sum(start) * (1.0f / (kBatch1 * kLaneBytes));
            sum[h] = squares[h] = 0.0f;
        }
    }

    __device__ __forceinline__ void take(const u32 (&raw)[kBatch1][2][kLaneBytes / 4]) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int s = 0; s < kBatch1; ++s)
#pragma unroll
                for (int e = 0; e < kLaneBytes / 4; ++e) {
                    const float apart = __uint_as_float(raw[s][h][e]) - shift[h];
                    sum[h] += apart;
                    squares[h] = fmaf(apart, apart, squares[h]);
                }
    }

    __device__ __forceinline__ void finish(int g, float eps) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float difference, squared;
            if constexpr (kFloat) {
                difference = over_quad_sum(sum[h]) / kColumns;
                squared = over_quad_sum(squares[h]) / kColumns;
            } else {
                // A row's product with itself is in the lane that holds the column of the row's number.
                difference = sums[2 * h] * (2.0f / kColumns);
                squared = __shfl_sync(0xffffffffu, g & 1 ? grams[h][2 * h + 1] : grams[h][2 * h], g * 4 + (g >> 1)) * (4.0f / kColumns);
            }
            const float variance = fmaf(-difference, difference, squared);
            const float over_deviation = rsqrtf((variance < 0.0f ? 0.0f : variance) + eps);  // NaN stays NaN
            factor[h] = over_deviation * (kFloat ? 1.0f : 2.0f);
            rest[h] = -difference * over_deviation;
        }
    }
};
