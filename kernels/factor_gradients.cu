// The gradients of two factors out of that of their product: dL = dW Rᵀ and dR = Lᵀ dW for W = L R, each only where the factor is not zero.
//
// An inner feature is a column of L, which reaches some rows of W (outputs), and a row of R, which reaches some columns (inputs). All inner
// features with the same outputs and inputs are the members of a tile, at most 32; a table names them, -1 behind the last one.
// A block computes 32 rows of one tile: of dL (outputs) or of dR (inputs), in float32. Its four groups of threads take every fourth slice of
// the sum, the next slice on its way in registers, and add up what they have at the end, in a fixed order. blockIdx: tile, rows, linear.
//
// Floor: dW is read twice, once for each factor.
//
// dw: (linears, outputs, inputs), float32. MODE is the factors' dtype: 0 fp16, 1 bf16, 2 float32; gradients are float32.
// Defines: LINEARS, MODE, L_A L_B L_C L_D and R_A R_B R_C R_D, the patterns of the factors.
#include "factor_values.cuh"

constexpr int kTile = 32;  // members, rows, and terms of a slice
constexpr int kGroups = 4, kGroupThreads = 128, kEach = kTile * kTile / kGroupThreads;
constexpr int kOutputs = L_A * L_B * L_D, kInputs = R_A * R_C * R_D;
constexpr int kOutputTiles = (L_B + kTile - 1) / kTile;
static_assert(L_A * L_C * L_D == R_A * R_B * R_D, "factors that fit each other");

struct Operands {
    const Weight *left[LINEARS], *right[LINEARS];
    float *left_gradient[LINEARS], *right_gradient[LINEARS];
};

struct Slice {
    float dw[kTile][kTile + 2];       // by term, then by row
    float weights[kTile][kTile + 4];  // by term, then by member
};

// OF_LEFT: rows are outputs, terms inputs; else the other way round.
template <bool OF_LEFT>
__device__ __forceinline__ void gradient_rows(
    const float* dw, const Weight* factor, float* gradient, const int* members, int first_row, int left_residue, int right_residue, Slice* slices) {
    constexpr int kRows = OF_LEFT ? L_B : R_C, kTerms = OF_LEFT ? R_C : L_B;
    constexpr int kRowStep = OF_LEFT ? L_D * kInputs : R_D, kTermStep = OF_LEFT ? R_D : L_D * kInputs;  // in dW
    constexpr int kWeightStep = OF_LEFT ? R_D : L_C * L_D;                                             // of a term in the factor
    const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads, some = members[0];
    const int left_block = some / (L_C * L_D), right_block = some / (R_B * R_D);
    dw += (long long)(left_block * L_B * L_D + left_residue) * kInputs + right_block * R_C * R_D + right_residue;
    const int left_start = left_block * L_B * L_C * L_D + left_residue, right_start = right_block * R_B * R_C * R_D + right_residue;
    // Neighbouring threads read neighbouring columns of dW, and neighbouring weights.
    const int fast = thread % kTile, slow = thread / kTile;
    constexpr int kSlow = kGroupThreads / kTile;
    Slice& slice = slices[group];

    float next_dw[kEach], next_weights[kEach];
    auto read = [&](int start) {
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const int other = slow + k * kSlow;
            const int row = first_row + (OF_LEFT ? other : fast), term = start + (OF_LEFT ? fast : other);
            next_dw[k] = row < kRows && term < kTerms ? dw[(long long)row * kRowStep + (long long)term * kTermStep] : 0.0f;
            const int m = members[OF_LEFT ? other : fast];
            const int at = OF_LEFT ? right_start + m / R_D % R_B * (R_C * R_D) : left_start + m / L_D % L_C * L_D;
            next_weights[k] = m >= 0 && term < kTerms ? value_of(factor[at + term * kWeightStep]) : 0.0f;
        }
    };
    const int row = thread / 8 * 2, member = thread % 8 * 4;
    float sums[2][4] = {};
    int start = group * kTile;
    read(start);
    while (start < kTerms) {
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const int other = slow + k * kSlow;
            slice.dw[OF_LEFT ? fast : other][OF_LEFT ? other : fast] = next_dw[k];
            slice.weights[OF_LEFT ? fast : other][OF_LEFT ? other : fast] = next_weights[k];
        }
        asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(kGroupThreads) : "memory");
        start += kGroups * kTile;
        read(start);
#pragma unroll 8
        for (int term = 0; term < kTile; ++term) {
            const float2 left = *reinterpret_cast<const float2*>(&slice.dw[term][row]);
            const float4 right = *reinterpret_cast<const float4*>(&slice.weights[term][member]);
            const float rows[2] = {left.x, left.y}, columns[4] = {right.x, right.y, right.z, right.w};
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(rows[i], columns[j], sums[i][j]);
        }
        asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(kGroupThreads) : "memory");
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) slice.weights[row + i][member + j] = sums[i][j];
    __syncthreads();
    for (int at = threadIdx.x; at < kTile * kTile; at += kGroups * kGroupThreads) {
        const int own = OF_LEFT ? at / kTile : at % kTile, m = members[OF_LEFT ? at % kTile : at / kTile];
        const int r = first_row + own, k = OF_LEFT ? at % kTile : at / kTile;
        if (m < 0 || r >= kRows) continue;
        float sum = 0.0f;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) sum += slices[g].weights[own][k];
        gradient[OF_LEFT ? left_start + r * L_C * L_D + m / L_D % L_C * L_D : right_start + m / R_D % R_B * (R_C * R_D) + r * R_D] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(kGroups* kGroupThreads)
    factor_gradients(const float* dw, const int* table, const __grid_constant__ Operands operands) {
    __shared__ Slice slices[kGroups];
    __shared__ int members[kTile];
    if (threadIdx.x < kTile) members[threadIdx.x] = table[blockIdx.x * kTile + threadIdx.x];
    __syncthreads();
    const int linear = blockIdx.z, tile = blockIdx.y, left_residue = members[0] % L_D, right_residue = members[0] % R_D;
    dw += (long long)linear * kOutputs * kInputs;
    if (tile < kOutputTiles) {
        gradient_rows<true>(dw, operands.right[linear], operands.left_gradient[linear], members, tile * kTile, left_residue, right_residue, slices);
    } else {
        const int first_row = (tile - kOutputTiles) * kTile;
        gradient_rows<false>(dw, operands.left[linear], operands.right_gradient[linear], members, first_row, left_residue, right_residue, slices);
    }
}
