// y = residual + act(factor * (x Wᵀ) + shift) for a dense W of halves, in one launch, where W is too large to stay in shared memory.
//
//        x: ROWS rows             W: COLUMNS outputs                    a tile of y: ROWS rows, COLUMNS columns
//      ┌──┬──┬── … ──┐         ┌──┬──┬── … ──┐                        ┌───────────────┬─ … ─┐
//      │64│  │       │    x    │64│  │       │  through a ring        │ 64 rows       │     │
//      └──┴──┴── … ──┘         └──┴──┴── … ──┘                        └───────────────┴─ … ─┘
//
// Two warpgroups take a block's tiles in turn: one multiplies, straight from shared memory, while the other finishes the outputs of the tile
// before. Two threads of a third load by the copy engine. One loads 64 inputs of the rows and of the weights at a time, STAGES of them
// ahead, across tiles. The other loads the residual; y takes its place, and the copy engine stores y. Two blocks, a cluster, take
// tiles of the same columns, and each loads half of the weights for both. Blocks that run together share rows.
//
// With MOMENTS it also leaves the mean and the squared deviations of a row's COLUMNS outputs in each tile, from sums about a lane's first output, which
// cost at most a factor of COLUMNS / 4 of float32's precision; block_linear.cu reads them.
//
// A slot: ROWS rows of 64 halves, in the order of wgmma_rows.cuh, then a panel of the image of dense_linear.cu (flysurgery/gpu/dense.py).
//
// Floor: the products, or the bytes of x, residual and y. ViT-B's attn_out with its residual takes 50 us of an H200, 128 images in float16,
// where the bytes take 28 at the rate of a large copy, and PyTorch's product alone 48.
//
// Defines: IN_FEATURES, OUT_FEATURES, MODE (0 fp16, 1 bf16), ACTIVATION (exact_activation.cuh), RESIDUAL, MOMENTS, COLUMNS, STAGES.
// Limits: sm_90a; IN_FEATURES a multiple of 64, OUT_FEATURES one of COLUMNS; rows of x, y and the residual begin at multiples of 16 bytes.
#include "cluster_ring.cuh"
#include "exact_activation.cuh"
#include "instructions.cuh"

constexpr int kUnits = 384 / COLUMNS, kRows = 64 * kUnits;  // as many rows as a warpgroup's registers hold sums of
constexpr int kCluster = 2, kThreads = 3 * 128;
constexpr int kStages = IN_FEATURES / 64, kTiles = COLUMNS / 8, kColumnTiles = OUT_FEATURES / COLUMNS;
constexpr int kRowBytes = kRows * 128, kPanel = COLUMNS * 128, kSlot = kRowBytes + kPanel;
constexpr int kBox = 32, kBoxes = COLUMNS / kBox, kBoxBytes = 64 * kBox * 2, kUnit = kBoxes * kBoxBytes;  // 64 rows of a residual, or of y
constexpr int kRegisters = 240, kBringing = 24;  // of a multiplying thread, and of a loading thread; together all registers
static_assert(IN_FEATURES % 64 == 0 && OUT_FEATURES % COLUMNS == 0 && 384 % COLUMNS == 0 && COLUMNS % kBox == 0, "whole stages, tiles and boxes");

using Ring = ClusterRing<STAGES, kSlot, kCluster>;

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
dense_stream(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap residual, const __grid_constant__ TensorMap y,
             const char* __restrict__ image, const float* __restrict__ columns, float2* __restrict__ moments, long long rows) {
    extern __shared__ __align__(1024) char memory[];
    // slots | units of a residual, then of y | factors and shifts of all columns | barriers: a slot has arrived, is free, a unit has come, to either warpgroup, is gone
    Ring ring;
    ring.slots = shared_address(memory);
    const u32 units = ring.slots + STAGES * kSlot, columns_at = units + kUnits * kUnit;
    ring.arrived = columns_at + OUT_FEATURES * 8, ring.freed = ring.arrived + 8 * STAGES;
    const u32 come = ring.freed + 8 * STAGES, gone = come + 16 * kUnits;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        ring.prepare();
        for (int u = 0; u < 2 * kUnits; ++u) barrier_init(come + 8 * u, 1);
        for (int u = 0; u < kUnits; ++u) barrier_init(gone + 8 * u, 128);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    for (int c = threadIdx.x; c < 2 * OUT_FEATURES; c += kThreads) store_shared(columns_at + 4 * c, __float_as_uint(columns[c]));
    __syncthreads();
    cluster_sync();
    wait_for_kernels_before();
    const int rank = blockIdx.x % kCluster, clusters = gridDim.x / kCluster, first = blockIdx.x / kCluster;
    const int tiles = (int)((rows + kCluster * kRows - 1) / (kCluster * kRows)) * kColumnTiles;  // of a cluster
    const auto coming = [&](int turn, int u) { return come + 8 * (turn % 2 * kUnits + u); };
    const auto row_of = [&](int tile) { return (tile / kColumnTiles * kCluster + rank) * kRows; };
    const auto column_of = [&](int tile) { return tile % kColumnTiles * COLUMNS; };

    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kBringing));
        if (warp == 8 && lane == 0) {
            int n = 0;
#pragma unroll 1
            for (int tile = first; tile < tiles; tile += clusters) {
                const char* panel = image + (long long)(tile % kColumnTiles) * kStages * kPanel + rank * (kPanel / kCluster);
#pragma unroll 1
                for (int s = 0; s < kStages; ++s, ++n, panel += kPanel) {
                    ring.wait_freed(n);
                    barrier_expect(ring.arrival(n), kSlot);
                    copy_box(ring.slot(n), x, s * 64, row_of(tile), ring.arrival(n));
                    copy_bulk_to_all<kCluster>(ring.slot(n) + kRowBytes + rank * (kPanel / kCluster), panel, kPanel / kCluster, ring.arrival(n));
                }
            }
        }
        if (warp == 9 && lane == 0) {
            int turn = 0;
#pragma unroll 1
            for (int tile = first; tile < tiles; tile += clusters, ++turn)
#pragma unroll 1
                for (int u = 0; u < kUnits; ++u) {
                    barrier_wait(gone + 8 * u, ~turn & 1);
                    if (RESIDUAL) {
                        barrier_expect(coming(turn, u), kUnit);
#pragma unroll 1
                        for (int b = 0; b < kBoxes; ++b)
                            copy_box(units + u * kUnit + b * kBoxBytes, residual, column_of(tile) + b * kBox, row_of(tile) + u * 64, coming(turn, u));
                    } else {
                        barrier_arrive(coming(turn, u));
                    }
                }
        }
        cluster_sync();  // no block ends while another arrives at its barriers
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
    const int warpgroup = warp / 4, g = lane >> 2, t = lane & 3;
    if (warpgroup == 1) named_barrier_arrive(1, 256);  // it is the other's turn
#pragma unroll 1
    for (int turn = warpgroup;; turn += 2) {
        const int tile = first + turn * clusters;
        if (tile >= tiles) break;
        float sums[kUnits][kTiles][4] = {};
        multiply_in_turn<kStages>(sums, ring, turn * kStages, warpgroup, lane);

#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            barrier_wait(coming(turn, u), turn / 2 & 1);
            const u32 own = units + u * kUnit + (warp % 4 * 16 + g) * (2 * kBox) + t * 16;
            float first_output[2], total[2] = {}, squares[2] = {};  // of this lane's outputs in each of its rows
#pragma unroll
            for (int r = 0; r < kBoxes; ++r) {
                float factor[8], shift[8];
#pragma unroll
                for (int k = 0; k < 8; k += 4) {
                    const u32 at = columns_at + (column_of(tile) + r * 32 + t * 8 + k) * 4;
                    load_shared(reinterpret_cast<u32*>(factor) + k, at);
                    load_shared(reinterpret_cast<u32*>(shift) + k, at + OUT_FEATURES * 4);
                }
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const u32 place = own + r * kBoxBytes + h * (8 * 2 * kBox);
                    u32 packed[4];
                    if (RESIDUAL) load_shared(packed, place);
                    float out[8];
#pragma unroll
                    for (int e = 0; e < 8; ++e) out[e] = activate<ACTIVATION, true>(fmaf(sums[u][r * 4 + e / 2][2 * h + e % 2], factor[e], shift[e]));
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        if (RESIDUAL) out[2 * k] += low_half(packed[k]), out[2 * k + 1] += high_half(packed[k]);
                        packed[k] = round2(out[2 * k], out[2 * k + 1]);
                    }
                    if (MOMENTS) {
                        if (r == 0) first_output[h] = low_half(packed[0]);
#pragma unroll
                        for (int e = 0; e < 8; ++e) {
                            const float apart = (e % 2 ? high_half(packed[e / 2]) : low_half(packed[e / 2])) - first_output[h];
                            total[h] += apart;
                            squares[h] = fmaf(apart, apart, squares[h]);
                        }
                    }
                    store_shared_four(place, packed);
                }
            }
            fence_async();
            __syncwarp();
            if (lane == 0) {
#pragma unroll 1
                for (int b = 0; b < kBoxes; ++b)
                    store_box(y, column_of(tile) + b * kBox, row_of(tile) + u * 64 + warp % 4 * 16, units + u * kUnit + b * kBoxBytes + warp % 4 * (kBoxBytes / 4));
                commit_stores();
            }
            if (MOMENTS)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    constexpr float kOwn = COLUMNS / 4;
                    const float own_mean = first_output[h] + total[h] / kOwn, mean = over_quad_sum(own_mean) / 4.0f;
                    const float around = over_quad_sum(squares[h] - total[h] * total[h] / kOwn + kOwn * (own_mean - mean) * (own_mean - mean));
                    const long long row = row_of(tile) + u * 64 + warp % 4 * 16 + h * 8 + g;
                    if (t == 0 && row < rows) moments[row * kColumnTiles + tile % kColumnTiles] = make_float2(mean, around);
                }
        }
        if (lane == 0) wait_stores_read();
        __syncwarp();
#pragma unroll
        for (int u = 0; u < kUnits; ++u) barrier_arrive(gone + 8 * u);
    }
    cluster_sync();
}
