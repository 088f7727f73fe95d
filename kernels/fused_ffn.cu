// y = x + scale * (K4' K3' act(K2' K1' norm(x) + bias) + bias'): a whole feed-forward block of two butterfly layers in one launch, float16 or
// bfloat16 with float32 sums. x is read once (again for the residual, from the L2 cache), y is written once, nothing else reaches memory.
//
// The factors, in the order in which x meets them, are patterns (A1,B1,C1,1) (1,B2,C2,D2) (A3,B3,C3,1) (1,B4,C4,D4):
//   u = K1 norm(x)       blocks of factor 1; its outputs are sorted by the class (residue mod D2) that reads them
//   h = act(K2 u + bias) class by class, in pieces of HIDDEN units; the order of h is free, so it stays planar by class
//   v = K3 h             a piece of h belongs to one block of factor 3: accumulators of K2, activated, are operands of K3
//   y = K4 v             v sorted by class mod D4; a lane holds all residues of its columns
//
//        x: registers ──K1──> u: shared memory ──K2──> h: registers ──K3──> v: rows of y, then shared memory ──K4──> y
//        64 rows a warpgroup from the first load to the last store; WARPGROUPS of them share the panels of weights in a ring
//
// One more warpgroup loads data by the copy engine: a thread the panels, a warp the rows of x, for one warpgroup after the other. A warpgroup
// rounds a piece of h to halves, multiplies the next one in the same accumulators, and activates the rounded one meanwhile. u and v are core
// matrices that wgmma reads as its first operand, again for every piece: so a piece has up to 128 units, or shared memory would be the limit.
// Tiles of 8 columns that two classes share are read by both, against zero weights. As registers and shared memory are full, the slices of v
// wait where their rows of y will be, as the core matrices that they are, and come back by the copy engine in place of u. So y has whole units
// of 64 rows. The mean is subtracted from rows in registers, and u is divided by the deviation; the norm's weight and bias lie in
// K1 and bias.
//
// Weights arrive as panels in the order of use (flysurgery/gpu/ffn.py), with their float32 biases and scales.
// h is calculated in units of kHiddenUnit, which u is divided by, and act(h), v and the sums of the last factor in half of that: see activation.cuh.
// Biases and scales were packed so; where there is no scale, the last step multiplies.
//
// What orders the copy engine: it fills a slot after all threads have left it, which they do when their products with it are done (wgmma_wait) and
// when what threads read from it is in registers (fence_async); it writes x after the last product with v; v after all have multiplied u.
//
// Times on an H200: recipes/results/kernels_h200.csv (`python recipes/kernel_tables.py fused_ffn`).
//
// Limits: sm_90a; rows of x at multiples of 16 bytes; sizes as in ffn_tiling.py.

#include "activation.cuh"
#include "ffn_lanes.cuh"
#include "ffn_sizes.cuh"
#include "instructions.cuh"
#include "norm_rows.cuh"
#include "panel_ring.cuh"
#include "wgmma.cuh"

constexpr int kWarps = 4 * WARPGROUPS;
constexpr int kConsumerRegisters = 160, kProducerRegisters = 32;  // of a thread; all of a multiprocessor's with three warpgroups and one
constexpr int kWeights2 = kSteps2 * kTiles2 * 256, kWeights4 = kSteps4 * kTiles4 * 256;  // bytes of weights in a panel; floats follow them
constexpr int kOfBlock3 = kAllPieces * (PARTS2 + PARTS3);              // panels
constexpr int kEarly = PARTS3 > 1;                                    // turns of activating a piece before the next one's products begin
constexpr int kTurns = kEarly + PARTS2 + PARTS3 - 1;                  // of activating a piece
constexpr int kVectors4 = kRun / 8;                                   // of 16 bytes, of the outputs that a lane holds
constexpr float kOutUnit = kHiddenUnit / 2.0f;                        // of act(h) and of all that comes of it
constexpr u32 kOnes = MODE == 1 ? 0x3f803f80u : 0x3c003c00u, kOutUnits = MODE == 1 ? 0x3fc33fc3u : 0x3e183e18u;  // as two halves
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int kEightRows = 8 * kIn * 2 + 64;                          // bytes from eight rows of x to the next eight: loads have no bank conflict
constexpr int kBuffer = larger(larger(A1 * kTiles1, kTilesOfV) * 1024, 8 * kEightRows);  // bytes of a warpgroup: x, then u, then v

// Tiles of a block of u that are multiplied together.
__host__ __device__ constexpr int together(int tiles) {
    int most = 4;
    while (tiles % most != 0) --most;
    return most;
}
constexpr int kTogether1 = together(kTiles1), kProducts1 = kTiles1 / kTogether1;
constexpr int kPhases = A3 > 1 ? 2 : 1;                               // copies into a buffer a round: x, and v where it is not of one slice

static_assert(kHiddenUnit == HIDDEN_UNIT, "the image is in the units of the kernel");
static_assert(kRun % 8 == 0, "a lane holds whole vectors");

using Panels = FfnPanels<kWarps>;
static_assert(SLOTS >= 2 * PARTS1 && SLOTS >= 2 + PARTS3, "the panels that are in use together fit in the ring");

// Where a round and a block of factor 3 take whole turns of the ring, the block's pieces are written out: slots and tiles are constants then, which
// spares a third of the instructions beside the products.
constexpr bool kWrittenOut = kOfBlock3 % SLOTS == 0 && Panels::kPanels % SLOTS == 0 && kAllPieces <= 4;
constexpr int kUnrolled = kWrittenOut ? kAllPieces : 1;

// Tiles of u that a class of factor 2 reads, two a k16 step: first tile * 64 + (second - first) * 64 * 65536, as descriptors want them.
__constant__ constexpr u32 kTilesOfClass2[D2][STEPS2] = U_TABLE;

constexpr u32 kNoTile = 0xffffffffu;

// The descriptor of a panel of weights from its address / 16; `bytes` further on it is greater by bytes / 16.
template <int COLUMNS>
__device__ __forceinline__ u64 describe(u32 sixteenths) {
    return (u64)(128 >> 4) << 32 | (u32)(COLUMNS << 16) + sixteenths;
}

// The 64 rows that a warpgroup has in a round.
__device__ __forceinline__ long long unit_of(int round, int warpgroup) { return ((long long)round * WARPGROUPS + warpgroup) * gridDim.x + blockIdx.x; }

// Where a thread is, found anew in each stage, since registers are too scarce to remember it: asm hides that it is the same. The two rows of a
// lane, which products take for rows g and g + 8, are four apart in memory; neighbouring g are in the first and in the last eight of a warp's.
struct Place {
    int t, left;    // `left` rows from `row` on are inside, at most 16: row + 4*h is if left > 4*h
    long long row;  // the lane's first
    __device__ __forceinline__ Place(int round, long long rows) {
        int thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        t = thread & 3;
        row = unit_of(round, thread >> 7) * 64 + (thread >> 5 & 3) * 16 + (thread >> 2 & 1) * 8 + (thread >> 3 & 3);
        left = (int)(rows - row < 16 ? rows - row : 16);
    }
};

// One warp loads the rows of x for all warpgroups, each into its buffer as soon as that is free: eight rows at once where they lie side by side,
// as the copy engine takes its time for each request.
__device__ __forceinline__ void bring_rows(const char* x, long long rows, long long x_stride, int rounds, u32 buffers, u32 arrived, u32 freed) {
    const int lane = threadIdx.x & 31, together = x_stride == kIn * 2 ? 8 : 1;
    wait_for_kernels_before();
#pragma unroll 1
    for (int round = 0; round < rounds; ++round)
#pragma unroll 1
        for (int w = 0; w < WARPGROUPS; ++w) {
            const long long row = unit_of(round, w) * 64;
            if (row >= rows) continue;
            const int inside = (int)(rows - row < 64 ? rows - row : 64);
            barrier_wait(freed + 8 * w, ~round & 1);
            if (lane == 0) barrier_expect(arrived + 8 * w, inside * kIn * 2);
            __syncwarp();
#pragma unroll 1
            for (int r = lane * together; r < inside; r += 32 * together) {
                const int count = inside - r < together ? inside - r : together;
                copy_bulk(buffers + w * kBuffer + r / 8 * kEightRows + r % 8 * (kIn * 2), x + (row + r) * x_stride, count * kIn * 2, arrived + 8 * w);
            }
        }
}

extern "C" __global__ void __launch_bounds__(128 * (WARPGROUPS + 1), 1)
fused_ffn(const char* __restrict__ x, const char* __restrict__ image, char* __restrict__ y, long long rows, long long x_stride, int eps_bits) {
    extern __shared__ __align__(128) char memory[];
    // ring | barriers a warpgroup: its rows of x are there, its buffer is free | buffers
    using Ring = PanelRing<Panels>;
    const u32 ring_at = shared_address(memory), arrived = ring_at + Ring::kBytes, freed = arrived + 8 * WARPGROUPS;
    const u32 buffers = freed + 8 * WARPGROUPS + 127 & ~127u;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), warpgroup = warp / 4;

    if (threadIdx.x == 0) {
        for (int w = 0; w < WARPGROUPS; ++w) {
            barrier_init(arrived + 8 * w, 1);
            barrier_init(freed + 8 * w, 128);
        }
        Ring::prepare(ring_at);
    }
    __syncthreads();

    const long long units = (rows + 63) / 64;
    const int rounds = (int)((units + (long long)WARPGROUPS * gridDim.x - 1) / ((long long)WARPGROUPS * gridDim.x));
    if (warpgroup == WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
        if (threadIdx.x == 32 * kWarps) Ring::feed(image, ring_at, rounds);
        if (warp == kWarps + 1) bring_rows(x, rows, x_stride, rounds, buffers, arrived, freed);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        const u32 buffer = buffers + warpgroup * kBuffer;
        const u32 u_lane = buffer + ((warp & 3) * 16 + g) * 16 + t * 4;
        const u32 u_at = __shfl_sync(0xffffffffu, buffer >> 4, 0);
        Ring ring(ring_at);

        for (int round = 0; round < rounds; ++round) {
            if (unit_of(round, warpgroup) >= units) {  // no rows left for this warpgroup, others still need the panels
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
                barrier_wait(arrived + 8 * warpgroup, kPhases % 2 * round & 1);
                operands.load<4>(memory + (buffer - ring_at) + ((warp & 3) * 2 + (g & 1)) * kEightRows + (g >> 1) * (kIn * 2), kIn * 2, at.t, at.left);
                float factor[2] = {1.0f, 1.0f};
#if NORM
                operands.center(factor, __int_as_float(eps_bits));
#endif
                factor[0] *= 1.0f / kHiddenUnit;
                factor[1] *= 1.0f / kHiddenUnit;
                meet_warpgroup(warpgroup);  // all have read x
                float acc[2][kTogether1][4];
                auto finish = [&](int product) {
#pragma unroll
                    for (int n = 0; n < kTogether1; ++n) {
                        const float(&sum)[4] = acc[product % 2][n];
                        store_shared(u_lane + (product * kTogether1 + n) * 1024, round2(sum[0] * factor[0], sum[1] * factor[0]));
                        store_shared(u_lane + (product * kTogether1 + n) * 1024 + 128, round2(sum[2] * factor[1], sum[3] * factor[1]));
                    }
                    if (product % kProducts1 == kProducts1 - 1) ring.template leave<PARTS1>();
                };
                u64 weights[PARTS1];
#pragma unroll
                for (int product = 0; product < A1 * kProducts1; ++product) {  // one runs while the results of the one before are stored
                    if (product % kProducts1 == 0)
#pragma unroll
                        for (int part = 0; part < PARTS1; ++part) {
                            const int ahead = product > 0 ? PARTS1 + part : part;
                            ring.wait(ahead);
                            weights[part] = describe<kTiles1 * 8>(ring.sixteenths(ahead));
                        }
                    wgmma_fence();
#pragma unroll
                    for (int s = 0; s < kSteps1 * PARTS1; ++s) {
                        u32 a[4];
                        operands.operand(a, product / kProducts1 * kSteps1 * PARTS1 + s);
                        Wgmma<kTogether1 * 8>::template run<0>(
                            acc[product % 2], a, weights[s / kSteps1] + s % kSteps1 * kTiles1 * 16 + product % kProducts1 * kTogether1 * 8, s > 0);
                    }
                    wgmma_commit();
                    if (product > 0) {
                        wgmma_wait<1>();
                        finish(product - 1);
                    }
                }
                wgmma_wait<0>();
                finish(A1 * kProducts1 - 1);
                fence_async();
                meet_warpgroup(warpgroup);
            }

            // ---- v = K3 act(K2 u + bias), a block of factor 3 after the other
            char* const y_unit = y + unit_of(round, warpgroup) * (64 * kOut * 2);
            u32 u_descriptor = u_at;
            float h[kTiles2][4];
            u32 a[HIDDEN / 16][4];
            auto round_part = [&](int part) {  // what the third factor's part will read
#pragma unroll
                for (int s = part * kSteps3; s < (part + 1) * kSteps3; ++s)
#pragma unroll
                    for (int k = 0; k < 4; ++k) a[s][k] = round2(h[2 * s + k / 2][k % 2 * 2], h[2 * s + k / 2][k % 2 * 2 + 1]);
            };
            auto activate_part = [&](int turn) {  // of kTurns, each while products run
                if (rows > 0) {                   // always, but a branch: the compiler would activate between two products
#pragma unroll
                    for (int pair = 0; pair < HIDDEN / 4; ++pair)
                        if (pair * kTurns / (HIDDEN / 4) == turn) a[pair / 4][pair % 4] = activate_in_units<ACTIVATION>(a[pair / 4][pair % 4]);
                }
            };
            u32 there = 0;  // whether the panel that is multiplied next is known to be there
            // h = bias + K2 u for a class; meanwhile the piece before is activated.
            auto multiply_piece = [&](int cls, bool activate) {
#pragma unroll
                for (int part = 0; part < PARTS2; ++part) {
                    const u32 panel = ring.wait(part > 0, there);
                    if (part == 0) broadcast(h, panel + kWeights2, t);
                    const u64 weights = describe<HIDDEN>(ring.sixteenths(part > 0));
                    wgmma_fence();
#pragma unroll
                    for (int s = 0; s < kSteps2; ++s)
                        WgmmaShared<HIDDEN>::add(h, (u64)(128 >> 4) << 32 | (u_descriptor + kTilesOfClass2[cls][part * kSteps2 + s]), weights + s * kTiles2 * 16);
                    wgmma_commit();
                    if (activate) {
                        there = ring.is_there((part > 0) + 1);
                        activate_part(kEarly + part);
                    }
                    if (part > 0) {
                        wgmma_wait<1>();
                        ring.leave();
                    }
                }
            };
            // The slices of v but the last come back when nobody multiplies u any more.
            auto begin_return = [&] {
                asm volatile("fence.proxy.async;" ::: "memory");
                meet_warpgroup(warpgroup);
                if (A3 > 1 && (threadIdx.x & 127) == 0) {
                    barrier_expect(arrived + 8 * warpgroup, (A3 - 1) * kTiles3 * 1024);
                    copy_bulk(buffer, y_unit, (A3 - 1) * kTiles3 * 1024, arrived + 8 * warpgroup);
                }
            };
            multiply_piece(0, false);
            wgmma_wait<0>();
            ring.leave();
#pragma unroll
            for (int part = 0; part < PARTS3; ++part) round_part(part);
            if (kEarly) activate_part(0);
#pragma unroll 1
            for (int i = 0; i < A3; ++i) {
                float sums[kTiles3][4] = {};
                auto multiply_activated = [&](bool more) {  // and round `more` of h, if there is
#pragma unroll
                    for (int part = 0; part < PARTS3; ++part) {
                        ring.wait(more + part, there);
                        const u64 weights = describe<kTiles3 * 8>(ring.sixteenths(more + part));
                        wgmma_fence();
#pragma unroll
                        for (int s = 0; s < kSteps3; ++s) wgmma_pieces(sums, a[part * kSteps3 + s], weights + s * kTiles3 * 16);
                        wgmma_commit();
                        there = 0;
                        if (part + 1 < PARTS3) {
                            there = ring.is_there(more + part + 1);
                            activate_part(kEarly + PARTS2 + part);
                        }
                    }
                    if (more) {
                        wgmma_wait<PARTS3>();
                        ring.leave();
                    }
                    if (PARTS3 > 1) {  // half of the next piece is rounded, and its first part activated, while the last products with this one run
                        wgmma_wait<1>();
                        ring.template leave<PARTS3 - 1>();
#pragma unroll
                        for (int part = 0; part + 1 < PARTS3; ++part)
                            if (more) round_part(part);
                        if (more) activate_part(0);
                    }
                    wgmma_wait<0>();
                    ring.leave();
                    if (more) round_part(PARTS3 - 1);
                };
#pragma unroll kUnrolled
                for (int piece = 0; piece < kAllPieces; ++piece) {
                    if (kWrittenOut) {  // where the ring stands; 0 that the compiler does not know keeps it from holding the addresses of all panels and tiles
                        const u32 nothing = (i + piece * 3) * (u32)(rows >> 40);  // with other sums some kernels have no registers for products
                        ring.stand_at(ring_at + nothing, (A1 * PARTS1 + PARTS2 + piece * (PARTS2 + PARTS3)) % SLOTS);
                        u_descriptor = u_at + nothing;
                    }
                    if (piece + 1 < kAllPieces || i + 1 < A3) {
                        multiply_piece((piece + 1) % kAllPieces / kPieces, true);
                        multiply_activated(true);
                    } else {
                        begin_return();
#pragma unroll
                        for (int part = 0; part < PARTS2; ++part) activate_part(kEarly + part);
                        multiply_activated(false);
                    }
                }
                if (i < A3 - 1) {
                    char* const v_lane = y_unit + i * (kTiles3 * 1024) + (u_lane - buffer);
#pragma unroll
                    for (int n = 0; n < kTiles3; ++n) {
                        *reinterpret_cast<u32*>(v_lane + n * 1024) = round2(sums[n][0], sums[n][1]);
                        *reinterpret_cast<u32*>(v_lane + n * 1024 + 128) = round2(sums[n][2], sums[n][3]);
                    }
                } else {
#pragma unroll
                    for (int n = 0; n < kTiles3; ++n) {
                        store_shared(u_lane + (i * kTiles3 + n) * 1024, round2(sums[n][0], sums[n][1]));
                        store_shared(u_lane + (i * kTiles3 + n) * 1024 + 128, round2(sums[n][2], sums[n][3]));
                    }
                }
            }
            fence_async();
            meet_warpgroup(warpgroup);
            if (A3 > 1) barrier_wait(arrived + 8 * warpgroup, 1);
            const Place at(round, rows);
            char* const y_row = y + at.row * (kOut * 2);

            // ---- y = x + scale * (K4 v + bias), rounded before x is added; the four lanes of a row exchange vectors, so that they store neighbouring ones
            constexpr u32 kTilesOfClass4[D4][STEPS4] = V_TABLE;  // as kTilesOfClass2; kNoTile where a class has fewer steps
            const char* const x_row = x + at.row * x_stride;
#pragma unroll 1
            for (int column = 0; column < kPanels4; ++column) {
                float acc[D4][kTiles4][4];
                Vector<16> residual[2][kVectors4];
                const int byte = column * (kRuns * kRun * 8);
                auto load_residual = [&](int run, int h) {
#pragma unroll
                    for (int n = 0; n < kVectors4; ++n) {
                        residual[h][n] = {};
                        if (at.left > h * 4)
                            residual[h][n] = *reinterpret_cast<const Vector<16>*>(x_row + h * 4 * x_stride + byte + run * (kRun * 8) + place_of<kVectors4>(n, at.t) * 16);
                    }
                };
                if (RESIDUAL) {  // in flight during the products
                    load_residual(0, 0);
                    load_residual(0, 1);
                }
                u32 floats = 0;
                auto finish = [&](int j) {  // all products of class j, when those with its last panel are done
                    if (SCALED) multiply_columns(acc[j], floats + COLUMNS4 * 4, t);
                };
#pragma unroll
                for (int j = 0; j < D4; ++j) {  // a class is multiplied while the one before is scaled
#pragma unroll
                    for (int part = 0; part < PARTS4; ++part) {  // a panel is left when products with the next one are queued
                        const int ahead = j + part > 0;
                        const u32 panel = ring.wait(ahead);
                        const u64 weights = describe<COLUMNS4>(ring.sixteenths(ahead));
                        if (part == 0) broadcast(acc[j], panel + kWeights4, t);
                        wgmma_fence();
#pragma unroll
                        for (int s = 0; s < kSteps4; ++s) {
                            const u32 tiles = kTilesOfClass4[j][part * kSteps4 + s];
                            if (tiles == kNoTile) continue;
                            WgmmaShared<COLUMNS4>::add(acc[j], (u64)(128 >> 4) << 32 | (u_descriptor + tiles), weights + s * kTiles4 * 16);
                        }
                        wgmma_commit();
                        if (ahead) {
                            wgmma_wait<1>();
                            if (part == 0) finish(j - 1);
                            ring.leave();
                        }
                        floats = panel + kWeights4;
                    }
                }
                wgmma_wait<0>();
                finish(D4 - 1);
                ring.leave();
                if (column == kPanels4 - 1) barrier_arrive(freed + 8 * warpgroup);
#pragma unroll
                for (int run = 0; run < kRuns; ++run)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        Vector<16> out[kVectors4];
#pragma unroll
                        for (int n = 0; n < kVectors4; ++n)
#pragma unroll
                            for (int k = 0; k < 4; ++k) {
                                float pair[2];
#pragma unroll
                                for (int e = 0; e < 2; ++e) {
                                    const int nth = n * 8 + k * 2 + e, p = nth / D4, j = nth % D4;
                                    pair[e] = acc[j][run * RUN + p / 2][2 * h + p % 2];
                                }
                                if (!RESIDUAL && !SCALED) pair[0] *= kOutUnit, pair[1] *= kOutUnit;
                                out[n].w[k] = round2(pair[0], pair[1]);
                            }
                        exchange(out, at.t);
#pragma unroll
                        for (int n = 0; n < kVectors4; ++n)
#pragma unroll
                            for (int k = 0; k < 4; ++k)
                                if (RESIDUAL) out[n].w[k] = fma2(out[n].w[k], SCALED ? kOnes : kOutUnits, residual[h][n].w[k]);
                        if (RESIDUAL && run + 1 < kRuns) load_residual(run + 1, h);
#pragma unroll
                        for (int n = 0; n < kVectors4; ++n)
                            if (at.left > h * 4)
                                *reinterpret_cast<Vector<16>*>(y_row + h * 4 * (kOut * 2) + byte + run * (kRun * 8) + place_of<kVectors4>(n, at.t) * 16) = out[n];
                    }
            }
        }
    }
}
