// y = softmax(scale * q kᵀ) v of float32 on tensor cores, for heads of 64 features on sm_90a: three warpgroups multiply 64 queries each, as in
// short_attention.cu, and a fourth brings what they need, as halves. PyTorch has products of float32 on the ordinary cores.
//
// A block stays on its multiprocessor and takes head after head. Keys, queries and values of a head pass one after the other through the slots of
// a ring. The threads that load keys and values read them twice, the second time from the L2 cache: for their largest element, which decides the
// power of two that brings them into the range of fp16, and to scale, split and store them. A query has a power of two of its own.
//
//     slot: ROWS rows of 64 halves, 128 bytes, in the order of wgmma_rows.cuh, then in MODE 3 as many with the low parts
//
// MODE 3 splits into pairs hi + lo and adds lo*hi + hi*lo + hi*hi, MODE 2 (tf32 grade) keeps hi. Exponentials, at most 1, are scaled by 2^11. The
// products of CHUNK keys with values are added to float32 sums with rounding. Infinities and NaN do not come out finite.
//
// For 128 images of 197 tokens and 6 heads an H200 takes 144 us, and 99 in tf32 grade; bringing takes most of it (139 us in tf32
// grade by batches of 4), and the last 5 queries have a tile for themselves.
//
// Defines: MODE, CHUNK (a multiple of 16, up to 208), CHUNKS, ROWS (a multiple of 16), TILES (of queries), SLOTS (3 or more), BATCH (rows that a
// loading thread has requested at once).
// Limits: sm_90a; keys up to CHUNK*CHUNKS, which is up to ROWS, and less than 16*CHUNKS fewer; queries up to ROWS; scale > 0; features adjacent,
// rows at multiples of 16 bytes.
#include "mode.cuh"
#include "scale.cuh"
#include "wgmma_rows.cuh"

typedef long long i64;

constexpr int kHead = 64, kRow = 2 * kHead, kImage = ROWS * kRow, kSlot = kPairs ? 2 * kImage : kImage, kTiles = kHead / 8, kChunkTiles = CHUNK / 8;
constexpr int kSpare = TILES * 64 > ROWS ? (TILES * 64 - ROWS) * kRow : 0;
constexpr int kWarpgroups = 3, kRegisters = 144, kBringing = 80;  // of a multiplying thread, and of a loading thread; together all registers
constexpr int kShift = 11;                                        // of exponentials
constexpr float kLog2E = 1.44269504088896341f;

struct Strides {
    i64 batch, head, token;  // elements
};

// The n-th of what passes through the ring, from both sides; exponents of its rows, or one of them all in the place of the first.
struct Ring {
    u32 slots, arrived, freed, exponents;
    __device__ __forceinline__ u32 slot(int n) const { return slots + n % SLOTS * kSlot; }
    __device__ __forceinline__ u32 exponent(int n, int row) const { return exponents + (n % SLOTS * TILES * 64 + row) * 4; }
    __device__ __forceinline__ void wait_arrived(int n) const { barrier_wait(arrived + 8 * (n % SLOTS), n / SLOTS & 1); }
    __device__ __forceinline__ void wait_freed(int n) const { barrier_wait(freed + 8 * (n % SLOTS), ~(n / SLOTS) & 1); }
    __device__ __forceinline__ void free(int n) const { barrier_arrive(freed + 8 * (n % SLOTS)); }
    __device__ __forceinline__ void hand_over(int n) const {  // wgmma reads what this thread has stored
        fence_async();
        barrier_arrive(arrived + 8 * (n % SLOTS));
    }
};

__device__ __forceinline__ float largest(const float4& x) { return fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))); }

// The part of a matrix that a thread of the fourth warpgroup loads: four features of every eighth row. Missing rows are zeros.
struct Share {
    const float* from;
    i64 token;
    int rows;
    __device__ __forceinline__ int row(int n) const { return n * 8 + threadIdx.x % 128 / 16; }
    __device__ __forceinline__ float4 load(int n) const {
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (row(n) < rows) x = *reinterpret_cast<const float4*>(from + row(n) * token + threadIdx.x % 16 * 4);
        return x;
    }
    __device__ __forceinline__ void store(u32 slot, int n, const float4& x, float by) const {
        u32 hi[2], lo[2];
        split2(x.x * by, x.y * by, hi[0], lo[0]);
        split2(x.z * by, x.w * by, hi[1], lo[1]);
        const u32 to = slot + row_piece_at(row(n), threadIdx.x % 16 / 2) + threadIdx.x % 2 * 8;
        store_shared_pair(to, hi[0], hi[1]);
        if constexpr (kPairs) store_shared_pair(to + kImage, lo[0], lo[1]);
    }
};

// Each row with an exponent of its own.
__device__ __forceinline__ void bring_queries(const Ring& ring, int n, const Share& share) {
    ring.wait_freed(n);
#pragma unroll 1
    for (int first = 0; first < ROWS / 8; first += BATCH) {
        float4 x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) x[i] = share.load(first + i);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (first + i >= ROWS / 8) continue;
            float most = largest(x[i]);
#pragma unroll
            for (int over = 1; over < 16; over *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, over));
            const int exponent = exponent_for(most);
            share.store(ring.slot(n), first + i, x[i], power(exponent));
            if (threadIdx.x % 16 == 0 && share.row(first + i) < share.rows) store_shared(ring.exponent(n, share.row(first + i)), exponent);
        }
    }
    ring.hand_over(n);
}

// All rows with one exponent; the maxima of the warps meet in `met`.
__device__ __forceinline__ void bring_whole(const Ring& ring, int n, const Share& share, u32 met) {
    float most = 0.0f;
#pragma unroll 1
    for (int first = 0; first < ROWS / 8; first += BATCH) {
        float4 x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) x[i] = share.load(first + i);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) most = fmaxf(most, largest(x[i]));
    }
    const u32 of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
    if (threadIdx.x % 32 == 0) store_shared(met + threadIdx.x % 128 / 32 * 4, of_warp);
    named_barrier_wait(1, 128);
    u32 of_warps[4];
    load_shared(of_warps, met);
    const int exponent = min(exponent_for(__uint_as_float(max(max(of_warps[0], of_warps[1]), max(of_warps[2], of_warps[3])))), 126 - kShift);
    const float by = power(exponent);
    ring.wait_freed(n);
#pragma unroll 1
    for (int first = 0; first < ROWS / 8; first += BATCH) {
        float4 x[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) x[i] = share.load(first + i);
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (first + i < ROWS / 8) share.store(ring.slot(n), first + i, x[i], by);
    }
    if (threadIdx.x % 128 == 0) store_shared(ring.exponent(n, 0), exponent);
    ring.hand_over(n);
}

// c[O..] = a * bᵀ, or c[O..] += a * bᵀ: 64 rows from `a` on, N rows from `b` on.
template <int N, int O, int T>
__device__ __forceinline__ void multiply_scores(float (&c)[T][4], u32 a, u32 b, bool accumulate) {
#pragma unroll
    for (int s = 0; s < 4; ++s) WgmmaShared<N>::template run<O>(c, rows_descriptor(a + s * 32), rows_descriptor(b + s * 32), accumulate || s > 0);
}

extern "C" __global__ void __launch_bounds__(128 * (kWarpgroups + 1), 1)
attention(const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v, float* __restrict__ y, Strides of_q, Strides of_k,
                Strides of_v, i64 queries, i64 keys, i64 heads, i64 all_heads, int scale_bits) {
    extern __shared__ __align__(1024) char memory[];
    Ring ring;
    ring.slots = shared_address(memory), ring.arrived = ring.slots + SLOTS * kSlot + kSpare, ring.freed = ring.arrived + 8 * SLOTS;
    const u32 met = ring.freed + 8 * SLOTS;  // maxima of the four loading warps, for keys and for values
    ring.exponents = met + 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < SLOTS; ++s) barrier_init(ring.arrived + 8 * s, 128), barrier_init(ring.freed + 8 * s, 128 * TILES);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    wait_for_kernels_before();
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0), lane = threadIdx.x % 32;

    if (warpgroup == kWarpgroups) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kBringing));
        int n = 0;
        const auto share_of = [&](const float* from, const Strides& of, int at, i64 rows) {
            return Share{from + at / (int)heads * of.batch + at % (int)heads * of.head, of.token, (int)rows};
        };
#pragma unroll 1
        for (int at = blockIdx.x; at < (int)all_heads; at += gridDim.x) {
            bring_whole(ring, n++, share_of(k, of_k, at, keys), met);
            bring_queries(ring, n++, share_of(q, of_q, at, queries));
            bring_whole(ring, n++, share_of(v, of_v, at, keys), met + 16);
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
    const int warp = threadIdx.x / 32 % 4, g = lane >> 2, t = lane & 3;
    const auto turn_of = [](int unit) { return 2 + unit % kWarpgroups; };  // a barrier: it is the unit's turn
    if (warpgroup == kWarpgroups - 1) named_barrier_arrive(turn_of(0), 256);
#pragma unroll 1
    for (int unit = warpgroup;; unit += kWarpgroups) {
        const int turn = unit / TILES, tile = unit % TILES;
        const int at = blockIdx.x + turn * gridDim.x;
        if (at >= (int)all_heads) break;
        const int of_keys = 3 * turn, of_queries = of_keys + 1, of_values = of_keys + 2;
        const u32 query_rows = ring.slot(of_queries) + tile * 64 * kRow;
        const i64 first = tile * 64 + warp * 16 + g;
        named_barrier_wait(turn_of(unit), 256);  // first: who had the turn before has seen all that came before arrive
        ring.wait_arrived(of_keys);
        ring.wait_arrived(of_queries);
        const float of_all = power(-(int)load_shared_one(ring.exponent(of_keys, 0))) * __int_as_float(scale_bits) * kLog2E;
        float scale[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) scale[h] = first + 8 * h < queries ? power(-(int)load_shared_one(ring.exponent(of_queries, first + 8 * h))) * of_all : 0.0f;

        float out[kTiles][4] = {}, most[2] = {-infinity(), -infinity()}, total[2] = {};
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            float scores[kChunkTiles][4];
            const u32 key_rows = ring.slot(of_keys) + chunk * CHUNK * kRow, value_rows = ring.slot(of_values) + chunk * CHUNK * kRow;
            wgmma_fence();
            if constexpr (kPairs) {
                multiply_scores<CHUNK / 2, 0>(scores, query_rows + kImage, key_rows, false);
                multiply_scores<CHUNK / 2, kChunkTiles / 2>(scores, query_rows + kImage, key_rows + CHUNK / 2 * kRow, false);
                multiply_scores<CHUNK / 2, 0>(scores, query_rows, key_rows + kImage, true);
                multiply_scores<CHUNK / 2, kChunkTiles / 2>(scores, query_rows, key_rows + kImage + CHUNK / 2 * kRow, true);
            }
            multiply_scores<CHUNK / 2, 0>(scores, query_rows, key_rows, kPairs);
            multiply_scores<CHUNK / 2, kChunkTiles / 2>(scores, query_rows, key_rows + CHUNK / 2 * kRow, kPairs);
            wgmma_commit();
            wgmma_wait<0>();
            if (chunk == 0) named_barrier_arrive(turn_of(unit + 1), 256);
            const int left = (int)keys - chunk * CHUNK - 2 * t;  // a lane's keys n*8 + e are there if they are fewer
            constexpr int kSure = kChunkTiles > 2 * CHUNKS ? kChunkTiles - 2 * CHUNKS : 0;  // tiles whose keys are all there
            if (chunk == CHUNKS - 1) {
                ring.free(of_keys);
                ring.free(of_queries);
            }
            float keep[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float highest = most[h];
#pragma unroll
                for (int n = 0; n < kChunkTiles; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& score = scores[n][2 * h + e];
                        if (n >= kSure && n * 8 + e >= left) score = -infinity();
                        highest = fmaxf(highest, score);
                    }
                highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
                highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
                keep[h] = chunk > 0 ? exp2_fast((most[h] - highest) * scale[h]) : 0.0f;
                most[h] = highest;
                total[h] *= keep[h];
            }
            u32 hi[kChunkTiles][2], lo[kPairs ? kChunkTiles : 1][2];
#pragma unroll
            for (int n = 0; n < kChunkTiles; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float one = exp2_fast(fmaf(scores[n][2 * h] - most[h], scale[h], kShift));  // exact for the largest, however large
                    float two = exp2_fast(fmaf(scores[n][2 * h + 1] - most[h], scale[h], kShift));
                    if (n >= kSure && n * 8 >= left) one = 0.0f;  // where the scale is zero too
                    if (n >= kSure && n * 8 + 1 >= left) two = 0.0f;
                    total[h] += one + two;
                    split2(one, two, hi[n][h], lo[kPairs ? n : 0][h]);
                }

            if (chunk == 0) ring.wait_arrived(of_values);
            float products[kTiles][4];
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < CHUNK / 16; ++s) {
                const u32 a[4] = {hi[2 * s][0], hi[2 * s][1], hi[2 * s + 1][0], hi[2 * s + 1][1]};
                if constexpr (kPairs) {
                    const u32 small[4] = {lo[2 * s][0], lo[2 * s][1], lo[2 * s + 1][0], lo[2 * s + 1][1]};
                    multiply_rows(products, small, rows_descriptor(value_rows + s * 16 * kRow), s > 0);
                    multiply_rows(products, a, rows_descriptor(value_rows + kImage + s * 16 * kRow), 1);
                }
                multiply_rows(products, a, rows_descriptor(value_rows + s * 16 * kRow), kPairs || s > 0);
            }
            wgmma_commit();
            wgmma_wait<0>();
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[n][e] = fmaf(out[n][e], keep[e / 2], products[n][e]);
        }
        const float down = power(-(int)load_shared_one(ring.exponent(of_values, 0)));
        ring.free(of_values);

        float* const y_rows = y + ((at / (int)heads * queries + first) * heads + at % (int)heads) * kHead + 2 * t;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float by = 1.0f / over_quad_sum(total[h]);
            if (first + 8 * h >= queries) continue;
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
                *reinterpret_cast<float2*>(y_rows + 8 * h * heads * kHead + n * 8) = make_float2(out[n][2 * h] * by * down, out[n][2 * h + 1] * by * down);
        }
    }
}
