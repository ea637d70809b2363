// Parts of decode attention, contiguous or paged: query rows packed by KV head, one tile of keys at a time, online
// softmax in fp32, and equal shares of the work for the team.
//
// The G = Hq/Hkv query heads (times S positions) that share a KV head form R rows and pass over K and V together, four
// rows per block: the tile is read from memory once, and from L1/L2 by the other blocks. A row sees one interval of
// keys (causal, window, length), so a mask is an interval, never a value: keys outside it are not multiplied by zero
// but never read, and a NaN there has no effect.
//
// Shares: the tiles of all (sequence, KV head) units, laid end to end, are cut into `threads` equal ranges. A unit
// inside one range is written at once. The parts of a unit in several ranges are merged after the join, in order: the
// same bits every time.
#pragma once
#include "project.h"

#define AUTOSEL_NOINLINE __attribute__((noinline))  // a hot loop has all registers, and a name in a profile
#define AUTOSEL_PREFETCH_L2 2                       // __builtin_prefetch's locality: into L2, past L1

namespace autosel {
namespace attention {

constexpr int kRows = 4;               // query rows a block
constexpr int64_t kPair = 2 * kLanes;  // channels a load2

#if defined(AUTOSEL_BF16_DOT)
template <class T> constexpr bool kDot = std::is_same_v<T, bf16>;
#else
template <class T> constexpr bool kDot = false;
#endif
// Queries and weights (probabilities) are multiplied as stored where there is an instruction for it, else as fp32.
template <class T> using Factor = std::conditional_t<kDot<T>, T, float>;

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// --- two vectors at a time -------------------------------------------------------------------------------------------
// bf16 is widened by a shift and a mask: a = even channels, b = odd ones. Accumulators and queries keep that order and
// store2 restores it, so widening needs no shuffle.

template <class T> static inline void load2(const T* p, vreg& a, vreg& b) { a = load(p), b = load(p + kLanes); }
static inline void load2(const bf16* p, vreg& a, vreg& b) {
  vu u;
  memcpy(&u, p, sizeof u);
  a = reinterpret_cast<vreg>(u << 16), b = reinterpret_cast<vreg>(u & 0xffff0000u);
}

// The first n (< kPair) channels, zeros behind; nothing past p + n is read.
template <class T> static inline void load2_tail(const T* p, int64_t n, vreg& a, vreg& b) {
#if defined(AUTOSEL_AVX512)
  if constexpr (sizeof(T) == 2) {
    __m512i bits = _mm512_maskz_loadu_epi16(__mmask32((1u << n) - 1), p);
    T buffer[kPair];
    if constexpr (std::is_same_v<T, bf16>) {
      a = reinterpret_cast<vreg>(_mm512_slli_epi32(bits, 16));
      b = reinterpret_cast<vreg>(_mm512_and_si512(bits, _mm512_set1_epi32(int(0xffff0000u))));
    } else {
      memcpy(buffer, &bits, sizeof buffer);
      load2(buffer, a, b);
    }
    return;
  }
#endif
  T buffer[kPair] = {};
  memcpy(buffer, p, size_t(n) * sizeof(T));
  load2(buffer, a, b);
}

// Undoes the order the accumulators of T are in: load2's, or that of the pairs of gather_step.
template <class T> static inline void store2(T* p, vreg a, vreg b) { store(p, a), store(p + kLanes, b); }
template <> inline void store2<bf16>(bf16* p, vreg a, vreg b) {
#if defined(AUTOSEL_BF16_DOT)
  __m512i both = (__m512i)_mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(a));
  _mm512_storeu_si512(p, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), both));
#else
  bf16 even[kLanes], odd[kLanes];
  store(even, a), store(odd, b);
  for (int i = 0; i < kLanes; ++i) p[2 * i] = even[i], p[2 * i + 1] = odd[i];
#endif
}

// kLanes vectors -> one whose lane i is the sum of vector i.
static inline vreg sums(const vreg* v) {
#if defined(AUTOSEL_AVX512)
  auto in = [&](int i) { return reinterpret_cast<__m512>(v[i]); };
  auto within = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd));
  };
  auto across = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  };
  __m512 four[4];
  for (int i = 0; i < 4; ++i) four[i] = within(within(in(4 * i), in(4 * i + 1)), within(in(4 * i + 2), in(4 * i + 3)));
  return reinterpret_cast<vreg>(across(across(four[0], four[1]), across(four[2], four[3])));
#elif defined(__AVX2__)
  auto in = [&](int i) { return reinterpret_cast<__m256>(v[i]); };
  auto within = [](__m256 x, __m256 y) {
    return _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x88), _mm256_shuffle_ps(x, y, 0xdd));
  };
  __m256 lo = within(within(in(0), in(1)), within(in(2), in(3)));
  __m256 hi = within(within(in(4), in(5)), within(in(6), in(7)));
  return reinterpret_cast<vreg>(
      _mm256_add_ps(_mm256_permute2f128_ps(lo, hi, 0x20), _mm256_permute2f128_ps(lo, hi, 0x31)));
#else
  vreg r;
  for (int i = 0; i < kLanes; ++i) r[i] = sum(v[i]);
  return r;
#endif
}

// exp(x) for x <= 0 or NaN, as softmax needs it; below -87.3, -inf included, it gives 0 (or, on AVX-512, a subnormal).
static inline vreg exp_nonpositive(vreg x) {
#if defined(AUTOSEL_AVX512)
  __m512 c = _mm512_max_ps(_mm512_set1_ps(-120.0f), reinterpret_cast<__m512>(x));  // a NaN in the second operand stays
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(c, _mm512_set1_ps(1.44269504f)), 0);
  __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), c);
  f = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), f);
  __m512 p = _mm512_set1_ps(1.0f / 720);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f / 120));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f / 24));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f / 6));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return reinterpret_cast<vreg>(_mm512_scalef_ps(p, n));
#else
  return exp(x);
#endif
}

#if defined(AUTOSEL_BF16_DOT)
// 2^x for x <= 0, -inf or NaN, to 2^-18: for weights that are rounded to 8 bits. 2^floor(x) times a polynomial of the
// rest, minimax on [0, 1) and 1 at 0.
static inline __m512 exp2_nonpositive(__m512 x) {
  __m512 f = _mm512_reduce_ps(x, 0x09);  // x - floor(x)
  __m512 p = _mm512_set1_ps(0.013426685705780983f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.052242472767829895f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.2412802129983902f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6930448412895203f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);
}
#endif

// c * tanh(s / c). tanh by 1 - 2 / (exp(2|x|) + 1) loses small x to cancellation: an odd polynomial below 0.625
// (Cephes).
static inline vreg cap(vreg s, float softcap) {
  vreg x = s / splat(softcap), a = x < vreg{} ? -x : x;
  vreg e = exp(a + a), big = splat(1.0f) - splat(2.0f) / (e + splat(1.0f));
  big = x < vreg{} ? -big : big;
  vreg z = x * x, p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  return splat(softcap) * (a < splat(0.625f) ? fma(p * z, x, x) : big);
}

// --- memory ----------------------------------------------------------------------------------------------------------

// The rows of a tile: equally spaced (contiguous cache), or anywhere (pages).
template <class T> struct Spaced {
  const T* base;
  int64_t stride;
  const T* operator()(int64_t t) const { return base + t * stride; }
  Spaced from(int64_t t) const { return {base + t * stride, stride}; }
};
template <class T> struct Listed {
  const T* const* rows;
  const T* operator()(int64_t t) const { return rows[t]; }
  Listed from(int64_t t) const { return {rows + t}; }
};

// Prefetches bytes [from, to) of rows [t, t + kCount) of n into L2; kBytes of each if that is known: a prefetch in a
// loop of unknown length costs as much as the arithmetic of the row.
template <int kCount, int64_t kBytes = 0, class Rows>
static inline void fetch(const Rows& rows, int64_t t, int64_t n, int64_t from, int64_t to) {
  if (t + kCount > n) return;  // the last few rows are left to the hardware
  asm volatile("");  // without it g++ treats a function that only prefetches as pure, and drops every call (12.2)
  for (int j = 0; j < kCount; ++j) {
    const char* p = reinterpret_cast<const char*>(rows(t + j)) + from;
    for (int64_t i = 0; i < (kBytes ? kBytes : to - from); i += 64) __builtin_prefetch(p + i, 0, AUTOSEL_PREFETCH_L2);
  }
}

// What to prefetch while row t of a tile of n is in use: row t of the next tile and, a second time, the tile's own row
// `again` rows ahead. A prefetch into L2 is dropped if the memory queue is full, so a burst loses lines.
template <class Rows> struct Ahead {
  Rows rows;
  int64_t n, again;  // 0, 0: nothing
  int64_t first;     // rows before it were already prefetched
  template <int kCount, int64_t kBytes = 0>
  void ask(const Rows& own, int64_t own_n, int64_t t, int64_t from, int64_t to) const {
    if (t + kCount > first) fetch<kCount, kBytes>(rows, t, n, from, to);
    if (again) fetch<kCount, kBytes>(own, t + again, own_n, from, to);
  }
};

// --- scores of four rows against a tile ------------------------------------------------------------------------------

// kLanes sums at a time: four rows by kLanes / 4 tokens, each a vector along D, joined in one step. Keys past the n-th
// repeat the n-th, so that nothing beyond the tile is read; their scores are stored in the padding.

template <class T, bool kTail>
static inline void scores_step(vreg* acc, const Factor<T>* q, int64_t width, const T* const* row, int64_t c,
                               int64_t left) {
  constexpr int kTokens = kLanes / kRows;
#if defined(AUTOSEL_BF16_DOT)
  if constexpr (kDot<T>) {
    __m512bh key[kTokens];
    for (int j = 0; j < kTokens; ++j)
      key[j] = kTail ? (__m512bh)_mm512_maskz_loadu_epi16(__mmask32((1u << left) - 1), row[j] + c)
                     : (__m512bh)_mm512_loadu_si512(row[j] + c);
    for (int r = 0; r < kRows; ++r) {
      __m512bh mine = (__m512bh)_mm512_loadu_si512(q + r * width + c);
      for (int j = 0; j < kTokens; ++j) {
        __m512 x = reinterpret_cast<__m512>(acc[r * kTokens + j]);
        acc[r * kTokens + j] = reinterpret_cast<vreg>(_mm512_dpbf16_ps(x, mine, key[j]));
      }
    }
  }
#endif
  if constexpr (!kDot<T>) {
    for (int j = 0; j < kTokens; ++j) {
      vreg a, b;
      if constexpr (kTail) load2_tail(row[j] + c, left, a, b);
      else load2(row[j] + c, a, b);
      for (int r = 0; r < kRows; ++r) {
        vreg& x = acc[r * kTokens + j];
        x = fma(load(q + r * width + c + kLanes), b, fma(load(q + r * width + c), a, x));
      }
    }
  }
}

// q: [4 rows][width], as stored for the dot instruction, else fp32 in load2's order; zero past d.
template <class T, int64_t kD, class Rows>  // kD: d where it is known, else 0
static AUTOSEL_NOINLINE void scores_of(const Factor<T>* q, int64_t width, Rows k, int64_t n, int64_t d, float* s,
                                       int64_t ld, Ahead<Rows> ahead) {
  if (kD) d = width = kD;
  constexpr int kTokens = kLanes / kRows;
  int64_t whole = d / kPair * kPair, bytes = d * int64_t(sizeof(T));
  for (int64_t t = 0; t < n; t += kTokens) {
    const T* row[kTokens];
    for (int j = 0; j < kTokens; ++j) row[j] = k(t + j < n ? t + j : n - 1);
    ahead.template ask<kTokens, kD * int64_t(sizeof(T))>(k, n, t, 0, bytes);
    vreg acc[kLanes] = {};
    for (int64_t c = 0; c < whole; c += kPair) scores_step<T, false>(acc, q, width, row, c, 0);
    if (whole < d) scores_step<T, true>(acc, q, width, row, whole, d - whole);
    float joined[kLanes];
    store(joined, sums(acc));
    for (int r = 0; r < kRows; ++r) memcpy(s + r * ld + t, joined + r * kTokens, kTokens * sizeof(float));
  }
}

template <class T, class Rows>
static void scores(const Factor<T>* q, int64_t width, Rows k, int64_t n, int64_t d, float* s, int64_t ld,
                   Ahead<Rows> ahead) {
  if (d == 64) return scores_of<T, 64>(q, width, k, n, d, s, ld, ahead);
  if (d == 128) return scores_of<T, 128>(q, width, k, n, d, s, ld, ahead);
  if (d == 256) return scores_of<T, 256>(q, width, k, n, d, s, ld, ahead);
  scores_of<T, 0>(q, width, k, n, d, s, ld, ahead);
}

// --- online softmax --------------------------------------------------------------------------------------------------

static constexpr int64_t softening_slots(int64_t rows, int64_t n) { return rows * ((n + kLanes - 1) / kLanes); }

// s[r][i] = cap(scale * s[r][i]): the scores of a softcap, and of a scale that turns their order.
template <int kNR> static void reshape(float* s, int64_t ld, int64_t n, float scale, float softcap) {
  for (int64_t i = 0; i < n; i += kLanes)
    for (int r = 0; r < kNR; ++r) {
      vreg x = load(s + r * ld + i) * splat(scale);
      if (softcap > 0) x = x == splat(-INFINITY) ? x : cap(x, softcap);
      store(s + r * ld + i, x);
    }
}

// x, rounded: GCC would contract a product that is subtracted from into one fused operation.
static inline vreg rounded(vreg x) {
#if defined(__FMA__)
  asm("" : "+x"(x));
#endif
  return x;
}

// s[r][0, n) -> weights exp(scale * s - base[r]) in place, all[r] += their sum by lanes. Rounded weights are summed as
// rounded, so that o stays a mean of V.
template <class T, int kNR, class Between>
static inline void weigh(float* s, int64_t ld, int64_t n, float scale, const float* base, vreg* all,
                         const Between& between) {
#if defined(AUTOSEL_BF16_DOT)
  if constexpr (kDot<T>) {
    constexpr float kLog2E = 1.44269504f;
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    // The product is rounded before the base is subtracted, as the base was: the largest score gives 0 however large it
    // is. In one fmsub with scale * log2(e) the rounding of scores beyond 2^30 overflowed exp: NaN.
    auto weight = [&](const float* x, float from) {
      vreg below = rounded(load(x) * splat(scale)) - splat(from);
      return exp2_nonpositive(reinterpret_cast<__m512>(below * splat(kLog2E)));
    };
    for (int64_t i = 0; i < n; i += kPair)
      for (int r = 0; r < kNR; ++r) {
        const float* x = s + r * ld + i;
        __m512 a = weight(x, base[r]), b = weight(x + kLanes, base[r]);
        __m512bh both = _mm512_cvtne2ps_pbh(b, a);
        _mm512_storeu_si512(reinterpret_cast<T*>(s + r * ld) + i, (__m512i)both);
        all[r] = reinterpret_cast<vreg>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(all[r]), both, ones));
        between(i / kLanes * kNR + 2 * r), between(i / kLanes * kNR + 2 * r + 1);
      }
  }
#endif
  if constexpr (!kDot<T>) {
    for (int64_t i = 0; i < n; i += kLanes)
      for (int r = 0; r < kNR; ++r) {
        vreg p = exp_nonpositive(rounded(load(s + r * ld + i) * splat(scale)) - splat(base[r]));
        store(s + r * ld + i, p);
        between(i / kLanes * kNR + r);
        all[r] += p;
      }
  }
}

// kNR rows at once, because one row alone waits for its own maximum and exponentials. s[r][0, n) raw dot products ->
// weights exp(s - m) on [begin[r], end[r]), zero elsewhere up to a whole step, in place (bf16 weights at the front of
// their row); begin = nullptr: everywhere. Updates each row's maximum m and sum l; keep[r] is the factor for the sums
// accumulated before. m never becomes NaN; l and the weights can. Calls between(i) for i = 0, 1, .. at least
// softening_slots(kNR, n) - 1: prefetches for a phase that loads nothing new itself.
template <class T, int kNR, class Between>
static AUTOSEL_NOINLINE void soften(float* s, int64_t ld, int64_t n, const int64_t* begin, const int64_t* end,
                                    float scale, float softcap, float* m, float* l, float* keep,
                                    const Between& between) {
  static_assert(kNR <= kLanes, "one vector holds what is kept of each row");
  int64_t padded = round_up(n, kDot<T> ? kPair : kLanes);
  for (int r = 0; r < kNR; ++r) {
    float* x = s + r * ld;
    int64_t lo = begin ? begin[r] : 0, hi = begin ? end[r] : n;
    for (int64_t i = 0; i < lo; ++i) x[i] = -INFINITY;
    for (int64_t i = hi > lo ? hi : lo; i < padded; ++i) x[i] = -INFINITY;
  }
  if (softcap > 0 || !(scale > 0)) reshape<kNR>(s, ld, n, scale, softcap), scale = 1;
  vreg top[kNR], all[kNR];
  for (int r = 0; r < kNR; ++r) top[r] = splat(-INFINITY), all[r] = vreg{};
  for (int64_t i = 0; i < n; i += kLanes)
    for (int r = 0; r < kNR; ++r) top[r] = max(load(s + r * ld + i), top[r]);  // in this order a NaN keeps top
  float fall[kLanes] = {}, base[kNR];
  for (int r = 0; r < kNR; ++r) {
    float peak = scale * max(top[r]), now = peak > m[r] ? peak : m[r];
    base[r] = now == -INFINITY ? 0.0f : now, fall[r] = m[r] - base[r], m[r] = now;
  }
  weigh<T, kNR>(s, ld, n, scale, base, all, between);
  store(fall, exp_nonpositive(load(fall)));
  for (int r = 0; r < kNR; ++r) keep[r] = fall[r], l[r] = l[r] * keep[r] + sum(all[r]);
}

// --- o = o * keep + weights V ----------------------------------------------------------------------------------------

// One step of tokens [t, t + 2) if bf16 dots take two, otherwise of token t. Pairs: channels 8i..8i+3 of two tokens,
// interleaved, go to vector a, 8i+4..8i+7 to b; store2 restores the order. An odd last token is paired with zeros.
template <int kNR, int kPairs, bool kTail, bool kSingle, class T, class Rows>
static inline void gather_step(vreg (*acc)[2 * kPairs], const Factor<T>* p, int64_t ld, Rows v, int64_t t, int64_t c,
                               int64_t left) {
#if defined(AUTOSEL_BF16_DOT)
  if constexpr (kDot<T>) {
    const T *one = v(t) + c, *two = kSingle ? nullptr : v(t + 1) + c;
    __m512bh x[2 * kPairs];
    for (int i = 0; i < kPairs; ++i) {
      auto read = [&](const T* from) {
        if constexpr (kTail) return _mm512_maskz_loadu_epi16(__mmask32((1u << left) - 1), from);
        else return _mm512_loadu_si512(from + i * kPair);
      };
      __m512i a = read(one), b = kSingle ? _mm512_setzero_si512() : read(two);
      x[2 * i] = (__m512bh)_mm512_unpacklo_epi16(a, b), x[2 * i + 1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
    }
    for (int r = 0; r < kNR; ++r) {
      int32_t both = 0;
      memcpy(&both, p + r * ld + t, kSingle ? 2 : 4);
      __m512bh w = (__m512bh)_mm512_set1_epi32(both);
      for (int i = 0; i < 2 * kPairs; ++i)
        acc[r][i] = reinterpret_cast<vreg>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc[r][i]), w, x[i]));
    }
  }
#endif
  if constexpr (!kDot<T>) {
    const T* row = v(t) + c;
    vreg x[2 * kPairs];
    for (int i = 0; i < kPairs; ++i)
      if constexpr (kTail) load2_tail(row + i * kPair, left, x[2 * i], x[2 * i + 1]);
      else load2(row + i * kPair, x[2 * i], x[2 * i + 1]);
    for (int r = 0; r < kNR; ++r) {
      vreg w = splat(p[r * ld + t]);
      for (int i = 0; i < 2 * kPairs; ++i) acc[r][i] = fma(w, x[i], acc[r][i]);
    }
  }
}

template <int kNR, int kPairs, bool kTail, class T, class Rows>
static AUTOSEL_NOINLINE void gather(float* o, int64_t width, const Factor<T>* p, int64_t ld, Rows v, int64_t n,
                                    int64_t c, int64_t left, const float* keep, Ahead<Rows> ahead) {
  constexpr int kTokens = kDot<T> ? 2 : 1;
  int64_t from = c * int64_t(sizeof(T)), to = (c + (kTail ? left : kPairs * kPair)) * int64_t(sizeof(T)), t = 0;
  vreg acc[kNR][2 * kPairs];
  for (int r = 0; r < kNR; ++r)
    for (int i = 0; i < 2 * kPairs; ++i) acc[r][i] = load(o + r * width + c + i * kLanes) * splat(keep[r]);
  for (; t + kTokens <= n; t += kTokens) {
    ahead.template ask<kTokens, kTail ? 0 : kPairs * kPair * int64_t(sizeof(T))>(v, n, t, from, to);
    gather_step<kNR, kPairs, kTail, false, T>(acc, p, ld, v, t, c, left);
  }
  if (t < n) {
    ahead.template ask<1>(v, n, t, from, to);
    gather_step<kNR, kPairs, kTail, true, T>(acc, p, ld, v, t, c, left);
  }
  for (int r = 0; r < kNR; ++r)
    for (int i = 0; i < 2 * kPairs; ++i) store(o + r * width + c + i * kLanes, acc[r][i]);
}

template <int kNR, class T, class Rows>
static void gather_rows(float* o, int64_t width, const Factor<T>* p, int64_t ld, Rows v, int64_t n, int64_t d,
                        const float* keep, Ahead<Rows> ahead) {
#if defined(AUTOSEL_AVX512)
  constexpr int kPairs = 2;  // 4 rows x 4 vectors of accumulators in 32 registers
#else
  constexpr int kPairs = 1;  // 4 x 2 in 16
#endif
  int64_t c = 0;
  for (; c + kPairs * kPair <= d; c += kPairs * kPair)
    gather<kNR, kPairs, false, T>(o, width, p, ld, v, n, c, 0, keep, ahead);
  for (; c + kPair <= d; c += kPair) gather<kNR, 1, false, T>(o, width, p, ld, v, n, c, 0, keep, ahead);
  if (c < d) gather<kNR, 1, true, T>(o, width, p, ld, v, n, c, d - c, keep, ahead);
}

template <class T, class Rows>
static void gather_rows(int64_t rows, float* o, int64_t width, const Factor<T>* p, int64_t ld, Rows v, int64_t n,
                        int64_t d, const float* keep, Ahead<Rows> ahead) {
  if (rows == 4) return gather_rows<4, T>(o, width, p, ld, v, n, d, keep, ahead);
  if (rows == 3) return gather_rows<3, T>(o, width, p, ld, v, n, d, keep, ahead);
  if (rows == 2) return gather_rows<2, T>(o, width, p, ld, v, n, d, keep, ahead);
  gather_rows<1, T>(o, width, p, ld, v, n, d, keep, ahead);
}

}  // namespace attention
}  // namespace autosel

#include "attention_amx.h"

namespace autosel {
namespace attention {

// --- one unit: the R rows of a (sequence, KV head) -------------------------------------------------------------------

struct Shape {
  int64_t batch, q_heads, kv_heads, positions, d;
  int64_t group, rows, width;  // rows = group * positions; width = d rounded up to kPair
  float scale, softcap;
  int64_t window, tile;
};

template <class T> struct Strided4 {
  T* data;
  int64_t s0, s1, s2;
  T* at(int64_t i, int64_t j, int64_t k) const { return data + i * s0 + j * s1 + k * s2; }
};

// A thread's state: packed queries, accumulators, running maximum and sum of each row, weights of one block (of all
// rows if tiles multiply them; then also the queries in pairs, and room for 16 keys).
template <class T> struct Bench {
  Factor<T>*q, *pairs, *room;
  float *o, *m, *l, *s;
  int64_t ld;  // floats of s a row
  int64_t padded;
  bool tiles;

  explicit Bench(const Shape& a) : padded(round_up(a.rows, kRows)), tiles(by_tiles<T>(a.rows, a.d)) {
    static thread_local Scratch scratch;
    ld = round_up(a.tile, 16) + 16;  // 16 more, so that four rows do not share an L1 set
    const int64_t block = tiles ? padded : kRows;
    size_t q_bytes = size_t(round_up(padded * a.width * int64_t(sizeof(Factor<T>)), 64));
    size_t room_bytes = tiles ? size_t(kTileRows * a.d) * sizeof(Factor<T>) : 0;
    size_t o_bytes = size_t(padded * a.width) * 4, s_bytes = size_t(block * ld) * 4;
    char* p = scratch.get<char>(int64_t((tiles ? 2 : 1) * q_bytes + room_bytes + o_bytes + s_bytes) + padded * 8);
    auto take = [&p](size_t bytes) { return (p += bytes) - bytes; };
    q = reinterpret_cast<Factor<T>*>(take(q_bytes)), pairs = reinterpret_cast<Factor<T>*>(take(tiles ? q_bytes : 0));
    room = reinterpret_cast<Factor<T>*>(take(room_bytes)), o = reinterpret_cast<float*>(p);
    s = o + padded * a.width, m = s + block * ld, l = m + padded;
  }

  // Row r is query head h * group + r % group at position r / group: neighbours see (nearly) the same keys.
  void start(const Shape& a, const Strided4<const T>& query, int64_t b, int64_t h) {
    memset(q, 0, size_t(round_up(a.rows, kRows) * a.width) * sizeof(Factor<T>));
    memset(o, 0, size_t(a.rows * a.width) * 4);
    for (int64_t r = 0; r < round_up(a.rows, kRows); ++r) m[r] = -INFINITY, l[r] = 0;
    for (int64_t r = 0; r < a.rows; ++r) {
      const T* from = query.at(b, h * a.group + r % a.group, r / a.group);
      Factor<T>* to = q + r * a.width;
      if constexpr (std::is_same_v<Factor<T>, T>) {
        memcpy(to, from, size_t(a.d) * sizeof(T));
      } else {
        for (int64_t c = 0; c < a.d; c += kPair) {
          vreg x, y;
          if (c + kPair <= a.d) load2(from + c, x, y);
          else load2_tail(from + c, a.d - c, x, y);
          store(to + c, x), store(to + c + kLanes, y);
        }
      }
    }
#if defined(AUTOSEL_AMX)
    if constexpr (std::is_same_v<T, bf16>)
      if (tiles) pair_queries(q, padded, a.width, a.d, pairs);
#endif
  }

#if defined(AUTOSEL_AMX)
  // `tile`, if all rows see all keys.
  template <class Rows>
  void tile_by_amx(const Shape& a, int64_t n, const Rows& k, const Rows& v, Coming<Rows> coming) {
    tile_scores(pairs, padded, k, n, a.d, s, ld, room, coming);
    for (int64_t r0 = 0; r0 < a.rows; r0 += kRows) {
      float keep[kRows];
      soften<T, kRows>(s + r0 * ld, ld, n, nullptr, nullptr, a.scale, a.softcap, m + r0, l + r0, keep,
                       [&](int64_t slot) {
                         if (slot % 2) coming.ask();
                       });
      for (int64_t r = r0; r < r0 + kRows && r < a.rows; ++r)
        for (int64_t c = 0; c < a.d; c += kLanes)
          store(o + r * a.width + c, load(o + r * a.width + c) * splat(keep[r - r0]));
    }
    const T* p = reinterpret_cast<const T*>(s);
    int64_t c = 0;
    for (; c + 2 * kPair <= a.d; c += 2 * kPair) tile_gather<2>(o, a.width, p, 2 * ld, v, n, c, coming);
    if (c < a.d) tile_gather<1>(o, a.width, p, 2 * ld, v, n, c, coming);
  }
#endif

  // Keys [first, first + n) of a sequence of `length` keys.
  template <class Rows>
  void tile(const Shape& a, int64_t length, int64_t first, int64_t n, Rows k, Rows v, Ahead<Rows> next_k,
            Ahead<Rows> next_v) {
    const int64_t row_bytes = a.d * int64_t(sizeof(T));
#if defined(AUTOSEL_AMX)
    if constexpr (std::is_same_v<T, bf16>) {
      const bool all_see = first + n <= length - a.positions + 1 && (a.window <= 0 || length - a.window <= first);
      if (tiles && all_see)
        return tile_by_amx(a, n, k, v, Coming<Rows>{next_k.rows, next_v.rows, next_k.n, row_bytes});
    }
#endif
    for (int64_t r0 = 0; r0 < a.rows; r0 += kRows) {
      int64_t rows = a.rows - r0 < kRows ? a.rows - r0 : kRows, begin[kRows] = {}, end[kRows] = {};
      bool whole = true, some = false;
      for (int64_t r = 0; r < rows; ++r) {
        int64_t position = length - a.positions + (r0 + r) / a.group;
        int64_t lo = a.window > 0 ? position - a.window + 1 - first : 0, hi = position + 1 - first;
        begin[r] = lo < 0 ? 0 : lo > n ? n : lo, end[r] = hi < 0 ? 0 : hi > n ? n : hi;
        whole = whole && begin[r] == 0 && end[r] == n;
        some = some || begin[r] < end[r];
      }
      if (!some) continue;
      scores<T>(q + r0 * a.width, a.width, k, n, a.d, s, ld, next_k);
      float keep[kRows];
      soften<T, kRows>(s, ld, n, whole ? nullptr : begin, end, a.scale, a.softcap, m + r0, l + r0, keep,
                       [&](int64_t t) { fetch<1>(next_v.rows, t, next_v.n, 0, row_bytes); });
      const Factor<T>* p = reinterpret_cast<const Factor<T>*>(s);
      int64_t p_ld = ld * int64_t(sizeof(float) / sizeof(Factor<T>));
      if (whole) {
        gather_rows<T>(rows, o + r0 * a.width, a.width, p, p_ld, v, n, a.d, keep, next_v);
      } else {
        for (int64_t r = 0; r < rows; ++r)
          if (begin[r] < end[r])
            gather_rows<T>(1, o + (r0 + r) * a.width, a.width, p + r * p_ld + begin[r], p_ld, v.from(begin[r]),
                           end[r] - begin[r], a.d, keep + r, next_v);
      }
      next_k.n = next_v.n = next_k.again = next_v.again = 0;  // other blocks find the tile in the cache
    }
  }
};

// Writes rows o / l; a row that sees no key (its position is before the first) is zero.
template <class T>
static void finish(const Shape& a, const Strided4<T>& out, int64_t b, int64_t h, int64_t length, const float* o,
                   const float* l) {
  for (int64_t r = 0; r < a.rows; ++r) {
    T* to = out.at(b, h * a.group + r % a.group, r / a.group);
    bool blind = length - a.positions + r / a.group < 0;
    vreg by = splat(blind ? 0.0f : 1.0f / l[r]);
    for (int64_t c = 0; c < a.d; c += kPair) {
      vreg x = load(o + r * a.width + c) * by, y = load(o + r * a.width + c + kLanes) * by;
      if (blind) x = y = vreg{};
      T buffer[kPair];
      if (c + kPair <= a.d) store2(to + c, x, y);
      else store2(buffer, x, y), memcpy(to + c, buffer, size_t(a.d - c) * sizeof(T));
    }
  }
}

// --- the whole call --------------------------------------------------------------------------------------------------

struct Lengths {
  const int32_t* data;  // nullptr: every sequence has max_len keys
  int64_t stride, max_len;
  Lengths(const Optional<TensorView>& t, int64_t longest, int64_t room)
      : data(t.has_value() ? autosel::data<int32_t>(t.value()) : nullptr),
        stride(t.has_value() ? t.value().stride(0) : 0), max_len(longest < room ? longest : room) {}
  Lengths(const int32_t* one_a_sequence, int64_t room) : data(one_a_sequence), stride(1), max_len(room) {}
  int64_t of(int64_t b) const {  // never more than the cache holds, whatever the tensor contains
    int64_t n = data ? data[b * stride] : max_len;
    return n < 0 ? 0 : n > max_len ? max_len : n;
  }
};

struct Sequence {
  int64_t length, low, tiles, start;  // first key any row sees; tiles a KV head; first tile in the line of all tiles
};

struct Part {  // one unit's unfinished rows: o[rows][width], m[rows], l[rows] behind it
  int64_t unit;
  bool used;
};

// Tiles of a contiguous cache; `tiles` has room for two a rank.
template <class T> struct Contiguous {
  Strided4<const T> keys, values;
  struct Tile { const T *k, *v; };
  Tile (*tiles)[2];
  void fill(int rank, int slot, int64_t b, int64_t h, int64_t first, int64_t) const {
    tiles[rank][slot] = {keys.at(b, h, first), values.at(b, h, first)};
  }
  Spaced<T> k(int rank, int slot) const { return {tiles[rank][slot].k, keys.s2}; }
  Spaced<T> v(int rank, int slot) const { return {tiles[rank][slot].v, values.s2}; }
};

// The threads' shares of the work. `sequences` has room for a.batch.
struct Cut {
  Sequence* sequences;
  int64_t total, threads;  // tiles in all; threads that have a share of them: the first ranks

  Cut(const Shape& a, const Lengths& lengths, int64_t most_threads, int64_t chunk, Sequence* room)
      : sequences(room), total(0), threads(most_threads) {
    int64_t keys = 0;
    for (int64_t b = 0; b < a.batch; ++b) {
      int64_t length = lengths.of(b);
      int64_t low = a.window > 0 ? length - a.positions - a.window + 1 : 0;
      low = low < 0 ? 0 : low;
      sequences[b] = {length, low, (length - low + a.tile - 1) / a.tile, total};
      total += sequences[b].tiles * a.kv_heads, keys += (length - low) * a.kv_heads;
    }
    int64_t worth = chunk > 0 ? keys / chunk : keys;
    threads = threads < worth ? threads : worth > 1 ? worth : 1;
    threads = threads < total ? threads : total;
  }

  int64_t begin(int64_t rank) const { return total * rank / threads; }

  int64_t of(const Shape& a, int64_t i) const {  // the sequence that tile i of the line belongs to
    int64_t lo = 0, hi = a.batch - 1;
    while (lo < hi) {
      int64_t mid = (lo + hi + 1) / 2;
      if (sequences[mid].start <= i) lo = mid;
      else hi = mid - 1;
    }
    return lo;
  }
};

// Memory for unfinished units: two parts per thread, `floats` each.
struct Unfinished {
  Part* parts;
  float* partial;
  size_t floats;

  static size_t floats_of(const Shape& a) { return size_t(a.rows * (a.width + 2)); }
  static size_t bytes(const Shape& a, int64_t threads) {
    return size_t(round_up(2 * threads * int64_t(sizeof(Part)), 64)) + size_t(2 * threads) * floats_of(a) * 4;
  }
  Unfinished(const Shape& a, int64_t threads, char* memory)
      : parts(reinterpret_cast<Part*>(memory)),
        partial(reinterpret_cast<float*>(memory + round_up(2 * threads * int64_t(sizeof(Part)), 64))),
        floats(floats_of(a)) {}
  void clear(int64_t rank) const { parts[2 * rank].used = parts[2 * rank + 1].used = false; }
};

// One thread's tiles [begin, end), after its parts were cleared; it prefetches up to `beyond` >= end. source.fill(rank,
// slot, b, h, first, n) readies a tile's rows; source.k(rank, slot) and source.v(rank, slot) give them. ready(b, h,
// last) is called before the queries of (b, h) are read, and before its keys are: `last` if the newest key is among
// those that this thread reads.
template <class T, class Source, class Ready>
static void attend_share(const Shape& a, const Cut& cut, const Unfinished& saved, const Strided4<const T>& query,
                         const Strided4<T>& out, int64_t prefetch, const Source& source, int64_t begin, int64_t end,
                         int64_t beyond, int rank, const Ready& ready) {
  Bench<T> bench(a);
  AttentionTiles tiles(bench.tiles ? a.rows : 0);
  auto fill = [&](int64_t i) -> int64_t {  // readies tile i in slot i & 1; returns its keys
    int64_t b = cut.of(a, i);
    const Sequence& q = cut.sequences[b];
    int64_t h = (i - q.start) / q.tiles, first = q.low + (i - q.start) % q.tiles * a.tile;
    int64_t n = q.length - first < a.tile ? q.length - first : a.tile;
    source.fill(rank, int(i & 1), b, h, first, n);
    return n;
  };
  int64_t n = fill(begin);
  for (int64_t i = begin; i < end;) {
    int64_t b = cut.of(a, i);
    const Sequence& q = cut.sequences[b];
    int64_t h = (i - q.start) / q.tiles, from = (i - q.start) % q.tiles;
    int64_t to = from + (end - i) < q.tiles ? from + (end - i) : q.tiles;
    ready(b, h, to == q.tiles);
    bench.start(a, query, b, h);
    for (int64_t tile = from; tile < to; ++tile, ++i) {
      int slot = int(i & 1);
      int64_t next = i + 1 < beyond ? fill(i + 1) : 0, asked = prefetch ? next : 0;
      using Rows = decltype(source.k(rank, slot));
      bench.tile(a, q.length, q.low + tile * a.tile, n, source.k(rank, slot), source.v(rank, slot),
                 Ahead<Rows>{source.k(rank, slot ^ 1), asked, prefetch, 0},
                 Ahead<Rows>{source.v(rank, slot ^ 1), asked, prefetch, softening_slots(kRows, n)});
      n = next;
    }
    if (from == 0 && to == q.tiles) {
      finish(a, out, b, h, q.length, bench.o, bench.l);
      continue;
    }
    int64_t part = 2 * rank + (from == 0);  // a unit's beginning is a range's last piece, any other its first
    saved.parts[part] = {b * a.kv_heads + h, true};
    float* save = saved.partial + size_t(part) * saved.floats;
    memcpy(save, bench.o, size_t(a.rows * a.width) * 4);
    memcpy(save + a.rows * a.width, bench.m, size_t(a.rows) * 4);
    memcpy(save + a.rows * (a.width + 1), bench.l, size_t(a.rows) * 4);
  }
}

// After all shares are done: the thread `leader`, which has the beginning of a unit, merges the ranges that continue
// it.
template <class T>
static void attend_merge(const Shape& a, const Cut& cut, const Unfinished& saved, const Strided4<T>& out,
                         int64_t leader) {
  const Part* parts = saved.parts;
  if (!parts[2 * leader + 1].used) return;
  int64_t unit = parts[2 * leader + 1].unit;
  float* sum = saved.partial + size_t(2 * leader + 1) * saved.floats;
  float *sum_m = sum + a.rows * a.width, *sum_l = sum_m + a.rows;
  for (int64_t j = leader + 1; j < cut.threads && parts[2 * j].used && parts[2 * j].unit == unit; ++j) {
    const float* add = saved.partial + size_t(2 * j) * saved.floats;
    const float *add_m = add + a.rows * a.width, *add_l = add_m + a.rows;
    for (int64_t r = 0; r < a.rows; ++r) {
      float m = add_m[r] > sum_m[r] ? add_m[r] : sum_m[r], base = m == -INFINITY ? 0.0f : m;
      float old = expf(sum_m[r] - base), fresh = expf(add_m[r] - base);
      for (int64_t c = 0; c < a.width; c += kLanes)
        store(sum + r * a.width + c,
              fma(load(add + r * a.width + c), splat(fresh), load(sum + r * a.width + c) * splat(old)));
      sum_l[r] = sum_l[r] * old + add_l[r] * fresh, sum_m[r] = m;
    }
  }
  int64_t b = unit / a.kv_heads;
  finish(a, out, b, unit % a.kv_heads, cut.sequences[b].length, sum, sum_l);
}

template <class T, class Source>
static void attend(const Shape& a, const Strided4<const T>& query, const Strided4<T>& out, const Lengths& lengths,
                   int64_t threads, int64_t chunk, int64_t prefetch, const Source& source) {
  static thread_local Scratch scratch;
  if (threads > 255) threads = 255;
  if (threads < 1) threads = 1;
  size_t head = size_t(round_up(a.batch * int64_t(sizeof(Sequence)), 64));
  char* memory = scratch.get<char>(int64_t(head + Unfinished::bytes(a, threads)));
  Cut cut(a, lengths, threads, chunk, reinterpret_cast<Sequence*>(memory));
  Unfinished saved(a, threads, memory + head);
  for (int64_t b = 0; b < a.batch; ++b)
    if (cut.sequences[b].length == 0)
      for (int64_t h = 0; h < a.q_heads; ++h)
        for (int64_t s = 0; s < a.positions; ++s) memset(out.at(b, h, s), 0, size_t(a.d) * sizeof(T));
  if (cut.total == 0) return;
  threads = cut.threads;
  for (int64_t i = 0; i < threads; ++i) saved.clear(i);
  parallel(threads, cut.total, 1, [&](int64_t begin, int64_t end, int rank) {
    attend_share(a, cut, saved, query, out, prefetch, source, begin, end, end, rank, [](int64_t, int64_t, bool) {});
  });
  // With few threads there is little to add, so there is no second fork.
  parallel(threads > 8 ? threads : 1, threads, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t leader = begin; leader < end; ++leader) attend_merge(a, cut, saved, out, leader);
  });
}

template <class T> static inline Strided4<T> strided4(const TensorView& t) {
  return {data<std::remove_const_t<T>>(t), t.stride(0), t.stride(1), t.stride(2)};
}

static inline bool is_int32(const TensorView& t) { return t.dtype().code == kDLInt && t.dtype().bits == 32; }

// q, o [B,Hq,S,D] and lengths[B] in the form that every cached attention takes.
static inline void check_queries(const TensorView& q, const TensorView& o, const Optional<TensorView>& lengths,
                                 int64_t kv_heads, int64_t d) {
  AUTOSEL_CHECK(q.ndim() == 4 && o.ndim() == 4, "attention takes q[B,Hq,S,D] and o[B,Hq,S,D]");
  for (int i = 0; i < 4; ++i) AUTOSEL_CHECK(q.size(i) == o.size(i), "attention: q and o differ in size");
  AUTOSEL_CHECK(q.size(3) == d && d > 0, "attention: head widths of q and the cache differ");
  AUTOSEL_CHECK(kv_heads > 0 && q.size(1) % kv_heads == 0, "attention: query heads are no multiple of KV heads");
  AUTOSEL_CHECK(q.stride(3) == 1 && o.stride(3) == 1, "attention: last dimension not contiguous");
  AUTOSEL_CHECK(same_dtype(q, o), "attention: dtypes differ");
  if (lengths.has_value()) {
    const TensorView& n = lengths.value();
    AUTOSEL_CHECK(n.ndim() == 1 && n.size(0) == q.size(0) && is_int32(n), "attention: lengths must be int32 [B]");
  }
}

static inline Shape shape_of(const TensorView& q, int64_t kv_heads, double scale, int64_t window, double softcap,
                             int64_t tile) {
  Shape a{};
  a.batch = q.size(0), a.q_heads = q.size(1), a.kv_heads = kv_heads, a.positions = q.size(2), a.d = q.size(3);
  a.group = a.q_heads / kv_heads, a.rows = a.group * a.positions, a.width = round_up(a.d, kPair);
  a.scale = float(scale == 0 ? 1.0 / sqrt(double(a.d)) : scale), a.softcap = float(softcap);
  a.window = window, a.tile = tile < kLanes ? kLanes : round_up(tile, kLanes);
  return a;
}

}  // namespace attention
}  // namespace autosel
