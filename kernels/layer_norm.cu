// y = (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, rounded once to the type of x.
//
// One warp a row, which stays in registers between the sums and the result: x is read once and y written once. The mean comes first,
// then the squares of what differs from it, so that rows whose mean is far larger than their deviations lose nothing. Weight and bias
// are float32, from the L1 cache; null pointers stand for ones and zeros. Memory-bound.
//
// Defines: COLUMNS; MODE, the type of x and y: 0 float16, 1 bfloat16, 2 float32; VECTOR_BYTES (row_vectors.cuh); MOMENTS 1 to write no more of a row than its mean and
// the sum of the squares of what differs from it, float32.
// Limits: sm_80 or newer; rows begin at multiples of 16 bytes and hold a multiple of 16 bytes, at most 4096 columns.
#include "row_vectors.cuh"

extern "C" __global__ void __launch_bounds__(32 * kWarps) layer_norm(
    const char* x, const float* weight, const float* bias, char* y, long long rows, long long stride, int eps_bits) {
    wait_for_kernels_before();
    const long long row = (long long)blockIdx.x * kWarps + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= rows) return;
    const Vector<kVectorBytes>* from = reinterpret_cast<const Vector<kVectorBytes>*>(x + row * stride);
    Vector<kVectorBytes>* to = reinterpret_cast<Vector<kVectorBytes>*>(y + row * COLUMNS * kBytes);

    float values[kSteps][kWidth] = {};
    float sum = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        if (step * 32 + lane < kVectors) {
            spread(values[step], from[step * 32 + lane]);
#pragma unroll
            for (int k = 0; k < kWidth; ++k) sum += values[step][k];
        }
    const float2 moments = center(values, sum, lane);
    if (MOMENTS) {
        if (lane == 0) reinterpret_cast<float2*>(y)[row] = moments;
        return;
    }
    const float scale = rsqrtf(moments.y * (1.0f / COLUMNS) + __int_as_float(eps_bits));

#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        if (step * 32 + lane < kVectors) {
            const int column = (step * 32 + lane) * kWidth;
            float out[kWidth];
#pragma unroll
            for (int k = 0; k < kWidth; ++k) out[k] = values[step][k] * scale;
            if (weight != nullptr) {
#pragma unroll
                for (int k = 0; k < kWidth; k += 4) {
                    const float4 w = *reinterpret_cast<const float4*>(weight + column + k);
                    const float4 b = *reinterpret_cast<const float4*>(bias + column + k);
                    out[k] = fmaf(out[k], w.x, b.x);
                    out[k + 1] = fmaf(out[k + 1], w.y, b.y);
                    out[k + 2] = fmaf(out[k + 2], w.z, b.z);
                    out[k + 3] = fmaf(out[k + 3], w.w, b.w);
                }
            }
            to[step * 32 + lane] = rounded<kVectorBytes>(out);
        }
}
