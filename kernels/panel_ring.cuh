// Panels of weights on their way: a ring of slots, filled in the order of use, once a round, by the copy engine (sm_90 and later).
// The last warp to leave a slot refills it, so that nobody waits in order to refill.
#pragma once
#include "instructions.cuh"

// Panels: kPanels of them a round, kSlots slots of kStride bytes for kWarps warps, which leave up to kTogether at a time; panel n begins
// at n*kStride of the image and has `bytes(n)` bytes.
template <class Panels>
struct BulkRing {
    const char* image;
    u32 ring;           // slots, behind them a barrier a slot that completes when its panel is there, and a counter a slot of warps that left
    int lane;
    int refills;        // panels still to come
    int to_come;        // the panel that comes next
    u32 left[Panels::kTogether] = {};  // how many warps had left each slot before this one: it takes time to arrive, so `settle` looks later
    int pending = 0, oldest = 0;       // how many slots await that, and the first of them
    int slot = 0;
    u32 phase = 0;

    static constexpr int kFull = Panels::kSlots * Panels::kStride, kLeaving = kFull + 8 * Panels::kSlots;
    static constexpr int kBytes = kLeaving + 4 * Panels::kSlots;
    static_assert(Panels::kSlots < Panels::kPanels, "a ring has fewer slots than panels come");
    static_assert(Panels::kTogether <= Panels::kSlots, "panels that are waited for together lie in the ring together, else nobody ever leaves one");

    // One thread makes the barriers; then all threads meet.
    static __device__ __forceinline__ void prepare(u32 ring) {
        for (int s = 0; s < Panels::kSlots; ++s) {
            barrier_init(ring + kFull + 8 * s, 1);
            store_shared(ring + kLeaving + 4 * s, 0);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    __device__ __forceinline__ BulkRing(const char* image_, u32 ring_, int rounds, int warp, int lane_) : image(image_), ring(ring_), lane(lane_) {
        refills = rounds * Panels::kPanels - Panels::kSlots;
        to_come = Panels::kSlots;
        for (int s = warp; s < Panels::kSlots; s += Panels::kWarps) fill(s, s);
    }

    __device__ __forceinline__ void fill(int to_slot, int panel) const {
        copy_by_warp(ring + to_slot * Panels::kStride, image + (long long)panel * Panels::kStride, Panels::bytes(panel), ring + kFull + 8 * to_slot, lane);
    }

    // Wait for the panel that comes `ahead` panels after the present one; gives its address.
    __device__ __forceinline__ u32 wait(int ahead = 0) const {
        int s = slot + ahead;
        const bool wraps = s >= Panels::kSlots;
        s = wraps ? s - Panels::kSlots : s;
        barrier_wait(ring + kFull + 8 * s, wraps ? phase ^ 1 : phase);
        return ring + s * Panels::kStride;
    }

    // Where this warp was the last to leave a slot, it brings the panel that comes next there.
    __device__ __forceinline__ void settle() {
#pragma unroll
        for (int k = 0; k < Panels::kTogether; ++k)
            if (k < pending) {
                if (left[k] == Panels::kWarps - 1 && refills > 0) fill(oldest, to_come);  // lane 0 alone counts
                if (++to_come == Panels::kPanels) to_come = 0;
                if (++oldest == Panels::kSlots) oldest = 0;
                --refills;
            }
        pending = 0;
    }

    // The warp needs the present panel no more, nor the next COUNT - 1.
    template <int COUNT = 1>
    __device__ __forceinline__ void leave() {
        settle();
        __syncwarp();
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            if (lane == 0)
                asm volatile("atom.relaxed.cta.shared.inc.u32 %0, [%1], %2;" : "=r"(left[k]) : "r"(ring + kLeaving + 4 * slot), "n"(Panels::kWarps - 1) : "memory");
            if (++slot == Panels::kSlots) {
                slot = 0;
                phase ^= 1;
            }
        }
        pending = COUNT;
    }
};
