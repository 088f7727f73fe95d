// Widths of wgmma.cuh's products that only the kernel of block products uses.
#pragma once
#include "wgmma.cuh"

template <> struct Wgmma<144> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], const unsigned int (&a)[4], unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %77, 0;"
                     " wgmma.mma_async.sync.aligned.m64n144k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71},"
                     " {%72,%73,%74,%75}, %76, p, 1, 1, 0; }"
                     : WGMMA_C(0), WGMMA_C(1), WGMMA_C(2), WGMMA_C(3), WGMMA_C(4), WGMMA_C(5), WGMMA_C(6), WGMMA_C(7), WGMMA_C(8), WGMMA_C(9), WGMMA_C(10), WGMMA_C(11), WGMMA_C(12), WGMMA_C(13), WGMMA_C(14), WGMMA_C(15), WGMMA_C(16), WGMMA_C(17)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }
};

template <> struct Wgmma<192> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], const unsigned int (&a)[4], unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %101, 0;"
                     " wgmma.mma_async.sync.aligned.m64n192k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95},"
                     " {%96,%97,%98,%99}, %100, p, 1, 1, 0; }"
                     : WGMMA_C(0), WGMMA_C(1), WGMMA_C(2), WGMMA_C(3), WGMMA_C(4), WGMMA_C(5), WGMMA_C(6), WGMMA_C(7), WGMMA_C(8), WGMMA_C(9), WGMMA_C(10), WGMMA_C(11), WGMMA_C(12), WGMMA_C(13), WGMMA_C(14), WGMMA_C(15), WGMMA_C(16), WGMMA_C(17), WGMMA_C(18), WGMMA_C(19), WGMMA_C(20), WGMMA_C(21), WGMMA_C(22), WGMMA_C(23)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }
};

template <> struct Wgmma<256> {
    template <int O, int T>
    static __device__ __forceinline__ void run(float (&c)[T][4], const unsigned int (&a)[4], unsigned long long b, int accumulate) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %133, 0;"
                     " wgmma.mma_async.sync.aligned.m64n256k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127},"
                     " {%128,%129,%130,%131}, %132, p, 1, 1, 0; }"
                     : WGMMA_C(0), WGMMA_C(1), WGMMA_C(2), WGMMA_C(3), WGMMA_C(4), WGMMA_C(5), WGMMA_C(6), WGMMA_C(7), WGMMA_C(8), WGMMA_C(9), WGMMA_C(10), WGMMA_C(11), WGMMA_C(12), WGMMA_C(13), WGMMA_C(14), WGMMA_C(15), WGMMA_C(16), WGMMA_C(17), WGMMA_C(18), WGMMA_C(19), WGMMA_C(20), WGMMA_C(21), WGMMA_C(22), WGMMA_C(23), WGMMA_C(24), WGMMA_C(25), WGMMA_C(26), WGMMA_C(27), WGMMA_C(28), WGMMA_C(29), WGMMA_C(30), WGMMA_C(31)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }
};
