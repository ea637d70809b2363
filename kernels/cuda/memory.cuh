// Every instruction that only PTX has, each with a substitute for older devices, and for a CPU, where a C++ compiler
// compiles the same source to be tested.
#pragma once
#include <cassert>

#include "types.cuh"

namespace autosel {

// 2^x, to about 2 ulp; a result below the smallest normal is zero. exp2f would rescale such results.
__device__ __forceinline__ float exp2_flushed(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.0f : y;
#endif
}

// 16 bytes of an operand that is read once: bypasses L1, so that it does not evict activations. `volatile` keeps the
// order of the source, in particular before `wait_for_producers`.
__device__ __forceinline__ uint4 load_streamed(const void* p) {
#ifdef __CUDA_ARCH__
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
#else
  assert(uintptr_t(p) % 16 == 0);
  uint4 v;
  memcpy(&v, p, 16);
  return v;
#endif
}

// 16 bytes of an operand that other warps also read, or that an earlier kernel may still be writing: coherent, through
// L1, and not moved up across `wait_for_producers`.
__device__ __forceinline__ uint4 load_resident(const void* p) {
#ifndef __CUDA_ARCH__
  assert(uintptr_t(p) % 16 == 0);
#endif
  return *static_cast<const uint4*>(p);
}

__device__ __forceinline__ void store(void* p, const uint4& v) {
#ifndef __CUDA_ARCH__
  assert(uintptr_t(p) % 16 == 0);
#endif
  *static_cast<uint4*>(p) = v;
}

// Up to kVec<T> elements one by one, then zeros: for unaligned rows and the ends of rows.
template <class T> __device__ __forceinline__ uint4 load_elements(const T* p, int count) {
  T x[kVec<T>];
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) x[i] = i < count ? p[i] : T(0.0f);
  uint4 v;
  memcpy(&v, x, 16);
  return v;
}

template <class T> __device__ __forceinline__ void store_elements(T* p, const uint4& v, int count) {
  T x[kVec<T>];
  memcpy(x, &v, 16);
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i)
    if (i < count) p[i] = x[i];
}

// `count` elements of p (none, or more than a vector, are possible): as one vector if that is allowed and complete.
template <class T, bool Aligned> __device__ __forceinline__ uint4 load_vector(const T* p, int64_t count) {
  if (Aligned && count >= kVec<T>) return load_resident(p);
  return load_elements(p, int(count < kVec<T> ? count : kVec<T>));
}

template <class T, bool Aligned> __device__ __forceinline__ void store_vector(T* p, const uint4& v, int64_t count) {
  if (Aligned && count >= kVec<T>) store(p, v);
  else store_elements(p, v, int(count < kVec<T> ? count : kVec<T>));
}

// --- asynchronous copies to shared memory (sm_80) -------------------------------------------------------------------

// 16 bytes from `from` to `to`, or zeros if not `wanted` (`from` is not read then).
__device__ __forceinline__ void copy_async(void* to, const void* from, bool wanted) {
#ifdef __CUDA_ARCH__
  uint32_t at = uint32_t(__cvta_generic_to_shared(to));
  int bytes = wanted ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
#else
  assert(uintptr_t(to) % 16 == 0 && (!wanted || uintptr_t(from) % 16 == 0));
  if (wanted) memcpy(to, from, 16);
  else memset(to, 0, 16);
#endif
}

// The copies of this thread since the last commit become one group.
__device__ __forceinline__ void commit_copies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most Pending of this thread's groups are in flight. Does not cover other threads' copies.
template <int Pending> __device__ __forceinline__ void await_copies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}

// The same for a number known at run time, up to 7.
__device__ __forceinline__ void await_copies_but(int pending) {
  switch (pending) {
    case 0: return await_copies<0>();
    case 1: return await_copies<1>();
    case 2: return await_copies<2>();
    case 3: return await_copies<3>();
    case 4: return await_copies<4>();
    case 5: return await_copies<5>();
    case 6: return await_copies<6>();
    default: return await_copies<7>();
  }
}

// --- programmatic dependent launch (sm_90) --------------------------------------------------------------------------

// Allows the next kernel of the stream to start its prologue: before it reads our results it waits anyway.
__device__ __forceinline__ void release_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels before this one have completed and their results are visible. Before it only constants may be
// read (weights), and nothing written. Without the launch attribute it returns at once: the stream has waited.
__device__ __forceinline__ void wait_for_producers() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#elif defined(AUTOSEL_EMULATED)
  simt::wait_for_producers();
#endif
}

// --- CTAs of one launch that wait for each other ----------------------------------------------------------------------

// Writes of a thread before `add_released`, and writes of its CTA before a preceding barrier, are visible to a thread
// that reads the sum with `load_acquired`, and to that thread's CTA after a barrier.
__device__ __forceinline__ void add_released(unsigned* at, unsigned v) {
#ifdef __CUDA_ARCH__
  __threadfence();
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
#else
  *at += v;
#endif
}

__device__ __forceinline__ unsigned load_acquired(const unsigned* at) {
#ifdef __CUDA_ARCH__
  unsigned v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
#else
  return *at;
#endif
}

// The same without ordering, for polling: each `load_acquired` empties the SM's L1, in which CTAs that still work keep
// their data.
__device__ __forceinline__ unsigned load_relaxed(const unsigned* at) {
#ifdef __CUDA_ARCH__
  unsigned v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
#else
  return *at;
#endif
}

// Nanoseconds of a clock that all SMs share; it may tick in steps of a microsecond.
__device__ __forceinline__ unsigned long long clock_ns() {
#ifdef __CUDA_ARCH__
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
#elif defined(AUTOSEL_EMULATED)
  return simt::clock_ns();
#else
  return 0;
#endif
}

// Pause between two reads of a counter.
__device__ __forceinline__ void rest() {
#ifdef __CUDA_ARCH__
  __nanosleep(20);
#elif defined(AUTOSEL_EMULATED)
  simt::rest();
#endif
}

// --- shared memory --------------------------------------------------------------------------------------------------

// The block's shared memory, all of it dynamic: a launch gives its size, so that a check knows its end.
#ifdef __CUDACC__
__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(128) char autosel_shared[];
  return autosel_shared;
}
#endif

}  // namespace autosel
