// x[M,K] . w[N,K]^T for many rows of x: compute-bound, so weights are turned so that lanes run along N and a register
// tile of kTileRows x 2 kLanes takes 2 loads of weights and kTileRows broadcasts of x for twice kTileRows multiplies.
//
// A thread owns columns of y, 2 kLanes at a time ("strip"). For each strip, for each block of K: turn the weights'
// block into L1 (k_block lanes x 2 kLanes x 4 bytes <= half of it), run every tile of x over it, add into c. A lane
// is 32 bits: an fp32 (fp16 and, without the dot instruction, bf16 are widened while turning) or two neighbours along
// K in bf16.
//   Turning costs 4.5 cycles a cache line of weights, multiplying M (Zen 4: one 512-bit vdpbf16ps or FMA a cycle): from
//   M = 8 or so it is cheaper than dot.h, which reads x from L2 for every few rows of weights.
//   Reading 2 kLanes rows in blocks of K is a bad order for memory, so tiles ask L2, line by line and in the order of
//   addresses, for the strip (or part of one) that comes next: see `Ahead`. Without: 0.6 of the
//   speed at M = 12, 0.87 at 64.
//
// The register tile runs at one multiply a cycle (24.1 cycles for 12 x 2). 2048 x 4096, one core of Zen 4, times
// torch's speed, bf16: 1.3-1.6 at M=12, 1.3 at 16, 1.2 at 32, 1.05 at 64, 0.91-1.0 from 128 on (up to 218 of 236 GFLOP/s);
// 2048 x 2048: fp16 3.5-3.9, fp32 1.4 at M=16 and 1.2 at 64.
// Losers: sixteen rows turned at once; the rows copied together before turning (1.1x slower at M=16); chunks of x of 64
// rows (0.88 of 480 at once: weights are turned for every chunk).
#pragma once
#include "dot.h"

namespace autosel {

constexpr int kStrip = 2 * kLanes;                 // columns of y that a register tile spans
constexpr int kTileRows = kAccumulators / 2;       // rows of x that it spans at most
template <class T> constexpr int kPerLane = kPaired<T> ? 2 : 1;  // elements along K in a lane
template <class T> static inline int64_t lanes_of(int64_t k) { return (k + kPerLane<T> - 1) / kPerLane<T>; }

// --- turning: rows that run along K become lanes ---------------------------------------------------------------------

template <class T> static inline vreg lanes_at(const T* p) { return load(p); }
template <class T> static inline vreg lanes_at_tail(const T* p, int64_t n) { return load_tail(p, n); }
#if defined(AUTOSEL_BF16_DOT)
template <> inline vreg lanes_at(const bf16* p) { return reinterpret_cast<vreg>(_mm512_loadu_si512(p)); }
template <> inline vreg lanes_at_tail(const bf16* p, int64_t n) {
  bf16 buffer[2 * kLanes] = {};
  memcpy(buffer, p, size_t(n) * sizeof(bf16));
  return lanes_at(buffer);
}
#endif

// Swaps a's lanes with bit `Stride` set for b's with it clear.
template <int Stride> static inline void exchange(vreg& a, vreg& b) {
  vi low, high;
  for (int i = 0; i < kLanes; ++i) {
    low[i] = i & Stride ? kLanes + i - Stride : i;
    high[i] = i & Stride ? kLanes + i : i + Stride;
  }
  vreg l = __builtin_shuffle(a, b, low), h = __builtin_shuffle(a, b, high);
  a = l, b = h;
}

template <int Stride> static inline void exchange_all(vreg* v) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    if (!(i & Stride)) exchange<Stride>(v[i], v[i + Stride]);
}

// Lanes 8 * half and on.
static inline void store_eight(float* p, vreg v, int half) {
#if defined(AUTOSEL_AVX512)
  __m512 z = reinterpret_cast<__m512>(v);
  _mm256_storeu_ps(p, half ? _mm512_extractf32x8_ps(z, 1) : _mm512_castps512_ps256(z));
#else
  (void)half, store(p, v);
#endif
}

// to[l * pitch + r] = lane l of row r, r < columns; missing rows and elements are zero.
//
// Eight rows at a time: sixteen rows a multiple of 4 KB apart share 8 ways of L1 and throw each other out (6.4 cycles
// a line for sixteen, 4.5 for eight; a staged copy of the rows 7.2). Groups go from the last to the first, and write
// eight values a lane whatever `columns`: what is too much gets overwritten, but for 7 values behind the last lane.
template <class S, int kPer>
static void turn_rows(const S* from, int64_t stride, int64_t rows, int64_t k, float* to, int64_t columns,
                      int64_t pitch) {
  for (int64_t group = (columns - 1) / 8 * 8; group >= 0; group -= 8) {
    float* out = to + group;
    for (int64_t j = 0; j < k; j += kLanes * kPer) {
      int64_t left = k - j, lanes = (left + kPer - 1) / kPer;
      vreg v[8];
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) {
        const S* p = from + (group + r) * stride + j;
        v[r] = group + r >= rows ? vreg{} : left >= kLanes * kPer ? lanes_at(p) : lanes_at_tail(p, left);
      }
      exchange_all<1>(v), exchange_all<2>(v), exchange_all<4>(v);
#pragma GCC unroll 2
      for (int half = 0; half < kLanes / 8; ++half)
#pragma GCC unroll 8
        for (int l = 0; l < 8; ++l, out += pitch)
          if (half * 8 + l < lanes) store_eight(out, v[l], half);
    }
  }
}

// --- x: tiles of `tile` rows, each [lanes][tile] ---------------------------------------------------------------------

static inline int64_t tile_rows_for(int64_t m) {
  int64_t tiles = (m + kTileRows - 1) / kTileRows;
  return (m + tiles - 1) / tiles;  // equal tiles: 16 rows are 8 + 8, not 12 + 4
}

template <class T> static inline int64_t tile_panel_floats(int64_t m, int64_t k) {
  int64_t tile = tile_rows_for(m);
  return (m + tile - 1) / tile * tile * lanes_of<T>(k) + kLanes;  // kLanes: the surplus of the last store
}

// Rows of T, or of Wide<T>.
template <class T, class S> static void pack_for_tiles(const Matrix<const S>& x, float* out) {
  int64_t tile = tile_rows_for(x.rows), lanes = lanes_of<T>(x.columns);
  for (int64_t i = 0; i < x.rows; i += tile)
    turn_rows<S, kPerLane<T>>(x.row(i), x.stride, x.rows - i, x.columns, out + i * lanes, tile, tile);
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

// c[Rows][kStrip] (+)= x[lanes][Rows]^T w[lanes][kStrip], asking L2 for two lines a lane, from a and b on. There are
// issue slots to spare for that: a tile that has nothing to ask for points at w itself.
template <class T, int Rows>
static void tile(const float* w, const float* x, int64_t lanes, float* c, bool first, const char* a, const char* b) {
  vreg acc[Rows][2];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < 2; ++v) acc[r][v] = first ? vreg{} : load(c + r * kStrip + v * kLanes);
  for (int64_t l = 0; l < lanes; ++l, w += kStrip, x += Rows) {
    vreg w0 = load(w), w1 = load(w + kLanes);
    prefetch_l2(a + l * 64), prefetch_l2(b + l * 64);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      acc[r][0] = multiply<T>(acc[r][0], w0, x[r]);
      acc[r][1] = multiply<T>(acc[r][1], w1, x[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < 2; ++v) store(c + r * kStrip + v * kLanes, acc[r][v]);
}

using TileKernel = void (*)(const float*, const float*, int64_t, float*, bool, const char*, const char*);

template <class T, int Rows = kTileRows> static TileKernel tile_kernel(int64_t rows) {
  if constexpr (Rows > 1)
    if (rows < Rows) return tile_kernel<T, Rows - 1>(rows);
  return tile<T, Rows>;
}

// --- strips ----------------------------------------------------------------------------------------------------------

// How a thread walks: blocks of K turned into L1, parts of K (whole blocks) asked for ahead, chunks of x. In elements.
struct Walk {
  int64_t k_block, k_ahead, m_block;
};

// Where the weights of one strip lie: kLanes rows for each of its halves, `rows` of them real.
template <class T> struct Strip {
  const T* w[2];
  int64_t rows[2], stride[2];
};

// One matrix gives 2 kLanes of its rows; two give kLanes each, so that a register tile holds gate and up side by side.
template <class T, int Parts> static Strip<T> strip_at(const Matrix<const T>* w, int64_t s) {
  Strip<T> found;
  for (int v = 0; v < 2; ++v) {
    const Matrix<const T>& part = w[Parts == 2 ? v : 0];
    int64_t first = Parts == 2 ? s * kLanes : s * kStrip + v * kLanes, left = part.rows - first;
    found.w[v] = part.row(first), found.stride[v] = part.stride;
    found.rows[v] = left < 0 ? 0 : left < kLanes ? left : kLanes;
  }
  return found;
}

// The next part of a strip's weights, given out in runs of lines: kLanes rows of `lines` lines in each half.
template <class T> struct Ahead {
  const Strip<T>& strip;
  int64_t from, lines;
  const char* run(int half, int64_t line) const {
    return reinterpret_cast<const char*>(strip.w[half] + from + line / lines * strip.stride[half]) + line % lines * 64;
  }
};

// c[tiles][rows][kStrip] = x . (the strip's weights)^T; `after` is the strip that this thread will want next.
template <class T>
static void multiply_strip(const float* x, int64_t m, int64_t k, const Strip<T>& at, const Strip<T>& after,
                           const Walk& walk, TileKernel kernel, float* w, float* c) {
  constexpr int P = kPerLane<T>;
  int64_t rows = tile_rows_for(m), tiles = (m + rows - 1) / rows, lanes = lanes_of<T>(k);
  int64_t part_lines = ((walk.k_ahead < k ? walk.k_ahead : k) * int64_t(sizeof(T)) + 63) / 64;
  // Lines of each half to ask for during one block.
  int64_t share = kLanes * (walk.k_block < k ? walk.k_block : k) * int64_t(sizeof(T)) / 64;
  for (int64_t part = 0; part < k; part += walk.k_ahead) {
    int64_t part_end = part + walk.k_ahead < k ? part + walk.k_ahead : k;
    bool last = part_end == k;
    Ahead<T> next{last ? after : at, last ? 0 : part_end, part_lines};
    for (int64_t j = part, line = 0; j < part_end; j += walk.k_block, line += share) {
      int64_t wide = part_end - j < walk.k_block ? part_end - j : walk.k_block, l = lanes_of<T>(wide);
      for (int v = 0; v < 2; ++v)
        turn_rows<T, P>(at.w[v] + j, at.stride[v], at.rows[v], wide, w + v * kLanes, kLanes, kStrip);
      for (int64_t t = 0; t < tiles; ++t) {
        bool ask = t * l < share;
        const char* nothing = reinterpret_cast<const char*>(w);
        kernel(w, x + (t * lanes + j / P) * rows, l, c + t * rows * kStrip, j == 0,
               ask ? next.run(0, line + t * l) : nothing, ask ? next.run(1, line + t * l) : nothing);
      }
    }
  }
}

// As `stream` in dot.h, for any m; x(m0, m) is asked for each chunk of rows by each thread.
template <class T, int Parts, class X, class Done>
static void blocked(const X& x, int64_t m, const Matrix<const T>* w, int64_t threads, const Walk& walk,
                    const Done& done) {
  constexpr int64_t columns = Parts == 2 ? kLanes : kStrip;
  AUTOSEL_CHECK(walk.k_block > 0 && walk.k_block % (kLanes * kPerLane<T>) == 0 && walk.k_ahead > 0 &&
                    walk.k_ahead % walk.k_block == 0 && walk.m_block > 0,
                "k_block must be whole vectors, k_ahead whole blocks, m_block positive");
  int64_t k = w->columns, n = w->rows;
  parallel(threads, (n + columns - 1) / columns, 1, [&](int64_t begin, int64_t end, int rank) {
    static thread_local Scratch panels, blocks;
    for (int64_t m0 = 0; m0 < m; m0 += walk.m_block) {
      int64_t taken = m - m0 < walk.m_block ? m - m0 : walk.m_block;
      TileKernel kernel = tile_kernel<T>(tile_rows_for(taken));
      float* panel = panels.get<float>(tile_panel_floats<T>(taken, k));
      pack_for_tiles<T>(x(m0, taken), panel);
      int64_t turned = walk.k_block / kPerLane<T> * kStrip;
      float *block = blocks.get<float>(turned + (taken + kTileRows) * kStrip), *c = block + turned;
      for (int64_t s = begin; s < end; ++s) {
        Strip<T> at = strip_at<T, Parts>(w, s), after = strip_at<T, Parts>(w, s + 1 < end ? s + 1 : begin);
        multiply_strip<T>(panel, taken, k, at, after, walk, kernel, block, c);
        for (int64_t i = 0; i < taken; ++i) {
          const float* v[2] = {c + i * kStrip, c + i * kStrip + kLanes};
          done(rank, m0 + i, s * columns, at.rows[0], v);
          if (Parts == 1 && at.rows[1] > 0) done(rank, m0 + i, s * columns + kLanes, at.rows[1], v + 1);
        }
      }
    }
  });
}

}  // namespace autosel
