// x[M,K] . w[N,K]^T for many rows of x: compute-bound, so weights are transposed: lanes run along N, and a register
// tile of kTileRows x 2 kLanes takes 2 loads of weights and kTileRows broadcasts of x for twice kTileRows multiplies.
//
// A thread owns columns of y, 2 kLanes at a time ("strip"). For each strip, for each block of K: transpose the weights'
// block into L1 (k_block lanes x 2 kLanes x 4 bytes <= half of it), multiply every tile of x by it, add into c. A lane
// is 32 bits: an fp32 (fp16 and, without the dot instruction, bf16 are widened during the transpose) or two neighbours
// along K in bf16.
//   Transposing costs 4.5 cycles per cache line of weights, multiplying M (Zen 4: one 512-bit vdpbf16ps or FMA per
//   cycle): from about M = 8 it is cheaper than dot.h, which reads x from L2 for every few rows of weights.
//   Reading 2 kLanes rows in blocks of K is a bad order for memory, so tiles prefetch the next strip (or part of one) into
//   L2, line by line in the order of addresses: see `Ahead`. Without it, the speed is 0.6 at M = 12, 0.87 at 64.
//
// The register tile runs at one multiply per cycle (24.1 cycles for 12 x 2). 2048 x 4096, one core of Zen 4, times
// torch's speed, bf16: 1.3-1.6 at M=12, 1.3 at 16, 1.2 at 32, 1.05 at 64, 0.91-1.0 from 128 on (up to 218 of 236
// GFLOP/s); 2048 x 2048: fp16 3.5-3.9, fp32 1.4 at M=16 and 1.2 at 64.
// On 2 cores of Zen 3 (AVX2, FMA 103 GFLOP/s per core), bf16: the tile runs at 101-103 GFLOP/s from four rows on;
// transposing costs 1.3 ns per line from L1, 2.0 if rows are 4 KB apart. Products by two threads, N = K = 2048 and
// 4096, times the speed before all of the following changes: 1.9-2.0 at M=9, 1.7 at 12, 1.95 at 13, 1.7 at 64 (160-168
// of 206 GFLOP/s).
// Times dot.h's speed: 0.9-0.95 at M=5, 0.9-1.0 at 6, 0.8-0.9 at 7, 0.9-0.95 at 8, 1.2-1.35 at 9, 1.1-1.2 at 12, 1.4 at
// 13.
// Earlier forms, each compared with the present one: a broadcast that was an addition (simd.h: splat; the tile ran at
// 53 GFLOP/s); bf16 widened before the transpose (4.8 ns per line); tests for missing rows and elements inside that
// loop (one thread, weights in L3, ns per line: M=1 9.5 -> 5.3, M=12 15 -> 11); a line prefetched with every lane, four
// times as many as there are (M=1 5.2 -> 4.8); equal tiles, 9 rows as 5 + 5 (now 5 + 4: a tenth less).
// Rejected on Zen 3: all tiles of a block prefetching in turn (0.98-1.0); all but the first prefetching the next tile's
// x, into L2 or L1 (0.97-1.0).
// Transposing in whole steps and tiles that differ by a row are not measured on AVX-512; splat did not change there.
// Rejected: sixteen rows transposed at once; the rows copied together before transposing (1.1x slower at M=16); chunks
// of x of 64 rows (0.88 of 480 at once: weights are transposed for every chunk).
#pragma once
#include "dot.h"

namespace autosel {

constexpr int kStrip = 2 * kLanes;                 // columns of y in a register tile
constexpr int kTileRows = kAccumulators / 2;       // most rows of x in a register tile

// --- x: tiles of rows, each [lanes][rows] ----------------------------------------------------------------------------

// m rows of x in as few tiles as registers allow, of sizes that differ by at most one row (16 rows are 8 + 8, not 12 +
// 4; 13 with at most 6 per tile are 5 + 4 + 4): the larger ones first.
struct Tiles {
  int64_t count, rows, larger;
  explicit Tiles(int64_t m)
      : count((m + kTileRows - 1) / kTileRows), rows((m + count - 1) / count), larger(m - count * (rows - 1)) {}
  int64_t of(int64_t tile) const { return tile < larger ? rows : rows - 1; }
};

template <class T> static inline int64_t tile_panel_floats(int64_t m, int64_t k) {
  return m * lanes_of<T>(k) + kLanes;  // kLanes: the surplus of the last store
}

// Rows of T, or of Wide<T>.
template <class T, class S> static void pack_for_tiles(const Matrix<const S>& x, float* out) {
  Tiles tiles(x.rows);
  int64_t lanes = lanes_of<T>(x.columns);
  for (int64_t t = 0, i = 0; t < tiles.count; i += tiles.of(t++))
    turn_rows<S, kPerLane<T>>(x.row(i), x.stride, x.rows - i, x.columns, out + i * lanes, tiles.of(t), tiles.of(t));
}

// --- the register tile -----------------------------------------------------------------------------------------------

template <class T> static inline vreg multiply(vreg acc, vreg w, float x) {
#if defined(AUTOSEL_BF16_DOT)
  if constexpr (kPaired<T>)
    return reinterpret_cast<vreg>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), reinterpret_cast<__m512bh>(w),
                                                   reinterpret_cast<__m512bh>(_mm512_set1_ps(x))));
#endif
  return fma(w, splat(x), acc);
}

// For this many lanes, a tile prefetches one line of each half of the next part, so that the first tile of a block
// prefetches as much as the block read.
template <class T> constexpr int kLanesPerLine = 64 / (kLanes * kPerLane<T> * int(sizeof(T)));

// c[Rows][kStrip] (+)= x[lanes][Rows]^T w[lanes][kStrip], prefetching the lines from a and b on into L2. There are
// issue slots to spare for that: a tile with nothing to prefetch points at w itself.
template <class T, int Rows>
static void tile(const float* w, const float* x, int64_t lanes, float* c, bool first, const char* a, const char* b) {
  vreg acc[Rows][2];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < 2; ++v) acc[r][v] = first ? vreg{} : load(c + r * kStrip + v * kLanes);
  auto lane = [&]() __attribute__((always_inline)) {
    vreg w0 = load(w), w1 = load(w + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      acc[r][0] = multiply<T>(acc[r][0], w0, x[r]);
      acc[r][1] = multiply<T>(acc[r][1], w1, x[r]);
    }
    w += kStrip, x += Rows;
  };
  int64_t l = 0;
  for (; l + kLanesPerLine<T> <= lanes; l += kLanesPerLine<T>, a += 64, b += 64) {
    prefetch_l2(a), prefetch_l2(b);
#pragma GCC unroll 4
    for (int i = 0; i < kLanesPerLine<T>; ++i) lane();
  }
  for (; l < lanes; ++l) lane();
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < 2; ++v) store(c + r * kStrip + v * kLanes, acc[r][v]);
}

using TileKernel = void (*)(const float*, const float*, int64_t, float*, bool, const char*, const char*);

// For no rows: none.
template <class T, int Rows = kTileRows> static TileKernel tile_kernel(int64_t rows) {
  if constexpr (Rows > 0) return rows < Rows ? tile_kernel<T, Rows - 1>(rows) : tile<T, Rows>;
  return nullptr;
}

// --- strips ----------------------------------------------------------------------------------------------------------

// A thread's loop: blocks of K transposed into L1, parts of K (whole blocks) prefetched, chunks of x. In elements.
struct Walk {
  int64_t k_block, k_ahead, m_block;
};

// Half of a strip: kLanes rows of a matrix from `first` on, `rows` of them real; the next strip's are `apart` rows on.
template <class W> struct Half {
  const W* w;
  int64_t first, rows, apart;
};
template <class W> struct Strip { Half<W> half[2]; };

// One matrix gives 2 kLanes of its rows; two give kLanes each, so that a register tile holds gate and up side by side.
template <int Parts, class W> static Strip<W> strip_at(const W* w, int64_t s) {
  Strip<W> found;
  for (int v = 0; v < 2; ++v) {
    const W& part = w[Parts == 2 ? v : 0];
    int64_t first = Parts == 2 ? s * kLanes : s * kStrip + v * kLanes, left = part.rows - first;
    found.half[v] = {&part, first, left < 0 ? 0 : left < kLanes ? left : kLanes, Parts == 2 ? kLanes : kStrip};
  }
  return found;
}

// How the rows of plain weights become lanes (of codes: coded_block.h).
template <class T> struct PlainStrips {
  using Weights = Matrix<const T>;
  static constexpr bool kAsks = true;  // tiles prefetch the next part
  // Writes elements j to j + count of the rows to a column of `to` each, kStrip apart.
  static void turn(const Half<Weights>& half, int64_t j, int64_t count, float* to) {
    turn_rows<T, kPerLane<T>>(half.w->row(half.first) + j, half.w->stride, half.rows, count, to, kLanes, kStrip);
  }
  // Completes the sums of m rows of x.
  static void finish(const Strip<Weights>&, float*, int64_t) {}
};

// The next part of a strip's weights, divided into runs of lines: kLanes rows of `lines` lines in each half.
template <class W> struct Ahead {
  const Strip<W>& strip;
  int64_t from, lines;
  const char* run(int v, int64_t line) const {
    const Half<W>& half = strip.half[v];
    return reinterpret_cast<const char*>(half.w->row(half.first) + from + line / lines * half.w->stride) +
           line % lines * 64;
  }
};

// c[m][kStrip] = x . (the strip's weights)^T; `after` is the next strip of this thread.
template <class T, class S, class W>
static void multiply_strip(const float* x, int64_t m, int64_t k, const Strip<W>& at, const Strip<W>& after,
                           const Walk& walk, float* w, float* c) {
  constexpr int P = kPerLane<T>;
  const Tiles tiles(m);
  const TileKernel kernels[2] = {tile_kernel<T>(tiles.rows), tile_kernel<T>(tiles.rows - 1)};
  int64_t lanes = lanes_of<T>(k);
  int64_t part_lines = ((walk.k_ahead < k ? walk.k_ahead : k) * int64_t(sizeof(T)) + 63) / 64;
  // Lines of each half to prefetch during one block.
  int64_t share = kLanes * (walk.k_block < k ? walk.k_block : k) * int64_t(sizeof(T)) / 64;
  for (int64_t part = 0; part < k; part += walk.k_ahead) {
    int64_t part_end = part + walk.k_ahead < k ? part + walk.k_ahead : k;
    bool last = part_end == k;
    Ahead<W> next{last ? after : at, last ? 0 : part_end, part_lines};
    for (int64_t j = part, line = 0; j < part_end; j += walk.k_block, line += share) {
      int64_t wide = part_end - j < walk.k_block ? part_end - j : walk.k_block, l = lanes_of<T>(wide);
      for (int v = 0; v < 2; ++v) S::turn(at.half[v], j, wide, w + v * kLanes);
      for (int64_t t = 0, i = 0; t < tiles.count; i += tiles.of(t++)) {
        const char *a = reinterpret_cast<const char*>(w), *b = a;
        if constexpr (S::kAsks) if (t == 0) a = next.run(0, line), b = next.run(1, line);
        kernels[t >= tiles.larger](w, x + i * lanes + j / P * tiles.of(t), l, c + i * kStrip, j == 0, a, b);
      }
    }
  }
}

// As `stream` in dot.h, for any m; each thread calls x(m0, m) for each chunk of rows. S reads the weights.
template <class T, int Parts, class S = PlainStrips<T>, class X, class W, class Done>
static void blocked(const X& x, int64_t m, const W* w, int64_t threads, const Walk& walk, const Done& done) {
  constexpr int64_t columns = Parts == 2 ? kLanes : kStrip;
  AUTOSEL_CHECK(walk.k_block > 0 && walk.k_block % (kLanes * kPerLane<T>) == 0 && walk.k_ahead > 0 &&
                    walk.k_ahead % walk.k_block == 0 && walk.m_block > 0,
                "k_block must be whole vectors, k_ahead whole blocks, m_block positive");
  int64_t k = w->columns, n = w->rows;
  parallel(threads, (n + columns - 1) / columns, 1, [&](int64_t begin, int64_t end, int rank) {
    static thread_local Scratch panels, blocks;
    for (int64_t m0 = 0; m0 < m; m0 += walk.m_block) {
      int64_t taken = m - m0 < walk.m_block ? m - m0 : walk.m_block;
      float* panel = panels.get<float>(tile_panel_floats<T>(taken, k));
      pack_for_tiles<T>(x(m0, taken), panel);
      int64_t turned = walk.k_block / kPerLane<T> * kStrip;
      float *block = blocks.get<float>(turned + taken * kStrip), *c = block + turned;
      for (int64_t s = begin; s < end; ++s) {
        Strip<W> at = strip_at<Parts>(w, s), after = strip_at<Parts>(w, s + 1 < end ? s + 1 : begin);
        multiply_strip<T, S>(panel, taken, k, at, after, walk, block, c);
        S::finish(at, c, taken);
        for (int64_t i = 0; i < taken; ++i) {
          const float* v[2] = {c + i * kStrip, c + i * kStrip + kLanes};
          done(rank, m0 + i, s * columns, at.half[0].rows, v);
          if (Parts == 1 && at.half[1].rows > 0) done(rank, m0 + i, s * columns + kLanes, at.half[1].rows, v + 1);
        }
      }
    }
  });
}

}  // namespace autosel
