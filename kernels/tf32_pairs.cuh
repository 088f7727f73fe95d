// Products of float32 by mma.sync with each value as two tf32, the second one what the first leaves: nearly as exact as by float32.
#pragma once
#include "instructions.cuh"

template <int COUNT>
struct Pairs {
    u32 high[COUNT], low[COUNT];

    __device__ __forceinline__ void put(int k, float value) {
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high[k]) : "f"(value));
        low[k] = __float_as_uint(value - __uint_as_float(high[k]));  // mma reads its upper bits
    }
};

__device__ __forceinline__ void mma_tf32(float (&c)[4], const u32* a, const u32* b) {  // m16n8k8
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// sums[i][j] += a_i b_j: 16 rows by 8 columns each, over 8 terms; the small products first.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void mma_pairs(float (&sums)[ROWS][COLUMNS][4], const Pairs<4 * ROWS>& a, const Pairs<2 * COLUMNS>& b) {
    auto add = [&](const u32* left, const u32* right) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) mma_tf32(sums[i][j], left + 4 * i, right + 2 * j);
    };
    add(a.low, b.high);
    add(a.high, b.low);
    add(a.high, b.high);
}
