// y = softmax(scale * q kᵀ) v of halves, for heads of 64 features on sm_90a: three warpgroups multiply 64 queries
// each, and two threads of a fourth have the copy engine bring what they need, and fetch what they made.
//
// A block stays on its multiprocessor and takes head after head. Keys, queries and values of a head pass one after the other through the slots of
// a ring. Warpgroups take tiles of 64 queries in turn, across heads, one after the other, so that products of one run beside the exponentials of
// another. A thread has the scores of CHUNK keys at once, in two products of half of them, and looks for the maximum of one half while the
// other is multiplied; more keys come in CHUNKS of them with a running maximum and sum. Accumulators of q kᵀ, through the exponential, are
// the operand of the product with v. The rows of y take the place of the queries, whence they are fetched when all of a head's are there.
//
// Up to 8 queries in the last tile, as of 197, would waste the other rows of a product. They are its columns instead: its rows are keys, then
// features, and its warps meet twice in between. This passes the turn on at once, and fits between the turns of the others.
//
//     slot: ROWS rows of 64 halves, 128 bytes, in the order of wgmma_rows.cuh; rows that are not there are zeros
//     a tile of 64 rows may read beyond its slot: values from there reach no row of y
//
// Floor: the bytes of q, k, v and y. For 128 images of 197 tokens and 6 heads an H200 takes 28 us, where the bytes take 18 at full bandwidth,
// and loads and stores without any product 23; what remains is products and exponentials of one warpgroup waiting for each other.
// Times beside PyTorch's, with the floor's share: recipes/results/kernels_h200.csv.
//
// Defines: MODE (0 fp16, 1 bf16), CHUNK (a multiple of 16, up to 208), CHUNKS, ROWS (a multiple of 16), TILES (of queries), SLOTS (5 or more),
// LAST (1: the last of three tiles or more has up to 8 queries, multiplied apart), LOG_SUMS (1: log_sums, (all heads, queries), becomes the
// logarithm of a query's sum of exponentials, by base 2, for attention_gradient.cu; else it is null).
// Limits: sm_90a; keys up to CHUNK*CHUNKS, which is up to ROWS, and less than 16*CHUNKS fewer; queries up to ROWS; scale > 0; features adjacent,
// rows at multiples of 16 bytes.
#include "instructions.cuh"
#include "tensor_map.cuh"
#include "wgmma_rows.cuh"

typedef long long i64;

constexpr int kKeys = CHUNK * CHUNKS;
constexpr int kHead = 64, kRow = 2 * kHead, kSlot = ROWS * kRow, kTiles = kHead / 8, kChunkTiles = CHUNK / 8;
constexpr int kRead = LAST ? (kKeys + 63) / 64 * 64 : TILES * 64;  // rows that products read of a slot, and may find beyond the last one
constexpr int kSpare = kRead > ROWS ? (kRead - ROWS) * kRow : 0;
constexpr int kWarpgroups = 3;
constexpr int kRegisters = 160, kBringing = 32;  // of a multiplying thread, and of a loading thread; together all registers
constexpr int kBoxes = (ROWS + 255) / 256, kBoxRows = ROWS / kBoxes;  // of a slot: the copy engine takes up to 256 rows at once
constexpr int kHeads = (SLOTS + 2) / 3;  // whose queries are in the ring, at most
constexpr int kEarly = kChunkTiles >= 4 * CHUNKS ? kChunkTiles / 2 : 0;  // tiles whose keys are all there, and that are looked at early
constexpr float kLog2E = 1.44269504088896341f;

// The n-th of what passes through the ring, from both sides.
struct Ring {
    u32 slots, arrived, freed, finished;
    __device__ __forceinline__ u32 slot(int n) const { return slots + n % SLOTS * kSlot; }
    __device__ __forceinline__ u32 arrival(int n) const { return arrived + 8 * (n % SLOTS); }
    __device__ __forceinline__ void wait_arrived(int n) const { barrier_wait(arrival(n), n / SLOTS & 1); }
    __device__ __forceinline__ void wait_freed(int n) const { barrier_wait(freed + 8 * (n % SLOTS), ~(n / SLOTS) & 1); }
    __device__ __forceinline__ void free(int n) const { barrier_arrive(freed + 8 * (n % SLOTS)); }
    __device__ __forceinline__ void free_for_all(int n) const { barrier_arrive_for(freed + 8 * (n % SLOTS), 128 * TILES); }
    // rows of y stand in the place of the queries of a block's head
    __device__ __forceinline__ void finish(int turn) const {
        fence_async();
        barrier_arrive(finished + 8 * (turn % kHeads));
    }
    __device__ __forceinline__ void wait_finished(int turn) const { barrier_wait(finished + 8 * (turn % kHeads), turn / kHeads & 1); }
};

// c[i] = 64 rows of keys * 8 queriesᵀ, for every tile of keys.
template <int I, int T>
__device__ __forceinline__ void multiply_keys(float (&c)[T][4], u64 keys, u64 queries) {
#pragma unroll
    for (int s = 0; s < 4; ++s) WgmmaShared<8>::template run<I>(c, rows_further(keys, I * 64 * kRow + s * 32), rows_further(queries, s * 32), s > 0);
    if constexpr (I + 1 < T) multiply_keys<I + 1>(c, keys, queries);
}

// c = 64 features of 16 values, transposed * 16 keys' weights of 8 queries, or c += them.
__device__ __forceinline__ void multiply_values(float (&c)[4], u64 values, u64 weights, int accumulate) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0;"
                 " wgmma.mma_async.sync.aligned.m64n8k16.f32." WGMMA_HALF "." WGMMA_HALF " {%0,%1,%2,%3}, %4, %5, p, 1, 1, 1, 1; }"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "l"(values), "l"(weights), "r"(accumulate));
}

// A warpgroup multiplies the last queries of a head, up to 8, with keys and values in the place of rows: a thread has the scores of two queries and
// of every eighth key, then sums of two queries and of two features. Weights, maxima and sums meet in shared memory from `met` on. The same
// bytes served the head before: its last queries are done, as the warpgroup that multiplied them has taken another tile since, or is this
// one, and turns follow each other.
__device__ __forceinline__ void attend_last(const Ring& ring, int turn, u32 met, int barrier, int keys, float scale, float* log_sums, int queries) {
    constexpr int kKeyTiles = (kKeys + 63) / 64;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const int of_keys = 3 * turn, of_queries = of_keys + 1, of_values = of_keys + 2;
    const u32 query_rows = ring.slot(of_queries) + (TILES - 1) * 64 * kRow, maxima = met + kKeys * 16, sums = maxima + 4 * 32;
    const u64 own_queries = rows_descriptor(query_rows), key_rows = rows_descriptor(ring.slot(of_keys));
    float scores[kKeyTiles][4], highest[2] = {-infinity(), -infinity()}, total[2] = {};
    wgmma_fence();
    multiply_keys<0>(scores, key_rows, own_queries);
    wgmma_commit();
    wgmma_wait<0>();
    ring.free(of_keys);
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (64 * i + 16 * warp + g + e / 2 * 8 >= keys) scores[i][e] = -infinity();
            highest[e % 2] = fmaxf(highest[e % 2], scores[i][e]);
        }
#pragma unroll
    for (int q = 0; q < 2; ++q)
#pragma unroll
        for (int apart = 4; apart < 32; apart *= 2) highest[q] = fmaxf(highest[q], __shfl_xor_sync(0xffffffffu, highest[q], apart));
    if (g == 0) store_shared_pair(maxima + 32 * warp + 8 * t, __float_as_uint(highest[0]), __float_as_uint(highest[1]));
    named_barrier_wait(barrier, 128);
    float shift[2];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
#pragma unroll
        for (int w = 0; w < 4; ++w) highest[q] = fmaxf(highest[q], __uint_as_float(load_shared_one(maxima + 32 * w + 8 * t + 4 * q)));
        shift[q] = -highest[q] * scale;
    }
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int key = 64 * i + 16 * warp + 8 * h + g;
            const float one = exp2_fast(fmaf(scores[i][2 * h], scale, shift[0])), two = exp2_fast(fmaf(scores[i][2 * h + 1], scale, shift[1]));
            total[0] += one, total[1] += two;
            if (key < kKeys) store_shared(met + key * 16 + 4 * t, round2(one, two));
        }
#pragma unroll
    for (int q = 0; q < 2; ++q)
#pragma unroll
        for (int apart = 4; apart < 32; apart *= 2) total[q] += __shfl_xor_sync(0xffffffffu, total[q], apart);
    if (g == 0) store_shared_pair(sums + 32 * warp + 8 * t, __float_as_uint(total[0]), __float_as_uint(total[1]));
    fence_async();
    ring.wait_arrived(of_values);
    named_barrier_wait(barrier, 128);

    const u64 value_rows = rows_descriptor(ring.slot(of_values)), weights = wgmma_descriptor(met, 8);
    float out[4];
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kKeys / 16; ++s) multiply_values(out, rows_further(value_rows, s * 16 * kRow), rows_further(weights, s * 16 * 16), s > 0);
    wgmma_commit();
    wgmma_wait<0>();
    ring.free(of_values);
#pragma unroll
    for (int q = 0; q < 2; ++q) {
        total[q] = 0.0f;
#pragma unroll
        for (int w = 0; w < 4; ++w) total[q] += __uint_as_float(load_shared_one(sums + 32 * w + 8 * t + 4 * q));
        const int query = (TILES - 1) * 64 + 2 * t + q;
        if (LOG_SUMS && warp == 0 && g == 0 && query < queries) log_sums[query] = highest[q] * scale + __log2f(total[q]);
        const float by = reciprocal_fast(total[q]);
        const u32 both = round2(out[q] * by, out[2 + q] * by);  // of the features g and 8 + g of this warp's 16
        store_shared_half(query_rows + row_piece_at(2 * t + q, 2 * warp) + 2 * g, (u16)both);
        store_shared_half(query_rows + row_piece_at(2 * t + q, 2 * warp + 1) + 2 * g, (u16)(both >> 16));
    }
    ring.finish(turn);
}

extern "C" __global__ void __launch_bounds__(128 * (kWarpgroups + 1), 1)
short_attention(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
                const __grid_constant__ TensorMap y, float* __restrict__ log_sums, i64 queries, i64 keys, i64 heads, i64 all_heads, int scale_bits) {
    extern __shared__ __align__(1024) char memory[];
    Ring ring;
    ring.slots = shared_address(memory), ring.arrived = ring.slots + SLOTS * kSlot + kSpare, ring.freed = ring.arrived + 8 * SLOTS;
    ring.finished = ring.freed + 8 * SLOTS;
    const u32 met = ring.finished + 8 * (kHeads + kHeads % 2);
    if (threadIdx.x == 0) {
        for (int s = 0; s < SLOTS; ++s) barrier_init(ring.arrived + 8 * s, 1), barrier_init(ring.freed + 8 * s, 128 * TILES);
        for (int h = 0; h < kHeads; ++h) barrier_init(ring.finished + 8 * h, 128 * TILES);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    wait_for_kernels_before();
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0), lane = threadIdx.x % 32;

    if (warpgroup == kWarpgroups) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kBringing));
        if (threadIdx.x % 128 == 0) {
            int n = 0;
            const auto bring = [&](const TensorMap& map, int at) {
                ring.wait_freed(n);
                barrier_expect(ring.arrival(n), kSlot);
#pragma unroll
                for (int b = 0; b < kBoxes; ++b)
                    copy_head(ring.slot(n) + b * kBoxRows * kRow, map, b * kBoxRows, at % (int)heads, at / (int)heads, ring.arrival(n));
                ++n;
            };
#pragma unroll 1
            for (int at = blockIdx.x; at < (int)all_heads; at += gridDim.x) bring(k, at), bring(q, at), bring(v, at);
        } else if (threadIdx.x % 128 == 32) {
            int turn = 0;
#pragma unroll 1
            for (int at = blockIdx.x; at < (int)all_heads; at += gridDim.x, ++turn) {
                const int of_queries = 3 * turn + 1;
                ring.wait_finished(turn);
#pragma unroll
                for (int b = 0; b < kBoxes; ++b)
                    store_head(y, b * kBoxRows, at % (int)heads, at / (int)heads, ring.slot(of_queries) + b * kBoxRows * kRow);
                commit_stores();
                wait_stores_read();
                ring.free_for_all(of_queries);
            }
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
    const int warp = threadIdx.x / 32 % 4, g = lane >> 2, t = lane & 3;
    const float scale = __int_as_float(scale_bits) * kLog2E;
    const auto turn_of = [](int unit) { return 1 + kWarpgroups + unit % kWarpgroups; };  // a barrier: it is the unit's turn
    if (warpgroup == kWarpgroups - 1) named_barrier_arrive(turn_of(0), 256);
#pragma unroll 1
    for (int unit = warpgroup;; unit += kWarpgroups) {
        const int turn = unit / TILES, tile = unit % TILES, first = tile * 64 + warp * 16;
        const int at = blockIdx.x + turn * gridDim.x;
        if (at >= (int)all_heads) break;
        const int of_keys = 3 * turn, of_queries = of_keys + 1, of_values = of_keys + 2;
        const u32 query_rows = ring.slot(of_queries);
        named_barrier_wait(turn_of(unit), 256);  // first: who had the turn before has seen all that came before arrive
        ring.wait_arrived(of_keys);
        ring.wait_arrived(of_queries);
        if (LAST && tile == TILES - 1) {
            named_barrier_arrive(turn_of(unit + 1), 256);
            attend_last(ring, turn, met, 1 + warpgroup, (int)keys, scale, log_sums + at * queries, (int)queries);
            continue;
        }

        float out[kTiles][4], most[2] = {-infinity(), -infinity()}, total[2] = {};
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            float scores[kChunkTiles][4], highest[2] = {most[0], most[1]};
            const u64 own_queries = rows_descriptor(query_rows + tile * 64 * kRow), key_rows = rows_descriptor(ring.slot(of_keys) + chunk * CHUNK * kRow);
            const u64 value_rows = rows_descriptor(ring.slot(of_values) + chunk * CHUNK * kRow);
            const auto raise = [&](int from, int to) {
#pragma unroll
                for (int n = from; n < to; ++n)
#pragma unroll
                    for (int h = 0; h < 2; ++h) highest[h] = fmaxf(highest[h], fmaxf(scores[n][2 * h], scores[n][2 * h + 1]));
            };
            wgmma_fence();
            multiply_by_rows<CHUNK / 2, 0>(scores, own_queries, key_rows);
            wgmma_commit();
            multiply_by_rows<CHUNK / 2, kChunkTiles / 2>(scores, own_queries, rows_further(key_rows, CHUNK / 2 * kRow));
            wgmma_commit();
            wgmma_wait<1>();
            raise(0, kEarly);
            wgmma_wait<0>();
            if (chunk == 0) named_barrier_arrive(turn_of(unit + 1), 256);

            if (chunk == CHUNKS - 1) {
                ring.free(of_keys);
                const int left = (int)keys - chunk * CHUNK - 2 * t;  // a lane's keys n*8 + e are there if they are fewer
#pragma unroll
                for (int n = max(kChunkTiles - 2 * CHUNKS, 0); n < kChunkTiles; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (n * 8 + e % 2 >= left) scores[n][e] = -infinity();
            }
            raise(kEarly, kChunkTiles);
            float shift[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                highest[h] = fmaxf(highest[h], __shfl_xor_sync(0xffffffffu, highest[h], 1));
                highest[h] = fmaxf(highest[h], __shfl_xor_sync(0xffffffffu, highest[h], 2));
                if (chunk > 0) {
                    const float keep = exp2_fast((most[h] - highest[h]) * scale);
                    total[h] *= keep;
#pragma unroll
                    for (int n = 0; n < kTiles; ++n) out[n][2 * h] *= keep, out[n][2 * h + 1] *= keep;
                }
                most[h] = highest[h];
                shift[h] = -highest[h] * scale;
            }
            u32 weights[kChunkTiles][2];
#pragma unroll
            for (int n = 0; n < kChunkTiles; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float one = exp2_fast(fmaf(scores[n][2 * h], scale, shift[h])), two = exp2_fast(fmaf(scores[n][2 * h + 1], scale, shift[h]));
                    total[h] += one + two;
                    weights[n][h] = round2(one, two);
                }

            if (chunk == 0) ring.wait_arrived(of_values);
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < CHUNK / 16; ++s) {
                const u32 a[4] = {weights[2 * s][0], weights[2 * s][1], weights[2 * s + 1][0], weights[2 * s + 1][1]};
                multiply_rows(out, a, rows_further(value_rows, s * 16 * kRow), chunk + s > 0);
            }
            wgmma_commit();
            wgmma_wait<0>();
        }
        ring.free(of_values);

        named_barrier_wait(1 + warpgroup, 128);  // all have multiplied the queries whose place y takes
        if (first < queries) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float sum = over_quad_sum(total[h]), by = reciprocal_fast(sum);
                if (LOG_SUMS && t == 0 && first + g + 8 * h < queries) log_sums[at * queries + first + g + 8 * h] = most[h] * scale + __log2f(sum);
#pragma unroll
                for (int n = 0; n < kTiles; ++n)
                    store_shared(query_rows + row_piece_at(first + g + 8 * h, n) + 4 * t, round2(out[n][2 * h] * by, out[n][2 * h + 1] * by));
            }
        }
        ring.finish(turn);
    }
}
