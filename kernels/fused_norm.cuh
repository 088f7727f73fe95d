// Layer norm of rows on their way into the first product: (x - mean) / sqrt(variance + eps). Its weight and bias lie in the image and the bias.
#pragma once
#include "fused_rows.cuh"
#include "scale.cuh"

// Mean and deviation of the rows that a lane multiplies. One pass takes the sums of x - shift and of its squares, `shift` being the mean of
// the row's first values: the difference of the sums then loses no more than a factor of columns / first values of the variance.
struct RowNorm {
    static constexpr int kColumns = kRowBytes / kElem;
    float shift[2 * MT], sum[2 * MT], squares[2 * MT];
    float mean[2 * MT], factor[2 * MT];

    template <int WORDS>
    __device__ __forceinline__ void take(int mh, const u32 (&words)[WORDS], bool first) {
        constexpr int kCount = kFloat ? WORDS : 2 * WORDS;
        float values[kCount];
#pragma unroll
        for (int k = 0; k < WORDS; ++k) {
            if constexpr (kFloat) values[k] = __uint_as_float(words[k]);
            else { values[2 * k] = low_half(words[k]); values[2 * k + 1] = high_half(words[k]); }
        }
        if (first) {
            float start = 0.0f;
#pragma unroll
            for (int k = 0; k < kCount; ++k) start += values[k];
            shift[mh] = over_quad_sum(start) * (1.0f / (4 * kCount));
            sum[mh] = squares[mh] = 0.0f;
        }
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
            const float apart = values[k] - shift[mh];
            sum[mh] += apart;
            squares[mh] = fmaf(apart, apart, squares[mh]);
        }
    }

    __device__ __forceinline__ void finish(float eps) {
#pragma unroll
        for (int mh = 0; mh < 2 * MT; ++mh) {
            const float difference = over_quad_sum(sum[mh]) * (1.0f / kColumns);
            const float variance = fmaf(-difference, difference, over_quad_sum(squares[mh]) * (1.0f / kColumns));
            factor[mh] = rsqrtf((variance < 0.0f ? 0.0f : variance) + eps) * power(kNormedExponent);  // NaN stays NaN
            mean[mh] = kFloat ? shift[mh] + difference : -(shift[mh] + difference) * factor[mh];
        }
    }

    // Rows as they lie in memory, four lanes a row.
    __device__ __forceinline__ void measure(const char* row, long long stride, int left, int t, float eps) {
        constexpr int kVectors = kRowBytes / 64, kTogether = kVectors % 6 == 0 ? 6 : kVectors % 4 == 0 ? 4 : 1;
        constexpr int kUnrolled = kVectors / kTogether <= 8 ? kVectors / kTogether : 1;
        static_assert(!NORM || kRowBytes % 64 == 0, "four lanes read a row in vectors of 16 bytes");
#pragma unroll kUnrolled
        for (int v0 = 0; v0 < kVectors; v0 += kTogether) {
            Vector<16> part[kTogether][2 * MT] = {};
#pragma unroll
            for (int v = 0; v < kTogether; ++v)
#pragma unroll
                for (int mh = 0; mh < 2 * MT; ++mh)
                    if (left > mh * 8) part[v][mh] = *reinterpret_cast<const Vector<16>*>(row + mh * 8 * stride + ((v0 + v) * 4 + t) * 16);
#pragma unroll
            for (int v = 0; v < kTogether; ++v)
#pragma unroll
                for (int mh = 0; mh < 2 * MT; ++mh) take(mh, part[v][mh].w, v0 + v == 0);
        }
        finish(eps);
    }

    // Rows of which all batches are staged, or on their way.
    __device__ __forceinline__ void measure_staged(StagedRows& staged, float eps) {
        measure_batch<0>(staged);
        finish(eps);
    }

    template <int B>
    __device__ __forceinline__ void measure_batch(StagedRows& staged) {
        wait_copies<kRowBatches - 1 - B>();
        if (kMatrix) __syncwarp();
        if constexpr (kMatrix) {
            u32 a[kBatch1][MT][4];
            staged.read_operands(a);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    u32 words[2 * kBatch1];
#pragma unroll
                    for (int s = 0; s < kBatch1; ++s) { words[2 * s] = a[s][m][h]; words[2 * s + 1] = a[s][m][h + 2]; }
                    take(2 * m + h, words, B == 0);
                }
        } else {
            u32 raw[kBatch1][2 * MT][kLaneBytes / 4];
            staged.read(raw);
#pragma unroll
            for (int s = 0; s < kBatch1; ++s)
#pragma unroll
                for (int mh = 0; mh < 2 * MT; ++mh) take(mh, raw[s][mh], B == 0 && s == 0);
        }
        staged.skip();
        if constexpr (B + 1 < kRowBatches) measure_batch<B + 1>(staged);
    }

    // A value of one of the rows: normalized, times 2^kNormedExponent.
    __device__ __forceinline__ float normalized(float value, int mh) const {
        if constexpr (kFloat) return (value - mean[mh]) * factor[mh];
        else return fmaf(value, factor[mh], mean[mh]);
    }
    __device__ __forceinline__ u32 normalized_pair(u32 pair, int mh) const {
        return round2(normalized(low_half(pair), mh), normalized(high_half(pair), mh));
    }
};
