// The gradients of two factors out of that of their product: dL = dW Rᵀ and dR = Lᵀ dW for W = L R, each only where the factor is not zero.
//
// An inner feature is a column of L, which reaches some rows of W (outputs), and a row of R, which reaches some columns (inputs). All inner
// features with the same outputs and inputs are the members of a tile, at most 32; a table names them, -1 behind the last one.
// A warp computes 32 rows of one tile: of dL (outputs, summed over inputs) or of dR (inputs, summed over outputs), by tensor cores. SPLIT
// warps take every SPLIT-th slice of that sum, the next slice on its way in registers, and the block adds up what they have, in a fixed order.
// blockIdx: tile, rows, linear.
//
// Floor: dW is read twice, once for each factor.
//
// dw: (linears, outputs, inputs), float32. MODE is the factors' dtype: 0 fp16, 1 bf16, 2 float32; gradients are float32.
// Defines: LINEARS, MODE, LEFT_SPLIT and RIGHT_SPLIT (1, 2, 4 or 8), L_A L_B L_C L_D and R_A R_B R_C R_D, the patterns of the factors.
#include "factor_values.cuh"
#include "tf32_pairs.cuh"

constexpr int kTile = 32;   // members, and rows of a warp
constexpr int kSlice = 16;  // terms
constexpr int kWarps = 8, kEach = kTile * kSlice / 32;
constexpr int kOutputs = L_A * L_B * L_D, kInputs = R_A * R_C * R_D;
static_assert(L_A * L_C * L_D == R_A * R_B * R_D, "factors that fit each other");

struct Operands {
    const Weight *left[LINEARS], *right[LINEARS];
    float *left_gradient[LINEARS], *right_gradient[LINEARS];
};

struct Tile {
    int in_left[kTile], in_right[kTile];      // where the factors have the members, from the start of their block; -1 for none
    int left_block, right_block;              // which all members share
    int left_residue, right_residue;
};

// By rows for dL and by terms for dR, as lanes read it. The steps keep the lanes of an access in different banks.
struct Slice {
    float values[kTile * (kSlice + 4)];
    static_assert(kTile * (kSlice + 4) == kSlice * (kTile + 8), "one size for both");

    template <bool OF_LEFT>
    __device__ __forceinline__ float& at(int term, int row) {
        return values[OF_LEFT ? row * (kSlice + 4) + term : term * (kTile + 8) + row];
    }
};

union Memory {
    struct {
        Slice dw, weights;
    } slices;
    float sums[kTile][kTile + 4];  // by row, then by member
};

template <bool OF_LEFT>
__device__ __forceinline__ void gradient_rows(const float* dw, const Weight* factor, float* gradient, const Tile& tile, int block, Memory* memory) {
    constexpr int kSplit = OF_LEFT ? LEFT_SPLIT : RIGHT_SPLIT, kRows = OF_LEFT ? L_B : R_C, kTerms = OF_LEFT ? R_C : L_B;
    constexpr int kRowStep = OF_LEFT ? L_D * kInputs : R_D, kTermStep = OF_LEFT ? R_D : L_D * kInputs;  // in dW
    constexpr int kWeightStep = OF_LEFT ? R_D : L_C * L_D;                                             // of a term in the factor
    const long long left_start = (long long)tile.left_block * L_B * L_C * L_D + tile.left_residue;
    const long long right_start = (long long)tile.right_block * R_B * R_C * R_D + tile.right_residue;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int from_row = block * (kWarps / kSplit) * kTile, first_row = from_row + warp / kSplit * kTile;
    // Neighbouring lanes read neighbouring columns of dW, and neighbouring weights: terms for dL, rows and members for dR.
    const int some = OF_LEFT ? lane / kSlice : lane, term_of = OF_LEFT ? lane % kSlice : 0;
    constexpr int kRowOf = OF_LEFT ? 32 / kSlice : 0, kTermOf = OF_LEFT ? 0 : 1;  // steps of a lane's next element
    dw += (long long)(tile.left_block * L_B * L_D + tile.left_residue) * kInputs + tile.right_block * R_C * R_D + tile.right_residue;
    dw += (long long)(first_row + some) * kRowStep + (long long)term_of * kTermStep;
    factor += (OF_LEFT ? right_start : left_start) + (long long)term_of * kWeightStep;
    const int* places = OF_LEFT ? tile.in_right : tile.in_left;

    float next_dw[kEach];
    Weight next_weights[kEach];
    auto read = [&](int start) {
        const float* from = dw + (long long)start * kTermStep;
        const Weight* weights = factor + (long long)start * kWeightStep;
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const bool present = start + term_of + k * kTermOf < kTerms;
            const int place = places[some + k * kRowOf];
            next_dw[k] = present && first_row + some + k * kRowOf < kRows ? from[(long long)k * (kRowOf * kRowStep + kTermOf * kTermStep)] : 0.0f;
            next_weights[k] = present && place >= 0 ? weights[place + (long long)k * (kTermOf * kWeightStep)] : Weight(0);
        }
    };
    const int quad = lane / 4, pair = lane % 4;  // of a fragment: rows or columns, and terms
    float sums[kTile / 16][kTile / 8][4] = {};
    Slice &read_dw = memory[warp].slices.dw, &read_weights = memory[warp].slices.weights;
    int start = warp % kSplit * kSlice;
    read(start);
    while (start < kTerms && first_row < kRows) {
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            read_dw.at<OF_LEFT>(term_of + k * kTermOf, some + k * kRowOf) = next_dw[k];
            read_weights.at<OF_LEFT>(term_of + k * kTermOf, some + k * kRowOf) = value_of(next_weights[k]);
        }
        __syncwarp();
        start += kSplit * kSlice;
        read(start);
#pragma unroll
        for (int step = 0; step < kSlice; step += 8) {
            const int term = step + pair;
            Pairs<4 * (kTile / 16)> a;
            Pairs<2 * (kTile / 8)> b;
#pragma unroll
            for (int k = 0; k < 4 * (kTile / 16); ++k) a.put(k, read_dw.at<OF_LEFT>(term + k % 4 / 2 * 4, quad + k / 4 * 16 + k % 2 * 8));
#pragma unroll
            for (int k = 0; k < 2 * (kTile / 8); ++k) b.put(k, read_weights.at<OF_LEFT>(term + k % 2 * 4, quad + k / 2 * 8));
            mma_pairs(sums, a, b);
        }
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kTile / 16; ++i)
#pragma unroll
        for (int j = 0; j < kTile / 8; ++j)
#pragma unroll
            for (int k = 0; k < 4; ++k) memory[warp].sums[i * 16 + quad + k / 2 * 8][j * 8 + pair * 2 + k % 2] = sums[i][j][k];
    __syncthreads();
    for (int at = threadIdx.x; at < kWarps / kSplit * kTile * kTile; at += 32 * kWarps) {
        const int within = at % (kTile * kTile), group = at / (kTile * kTile);
        const int own = OF_LEFT ? within / kTile : within % kTile, k = OF_LEFT ? within % kTile : within / kTile;
        const int r = from_row + group * kTile + own;
        if (tile.in_left[k] < 0 || r >= kRows) continue;
        float sum = 0.0f;
#pragma unroll
        for (int share = 0; share < kSplit; ++share) sum += memory[group * kSplit + share].sums[own][k];
        gradient[OF_LEFT ? left_start + (long long)r * L_C * L_D + tile.in_left[k] : right_start + tile.in_right[k] + (long long)r * R_D] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    factor_gradients(const float* dw, const int* table, const __grid_constant__ Operands operands) {
    constexpr int kLeftBlocks = (L_B + kWarps / LEFT_SPLIT * kTile - 1) / (kWarps / LEFT_SPLIT * kTile);
    __shared__ __align__(16) Memory memory[kWarps];
    __shared__ Tile tile;
    if (threadIdx.x < kTile) {
        const int m = table[blockIdx.x * kTile + threadIdx.x], first = table[blockIdx.x * kTile];
        tile.in_left[threadIdx.x] = m < 0 ? -1 : m / L_D % L_C * L_D;
        tile.in_right[threadIdx.x] = m < 0 ? -1 : m / R_D % R_B * (R_C * R_D);
        if (threadIdx.x == 0) {
            tile.left_block = first / (L_C * L_D), tile.right_block = first / (R_B * R_D);
            tile.left_residue = first % L_D, tile.right_residue = first % R_D;
        }
    }
    __syncthreads();
    const int linear = blockIdx.z, block = blockIdx.y;
    dw += (long long)linear * kOutputs * kInputs;
    if (block < kLeftBlocks) {
        gradient_rows<true>(dw, operands.right[linear], operands.left_gradient[linear], tile, block, memory);
    } else {
        gradient_rows<false>(dw, operands.left[linear], operands.right_gradient[linear], tile, block - kLeftBlocks, memory);
    }
}
