// The gradient of y = n * weight + bias, n = (x - mean) / deviation, over the last dimension. With h = g * weight:
// dx = r + (h - mean(h) - n * mean(h * n)) / deviation, and sums over rows: g * n for the weight, g for the bias, and dx for the bias of the
// operation before.
//
// One warp a row, as in layer_norm.cu; moments are computed again, which costs nothing beside the memory. A warp takes every so many rows, the next
// one of narrow rows on its way, so that its sums stay in registers; the block's warps add theirs up at the end, in a fixed order. Floor: x, g and r,
// read once, and dx.
//
// sums: (blocks, 3, COLUMNS) float32, to be added up over blocks. A null r stands for zeros.
// Defines: COLUMNS; MODE, the type of x, g, r and dx: 0 float16, 1 bfloat16, 2 float32; VECTOR_BYTES (row_vectors.cuh). The weight is float32; a null one stands for ones. WARPS of a
// block: more keep more rows on their way, and leave each fewer registers.
// Limits: sm_80 or newer; all rows lie one after the other and hold a multiple of 16 bytes, at most 1024 columns.
#include "row_vectors.cuh"

constexpr bool kAhead = kSteps * kWidth <= (MODE == 2 ? 16 : 24);  // wider rows need the registers

extern "C" __global__ void __launch_bounds__(32 * WARPS) norm_gradient(
    const char* x, const char* g, const char* r, const float* weight, char* dx, float* sums, long long rows, int eps_bits) {
    __shared__ float parts[WARPS][COLUMNS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float of_weight[kSteps][kWidth] = {}, of_bias[kSteps][kWidth] = {}, of_dx[kSteps][kWidth] = {};
    Vector<kVectorBytes> next_x[kSteps], next_g[kSteps], next_r[kSteps];
    auto read = [&](long long row) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            if (row < rows && step * 32 + lane < kVectors) {
                const long long byte = (row * kVectors + step * 32 + lane) * kVectorBytes;
                load_now(next_x[step], x + byte);
                load_now(next_g[step], g + byte);
                if (r != nullptr) load_now(next_r[step], r + byte);
            }
    };
    wait_for_kernels_before();
    long long row = (long long)blockIdx.x * WARPS + warp;
    if (kAhead) read(row);
    for (; row < rows; row += (long long)gridDim.x * WARPS) {
        if (!kAhead) read(row);
        float n[kSteps][kWidth] = {}, h[kSteps][kWidth] = {};
        Vector<kVectorBytes> beside[kSteps];
        float sum = 0.0f;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            if (step * 32 + lane < kVectors) {
                spread(n[step], next_x[step]);
                spread(h[step], next_g[step]);
                beside[step] = next_r[step];
#pragma unroll
                for (int k = 0; k < kWidth; ++k) sum += n[step][k];
            }
        if (kAhead) read(row + (long long)gridDim.x * WARPS);
        const float scale = rsqrtf(center(n, sum, lane).y * (1.0f / COLUMNS) + __int_as_float(eps_bits));
        float of_h = 0.0f, of_product = 0.0f;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            if (step * 32 + lane < kVectors)
#pragma unroll
                for (int k = 0; k < kWidth; ++k) {
                    n[step][k] *= scale;
                    of_weight[step][k] = fmaf(h[step][k], n[step][k], of_weight[step][k]);
                    of_bias[step][k] += h[step][k];
                    if (weight != nullptr) h[step][k] *= weight[(step * 32 + lane) * kWidth + k];
                    of_h += h[step][k];
                    of_product = fmaf(h[step][k], n[step][k], of_product);
                }
        const float shift = over_warp_sum(of_h) * (1.0f / COLUMNS), along = over_warp_sum(of_product) * (1.0f / COLUMNS);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            if (step * 32 + lane < kVectors) {
                float out[kWidth] = {};
                if (r != nullptr) spread(out, beside[step]);
#pragma unroll
                for (int k = 0; k < kWidth; ++k) {
                    out[k] = fmaf(fmaf(-n[step][k], along, h[step][k] - shift), scale, out[k]);
                    of_dx[step][k] += out[k];
                }
                reinterpret_cast<Vector<kVectorBytes>*>(dx)[row * kVectors + step * 32 + lane] = rounded<kVectorBytes>(out);
            }
    }
    sums += (long long)blockIdx.x * 3 * COLUMNS;
    auto add_up = [&](const float (&own)[kSteps][kWidth], float* to) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            if (step * 32 + lane < kVectors)
#pragma unroll
                for (int k = 0; k < kWidth; ++k) parts[warp][(step * 32 + lane) * kWidth + k] = own[step][k];
        __syncthreads();
        for (int column = threadIdx.x; column < COLUMNS; column += 32 * WARPS) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += parts[w][column];
            to[column] = sum;
        }
        __syncthreads();
    };
    add_up(of_weight, sums);
    add_up(of_bias, sums + COLUMNS);
    add_up(of_dx, sums + 2 * COLUMNS);
}
