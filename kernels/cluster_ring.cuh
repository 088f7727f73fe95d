// A ring of slots that one thread of each block fills by the copy engine, partly for all blocks of its cluster (sm_90a).
#pragma once
#include "tensor_map.cuh"

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
