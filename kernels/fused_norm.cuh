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
    u32 center[2 * MT];                   // of halves: -shift / 2, twice
    float sums[MT][4], grams[MT][2][4];
    float shift[2 * MT], sum[2 * MT], squares[2 * MT];  // of floats
    float factor[2 * MT], rest[2 * MT];   // what the products are multiplied by, and what times K1 K2 1 is added

    // The first batch of halves, as operands, and then each, which becomes what is multiplied.
    __device__ __forceinline__ void begin(const u32 (&a)[kBatch1][MT][4]) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            float start[4] = {};
#pragma unroll
            for (int s = 0; s < kBatch1; ++s) mma(start, a[s][m], kOnes, kOnes);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float middle = start[2 * h] * (-0.5f / (16 * kBatch1));
                center[2 * m + h] = round2(middle, middle);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[m][e] = grams[m][0][e] = grams[m][1][e] = 0.0f;
        }
    }

    __device__ __forceinline__ void take(u32 (&a)[kBatch1][MT][4]) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int s = 0; s < kBatch1; ++s) {
                u32(&d)[4] = a[s][m];
#pragma unroll
                for (int k = 0; k < 4; ++k) d[k] = fma2(d[k], kHalf, center[2 * m + k % 2]);
                mma(sums[m], d, kOnes, kOnes);
                mma(grams[m][0], d, d[0], d[2]);
                mma(grams[m][1], d, d[1], d[3]);
            }
    }
    // The first batch of floats, as they lie in memory, and then each.
    __device__ __forceinline__ void begin(const u32 (&raw)[kBatch1][2 * MT][kLaneBytes / 4]) {
#pragma unroll
        for (int mh = 0; mh < 2 * MT; ++mh) {
            float start = 0.0f;
#pragma unroll
            for (int s = 0; s < kBatch1; ++s)
#pragma unroll
                for (int e = 0; e < kLaneBytes / 4; ++e) start += __uint_as_float(raw[s][mh][e]);
            shift[mh] = over_quad_sum(start) * (1.0f / (kBatch1 * kLaneBytes));
            sum[mh] = squares[mh] = 0.0f;
        }
    }

    __device__ __forceinline__ void take(const u32 (&raw)[kBatch1][2 * MT][kLaneBytes / 4]) {
#pragma unroll
        for (int mh = 0; mh < 2 * MT; ++mh)
#pragma unroll
            for (int s = 0; s < kBatch1; ++s)
#pragma unroll
                for (int e = 0; e < kLaneBytes / 4; ++e) {
                    const float apart = __uint_as_float(raw[s][mh][e]) - shift[mh];
                    sum[mh] += apart;
                    squares[mh] = fmaf(apart, apart, squares[mh]);
                }
    }

    __device__ __forceinline__ void finish(int g, float eps) {
#pragma unroll
        for (int mh = 0; mh < 2 * MT; ++mh) {
            const int m = mh / 2, h = mh % 2;
            float difference, squared;
            if constexpr (kFloat) {
                difference = over_quad_sum(sum[mh]) / kColumns;
                squared = over_quad_sum(squares[mh]) / kColumns;
            } else {
                // A row's product with itself is in the lane that holds the column of the row's number.
                difference = sums[m][2 * h] * (2.0f / kColumns);
                squared = __shfl_sync(0xffffffffu, g & 1 ? grams[m][h][2 * h + 1] : grams[m][h][2 * h], g * 4 + (g >> 1)) * (4.0f / kColumns);
            }
            const float variance = fmaf(-difference, difference, squared);
            const float over_deviation = rsqrtf((variance < 0.0f ? 0.0f : variance) + eps);  // NaN stays NaN
            factor[mh] = over_deviation * (kFloat ? 1.0f : 2.0f);
            rest[mh] = -difference * over_deviation;
        }
    }
};
