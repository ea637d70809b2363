// Up to four query rows over one tile of keys: scores, online softmax, weights V, and what is prefetched meanwhile.
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
