// y = x + scale * (K4' K3' act(K2' K1' norm(x) + bias) + bias'): a whole feed-forward block of two butterfly layers in one launch by mma.sync,
// float16 or bfloat16 with float32 sums. x is read once (again for the residual, from the L2 cache), y is written once, nothing else is.
//
// Factors, orders and activations are those of fused_ffn.cu, which needs wgmma; here a warp owns 16 rows from the first load to the last store:
//
//        x: registers ──K1──> u: registers ──K2──> h: registers ──K3──> v: shared memory, then registers ──K4──> y
//
// Accumulators, rounded, are halves of operands, so u takes the place of x in registers block by block, and h is consumed as it is made, piece
// by piece of HIDDEN units. A block of factor 3 sums the pieces of all classes into its slice of v. As u is needed for every block, all slices
// but the last wait in shared memory that only their own lanes read, and come back to registers when u is no longer needed.
//
// Weights arrive as panels in the order of use, as in fused_ffn.cu (flysurgery/ops/cuda/ffn_image.py), but a panel of the middle holds the weights
// of a piece in both factors. They pass through the ring of fused_ring.cuh.
//
// Measured on an H200 in float16, 25216 rows of width 384: 97 us by the patterns of Gonon et al., 79 by Monarch's
// (recipes/results/kernel_trials_h200.csv, run 5), where the products at the rate of a large one take 32 and 25, and the bytes 9.
//
// Limits: sm_80 or newer; rows of x at multiples of 16 bytes; sizes as in ffn_warp_tiling.py.

#include "activation.cuh"
#include "ffn_lanes.cuh"
#include "fused_ring.cuh"
#include "instructions.cuh"
#include "norm_rows.cuh"

constexpr int kRowsOfWarp = 16;
constexpr int kIn = A1 * C1, kOut = B4 * D4;
constexpr int kTiles1 = (B1 + 7) / 8, kTiles2 = HIDDEN / 8, kTiles3 = (B3 + 7) / 8, kTiles4 = COLUMNS4 / 8;
constexpr int kTilesOfU = A1 * kTiles1, kTilesOfV = A3 * kTiles3;
constexpr int kSteps1 = C1 / 16 / PARTS1;                                // k16 steps of a panel
constexpr int kPieces = C3 / D2 / HIDDEN;                                // pieces of h of a class that a block of factor 3 reads
constexpr int kWeights2 = STEPS2 * kTiles2 * 256, kWeights4 = STEPS4 * kTiles4 * 256;  // bytes of weights, behind which floats stand
constexpr int kWeights3 = kWeights2 + HIDDEN * 4;                        // where the third factor's weights begin in a panel
constexpr int kPanels4 = B4 / COLUMNS4;                                  // of a class of factor 4, side by side
constexpr int kRun = 2 * RUN * D4, kVectors4 = kRun / 8;                 // adjacent outputs that a lane holds, vectors of 16 bytes of them
constexpr int kRuns = kTiles4 / RUN;                                     // of a panel
constexpr int kSliceBytes = kTiles3 * 256, kWaitingBytes = (A3 - 1) * kSliceBytes;  // of v, of a warp

static_assert(kSteps1 * 16 * PARTS1 == C1 && kPieces * HIDDEN * D2 == C3 && HIDDEN % 16 == 0, "whole panels");
static_assert(kTiles4 % RUN == 0 && kRun % 8 == 0 && kPanels4 * COLUMNS4 == B4, "a lane holds whole vectors");

struct Panels {
    static constexpr int kPanels = A1 * PARTS1 + A3 * D2 * kPieces + kPanels4 * D4, kSlots = SLOTS, kSlotBytes = PANEL_STRIDE, kWarps = WARPS;
    static constexpr bool kUniform = false;
    static __device__ int source(int panel) { return panel * PANEL_STRIDE; }
    static __device__ int bytes(int panel) { return PANEL_STRIDE; }
};

// The address that a lane hands to ldmatrix, relative to weights of `columns` columns.
__device__ __forceinline__ u32 matrix_offset(int lane, int columns) {
    const int matrix = lane >> 3, row = lane & 7;
    return ((matrix & 1) * columns + (matrix >> 1) * 8 + row) * 16;
}

// acc += a * weights, of one k16 step; `weights` has the lane's offset in it.
template <int TILES>
__device__ __forceinline__ void multiply(float (&acc)[TILES][4], const u32 (&a)[4], u32 weights) {
#pragma unroll
    for (int n = 0; n < TILES; n += 2) {
        u32 b[4];
        if (n + 1 < TILES) load_matrices(b, weights + n * 128);
        else load_two_matrices(b, weights + n * 128);
        mma(acc[n], a, b[0], b[1]);
        if (n + 1 < TILES) mma(acc[n + 1], a, b[2], b[3]);
    }
}

// acc += operands * weights, of a class: a pair of tiles of 8 columns a step, either of them empty where it is negative.
template <int TILES, int COUNT, int STEPS>
__device__ __forceinline__ void multiply_class(float (&acc)[TILES][4], const u32 (&operands)[COUNT][2], const int (&tiles)[STEPS][2], u32 weights) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        if (tiles[s][0] < 0) continue;
        u32 a[4] = {operands[tiles[s][0]][0], operands[tiles[s][0]][1], 0, 0};
        if (tiles[s][1] >= 0) a[2] = operands[tiles[s][1]][0], a[3] = operands[tiles[s][1]][1];
        multiply(acc, a, weights + s * TILES * 256);
    }
}

template <int TILES>
__device__ __forceinline__ void round_tiles(u32 (*to)[2], const float (&acc)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) to[n][h] = round2(acc[n][2 * h], acc[n][2 * h + 1]);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
ffn_warps(const char* __restrict__ x, const char* __restrict__ image, char* __restrict__ y, long long rows, long long x_stride, int eps_bits) {
    extern __shared__ __align__(128) char memory[];
    // ring | v of each warp | a barrier a slot: the panel is there | a barrier and a counter a slot: warps that left it
    const u32 ring_at = shared_address(memory), v_all = ring_at + SLOTS * PANEL_STRIDE;
    const u32 full = v_all + WARPS * kWaitingBytes, left_all = full + 8 * SLOTS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const long long rows_of_round = (long long)kRowsOfWarp * WARPS * gridDim.x;
    const int rounds = (int)((rows + rows_of_round - 1) / rows_of_round);

    using Ring = PanelRing<Panels>;
    if (threadIdx.x == 0) Ring::prepare(full, left_all);
    __syncthreads();
    Ring ring(image, ring_at, full, left_all, rounds, warp, lane);
    wait_for_kernels_before();
    const u32 v_lane = v_all + warp * kWaitingBytes + lane * 8;
    constexpr int kTilesOfClass2[D2][STEPS2][2] = U_TILES, kTilesOfClass4[D4][STEPS4][2] = V_TILES;

    for (int round = 0; round < rounds; ++round) {
        const long long row0 = (((long long)round * WARPS + warp) * gridDim.x + blockIdx.x) * kRowsOfWarp;
        if (row0 >= rows) {  // no rows left for this warp, others still need the panels
#pragma unroll 1
            for (int p = 0; p < Panels::kPanels; ++p) {
                ring.next();
                ring.leave();
            }
            continue;
        }
        const int left = (int)(rows - row0 < kRowsOfWarp ? rows - row0 : kRowsOfWarp) - g;  // row h*8 is inside if left > h*8
        const char* const x_row = x + (row0 + g) * x_stride;

        // ---- u = K1 norm(x)
        u32 u[kTilesOfU][2];
        {
            NormRows<kIn, X_VECTOR> operands;
            operands.load<8>(x_row, x_stride, t, left);
#if NORM
            operands.normalize(__int_as_float(eps_bits));
#endif
#pragma unroll
            for (int block = 0; block < A1; ++block) {
                float acc[kTiles1][4] = {};
#pragma unroll
                for (int part = 0; part < PARTS1; ++part) {
                    const u32 weights = ring.next() + matrix_offset(lane, kTiles1 * 8);
#pragma unroll
                    for (int s = 0; s < kSteps1; ++s) {
                        u32 a[4];
                        operands.operand(a, (block * PARTS1 + part) * kSteps1 + s);
                        multiply(acc, a, weights + s * kTiles1 * 256);
                    }
                    ring.leave();
                }
                round_tiles(u + block * kTiles1, acc);
            }
        }

        // ---- v = K3 act(K2 u + bias), a block of factor 3 after the other
        u32 v[kTilesOfV][2];
#pragma unroll 1
        for (int i = 0; i < A3; ++i) {
            float sums[kTiles3][4] = {};
#pragma unroll
            for (int j = 0; j < D2; ++j)  // of each class, as registers of u have names
#pragma unroll 1
                for (int piece = 0; piece < kPieces; ++piece) {
                    const u32 panel = ring.next();
                    float h[kTiles2][4];
                    broadcast(h, panel + kWeights2, t);
                    multiply_class(h, u, kTilesOfClass2[j], panel + matrix_offset(lane, HIDDEN));
#pragma unroll
                    for (int s = 0; s < HIDDEN / 16; ++s) {
                        u32 a[4];
#pragma unroll
                        for (int k = 0; k < 4; ++k) {
                            const float* pair = &h[2 * s + k / 2][k % 2 * 2];
                            a[k] = activate_pair<ACTIVATION>(pair[0], pair[1]);
                        }
                        multiply(sums, a, panel + kWeights3 + matrix_offset(lane, kTiles3 * 8) + s * kTiles3 * 256);
                    }
                    fence_copies();
                    ring.leave();
                }
            round_tiles(v + (kTilesOfV - kTiles3), sums);
            if (i + 1 < A3)
#pragma unroll
                for (int n = 0; n < kTiles3; ++n)
                    store_shared_pair(v_lane + i * kSliceBytes + n * 256, v[kTilesOfV - kTiles3 + n][0], v[kTilesOfV - kTiles3 + n][1]);
        }
#pragma unroll
        for (int n = 0; n < kTilesOfV - kTiles3; ++n) load_shared_pair(v[n], v_lane + n * 256);

        // ---- y = x + scale * (K4 v + bias); the four lanes of a row exchange vectors, so that they store neighbouring ones
        char* const y_row = y + (row0 + g) * (kOut * 2);
#pragma unroll 1
        for (int column = 0; column < kPanels4; ++column) {
            float acc[D4][kTiles4][4];
            const int byte = column * (kRuns * kRun * 8);
#pragma unroll
            for (int j = 0; j < D4; ++j) {
                const u32 panel = ring.next();
                broadcast(acc[j], panel + kWeights4, t);
                multiply_class(acc[j], v, kTilesOfClass4[j], panel + matrix_offset(lane, COLUMNS4));
                if (SCALED) multiply_columns(acc[j], panel + kWeights4 + COLUMNS4 * 4, t);
                fence_copies();
                ring.leave();
            }
#pragma unroll
            for (int run = 0; run < kRuns; ++run)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    Vector<16> out[kVectors4];
#pragma unroll
                    for (int n = 0; n < kVectors4; ++n) {
                        Vector<16> residual = {};
                        if (RESIDUAL && left > h * 8)
                            residual = *reinterpret_cast<const Vector<16>*>(x_row + h * 8 * x_stride + byte + (run * 4 + t) * (kRun * 2) + n * 16);
#pragma unroll
                        for (int k = 0; k < 4; ++k) {
                            float pair[2];
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                const int nth = n * 8 + k * 2 + e, p = nth / D4, j = nth % D4;
                                pair[e] = acc[j][run * RUN + p / 2][2 * h + p % 2];
                            }
                            if (RESIDUAL) pair[0] += low_half(residual.w[k]), pair[1] += high_half(residual.w[k]);
                            out[n].w[k] = round2(pair[0], pair[1]);
                        }
                    }
                    exchange(out, t);
#pragma unroll
                    for (int n = 0; n < kVectors4; ++n)
                        if (left > h * 8)
                            *reinterpret_cast<Vector<16>*>(y_row + h * 8 * (kOut * 2) + byte + run * (kRun * 8) + place_of<kVectors4>(n, t) * 16) = out[n];
                }
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}
