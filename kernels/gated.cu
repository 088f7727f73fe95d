// y = act(gate) * value, element by element, in float32, rounded once. Gate and value are rows of their own or halves of the same rows.
//
// A thread takes one vector of 16 bytes. Floor: the bytes of gate, value and y.
//
// Part of the blocks timed in recipes/results/kernels_h200.csv.
//
// MODE 0 fp16, 1 bf16, 2 float32. Defines: COLUMNS, MODE, ACTIVATION (exact_activation.cuh).
// Limits: COLUMNS fill whole vectors; rows begin at multiples of 16 bytes.
#include "exact_activation.cuh"
#include "row_vectors.cuh"

extern "C" __global__ void gated(const char* gate, const char* value, char* y, long long rows, long long gate_stride, long long value_stride) {
    const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long row = index / kVectors, byte = index % kVectors * 16;
    if (row >= rows) return;
    const Vector<16> g = *reinterpret_cast<const Vector<16>*>(gate + row * gate_stride + byte);
    const Vector<16> v = *reinterpret_cast<const Vector<16>*>(value + row * value_stride + byte);
    float gates[kWidth], values[kWidth];
    spread(gates, g);
    spread(values, v);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] = activate<ACTIVATION>(gates[k]) * values[k];
    *reinterpret_cast<Vector<16>*>(y + index * 16) = rounded<16>(values);
}
