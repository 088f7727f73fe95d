// y = residual + act(factor * (x Wᵀ) + shift) for a dense W, in one launch: a product with its bias, layer scale, activation and residual.
//
//        x: 16 rows a warp, staged by cp.async          y, residual: 16 rows, COLUMNS columns
//      ┌────┬────┬────┬─ … ─┐                         ┌───────────────┬─ … ─┐
//      │batch of k16 steps  │  x  W: COLUMNS outputs  │ column tile   │     │
//      └────┴────┴────┴─ … ─┘     in shared memory    └───────────────┴─ … ─┘
//
// A block keeps all inputs of its COLUMNS outputs in shared memory and goes over the rows; the blocks of one row range, a column tile each,
// run together, so that x comes from device memory once and from the L2 cache for the others. A warpgroup owns 64 rows; a warp
// loads its own 16, STAGES - 1 batches of 128 bytes of a row ahead; there is no barrier between load and use, nor between warps.
// Residuals are requested while products run.
//
// MODE 0 fp16, 1 bf16: float32 sums over all inputs. MODE 2 (tf32 grade) and 3 (fp32 grade) take float32. Every row of a batch has a
// power of two that brings its largest element near 2^11, every output one for its weights; what is scaled becomes fp16 (MODE 2) or a
// pair hi + lo (MODE 3: lo*hi + hi*lo + hi*hi). The products of a batch, 32 inputs, are added to float32 sums with rounding, so the tensor cores'
// truncation does not add up. Rows of less than 2^-106 lose precision; infinities and NaN in x give NaN or infinite results.
//
// Columns of W are ordered so that a lane holds 16 adjacent bytes of a row of y. The image (flysurgery/gpu/dense.py) is
// [column tile][batch][hi, lo][k8][column][8 halves], which the descriptors of wgmma name.
//
// Floor: the bytes of x, residual, y and weights. Its share of a whole model's time is in recipes/results/optimized_vits.csv, as the gain
// of "dense optimized"; no recipe times it alone.
//
// Patches: where PATCH_WIDE is not 0, x is images (image, channel, row, column) without gaps, and a row of the product is a patch of PATCH_HIGH x
// PATCH_WIDE pixels, all channels one after the other: patches are read where they lie, image by image, row by row. Each image has PREFIX rows of
// y before its patches. RESIDUAL then adds a position: `residual` has the rows of one image, first the PREFIX ones as they are to be in y.
//
// Gated: half of the outputs of a block are a gate's and half the value's at the same places, and y = act(gate) * value, of OUT_FEATURES / 2 columns.
//
// Defines: IN_FEATURES, OUT_FEATURES, MODE, ACTIVATION (exact_activation.cuh), GATED, RESIDUAL, PATCH_HIGH, PATCH_WIDE, PREFIX, WARPS, COLUMNS, STAGES.
// Limits: sm_90a; rows of x of whole batches, beginning at multiples of 16 bytes, as those of the residual; OUT_FEATURES a multiple of COLUMNS.
#include "exact_activation.cuh"
#include "instructions.cuh"
#include "mode.cuh"
#include "scale.cuh"
#include "wgmma.cuh"

constexpr int kTiles = COLUMNS / 8, kColumnTiles = OUT_FEATURES / COLUMNS;
constexpr int kBatch = 128 / kElem, kSteps = kBatch / 16, kBatches = IN_FEATURES / kBatch;  // inputs and k16 steps of a batch
constexpr int kImageBytes = kBatch * COLUMNS * 2, kPanelBytes = kImageBytes * kImages;
constexpr int kStageBytes = 16 * 128;
constexpr int kUnitWarps = 4, kUnits = WARPS / kUnitWarps, kUnitRows = 16 * kUnitWarps;
constexpr int kRun = kFloat ? 2 : 4, kHeld = 2 * kRun;  // tiles whose columns of a lane are adjacent, and how many these are: 16 bytes
constexpr int kHalves = GATED ? 2 : 1, kVectors = kTiles / kRun / kHalves;  // vectors of y that a lane stores
constexpr bool kPatches = PATCH_WIDE > 0;
constexpr int kLine = kPatches ? PATCH_WIDE * kElem : 128;                     // adjacent bytes of a patch
constexpr int kChannels = kPatches ? IN_FEATURES * kElem / (PATCH_HIGH * kLine) : 1;
// Pieces of 16 bytes of a row that lanes side by side ask for, rows that a warp asks for together, and in how many turns all 16. The lines of
// patches side by side are adjacent: the more of them at once, the fewer reads begin or end inside of 128 bytes.
constexpr int kAdjacent = kPatches && kLine < 128 ? 4 : 8, kTogether = 32 / kAdjacent, kTurns = 16 / kTogether;
constexpr int kBatchesOfChannel = kPatches ? PATCH_HIGH * kLine / 128 : kBatches;
static_assert(!kPatches || (kLine % 16 == 0 && 128 % kLine == 0 && PATCH_HIGH * kLine % 128 == 0), "a batch is whole lines of one channel");
static_assert(IN_FEATURES % kBatch == 0 && OUT_FEATURES % COLUMNS == 0 && kTiles % (kRun * kHalves) == 0 && WARPS % kUnitWarps == 0, "whole batches, tiles and units");
static_assert(!GATED || !RESIDUAL, "nothing is added behind a gate");
static_assert(kPatches || PREFIX == 0, "images have rows before their patches");

__device__ __forceinline__ long long first_row(int round, int warp) {
    const long long block = blockIdx.x / kColumnTiles, blocks = gridDim.x / kColumnTiles;
    return (((long long)round * kUnits + warp / kUnitWarps) * blocks + block) * kUnitRows;
}

// Of a row of patches: its image, and its place among the patches of that image. In 32 bits, as 64 are divided by a subroutine: 2^32
// patches, of 128 bytes at least, are more than a device holds.
struct Patch {
    u32 image, place;

    __device__ __forceinline__ Patch(long long row, u32 of_image) : image((u32)row / of_image), place((u32)row - image * of_image) {}
};

__device__ __forceinline__ u32 patches_across(long long stride) { return (u32)stride / kLine; }

__device__ __forceinline__ u32 patches_of_image(long long stride, long long height) {
    if constexpr (kPatches) return (u32)height / PATCH_HIGH * patches_across(stride);
    return 1;
}

// The operands of a batch: 16 rows of a warp, and the exponents of the two rows of a lane.
struct Operands {
    u32 hi[kSteps][4], lo[kPairs ? kSteps : 1][4];
    int exponent[2];
};

// Loads rows of x. In shared memory the 16-byte pieces of a row are rotated by row against bank conflicts.
struct StagedRows {
    const char* x;
    long long rows, stride;  // of patches, bytes from a line of pixels to the next
    long long height;        // of images
    u32 stages;
    int warp, lane, round = 0, batch = 0, to = 0, from = 0;
    const char* row[kPatches ? kTurns : 1];  // the lane's first piece of its first row; of each of its patches
    int inside;                              // rows from the first to the end; those past it are filled with zeros

    __device__ __forceinline__ static int turned(int piece, int row) { return piece ^ ((row & 1) << 2 | (row >> 1 & 3)); }

    __device__ __forceinline__ StagedRows(const char* x_, long long rows_, long long stride_, long long height_, u32 shared, int warp_, int lane_)
        : x(x_), rows(rows_), stride(stride_), height(height_), stages(shared + warp_ * STAGES * kStageBytes), warp(warp_), lane(lane_) {
        set_rows();
    }

    __device__ __forceinline__ void set_rows() {
        const long long first = first_row(round, warp) + warp % kUnitWarps * 16 + lane / kAdjacent;
        inside = (int)min(max(rows - first, 0ll), 16ll);
        if constexpr (kPatches) {
            const u32 byte = lane % kAdjacent * 16, across = patches_across(stride), down = (u32)height / PATCH_HIGH;
            const Patch patch(first, patches_of_image(stride, height));
            u32 i = patch.place / across, j = patch.place - i * across;
            const char* at = x + ((long long)patch.image * kChannels * height + i * PATCH_HIGH + byte / kLine) * stride + j * kLine + byte % kLine;
#pragma unroll
            for (int m = 0; m < kTurns; ++m) {
                row[m] = at;
                at += kTogether * kLine;
                for (j += kTogether; j >= across; j -= across) {  // over the end of a row of patches, and of an image
                    at += (PATCH_HIGH - 1) * stride;
                    if (++i == down) i = 0, at += (kChannels - 1) * height * stride;
                }
            }
        } else {
            row[0] = x + first * stride + (lane & 7) * 16;
        }
    }

    // Where the lane's n-th piece of a batch begins, in its m-th row.
    __device__ __forceinline__ const char* piece(int m, int n) const {
        if constexpr (kPatches) {
            const int line = batch % kBatchesOfChannel * (128 / kLine) + n * (kAdjacent * 16 / kLine);
            return row[m] + (batch / kBatchesOfChannel * height + line) * stride;
        } else {
            return row[0] + kTogether * m * stride + batch * 128;
        }
    }

    // Ask for the next batch.
    __device__ __forceinline__ void load() {
        const u32 stage = stages + to * kStageBytes;
#pragma unroll
        for (int n = 0; n < 8 / kAdjacent; ++n)
#pragma unroll
            for (int m = 0; m < kTurns; ++m) {
                const int own = kTogether * m + lane / kAdjacent, to_piece = turned(n * kAdjacent + lane % kAdjacent, own);
                copy_async<16>(stage + own * 128 + to_piece * 16, piece(m, n), kTogether * m < inside ? 16 : 0);
            }
        commit_copies();
        if (++to == STAGES) to = 0;
        if (++batch == kBatches) {
            batch = 0;
            ++round;
            set_rows();
        }
    }

    // The operands of the present batch; then the batch that takes its place is requested.
    __device__ __forceinline__ void read(Operands& operands) {
        wait_copies<STAGES - 2>();
        __syncwarp();
        const u32 stage = stages + from * kStageBytes;
        if constexpr (kFloat) {
            const int g = lane >> 2, t = lane & 3;  // a lane takes four adjacent floats of a step: the weights are packed in this order
            scale_rows(operands.hi, operands.lo, operands.exponent, [&](int h, int s) { return stage + (g + h * 8) * 128 + turned(4 * s + t, g) * 16; });
        } else {
            const int own = (lane & 8) + (lane & 7);
#pragma unroll
            for (int s = 0; s < kSteps; ++s) load_matrices(operands.hi[s], stage + own * 128 + turned(2 * s + (lane >> 4), own) * 16);
        }
        __syncwarp();
        if (++from == STAGES) from = 0;
        load();
    }
};

// acc += operands * panel, small products first; acc = operands * panel where it is fresh.
__device__ __forceinline__ void multiply(float (&acc)[kTiles][4], const Operands& operands, u32 panel, bool fresh) {
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        const u64 step = wgmma_descriptor(panel + s * COLUMNS * 32, COLUMNS);
        if constexpr (kPairs) {
            wgmma_pieces(acc, operands.lo[s], step, !(fresh && s == 0));
            wgmma_pieces(acc, operands.hi[s], wgmma_descriptor(panel + s * COLUMNS * 32 + kImageBytes, COLUMNS));
        }
        wgmma_pieces(acc, operands.hi[s], step, kPairs || !(fresh && s == 0));
    }
    wgmma_commit();
    wgmma_wait<0>();  // the other warpgroups make use of the time
}

// sums += operands * panel
__device__ __forceinline__ void add_batch(float (&sums)[kTiles][4], const Operands& operands, u32 panel) {
    if constexpr (!kFloat) {
        multiply(sums, operands, panel, false);
        return;
    }
    float products[kTiles][4];
    multiply(products, operands, panel, true);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float down = power(-operands.exponent[h] - kWeightShift);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            sums[n][2 * h] = fmaf(products[n][2 * h], down, sums[n][2 * h]);
            sums[n][2 * h + 1] = fmaf(products[n][2 * h + 1], down, sums[n][2 * h + 1]);
        }
    }
}

// The rows before the patches of each image: the PREFIX rows of `from`, by all blocks of a column tile.
__device__ __forceinline__ void store_prefix(char* y, const char* from, long long images, u32 of_image, int tile) {
    constexpr int kPieces = COLUMNS * kElem / 16;  // of a row
    const long long threads = gridDim.x / kColumnTiles * blockDim.x, pieces = images * PREFIX * kPieces;
    for (long long at = blockIdx.x / kColumnTiles * blockDim.x + threadIdx.x; at < pieces; at += threads) {
        const long long image = at / (PREFIX * kPieces);
        const int row = (int)(at / kPieces % PREFIX), byte = tile * COLUMNS * kElem + (int)(at % kPieces) * 16;
        *reinterpret_cast<Vector<16>*>(y + (image * (PREFIX + of_image) + row) * (OUT_FEATURES * kElem) + byte) =
            *reinterpret_cast<const Vector<16>*>(from + row * (OUT_FEATURES * kElem) + byte);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
dense_linear(const char* __restrict__ x, const char* __restrict__ image, const float* __restrict__ columns, const char* __restrict__ residual,
             char* __restrict__ y, long long rows, long long x_stride, long long residual_stride, long long height) {
    extern __shared__ __align__(128) char memory[];
    // panels of weights | staged x | factors and shifts of the columns | a barrier a panel: it is there
    const u32 weights = shared_address(memory), staged_at = weights + kBatches * kPanelBytes;
    const u32 columns_at = staged_at + WARPS * STAGES * kStageBytes, full = columns_at + COLUMNS * 8;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int tile = blockIdx.x % kColumnTiles;

    if (threadIdx.x == 0) {
        for (int b = 0; b < kBatches; ++b) barrier_init(full + 8 * b, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    for (int c = threadIdx.x; c < 2 * COLUMNS; c += 32 * WARPS)
        store_shared(columns_at + 4 * c, __float_as_uint(columns[c / COLUMNS * OUT_FEATURES + tile * COLUMNS + c % COLUMNS]));
    __syncthreads();
    for (int b = warp; b < kBatches; b += WARPS)
        copy_by_warp(weights + b * kPanelBytes, image + ((long long)tile * kBatches + b) * kPanelBytes, kPanelBytes, full + 8 * b, lane);
    wait_for_kernels_before();  // weights come while the kernel before ends
    StagedRows staged(x, rows, x_stride, height, staged_at, warp, lane);
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; ++s) staged.load();
    const u32 of_image = patches_of_image(x_stride, height);
    if constexpr (PREFIX > 0) store_prefix(y, residual, rows / of_image, of_image, tile);

    const int column_byte = tile * (COLUMNS / kHalves) * kElem + t * 16;
#pragma unroll 1
    for (int round = 0; first_row(round, warp) < rows; ++round) {
        const long long row = first_row(round, warp) + warp % kUnitWarps * 16 + g;
        if (RESIDUAL && !kPatches && t == 0) {  // from here on they are loading into the L2 cache
            const char* const residual_row = residual + row * residual_stride + column_byte;
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int byte = 0; byte < COLUMNS * kElem; byte += 128)
                    if (row + h * 8 < rows) asm volatile("prefetch.global.L2 [%0];" ::"l"(residual_row + h * 8 * residual_stride + byte));
        }
        float sums[kTiles][4] = {};
#pragma unroll 1
        for (int b = 0; b < kBatches; ++b) {
            Operands operands;
            staged.read(operands);
            barrier_wait(full + 8 * b, 0);
            add_batch(sums, operands, weights + b * kPanelBytes);
        }
        const char* residual_row[2];
        char* y_row[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            long long from = row + h * 8, to = from;
            if constexpr (kPatches) {
                const Patch patch(from, of_image);
                from = PREFIX + patch.place;
                to += (patch.image + 1ll) * PREFIX;
            }
            residual_row[h] = residual + from * residual_stride + column_byte;
            y_row[h] = y + to * (OUT_FEATURES / kHalves * kElem) + column_byte;
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            Vector<16> added[2] = {};
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (RESIDUAL && row + h * 8 < rows) added[h] = *reinterpret_cast<const Vector<16>*>(residual_row[h] + v * 64);
            float factor[kHalves][kHeld], shift[kHalves][kHeld];
#pragma unroll
            for (int half = 0; half < kHalves; ++half)
#pragma unroll
                for (int k = 0; k < kHeld; k += 4) {
                    const u32 at = columns_at + ((v + half * kVectors) * 4 * kHeld + t * kHeld + k) * 4;
                    load_shared(reinterpret_cast<u32*>(factor[half]) + k, at);
                    load_shared(reinterpret_cast<u32*>(shift[half]) + k, at + COLUMNS * 4);
                }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float out[kHeld], more[kHeld];
                spread(more, added[h]);
#pragma unroll
                for (int e = 0; e < kHeld; ++e) {
                    auto sum = [&](int half) {
                        return fmaf(sums[(v + half * kVectors) * kRun + e / 2][2 * h + e % 2], factor[half][e], shift[half][e]);
                    };
                    out[e] = activate<ACTIVATION, !kFloat>(sum(0));
                    if constexpr (GATED) out[e] *= sum(1);
                    out[e] += more[e];
                }
                const Vector<16> packed = rounded<16>(out);
                if (row + h * 8 < rows) *reinterpret_cast<Vector<16>*>(y_row[h] + v * 64) = packed;
            }
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}
