// y = softmax(scale * q kᵀ) v of halves, head by head, for few queries: a block has 16 queries of one head, and its warps split the keys
// among them, so that all loads are in flight at once. Each warp keeps a maximum, a sum and an output of its own keys; they meet in shared
// memory.
//
// Rows of q and k go to registers as they lie, 16 bytes a lane: the order of the features is free, as both have the same. Rows of v pass through
// shared memory, where ldmatrix turns them.
//
// Measured on an H200, beside PyTorch, with the share of its bound: recipes/results/kernels_h200.csv.
//
// Defines: HEAD (features of a head), WARPS, STEPS (of 16 keys, of a warp), MODE 0 fp16, 1 bf16.
// Limits: sm_80 or newer; HEAD a multiple of 32; at most WARPS*STEPS*16 keys; features adjacent, rows at multiples of 16 bytes.
#include "instructions.cuh"

typedef long long i64;

constexpr int kChunks = HEAD / 32, kTiles = HEAD / 8, kKeys = STEPS * 16;
constexpr int kRowBytes = HEAD * 2 + 16;  // of v in shared memory: 16 bytes more, against bank conflicts
constexpr int kPitch = HEAD + 8;          // floats of a row of outputs
constexpr int kWarpBytes = kKeys * kRowBytes > 16 * kPitch * 4 ? kKeys * kRowBytes : 16 * kPitch * 4;
constexpr float kLog2E = 1.44269504088896341f, kLowest = -1e30f;

struct Strides {
    i64 batch, head, token;  // elements
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
few_attention(const char* q, const char* k, const char* v, char* y, Strides of_q, Strides of_k, Strides of_v, i64 queries, i64 keys, i64 heads,
              int scale_bits) {
    extern __shared__ __align__(128) char memory[];
    float* const extremes = reinterpret_cast<float*>(memory + WARPS * kWarpBytes);  // [WARPS][16] maxima, then sums
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const i64 batch = blockIdx.y / heads, head = blockIdx.y % heads, query0 = blockIdx.x * 16;
    const int key0 = warp * kKeys;
    char* const own = memory + warp * kWarpBytes;
    wait_for_kernels_before();
    const char* const q_head = q + (batch * of_q.batch + head * of_q.head) * 2;
    const char* const k_head = k + (batch * of_k.batch + head * of_k.head) * 2;
    const char* const v_head = v + (batch * of_v.batch + head * of_v.head) * 2;
    Vector<16> a[2][kChunks], b[2 * STEPS][kChunks];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            a[h][c] = {};
            if (query0 + h * 8 + g < queries) load_now(a[h][c], q_head + ((query0 + h * 8 + g) * of_q.token + c * 32 + t * 8) * 2);
        }
#pragma unroll
    for (int n = 0; n < 2 * STEPS; ++n)
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            b[n][c] = {};
            if (key0 + n * 8 + g < keys) load_now(b[n][c], k_head + ((key0 + n * 8 + g) * of_k.token + c * 32 + t * 8) * 2);
        }
    const u32 staged = shared_address(own);
#pragma unroll
    for (int piece = lane; piece < kKeys * kTiles; piece += 32) {
        const int row = piece / kTiles, part = piece % kTiles;
        const bool inside = key0 + row < keys;
        copy_async<16>(staged + row * kRowBytes + part * 16, v_head + ((inside ? key0 + row : 0) * of_v.token + part * 8) * 2, inside ? 16 : 0);
    }
    commit_copies();

    float s[2 * STEPS][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 operand[4] = {a[0][c].w[2 * half], a[1][c].w[2 * half], a[0][c].w[2 * half + 1], a[1][c].w[2 * half + 1]};
#pragma unroll
            for (int n = 0; n < 2 * STEPS; ++n) mma(s[n], operand, b[n][c].w[2 * half], b[n][c].w[2 * half + 1]);
        }
    const float scale = __int_as_float(scale_bits) * kLog2E;
    float largest[2] = {kLowest, kLowest}, sum[2] = {};
#pragma unroll
    for (int n = 0; n < 2 * STEPS; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            s[n][e] = key0 + n * 8 + t * 2 + e % 2 < keys ? s[n][e] * scale : kLowest;
            largest[e / 2] = fmaxf(largest[e / 2], s[n][e]);
        }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 1));
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 2));
    }
    u32 p[2 * STEPS][2];
#pragma unroll
    for (int n = 0; n < 2 * STEPS; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float first = exp2_fast(s[n][2 * h] - largest[h]), second = exp2_fast(s[n][2 * h + 1] - largest[h]);
            sum[h] += first + second;
            p[n][h] = round2(first, second);
        }
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = over_quad_sum(sum[h]);

    wait_copies<0>();
    __syncwarp();
    float out[kTiles][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const u32 operand[4] = {p[2 * step][0], p[2 * step][1], p[2 * step + 1][0], p[2 * step + 1][1]};
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            u32 columns[4];
            load_transposed(columns, staged + (step * 16 + (lane & 15)) * kRowBytes + (n + (lane >> 4)) * 16);
            mma(out[n], operand, columns[0], columns[1]);
            mma(out[n + 1], operand, columns[2], columns[3]);
        }
    }
    __syncwarp();
    float* const outputs = reinterpret_cast<float*>(own);  // in the place of v
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) *reinterpret_cast<float2*>(outputs + (h * 8 + g) * kPitch + n * 8 + t * 2) = make_float2(out[n][2 * h], out[n][2 * h + 1]);
    if (t == 0)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            extremes[warp * 16 + h * 8 + g] = largest[h];
            extremes[(WARPS + warp) * 16 + h * 8 + g] = sum[h];
        }
    __syncthreads();
    for (int at = threadIdx.x * 4; at < 16 * HEAD; at += 128 * WARPS) {
        const int row = at / HEAD, column = at % HEAD;
        if (query0 + row >= queries) break;
        float top = kLowest, whole = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, extremes[w * 16 + row]);
        float4 mixed = {};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = exp2_fast(extremes[w * 16 + row] - top);
            const float4 part = *reinterpret_cast<const float4*>(reinterpret_cast<const float*>(memory + w * kWarpBytes) + row * kPitch + column);
            whole = fmaf(weight, extremes[(WARPS + w) * 16 + row], whole);
            mixed.x = fmaf(weight, part.x, mixed.x), mixed.y = fmaf(weight, part.y, mixed.y);
            mixed.z = fmaf(weight, part.z, mixed.z), mixed.w = fmaf(weight, part.w, mixed.w);
        }
        const float inverse = 1.0f / whole;
        Vector<8> packed;
        packed.w[0] = round2(mixed.x * inverse, mixed.y * inverse);
        packed.w[1] = round2(mixed.z * inverse, mixed.w * inverse);
        *reinterpret_cast<Vector<8>*>(y + (((batch * queries + query0 + row) * heads + head) * HEAD + column) * 2) = packed;
    }
}
