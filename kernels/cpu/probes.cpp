// probes   the device's rates, each as many short windows: read, copy, last-level cache, latency, FMA, bf16 dot, exp, fork-join
//
// Plain C entry points for ctypes: a fingerprint needs neither torch nor tvm-ffi in the process. Every probe fills
// `out` with one figure per window until `seconds` have passed (at least 3 windows, at most `most`) and returns their
// number. The caller computes the statistics. A window is long compared with the timer (20 ns) and the fork-join (a few
// us), and short compared with the scheduler's tick, so that on a shared machine some windows are undisturbed.
//
// Threads come from team.h and are not pinned: the probes measure the rates that a kernel of this process gets.

#include "simd.h"
#include "team.h"

namespace autosel {

static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC_RAW, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// Runs `window` (which returns its own seconds) over and over; out[i] = figure(seconds).
template <class Window, class Figure>
static int64_t windows(double seconds, double* out, int64_t most, const Window& window, const Figure& figure) {
  autosel::team_v2::Awake awake;
  double end = now() + seconds;
  int64_t n = 0;
  while (n < most && (n < 3 || now() < end)) out[n++] = figure(window());
  return n;
}

template <class Work> static double timed(const Work& work) {
  double start = now();
  work();
  return now() - start;
}

// --- memory ----------------------------------------------------------------------------------------------------------

struct Memory { char* at; int64_t bytes; };

// Pages of 2 MB if the system grants them, so that page walks do not limit the rate. The team touches them first, so
// that each thread's share is nearby on a NUMA machine.
static Memory map(int64_t bytes, int64_t threads) {
  void* at = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return {nullptr, 0};
  madvise(at, size_t(bytes), MADV_HUGEPAGE);
  char* p = static_cast<char*>(at);
  parallel(threads, bytes, 1 << 21, [&](int64_t begin, int64_t end, int) { memset(p + begin, 1, size_t(end - begin)); });
  return {p, bytes};
}

#if defined(AUTOSEL_AVX512)
constexpr int kReadBytes = 64;
#elif defined(__AVX__)
constexpr int kReadBytes = 32;
#else
constexpr int kReadBytes = 16;  // wider than the registers, the compiler spills the chains and reads at half the rate
#endif
typedef uint64_t vread __attribute__((vector_size(kReadBytes)));
}
extern "C" { uint64_t autosel_probe_sink[256]; }  // visible, so the compiler cannot remove it
namespace autosel {
static uint64_t* const sink = autosel_probe_sink;

// Bitwise or in eight chains: one cheap instruction per load, so that loads alone take the time.
static uint64_t read_all(const char* p, int64_t bytes) {
  vread a[8] = {};
  const vread* v = reinterpret_cast<const vread*>(p);
  for (int64_t i = 0, n = bytes / kReadBytes; i + 8 <= n; i += 8)
    for (int k = 0; k < 8; ++k) a[k] |= v[i + k];
  for (int k = 1; k < 8; ++k) a[0] |= a[k];
  uint64_t all = 0;
  for (int k = 0; k < kReadBytes / 8; ++k) all |= a[0][k];
  return all;
}

// The same bytes, eight rows at a time, prefetching the next eight: more lines in flight than the hardware prefetcher
// keeps for one stream. The faster of the two differs by machine and moment (ratios of 0.9 to 1.25 measured here).
static uint64_t read_rows(const char* p, int64_t bytes) {
  constexpr int64_t kRow = 8192, kBlock = 8 * kRow;
  vread a[8] = {};
  int64_t at = 0;
  for (; at + 2 * kBlock <= bytes; at += kBlock)
    for (int64_t i = 0; i < kRow; i += 64) {
      const char* ahead = p + at + kBlock + 8 * i;
      for (int r = 0; r < 8; ++r) __builtin_prefetch(ahead + 64 * r, 0, 2);
      for (int r = 0; r < 8; ++r)
        for (int64_t part = 0; part < 64; part += kReadBytes)
          a[r] |= *reinterpret_cast<const vread*>(p + at + r * kRow + i + part);
    }
  for (int k = 1; k < 8; ++k) a[0] |= a[k];
  return read_all(p + at, bytes - at) | uint64_t(a[0][0]);
}

static double read_window(const char* p, int64_t bytes, int64_t threads, bool rows = false) {
  return timed([&] {
    parallel(threads, bytes, 4096, [&](int64_t begin, int64_t end, int rank) {
      sink[rank & 255] = rows ? read_rows(p + begin, end - begin) : read_all(p + begin, end - begin);
    });
  });
}

static double copy_window(char* to, const char* from, int64_t bytes, int64_t threads) {
  return timed([&] {
    parallel(threads, bytes, 4096, [&](int64_t begin, int64_t end, int) {
      memcpy(to + begin, from + begin, size_t(end - begin));
    });
  });
}

// One random cycle through every line of `memory` (Sattolo): no stride for a prefetcher, no short loop.
static void make_cycle(const Memory& memory) {
  uint32_t lines = uint32_t(memory.bytes / 64);
  auto next = [&](uint32_t i) -> uint32_t& { return *reinterpret_cast<uint32_t*>(memory.at + int64_t(i) * 64); };
  for (uint32_t i = 0; i < lines; ++i) next(i) = i;
  uint64_t state = 0x9e3779b97f4a7c15;
  for (uint32_t i = lines - 1; i > 0; --i) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    uint32_t j = uint32_t((state >> 32) * i >> 32), kept = next(i);  // j < i makes it one cycle
    next(i) = next(j), next(j) = kept;
  }
}

// --- arithmetic ------------------------------------------------------------------------------------------------------

constexpr int kChains = 12;  // latency 4 x 2 ports = 8 chains saturate; 12 leave room and fit 16 registers
constexpr int64_t kSteps = 4096;

template <class Step> static double chains_window(const Step& step) {
  vreg a[kChains];
  for (int k = 0; k < kChains; ++k) a[k] = splat(1.0f + float(k));
  double seconds = timed([&] {
    for (int64_t i = 0; i < kSteps; ++i)
      for (int k = 0; k < kChains; ++k) a[k] = step(a[k]);  // rounding prevents the compiler from folding any of it
  });
  for (int k = 1; k < kChains; ++k) a[0] += a[k];
  sink[0] = float_to_bits(sum(a[0]));
  return seconds;
}

}  // namespace autosel

using namespace autosel;

extern "C" {

// A buffer, or null. Mapping and first touch cost about 0.2 s a GB.
void* autosel_probe_map(int64_t bytes, int64_t threads) { return map(bytes, threads).at; }

int64_t autosel_probe_unmap(void* at, int64_t bytes) { return munmap(at, size_t(bytes)); }

// Return bytes/s. Windows of `window` bytes move around the buffer, from the one at `first` on: the bytes read were last
// touched one whole buffer ago. They are read as one stream per thread and by rows, in turn; the result is the faster of
// the two.
int64_t autosel_probe_read(const char* p, int64_t bytes, int64_t window, int64_t first, int64_t threads, double seconds,
                           double* out, int64_t most) {
  int64_t at = first;
  bool rows = false;
  return windows(seconds, out, most, [&] {
    double taken = read_window(p + at, window, threads, rows);
    at = at + 2 * window <= bytes ? at + window : 0;
    rows = !rows;
    return taken;
  }, [&](double s) { return double(window) / s; });
}

// Return bytes/s, reads plus writes, of the C library's memcpy.
int64_t autosel_probe_copy(char* to, const char* from, int64_t bytes, int64_t window, int64_t threads, double seconds,
                           double* out, int64_t most) {
  int64_t at = 0;
  return windows(seconds, out, most, [&] {
    double taken = copy_window(to + at, from + at, window, threads);
    at = at + 2 * window <= bytes ? at + window : 0;
    return taken;
  }, [&](double s) { return 2.0 * double(window) / s; });
}

// Return bytes/s over a set that stays in the last-level cache; each window reads it `passes` times.
int64_t autosel_probe_cache(const char* p, int64_t bytes, int64_t passes, int64_t threads, double seconds, double* out,
                            int64_t most) {
  read_window(p, bytes, threads);
  return windows(seconds, out, most, [&] {
    return timed([&] {
      parallel(threads, bytes, 4096, [&](int64_t begin, int64_t end, int rank) {
        for (int64_t i = 0; i < passes; ++i) sink[rank & 255] += read_all(p + begin, end - begin);
      });
    });
  }, [&](double s) { return double(bytes * passes) / s; });
}

// Return seconds per load. `flush` is read first, so that no line of the cycle is in a cache; no line is visited twice.
int64_t autosel_probe_latency(char* p, int64_t bytes, const char* flush, int64_t flush_bytes, double seconds, double* out,
                              int64_t most) {
  constexpr int64_t kLoads = 1024;
  make_cycle({p, bytes});
  sink[0] = read_all(flush, flush_bytes);
  int64_t available = bytes / 64 / kLoads;
  uint32_t line = 0;
  int64_t n = windows(seconds, out, most < available ? most : available, [&] {
    return timed([&] {
      for (int64_t i = 0; i < kLoads; ++i) line = *reinterpret_cast<const volatile uint32_t*>(p + int64_t(line) * 64);
    });
  }, [&](double s) { return s / double(kLoads); });
  sink[0] = line;
  return n;
}

// Return fp32 FLOP/s of one thread; a multiply-add counts as two.
int64_t autosel_probe_fma(double seconds, double* out, int64_t most) {
  vreg x = splat(0.999f), y = splat(0.001f);
  return windows(seconds, out, most, [&] { return chains_window([&](vreg a) { return fma(a, x, y); }); },
                 [&](double s) { return 2.0 * kLanes * kChains * double(kSteps) / s; });
}

// Return bf16 dot-product FLOP/s of one thread; 0 windows if the instruction is not compiled in.
int64_t autosel_probe_bf16_dot(double seconds, double* out, int64_t most) {
#if defined(AUTOSEL_BF16_DOT)
  bf16 one[2 * kLanes];
  for (auto& b : one) b = narrow<bf16>(0.001f);
  __m512i x = _mm512_loadu_si512(one);
  auto step = [&](vreg a) {
    return reinterpret_cast<vreg>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(a), (__m512bh)x, (__m512bh)x));
  };
  return windows(seconds, out, most, [&] { return chains_window(step); },
                 [&](double s) { return 4.0 * kLanes * kChains * double(kSteps) / s; });
#else
  (void)seconds, (void)out, (void)most;
  return 0;
#endif
}

// Return exponentials/s of one thread, operands in L1, results stored.
int64_t autosel_probe_exp(double seconds, double* out, int64_t most) {
  constexpr int64_t kCount = 1024, kPasses = 16;
  static float x[kCount], y[kCount];
  for (int64_t i = 0; i < kCount; ++i) x[i] = -8.0f + 0.015f * float(i);
  return windows(seconds, out, most, [&] {
    return timed([&] {
      for (int64_t pass = 0; pass < kPasses; ++pass) {
        for (int64_t i = 0; i < kCount; i += 2 * kLanes)
          store(y + i, exp(load(x + i))), store(y + i + kLanes, exp(load(x + i + kLanes)));
        asm volatile("" : : "r"(y) : "memory");
      }
    });
  }, [&](double s) { return double(kCount * kPasses) / s; });
}

// Return seconds per empty parallel region of `threads`, back to back as in a decode step.
int64_t autosel_probe_fork_join(int64_t threads, double seconds, double* out, int64_t most) {
  constexpr int64_t kRegions = 4;  // few, so that one preempted helper spoils few
  return windows(seconds, out, most, [&] {
    return timed([&] {
      for (int64_t i = 0; i < kRegions; ++i)
        parallel(threads, threads, 1, [](int64_t begin, int64_t, int rank) { sink[rank & 255] = uint64_t(begin); });
    });
  }, [&](double s) { return s / double(kRegions); });
}

}  // extern "C"
