// y = act(scale * norm(x) W^T + shift) + residual for few rows, where neither arithmetic nor bytes take the time but the way to memory and back.
// So there is one round of loads, one of products, one of stores.
//
// A block makes 16*ROW_TILES rows of COLUMNS columns, and its SPLIT warps share the inputs among them. So every element of x and of W that a block
// needs is an operand of one warp, and goes from memory straight to that warp's registers, all loads at once. A lane takes 16 adjacent
// bytes of a row: the operands of two k16 steps, as the order of the inputs is free while x and W have the same. The warps' sums meet in
// shared memory. With NORM so do the sums of the rows before, first of the elements, then of the squares of what differs from their mean.
//
//     x   lane t of a quad:  inputs 8t .. 8t+7 of each 32     ──┐
//     W   lane t of a quad:  inputs 8t .. 8t+7 of each 32     ──┴─ mma m16n8k16 ──> sums of one warp ──> shared memory ──> y
//
// From sm_90 on a kernel may begin before the one before it has ended, and then has its weights by the time that x is there. Weights must
// therefore not come from the kernel before; whoever launches sees to that.
//
// Measured on an H200, beside PyTorch: recipes/results/kernels_h200.csv.
//
// Defines: IN_FEATURES, OUT_FEATURES, MODE (0 fp16, 1 bf16), NORM, ACTIVATION (exact_activation.cuh), RESIDUAL, ROW_TILES, COLUMNS, SPLIT,
// RESIDENT (blocks that a multiprocessor runs at once).
// Limits: sm_80 or newer; IN_FEATURES a multiple of 32*SPLIT, OUT_FEATURES of COLUMNS; rows at multiples of 16 bytes.
#include "exact_activation.cuh"
#include "instructions.cuh"

constexpr int kChunks = IN_FEATURES / 32 / SPLIT;  // of 32 inputs, of a warp
constexpr int kTiles = COLUMNS / 8, kRows = 16 * ROW_TILES, kThreads = 32 * SPLIT;
constexpr int kPitch = COLUMNS + (40 - COLUMNS % 32) % 32;  // floats of a row of sums: 8 more than whole rounds of the banks
static_assert(IN_FEATURES % (32 * SPLIT) == 0 && COLUMNS % 8 == 0 && OUT_FEATURES % COLUMNS == 0, "whole chunks and tiles");

constexpr int kOutputs = (kRows * COLUMNS / 4 + kThreads - 1) / kThreads;  // of a thread, four adjacent ones each

// A warp's part of the rows g and g + 8 of each tile of 16.
struct Rows {
    Vector<16> part[ROW_TILES][2][kChunks];

    __device__ __forceinline__ void load(const char* x, long long rows, long long stride) {
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int c = 0; c < kChunks; ++c) {
                    part[m][h][c] = {};
                    if (m * 16 + h * 8 < rows) load_now(part[m][h][c], x + (m * 16 + h * 8) * stride + c * 64);
                }
    }

    // Sums over whole rows, from those of a warp's part.
    __device__ __forceinline__ static void meet(float (&sum)[ROW_TILES][2], float* shared, int warp, int g, int t) {
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float quad = over_quad_sum(sum[m][h]);
                if (t == 0) shared[warp * kRows + m * 16 + h * 8 + g] = quad;
            }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                sum[m][h] = 0.0f;
#pragma unroll
                for (int s = 0; s < SPLIT; ++s) sum[m][h] += shared[s * kRows + m * 16 + h * 8 + g];
            }
    }

    // `norm` is the lane's first weight of the norm in shared memory, its biases lie IN_FEATURES further.
    __device__ __forceinline__ void normalize(const float* norm, float eps, float* shared, int warp, int g, int t) {
        float mean[ROW_TILES][2] = {}, square[ROW_TILES][2] = {};
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int c = 0; c < kChunks; ++c)
#pragma unroll
                    for (int k = 0; k < 4; ++k) mean[m][h] += low_half(part[m][h][c].w[k]) + high_half(part[m][h][c].w[k]);
        meet(mean, shared, warp, g, t);
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                mean[m][h] *= 1.0f / IN_FEATURES;
#pragma unroll
                for (int c = 0; c < kChunks; ++c)
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        const float low = low_half(part[m][h][c].w[k]) - mean[m][h], high = high_half(part[m][h][c].w[k]) - mean[m][h];
                        square[m][h] = fmaf(low, low, fmaf(high, high, square[m][h]));
                    }
            }
        meet(square, shared + SPLIT * kRows, warp, g, t);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            float gain[8], offset[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) gain[k] = norm[c * 32 + k], offset[k] = norm[IN_FEATURES + c * 32 + k];
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float scale = rsqrtf(square[m][h] * (1.0f / IN_FEATURES) + eps);
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        u32& word = part[m][h][c].w[k];
                        word = round2(fmaf((low_half(word) - mean[m][h]) * scale, gain[2 * k], offset[2 * k]),
                                      fmaf((high_half(word) - mean[m][h]) * scale, gain[2 * k + 1], offset[2 * k + 1]));
                    }
                }
        }
        __syncthreads();  // products take the place of these sums
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT)
few_rows(const char* x, const char* weight, const float* __restrict__ norm, const float* __restrict__ columns, const char* residual, char* y,
         long long rows, long long x_stride, long long residual_stride, int eps_bits) {
    extern __shared__ __align__(16) float sums[];  // [SPLIT][kRows][kPitch], behind them the block's part of `columns`, and `norm`
    float* const columns_here = sums + SPLIT * kRows * kPitch;
    float* const norm_here = columns_here + 2 * COLUMNS;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int column0 = blockIdx.x * COLUMNS, input0 = warp * kChunks * 32 + t * 8;
    const long long row0 = (long long)blockIdx.y * kRows;

    Vector<16> weights[kTiles][kChunks];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int c = 0; c < kChunks; ++c) load_now(weights[n][c], weight + ((long long)(column0 + n * 8 + g) * IN_FEATURES + input0 + c * 32) * 2);
    for (int k = threadIdx.x; k < 2 * COLUMNS; k += kThreads) columns_here[k] = columns[k / COLUMNS * OUT_FEATURES + column0 + k % COLUMNS];
    if constexpr (NORM)
        for (int k = threadIdx.x; k < 2 * IN_FEATURES; k += kThreads) norm_here[k] = norm[k];
    wait_for_kernels_before();
    Rows own;
    own.load(x + (row0 + g) * x_stride + input0 * 2, rows - row0 - g, x_stride);
    Vector<8> added[kOutputs] = {};
    if constexpr (RESIDUAL)
#pragma unroll
        for (int n = 0; n < kOutputs; ++n) {
            const int at = (n * kThreads + threadIdx.x) * 4, row = at / COLUMNS;
            if (row < kRows && row0 + row < rows) load_now(added[n], residual + (row0 + row) * residual_stride + (column0 + at % COLUMNS) * 2);
        }
    if constexpr (NORM) {
        __syncthreads();
        own.normalize(norm_here + input0, __int_as_float(eps_bits), sums, warp, g, t);
    }

    float products[ROW_TILES][kTiles][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
        for (int s = 0; s < 4; s += 2)
#pragma unroll
            for (int m = 0; m < ROW_TILES; ++m) {
                const auto& [above, below] = own.part[m];
                const u32 operand[4] = {above[c].w[s], below[c].w[s], above[c].w[s + 1], below[c].w[s + 1]};
#pragma unroll
                for (int n = 0; n < kTiles; ++n) mma(products[m][n], operand, weights[n][c].w[s], weights[n][c].w[s + 1]);
            }
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                *reinterpret_cast<float2*>(sums + (warp * kRows + m * 16 + h * 8 + g) * kPitch + n * 8 + t * 2) =
                    make_float2(products[m][n][2 * h], products[m][n][2 * h + 1]);
    __syncthreads();

#pragma unroll
    for (int n = 0; n < kOutputs; ++n) {
        const int at = (n * kThreads + threadIdx.x) * 4, row = at / COLUMNS, column = at % COLUMNS;
        if (row >= kRows || row0 + row >= rows) break;
        float sum[4] = {};
#pragma unroll
        for (int s = 0; s < SPLIT; ++s) {
            const float4 of_warp = *reinterpret_cast<const float4*>(sums + (s * kRows + row) * kPitch + column);
            sum[0] += of_warp.x, sum[1] += of_warp.y, sum[2] += of_warp.z, sum[3] += of_warp.w;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k] = activate<ACTIVATION, true>(fmaf(sum[k], columns_here[column + k], columns_here[COLUMNS + column + k]));
        Vector<8> out;
#pragma unroll
        for (int k = 0; k < 2; ++k) out.w[k] = round2(sum[2 * k] + low_half(added[n].w[k]), sum[2 * k + 1] + high_half(added[n].w[k]));
        *reinterpret_cast<Vector<8>*>(y + (row0 + row) * (OUT_FEATURES * 2) + (column0 + column) * 2) = out;
    }
}
