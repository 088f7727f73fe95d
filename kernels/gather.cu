// image[n] = weights[table[n]], or half of it, rounded to 16 bits; 0 where table[n] < 0. The packing of weights for half-precision kernels, in
// one launch: `table` holds, for each 16-bit element of the images, the place of its weight among SLOTS tensors laid one after the
// other. Tensor k begins at starts.place[k].
//
// Each thread makes eight neighbouring elements, which it stores as one vector of 16 bytes. The weights come from the L2 cache, in no
// particular order; the table, twice the size of the image, is read once in order. Memory-bound.
//
// Defines: SLOTS; SOURCE, the type of the weights: 0 float16, 1 bfloat16, 2 float32. TARGET, that of the image: 0 or 1. HALVED.
// Limits: sm_80 or newer; count is a multiple of 8; table and image begin at multiples of 16 bytes.
#include "target.cuh"

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

struct Sources {
    const void* tensor[SLOTS];
};

struct Starts {
    i64 place[SLOTS];
};

__device__ __forceinline__ u16 load_rounded(const void* weights, int place) {
    constexpr float kTimes = HALVED ? 0.5f : 1.0f;
    if constexpr (SOURCE == TARGET && !HALVED) {
        return static_cast<const u16*>(weights)[place];
    } else if constexpr (SOURCE == 2) {
        return round_to_target(kTimes * static_cast<const float*>(weights)[place]);
    } else {
        const u16 bits = static_cast<const u16*>(weights)[place];
        float value;
        if constexpr (SOURCE == 0)
            asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        else
            value = __uint_as_float(static_cast<u32>(bits) << 16);
        return round_to_target(kTimes * value);
    }
}

extern "C" __global__ void __launch_bounds__(256)
gather(const __grid_constant__ Sources sources, const int4* __restrict__ table, uint4* __restrict__ image, i64 count,
       const __grid_constant__ Starts starts) {
    const i64 vector = (i64)blockIdx.x * 256 + threadIdx.x;
    if (vector * 8 >= count) return;
    const int4 low = table[2 * vector], high = table[2 * vector + 1];
    const int places[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    u32 halves[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const void* weights = sources.tensor[0];
        int start = 0;
#pragma unroll
        for (int k = 1; k < SLOTS; ++k)
            if (places[n] >= (int)starts.place[k]) {
                weights = sources.tensor[k];
                start = (int)starts.place[k];
            }
        halves[n] = places[n] < 0 ? 0 : load_rounded(weights, places[n] - start);
    }
    image[vector] = make_uint4(halves[0] | halves[1] << 16, halves[2] | halves[3] << 16,
                               halves[4] | halves[5] << 16, halves[6] | halves[7] << 16);
}
