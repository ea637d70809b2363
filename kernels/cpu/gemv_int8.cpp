// gemv_int8   y = (x @ codes^T) * scales (+ bias) (+ residual)
//                                       x[M,K], codes int8[N,K], scales fp32[N], bias[N], residual[M,N] -> y[M,N]
//
// bytes   N K + 4 N + (M K + M N + ...) b, b bytes an element of x      FLOPs   2 M N K
// roofline at M=1, N=K=4096, on two cores of Zen 4 reading 37 GB/s: 16.8 MB is 0.45 ms; the conversions are 0.1 ms.
// knobs   threads, rows (knobs/cpu/linear.py). The method: int8.h and dot.h.
#include "int8.h"

namespace autosel {

static void gemv_int8(TensorView x, TensorView codes, TensorView scales, Optional<TensorView> bias,
                      Optional<TensorView> residual, TensorView y, int64_t threads, int64_t rows) {
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    auto weights = int8_matrix<T>(codes, scales, "w", -1, from.columns);
    auto to = matrix<T>(y, "y", x, from.rows, weights.codes.rows);
    auto add = residual ? matrix<const T>(*residual, "residual", x, from.rows, weights.codes.rows) : Matrix<const T>{};
    const T* b = bias ? vector<const T>(*bias, "bias", x, weights.codes.rows) : nullptr;
    stream_int8<T, 1>(from, from.rows, &weights, threads, rows,
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

AUTOSEL_EXPORT(gemv_int8, autosel::gemv_int8);
