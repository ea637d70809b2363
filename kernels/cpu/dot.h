// x[M,K] . w[N,K]^T for a few rows of x: weights stream from memory once, each line multiplied by every row of x.
//
// Both operands run along K, so no weight is repacked: an accumulator holds kLanes partial sums, added up at the end of
// a row.
// R rows of weights are read together, so that one load of x serves R of them: x beyond L1 (K = 14336 in bf16 is 28 KB)
// comes from L2 at the cost of a weight line. R * M accumulators stay in registers (kAccumulators).
// The hardware prefetcher does not follow R streams one row apart (measured below), so each step also prefetches one
// line of the *next* R rows into L2, in the order of addresses: memory sees one linear stream, whatever the order of
// use.
// On 16 registers, seven and eight rows of x are split into two groups. For each block of R rows of weights, which then
// stays in L1 or L2, the kernel runs once for each group, and prefetches in the first run only. So R stays 3; with R =
// 1 the fp32 x, beyond L1 from K = 2048 and M = 4 on, would come from L2 for every row of weights, and L2 gives half of
// the rate that the multiplies need. Figures at the end. On 32 registers (AVX-512) all 8 rows are one group: one call
// per block, as in the figures in between.
// A prefetch is dropped if the memory queue is full. In long rows the hardware's own streams compensate; rows shorter
// than a page end too early for that. With one row of x, short rows are read one by one, as a single stream, and
// prefetching every other line is enough; with two matrices (gate and up), a run of columns of one is followed by the
// same run of the other.
//
// Measured on 2 cores of Zen 4 (AVX-512-BF16, bf16), against a plain streaming read in the same run, medians:
//   M=1, K=4096    R=1: 0.90-0.99, reading 2 KB ahead: 1.0    R=2: 0.65    R=4 or 8, next block ahead: 1.0-1.1
//   M=1, K=14336   R=1: 0.78-0.86, reading 2 KB ahead: 0.9    R=2: 0.84    R=4: 1.06    R=8: 1.06-1.1
//   M=4, K=4096    R=4 without asking ahead: 0.55    R=4: 0.65-0.96    R=6: 0.7-0.96
//   M=8, K=4096    R=1: 0.40    R=2: 0.45-0.64    R=3: 0.8-0.95
// Short rows one by one, every other line 16 KB ahead, runs of 256 KB, against R=8 with each line of the next block
// prefetched; medians of about 500 pairs of single projections, M=1, at 34 GB/s:
//   K=1152  lm_head 1.09-1.10, gate and up 1.07-1.09      K=1024  1.08
//   4 KB ahead 1.06, 1.04 and 1.06; 1 KB 1.02, 1.00, 1.04; runs of 64 KB: gate and up 1.05; no runs: gate and up 0.94.
//   Whole steps of gemma3-1b at context 2048 in turn: 1.11 (0.87 -> 0.95 of the read rate; at 51 GB/s 0.81 -> 0.93).
// Rejected: prefetches into L1 instead of L2 (0.55: they evict x); blocks of K with partial sums kept in L1 (0.85-0.95:
// no better than R rows, and more code); two blocks ahead (no gain). At K=1152 with R=8: sums of eight rows by one
// transposition 1.00; sixteen rows 1.00; each line prefetched a second time 256 bytes before use 1.02-1.07 (whole steps
// 1.04); no prefetch 0.83; two or four streams of neighbouring rows 0.92-0.99. Long rows one by one, 2 to 18 KB ahead:
// K=2048 0.92-0.95, K=8192 0.90. Long rows with every other line prefetched: single projections 1.03-1.06, but whole
// steps of llama-1b 0.975.
// On 2 cores of Zen 3 (AVX2, L1 32 KB, L2 512 KB), N = K = 2048 and 4096, two groups with R=3 against one with R=1:
//   M=7  bf16 1.45-1.55, fp16 1.6, fp32 1.15    M=8  bf16 1.45-1.55, fp16 1.65, fp32 1.2
// On 2 cores of Zen 5 (AVX-512-BF16, L1 48 KB), R=1 against the most that registers hold (8, 4 or 3), if x and the
// weights fit L1. Median pairs, at 46 GB/s:
//   x of 8 to 20 KB: bf16 M=2 1.02-1.08, M=3 1.08, M=4 1.00-1.09, M=5 1.08-1.10, M=8 (K=1024) 1.19; gate and up 1.02-1.08;
//   fp16 0.94-1.03, M=8 1.25; fp32 M=2 0.99, M=4 1.06, M=8 1.25    24 KB: 0.90-1.05    32 KB and more: 0.37-0.96
// AVX2 of the same core: 0.82-1.0 (fp32 M=2 1.02-1.08); the multiplies weigh more there, and x is fp32.
// Rejected on Zen 3: two groups with R=4 against one with R=2 (M=5 and 6: bf16 0.95-1.05, fp16 0.95-1.05, fp32 0.9);
// groups of at most three with R=4 (M=4 0.83, M=8 0.9; M=7 the same); no prefetch in the second run (1.00-1.03, for
// twice the kernels). The multiplies alone would allow 1.6 times the speed at M=8: x still comes from L2.
// from L2.
// Emerald Rapids, at 26 to 30 GB/s: the next block's lines asked for as four sequences in turn (kInTurn) against one line
// after another, in turn, bf16, M=1 (R=8), 2, 3 (R=4): N = 16384, K = 2048 1.10, 1.09, 1.03; N = 2048, K = 8192 1.15,
// 1.18, 1.13; N = 4096, K = 14336 1.09, 1.15, 1.12: 82, 74-80, 70-75 % of the read probe. Not used without AMX: not
// measured on Zen.
#pragma once
#include "amx.h"

namespace autosel {

constexpr int kAccumulators = kLanes == 16 ? 24 : 12;  // of 32 or 16 registers; the rest holds operands
constexpr int kMaxRows = 8;                            // of x in one pass over the weights
constexpr int kMostTogether = kLanes == 16 ? 8 : 6;    // of x in one kernel
constexpr int kMostBlock = 8;                          // most rows of weights read together
constexpr int kMostColumns = 16;                       // of y that one call computes
constexpr int64_t kShortRow = 4096;                    // bytes: shorter rows of weights are a stream only together
constexpr int64_t kAheadOfShort = 16 << 10;            // bytes from the line in use to the prefetched one
constexpr int64_t kRunBytes = 256 << 10;               // of one matrix before the next is read
constexpr int64_t kMostRun = 128;                      // columns of that

static inline void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

template <class T> static inline bool is_short(int64_t k) { return k * int64_t(sizeof(T)) < kShortRow; }

// --- one step: kWidth elements of a weight row against as many of each row of x --------------------------------------

template <class T> struct Step {
  static constexpr int kWidth = kLanes;
  vreg w;
  static Step at(const T* p) { return {load(p)}; }
  vreg add(vreg acc, const float* x) const { return fma(w, load(x), acc); }
  void put(float* x) const { store(x, w); }
};

template <> struct Step<bf16> {
  static constexpr int kWidth = 2 * kLanes;
#if defined(AUTOSEL_BF16_DOT)
  __m512i w;
  static Step at(const bf16* p) { return {_mm512_loadu_si512(p)}; }
  vreg add(vreg acc, const bf16* x) const { return times(acc, _mm512_loadu_si512(x)); }
  vreg times(vreg acc, __m512i other) const {
    return reinterpret_cast<vreg>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), (__m512bh)w, (__m512bh)other));
  }
  void put(bf16* x) const { _mm512_storeu_si512(x, w); }
#else
  // One load and two cheap operations widen 2 * kLanes: x has evens first, then odds, to match.
  vreg even, odd;
  static Step at(const bf16* p) {
    vu both;
    memcpy(&both, p, sizeof both);
    return {reinterpret_cast<vreg>(both << 16), reinterpret_cast<vreg>(both & 0xffff0000u)};
  }
  vreg add(vreg acc, const float* x) const { return fma(odd, load(x + kLanes), fma(even, load(x), acc)); }
  void put(float* x) const { store(x, even), store(x + kLanes, odd); }
#endif
};

template <class T> static inline Step<T> tail_step(const T* p, int64_t n) {
  T buffer[Step<T>::kWidth] = {};
  memcpy(buffer, p, size_t(n) * sizeof(T));
  return Step<T>::at(buffer);
}

// --- x, laid out for the steps: groups of rows, each [ceil(K / kWidth)][rows][kWidth], zeros behind K -----------------

// m <= kMaxRows rows of x in as few groups of at most `most` rows as possible, of sizes that differ by at most one row:
// the larger ones first.
struct Groups {
  int64_t count, rows, larger;
  Groups() = default;
  explicit Groups(int64_t m, int64_t most = kMostTogether)
      : count((m + most - 1) / most),
        rows((m + count - 1) / count),
        larger(m - count * (rows - 1)) {}
  int64_t of(int64_t group) const { return group < larger ? rows : rows - 1; }
};

template <class T> static inline int64_t dot_panel_elements(int64_t m, int64_t k) {
  return (k + Step<T>::kWidth - 1) / Step<T>::kWidth * Step<T>::kWidth * m;
}

// The same, or of amx.h's layout.
template <class T> static inline int64_t panel_elements(int64_t m, int64_t k) {
  return by_amx<T>(m) ? amx_panel_elements(m, k) : dot_panel_elements<T>(m, k);
}

// Rows of T, or rows already widened: nothing is rounded here.
template <class T, class S> static void pack_group(const Matrix<const S>& x, Wide<T>* out) {
  constexpr int W = Step<T>::kWidth;
  for (int64_t i = 0; i < x.rows; ++i) {
    const S* row = x.row(i);
    Wide<T>* to = out + i * W;
    for (int64_t j = 0; j < x.columns; j += W, to += x.rows * W) {
      int64_t n = x.columns - j < W ? x.columns - j : W;
      if constexpr (std::is_same_v<S, T>) {
        (n == W ? Step<T>::at(row + j) : tail_step(row + j, n)).put(to);
      } else {
        for (int64_t e = 0; e < W; ++e) to[W == kLanes ? e : e % 2 * kLanes + e / 2] = e < n ? row[j + e] : 0.0f;
      }
    }
  }
}

template <class T, class S> static void pack_for_dot(const Matrix<const S>& x, Wide<T>* out) {
  if constexpr (kPaired<T>)
    if (by_amx<T>(x.rows)) return pack_for_amx(x, out);
  Groups groups(x.rows);
  for (int64_t g = 0, i = 0; g < groups.count; i += groups.of(g++))
    pack_group<T>(x(i, groups.of(g)), out + dot_panel_elements<T>(i, x.columns));
}

// --- R rows of weights against M rows of x ---------------------------------------------------------------------------

// out[m * R + r] = w[r] . x[m]. `next` points to the weights of the following call, or to any address if there is none.
template <class T>
using DotBlock = void (*)(const T* w, int64_t stride, const Wide<T>* x, int64_t k, const T* next, float* out);

// Enough chains of sums to hide the latency of one row of x. Several rows have one chain each, whatever R: the bits do
// not depend on R, so columns can be assigned to blocks in any order. It costs nothing (1.00).
template <int M> constexpr int chains(int r) { return M > 1 || r >= 7 ? 1 : (8 + r - 1) / r; }

template <class T, int M, int R, int U = chains<M>(R)>
static void dot_block(const T* w, int64_t stride, const Wide<T>* x, int64_t k, const T* next, float* out) {
  constexpr int W = Step<T>::kWidth;
  constexpr int kStride = W * int(sizeof(T));  // 64 bytes, or 32: then every other step has a new line to ask for
  vreg acc[R][M][U] = {};
  const char* ahead = reinterpret_cast<const char*>(next);
  // Bytes between the lines that neighbouring loads ask for, and between every fourth of them.
  const bool turn = R % kInTurn == 0 && asks_in_turn();
  const int64_t sequence = turn ? R / kInTurn * stride * int64_t(sizeof(T)) : kStride;
  const int64_t fourth = turn ? kStride : kInTurn * kStride, step = U * R / kInTurn * fourth;
  int64_t j = 0;
  for (; j + U * W <= k; j += U * W, x += U * M * W, ahead += R % kInTurn ? U * R * kStride : step)
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        Step<T> s = Step<T>::at(w + r * stride + j + u * W);
        if (kStride == 64 || U * R == 1 || (u * R + r) % 2 == 0)
          prefetch_l2(ahead + (u * R + r) % kInTurn * sequence + (u * R + r) / kInTurn * fourth);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) acc[r][m][u] = s.add(acc[r][m][u], x + (u * M + m) * W);
      }
    }
  for (; j < k; j += W, x += M * W)
    for (int r = 0; r < R; ++r) {
      const T* p = w + r * stride + j;
      Step<T> s = j + W <= k ? Step<T>::at(p) : tail_step(p, k - j);
      for (int m = 0; m < M; ++m) acc[r][m][0] = s.add(acc[r][m][0], x + m * W);
    }
#pragma GCC unroll 24
  for (int i = 0; i < R * M; ++i) {
    vreg total = acc[i / M][i % M][0];
    for (int u = 1; u < U; ++u) total = total + acc[i / M][i % M][u];
    out[i % M * R + i / M] = sum(total);
  }
}

// R short rows, one after another, for one row of x.
template <class T, int R>
static void dot_rows(const T* w, int64_t stride, const Wide<T>* x, int64_t k, const T*, float* out) {
  constexpr int W = Step<T>::kWidth, U = 4;
  for (int r = 0; r < R; ++r, w += stride) {
    vreg acc[U] = {};
    int64_t j = 0;
    for (; j + U * W <= k; j += U * W)
#pragma GCC unroll 4
      for (int u = 0; u < U; ++u) {
        const T* p = w + j + u * W;
        if (u * W * int(sizeof(T)) % 128 == 0) prefetch_l2(reinterpret_cast<const char*>(p) + kAheadOfShort);
        acc[u] = Step<T>::at(p).add(acc[u], x + j + u * W);
      }
    for (; j < k; j += W) acc[0] = (j + W <= k ? Step<T>::at(w + j) : tail_step(w + j, k - j)).add(acc[0], x + j);
    out[r] = sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
  }
}

// The kernels: R of 1, 8, 4, and if not even 4 fit, 3 or 2; if groups differ by a row, the smaller one has the R of the
// larger. Null for any other R.
template <class T, int M> static DotBlock<T> dot_block_of(int64_t rows, bool one_by_one) {
  constexpr int A = kAccumulators, L = kMostTogether < kMaxRows && M < kMostTogether ? M + 1 : M;
  if constexpr (M == 1) if (rows == 8 && one_by_one) return dot_rows<T, 8>;
  if (rows == 1) return dot_block<T, M, 1>;
  if constexpr (M * 8 <= A) if (rows == 8) return dot_block<T, M, 8>;
  if constexpr (M * 4 <= A) if (rows == 4) return dot_block<T, M, 4>;
  if constexpr (M * 3 <= A && L * 4 > A) if (rows == 3) return dot_block<T, M, 3>;
  if constexpr (M * 2 <= A && M * 3 > A) if (rows == 2) return dot_block<T, M, 2>;
  return nullptr;
}

template <class T> static DotBlock<T> dot_block_for(int64_t m, int64_t rows, bool one_by_one) {
  switch (m) {
    case 1: return dot_block_of<T, 1>(rows, one_by_one);
    case 2: return dot_block_of<T, 2>(rows, one_by_one);
    case 3: return dot_block_of<T, 3>(rows, one_by_one);
    case 4: return dot_block_of<T, 4>(rows, one_by_one);
    case 5: return dot_block_of<T, 5>(rows, one_by_one);
    case 6: return dot_block_of<T, 6>(rows, one_by_one);
  }
  if constexpr (kMostTogether == 8) switch (m) {
    case 7: return dot_block_of<T, 7>(rows, one_by_one);
    case 8: return dot_block_of<T, 8>(rows, one_by_one);
  }
  return nullptr;
}

// The kernels that multiply the groups of m <= kMaxRows rows of x by rows of weights of k elements: `rows` at a time,
// or the next lower number that has kernels (a knob derived for another M must not be an error); and those for the
// rest.
template <class T> struct DotBlocks {
  Groups groups;
  int64_t rows;
  DotBlock<T> several[2], one[2];  // for the larger groups and the smaller ones

  DotBlocks() = default;
  DotBlocks(int64_t m, int64_t k, int64_t asked) : groups(m), rows(asked < kMostBlock ? asked : kMostBlock) {
    while (!find(k)) --rows;
  }
  const DotBlock<T>& of(int64_t group, bool whole) const { return (whole ? several : one)[group >= groups.larger]; }

 private:
  bool find(int64_t k) {
    for (int smaller = 0; smaller < (groups.larger < groups.count ? 2 : 1); ++smaller) {
      several[smaller] = dot_block_for<T>(groups.rows - smaller, rows, is_short<T>(k));
      one[smaller] = dot_block_for<T>(groups.rows - smaller, 1, is_short<T>(k));
      if (!several[smaller]) return false;
    }
    return true;
  }
};

// --- all of it, shared by threads ------------------------------------------------------------------------------------

// Columns of one matrix that are computed consecutively, in whole blocks.
template <class T> static inline int64_t run_columns(int64_t k, int64_t rows) {
  if (!is_short<T>(k)) return rows;
  int64_t fit = kRunBytes / (k * int64_t(sizeof(T)) + 1);
  return (fit < rows ? rows : fit < kMostRun ? fit : kMostRun) / rows * rows;
}

// Plain rows of weights and the m <= kMaxRows rows of x in `panel`: the columns that stream_runs computes.
template <class T> struct PlainColumns {
  const Matrix<const T>* w;
  const Wide<T>* panel;
  DotBlocks<T> blocks;
  int64_t amx;  // rows of x, or 0: blocks

  PlainColumns() = default;
  PlainColumns(const Matrix<const T>* w, const Wide<T>* panel, int64_t m, int64_t together)
      : w(w), panel(panel), blocks(m, w->columns, together), amx(by_amx<T>(m) ? m : 0) {}
  const void* at(int64_t n) const { return w->row(n); }
  Amx hold() const { return {amx, w->rows}; }
  // Consecutive columns of a matrix, in whole blocks, before the next matrix is read.
  int64_t run() const { return amx ? kAmxColumns : run_columns<T>(w->columns, blocks.rows); }
  // out[i * taken + c] = x[i] . w[n + c] for c < taken, which it returns; n < to. `then` is read once `to` is reached.
  int64_t dots(int64_t n, int64_t to, const void* then, float* out) const {
#if defined(AUTOSEL_AMX)
    if constexpr (kPaired<T>) if (amx) return amx_dots(n, to, then, out);
#endif
    bool whole = n + blocks.rows <= to;
    int64_t taken = whole ? blocks.rows : 1;
    const T *at = w->row(n), *next = n + taken < to ? at + taken * w->stride : static_cast<const T*>(then);
    // Only the first group prefetches; the others find the block, and the lines that they would prefetch, in L2.
    for (int64_t g = 0, i = 0; g < blocks.groups.count; i += blocks.groups.of(g++), next = at)
      blocks.of(g, whole)(at, w->stride, panel + dot_panel_elements<T>(i, w->columns), w->columns, next,
                          out + i * taken);
    return taken;
  }

 private:
#if defined(AUTOSEL_AMX)
  int64_t amx_dots(int64_t n, int64_t to, const void* then, float* out) const {
    AmxColumns columns(n, to);
    const T *at = w->row(n - columns.skipped), *next = n + columns.taken < to ? w->row(n + columns.taken) : nullptr;
    (columns.few ? amx_plain<true> : amx_plain<false>)(at, w->stride, w->rows, panel, amx, w->columns,
                                                       next ? next : then, columns, out);
    return columns.taken;
  }
#endif
};

// Columns [begin, end) of y, for m <= kMaxRows rows of x; `after` points to the weights that this thread multiplies
// next.
template <int Parts, class Columns, class Done>
static void stream_runs(const Columns* w, int64_t m, int64_t begin, int64_t end, const void* after, const Done& done) {
  int64_t run = w->run();
  [[maybe_unused]] const auto& held = w->hold();
  float out[kMaxRows * kMostColumns], kept[Parts][kMaxRows][kMostRun + kLanes];
  for (int64_t from = begin, to; from < end; from = to) {
    to = from + run < end ? from + run : end;
    for (int p = 0; p < Parts; ++p) {
      const void* then = p + 1 < Parts ? w[p + 1].at(from) : to < end ? w[0].at(to) : after;
      for (int64_t n = from, taken; n < to; n += taken) {
        taken = w[p].dots(n, to, then, out);
        for (int64_t i = 0; i < m; ++i) memcpy(kept[p][i] + (n - from), out + i * taken, size_t(taken) * sizeof(float));
      }
    }
    for (int64_t n = from; n < to; n += kLanes)
      for (int64_t i = 0; i < m; ++i) {
        const float* v[Parts];
        for (int p = 0; p < Parts; ++p) v[p] = kept[p][i] + (n - from);
        done(i, n, to - n < kLanes ? to - n : int64_t(kLanes), v);
      }
  }
}

// The same for plain weights; `panel` holds the rows of x.
template <class T, int Parts, class Done>
static void stream_columns(const Wide<T>* panel, int64_t m, const Matrix<const T>* w, int64_t begin, int64_t end,
                           int64_t rows, const void* after, const Done& done) {
  PlainColumns<T> columns[Parts];
  for (int p = 0; p < Parts; ++p) columns[p] = PlainColumns<T>(w + p, panel, m, rows);
  stream_runs<Parts>(columns, m, begin, end, after, done);
}

// One thread's columns [begin, end) of y for at most kMaxRows rows of x.
template <class T, int Parts, class S, class Done>
static void stream_share(const Matrix<const S>& x, const Matrix<const T>* w, int64_t begin, int64_t end, int64_t rows,
                         const Done& done) {
  static thread_local Scratch scratch;
  Wide<T>* panel = scratch.get<Wide<T>>(panel_elements<T>(x.rows, x.columns));
  pack_for_dot<T>(x, panel);
  stream_columns<T, Parts>(panel, x.rows, w, begin, end, rows, w->row(end), done);
}

// x(m0, m) gives rows m0 .. m0 + m of x (each thread calls it, kMaxRows rows at a time); done(rank, i, n, count, v)
// takes, for row i of y and columns n .. n + count, v[p][0 .. count) = x[i] . w[p][n ..] for each of the Parts
// matrices. v[p] may be read up to kLanes.
template <class T, int Parts, class X, class Done>
static void stream(const X& x, int64_t m, const Matrix<const T>* w, int64_t threads, int64_t rows, const Done& done) {
  AUTOSEL_CHECK(rows >= 1, "rows is " << rows << ", expected at least 1");
  parallel(threads, w->rows, 8, [&](int64_t begin, int64_t end, int rank) {
    for (int64_t m0 = 0; m0 < m; m0 += kMaxRows) {
      int64_t some = m - m0 < kMaxRows ? m - m0 : kMaxRows;
      auto offset = [&](int64_t i, int64_t n, int64_t count, const float* const* v) {
        done(rank, m0 + i, n, count, v);
      };
      stream_share<T, Parts>(x(m0, some), w, begin, end, rows, offset);
    }
  });
}

}  // namespace autosel
