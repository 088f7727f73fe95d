// y = softmax(scale * q kᵀ) v of halves, head by head, for sequences whose keys and values fit in shared memory.
//
// A block has all queries of one head: its keys and values come once, and warps take 16 queries after 16 queries. A warp goes over the keys in
// chunks of STEPS * 16 with a running maximum and sum; accumulators of q kᵀ, through the exponential, are the operands of the product with v.
// Two blocks of a multiprocessor hide each other's loads.
//
//     q: 16 bytes a lane, straight from memory       keys: 16 bytes a lane, in the same order of features
//     values: ldmatrix.trans                         y: turned in shared memory, so that stores are whole rows of a head
//
// What limits it: each warp reads all keys and values from shared memory for 16 queries. An H200 takes 69 us for 128 images of 197 tokens and
// 6 heads, where the bytes take 18 at full bandwidth; short_attention_wgmma.cu is for such devices.
//
// MODE 0 fp16, 1 bf16. Defines: MODE, HEAD (32 or 64), KEYS (the number, rounded up to 16), STEPS, WARPS, BLOCKS (of a multiprocessor).
// Limits: sm_80 or newer; scale > 0; features adjacent, rows at multiples of 16 bytes.
#include "instructions.cuh"

typedef long long i64;

constexpr int kTiles = HEAD / 8, kPieces = HEAD / 8, kRow = HEAD * 2, kPitch = kRow + 16;
constexpr float kLog2E = 1.44269504088896341f;

struct Strides {
    i64 batch, head, token;  // elements
};

// The 16-byte pieces of a row are turned by row against bank conflicts.
__device__ __forceinline__ u32 place(int row, int piece) { return row * kRow + ((piece ^ (HEAD == 64 ? (row & 1) << 2 | (row >> 1 & 3) : row >> 1 & 3)) << 4); }

__device__ __forceinline__ void bring(u32 to, const u16* from, i64 token, int tokens) {
    for (int n = threadIdx.x; n < KEYS * kPieces; n += 32 * WARPS) {
        const int row = n / kPieces, piece = n % kPieces;
        copy_async<16>(to + place(row, piece), from + (row < tokens ? row : 0) * token + piece * 8, row < tokens ? 16 : 0);
    }
    commit_copies();
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
short_attention(const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ v, u16* __restrict__ y, Strides q_strides,
                Strides k_strides, Strides v_strides, i64 queries, i64 tokens, i64 heads, int scale_bits) {
    extern __shared__ __align__(128) char memory[];
    // keys | values | rows of y of each warp
    const u32 keys = shared_address(memory), values = keys + KEYS * kRow;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const u32 turned = values + KEYS * kRow + warp * 16 * kPitch;
    const i64 batch = blockIdx.x / heads, head = blockIdx.x % heads;
    bring(keys, k + batch * k_strides.batch + head * k_strides.head, k_strides.token, (int)tokens);
    bring(values, v + batch * v_strides.batch + head * v_strides.head, v_strides.token, (int)tokens);
    const u16* const q_head = q + batch * q_strides.batch + head * q_strides.head;
    const float scale = __int_as_float(scale_bits) * kLog2E, none = __int_as_float(0xff800000);

    bool fresh = true;
#pragma unroll 1
    for (int first = warp * 16; first < queries || fresh; first += 16 * WARPS) {
        // A lane's features are 8t.. of each 32: two steps of two pairs each. Keys are read in the same order.
        Vector<16> own[2][HEAD / 32] = {};
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int s = 0; s < HEAD / 32; ++s)
                if (first + g + h * 8 < queries)
                    own[h][s] = *reinterpret_cast<const Vector<16>*>(q_head + (first + g + h * 8) * q_strides.token + s * 32 + t * 8);
        if (fresh) {
            wait_copies<0>();
            __syncthreads();
            fresh = false;
        }
        if (first >= queries) break;

        float out[kTiles][4] = {}, most[2] = {none, none}, total[2] = {};
#pragma unroll 1
        for (int chunk = 0; chunk < KEYS; chunk += 16 * STEPS) {
            float scores[2 * STEPS][4] = {};
#pragma unroll
            for (int n = 0; n < 2 * STEPS; ++n) {
                if (chunk + n * 8 >= KEYS) continue;
#pragma unroll
                for (int s = 0; s < HEAD / 32; ++s) {
                    u32 b[4];
                    load_shared(b, keys + place(chunk + n * 8 + g, s * 4 + t));
                    const u32 even[4] = {own[0][s].w[0], own[1][s].w[0], own[0][s].w[1], own[1][s].w[1]};
                    const u32 odd[4] = {own[0][s].w[2], own[1][s].w[2], own[0][s].w[3], own[1][s].w[3]};
                    mma(scores[n], even, b[0], b[1]);
                    mma(scores[n], odd, b[2], b[3]);
                }
            }

            const int left = (int)tokens - chunk - 2 * t;  // a lane's keys n*8 + e are there if they are fewer
            float keep[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float highest = most[h];
#pragma unroll
                for (int n = 0; n < 2 * STEPS; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& score = scores[n][2 * h + e];
                        if (chunk + 16 * STEPS > KEYS - 16 && n * 8 + e >= left) score = none;
                        highest = fmaxf(highest, score);
                    }
                highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
                highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
                keep[h] = exp2_fast((most[h] - highest) * scale);
                most[h] = highest;
                const float shift = -highest * scale;
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < 2 * STEPS; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& score = scores[n][2 * h + e];
                        score = exp2_fast(fmaf(score, scale, shift));
                        sum += score;
                    }
                total[h] = fmaf(total[h], keep[h], sum);
            }
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[n][e] *= keep[e / 2];

#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                if (chunk + s * 16 >= KEYS) continue;
                const u32 a[4] = {round2(scores[2 * s][0], scores[2 * s][1]), round2(scores[2 * s][2], scores[2 * s][3]),
                                  round2(scores[2 * s + 1][0], scores[2 * s + 1][1]), round2(scores[2 * s + 1][2], scores[2 * s + 1][3])};
#pragma unroll
                for (int n = 0; n < kTiles; n += 2) {
                    u32 b[4];
                    load_transposed(b, values + place(chunk + s * 16 + (lane & 15), n + (lane >> 4)));
                    mma(out[n], a, b[0], b[1]);
                    mma(out[n + 1], a, b[2], b[3]);
                }
            }
        }

        __syncwarp();  // all have read what they stored before
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            total[h] += __shfl_xor_sync(0xffffffffu, total[h], 1);
            total[h] += __shfl_xor_sync(0xffffffffu, total[h], 2);
            const float by = 1.0f / total[h];
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
                store_shared(turned + (g + h * 8) * kPitch + n * 16 + t * 4, round2(out[n][2 * h] * by, out[n][2 * h + 1] * by));
        }
        __syncwarp();
#pragma unroll
        for (int n = 0; n < kPieces / 2; ++n) {
            const int piece = n * 32 + lane, row = piece / kPieces;
            Vector<16> rounded;
            load_shared(rounded.w, turned + row * kPitch + piece % kPieces * 16);
            if (first + row < queries)
                *reinterpret_cast<Vector<16>*>(y + ((batch * queries + first + row) * heads + head) * HEAD + piece % kPieces * 8) = rounded;
        }
    }
}
