// v = K3 act(K2 u + bias): the two factors around the activation of a wide feed-forward block in one launch; hidden units reach no memory.
//
//        u: shared memory, a class at a time ──K2──> h: registers ──K3──> v: registers
//        64 rows a warpgroup, three of which share the panels of weights in a ring
//
// Factors are patterns (1,b,64*STAGES,CLASSES) and (A3,128,128*PIECES*CLASSES,1). A row of u is too long to stay beside the weights, so a
// warpgroup goes over the classes: it keeps the columns of one, and makes with them their part of all of v. That part waits, rounded to halves,
// where v will be, each lane's in places of its own in the rows of its warp, and the next class adds to it. So v has whole units of 64 rows. A
// piece of 128 hidden units, rounded and activated, is an operand of the third factor at once.
//
// One more warpgroup loads data by the copy engine. A thread of its first warp loads the panels. One of each other warp loads the rows of a
// warpgroup, 64 columns at a time, as soon as the products with those of the class before are done. No thread reads these data itself.
//
// Panels of 64 inputs of 128 columns lie in the order of use, as the biases do (flysurgery/gpu/factor_by_factor.py). The activation takes half of
// its argument: weights and biases of the second factor are halved.
//
// Floor: the products.
//
// MODE 0 fp16, 1 bf16. Defines: MODE, CLASSES, STAGES, A3 (blocks of the third factor), PIECES (of a class and a block), ACTIVATION (activation.cuh), SLOTS.
// Limits: sm_90a; rows of u begin at multiples of 16 bytes.
#include "activation.cuh"
#include "instructions.cuh"
#include "panel_ring.cuh"
#include "row_pairs.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

constexpr int kWarpgroups = 3, kWarps = 4 * kWarpgroups, kThreads = 128 * (kWarpgroups + 1);
constexpr int kRegisters = 160, kBringing = 32;                     // of a multiplying thread, and of a loading thread; together all registers
constexpr int kColumns = 128, kTiles = kColumns / 8;                // of a panel
constexpr int kSteps = 4, kDownPanels = kColumns / 16 / kSteps;     // k16 steps of a panel, panels of the third factor in a piece
constexpr int kPanel = 16 * kSteps * kColumns * 2;                  // bytes of one
constexpr int kStretch = 64 * 128;                                  // bytes of 64 columns of a warpgroup's rows of u
constexpr int kRow = A3 * kColumns * 2;                         // bytes of a row of v

struct Panels {
    static constexpr int kPanels = CLASSES * A3 * PIECES * (STAGES + kDownPanels), kSlots = SLOTS, kStride = kPanel, kArrivals = kWarps;
};

// Descriptors from an address / 16; `bytes` further on they are greater by bytes / 16.
__device__ __forceinline__ u64 stretch_of(u32 sixteenths) { return (u64)(1u << 30 | 1024 >> 4) << 32 | (1u << 16) + sixteenths; }
__device__ __forceinline__ u64 panel_of(u32 sixteenths) { return (u64)(128 >> 4) << 32 | (u32)(kColumns << 16) + sixteenths; }

extern "C" __global__ void __launch_bounds__(kThreads, 1)
ffn_middle(const __grid_constant__ TensorMap u, const char* __restrict__ image, const char* __restrict__ biases, const int* __restrict__ places,
           char* __restrict__ v, long long rows) {
    extern __shared__ __align__(1024) char memory[];
    // stretches of u of each warpgroup | ring | barriers a stretch: it has arrived, it is free
    const u32 stretches = shared_address(memory), ring_at = stretches + kWarpgroups * STAGES * kStretch;
    using Ring = PanelRing<Panels>;
    const u32 arrived = ring_at + Ring::kBytes, freed = arrived + 8 * kWarpgroups * STAGES;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    Ring ring(ring_at);
    if (threadIdx.x == 0) {
        for (int s = 0; s < kWarpgroups * STAGES; ++s) barrier_init(arrived + 8 * s, 1), barrier_init(freed + 8 * s, 4);
        Ring::prepare(ring_at);
    }
    __syncthreads();
    const int units = (int)((rows + 63) / 64), rounds = (units + kWarpgroups * (int)gridDim.x - 1) / (kWarpgroups * (int)gridDim.x);
    const auto unit_of = [&](int round, int warpgroup) { return (round * kWarpgroups + warpgroup) * (int)gridDim.x + (int)blockIdx.x; };

    if (warp >= kWarps) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kBringing));
        const int warpgroup = warp - kWarps - 1;  // whose rows the warp loads
        if (lane == 0 && warpgroup < 0)
            Ring::feed(image, ring_at, rounds);
        if (lane == 0 && warpgroup >= 0) {
            wait_for_kernels_before();
            const int first = warpgroup * STAGES;
            u32 fill = 0;
            for (int round = 0; round < rounds; ++round)
                if (unit_of(round, warpgroup) < units)
#pragma unroll 1
                    for (int j = 0; j < CLASSES; ++j, ++fill)
#pragma unroll 1
                        for (int s = 0; s < STAGES; ++s) {
                            const u32 barrier = arrived + 8 * (first + s);
                            barrier_wait(freed + 8 * (first + s), ~fill & 1);
                            barrier_expect(barrier, kStretch);
                            copy_box(stretches + (first + s) * kStretch, u, places[j * STAGES + s], unit_of(round, warpgroup) * 64, barrier);
                        }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
        const int warpgroup = warp / 4, t = lane & 3, odd = lane >> 2 & 1;
        const u32 own = stretches + warpgroup * STAGES * kStretch >> 4;
        const u32 own_arrived = arrived + 8 * warpgroup * STAGES, own_freed = freed + 8 * warpgroup * STAGES;
        u32 fill = 0;
#pragma unroll 1
        for (int round = 0; round < rounds; ++round) {
            if (unit_of(round, warpgroup) >= units) {  // no rows left for this warpgroup, others still need the panels
#pragma unroll 1
                for (int p = 0; p < Panels::kPanels; ++p) {
                    ring.wait(0);
                    __syncwarp();
                    ring.leave(lane == 0);
                }
                continue;
            }
            char* const rows_of_warp = v + ((long long)unit_of(round, warpgroup) * 64 + warp % 4 * 16) * kRow;
#pragma unroll 1
            for (int j = 0; j < CLASSES; ++j, ++fill) {
                const char* piece_biases = biases + j * (A3 * PIECES * kColumns * 4);
#pragma unroll 1
                for (int i = 0; i < A3; ++i) {
                    char* const part = rows_of_warp + i * (kColumns * 2) + (lane >> 4) * kRow + (lane & 15) * 16;  // two rows a vector of all lanes
                    float sums[kTiles][4] = {};
#pragma unroll 1
                    for (int piece = 0; piece < PIECES; ++piece) {
                        const bool begins = i == 0 && piece == 0, ends = i == A3 - 1 && piece == PIECES - 1;
                        u32 from;  // asm keeps the compiler from holding the descriptors of all stretches
                        asm volatile("mov.u32 %0, %1;" : "=r"(from) : "r"(own));
                        float h[kTiles][4];
#pragma unroll
                        for (int n = 0; n < kTiles; n += 2) {  // sums begin with the biases: of a lane's columns, eight of four tiles side by side
                            Vector<16> bias;
                            load_now(bias, piece_biases + ((n / 4 * 4 + t) * 8 + n % 4 * 2) * 4);
#pragma unroll
                            for (int e = 0; e < 4; ++e) h[n + e / 2][e % 2] = h[n + e / 2][2 + e % 2] = __uint_as_float(bias.w[e]);
                        }
                        piece_biases += kColumns * 4;
#pragma unroll
                        for (int s = 0; s < STAGES; ++s) {
                            ring.wait(s > 0);
                            if (begins) barrier_wait(own_arrived + 8 * s, fill & 1);
                            const u64 a = stretch_of(from + (s * kStretch >> 4)), b = panel_of(ring.sixteenths(s > 0));
                            wgmma_fence();
#pragma unroll
                            for (int k = 0; k < kSteps; ++k) WgmmaShared<kColumns>::add(h, a + (k * 32 >> 4), b + (k * kColumns * 32 >> 4));
                            wgmma_commit();
                            if (s > 0) {
                                wgmma_wait<1>();
                                if (ends && lane == 0) barrier_arrive(own_freed + 8 * (s - 1));
                                ring.leave(lane == 0);
                            }
                        }
                        wgmma_wait<0>();
                        if (ends && lane == 0) barrier_arrive(own_freed + 8 * (STAGES - 1));
                        ring.leave(lane == 0);
                        u32 a[kTiles / 2][4];
#pragma unroll
                        for (int p = 0; p < kDownPanels; ++p) {  // a part is activated while the one before is multiplied
#pragma unroll
                            for (int k = p * kSteps; k < (p + 1) * kSteps; ++k)
#pragma unroll
                                for (int e = 0; e < 4; ++e) a[k][e] = activate_pair<ACTIVATION>(h[2 * k + e / 2][e % 2 * 2], h[2 * k + e / 2][e % 2 * 2 + 1]);
                            ring.wait(p > 0);
                            const u64 b = panel_of(ring.sixteenths(p > 0));
                            wgmma_fence();
#pragma unroll
                            for (int k = 0; k < kSteps; ++k) Wgmma<kColumns>::template run<0>(sums, a[p * kSteps + k], b + (k * kColumns * 32 >> 4), 1);
                            wgmma_commit();
                            if (p > 0) {
                                wgmma_wait<1>();
                                ring.leave(lane == 0);
                            }
                        }
                        wgmma_wait<0>();
                        ring.leave(lane == 0);
                    }
                    if (j > 0) {  // the classes before are waiting where v will be
                        Vector<16> waiting[kTiles / 2];
#pragma unroll
                        for (int m = 0; m < kTiles / 2; ++m) load_now(waiting[m], part + 2 * m * kRow);
#pragma unroll
                        for (int n = 0; n < kTiles; ++n)
#pragma unroll
                            for (int e = 0; e < 4; ++e) {
                                const u32 word = waiting[n / 2].w[n % 2 * 2 + e / 2];
                                sums[n][e] += e % 2 ? high_half(word) : low_half(word);
                            }
                    }
                    if (j < CLASSES - 1) {
#pragma unroll
                        for (int m = 0; m < kTiles / 2; ++m) {
                            Vector<16> packed;
#pragma unroll
                            for (int k = 0; k < 4; ++k) packed.w[k] = round2(sums[2 * m + k / 2][k % 2 * 2], sums[2 * m + k / 2][k % 2 * 2 + 1]);
                            *reinterpret_cast<Vector<16>*>(part + 2 * m * kRow) = packed;
                        }
                    } else {
                        __syncwarp();  // all lanes have read what waited in these rows
#pragma unroll
                        for (int r = 0; r < kTiles / 4; r += 2)
#pragma unroll
                            for (int g = 0; g < 2; ++g) {
                                Vector<16> line[2];  // what a lane has of 64 columns of a row
#pragma unroll
                                for (int k = 0; k < 8; ++k) line[k / 4].w[k % 4] = round2(sums[r * 4 + k][2 * g], sums[r * 4 + k][2 * g + 1]);
                                exchange_rows(line[0], line[1], odd);
                                char* const to = rows_of_warp + ((lane >> 2) + 8 * g - odd) * kRow + (i * kColumns + r * 32 + odd * 32 + t * 8) * 2;
                                *reinterpret_cast<Vector<16>*>(to) = line[0];
                                *reinterpret_cast<Vector<16>*>(to + kRow) = line[1];
                            }
                    }
                }
            }
        }
    }
}
