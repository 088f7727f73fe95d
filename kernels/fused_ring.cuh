// Loads panels of weights: a ring of slots, filled in the order of use, once a round, by the warps that use them.
#pragma once
#include "instructions.cuh"

// Panels: kPanels of them a round and kSlots slots of kSlotBytes for kWarps warps; source(panel) is where a panel begins in the image,
// bytes(panel) its size.
template <class Panels>
struct PanelRing {
    static constexpr bool kResident = Panels::kSlots == Panels::kPanels;  // filled once and never again
    const char* image;
    u32 ring, full, left;  // slots, a barrier a slot that completes when its panel is there, one that completes when all threads have left it, and a counter of warps
    int warp, lane;
    int refills;              // panels still to come
    int upcoming = Panels::kSlots % Panels::kPanels;  // the panel that is brought next
    int slot = 0;
    u32 phase = 0;

    // One thread initialises the barriers; then all threads synchronize.
    static __device__ __forceinline__ void prepare(u32 full, u32 left) {
        for (int s = 0; s < Panels::kSlots; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(left + 8 * s, 32 * Panels::kWarps);
            store_shared(left + 8 * Panels::kSlots + 4 * s, 0);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    __device__ __forceinline__ PanelRing(const char* image_, u32 ring_, u32 full_, u32 left_, int rounds, int warp_, int lane_)
        : image(image_), ring(ring_), full(full_), left(left_), warp(warp_), lane(lane_) {
        refills = kResident ? 0 : rounds * Panels::kPanels - Panels::kSlots;
        for (int s = warp; s < Panels::kSlots; s += Panels::kWarps) fill(s, s);
    }

    __device__ __forceinline__ void fill(int to_slot, int panel) const {
        copy_by_warp(ring + to_slot * Panels::kSlotBytes, image + Panels::source(panel), Panels::bytes(panel), full + 8 * to_slot, lane);
    }

    // Wait for the next panel, or the one that comes `ahead` panels later; gives its address.
    __device__ __forceinline__ u32 next(int ahead = 0) const {
        const bool wraps = slot + ahead >= Panels::kSlots;
        const int s = wraps ? slot + ahead - Panels::kSlots : slot + ahead;
        barrier_wait(full + 8 * s, kResident ? 0 : wraps ? phase ^ 1 : phase);
        return __shfl_sync(0xffffffffu, ring + s * Panels::kSlotBytes, 0);  // the descriptors of wgmma need a uniform register
    }

    // The warp has finished with the panel. The last warp to finish loads the next panel of this slot.
    __device__ __forceinline__ void leave() {
        if constexpr (!kResident) {
            barrier_arrive(left + 8 * slot);
            __syncwarp();
            // The counter only names the last warp. What orders the reads of all lanes before the copy is the barrier, at which
            // they have arrived by then, so the last one does not wait.
            u32 before = 0;
            if (lane == 0) before = shared_increment(left + 8 * Panels::kSlots + 4 * slot);
            before = __shfl_sync(0xffffffffu, before, 0);
            if (before % Panels::kWarps == Panels::kWarps - 1 && refills > 0) {
                barrier_wait(left + 8 * slot, phase);
                fill(slot, upcoming);
            }
            --refills;
            if (++upcoming == Panels::kPanels) upcoming = 0;
        }
        if (++slot == Panels::kSlots) {
            slot = 0;
            phase ^= 1;
        }
    }
};
