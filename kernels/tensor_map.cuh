// Boxes of a matrix by the copy engine (sm_90a): a kernel takes the map, which flysurgery/ops/cuda/tensor_map.py makes, as a __grid_constant__.
#pragma once
#include "instructions.cuh"

struct alignas(64) TensorMap { u64 w[16]; };

// One thread asks for the box whose first element stands at `column` and `row`, and `barrier` counts its bytes. Rows of 128 bytes are swizzled as
// wgmma_rows.cuh has it, so `to` is a multiple of 1024; what lies outside of the matrix comes as zeros.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}
