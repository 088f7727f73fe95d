// y = x + scale * (K4' K3' act(K2' K1' norm(x) + bias) + bias'): a whole feed-forward block of two butterfly layers in one launch, float16 or
// bfloat16 with float32 sums. x is read once (again for the residual, from the L2 cache), y is written once, nothing else reaches memory.
//
// The factors, in the order in which x meets them, are patterns (A1,B1,C1,1) (1,B2,C2,D2) (A3,B3,C3,1) (1,B4,C4,D4):
//   u = K1 norm(x)       blocks of factor 1; its outputs are sorted by the class (residue mod D2) that reads them
//   h = act(K2 u + bias) class by class, in pieces of HIDDEN units; the order of h is free, so it stays planar by class
//   v = K3 h             a piece of h belongs to one block of factor 3: accumulators of K2, activated, are operands of K3
//   y = K4 v             v sorted by class mod D4; a lane holds all residues of its columns, so it stores vectors
//
//        x: registers ──K1──> u: shared memory ──K2──> h: registers ──K3──> v: registers ──K4──> y
//        64 rows a warpgroup from the first load to the last store; WARPGROUPS of them share the panels of weights in a ring
//
// u is written as core matrices that wgmma reads as its first operand; tiles of 8 columns that two classes share are read by
// both, against zero weights. VS of the A3 slices of v wait where their rows of y will be, as registers are
// scarce: they come back from the L2 cache before the last factor. Mean and
// variance are of the rows in registers, exact in two passes; the norm's weight and bias lie in K1 and bias.
//
// Weights arrive as panels in the order of use (flysurgery/ops/cuda/ffn_image.py), with their float32 biases and scales.
// The two sides of act: see activation.cuh. Halves of h come from weights that were halved when packed.
//
// Measured on an H200, 25088 rows, width 384, float16, GELU by erf (`python recipes/fused_ffn_table.py`): 74 us with the patterns of Gonon et
// al. and 61 us with Monarch of four blocks, where the dense block takes 206 us; 40 and 38 % of the roofline of the tensor cores. Of the
// clocks of a warpgroup 15 % pass until x is there and normalized, 4 % in K1, 60 % in K2, act and K3, 20 % in K4 and the stores, which go
// out in pieces of 16 bytes, 48 bytes apart where D4 = 3. Nothing is saturated: a single wave waits for its own latencies.
//
// Limits: sm_90a; rows of x at multiples of 16 bytes; sizes as in ffn_tiling.py.

#include "activation.cuh"
#include "instructions.cuh"
#include "norm_rows.cuh"
#include "panel_ring.cuh"
#include "wgmma.cuh"
#include "wgmma_shared.cuh"

constexpr int kWarps = 4 * WARPGROUPS;
constexpr int kIn = A1 * C1, kOut = B4 * D4;
__host__ __device__ constexpr int most(int tiles) { return tiles % 6 == 0 ? 6 : tiles % 4 == 0 ? 4 : tiles % 3 == 0 ? 3 : tiles % 2 == 0 ? 2 : 1; }
constexpr int kTiles1 = (B1 + 7) / 8, kTiles2 = HIDDEN / 8, kTiles3 = (B3 + 7) / 8, kTiles4 = COLUMNS4 / 8;
constexpr int kSteps1 = C1 / 16 / PARTS1, kSteps2 = STEPS2 / PARTS2;  // k16 steps of a panel
constexpr int kPieces = C3 / D2 / HIDDEN;                             // pieces of a class and a block of factor 3
constexpr int kWeights1 = kSteps1 * kTiles1 * 256, kWeights2 = kSteps2 * kTiles2 * 256, kWeights3 = HIDDEN * kTiles3 * 16;
constexpr int kSteps4 = STEPS4 / PARTS4, kWeights4 = kSteps4 * kTiles4 * 256;
constexpr int kFloats4 = COLUMNS4 * 4 * (1 + SCALED);                 // its biases and scales
constexpr int kHalf1 = most(kTiles1);                                 // tiles of a block of u that are multiplied together
constexpr int kUWords = A1 * kTiles1;                                 // tiles of u
constexpr int kRun = 2 * RUN * D4;                                    // adjacent outputs that a lane holds
constexpr int kRuns = kTiles4 / RUN, kVectors4 = kRun / 8;            // a panel's runs, and vectors of 16 bytes in one
constexpr int kPanels4 = B4 / COLUMNS4;
constexpr int kBuffer = (kUWords > A3 * kTiles3 ? kUWords : A3 * kTiles3) * 1024;  // bytes of a warpgroup: u, then v

static_assert(kSteps1 * 16 * PARTS1 == C1 && kSteps2 * PARTS2 == STEPS2 && kPieces * HIDDEN * D2 == C3 && HIDDEN % 16 == 0, "whole panels");
static_assert(kTiles4 % RUN == 0 && kRun % 8 == 0 && kPanels4 * COLUMNS4 == B4 && kSteps4 * PARTS4 == STEPS4, "a lane stores whole vectors");

struct Panels {
    static constexpr int kFirst = A1 * PARTS1, kMiddle = A3 * D2 * kPieces * (PARTS2 + 1), kLast = kPanels4 * D4 * PARTS4;
    static constexpr int kPanels = kFirst + kMiddle + kLast, kSlots = SLOTS, kStride = PANEL_STRIDE, kWarps = ::kWarps;
    static constexpr int kTogether = PARTS1 > PARTS2 ? (PARTS1 > PARTS4 ? PARTS1 : PARTS4) : PARTS2 > PARTS4 ? PARTS2 : PARTS4;
    static __device__ __forceinline__ int bytes(int panel) {
        if (panel < kFirst) return kWeights1;
        if (panel >= kFirst + kMiddle) return kWeights4 + ((panel - kFirst - kMiddle) % PARTS4 == 0 ? kFloats4 : 0);
        const int part = (panel - kFirst) % (PARTS2 + 1);
        return part == PARTS2 ? kWeights3 : part == 0 ? kWeights2 + HIDDEN * 4 : kWeights2;
    }
};

// Tiles of u that a class of factor 2 reads, two a k16 step: first tile * 64 + (second - first) * 64 * 65536, as descriptors want them.
__constant__ u32 kTilesOfU[D2][STEPS2] = U_TABLE;

constexpr u32 kNoTile = 0xffffffffu;

// acc = float32 values in panel order, which all rows share.
template <int TILES>
__device__ __forceinline__ void broadcast(float (&acc)[TILES][4], u32 address, int t) {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        u32 pair[2];
        load_shared_pair(pair, address + (n * 4 + t) * 8);
        acc[n][0] = acc[n][2] = __uint_as_float(pair[0]);
        acc[n][1] = acc[n][3] = __uint_as_float(pair[1]);
    }
}

template <int TILES, int O = 0>
__device__ __forceinline__ void multiply(float (&acc)[TILES][4], const u32 (&a)[4], u64 panel, int accumulate) {
    constexpr int kPiece = wgmma_piece((TILES - O) * 8);
    Wgmma<kPiece>::template run<O>(acc, a, panel + O * 8, accumulate);
    if constexpr (O + kPiece / 8 < TILES) multiply<TILES, O + kPiece / 8>(acc, a, panel, accumulate);
}

// The descriptor of a panel of weights; `bytes` further on it is greater by bytes / 16.
template <int COLUMNS>
__device__ __forceinline__ u64 describe(u32 panel) {
    return (u64)(128 >> 4) << 32 | (u32)(COLUMNS << 16) + (panel >> 4);
}

__device__ __forceinline__ void meet_warpgroup(int warpgroup) { asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory"); }

// Where a thread is, found anew in each stage, since registers are too scarce to remember it: asm hides that it is the same.
struct Place {
    int thread, t, left;  // `left` rows from `row` on are inside, at most 16: row + 8*h is if left > 8*h
    long long row;        // the lane's first
    __device__ __forceinline__ Place(int round, long long rows) {
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        t = thread & 3;
        const long long unit = ((long long)round * WARPGROUPS + (thread >> 7)) * gridDim.x + blockIdx.x;
        row = unit * 64 + (thread >> 5 & 3) * 16 + (thread >> 2 & 7);
        left = (int)(rows - row < 16 ? rows - row : 16);
    }
};

extern "C" __global__ void __launch_bounds__(32 * kWarps, 1)
fused_ffn(const char* __restrict__ x, const char* __restrict__ image, char* __restrict__ y, long long rows, long long x_stride, int eps_bits) {
    extern __shared__ __align__(128) char memory[];
    using Ring = BulkRing<Panels>;
    const u32 ring_at = shared_address(memory);
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const int warpgroup = warp / 4, g = lane >> 2, t = lane & 3;
    const u32 buffer = (ring_at + Ring::kBytes + 127 & ~127u) + warpgroup * kBuffer;
    const u32 u_lane = buffer + ((warp & 3) * 16 + g) * 16 + t * 4;
    const u32 u_descriptor = __shfl_sync(0xffffffffu, buffer >> 4, 0);

    if (threadIdx.x == 0) Ring::prepare(ring_at);
    __syncthreads();

    const long long units = (rows + 63) / 64;
    const int rounds = (int)((units + (long long)WARPGROUPS * gridDim.x - 1) / ((long long)WARPGROUPS * gridDim.x));
    Ring ring(image, ring_at, rounds, warp, lane);

    for (int round = 0; round < rounds; ++round) {
        const long long unit = ((long long)round * WARPGROUPS + warpgroup) * gridDim.x + blockIdx.x;
        if (unit >= units) {  // no rows left for this warpgroup, others still need the panels
#pragma unroll 1
            for (int p = 0; p < Panels::kPanels; ++p) {
                ring.wait();
                ring.leave();
            }
            continue;
        }
        {   // ---- u = K1 norm(x)
            const Place at(round, rows);
            NormRows<kIn, X_VECTOR> operands;
            operands.load(x + at.row * x_stride, x_stride, at.t, at.left);
#if NORM
            operands.normalize(__int_as_float(eps_bits));
#endif
            meet_warpgroup(warpgroup);  // all have read what the buffer held
#pragma unroll
            for (int i = 0; i < A1; ++i) {
                u64 weights[PARTS1];
#pragma unroll
                for (int part = 0; part < PARTS1; ++part) weights[part] = describe<kTiles1 * 8>(ring.wait(part));
#pragma unroll
                for (int first = 0; first < kTiles1; first += kHalf1) {
                    float acc[kHalf1][4];
                    wgmma_fence();
#pragma unroll
                    for (int s = 0; s < kSteps1 * PARTS1; ++s) {
                        u32 a[4];
                        operands.operand(a, i * kSteps1 * PARTS1 + s);
                        Wgmma<kHalf1 * 8>::template run<0>(
                            acc, a, weights[s / kSteps1] + s % kSteps1 * kTiles1 * 16 + first * 8, s > 0);
                    }
                    wgmma_commit();
                    wgmma_wait<0>();
#pragma unroll
                    for (int n = 0; n < kHalf1; ++n) {
                        store_shared(u_lane + (i * kTiles1 + first + n) * 1024, round2(acc[n][0], acc[n][1]));
                        store_shared(u_lane + (i * kTiles1 + first + n) * 1024 + 128, round2(acc[n][2], acc[n][3]));
                    }
                }
                ring.leave<PARTS1>();
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            meet_warpgroup(warpgroup);
        }

        // ---- v = K3 act(K2 u + bias), a block of factor 3 after the other
        u32 v[A3][kTiles3][2];
#pragma unroll
        for (int i = 0; i < A3; ++i) {
            float sums[kTiles3][4];
#pragma unroll
            for (int n = 0; n < kTiles3; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
#pragma unroll 1
            for (int c = 0; c < D2 * kPieces; ++c) {
                const u32* const tiles = kTilesOfU[c / kPieces];
                float h[kTiles2][4];
#pragma unroll
                for (int part = 0; part < PARTS2; ++part) {
                    const u32 panel = ring.wait(part);
                    const u64 weights = describe<HIDDEN>(panel);
                    if (part == 0) broadcast(h, panel + kWeights2, t);
                    wgmma_fence();
#pragma unroll
                    for (int s = 0; s < kSteps2; ++s) {
                        const u64 a = (u64)(128 >> 4) << 32 | (u_descriptor + tiles[part * kSteps2 + s]);
                        WgmmaShared<HIDDEN>::run(h, a, weights + s * kTiles2 * 16);
                    }
                    wgmma_commit();
                }
                ring.settle();
                wgmma_wait<0>();
                ring.leave<PARTS2>();

                u32 a[HIDDEN / 16][4];
#pragma unroll
                for (int s = 0; s < HIDDEN / 16; ++s) {
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        const float* pair = &h[2 * s + k / 2][k % 2 * 2];
                        a[s][k] = round2(activate_half<ACTIVATION>(pair[0]), activate_half<ACTIVATION>(pair[1]));
                    }
                    if (s == 0) ring.settle();
                }
                const u64 weights = describe<kTiles3 * 8>(ring.wait());
                wgmma_fence();
#pragma unroll
                for (int s = 0; s < HIDDEN / 16; ++s) multiply(sums, a[s], weights + s * kTiles3 * 16, 1);
                wgmma_commit();
                wgmma_wait<0>();
                ring.leave();
            }
#pragma unroll
            for (int n = 0; n < kTiles3; ++n) {
                v[i][n][0] = round2(sums[n][0], sums[n][1]);
                v[i][n][1] = round2(sums[n][2], sums[n][3]);
            }
            if (i < VS) {
                const Place at(round, rows);
                char* const y_row = y + at.row * (kOut * 2) + at.t * 16;
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int n = 0; n < kTiles3; n += 4) {
                        const Vector<16> aside = {v[i][n][h], v[i][n + 1][h], v[i][n + 2][h], v[i][n + 3][h]};
                        if (at.left > h * 8) *reinterpret_cast<Vector<16>*>(y_row + h * 8 * (kOut * 2) + (i * kTiles3 + n) * 16) = aside;
                    }
            }
        }
        const Place at(round, rows);
        char* const y_row = y + at.row * (kOut * 2);
#pragma unroll
        for (int i = 0; i < VS; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int n = 0; n < kTiles3; n += 4) {
                    Vector<16> aside = {};
                    if (at.left > h * 8) aside = *reinterpret_cast<const Vector<16>*>(y_row + h * 8 * (kOut * 2) + (i * kTiles3 + n) * 16 + at.t * 16);
#pragma unroll
                    for (int k = 0; k < 4; ++k) v[i][n + k][h] = aside.w[k];
                }
        meet_warpgroup(warpgroup);  // nobody multiplies u any more
#pragma unroll
        for (int o = 0; o < A3 * kTiles3; ++o) {
            store_shared(u_lane + o * 1024, v[o / kTiles3][o % kTiles3][0]);
            store_shared(u_lane + o * 1024 + 128, v[o / kTiles3][o % kTiles3][1]);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        meet_warpgroup(warpgroup);

        // ---- y = x + scale * (K4 v + bias)
        constexpr u32 kTilesOfV[D4][STEPS4] = V_TABLE;  // as kTilesOfU; kNoTile where a class has fewer steps
        const char* const x_row = x + at.row * x_stride;
#pragma unroll 1
        for (int column = 0; column < kPanels4; ++column) {
            float acc[D4][kTiles4][4];
            Vector<16> residual[RESIDUAL ? kRuns : 1][kVectors4][2];
            const int byte = (column * kRuns * 4 + at.t) * kRun * 2;
            auto load_residual = [&](int run) {
#pragma unroll
                for (int n = 0; n < kVectors4; ++n)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        if (at.left > h * 8)
                            residual[run][n][h] = *reinterpret_cast<const Vector<16>*>(x_row + h * 8 * x_stride + byte + run * 8 * kRun + n * 16);
                        else residual[run][n][h] = {};
            };
#pragma unroll
            for (int j = 0; j < D4; ++j) {
                u32 floats = 0;
#pragma unroll
                for (int part = 0; part < PARTS4; ++part) {
                    const u32 panel = ring.wait(part);
                    if (part == 0) {
                        floats = panel + kWeights4;
                        broadcast(acc[j], floats, t);
                    }
                    const u64 weights = describe<COLUMNS4>(panel);
                    wgmma_fence();
#pragma unroll
                    for (int s = 0; s < kSteps4; ++s) {
                        const u32 tiles = kTilesOfV[j][part * kSteps4 + s];
                        if (tiles == kNoTile) continue;
                        const u64 a = (u64)(128 >> 4) << 32 | (u_descriptor + tiles);
                        WgmmaShared<COLUMNS4>::run(acc[j], a, weights + s * kTiles4 * 16);
                    }
                    wgmma_commit();
                }
                ring.settle();
                if (RESIDUAL && j == D4 - 1)
#pragma unroll
                    for (int run = 0; run < kRuns / 2; ++run) load_residual(run);
                wgmma_wait<0>();
#if SCALED
                float scale[kTiles4][4];
                broadcast(scale, floats + COLUMNS4 * 4, t);
#pragma unroll
                for (int n = 0; n < kTiles4; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) acc[j][n][e] *= scale[n][e];
#endif
                ring.leave<PARTS4>();
            }
            if (RESIDUAL)
#pragma unroll
                for (int run = kRuns / 2; run < kRuns; ++run) load_residual(run);
#pragma unroll
            for (int run = 0; run < kRuns; ++run)
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int n = 0; n < kVectors4; ++n) {
                        Vector<16> out;
#pragma unroll
                        for (int k = 0; k < 4; ++k) {
                            float pair[2];
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                const int place = n * 8 + k * 2 + e, p = place / D4, j = place % D4;
                                pair[e] = acc[j][run * RUN + p / 2][2 * h + p % 2];
                            }
                            if (RESIDUAL) {
                                const u32 pair_of_x = residual[RESIDUAL ? run : 0][n][h].w[k];
                                pair[0] += low_half(pair_of_x), pair[1] += high_half(pair_of_x);
                            }
                            out.w[k] = round2(pair[0], pair[1]);
                        }
                        if (at.left > h * 8)
                            *reinterpret_cast<Vector<16>*>(y_row + h * 8 * (kOut * 2) + byte + run * 8 * kRun + n * 16) = out;
                    }
        }
    }
}
