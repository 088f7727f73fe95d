// What two neighbouring rows exchange, so that stores fill lines of 128 bytes.
#pragma once
#include "instructions.cuh"

// The lanes of both rows have two vectors each, 64 bytes apart; then the even row's are in `first`, the odd row's in `second`.
__device__ __forceinline__ void exchange_rows(Vector<16>& first, Vector<16>& second, bool odd) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const u32 got = __shfl_xor_sync(0xffffffffu, odd ? first.w[k] : second.w[k], 4);
        (odd ? first.w[k] : second.w[k]) = got;
    }
}
