// W = L R for two factors: the dense matrix of each of several linears, side by side along the outputs.
//
// An entry of W sums over the inner features that its output and its input share. Those of an output are block i of L's inner side with residue
// j; those of an input likewise by R; a table gives for each pair of (block, residue) the first they share, the step to the next, and how many
// there are. A thread computes kRows entries below each other, for outputs of one block and residue, which share the right factor's values;
// neighbours along the inputs. Factors are read from the L1 and L2 caches. blockIdx: inputs, outputs, linear.
//
// left, right: factors of shapes (a, b, c, d); w: (linears, outputs, inputs), float32. MODE is the factors' dtype: 0 fp16, 1 bf16, 2 float32.
// Defines: LINEARS, MODE, L_A L_B L_C L_D and R_A R_B R_C R_D, the patterns of the factors.
#include "factor_values.cuh"

constexpr int kOutputs = L_A * L_B * L_D, kInputs = R_A * R_C * R_D;
static_assert(L_A * L_C * L_D == R_A * R_B * R_D, "factors that fit each other");

struct Operands {
    const Weight *left[LINEARS], *right[LINEARS];
};

constexpr int kRows = 8, kRowTiles = (L_B + kRows - 1) / kRows;

extern "C" __global__ void __launch_bounds__(128) multiply_out(const int3* shared_features, float* w, Operands operands) {
    const int input = blockIdx.x * 128 + threadIdx.x;
    if (input >= kInputs) return;
    const Weight *left = operands.left[blockIdx.z], *right = operands.right[blockIdx.z];
    const int left_residue = blockIdx.y % L_D, first_row = blockIdx.y / L_D % kRowTiles * kRows, left_block = blockIdx.y / L_D / kRowTiles;
    const int right_block = input / (R_C * R_D), right_residue = input % R_D;
    const int3 shared = shared_features[(left_block * L_D + left_residue) * (R_A * R_D) + right_block * R_D + right_residue];
    // L[i, p, q, j] of inner feature m = (i * c + q) * d + j, and R[i, p, q, j] of m = (i * b + p) * d + j
    const Weight* from_left = left + (long long)(left_block * L_B + first_row) * L_C * L_D + left_residue;
    const Weight* from_right = right + (long long)right_block * R_B * R_C * R_D + input % (R_C * R_D);
    const int rows = min(kRows, L_B - first_row);
    float sums[kRows] = {};
    for (int n = 0, m = shared.x; n < shared.z; ++n, m += shared.y) {
        const float value = value_of(from_right[(long long)(m / R_D - right_block * R_B) * R_C * R_D]);
        const Weight* column = from_left + (m / L_D - left_block * L_C) * L_D;
#pragma unroll
        for (int k = 0; k < kRows; ++k)
            if (k < rows) sums[k] = fmaf(value_of(column[k * L_C * L_D]), value, sums[k]);
    }
    w += ((long long)blockIdx.z * kOutputs + (left_block * L_B + first_row) * L_D + left_residue) * kInputs + input;
#pragma unroll
    for (int k = 0; k < kRows; ++k)
        if (k < rows) w[(long long)k * L_D * kInputs] = sums[k];
}
