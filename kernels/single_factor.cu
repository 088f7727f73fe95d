// y = x Kᵀ (+ bias) for one Kronecker-sparse factor of any pattern (a, b, c, d), in one launch:
//
//     y[row, (i*b + p)*d + j] = sum over q of x[row, (i*c + q)*d + j] * factor[i, p, q, j]  (+ bias[(i*b + p)*d + j])
//
// x: (rows, a*c*d), rows LDX elements apart; y: (rows, a*b*d), contiguous; row-major, batch-size-first.
//
// Tiling. A CTA owns BM rows, one i, BN outputs p and J consecutive residues j. It walks over q in chunks of KC. The chunk of x is
// copied to shared memory in its natural order [row][q][j], so global reads are contiguous for every d; a warp takes its
// residues apart while it reads fragments (two elements q, q' of one residue make a register: one byte permute). The accumulators
// of a residue class interleave again in shared memory, eight rows of a warp at a time, and leave in wide contiguous stores.
// Warps: WM over rows (MT tiles of 16 each), WN over outputs (NT tiles of 8 each), WJ over residues (R each, J = WJ*R).
//
//        q0 .. q0+KC, all J residues                     p0 .. p0+BN, all J residues
//      +-----------------------------+                 +-----------------------------+
//   BM |j0 j1 .. |j0 j1 .. |j0 j1 .. |  x W (i, j) ->  |j0 j1 .. |j0 j1 .. |j0 j1 .. | BM
//      +-----------------------------+                 +-----------------------------+
//
// Weights are packed on the host, per (i, residue range, output tile, chunk): [residue][plane][k/8][output][8 halves], read by
// ldmatrix; the order of q within 16 follows the fragment of x. They stay in shared memory (RESIDENT) or stream with x.
// The CTA goes over TILES row tiles one after another; the copies run STAGES - 1 chunks ahead.
//
// Modes. fp16, bf16: m16n8k16, float32 sums. exact: float32 FFMA, q ascending. tf32 and fp32 take float32: every row and residue
// has a power-of-two scale, chosen from the first 16 q with 2^8 of headroom and lowered (sums rescaled) if a later element does
// not fit; scaled x = hi + lo in fp16, the weights likewise with one scale a factor. tf32 multiplies hi*hi, fp32 also lo*hi and
// hi*lo, and adds each group of 16 products in float32 with rounding. An element smaller than 2^-33 times the largest of its
// row and residue may vanish. Infinities and NaN in x or the factor give NaN or infinite results.
//
// Limits: any a, b, c, d, rows; rows of zero length are not launched. Needs sm_80. Shared memory is the caller's sum, see single.py.
//
// Blocks that run together share rows of x: all output tiles and RANGES_FAST neighbouring residue ranges, then row chunks, then the rest.
//
// Defines: PATTERN_A, PATTERN_B, PATTERN_C, PATTERN_D, MODE, WM, WN, WJ, MT, NT, R, KC, STAGES, RESIDENT, INTERLEAVED_Q, RANGES_FAST,
// X_VECTOR and Y_VECTOR (bytes a copy or store), X_PITCH and Y_PITCH (bytes from row to row in shared memory), MIN_BLOCKS.

#include "single_memory.cuh"

#define MODE_FP16 0
#define MODE_BF16 1
#define MODE_TF32 2
#define MODE_FP32 3
#define MODE_EXACT 4

constexpr int PA = PATTERN_A, PB = PATTERN_B, PC = PATTERN_C, PD = PATTERN_D;
constexpr bool HALVES = MODE == MODE_FP16 || MODE == MODE_BF16;
constexpr bool SCALED = MODE == MODE_TF32 || MODE == MODE_FP32;
constexpr int PLANES = MODE == MODE_FP32 ? 2 : 1;
constexpr int ES = HALVES ? 2 : 4;           // bytes an element of x and y
constexpr int WS = MODE == MODE_EXACT ? 4 : 2;  // bytes an element of the weights
constexpr int J = WJ * R;
constexpr int BM = WM * MT * 16;
constexpr int BN = WN * NT * 8;
constexpr int THREADS = WM * WN * WJ * 32;
constexpr int OUTPUT_TILES = (PB + BN - 1) / BN;
constexpr int RANGES = (PD + J - 1) / J;     // residue ranges
constexpr int CHUNKS = (PC + KC - 1) / KC;
constexpr int IMAGE_HEADER = 128;            // holds the exponent of the weights' scale
constexpr int WEIGHT_CHUNK = J * PLANES * KC * BN * WS;
constexpr int X_STAGE = BM * X_PITCH;
constexpr int STAGE = X_STAGE + (RESIDENT ? 0 : WEIGHT_CHUNK);
constexpr int WEIGHTS_AT = 0;
constexpr int STAGES_AT = RESIDENT ? CHUNKS * WEIGHT_CHUNK : 0;
constexpr int BIAS_AT = STAGES_AT + STAGES * STAGE;
constexpr int OUTPUT_AT = BIAS_AT + (BN * J * 4 + 15) / 16 * 16;
constexpr bool WHOLE = J == PD;              // a chunk of x and a row of the output tile are contiguous in global memory
constexpr bool CONTIGUOUS_Q = WJ == 1 && !INTERLEAVED_Q;  // a thread's four q lie next to each other, all residues included
constexpr int OWN = 2 * J * ES;              // bytes of a row that one thread holds side by side after the product, where WJ = 1
constexpr bool DIRECT = MODE != MODE_EXACT && WJ == 1 && WHOLE && PB % 2 == 0 && (OWN == 8 || OWN == 16) && Y_VECTOR == 16;

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 out;
    if constexpr (MODE == MODE_BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ float half_to_float(u32 pair, int upper) {
    float out;
    asm("{.reg .b16 l, h;\n mov.b32 {l, h}, %1;\n cvt.f32.f16 %0, %2;}" : "=f"(out) : "r"(pair), "h"((unsigned short)(upper ? pair >> 16 : pair)));
    return out;
}

__device__ __forceinline__ float stored_to_float(const char* from) {
    if constexpr (ES == 4) return *(const float*)from;
    unsigned short bits = *(const unsigned short*)from;
    return MODE == MODE_BF16 ? __uint_as_float((u32)bits << 16) : half_to_float(bits, 0);
}

__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (MODE == MODE_BF16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// The B fragments of two neighbouring n8 tiles (one, where NT is odd and this is the last): b[0..1] and b[2..3]
template <bool PAIR>
__device__ __forceinline__ void read_weights(u32 (&b)[4], u32 address) {
    if constexpr (PAIR) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address));
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(b[0]), "=r"(b[1]) : "r"(address));
    }
}

struct Place {  // which part of the product this thread works on
    int i, range, output_tile;
    int wm, wn, wj, g, t, lane;
};

__device__ __forceinline__ void load_weights(char* to, const char* image, const Place& at, int chunk) {
    i64 block = (((i64)at.i * RANGES + at.range) * OUTPUT_TILES + at.output_tile) * CHUNKS + chunk;
    const char* from = image + IMAGE_HEADER + block * WEIGHT_CHUNK;
    for (int e = threadIdx.x * 16; e < WEIGHT_CHUNK; e += THREADS * 16) copy_async<16>(to + e, from + e, true);
}

__device__ __forceinline__ void load_x(char* to, const char* x, i64 ldx, i64 rows, i64 row0, const Place& at, int chunk) {
    constexpr int PER_ROW = KC * J * ES / X_VECTOR;
    constexpr int PER_Q = J * ES / X_VECTOR > 0 ? J * ES / X_VECTOR : 1;
    const char* origin = x + (row0 * ldx + ((i64)at.i * PC + chunk * KC) * PD + at.range * J) * ES;
    copy_lines<BM, PER_ROW, X_VECTOR, X_PITCH, THREADS>(to, origin, ldx * ES, (int)min((i64)BM, rows - row0), [&](int part) {
        if constexpr (WHOLE) {
            int offset = part * X_VECTOR;
            return PC % KC == 0 || chunk * KC * PD * ES + offset < PC * PD * ES ? offset : -1;
        } else {
            int q = part / PER_Q, within = part % PER_Q * X_VECTOR;
            bool valid = (PC % KC == 0 || chunk * KC + q < PC) && (PD % J == 0 || at.range * J * ES + within < PD * ES);
            return valid ? q * PD * ES + within : -1;
        }
    });
}

// Raw elements of one row for 16 q: words[...] such that element (m, r) is q number m of this thread and residue r of this warp
constexpr int ROW_WORDS = CONTIGUOUS_Q ? R * ES : 4 * ((R * ES + 3) / 4);

__device__ __forceinline__ void read_row(u32 (&words)[ROW_WORDS], const char* row, const Place& at) {
    if constexpr (CONTIGUOUS_Q) {
        read_words<ROW_WORDS>(words, row + at.t * 4 * J * ES);
    } else {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            int q = INTERLEAVED_Q ? at.t + 4 * m : 4 * at.t + m;
            read_words<ROW_WORDS / 4>(words + m * (ROW_WORDS / 4), row + (q * J + at.wj * R) * ES);
        }
    }
}

__device__ __forceinline__ constexpr int element_at(int m, int r) {  // in elements of the words array
    return CONTIGUOUS_Q ? m * R + r : m * (ROW_WORDS / 4) * (4 / ES) + r;
}

__device__ __forceinline__ u32 pair_of_halves(const u32 (&words)[ROW_WORDS], int m, int r) {
    int first = element_at(m, r), second = element_at(m + 1, r);
    if (first / 2 == second / 2) return words[first / 2];
    u32 selector = (first % 2 ? 0x32u : 0x10u) | (second % 2 ? 0x7600u : 0x5400u);
    return __byte_perm(words[first / 2], words[second / 2], selector);
}

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((u32)(exponent + 127) << 23); }

#if MODE != MODE_EXACT

struct Fragments {
    u32 hi[MT][R][4];
    u32 lo[PLANES == 2 ? MT : 1][PLANES == 2 ? R : 1][4];
};

struct Sums {
    float value[MT][R][NT][4];
    float scale[SCALED ? MT : 1][SCALED ? R : 1][2];  // of rows g and g + 8
};

constexpr int HEADROOM = 8;            // a first element may be scaled to 2^HEADROOM; later ones up to 2^16 still fit
constexpr int LARGEST_EXPONENT = 123;  // of a scale

// Reads and converts the fragments of 16 q. False where an element did not fit, or was not finite.
__device__ __forceinline__ bool read_fragments(Fragments& f, const Sums& sums, const char* x, const Place& at) {
    u32 check = 0;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            u32 words[ROW_WORDS];
            read_row(words, x + ((at.wm * MT + mt) * 16 + h * 8 + at.g) * X_PITCH, at);
#pragma unroll
            for (int r = 0; r < R; ++r) {
#pragma unroll
                for (int m = 0; m < 4; m += 2) {
                    if constexpr (HALVES) {
                        f.hi[mt][r][m + h] = pair_of_halves(words, m, r);
                    } else {
                        float first = __uint_as_float(words[element_at(m, r)]) * sums.scale[mt][r][h];
                        float second = __uint_as_float(words[element_at(m + 1, r)]) * sums.scale[mt][r][h];
                        u32 hi = pack(first, second), probe = hi;
                        f.hi[mt][r][m + h] = hi;
                        if constexpr (PLANES == 2) {
                            probe = pack(first - half_to_float(hi, 0), second - half_to_float(hi, 1));
                            f.lo[mt][r][m + h] = probe;
                        }
                        asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(check) : "r"(probe), "r"(0));
                    }
                }
            }
        }
    }
    return (check & 0x7fff7fffu) == 0;
}

// Lowers the scales so that these 16 q fit, and the sums with them
__device__ __forceinline__ void lower_scales(Sums& sums, const char* x, const Place& at) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            u32 words[ROW_WORDS];
            read_row(words, x + ((at.wm * MT + mt) * 16 + h * 8 + at.g) * X_PITCH, at);
#pragma unroll
            for (int r = 0; r < R; ++r) {
                u32 largest = 0;
#pragma unroll
                for (int m = 0; m < 4; ++m) largest = max(largest, words[element_at(m, r)] & 0x7fffffffu);
                largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
                largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
                int before = (int)(__float_as_uint(sums.scale[mt][r][h]) >> 23) - 127;
                int now = min(before, min(LARGEST_EXPONENT, HEADROOM - 1 - ((int)(largest >> 23) - 127)));
                float factor = now - before < -126 ? 0.0f : power_of_two(now - before);
                sums.scale[mt][r][h] = power_of_two(now);
#pragma unroll
                for (int nt = 0; nt < NT; ++nt) sums.value[mt][r][nt][2 * h] *= factor, sums.value[mt][r][nt][2 * h + 1] *= factor;
            }
        }
    }
}

__device__ __forceinline__ void start_sums(Sums& sums) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int r = 0; r < R; ++r) {
            if constexpr (SCALED) sums.scale[mt][r][0] = sums.scale[mt][r][1] = power_of_two(LARGEST_EXPONENT);
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums.value[mt][r][nt][e] = 0.0f;
        }
}

__device__ __forceinline__ void add_product(float (&sum)[4], const Fragments& f, int mt, int r, const u32 (&hi)[4], const u32 (&lo)[4], int n) {
    if constexpr (PLANES == 1) {
        multiply(sum, f.hi[mt][r], hi[2 * n], hi[2 * n + 1]);
    } else {
        float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        multiply(part, f.lo[mt][r], hi[2 * n], hi[2 * n + 1]);
        multiply(part, f.hi[mt][r], lo[2 * n], lo[2 * n + 1]);
        multiply(part, f.hi[mt][r], hi[2 * n], hi[2 * n + 1]);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] += part[e];
    }
}

__device__ __forceinline__ void multiply_chunk(Sums& sums, const char* x, const char* weights, const Place& at, bool first) {
    // ldmatrix: lanes 8m to 8m+7 name the rows of matrix m = (second k8, second n8) in binary
    u32 base = shared_address(weights) + (at.wj * R * PLANES * (KC / 8) + (at.lane / 8) % 2) * BN * 16 +
               (at.wn * NT * 8 + at.lane / 16 * 8 + at.lane % 8) * 16;
#pragma unroll(HALVES ? 2 : 1)
    for (int step = 0; step < KC / 16; ++step) {
        Fragments f;
        const char* from = x + step * 16 * J * ES;
        if constexpr (SCALED) {
            bool redo = first && step == 0;
            if (!redo) redo = __any_sync(0xffffffffu, !read_fragments(f, sums, from, at));
            if (redo) {
                lower_scales(sums, from, at);
                read_fragments(f, sums, from, at);
            }
        } else {
            read_fragments(f, sums, from, at);
        }
#pragma unroll
        for (int r = 0; r < R; ++r) {
            u32 panel = base + (r * PLANES * (KC / 8) + step * 2) * BN * 16;
#pragma unroll
            for (int nt = 0; nt < NT; nt += 2) {
                constexpr int LO = (KC / 8) * BN * 16;
                u32 hi[4], lo[4];
                if (nt + 1 < NT) read_weights<true>(hi, panel + nt * 128);
                else read_weights<false>(hi, panel + nt * 128);
                if constexpr (PLANES == 2) {
                    if (nt + 1 < NT) read_weights<true>(lo, panel + LO + nt * 128);
                    else read_weights<false>(lo, panel + LO + nt * 128);
                }
#pragma unroll
                for (int n = 0; n < 2 && nt + n < NT; ++n)
#pragma unroll
                    for (int mt = 0; mt < MT; ++mt) add_product(sums.value[mt][r][nt + n], f, mt, r, hi, lo, n);
            }
        }
    }
}

__device__ __forceinline__ void finish_sums(Sums& sums, const float* bias, int weight_exponent, const Place& at) {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float undo = 1.0f, undo_rest = 1.0f;
                if constexpr (SCALED) {  // two powers, as one could leave the range of float32
                    int exponent = 127 - (int)(__float_as_uint(sums.scale[mt][r][h]) >> 23) - weight_exponent;
                    undo = power_of_two(exponent / 2), undo_rest = power_of_two(exponent - exponent / 2);
                }
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& value = sums.value[mt][r][nt][2 * h + e];
                        if constexpr (SCALED) value = value * undo * undo_rest;
                        value += bias[((at.wn * NT + nt) * 8 + 2 * at.t + e) * J + at.wj * R + r];
                    }
            }
}

// This thread's outputs p, p+1 of n8 tile nt in row h*8 + g of tile mt: all residues side by side, as words of y
constexpr int OWN_WORDS = (2 * R * ES + 3) / 4;

__device__ __forceinline__ void own_words(u32 (&words)[OWN_WORDS], const Sums& sums, int mt, int h, int nt) {
#pragma unroll
    for (int w = 0; w < OWN_WORDS; ++w) {
        if constexpr (ES == 4) {
            words[w] = __float_as_uint(sums.value[mt][w % R][nt][2 * h + w / R]);
        } else {
            words[w] = pack(sums.value[mt][(2 * w) % R][nt][2 * h + 2 * w / R], sums.value[mt][(2 * w + 1) % R][nt][2 * h + (2 * w + 1) / R]);
        }
    }
}

__device__ __forceinline__ void write_slab(char* slab, const Sums& sums, int mt, int h, const Place& at) {
    char* row = slab + (at.wm * 8 + at.g) * Y_PITCH;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
        u32 words[OWN_WORDS];
        own_words(words, sums, mt, h, nt);
        int p = (at.wn * NT + nt) * 8 + 2 * at.t;
        if constexpr (WJ == 1) {
            write_words<OWN_WORDS>(row + p * J * ES, words);
        } else {
            write_words<OWN_WORDS / 2>(row + (p * J + at.wj * R) * ES, words);
            write_words<OWN_WORDS / 2>(row + ((p + 1) * J + at.wj * R) * ES, words + OWN_WORDS / 2);
        }
    }
}

#else

struct Sums {  // thread (t = lane / 8, g = lane % 8) holds rows t + 4s and outputs g + 8u of its warp's tile
    float value[MT * 4][R][NT];
};

__device__ __forceinline__ void start_sums(Sums& sums) {
#pragma unroll
    for (int s = 0; s < MT * 4; ++s)
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int u = 0; u < NT; ++u) sums.value[s][r][u] = 0.0f;
}

__device__ __forceinline__ void multiply_chunk(Sums& sums, const char* x, const char* weights, const Place& at, bool) {
    const float* w = (const float*)weights + at.wj * R * KC * BN + at.wn * NT * 8 + at.lane % 8;
    const char* rows = x + (at.wm * MT * 16 + at.lane / 8) * X_PITCH + at.wj * R * 4;
#pragma unroll 2
    for (int q = 0; q < KC; ++q) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
            float own_x[MT * 4], own_w[NT];
#pragma unroll
            for (int s = 0; s < MT * 4; ++s) own_x[s] = *(const float*)(rows + 4 * s * X_PITCH + (q * J + r) * 4);
#pragma unroll
            for (int u = 0; u < NT; ++u) own_w[u] = w[(r * KC + q) * BN + 8 * u];
#pragma unroll
            for (int s = 0; s < MT * 4; ++s)
#pragma unroll
                for (int u = 0; u < NT; ++u) sums.value[s][r][u] = fmaf(own_x[s], own_w[u], sums.value[s][r][u]);
        }
    }
}

__device__ __forceinline__ void finish_sums(Sums& sums, const float* bias, int, const Place& at) {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int u = 0; u < NT; ++u) {
            float own = bias[((at.wn * NT + u) * 8 + at.lane % 8) * J + at.wj * R + r];
#pragma unroll
            for (int s = 0; s < MT * 4; ++s) sums.value[s][r][u] += own;
        }
}

__device__ __forceinline__ void write_slab(char* slab, const Sums& sums, int mt, int h, const Place& at) {
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int u = 0; u < NT; ++u) {
                char* row = slab + (at.wm * 8 + at.lane / 8 + 4 * s) * Y_PITCH;
                int p = (at.wn * NT + u) * 8 + at.lane % 8;
                *(float*)(row + (p * J + at.wj * R + r) * 4) = sums.value[mt * 4 + h * 2 + s][r][u];
            }
}

#endif

__device__ __forceinline__ void store_slab(char* y, const char* slab, i64 rows, i64 row0, const Place& at) {
    constexpr int PER_ROW = BN * J * ES / Y_VECTOR;
    constexpr int PER_P = J * ES / Y_VECTOR > 0 ? J * ES / Y_VECTOR : 1;
    constexpr int LANES = lanes_of_line(PER_ROW), AT_ONCE = THREADS / LANES;
    constexpr i64 Y_STRIDE = (i64)PA * PB * PD * ES;
    int p0 = at.output_tile * BN, left = (int)min((i64)BM, rows - row0);
    int lane = threadIdx.x % LANES, line0 = threadIdx.x / LANES;
    char* origin = y + row0 * Y_STRIDE + (((i64)at.i * PB + p0) * PD + at.range * J) * ES;
#pragma unroll
    for (int first = 0; first < PER_ROW; first += LANES) {
        int part = first + lane, offset;
        bool valid = PER_ROW % LANES == 0 || part < PER_ROW;
        if constexpr (WHOLE) {
            offset = part * Y_VECTOR;
            if constexpr (PB % BN != 0) valid &= p0 * PD * ES + offset < PB * PD * ES;
        } else {
            int p = part / PER_P, within = part % PER_P * Y_VECTOR;
            offset = p * PD * ES + within;
            if constexpr (PB % BN != 0) valid &= p0 + p < PB;
            if constexpr (PD % J != 0) valid &= at.range * J * ES + within < PD * ES;
        }
#pragma unroll
        for (int n = 0; n < WM * 8; n += AT_ONCE) {
            int line = n + line0, row = line / 8 * MT * 16 + line % 8;
            if (valid && row < left && (WM * 8 % AT_ONCE == 0 || line < WM * 8))
                move<Y_VECTOR>(origin + row * Y_STRIDE + offset, slab + line * Y_PITCH + part * Y_VECTOR);
        }
    }
}

__device__ __forceinline__ void store_tile(char* y, char* slab, Sums& sums, i64 rows, i64 row0, const Place& at) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#if MODE != MODE_EXACT
            if constexpr (DIRECT) {
                i64 row = row0 + (at.wm * MT + mt) * 16 + h * 8 + at.g;
#pragma unroll
                for (int nt = 0; nt < NT; ++nt) {
                    u32 words[OWN_WORDS];
                    own_words(words, sums, mt, h, nt);
                    int p = at.output_tile * BN + (at.wn * NT + nt) * 8 + 2 * at.t;
                    if (row < rows && p < PB) write_words<OWN_WORDS>(y + (row * PA * PB * PD + ((i64)at.i * PB + p) * PD) * ES, words);
                }
                continue;
            }
#endif
            if constexpr (!DIRECT) {
                write_slab(slab, sums, mt, h, at);
                __syncthreads();
                store_slab(y, slab, rows, row0 + mt * 16 + h * 8, at);
                __syncthreads();
            }
        }
}

// grid: (a * residue ranges * output tiles) * row chunks; a row chunk is `tiles` tiles of BM rows
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    single_factor(const char* x, const char* image, const char* bias, char* y, i64 rows, i64 ldx, i64 tiles) {
    extern __shared__ __align__(128) char shared[];
    Place at;
    at.lane = threadIdx.x % 32, at.g = at.lane / 4, at.t = at.lane % 4;
    int warp = threadIdx.x / 32;
    at.wm = warp % WM, at.wn = warp / WM % WN, at.wj = warp / (WM * WN);
    constexpr int FAST = OUTPUT_TILES * RANGES_FAST;
    int fast = blockIdx.x % FAST, rest = blockIdx.x / FAST;
    int row_chunks = gridDim.x / (PA * RANGES * OUTPUT_TILES);
    int slow = rest / row_chunks;
    at.output_tile = fast % OUTPUT_TILES;
    at.range = slow % (RANGES / RANGES_FAST) * RANGES_FAST + fast / OUTPUT_TILES;
    at.i = slow / (RANGES / RANGES_FAST);

    i64 first_tile = (i64)(rest % row_chunks) * tiles;
    i64 all_tiles = (rows + BM - 1) / BM;
    int own_tiles = (int)min(tiles, all_tiles - first_tile);
    if (own_tiles <= 0) return;

    float* own_bias = (float*)(shared + BIAS_AT);
    for (int e = threadIdx.x; e < BN * J; e += THREADS) {
        int p = at.output_tile * BN + e / J, j = at.range * J + e % J;
        bool valid = bias != nullptr && p < PB && j < PD;
        own_bias[e] = valid ? stored_to_float(bias + (((i64)at.i * PB + p) * PD + j) * ES) : 0.0f;
    }
    int weight_exponent = SCALED ? *(const int*)image : 0;

    if constexpr (RESIDENT) {
        for (int chunk = 0; chunk < CHUNKS; ++chunk) load_weights(shared + WEIGHTS_AT + chunk * WEIGHT_CHUNK, image, at, chunk);
    }
    int steps = own_tiles * CHUNKS;
    i64 next_row = first_tile * BM;
    int next_chunk = 0, next_step = 0;
    auto load_next = [&]() {
        if (next_step < steps) {
            char* stage = shared + STAGES_AT + next_step % STAGES * STAGE;
            load_x(stage, x, ldx, rows, next_row, at, next_chunk);
            if constexpr (!RESIDENT) load_weights(stage + X_STAGE, image, at, next_chunk);
            ++next_step;
            if (++next_chunk == CHUNKS) next_chunk = 0, next_row += BM;
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    for (int s = 0; s < STAGES - 1; ++s) load_next();

    Sums sums;
    int step = 0;
    for (int tile = 0; tile < own_tiles; ++tile) {
        start_sums(sums);
        for (int chunk = 0; chunk < CHUNKS; ++chunk, ++step) {
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
            __syncthreads();
            load_next();
            const char* stage = shared + STAGES_AT + step % STAGES * STAGE;
            const char* weights = RESIDENT ? shared + WEIGHTS_AT + chunk * WEIGHT_CHUNK : stage + X_STAGE;
            multiply_chunk(sums, stage, weights, at, chunk == 0);
        }
        finish_sums(sums, own_bias, weight_exponent, at);
        store_tile(y, shared + OUTPUT_AT, sums, rows, (first_tile + tile) * BM, at);
    }
}
