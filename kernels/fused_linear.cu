// y = act(x (K1 K2)^T + bias) + residual in one launch: x is read once, y is written once, the intermediate u = x K2^T
// never leaves the warp that made it.
//
//   u[(i2*B2 + p2)*D2 + j2]            = sum_q x[(i2*C2 + q)*D2 + j2] * K2[i2,p2,q,j2]         stage 1, groups (i2,j2)
//   y[((g*A1 + i1)*B1 + p)*D1 + j1]    = sum_q u[(i1*C1 + q)*D1 + j1] * K1[g][i1,p,q,j1]       stage 2, classes (i1,j1)
//
// Each warp owns 16*MT rows from the first load to the last store. One m16n8k16 accumulator tile, rounded, is half of an
// m16n8k16 A operand, so u stays in registers (or, where it is too large, in shared memory that only its own lane reads).
// The order of u is free: the columns of stage 1 are sorted by the class of stage 2 that reads them, TILES tiles of 8 for
// each class, so the stride-D1 permutation costs nothing. GROUPS linears that share x (q, k, v) run side by side.
//
// Weights arrive as an image in the order of use, cut into panels: [k8][column][8 halves], which ldmatrix reads without
// bank conflicts. They pass through a ring of SLOTS slots; the last warp to leave a slot refills it, so nobody waits to
// refill. A ring that holds all panels is filled once and never again. Each warp stages its own x by cp.async, STAGES - 1
// batches of k16 steps ahead, so no barrier of the block stands between load and use.
//
// MODE 0 fp16, 1 bf16: one product, float32 sums. MODE 2 (tf32 grade) and 3 (fp32 grade) take float32: x, u and the
// weights are scaled by powers of two and rounded to fp16 (MODE 2) or split into hi + lo (MODE 3: hi*hi + hi*lo + lo*hi).
// The scale of a row follows its blocks: it starts at the first chunk's maximum and drops when a later chunk would
// overflow, so rows from 2^-126 to the largest finite float keep their relative precision.
//
// Products: wgmma where WGMMA is 1 (sm_90a; four warps share each read of a panel), mma.sync elsewhere (sm_80 and later).
//
// Limits: sm_80 or newer; row strides of x, y and residual in multiples of 16 bytes; C2 % 4 == 0.

#include "instructions.cuh"
#include "scale.cuh"
#if WGMMA
#include "wgmma.cuh"
#endif

constexpr bool kFloat = MODE >= 2;
constexpr bool kPairs = MODE == 3;
constexpr int kElem = kFloat ? 4 : 2;         // bytes of an element of x and y
constexpr int kImages = kPairs ? 2 : 1;       // hi, lo
constexpr int kGroups2 = A2 * D2;             // groups of stage 1
constexpr int kClasses = A1 * D1;             // classes of stage 2
constexpr int kTiles1 = GROUPS * kClasses * TILES;             // column tiles of a group
constexpr int kSteps1 = KSTEPS1;              // k16 steps of a group, padded
constexpr bool kMatrix = !kFloat && D2 == 1 && C2 % 8 == 0;    // x is in operand order already: ldmatrix reads it
constexpr int kLaneElems = 4 * D2;            // elements of a row of x that a lane holds for a k16 step
constexpr int kLaneBytes = kLaneElems * kElem;
constexpr int kVec = kLaneBytes % 16 == 0 ? 16 : 8;
constexpr int kVecs = kLaneBytes / kVec;
constexpr int kCopy = kMatrix ? 16 : kVec;
constexpr int kPasses = D2 / RESIDUES;        // passes over a block of x, RESIDUES residues j2 each
// Steps handled together: their operands are ready before the first product, and the small corrections go first.
__host__ __device__ constexpr int batch(int steps, int most) {
    int best = 1;
    for (int n = 1; n <= most; ++n)
        if (steps % n == 0) best = n;
    return best;
}
constexpr int kBatch1 = batch(PANEL_STEPS, RESIDUES > 4 ? 1 : 4 / RESIDUES);
constexpr int kBatches = kSteps1 / kBatch1;   // batches of a group
constexpr int kPairsOfSteps = (kBatch1 + 1) / 2;
constexpr int kStageBytes = kMatrix ? kPairsOfSteps * MT * 1024 : kBatch1 * MT * 2 * kLaneBytes * 32;
constexpr int kPanelsOfGroup = kSteps1 / PANEL_STEPS;
constexpr int kPanel1 = PANEL_STEPS * RESIDUES * 16 * kTiles1 * 8 * 2 * kImages;
constexpr int kSteps2 = (kGroups2 * TILES + 1) / 2;            // k16 steps of a class
constexpr int kTiles2 = PANEL_COLUMNS / 8;
constexpr int kColumnPanels = (B1 + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
constexpr int kPanel2 = D1 * kSteps2 * 16 * PANEL_COLUMNS * 2 * kImages;
constexpr int kSlot = kPanel1 > kPanel2 ? kPanel1 : kPanel2;
constexpr int kCount1 = A2 * kPasses * kPanelsOfGroup;
constexpr int kCount2 = GROUPS * A1 * kColumnPanels;
constexpr int kPanels = kCount1 + kCount2;
constexpr bool kResident = SLOTS == kPanels;
constexpr int kRowsOfWarp = 16 * MT;
constexpr int kUnitWarps = WGMMA ? 4 : 1;     // warps that take rows together: a warpgroup, or one warp
constexpr int kUnits = WARPS / kUnitWarps;
constexpr int kUnitRows = kUnitWarps * kRowsOfWarp;
constexpr int kHeader = 128;                  // bytes before the panels: an int for each linear, the exponent of its scaled weights
constexpr int kOutFeatures = GROUPS * A1 * B1 * D1;
constexpr int kRun = 2 * RUN * D1;            // adjacent outputs that a lane holds: RUN tiles, all residues
constexpr int kStore = kRun * kElem % 16 == 0 ? 16 : 8;        // bytes of a vector of outputs
constexpr int kPer = kStore / kElem;          // outputs in a vector
constexpr bool kWhole = kPer % D1 == 0;       // a vector holds whole columns: then lanes take vectors in turn, and a store has no gaps
constexpr int kSteps2All = GROUPS * kClasses * kSteps2;
constexpr int kUImages = U_SHARED == 1 ? kImages : U_SHARED == 2 ? 1 : 0;  // images of u in shared memory
constexpr int kUBytes = kSteps2All * MT * 512 * kUImages;

// Steps of the second product handled together.
constexpr int kBatch2 = U_SHARED == 0 ? (WGMMA ? kSteps2 : batch(kSteps2, 4)) : batch(kSteps2, 6);


static_assert(SLOTS <= kPanels && SLOTS > 1, "a slot for each panel at most");
static_assert(C2 % 4 == 0, "a lane reads 4 elements of a column class at a time");
static_assert(kTiles2 % RUN == 0 && (kRun * kElem) % kStore == 0, "a lane stores whole vectors");
static_assert(kSteps1 % PANEL_STEPS == 0, "panels hold whole steps");

static_assert(STAGES >= 2, "one batch of x is read while others are on their way");
static_assert(!WGMMA || (MT == 1 && WARPS % 4 == 0), "a warpgroup has 64 rows, 16 a warp");
static_assert(U_SHARED < 2 || kPairs, "only pairs have a low part to put aside");

// ---- products with a panel ----------------------------------------------------------------------------------------

// hi and lo halves of two floats.
__device__ __forceinline__ void split2(float a, float b, u32& hi, u32& lo) {
    hi = round2(a, b);
    if constexpr (kPairs) lo = round2(a - widen((u16)hi), b - widen((u16)(hi >> 16)));
}

// The address that a lane hands to ldmatrix, relative to a panel of `columns` columns.
__device__ __forceinline__ u32 matrix_offset(int lane, int columns, int image_bytes) {
    const int matrix = lane >> 3, row = lane & 7;
    if constexpr (kPairs) return (matrix >> 1) * image_bytes + ((matrix & 1) * columns + row) * 16;
    else return ((matrix & 1) * columns + (matrix >> 1) * 8 + row) * 16;
}

#if WGMMA
template <int TILES_, int O = 0>
__device__ __forceinline__ void wgmma_step(float (&acc)[TILES_][4], const u32 (&a)[4], u32 address, int columns) {
    constexpr int kPiece = wgmma_piece((TILES_ - O) * 8);
    Wgmma<kPiece>::template run<O>(acc, a, wgmma_descriptor(address + O * 128, columns), 1);
    if constexpr (O + kPiece / 8 < TILES_) wgmma_step<TILES_, O + kPiece / 8>(acc, a, address, columns);
}
#endif

// acc += a[s] * panel[first + s * STRIDE], for S steps of a panel of N column tiles. `panel` is the panel's address, plus
// the lane's ldmatrix offset for mma.sync. The products of wgmma are only queued.
template <int N, int S, int STRIDE, int IMAGE_BYTES>
__device__ __forceinline__ void multiply(float (&acc)[MT][N][4], const u32 (&hi)[S][MT][4], const u32 (&lo)[kPairs ? S : 1][MT][4],
                                         u32 panel, int first) {
    constexpr int kStep = N * 256;
#if WGMMA
    if constexpr (kPairs) {
#pragma unroll
        for (int s = 0; s < S; ++s) {
            wgmma_step(acc[0], lo[s][0], panel + (first + s * STRIDE) * kStep, N * 8);
            wgmma_step(acc[0], hi[s][0], panel + (first + s * STRIDE) * kStep + IMAGE_BYTES, N * 8);
        }
    }
#pragma unroll
    for (int s = 0; s < S; ++s) wgmma_step(acc[0], hi[s][0], panel + (first + s * STRIDE) * kStep, N * 8);
#else
    if constexpr (kPairs) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            u32 b[S][4];
#pragma unroll
            for (int s = 0; s < S; ++s) {
                load_matrices(b[s], panel + (first + s * STRIDE) * kStep + n * 128);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    mma(acc[m][n], lo[s][m], b[s][0], b[s][1]);
                    mma(acc[m][n], hi[s][m], b[s][2], b[s][3]);
                }
            }
#pragma unroll
            for (int s = 0; s < S; ++s)
#pragma unroll
                for (int m = 0; m < MT; ++m) mma(acc[m][n], hi[s][m], b[s][0], b[s][1]);
        }
    } else {
#pragma unroll
        for (int s = 0; s < S; ++s)
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                u32 b[4];
                if (n + 1 < N) load_matrices(b, panel + (first + s * STRIDE) * kStep + n * 128);
                else load_two_matrices(b, panel + (first + s * STRIDE) * kStep + n * 128);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    mma(acc[m][n], hi[s][m], b[0], b[1]);
                    if (n + 1 < N) mma(acc[m][n + 1], hi[s][m], b[2], b[3]);
                }
            }
    }
#endif
}

// Products of wgmma run on their own: fence before, queue after, and wait until at most LEFT queued ones are unfinished.
__device__ __forceinline__ void begin_products() {
#if WGMMA
    wgmma_fence();
#endif
}
__device__ __forceinline__ void queue_products() {
#if WGMMA
    wgmma_commit();
#endif
}
template <int LEFT>
__device__ __forceinline__ void finish_products() {
#if WGMMA
    wgmma_wait<LEFT>();
#endif
}

// ---- epilogue -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float activate(float v) {
    if constexpr (ACTIVATION == 1) return 0.5f * v * (1.0f + erff(v * 0.70710678118654752f));
    if constexpr (ACTIVATION == 2) return 0.5f * v * (1.0f + tanhf(0.79788456080286536f * (v + 0.044715f * v * v * v)));
    if constexpr (ACTIVATION == 3) return v / (1.0f + __expf(-v));
    return v;
}

__device__ __forceinline__ void widen_vector(float* out, const Vector<kStore>& v) {
#pragma unroll
    for (int k = 0; k < kStore / 4; ++k) {
        if constexpr (kFloat) out[k] = __uint_as_float(v.w[k]);
        else { out[2 * k] = widen((u16)v.w[k]); out[2 * k + 1] = widen((u16)(v.w[k] >> 16)); }
    }
}

// ---- the kernel ---------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
fused_linear(const char* __restrict__ x, const char* __restrict__ image, const char* __restrict__ bias,
             const char* __restrict__ residual, char* __restrict__ y, long long rows, long long x_stride, long long residual_stride) {
    extern __shared__ __align__(128) char memory[];
    // ring | staged x | u | bias | a barrier a slot: the panel is there | a counter a slot: warps that left it
    const u32 ring = shared_address(memory);
    const u32 staged_all = ring + SLOTS * kSlot;
    const u32 u_all = staged_all + WARPS * STAGES * kStageBytes;
    const u32 bias_at = u_all + WARPS * kUBytes;
    const u32 full = bias_at + kOutFeatures * kElem;
    const u32 leaving = full + 8 * SLOTS;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31;  // warp-uniform for the compiler
    // Unit by unit the rows go round the blocks, so the last round is spread over all of them.
    const int rounds = (int)((rows + (long long)kUnitRows * kUnits * gridDim.x - 1) / ((long long)kUnitRows * kUnits * gridDim.x));
    auto first_row = [&](int round) -> long long {  // of the warp
        return (((long long)round * kUnits + warp / kUnitWarps) * gridDim.x + blockIdx.x) * kUnitRows + warp % kUnitWarps * kRowsOfWarp;
    };

    if (threadIdx.x == 0) {
        for (int s = 0; s < SLOTS; ++s) {
            barrier_init(full + 8 * s, kCopyArrivals);
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(leaving + 4 * s), "r"(0) : "memory");
        }
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    }
    for (int b = threadIdx.x * 4; b < kOutFeatures * kElem; b += 128 * WARPS) {
        const u32 word = bias ? *reinterpret_cast<const u32*>(bias + b) : 0;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(bias_at + b), "r"(word) : "memory");
    }
    __syncthreads();

    const int g = lane >> 2, t = lane & 3;
    // Where a lane writes its part of staged x and where it reads: its own, or through ldmatrix that of its warp.
    // For ldmatrix the 64 bytes of a row and two steps lie together, their 16-byte pieces turned by row against bank conflicts.
    const u32 staged = staged_all + warp * STAGES * kStageBytes + (kMatrix ? g * 64 + ((t ^ (g >> 1 & 3)) << 4) : lane * kVec);
    const u32 turned = (lane >> 3 & 1) * 512 + (lane & 7) * 64 + ((lane >> 4 ^ (lane >> 1 & 3)) << 4);
    const u32 staged_read = staged_all + warp * STAGES * kStageBytes + (kMatrix ? turned : lane * kVec);
    const int odd_step = (int)(turned ^ 32) - (int)turned;
    const u32 u_base = u_all + warp * kUBytes + lane * 16;

    // The batch of x to load next: the rows of a round, and the byte in them. Rows outside are filled with zeros.
    constexpr int kStepBytes = 16 * D2 * kElem;
    int load_round = 0, load_i2 = 0, load_pass = 0, load_batch = 0, load_byte = 0;
    u32 load_to = staged;
    const char* load_row[2 * MT];
    int load_size[2 * MT];
    auto set_rows = [&]() {
        const long long row0 = first_row(load_round) + g;
#pragma unroll
        for (int mh = 0; mh < 2 * MT; ++mh) {
            const bool inside = row0 + mh * 8 < rows;
            load_row[mh] = x + (inside ? (row0 + mh * 8) * x_stride + t * (kMatrix ? 16 : kLaneBytes) : 0);
            load_size[mh] = inside ? kCopy : 0;
        }
    };
    set_rows();
    auto load = [&]() {
        if constexpr (kMatrix) {
            const int valid = (C2 - load_batch * 16 * kBatch1 - t * 8) * 2;
#pragma unroll
            for (int v = 0; v < kPairsOfSteps; ++v)
#pragma unroll
                for (int mh = 0; mh < 2 * MT; ++mh) {
                    const int size = C2 == 16 * kSteps1 ? load_size[mh] : valid > v * 64 ? load_size[mh] : 0;
                    if (kBatch1 % 2 == 0 || t + 4 * v < 2 * kBatch1)
                        copy_async<16>(load_to + (mh / 2 * kPairsOfSteps + v) * 1024 + mh % 2 * 512,
                                       size ? load_row[mh] + load_byte + v * 64 : x, size);
                }
        } else
#pragma unroll
        for (int b = 0; b < kBatch1; ++b) {
            const int valid = (C2 - (load_batch * kBatch1 + b) * 16 - t * 4) * D2 * kElem;  // bytes left in the class
#pragma unroll
            for (int mh = 0; mh < 2 * MT; ++mh)
#pragma unroll
                for (int v = 0; v < kVecs; ++v) {
                    const u32 to = load_to + ((b * 2 * MT + mh) * kLaneBytes + v * kVec) * 32;
                    const char* from = load_row[mh] + load_byte + b * kStepBytes + v * kVec;
                    if constexpr (C2 == 16 * kSteps1) copy_async<kVec>(to, load_size[mh] ? from : x, load_size[mh]);
                    else {
                        const int size = min(max(valid - v * kVec, 0), load_size[mh]);
                        copy_async<kVec>(to, size > 0 ? from : x, size);
                    }
                }
        }
        commit_copies();
        load_to += kStageBytes;
        if (load_to == staged + STAGES * kStageBytes) load_to = staged;
        load_byte += kBatch1 * kStepBytes;
        if (++load_batch == kBatches) {
            load_batch = 0;
            if (kPasses > 1 && ++load_pass < kPasses) load_byte -= kBatches * kBatch1 * kStepBytes;
            else {
                load_pass = 0;
                load_byte = ++load_i2 * C2 * D2 * kElem;
                if (load_i2 == A2) {
                    load_i2 = 0;
                    load_byte = 0;
                    ++load_round;
                    set_rows();
                }
            }
        }
    };

    // The ring: panels come in the order of use, once a round.
    auto fill = [&](int to_slot, int panel) {
        const int bytes = panel < kCount1 ? kPanel1 : kPanel2;
        const char* source = image + kHeader + (panel < kCount1 ? panel * kPanel1 : kCount1 * kPanel1 + (panel - kCount1) * kPanel2);
        copy_by_warp(ring + to_slot * kSlot, source, bytes, full + 8 * to_slot, lane);
    };
    constexpr int kFirst = kResident ? kPanels : SLOTS;
    for (int s = warp; s < kFirst; s += WARPS) fill(s, s);
    for (int s = 0; s < STAGES - 1; ++s) load();

    int refills = kResident ? 0 : rounds * kPanels - SLOTS;  // panels still to come
    int slot = 0;
    u32 phase = 0, read_from = staged_read;
    auto next_panel = [&]() -> u32 {
        barrier_wait(full + 8 * slot, kResident ? 0 : phase);
#if WGMMA
        return __shfl_sync(0xffffffffu, ring + slot * kSlot, 0);  // descriptors must be uniform in a warp
#else
        return ring + slot * kSlot;
#endif
    };
    auto leave_panel = [&]() {
        if constexpr (!kResident) {
            __syncwarp();
            u32 left = 0;
            if (lane == 0) asm volatile("atom.relaxed.cta.shared.add.u32 %0, [%1], 1;" : "=r"(left) : "r"(leaving + 4 * slot) : "memory");
            left = __shfl_sync(0xffffffffu, left, 0);
            if (left % WARPS == WARPS - 1 && refills > 0) fill(slot, (kPanels - refills % kPanels) % kPanels);
            --refills;
        }
        if (++slot == SLOTS) { slot = 0; phase ^= 1; }
    };

    constexpr int kImage1 = kPanel1 / kImages, kImage2 = kPanel2 / kImages;
    constexpr int kUImages1 = kUImages > 0 ? kUImages : 1;
    const u32 matrix1 = WGMMA ? 0 : matrix_offset(lane, kTiles1 * 8, kImage1), matrix2 = WGMMA ? 0 : matrix_offset(lane, PANEL_COLUMNS, kImage2);

    for (int round = 0; round < rounds; ++round) {
        const long long row0 = first_row(round);
        if (row0 - warp % kUnitWarps * kRowsOfWarp >= rows) {  // no rows left for this unit, others still need the panels
            if (kResident) break;
#pragma unroll 1
            for (int p = 0; p < kPanels; ++p) {
                next_panel();
                leave_panel();
            }
            continue;
        }
        // u as A operands. A padding tile of a class stays zero.
        u32 u_hi[U_SHARED == 1 ? 1 : kSteps2All][MT][4] = {}, u_lo[U_SHARED == 0 && kPairs ? kSteps2All : 1][MT][4] = {};
        int u_exponent[MT][2];
        if constexpr (kUImages > 0 && (kGroups2 * TILES) % 2 == 1)
            for (int c = 0; c < GROUPS * kClasses; ++c)
                for (int o = 0; o < MT * kUImages; ++o)
                    store_shared_pair(u_base + ((c * kSteps2 + kSteps2 - 1) * MT * kUImages + o) * 512 + 8, 0, 0);

        // ---- stage 1
#pragma unroll
        for (int i2 = 0; i2 < A2; ++i2) {
#pragma unroll
            for (int pass = 0; pass < kPasses; ++pass) {
                float acc[RESIDUES][MT][kTiles1][4] = {};
                int exponent[MT][2] = {};
                float scale[MT][2] = {};

                for (int p = 0; p < kPanelsOfGroup; ++p) {
                    const u32 address = next_panel() + matrix1;
#pragma unroll
                    for (int c = 0; c < PANEL_STEPS; c += kBatch1) {
                        wait_copies<STAGES - 2>();
                        if (kMatrix) __syncwarp();
                        // The lane's part of a batch of x, read anew where it is needed again: registers are scarce.
                        auto read = [&](u32 (&raw)[kBatch1][MT][2][kLaneBytes / 4]) {
#pragma unroll
                            for (int b = 0; b < kBatch1; ++b)
#pragma unroll
                                for (int mh = 0; mh < 2 * MT; ++mh)
#pragma unroll
                                    for (int v = 0; v < kVecs; ++v) {
                                        u32* to = &raw[b][mh / 2][mh % 2][v * kVec / 4];
                                        const u32 piece = read_from + ((b * 2 * MT + mh) * kLaneBytes + v * kVec) * 32;
                                        if constexpr (kVec == 16) load_shared(to, piece);
                                        else load_shared_pair(to, piece);
                                    }
                        };
                        u32 hi[RESIDUES][kBatch1][MT][4], lo[RESIDUES][kPairs ? kBatch1 : 1][MT][4];
                        u32 largest_half = 0;
                        auto operands = [&]() {
                            if constexpr (kMatrix) {
#pragma unroll
                                for (int s = 0; s < kBatch1; ++s)
#pragma unroll
                                    for (int m = 0; m < MT; ++m) load_matrices(hi[0][s][m], read_from + (m * kPairsOfSteps + s / 2) * 1024 + (s % 2 ? odd_step : 0));
                                return;
                            }
                            u32 raw[kBatch1][MT][2][kLaneBytes / 4];
                            read(raw);
#pragma unroll
                            for (int r = 0; r < RESIDUES; ++r)
#pragma unroll
                                for (int s = 0; s < kBatch1; ++s)
#pragma unroll
                                    for (int m = 0; m < MT; ++m)
#pragma unroll
                                        for (int k = 0; k < 4; ++k) {
                                            // Pair k/2 of row half k%2: elements 2(k/2) and the next of the lane's four, residue j2.
                                            const auto& from = raw[s][m][k & 1];
                                            const int j2 = pass * RESIDUES + r;
                                            const int e0 = 2 * (k >> 1) * D2 + j2, e1 = e0 + D2;
                                            if constexpr (kFloat) {
                                                split2(__uint_as_float(from[e0]) * scale[m][k & 1], __uint_as_float(from[e1]) * scale[m][k & 1],
                                                       hi[r][s][m][k], lo[r][kPairs ? s : 0][m][k]);
                                                largest_half = max_halves(largest_half, hi[r][s][m][k]);
                                            } else {
                                                hi[r][s][m][k] = __byte_perm(from[e0 / 2], from[e1 / 2],
                                                                             ((e0 & 1) ? 0x32 : 0x10) | ((e1 & 1) ? 0x7600 : 0x5400));
                                            }
                                        }
                        };
                        // The scale of the rows: set by the first batch of a group, lowered when a later one overflows.
                        const bool first = kFloat && p == 0 && c == 0;
                        if (!first) operands();
                        if (first || (kFloat && __any_sync(0xffffffffu, overflows(largest_half)))) {
                            u32 raw[kBatch1][MT][2][kLaneBytes / 4];
                            read(raw);
                            if (!first) finish_products<0>();
#pragma unroll
                            for (int mh = 0; mh < 2 * MT; ++mh) {
                                const int m = mh / 2, h = mh % 2;
                                float largest = 0.0f;
#pragma unroll
                                for (int b = 0; b < kBatch1; ++b)
#pragma unroll
                                    for (int e = 0; e < kLaneBytes / 4; ++e) largest = fmaxf(largest, fabsf(__uint_as_float(raw[b][m][h][e])));
                                const int fresh = exponent_for(over_quad(largest));
                                const int change = first ? 0 : min(fresh - exponent[m][h], 0);
                                exponent[m][h] = first ? fresh : exponent[m][h] + change;
                                scale[m][h] = power(exponent[m][h]);
                                if (!first) {
                                    const float factor = power(change);
#pragma unroll
                                    for (int r = 0; r < RESIDUES; ++r)
#pragma unroll
                                        for (int n = 0; n < kTiles1; ++n) {
                                            acc[r][m][n][2 * h] *= factor;
                                            acc[r][m][n][2 * h + 1] *= factor;
                                        }
                                }
                            }
                            operands();
                        }
                        read_from += kStageBytes;
                        if (read_from == staged_read + STAGES * kStageBytes) read_from = staged_read;
                        load();
                        begin_products();
#pragma unroll
                        for (int r = 0; r < RESIDUES; ++r)
                            multiply<kTiles1, kBatch1, RESIDUES, kImage1>(acc[r], hi[r], lo[r], address, c * RESIDUES + r);
                        queue_products();
                        // The next batch is made ready while this one is multiplied.
                        if (c + kBatch1 < PANEL_STEPS) finish_products<1>();
                        else finish_products<0>();
                    }
                    leave_panel();
                }

                // ---- accumulators become A operands
                if constexpr (kFloat) {
                    const bool first = i2 == 0 && pass == 0;
                    bool over = first;
                    float largest[MT][2];
#pragma unroll
                    for (int mh = 0; mh < 2 * MT; ++mh) {
                        const int m = mh / 2, h = mh % 2;
                        largest[m][h] = 0.0f;
#pragma unroll
                        for (int r = 0; r < RESIDUES; ++r)
#pragma unroll
                            for (int n = 0; n < kTiles1; ++n)
                                largest[m][h] = fmaxf(largest[m][h], fmaxf(fabsf(acc[r][m][n][2 * h]), fabsf(acc[r][m][n][2 * h + 1])));
                        // acc = u * 2^exponent; u is kept as u * 2^u_exponent
                        if (!first) over |= largest[m][h] * power(u_exponent[m][h] - exponent[m][h]) > kLargest;
                    }
                    if (__any_sync(0xffffffffu, over)) {
#pragma unroll
                        for (int mh = 0; mh < 2 * MT; ++mh) {
                            const int m = mh / 2, h = mh % 2;
                            const int fresh = exponent_for(over_quad(largest[m][h])) + exponent[m][h];
                            const int change = first ? 0 : min(fresh - u_exponent[m][h], 0);
                            u_exponent[m][h] = first ? fresh : u_exponent[m][h] + change;
                            if (first) continue;
                            const float factor = power(change);
                            if constexpr (U_SHARED != 1) {
#pragma unroll
                                for (int s = 0; s < kSteps2All; ++s)
#pragma unroll
                                    for (int k = h; k < 4; k += 2) {
                                        u_hi[s][m][k] = scale2(u_hi[s][m][k], factor);
                                        if constexpr (kPairs && U_SHARED == 0) u_lo[s][m][k] = scale2(u_lo[s][m][k], factor);
                                    }
                            }
                            for (int o = 0; o < kSteps2All * kUImages; ++o) {
                                const u32 at = u_base + ((o / kUImages1 * MT + m) * kUImages + o % kUImages1) * 512;
                                u32 v[4];
                                load_shared(v, at);
                                store_shared_pair(at, h == 0 ? scale2(v[0], factor) : v[0], h == 1 ? scale2(v[1], factor) : v[1]);
                                store_shared_pair(at + 8, h == 0 ? scale2(v[2], factor) : v[2], h == 1 ? scale2(v[3], factor) : v[3]);
                            }
                        }
                    }
#pragma unroll
                    for (int mh = 0; mh < 2 * MT; ++mh) {
                        const int m = mh / 2, h = mh % 2;
                        const float factor = power(u_exponent[m][h] - exponent[m][h]);
#pragma unroll
                        for (int r = 0; r < RESIDUES; ++r)
#pragma unroll
                            for (int n = 0; n < kTiles1; ++n) {
                                acc[r][m][n][2 * h] *= factor;
                                acc[r][m][n][2 * h + 1] *= factor;
                            }
                    }
                }
#pragma unroll
                for (int r = 0; r < RESIDUES; ++r)
#pragma unroll
                    for (int m = 0; m < MT; ++m)
#pragma unroll
                        for (int n = 0; n < kTiles1; ++n) {
                            const int place = (i2 * D2 + pass * RESIDUES + r) * TILES + n % TILES;
                            const int s = n / TILES * kSteps2 + place / 2, k = (place & 1) * 2;  // n / TILES: linear and class
                            u32 hi0, hi1, lo0, lo1;
                            split2(acc[r][m][n][0], acc[r][m][n][1], hi0, lo0);
                            split2(acc[r][m][n][2], acc[r][m][n][3], hi1, lo1);
                            const u32 at = u_base + (s * MT + m) * kUImages * 512 + k * 4;
                            if constexpr (U_SHARED == 1) store_shared_pair(at, hi0, hi1);
                            else { u_hi[s][m][k] = hi0; u_hi[s][m][k + 1] = hi1; }
                            if constexpr (kPairs && U_SHARED == 0) { u_lo[s][m][k] = lo0; u_lo[s][m][k + 1] = lo1; }
                            if constexpr (kPairs && U_SHARED != 0) store_shared_pair(at + (kImages - 1) * (U_SHARED == 1 ? 512 : 0), lo0, lo1);
                        }
            }
        }

        // ---- stage 2
        char* const y_base = y + row0 * ((long long)kOutFeatures * kElem);
        const char* const residual_base = residual + row0 * residual_stride;
        const int left = (int)(rows - row0 < kRowsOfWarp ? rows - row0 : kRowsOfWarp) - g;  // row mh*8 is inside if left > mh*8
        constexpr int kLaneStride = kWhole ? kStore : kRun * kElem, kPlaceStride = kWhole ? 4 * kStore : kStore;
        const u32 y_lane = g * (kOutFeatures * kElem) + t * kLaneStride;
#pragma unroll
        for (int gi = 0; gi < GROUPS * A1; ++gi) {  // linear and block i1
            float down[2 * MT][2] = {};  // the scale undone, in two steps since one may leave float32's range
            if constexpr (kFloat) {
#pragma unroll
                for (int mh = 0; mh < 2 * MT; ++mh) {
                    const int e = -(u_exponent[mh / 2][mh % 2] + reinterpret_cast<const int*>(image)[gi / A1]);
                    down[mh][0] = power(e / 2);
                    down[mh][1] = power(e - e / 2);
                }
            }
            for (int panel = 0; panel < kColumnPanels; ++panel) {
                float acc[D1][MT][kTiles2][4] = {};
                const u32 address = next_panel() + matrix2;
#pragma unroll
                for (int j = 0; j < D1; ++j)
#pragma unroll
                    for (int s = 0; s < kSteps2; s += kBatch2) {
                        u32 hi[kBatch2][MT][4], lo[kPairs ? kBatch2 : 1][MT][4];
#pragma unroll
                        for (int b = 0; b < kBatch2; ++b)
#pragma unroll
                            for (int m = 0; m < MT; ++m) {
                                const int us = (gi * D1 + j) * kSteps2 + s + b;
                                const u32 at = u_base + (us * MT + m) * kUImages * 512;
                                if constexpr (U_SHARED == 1) load_shared(hi[b][m], at);
                                if constexpr (kPairs && U_SHARED != 0) load_shared(lo[kPairs ? b : 0][m], at + (kImages - 1) * (U_SHARED == 1 ? 512 : 0));
#pragma unroll
                                for (int k = 0; k < 4; ++k) {
                                    if constexpr (U_SHARED != 1) hi[b][m][k] = u_hi[us][m][k];
                                    if constexpr (kPairs && U_SHARED == 0) lo[b][m][k] = u_lo[us][m][k];
                                }
                            }
                        if (s == 0 || U_SHARED != 0) begin_products();
                        multiply<kTiles2, kBatch2, 1, kImage2>(acc[j], hi, lo, address, j * kSteps2 + s);
                        queue_products();
                        if (U_SHARED != 0) finish_products<1>();
                    }
                finish_products<0>();
                leave_panel();

                // ---- epilogue: a lane holds kRun adjacent outputs of each of its rows
                const int panel_byte = (gi * B1 + panel * PANEL_COLUMNS) * D1 * kElem;
#pragma unroll
                for (int v = 0; v < kTiles2 / RUN * kRun / kPer; ++v) {
                    const int run = v / (kRun / kPer), place = v % (kRun / kPer);
                    const int in_panel = run * 4 * kRun * kElem + place * kPlaceStride;
                    if (B1 % PANEL_COLUMNS != 0 && panel * PANEL_COLUMNS * D1 * kElem + in_panel + t * kLaneStride >= B1 * D1 * kElem) continue;
                    const int byte = panel_byte + in_panel;
                    Vector<kStore> bias_vector;
                    if constexpr (kStore == 16) load_shared(bias_vector.w, bias_at + byte + t * kLaneStride);
                    else load_shared_pair(bias_vector.w, bias_at + byte + t * kLaneStride);
                    float b[kPer];
                    widen_vector(b, bias_vector);
#pragma unroll
                    for (int mh = 0; mh < 2 * MT; ++mh) {
                        float out[kPer];
#pragma unroll
                        for (int e = 0; e < kPer; ++e) {
                            const int p = (place * kPer + e) / D1, j = (place * kPer + e) % D1;
                            out[e] = acc[j][mh / 2][run * RUN + p / 2][2 * (mh % 2) + p % 2];
                            out[e] = activate(kFloat ? fmaf(out[e] * down[mh][0], down[mh][1], b[e]) : out[e] + b[e]);
                        }
                        if (RESIDUAL && left > mh * 8) {
                            float r[kPer];
                            widen_vector(r, *reinterpret_cast<const Vector<kStore>*>(residual_base + (g + mh * 8) * residual_stride + t * kLaneStride + byte));
#pragma unroll
                            for (int e = 0; e < kPer; ++e) out[e] += r[e];
                        }
                        Vector<kStore> packed;
#pragma unroll
                        for (int k = 0; k < kStore / 4; ++k) {
                            if constexpr (kFloat) packed.w[k] = __float_as_uint(out[k]);
                            else packed.w[k] = round2(out[2 * k], out[2 * k + 1]);
                        }
                        if (left > mh * 8) *reinterpret_cast<Vector<kStore>*>(y_base + (y_lane + mh * 8 * kOutFeatures * kElem + byte)) = packed;
                    }
                }
            }
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}
