// y = act(factor * (x Kᵀ + shift)), or residual + factor * (x Kᵀ + shift), for a matrix of blocks in one launch: each tile of outputs reads
// inputs of its own.
//
//        x: 64 rows a warpgroup, 64 gathered columns a stage          y: 64 rows, COLUMNS * D adjacent columns
//      ┌──┬──┬── … ──┐  pieces of 8 columns, by a table            ┌─┬─┬─┬─┬─┬─ … ─┐
//      │ 3│ 0│       │  ×  K: COLUMNS outputs of each of D classes │0│1│2│0│1│2    │  outputs of D classes alternate
//      └──┴──┴── … ──┘     in shared memory                        └─┴─┴─┴─┴─┴─ … ─┘
//
// A block keeps the weights of its tile in shared memory and goes over the rows; the blocks of one row range, a tile each, run together,
// so that x comes from device memory once and from the L2 cache for the others. How x comes, stages ahead of its products, is in block_rows.cuh;
// sums are float32. The next launch begins while this one ends, and brings its weights. If it goes through the rows in the other direction, it finds
// the last ones in the L2 cache.
//
// With NORM the products are those of x as it is: norm(x) Kᵀ = s * (x Kᵀ) - mean * s * (sums of K's rows), with s = 1 / sqrt(variance + eps) and the
// moments that layer_norm.cu has left for each row, or dense_stream.cu for each of NORM parts of a row: mean and sum of squared deviations. Weight and bias lie in K and shift. The sums are those of the rounded K, so a mean cancels to float32's precision.
// The activation takes half of its argument: weights and shift are halved.
//
// The image (flysurgery/gpu/block_linear.py) is [tile][class][stage][k8][column][8 halves]. Columns are ordered so that a lane holds
// whole vectors of 16 bytes of a row of y; where it holds several side by side, rows are turned in shared memory before they are stored.
//
// Floor: the bytes of x, residual and y, or the products. Its share of a whole model is in recipes/results/optimized_vits.csv,
// in the rows of ViT-B/16.
//
// MODE 0 fp16, 1 bf16. Defines: MODE, TILES, D, STEPS (stages of a class), LAST (k16 steps of the last of them), COLUMNS, RUN, WARPGROUPS, SLOTS,
// BOXES (block_rows.cuh), ACTIVATION (activation.cuh), NORM, FEATURES (columns of x), RESIDUAL, SCALED (whether there is a factor). Limits: sm_90a;
// rows of x, y and the residual begin at multiples of 16 bytes.
#include "activation.cuh"
#include "block_rows.cuh"
#include "row_pairs.cuh"

constexpr int kTiles = COLUMNS / 8, kRun = 2 * RUN * D;
constexpr int kPanel = 64 * COLUMNS * 2;      // bytes of a stage's weights
constexpr int kOut = COLUMNS * D;             // outputs of a tile
constexpr int kTurns = 2 * kTiles / RUN;      // of the epilogue, of 8 rows and a run
constexpr int kAhead = kRun == 8 && kTurns >= 4 ? 4 : 2;  // turns that residuals are loaded ahead
constexpr int kTurned = kRun > 8 ? 8 * 4 * kRun * 2 : 0;  // bytes in which a warp turns 8 rows of a run, where a lane holds several vectors of it
constexpr int kProducts = D * (4 * STEPS - 4 + LAST) * COLUMNS / 2;  // clock cycles of the products of 64 rows
constexpr int kApart = ACTIVATION ? kProducts : 6000;  // clock cycles between the warpgroups' beginnings; the latter is about a third of a round
constexpr int kParts = NORM < 5 ? 1 : (NORM + 3) / 4;  // of a row's parts, those whose moments a lane loads
constexpr bool kLines = ACTIVATION && kRun == 8 && kTiles / RUN % 2 == 0;  // stores fill lines of 128 bytes
static_assert(kRun % 8 == 0 && kTiles % RUN == 0, "a lane holds whole vectors");
static_assert(!ACTIVATION || !RESIDUAL, "nothing is added behind an activation");

// -mean * s and s of a row, whose four lanes have the moments of every fourth part each.
__device__ __forceinline__ float2 scale_of(const Vector<8> (&parts)[kParts], int t, float eps) {
    float mean = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) mean += __uint_as_float(parts[i].w[0]);
    mean = over_quad_sum(mean) * (1.0f / NORM);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
        const float apart = __uint_as_float(parts[i].w[0]) - mean;
        if (4 * i + t < NORM) squares += fmaf(apart * apart, (float)FEATURES / NORM, __uint_as_float(parts[i].w[1]));
    }
    const float s = rsqrtf(fmaf(over_quad_sum(squares), 1.0f / FEATURES, eps));
    return make_float2(-mean * s, s);
}

extern "C" __global__ void __launch_bounds__(128 * WARPGROUPS, 1)
#if BOXES
block_linear(const __grid_constant__ TensorMap x, const char* __restrict__ image, const int* __restrict__ pieces, const float* __restrict__ columns,
#else
block_linear(const char* __restrict__ x, const char* __restrict__ image, const int* __restrict__ pieces, const float* __restrict__ columns,
#endif
             const char* __restrict__ moments, const char* __restrict__ residual, char* __restrict__ y, long long rows, long long x_stride,
             long long residual_stride, int backwards, int eps_bits) {
    extern __shared__ __align__(BOXES ? 1024 : 128) char memory[];
    // panels of weights | staged x | rows of y that are turned | shifts of the columns, with SCALED or NORM also their factors and sums of weights
    //   | bytes from a row's start to each piece | a barrier a panel: it is there | barriers of x
    const u32 weights = shared_address(memory), staged_at = weights + kStages * kPanel;
    const u32 turned_at = staged_at + 4 * WARPGROUPS * SLOTS * kSlot, columns_at = turned_at + 4 * WARPGROUPS * kTurned;
    const u32 pieces_at = columns_at + kOut * 12, full = pieces_at + kStages * 32, row_barriers = full + kStages * 8;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31, t = lane & 3;
    const int tile = blockIdx.x % TILES;

    if (warp == 0) {  // weights are requested before any other wait
        if (lane == 0) {
            for (int s = 0; s < kStages; ++s) barrier_init(full + 8 * s, 1);
            StagedRows::prepare(row_barriers);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
        for (int s = 0; s < kStages; ++s)
            copy_by_warp(weights + s * kPanel, image + ((long long)tile * kStages + s) * kPanel, kPanel, full + 8 * s, lane);
    }
    for (int c = threadIdx.x; c < (SCALED || NORM ? 3 : 1) * kOut; c += 128 * WARPGROUPS)
        store_shared(columns_at + 4 * c, __float_as_uint(columns[c / kOut * (TILES * kOut) + tile * kOut + c % kOut]));
    for (int p = threadIdx.x; p < kStages * 8; p += 128 * WARPGROUPS) store_shared(pieces_at + 4 * p, (u32)pieces[tile * kStages * 8 + p]);
    __syncthreads();
    wait_for_kernels_before();  // weights come while the kernel before ends

    const Units units{rows, blockIdx.x / TILES, gridDim.x / TILES, backwards != 0};
    StagedRows staged(x, x_stride, units, staged_at, row_barriers, pieces_at, warp, lane);
    staged.begin();

    if (ACTIVATION || (RESIDUAL && units.first(1, 0) < rows)) {  // one warpgroup after the other, so that one's ends run beside the others' products
        const long long start = clock64();
        while (clock64() - start < warp / 4 * kApart) {
        }
    }
    const u32 b_from = __shfl_sync(0xffffffffu, weights, 0);
#pragma unroll 1
    for (int round = 0;; ++round) {
        const long long first = units.first(round, warp / 4);
        if (first >= rows) break;
        const long long row = first + warp % 4 * 16 + (lane >> 2);
        Vector<8> parts[2][kParts] = {};  // mean and squared deviations of every fourth part of a row
        if (NORM)
#pragma unroll
            for (int i = 0; i < kParts; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    if (row + h * 8 < rows && 4 * i + t < NORM) load_now(parts[h][i], moments + ((row + h * 8) * NORM + 4 * i + t) * 8);
        if (RESIDUAL && t == 0) {  // from here on they are loading into the L2 cache
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int b = 0; b < kOut * 2; b += 128)
                    if (row + h * 8 < rows) asm volatile("prefetch.global.L2 [%0];" ::"l"(residual + (row + h * 8) * residual_stride + tile * kOut * 2 + b));
        }
        const int byte = (tile * kOut + t * kRun) * 2;
        Vector<16> added[kAhead][kRun / 8];  // what stands in the residual
        auto bring = [&](int turn) {
#pragma unroll
            for (int v = 0; v < kRun / 8; ++v) {
                added[turn % kAhead][v] = {};
                if (row + turn % 2 * 8 < rows)
                    load_now(added[turn % kAhead][v], residual + (row + turn % 2 * 8) * residual_stride + byte + (turn / 2 * 4 * kRun + v * 8) * 2);
            }
        };
        float acc[D][kTiles][4] = {};
        Operands operands;
#pragma unroll
        for (int s = 0; s < kStages; ++s) {
            const int steps = s % STEPS == STEPS - 1 ? LAST : 4;
            staged.wait(operands, s, steps);
            barrier_wait(full + 8 * s, 0);
            const u64 b = wgmma_descriptor(b_from + s * kPanel, COLUMNS);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k)
                if (k < steps) staged.multiply<COLUMNS>(acc[s / STEPS], operands, s, k, b + k * (COLUMNS * 32 >> 4));
            wgmma_commit();
            staged.proceed(s);
        }
        if (RESIDUAL)
#pragma unroll
            for (int turn = 0; turn < kAhead; ++turn) bring(turn);
        float2 norm[2];  // -mean * s and s
        if (NORM)
#pragma unroll
            for (int h = 0; h < 2; ++h) norm[h] = scale_of(parts[h], t, __int_as_float(eps_bits));
        wgmma_wait<0>();
        staged.finish();

        const u32 turned = turned_at + warp * kTurned;
        Vector<16> before[2];  // of a line's first half
#pragma unroll
        for (int r = 0; r < kTiles / RUN; ++r) {
            float shift[kRun], factor[kRun], sum[kRun];
#pragma unroll
            for (int k = 0; k < kRun; k += 4) {
                const u32 at = columns_at + ((r * 4 + t) * kRun + k) * 4;
                load_shared(reinterpret_cast<u32*>(shift) + k, at);
                if (SCALED) load_shared(reinterpret_cast<u32*>(factor) + k, at + kOut * 4);
                if (NORM) load_shared(reinterpret_cast<u32*>(sum) + k, at + kOut * 8);
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const long long own = row + h * 8;
#pragma unroll
                for (int v = 0; v < kRun / 8; ++v) {
                    const int column = r * 4 * kRun + v * 8;
                    Vector<16> packed = {};
                    if (RESIDUAL) packed = added[(2 * r + h) % kAhead][v];
                    float out[8];
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        const int p = v * 8 + e;
                        out[e] = acc[p % D][r * RUN + p / D / 2][2 * h + p / D % 2];
                        if (NORM) out[e] = fmaf(out[e], norm[h].y, fmaf(norm[h].x, sum[p], shift[p]));
                        else out[e] += shift[p];
                        if (SCALED) out[e] *= factor[p];
                    }
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        if (RESIDUAL) out[2 * k] += low_half(packed.w[k]), out[2 * k + 1] += high_half(packed.w[k]);
                        packed.w[k] = ACTIVATION ? activate_pair<ACTIVATION>(out[2 * k], out[2 * k + 1]) : round2(out[2 * k], out[2 * k + 1]);
                    }
                    if (kTurned) {
                        store_shared_four(turned + (lane * kRun + v * 8) * 2, packed.w);
                    } else if (kLines && r % 2 == 0) {
                        before[h] = packed;
                    } else if (kLines) {
                        const int odd = lane >> 2 & 1;
                        exchange_rows(before[h], packed, odd);
                        char* const line = y + (own - odd) * (TILES * kOut * 2) + byte + (r - 1 + odd) * 64;
                        if (own - odd < rows) *reinterpret_cast<Vector<16>*>(line) = before[h];
                        if (own - odd + 1 < rows) *reinterpret_cast<Vector<16>*>(line + TILES * kOut * 2) = packed;
                    } else if (own < rows) {
                        *reinterpret_cast<Vector<16>*>(y + own * (TILES * kOut * 2) + byte + column * 2) = packed;
                    }
                }
                if (RESIDUAL && 2 * r + h + kAhead < kTurns) bring(2 * r + h + kAhead);
                if (kTurned) {
                    __syncwarp();
#pragma unroll
                    for (int v = 0; v < kRun / 8; ++v) {
                        const int vector = v * 32 + lane, of_row = vector / (kRun / 2);  // rows of 4 * kRun outputs
                        const long long to = own - (lane >> 2) + of_row;
                        Vector<16> packed;
                        load_shared(packed.w, turned + vector * 16);
                        if (to < rows)
                            *reinterpret_cast<Vector<16>*>(y + to * (TILES * kOut * 2) + (tile * kOut + r * 4 * kRun + vector % (kRun / 2) * 8) * 2) = packed;
                    }
                    __syncwarp();
                }
            }
        }
    }
    staged.end();
}
