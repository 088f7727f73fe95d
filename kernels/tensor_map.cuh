// Boxes of a matrix by the copy engine, and clusters of blocks that share the loaded data (sm_90a). A kernel takes the map of
// flysurgery/gpu/tensor_map.py as a __grid_constant__.
#pragma once
#include "instructions.cuh"

struct alignas(64) TensorMap { u64 w[16]; };

// One thread requests the box whose first element is at `column` and `row`, and `barrier` counts its bytes. Rows of 128 bytes are swizzled as
// wgmma_rows.cuh has it, so `to` is a multiple of 1024; what lies outside of the matrix comes as zeros.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

// The same of one head's rows, 64 features wide, of a map of features, tokens, heads and images.
__device__ __forceinline__ void copy_head(u32 to, const TensorMap& map, int token, int head, int image, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {0, %2, %3, %4}], [%5];"
                 ::"r"(to), "l"(&map), "r"(token), "r"(head), "r"(image), "r"(barrier) : "memory");
}

// One thread requests the store of such a box, closes the group of its requests, and waits until the boxes of its groups have been read.
__device__ __forceinline__ void store_box(const TensorMap& map, int column, int row, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column), "r"(row), "r"(from) : "memory");
}
__device__ __forceinline__ void store_head(const TensorMap& map, int token, int head, int image, u32 from) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {0, %1, %2, %3}], [%4];"
                 ::"l"(&map), "r"(token), "r"(head), "r"(image), "r"(from) : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// `copy_bulk` to the same address in all BLOCKS of the cluster; each one's barrier at `barrier` counts the bytes that come to it.
template <int BLOCKS>
__device__ __forceinline__ void copy_bulk_to_all(u32 to, const char* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((u16)((1 << BLOCKS) - 1)) : "memory");
}
// Arrives at the barrier that lies at `barrier` in another block of the cluster, or in one's own.
__device__ __forceinline__ void cluster_arrive(u32 barrier, int block) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }"
                 ::"r"(barrier), "r"(block) : "memory");
}
__device__ __forceinline__ void cluster_sync() { asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory"); }
