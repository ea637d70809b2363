// Microbenchmarks of a device: what a fingerprint's rates are measured with. Compiled by NVRTC, so that a fingerprint
// needs no toolkit; includes nothing.
//
// Each kernel does one thing as fast as the device can, with its result consumed under a test that is never true, so
// that no compiler can drop the work. What is timed, over how much, and when a figure is believed:
// autosel/fingerprint/gpu_probe.py and gpu_rates.py.
//
// Ideas from the published microbenchmarks: RRZE-HPC's gpu-benches (stream ramp, shared L2 chunks, small kernels),
// Jia et al. 2018 (pointer chase), NVIDIA's nvbandwidth (a spinning kernel holds the queue until all is enqueued).
//
// status  compiled and emulated; not yet run on silicon

using u64 = unsigned long long;

struct alignas(16) Vec { unsigned x, y, z, w; };

__device__ inline void fold(Vec& to, const Vec& from) { to.x |= from.x, to.y |= from.y, to.z |= from.z, to.w |= from.w; }

// A device's memory never holds this in all four words of an or over random data.
__device__ inline bool never(const Vec& v) { return (v.x & v.y & v.z & v.w) == 0xdeadbeefu && v.x == 0x12345678u; }

// Between two looks at what another block is to write: nothing on a device; emulated threads change places here.
__device__ inline void look_again() {
#if defined(AUTOSEL_EMULATED)
  simt::rest();
#endif
}

// --- memory ----------------------------------------------------------------------------------------------------------

// 16-byte loads, eight independent ones a thread: bytes in flight = 128 a thread.
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

// One load in flight a thread: the rate at a given occupancy tells the loaded latency (Little).
extern "C" __global__ void probe_read_one(const Vec* from, u64 count, Vec* sink) {
  u64 stride = u64(gridDim.x) * blockDim.x;
  Vec all = {};
#pragma unroll 1
  for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    // The next address waits for this value: whether it moves on by one more is known only once it is here.
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

// Leaves nothing in L1, in which a block's chunk may fit: what is asked is how fast L2 gives it.
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
    // A pass depends on the one before, or the compiler would read once.
    if (never(all[0])) mine += 1;
  }
#pragma unroll
  for (int k = 1; k < 4; ++k) fold(all[0], all[k]);
  if (never(all[0])) sink[0] = all[0];
}

// One thread follows a cycle of indices, each a word of its own 128-byte line, from the one in sink[0] on, which is
// then where it has come to; clock ticks into ticks[0].
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

// The same as a link of a chain of programmatic dependent launches: lets the next start, then waits for the one before.
extern "C" __global__ void probe_tiny_dependent(unsigned* word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  if (word[0] == 0xdeadbeefu) word[1] = 1;
}

// Holds the stream until the host has enqueued what is to be timed, for at most `most` ticks.
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

constexpr int kChains = 8;

__device__ inline void exp2_in_place(float& x) {
#if defined(__CUDA_ARCH__)
  asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
#else
  x = exp2f(x);
#endif
}

// Eight dependent chains a thread of 2^x; ticks of block 0's first warp into ticks[0].
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
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x == 0) ticks[0] = clock64() - start;
  float all = 0.0f;
  for (int k = 0; k < kChains; ++k) all += a[k];
  if (all == -1.0f) sink[0] = all;
}

extern "C" __global__ void probe_fma(unsigned steps, float seed, long long* ticks, float* sink) {
  float a[kChains];
  for (int k = 0; k < kChains; ++k) a[k] = seed * float(k + 1 + int(threadIdx.x));
  __syncthreads();
  long long start = clock64();
  // Unrolled, for a scheduler that can issue a product each clock has none to spare for counting.
#pragma unroll 8
  for (unsigned i = 0; i < steps; ++i) {
#pragma unroll
    for (int k = 0; k < kChains; ++k) a[k] = a[k] * 0.999f + seed;
  }
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x == 0) ticks[0] = clock64() - start;
  float all = 0.0f;
  for (int k = 0; k < kChains; ++k) all += a[k];
  if (all == -1.0f) sink[0] = all;
}

// The clock under load: ticks of one block over a stretch that the host times.
extern "C" __global__ void probe_clock(long long ticks_wanted, long long* ticks) {
  long long start = clock64(), now = start;
  while ((now = clock64()) - start < ticks_wanted) {}
  if (blockIdx.x == 0 && threadIdx.x == 0) ticks[0] = now - start;
}
