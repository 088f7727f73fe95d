// The gradient of one Kronecker-sparse factor of any pattern (a, b, c, d):
//
//     out[i, p, q, j] = sum over rows of dy[row, (i*b + p)*d + j] * x[row, (i*c + q)*d + j]
//
// x: (rows, a*c*d) and dy: (rows, a*b*d), rows LDX and LDY elements apart, batch-size-first; out: (a, b, c, d), float32.
// No permuted copy of x or dy is made: both are staged in their natural order, and a warp takes residues apart as it reads.
//
// Tiling. A CTA owns one i, BP outputs p, BQ inputs q, J consecutive residues j and one split of the rows, which it walks in
// chunks of KR. Per residue this is dyᵀ x: the rows are the inner dimension of mma.sync. A lane reads from one row the E = P*J
// (or R) elements that lie side by side in shared memory: P neighbouring p (or q), all residues of its warp. The tiles of eight
// therefore interleave: tile s holds p = s/P*8P + lane*P + s%P. Rows of one k slot are t + 4m, the same for x and dy.
// Halves of a single residue (J = 1) are read by transposing ldmatrix instead, in natural order.
// Each split writes its sums to partial[split] in the layout of out; factor_grad_sum adds the splits in a fixed order, so
// results do not change from run to run. With one split out is written at once.
//
// Modes. fp16, bf16: m16n8k16, float32 sums. tf32: inputs rounded to TF32, m16n8k8. fp32: x = hi + lo in TF32, hi rounded to nearest,
// lo*hi + hi*lo + hi*hi, added in float32 with rounding every 8 rows; the whole range of float32 is safe. Infinities and NaN propagate.
//
// Limits: any a, b, c, d, rows > 0. Needs sm_80.
// Measured on an H200, bf16, 25088 rows (recipes/results/factor_grad_h200.csv): 2 to 6 times the time of the bytes of x and dy. Einsum
// takes 2.6 times as long in the median, but less where d = 1 and a block has a side of 256 or more. No unit is saturated: the
// schedulers issue on 28 % of the clocks, and the L2 cache works at half its rate.
//
// Defines: PATTERN_A, PATTERN_B, PATTERN_C, PATTERN_D, MODE, WM, WN, WJ, MT, NT, R, P, KR, STAGES, X_VECTOR, DY_VECTOR (bytes a copy),
// X_PITCH, DY_PITCH (bytes from row to row in shared memory), MIN_BLOCKS.

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
constexpr bool WHOLE = J == PD;
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
    constexpr int PER_ROW = TILE * J * ES / VECTOR;
    constexpr int PER_FEATURE = J * ES / VECTOR > 0 ? J * ES / VECTOR : 1;
    const char* origin = source + (row0 * stride + ((i64)at.i * SIZE + tile * TILE) * PD + at.range * J) * ES;
    copy_lines<KR, PER_ROW, VECTOR, PITCH, THREADS>(to, origin, stride * ES, (int)min((i64)KR, row_end - row0), [&](int part) {
        if constexpr (WHOLE) {
            int offset = part * VECTOR;
            return SIZE % TILE == 0 || tile * TILE * PD * ES + offset < SIZE * PD * ES ? offset : -1;
        } else {
            int feature = part / PER_FEATURE, within = part % PER_FEATURE * VECTOR;
            bool valid = (SIZE % TILE == 0 || tile * TILE + feature < SIZE) && (PD % J == 0 || at.range * J * ES + within < PD * ES);
            return valid ? feature * PD * ES + within : -1;
        }
    });
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
};

__device__ __forceinline__ void multiply_chunk(Sums& sums, const char* x, const char* dy, const Place& at) {
#pragma unroll(HALVES ? 2 : 1)
    for (int step = 0; step < KR / STEP; ++step) {
        Group left[2 * MT / P];
#pragma unroll
        for (int s = 0; s < 2 * MT / P; ++s) read_group<DY_PITCH>(left[s], dy + step * STEP * DY_PITCH, at.wm * MT * 16 + s * 8 * P, at);
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

// grid: (a * residue ranges * p tiles * q tiles) * splits; a split is `chunks` chunks of KR rows
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    factor_grad(const char* x, const char* dy, float* partial, i64 rows, i64 ldx, i64 ldy, i64 chunks) {
    extern __shared__ __align__(128) char shared[];
    Place at;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    at.g = lane / 4, at.t = lane % 4;
    at.wm = warp % WM, at.wn = warp / WM % WN, at.wj = warp / (WM * WN);
    int rest = blockIdx.x;
    at.q_tile = rest % Q_TILES, rest /= Q_TILES;
    at.p_tile = rest % P_TILES, rest /= P_TILES;
    at.range = rest % RANGES, rest /= RANGES;
    at.i = rest % PA;
    i64 split = rest / PA;

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
    for (int step = 0; step < steps; ++step) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncthreads();
        load_next();
        const char* stage = shared + step % STAGES * STAGE;
        multiply_chunk(sums, stage, stage + KR * X_PITCH, at);
    }

    float* out = partial + split * ((i64)PA * PB * PC * PD);
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

// A block adds the splits of 32 elements: eight threads an element, each every eighth split, then a tree over the eight
extern "C" __global__ void __launch_bounds__(256) factor_grad_sum(const float* partial, float* out, i64 splits) {
    constexpr i64 SIZE = (i64)PA * PB * PC * PD;
    __shared__ float parts[8][32];
    int lane = threadIdx.x % 32, part = threadIdx.x / 32;
    i64 e = (i64)blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (e < SIZE) {
#pragma unroll 8
        for (i64 s = part; s < splits; s += 8) sum += partial[s * SIZE + e];
    }
    parts[part][lane] = sum;
    __syncthreads();
    if (part == 0 && e < SIZE) {
        out[e] = ((parts[0][lane] + parts[1][lane]) + (parts[2][lane] + parts[3][lane])) +
                 ((parts[4][lane] + parts[5][lane]) + (parts[6][lane] + parts[7][lane]));
    }
}
