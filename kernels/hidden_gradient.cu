// What the backward pass of a feed-forward block needs of its hidden units, in one launch: h = act(u) for u = x W1ᵀ + b, and du = (dy W2) * act'(u).
// A tile of hidden units reads all columns of x and of dy, or those that two factors connect with it. A class is a block of the factor that reads x, a part
// a block of the factor that reads dy. Tiles go through the classes, in a class through the parts, PIECES tiles each; h goes through the parts first.
//
//     turns of two warpgroups:   x W1ᵀ of A │ x W1ᵀ of B │ dy W2 of A │ dy W2 of B │ x W1ᵀ of the next A │ …
//     meanwhile the other:                  │ h of A     │ h of B     │ du of A    │ du of B
//
// A warpgroup computes 128 rows and a tile of hidden units of both products, one after the other, in the same registers: slopes wait for the second product as
// float16. One of two warpgroups multiplies, straight from shared memory, while the other finishes what it has. A thread of a third loads 64
// features of the rows and of the weights at a time, STAGES of them ahead. Two blocks, a cluster, take the same hidden units, and each
// loads half of the weights for both.
//
// A slot: 128 rows of 64 halves, in the order of wgmma_rows.cuh, then a panel of weights: core matrices of wgmma.cuh. The image (flysurgery/gpu/hidden_gradient.py)
// has the panels of W1, then of W2, for each tile, in an order of columns that gives a lane 8 neighbours of each 32.
//
// Sums of du over rows, for the bias: a warp adds up its rows of a tile in float32, before they are rounded, and adds that to what it has written for an
// earlier tile. Blocks pass over all columns again and again, 256 rows a pass. After `parts` passes the same warps meet the same columns again,
// so each sum has one order. Rows beyond the end are zeros, as those of dy are.
//
// Floor: both products, or the bytes of x, dy, h and du.
//
// x, dy: (rows, any); bias: (HIDDEN,) or null; h, du: (rows, HIDDEN). All are halves. Bias, du and its sums lie in the order of the tiles.
// sums_of_du: (parts, 2, 4, HIDDEN) float32, to be added up. The tiles of `parts` passes, of a cluster, are a multiple of the number of blocks, or they are all.
// Defines: INPUTS and GRADIENTS (64 columns each, of x and of dy, that a tile reads), HIDDEN, COLUMNS (hidden units of a tile), PARTS, PIECES, MODE (0 fp16,
// 1 bf16), ACTIVATION (activation_slope.cuh), STAGES (slots).
// Limits: sm_90a; HIDDEN a multiple of COLUMNS, COLUMNS of 32; rows begin at multiples of 16 bytes.
#include "accumulator_sums.cuh"
#include "activation_slope.cuh"
#include "cluster_ring.cuh"

constexpr int kUnits = 2, kRows = 64 * kUnits, kColumns = COLUMNS;
constexpr int kCluster = 2, kThreads = 3 * 128;
constexpr int kTiles = kColumns / 8, kColumnTiles = HIDDEN / kColumns, kClasses = kColumnTiles / (PARTS * PIECES);
constexpr int kPanel = kColumns * 128, kSlot = kRows * 128 + kPanel;
constexpr int kRegisters = 240, kBringing = 24;  // of a multiplying thread, and of a loading thread; together all registers
static_assert(HIDDEN == kClasses * PARTS * PIECES * kColumns && kColumns % 32 == 0, "whole tiles and vectors");

using Ring = ClusterRing<STAGES, kSlot, kCluster>;
using Sums = float[kUnits][kTiles][4];

// Two slopes as float16, the first in the low half.
__device__ __forceinline__ u32 two_slopes(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ float slope_of(u32 two, int which) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)(which ? two >> 16 : two)));
    return f;
}

// The first column of x, of dy and of h of a tile of hidden units.
__device__ __forceinline__ constexpr int first_of_x(int tile) { return tile / (PARTS * PIECES) * INPUTS * 64; }
__device__ __forceinline__ constexpr int first_of_dy(int tile) { return tile / PIECES % PARTS * GRADIENTS * 64; }
__device__ __forceinline__ constexpr int first_of_h(int tile) {
    return ((tile / PIECES % PARTS * kClasses + tile / (PARTS * PIECES)) * PIECES + tile % PIECES) * kColumns;
}

// A warpgroup's turn, from the n-th slot on.
template <int COUNT>
__device__ __forceinline__ void multiply(Sums& sums, const Ring& ring, int n, int warpgroup, int lane) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
        for (int c = 0; c < kTiles; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[u][c][e] = 0.0f;
    multiply_in_turn<COUNT>(sums, ring, n, warpgroup, lane);
}

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
hidden_gradient(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap dy, const char* __restrict__ image, const u16* __restrict__ bias,
                u16* __restrict__ h, u16* __restrict__ du, float* __restrict__ sums_of_du, long long rows, int parts) {
    extern __shared__ __align__(1024) char memory[];
    // slots | biases of all hidden units, float32 | barriers
    Ring ring;
    ring.slots = shared_address(memory);
    const u32 biases = ring.slots + STAGES * kSlot;
    ring.arrived = biases + HIDDEN * 4, ring.freed = ring.arrived + 8 * STAGES;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        ring.prepare();
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    wait_for_kernels_before();
    for (int c = threadIdx.x; c < HIDDEN; c += kThreads) store_shared(biases + 4 * c, __float_as_uint(bias == nullptr ? 0.0f : widen(bias[c])));
    __syncthreads();
    cluster_sync();
    const int rank = blockIdx.x % kCluster, clusters = gridDim.x / kCluster, first = blockIdx.x / kCluster;
    const int tiles = (int)((rows + kCluster * kRows - 1) / (kCluster * kRows)) * kColumnTiles;  // of a cluster
    const auto row_of = [&](int tile) { return (tile / kColumnTiles * kCluster + rank) * kRows; };

    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kBringing));
        if (warp == 8 && lane == 0) {
            int n = 0;
#pragma unroll 1
            for (int pair = first; pair < tiles; pair += 2 * clusters)
#pragma unroll 1
                for (int turn = 0; turn < 4; ++turn) {
                    const int tile = pair + turn % 2 * clusters, second = turn / 2;
                    if (tile >= tiles) continue;
                    const int stages = second ? GRADIENTS : INPUTS, from = second ? first_of_dy(tile % kColumnTiles) : first_of_x(tile % kColumnTiles);
                    const char* panel = image + (long long)(tile % kColumnTiles * (INPUTS + GRADIENTS) + second * INPUTS) * kPanel + rank * (kPanel / kCluster);
#pragma unroll 1
                    for (int s = 0; s < stages; ++s, ++n, panel += kPanel) {
                        ring.wait_freed(n);
                        barrier_expect(ring.arrival(n), kSlot);
                        copy_box(ring.slot(n), second ? dy : x, from + s * 64, row_of(tile), ring.arrival(n));
                        copy_bulk_to_all<kCluster>(ring.slot(n) + kRows * 128 + rank * (kPanel / kCluster), panel, kPanel / kCluster, ring.arrival(n));
                    }
                }
        }
        cluster_sync();  // no block ends while another arrives at its barriers
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
    const int warpgroup = warp / 4, g = lane >> 2, t = lane & 3;
    if (warpgroup == 1) named_barrier_arrive(1, 256);  // it is the other's turn
    int n = 0;
#pragma unroll 1
    for (int pair = first; pair < tiles; pair += 2 * clusters) {
        const int tile = pair + warpgroup * clusters, turns = pair + clusters < tiles ? 2 : 1;
        if (tile >= tiles) {
            named_barrier_wait(2, 256);  // it leaves its turn to the other
            named_barrier_arrive(1, 256);
            break;
        }
        const int row = row_of(tile) + warp % 4 * 16 + g, column = tile % kColumnTiles * kColumns + t * 8;
        const auto store = [&](u16* to, int from, int r, int u, int half, const Vector<16>& out) {  // 8 neighbours of one row
            const long long at = row + u * 64 + half * 8;
            if (at < rows) store_now(to + at * HIDDEN + from + r * 32, out);
        };
        const int column_of_h = first_of_h(tile % kColumnTiles) + t * 8;
        Sums sums;
        u32 slopes[kUnits][kTiles][2];
        multiply<INPUTS>(sums, ring, n + warpgroup * INPUTS, warpgroup, lane);
#pragma unroll
        for (int r = 0; r < kColumns / 32; ++r) {
            float shift[8];
#pragma unroll
            for (int k = 0; k < 8; k += 4) load_shared(reinterpret_cast<u32*>(shift) + k, biases + (column + r * 32 + k) * 4);
#pragma unroll
            for (int u = 0; u < kUnits; ++u)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    Vector<16> out;
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        float slope[2], value[2];
#pragma unroll
                        for (int e = 0; e < 2; ++e) value[e] = with_slope(sums[u][r * 4 + k][2 * half + e] + shift[2 * k + e], slope[e]);
                        out.w[k] = round2(value[0], value[1]);
                        slopes[u][r * 4 + k][half] = two_slopes(slope[0], slope[1]);
                    }
                    store(h, column_of_h, r, u, half, out);
                }
        }
        multiply<GRADIENTS>(sums, ring, n + turns * INPUTS + warpgroup * GRADIENTS, warpgroup, lane);
        const int pass = tile / kColumnTiles;
        float* const part = sums_of_du + (long long)((pass % parts * kCluster + rank) * 4 + warp % 4) * HIDDEN + column + g;
        float total[kColumns / 32];
#pragma unroll
        for (int r = 0; r < kColumns / 32; ++r) total[r] = pass < parts ? 0.0f : part[r * 32];
#pragma unroll
        for (int r = 0; r < kColumns / 32; ++r) {
            float own_sums[8] = {};
#pragma unroll
            for (int u = 0; u < kUnits; ++u)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    Vector<16> out;
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        float value[2];
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            value[e] = sums[u][r * 4 + k][2 * half + e] * slope_of(slopes[u][r * 4 + k][half], e);
                            own_sums[2 * k + e] += value[e];
                        }
                        out.w[k] = round2(value[0], value[1]);
                    }
                    store(du, column, r, u, half, out);
                }
            sum_over_rows(own_sums, lane);
            part[r * 32] = total[r] + own_sums[0];
        }
        n += turns * (INPUTS + GRADIENTS);
    }
    cluster_sync();
}
