// The gradients of two factors out of that of their product: dL = dW Rᵀ and dR = Lᵀ dW for W = L R, each only where the factor is not zero.
//
// An inner feature is a column of L, which reaches some rows of W (outputs), and a row of R, which reaches some columns (inputs). All inner
// features with the same outputs and inputs are the members of a tile, at most 32; a table names them, -1 behind the last one.
// A block computes 32 rows of one tile: of dL (outputs) or of dR (inputs). Its four groups of threads take every fourth slice of the sum, the
// next slice on its way in registers, and add up what they have at the end, in a fixed order. blockIdx: tile, rows, linear.
//
// Tensor cores multiply. A float32 is the sum of two tf32 there, and the product of the two smaller parts is left out: 2^-22 of the result.
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

// Both by term, then by row or member, or the other way round: as they are read from memory. The lines' lengths are such that the 32
// values of a fragment lie in 32 banks.
struct Slice {
    float dw[kTile * (kTile + 8)], weights[kTile * (kTile + 8)];
};

// A float32 as the sum of two tf32.
struct Pair {
    u32 high, low;
    __device__ __forceinline__ explicit Pair(float value) {
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high) : "f"(value));
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(low) : "f"(value - __uint_as_float(high)));
    }
};

// sums (16 rows x 8 members) += rows (16 x 8 terms) * members (8 terms x 8), each lane with its part of the fragments.
__device__ __forceinline__ void multiply(float (&sums)[4], u32 a, u32 b, u32 c, u32 d, u32 e, u32 f) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(f));
}

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
    constexpr int kLine = kTile + (OF_LEFT ? 4 : 8);
    auto at = [](int term, int other) { return OF_LEFT ? other * kLine + term : term * kLine + other; };
    // A warp has 16 rows and 16 members.
    const int warp = thread / 32, lane = thread % 32, row = warp / 2 * 16 + lane / 4, member = warp % 2 * 16 + lane / 4;
    float sums[2][4] = {};
    int start = group * kTile;
    read(start);
    while (start < kTerms) {
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            slice.dw[(slow + k * kSlow) * kLine + fast] = next_dw[k];
            slice.weights[(slow + k * kSlow) * kLine + fast] = next_weights[k];
        }
        asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(kGroupThreads) : "memory");
        start += kGroups * kTile;
        read(start);
#pragma unroll
        for (int step = 0; step < kTile; step += 8) {
            const int term = step + lane % 4;
            const Pair a(slice.dw[at(term, row)]), b(slice.dw[at(term, row + 8)]);
            const Pair c(slice.dw[at(term + 4, row)]), d(slice.dw[at(term + 4, row + 8)]);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const Pair e(slice.weights[at(term, member + n * 8)]), f(slice.weights[at(term + 4, member + n * 8)]);
                multiply(sums[n], a.low, b.low, c.low, d.low, e.high, f.high);
                multiply(sums[n], a.high, b.high, c.high, d.high, e.low, f.low);
                multiply(sums[n], a.high, b.high, c.high, d.high, e.high, f.high);
            }
        }
        asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(kGroupThreads) : "memory");
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int k = 0; k < 4; ++k)  // two neighbouring members of a row, and of the row 8 below
            slice.weights[(row + k / 2 * 8) * (kTile + 1) + warp % 2 * 16 + n * 8 + lane % 4 * 2 + k % 2] = sums[n][k];
    __syncthreads();
    for (int n = threadIdx.x; n < kTile * kTile; n += kGroups * kGroupThreads) {
        const int own = OF_LEFT ? n / kTile : n % kTile, k = OF_LEFT ? n % kTile : n / kTile, m = members[k];
        const int r = first_row + own;
        if (m < 0 || r >= kRows) continue;
        float sum = 0.0f;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) sum += slices[g].weights[own * (kTile + 1) + k];
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
