// The product of a chunk by mma.sync, and its sums: undone scales, bias, interleaved outputs.
#pragma once

#include "single_fragments.cuh"

// The B fragments of two neighbouring n8 tiles (one, where NT is odd and this is the last): b[0..1] and b[2..3]
template <bool PAIR>
__device__ __forceinline__ void read_weights(u32 (&b)[4], u32 address) {
    if constexpr (PAIR) load_matrices(b, address);
    else asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(b[0]), "=r"(b[1]) : "r"(address));
}

__device__ __forceinline__ void start_sums(Sums& sums) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int r = 0; r < R; ++r) {
            if constexpr (SCALED) sums.scale[mt][r][0] = sums.scale[mt][r][1] = power_of_two(LARGEST_EXPONENT);
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums.value[mt][r][nt][e] = 0.0f;
        }
}

__device__ __forceinline__ void add_product(float (&sum)[4], const Fragments& f, int mt, int r, const u32 (&hi)[4], const u32 (&lo)[4], int n) {
    if constexpr (PLANES == 1) {
        mma(sum, f.hi[mt][r], hi[2 * n], hi[2 * n + 1]);
    } else {
        float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        mma(part, f.lo[mt][r], hi[2 * n], hi[2 * n + 1]);
        mma(part, f.hi[mt][r], lo[2 * n], lo[2 * n + 1]);
        mma(part, f.hi[mt][r], hi[2 * n], hi[2 * n + 1]);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] += part[e];
    }
}

__device__ __forceinline__ void multiply_chunk(Sums& sums, const char* x, const char* weights, const Place& at, bool first) {
    // ldmatrix: lanes 8m to 8m+7 name the rows of matrix m = (second k8, second n8) in binary
    u32 base = shared_address(weights) + (at.wj * R * PLANES * (KC / 8) + (at.lane / 8) % 2) * BN * 16 +
               (at.wn * NT * 8 + at.lane / 16 * 8 + at.lane % 8) * 16;
#pragma unroll(HALVES ? 2 : 1)
    for (int step = 0; step < KC / 16; ++step) {
        Fragments f;
        const char* from = x + step * 16 * J * ES;
        if constexpr (SCALED) {
            bool redo = first && step == 0;
            if (!redo) redo = __any_sync(0xffffffffu, !read_fragments(f, sums, from, at));
            if (redo) {
                lower_scales(sums, from, at);
                read_fragments(f, sums, from, at);
            }
        } else {
            read_fragments(f, sums, from, at);
        }
#pragma unroll
        for (int r = 0; r < R; ++r) {
            u32 panel = base + (r * PLANES * (KC / 8) + step * 2) * BN * 16;
#pragma unroll
            for (int nt = 0; nt < NT; nt += 2) {
                constexpr int LO = (KC / 8) * BN * 16;
                u32 hi[4], lo[4];
                if (nt + 1 < NT) read_weights<true>(hi, panel + nt * 128);
                else read_weights<false>(hi, panel + nt * 128);
                if constexpr (PLANES == 2) {
                    if (nt + 1 < NT) read_weights<true>(lo, panel + LO + nt * 128);
                    else read_weights<false>(lo, panel + LO + nt * 128);
                }
#pragma unroll
                for (int n = 0; n < 2 && nt + n < NT; ++n)
#pragma unroll
                    for (int mt = 0; mt < MT; ++mt) add_product(sums.value[mt][r][nt + n], f, mt, r, hi, lo, n);
            }
        }
    }
}

__device__ __forceinline__ void finish_sums(Sums& sums, const float* bias, int weight_exponent, const Place& at) {
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float undo = 1.0f, undo_rest = 1.0f;
                if constexpr (SCALED) {  // two powers, as one could leave the range of float32
                    int exponent = 127 - (int)(__float_as_uint(sums.scale[mt][r][h]) >> 23) - weight_exponent;
                    undo = power_of_two(exponent / 2), undo_rest = power_of_two(exponent - exponent / 2);
                }
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& value = sums.value[mt][r][nt][2 * h + e];
                        if constexpr (SCALED) value = value * undo * undo_rest;
                        value += bias[((at.wn * NT + nt) * 8 + 2 * at.t + e) * J + at.wj * R + r];
                    }
            }
}

// This thread's outputs p, p+1 of n8 tile nt in row h*8 + g of tile mt: all residues side by side, as words of y
constexpr int OWN_WORDS = (2 * R * ES + 3) / 4;

__device__ __forceinline__ void own_words(u32 (&words)[OWN_WORDS], const Sums& sums, int mt, int h, int nt) {
#pragma unroll
    for (int w = 0; w < OWN_WORDS; ++w) {
        if constexpr (ES == 4) {
            words[w] = __float_as_uint(sums.value[mt][w % R][nt][2 * h + w / R]);
        } else {
            words[w] = round2(sums.value[mt][(2 * w) % R][nt][2 * h + 2 * w / R], sums.value[mt][(2 * w + 1) % R][nt][2 * h + (2 * w + 1) / R]);
        }
    }
}

__device__ __forceinline__ void write_slab(char* slab, const Sums& sums, int mt, int h, const Place& at) {
    char* row = slab + (at.wm * 8 + at.g) * Y_PITCH;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
        u32 words[OWN_WORDS];
        own_words(words, sums, mt, h, nt);
        int p = (at.wn * NT + nt) * 8 + 2 * at.t;
        if constexpr (WJ == 1) {
            write_words<OWN_WORDS>(row + p * J * ES, words);
        } else {
            write_words<OWN_WORDS / 2>(row + (p * J + at.wj * R) * ES, words);
            write_words<OWN_WORDS / 2>(row + ((p + 1) * J + at.wj * R) * ES, words + OWN_WORDS / 2);
        }
    }
}
