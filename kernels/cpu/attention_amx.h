// Attention of up to 16 query rows over one tile of keys by AMX: scores and P V as products of tiles (amx.h).
//
// Scores: a tile of 16 keys as they lie in the cache, times the queries, whose neighbours along D were paired once for
// a unit; the product has a key in each row, and is turned. P V: the weights of 32 keys, times the values, of which two
// keys are interleaved on their way through L1; that leaves the channels in the order of `gather`, which store2 undoes.
// The softmax between them is attention_tile.h's, masks and memory are attention.h's. Both products round like the dots:
// weights to bf16, sums to fp32.
//
// Intel starts a dot of 512 bits in two cycles, so four rows at D = 64 need 32 cycles a key for the dots alone, and as
// tiles 4: each takes 16 cycles for any number of rows (Intel's optimisation manual). Figures: attn_decode.cpp.
#pragma once
#include "amx.h"
#include "attention_tile.h"

namespace autosel {
namespace attention {

constexpr int64_t kTileRows = 16;  // query rows, and keys of a tile of scores
constexpr int64_t kTileKeys = 32;  // keys of a tile of weights

// Whether `rows` query rows of a KV head, d wide, are multiplied here.
template <class T> static inline bool by_tiles(int64_t rows, int64_t d) {
  return rows <= kTileRows && d % kAmxWidth == 0 && has_amx<T>();
}

#if defined(AUTOSEL_AMX)
// The tiles for `rows` query rows (0: not used), of which scores have a multiple of four:
//   0-3 sums of 16 channels, 4 weights, 5 keys or values, 6 scores, 7 queries
class AttentionTiles : AmxTiles {
 public:
  explicit AttentionTiles(int64_t rows) : AmxTiles(rows > 0, shapes(rows)) {}

 private:
  static AmxShapes shapes(int64_t rows) {
    AmxShapes s;
    for (int sums = 0; sums < 4; ++sums) s.set(sums, rows, 64);
    const int64_t padded = round_up(rows, kRows);
    s.set(4, rows, 64), s.set(5, 16, 64), s.set(6, 16, 4 * padded), s.set(7, 16, 4 * padded);
    return s;
  }
};

// Queries [rows][width] -> [d / 2][padded] pairs of neighbours; padded rows are zero.
static inline void pair_queries(const bf16* q, int64_t padded, int64_t width, int64_t d, bf16* out) {
  for (int64_t r = 0; r < padded; ++r)
    for (int64_t c = 0; c < d; c += 2) memcpy(out + c * padded + 2 * r, q + r * width + c, 2 * sizeof(bf16));
}

// c[key][row] of 16 keys -> s[row][key].
static inline void turn_scores(const float* c, int64_t padded, float* s, int64_t ld) {
  for (int64_t r = 0; r < padded; r += 4) {
    __m512 v[4];
    for (int i = 0; i < 4; ++i) {  // a lane has four rows of a key
      auto key = [&](int lane) { return _mm_loadu_ps(c + (4 * lane + i) * padded + r); };
      v[i] = _mm512_insertf32x4(_mm512_castps128_ps512(key(0)), key(1), 1);
      v[i] = _mm512_insertf32x4(_mm512_insertf32x4(v[i], key(2), 2), key(3), 3);
    }
    auto low = [](__m512 a, __m512 b) { return _mm512_castps_pd(_mm512_unpacklo_ps(a, b)); };
    auto high = [](__m512 a, __m512 b) { return _mm512_castps_pd(_mm512_unpackhi_ps(a, b)); };
    const __m512d a = low(v[0], v[1]), b = low(v[2], v[3]), e = high(v[0], v[1]), f = high(v[2], v[3]);
    _mm512_storeu_pd(s + r * ld, _mm512_unpacklo_pd(a, b));
    _mm512_storeu_pd(s + (r + 1) * ld, _mm512_unpackhi_pd(a, b));
    _mm512_storeu_pd(s + (r + 2) * ld, _mm512_unpacklo_pd(e, f));
    _mm512_storeu_pd(s + (r + 3) * ld, _mm512_unpackhi_pd(e, f));
  }
}

// Where 16 equally spaced keys from t on are, and how far apart in bytes. Keys in pages, and those before the end, are
// copied to `room`; keys past the n-th repeat the n-th, so that nothing beyond the tile is read.
template <class Rows>
static inline const bf16* sixteen(const Rows& k, int64_t t, int64_t n, int64_t d, bf16* room, int64_t& apart) {
  if constexpr (std::is_same_v<Rows, Spaced<bf16>>)
    if (t + kTileRows <= n) {
      apart = k.stride * int64_t(sizeof(bf16));
      return k(t);
    }
  apart = d * int64_t(sizeof(bf16));
  for (int64_t j = 0; j < kTileRows; ++j) memcpy(room + j * d, k(t + j < n ? t + j : n - 1), size_t(apart));
  return room;
}

// What to prefetch while a tile is in use: the rows of the next one, of eight sequences in turn, four of keys and four
// of values (kInTurn).
template <class Rows> struct Coming {
  static constexpr int kParts = kInTurn;
  Rows k, v;
  int64_t n, bytes, each = (n + kParts - 1) / kParts;  // rows, bytes of one, rows of a part
  int64_t row = 0, next = 0;                           // of the first part; of the part in turn
  int part = 0;

  // Asks for one row of keys and one of values.
  void ask() {
    if (row >= each) return;
    asm volatile("");  // as in fetch
    if (next < n) {
      auto a = reinterpret_cast<const char*>(k(next)), b = reinterpret_cast<const char*>(v(next));
      for (int64_t line = 0; line < bytes; line += 64) {
        __builtin_prefetch(a + line, 0, AUTOSEL_PREFETCH_L2);
        __builtin_prefetch(b + line, 0, AUTOSEL_PREFETCH_L2);
      }
    }
    next += each;
    if (++part == kParts) part = 0, next = ++row;
  }
};

// s[row][key] = scores of the paired queries q with n keys. `room` holds 16 keys.
template <class Rows>
AUTOSEL_WITH_AMX static AUTOSEL_NOINLINE void tile_scores(const bf16* q, int64_t padded, const Rows& k, int64_t n,
                                                          int64_t d, float* s, int64_t ld, bf16* room,
                                                          Coming<Rows>& coming) {
  alignas(64) float c[kTileRows * kTileRows];
  for (int64_t t = 0; t < n; t += kTileRows) {
    int64_t apart;
    const bf16* keys = sixteen(k, t, n, d, room, apart);
    for (int64_t asked = 0; asked < kTileRows / 2; ++asked) coming.ask();
    amx_fence();
    _tile_zero(6);
    for (int64_t at = 0; at < d; at += kAmxWidth) {
      _tile_loadd(5, keys + at, apart);
      _tile_loadd(7, q + at * padded, 4 * padded);
      _tile_dpbf16ps(6, 5, 7);
    }
    _tile_stored(6, c, 4 * padded);
    amx_fence();
    turn_scores(c, padded, s + t, ld);
  }
}

// o[row][c, c + 32 kPairs) += weights V. p: [rows][ld] weights, zero past the n-th up to a whole kTileKeys.
template <int kPairs, class Rows>
AUTOSEL_WITH_AMX static AUTOSEL_NOINLINE void tile_gather(float* o, int64_t width, const bf16* p, int64_t ld,
                                                          const Rows& v, int64_t n, int64_t c, Coming<Rows>& coming) {
  alignas(64) bf16 values[2][2 * kPairs][kTileKeys / 2][2 * 16];  // one is made while the other is multiplied
  const int64_t row = width * int64_t(sizeof(float));
  amx_fence();
  _tile_loadd(0, o + c, row);
  _tile_loadd(1, o + c + kLanes, row);
  if constexpr (kPairs == 2) {
    _tile_loadd(2, o + c + 2 * kLanes, row);
    _tile_loadd(3, o + c + 3 * kLanes, row);
  }
  for (int64_t t = 0; t < n; t += kTileKeys) {
    auto& to = values[t / kTileKeys % 2];
    for (int64_t pair = 0; pair < kTileKeys / 2; ++pair) {
      const int64_t one = t + 2 * pair;
      coming.ask();
      for (int i = 0; i < kPairs; ++i) {
        auto read = [&](int64_t key) {
          return key < n ? _mm512_loadu_si512(v(key) + c + i * kPair) : _mm512_setzero_si512();
        };
        const __m512i a = read(one), b = read(one + 1);
        _mm512_store_si512(to[2 * i][pair], _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(to[2 * i + 1][pair], _mm512_unpackhi_epi16(a, b));
      }
    }
    amx_fence();
    _tile_loadd(4, p + t, ld * int64_t(sizeof(bf16)));
    _tile_loadd(5, to[0], 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(5, to[1], 64);
    _tile_dpbf16ps(1, 4, 5);
    if constexpr (kPairs == 2) {
      _tile_loadd(5, to[2], 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(5, to[3], 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, o + c, row);
  _tile_stored(1, o + c + kLanes, row);
  if constexpr (kPairs == 2) {
    _tile_stored(2, o + c + 2 * kLanes, row);
    _tile_stored(3, o + c + 3 * kLanes, row);
  }
  amx_fence();
}
#else
struct AttentionTiles { explicit AttentionTiles(int64_t) {} };
#endif

}  // namespace attention
}  // namespace autosel
