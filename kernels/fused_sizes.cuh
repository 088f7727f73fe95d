// The sizes of the fused kernel, all known at compile time. The macros come from the host code that packs the weights:
// the patterns A1..D1 (second product) and A2..D2 (first), GROUPS linears that share x, MODE, and the configuration.
#pragma once
#include "mode.cuh"

constexpr int kGroups2 = A2 * D2;             // groups of stage 1
constexpr int kClasses = A1 * D1;             // classes of stage 2
constexpr int kTiles1 = GROUPS * GROUP_TILES;                  // column tiles of a group
// A group's columns are sorted by the class that reads them. Class c reads class_tiles(c) tiles of each group, from class_from(c)
// on; where columns of two classes share a tile, both read it, with zero weights for the other class's columns.
__host__ __device__ constexpr int class_from(int c) { constexpr int from[] = CLASS_FROM; return from[c]; }
__host__ __device__ constexpr int class_tiles(int c) { constexpr int tiles[] = CLASS_TILES; return tiles[c]; }
__host__ __device__ constexpr int class_steps(int c) { return (kGroups2 * class_tiles(c) + 1) / 2; }  // k16 steps, a last odd tile padded
__host__ __device__ constexpr int most_steps() {
    int most = 0;
    for (int c = 0; c < kClasses; ++c) most = class_steps(c) > most ? class_steps(c) : most;
    return most;
}
constexpr int kSteps1 = KSTEPS1;              // k16 steps of a group, padded
constexpr bool kMatrix = !kFloat && D2 == 1 && C2 % 8 == 0;    // x is in operand order already: ldmatrix reads it
constexpr int kLaneElems = 4 * D2;            // elements of a row of x that a lane holds for a k16 step
constexpr int kLaneBytes = kLaneElems * kElem;
constexpr int kStepBytes = 16 * D2 * kElem;   // bytes of a row in a k16 step
constexpr int kVec = kLaneBytes % 16 == 0 ? 16 : 8;
constexpr int kVecs = kLaneBytes / kVec;
constexpr int kCopy = kMatrix ? 16 : kVec;
constexpr int kPasses = D2 / RESIDUES;        // passes over a block of x, RESIDUES residues j2 each
constexpr int kBatch1 = BATCH;                // steps handled together: their operands are ready before the first product, small corrections first
constexpr int kBatches = kSteps1 / kBatch1;   // batches of a group
constexpr int kPairsOfSteps = (kBatch1 + 1) / 2;
constexpr int kStageBytes = kMatrix ? kPairsOfSteps * 1024 : kBatch1 * 2 * kLaneBytes * 32;
constexpr int kPanelsOfGroup = kSteps1 / PANEL_STEPS;
constexpr int kPanel1 = PANEL_STEPS * RESIDUES * 16 * kTiles1 * 8 * 2 * kImages;
constexpr int kSteps2 = most_steps();         // k16 steps of a class in a panel
constexpr int kTiles2 = PANEL_COLUMNS / 8;
constexpr int kColumnPanels = (B1 + PANEL_COLUMNS - 1) / PANEL_COLUMNS;
constexpr int kPanelsOfColumns = D1 / PANEL_CLASSES;    // panels that hold the same columns, each for some classes
constexpr int kPanel2 = PANEL_CLASSES * kSteps2 * 16 * PANEL_COLUMNS * 2 * kImages;
constexpr int kSlot = kPanel1 > kPanel2 ? kPanel1 : kPanel2;
constexpr int kCount1 = A2 * kPasses * kPanelsOfGroup;
constexpr int kCount2 = GROUPS * A1 * kColumnPanels * kPanelsOfColumns;
constexpr int kPanels = kCount1 + kCount2;
constexpr int kImage1 = kPanel1 / kImages, kImage2 = kPanel2 / kImages;
constexpr int kRowsOfWarp = 16;
constexpr int kUnitWarps = 4;                 // warps that take rows together: a warpgroup
constexpr int kUnits = WARPS / kUnitWarps;
constexpr int kUnitRows = kUnitWarps * kRowsOfWarp;
constexpr int kHeader = 128;                  // bytes before the panels: an int for each linear, the exponent of its scaled weights
constexpr int kOutFeatures = GROUPS * A1 * B1 * D1;
constexpr int kBiases = NORM ? 2 : 1;         // vectors that are added to outputs: the bias, and what a norm adds
constexpr int kHalves = GATED ? 2 : 1;        // outputs whose product is a column of y: a gate and a value, side by side in each panel
constexpr int kRowOfY = BLOCKS * kOutFeatures / kHalves * kElem;  // bytes
constexpr int kImageBytes = kHeader + kCount1 * kPanel1 + kCount2 * kPanel2;
struct Panels {                               // as a ring brings them
    static constexpr int kPanels = ::kPanels, kSlots = SLOTS, kSlotBytes = kSlot, kWarps = WARPS;
    static __device__ int source(int panel) {
        return kHeader + (panel < kCount1 ? panel * kPanel1 : kCount1 * kPanel1 + (panel - kCount1) * kPanel2);
    }
    static __device__ int bytes(int panel) { return panel < kCount1 ? kPanel1 : kPanel2; }
};
constexpr int kRun = 2 * RUN * D1;            // adjacent outputs that a lane holds: RUN tiles, all residues
constexpr int kStore = kRun * kElem % 16 == 0 ? 16 : 8;        // bytes of a vector of outputs
constexpr int kPer = kStore / kElem;          // outputs in a vector
constexpr bool kWhole = kPer % D1 == 0;       // a vector holds whole columns: then lanes take vectors in turn, and a store has no gaps
constexpr int kPlaces = kRun / kPer;          // vectors of a row that a lane holds side by side
constexpr bool kExchanged = !kWhole && kPlaces == 3 && B1 % PANEL_COLUMNS == 0;  // vectors that neighbouring lanes exchange
constexpr int kUTiles = kGroups2 * kTiles1;   // tiles of u
// What lies of u in shared memory: the first U_GROUPS groups, or the low halves of the first U_LOW.
constexpr int kUSharedTiles = (U_LOW ? U_LOW : U_GROUPS) * kTiles1;
constexpr int kUImages = U_LOW ? 1 : kImages;
constexpr int kLowOfU = U_LOW ? 0 : 256;      // from a tile's high halves to its low ones
constexpr int kUBytes = kUSharedTiles * 256 * kUImages;
__host__ __device__ constexpr bool high_is_shared(int tile) { return tile < U_GROUPS * kTiles1; }
__host__ __device__ constexpr bool low_is_shared(int tile) { return tile < kUSharedTiles; }
constexpr int kRowBytes = A2 * C2 * D2 * kElem;
constexpr bool kLinear = kPasses == 1 && C2 == 16 * kSteps1;   // batches of x follow each other in memory
constexpr bool kOnce = kFloat && kPasses == 1 && BLOCKS == 1 && !NORM;  // x is read here and nowhere else, as far as a layer can know
// The small products of pairs may have sums of their own, so that each step adds once to the long sum and not three times.
constexpr bool kSmallApart = SMALL_APART;
// The blocks of x share their code where that would be long and u leaves registers.
constexpr int kUnrolled1 = LOOPED ? 1 : A2;
// So do the panels of a group, unless they are two at most and their code stays short.
constexpr int kUnrolledPanels = kPanelsOfGroup <= 2 && (!kFloat || A2 <= 4) ? kPanelsOfGroup : 1;
// A last round that has few rows is shared by the warpgroups of a block: all multiply by the first factor, each by its part of the second.
constexpr bool kShares = SHARES;
// Panels with one of many classes are left when the products with the next one are queued.
constexpr bool kHeld2 = kPairs && U_LOW && PANEL_CLASSES == 1 && D1 > 2;
// Steps of the second product handled together.
constexpr int kBatch2 = kUSharedTiles == 0 ? kSteps2 : STEPS2;
// The small products of pairs come first, while the sum is small: of all steps, in a sweep of their own where not all steps go together.
constexpr int kSweeps2 = kPairs && kBatch2 < kSteps2 ? 2 : 1;

static_assert(SLOTS <= kPanels && SLOTS > 1, "a slot for each panel at most");
static_assert(C2 % 4 == 0, "a lane reads 4 elements of a column class at a time");
static_assert(kTiles2 % RUN == 0 && (kRun * kElem) % kStore == 0, "a lane stores whole vectors");
static_assert(kSteps1 % PANEL_STEPS == 0 && PANEL_STEPS % BATCH == 0, "panels hold whole batches");
static_assert(D1 % PANEL_CLASSES == 0, "panels of the second product hold whole classes");

static_assert(STAGES >= 2, "one batch of x is read while others are on their way");
static_assert(WARPS % kUnitWarps == 0, "whole warpgroups");
static_assert(U_GROUPS <= kGroups2 && U_LOW <= kGroups2 && (!U_LOW || (kPairs && U_GROUPS == 0)), "only pairs have a low part to put aside");
static_assert(!NORM || (C2 % 16 == 0 && !SCALED), "a norm counts all columns of x and no others");
static_assert(!GATED || (GROUPS * BLOCKS * A1 == 1 && B1 % PANEL_COLUMNS == 0 && kTiles2 % (2 * RUN) == 0 && !RESIDUAL && !SCALED),
              "halves of whole panels, and nothing behind them");
