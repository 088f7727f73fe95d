// Panels of weights on their way: a ring of slots, filled in the order of use, once a round.
#pragma once
#include "fused_sizes.cuh"
#include "instructions.cuh"

struct PanelRing {
    const char* image;
    u32 ring, full, left;  // slots, a barrier a slot that completes when its panel is there, one that completes when all warps have left it, and a counter of them
    int warp, lane;
    int refills;              // panels still to come
    int upcoming = SLOTS % kPanels;  // the panel that is brought next
    int slot = 0;
    u32 phase = 0;

    __device__ __forceinline__ PanelRing(const char* image_, u32 ring_, u32 full_, u32 left_, int rounds, int warp_, int lane_)
        : image(image_), ring(ring_), full(full_), left(left_), warp(warp_), lane(lane_) {
        refills = kResident ? 0 : rounds * kPanels - SLOTS;
        for (int s = warp; s < SLOTS; s += WARPS) fill(s, s);
    }

    __device__ __forceinline__ void fill(int to_slot, int panel) const {
        const bool first = panel < kCount1;
        const char* source = image + kHeader + (first ? panel * kPanel1 : kCount1 * kPanel1 + (panel - kCount1) * kPanel2);
        copy_by_warp(ring + to_slot * kSlot, source, first ? kPanel1 : kPanel2, full + 8 * to_slot, lane);
    }

    // Wait for the next panel; gives its address.
    __device__ __forceinline__ u32 next() const {
        barrier_wait(full + 8 * slot, kResident ? 0 : phase);
        const u32 address = ring + slot * kSlot;
        return WGMMA ? __shfl_sync(0xffffffffu, address, 0) : address;  // the descriptors of wgmma must be uniform in a warp
    }

    // The warp needs the panel no more. The last one to say so brings the panel that comes next in its slot.
    __device__ __forceinline__ void leave() {
        if constexpr (!kResident) {
            __syncwarp();
            // The counter only names the last warp. What orders the others' reads before the copy is the barrier, at which
            // they have arrived by then, so the last one does not wait.
            u32 before = 0;
            if (lane == 0) {
                barrier_arrive(left + 8 * slot);
                before = shared_increment(left + 8 * SLOTS + 4 * slot);
            }
            before = __shfl_sync(0xffffffffu, before, 0);
            if (before % WARPS == WARPS - 1 && refills > 0) {
                barrier_wait(left + 8 * slot, phase);
                fill(slot, upcoming);
            }
            --refills;
            if (++upcoming == kPanels) upcoming = 0;
        }
        if (++slot == SLOTS) {
            slot = 0;
            phase ^= 1;
        }
    }
};
