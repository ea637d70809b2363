// norm_qkv   y = rmsnorm(x) @ w^T                                           x[M,d], norm_weight[d], w[N,d] -> y[M,N]
//
// bytes   N d b + (M d + d + M N) b      FLOPs   2 M N d + 4 M d
// roofline at M=1, d=4096, N=6144, bf16 on two cores of Zen 4 reading 37 GB/s: 50 MB is 1.4 ms; the norm itself 1 us.
// knobs   threads, rows (M <= 8) or k_block, k_ahead, m_block (knobs/cpu/linear.py).
// Every thread normalises x for itself (8 KB at M=1): a barrier after the norm of one thread costs as much, and x is
// then in the L2 of each. Multiplying first and scaling by 1/rms afterwards saves nothing, because x is packed in any
// case.
#include "fused.h"

namespace autosel {

static void norm_qkv(TensorView x, TensorView norm_weight, TensorView w, double eps, double offset, TensorView y,
                     int64_t threads, int64_t rows, int64_t k_block, int64_t k_ahead, int64_t m_block) {
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    auto weights = matrix<const T>(w, "w", x, -1, from.columns);
    auto to = matrix<T>(y, "y", x, from.rows, weights.rows);
    auto scale = vector<const T>(norm_weight, "norm_weight", x, from.columns);
    Normalised<T> normalised{from, scale, float(eps), float(offset)};
    project<T, 1>(normalised, from.rows, &weights, Plan{threads, rows, {k_block, k_ahead, m_block}},
                  [&](int, int64_t i, int64_t n, int64_t count, const float* const* v) {
                    store_some(to.row(i) + n, load(v[0]), count);
                  });
  });
}

}  // namespace autosel

AUTOSEL_EXPORT(norm_qkv, autosel::norm_qkv);
