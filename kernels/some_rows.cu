// y = act(factor * (x W^T) + shift) + residual for some hundred rows: too many for few_rows.cu, whose operands all lie in registers, too few for
// kernels that give a warpgroup 64 rows of all columns. So rows, columns and inputs are cut until all multiprocessors have a part.
//
// A block makes ROWS rows of COLUMNS columns. Slabs of 64 inputs of both pass through a ring of STAGES slots in shared memory; where all of them
// fit at once, there is one round of loads. A slot has SPLIT slabs, one for each group of warpgroups, and SHARES blocks of a cluster have a part of
// the inputs each: the sums of all meet in shared memory. A warpgroup has 64 rows of a slab.
//
//     x: ROWS x 64    W: COLUMNS x 64    by SPLIT groups in SHARES blocks                      y: ROWS x COLUMNS
//     ┌──┬──┬──┬─ … ─┐  slab by slab  ──> wgmma ──> sums in shared memory of each block ──> added up, ROWS / SHARES rows by each
//
// MODE 0 fp16, 1 bf16: W lies as PyTorch has it. MODE 2 (tf32 grade) and 3 (fp32 grade) take float32: of 32 inputs each row has a power of two that
// brings its largest element near 2^11, each output one for all its weights; what is scaled becomes fp16 (MODE 2) or a pair hi + lo (MODE 3: lo*hi +
// hi*lo + hi*hi). The products of 32 inputs are added to float32 sums with rounding, so the tensor cores' truncation does not add up. W is then
// [output][hi, lo][input] of fp16, each 16 inputs in the order in which a lane reads them side by side. Infinities and NaN do not come out finite.
//
// A kernel may begin before the one before it has ended, and then has its first weights by the time that x is there. Weights must therefore not
// come from the kernel before; whoever launches sees to that.
//
// Measured on an H200, beside PyTorch: recipes/results/kernels_h200.csv.
//
// Defines: IN_FEATURES, OUT_FEATURES, MODE, ACTIVATION (exact_activation.cuh), RESIDUAL, ROWS, COLUMNS, SPLIT, SHARES, STAGES,
// RESIDENT (blocks that a multiprocessor runs at once).
// Limits: sm_90a; IN_FEATURES a multiple of 64*SPLIT*SHARES, OUT_FEATURES of COLUMNS, ROWS of 64; rows at multiples of 16 bytes.
#include "exact_activation.cuh"
#include "instructions.cuh"
#include "mode.cuh"
#include "scale.cuh"
#include "wgmma_rows.cuh"
#include "wgmma.cuh"

constexpr int kSlab = 64, kLine = kSlab * kElem, kWeightLine = kSlab * 2;  // inputs of a slab; its bytes of a row, and of an output
constexpr int kSteps = IN_FEATURES / (kSlab * SPLIT * SHARES), kThreads = 2 * ROWS * SPLIT;
constexpr int kSlots = STAGES >= kSteps ? kSteps : STAGES, kAhead = STAGES >= kSteps ? kSteps : STAGES - 1;
constexpr int kPlaneBytes = COLUMNS * kWeightLine, kWeightBytes = kImages * kPlaneBytes, kRowBytes = ROWS * kLine;  // of a slab
constexpr int kPitch = COLUMNS + (40 - COLUMNS % 32) % 32;  // floats of a row of sums: 8 more than whole rounds of the banks
constexpr int kRing = SPLIT * kSlots * (kWeightBytes + kRowBytes), kSums = SPLIT * ROWS * kPitch * 4;
constexpr int kTiles = COLUMNS / 8;
constexpr int kOutputs = (ROWS / SHARES * COLUMNS / 4 + kThreads - 1) / kThreads;  // of a thread, four adjacent ones each
static_assert(IN_FEATURES % (kSlab * SPLIT * SHARES) == 0 && ROWS % 64 == 0 && ROWS % SHARES == 0 && OUT_FEATURES % COLUMNS == 0, "whole slabs and tiles");

// Where a piece of 16 bytes lies in a slab: turned by row, of halves as wgmma reads them.
__device__ __forceinline__ u32 turned(int line, int piece) { return line * kWeightLine + ((piece ^ (line & 7)) << 4); }
__device__ __forceinline__ u32 row_piece(int row, int piece) {
    return kFloat ? row * kLine + ((piece ^ ((row & 1) << 2 | (row >> 1 & 3))) << 4) : turned(row, piece);
}

// Ask for SPLIT slabs of the block's weights.
__device__ __forceinline__ void bring_weights(u32 to, const char* from) {
    constexpr int kPieces = COLUMNS * kImages * 8;
#pragma unroll
    for (int n = 0; n < (SPLIT * kPieces + kThreads - 1) / kThreads; ++n) {
        const int at = n * kThreads + threadIdx.x, slab = at / kPieces, line = at % kPieces / 8, piece = at % 8;
        if (SPLIT * kPieces % kThreads == 0 || slab < SPLIT)
            copy_async<16>(to + slab * kWeightBytes + line % kImages * kPlaneBytes + turned(line / kImages, piece),
                           from + line * (IN_FEATURES * 2) + slab * kWeightLine + piece * 16, 16);
    }
}

// The same of its rows; those past the end are filled with zeros.
__device__ __forceinline__ void bring_rows(u32 to, const char* from, long long stride, long long inside) {
    constexpr int kPieces = kLine / 16;
#pragma unroll
    for (int n = 0; n < (SPLIT * ROWS * kPieces + kThreads - 1) / kThreads; ++n) {
        const int at = n * kThreads + threadIdx.x, slab = at / (ROWS * kPieces), row = at / kPieces % ROWS, piece = at % kPieces;
        if (SPLIT * ROWS * kPieces % kThreads == 0 || slab < SPLIT)
            copy_async<16>(to + slab * kRowBytes + row_piece(row, piece), from + row * stride + slab * kLine + piece * 16, row < inside ? 16 : 0);
    }
}

// sums += rows * weights of a slab; of halves both are read from shared memory.
__device__ __forceinline__ void multiply(float (&sums)[kTiles][4], u32 rows, u32 weights, int warp, int g, int t) {
    const u64 of_weights = rows_descriptor(weights);
    if constexpr (kFloat) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 hi[2][4], lo[kPairs ? 2 : 1][4];  // of a lane for 32 inputs
            int exponent[2];
            const int row = warp % (ROWS / 16) * 16 + g;
            scale_rows(hi, lo, exponent, [&](int h, int s) { return rows + row_piece(row + h * 8, half * 8 + s * 4 + t); });
            const float back[2] = {power(-exponent[0] - kWeightShift), power(-exponent[1] - kWeightShift)};
            float products[kTiles][4];
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const u64 high = of_weights + ((half * 64 + s * 32) >> 4), low = high + (kPlaneBytes >> 4);
                if constexpr (kPairs) {
                    Wgmma<COLUMNS>::template run<0>(products, lo[s], high, s > 0);
                    Wgmma<COLUMNS>::template run<0>(products, hi[s], low, 1);
                }
                Wgmma<COLUMNS>::template run<0>(products, hi[s], high, kPairs || s > 0);
            }
            wgmma_commit();
            wgmma_wait<0>();  // other warpgroups make use of the time
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[n][e] = fmaf(products[n][e], back[e / 2], sums[n][e]);
        }
    } else {
        const u64 of_rows = rows_descriptor(rows + warp % (ROWS / 16) / 4 * 64 * kLine);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 4; ++s) WgmmaShared<COLUMNS>::add(sums, of_rows + (s * 32 >> 4), of_weights + (s * 32 >> 4));
        wgmma_commit();
        wgmma_wait<0>();
    }
}

// Four sums that lie at `place` in a block of the cluster.
__device__ __forceinline__ void add_sums(float (&sum)[4], const float* place, int block) {
    float4 more;
    if constexpr (SHARES > 1) {
        asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5; ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [there]; }"
                     : "=f"(more.x), "=f"(more.y), "=f"(more.z), "=f"(more.w)
                     : "r"(shared_address(place)), "r"(block));
    } else {
        more = *reinterpret_cast<const float4*>(place);
    }
    sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
}

__device__ __forceinline__ void all_meet() {
#if SHARES > 1
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
#else
    __syncthreads();
#endif
}

extern "C" __global__ void
#if SHARES > 1
__cluster_dims__(SHARES, 1, 1)
#endif
__launch_bounds__(kThreads, RESIDENT)
some_rows(const char* x, const char* weight, const float* __restrict__ columns, const char* residual, char* y,
          long long rows, long long x_stride, long long residual_stride) {
    extern __shared__ __align__(1024) char memory[];  // weights | rows, or sums in their place; behind them the block's part of `columns`
    float* const sums_here = reinterpret_cast<float*>(memory);
    float* const columns_here = reinterpret_cast<float*>(memory + (kRing > kSums ? kRing : kSums));
    const u32 weights_at = shared_address(memory), rows_at = weights_at + kSlots * SPLIT * kWeightBytes;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int part = warp / (ROWS / 16);
    const int share = blockIdx.x % SHARES, column0 = blockIdx.x / SHARES * COLUMNS, slab0 = share * kSteps * SPLIT;
    const long long row0 = (long long)blockIdx.y * ROWS, inside = rows - row0;
    const char* const own_weights = weight + (long long)column0 * kImages * IN_FEATURES * 2 + slab0 * kWeightLine;
    const char* const own_rows = x + row0 * x_stride + slab0 * kLine;

#pragma unroll 1
    for (int k = 0; k < kAhead; ++k) bring_weights(weights_at + k * SPLIT * kWeightBytes, own_weights + k * SPLIT * kWeightLine);
    for (int k = threadIdx.x; k < 2 * COLUMNS; k += kThreads) columns_here[k] = columns[k / COLUMNS * OUT_FEATURES + column0 + k % COLUMNS];
    wait_for_kernels_before();
#pragma unroll 1
    for (int k = 0; k < kAhead; ++k) {
        bring_rows(rows_at + k * SPLIT * kRowBytes, own_rows + k * SPLIT * kLine, x_stride, inside);
        commit_copies();
    }
    float sums[kTiles][4] = {};
#pragma unroll 1
    for (int k = 0; k < kSteps; ++k) {
        wait_copies<kAhead - 1>();
        fence_async();  // the copies come before what wgmma reads
        __syncthreads();
        if (kAhead < kSteps && k + kAhead < kSteps) {
            const int slot = (k + kAhead) % kSlots * SPLIT, slab = (k + kAhead) * SPLIT;
            bring_weights(weights_at + slot * kWeightBytes, own_weights + slab * kWeightLine);
            bring_rows(rows_at + slot * kRowBytes, own_rows + slab * kLine, x_stride, inside);
        }
        commit_copies();
        const int slot = k % kSlots * SPLIT + part;
        multiply(sums, rows_at + slot * kRowBytes, weights_at + slot * kWeightBytes, warp, g, t);
    }
    __syncthreads();  // sums take the place of slabs
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            *reinterpret_cast<float2*>(sums_here + (warp * 16 + h * 8 + g) * kPitch + n * 8 + t * 2) = make_float2(sums[n][2 * h], sums[n][2 * h + 1]);
    const int row_here = share * (ROWS / SHARES);  // the first of those whose sums this block adds up
    Vector<4 * kElem> added[kOutputs] = {};
    if constexpr (RESIDUAL)
#pragma unroll
        for (int n = 0; n < kOutputs; ++n) {
            const int at = (n * kThreads + threadIdx.x) * 4, row = row_here + at / COLUMNS;
            if (at < ROWS / SHARES * COLUMNS && row < inside)
                load_now(added[n], residual + (row0 + row) * residual_stride + (column0 + at % COLUMNS) * kElem);
        }
    all_meet();

#pragma unroll
    for (int n = 0; n < kOutputs; ++n) {
        const int at = (n * kThreads + threadIdx.x) * 4, row = row_here + at / COLUMNS, column = at % COLUMNS;
        if (at >= ROWS / SHARES * COLUMNS || row >= inside) break;
        float sum[4] = {};
#pragma unroll
        for (int s = 0; s < SPLIT * SHARES; ++s) add_sums(sum, sums_here + (s % SPLIT * ROWS + row) * kPitch + column, s / SPLIT);
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k] = activate<ACTIVATION, !kFloat>(fmaf(sum[k], columns_here[column + k], columns_here[COLUMNS + column + k]));
        Vector<4 * kElem> out;
#pragma unroll
        for (int k = 0; k < kElem; ++k) {
            if constexpr (kFloat) out.w[k] = __float_as_uint(sum[k] + __uint_as_float(added[n].w[k]));
            else out.w[k] = round2(sum[2 * k] + low_half(added[n].w[k]), sum[2 * k + 1] + high_half(added[n].w[k]));
        }
        *reinterpret_cast<Vector<4 * kElem>*>(y + (row0 + row) * (OUT_FEATURES * kElem) + (column0 + column) * kElem) = out;
    }
    if constexpr (SHARES > 1) all_meet();  // no block ends while others read its sums
}
