// Microbenchmarks that measure the rates in a fingerprint. Compiled by NVRTC, so that a fingerprint needs no toolkit;
// includes nothing.
//
// Each kernel does one thing as fast as the device can. Its result is used under a condition that is never true, so
// that no compiler can remove the work. What is timed, over how many bytes, and when a figure is accepted:
// autosel/devices/cuda/probe.py, cost.py, arithmetic.py and rates.py.
//
// Ideas from the published microbenchmarks: RRZE-HPC's gpu-benches (stream ramp, shared L2 chunks, small kernels),
// Jia et al. 2018 (pointer chase), NVIDIA's nvbandwidth (a spinning kernel holds the queue until all is enqueued).
//
// status  compiled and emulated; not yet run on silicon

using u64 = unsigned long long;

struct alignas(16) Vec { unsigned x, y, z, w; };

__device__ inline void fold(Vec& to, const Vec& from) { to.x |= from.x, to.y |= from.y, to.z |= from.z, to.w |= from.w; }

// No memory contains this in all four words of an or over random data.
__device__ inline bool never(const Vec& v) { return (v.x & v.y & v.z & v.w) == 0xdeadbeefu && v.x == 0x12345678u; }

// Pause between two reads of another block's value: empty on a device; emulated threads yield here.
__device__ inline void look_again() {
#if defined(AUTOSEL_EMULATED)
  simt::rest();
#endif
}

// --- memory ----------------------------------------------------------------------------------------------------------

// 16-byte loads, eight independent ones per thread: bytes in flight = 128 per thread.
extern "C" __global__ void probe_read(const Vec* from, u64 count, Vec* sink) {
  u64 stride = u64(gridDim.x) * blockDim.x, i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
  Vec all[8] = {};
  for (; i + 7 * stride < count; i += 8 * stride) {
    Vec got[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) got[k] = from[i + k * stride];
#pragma unroll
    for (int k = 0; k < 8; ++k) fold(all[k], got[k]);
  }
  for (; i < count; i += stride) fold(all[0], from[i]);
#pragma unroll
  for (int k = 1; k < 8; ++k) fold(all[0], all[k]);
  if (never(all[0])) sink[0] = all[0];
}

// One load in flight per thread: the rate at a given occupancy gives the loaded latency (Little's law).
extern "C" __global__ void probe_read_one(const Vec* from, u64 count, Vec* sink) {
  u64 stride = u64(gridDim.x) * blockDim.x;
  Vec all = {};
#pragma unroll 1
  for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    // The next address depends on this value, so the next load waits for it.
    Vec got = from[i];
    fold(all, got);
    i += got.x == 0x9e3779b9u && got.y == 0x7f4a7c15u && got.z == got.w;
  }
  if (never(all)) sink[0] = all;
}

extern "C" __global__ void probe_copy(Vec* to, const Vec* from, u64 count) {
  u64 stride = u64(gridDim.x) * blockDim.x, i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    Vec got[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) got[k] = from[i + k * stride];
#pragma unroll
    for (int k = 0; k < 4; ++k) to[i + k * stride] = got[k];
  }
  for (; i < count; i += stride) to[i] = from[i];
}

// Bypasses L1, which could hold a block's chunk: this measures L2.
__device__ inline Vec from_l2(const Vec* at) {
#if defined(__CUDA_ARCH__)
  Vec v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
#else
  return *at;
#endif
}

// Blocks share `chunks` chunks of `count` vectors, each read `passes` times: from L2 as long as they fit it.
extern "C" __global__ void probe_chunks(const Vec* from, u64 count, unsigned chunks, unsigned passes, Vec* sink) {
  const Vec* mine = from + count * (blockIdx.x % chunks);
  Vec all[4] = {};
#pragma unroll 1
  for (unsigned pass = 0; pass < passes; ++pass) {
    u64 i = threadIdx.x;
    for (; i + 3 * blockDim.x < count; i += 4 * blockDim.x) {
      Vec got[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) got[k] = from_l2(&mine[i + k * u64(blockDim.x)]);
#pragma unroll
      for (int k = 0; k < 4; ++k) fold(all[k], got[k]);
    }
    for (; i < count; i += blockDim.x) fold(all[0], from_l2(&mine[i]));
    // Each pass depends on the one before; otherwise the compiler would read once.
    if (never(all[0])) mine += 1;
  }
#pragma unroll
  for (int k = 1; k < 4; ++k) fold(all[0], all[k]);
  if (never(all[0])) sink[0] = all[0];
}

// One thread follows a cycle of indices, one per 128-byte line, starting at the one in sink[0], which then holds its
// last position; clock ticks into ticks[0].
extern "C" __global__ void probe_chase(const unsigned* next, unsigned steps, long long* ticks, unsigned* sink) {
  unsigned at = sink[0];
  for (unsigned i = 0; i < 64; ++i) at = next[u64(at) * 32];
  long long start = clock64();
#pragma unroll 1
  for (unsigned i = 0; i < steps; i += 32) {
#pragma unroll
    for (int k = 0; k < 32; ++k) at = next[u64(at) * 32];
  }
  ticks[0] = clock64() - start;
  sink[0] = at;
}

// --- the cost of starting and of meeting ------------------------------------------------------------------------------

extern "C" __global__ void probe_tiny(unsigned* word) {
  if (word[0] == 0xdeadbeefu) word[1] = 1;
}

// The same as a link of a chain of programmatic dependent launches: allows the next to start, then waits for the
// previous one.
extern "C" __global__ void probe_tiny_dependent(unsigned* word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  if (word[0] == 0xdeadbeefu) word[1] = 1;
}

// Blocks the stream until the host has enqueued the work to be timed, for at most `most` ticks.
extern "C" __global__ void probe_gate(volatile unsigned* open, long long most) {
  long long start = clock64();
  while (open[0] == 0 && clock64() - start < most) {}
}

// All blocks meet `rounds` times at one counter in memory. Every block must be resident: the host launches no more
// blocks than SMs. The counter starts at 0.
extern "C" __global__ void probe_barrier(unsigned* counter, unsigned rounds) {
  for (unsigned r = 1; r <= rounds; ++r) {
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(counter, 1);
      while (*reinterpret_cast<volatile unsigned*>(counter) < r * gridDim.x) look_again();
      __threadfence();
    }
    __syncthreads();
  }
}

// --- arithmetic ------------------------------------------------------------------------------------------------------

// Eight chains per thread; each step of a chain waits for the one before; ticks of block 0 into ticks[0].
constexpr int kChains = 8;

__device__ inline void exp2_in_place(float& x) {
#if defined(__CUDA_ARCH__)
  asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
#else
  x = exp2f(x);
#endif
}

__device__ inline void stop_watch(long long start, long long* ticks) {
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x == 0) ticks[0] = clock64() - start;
}

extern "C" __global__ void probe_exp2(unsigned steps, float seed, long long* ticks, float* sink) {
  float a[kChains];
  for (int k = 0; k < kChains; ++k) a[k] = seed * float(k + 1 + int(threadIdx.x));
  __syncthreads();
  long long start = clock64();
#pragma unroll 1
  for (unsigned i = 0; i < steps; ++i) {
#pragma unroll
    for (int k = 0; k < kChains; ++k) exp2_in_place(a[k]);
  }
  stop_watch(start, ticks);
  float all = 0.0f;
  for (int k = 0; k < kChains; ++k) all += a[k];
  if (all == -1.0f) sink[0] = all;
}

extern "C" __global__ void probe_fma(unsigned steps, float seed, long long* ticks, float* sink) {
  float a[kChains];
  for (int k = 0; k < kChains; ++k) a[k] = seed * float(k + 1 + int(threadIdx.x));
  __syncthreads();
  long long start = clock64();
  // Unrolled: a scheduler that can issue one product per clock has no clocks left for counting.
#pragma unroll 8
  for (unsigned i = 0; i < steps; ++i) {
#pragma unroll
    for (int k = 0; k < kChains; ++k) a[k] = a[k] * 0.999f + seed;
  }
  stop_watch(start, ticks);
  float all = 0.0f;
  for (int k = 0; k < kChains; ++k) all += a[k];
  if (all == -1.0f) sink[0] = all;
}

// Two fp8 (e4m3) become two fp16. Any two bytes are a pair of e4m3, so the lower half of a result is the pair of the
// next step.
__device__ inline unsigned widened(unsigned pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  unsigned wide;
  asm volatile("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"((unsigned short)(pair)));
  return wide;
#else
  return pair * 2654435761u;  // no such instruction: the host does not measure its rate
#endif
}

extern "C" __global__ void probe_from_fp8(unsigned steps, float seed, long long* ticks, unsigned* sink) {
  unsigned a[kChains];
  for (int k = 0; k < kChains; ++k) a[k] = unsigned(seed) + 0x9e37u * (k + 1 + threadIdx.x);
  __syncthreads();
  long long start = clock64();
#pragma unroll 8
  for (unsigned i = 0; i < steps; ++i) {
#pragma unroll
    for (int k = 0; k < kChains; ++k) a[k] = widened(a[k]);
  }
  stop_watch(start, ticks);
  unsigned all = 0;
  for (int k = 0; k < kChains; ++k) all |= a[k];
  if (all == 0xdeadbeefu) sink[0] = all;
}

// Eight independent 16-byte loads per thread and step from shared memory, with each warp's 512 bytes contiguous: no
// bank conflicts. Blocks of at most 512 threads, launched with room for 1024 vectors.
constexpr int kSharedVectors = 1024;

__device__ inline Vec from_shared(const Vec* at) {
#if defined(__CUDA_ARCH__)
  Vec v;
  unsigned place = unsigned(__cvta_generic_to_shared(at));
  // Volatile: the compiler must repeat a load although nothing was written in between.
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(place));
  return v;
#else
  return *at;
#endif
}

extern "C" __global__ void probe_shared(unsigned steps, float seed, long long* ticks, Vec* sink) {
#if defined(AUTOSEL_EMULATED)
  Vec* room = reinterpret_cast<Vec*>(autosel::shared_memory());
#else
  extern __shared__ Vec room[];
#endif
  for (unsigned i = threadIdx.x; i < kSharedVectors; i += blockDim.x) room[i] = {i, unsigned(seed), i * i, 1u};
  __syncthreads();
  const Vec* mine = room + threadIdx.x;
  Vec all[kChains] = {};
  long long start = clock64();
#pragma unroll 1
  for (unsigned i = 0; i < steps; ++i) {
    Vec got[kChains];
#pragma unroll
    for (int k = 0; k < kChains; ++k) got[k] = from_shared(mine + k * 64);
#pragma unroll
    for (int k = 0; k < kChains; ++k) fold(all[k], got[k]);
  }
  stop_watch(start, ticks);
#pragma unroll
  for (int k = 1; k < kChains; ++k) fold(all[0], all[k]);
  if (never(all[0])) sink[0] = all[0];
}

// Eight accumulators per warp, operands in registers and never loaded: the rate of the warp-wide matrix instruction, on
// which every kernel for small M is built. A warp group's instruction (sm_90, sm_100) is faster: gpu_arithmetic.py
// measures it by timing the library's product.
__device__ inline unsigned scrambled(unsigned x) {
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

struct Fragments { unsigned a[4], b[2]; };

// Random signs and mantissas: values in [0.5, 2), so that nothing overflows and no multiplier idles.
__device__ inline Fragments drawn(unsigned keep, unsigned set) {
  Fragments f;
  unsigned x = scrambled(blockIdx.x * blockDim.x + threadIdx.x + 1);
  for (int i = 0; i < 4; ++i) f.a[i] = ((x = scrambled(x + i)) & keep) | set;
  for (int i = 0; i < 2; ++i) f.b[i] = ((x = scrambled(x + i)) & keep) | set;
  return f;
}

__device__ inline void product_bf16(float (&c)[4], const Fragments& f) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(f.a[0]), "r"(f.a[1]), "r"(f.a[2]), "r"(f.a[3]), "r"(f.b[0]), "r"(f.b[1]));
#else
  for (int i = 0; i < 4; ++i) c[i] += float(f.a[i] & 1) - float(f.b[i & 1] & 1);
#endif
}

__device__ inline void product_fp8(float (&c)[4], const Fragments& f) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(f.a[0]), "r"(f.a[1]), "r"(f.a[2]), "r"(f.a[3]), "r"(f.b[0]), "r"(f.b[1]));
#else
  for (int i = 0; i < 4; ++i) c[i] += float(f.a[i] & 1) - float(f.b[i & 1] & 1);
#endif
}

template <class Product>
__device__ inline void products(unsigned steps, const Fragments& f, Product product, long long* ticks, float* sink) {
  float c[kChains][4] = {};
  __syncthreads();
  long long start = clock64();
#pragma unroll 1
  for (unsigned i = 0; i < steps; ++i) {
#pragma unroll
    for (int k = 0; k < kChains; ++k) product(c[k], f);
  }
  stop_watch(start, ticks);
  float all = 0.0f;
  for (int k = 0; k < kChains; ++k) all += c[k][0] + c[k][1] + c[k][2] + c[k][3];
  if (all == -0.12345f) sink[0] = all;
}

extern "C" __global__ void probe_mma_bf16(unsigned steps, float, long long* ticks, float* sink) {
  auto product = [](float (&c)[4], const Fragments& f) { product_bf16(c, f); };
  products(steps, drawn(0x80ff80ffu, 0x3f003f00u), product, ticks, sink);
}

extern "C" __global__ void probe_mma_fp8(unsigned steps, float, long long* ticks, float* sink) {
  auto product = [](float (&c)[4], const Fragments& f) { product_fp8(c, f); };
  products(steps, drawn(0x8f8f8f8fu, 0x30303030u), product, ticks, sink);
}

// The clock under load: ticks of one block over a period that the host times.
extern "C" __global__ void probe_clock(long long ticks_wanted, long long* ticks) {
  long long start = clock64(), now = start;
  while ((now = clock64()) - start < ticks_wanted) {}
  if (blockIdx.x == 0 && threadIdx.x == 0) ticks[0] = now - start;
}
