// What the feed-forward kernels do with values that the lanes of a row hold: values of a column to all rows, vectors to their neighbours.
#pragma once
#include "instructions.cuh"

// acc = float32 values in panel order, which all rows share.
template <int TILES>
__device__ __forceinline__ void broadcast(float (&acc)[TILES][4], u32 address, int t) {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        u32 pair[2];
        load_shared_pair(pair, address + (n * 4 + t) * 8);
        acc[n][0] = acc[n][2] = __uint_as_float(pair[0]);
        acc[n][1] = acc[n][3] = __uint_as_float(pair[1]);
    }
}

// acc *= float32 values in panel order; asm keeps the compiler from doing it later, when registers are scarcer.
template <int TILES>
__device__ __forceinline__ void multiply_columns(float (&acc)[TILES][4], u32 address, int t) {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        u32 pair[2];
        load_shared_pair(pair, address + (n * 4 + t) * 8);
#pragma unroll
        for (int e = 0; e < 4; ++e) asm volatile("mul.f32 %0, %0, %1;" : "+f"(acc[n][e]) : "f"(__uint_as_float(pair[e % 2])));
    }
    fence_async();
}

// Lane t of the four lanes of a row holds vectors N*t .. N*t + N-1 of 4*N; where N is odd it gets vectors t, t + 4, ...: in turn n all give their
// n-th, which are vectors of four different lanes.
template <int N>
__device__ __forceinline__ int place_of(int n, int t) { return N % 2 ? n * 4 + t : t * N + n; }
template <int N>
__device__ __forceinline__ void exchange(Vector<16> (&v)[N], int t) {
    if constexpr (N % 2 == 0 || N == 1) return;
    Vector<16> got[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int from = N * (t - n) & 3, nth = (N * from + n) / 4;  // N * N = 1 modulo 8
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 word = __shfl_sync(0xffffffffu, v[n].w[k], from, 4);
#pragma unroll
            for (int place = 0; place < N; ++place) got[place].w[k] = n == 0 || nth == place ? word : got[place].w[k];
        }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) v[n] = got[n];
}
