// x[M,K] . w[N,K]^T for four to eight rows of bf16 x by AMX: one instruction multiplies a tile of 16 rows of weights and
// 32 elements of K by all rows of x.
//
// The weights are the first operand of the product, with the stride of their rows, so no weight is repacked: a tile is
// 16 lines of memory, one of each row. x is the second operand; each thread lays it out once: for each 32 elements of
// K, 16 pairs of neighbours, each of all rows of x. The result is 16 columns of y for each row of x.
// A tile of weights (1 KB) takes 16 cycles, or 52 if it waits for the sum before it (Intel's optimisation manual); the
// dots of dot.h take 32 M cycles on Intel, which starts one in two cycles. Memory gives a core of Granite Rapids a tile
// in 64 ns (16 GB/s), so M = 8 was limited by the dots.
//
// A thread's columns are taken 16 at a time, the last ones 8 at a time; fewer than 8 are computed together with some
// before them, whose results are dropped. Each output is one chain of sums in the order of K, whatever tile it falls
// into, so the bits do not depend on how columns are divided among threads. They differ from dot.h's. Like the dot, the
// tiles round to nearest even and flush subnormals.
// Each line that is read asks for one line of the columns that come next, of four sequences in turn.
//
// Tiles are state of a thread: the configuration that was there (oneDNN's) is put back. Linux gives a process the tiles
// on request (since 5.16); where it refuses, dot.h's kernels run.
//
// Measured on 2 cores of Granite Rapids, N = 2048, K = 2048 (K = 8192), M = 3, 4, 6, 8, times the speed of dot.h and
// packed.h, in turn, memory at 26 GB/s:
//   plain   0.97 (0.94), 1.02 (1.02), - (1.21), 1.19 (1.42)    packed   1.02 (1.09), 1.13 (1.13), - (1.83), 1.72 (1.98)
// while lines were prefetched in the order of addresses. Four sequences in turn against that, on 2 cores of Emerald
// Rapids, in turn, M = 4, 8, and the share of the read probe (26 to 30 GB/s):
//   plain   N = 16384, K = 2048 1.14, 1.15, 89 %, 82 %    N = 2048, K = 8192 1.18, 1.12, 80 %, 78 %
//           N = 4096, K = 14336 1.16, 1.13, 77 %, 74 %    eight sequences 0.97 of it, each row one 0.96
//   packed  N = 16384, K = 2048 1.03, 1.05, 80 %, 79 %    N = 2048, K = 8192 1.12, 1.06, 74 %, 67 %
//           N = 4096, K = 14336 1.11, 1.06, 68 %, 65 %
#pragma once
#include "turn.h"

#if defined(AUTOSEL_BF16_DOT) && defined(__x86_64__) && defined(__linux__)
#define AUTOSEL_AMX 1
#include <cpuid.h>
#endif

namespace autosel {

constexpr int64_t kFewestForAmx = 4;  // rows of x
constexpr int64_t kAmxColumns = 16;   // of y at a time
constexpr int64_t kAmxFew = 8;        // the same at the end of a thread's share
constexpr int64_t kAmxWidth = 32;     // elements along K in a tile
// Sequences of lines that are prefetched in turn. Intel's core waits for 16 lines at most, its prefetcher for more, once
// it has seen some lines of a page one after another. While one page is begun, lines of the others arrive.
constexpr int kInTurn = 4;

#if defined(AUTOSEL_AMX)
#define AUTOSEL_WITH_AMX __attribute__((target("amx-tile,amx-bf16")))

static inline bool amx_permitted() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;  // EDX of leaf 7
  constexpr long kRequest = 0x1023, kTileData = 18;       // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBf16) && (d & kTile) &&
         syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// Whether the tiles multiply T here.
template <class T> static inline bool has_amx() {
  static const bool permitted = amx_permitted();
  return std::is_same_v<T, bf16> && permitted;
}

// GCC does not see that the tile instructions read and write memory: before they read, and after they wrote.
static inline void amx_fence() { asm volatile("" ::: "memory"); }

// The layout of ldtilecfg.
struct AmxShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
  void set(int tile, int64_t height, int64_t width) { rows[tile] = uint8_t(height), bytes[tile] = uint16_t(width); }
};
static_assert(sizeof(AmxShapes) == 64);

// Shapes of this thread's tiles while it lives, if `used`.
class AmxTiles {
 public:
  AUTOSEL_WITH_AMX AmxTiles(bool used, const AmxShapes& shapes) : used_(used) {
    if (!used_) return;
    _tile_storeconfig(&before_);
    amx_fence();
    _tile_loadconfig(&shapes);
  }
  AUTOSEL_WITH_AMX ~AmxTiles() {
    if (!used_) return;
    amx_fence();
    if (before_.palette) _tile_loadconfig(&before_);
    else _tile_release();
  }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

 private:
  bool used_;
  AmxShapes before_;
};

// The tiles for m rows of x (0: not used) and `columns` columns of y:
//   0 sums, 1 weights, of kAmxColumns columns      2 sums, 3 weights, of at most kAmxFew      4 x
class Amx : AmxTiles {
 public:
  Amx(int64_t m, int64_t columns) : AmxTiles(m > 0 && columns > 0, shapes(m, columns)) {}

 private:
  static AmxShapes shapes(int64_t m, int64_t columns) {
    AmxShapes s;
    const int64_t few = columns < kAmxFew ? columns : kAmxFew;
    s.set(0, kAmxColumns, 4 * m), s.set(1, kAmxColumns, 64), s.set(2, few, 4 * m), s.set(3, few, 64);
    s.set(4, 16, 4 * m);
    return s;
  }
};

template <bool Few> AUTOSEL_WITH_AMX static inline void amx_clear() {
  if constexpr (Few) _tile_zero(2);
  else _tile_zero(0);
}

// Sums += kAmxWidth elements of the rows at w, `stride` bytes apart, times those of x.
template <bool Few>
AUTOSEL_WITH_AMX static inline void amx_multiply(const void* w, int64_t stride, const bf16* x, int64_t m) {
  _tile_loadd(4, x, 4 * m);
  if constexpr (Few) {
    _tile_loadd(3, w, stride);
    _tile_dpbf16ps(2, 3, 4);
  } else {
    _tile_loadd(1, w, stride);
    _tile_dpbf16ps(0, 1, 4);
  }
}

// out[i * taken + c] = sums of column skipped + c.
template <bool Few> AUTOSEL_WITH_AMX static inline void amx_sums(int64_t m, int64_t skipped, int64_t taken, float* out) {
  alignas(64) float c[kAmxColumns * 16];
  if constexpr (Few) _tile_stored(2, c, 4 * m);
  else _tile_stored(0, c, 4 * m);
  amx_fence();
  for (int64_t i = 0; i < m; ++i)
    for (int64_t n = 0; n < taken; ++n) out[i * taken + n] = c[(skipped + n) * m + i];
}

// Whether this core is Intel's. A hypervisor may hide its tiles.
static inline bool of_intel() {
  static const bool found = [] {
    unsigned a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx && d == signature_INTEL_edx;
  }();
  return found;
}

#else
template <class T> static inline bool has_amx() { return false; }
static inline bool of_intel() { return false; }
struct Amx { Amx(int64_t, int64_t) {} };
#endif

// Whether this core wants sequences in turn.
static inline bool asks_in_turn() { return of_intel(); }

// Whether m rows of T are multiplied here.
template <class T> static inline bool by_amx(int64_t m) { return m >= kFewestForAmx && has_amx<T>(); }

// Columns of y of one call: `taken` of them from n on, after `skipped` ones that are computed again.
struct AmxColumns {
  bool few;
  int64_t skipped = 0, taken;
  AmxColumns(int64_t n, int64_t to) : few(n + kAmxColumns > to), taken(few ? kAmxFew : kAmxColumns) {
    if (n + taken <= to) return;
    taken = to - n;
    skipped = to < kAmxFew ? n : n - (to - kAmxFew);
  }
};

// Elements of x's layout for m rows: [step][pair][row] of two neighbours along K, zeros behind K.
static inline int64_t amx_lanes(int64_t k) { return (k + kAmxWidth - 1) / kAmxWidth * (kAmxWidth / 2); }
static inline int64_t amx_panel_elements(int64_t m, int64_t k) {
  return 2 * (m * amx_lanes(k) + kLanes);  // kLanes: the surplus of the last store
}

static inline void pack_for_amx(const Matrix<const bf16>& x, bf16* out) {
  float* lanes = reinterpret_cast<float*>(out);
  const int64_t m = x.rows, whole = m * lanes_of<bf16>(x.columns);
  turn_rows<bf16, kPerLane<bf16>>(x.at, x.stride, m, x.columns, lanes, m, m);
  memset(lanes + whole, 0, size_t(m * amx_lanes(x.columns) - whole) * sizeof *lanes);
}

#if defined(AUTOSEL_AMX)
// Columns n .. n + taken of y from plain rows of weights, `stride` elements apart; one line of what follows `next` is
// prefetched for each line that is read.
template <bool Few>
AUTOSEL_WITH_AMX static void amx_plain(const bf16* w, int64_t stride, int64_t rows, const bf16* x, int64_t m, int64_t k,
                                       const void* next, const AmxColumns& columns, float* out) {
  constexpr int64_t kTall = Few ? kAmxFew : kAmxColumns;
  const char* ahead = static_cast<const char*>(next);
  const int64_t sequence = kAmxColumns / kInTurn * stride * int64_t(sizeof(bf16));
  amx_clear<Few>();
  int64_t j = 0;
  for (; j + kAmxWidth <= k; j += kAmxWidth, x += kAmxWidth * m, ahead += 64 * kTall / kInTurn) {
#pragma GCC unroll 16
    for (int64_t line = 0; line < kTall; ++line)
      __builtin_prefetch(ahead + line % kInTurn * sequence + line / kInTurn * 64, 0, 2);
    amx_multiply<Few>(w + j, stride * int64_t(sizeof(bf16)), x, m);
  }
  if (j < k) {  // nothing behind a row is read
    alignas(64) bf16 tail[kTall][kAmxWidth] = {};
    for (int64_t r = 0; r < kTall && r < rows; ++r) memcpy(tail[r], w + r * stride + j, size_t(k - j) * sizeof(bf16));
    amx_fence();
    amx_multiply<Few>(tail, 64, x, m);
  }
  amx_sums<Few>(m, columns.skipped, columns.taken, out);
}
#endif

}  // namespace autosel
