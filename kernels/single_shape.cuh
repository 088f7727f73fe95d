// What follows from the macros of single_factor.cu: sizes, the parts of shared memory, a thread's place in the product, an element's value.
#pragma once

#include "single_memory.cuh"

#define MODE_FP16 0
#define MODE_BF16 1
#define MODE_TF32 2
#define MODE_FP32 3

constexpr int PA = PATTERN_A, PB = PATTERN_B, PC = PATTERN_C, PD = PATTERN_D;
constexpr bool HALVES = MODE == MODE_FP16 || MODE == MODE_BF16;
constexpr bool SCALED = MODE == MODE_TF32 || MODE == MODE_FP32;
constexpr int PLANES = MODE == MODE_FP32 ? 2 : 1;
constexpr int ES = HALVES ? 2 : 4;           // bytes an element of x, the bias and y
constexpr int J = WJ * R;
constexpr int BM = WM * MT * 16;
constexpr int BN = WN * NT * 8;
constexpr int THREADS = WM * WN * WJ * 32;
constexpr int OUTPUT_TILES = (PB + BN - 1) / BN;
constexpr int RANGES = (PD + J - 1) / J;     // residue ranges
constexpr int CHUNKS = (PC + KC - 1) / KC;
constexpr int IMAGE_HEADER = 128;            // holds the exponent of the weights' scale
constexpr int WEIGHT_CHUNK = J * PLANES * KC * BN * 2;
constexpr int X_STAGE = BM * X_PITCH;
constexpr int STAGE = X_STAGE + (RESIDENT ? 0 : WEIGHT_CHUNK);
constexpr int WEIGHTS_AT = 0;
constexpr int STAGES_AT = RESIDENT ? CHUNKS * WEIGHT_CHUNK : 0;
constexpr int BIAS_AT = STAGES_AT + STAGES * STAGE;
constexpr int OUTPUT_AT = BIAS_AT + (BN * J * 4 + 15) / 16 * 16;
constexpr bool WHOLE = J == PD;              // a chunk of x and a row of the output tile are contiguous in global memory
constexpr bool CONTIGUOUS_Q = WJ == 1 && !INTERLEAVED_Q;  // a thread's four q lie next to each other, all residues included
constexpr int OWN = 2 * J * ES;              // bytes of a row that one thread holds side by side after the product, where WJ = 1
constexpr bool DIRECT = WJ == 1 && WHOLE && PB % 2 == 0 && (OWN == 8 || OWN == 16) && Y_VECTOR == 16;

struct Place {  // which part of the product this thread works on
    int i, range, output_tile;
    int wm, wn, wj, g, t, lane;
};

__device__ __forceinline__ float stored_to_float(const char* from) {
    if constexpr (ES == 4) return *(const float*)from;
    return widen(*(const u16*)from);
}
