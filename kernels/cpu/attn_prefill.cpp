// prefill_attn   o = softmax(scale q K^T, causal) V over the prompt itself   q[B,Hq,S,D], k/v[B,Hkv,S,D] -> o[B,Hq,S,D]
//
// bytes   2 B (Hq + Hkv) S D b (b = bytes an element)      FLOPs   2 B Hq S^2 D (the causal half of 4)
// roofline at B=1, 32/8 heads, D=128, S=2048, bf16: 34 GFLOP; at 2 x 236 GFLOP/s of dots (Zen 4, 2 cores) 73 ms.
// knobs   threads (knobs/cpu/attention.py: prefill)
// Two passes with a barrier between them. The first packs K and V of each KV head once for all query heads and blocks
// that read them: K is transposed, so that a vector is one channel (a pair, for the bf16 dot) of kLanes keys; V has two
// keys interleaved. In the second, blocks of 48 queries of one head loop over tiles of keys, with a 6 x 4-vector
// register tile for both products (24 sums, 4 of B, 1 of A in 32 registers; 6 x 2 in 16) and online softmax between
// them. Tiles beyond the diagonal or the window are skipped. Threads take blocks one at a time, the longest first; the
// result of a block does not depend on the thread. A key that a query must not see gets weight 0: unlike in decode, it
// must be finite, as the contract says.
#include "attention.h"

namespace autosel {
namespace {

using namespace attention;

constexpr int kMR = 6;
#if defined(AUTOSEL_AVX512)
constexpr int kNV = 4;
#else
constexpr int kNV = 2;
#endif
constexpr int64_t kTile = 64;              // keys per tile: K and V of it fill L1 at D = 128
constexpr int64_t kPanel = kNV * kLanes;   // keys per panel of transposed K
constexpr int64_t kQueries = 8 * kMR;      // queries per block: each tile is read from L2 once for 8 passes from L1
constexpr int64_t kScoreLd = kTile + 16;   // 16 more, so that rows of scores do not share an L1 set
template <class T> constexpr int64_t kDeep = kDot<T> ? 2 : 1;  // elements of the summed dimension per step
static_assert(kTile % kPanel == 0, "whole panels");

// c[kMR][NV vectors] (= c * keep if given, else 0) += a[kMR][steps] b[steps][NV vectors]
template <int NV, class T>
static AUTOSEL_NOINLINE void multiply(const Factor<T>* a, int64_t a_ld, const Factor<T>* b, int64_t b_ld, int64_t steps,
                                      float* c, int64_t c_ld, const float* keep) {
  vreg acc[kMR][NV];
  for (int r = 0; r < kMR; ++r)
    for (int i = 0; i < NV; ++i) acc[r][i] = keep ? load(c + r * c_ld + i * kLanes) * splat(keep[r]) : vreg{};
  for (int64_t k = 0; k < steps; ++k) {
#if defined(AUTOSEL_BF16_DOT)
    if constexpr (kDot<T>) {
      __m512bh x[NV];
      for (int i = 0; i < NV; ++i) x[i] = (__m512bh)_mm512_loadu_si512(b + k * b_ld + i * 2 * kLanes);
      for (int r = 0; r < kMR; ++r) {
        int32_t both;
        memcpy(&both, a + r * a_ld + 2 * k, 4);
        __m512bh w = (__m512bh)_mm512_set1_epi32(both);
        for (int i = 0; i < NV; ++i)
          acc[r][i] = reinterpret_cast<vreg>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc[r][i]), w, x[i]));
      }
    }
#endif
    if constexpr (!kDot<T>) {
      vreg x[NV];
      for (int i = 0; i < NV; ++i) x[i] = load(b + k * b_ld + i * kLanes);
      for (int r = 0; r < kMR; ++r) {
        vreg w = splat(a[r * a_ld + k]);
        for (int i = 0; i < NV; ++i) acc[r][i] = fma(w, x[i], acc[r][i]);
      }
    }
  }
  for (int r = 0; r < kMR; ++r)
    for (int i = 0; i < NV; ++i) store(c + r * c_ld + i * kLanes, acc[r][i]);
}

template <class T>
static void multiply(int vectors, const Factor<T>* a, int64_t a_ld, const Factor<T>* b, int64_t b_ld, int64_t steps,
                     float* c, int64_t c_ld, const float* keep) {
  if (vectors >= 4) return multiply<kNV < 4 ? kNV : 4, T>(a, a_ld, b, b_ld, steps, c, c_ld, keep);
  if (vectors == 3) return multiply<kNV < 3 ? kNV : 3, T>(a, a_ld, b, b_ld, steps, c, c_ld, keep);
  if (vectors == 2) return multiply<2, T>(a, a_ld, b, b_ld, steps, c, c_ld, keep);
  multiply<1, T>(a, a_ld, b, b_ld, steps, c, c_ld, keep);
}

template <class T> static inline Factor<T> factor(T x) {
  if constexpr (kDot<T>) return x;
  else return widen(x);
}

// A head's packed tiles, one after the other: transposed K, then interleaved V.
struct Packing {
  int64_t d, depth, width, k_tile, v_tile, tiles, head;  // depth, width: d rounded up to a step, to a vector
};

template <class T> static Packing packing_of(int64_t s, int64_t d) {
  Packing p{};
  p.d = d, p.depth = round_up(d, kDeep<T>), p.width = round_up(d, kLanes);
  p.k_tile = kTile * p.depth, p.v_tile = kTile * p.width;
  p.tiles = (s + kTile - 1) / kTile, p.head = p.tiles * (p.k_tile + p.v_tile);
  return p;
}

// k: [panel][d / deep][panel keys][deep]; v: [keys / deep][width][deep]; zeros beyond n keys and d channels.
template <class T>
static void pack(const Packing& p, Spaced<T> k, Spaced<T> v, int64_t n, Factor<T>* to) {
  constexpr int64_t deep = kDeep<T>;
  memset(to, 0, size_t(p.k_tile + p.v_tile) * sizeof(Factor<T>));
  for (int64_t t = 0; t < n; ++t) {
    const T* row = k(t);
    Factor<T>* at = to + t / kPanel * kPanel * p.depth + t % kPanel * deep;
    for (int64_t c = 0; c + deep <= p.d; c += deep)
      for (int64_t i = 0; i < deep; ++i) at[c * kPanel + i] = factor(row[c + i]);
    if (p.d % deep) at[(p.d - 1) * kPanel] = factor(row[p.d - 1]);
  }
  to += p.k_tile;
  for (int64_t t = 0; t < n; ++t) {
    const T* row = v(t);
    Factor<T>* at = to + t / deep * p.width * deep + t % deep;
    for (int64_t c = 0; c < p.d; ++c) at[c * deep] = factor(row[c]);
  }
}

// A thread's state: a block of queries, scores (then weights), sums, running maximum and sum of each query.
template <class T> struct Block {
  Factor<T>* q;
  float *s, *o, *m, *l;
  explicit Block(const Packing& p) {
    static thread_local Scratch scratch;
    size_t q_bytes = size_t(round_up(kQueries * p.depth * int64_t(sizeof(Factor<T>)), 64));
    char* at = scratch.get<char>(int64_t(q_bytes) + kQueries * (kScoreLd + p.width + 2) * 4);
    q = reinterpret_cast<Factor<T>*>(at), s = reinterpret_cast<float*>(at + q_bytes);
    o = s + kQueries * kScoreLd, m = o + kQueries * p.width, l = m + kQueries;
  }

  void start(const Packing& p, Spaced<T> queries, int64_t rows) {
    memset(q, 0, size_t(kQueries * p.depth) * sizeof(Factor<T>));
    memset(o, 0, size_t(kQueries * p.width) * 4);
    for (int64_t r = 0; r < kQueries; ++r) m[r] = -INFINITY, l[r] = 0;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < p.d; ++c) q[r * p.depth + c] = factor(queries(r)[c]);
  }

  // Keys [first, first + n) against `rows` queries, the first of which is at position `at`.
  void tile(const Shape& a, const Packing& p, const Factor<T>* packed, int64_t first, int64_t n, int64_t at,
            int64_t rows) {
    const Factor<T>* v = packed + p.k_tile;
    int64_t weights_ld = kScoreLd * int64_t(sizeof(float) / sizeof(Factor<T>));
    for (int64_t r0 = 0; r0 < rows; r0 += kMR) {
      float *scores = s + r0 * kScoreLd, keep[kMR];
      for (int64_t c = 0; c < n; c += kPanel)
        multiply<kNV, T>(q + r0 * p.depth, p.depth, packed + c * p.depth, kPanel * kDeep<T>, p.depth / kDeep<T>,
                         scores + c, kScoreLd, nullptr);
      int64_t begin[kMR], end[kMR];
      for (int64_t r = 0; r < kMR; ++r) {
        int64_t hi = at + r0 + r + 1 - first, lo = a.window > 0 ? hi - a.window : 0;
        begin[r] = lo < 0 ? 0 : lo > n ? n : lo, end[r] = hi < begin[r] ? begin[r] : hi > n ? n : hi;
      }
      soften<T, kMR>(scores, kScoreLd, n, begin, end, a.scale, a.softcap, m + r0, l + r0, keep, [](int64_t) {});
      const Factor<T>* weights = reinterpret_cast<const Factor<T>*>(scores);
      for (int64_t c = 0; c < p.width; c += kPanel) {
        int64_t vectors = (p.width - c) / kLanes;
        multiply<T>(int(vectors < kNV ? vectors : kNV), weights, weights_ld, v + c * kDeep<T>, p.width * kDeep<T>,
                    (n + kDeep<T> - 1) / kDeep<T>, o + r0 * p.width + c, p.width, keep);
      }
    }
  }

  void finish(const Packing& p, T* to, int64_t stride, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) {
      vreg by = splat(1.0f / l[r]);
      int64_t c = 0;
      for (; c + kLanes <= p.d; c += kLanes) store(to + r * stride + c, load(o + r * p.width + c) * by);
      if (c < p.d) store_tail(to + r * stride + c, load(o + r * p.width + c) * by, p.d - c);
    }
  }
};

template <class T>
static void prefill(const Shape& a, const Strided4<const T>& q, const Strided4<const T>& k, const Strided4<const T>& v,
                    const Strided4<T>& o, int64_t threads) {
  static thread_local Scratch scratch;
  int64_t s = a.positions;
  Packing p = packing_of<T>(s, a.d);
  size_t packed_bytes = size_t(a.batch * a.kv_heads * p.head) * sizeof(Factor<T>);
  auto* packed = reinterpret_cast<Factor<T>*>(scratch.get<char>(int64_t(packed_bytes)));
  parallel(threads, a.batch * a.kv_heads * p.tiles, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t head = i / p.tiles, first = i % p.tiles * kTile, b = head / a.kv_heads, h = head % a.kv_heads;
      int64_t n = s - first < kTile ? s - first : kTile;
      pack<T>(p, {k.at(b, h, first), k.s2}, {v.at(b, h, first), v.s2}, n,
              packed + head * p.head + i % p.tiles * (p.k_tile + p.v_tile));
    }
  });

  int64_t blocks = (s + kQueries - 1) / kQueries, heads = a.batch * a.q_heads;
  std::atomic<int64_t> taken{0};
  int64_t workers = threads < blocks * heads ? threads : blocks * heads;
  parallel(workers, workers, 1, [&](int64_t, int64_t, int) {
    Block<T> block(p);
    for (int64_t i; (i = taken.fetch_add(1, std::memory_order_relaxed)) < blocks * heads;) {
      int64_t at = (blocks - 1 - i / heads) * kQueries, b = i % heads / a.q_heads, hq = i % heads % a.q_heads;
      int64_t rows = s - at < kQueries ? s - at : kQueries;
      int64_t low = a.window > 0 && at - a.window + 1 > 0 ? (at - a.window + 1) / kTile : 0;
      const Factor<T>* head = packed + (b * a.kv_heads + hq / a.group) * p.head;
      block.start(p, {q.at(b, hq, at), q.s2}, rows);
      for (int64_t tile = low; tile * kTile < at + rows; ++tile) {
        int64_t first = tile * kTile, n = s - first < kTile ? s - first : kTile;
        block.tile(a, p, head + tile * (p.k_tile + p.v_tile), first, n, at, rows);
      }
      block.finish(p, o.at(b, hq, at), o.s2, rows);
    }
  });
}

void attn_prefill(TensorView q, TensorView k, TensorView v, double scale, int64_t window, double softcap, TensorView o,
                  int64_t threads) {
  AUTOSEL_CHECK(k.ndim() == 4 && v.ndim() == 4, "prefill_attn takes k[B,Hkv,S,D] and v[B,Hkv,S,D]");
  check_queries(q, o, Optional<TensorView>(), k.size(1), k.size(3));
  for (int i = 0; i < 4; ++i) AUTOSEL_CHECK(k.size(i) == v.size(i), "prefill_attn: k and v differ in size");
  AUTOSEL_CHECK(k.size(0) == q.size(0) && k.size(2) == q.size(2), "prefill_attn: q and k differ in size");
  AUTOSEL_CHECK(k.stride(3) == 1 && v.stride(3) == 1, "prefill_attn: last dimension not contiguous");
  AUTOSEL_CHECK(same_dtype(q, k) && same_dtype(q, v), "prefill_attn: dtypes differ");
  by_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    prefill<T>(shape_of(q, k.size(1), scale, window, softcap, kTile), strided4<const T>(q), strided4<const T>(k),
               strided4<const T>(v), strided4<T>(o), threads < 1 ? 1 : threads);
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(attn_prefill, autosel::attn_prefill);
