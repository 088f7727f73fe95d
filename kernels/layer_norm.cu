// y = (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, rounded once to the type of x.
//
// One warp a row, which stays in registers between the sums and the result: x is read once and y written once. The mean comes first,
// then the squares of what differs from it, so that rows whose mean is far larger than their deviations lose nothing. Weight and bias
// are float32, from the L1 cache. Memory-bound.
//
// Defines: COLUMNS; MODE, the type of x and y: 0 float16, 1 bfloat16, 2 float32; MOMENTS 1 to write no more of a row than its mean and
// the sum of the squares of what differs from it, float32.
// Limits: sm_80 or newer; rows begin at multiples of 16 bytes and hold a multiple of 16 bytes, at most 4096 columns.
#include "instructions.cuh"

constexpr int kBytes = MODE == 2 ? 4 : 2;
constexpr int kWidth = 16 / kBytes;                    // columns of a vector
constexpr int kVectors = COLUMNS / kWidth;             // vectors of a row
constexpr int kSteps = (kVectors + 31) / 32;           // vectors of a lane, the last perhaps outside
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

__device__ __forceinline__ float over_warp_sum(float value) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) value += __shfl_xor_sync(0xffffffffu, value, lanes);
    return value;
}

extern "C" __global__ void __launch_bounds__(32 * kWarps) layer_norm(
    const char* x, const float* weight, const float* bias, char* y, long long rows, long long stride, int eps_bits) {
    wait_for_kernels_before();
    const long long row = (long long)blockIdx.x * kWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= rows) return;
    const Vector<16>* from = reinterpret_cast<const Vector<16>*>(x + row * stride);
    Vector<16>* to = reinterpret_cast<Vector<16>*>(y + row * COLUMNS * kBytes);

    float values[kSteps][kWidth] = {};
    float sum = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        if (step * 32 + lane < kVectors) {
            spread(values[step], from[step * 32 + lane]);
#pragma unroll
            for (int k = 0; k < kWidth; ++k) sum += values[step][k];
        }
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
    squares = over_warp_sum(squares);
    if (MOMENTS) {
        if (lane == 0) reinterpret_cast<float2*>(y)[row] = make_float2(mean, squares);
        return;
    }
    const float scale = rsqrtf(squares * (1.0f / COLUMNS) + __int_as_float(eps_bits));

#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        if (step * 32 + lane < kVectors) {
            const int column = (step * 32 + lane) * kWidth;
            float out[kWidth];
#pragma unroll
            for (int k = 0; k < kWidth; k += 4) {
                const float4 w = *reinterpret_cast<const float4*>(weight + column + k);
                const float4 b = *reinterpret_cast<const float4*>(bias + column + k);
                out[k] = fmaf(values[step][k] * scale, w.x, b.x);
                out[k + 1] = fmaf(values[step][k + 1] * scale, w.y, b.y);
                out[k + 2] = fmaf(values[step][k + 2] * scale, w.z, b.z);
                out[k + 3] = fmaf(values[step][k + 3] * scale, w.w, b.w);
            }
            Vector<16> rounded;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if constexpr (MODE == 2) rounded.w[k] = __float_as_uint(out[k]);
                else rounded.w[k] = round2(out[2 * k], out[2 * k + 1]);
            }
            to[step * 32 + lane] = rounded;
        }
}
