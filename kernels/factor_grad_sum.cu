// Adds what the splits of factor_grad.cu or factor_grad_wgmma.cu gave, in a fixed order.
//
// partial: (splits, size), float32, of each split first `of_factors` elements of the gradients of factors, then those of biases.
// A block adds those of 32 elements: eight threads an element, each every eighth split, then a tree over the eight.

typedef long long i64;

extern "C" __global__ void __launch_bounds__(256) factor_grad_sum(const float* partial, float* out, float* bias, i64 splits, i64 size, i64 of_factors) {
    __shared__ float parts[8][32];
    int lane = threadIdx.x % 32, part = threadIdx.x / 32;
    i64 e = (i64)blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (e < size) {
#pragma unroll 8
        for (i64 s = part; s < splits; s += 8) sum += partial[s * size + e];
    }
    parts[part][lane] = sum;
    __syncthreads();
    if (part == 0 && e < size) {
        float* to = e < of_factors ? out + e : bias + (e - of_factors);
        *to = ((parts[0][lane] + parts[1][lane]) + (parts[2][lane] + parts[3][lane])) +
                 ((parts[4][lane] + parts[5][lane]) + (parts[6][lane] + parts[7][lane]));
    }
}
