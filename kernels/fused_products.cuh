// Products of operands in registers, 64 rows a warpgroup, with a panel of weights in shared memory, by wgmma.
#pragma once
#include "instructions.cuh"
#include "mode.cuh"
#include "wgmma.cuh"

template <int TILES_, int O = 0>
__device__ __forceinline__ void wgmma_step(float (&acc)[TILES_][4], const u32 (&a)[4], u32 address, int columns) {
    constexpr int kPiece = wgmma_piece((TILES_ - O) * 8);
    Wgmma<kPiece>::template run<O>(acc, a, wgmma_descriptor(address + O * 128, columns), 1);
    if constexpr (O + kPiece / 8 < TILES_) wgmma_step<TILES_, O + kPiece / 8>(acc, a, address, columns);
}

constexpr int kSmallTerms = 1, kLargeTerms = 2;  // of pairs: lo*hi + hi*lo, and hi*hi

// acc += a[s] * panel[first + s * STRIDE], for `count` of S steps of a panel of N column tiles, which begins at the address `panel`. Of
// pairs `small`, which may be acc, takes lo*hi + hi*lo, and `terms` are multiplied. The products are only queued.
template <int N, int S, int STRIDE, int IMAGE_BYTES>
__device__ __forceinline__ void multiply(float (&acc)[N][4], float (&small)[N][4], const u32 (&hi)[S][4], const u32 (&lo)[kPairs ? S : 1][4],
                                         u32 panel, int first, int count = S, int terms = kSmallTerms | kLargeTerms) {
    constexpr int kStep = N * 256;
    if constexpr (kPairs) {
#pragma unroll
        for (int s = 0; s < S; ++s) {
            if (s >= count || !(terms & kSmallTerms)) continue;
            wgmma_step(small, lo[s], panel + (first + s * STRIDE) * kStep, N * 8);
            wgmma_step(small, hi[s], panel + (first + s * STRIDE) * kStep + IMAGE_BYTES, N * 8);
        }
    }
#pragma unroll
    for (int s = 0; s < S; ++s)
        if (s < count && (terms & kLargeTerms)) wgmma_step(acc, hi[s], panel + (first + s * STRIDE) * kStep, N * 8);
}
