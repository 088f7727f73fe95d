// y = act(x (K1 K2)^T + bias) + residual in one launch: x is read once, y is written once, the intermediate u = x K2^T
// never leaves the warp that made it. With GATED the outputs are a gate and a value, and y = act(gate) * value; with SCALED what the
// activation takes is multiplied by a vector first, which lies behind the bias.
//
//   u[(i2*B2 + p2)*D2 + j2]            = sum_q x[(i2*C2 + q)*D2 + j2] * K2[i2,p2,q,j2]         stage 1, groups (i2,j2)
//   y[((g*A1 + i1)*B1 + p)*D1 + j1]    = sum_q u[(i1*C1 + q)*D1 + j1] * K1[g][i1,p,q,j1]       stage 2, classes (i1,j1)
//
// Each warpgroup owns 64 rows from the first load to the last store, 16 a warp. One m16n8k16 accumulator tile, rounded, is half of
// an m16n8k16 A operand, so u stays in registers (or, where it is too large, in shared memory that only its own lane reads).
// The order of u is free: the columns of stage 1 are sorted by the class of stage 2 that reads them, so the stride-D1
// permutation costs nothing. GROUPS linears that share x (q, k, v) run side by side, or BLOCKS blocks with one of them each.
// With NORM a layer norm of x stands before the layer, see fused_norm.cuh.
//
// Weights arrive as an image in the order of use, cut into panels: [k8][column][8 halves], which the descriptors of wgmma name.
// Four warps share each read of a panel. Panels pass through a ring of SLOTS slots; the last warp to leave a slot refills it, so nobody waits to
// refill. A ring that holds all panels is filled once and never again. Each warp stages its own x by cp.async, STAGES - 1
// batches of k16 steps ahead, so there is no barrier of the block between load and use.
//
// MODE 0 fp16, 1 bf16: one product, float32 sums. MODE 2 (tf32 grade) and 3 (fp32 grade) take float32: x, u and the
// weights are scaled by powers of two and rounded to fp16 (MODE 2) or split into hi + lo (MODE 3: hi*hi + hi*lo + lo*hi).
// The scale of a row follows its blocks: it starts at the first chunk's maximum and drops when a later chunk would
// overflow, so rows from about 2^-120 to the largest finite float keep their relative precision.
//
// Measured on an H200 at 25088 rows: recipes/results/kernels_h200.csv has its share of the roofline by layer and mode.
//
// Limits: sm_90a; row strides of x, y and residual in multiples of 16 bytes; C2 % 4 == 0.

#include "exact_activation.cuh"
#include "fused_norm.cuh"
#include "fused_products.cuh"
#include "fused_ring.cuh"
#include "fused_rows.cuh"
#include "fused_sizes.cuh"
#include "instructions.cuh"
#include "scale.cuh"

// ---- epilogue -----------------------------------------------------------------------------------------------------

// A lane t of four holds the vectors 3t to 3t + 2 of a row. Neighbours exchange their second ones, so that all stores fill sectors of 32 bytes.
__device__ __forceinline__ void store_three(char* to, const Vector<kStore> (&held)[kPlaces], bool odd, bool inside) {
    Vector<kStore> first, second, third;
#pragma unroll
    for (int k = 0; k < kStore / 4; ++k) {
        const u32 got = __shfl_xor_sync(0xffffffffu, held[kPlaces / 2].w[k], 1);
        first.w[k] = odd ? held[0].w[k] : held[kPlaces - 1].w[k];
        second.w[k] = odd ? got : held[0].w[k];
        third.w[k] = odd ? held[kPlaces - 1].w[k] : got;
    }
    if (!inside) return;
    *reinterpret_cast<Vector<kStore>*>(to + (odd ? 0 : 2) * kStore) = first;
    *reinterpret_cast<Vector<kStore>*>(to + (odd ? -2 : 0) * kStore) = second;
    *reinterpret_cast<Vector<kStore>*>(to + (odd ? 2 : 4) * kStore) = third;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
fused_linear(const char* x, const char* __restrict__ image, const char* __restrict__ bias, const char* residual, char* __restrict__ y, long long rows, long long x_stride, long long residual_stride,
             int eps_bits) {
    extern __shared__ __align__(128) char memory[];
    // Several linears that share x may have blocks of their own, which find it in the L2 cache.
    image += blockIdx.y * kImageBytes;
    if (bias) bias += blockIdx.y * (kOutFeatures * kElem);
    if (RESIDUAL) residual += blockIdx.y * (kOutFeatures * kElem);
    y += blockIdx.y * (kOutFeatures * kElem);
    // ring | staged x | u | bias | a barrier a slot: the panel is there | a barrier and a counter a slot: warps that left it
    const u32 ring = shared_address(memory);
    const u32 staged_all = ring + SLOTS * kSlot;
    const u32 u_all = staged_all + WARPS * STAGES * kStageBytes;
    const u32 bias_at = u_all + WARPS * kUBytes;
    const u32 full = bias_at + kBiases * kOutFeatures * kElem;
    const u32 left_all = full + 8 * SLOTS;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31;  // warp-uniform for the compiler
    const long long rows_of_round = (long long)kUnitRows * kUnits * gridDim.x;
    const int rounds = (int)((rows + rows_of_round - 1) / rows_of_round);
    // The round that is shared, if any: a last one with no more than a unit of rows a block.
    const int shared_round = kShares && rows - (rounds - 1) * rows_of_round <= (long long)kUnitRows * gridDim.x ? rounds - 1 : -1;

    using Ring = PanelRing<Panels>;
    if (threadIdx.x == 0) Ring::prepare(full, left_all);
#pragma unroll
    for (int i = 0; i < kBiases; ++i)
        for (int b = threadIdx.x * 4; b < kOutFeatures * kElem; b += 128 * WARPS)
            store_shared(bias_at + i * kOutFeatures * kElem + b, bias ? *reinterpret_cast<const u32*>(bias + i * BLOCKS * kOutFeatures * kElem + b) : 0);
    __syncthreads();

    const int g = lane >> 2, t = lane & 3;
    const u32 u_base = u_all + warp * kUBytes + lane * 8;
    Ring panels(image, ring, full, left_all, rounds, warp, lane);
    StagedRows staged(x, rows, x_stride, staged_all, warp, lane, shared_round);
    wait_for_kernels_before();  // weights were there before
    for (int s = 0; s < STAGES - 1; ++s) staged.load();  // after the first weights, which would wait behind them

    for (int round = 0; round < rounds; ++round) {
        const long long row0 = first_row(round, warp, shared_round);
        if (row0 - warp % kUnitWarps * kRowsOfWarp >= rows) {  // no rows left for this unit, others still need the panels
            if (Ring::kResident) break;
#pragma unroll 1
            for (int p = 0; p < kPanels; ++p) {
                panels.next();
                panels.leave();
            }
            continue;
        }
        // u as halves of A operands, tile by tile.
        u32 u_hi[kUTiles][2], u_lo[kPairs ? kUTiles : 1][2];
        int u_exponent[2];
        auto put_u = [&](int i, const u32 (&hi)[2], const u32 (&lo)[2]) {
            const u32 at = u_base + i * kUImages * 256;
            if (high_is_shared(i)) store_shared_pair(at, hi[0], hi[1]);
            else { u_hi[i][0] = hi[0]; u_hi[i][1] = hi[1]; }
            if constexpr (kPairs) {
                if (low_is_shared(i)) store_shared_pair(at + kLowOfU, lo[0], lo[1]);
                else { u_lo[i][0] = lo[0]; u_lo[i][1] = lo[1]; }
            }
        };

        RowNorm norm;

        // ---- stage 1
#pragma unroll kUnrolled1
        for (int i2 = 0; i2 < A2; ++i2) {
#pragma unroll
            for (int pass = 0; pass < kPasses; ++pass) {
                const int group0 = i2 * D2 + pass * RESIDUES;
                float acc[RESIDUES][kTiles1][4] = {};
                float small[kSmallApart ? RESIDUES : 1][kTiles1][4] = {};  // sums of lo*hi and hi*lo
                int exponent[2] = {};
                float scale[2] = {};

#pragma unroll kUnrolledPanels
                for (int p = 0; p < kPanelsOfGroup; ++p) {
                    const u32 address = panels.next();
#pragma unroll
                    for (int c = 0; c < PANEL_STEPS; c += kBatch1) {
                        staged.wait();
                        u32 hi[RESIDUES][kBatch1][4], lo[RESIDUES][kPairs ? kBatch1 : 1][4];
                        u32 largest_half = 0;
                        auto scaled = [&](u32 word, int h) {
                            return (NORM ? __uint_as_float(word) - norm.shift[h] : __uint_as_float(word)) * scale[h];
                        };
                        const bool first_of_row = group0 == 0 && p == 0 && c == 0;
                        auto operands = [&](bool anew) {
                            if constexpr (kMatrix) {
                                staged.read_operands(hi[0]);
                            } else {
                                u32 raw[kBatch1][2][kLaneBytes / 4];  // read anew where needed again: registers are scarce
                                staged.read(raw);
                                if constexpr (NORM && kFloat)
                                    if (pass == 0 && !anew) norm.take(raw);
#pragma unroll
                                for (int r = 0; r < RESIDUES; ++r)
#pragma unroll
                                    for (int s = 0; s < kBatch1; ++s)
#pragma unroll
                                        for (int k = 0; k < 4; ++k) {
                                            // Pair k/2 of row half k%2: elements 2(k/2) and the next of the lane's four, residue j2.
                                            const auto& from = raw[s][k & 1];
                                            const int j2 = pass * RESIDUES + r;
                                            const int e0 = 2 * (k >> 1) * D2 + j2, e1 = e0 + D2;
                                            if constexpr (kFloat) {
                                                split2(scaled(from[e0], k & 1), scaled(from[e1], k & 1), hi[r][s][k], lo[r][kPairs ? s : 0][k]);
                                                largest_half = max_halves(largest_half, hi[r][s][k]);
                                            } else {
                                                hi[r][s][k] = __byte_perm(from[e0 / 2], from[e1 / 2],
                                                                          ((e0 & 1) ? 0x32 : 0x10) | ((e1 & 1) ? 0x7600 : 0x5400));
                                            }
                                        }
                            }
                            if constexpr (NORM && !kFloat) {
                                if (first_of_row) norm.begin(hi[0]);
#pragma unroll
                                for (int r = 0; r < RESIDUES; ++r) norm.take(hi[r]);
                            }
                        };
                        // The scale of the rows: set by the first batch of a group, lowered when a later one overflows.
                        const bool first = p == 0 && c == 0;
                        bool settle = kFloat && first, anew = false;
#pragma unroll 1
                        while (true) {
                            if (settle) {
                                u32 raw[kBatch1][2][kLaneBytes / 4];
                                staged.read(raw);
                                wgmma_wait<0>();
                                if constexpr (NORM && kFloat)
                                    if (first_of_row) norm.begin(raw);
#pragma unroll
                                for (int h = 0; h < 2; ++h) {
                                    float largest = 0.0f;
#pragma unroll
                                    for (int b = 0; b < kBatch1; ++b)
#pragma unroll
                                        for (int e = 0; e < kLaneBytes / 4; ++e) largest = fmaxf(largest, fabsf(__uint_as_float(raw[b][h][e]) - (NORM ? norm.shift[h] : 0.0f)));
                                    const int fresh = exponent_for(over_quad(largest));
                                    const int change = first ? 0 : min(fresh - exponent[h], 0);
                                    exponent[h] = first ? fresh : exponent[h] + change;
                                    scale[h] = power(exponent[h]);
                                    const float factor = power(change);
#pragma unroll
                                    for (int r = 0; r < RESIDUES; ++r)
#pragma unroll
                                        for (int n = 0; n < kTiles1; ++n) {
                                            acc[r][n][2 * h] *= factor;
                                            acc[r][n][2 * h + 1] *= factor;
                                            if constexpr (kSmallApart) {
                                                small[r][n][2 * h] *= factor;
                                                small[r][n][2 * h + 1] *= factor;
                                            }
                                        }
                                }
                            }
                            operands(anew);
                            if (!kFloat || settle || !__any_sync(0xffffffffu, overflows(largest_half))) break;
                            settle = anew = true;
                        }
                        staged.done();
                        wgmma_fence();
#pragma unroll
                        for (int r = 0; r < RESIDUES; ++r)
                            multiply<kTiles1, kBatch1, RESIDUES, kImage1>(acc[r], kSmallApart ? small[r] : acc[r], hi[r], lo[r], address, c * RESIDUES + r);
                        wgmma_commit();
                        // The next batch is made ready while this one is multiplied.
                        if (c + kBatch1 < PANEL_STEPS) wgmma_wait<1>();
                        else wgmma_wait<0>();
                    }
                    panels.leave();
                }

                if constexpr (kSmallApart)
#pragma unroll
                    for (int r = 0; r < RESIDUES; ++r)
#pragma unroll
                        for (int n = 0; n < kTiles1; ++n)
#pragma unroll
                            for (int e = 0; e < 4; ++e) acc[r][n][e] += small[r][n][e];

                // ---- accumulators become A operands
                if constexpr (kFloat) {
                    const bool first = group0 == 0;
                    bool over = first;
                    float largest[2];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        largest[h] = 0.0f;
#pragma unroll
                        for (int r = 0; r < RESIDUES; ++r)
#pragma unroll
                            for (int n = 0; n < kTiles1; ++n)
                                largest[h] = fmaxf(largest[h], fmaxf(fabsf(acc[r][n][2 * h]), fabsf(acc[r][n][2 * h + 1])));
                        // acc = u * 2^exponent; u is kept as u * 2^u_exponent
                        if (!first) over |= largest[h] * power(u_exponent[h] - exponent[h]) > kLargest;
                    }
                    if (__any_sync(0xffffffffu, over)) {
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const int fresh = exponent_for(over_quad(largest[h])) + exponent[h];
                            const int change = first ? 0 : min(fresh - u_exponent[h], 0);
                            u_exponent[h] = first ? fresh : u_exponent[h] + change;
                            if (first) continue;
                            const float factor = power(change);
                            const int there = group0 * kTiles1;  // tiles of u that are there
#pragma unroll
                            for (int i = 0; i < kUTiles; ++i) {
                                if (i >= there) continue;
                                if (!high_is_shared(i)) u_hi[i][h] = scale2(u_hi[i][h], factor);
                                if (kPairs && !low_is_shared(i)) u_lo[i][h] = scale2(u_lo[i][h], factor);
                            }
#pragma unroll 1
                            for (int i = 0; i < min(there, kUSharedTiles) * kUImages; ++i) {
                                const u32 at = u_base + i * 256 + h * 4;
                                store_shared(at, scale2(load_shared_one(at), factor));
                            }
                        }
                    }
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const float factor = power(u_exponent[h] - exponent[h]);
#pragma unroll
                        for (int r = 0; r < RESIDUES; ++r)
#pragma unroll
                            for (int n = 0; n < kTiles1; ++n) {
                                acc[r][n][2 * h] *= factor;
                                acc[r][n][2 * h + 1] *= factor;
                            }
                    }
                }
                u32 hi[RESIDUES][kTiles1][2], lo[RESIDUES][kTiles1][2];
#pragma unroll
                for (int r = 0; r < RESIDUES; ++r)
#pragma unroll
                    for (int n = 0; n < kTiles1; ++n)
#pragma unroll
                        for (int h = 0; h < 2; ++h) split2(acc[r][n][2 * h], acc[r][n][2 * h + 1], hi[r][n][h], lo[r][n][h]);
#pragma unroll
                for (int known = 0; known < A2; ++known) {
                    if (known != i2) continue;  // registers have their names at compile time
#pragma unroll
                    for (int r = 0; r < RESIDUES; ++r)
#pragma unroll
                        for (int n = 0; n < kTiles1; ++n) put_u((known * D2 + pass * RESIDUES + r) * kTiles1 + n, hi[r][n], lo[r][n]);
                }
            }
        }

        // ---- stage 2
        if constexpr (NORM) norm.finish(g, __int_as_float(eps_bits));
        char* const y_base = y + row0 * (long long)kRowOfY;
        const char* const residual_base = residual + row0 * residual_stride;
        const int left = (int)(rows - row0 < kRowsOfWarp ? rows - row0 : kRowsOfWarp) - g;  // row h*8 is inside if left > h*8
        constexpr int kLaneStride = kWhole ? kStore : kRun * kElem, kPlaceStride = kWhole ? 4 * kStore : kStore;
        const u32 y_lane = g * kRowOfY + t * kLaneStride;
#pragma unroll
        for (int gi = 0; gi < GROUPS * A1; ++gi) {  // linear and block i1
            float down[2][2] = {};  // the scale undone, in two steps since one may leave float32's range
            if constexpr (kFloat) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int e = -(u_exponent[h] + reinterpret_cast<const int*>(image)[gi / A1]);
                    down[h][0] = power(e / 2);
                    down[h][1] = NORM ? power(e - e / 2) * norm.factor[h] : power(e - e / 2);
                }
            }
            for (int panel = 0; panel < kColumnPanels; ++panel) {
                if (kShares && round == shared_round && panel % kUnits != warp / kUnitWarps) {  // another warpgroup's
#pragma unroll 1
                    for (int p = 0; p < kPanelsOfColumns; ++p) {
                        panels.next();
                        panels.leave();
                    }
                    continue;
                }
                float acc[D1][kTiles2][4] = {};
#pragma unroll
                for (int j0 = 0; j0 < D1; j0 += PANEL_CLASSES) {
                    const u32 address = panels.next(kHeld2 && j0 > 0);
#pragma unroll
                    for (int j = j0; j < j0 + PANEL_CLASSES; ++j) {
                        const int c = gi % A1 * D1 + j, steps = class_steps(c), tiles = class_tiles(c);
#pragma unroll
                        for (int sweep = 0; sweep < kSweeps2; ++sweep)
#pragma unroll
                            for (int s = 0; s < steps; s += kBatch2) {
                                const int terms = kSweeps2 == 1 ? kSmallTerms | kLargeTerms : sweep == 0 ? kSmallTerms : kLargeTerms;
                                u32 hi[kBatch2][4], lo[kPairs ? kBatch2 : 1][4];
#pragma unroll
                                for (int o = 0; o < 2 * kBatch2; ++o) {
                                    const int nth = 2 * s + o, b = o / 2, k = o % 2 * 2;  // the class's nth tile is half of operand b
                                    if (nth >= 2 * steps) continue;
                                    if (nth == kGroups2 * tiles) {  // padding
                                        hi[b][k] = hi[b][k + 1] = 0;
                                        if constexpr (kPairs) lo[b][k] = lo[b][k + 1] = 0;
                                        continue;
                                    }
                                    const int i = nth / tiles * kTiles1 + gi / A1 * GROUP_TILES + class_from(c) + nth % tiles;
                                    const u32 at = u_base + i * kUImages * 256;
                                    if (high_is_shared(i)) load_shared_pair(&hi[b][k], at);
                                    else { hi[b][k] = u_hi[i][0]; hi[b][k + 1] = u_hi[i][1]; }
                                    if (kPairs && (terms & kSmallTerms)) {
                                        if (low_is_shared(i)) load_shared_pair(&lo[b][k], at + kLowOfU);
                                        else { lo[b][k] = u_lo[i][0]; lo[b][k + 1] = u_lo[i][1]; }
                                    }
                                }
                                if (sweep == 0 && s == 0 || kUSharedTiles > 0) wgmma_fence();
                                multiply<kTiles2, kBatch2, 1, kImage2>(acc[j], acc[j], hi, lo, address, (j - j0) * kSteps2 + s, steps - s, terms);
                                wgmma_commit();
                                if (kUSharedTiles > 0) wgmma_wait<1>();
                            }
                    }
                    wgmma_wait<kHeld2>();
                    if (!kHeld2 || j0 > 0) panels.leave();
                }
                if (kHeld2) {
                    wgmma_wait<0>();
                    panels.leave();
                }

                // ---- epilogue: a lane holds kRun adjacent outputs of each of its rows
                const int panel_byte = (gi * B1 + panel * PANEL_COLUMNS / kHalves) * D1 * kElem;
#pragma unroll
                for (int run = 0; run < kTiles2 / RUN / kHalves; ++run) {
                    Vector<kStore> held[2][kPlaces];
#pragma unroll
                    for (int place = 0; place < kPlaces; ++place) {
                        const int in_panel = run * 4 * kRun * kElem + place * kPlaceStride;
                        if (B1 % PANEL_COLUMNS != 0 && panel * PANEL_COLUMNS * D1 * kElem + in_panel + t * kLaneStride >= B1 * D1 * kElem) continue;
                        const int byte = panel_byte + in_panel;
                        float b[kBiases][kHalves][kPer], s[kPer];
#pragma unroll
                        for (int i = 0; i < kBiases * kHalves; ++i) {
                            const int half = i % kHalves;
                            const u32 at = bias_at + (i / kHalves * kOutFeatures + half * (kOutFeatures / 2)) * kElem + byte + t * kLaneStride;
                            Vector<kStore> bias_vector;
                            if constexpr (kStore == 16) load_shared(bias_vector.w, at);
                            else load_shared_pair(bias_vector.w, at);
                            spread(b[i / kHalves][half], bias_vector);
                        }
                        if constexpr (SCALED) spread(s, *reinterpret_cast<const Vector<kStore>*>(bias + kOutFeatures * kElem + byte + t * kLaneStride));
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            float out[kPer];
#pragma unroll
                            for (int e = 0; e < kPer; ++e) {
                                const int p = (place * kPer + e) / D1, j = (place * kPer + e) % D1;
                                auto sum = [&](int half) {
                                    const float a = acc[j][half * (kTiles2 / 2) + run * RUN + p / 2][2 * h + p % 2];
                                    const float shift = NORM ? fmaf(b[kBiases - 1][half][e], norm.rest[h], b[0][half][e]) : b[0][half][e];
                                    return kFloat ? fmaf(a * down[h][0], down[h][1], shift) : NORM ? fmaf(a, norm.factor[h], shift) : a + shift;
                                };
                                out[e] = activate<ACTIVATION, !kFloat>(SCALED ? sum(0) * s[e] : sum(0));
                                if constexpr (GATED) out[e] *= sum(1);
                            }
                            if (RESIDUAL && left > h * 8) {
                                float r[kPer];
                                spread(r, *reinterpret_cast<const Vector<kStore>*>(residual_base + (g + h * 8) * residual_stride + t * kLaneStride + byte));
#pragma unroll
                                for (int e = 0; e < kPer; ++e) out[e] += r[e];
                            }
                            held[h][place] = rounded<kStore>(out);
                            if (!kExchanged && left > h * 8) *reinterpret_cast<Vector<kStore>*>(y_base + (y_lane + h * 8 * kRowOfY + byte)) = held[h][place];
                        }
                    }
                    if constexpr (kExchanged)
#pragma unroll
                        for (int h = 0; h < 2; ++h)
                            store_three(y_base + (y_lane + h * 8 * kRowOfY + panel_byte + run * 4 * kRun * kElem), held[h], t & 1, left > h * 8);
                }
            }
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}
