// The x operand of the tensor cores: a warp takes residues apart as it reads, and float32 becomes scaled pairs of fp16.
#pragma once

#include "single_shape.cuh"

// Raw elements of one row for 16 q: words[...] such that element (m, r) is q number m of this thread and residue r of this warp
constexpr int ROW_WORDS = CONTIGUOUS_Q ? R * ES : 4 * ((R * ES + 3) / 4);

__device__ __forceinline__ void read_row(u32 (&words)[ROW_WORDS], const char* row, const Place& at) {
    if constexpr (CONTIGUOUS_Q) {
        read_words<ROW_WORDS>(words, row + at.t * 4 * J * ES);
    } else {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            int q = INTERLEAVED_Q ? at.t + 4 * m : 4 * at.t + m;
            read_words<ROW_WORDS / 4>(words + m * (ROW_WORDS / 4), row + (q * J + at.wj * R) * ES);
        }
    }
}

__device__ __forceinline__ constexpr int element_at(int m, int r) {  // in elements of the words array
    return CONTIGUOUS_Q ? m * R + r : m * (ROW_WORDS / 4) * (4 / ES) + r;
}

__device__ __forceinline__ u32 pair_of_halves(const u32 (&words)[ROW_WORDS], int m, int r) {
    int first = element_at(m, r), second = element_at(m + 1, r);
    if (first / 2 == second / 2) return words[first / 2];
    u32 selector = (first % 2 ? 0x32u : 0x10u) | (second % 2 ? 0x7600u : 0x5400u);
    return __byte_perm(words[first / 2], words[second / 2], selector);
}

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((u32)(exponent + 127) << 23); }

struct Fragments {
    u32 hi[MT][R][4];
    u32 lo[PLANES == 2 ? MT : 1][PLANES == 2 ? R : 1][4];
};

struct Sums {
    float value[MT][R][NT][4];
    float scale[SCALED ? MT : 1][SCALED ? R : 1][2];  // of rows g and g + 8
};

constexpr int HEADROOM = 8;            // a first element may be scaled to 2^HEADROOM; later ones up to 2^16 still fit
constexpr int LARGEST_EXPONENT = 123;  // of a scale

// Reads and converts the fragments of 16 q. False where an element did not fit, or was not finite.
__device__ __forceinline__ bool read_fragments(Fragments& f, const Sums& sums, const char* x, const Place& at) {
    u32 check = 0;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            u32 words[ROW_WORDS];
            read_row(words, x + ((at.wm * MT + mt) * 16 + h * 8 + at.g) * X_PITCH, at);
#pragma unroll
            for (int r = 0; r < R; ++r) {
#pragma unroll
                for (int m = 0; m < 4; m += 2) {
                    if constexpr (HALVES) {
                        f.hi[mt][r][m + h] = pair_of_halves(words, m, r);
                    } else {
                        float first = __uint_as_float(words[element_at(m, r)]) * sums.scale[mt][r][h];
                        float second = __uint_as_float(words[element_at(m + 1, r)]) * sums.scale[mt][r][h];
                        u32 hi = round2(first, second), probe = hi;
                        f.hi[mt][r][m + h] = hi;
                        if constexpr (PLANES == 2) {
                            probe = round2(first - low_half(hi), second - high_half(hi));
                            f.lo[mt][r][m + h] = probe;
                        }
                        asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(check) : "r"(probe), "r"(0));
                    }
                }
            }
        }
    }
    return (check & 0x7fff7fffu) == 0;
}

// Lowers the scales so that these 16 q fit, and the sums with them
__device__ __forceinline__ void lower_scales(Sums& sums, const char* x, const Place& at) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            u32 words[ROW_WORDS];
            read_row(words, x + ((at.wm * MT + mt) * 16 + h * 8 + at.g) * X_PITCH, at);
#pragma unroll
            for (int r = 0; r < R; ++r) {
                u32 largest = 0;
#pragma unroll
                for (int m = 0; m < 4; ++m) largest = max(largest, words[element_at(m, r)] & 0x7fffffffu);
                largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
                largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
                int before = (int)(__float_as_uint(sums.scale[mt][r][h]) >> 23) - 127;
                int now = min(before, min(LARGEST_EXPONENT, HEADROOM - 1 - ((int)(largest >> 23) - 127)));
                float factor = now - before < -126 ? 0.0f : power_of_two(now - before);
                sums.scale[mt][r][h] = power_of_two(now);
#pragma unroll
                for (int nt = 0; nt < NT; ++nt) sums.value[mt][r][nt][2 * h] *= factor, sums.value[mt][r][nt][2 * h + 1] *= factor;
            }
        }
    }
}
