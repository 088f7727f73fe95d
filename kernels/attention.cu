// y = softmax(scale * q kᵀ) v in float32, head by head, on tensor cores: float32 grade by pairs of fp16, which PyTorch leaves to the ordinary
// cores.
//
// A block has WARPS*16 queries of one head and goes over the keys in blocks of KEYS, with a running maximum and sum. A warp has 16 queries
// from the first product to the last: accumulators of q kᵀ, through the exponential, are the operands of the product with v.
//
//     keys and values: cp.async, floats ──scale, split──> hi and lo, fp16, in shared memory      q: hi and lo in registers
//                      (the next block while this one is multiplied)
//
// MODE 3 splits into pairs hi + lo and adds lo*hi + hi*lo + hi*hi, MODE 2 (tf32 grade) keeps hi. A query, a block of keys and a block of values
// have a power of two each that brings their largest element near 2^11; exponentials, at most 1, are scaled by 2^11. The products of a block
// are added to float32 sums with rounding. Infinities and NaN do not come out finite.
//
// Floor: the products, or the bytes of q, k, v and y. Part of the fp32 and tf32 models timed in recipes/results/optimized_vit_h200.csv.
//
// Defines: HEAD (features of a head), KEYS (of a block, a multiple of 16), MODE, WARPS.
// Limits: sm_80 or newer; HEAD a multiple of 16, up to 64, where registers last; features of q, k and v adjacent, their rows at multiples of 16 bytes.
#include "instructions.cuh"
#include "scale.cuh"

typedef long long i64;

constexpr bool kPairs = MODE == 3;
constexpr int kKeys = KEYS, kSteps = HEAD / 16, kTiles = HEAD / 8, kKeyTiles = kKeys / 8;
constexpr int kThreads = 32 * WARPS, kQueries = 16 * WARPS;
constexpr int kPieces = HEAD / 4, kOwn = (2 * kKeys * kPieces + kThreads - 1) / kThreads;  // 16-byte pieces of a row, of a thread
constexpr int kPitch = HEAD * 2 + 16, kImage = kKeys * kPitch, kImages = kPairs ? 2 : 1;  // 16 bytes more, against bank conflicts
constexpr int kShift = 11;  // of exponentials
constexpr float kLog2E = 1.44269504088896341f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

struct Strides {
    i64 batch, head, token;  // elements
};

__device__ __forceinline__ void split(float a, float b, u32& hi, u32& lo) {
    hi = round2(a, b);
    if constexpr (kPairs) lo = round2(a - widen((u16)hi), b - widen((u16)(hi >> 16)));
}

// Two tiles of 8 columns += a * b, small products first; b[0..1] are the operands of the first, b[2..3] of the second.
__device__ __forceinline__ void multiply(float (&first)[4], float (&second)[4], const u32 (&hi)[4], const u32 (&lo)[4], const u32 (&b_hi)[4],
                                         const u32 (&b_lo)[4]) {
    if constexpr (kPairs) {
        mma(first, lo, b_hi[0], b_hi[1]);
        mma(second, lo, b_hi[2], b_hi[3]);
        mma(first, hi, b_lo[0], b_lo[1]);
        mma(second, hi, b_lo[2], b_lo[3]);
    }
    mma(first, hi, b_hi[0], b_hi[1]);
    mma(second, hi, b_hi[2], b_hi[3]);
}

// Keys and values of one head on their way into shared memory.
struct Blocks {
    const float *k, *v;
    i64 k_token, v_token;
    int tokens;
    u32 staged, images, largest;  // floats; keys hi, lo, values hi, lo; bits of the largest key and value

    // Ask for a block: piece n of 2*kKeys rows, keys first, belongs to thread n mod kThreads from here to the conversion.
    __device__ __forceinline__ void load(int first) const {
#pragma unroll 2
        for (int n = 0; n < kOwn; ++n) {
            const int piece = n * kThreads + threadIdx.x, row = piece / kPieces % kKeys, column = piece % kPieces * 4;
            const bool value = piece >= kKeys * kPieces, inside = first + row < tokens;
            const float* from = (value ? v : k) + (inside ? first + row : 0) * (value ? v_token : k_token) + column;
            if (piece < 2 * kKeys * kPieces) copy_async<16>(staged + piece * 16, from, inside ? 16 : 0);
        }
        commit_copies();
    }

    // Scale and split what has come; gives the exponents of keys and values.
    __device__ __forceinline__ void convert(int (&exponent)[2]) const {
        wait_copies<0>();
        float most[2] = {};
        if (threadIdx.x < 2) store_shared(largest + 4 * threadIdx.x, 0);
#pragma unroll 2
        for (int n = 0; n < kOwn; ++n) {
            const int piece = n * kThreads + threadIdx.x;
            if (piece >= 2 * kKeys * kPieces) continue;
            u32 raw[4];
            load_shared(raw, staged + piece * 16);
            const float own = fmaxf(fmaxf(fabsf(__uint_as_float(raw[0])), fabsf(__uint_as_float(raw[1]))),
                                    fmaxf(fabsf(__uint_as_float(raw[2])), fabsf(__uint_as_float(raw[3]))));
            if (piece < kKeys * kPieces) most[0] = fmaxf(most[0], own);
            else most[1] = fmaxf(most[1], own);
        }
        __syncthreads();  // also: all have multiplied the block before
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(most[i]));
            if (threadIdx.x % 32 == 0) asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(largest + 4 * i), "r"(of_warp) : "memory");
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; ++i) exponent[i] = min(exponent_for(__uint_as_float(load_shared_one(largest + 4 * i))), 126 - kShift);
        const float scale[2] = {power(exponent[0]), power(exponent[1])};
#pragma unroll 2
        for (int n = 0; n < kOwn; ++n) {
            const int piece = n * kThreads + threadIdx.x;
            if (piece >= 2 * kKeys * kPieces) continue;
            const int value = piece >= kKeys * kPieces, row = piece / kPieces % kKeys, column = piece % kPieces;
            const float by = value ? scale[1] : scale[0];
            u32 raw[4], hi[2], lo[2];
            load_shared(raw, staged + piece * 16);
            split(__uint_as_float(raw[0]) * by, __uint_as_float(raw[1]) * by, hi[0], lo[0]);
            split(__uint_as_float(raw[2]) * by, __uint_as_float(raw[3]) * by, hi[1], lo[1]);
            const u32 to = images + value * kImages * kImage + row * kPitch + column * 8;
            store_shared_pair(to, hi[0], hi[1]);
            if constexpr (kPairs) store_shared_pair(to + kImage, lo[0], lo[1]);
        }
        __syncthreads();
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 2)
attention(const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v, float* __restrict__ y, Strides q_strides,
          Strides k_strides, Strides v_strides, i64 queries, i64 tokens, i64 heads, int scale_bits) {
    extern __shared__ __align__(128) char memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const i64 batch = blockIdx.y / heads, head = blockIdx.y % heads;
    const u32 images = shared_address(memory);
    const Blocks blocks{k + batch * k_strides.batch + head * k_strides.head, v + batch * v_strides.batch + head * v_strides.head, k_strides.token,
                        v_strides.token, (int)tokens, images + 2 * kImages * kImage, images, images + 2 * kImages * kImage + 2 * kKeys * HEAD * 4};
    blocks.load(0);

    // Queries of a lane: rows g and g + 8
    const i64 row = (i64)blockIdx.x * kQueries + warp * 16 + g;
    const float* const q_row = q + batch * q_strides.batch + head * q_strides.head + row * q_strides.token;
    u32 q_hi[kSteps][4], q_lo[kPairs ? kSteps : 1][4];
    float q_down[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float2 part[2 * kSteps];
        float largest = 0.0f;
#pragma unroll
        for (int s = 0; s < 2 * kSteps; ++s) {
            part[s] = make_float2(0.0f, 0.0f);
            if (row + h * 8 < queries) part[s] = *reinterpret_cast<const float2*>(q_row + h * 8 * q_strides.token + s * 8 + t * 2);
            largest = fmaxf(largest, fmaxf(fabsf(part[s].x), fabsf(part[s].y)));
        }
        const int exponent = exponent_for(over_quad(largest));
        const float scale = power(exponent);
        q_down[h] = power(-exponent);
#pragma unroll
        for (int s = 0; s < 2 * kSteps; ++s) split(part[s].x * scale, part[s].y * scale, q_hi[s / 2][s % 2 * 2 + h], q_lo[kPairs ? s / 2 : 0][s % 2 * 2 + h]);
    }

    float out[kTiles][4] = {}, most[2] = {-infinity(), -infinity()}, total[2] = {};
    const bool idle = (i64)blockIdx.x * kQueries + warp * 16 >= queries;  // a warp past the last query helps with keys and values alone
    const int key_row = (lane >> 4) * 8 + (lane & 7), value_row = (lane >> 3 & 1) * 8 + (lane & 7);
#pragma unroll 1
    for (int first = 0; first < tokens; first += kKeys) {
        int exponent[2];
        blocks.convert(exponent);
        if (first + kKeys < tokens) blocks.load(first + kKeys);
        const int left = idle ? 0 : (int)min((i64)kKeys, tokens - first);

        float scores[kKeyTiles][4] = {};
#pragma unroll
        for (int n = 0; n < kKeyTiles; n += 2) {
            if (n * 8 >= left) continue;
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                u32 hi[4], lo[4];
                const u32 at = images + (n * 8 + key_row) * kPitch + s * 32 + (lane >> 3 & 1) * 16;
                load_matrices(hi, at);
                if constexpr (kPairs) load_matrices(lo, at + kImage);
                multiply(scores[n], scores[n + 1], q_hi[s], q_lo[kPairs ? s : 0], hi, lo);
            }
        }

        const float by = power(-exponent[0]) * __int_as_float(scale_bits) * kLog2E, down = power(-exponent[1] - kShift);
        float keep[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float highest = most[h];
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& score = scores[n][2 * h + e];
                    score = n * 8 + 2 * t + e < left ? score * q_down[h] * by : -infinity();
                    highest = fmaxf(highest, score);
                }
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
            keep[h] = exp2_fast(most[h] - highest);
            most[h] = highest;
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& score = scores[n][2 * h + e];
                    score = exp2_fast(score - highest);
                    sum += score;
                }
            total[h] = fmaf(total[h], keep[h], sum);
        }

        u32 p_hi[kKeyTiles / 2][4], p_lo[kPairs ? kKeyTiles / 2 : 1][4];
        constexpr float kUp = 1 << kShift;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                split(scores[n][2 * h] * kUp, scores[n][2 * h + 1] * kUp, p_hi[n / 2][n % 2 * 2 + h], p_lo[kPairs ? n / 2 : 0][n % 2 * 2 + h]);
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            float products[2][4] = {};
#pragma unroll
            for (int s = 0; s < kKeyTiles / 2; ++s) {
                if (s * 16 >= left) continue;
                u32 hi[4], lo[4];
                const u32 at = images + kImages * kImage + (s * 16 + value_row) * kPitch + (n + (lane >> 4)) * 16;
                load_transposed(hi, at);
                if constexpr (kPairs) load_transposed(lo, at + kImage);
                multiply(products[0], products[1], p_hi[s], p_lo[kPairs ? s : 0], hi, lo);
            }
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                float& sum = out[n + e / 4][e % 4];
                sum = fmaf(products[e / 4][e % 4], down, sum * keep[e % 4 / 2]);
            }
        }
    }

#pragma unroll
    for (int h = 0; h < 2; ++h) {
        total[h] += __shfl_xor_sync(0xffffffffu, total[h], 1);
        total[h] += __shfl_xor_sync(0xffffffffu, total[h], 2);
        float* const to = y + ((batch * queries + row + h * 8) * heads + head) * HEAD + t * 2;
        if (row + h * 8 >= queries) continue;
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
            *reinterpret_cast<float2*>(to + n * 8) = make_float2(out[n][2 * h] / total[h], out[n][2 * h + 1] / total[h]);
    }
}
