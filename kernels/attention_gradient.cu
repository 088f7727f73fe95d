// The gradients of y = softmax(scale * q kᵀ) v of halves with respect to q, k and v, for heads of 64 features and as many queries as keys, on sm_90a.
//
//     p  = exp(scale * q kᵀ - l)       l: the logarithm of a query's sum of exponentials; short_attention.cu leaves that by base 2
//     ds = p * (dy vᵀ - d)             d: the sum over features of dy * y
//     dv = pᵀ dy     dk = scale * dsᵀ q     dq = scale * ds k
//
// A block takes head after head. The copy engine brings its q, k, v and dy; three warps beside it sum dy * y. Three warpgroups take tiles of 64 keys,
// then of 64 queries, in turn across heads. A tile of keys multiplies its keys and values with all queries and gradients, 32 at a time, which gives pᵀ and
// dsᵀ; a tile of queries does the same with all keys and values for ds. So p and ds are accumulators that become operands
// without an exchange between warps, and every result is summed in one order. Two products are computed twice for that.
//
//     slot: ROWS rows of 64 halves, 128 bytes, in the order of wgmma_rows.cuh; rows that are not there are zeros
//     a tile of 64 rows may read beyond its slot: values from there reach no row that is stored
//
// Sums over tokens, for the bias of a projection to q, k and v: of dq by the warps of queries, in float32 before they are rounded. That of dv is that of dy,
// as a query's p add up to one, and the three warps have read dy. That of dk is zero, as a query's ds add up to nothing. A block stays with one head.
//
// Floor: the bytes of q, k, v, y, dy and the three gradients; or seven products of 64 x ROWS x 64 for each 64 tokens.
//
// sums_of_q, _k, _v: (blocks / heads, heads, 64) float32, to be added up, or null: rows and heads are as far apart as tokens and heads of the gradients.
//
// Defines: MODE (0 fp16, 1 bf16), ROWS (of a slot, a multiple of 16, above 256 of 32), TILES (of 64 rows), HEADS (whose slots are in shared memory at once).
// Limits: sm_90a; more than ROWS - 32 and up to ROWS tokens; scale > 0; features adjacent, rows at multiples of 16 bytes. The number of
// blocks is a multiple of that of an image's heads.
#include "accumulator_sums.cuh"
#include "tensor_map.cuh"
#include "wgmma_rows.cuh"

typedef long long i64;

constexpr int kHead = 64, kRow = 2 * kHead, kSlot = ROWS * kRow, kTiles = kHead / 8;
constexpr int kSpare = (TILES * 64 - ROWS) * kRow;
constexpr int kChunk = 32, kWhole = ROWS / kChunk, kRest = ROWS % kChunk;
constexpr int kWarpgroups = 3, kUnits = 2 * TILES;
constexpr int kRegisters = 144, kBringing = 80;  // of a multiplying thread, and of one that brings; together all registers
constexpr int kQueryWarps = 4 * kWarpgroups, kGradientWarps = 3;  // of which each has a row of sums in shared memory
constexpr int kBoxes = (ROWS + 255) / 256, kBoxRows = ROWS / kBoxes;
constexpr float kLog2E = 1.44269504088896341f;
static_assert(ROWS % 16 == 0 && ROWS % kBoxes == 0, "whole steps and boxes");

// Where one of q, k, v and gradients lies, or is to lie: elements from an image, a head, a token to the next.
struct Places { i64 image, head, token; };

// What a tile multiplies: rows of the first two slots with all rows of the others.
struct Operands { u32 rows, more_rows, columns, more_columns; };

// Sums of the two products of a tile: p times `more_columns`, which tiles of queries leave out, and ds times `columns`.
struct Sums { float of_p[kTiles][4], of_ds[kTiles][4]; };

// N columns of p and ds, from the `at`-th on, and their products. `moments` holds l and d of queries, which are the rows or the columns here.
template <int N, bool OF_KEYS>
__device__ __forceinline__ void add_columns(Sums& sums, const Operands& given, int at, u32 moments, const float (&l)[2], const float (&d)[2], float scale, int tokens, bool first) {
    float scores[N / 8][4], products[N / 8][4];
    const u64 columns = rows_descriptor(given.columns + at * kRow), more_columns = rows_descriptor(given.more_columns + at * kRow);
    const int t = threadIdx.x % 4;
    const auto of_query = [&](int n, int h, float (&number)[2], const float (&own)[2], int which) {  // l or d of two elements side by side
        u32 words[4];
        if (OF_KEYS) load_shared(words, moments + (at + n * 8 + 2 * t) * 8);
#pragma unroll
        for (int e = 0; e < 2; ++e) number[e] = OF_KEYS ? __uint_as_float(words[2 * e + which]) : own[h];
    };
    const auto add = [&](float (&to)[kTiles][4], const u32 (&halves)[N / 8][2], u64 rows) {  // to += halves * rows, only queued
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < N / 16; ++s) {
            const u32 a[4] = {halves[2 * s][0], halves[2 * s][1], halves[2 * s + 1][0], halves[2 * s + 1][1]};
            multiply_rows(to, a, rows_further(rows, s * 16 * kRow), !first || s > 0);
        }
        wgmma_commit();
    };
    wgmma_fence();
    multiply_by_rows<N, 0>(scores, rows_descriptor(given.rows), columns);
    wgmma_commit();
    multiply_by_rows<N, 0>(products, rows_descriptor(given.more_rows), more_columns);
    wgmma_commit();
    wgmma_wait<1>();
    if (!OF_KEYS && at + N > tokens)  // with keys that are not there
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (at + n * 8 + 2 * t + e % 2 >= tokens) scores[n][e] = -infinity();
    u32 p[N / 8][2], ds[N / 8][2];
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float shift[2];
            of_query(n, h, shift, l, 0);
#pragma unroll
            for (int e = 0; e < 2; ++e) scores[n][2 * h + e] = exp2_fast(fmaf(scores[n][2 * h + e], scale, -shift[e]));
            if (OF_KEYS) p[n][h] = round2(scores[n][2 * h], scores[n][2 * h + 1]);
        }
    if constexpr (OF_KEYS) {
        add(sums.of_p, p, more_columns);
        wgmma_wait<1>();
    } else {
        wgmma_wait<0>();
    }
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float shift[2];
            of_query(n, h, shift, d, 1);
            ds[n][h] = round2(scores[n][2 * h] * (products[n][2 * h] - shift[0]), scores[n][2 * h + 1] * (products[n][2 * h + 1] - shift[1]));
        }
    add(sums.of_ds, ds, columns);
    wgmma_wait<0>();
}

// Stores a warp's 16 rows from `to` on, the sums times `factor`. Four lanes exchange words, so that each stores 16 bytes side by side.
__device__ __forceinline__ void store_rows(u16* to, i64 step, const float (&sums)[kTiles][4], float factor, int inside) {
    const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const bool odd = t & 1, upper = t & 2;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 own[4], pairs[2][2], got[2];
#pragma unroll
            for (int n = 0; n < 4; ++n) own[n] = round2(sums[half * 4 + n][2 * h] * factor, sums[half * 4 + n][2 * h + 1] * factor);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const u32 other = __shfl_xor_sync(0xffffffffu, odd ? own[2 * k] : own[2 * k + 1], 1);
                pairs[k][0] = odd ? other : own[2 * k], pairs[k][1] = odd ? own[2 * k + 1] : other;
            }
#pragma unroll
            for (int k = 0; k < 2; ++k) got[k] = __shfl_xor_sync(0xffffffffu, upper ? pairs[0][k] : pairs[1][k], 2);
            Vector<16> all;
#pragma unroll
            for (int k = 0; k < 2; ++k) all.w[k] = upper ? got[k] : pairs[0][k], all.w[2 + k] = upper ? pairs[1][k] : got[k];
            if (g + 8 * h < inside) store_now(to + (g + 8 * h) * step + (half * 4 + t) * 8, all);
        }
}

// Adds to a warp's sums, two columns a lane, what its 16 rows have; those from the inside-th on are not there.
__device__ __forceinline__ void add_rows(u32 to, const float (&sums)[kTiles][4], int inside) {
    const int lane = threadIdx.x % 32, g = lane >> 2;
    float own[2 * kTiles];
#pragma unroll
    for (int c = 0; c < 2 * kTiles; ++c) own[c] = (g < inside ? sums[c / 2][c % 2] : 0.0f) + (g + 8 < inside ? sums[c / 2][2 + c % 2] : 0.0f);
    sum_over_rows(own, lane);
    u32 before[2];
    load_shared_pair(before, to + lane * 8);
    store_shared_pair(to + lane * 8, __float_as_uint(__uint_as_float(before[0]) + own[0]), __float_as_uint(__uint_as_float(before[1]) + own[1]));
}

extern "C" __global__ void __launch_bounds__(128 * (kWarpgroups + 1), 1)
attention_gradient(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap dy,
                   const u16* __restrict__ y, const float* __restrict__ log_sums, u16* __restrict__ dq, u16* __restrict__ dk, u16* __restrict__ dv, float* __restrict__ sums_of_q, float* __restrict__ sums_of_k,
                   float* __restrict__ sums_of_v, Places of_y, Places of_gradients, i64 tokens, i64 heads, i64 all_heads, int scale_bits) {
    extern __shared__ __align__(1024) char memory[];
    // slots of q, k, v and dy, a head after the other | l and d of queries, a head after the other | a row of sums for each warp
    // | barriers: slots have arrived, l and d are there, both are free
    const u32 slots = shared_address(memory), moments_at = slots + HEADS * 4 * kSlot + kSpare;
    const u32 sums_at = moments_at + HEADS * TILES * 64 * 8, arrived = sums_at + (kQueryWarps + kGradientWarps) * kHead * 4, summed = arrived + 8 * HEADS, freed = summed + 8 * HEADS;
    if (threadIdx.x == 0) {
        for (int n = 0; n < HEADS; ++n) barrier_init(arrived + 8 * n, 1), barrier_init(summed + 8 * n, 96), barrier_init(freed + 8 * n, 128 * kUnits);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    wait_for_kernels_before();
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    const auto slot = [&](int turn, int n) { return slots + (turn % HEADS * 4 + n) * kSlot; };
    const auto moments_of = [&](int turn) { return moments_at + turn % HEADS * (TILES * 64 * 8); };
    const auto wait_freed = [&](int turn) { barrier_wait(freed + 8 * (turn % HEADS), ~(turn / HEADS) & 1); };

    if (warpgroup == kWarpgroups) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kBringing));
        const int warp = threadIdx.x / 32 % 4;
        if (threadIdx.x % 128 == 0) {
            int turn = 0;
#pragma unroll 1
            for (int at = blockIdx.x; at < (int)all_heads; at += gridDim.x, ++turn) {
                const u32 barrier = arrived + 8 * (turn % HEADS);
                wait_freed(turn);
                barrier_expect(barrier, 4 * kSlot);
#pragma unroll
                for (int b = 0; b < kBoxes; ++b) {
                    const int row = b * kBoxRows, head = at % (int)heads, image = at / (int)heads;
                    copy_head(slot(turn, 0) + row * kRow, q, row, head, image, barrier);
                    copy_head(slot(turn, 1) + row * kRow, k, row, head, image, barrier);
                    copy_head(slot(turn, 2) + row * kRow, v, row, head, image, barrier);
                    copy_head(slot(turn, 3) + row * kRow, dy, row, head, image, barrier);
                }
            }
        } else if (warp > 0) {
            constexpr int kTogether = 8;  // rows of a lane that are on their way at once
            int turn = 0;
            float column_sums[8] = {};  // over the lane's rows
#pragma unroll 1
            for (int at = blockIdx.x; at < (int)all_heads; at += gridDim.x, ++turn) {
                const u16* const of_head = y + at / (int)heads * of_y.image + at % (int)heads * of_y.head + lane % 8 * 8;
#pragma unroll 1
                for (int row = (warp - 1) * 4 + lane / 8; row < ROWS; row += kTogether * 12) {
                    Vector<16> values[kTogether] = {};
                    float l[kTogether];
#pragma unroll
                    for (int n = 0; n < kTogether; ++n) {
                        l[n] = infinity();  // exp(-infinity) = 0 for a query that is not there
                        if (row + n * 12 < tokens) {
                            load_now(values[n], reinterpret_cast<const char*>(of_head + (row + n * 12) * of_y.token));
                            l[n] = log_sums[at * tokens + row + n * 12];
                        }
                    }
                    barrier_wait(arrived + 8 * (turn % HEADS), turn / HEADS & 1);
#pragma unroll
                    for (int n = 0; n < kTogether; ++n) {
                        const int own = row + n * 12;
                        if (own >= ROWS) break;
                        u32 gradients[4];
                        load_shared(gradients, slot(turn, 3) + row_piece_at(own, lane % 8));
                        float sum = 0.0f;
#pragma unroll
                        for (int w = 0; w < 4; ++w) {
                            const float low = low_half(gradients[w]), high = high_half(gradients[w]);
                            sum = fmaf(low_half(values[n].w[w]), low, fmaf(high_half(values[n].w[w]), high, sum));
                            column_sums[2 * w] += low, column_sums[2 * w + 1] += high;
                        }
#pragma unroll
                        for (int apart = 1; apart < 8; apart *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
                        if (lane % 8 == 0) store_shared_pair(moments_of(turn) + own * 8, __float_as_uint(l[n]), __float_as_uint(sum));
                    }
                }
                barrier_arrive(summed + 8 * (turn % HEADS));
            }
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                column_sums[c] += __shfl_xor_sync(0xffffffffu, column_sums[c], 8);
                column_sums[c] += __shfl_xor_sync(0xffffffffu, column_sums[c], 16);
                if (lane < 8) store_shared(sums_at + ((kQueryWarps + warp - 1) * kHead + lane * 8 + c) * 4, __float_as_uint(column_sums[c]));
            }
            named_barrier_arrive(1, 32 * (kQueryWarps + kGradientWarps));
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
    const int warp = threadIdx.x / 32 % 4, g = lane >> 2;
    const float scale = __int_as_float(scale_bits), scale_of_two = scale * kLog2E;
    const u32 own_sums = sums_at + (warpgroup * 4 + warp) * kHead * 4;
    store_shared_pair(own_sums + lane * 8, 0, 0);
#pragma unroll 1
    for (int unit = warpgroup;; unit += kWarpgroups) {
        const int turn = unit / kUnits, tile = unit % TILES, first = tile * 64 + warp * 16;
        const int at = blockIdx.x + turn * gridDim.x, phase = turn / HEADS & 1;
        if (at >= (int)all_heads) break;
        barrier_wait(arrived + 8 * (turn % HEADS), phase);
        barrier_wait(summed + 8 * (turn % HEADS), phase);
        const i64 start = at / (int)heads * of_gradients.image + at % (int)heads * of_gradients.head + first * of_gradients.token;
        const int inside = (int)tokens - first;
        const u32 own = tile * 64 * kRow;
        Sums sums;
        float l[2] = {}, d[2] = {};
        if (unit % kUnits < TILES) {
            const Operands of_keys = {slot(turn, 1) + own, slot(turn, 2) + own, slot(turn, 0), slot(turn, 3)};
#pragma unroll 1
            for (int c = 0; c < kWhole; ++c) add_columns<kChunk, true>(sums, of_keys, c * kChunk, moments_of(turn), l, d, scale_of_two, (int)tokens, c == 0);
            if constexpr (kRest > 0) add_columns<kRest, true>(sums, of_keys, kWhole * kChunk, moments_of(turn), l, d, scale_of_two, (int)tokens, kWhole == 0);
            barrier_arrive(freed + 8 * (turn % HEADS));
            store_rows(dv + start, of_gradients.token, sums.of_p, 1.0f, inside);
            store_rows(dk + start, of_gradients.token, sums.of_ds, scale, inside);
        } else {
            const Operands of_queries = {slot(turn, 0) + own, slot(turn, 3) + own, slot(turn, 1), slot(turn, 2)};
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                u32 words[2];
                load_shared_pair(words, moments_of(turn) + (first + g + 8 * h) * 8);
                l[h] = __uint_as_float(words[0]), d[h] = __uint_as_float(words[1]);
            }
#pragma unroll 1
            for (int c = 0; c < kWhole; ++c) add_columns<kChunk, false>(sums, of_queries, c * kChunk, moments_of(turn), l, d, scale_of_two, (int)tokens, c == 0);
            if constexpr (kRest > 0) add_columns<kRest, false>(sums, of_queries, kWhole * kChunk, moments_of(turn), l, d, scale_of_two, (int)tokens, kWhole == 0);
            barrier_arrive(freed + 8 * (turn % HEADS));
            store_rows(dq + start, of_gradients.token, sums.of_ds, scale, inside);
            add_rows(own_sums, sums.of_ds, inside);
        }
    }
    named_barrier_wait(1, 32 * (kQueryWarps + kGradientWarps));
    if (sums_of_q == nullptr || threadIdx.x >= kHead) return;
    const auto sum_of = [&](int from, int count) {  // of a column of some warps
        float sum = 0.0f;
        for (int n = from; n < from + count; ++n) sum += __uint_as_float(load_shared_one(sums_at + (n * kHead + threadIdx.x) * 4));
        return sum;
    };
    const i64 place = blockIdx.x / (int)heads * of_gradients.token + blockIdx.x % (int)heads * of_gradients.head + threadIdx.x;
    sums_of_q[place] = scale * sum_of(0, kQueryWarps);
    sums_of_k[place] = 0.0f;
    sums_of_v[place] = sum_of(kQueryWarps, kGradientWarps);
}
