// wgmma (sm_90a) for attention: rows of 64 halves lie in shared memory as 128 bytes each, whose 16-byte pieces are swizzled: piece p of
// row r is the (p ^ r % 8)-th. Tiles of rows begin at multiples of 1024 bytes.
#pragma once
#include "wgmma.cuh"

// Rows from `address` on, for a product along their features (`address` + 32 bytes: the next 16) or along the rows themselves.
__device__ __forceinline__ unsigned long long rows_descriptor(unsigned int address) {
    return 1ull << 62 | (unsigned long long)(1024 >> 4) << 32 | 1ull << 16 | ((address & 0x3ffff) >> 4);
}

#define WGMMA_R(n) "+f"(c[O + n][0]), "+f"(c[O + n][1]), "+f"(c[O + n][2]), "+f"(c[O + n][3])

template <int N> struct WgmmaRows;

template <> struct WgmmaRows<8> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %6, 0;"
                     " wgmma.mma_async.sync.aligned.m64n8k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3},"
                     " %4, %5, p, 1, 1, 0, 0; }"
                     : WGMMA_R(0)
                     : "l"(a), "l"(b), "r"(accumulate));
    }
};

template <> struct WgmmaRows<16> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %10, 0;"
                     " wgmma.mma_async.sync.aligned.m64n16k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7},"
                     " %8, %9, p, 1, 1, 0, 0; }"
                     : WGMMA_R(0), WGMMA_R(1)
                     : "l"(a), "l"(b), "r"(accumulate));
    }
};

template <> struct WgmmaRows<24> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %14, 0;"
                     " wgmma.mma_async.sync.aligned.m64n24k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11},"
                     " %12, %13, p, 1, 1, 0, 0; }"
                     : WGMMA_R(0), WGMMA_R(1), WGMMA_R(2)
                     : "l"(a), "l"(b), "r"(accumulate));
    }
};

template <> struct WgmmaRows<32> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0;"
                     " wgmma.mma_async.sync.aligned.m64n32k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},"
                     " %16, %17, p, 1, 1, 0, 0; }"
                     : WGMMA_R(0), WGMMA_R(1), WGMMA_R(2), WGMMA_R(3)
                     : "l"(a), "l"(b), "r"(accumulate));
    }
};

template <> struct WgmmaRows<40> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %22, 0;"
                     " wgmma.mma_async.sync.aligned.m64n40k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19},"
                     " %20, %21, p, 1, 1, 0, 0; }"
                     : WGMMA_R(0), WGMMA_R(1), WGMMA_R(2), WGMMA_R(3), WGMMA_R(4)
                     : "l"(a), "l"(b), "r"(accumulate));
    }
};

template <> struct WgmmaRows<48> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %26, 0;"
                     " wgmma.mma_async.sync.aligned.m64n48k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23},"
                     " %24, %25, p, 1, 1, 0, 0; }"
                     : WGMMA_R(0), WGMMA_R(1), WGMMA_R(2), WGMMA_R(3), WGMMA_R(4), WGMMA_R(5)
                     : "l"(a), "l"(b), "r"(accumulate));
    }
};

template <> struct WgmmaRows<56> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %30, 0;"
                     " wgmma.mma_async.sync.aligned.m64n56k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27},"
                     " %28, %29, p, 1, 1, 0, 0; }"
                     : WGMMA_R(0), WGMMA_R(1), WGMMA_R(2), WGMMA_R(3), WGMMA_R(4), WGMMA_R(5), WGMMA_R(6)
                     : "l"(a), "l"(b), "r"(accumulate));
    }
};

template <> struct WgmmaRows<64> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;"
                     " wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
                     " %32, %33, p, 1, 1, 0, 0; }"
                     : WGMMA_R(0), WGMMA_R(1), WGMMA_R(2), WGMMA_R(3), WGMMA_R(4), WGMMA_R(5), WGMMA_R(6), WGMMA_R(7)
                     : "l"(a), "l"(b), "r"(accumulate));
    }
};

template <> struct WgmmaRows<72> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %38, 0;"
                     " wgmma.mma_async.sync.aligned.m64n72k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35},"
                     " %36, %37, p, 1, 1, 0, 0; }"
                     : WGMMA_R(0), WGMMA_R(1), WGMMA_R(2), WGMMA_R(3), WGMMA_R(4), WGMMA_R(5), WGMMA_R(6), WGMMA_R(7), WGMMA_R(8)
                     : "l"(a), "l"(b), "r"(accumulate));
    }
};

template <> struct WgmmaRows<80> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %42, 0;"
                     " wgmma.mma_async.sync.aligned.m64n80k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39},"
                     " %40, %41, p, 1, 1, 0, 0; }"
                     : WGMMA_R(0), WGMMA_R(1), WGMMA_R(2), WGMMA_R(3), WGMMA_R(4), WGMMA_R(5), WGMMA_R(6), WGMMA_R(7), WGMMA_R(8), WGMMA_R(9)
                     : "l"(a), "l"(b), "r"(accumulate));
    }
};

template <> struct WgmmaRows<88> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %46, 0;"
                     " wgmma.mma_async.sync.aligned.m64n88k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43},"
                     " %44, %45, p, 1, 1, 0, 0; }"
                     : WGMMA_R(0), WGMMA_R(1), WGMMA_R(2), WGMMA_R(3), WGMMA_R(4), WGMMA_R(5), WGMMA_R(6), WGMMA_R(7), WGMMA_R(8), WGMMA_R(9), WGMMA_R(10)
                     : "l"(a), "l"(b), "r"(accumulate));
    }
};

template <> struct WgmmaRows<96> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %50, 0;"
                     " wgmma.mma_async.sync.aligned.m64n96k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47},"
                     " %48, %49, p, 1, 1, 0, 0; }"
                     : WGMMA_R(0), WGMMA_R(1), WGMMA_R(2), WGMMA_R(3), WGMMA_R(4), WGMMA_R(5), WGMMA_R(6), WGMMA_R(7), WGMMA_R(8), WGMMA_R(9), WGMMA_R(10), WGMMA_R(11)
                     : "l"(a), "l"(b), "r"(accumulate));
    }
};

template <> struct WgmmaRows<104> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %54, 0;"
                     " wgmma.mma_async.sync.aligned.m64n104k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51},"
                     " %52, %53, p, 1, 1, 0, 0; }"
                     : WGMMA_R(0), WGMMA_R(1), WGMMA_R(2), WGMMA_R(3), WGMMA_R(4), WGMMA_R(5), WGMMA_R(6), WGMMA_R(7), WGMMA_R(8), WGMMA_R(9), WGMMA_R(10), WGMMA_R(11), WGMMA_R(12)
                     : "l"(a), "l"(b), "r"(accumulate));
    }
};

// The same at an offset in bytes, which costs less than another descriptor.
__device__ __forceinline__ unsigned long long rows_further(unsigned long long descriptor, int bytes) { return descriptor + (bytes >> 4); }

// c[O..] = a * bᵀ: 64 rows from `a` on, N rows from `b` on, which are descriptors.
template <int N, int O, int T>
__device__ __forceinline__ void multiply_by_rows(float (&c)[T][4], unsigned long long a, unsigned long long b) {
#pragma unroll
    for (int s = 0; s < 4; ++s) WgmmaRows<N>::template run<O>(c, rows_further(a, s * 32), rows_further(b, s * 32), s > 0);
}

// c = a * b, or c += a * b: a from registers, 16 rows from the descriptor `b` on.
__device__ __forceinline__ void multiply_rows(float (&c)[8][4], const unsigned int (&a)[4], unsigned long long b, int accumulate) {
    constexpr int O = 0;
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;"
                 " wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_HALF "." WGMMA_HALF
                 " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
                 " {%32,%33,%34,%35}, %36, p, 1, 1, 1; }"
                 : WGMMA_R(0), WGMMA_R(1), WGMMA_R(2), WGMMA_R(3), WGMMA_R(4), WGMMA_R(5), WGMMA_R(6), WGMMA_R(7)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
