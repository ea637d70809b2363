// lm_head   logits = x @ w^T, or in each row the lowest index of their maximum
//                                                         x[M,d], w[V,d] -> logits[M,V] or token[M] int64
//
// bytes   V d b + M d b + (M V b or 8 M)      FLOPs   2 M V d
// roofline at M=1, V=128256, d=4096, bf16 on two cores of Zen 4 reading 37 GB/s: 1.05 GB is 28 ms; a separate argmax
// would write and read 257 KB more.
// knobs   threads, rows (M <= 8) or k_block, k_ahead, m_block (knobs/cpu/linear.py).
// Greedy: each thread keeps the best logit of its own columns; threads are compared in the order of columns, so the
// lowest index wins a tie. Logits are compared after rounding to the dtype, and a NaN beats every number, as in
// torch.argmax(logits): the token is that of a separate argmax if the logits are equal.

#include "best.h"
#include "fused.h"

namespace autosel {

static void lm_head(TensorView x, TensorView w, int64_t greedy, TensorView out, int64_t threads, int64_t rows,
                    int64_t k_block, int64_t k_ahead, int64_t m_block) {
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    auto weights = matrix<const T>(w, "w", x, -1, from.columns);
    int64_t m = from.rows;
    Plan plan{threads, rows, {k_block, k_ahead, m_block}};
    if (!greedy) {
      auto to = matrix<T>(out, "logits", x, m, weights.rows);
      auto keep = [&](int, int64_t i, int64_t n, int64_t count, const float* const* v) {
        store_some(to.row(i) + n, load(v[0]), count);
      };
      return project<T, 1>(from, m, &weights, plan, keep);
    }
    DLDataType d = out.dtype();
    AUTOSEL_CHECK(out.ndim() == 1 && out.size(0) == m && d.code == kDLInt && d.bits == 64,
                  "token must be int64[" << m << "]");
    AUTOSEL_CHECK(m == 1 || out.stride(0) == 1, "token: not contiguous");
    static thread_local std::vector<Best> kept;
    kept.assign(size_t(threads * m), Best{0, -1});
    Best* best = kept.data();
    project<T, 1>(from, m, &weights, plan, [&](int rank, int64_t i, int64_t n, int64_t count, const float* const* v) {
      challenge<T>(best[rank * m + i], n, count, v[0]);
    });
    for (int64_t i = 0; i < m; ++i) data<int64_t>(out)[i] = best_of(best + i, threads, m).index;
  });
}

}  // namespace autosel

AUTOSEL_EXPORT(lm_head, autosel::lm_head);
