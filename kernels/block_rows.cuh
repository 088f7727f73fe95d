// Loads rows of x for the products of block_linear.cu, a stage of 64 columns at a time. Both ways fill SLOTS slots a warpgroup, in the order
// of wgmma_rows.cuh, and have the same functions: `begin`, and for each stage `wait`, `multiply` by each k16 step, and `proceed` behind them.
#pragma once
#include "instructions.cuh"
#include "tensor_map.cuh"
#include "wgmma_rows.cuh"

constexpr int kSlot = 16 * 128;  // bytes of a warp's stage
constexpr int kStages = D * STEPS;

// The rows that a warpgroup takes, 64 a round.
struct Units {
    long long rows, block, blocks;
    bool backwards;
    // The first row of a round; `rows` where none are left.
    __device__ __forceinline__ long long first(int round, int warpgroup) const {
        const long long units = (rows + 63) / 64, next = (round * (long long)WARPGROUPS + warpgroup) * blocks + block;
        return next >= units ? rows : (backwards ? units - 1 - next : next) * 64;
    }
};

#if BOXES
// Columns of a stage lie side by side: a thread of the warpgroup loads all 64 rows by one request to the copy engine. Products read them from
// shared memory; a slot is filled again when all warps are done with it.
struct Operands {};

struct StagedRows {
    const TensorMap& x;
    Units units;
    u32 slots, arrived, left, pieces;
    int warp, lane, stage = 0, to = 0, from = 0, round = 0;
    u32 phase = 0, to_phase = 1;
    long long first;

    __device__ __forceinline__ StagedRows(const TensorMap& x_, long long, Units units_, u32 staged_at, u32 barriers, u32 pieces_, int warp_, int lane_)
        : x(x_), units(units_), slots(staged_at + warp_ / 4 * SLOTS * 4 * kSlot), arrived(barriers + warp_ / 4 * SLOTS * 16), left(arrived + SLOTS * 8),
          pieces(pieces_), warp(warp_), lane(lane_) {}
    static __device__ __forceinline__ void prepare(u32 barriers) {
        for (int s = 0; s < 2 * WARPGROUPS * SLOTS; ++s) barrier_init(barriers + 8 * s, s / SLOTS % 2 ? 4 : 1);
    }
    __device__ __forceinline__ void begin() {
        first = units.first(0, warp / 4);
#pragma unroll 1
        for (int s = 0; s < SLOTS; ++s) load();
    }
    __device__ __forceinline__ void load() {
        if (warp % 4 == 0 && lane == 0 && first < units.rows) {
            barrier_wait(left + 8 * to, to_phase);
            barrier_expect(arrived + 8 * to, 4 * kSlot);
            copy_box(slots + to * 4 * kSlot, x, (int)load_shared_one(pieces + stage * 32) / 2, (int)first, arrived + 8 * to);
        }
        __syncwarp();
        if (++to == SLOTS) to = 0, to_phase ^= 1;
        if (++stage == kStages) {
            stage = 0;
            first = units.first(++round, warp / 4);
        }
    }
    __device__ __forceinline__ void wait(Operands&, int, int) { barrier_wait(arrived + 8 * from, phase); }
    template <int COLUMNS_>
    __device__ __forceinline__ void multiply(float (&sums)[COLUMNS_ / 8][4], const Operands&, int, int k, u64 b) {
        WgmmaShared<COLUMNS_>::add(sums, rows_descriptor(__shfl_sync(0xffffffffu, slots + from * 4 * kSlot, 0)) + (k * 32 >> 4), b);
    }
    __device__ __forceinline__ void leave(int slot) {
        if (lane == 0) barrier_arrive(left + 8 * slot);
        load();
    }
    __device__ __forceinline__ void proceed(int s) {
        if (s > 0) {
            wgmma_wait<1>();
            leave(from == 0 ? SLOTS - 1 : from - 1);
        }
        if (++from == SLOTS) from = 0, phase ^= 1;
    }
    // All products of the row are done.
    __device__ __forceinline__ void finish() { leave(from == 0 ? SLOTS - 1 : from - 1); }
    __device__ __forceinline__ void end() {}
};
#else
// Columns are gathered in pieces of 8: a warp loads its own 16 rows by cp.async, SLOTS - 1 stages ahead, and reads them by ldmatrix as operands, a
// stage while the one before is multiplied. The 16-byte pieces of a row are turned by row against bank conflicts.
struct Operands {
    u32 a[2][4][4];  // of a round's stages in turn; kept from round to round they cost up to a twentieth of the time
};

struct StagedRows {
    const char* x;
    Units units;
    long long stride;
    u32 slots, pieces;
    int warp, lane, stage = 0, to = 0, from = 0, round = 0, inside;
    const char* row;

    __device__ __forceinline__ StagedRows(const char* x_, long long stride_, Units units_, u32 staged_at, u32, u32 pieces_, int warp_, int lane_)
        : x(x_), units(units_), stride(stride_), slots(staged_at + warp_ * SLOTS * kSlot), pieces(pieces_), warp(warp_), lane(lane_) {}
    static __device__ __forceinline__ void prepare(u32) {}
    __device__ __forceinline__ void set_rows() {
        const long long first = units.first(round, warp / 4) + warp % 4 * 16 + (lane >> 3);
        inside = (int)min(max(units.rows - first, 0ll), 16ll);
        row = x + first * stride;
    }
    __device__ __forceinline__ void begin() {
        set_rows();
#pragma unroll 1
        for (int s = 0; s < SLOTS - 1; ++s) load();
    }
    __device__ __forceinline__ void load() {
        const u32 at = slots + to * kSlot;
        const int offset = (int)load_shared_one(pieces + (stage * 8 + (lane & 7)) * 4);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const int own = 4 * m + (lane >> 3);
            copy_async<16>(at + own * 128 + ((lane & 7) ^ (own & 7)) * 16, row + (offset < 0 ? 0 : offset) + 4 * m * stride,
                           offset >= 0 && 4 * m < inside ? 16 : 0);
        }
        commit_copies();
        if (++to == SLOTS) to = 0;
        if (++stage == kStages) {
            stage = 0;
            ++round;
            set_rows();
        }
    }
    // The operands of stage `s`, of the given number of k16 steps; then the stage that takes its place is requested.
    __device__ __forceinline__ void wait(Operands& operands, int s, int steps) {
        const u32 at = slots + from * kSlot;
        wait_copies<SLOTS - 2>();
        __syncwarp();
        const int own = lane & 15;
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if (k < steps) load_matrices(operands.a[s % 2][k], at + own * 128 + ((2 * k + (lane >> 4)) ^ (own & 7)) * 16);
        __syncwarp();
        if (++from == SLOTS) from = 0;
        load();
    }
    template <int COLUMNS_>
    __device__ __forceinline__ void multiply(float (&sums)[COLUMNS_ / 8][4], const Operands& operands, int s, int k, u64 b) {
        Wgmma<COLUMNS_>::template run<0>(sums, operands.a[s % 2][k], b, 1);
    }
    __device__ __forceinline__ void proceed(int s) {
        if (STEPS == 1) wgmma_wait<0>();  // the next stage begins other sums
        else if (s > 0 && s < kStages - 1) wgmma_wait<1>();
    }
    __device__ __forceinline__ void finish() {}
    __device__ __forceinline__ void end() { asm volatile("cp.async.wait_all;" ::: "memory"); }
};
#endif
