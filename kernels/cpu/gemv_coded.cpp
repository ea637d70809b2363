// gemv_coded   y = x @ w^T (+ bias) (+ residual) from codes and scales
//                                       x[M,K], codes and scales of w[N,K], bias[N], residual[M,N] -> y[M,N]
//
// bytes   (bits / 8 + scale / group) N K + (M K + M N + ...) b, b bytes an element of x      FLOPs   2 M N K
// roofline at M=1, N=4096, K=14336, on two cores of Zen 4 reading 60 GB/s: int8 per row 0.98 ms, int4-g128 0.50 ms.
// knobs   threads, rows (knobs/cpu/linear.py). A build serves one format; the method and its figures: coded.h.
#include "coded.h"

namespace autosel {

static void gemv_coded(TensorView x, TensorView codes, TensorView scales, Optional<TensorView> bias,
                      Optional<TensorView> residual, TensorView y, int64_t threads, int64_t rows) {
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    auto weights = coded_matrix<OnlyFormat>(codes, scales, "w", -1, from.columns);
    auto to = matrix<T>(y, "y", x, from.rows, weights.rows);
    auto add = residual ? matrix<const T>(*residual, "residual", x, from.rows, weights.rows) : Matrix<const T>{};
    const T* b = bias ? vector<const T>(*bias, "bias", x, weights.rows) : nullptr;
    stream_coded<T, 1>(from, from.rows, &weights, threads, rows,
                      [&](int, int64_t i, int64_t n, int64_t count, const float* const* v) {
                        for (int64_t c = 0; c < count; ++c) {
                          float value = v[0][c];
                          if (b) value += widen(b[n + c]);
                          if (add.at) value += widen(add.row(i)[n + c]);
                          to.row(i)[n + c] = narrow<T>(value);
                        }
                      });
  });
}

}  // namespace autosel

AUTOSEL_EXPORT(gemv_coded, autosel::gemv_coded);
