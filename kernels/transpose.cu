// Many matrices transposed: y[row, i, f, s] = x[row, i, s, f] (+ bias[i, f, s]).
//
// x: (rows, MATRICES, SLOW, FAST), rows LDX elements apart; y: (rows, MATRICES, FAST, SLOW), rows LDY elements apart. bias: like a row
// of y, or null; added in float32. With (SLOW, FAST) = (c, d) the residues of a pattern (a, b, c, d) come apart into blocks
// that a batched product reads in place; with (d, b) its results interleave again.
//
// A CTA moves a tile of a matrix, or TOGETHER small matrices, through shared memory: vectors of IN_VECTOR elements come in along a row,
// vectors of OUT_VECTOR elements leave along a column. Two-byte elements lie there in words of two neighbours, where IN_VECTOR
// is even; a thread takes the words of OUT_VECTOR rows apart into two columns. Rows s, s + 1, .. of one vector lie in areas
// of their own, so that neighbouring threads, a vector apart, read neighbouring lines, at a pitch that spreads them over all
// banks.
//
// Memory-bound: at the rate of a copy where both vectors are wide. At d = 2, 3 and 6 those on one side are an element or two, which costs time.
//
// Defines: MODE (0 float16, 1 bfloat16, 2 float32), MATRICES, SLOW, FAST, TILE_SLOW, TILE_FAST, TOGETHER, IN_VECTOR, OUT_VECTOR.
// Limits: sm_80 or newer. IN_VECTOR divides FAST and TILE_FAST, OUT_VECTOR divides SLOW and TILE_SLOW; either takes at most 16 bytes.
// Addresses and strides are multiples of 16 bytes, or both vectors are one element.

#include "single_memory.cuh"

constexpr int THREADS = 256;
constexpr int ES = MODE == 2 ? 4 : 2;                             // bytes an element
constexpr int EACH = MODE != 2 && IN_VECTOR % 2 == 0 ? 2 : 1;     // elements a word in shared memory
constexpr int IN_WORDS = IN_VECTOR / EACH;
constexpr int OUT_WORDS = OUT_VECTOR * ES >= 4 ? OUT_VECTOR * ES / 4 : 1;
constexpr int LINE = TILE_FAST / EACH, LINES = TILE_SLOW / OUT_VECTOR;  // words a line, lines an area
constexpr int SPREAD = LINES >= 32 ? 1 : LINES >= 16 ? 2 : LINES >= 8 ? 4 : LINES >= 4 ? 8 : 16;
constexpr int PITCH = LINE + (3 * SPREAD - LINE % (2 * SPREAD)) % (2 * SPREAD);  // SPREAD times an odd number
constexpr int AREA = LINES * PITCH + (5 - LINES * PITCH % 4) % 4;  // 1 modulo 4: vectors of four rows come in to all banks
constexpr int VECTORS_IN = TOGETHER * TILE_SLOW * TILE_FAST / IN_VECTOR, VECTORS_OUT = TOGETHER * LINES * LINE;
constexpr int ROUNDS = (VECTORS_IN + THREADS - 1) / THREADS;
constexpr int TILES_SLOW = (SLOW + TILE_SLOW - 1) / TILE_SLOW, TILES_FAST = (FAST + TILE_FAST - 1) / TILE_FAST;
constexpr bool JOINED = EACH == 2 && OUT_VECTOR == SLOW && OUT_VECTOR * ES <= 8 && OUT_VECTOR > 1;  // two columns are adjacent in y

template <bool WIDE> struct Bits { typedef u32 type; };
template <> struct Bits<false> { typedef u16 type; };
typedef Bits<MODE == 2 || EACH == 2>::type Word;

template <int ELEMENTS>
__device__ __forceinline__ void read_vector(u32* to, const char* from) {
    if constexpr (ELEMENTS * ES >= 4) read_words<ELEMENTS * ES / 4>(to, from);
    else to[0] = *(const u16*)from;
}

template <int ELEMENTS>
__device__ __forceinline__ void write_vector(char* to, const u32* from) {
    if constexpr (ELEMENTS * ES >= 4) write_words<ELEMENTS * ES / 4>(to, from);
    else *(u16*)to = (u16)from[0];
}

__device__ __forceinline__ u32 add_halves(u32 left, u32 right) {
    const float sum = widen((u16)left) + widen((u16)right);
    u16 half;
    if constexpr (MODE == 1) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(sum));
    else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(sum));
    return half;
}

__device__ __forceinline__ u32 add(u32 left, u32 right) {
    if constexpr (MODE == 2) return __float_as_uint(__uint_as_float(left) + __uint_as_float(right));
    else return add_halves(left & 0xffff, right & 0xffff) | add_halves(left >> 16, right >> 16) << 16;
}

// One column of the words of OUT_VECTOR rows.
__device__ __forceinline__ void take_column(u32* to, const u32* words, int column) {
#pragma unroll
    for (int w = 0; w < OUT_WORDS; ++w) {
        if constexpr (MODE == 2) to[w] = words[w];
        else if constexpr (OUT_VECTOR == 1) to[w] = words[0] >> 16 * column;
        else to[w] = __byte_perm(words[2 * w], words[2 * w + 1], column ? 0x7632 : 0x5410);
    }
}

// grid: tiles of a matrix, by groups of TOGETHER matrices
extern "C" __global__ void __launch_bounds__(THREADS)
    transpose(const char* __restrict__ x, const char* __restrict__ bias, char* __restrict__ y, i64 rows, i64 ldx, i64 ldy) {
    __shared__ Word tile[TOGETHER * OUT_VECTOR * AREA];
    int place = blockIdx.x % (TILES_SLOW * TILES_FAST);
    int slow0 = place / TILES_FAST * TILE_SLOW, fast0 = place % TILES_FAST * TILE_FAST;
    i64 first = (i64)(blockIdx.x / (TILES_SLOW * TILES_FAST)) * TOGETHER, row0 = first / MATRICES;
    int i0 = (int)(first % MATRICES), left = (int)min(rows - row0, (i64)TOGETHER);
    x += row0 * ldx * ES;
    y += row0 * ldy * ES;

    u32 words[ROUNDS][IN_WORDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        int n = round * THREADS + threadIdx.x;
        int s = slow0 + n / (TILE_FAST / IN_VECTOR) % TILE_SLOW, f = fast0 + n % (TILE_FAST / IN_VECTOR) * IN_VECTOR;
        int i = i0 + n / (TILE_SLOW * TILE_FAST / IN_VECTOR), row = TOGETHER == 1 ? 0 : i / MATRICES;
        if (n < VECTORS_IN && row < left && s < SLOW && f < FAST)
            read_vector<IN_VECTOR>(words[round], x + (row * ldx + i % MATRICES * (SLOW * FAST) + s * FAST + f) * ES);
    }
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        int n = round * THREADS + threadIdx.x;
        int s = n / (TILE_FAST / IN_VECTOR) % TILE_SLOW, m = n / (TILE_SLOW * TILE_FAST / IN_VECTOR);
        Word* to = tile + (m * OUT_VECTOR + s % OUT_VECTOR) * AREA + s / OUT_VECTOR * PITCH + n % (TILE_FAST / IN_VECTOR) * IN_WORDS;
        if (n < VECTORS_IN) {
#pragma unroll
            for (int w = 0; w < IN_WORDS; ++w) to[w] = (Word)words[round][w];
        }
    }
    __syncthreads();
#pragma unroll 2
    for (int n = threadIdx.x; n < VECTORS_OUT; n += THREADS) {
        int line = n % LINES, word = n / LINES % LINE, m = n / (LINES * LINE);
        int i = i0 + m, row = TOGETHER == 1 ? 0 : i / MATRICES;
        int s = slow0 + line * OUT_VECTOR, f = fast0 + word * EACH;
        if (row >= left || s >= SLOW || f >= FAST) continue;
        u32 from[OUT_VECTOR], to[EACH][OUT_WORDS];
#pragma unroll
        for (int k = 0; k < OUT_VECTOR; ++k) from[k] = tile[(m * OUT_VECTOR + k) * AREA + line * PITCH + word];
        int within = i % MATRICES * (SLOW * FAST) + f * SLOW + s;
        char* target = y + (row * ldy + within) * ES;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            take_column(to[e], from, e);
            if (bias != nullptr) {
                u32 own[OUT_WORDS];
                read_vector<OUT_VECTOR>(own, bias + (within + e * SLOW) * ES);
#pragma unroll
                for (int w = 0; w < OUT_WORDS; ++w) to[e][w] = add(to[e][w], own[w]);
            }
            if constexpr (!JOINED) write_vector<OUT_VECTOR>(target + e * SLOW * ES, to[e]);
        }
        if constexpr (JOINED) write_vector<2 * OUT_VECTOR>(target, to[0]);
    }
}
