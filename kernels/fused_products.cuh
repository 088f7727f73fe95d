// Products of operands in registers, of MT tiles of 16 rows, with a panel of weights in shared memory, by mma.sync or by wgmma.
#pragma once
#include "instructions.cuh"
#include "mode.cuh"
#if WGMMA
#include "wgmma.cuh"
#endif

// hi and lo halves of two floats.
__device__ __forceinline__ void split2(float a, float b, u32& hi, u32& lo) {
    hi = round2(a, b);
    if constexpr (kPairs) lo = round2(a - widen((u16)hi), b - widen((u16)(hi >> 16)));
}

// The address that a lane hands to ldmatrix, relative to a panel of `columns` columns.
__device__ __forceinline__ u32 matrix_offset(int lane, int columns, int image_bytes) {
    const int matrix = lane >> 3, row = lane & 7;
    if constexpr (kPairs) return (matrix >> 1) * image_bytes + ((matrix & 1) * columns + row) * 16;
    else return ((matrix & 1) * columns + (matrix >> 1) * 8 + row) * 16;
}

#if WGMMA
template <int TILES_, int O = 0>
__device__ __forceinline__ void wgmma_step(float (&acc)[TILES_][4], const u32 (&a)[4], u32 address, int columns) {
    constexpr int kPiece = wgmma_piece((TILES_ - O) * 8);
    Wgmma<kPiece>::template run<O>(acc, a, wgmma_descriptor(address + O * 128, columns), 1);
    if constexpr (O + kPiece / 8 < TILES_) wgmma_step<TILES_, O + kPiece / 8>(acc, a, address, columns);
}
#endif

constexpr int kSmallTerms = 1, kLargeTerms = 2;  // of pairs: lo*hi + hi*lo, and hi*hi

// acc += a[s] * panel[first + s * STRIDE], for `count` of S steps of a panel of N column tiles. `panel` is the panel's address,
// plus the lane's ldmatrix offset for mma.sync. Of pairs `small`, which may be acc, takes lo*hi + hi*lo. `terms` of pairs are
// multiplied, with mma.sync all of them. The products of wgmma are only queued.
template <int N, int S, int STRIDE, int IMAGE_BYTES>
__device__ __forceinline__ void multiply(float (&acc)[MT][N][4], float (&small)[MT][N][4], const u32 (&hi)[S][MT][4],
                                         const u32 (&lo)[kPairs ? S : 1][MT][4], u32 panel, int first, int count = S, int terms = kSmallTerms | kLargeTerms) {
    constexpr int kStep = N * 256;
#if WGMMA
    if constexpr (kPairs) {
#pragma unroll
        for (int s = 0; s < S; ++s) {
            if (s >= count || !(terms & kSmallTerms)) continue;
            wgmma_step(small[0], lo[s][0], panel + (first + s * STRIDE) * kStep, N * 8);
            wgmma_step(small[0], hi[s][0], panel + (first + s * STRIDE) * kStep + IMAGE_BYTES, N * 8);
        }
    }
#pragma unroll
    for (int s = 0; s < S; ++s)
        if (s < count && (terms & kLargeTerms)) wgmma_step(acc[0], hi[s][0], panel + (first + s * STRIDE) * kStep, N * 8);
#else
    if constexpr (kPairs) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            u32 b[S][4];
#pragma unroll
            for (int s = 0; s < S; ++s) {
                if (s >= count) continue;
                load_matrices(b[s], panel + (first + s * STRIDE) * kStep + n * 128);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    mma(small[m][n], lo[s][m], b[s][0], b[s][1]);
                    mma(small[m][n], hi[s][m], b[s][2], b[s][3]);
                }
            }
#pragma unroll
            for (int s = 0; s < S; ++s)
#pragma unroll
                for (int m = 0; m < MT && s < count; ++m) mma(acc[m][n], hi[s][m], b[s][0], b[s][1]);
        }
    } else {
#pragma unroll
        for (int s = 0; s < S; ++s)
#pragma unroll
            for (int n = 0; n < N && s < count; n += 2) {
                u32 b[4];
                if (n + 1 < N) load_matrices(b, panel + (first + s * STRIDE) * kStep + n * 128);
                else load_two_matrices(b, panel + (first + s * STRIDE) * kStep + n * 128);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    mma(acc[m][n], hi[s][m], b[0], b[1]);
                    if (n + 1 < N) mma(acc[m][n + 1], hi[s][m], b[2], b[3]);
                }
            }
    }
#endif
}

// Products of wgmma run on their own: fence before, queue after, and wait until at most LEFT queued ones are unfinished.
__device__ __forceinline__ void begin_products() {
#if WGMMA
    wgmma_fence();
#endif
}
__device__ __forceinline__ void queue_products() {
#if WGMMA
    wgmma_commit();
#endif
}
template <int LEFT>
__device__ __forceinline__ void finish_products() {
#if WGMMA
    wgmma_wait<LEFT>();
#endif
}
