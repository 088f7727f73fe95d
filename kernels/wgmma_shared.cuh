// wgmma (sm_90a) with both operands in shared memory: c += a * b, 64 rows a warpgroup. The layouts are those of wgmma.cuh: a lies as
// no-swizzle core matrices of 8 rows x 16 bytes, 128 bytes from one 8 rows to the next, any distance from one k8 to the next.
#pragma once
#include "wgmma.cuh"

#define WGMMA_D(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])

template <int N> struct WgmmaShared;

template <> struct WgmmaShared<16> {
    static __device__ __forceinline__ void run(float (&c)[2][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, 1, 1, 1, 0, 0;"
                     : WGMMA_D(0), WGMMA_D(1)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaShared<24> {
    static __device__ __forceinline__ void run(float (&c)[3][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n24k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11}, %12, %13, 1, 1, 1, 0, 0;"
                     : WGMMA_D(0), WGMMA_D(1), WGMMA_D(2)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaShared<32> {
    static __device__ __forceinline__ void run(float (&c)[4][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, 1, 1, 1, 0, 0;"
                     : WGMMA_D(0), WGMMA_D(1), WGMMA_D(2), WGMMA_D(3)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaShared<40> {
    static __device__ __forceinline__ void run(float (&c)[5][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n40k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19}, %20, %21, 1, 1, 1, 0, 0;"
                     : WGMMA_D(0), WGMMA_D(1), WGMMA_D(2), WGMMA_D(3), WGMMA_D(4)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaShared<48> {
    static __device__ __forceinline__ void run(float (&c)[6][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n48k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23}, %24, %25, 1, 1, 1, 0, 0;"
                     : WGMMA_D(0), WGMMA_D(1), WGMMA_D(2), WGMMA_D(3), WGMMA_D(4), WGMMA_D(5)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaShared<64> {
    static __device__ __forceinline__ void run(float (&c)[8][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 0, 0;"
                     : WGMMA_D(0), WGMMA_D(1), WGMMA_D(2), WGMMA_D(3), WGMMA_D(4), WGMMA_D(5), WGMMA_D(6), WGMMA_D(7)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaShared<72> {
    static __device__ __forceinline__ void run(float (&c)[9][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n72k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35}, %36, %37, 1, 1, 1, 0, 0;"
                     : WGMMA_D(0), WGMMA_D(1), WGMMA_D(2), WGMMA_D(3), WGMMA_D(4), WGMMA_D(5), WGMMA_D(6), WGMMA_D(7), WGMMA_D(8)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaShared<96> {
    static __device__ __forceinline__ void run(float (&c)[12][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n96k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}, %48, %49, 1, 1, 1, 0, 0;"
                     : WGMMA_D(0), WGMMA_D(1), WGMMA_D(2), WGMMA_D(3), WGMMA_D(4), WGMMA_D(5), WGMMA_D(6), WGMMA_D(7), WGMMA_D(8), WGMMA_D(9), WGMMA_D(10), WGMMA_D(11)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaShared<128> {
    static __device__ __forceinline__ void run(float (&c)[16][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, 1, 1, 1, 0, 0;"
                     : WGMMA_D(0), WGMMA_D(1), WGMMA_D(2), WGMMA_D(3), WGMMA_D(4), WGMMA_D(5), WGMMA_D(6), WGMMA_D(7), WGMMA_D(8), WGMMA_D(9), WGMMA_D(10), WGMMA_D(11), WGMMA_D(12), WGMMA_D(13), WGMMA_D(14), WGMMA_D(15)
                     : "l"(a), "l"(b));
    }
};
