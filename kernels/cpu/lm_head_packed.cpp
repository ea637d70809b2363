// lm_head_packed   logits = x @ w^T, or in each row the lowest index of their maximum, from lossless 12-bit weights
//                                              x[M,d], w[V,d], packed bytes of w -> logits[M,V] or token[M] int64
//
// bytes   1.5 V d and some, + M d b + (M V b or 8 M), b bytes an element      FLOPs   2 M V d
// roofline at M=1, V=128256, d=4096 on two cores of Zen 4 reading 37 GB/s: 0.79 GB is 21 ms; w itself is 1.05 GB.
// knobs   threads, rows (knobs/cpu/linear.py): those of lm_head for few rows of x; the results have the same bits.
// The method and its figures: packed.h; the greedy choice: lm_head.cpp. If the packed bytes are missing or stale, it
// works as lm_head.

#include "best.h"
#include "pack.h"

namespace autosel {

static void lm_head_packed(TensorView x, TensorView w, Optional<TensorView> packed, int64_t greedy, TensorView out,
                           int64_t threads, int64_t rows) {
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    auto weights = matrix<const T>(w, "w", x, -1, from.columns);
    int64_t m = from.rows;
    if (!greedy) {
      auto to = matrix<T>(out, "logits", x, m, weights.rows);
      return stream_packed<T, 1>(from, m, &weights, &packed, threads, rows,
                                 [&](int, int64_t i, int64_t n, int64_t count, const float* const* v) {
                                   store_some(to.row(i) + n, load(v[0]), count);
                                 });
    }
    DLDataType d = out.dtype();
    AUTOSEL_CHECK(out.ndim() == 1 && out.size(0) == m && d.code == kDLInt && d.bits == 64,
                  "token must be int64[" << m << "]");
    AUTOSEL_CHECK(m == 1 || out.stride(0) == 1, "token: not contiguous");
    static thread_local std::vector<Best> kept;
    kept.assign(size_t(threads * m), Best{0, -1});
    Best* best = kept.data();
    stream_packed<T, 1>(from, m, &weights, &packed, threads, rows,
                        [&](int rank, int64_t i, int64_t n, int64_t count, const float* const* v) {
                          challenge<T>(best[rank * m + i], n, count, v[0]);
                        });
    for (int64_t i = 0; i < m; ++i) data<int64_t>(out)[i] = best_of(best + i, threads, m).index;
  });
}

}  // namespace autosel

AUTOSEL_EXPORT(lm_head_packed, autosel::lm_head_packed);
