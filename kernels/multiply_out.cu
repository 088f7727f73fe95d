// W = L R for two factors: the dense matrix of each of several linears, side by side along the outputs.
//
// An entry of W sums over the inner features that its output and its input share. Those of an output are block i of L's inner side with residue
// j; those of an input likewise by R; a table gives for each pair of (block, residue) the first they share, the step to the next, and how many
// there are. A block of threads computes 64 outputs of one block and residue by 64 inputs of another, by tensor cores, 32 by 32 a warp. The
// terms of the next slice are on their way in registers. blockIdx: inputs, outputs, linear.
//
// Floor: W is written once.
//
// left, right: factors of shapes (a, b, c, d); w: (linears, outputs, inputs). MODE is the factors' dtype, TARGET that of w: 0 fp16, 1 bf16, 2 float32.
// Defines: LINEARS, MODE, TARGET, L_A L_B L_C L_D and R_A R_B R_C R_D, the patterns of the factors.
#include "factor_values.cuh"
#include "target.cuh"
#include "tf32_pairs.cuh"

constexpr int kOutputs = L_A * L_B * L_D, kInputs = R_A * R_C * R_D;
constexpr int kTile = 64, kSlice = 16, kThreads = 128, kEach = kTile * kSlice / kThreads;  // outputs and inputs; terms; of a thread
constexpr int kRowTiles = (L_B + kTile - 1) / kTile, kColumnTiles = (R_C + kTile - 1) / kTile;
constexpr bool kInPairs = R_D == 1 && R_C % 2 == 0;  // neighbouring entries of W lie side by side
static_assert(L_A * L_C * L_D == R_A * R_B * R_D, "factors that fit each other");

struct Operands {
    const Weight *left[LINEARS], *right[LINEARS];
};

struct __align__(2 * sizeof(Target)) Two {
    Target first, second;
};

extern "C" __global__ void __launch_bounds__(kThreads)
    multiply_out(const int3* shared_features, Target* w, const __grid_constant__ Operands operands) {
    __shared__ float rows[kTile][kSlice + 4], columns[kSlice][kTile + 8];  // the steps keep the lanes of an access in different banks
    const int left_residue = blockIdx.y % L_D, first_row = blockIdx.y / L_D % kRowTiles * kTile, left_block = blockIdx.y / L_D / kRowTiles;
    const int right_residue = blockIdx.x % R_D, first_column = blockIdx.x / R_D % kColumnTiles * kTile, right_block = blockIdx.x / R_D / kColumnTiles;
    const int3 shared = shared_features[(left_block * L_D + left_residue) * (R_A * R_D) + right_block * R_D + right_residue];
    const int terms = shared.z, left_step = shared.y / L_D * L_D, right_step = shared.y / R_D * (R_C * R_D);  // from a term to the next

    // L[i, p, q, j] of inner feature m = (i * c + q) * d + j, and R[i, p, q, j] of m = (i * b + p) * d + j. Neighbouring lanes read
    // neighbouring terms of L, and neighbouring inputs of R.
    const int term = threadIdx.x % kSlice, row = threadIdx.x / kSlice, column = threadIdx.x % kTile, term_of = threadIdx.x / kTile;
    constexpr int kRowStep = kThreads / kSlice, kTermStep = kThreads / kTile;
    const Weight* left = operands.left[blockIdx.z] + ((long long)left_block * L_B + first_row + row) * L_C * L_D + left_residue;
    left += (shared.x / L_D - left_block * L_C) * L_D + (long long)term * left_step;
    const Weight* right = operands.right[blockIdx.z] + (long long)right_block * R_B * R_C * R_D + (first_column + column) * R_D + right_residue;
    right += (shared.x / R_D - right_block * R_B) * (R_C * R_D) + (long long)term_of * right_step;
    Weight next_left[kEach], next_right[kEach];
    auto read = [&](int start) {
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const bool has_left = start + term < terms && first_row + row + k * kRowStep < L_B;
            const bool has_right = start + term_of + k * kTermStep < terms && first_column + column < R_C;
            next_left[k] = has_left ? left[(long long)k * kRowStep * L_C * L_D + (long long)start * left_step] : Weight(0);
            next_right[k] = has_right ? right[(long long)(start + k * kTermStep) * right_step] : Weight(0);
        }
    };
    const int warp = threadIdx.x / 32, quad = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;  // of a fragment: rows or columns, and terms
    const int warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
    float sums[2][4][4] = {};
    read(0);
    for (int start = 0; start < terms; start += kSlice) {
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            rows[row + k * kRowStep][term] = value_of(next_left[k]);
            columns[term_of + k * kTermStep][column] = value_of(next_right[k]);
        }
        __syncthreads();
        read(start + kSlice);
#pragma unroll
        for (int step = 0; step < kSlice; step += 8) {
            Pairs<8> a, b;
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                a.put(k, rows[warp_row + quad + k / 4 * 16 + k % 2 * 8][step + pair + k % 4 / 2 * 4]);
                b.put(k, columns[step + pair + k % 2 * 4][warp_column + quad + k / 2 * 8]);
            }
            mma_pairs(sums, a, b);
        }
        __syncthreads();
    }
    w += (long long)blockIdx.z * kOutputs * kInputs + right_block * R_C * R_D + right_residue;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int k = 0; k < 4; k += 2) {
                const int p = first_row + warp_row + i * 16 + quad + k / 2 * 8, q = first_column + warp_column + j * 8 + pair * 2;
                if (p >= L_B || q >= R_C) continue;
                Target* to = w + (((long long)left_block * L_B + p) * L_D + left_residue) * kInputs + q * R_D;
                const Two two = {round_to_target(sums[i][j][k]), round_to_target(sums[i][j][k + 1])};
                if constexpr (kInPairs) {
                    *reinterpret_cast<Two*>(to) = two;
                } else {
                    to[0] = two.first;
                    if (q + 1 < R_C) to[R_D] = two.second;
                }
            }
}
