// The gradient of one Kronecker-sparse factor (a, b, c, d), as factor_grad.cu gives it, for halves on sm_90a:
//
//     out[i, p, q, j] = sum over rows of dy[row, (i*b + p)*d + j] * x[row, (i*c + q)*d + j]
//
// and, with BIAS, the sums of the columns of dy: a tile of ones lies behind the inputs.
//
// x: (rows, a*c*d) and dy: (rows, a*b*d), rows LDX and LDY elements apart; out: (a, b, c, d), float32. Several linears are one launch, as
// in factor_grad.cu; those that share x may be JOINED, their outputs side by side in one tile, so that x is read once.
//
// The residues j are not separated: the products of all b*d columns of dy with all c*d columns of x are computed, and those of equal
// residues leave. That is d times the arithmetic, and for small d still less time than to sort halves.
//
// A CTA owns one i, BP columns of dy, BQ columns of x, and one split of the rows, which it walks in chunks of KR. Copies bring every 16 bytes
// to their place in panels of 64 columns, from which wgmma reads both operands, the rows along the product's inner dimension.
// Columns beyond the pattern's end are not set: they reach no sum but their own.
// Each split writes its sums to a workspace in the layout of out, for factor_grad_sum.cu.
//
// Measured on an H200, with the share of its bound: recipes/results/kernels_h200.csv.
//
// Limits: b*d and c*d multiples of 8, rows at multiples of 16 bytes, rows > 0.
//
// Defines: PATTERN_A, PATTERN_B, PATTERN_C, PATTERN_D, MODE (0 for fp16, 1 for bf16), WM (warpgroups, 64 columns of dy each), NT (tiles of
// 8 columns of x; a divisor of the threads), KR, STAGES, MIN_BLOCKS, JOINED, BIAS.

#include "single_memory.cuh"
#include "wgmma_transposed.cuh"

constexpr int PA = PATTERN_A, PD = PATTERN_D;
constexpr int B = PATTERN_B * PD, C = PATTERN_C * PD;  // columns of dy and x in a block of the pattern
constexpr int THREADS = 128 * WM;
constexpr int BP = 64 * WM, BQ = 8 * NT;
constexpr int P_TILES = (JOINED * B + BP - 1) / BP, Q_TILES = (C + BQ - 1) / BQ;
constexpr int TILES = NT + BIAS;              // of eight columns of x, the ones behind them
constexpr int PANEL = KR * 128;               // bytes of 64 columns
constexpr int X_AT = WM * PANEL;              // where the panels of x begin, behind those of dy
constexpr int STAGE = X_AT + (TILES + 7) / 8 * PANEL;
constexpr u32 ONES = MODE == 1 ? 0x3f803f80u : 0x3c003c00u;
static_assert(B % 8 == 0 && C % 8 == 0, "copies of eight columns");

// Where the 16 bytes of 8 columns lie in a row of the panels
__device__ __forceinline__ int in_panels(int piece, int row) { return piece / 8 * PANEL + row * 128 + (piece % 8 ^ row % 8) * 16; }

// Starts the copies of COLUMNS columns of KR rows; column(n) is where the 8 columns from n on lie in a row, in elements, or -1, and
// `to` begins the panels they belong to. The threads go round in whole rows, so that each keeps its columns. Rows from `lines` on are zeros.
template <int COLUMNS, typename Column>
__device__ __forceinline__ void copy_columns(char* to, const char* from, i64 stride, int lines, Column column) {
    constexpr int EIGHTS = COLUMNS / 8, ROWS = THREADS / EIGHTS;
    static_assert(THREADS % EIGHTS == 0, "whole rows");
    int piece = threadIdx.x % EIGHTS, at = column(piece * 8);
#pragma unroll
    for (int first = 0; first < KR; first += ROWS) {
        int row = first + threadIdx.x / EIGHTS;
        if (at < 0 || (KR % ROWS != 0 && row >= KR)) continue;
        copy_async<16>(to + in_panels(piece, row), from + 2 * (row * stride + at), row < lines);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    factor_grad(const char* x, const char* dy, float* out, float* bias, i64 rows, i64 ldx, i64 ldy, i64 chunks, i64 size, i64 linears,
                i64 x_step, i64 dy_step) {
    extern __shared__ __align__(1024) char shared[];
    int rest = blockIdx.x;
    int q_tile = rest % Q_TILES, p_tile = (rest /= Q_TILES) % P_TILES;
    int i = (rest /= P_TILES) % PA;
    int linear = (rest /= PA) % (int)(linears / JOINED);
    i64 split = rest / (int)(linears / JOINED);
    int p0 = p_tile * BP, q0 = q_tile * BQ;
    out += split * size + linear * ((i64)PA * B * PATTERN_C);
    bias += split * size + linear * (PA * B);

    i64 row0 = split * chunks * KR;
    i64 row_end = min(rows, row0 + chunks * KR);
    int steps = row_end > row0 ? (int)((row_end - row0 + KR - 1) / KR) : 0;
    x += 2 * (row0 * ldx + linear * x_step);
    dy += 2 * (row0 * ldy + linear * dy_step);
    auto load = [&](int step) {
        if (step < steps) {
            char* stage = shared + step % STAGES * STAGE;
            int lines = (int)min((i64)KR, row_end - row0 - (i64)step * KR);
            auto dy_column = [&](int n) { return p0 + n < JOINED * B ? (p0 + n) / B * (int)dy_step + i * B + (p0 + n) % B : -1; };
            auto x_column = [&](int n) { return q0 + n < C ? i * C + q0 + n : -1; };
            copy_columns<BP>(stage, dy + 2 * KR * (step * ldy), ldy, lines, dy_column);
            copy_columns<BQ>(stage + X_AT, x + 2 * KR * (step * ldx), ldx, lines, x_column);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };

    if constexpr (BIAS) {
        for (int n = threadIdx.x; n < STAGES * KR; n += THREADS)
            *(uint4*)(shared + n / KR * STAGE + X_AT + in_panels(NT, n % KR)) = make_uint4(ONES, ONES, ONES, ONES);
    }
    for (int s = 0; s < STAGES - 1; ++s) load(s);

    float sums[TILES][4];
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[n][e] = 0.0f;
    int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0);
    for (int step = 0; step < steps; ++step) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
        __syncthreads();
        load(step + STAGES - 1);
        u32 stage = shared_address(shared) + step % STAGES * STAGE;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < KR / 16; ++k)
            multiply_transposed<8 * TILES>(sums, transposed_descriptor(stage + warpgroup * PANEL + k * 2048, PANEL),
                                           transposed_descriptor(stage + X_AT + k * 2048, PANEL), PANEL);
        wgmma_commit();
        wgmma_wait<0>();
    }

    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int row = p0 + (int)threadIdx.x / 32 * 16 + 8 * h + g;
        if (row >= JOINED * B) continue;
        int p = row % B / PD, j = row % PD;
        float* line = out + ((i64)(row / B * PA + i) * PATTERN_B + p) * C + j;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            int column = q0 + 8 * n + 2 * t;
            if (column >= C) continue;
            if constexpr (PD == 1) {
                *(float2*)(line + column) = make_float2(sums[n][2 * h], sums[n][2 * h + 1]);
            } else {
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if ((column + e) % PD == j) line[column + e - j] = sums[n][2 * h + e];
            }
        }
        if constexpr (BIAS) {
            if (q_tile == 0 && t == 0) bias[(i64)(row / B * PA + i) * B + row % B] = sums[NT][2 * h];
        }
    }
}
