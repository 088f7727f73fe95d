// y = x + scale * (K4' K3' act(K2' K1' norm(x) + bias) + bias'): a whole feed-forward block of two butterfly layers of float32 in one launch, by
// tensor cores that multiply halves: TF32's grade of error (MODE 2) or float32's by pairs of halves (MODE 3). x is read twice, the second time
// from the L2 cache (and again for the residual), y is written once; what lies between does not leave the multiprocessor, but for v.
//
//        x ──K1──> u: registers and shared memory ──K2──> h: registers ──K3──> v: rows of y, then where u was ──K4──> y
//
// Factors and orders are those of fused_ffn.cu: a warpgroup owns 64 rows, and accumulators, rounded or split into hi + lo, are operands. Of pairs
// the high halves of u lie in registers, the low ones in shared memory; single halves lie there. A piece of HIDDEN units is activated while
// the second factor's product for the next one runs. The slices of v wait in the rows of y as float32, which they fill at most. One more
// warpgroup loads the weights and gives its registers to those that multiply.
//
// No scale is searched for: a normalized row is not longer than sqrt(columns), so the weights alone bound each product. The host
// multiplies weights by powers of two, and the image's header says by which ones sums are multiplied, so that operands are at most 2^15;
// pairs lose 2^-40 of that.
//
// Weights arrive as panels in the order of use (flysurgery/gpu/ffn.py), through the ring of panel_ring.cuh.
//
// Measured on an H200, 25216 rows of width 384: fp32 179 us by the patterns of Gonon et al., 165 by Monarch's, tf32 112 and 108.
// The products at the rate of a large one would take 0.53 and 0.46 of the first two, the bytes 19 us.
//
// Limits: sm_90a; rows of x at multiples of 16 bytes; a norm stands before the block; sizes as in ffn_tiling.py.

#include "exact_activation.cuh"
#include "ffn_lanes.cuh"
#include "ffn_sizes.cuh"
#include "fused_products.cuh"
#include "instructions.cuh"
#include "mode.cuh"
#include "panel_ring.cuh"
#include "wgmma.cuh"

constexpr int kWarpgroups = WARPS / 4;  // that multiply
constexpr int kRowOfY = kOut * 4;
constexpr int kTilesOfU = A1 * kTiles1, kTilesHeld = kTilesOfU > kTilesOfV ? kTilesOfU : kTilesOfV;
constexpr int kImage1 = kSteps1 * kTiles1 * 256, kImage2 = kSteps2 * kTiles2 * 256;  // bytes of the high or low halves of a panel
constexpr int kImage3 = kSteps3 * kTiles3 * 256, kImage4 = kSteps4 * kTiles4 * 256;
constexpr int kVectors4 = kRun / 4;                                      // of 16 bytes, of the outputs that a lane holds
constexpr bool kWhole = 4 % D4 == 0;                                     // a vector holds whole columns: then lanes take vectors in turn
constexpr int kHeader = 128;                                             // bytes before the panels: what sums are multiplied by
constexpr int kHeldBytes = kTilesHeld * 1024;                            // of a warpgroup

static_assert(kRun % 4 == 0, "a lane holds whole vectors");

using Panels = FfnPanels<WARPS>;
static_assert(SLOTS >= PARTS2 + PARTS3 && SLOTS >= PARTS4, "the panels that are in use together fit in the ring");

// acc += operands * weights. Products are queued, small ones first; so they are in multiply_held.
template <int IMAGE, int STEPS, int TILES>
__device__ __forceinline__ void multiply_operands(float (&acc)[TILES][4], const u32 (*hi)[4], const u32 (*lo)[4], u32 weights) {
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        if constexpr (!kPairs) break;
        wgmma_step(acc, lo[s], weights + s * TILES * 256, TILES * 8);
        wgmma_step(acc, hi[s], weights + IMAGE + s * TILES * 256, TILES * 8);
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) wgmma_step(acc, hi[s], weights + s * TILES * 256, TILES * 8);
    wgmma_commit();
}

// What the 64 rows of a warpgroup are for the next factor, in tiles of 8 columns. The lane's part of high halves lies in its registers where
// they have low ones; these, or else the high ones, lie in shared memory as core matrices, one tile after the other.
struct Held {
    u32 high[kPairs ? kTilesHeld : 1][2];
    u32 lane_at, descriptor;  // where a lane writes its part of a tile; of the first tile

    __device__ __forceinline__ void put(int tile, const float (&sums)[4], float fit) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            u32 hi, lo;
            split2(sums[2 * h] * fit, sums[2 * h + 1] * fit, hi, lo);
            if constexpr (kPairs) high[tile][h] = hi;
            store_shared(lane_at + tile * 1024 + h * 128, kPairs ? lo : hi);
        }
    }
    // All tiles of two rows in memory; some loads are in flight together.
    template <int FIRST>
    __device__ __forceinline__ void take(const char* const (&rows)[2], float fit) {
        constexpr int kTogether = 8;
        if constexpr (FIRST < kTilesOfV) {
            Vector<8> pairs[kTogether][2];
            load_tiles<FIRST, 0>(pairs, rows);
#pragma unroll
            for (int n = 0; n < kTogether && FIRST + n < kTilesOfV; ++n) {
                float sums[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[e] = __uint_as_float(pairs[n][e / 2].w[e % 2]);
                put(FIRST + n, sums, fit);
            }
            take<FIRST + kTogether>(rows, fit);
        }
    }
    template <int FIRST, int N, int TOGETHER>
    static __device__ __forceinline__ void load_tiles(Vector<8> (&pairs)[TOGETHER][2], const char* const (&rows)[2]) {
        if constexpr (N < TOGETHER && FIRST + N < kTilesOfV) {
#pragma unroll
            for (int h = 0; h < 2; ++h) load_now<(FIRST + N) * 32>(pairs[N][h], rows[h]);
            load_tiles<FIRST, N + 1>(pairs, rows);
        }
    }
    // The operand of a step, from registers or from shared memory; the second tile is empty where it is negative.
    __device__ __forceinline__ void in_registers(u32 (&a)[4], const int (&tiles)[2]) const {
#pragma unroll
        for (int k = 0; k < 4; ++k) a[k] = tiles[k / 2] < 0 ? 0 : high[tiles[k / 2]][k % 2];
    }
    __device__ __forceinline__ u64 in_memory(const int (&tiles)[2]) const {
        u32 first;  // asm hides that it is always the same: the compiler would keep all that it can add to it
        asm volatile("mov.u32 %0, %1;" : "=r"(first) : "r"(descriptor));
        const u32 apart = tiles[1] < 0 ? 0 : (tiles[1] - tiles[0]) * 64;
        return (u64)(128 >> 4) << 32 | (first + (u32)(tiles[0] * 64) + (apart << 16));
    }
};

// acc += held * weights, for the steps of a class from `first` on that a panel has.
template <int STEPS, int IMAGE, int TILES, int ALL>
__device__ __forceinline__ void multiply_held(float (&acc)[TILES][4], const Held& held, const int (&tiles)[ALL][2], int first, u32 weights) {
    wgmma_fence();
#pragma unroll
    for (int s = first; s < first + STEPS; ++s) {
        if (tiles[s][0] < 0) continue;
        const u32 step = weights + (s - first) * TILES * 256;
        WgmmaShared<TILES * 8>::add(acc, held.in_memory(tiles[s]), wgmma_descriptor(step, TILES * 8));
        if constexpr (kPairs) {
            u32 a[4];
            held.in_registers(a, tiles[s]);
            wgmma_step(acc, a, step + IMAGE, TILES * 8);
        }
    }
#pragma unroll
    for (int s = first; s < first + STEPS; ++s) {
        if constexpr (!kPairs) break;
        if (tiles[s][0] < 0) continue;
        u32 a[4];
        held.in_registers(a, tiles[s]);
        wgmma_step(acc, a, weights + (s - first) * TILES * 256, TILES * 8);
    }
    wgmma_commit();
}

// A lane's values of STEPS * 16 columns of its two rows, four neighbours a step.
template <int STEPS>
struct Rows {
    Vector<16> w[STEPS][2];
    template <int S = 0>
    __device__ __forceinline__ void load(const char* const (&rows)[2], int byte) {
        if constexpr (S < STEPS) {
#pragma unroll
            for (int h = 0; h < 2; ++h) load_now<S * 64>(w[S][h], rows[h] + byte);
            load<S + 1>(rows, byte);
        }
    }
    __device__ __forceinline__ float at(int h, int e) const { return __uint_as_float(w[e / 4][h].w[e % 4]); }
};

// What normalizes the lane's two rows: (x - mean) * factor, which is NORMALIZED times as long as a normalized row. Sums are of what differs from
// the mean of the row's last values, so the difference loses no more than a factor of columns / last values of the variance.
struct Moments {
    static constexpr int kSteps = kIn / 16 % 12 == 0 ? 12 : kIn / 16 % 4 == 0 ? 4 : 1;  // whose loads are in flight together
    float mean[2], factor[2];

    __device__ __forceinline__ void take(const char* const (&rows)[2], float eps) {
        float shift[2], sum[2] = {}, squares[2] = {};
#pragma unroll 1
        for (int s = kIn / 16 - kSteps; s >= 0; s -= kSteps) {  // the first ones last: they are requested again at once
            Rows<kSteps> part;
            part.load(rows, s * 64);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (s == kIn / 16 - kSteps) {
                    float start = 0.0f;
#pragma unroll
                    for (int e = 0; e < 4 * kSteps; ++e) start += part.at(h, e);
                    shift[h] = over_quad_sum(start) * (1.0f / (16 * kSteps));
                }
#pragma unroll
                for (int e = 0; e < 4 * kSteps; ++e) {
                    const float apart = part.at(h, e) - shift[h];
                    sum[h] += apart;
                    squares[h] = fmaf(apart, apart, squares[h]);
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float difference = over_quad_sum(sum[h]) * (1.0f / kIn);
            const float variance = fmaf(-difference, difference, over_quad_sum(squares[h]) * (1.0f / kIn));
            mean[h] = shift[h] + difference;
            factor[h] = rsqrtf((variance < 0.0f ? 0.0f : variance) + eps) * NORMALIZED;  // NaN stays NaN
        }
    }
};

// acc = acc * factor + float32 values in panel order; asm as in multiply_columns.
template <int TILES>
__device__ __forceinline__ void multiply_and_add(float (&acc)[TILES][4], float factor, u32 address, int t) {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        u32 pair[2];
        load_shared_pair(pair, address + (n * 4 + t) * 8);
#pragma unroll
        for (int e = 0; e < 4; ++e) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(acc[n][e]) : "f"(factor), "f"(__uint_as_float(pair[e % 2])));
    }
}

// Where a thread is, found anew in each stage, since registers are too scarce to remember it: asm hides that it is the same.
struct Place {
    int t, left;    // `left` rows from `row` on are inside, at most 16: row + 8*h is if left > 8*h
    long long row;  // the lane's first
    __device__ __forceinline__ Place(long long unit, long long rows) {
        int thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        t = thread & 3;
        row = unit * 64 + (thread >> 5 & 3) * 16 + (thread >> 2 & 7);
        left = (int)(rows - row < 16 ? rows - row : 16);
    }
    // The lane's byte of a row, or of the last row where that is not inside: loads need no condition then.
    __device__ __forceinline__ const char* in_row(const char* matrix, long long stride, int h, int byte) const {
        return matrix + (row + (left > h * 8 ? h * 8 : left - 1)) * stride + byte;
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS + 128, 1)
ffn_floats(const char* __restrict__ x, const char* __restrict__ image, char* y, long long rows, long long x_stride, int eps_bits) {
    extern __shared__ __align__(128) char memory[];
    // what each warpgroup holds | ring
    const u32 held_at = shared_address(memory), ring_at = held_at + kWarpgroups * kHeldBytes;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), warpgroup = warp / 4;  // warp-uniform for the compiler
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const long long rows_of_round = 64ll * kWarpgroups * gridDim.x;
    const int rounds = (int)((rows + rows_of_round - 1) / rows_of_round);

    using Ring = PanelRing<Panels>;
    if (threadIdx.x == 0) Ring::prepare(ring_at);
    __syncthreads();
    if (warpgroup == kWarpgroups) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 32 * WARPS) Ring::feed(image + kHeader, ring_at, rounds);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    Ring ring(ring_at);
    wait_for_kernels_before();  // the first weights come while the kernel before ends
    const float* const fits = reinterpret_cast<const float*>(image);  // powers of two
    constexpr int kTilesOfClass2[D2][STEPS2][2] = U_TILES, kTilesOfClass4[D4][STEPS4][2] = V_TILES;
    Held held;
    held.lane_at = held_at + warpgroup * kHeldBytes + (warp % 4 * 16 + g) * 16 + t * 4;
    held.descriptor = held_at + warpgroup * kHeldBytes >> 4;

    for (int round = 0; round < rounds; ++round) {
        const long long unit = ((long long)round * kWarpgroups + warpgroup) * gridDim.x + blockIdx.x;
        if (unit * 64 >= rows) {  // no rows left for this warpgroup, others still need the panels
#pragma unroll 1
            for (int p = 0; p < Panels::kPanels; ++p) {
                ring.wait();
                ring.leave();
            }
            continue;
        }

        // ---- u = K1 norm(x)
        {
            const Place at(unit, rows);
            const char* const x_lane[2] = {at.in_row(x, x_stride, 0, at.t * 16), at.in_row(x, x_stride, 1, at.t * 16)};
            const float u_fit = fits[0];
            Moments moments;
            moments.take(x_lane, __int_as_float(eps_bits));
            Rows<kSteps1> part;
            part.load(x_lane, 0);
#pragma unroll
            for (int block = 0; block < A1; ++block) {
                float acc[kTiles1][4] = {};
#pragma unroll
                for (int nth = block * PARTS1; nth < (block + 1) * PARTS1; ++nth) {
                    u32 hi[kSteps1][4], lo[kSteps1][4];
#pragma unroll
                    for (int s = 0; s < kSteps1; ++s)
#pragma unroll
                        for (int k = 0; k < 4; ++k) {
                            float pair[2];
#pragma unroll
                            for (int e = 0; e < 2; ++e) pair[e] = (part.at(k % 2, s * 4 + k / 2 * 2 + e) - moments.mean[k % 2]) * moments.factor[k % 2];
                            split2(pair[0], pair[1], hi[s][k], lo[s][k]);
                        }
                    if (nth + 1 < A1 * PARTS1) part.load(x_lane, (nth + 1) * kSteps1 * 64);  // meanwhile
                    multiply_operands<kImage1, kSteps1>(acc, hi, lo, ring.wait());
                    wgmma_wait<0>();
                    ring.leave();
                }
#pragma unroll
                for (int n = 0; n < kTiles1; ++n) held.put(block * kTiles1 + n, acc[n], u_fit);
            }
            fence_async();
            meet_warpgroup(warpgroup);
        }

        // ---- v = K3 act(K2 u + bias), a block of factor 3 after the other
        const float to_hidden = fits[1], hidden_fit = fits[2];
        float h[kTiles2][4];
        auto multiply_piece = [&](int cls) {
#pragma unroll
            for (int n = 0; n < kTiles2; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) h[n][e] = 0.0f;
#pragma unroll
            for (int j = 0; j < D2; ++j)  // as registers have names
                if (cls == j)
#pragma unroll
                    for (int part = 0; part < PARTS2; ++part) multiply_held<kSteps2, kImage2>(h, held, kTilesOfClass2[j], part * kSteps2, ring.wait(part));
        };
        multiply_piece(0);
        wgmma_wait<0>();
        ring.template leave<PARTS2>();
#pragma unroll 1
        for (int i = 0; i < A3; ++i) {
            float sums[kTiles3][4] = {};
#pragma unroll 1
            for (int piece = 0; piece < kAllPieces; ++piece) {
                const bool more = piece + 1 < kAllPieces || i + 1 < A3;
                float now[kTiles2][4];
#pragma unroll
                for (int n = 0; n < kTiles2; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) now[n][e] = h[n][e];
                if (more) multiply_piece((piece + 1) % kAllPieces / kPieces);
                u32 weights[PARTS3];
#pragma unroll
                for (int part = 0; part < PARTS3; ++part) weights[part] = ring.wait((more ? PARTS2 : 0) + part);
                u32 hi[HIDDEN / 16][4], lo[HIDDEN / 16][4];
                if (rows > 0) {  // always, but a branch: the compiler would activate between two products
                    multiply_and_add(now, to_hidden, weights[0] + kImages * kImage3, t);
#pragma unroll
                    for (int n = 0; n < kTiles2; ++n) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) now[n][e] = activate<ACTIVATION, !kPairs>(now[n][e]) * hidden_fit;
#pragma unroll
                        for (int k = 0; k < 2; ++k) split2(now[n][2 * k], now[n][2 * k + 1], hi[n / 2][n % 2 * 2 + k], lo[n / 2][n % 2 * 2 + k]);
                    }
                    fence_async();
                }
#pragma unroll
                for (int part = 0; part < PARTS3; ++part) multiply_operands<kImage3, kSteps3>(sums, hi + part * kSteps3, lo + part * kSteps3, weights[part]);
                wgmma_wait<0>();
#pragma unroll 1
                for (int p = more ? 0 : PARTS2; p < PARTS2 + PARTS3; ++p) ring.leave();
            }
            const Place at(unit, rows);
            char* const v_lane = y + at.row * kRowOfY + at.t * 8;
#pragma unroll
            for (int n = 0; n < kTiles3; ++n)
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    Vector<8> pair;
#pragma unroll
                    for (int e = 0; e < 2; ++e) pair.w[e] = __float_as_uint(sums[n][2 * k + e]);
                    if (at.left > k * 8) *reinterpret_cast<Vector<8>*>(v_lane + k * 8 * kRowOfY + (i * kTiles3 + n) * 32) = pair;
                }
        }
        meet_warpgroup(warpgroup);  // nobody reads u any more
        const Place at(unit, rows);
        const char* const x_row = x + at.row * x_stride;
        char* const y_row = y + at.row * kRowOfY;
        const char* const v_lane[2] = {at.in_row(y, kRowOfY, 0, at.t * 8), at.in_row(y, kRowOfY, 1, at.t * 8)};
        held.template take<0>(v_lane, fits[3]);
        fence_async();
        meet_warpgroup(warpgroup);  // v is there, and outputs may take the place of what other lanes have read

        // ---- y = x + scale * (K4 v + bias); the four lanes of a row exchange vectors, so that they store neighbouring ones
        const float to_output = fits[4];
#pragma unroll 1
        for (int column = 0; column < kPanels4; ++column) {
            float acc[D4][kTiles4][4] = {};
            Vector<16> residual[2][kVectors4];
            auto place = [&](int run, int n) {  // in a row, of the lane's nth vector of a run
                return (column * kRuns + run) * (kRun * 16) + (kWhole ? n * 4 + at.t : place_of<kVectors4>(n, at.t)) * 16;
            };
            auto load_residual = [&](int run, int h) {
#pragma unroll
                for (int n = 0; n < kVectors4; ++n) {
                    residual[h][n] = {};
                    if (at.left > h * 8) residual[h][n] = *reinterpret_cast<const Vector<16>*>(x_row + h * 8 * x_stride + place(run, n));
                }
            };
#pragma unroll
            for (int j = 0; j < D4; ++j) {
                const u32 floats = ring.wait() + kImages * kImage4;
#pragma unroll
                for (int part = 0; part < PARTS4; ++part) multiply_held<kSteps4, kImage4>(acc[j], held, kTilesOfClass4[j], part * kSteps4, ring.wait(part));
                if (RESIDUAL && j + 1 == D4) load_residual(0, 0), load_residual(0, 1);  // meanwhile
                wgmma_wait<0>();
                multiply_and_add(acc[j], to_output, floats, t);
                if (SCALED) multiply_columns(acc[j], floats + COLUMNS4 * 4, t);
                fence_async();
                ring.template leave<PARTS4>();
            }
#pragma unroll
            for (int run = 0; run < kRuns; ++run)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    Vector<16> out[kVectors4];
#pragma unroll
                    for (int nth = 0; nth < kRun; ++nth)
                        out[nth / 4].w[nth % 4] = __float_as_uint(acc[nth % D4][run * RUN + nth / D4 / 2][2 * h + nth / D4 % 2]);
                    if constexpr (!kWhole) exchange(out, t);
#pragma unroll
                    for (int n = 0; n < 4 * kVectors4; ++n) {
                        u32& word = out[n / 4].w[n % 4];
                        if (RESIDUAL) word = __float_as_uint(__uint_as_float(word) + __uint_as_float(residual[h][n / 4].w[n % 4]));
                    }
                    if (RESIDUAL && run + 1 < kRuns) load_residual(run + 1, h);
#pragma unroll
                    for (int n = 0; n < kVectors4; ++n)
                        if (at.left > h * 8) *reinterpret_cast<Vector<16>*>(y_row + h * 8 * kRowOfY + place(run, n)) = out[n];
                }
        }
        meet_warpgroup(warpgroup);  // nobody reads v any more
    }
}
