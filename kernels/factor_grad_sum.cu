// Adds what the splits of factor_grad.cu or factor_grad_wgmma.cu gave, in a fixed order.
//
// partial: (splits, size), float32, of each split first `of_factors` elements of the gradients of factors, then those of biases.
// A block adds those of 32 lanes, VECTOR elements each: eight threads a lane, each every eighth split, then a tree over the eight.
//
// Defines: VECTOR, 4 where it divides size and of_factors, else 1.

typedef long long i64;

#if VECTOR == 4
typedef float4 Values;
__device__ __forceinline__ Values operator+(Values a, Values b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
#else
typedef float Values;
#endif

extern "C" __global__ void __launch_bounds__(256) factor_grad_sum(const Values* partial, float* out, float* bias, i64 splits, i64 size, i64 of_factors) {
    __shared__ Values parts[8][32];
    int lane = threadIdx.x % 32, part = threadIdx.x / 32;
    i64 at = (i64)blockIdx.x * 32 + lane, lanes = size / VECTOR;
    Values sum = {};
    if (at < lanes) {
#pragma unroll 8
        for (i64 s = part; s < splits; s += 8) sum = sum + partial[s * lanes + at];
    }
    parts[part][lane] = sum;
    __syncthreads();
    if (part == 0 && at < lanes) {
        float* to = at * VECTOR < of_factors ? out + at * VECTOR : bias + (at * VECTOR - of_factors);
        *(Values*)to = ((parts[0][lane] + parts[1][lane]) + (parts[2][lane] + parts[3][lane])) +
                       ((parts[4][lane] + parts[5][lane]) + (parts[6][lane] + parts[7][lane]));
    }
}
