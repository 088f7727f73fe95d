// Widths of wgmma_shared.cuh's products that only the kernels of block products and of streaming dense weights use.
#pragma once
#include "wgmma_shared.cuh"

template <> struct WgmmaShared<144> {
    static __device__ __forceinline__ void run(float (&c)[18][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n144k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71}, %72, %73, 1, 1, 1, 0, 0;"
                     : WGMMA_D(0), WGMMA_D(1), WGMMA_D(2), WGMMA_D(3), WGMMA_D(4), WGMMA_D(5), WGMMA_D(6), WGMMA_D(7), WGMMA_D(8), WGMMA_D(9), WGMMA_D(10), WGMMA_D(11), WGMMA_D(12), WGMMA_D(13), WGMMA_D(14), WGMMA_D(15), WGMMA_D(16), WGMMA_D(17)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaShared<192> {
    static __device__ __forceinline__ void run(float (&c)[24][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95}, %96, %97, 1, 1, 1, 0, 0;"
                     : WGMMA_D(0), WGMMA_D(1), WGMMA_D(2), WGMMA_D(3), WGMMA_D(4), WGMMA_D(5), WGMMA_D(6), WGMMA_D(7), WGMMA_D(8), WGMMA_D(9), WGMMA_D(10), WGMMA_D(11), WGMMA_D(12), WGMMA_D(13), WGMMA_D(14), WGMMA_D(15), WGMMA_D(16), WGMMA_D(17), WGMMA_D(18), WGMMA_D(19), WGMMA_D(20), WGMMA_D(21), WGMMA_D(22), WGMMA_D(23)
                     : "l"(a), "l"(b));
    }
};

template <> struct WgmmaShared<256> {
    static __device__ __forceinline__ void run(float (&c)[32][4], unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." WGMMA_HALF "." WGMMA_HALF
                     " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, %128, %129, 1, 1, 1, 0, 0;"
                     : WGMMA_D(0), WGMMA_D(1), WGMMA_D(2), WGMMA_D(3), WGMMA_D(4), WGMMA_D(5), WGMMA_D(6), WGMMA_D(7), WGMMA_D(8), WGMMA_D(9), WGMMA_D(10), WGMMA_D(11), WGMMA_D(12), WGMMA_D(13), WGMMA_D(14), WGMMA_D(15), WGMMA_D(16), WGMMA_D(17), WGMMA_D(18), WGMMA_D(19), WGMMA_D(20), WGMMA_D(21), WGMMA_D(22), WGMMA_D(23), WGMMA_D(24), WGMMA_D(25), WGMMA_D(26), WGMMA_D(27), WGMMA_D(28), WGMMA_D(29), WGMMA_D(30), WGMMA_D(31)
                     : "l"(a), "l"(b));
    }
};
