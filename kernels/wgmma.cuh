// wgmma (sm_90a): c[O..] += a * B, 64 rows a warpgroup, a from registers, B from shared memory through a descriptor.
//
// A warp holds rows 16w..16w+15 of the 64 in the layout of mma.sync m16n8k16, accumulators and a alike, so the code
// around the product is the same for both. B lies as no-swizzle core matrices, K-major: panel [k8][column][8 halves],
// 128 bytes from one 8 columns to the next, columns*16 bytes from one k8 to the next.
#pragma once

#if MODE == 1
#define WGMMA_HALF "bf16"
#else
#define WGMMA_HALF "f16"
#endif

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

__device__ __forceinline__ unsigned long long wgmma_descriptor(unsigned int address, int columns) {
    return ((unsigned long long)(128 >> 4) << 32) | ((unsigned long long)columns << 16) | ((address & 0x3ffff) >> 4);
}

// The widest single instruction for N columns, N a multiple of 8; wider products are done in pieces.
__host__ __device__ constexpr int wgmma_piece(int columns) {
    return columns % 128 == 0 ? 128 : columns % 96 == 0 ? 96 : columns % 72 == 0 ? 72 : columns % 64 == 0 ? 64 : columns <= 48 && columns != 0 ? columns : columns % 48 == 0 ? 48 : columns % 40 == 0 ? 40 : columns % 32 == 0 ? 32 : columns % 24 == 0 ? 24 : columns % 16 == 0 ? 16 : 8;
}

#define WGMMA_C(n) "+f"(c[O + n][0]), "+f"(c[O + n][1]), "+f"(c[O + n][2]), "+f"(c[O + n][3])

template <int N> struct Wgmma;

template <> struct Wgmma<8> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], const unsigned int (&a)[4], unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %9, 0;"
                     " wgmma.mma_async.sync.aligned.m64n8k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3},"
                     " {%4,%5,%6,%7}, %8, p, 1, 1, 0; }"
                     : WGMMA_C(0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }
};

template <> struct Wgmma<16> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], const unsigned int (&a)[4], unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %13, 0;"
                     " wgmma.mma_async.sync.aligned.m64n16k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7},"
                     " {%8,%9,%10,%11}, %12, p, 1, 1, 0; }"
                     : WGMMA_C(0), WGMMA_C(1)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }
};

template <> struct Wgmma<24> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], const unsigned int (&a)[4], unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %17, 0;"
                     " wgmma.mma_async.sync.aligned.m64n24k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11},"
                     " {%12,%13,%14,%15}, %16, p, 1, 1, 0; }"
                     : WGMMA_C(0), WGMMA_C(1), WGMMA_C(2)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }
};

template <> struct Wgmma<32> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], const unsigned int (&a)[4], unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %21, 0;"
                     " wgmma.mma_async.sync.aligned.m64n32k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},"
                     " {%16,%17,%18,%19}, %20, p, 1, 1, 0; }"
                     : WGMMA_C(0), WGMMA_C(1), WGMMA_C(2), WGMMA_C(3)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }
};

template <> struct Wgmma<40> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], const unsigned int (&a)[4], unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %25, 0;"
                     " wgmma.mma_async.sync.aligned.m64n40k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19},"
                     " {%20,%21,%22,%23}, %24, p, 1, 1, 0; }"
                     : WGMMA_C(0), WGMMA_C(1), WGMMA_C(2), WGMMA_C(3), WGMMA_C(4)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }
};

template <> struct Wgmma<48> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], const unsigned int (&a)[4], unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %29, 0;"
                     " wgmma.mma_async.sync.aligned.m64n48k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23},"
                     " {%24,%25,%26,%27}, %28, p, 1, 1, 0; }"
                     : WGMMA_C(0), WGMMA_C(1), WGMMA_C(2), WGMMA_C(3), WGMMA_C(4), WGMMA_C(5)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }
};

template <> struct Wgmma<64> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], const unsigned int (&a)[4], unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;"
                     " wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
                     " {%32,%33,%34,%35}, %36, p, 1, 1, 0; }"
                     : WGMMA_C(0), WGMMA_C(1), WGMMA_C(2), WGMMA_C(3), WGMMA_C(4), WGMMA_C(5), WGMMA_C(6), WGMMA_C(7)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }
};

template <> struct Wgmma<72> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], const unsigned int (&a)[4], unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %41, 0;"
                     " wgmma.mma_async.sync.aligned.m64n72k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35},"
                     " {%36,%37,%38,%39}, %40, p, 1, 1, 0; }"
                     : WGMMA_C(0), WGMMA_C(1), WGMMA_C(2), WGMMA_C(3), WGMMA_C(4), WGMMA_C(5), WGMMA_C(6), WGMMA_C(7), WGMMA_C(8)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }
};

template <> struct Wgmma<96> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], const unsigned int (&a)[4], unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %53, 0;"
                     " wgmma.mma_async.sync.aligned.m64n96k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47},"
                     " {%48,%49,%50,%51}, %52, p, 1, 1, 0; }"
                     : WGMMA_C(0), WGMMA_C(1), WGMMA_C(2), WGMMA_C(3), WGMMA_C(4), WGMMA_C(5), WGMMA_C(6), WGMMA_C(7), WGMMA_C(8), WGMMA_C(9), WGMMA_C(10), WGMMA_C(11)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }
};

template <> struct Wgmma<128> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], const unsigned int (&a)[4], unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;"
                     " wgmma.mma_async.sync.aligned.m64n128k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
                     " {%64,%65,%66,%67}, %68, p, 1, 1, 0; }"
                     : WGMMA_C(0), WGMMA_C(1), WGMMA_C(2), WGMMA_C(3), WGMMA_C(4), WGMMA_C(5), WGMMA_C(6), WGMMA_C(7), WGMMA_C(8), WGMMA_C(9), WGMMA_C(10), WGMMA_C(11), WGMMA_C(12), WGMMA_C(13), WGMMA_C(14), WGMMA_C(15)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }
};
