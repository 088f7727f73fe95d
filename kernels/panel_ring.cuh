// Panels of weights on their way: a ring of slots, filled in the order of use, once a round, by the copy engine (sm_90 and later).
// The last warp to leave a slot refills it, so that nobody waits in order to refill.
#pragma once
#include "instructions.cuh"

// Panels: kPanels of them a round, kSlots slots of kStride bytes for kWarps warps; panel n begins at n*kStride of the image and
// has `bytes(n)` bytes.
template <class Panels>
struct BulkRing {
    const char* image;
    u32 ring, full, leaving;  // slots, a barrier a slot that completes when its panel is there, a counter a slot of warps that left
    int lane;
    int refills;              // panels still to come
    int slot = 0;
    u32 phase = 0;

    static constexpr int kBytes = Panels::kSlots * (Panels::kStride + 12);

    // One thread makes the barriers, behind `kSlots` slots; then all threads meet.
    static __device__ __forceinline__ void prepare(u32 ring) {
        for (int s = 0; s < Panels::kSlots; ++s) {
            barrier_init(ring + Panels::kSlots * Panels::kStride + 8 * s, 1);
            store_shared(ring + Panels::kSlots * (Panels::kStride + 8) + 4 * s, 0);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    __device__ __forceinline__ BulkRing(const char* image_, u32 ring_, int rounds, int warp, int lane_)
        : image(image_), ring(ring_), full(ring_ + Panels::kSlots * Panels::kStride), leaving(full + 8 * Panels::kSlots), lane(lane_) {
        refills = rounds * Panels::kPanels - Panels::kSlots;
        for (int s = warp; s < Panels::kSlots; s += Panels::kWarps) fill(s, s);
    }

    __device__ __forceinline__ void fill(int to_slot, int panel) const {
        copy_by_warp(ring + to_slot * Panels::kStride, image + (long long)panel * Panels::kStride, Panels::bytes(panel), full + 8 * to_slot, lane);
    }

    // Wait for the panel that comes `ahead` panels after the present one; gives its address, the same in all lanes.
    __device__ __forceinline__ u32 wait(int ahead = 0) const {
        int s = slot + ahead;
        const bool wraps = s >= Panels::kSlots;
        s = wraps ? s - Panels::kSlots : s;
        barrier_wait(full + 8 * s, wraps ? phase ^ 1 : phase);
        return __shfl_sync(0xffffffffu, ring + s * Panels::kStride, 0);
    }

    // The warp needs the present panel no more. The last one to say so brings the panel that comes next in its slot.
    __device__ __forceinline__ void leave() {
        __syncwarp();
        u32 left = lane == 0 ? shared_increment(leaving + 4 * slot) : 0;
        left = __shfl_sync(0xffffffffu, left, 0);
        if (left % Panels::kWarps == Panels::kWarps - 1 && refills > 0)
            fill(slot, (Panels::kPanels - refills % Panels::kPanels) % Panels::kPanels);
        --refills;
        if (++slot == Panels::kSlots) {
            slot = 0;
            phase ^= 1;
        }
    }
};
