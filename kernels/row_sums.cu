// Sums of g over rows, the gradient of a bias. With an activation, in place, u becomes act(u) and g becomes du = g * act'(u), and the sums are those
// of du. All in float32, rounded once.
//
// A thread keeps one vector of 16 bytes of columns and walks down the rows of its block, several at once, so that its sums stay in registers; the
// block's eight warps add theirs up at the end, in a fixed order. blockIdx: vectors of columns in steps of 32, parts of the rows. Floor: u and g, read and written.
//
// sums: (parts, COLUMNS) float32, one row for each part of the rows, to be added up.
// Defines: COLUMNS; MODE: 0 fp16, 1 bf16, 2 float32; ACTIVATION: 0 none, with u null, 1 GELU by erf, 2 GELU by tanh, 3 SiLU.
// Limits: sm_80 or newer; all rows lie one after the other and hold a multiple of 16 bytes.
#include "activation_slope.cuh"
#include "row_vectors.cuh"

constexpr int kTogether = ACTIVATION == 0 ? 8 : 2;  // rows whose loads are on their way at once

template <int COUNT>
__device__ __forceinline__ void several(Vector<16>* of_u, Vector<16>* of_g, long long row, long long step, float (&total)[kWidth]) {
    Vector<16> u[COUNT], g[COUNT];
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
        load_now(g[n], reinterpret_cast<const char*>(of_g + (row + n * step) * kVectors));
        if (ACTIVATION != 0) load_now(u[n], reinterpret_cast<const char*>(of_u + (row + n * step) * kVectors));
    }
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
        float gradient[kWidth];
        spread(gradient, g[n]);
        if constexpr (ACTIVATION != 0) {
            float value[kWidth];
            spread(value, u[n]);
#pragma unroll
            for (int k = 0; k < kWidth; ++k) {
                float slope;
                value[k] = with_slope(value[k], slope);
                gradient[k] *= slope;
            }
            of_u[(row + n * step) * kVectors] = rounded<16>(value);
            of_g[(row + n * step) * kVectors] = rounded<16>(gradient);
        }
#pragma unroll
        for (int k = 0; k < kWidth; ++k) total[k] += gradient[k];
    }
}

extern "C" __global__ void __launch_bounds__(32 * kWarps) row_sums(char* u, char* g, float* sums, long long rows) {
    __shared__ float parts[kWarps][32][kWidth + 1];
    wait_for_kernels_before();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, vector = blockIdx.x * 32 + lane;
    float total[kWidth] = {};
    const long long step = (long long)gridDim.y * kWarps;
    if (vector < kVectors) {
        Vector<16>* of_u = reinterpret_cast<Vector<16>*>(u) + vector;
        Vector<16>* of_g = reinterpret_cast<Vector<16>*>(g) + vector;
        long long row = (long long)blockIdx.y * kWarps + warp;
        for (; row + (kTogether - 1) * step < rows; row += kTogether * step) several<kTogether>(of_u, of_g, row, step, total);
        for (; row < rows; row += step) several<1>(of_u, of_g, row, step, total);
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k) parts[warp][lane][k] = total[k];
    __syncthreads();
    if (warp != 0 || vector >= kVectors) return;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += parts[w][lane][k];
        sums[(long long)blockIdx.y * COLUMNS + vector * kWidth + k] = sum;
    }
}
