// wgmma (sm_90a) with both operands transposed in shared memory: c += aᵀ * b, where the 16 rows of a product are the rows of both.
// An operand lies in panels of 64 columns, 128 bytes a row, whose 16-byte pieces are swizzled: piece p of row r is the (p ^ r % 8)-th. Panels
// begin at multiples of 1024 bytes.
#pragma once
#include "wgmma.cuh"

// A product's 16 rows begin at `address`, a multiple of 1024; the next 64 columns lie `panel` bytes further.
__device__ __forceinline__ unsigned long long transposed_descriptor(unsigned int address, int panel) {
    return 1ull << 62 | (unsigned long long)(1024 >> 4) << 32 | (panel >> 4) << 16 | ((address & 0x3ffff) >> 4);
}

#define WGMMA_T(n) "+f"(c[O + n][0]), "+f"(c[O + n][1]), "+f"(c[O + n][2]), "+f"(c[O + n][3])

template <int N> struct WgmmaTransposed;

template <> struct WgmmaTransposed<16> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, 1, 1, 1, 1, 1;"
                     : WGMMA_T(0), WGMMA_T(1)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaTransposed<24> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n24k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11}, %12, %13, 1, 1, 1, 1, 1;"
                     : WGMMA_T(0), WGMMA_T(1), WGMMA_T(2)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaTransposed<32> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, 1, 1, 1, 1, 1;"
                     : WGMMA_T(0), WGMMA_T(1), WGMMA_T(2), WGMMA_T(3)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaTransposed<40> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n40k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19}, %20, %21, 1, 1, 1, 1, 1;"
                     : WGMMA_T(0), WGMMA_T(1), WGMMA_T(2), WGMMA_T(3), WGMMA_T(4)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaTransposed<48> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n48k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23}, %24, %25, 1, 1, 1, 1, 1;"
                     : WGMMA_T(0), WGMMA_T(1), WGMMA_T(2), WGMMA_T(3), WGMMA_T(4), WGMMA_T(5)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaTransposed<56> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n56k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27}, %28, %29, 1, 1, 1, 1, 1;"
                     : WGMMA_T(0), WGMMA_T(1), WGMMA_T(2), WGMMA_T(3), WGMMA_T(4), WGMMA_T(5), WGMMA_T(6)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaTransposed<64> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 1, 1;"
                     : WGMMA_T(0), WGMMA_T(1), WGMMA_T(2), WGMMA_T(3), WGMMA_T(4), WGMMA_T(5), WGMMA_T(6), WGMMA_T(7)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaTransposed<72> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n72k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35}, %36, %37, 1, 1, 1, 1, 1;"
                     : WGMMA_T(0), WGMMA_T(1), WGMMA_T(2), WGMMA_T(3), WGMMA_T(4), WGMMA_T(5), WGMMA_T(6), WGMMA_T(7), WGMMA_T(8)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaTransposed<96> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n96k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}, %48, %49, 1, 1, 1, 1, 1;"
                     : WGMMA_T(0), WGMMA_T(1), WGMMA_T(2), WGMMA_T(3), WGMMA_T(4), WGMMA_T(5), WGMMA_T(6), WGMMA_T(7), WGMMA_T(8), WGMMA_T(9), WGMMA_T(10), WGMMA_T(11)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaTransposed<104> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n104k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51}, %52, %53, 1, 1, 1, 1, 1;"
                     : WGMMA_T(0), WGMMA_T(1), WGMMA_T(2), WGMMA_T(3), WGMMA_T(4), WGMMA_T(5), WGMMA_T(6), WGMMA_T(7), WGMMA_T(8), WGMMA_T(9), WGMMA_T(10), WGMMA_T(11), WGMMA_T(12)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaTransposed<128> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, 1, 1, 1, 1, 1;"
                     : WGMMA_T(0), WGMMA_T(1), WGMMA_T(2), WGMMA_T(3), WGMMA_T(4), WGMMA_T(5), WGMMA_T(6), WGMMA_T(7), WGMMA_T(8), WGMMA_T(9), WGMMA_T(10), WGMMA_T(11), WGMMA_T(12), WGMMA_T(13), WGMMA_T(14), WGMMA_T(15)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaTransposed<136> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n136k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67}, %68, %69, 1, 1, 1, 1, 1;"
                     : WGMMA_T(0), WGMMA_T(1), WGMMA_T(2), WGMMA_T(3), WGMMA_T(4), WGMMA_T(5), WGMMA_T(6), WGMMA_T(7), WGMMA_T(8), WGMMA_T(9), WGMMA_T(10), WGMMA_T(11), WGMMA_T(12), WGMMA_T(13), WGMMA_T(14), WGMMA_T(15), WGMMA_T(16)
                     : "l"(a), "l"(b));
    }
};

// c[O..] += aᵀ * b for N columns of b, in two instructions where one does not reach
template <int N, int O = 0, int T>
__device__ __forceinline__ void multiply_transposed(float (&c)[T][4], unsigned long long a, unsigned long long b, int panel) {
    if constexpr (N <= 136) {
        WgmmaTransposed<N>::template run<O>(c, a, b);
    } else {
        WgmmaTransposed<128>::template run<O>(c, a, b);
        WgmmaTransposed<N - 128>::template run<O + 16>(c, a, b + 2 * (panel >> 4));
    }
}
