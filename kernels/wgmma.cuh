// wgmma (sm_90a): c[O..] += a * B, 64 rows a warpgroup; B from shared memory through a descriptor, a from registers (Wgmma) or through a
// descriptor too (WgmmaShared, whose `add` always adds). Without `accumulate` the product replaces c.
//
// A warp holds rows 16w..16w+15 of the 64 in the layout of mma.sync m16n8k16, accumulators and a alike, so the code
// around the product is the same for both. B lies as no-swizzle core matrices, K-major: panel [k8][column][8 halves],
// 128 bytes from one 8 columns to the next, columns*16 bytes from one k8 to the next. In shared memory a lies in the same way, 8 rows in
// the place of 8 columns, any distance from one k8 to the next.
#pragma once

#if MODE == 1
#define WGMMA_HALF "bf16"
#else
#define WGMMA_HALF "f16"
#endif

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

__device__ __forceinline__ unsigned long long wgmma_descriptor(unsigned int address, int columns) {
    return ((unsigned long long)(128 >> 4) << 32) | ((unsigned long long)columns << 16) | ((address & 0x3ffff) >> 4);
}

// The widest single instruction for N columns, N a multiple of 8; wider products are done in pieces.
__host__ __device__ constexpr int wgmma_piece(int columns) {
    return columns % 128 == 0 ? 128 : columns % 96 == 0 ? 96 : columns % 72 == 0 ? 72 : columns % 64 == 0 ? 64 : columns <= 48 && columns != 0 ? columns : columns % 48 == 0 ? 48 : columns % 40 == 0 ? 40 : columns % 32 == 0 ? 32 : columns % 24 == 0 ? 24 : columns % 16 == 0 ? 16 : 8;
}

// The sums of n column tiles, for the n below: their operands in the text of an instruction, and the operands themselves.
#define WGMMA_TEXT_1 "%0,%1,%2,%3"
#define WGMMA_TEXT_2 WGMMA_TEXT_1 ",%4,%5,%6,%7"
#define WGMMA_TEXT_3 WGMMA_TEXT_2 ",%8,%9,%10,%11"
#define WGMMA_TEXT_4 WGMMA_TEXT_3 ",%12,%13,%14,%15"
#define WGMMA_TEXT_5 WGMMA_TEXT_4 ",%16,%17,%18,%19"
#define WGMMA_TEXT_6 WGMMA_TEXT_5 ",%20,%21,%22,%23"
#define WGMMA_TEXT_7 WGMMA_TEXT_6 ",%24,%25,%26,%27"
#define WGMMA_TEXT_8 WGMMA_TEXT_7 ",%28,%29,%30,%31"
#define WGMMA_TEXT_9 WGMMA_TEXT_8 ",%32,%33,%34,%35"
#define WGMMA_TEXT_10 WGMMA_TEXT_9 ",%36,%37,%38,%39"
#define WGMMA_TEXT_11 WGMMA_TEXT_10 ",%40,%41,%42,%43"
#define WGMMA_TEXT_12 WGMMA_TEXT_11 ",%44,%45,%46,%47"
#define WGMMA_TEXT_13 WGMMA_TEXT_12 ",%48,%49,%50,%51"
#define WGMMA_TEXT_16 WGMMA_TEXT_13 ",%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_TEXT_18 WGMMA_TEXT_16 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define WGMMA_TEXT_24 WGMMA_TEXT_18 ",%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_TEXT_32 WGMMA_TEXT_24 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_C(n) "+f"(c[O + n][0]), "+f"(c[O + n][1]), "+f"(c[O + n][2]), "+f"(c[O + n][3])
#define WGMMA_SUMS_1 WGMMA_C(0)
#define WGMMA_SUMS_2 WGMMA_SUMS_1, WGMMA_C(1)
#define WGMMA_SUMS_3 WGMMA_SUMS_2, WGMMA_C(2)
#define WGMMA_SUMS_4 WGMMA_SUMS_3, WGMMA_C(3)
#define WGMMA_SUMS_5 WGMMA_SUMS_4, WGMMA_C(4)
#define WGMMA_SUMS_6 WGMMA_SUMS_5, WGMMA_C(5)
#define WGMMA_SUMS_7 WGMMA_SUMS_6, WGMMA_C(6)
#define WGMMA_SUMS_8 WGMMA_SUMS_7, WGMMA_C(7)
#define WGMMA_SUMS_9 WGMMA_SUMS_8, WGMMA_C(8)
#define WGMMA_SUMS_10 WGMMA_SUMS_9, WGMMA_C(9)
#define WGMMA_SUMS_11 WGMMA_SUMS_10, WGMMA_C(10)
#define WGMMA_SUMS_12 WGMMA_SUMS_11, WGMMA_C(11)
#define WGMMA_SUMS_13 WGMMA_SUMS_12, WGMMA_C(12)
#define WGMMA_SUMS_16 WGMMA_SUMS_13, WGMMA_C(13), WGMMA_C(14), WGMMA_C(15)
#define WGMMA_SUMS_18 WGMMA_SUMS_16, WGMMA_C(16), WGMMA_C(17)
#define WGMMA_SUMS_24 WGMMA_SUMS_18, WGMMA_C(18), WGMMA_C(19), WGMMA_C(20), WGMMA_C(21), WGMMA_C(22), WGMMA_C(23)
#define WGMMA_SUMS_32 WGMMA_SUMS_24, WGMMA_C(24), WGMMA_C(25), WGMMA_C(26), WGMMA_C(27), WGMMA_C(28), WGMMA_C(29), WGMMA_C(30), WGMMA_C(31)

template <int N> struct Wgmma;
template <int N> struct WgmmaShared;

// Products of N columns. P0 to P5 are the numbers of the operands behind the sums.
#define WGMMA_WIDTH(N, TEXT, P0, P1, P2, P3, P4, P5, ...)                                                                                    \
    template <> struct Wgmma<N> {                                                                                                            \
        template <int O = 0, int T>                                                                                                          \
        static __device__ __forceinline__ void run(float (&c)[T][4], const unsigned int (&a)[4], unsigned long long b, int accumulate) {     \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #P5 ", 0;"                                                                       \
                         " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." WGMMA_HALF "." WGMMA_HALF                                        \
                         " {" TEXT "}, {%" #P0 ",%" #P1 ",%" #P2 ",%" #P3 "}, %" #P4 ", p, 1, 1, 0; }"                                       \
                         : __VA_ARGS__                                                                                                       \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                             \
        }                                                                                                                                    \
    };                                                                                                                                       \
    template <> struct WgmmaShared<N> {                                                                                                      \
        template <int O = 0, int T>                                                                                                          \
        static __device__ __forceinline__ void run(float (&c)[T][4], unsigned long long a, unsigned long long b, int accumulate) {           \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #P2 ", 0;"                                                                       \
                         " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." WGMMA_HALF "." WGMMA_HALF                                        \
                         " {" TEXT "}, %" #P0 ", %" #P1 ", p, 1, 1, 0, 0; }"                                                                 \
                         : __VA_ARGS__                                                                                                       \
                         : "l"(a), "l"(b), "r"(accumulate));                                                                                 \
        }                                                                                                                                    \
        template <int T>                                                                                                                     \
        static __device__ __forceinline__ void add(float (&c)[T][4], unsigned long long a, unsigned long long b) {                           \
            constexpr int O = 0;                                                                                                             \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." WGMMA_HALF "." WGMMA_HALF                                         \
                         " {" TEXT "}, %" #P0 ", %" #P1 ", 1, 1, 1, 0, 0;"                                                                   \
                         : __VA_ARGS__                                                                                                       \
                         : "l"(a), "l"(b));                                                                                                  \
        }                                                                                                                                    \
    };

WGMMA_WIDTH(8, WGMMA_TEXT_1, 4, 5, 6, 7, 8, 9, WGMMA_SUMS_1)
WGMMA_WIDTH(16, WGMMA_TEXT_2, 8, 9, 10, 11, 12, 13, WGMMA_SUMS_2)
WGMMA_WIDTH(24, WGMMA_TEXT_3, 12, 13, 14, 15, 16, 17, WGMMA_SUMS_3)
WGMMA_WIDTH(32, WGMMA_TEXT_4, 16, 17, 18, 19, 20, 21, WGMMA_SUMS_4)
WGMMA_WIDTH(40, WGMMA_TEXT_5, 20, 21, 22, 23, 24, 25, WGMMA_SUMS_5)
WGMMA_WIDTH(48, WGMMA_TEXT_6, 24, 25, 26, 27, 28, 29, WGMMA_SUMS_6)
WGMMA_WIDTH(56, WGMMA_TEXT_7, 28, 29, 30, 31, 32, 33, WGMMA_SUMS_7)
WGMMA_WIDTH(64, WGMMA_TEXT_8, 32, 33, 34, 35, 36, 37, WGMMA_SUMS_8)
WGMMA_WIDTH(72, WGMMA_TEXT_9, 36, 37, 38, 39, 40, 41, WGMMA_SUMS_9)
WGMMA_WIDTH(80, WGMMA_TEXT_10, 40, 41, 42, 43, 44, 45, WGMMA_SUMS_10)
WGMMA_WIDTH(88, WGMMA_TEXT_11, 44, 45, 46, 47, 48, 49, WGMMA_SUMS_11)
WGMMA_WIDTH(96, WGMMA_TEXT_12, 48, 49, 50, 51, 52, 53, WGMMA_SUMS_12)
WGMMA_WIDTH(104, WGMMA_TEXT_13, 52, 53, 54, 55, 56, 57, WGMMA_SUMS_13)
WGMMA_WIDTH(128, WGMMA_TEXT_16, 64, 65, 66, 67, 68, 69, WGMMA_SUMS_16)
WGMMA_WIDTH(144, WGMMA_TEXT_18, 72, 73, 74, 75, 76, 77, WGMMA_SUMS_18)
WGMMA_WIDTH(192, WGMMA_TEXT_24, 96, 97, 98, 99, 100, 101, WGMMA_SUMS_24)
WGMMA_WIDTH(256, WGMMA_TEXT_32, 128, 129, 130, 131, 132, 133, WGMMA_SUMS_32)

// c[O..] += a * B for all columns of c, in pieces; a from registers, `b` a descriptor. Without `accumulate` the products replace c.
template <int O = 0, int T>
__device__ __forceinline__ void wgmma_pieces(float (&c)[T][4], const unsigned int (&a)[4], unsigned long long b, int accumulate = 1) {
    constexpr int kPiece = wgmma_piece((T - O) * 8);
    Wgmma<kPiece>::template run<O>(c, a, b + O * 8, accumulate);
    if constexpr (O + kPiece / 8 < T) wgmma_pieces<O + kPiece / 8>(c, a, b, accumulate);
}
