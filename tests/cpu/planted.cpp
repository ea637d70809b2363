// rmsnorm in bf16: one right kernel, and typical mistakes of native kernels; for parity workers only (planted.py).
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "faults.cpp"

using bf16 = uint16_t;

static float wide(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
static bf16 cut(float x) { return bf16(bits_of(x) >> 16); }
static bf16 narrow(float x) {
  uint32_t bits = bits_of(x);
  if (std::isnan(x)) return bf16(bits >> 16 | 0x40);
  return bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The operands of a call: strides in elements, the last dimension contiguous.
struct Call {
  bf16* x;
  bf16* weight;
  bf16* y;
  int64_t m, d, x_stride, y_stride;
  float eps, offset;
};

static float rstd_of(const bf16* x, int64_t d, float eps) {
  float total = 0;
  for (int64_t i = 0; i < d; ++i) total += wide(x[i]) * wide(x[i]);
  return 1.0f / std::sqrt(total / float(d) + eps);
}
static float scaled(const Call& c, const bf16* x, int64_t i, float rstd) {
  return wide(x[i]) * rstd * (wide(c.weight[i]) + c.offset);
}
static void row(const Call& c, const bf16* x, bf16* y, int64_t begin, int64_t end) {
  float rstd = rstd_of(x, c.d, c.eps);
  for (int64_t i = begin; i < end; ++i) y[i] = narrow(scaled(c, x, i, rstd));
}
static void rows(const Call& c, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) row(c, c.x + r * c.x_stride, c.y + r * c.y_stride, 0, c.d);
}

extern "C" {

void native_right(const Call* c) { rows(*c, 0, c->m); }

// --- wrong writes ---

void native_zeros(const Call* c) {
  for (int64_t r = 0; r < c->m; ++r) memset(c->y + r * c->y_stride, 0, size_t(c->d) * 2);
}
void native_nothing(const Call*) {}
void native_without_last_tile(const Call* c) {
  for (int64_t r = 0; r < c->m; ++r) row(*c, c->x + r * c->x_stride, c->y + r * c->y_stride, 0, c->d / 16 * 16);
}
// Whole vectors of 16, on a ragged tail too.
void native_past_the_end(const Call* c) {
  rows(*c, 0, c->m);
  int64_t whole = (c->d + 15) / 16 * 16;
  for (int64_t i = c->d; i < whole; ++i) c->y[(c->m - 1) * c->y_stride + i] = 0x3f80;
}

// --- wrong reads ---

// Masks by multiplication: values past the row are loaded, and NaN times zero is NaN.
void native_masked_by_product(const Call* c) {
  for (int64_t r = 0; r < c->m; ++r) {
    const bf16* x = c->x + r * c->x_stride;
    float total = 0;
    for (int64_t i = 0; i < (c->d + 15) / 16 * 16; ++i) {
      float inside = i < c->d ? 1.0f : 0.0f;
      total += wide(x[i]) * wide(x[i]) * inside;
    }
    float rstd = 1.0f / std::sqrt(total / float(c->d) + c->eps);
    for (int64_t i = 0; i < c->d; ++i) c->y[r * c->y_stride + i] = narrow(scaled(*c, x, i, rstd));
  }
}
void native_without_strides(const Call* c) {
  for (int64_t r = 0; r < c->m; ++r) row(*c, c->x + r * c->d, c->y + r * c->d, 0, c->d);
}
// Loads by 16 bytes, whose address the hardware rounds down, as bulk copies do.
void native_aligned(const Call* c) {
  Call k = *c;
  k.x = reinterpret_cast<bf16*>(reinterpret_cast<uintptr_t>(c->x) & ~uintptr_t(15));
  k.weight = reinterpret_cast<bf16*>(reinterpret_cast<uintptr_t>(c->weight) & ~uintptr_t(15));
  rows(k, 0, k.m);
}
#if defined(__x86_64__)
#include <emmintrin.h>
// The same by an aligned load, which traps.
void native_aligned_trap(const Call* c) {
  static volatile int kept;
  if (c->d >= 8) kept = _mm_cvtsi128_si32(_mm_slli_si128(_mm_load_si128(reinterpret_cast<const __m128i*>(c->weight)), 2));
  rows(*c, 0, c->m);
}
#else
void native_aligned_trap(const Call* c) {
  if (reinterpret_cast<uintptr_t>(c->weight) % 16 != 0) __builtin_trap();
  rows(*c, 0, c->m);
}
#endif
void native_int32_index(const Call* c) {
  for (int64_t r = 0; r < c->m; ++r) {
    int32_t at = int32_t(uint32_t(r) * uint32_t(c->x_stride));
    row(*c, c->x + at, c->y + r * c->y_stride, 0, c->d);
  }
}
void native_normalises_in_place(const Call* c) {
  for (int64_t r = 0; r < c->m; ++r) {
    bf16* x = c->x + r * c->x_stride;
    float rstd = rstd_of(x, c->d, c->eps);
    for (int64_t i = 0; i < c->d; ++i) x[i] = narrow(wide(x[i]) * rstd);
    for (int64_t i = 0; i < c->d; ++i)
      c->y[r * c->y_stride + i] = narrow(wide(x[i]) * (wide(c->weight[i]) + c->offset));
  }
}

// --- wrong computations ---

void native_sums_in_bf16(const Call* c) {
  for (int64_t r = 0; r < c->m; ++r) {
    const bf16* x = c->x + r * c->x_stride;
    float total = 0;
    for (int64_t i = 0; i < c->d; ++i) total = wide(narrow(total + wide(x[i]) * wide(x[i])));
    float rstd = 1.0f / std::sqrt(total / float(c->d) + c->eps);
    for (int64_t i = 0; i < c->d; ++i) c->y[r * c->y_stride + i] = narrow(scaled(*c, x, i, rstd));
  }
}
void native_truncates(const Call* c) {
  for (int64_t r = 0; r < c->m; ++r) {
    const bf16* x = c->x + r * c->x_stride;
    float rstd = rstd_of(x, c->d, c->eps);
    for (int64_t i = 0; i < c->d; ++i) c->y[r * c->y_stride + i] = cut(scaled(*c, x, i, rstd));
  }
}
void native_swallows_nan(const Call* c) {
  for (int64_t r = 0; r < c->m; ++r) {
    const bf16* x = c->x + r * c->x_stride;
    float rstd = rstd_of(x, c->d, c->eps);
    for (int64_t i = 0; i < c->d; ++i)
      c->y[r * c->y_stride + i] = narrow(std::fmax(-3e38f, std::fmin(3e38f, scaled(*c, x, i, rstd))));
  }
}

// --- threads ---

// Two threads sum half a row each into shared partials, and read both without waiting for each other.
void native_without_barrier(const Call* c) {
  static volatile float partial[2];
  auto half = [c](int which) {
    for (int64_t r = 0; r < c->m; ++r) {
      const bf16* x = c->x + r * c->x_stride;
      int64_t middle = c->d / 2, begin = which ? middle : 0, end = which ? c->d : middle;
      float own = 0;
      for (int64_t i = begin; i < end; ++i) own += wide(x[i]) * wide(x[i]);
      partial[which] = own;
      float rstd = 1.0f / std::sqrt((partial[0] + partial[1]) / float(c->d) + c->eps);
      for (int64_t i = begin; i < end; ++i) c->y[r * c->y_stride + i] = narrow(scaled(*c, x, i, rstd));
    }
  };
  std::thread other(half, 1);
  half(0);
  other.join();
}
// The same with the barrier: right.
void native_two_threads(const Call* c) {
  std::atomic<int64_t> arrived{0};
  std::vector<float> partial(size_t(2 * c->m));
  auto half = [&](int which) {
    int64_t middle = c->d / 2, begin = which ? middle : 0, end = which ? c->d : middle;
    for (int64_t r = 0; r < c->m; ++r) {
      const bf16* x = c->x + r * c->x_stride;
      float own = 0;
      for (int64_t i = begin; i < end; ++i) own += wide(x[i]) * wide(x[i]);
      partial[size_t(2 * r + which)] = own;
    }
    arrived.fetch_add(1);
    while (arrived.load() < 2) std::this_thread::yield();
    for (int64_t r = 0; r < c->m; ++r) {
      const bf16* x = c->x + r * c->x_stride;
      float total = partial[size_t(2 * r)] + partial[size_t(2 * r + 1)];
      float rstd = 1.0f / std::sqrt(total / float(c->d) + c->eps);
      for (int64_t i = begin; i < end; ++i) c->y[r * c->y_stride + i] = narrow(scaled(*c, x, i, rstd));
    }
  };
  std::thread other(half, 1);
  half(0);
  other.join();
}
// Returns at once; a new thread does the work, on arguments that may no longer exist.
void native_works_later(const Call* c) {
  std::thread([k = *c] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    rows(k, 0, k.m);
  }).detach();
}
// Right, and leaves a thread behind that burns a core for some milliseconds.
void native_leaves_residue(const Call* c) {
  rows(*c, 0, c->m);
  std::thread([] {
    auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(4);
    while (std::chrono::steady_clock::now() < until) {
    }
  }).detach();
}

// --- wrong in some calls ---

void native_wrong_at_an_edge(const Call* c) {
  Call k = *c;
  k.d -= c->d % 16 == 15;
  rows(k, 0, k.m);
  if (k.d < c->d)
    for (int64_t r = 0; r < c->m; ++r) c->y[r * c->y_stride + k.d] = 0;
}
void native_nan_now_and_then(const Call* c) {
  static int calls = 0;
  rows(*c, 0, c->m);
  if (++calls % 40 == 0) c->y[0] = 0x7fc0;
}
void native_flaky(const Call* c) {
  static int calls = 0;
  rows(*c, 0, c->m);
  if (++calls % 7 == 0) c->y[(c->m - 1) * c->y_stride + c->d - 1] ^= 4;
}

// --- right for one caller, wrong for others ---

static void by_scratch(const Call* c, std::vector<float>& scratch) {
  if (scratch.size() < size_t(c->m * c->d)) scratch.resize(size_t(c->m * c->d));
  for (int64_t r = 0; r < c->m; ++r) {
    const bf16* x = c->x + r * c->x_stride;
    float rstd = rstd_of(x, c->d, c->eps);
    for (int64_t i = 0; i < c->d; ++i) scratch[size_t(r * c->d + i)] = scaled(*c, x, i, rstd);
  }
  for (int64_t r = 0; r < c->m; ++r)
    for (int64_t i = 0; i < c->d; ++i) c->y[r * c->y_stride + i] = narrow(scratch[size_t(r * c->d + i)]);
}
// One scratch buffer for all callers; of a size that no call has to change.
void native_static_scratch(const Call* c) {
  static std::vector<float> scratch(1 << 20);
  by_scratch(c, scratch);
}
// Set up once for the process, and kept by each thread.
void native_set_up_on_one_thread(const Call* c) {
  static std::once_flag once;
  thread_local float unit = 0;
  std::call_once(once, [] { unit = 1; });
  for (int64_t r = 0; r < c->m; ++r) {
    const bf16* x = c->x + r * c->x_stride;
    float rstd = rstd_of(x, c->d, c->eps) * unit;
    for (int64_t i = 0; i < c->d; ++i) c->y[r * c->y_stride + i] = narrow(scaled(*c, x, i, rstd));
  }
}
// Sums into new memory, which is zero only in a new process.
void native_sums_into_new_memory(const Call* c) {
  size_t room = size_t(std::max<int64_t>(c->m, 1 << 18)) * sizeof(float);
  auto* totals = static_cast<volatile float*>(malloc(room));
  for (int64_t r = 0; r < c->m; ++r) {
    const bf16* x = c->x + r * c->x_stride;
    for (int64_t i = 0; i < c->d; ++i) totals[r] = totals[r] + wide(x[i]) * wide(x[i]);
    float rstd = 1.0f / std::sqrt(totals[r] / float(c->d) + c->eps);
    for (int64_t i = 0; i < c->d; ++i) c->y[r * c->y_stride + i] = narrow(scaled(*c, x, i, rstd));
  }
  free(const_cast<float*>(totals));
}

// --- right, in unusual ways ---

// Scratch memory per thread.
void native_scratch_a_thread(const Call* c) {
  thread_local std::vector<float> scratch;
  by_scratch(c, scratch);
}

}  // extern "C"
