// Loads panels of weights: a ring of slots that one thread fills by the copy engine, in the order of use (sm_90 and later).
#pragma once
#include "instructions.cuh"

// Panels: kPanels of them a round, of kStride bytes each, and kSlots slots, which are free after kArrivals arrivals.
template <class Panels>
struct PanelRing {
    u32 ring;  // slots, behind them a barrier a slot that completes when its panel is there, and one that completes when all have left it
    int slot = 0;
    u32 phase = 0;

    static constexpr int kFull = Panels::kSlots * Panels::kStride, kFree = kFull + 8 * Panels::kSlots;
    static constexpr int kBytes = kFree + 8 * Panels::kSlots;

    __device__ __forceinline__ explicit PanelRing(u32 ring_) : ring(ring_) {}

    // One thread initialises the barriers; then all threads synchronize.
    static __device__ __forceinline__ void prepare(u32 ring) {
        for (int s = 0; s < Panels::kSlots; ++s) {
            barrier_init(ring + kFull + 8 * s, 1);
            barrier_init(ring + kFree + 8 * s, Panels::kArrivals);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }

    // One thread loads the panels of all rounds, each as soon as its slot is free.
    static __device__ __forceinline__ void feed(const char* image, u32 ring, int rounds) {
        int slot = 0;
        u32 phase = 1;  // at first all slots are free
        for (int round = 0; round < rounds; ++round)
#pragma unroll 1
            for (int panel = 0; panel < Panels::kPanels; ++panel) {
                barrier_wait(ring + kFree + 8 * slot, phase);
                barrier_expect(ring + kFull + 8 * slot, Panels::kStride);
                copy_bulk(ring + slot * Panels::kStride, image + panel * Panels::kStride, Panels::kStride, ring + kFull + 8 * slot);
                if (++slot == Panels::kSlots) {
                    slot = 0;
                    phase ^= 1;
                }
            }
    }

    // Wait for the panel `ahead` panels after the present one, unless `there`; gives its address.
    __device__ __forceinline__ u32 wait(int ahead = 0, u32 there = 0) const {
        const bool wraps = slot + ahead >= Panels::kSlots;
        const int s = wraps ? slot + ahead - Panels::kSlots : slot + ahead;
        if (!there) barrier_wait(ring + kFull + 8 * s, wraps ? phase ^ 1 : phase);
        return ring + s * Panels::kStride;
    }

    // Whether that panel is there; does not wait.
    __device__ __forceinline__ u32 is_there(int ahead) const {
        const bool wraps = slot + ahead >= Panels::kSlots;
        const int s = wraps ? slot + ahead - Panels::kSlots : slot + ahead;
        return barrier_completed(ring + kFull + 8 * s, wraps ? phase ^ 1 : phase);
    }

    // The address of that panel in units of 16 bytes, as descriptors want it: it takes an instruction less than from the address.
    __device__ __forceinline__ u32 sixteenths(int ahead = 0) const {
        const int s = slot + ahead >= Panels::kSlots ? slot + ahead - Panels::kSlots : slot + ahead;
        return (ring >> 4) + s * (Panels::kStride / 16);
    }

    // Sets the state of the ring, so that the compiler knows it.
    __device__ __forceinline__ void stand_at(u32 ring_, int slot_) {
        ring = ring_;
        slot = slot_;
    }

    // The thread has finished with the present panel and the next COUNT - 1; it arrives for itself, or for its warp.
    template <int COUNT = 1>
    __device__ __forceinline__ void leave(bool arrives = true) {
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            if (arrives) barrier_arrive(ring + kFree + 8 * slot);
            if (++slot == Panels::kSlots) {
                slot = 0;
                phase ^= 1;
            }
        }
    }
};
