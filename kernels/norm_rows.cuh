// Rows of x in registers as operands of products, less their mean, with what a product is multiplied by to be that of normalized rows: that asks
// for fewer instructions than to normalize them.
// A warp has 16 rows, a lane the parts of rows g and g + 8 that it multiplies: VECTOR neighbours (8 or 4) of every 4*VECTOR columns, so a
// load is 16 or 8 bytes wide and a k16 step takes 4 of the neighbours; the weights are packed in this order.
#pragma once
#include "instructions.cuh"

template <int COLUMNS, int VECTOR>
struct NormRows {
    static_assert(COLUMNS % (4 * VECTOR) == 0, "four lanes load whole vectors of a row");
    static constexpr int kVectors = COLUMNS / (4 * VECTOR);
    u32 w[kVectors][2][VECTOR / 2];

    // `row` is the lane's first row, `left` the number of rows from it on that are inside; others become zeros. The second is APART rows further.
    template <int APART>
    __device__ __forceinline__ void load(const char* row, long long stride, int t, int left) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                Vector<VECTOR * 2> part = {};
                if (left > h * APART) part = *reinterpret_cast<const Vector<VECTOR * 2>*>(row + h * APART * stride + (v * 4 + t) * VECTOR * 2);
#pragma unroll
                for (int k = 0; k < VECTOR / 2; ++k) w[v][h][k] = part.w[k];
            }
    }

    // x becomes (x - mean) / 2, which fits in halves for all x. The mean goes in two parts, so that little is lost where it is far larger than
    // the deviations; their squares are summed in float32. `factor` is 2 / sqrt(variance + eps) of the lane's two rows.
    __device__ __forceinline__ void center(float (&factor)[2], float eps) {
        constexpr u32 kOnes = MODE == 1 ? 0x3f803f80u : 0x3c003c00u, kHalf = MODE == 1 ? 0x3f003f00u : 0x38003800u;
        constexpr int kChains = 4;  // sums side by side, as each product waits for the one before
        float sums[kChains][4] = {};
#pragma unroll
        for (int s = 0; s < COLUMNS / 16; ++s) {
            u32 a[4];
            operand(a, s);
            mma(sums[s % kChains], a, kOnes, kOnes);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float mean = (sums[0][2 * h] + sums[1][2 * h] + (sums[2][2 * h] + sums[3][2 * h])) * (-0.5f / COLUMNS);
            const u32 most = round2(mean, mean);
            const float rest = mean - low_half(most);
            const u32 least = round2(rest, rest);
#pragma unroll
            for (int v = 0; v < kVectors; ++v)
#pragma unroll
                for (int k = 0; k < VECTOR / 2; ++k) w[v][h][k] = fma2(w[v][h][k], kHalf, most);
#pragma unroll
            for (int v = 0; v < kVectors; ++v)
#pragma unroll
                for (int k = 0; k < VECTOR / 2; ++k) w[v][h][k] = fma2(w[v][h][k], kOnes, least);
        }
        float low[2][4] = {}, high[2][4] = {};  // products of the rows with the first eight and the last eight: squares are on the diagonal
#pragma unroll
        for (int s = 0; s < COLUMNS / 16; ++s) {
            u32 a[4];
            operand(a, s);
            mma(low[s % 2], a, a[0], a[2]);
            mma(high[s % 2], a, a[1], a[3]);
        }
        const int g = (threadIdx.x & 31) >> 2;
        const float of_low = __shfl_sync(0xffffffffu, g & 1 ? low[0][1] + low[1][1] : low[0][0] + low[1][0], g / 2, 4);
        const float of_high = __shfl_sync(0xffffffffu, g & 1 ? high[0][3] + high[1][3] : high[0][2] + high[1][2], g / 2, 4);
        factor[0] = 2.0f * rsqrtf(of_low * (4.0f / COLUMNS) + eps);
        factor[1] = 2.0f * rsqrtf(of_high * (4.0f / COLUMNS) + eps);
    }

    // The operand of a k16 step.
    __device__ __forceinline__ void operand(u32 (&a)[4], int step) const {
        const int v = step / (VECTOR / 4), k = step % (VECTOR / 4) * 2;
        a[0] = w[v][0][k];
        a[1] = w[v][1][k];
        a[2] = w[v][0][k + 1];
        a[3] = w[v][1][k + 1];
    }
};
