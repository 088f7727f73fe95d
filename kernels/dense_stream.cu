// y = residual + act(factor * (x Wᵀ) + shift) for a dense W of halves, in one launch, where W is too large to stay in shared memory.
//
//        x: 192 rows              W: COLUMNS outputs                    y, residual: 64 rows a warpgroup, COLUMNS columns
//      ┌──┬──┬── … ──┐         ┌──┬──┬── … ──┐                        ┌───────────────┬─ … ─┐
//      │64│  │       │    x    │64│  │       │  through a ring        │ column tile   │     │
//      └──┴──┴── … ──┘         └──┴──┴── … ──┘                        └───────────────┴─ … ─┘
//
// A block takes tile after tile. A thread of its last warpgroup has the copy engine bring 64 inputs of the rows and of the weights at a time, SLOTS of
// them ahead, across tiles; three other warpgroups multiply 64 rows each, straight from shared memory, and finish their outputs while the next tile's first inputs come.
// Wide tiles of many rows read x and W the fewest times from the L2 cache; blocks that run together share rows.
//
// With MOMENTS it also leaves the mean and the squared deviations of a row's COLUMNS outputs in each tile, from sums about a lane's first output, which
// cost at most a factor of COLUMNS / 4 of float32's precision; block_linear.cu reads them.
//
// A slot: 192 rows of 64 halves, in the order of wgmma_rows.cuh, then a panel of the image of dense_linear.cu (flysurgery/ops/cuda/dense.py).
//
// Floor: the products, or the bytes of x, residual and y. ViT-B's attn_out with its residual takes 60 us of an H200,
// 128 images in float16, where the bytes take 28 at the rate of a large copy (recipes/results/kernel_trials_h200.csv, runs 5 and 20).
//
// Defines: IN, OUT, MODE (0 fp16, 1 bf16), ACTIVATION (exact_activation.cuh), RESIDUAL, MOMENTS, COLUMNS, SLOTS. Limits: sm_90a; IN a multiple
// of 64, OUT one of COLUMNS; rows of x, y and the residual begin at multiples of 16 bytes.
#include "exact_activation.cuh"
#include "instructions.cuh"
#include "tensor_map.cuh"
#include "wgmma_wide_shared.cuh"
#include "wgmma_rows.cuh"

constexpr int kWarpgroups = 3, kRows = 64 * kWarpgroups, kThreads = 128 * (kWarpgroups + 1);
constexpr int kStages = IN / 64, kTiles = COLUMNS / 8, kColumnTiles = OUT / COLUMNS;
constexpr int kRowBytes = kRows * 128, kPanel = COLUMNS * 128, kSlot = kRowBytes + kPanel;
constexpr int kRegisters = 160, kBringing = 32;  // of a thread that multiplies, and of one that brings; all that there are
constexpr int kAhead = 2;                        // vectors of a lane's residuals on their way
static_assert(IN % 64 == 0 && OUT % COLUMNS == 0 && COLUMNS % 32 == 0 && SLOTS > 1, "whole stages and tiles; a slot is freed when the next has arrived");

// The order of a block's stages, and the slots that they pass through.
struct Ring {
    u32 slots, arrived, freed;
    int slot = 0;
    u32 round = 0;
    __device__ __forceinline__ u32 at() const { return slots + slot * kSlot; }
    __device__ __forceinline__ void wait_arrived() const { barrier_wait(arrived + 8 * slot, round & 1); }
    __device__ __forceinline__ void wait_freed() const { barrier_wait(freed + 8 * slot, ~round & 1); }
    __device__ __forceinline__ void next() {
        if (++slot == SLOTS) slot = 0, ++round;
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
dense_stream(const __grid_constant__ TensorMap x, const char* __restrict__ image, const float* __restrict__ columns, const char* __restrict__ residual,
             char* __restrict__ y, float2* __restrict__ moments, long long rows, long long residual_stride) {
    extern __shared__ __align__(1024) char memory[];
    // slots | factors and shifts of all columns | barriers of each slot: it has arrived, it is free
    Ring ring;
    ring.slots = shared_address(memory);
    const u32 columns_at = ring.slots + SLOTS * kSlot;
    ring.arrived = columns_at + OUT * 8, ring.freed = ring.arrived + 8 * SLOTS;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int s = 0; s < SLOTS; ++s) barrier_init(ring.arrived + 8 * s, 1), barrier_init(ring.freed + 8 * s, 4 * kWarpgroups);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    for (int c = threadIdx.x; c < 2 * OUT; c += kThreads) store_shared(columns_at + 4 * c, __float_as_uint(columns[c]));
    __syncthreads();
    wait_for_kernels_before();
    const int tiles = (int)((rows + kRows - 1) / kRows) * kColumnTiles;

    if (warp >= 4 * kWarpgroups) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kBringing));
        if (threadIdx.x % 128) return;
#pragma unroll 1
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const char* panel = image + (long long)(tile % kColumnTiles) * kStages * kPanel;
#pragma unroll 1
            for (int s = 0; s < kStages; ++s, panel += kPanel) {
                ring.wait_freed();
                const u32 at = ring.at(), arrived = ring.arrived + 8 * ring.slot;
                barrier_expect(arrived, kSlot);
                copy_box(at, x, s * 64, tile / kColumnTiles * kRows, arrived);
                copy_bulk(at + kRowBytes, panel, kPanel, arrived);
                ring.next();
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
    const int warpgroup = warp / 4, g = lane >> 2, t = lane & 3;
    u32 last = 0;  // the barrier of the slot before
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const long long row = (long long)(tile / kColumnTiles) * kRows + warp * 16 + g;
        const int column = tile % kColumnTiles * COLUMNS + t * 8;
        if (RESIDUAL && t == 0) {  // from here on they are on their way to the L2 cache
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int b = 0; b < COLUMNS * 2; b += 128)
                    if (row + h * 8 < rows) asm volatile("prefetch.global.L2 [%0];" ::"l"(residual + (row + h * 8) * residual_stride + column * 2 + b));
        }
        Vector<16> added[kAhead];
        const auto bring = [&](int turn) {
            added[turn % kAhead] = {};
            if (row + turn % 2 * 8 < rows)
                load_now(added[turn % kAhead], residual + (row + turn % 2 * 8) * residual_stride + (column + turn / 2 * 32) * 2);
        };
        float sums[kTiles][4] = {};
#pragma unroll 1
        for (int s = 0; s < kStages; ++s) {
            ring.wait_arrived();
            const u32 at = ring.at();
            const u64 a = rows_descriptor(at + warpgroup * 8192), b = wgmma_descriptor(at + kRowBytes, COLUMNS);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) WgmmaShared<COLUMNS>::run(sums, a + (k * 32 >> 4), b + (k * COLUMNS * 32 >> 4));
            wgmma_commit();
            wgmma_wait<1>();  // the stage before is multiplied
            if (s > 0 && lane == 0) barrier_arrive(last);
            last = ring.freed + 8 * ring.slot;
            ring.next();
        }
        if (RESIDUAL)
#pragma unroll
            for (int turn = 0; turn < kAhead; ++turn) bring(turn);
        wgmma_wait<0>();
        if (lane == 0) barrier_arrive(last);

        float first[2], total[2] = {}, squares[2] = {};  // of this lane's outputs in each of its rows
#pragma unroll
        for (int r = 0; r < kTiles / 4; ++r) {
            float factor[8], shift[8];
#pragma unroll
            for (int k = 0; k < 8; k += 4) {
                const u32 at = columns_at + (column + r * 32 + k) * 4;
                load_shared(reinterpret_cast<u32*>(factor) + k, at);
                load_shared(reinterpret_cast<u32*>(shift) + k, at + OUT * 4);
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                Vector<16> packed = {};
                if (RESIDUAL) packed = added[(2 * r + h) % kAhead];
                if (RESIDUAL && 2 * r + h + kAhead < kTiles / 2) bring(2 * r + h + kAhead);
                float out[8];
#pragma unroll
                for (int e = 0; e < 8; ++e) out[e] = activate<ACTIVATION, true>(fmaf(sums[r * 4 + e / 2][2 * h + e % 2], factor[e], shift[e]));
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    if (RESIDUAL) out[2 * k] += low_half(packed.w[k]), out[2 * k + 1] += high_half(packed.w[k]);
                    packed.w[k] = round2(out[2 * k], out[2 * k + 1]);
                }
                if (MOMENTS) {
                    if (r == 0) first[h] = low_half(packed.w[0]);
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        const float apart = (e % 2 ? high_half(packed.w[e / 2]) : low_half(packed.w[e / 2])) - first[h];
                        total[h] += apart;
                        squares[h] = fmaf(apart, apart, squares[h]);
                    }
                }
                if (row + h * 8 < rows) *reinterpret_cast<Vector<16>*>(y + (row + h * 8) * (OUT * 2) + (column + r * 32) * 2) = packed;
            }
        }
        if (MOMENTS)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                constexpr float kOwn = COLUMNS / 4;
                const float own = first[h] + total[h] / kOwn, mean = over_quad_sum(own) / 4.0f;
                const float around = over_quad_sum(squares[h] - total[h] * total[h] / kOwn + kOwn * (own - mean) * (own - mean));
                if (t == 0 && row + h * 8 < rows) moments[(row + h * 8) * kColumnTiles + tile % kColumnTiles] = make_float2(mean, around);
            }
    }
}
