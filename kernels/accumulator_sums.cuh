// Sums over the rows of accumulators, whose rows are shared out by lane / 4 (wgmma.cuh).
#pragma once
#include "instructions.cuh"

// Adds up values of the eight lanes that have the same lane % 4, in a fixed order. Of COUNT sums, each lane keeps the COUNT / 8 from the
// (lane / 4 * COUNT / 8)-th on, in the first elements. A step shares the sums that are left with the lane that is APART.
template <int APART = 16, int COUNT>
__device__ __forceinline__ void sum_over_rows(float (&values)[COUNT], int lane) {
    constexpr int kLeft = COUNT * APART / 32;
    static_assert(COUNT % 8 == 0, "each of eight lanes keeps as many");
    const bool upper = lane & APART;
#pragma unroll
    for (int n = 0; n < kLeft; ++n) {
        const float first = values[n], second = values[kLeft + n];
        values[n] = (upper ? second : first) + __shfl_xor_sync(0xffffffffu, upper ? first : second, APART);
    }
    if constexpr (APART > 4) sum_over_rows<APART / 2>(values, lane);
}
