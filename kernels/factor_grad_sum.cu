// Adds the sums of the splits of factor_grad.cu or factor_grad_wgmma.cu, for several gradients at once, each in a fixed order.
//
// splits: float32; those of gradient n begin at parts.first[n], parts.step[n] elements apart, parts.count[n] elements each, and there are
// parts.splits[n] of them. Their sum goes to gradients.to[n].
// A block adds those of 32 lanes, VECTOR elements each: eight threads a lane, each every eighth split, then a tree over the eight.
//
// Defines: PARTS, how many gradients; VECTOR, 4 where it divides all that is counted in elements, else 1.

typedef long long i64;

#if VECTOR == 4
typedef float4 Values;
__device__ __forceinline__ Values operator+(Values a, Values b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
#else
typedef float Values;
#endif

struct Gradients {
    Values* to[PARTS];
};
struct Parts {
    i64 first[PARTS], splits[PARTS], step[PARTS], count[PARTS];
};

extern "C" __global__ void __launch_bounds__(256)
    factor_grad_sum(const Values* splits, const __grid_constant__ Gradients gradients, const __grid_constant__ Parts parts) {
    __shared__ Values shared[8][32];
    int lane = threadIdx.x % 32, eighth = threadIdx.x / 32, block = blockIdx.x, part = 0;
    for (int blocks; block >= (blocks = (int)((parts.count[part] / VECTOR + 31) / 32)); ++part) block -= blocks;
    i64 at = (i64)block * 32 + lane, step = parts.step[part] / VECTOR, end = parts.splits[part];
    bool inside = at < parts.count[part] / VECTOR;
    const Values* from = splits + parts.first[part] / VECTOR + at;
    Values sum = {};
    if (inside) {
#pragma unroll 8
        for (i64 split = eighth; split < end; split += 8) sum = sum + from[split * step];
    }
    shared[eighth][lane] = sum;
    __syncthreads();
    if (eighth == 0 && inside) {
        gradients.to[part][at] = ((shared[0][lane] + shared[1][lane]) + (shared[2][lane] + shared[3][lane])) +
                                 ((shared[4][lane] + shared[5][lane]) + (shared[6][lane] + shared[7][lane]));
    }
}
