// Loads rows of x: each warp stages its own by cp.async, some batches of k16 steps ahead of their use.
#pragma once
#include "fused_sizes.cuh"
#include "instructions.cuh"

// The first row of a warp in a round. Unit by unit the rows go round the blocks, so the last round is spread over all. In a round
// that is shared all units of a block have the same rows.
__device__ __forceinline__ long long first_row(int round, int warp, int shared_round) {
    const int unit = kShares && round == shared_round ? 0 : warp / kUnitWarps;
    return (((long long)round * kUnits + unit) * gridDim.x + blockIdx.x) * kUnitRows + warp % kUnitWarps * kRowsOfWarp;
}

struct StagedRows {
    const char* x;
    long long rows, stride;
    int warp, g, t, shared_round;
    u32 to_first, to, from_first, from;  // where a lane writes its part and where it reads: its own, or by ldmatrix its warp's
    int odd_step;                        // from an even step to the odd one after it, for ldmatrix
    int round = 0, i2 = 0, pass = 0, batch = 0, byte = 0;  // the next batch to load
    const char* row;                     // the lane's part of its first row
    int inside;                          // rows from there to the end; rows past it are filled with zeros

    __device__ __forceinline__ StagedRows(const char* x_, long long rows_, long long stride_, u32 shared, int warp_, int lane, int shared_round_)
        : x(x_), rows(rows_), stride(stride_), warp(warp_), g(lane >> 2), t(lane & 3), shared_round(shared_round_) {
        // For ldmatrix the 64 bytes of a row and two steps lie together, their 16-byte pieces turned by row against bank conflicts.
        const u32 base = shared + warp * STAGES * kStageBytes;
        const u32 turned = (lane >> 3 & 1) * 512 + (lane & 7) * 64 + ((lane >> 4 ^ (lane >> 1 & 3)) << 4);
        const u32 own = base + (kMatrix ? g * 64 + ((t ^ (g >> 1 & 3)) << 4) : lane * kVec);
        to_first = to = kOnce ? one_register(own, lane) : own;
        from_first = from = base + (kMatrix ? turned : lane * kVec);
        odd_step = (int)(turned ^ 32) - (int)turned;
        set_rows();
    }

    __device__ __forceinline__ void set_rows() {
        const long long row0 = first_row(round, warp, shared_round) + g;
        inside = (int)min(max(rows - row0, 0ll), (long long)kRowsOfWarp);
        row = x + (row0 * stride + t * (kMatrix ? 16 : kLaneBytes));
    }

    __device__ __forceinline__ int size(int h) const { return h * 8 < inside ? kCopy : 0; }
    __device__ __forceinline__ const char* at(int h, int offset) const { return row + h * 8 * stride + (byte + offset); }

    // Ask for the next batch.
    __device__ __forceinline__ void load() {
        if constexpr (kMatrix) load_for_matrix();
        else load_for_lane();
        commit_copies();
        to += kStageBytes;
        if (to == to_first + STAGES * kStageBytes) to = to_first;
        byte += kBatch1 * kStepBytes;
        if constexpr (kLinear) {
            if (byte < kRowBytes) return;
            byte = 0;
            ++round;
            set_rows();
            return;
        }
        if (++batch < kBatches) return;
        batch = 0;
        if (kPasses > 1 && ++pass < kPasses) {
            byte -= kBatches * kBatch1 * kStepBytes;
            return;
        }
        pass = 0;
        byte = ++i2 * C2 * D2 * kElem;
        if (i2 < A2) return;
        i2 = byte = 0;
        ++round;
        set_rows();
    }

    __device__ __forceinline__ void load_for_matrix() {
        const int valid = (C2 - batch * 16 * kBatch1 - t * 8) * 2;  // bytes left in the class
#pragma unroll
        for (int v = 0; v < kPairsOfSteps; ++v)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int bytes = C2 == 16 * kSteps1 || valid > v * 64 ? size(h) : 0;
                if (kBatch1 % 2 == 0 || t + 4 * v < 2 * kBatch1)
                    copy_ahead<16>(to + v * 1024 + h * 512, at(h, v * 64), bytes);
            }
    }

    __device__ __forceinline__ void load_for_lane() {
#pragma unroll
        for (int b = 0; b < kBatch1; ++b) {
            const int valid = (C2 - (batch * kBatch1 + b) * 16 - t * 4) * D2 * kElem;
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int v = 0; v < kVecs; ++v) {
                    const int bytes = C2 == 16 * kSteps1 ? size(h) : min(max(valid - v * kVec, 0), size(h));
                    const u32 piece = to + ((b * 2 + h) * kLaneBytes + v * kVec) * 32;
                    const char* const source = at(h, b * kStepBytes + v * kVec);
                    if constexpr (kOnce) copy_once(piece, source, bytes);
                    else copy_ahead<kVec>(piece, source, bytes);
                }
        }
    }

    // Wait for the batch that is due; its part may then be read until `done`.
    __device__ __forceinline__ void wait() {
        wait_copies<STAGES - 2>();
        if (kMatrix) __syncwarp();
    }

    // The lane's four neighbours of each residue, for each step and row.
    __device__ __forceinline__ void read(u32 (&raw)[kBatch1][2][kLaneBytes / 4]) const {
#pragma unroll
        for (int b = 0; b < kBatch1; ++b)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int v = 0; v < kVecs; ++v) {
                    const u32 piece = from + ((b * 2 + h) * kLaneBytes + v * kVec) * 32;
                    if constexpr (kVec == 16) load_shared(&raw[b][h][v * 4], piece);
                    else load_shared_pair(&raw[b][h][v * 2], piece);
                }
    }

    // Operands as they lie in memory, where kMatrix holds.
    __device__ __forceinline__ void read_operands(u32 (&a)[kBatch1][4]) const {
#pragma unroll
        for (int s = 0; s < kBatch1; ++s) load_matrices(a[s], from + s / 2 * 1024 + (s % 2 ? odd_step : 0));
    }

    __device__ __forceinline__ void done() {
        from += kStageBytes;
        if (from == from_first + STAGES * kStageBytes) from = from_first;
        load();
    }
};
