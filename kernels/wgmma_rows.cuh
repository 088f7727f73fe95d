// wgmma (sm_90a) for attention: rows of 64 halves lie in shared memory as 128 bytes each, whose 16-byte pieces are swizzled: piece p of
// row r is the (p ^ r % 8)-th. Tiles of rows begin at multiples of 1024 bytes.
#pragma once
#include "wgmma.cuh"

// Where a piece of a row lies, from the first row on.
__device__ __forceinline__ unsigned int row_piece_at(int row, int piece) { return row * 128 + ((piece ^ row % 8) << 4); }

// Rows from `address` on, for a product along their features (`address` + 32 bytes: the next 16) or along the rows themselves.
__device__ __forceinline__ unsigned long long rows_descriptor(unsigned int address) {
    return 1ull << 62 | (unsigned long long)(1024 >> 4) << 32 | 1ull << 16 | ((address & 0x3ffff) >> 4);
}

// The same at an offset in bytes, which costs less than another descriptor.
__device__ __forceinline__ unsigned long long rows_further(unsigned long long descriptor, int bytes) { return descriptor + (bytes >> 4); }

// c[O..] = a * bᵀ: 64 rows from `a` on, N rows from `b` on, which are descriptors.
template <int N, int O, int T>
__device__ __forceinline__ void multiply_by_rows(float (&c)[T][4], unsigned long long a, unsigned long long b) {
#pragma unroll
    for (int s = 0; s < 4; ++s) WgmmaShared<N>::template run<O>(c, rows_further(a, s * 32), rows_further(b, s * 32), s > 0);
}

// c = a * b, or c += a * b: a from registers, 16 rows from the descriptor `b` on.
__device__ __forceinline__ void multiply_rows(float (&c)[8][4], const unsigned int (&a)[4], unsigned long long b, int accumulate) {
    constexpr int O = 0;
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;"
                 " wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_HALF "." WGMMA_HALF " {" WGMMA_TEXT_8 "}, {%32,%33,%34,%35}, %36, p, 1, 1, 1; }"
                 : WGMMA_SUMS_8
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
