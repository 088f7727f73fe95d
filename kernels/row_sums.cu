// Sums of g over rows, the gradient of a bias. With an activation, in place, u becomes act(u) and g becomes du = g * act'(u), and the sums are those
// of du. All in float32, rounded once.
//
// A thread keeps one vector of 16 bytes of columns and walks down the rows of its block, several at once, so that its sums stay in registers. Half a warp
// has neighbouring vectors of a row, the other half those of the next row. The block's threads add theirs up at the end, in a fixed order. blockIdx: vectors of
// columns in steps of 16, parts of the rows. Floor: u and g, read and written.
//
// sums: (parts, COLUMNS) float32, one row for each part of the rows, to be added up: by this kernel too, which takes them as g.
// Defines: COLUMNS; MODE: 0 fp16, 1 bf16, 2 float32; ACTIVATION: 0 none, with u null, 1 GELU by erf, 2 GELU by tanh, 3 SiLU; WARPS of a block, of
// which 32 run on a multiprocessor at once; TOGETHER, the rows of a thread whose loads are on their way at once.
// Limits: sm_80 or newer; all rows lie one after the other and hold a multiple of 16 bytes.
#include "activation_slope.cuh"
#include "row_vectors.cuh"

constexpr int kLanes = 16, kColumns = kLanes * kWidth;  // of a row, in half a warp
static_assert(32 % WARPS == 0 && kColumns <= 32 * WARPS, "whole multiprocessors, and a thread for each column");

extern "C" __global__ void __launch_bounds__(32 * WARPS, 32 / WARPS) row_sums(char* u, char* g, float* sums, long long rows) {
    __shared__ __align__(16) float parts[WARPS][kColumns];
    wait_for_kernels_before();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, vector = blockIdx.x * kLanes + lane % kLanes;
    float total[kWidth] = {};
    if (vector < kVectors) {
        Vector<16>* const of_u = reinterpret_cast<Vector<16>*>(u) + vector;
        Vector<16>* const of_g = reinterpret_cast<Vector<16>*>(g) + vector;
        const long long step = (long long)gridDim.y * 2 * WARPS;
        for (long long first = ((long long)blockIdx.y * WARPS + warp) * 2 + lane / kLanes; first < rows; first += TOGETHER * step) {
            Vector<16> own_u[TOGETHER] = {}, own_g[TOGETHER] = {};
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n)
                if (first + n * step < rows) {
                    load_now(own_g[n], reinterpret_cast<const char*>(of_g + (first + n * step) * kVectors));
                    if (ACTIVATION != 0) load_now(own_u[n], reinterpret_cast<const char*>(of_u + (first + n * step) * kVectors));
                }
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) {
                float gradient[kWidth];
                spread(gradient, own_g[n]);
                if (ACTIVATION != 0 && first + n * step < rows) {
                    float value[kWidth];
                    spread(value, own_u[n]);
#pragma unroll
                    for (int k = 0; k < kWidth; ++k) {
                        float slope;
                        value[k] = with_slope(value[k], slope);
                        gradient[k] *= slope;
                    }
                    of_u[(first + n * step) * kVectors] = rounded<16>(value);
                    of_g[(first + n * step) * kVectors] = rounded<16>(gradient);
                }
#pragma unroll
                for (int k = 0; k < kWidth; ++k) total[k] += gradient[k];
            }
        }
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k) total[k] += __shfl_xor_sync(0xffffffffu, total[k], kLanes);
    if (lane < kLanes)
#pragma unroll
        for (int k = 0; k < kWidth; k += 4) reinterpret_cast<float4*>(parts[warp])[(lane * kWidth + k) / 4] = make_float4(total[k], total[k + 1], total[k + 2], total[k + 3]);
    __syncthreads();
    const int column = blockIdx.x * kColumns + threadIdx.x;
    if (threadIdx.x >= kColumns || column >= COLUMNS) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += parts[w][threadIdx.x];
    sums[(long long)blockIdx.y * COLUMNS + column] = sum;
}
