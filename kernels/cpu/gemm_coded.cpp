// gemm_coded   y = x @ w^T (+ bias) (+ residual) from codes and scales, for many rows of x
//                                       x[M,K], codes and scales of w[N,K], bias[N], residual[M,N] -> y[M,N]
//
// bytes   (bits / 8 + scale / group) N K + (M K + M N + ...) b, b bytes an element of x      FLOPs   2 M N K
// roofline at M=512, N=K=4096, bf16 on two cores of Zen 4: 17.2 GFLOP at 2 x 236 GFLOP/s is 36 ms; 8.7 MB (int4) is
//         0.2 ms.
// knobs   threads, k_block, m_block (knobs/cpu/linear.py): the part of K in L1, the rows of x that are multiplied by a
//         strip of weights once it is made. A build serves one format; the method and its figures: coded_block.h.
#include "coded_block.h"

namespace autosel {

static void gemm_coded(TensorView x, TensorView codes, TensorView scales, Optional<TensorView> bias,
                       Optional<TensorView> residual, TensorView y, int64_t threads, int64_t k_block, int64_t m_block) {
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    auto weights = coded_matrix<OnlyFormat>(codes, scales, "w", -1, from.columns);
    auto to = matrix<T>(y, "y", x, from.rows, weights.rows);
    auto add = residual ? matrix<const T>(*residual, "residual", x, from.rows, weights.rows) : Matrix<const T>{};
    const T* b = bias ? vector<const T>(*bias, "bias", x, weights.rows) : nullptr;
    blocked_coded<T, 1>(from, from.rows, &weights, threads, k_block, m_block,
                        [&](int, int64_t i, int64_t n, int64_t count, const float* const* v) {
                          vreg value = load(v[0]);
                          if (b) value = value + load_some(b + n, count);
                          if (add.at) value = value + load_some(add.row(i) + n, count);
                          store_some(to.row(i) + n, value, count);
                        });
  });
}

}  // namespace autosel

AUTOSEL_EXPORT(gemm_coded, autosel::gemm_coded);
