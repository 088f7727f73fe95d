// Moves between global memory, shared memory and registers, as single_factor.cu and transpose.cu need them.
#pragma once

#include "instructions.cuh"

typedef long long i64;

template <int BYTES>
__device__ __forceinline__ void copy_async(char* to, const char* from, bool valid) {
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0) : "memory");
    } else if constexpr (BYTES >= 4) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? BYTES : 0), "n"(BYTES)
                     : "memory");
    } else {
        *(u16*)to = valid ? *(const u16*)from : (u16)0;
    }
}

// How many threads share a line of VECTORS copies: a power of two that leaves few threads idle. A thread then keeps its columns
// from line to line, and what depends on them is computed once.
__host__ __device__ constexpr int lanes_of_line(int vectors) {
    int best = 32, least = (vectors + 31) / 32 * 32;
    for (int lanes = 16; lanes >= (vectors >= 8 ? 8 : 1); lanes /= 2) {
        int used = (vectors + lanes - 1) / lanes * lanes;
        if (used < least) best = lanes, least = used;
    }
    return best;
}

// LINES lines of VECTORS copies of VECTOR bytes to shared memory, PITCH bytes apart there and `stride` in global memory.
// column(v) is where copy v of a line starts, in bytes; -1 fills with zeros, as do lines from `valid_lines` on.
template <int LINES, int VECTORS, int VECTOR, int PITCH, int THREADS, typename Column>
__device__ __forceinline__ void copy_lines(char* to, const char* from, i64 stride, int valid_lines, Column column) {
    constexpr int LANES = lanes_of_line(VECTORS), AT_ONCE = THREADS / LANES;
    int lane = threadIdx.x % LANES, line0 = threadIdx.x / LANES;
    const char* line_from = from + line0 * stride;
    i64 step = AT_ONCE * stride;
#pragma unroll
    for (int first = 0; first < VECTORS; first += LANES) {
        int v = first + lane;
        if (VECTORS % LANES != 0 && v >= VECTORS) break;
        int offset = column(v);
        const char* source = line_from + offset;
        char* target = to + line0 * PITCH + v * VECTOR;
        int limit = offset < 0 ? 0 : valid_lines;
#pragma unroll
        for (int n = 0; n < LINES; n += AT_ONCE) {
            if (LINES % AT_ONCE == 0 || line0 + n < LINES) copy_async<VECTOR>(target + n * PITCH, source, line0 + n < limit);
            source += step;
        }
    }
}

// LINES rows of a tile: TILE features of RESIDUES neighbouring residues from feature `first` of SIZE on, of one block of a pattern with
// stride D; `from` is where the block's residues begin in the first row.
template <int LINES, int SIZE, int TILE, int RESIDUES, int D, int ES, int VECTOR, int PITCH, int THREADS>
__device__ __forceinline__ void load_features(char* to, const char* from, i64 stride, int valid_lines, int first, int first_residue) {
    constexpr bool WHOLE = RESIDUES == D;
    constexpr int PER_FEATURE = RESIDUES * ES / VECTOR > 0 ? RESIDUES * ES / VECTOR : 1;
    const char* origin = from + (i64)first * D * ES;
    copy_lines<LINES, TILE * RESIDUES * ES / VECTOR, VECTOR, PITCH, THREADS>(to, origin, stride, valid_lines, [&](int part) {
        int feature = WHOLE ? part * VECTOR / (D * ES) : part / PER_FEATURE;
        int within = part % PER_FEATURE * VECTOR;
        int offset = WHOLE ? part * VECTOR : feature * D * ES + within;
        bool valid = SIZE % TILE == 0 || first + feature < SIZE;
        if constexpr (D % RESIDUES != 0) valid &= first_residue * ES + within < D * ES;
        return valid ? offset : -1;
    });
}

template <int BYTES>
__device__ __forceinline__ void move(char* to, const char* from) {
    if constexpr (BYTES == 16) *(uint4*)to = *(const uint4*)from;
    else if constexpr (BYTES == 8) *(uint2*)to = *(const uint2*)from;
    else if constexpr (BYTES == 4) *(u32*)to = *(const u32*)from;
    else *(u16*)to = *(const u16*)from;
}

// WORDS words from or to shared memory in the widest accesses that a start aligned like WORDS allows
template <int WORDS>
__device__ __forceinline__ void read_words(u32* to, const char* from) {
    constexpr int WIDTH = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int w = 0; w < WORDS; w += WIDTH) {
        if constexpr (WIDTH == 4) {
            uint4 v = *(const uint4*)(from + 4 * w);
            to[w] = v.x, to[w + 1] = v.y, to[w + 2] = v.z, to[w + 3] = v.w;
        } else if constexpr (WIDTH == 2) {
            uint2 v = *(const uint2*)(from + 4 * w);
            to[w] = v.x, to[w + 1] = v.y;
        } else {
            to[w] = *(const u32*)(from + 4 * w);
        }
    }
}

template <int WORDS>
__device__ __forceinline__ void write_words(char* to, const u32* from) {
    constexpr int WIDTH = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int w = 0; w < WORDS; w += WIDTH) {
        if constexpr (WIDTH == 4) *(uint4*)(to + 4 * w) = make_uint4(from[w], from[w + 1], from[w + 2], from[w + 3]);
        else if constexpr (WIDTH == 2) *(uint2*)(to + 4 * w) = make_uint2(from[w], from[w + 1]);
        else *(u32*)(to + 4 * w) = from[w];
    }
}
