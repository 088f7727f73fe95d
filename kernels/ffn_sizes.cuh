// The sizes that follow from the macros of both feed-forward kernels, and the panels of a round.
#pragma once
#include "instructions.cuh"

constexpr int kIn = A1 * C1, kOut = B4 * D4;
constexpr int kTiles1 = (B1 + 7) / 8, kTiles2 = HIDDEN / 8, kTiles3 = (B3 + 7) / 8, kTiles4 = COLUMNS4 / 8, kTilesOfV = A3 * kTiles3;
constexpr int kSteps1 = C1 / 16 / PARTS1, kSteps2 = STEPS2 / PARTS2, kSteps3 = HIDDEN / 16 / PARTS3, kSteps4 = STEPS4 / PARTS4;  // k16 steps of a panel
constexpr int kPieces = C3 / D2 / HIDDEN, kAllPieces = D2 * kPieces;  // pieces of h that a block of factor 3 reads: of a class, of all
constexpr int kPanels4 = B4 / COLUMNS4;                               // of a class of factor 4, side by side
constexpr int kRun = 2 * RUN * D4, kRuns = kTiles4 / RUN;             // adjacent outputs that a lane holds; how often it does, of a panel

static_assert(kSteps1 * 16 * PARTS1 == C1 && kSteps2 * PARTS2 == STEPS2 && kPieces * HIDDEN * D2 == C3 && kSteps3 * 16 * PARTS3 == HIDDEN, "whole panels");
static_assert(kTiles4 % RUN == 0 && kPanels4 * COLUMNS4 == B4 && kSteps4 * PARTS4 == STEPS4, "whole panels of the last factor");
static_assert(kTilesOfV * 8 <= kOut, "v fits in the rows of y");

template <int WARPS_>
struct FfnPanels {  // as panel_ring.cuh brings them, to so many warps
    static constexpr int kPanels = A1 * PARTS1 + A3 * kAllPieces * (PARTS2 + PARTS3) + kPanels4 * D4 * PARTS4;
    static constexpr int kSlots = SLOTS, kStride = PANEL_STRIDE, kArrivals = 32 * WARPS_;
};

__device__ __forceinline__ void meet_warpgroup(int warpgroup) { named_barrier_wait(warpgroup + 1, 128); }
