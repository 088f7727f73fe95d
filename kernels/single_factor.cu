// y = x Kᵀ (+ bias) for one Kronecker-sparse factor of any pattern (a, b, c, d), in one launch:
//
//     y[row, (i*b + p)*d + j] = sum over q of x[row, (i*c + q)*d + j] * factor[i, p, q, j]  (+ bias[(i*b + p)*d + j])
//
// x: (rows, a*c*d), rows LDX elements apart; y: (rows, a*b*d), contiguous; row-major, batch-size-first.
//
// Tiling. A CTA owns BM rows, one i, BN outputs p and J consecutive residues j. It walks over q in chunks of KC. The chunk of x is
// copied to shared memory in its natural order [row][q][j], so global reads are contiguous for every d; a warp takes its
// residues apart while it reads fragments (two elements q, q' of one residue make a register: one byte permute). The accumulators
// of a residue class interleave again in shared memory, eight rows of a warp at a time, and leave in wide contiguous stores.
// Warps: WM over rows (MT tiles of 16 each), WN over outputs (NT tiles of 8 each), WJ over residues (R each, J = WJ*R).
//
//        q0 .. q0+KC, all J residues                     p0 .. p0+BN, all J residues
//      +-----------------------------+                 +-----------------------------+
//   BM |j0 j1 .. |j0 j1 .. |j0 j1 .. |  x W (i, j) ->  |j0 j1 .. |j0 j1 .. |j0 j1 .. | BM
//      +-----------------------------+                 +-----------------------------+
//
// Weights are packed on the host, per (i, residue range, output tile, chunk): [residue][plane][k/8][output][8 halves], read by
// ldmatrix; the order of q within 16 follows the fragment of x. They stay in shared memory (RESIDENT) or stream with x.
// The CTA goes over TILES row tiles one after another; the copies run STAGES - 1 chunks ahead.
//
// Modes. fp16, bf16: m16n8k16, float32 sums. tf32 and fp32 take float32: every row and residue
// has a power-of-two scale, chosen from the first 16 q with 2^8 of headroom and lowered (sums rescaled) if a later element does
// not fit; scaled x = hi + lo in fp16, the weights likewise with one scale a factor. tf32 multiplies hi*hi, fp32 also lo*hi and
// hi*lo, and adds each group of 16 products in float32 with rounding. An element smaller than 2^-33 times the largest of its
// row and residue may vanish. Infinities and NaN in x or the factor give NaN or infinite results.
//
// Limits: any a, b, c, d, rows; rows of zero length are not launched. Shared memory is the caller's sum, see single.py.
// A trial on an H200, 25088 rows, 120 patterns of Gonon et al., default tiles: fp32 beats bmm and einsum on all, by 2.65 in the median;
// fp16 on 105, by 2.73. It loses on 15: small ones with a = d = 1, which are plain dense products, blocks with a side of
// 1024, and two where the first choice of tiles is poor. These and others go to PyTorch's product of the blocks, with transpose.cu around
// it (single_by_bmm.py says which). Time over that of the bytes of x and y: 4.3 and 3.3 in the median; for large blocks the re-reading
// of x and weights from the L2 cache limits.
//
// Blocks that run together share rows of x: all output tiles and RANGES_FAST neighbouring residue ranges, then row chunks, then the rest.
//
// Defines: PATTERN_A, PATTERN_B, PATTERN_C, PATTERN_D, MODE, WM, WN, WJ, MT, NT, R, KC, STAGES, RESIDENT, INTERLEAVED_Q, RANGES_FAST,
// X_VECTOR and Y_VECTOR (bytes a copy or store), X_PITCH and Y_PITCH (bytes from row to row in shared memory), MIN_BLOCKS.

#include "single_shape.cuh"
#include "single_tiles.cuh"
#include "single_tensor.cuh"

__device__ __forceinline__ void store_tile(char* y, char* slab, Sums& sums, i64 rows, i64 row0, i64 y_stride, const Place& at) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if constexpr (DIRECT) {
                i64 row = row0 + (at.wm * MT + mt) * 16 + h * 8 + at.g;
#pragma unroll
                for (int nt = 0; nt < NT; ++nt) {
                    u32 words[OWN_WORDS];
                    own_words(words, sums, mt, h, nt);
                    int p = at.output_tile * BN + (at.wn * NT + nt) * 8 + 2 * at.t;
                    if (row < rows && p < PB) write_words<OWN_WORDS>(y + row * y_stride + ((i64)at.i * PB + p) * PD * ES, words);
                }
            } else {
                write_slab(slab, sums, mt, h, at);
                __syncthreads();
                store_slab(y, slab, rows, row0 + mt * 16 + h * 8, y_stride, at);
                __syncthreads();
            }
        }
}

// grid: (a * residue ranges * output tiles) * row chunks; a row chunk is `tiles` tiles of BM rows.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    single_factor(const char* x, const char* image, const char* bias, char* y, i64 rows, i64 ldx, i64 tiles) {
    extern __shared__ __align__(128) char shared[];
    Place at;
    at.lane = threadIdx.x % 32, at.g = at.lane / 4, at.t = at.lane % 4;
    int warp = threadIdx.x / 32;
    at.wm = warp % WM, at.wn = warp / WM % WN, at.wj = warp / (WM * WN);
    constexpr int FAST = OUTPUT_TILES * RANGES_FAST;
    int fast = blockIdx.x % FAST, rest = blockIdx.x / FAST;
    int row_chunks = gridDim.x / (PA * RANGES * OUTPUT_TILES);
    int slow = rest / row_chunks;
    at.output_tile = fast % OUTPUT_TILES;
    at.range = slow % (RANGES / RANGES_FAST) * RANGES_FAST + fast / OUTPUT_TILES;
    at.i = slow / (RANGES / RANGES_FAST);

    i64 first_tile = (i64)(rest % row_chunks) * tiles;
    i64 all_tiles = (rows + BM - 1) / BM;
    int own_tiles = (int)min(tiles, all_tiles - first_tile);
    if (own_tiles <= 0) return;

    constexpr i64 y_stride = (i64)PA * PB * PD * ES;
    float* own_bias = (float*)(shared + BIAS_AT);
    for (int e = threadIdx.x; e < BN * J; e += THREADS) {
        int p = at.output_tile * BN + e / J, j = at.range * J + e % J;
        bool valid = bias != nullptr && p < PB && j < PD;
        own_bias[e] = valid ? stored_to_float(bias + (((i64)at.i * PB + p) * PD + j) * ES) : 0.0f;
    }
    int weight_exponent = SCALED ? *(const int*)image : 0;

    if constexpr (RESIDENT) {
        for (int chunk = 0; chunk < CHUNKS; ++chunk) load_weights(shared + WEIGHTS_AT + chunk * WEIGHT_CHUNK, image, at, chunk);
    }
    int steps = own_tiles * CHUNKS;
    i64 next_row = first_tile * BM;
    int next_chunk = 0, next_step = 0;
    auto load_next = [&]() {
        if (next_step < steps) {
            char* stage = shared + STAGES_AT + next_step % STAGES * STAGE;
            load_x(stage, x, ldx, rows, next_row, at, next_chunk);
            if constexpr (!RESIDENT) load_weights(stage + X_STAGE, image, at, next_chunk);
            ++next_step;
            if (++next_chunk == CHUNKS) next_chunk = 0, next_row += BM;
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    for (int s = 0; s < STAGES - 1; ++s) load_next();

    Sums sums;
    int step = 0;
    for (int tile = 0; tile < own_tiles; ++tile) {
        start_sums(sums);
        for (int chunk = 0; chunk < CHUNKS; ++chunk, ++step) {
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
            __syncthreads();
            load_next();
            const char* stage = shared + STAGES_AT + step % STAGES * STAGE;
            const char* weights = RESIDENT ? shared + WEIGHTS_AT + chunk * WEIGHT_CHUNK : stage + X_STAGE;
            multiply_chunk(sums, stage, weights, at, chunk == 0);
        }
        finish_sums(sums, own_bias, weight_exponent, at);
        store_tile(y, shared + OUTPUT_AT, sums, rows, (first_tile + tile) * BM, y_stride, at);
    }
}
