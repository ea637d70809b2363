// lm_head_coded   logits = x @ w^T, or in each row the lowest index of their maximum
//                                          x[M,d], codes and scales of w[V,d] -> logits[M,V] or token[M] int64
//
// bytes   V d (bits / 8 + scale / group) + M d b + (M V b or 8 M)      FLOPs   2 M V d
// roofline at M=1, V=128256, d=4096, on two cores of Zen 4 reading 37 GB/s: 525 MB is 14 ms in int8.
// knobs   threads, rows (M <= 8) or k_block, m_block (knobs/cpu/linear.py). As lm_head.cpp, with the weights of coded.h.

#include "best.h"
#include "coded_block.h"

namespace autosel {

static void lm_head_coded(TensorView x, TensorView codes, TensorView scales, int64_t greedy, TensorView out,
                         int64_t threads, int64_t rows, int64_t k_block, int64_t m_block) {
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    auto weights = coded_matrix<OnlyFormat>(codes, scales, "w", -1, from.columns);
    int64_t m = from.rows;
    if (!greedy) {
      auto to = matrix<T>(out, "logits", x, m, weights.rows);
      return project_coded<T, 1>(from, m, &weights, threads, rows, k_block, m_block,
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
    project_coded<T, 1>(from, m, &weights, threads, rows, k_block, m_block,
                        [&](int rank, int64_t i, int64_t n, int64_t count, const float* const* v) {
                          challenge<T>(best[rank * m + i], n, count, v[0]);
                        });
    for (int64_t i = 0; i < m; ++i) data<int64_t>(out)[i] = best_of(best + i, threads, m).index;
  });
}

}  // namespace autosel

AUTOSEL_EXPORT(lm_head_coded, autosel::lm_head_coded);
