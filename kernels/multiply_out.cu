// W = L R for two factors: the dense matrix of each of several linears, side by side along the outputs.
//
// An entry of W sums over the inner features that its output and its input share. Those of an output are block i of L's inner side with residue
// j; those of an input likewise by R; a table gives for each pair of (block, residue) the first they share, the step to the next, and how many
// there are. A block computes ROWS outputs of one block and residue, whose part of L lies in shared memory, by inner feature; a thread all of them for one input
// or for two neighbours, which share the same inner features. So a value of R serves ROWS products, and 16 bytes of L four for each input. R is
// read from the L1 and L2 caches. blockIdx: inputs, outputs, linear.
//
// left, right: factors of shapes (a, b, c, d); w: (linears, outputs, inputs). MODE is the factors' dtype, TARGET that of w: 0 fp16, 1 bf16, 2 float32.
// Defines: LINEARS, MODE, TARGET, ROWS (4, 8 or 16), EACH (inputs of a thread, 2 where R_D is 1 and R_C even, or 1), L_A L_B L_C L_D and R_A R_B R_C R_D, the patterns of the factors.
#include "factor_values.cuh"
#include "target.cuh"

constexpr int kOutputs = L_A * L_B * L_D, kInputs = R_A * R_C * R_D, kThreads = 128;
constexpr int kRowTiles = (L_B + ROWS - 1) / ROWS, kLine = ROWS + 4;
static_assert(L_A * L_C * L_D == R_A * R_B * R_D, "factors that fit each other");

struct Operands {
    const Weight *left[LINEARS], *right[LINEARS];
};

extern "C" __global__ void __launch_bounds__(kThreads) multiply_out(const int3* shared_features, Target* w, Operands operands) {
    __shared__ __align__(16) float lines[L_C * kLine];  // L by its inner feature, then by output; four words apart, as neighbours would meet in one bank
    const Weight *left = operands.left[blockIdx.z], *right = operands.right[blockIdx.z];
    const int left_residue = blockIdx.y % L_D, first_row = blockIdx.y / L_D % kRowTiles * ROWS, left_block = blockIdx.y / L_D / kRowTiles;
    // L[i, p, q, j] of inner feature m = (i * c + q) * d + j, and R[i, p, q, j] of m = (i * b + p) * d + j
    const Weight* from_left = left + (long long)(left_block * L_B + first_row) * L_C * L_D + left_residue;
    for (int at = threadIdx.x; at < ROWS * L_C; at += kThreads) {
        const int row = at / L_C, q = at % L_C;
        lines[q * kLine + row] = first_row + row < L_B ? value_of(from_left[(long long)row * L_C * L_D + q * L_D]) : 0.0f;
    }
    __syncthreads();
    const int input = (blockIdx.x * kThreads + threadIdx.x) * EACH;
    if (input >= kInputs) return;
    const int right_block = input / (R_C * R_D), right_residue = input % R_D;
    const int3 shared = shared_features[(left_block * L_D + left_residue) * (R_A * R_D) + right_block * R_D + right_residue];
    const Weight* from_right = right + (long long)right_block * R_B * R_C * R_D + input % (R_C * R_D);
    float sums[ROWS][EACH] = {};
#pragma unroll 4
    for (int n = 0, m = shared.x; n < shared.z; ++n, m += shared.y) {
        const float4* line = reinterpret_cast<const float4*>(lines + (m / L_D - left_block * L_C) * kLine);
        float value[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e) value[e] = value_of(from_right[(long long)(m / R_D - right_block * R_B) * R_C * R_D + e]);
#pragma unroll
        for (int k = 0; k < ROWS; k += 4) {
            const float4 four = line[k / 4];
            const float rows[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int e = 0; e < EACH; ++e) sums[k + i][e] = fmaf(rows[i], value[e], sums[k + i][e]);
        }
    }
    w += ((long long)blockIdx.z * kOutputs + (left_block * L_B + first_row) * L_D + left_residue) * kInputs + input;
#pragma unroll
    for (int k = 0; k < ROWS; ++k)
        if (first_row + k < L_B)
#pragma unroll
            for (int e = 0; e < EACH; ++e) w[(long long)k * L_D * kInputs + e] = round_to_target(sums[k][e]);
}
