// The gradient of one Kronecker-sparse factor of any pattern (a, b, c, d):
//
//     out[i, p, q, j] = sum over rows of dy[row, (i*b + p)*d + j] * x[row, (i*c + q)*d + j]
//
// and, with BIAS, the sums of the columns of dy, from the same read: products with ones, by the warps of the first inputs.
//
// x: (rows, a*c*d) and dy: (rows, a*b*d), rows LDX and LDY elements apart, batch-size-first; out: (a, b, c, d), float32.
// Several linears, side by side in dy and in x, or sharing x, are one launch; their gradients lie one after the other.
// No permuted copy of x or dy is made: both are staged in their natural order, and a warp takes residues apart as it reads.
//
// Tiling. A CTA owns one i, BP outputs p, BQ inputs q, J consecutive residues j and one split of the rows, which it walks in
// chunks of KR. Per residue this is dyᵀ x: the rows are the inner dimension of mma.sync. A lane reads from one row the E = P*J
// (or R) elements that lie side by side in shared memory: P neighbouring p (or q), all residues of its warp. The tiles of eight
// therefore interleave: tile s holds p = s/P*8P + lane*P + s%P. Rows of one k slot are t + 4m, the same for x and dy.
// Halves of a single residue (J = 1) are read by transposing ldmatrix instead, in natural order.
// Each split writes its sums to a workspace in the layout of out; factor_grad_sum adds the splits in a fixed order, so
// results do not change from run to run. With one split out is written at once.
//
// Modes. fp16, bf16: m16n8k16, float32 sums. tf32: inputs rounded to TF32, m16n8k8. fp32: x = hi + lo in TF32, hi rounded to nearest,
// lo*hi + hi*lo + hi*hi, added in float32 with rounding every 8 rows; the whole range of float32 is safe. Infinities and NaN propagate.
//
// Limits: any a, b, c, d, rows > 0. Needs sm_80.
// Measured on an H200, bf16, 25088 rows (recipes/results/kernels_h200.csv): 2 to 6 times the time of the bytes of x and dy. Einsum
// takes 2.6 times as long in the median, but less where d = 1 and a block has a side of 256 or more. No unit is saturated: the
// schedulers issue on 28 % of the clocks, and the L2 cache works at half its rate.
//
// Defines: PATTERN_A, PATTERN_B, PATTERN_C, PATTERN_D, MODE, WM, WN, WJ, MT, NT, R, P, KR, STAGES, X_VECTOR, DY_VECTOR (bytes a copy),
// X_PITCH, DY_PITCH (bytes from row to row in shared memory), MIN_BLOCKS, BIAS.

#include "single_memory.cuh"

#define MODE_FP16 0
#define MODE_BF16 1
#define MODE_TF32 2
#define MODE_FP32 3

constexpr int PA = PATTERN_A, PB = PATTERN_B, PC = PATTERN_C, PD = PATTERN_D;
constexpr bool HALVES = MODE == MODE_FP16 || MODE == MODE_BF16;
constexpr int ES = HALVES ? 2 : 4;
constexpr int PLANES = MODE == MODE_FP32 ? 2 : 1;
constexpr int STEP = HALVES ? 16 : 8;     // rows a product
constexpr int READS = HALVES ? 4 : 2;     // of these rows, how many a lane reads
constexpr int J = WJ * R;
constexpr int BP = WM * MT * 16;
constexpr int BQ = WN * NT * 8;
constexpr int THREADS = WM * WN * WJ * 32;
constexpr int P_TILES = (PB + BP - 1) / BP;
constexpr int Q_TILES = (PC + BQ - 1) / BQ;
constexpr int RANGES = (PD + J - 1) / J;
constexpr int STAGE = KR * (X_PITCH + DY_PITCH);
constexpr bool MATRICES = HALVES && J == 1;  // 8x8 blocks of halves lie as ldmatrix transposes them
static_assert(!MATRICES || P == 2, "ldmatrix reads two tiles of eight features at once");
constexpr int WORDS = P * R * ES / 4;     // that a lane reads side by side

struct Place {
    int i, range, p_tile, q_tile;
    int wm, wn, wj, g, t;
};

// A chunk of KR rows: TILE features per residue from feature tile*TILE on, of SIZE in all
template <int SIZE, int TILE, int VECTOR, int PITCH>
__device__ __forceinline__ void load_rows(char* to, const char* source, i64 stride, i64 row0, i64 row_end, const Place& at, int tile) {
    const char* from = source + (row0 * stride + (i64)at.i * SIZE * PD + at.range * J) * ES;
    int lines = (int)min((i64)KR, row_end - row0);
    load_features<KR, SIZE, TILE, J, PD, ES, VECTOR, PITCH, THREADS>(to, from, stride * ES, lines, tile * TILE, at.range * J);
}

// Fragments of P tiles of eight features: value[tile][residue][...], two registers a tile, and their low parts in fp32
struct Group {
    u32 hi[P][R][2];
    u32 lo[P][PLANES == 2 ? R : 1][2];
};

__device__ __forceinline__ u32 round_to_tf32(u32 value) {
    u32 out;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out) : "f"(__uint_as_float(value)));
    return out;
}

// value = hi + lo + at most 2^-23 of value. hi is rounded to nearest, so |lo| <= 2^-11 |value| and of its 13 bits at most one is cut.
// hi stays finite: what rounds to infinity is truncated instead, and lo carries infinities and NaN.
__device__ __forceinline__ void split_tf32(u32& hi, u32& lo, u32 value) {
    hi = (value + 0x1000u) & 0xffffe000u;
    if ((hi << 1) == 0xff000000u) hi -= 0x2000u;
    lo = __float_as_uint(__uint_as_float(value) - __uint_as_float(hi)) & 0xffffe000u;
}

template <int PITCH>
__device__ __forceinline__ void read_group(Group& group, const char* rows, int feature0, const Place& at) {
    if constexpr (MATRICES) {  // lanes 8m to 8m+7 name the rows of matrix m = (second 8 rows, second 8 features) in binary
        int lane = threadIdx.x % 32;
        u32 address = shared_address(rows) + (lane / 16 * 8 + lane % 8) * PITCH + (feature0 + lane / 8 % 2 * 8) * ES;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(group.hi[0][0][0]), "=r"(group.hi[P - 1][0][0]), "=r"(group.hi[0][0][1]), "=r"(group.hi[P - 1][0][1])
                     : "r"(address));
        return;
    }
    u32 words[READS][WORDS];
    const char* from = rows + at.t * PITCH + ((feature0 + at.g * P) * J + at.wj * R) * ES;
#pragma unroll
    for (int m = 0; m < READS; ++m) read_words<WORDS>(words[m], from + 4 * m * PITCH);
#pragma unroll
    for (int e = 0; e < P * R; ++e)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32& hi = group.hi[e / R][e % R][half];
            if constexpr (HALVES) {
                hi = __byte_perm(words[2 * half][e / 2], words[2 * half + 1][e / 2], e % 2 ? 0x7632 : 0x5410);
            } else if constexpr (PLANES == 2) {
                split_tf32(hi, group.lo[e / R][e % R][half], words[half][e]);
            } else {
                hi = round_to_tf32(words[half][e]);
            }
        }
}

__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a0)[2], const u32 (&a1)[2], const u32 (&b)[2]) {
#if MODE == MODE_FP16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#elif MODE == MODE_BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0[0]), "r"(a1[0]), "r"(a0[1]), "r"(a1[1]), "r"(b[0]), "r"(b[1]));
}

struct Sums {
    float value[MT][R][NT][4];
    float bias[BIAS ? MT : 1][BIAS ? R : 1][4];  // of equal columns
};

constexpr u32 ONES = MODE == MODE_BF16 ? 0x3f803f80u : 0x3c003c00u;
static_assert(!BIAS || HALVES, "only halves meet ones without rounding");

__device__ __forceinline__ void multiply_chunk(Sums& sums, const char* x, const char* dy, const Place& at) {
#pragma unroll(HALVES ? 2 : 1)
    for (int step = 0; step < KR / STEP; ++step) {
        Group left[2 * MT / P];
#pragma unroll
        for (int s = 0; s < 2 * MT / P; ++s) read_group<DY_PITCH>(left[s], dy + step * STEP * DY_PITCH, at.wm * MT * 16 + s * 8 * P, at);
        if constexpr (BIAS) {
            if (at.q_tile == 0 && at.wn == 0) {
                const u32 ones[2] = {ONES, ONES};
#pragma unroll
                for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                    for (int r = 0; r < R; ++r)
                        multiply(sums.bias[mt][r], left[2 * mt / P].hi[2 * mt % P][r], left[(2 * mt + 1) / P].hi[(2 * mt + 1) % P][r], ones);
            }
        }
#pragma unroll
        for (int n = 0; n < NT / P; ++n) {
            Group right;
            read_group<X_PITCH>(right, x + step * STEP * X_PITCH, at.wn * NT * 8 + n * 8 * P, at);
#pragma unroll
            for (int u = 0; u < P; ++u)
#pragma unroll
                for (int r = 0; r < R; ++r)
#pragma unroll
                    for (int mt = 0; mt < MT; ++mt) {
                        const Group& first = left[2 * mt / P];
                        const Group& second = left[(2 * mt + 1) / P];
                        constexpr int W = P;  // m8 tiles 2mt and 2mt + 1 are members (2mt) % P and (2mt + 1) % P of their groups
                        float(&sum)[4] = sums.value[mt][r][n * P + u];
                        if constexpr (PLANES == 1) {
                            multiply(sum, first.hi[2 * mt % W][r], second.hi[(2 * mt + 1) % W][r], right.hi[u][r]);
                        } else {
                            float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                            multiply(part, first.lo[2 * mt % W][r], second.lo[(2 * mt + 1) % W][r], right.hi[u][r]);
                            multiply(part, first.hi[2 * mt % W][r], second.hi[(2 * mt + 1) % W][r], right.lo[u][r]);
                            multiply(part, first.hi[2 * mt % W][r], second.hi[(2 * mt + 1) % W][r], right.hi[u][r]);
#pragma unroll
                            for (int e = 0; e < 4; ++e) sum[e] += part[e];
                        }
                    }
        }
    }
}

// Which of a warp's features member n of tile of eight s is
__device__ __forceinline__ int feature_of(int s, int n) { return MATRICES ? 8 * s + n : s / P * 8 * P + n * P + s % P; }

// grid: (a * residue ranges * p tiles * q tiles) * linears * splits; a split is `chunks` chunks of KR rows. x and dy of a linear are x_step
// and dy_step elements behind those of the one before. Each split has its own sums, `size` apart: `out` and `bias`.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    factor_grad(const char* x, const char* dy, float* out, float* bias, i64 rows, i64 ldx, i64 ldy, i64 chunks, i64 size, i64 linears,
                i64 x_step, i64 dy_step) {
    extern __shared__ __align__(128) char shared[];
    Place at;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    at.g = lane / 4, at.t = lane % 4;
    at.wm = warp % WM, at.wn = warp / WM % WN, at.wj = warp / (WM * WN);
    int rest = blockIdx.x;
    at.q_tile = rest % Q_TILES, rest /= Q_TILES;
    at.p_tile = rest % P_TILES, rest /= P_TILES;
    at.range = rest % RANGES, rest /= RANGES;
    at.i = rest % PA, rest /= PA;
    int linear = rest % (int)linears;
    i64 split = rest / (int)linears;
    x += linear * x_step * ES;
    dy += linear * dy_step * ES;
    out += split * size + linear * ((i64)PA * PB * PC * PD);
    bias += split * size + linear * (PA * PB * PD);

    i64 row0 = split * chunks * KR;
    i64 row_end = min(rows, row0 + chunks * KR);
    int steps = row_end > row0 ? (int)((row_end - row0 + KR - 1) / KR) : 0;
    int next_step = 0;
    auto load_next = [&]() {
        if (next_step < steps) {
            char* stage = shared + next_step % STAGES * STAGE;
            i64 row = row0 + (i64)next_step * KR;
            load_rows<PC, BQ, X_VECTOR, X_PITCH>(stage, x, ldx, row, row_end, at, at.q_tile);
            load_rows<PB, BP, DY_VECTOR, DY_PITCH>(stage + KR * X_PITCH, dy, ldy, row, row_end, at, at.p_tile);
            ++next_step;
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    for (int s = 0; s < STAGES - 1; ++s) load_next();

    Sums sums;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums.value[mt][r][nt][e] = 0.0f;
    if constexpr (BIAS) {
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums.bias[mt][r][e] = 0.0f;
    }
    for (int step = 0; step < steps; ++step) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
        load_next();
        const char* stage = shared + step % STAGES * STAGE;
        multiply_chunk(sums, stage, stage + KR * X_PITCH, at);
    }

    if constexpr (BIAS) {
        if (at.q_tile == 0 && at.wn == 0 && at.t == 0) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt)
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int r = 0; r < R; ++r) {
                        int p = at.p_tile * BP + at.wm * MT * 16 + feature_of(2 * mt + h, at.g), j = at.range * J + at.wj * R + r;
                        if (p < PB && j < PD) bias[(at.i * PB + p) * PD + j] = sums.bias[mt][r][2 * h];
                    }
        }
    }
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int m8 = 2 * mt + e / 2;
                int p = at.p_tile * BP + at.wm * MT * 16 + feature_of(m8, at.g);
                int q = at.q_tile * BQ + at.wn * NT * 8 + feature_of(nt, 2 * at.t + e % 2);
                if (p < PB && q < PC) {
#pragma unroll
                    for (int r = 0; r < R; ++r) {
                        int j = at.range * J + at.wj * R + r;
                        if (j < PD) out[(((i64)at.i * PB + p) * PC + q) * PD + j] = sums.value[mt][r][nt][e];
                    }
                }
            }
}
