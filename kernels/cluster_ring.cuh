// A ring of slots that one thread of each block fills by the copy engine, partly for all blocks of its cluster, and products of what it holds by two
// warpgroups in turn (sm_90a).
#pragma once
#include "tensor_map.cuh"
#include "wgmma.cuh"
#include "wgmma_rows.cuh"

// SLOTS of BYTES each, for BLOCKS of a cluster. The n-th filling of the ring passes through slot n % SLOTS; four warps free it.
template <int SLOTS, int BYTES, int BLOCKS>
struct ClusterRing {
    u32 slots, arrived, freed;  // behind the slots or elsewhere: 8 bytes a slot each, for the barriers
    __device__ __forceinline__ void prepare() const {  // by one thread
        for (int s = 0; s < SLOTS; ++s) barrier_init(arrived + 8 * s, 1), barrier_init(freed + 8 * s, 4 * BLOCKS);
    }
    __device__ __forceinline__ u32 slot(int n) const { return slots + n % SLOTS * BYTES; }
    __device__ __forceinline__ u32 arrival(int n) const { return arrived + n % SLOTS * 8; }
    __device__ __forceinline__ void wait_arrived(int n) const { barrier_wait(arrival(n), n / SLOTS & 1); }
    __device__ __forceinline__ void wait_freed(int n) const { barrier_wait(freed + n % SLOTS * 8, ~(n / SLOTS) & 1); }
    __device__ __forceinline__ void free(int n, int lane) const {  // by a warp, in all blocks of the cluster
        if (lane < BLOCKS) cluster_arrive(freed + n % SLOTS * 8, lane);
    }
};

// A warpgroup's turn: sums += rows * weights of COUNT fillings, from the first on, for 64 * UNITS rows and 8 * TILES columns. A slot holds 64 halves of each
// row, in the order of wgmma_rows.cuh, then a panel of weights, as wgmma.cuh has it. Named barriers 1 and 2 are the warpgroups' turns.
template <int COUNT, int UNITS, int TILES, class Ring>
__device__ __forceinline__ void multiply_in_turn(float (&sums)[UNITS][TILES][4], const Ring& ring, int first, int warpgroup, int lane) {
    constexpr int kColumns = 8 * TILES;
    named_barrier_wait(1 + warpgroup, 256);  // who had the turn before has seen all that came before arrive
#pragma unroll 1
    for (int s = 0; s < COUNT; ++s) {
        const int n = first + s;
        ring.wait_arrived(n);
        const u64 a = rows_descriptor(ring.slot(n)), b = wgmma_descriptor(ring.slot(n) + UNITS * 64 * 128, kColumns);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int u = 0; u < UNITS; ++u) WgmmaShared<kColumns>::add(sums[u], a + ((u * 8192 + k * 32) >> 4), b + (k * kColumns * 32 >> 4));
        wgmma_commit();
        wgmma_wait<1>();  // the stage before is multiplied
        if (s > 0) ring.free(n - 1, lane);
    }
    named_barrier_arrive(2 - warpgroup, 256);
    wgmma_wait<0>();
    ring.free(first + COUNT - 1, lane);
}
