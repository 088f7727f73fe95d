// Instructions that the kernels are made of, one function each: products of tiles, loads, copies, barriers.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

template <int BYTES>
struct alignas(BYTES) Vector { u32 w[BYTES / 4]; };

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// c += a * b for one m16n8k16 tile; halves are bf16 where MODE is 1, fp16 elsewhere, sums float32.
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (MODE == 1)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

// Loads that the compiler does not move: it would otherwise save registers and keep few loads in flight. BYTE counts from `from` on; a
// sum there would be calculated for each load.
template <int BYTE = 0>
__device__ __forceinline__ void load_now(Vector<16>& to, const char* from) {
    asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4+%5];" : "=r"(to.w[0]), "=r"(to.w[1]), "=r"(to.w[2]), "=r"(to.w[3]) : "l"(from), "n"(BYTE) : "memory");
}
template <int BYTE = 0>
__device__ __forceinline__ void load_now(Vector<8>& to, const char* from) {
    asm volatile("ld.global.v2.b32 {%0,%1}, [%2+%3];" : "=r"(to.w[0]), "=r"(to.w[1]) : "l"(from), "n"(BYTE) : "memory");
}

// A store that the compiler does not split, as it does to save moves.
__device__ __forceinline__ void store_now(void* to, const Vector<16>& from) {
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(from.w[0]), "r"(from.w[1]), "r"(from.w[2]), "r"(from.w[3]) : "memory");
}

// Two floats to two halves of the mode, the first in the low half.
__device__ __forceinline__ u32 round2(float low, float high) {
    u32 r;
    if constexpr (MODE == 1) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
// a * b + c of two halves each, rounded once.
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 r;
    if constexpr (MODE == 1) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
__device__ __forceinline__ float widen(u16 h) {
    float f;
    if constexpr (MODE == 1) f = __uint_as_float((u32)h << 16);
    else asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float exp2_fast(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

__device__ __forceinline__ float reciprocal_fast(float v) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

__device__ __forceinline__ float low_half(u32 w) { return widen((u16)w); }
__device__ __forceinline__ float high_half(u32 w) {
    if constexpr (MODE == 1) return __uint_as_float(w & 0xffff0000u);
    else return widen((u16)(w >> 16));
}

// The elements of a vector, of the type that MODE says, as float32; and a vector of such values, rounded.
template <int BYTES, int COUNT>
__device__ __forceinline__ void spread(float (&to)[COUNT], const Vector<BYTES>& from) {
#pragma unroll
    for (int k = 0; k < BYTES / 4; ++k) {
        if constexpr (MODE >= 2) to[k] = __uint_as_float(from.w[k]);
        else to[2 * k] = low_half(from.w[k]), to[2 * k + 1] = widen((u16)(from.w[k] >> 16));
    }
}
template <int BYTES, int COUNT>
__device__ __forceinline__ Vector<BYTES> rounded(const float (&values)[COUNT]) {
    Vector<BYTES> to;
#pragma unroll
    for (int k = 0; k < BYTES / 4; ++k) {
        if constexpr (MODE >= 2) to.w[k] = __float_as_uint(values[k]);
        else to.w[k] = round2(values[2 * k], values[2 * k + 1]);
    }
    return to;
}

__device__ __forceinline__ float over_quad_sum(float v) {  // of the four lanes that share a row
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}

__device__ __forceinline__ void load_shared(u32* r, u32 address) {  // 16 bytes
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared_pair(u32* r, u32 address) {  // 8 bytes
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}
__device__ __forceinline__ void store_shared_pair(u32 address, u32 a, u32 b) {
    asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ void store_shared_four(u32 address, const u32 (&a)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}
__device__ __forceinline__ void store_shared_half(u32 address, u16 a) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(a) : "memory");
}
__device__ __forceinline__ u32 load_shared_one(u32 address) {  // 4 bytes
    u32 r;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
    return r;
}
__device__ __forceinline__ u32 shared_increment(u32 address) {  // gives the value before
    u32 r;
    asm volatile("atom.relaxed.cta.shared.add.u32 %0, [%1], 1;" : "=r"(r) : "r"(address) : "memory");
    return r;
}
__device__ __forceinline__ void store_shared(u32 address, u32 a) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(a) : "memory");
}

// Asynchronous copy of BYTES (8 or 16), of which `valid` are read and the rest filled with zeros.
template <int BYTES>
__device__ __forceinline__ void copy_async(u32 to, const void* from, int valid) {
    if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid));
    else asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(valid));
}
// The same, with a request for the surrounding 256 bytes in the L2 cache, of which more will be read soon.
template <int BYTES>
__device__ __forceinline__ void copy_ahead(u32 to, const void* from, int valid) {
    if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid));
    else asm volatile("cp.async.ca.shared.global.L2::256B [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(valid));
}
// The same of bytes that nobody reads again: they leave the L2 cache first, and it is asked for the 128 around. `to` must come from `one_register`:
// NVRTC makes an illegal instruction where a part of the address lies in a register that all lanes share.
__device__ __forceinline__ void copy_once(u32 to, const void* from, int valid) {
    constexpr u64 kEvictFirst = 0x12f0000000000000ull;  // as createpolicy gives it
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(valid), "l"(kEvictFirst));
}
// An address that the compiler cannot take apart.
__device__ __forceinline__ u32 one_register(u32 address, int lane) { return __shfl_sync(0xffffffffu, address, lane); }
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @p bra done; bra again; done: }"
                 ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void named_barrier_wait(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

// Whether a barrier has completed; does not wait.
__device__ __forceinline__ u32 barrier_completed(u32 barrier, u32 parity) {
    u32 r;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }" : "=r"(r) : "r"(barrier), "r"(parity) : "memory");
    return r;
}
// One arrival, with the number of bytes that the copy engine will load.
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Orders this thread's reads and writes in shared memory before later ones of the copy engine and wgmma. An arrival at a barrier orders reads
// before other threads' stores only: without the fence a slot may be filled again while loads from it are in flight.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Several arrivals at once.
__device__ __forceinline__ void barrier_arrive_for(u32 barrier, int count) {
    asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0], %1; }" ::"r"(barrier), "r"(count) : "memory");
}
// One thread starts the copy engine; `barrier` counts the bytes that have arrived. Addresses and size are multiples of 16 bytes.
__device__ __forceinline__ void copy_bulk(u32 to, const char* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// One lane of a warp starts the copy engine; `barrier`, which expects one arrival, completes a phase when the bytes are there.
__device__ __forceinline__ void copy_by_warp(u32 to, const char* from, int bytes, u32 barrier, int lane) {
    if (lane == 0) {
        barrier_expect(barrier, bytes);
        copy_bulk(to, from, bytes, barrier);
    }
}

// Lets the next kernel begin, if it was launched to begin early, and waits until those before have ended.
__device__ __forceinline__ void wait_for_kernels_before() {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
