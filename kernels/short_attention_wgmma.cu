// y = softmax(scale * q kᵀ) v of halves, as in short_attention.cu, for heads of 64 features on sm_90a: three warpgroups multiply 64 queries
// each, and a fourth brings what they need.
//
// A block stays on its multiprocessor and takes head after head. Keys, queries and values of a head pass one after the other through the slots of
// a ring. Warpgroups take tiles of 64 queries in turn, across heads, one after the other, so that products of one run beside the exponentials of
// another. A thread has the scores of CHUNK keys at once, in two products of half of them, and looks for the maximum of one half while the
// other is multiplied; more keys come in CHUNKS of them with a running maximum and sum. Accumulators of q kᵀ, through the exponential, are
// the operand of the product with v. The rows of y take the place of the queries, so that stores are whole rows of a head.
//
// Up to 8 queries in the last tile, as of 197, are multiplied by mma.sync: the warps of a warpgroup share the keys among them, then the features,
// and meet twice in between. This passes the turn on at once, and fits between the turns of the others.
//
//     slot: ROWS rows of 64 halves, 128 bytes, in the order of wgmma_rows.cuh; rows that are not there are zeros
//     the last tile may read beyond its slot: what it finds there reaches no row of y
//
// Floor: the bytes of q, k, v and y. For 128 images of 197 tokens and 6 heads an H200 takes 33 us, where the bytes take 18 at full bandwidth,
// and loads and stores without any product 23; what remains is products and exponentials of one warpgroup waiting for each other.
// Times beside PyTorch's, with the floor's share: recipes/results/attention_h200.csv.
//
// Defines: MODE (0 fp16, 1 bf16), CHUNK (a multiple of 16, up to 208), CHUNKS, ROWS (a multiple of 16), TILES (of queries), SLOTS (5 or more),
// LAST (1: the last of three tiles or more has up to 8 queries, multiplied apart).
// Limits: sm_90a; keys up to CHUNK*CHUNKS, which is up to ROWS, and less than 16*CHUNKS fewer; queries up to ROWS; scale > 0; features adjacent,
// rows at multiples of 16 bytes.
#include "instructions.cuh"
#include "wgmma_rows.cuh"

typedef long long i64;

constexpr int kHead = 64, kRow = 2 * kHead, kSlot = ROWS * kRow, kTiles = kHead / 8, kChunkTiles = CHUNK / 8;
constexpr int kSpare = !LAST && TILES * 64 > ROWS ? (TILES * 64 - ROWS) * kRow : 0;
constexpr int kWarpgroups = 3;
constexpr int kRegisters = 160, kBringing = 32;  // of a thread that multiplies, and of one that brings; all that there are
constexpr int kAhead = SLOTS < 6 ? SLOTS - 3 : 3;  // slots on their way; a head's others must arrive while its first is held
constexpr int kEarly = kChunkTiles >= 4 * CHUNKS ? kChunkTiles / 2 : 0;  // tiles whose keys are all there, and that are looked at early
constexpr int kKeys = CHUNK * CHUNKS, kPitch = 2 * kKeys + 16;  // bytes of a last query's exponentials: 16 more, against bank conflicts
constexpr float kLog2E = 1.44269504088896341f;

struct Strides {
    i64 batch, head, token;  // elements
};

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// The n-th of what passes through the ring, from both sides.
struct Ring {
    u32 slots, arrived, freed;
    __device__ __forceinline__ u32 slot(int n) const { return slots + n % SLOTS * kSlot; }
    __device__ __forceinline__ void wait_arrived(int n) const { barrier_wait(arrived + 8 * (n % SLOTS), n / SLOTS & 1); }
    __device__ __forceinline__ void wait_freed(int n) const { barrier_wait(freed + 8 * (n % SLOTS), ~(n / SLOTS) & 1); }
    __device__ __forceinline__ void free(int n) const { barrier_arrive(freed + 8 * (n % SLOTS)); }
    __device__ __forceinline__ void hand_over(int n) const {  // wgmma reads what this thread has copied
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_arrive(arrived + 8 * (n % SLOTS));
    }
};

__device__ __forceinline__ u32 place(int row, int piece) { return row * kRow + ((piece ^ row % 8) << 4); }

// A warpgroup starts the copies of a slot.
__device__ __forceinline__ void bring(u32 slot, const u16* from, i64 token, int rows) {
    const int first = threadIdx.x % 128 / 8, piece = threadIdx.x % 8;
    from += first * token + piece * 8;
#pragma unroll 2
    for (int n = 0; n < ROWS; n += 16) {
        const int row = n + first;
        copy_async<16>(slot + place(row, piece), row < rows ? from : from - row * token, row < rows ? 16 : 0);
        from += 16 * token;
    }
    commit_copies();
}

// A warpgroup multiplies the last queries of a head, 8 rows of tiles of 16 whose others are zeros: a warp has every fourth 8 keys, then 16 features.
// Exponentials, maxima and sums meet in shared memory from `met` on. The same bytes served the head before: its last queries are done, as the
// warpgroup that multiplied them has taken another tile since, or is this one, and turns follow each other.
__device__ __forceinline__ void attend_last(const Ring& ring, int of_keys, u32 met, int barrier, u16* y_rows, i64 y_token, int queries, int keys,
                                            float scale) {
    constexpr int kOwn = (kKeys / 8 + 3) / 4;  // tiles of 8 keys of a warp
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3, of_queries = of_keys + 1, of_values = of_keys + 2;
    const u32 query_rows = ring.slot(of_queries) + (TILES - 1) * 64 * kRow, key_rows = ring.slot(of_keys), value_rows = ring.slot(of_values);
    const u32 maxima = met + 8 * kPitch, sums = maxima + 4 * 32;
    u32 own[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) load_matrices(own[h], query_rows + place(lane & 7, 4 * h + (lane >> 3)));
    float scores[kOwn][4] = {}, highest = -infinity();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const int first = (4 * i + warp) * 8;
        if (first >= kKeys) continue;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            u32 b[4];
            load_matrices(b, key_rows + place(first + (lane & 7), 4 * h + (lane >> 3)));
            mma(scores[i], {own[h][0], 0, own[h][1], 0}, b[0], b[1]);
            mma(scores[i], {own[h][2], 0, own[h][3], 0}, b[2], b[3]);
        }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if ((4 * i + warp) * 8 + 2 * t + e >= keys) scores[i][e] = -infinity();
            highest = fmaxf(highest, scores[i][e]);
        }
    ring.free(of_queries);
    ring.free(of_keys);
    highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
    if (t == 0) store_shared(maxima + 32 * warp + 4 * g, __float_as_uint(highest));
    named_barrier_wait(barrier, 128);
#pragma unroll
    for (int w = 0; w < 4; ++w) highest = fmaxf(highest, __uint_as_float(load_shared_one(maxima + 32 * w + 4 * g)));
    const float shift = -highest * scale;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const int first = (4 * i + warp) * 8;
        if (first >= kKeys) continue;
        const float one = exp2_fast(fmaf(scores[i][0], scale, shift)), two = exp2_fast(fmaf(scores[i][1], scale, shift));
        total += one + two;
        store_shared(met + g * kPitch + 2 * first + 4 * t, round2(one, two));
    }
    total = over_quad_sum(total);
    if (t == 0) store_shared(sums + 32 * warp + 4 * g, __float_as_uint(total));
    ring.wait_arrived(of_values);
    named_barrier_wait(barrier, 128);

    float out[2][2][4] = {};  // of every second step; of 8 features
#pragma unroll
    for (int s = 0; s < kKeys / 16; ++s) {
        u32 a[4], b[4];
        load_two_matrices(a, met + (lane & 7) * kPitch + 32 * s + (lane >> 3 & 1) * 16);
        load_transposed(b, value_rows + place(16 * s + (lane & 15), 2 * warp + (lane >> 4)));
        mma(out[s % 2][0], {a[0], 0, a[1], 0}, b[0], b[1]);
        mma(out[s % 2][1], {a[0], 0, a[1], 0}, b[2], b[3]);
    }
    ring.free(of_values);
    total = 0.0f;
#pragma unroll
    for (int w = 0; w < 4; ++w) total += __uint_as_float(load_shared_one(sums + 32 * w + 4 * g));
    const float by = 1.0f / total;
#pragma unroll
    for (int n = 0; n < 2; ++n)
        if (g < queries)
            *reinterpret_cast<u32*>(y_rows + g * y_token + warp * 16 + n * 8 + 2 * t) =
                round2((out[0][n][0] + out[1][n][0]) * by, (out[0][n][1] + out[1][n][1]) * by);
}

extern "C" __global__ void __launch_bounds__(128 * (kWarpgroups + 1), 1)
short_attention(const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ v, u16* __restrict__ y, Strides of_q, Strides of_k,
                Strides of_v, i64 queries, i64 keys, i64 heads, i64 all_heads, int scale_bits) {
    extern __shared__ __align__(1024) char memory[];
    Ring ring;
    ring.slots = shared_address(memory), ring.arrived = ring.slots + SLOTS * kSlot + kSpare, ring.freed = ring.arrived + 8 * SLOTS;
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
        const auto pass = [&](const u16* from, const Strides& of, int at, i64 rows) {
            ring.wait_freed(n);
            bring(ring.slot(n), from + at / (int)heads * of.batch + at % (int)heads * of.head, of.token, (int)rows);
            if (n >= kAhead) {
                wait_copies<kAhead>();
                ring.hand_over(n - kAhead);
            }
            ++n;
        };
#pragma unroll 1
        for (int at = blockIdx.x; at < (int)all_heads; at += gridDim.x) pass(k, of_k, at, keys), pass(q, of_q, at, queries), pass(v, of_v, at, keys);
        wait_copies<0>();
        for (int last = max(n - kAhead, 0); last < n; ++last) ring.hand_over(last);
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
            u16* const y_rows = y + ((at / (int)heads * queries + tile * 64) * heads + at % (int)heads) * kHead;
            attend_last(ring, of_keys, ring.freed + 8 * SLOTS, 1 + warpgroup, y_rows, heads * kHead, (int)queries - tile * 64, (int)keys, scale);
            continue;
        }

        float out[kTiles][4], most[2] = {-infinity(), -infinity()}, total[2] = {};
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            float scores[kChunkTiles][4], highest[2] = {most[0], most[1]};
            const u32 key_rows = ring.slot(of_keys) + chunk * CHUNK * kRow, value_rows = ring.slot(of_values) + chunk * CHUNK * kRow;
            const auto raise = [&](int from, int to) {
#pragma unroll
                for (int n = from; n < to; ++n)
#pragma unroll
                    for (int h = 0; h < 2; ++h) highest[h] = fmaxf(highest[h], fmaxf(scores[n][2 * h], scores[n][2 * h + 1]));
            };
            wgmma_fence();
            multiply_by_rows<CHUNK / 2, 0>(scores, query_rows + tile * 64 * kRow, key_rows);
            wgmma_commit();
            multiply_by_rows<CHUNK / 2, kChunkTiles / 2>(scores, query_rows + tile * 64 * kRow, key_rows + CHUNK / 2 * kRow);
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
                multiply_rows(out, a, value_rows + s * 16 * kRow, chunk + s > 0);
            }
            wgmma_commit();
            wgmma_wait<0>();
        }
        ring.free(of_values);

        named_barrier_wait(1 + warpgroup, 128);  // all have multiplied the queries whose place y takes
        if (first < queries) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float by = 1.0f / over_quad_sum(total[h]);
#pragma unroll
                for (int n = 0; n < kTiles; ++n)
                    store_shared(query_rows + place(first + g + 8 * h, n) + 4 * t, round2(out[n][2 * h] * by, out[n][2 * h + 1] * by));
            }
            __syncwarp();
            u16* const y_head = y + (at / (int)heads * queries * heads + at % (int)heads) * kHead;
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int row = first + n * 4 + lane / 8, piece = lane % 8;
                Vector<16> rounded;
                load_shared(rounded.w, query_rows + place(row, piece));
                if (row < queries) *reinterpret_cast<Vector<16>*>(y_head + row * heads * kHead + piece * 8) = rounded;
            }
        }
        ring.free(of_queries);
    }
}
