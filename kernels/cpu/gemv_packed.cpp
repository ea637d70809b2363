// gemv_packed   y = x @ w^T (+ bias) (+ residual) from lossless 12-bit weights
//                                   x[M,K], w[N,K], packed bytes of w, bias[N], residual[M,N] -> y[M,N]
//
// bytes   1.5 N K and some, + (M K + M N + ...) b, b bytes an element      FLOPs   2 M N K
// roofline at M=1, N=K=4096 on two cores of Zen 4 reading 37 GB/s: 25.2 MB is 0.68 ms; w itself is 33.6 MB.
// knobs   threads, rows (knobs/cpu/linear.py): those of gemv; the results have the same bits.
// The method and its figures: packed.h. If the packed bytes are missing or stale, it works as gemv. Also exports `pack`
// and `compare`, which make and check packed bytes.
#include "pack.h"

namespace autosel {

static void gemv_packed(TensorView x, TensorView w, Optional<TensorView> packed, Optional<TensorView> bias,
                        Optional<TensorView> residual, TensorView y, int64_t threads, int64_t rows) {
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    auto weights = matrix<const T>(w, "w", x, -1, from.columns);
    auto to = matrix<T>(y, "y", x, from.rows, weights.rows);
    auto add = residual ? matrix<const T>(*residual, "residual", x, from.rows, weights.rows) : Matrix<const T>{};
    const T* b = bias ? vector<const T>(*bias, "bias", x, weights.rows) : nullptr;
    stream_packed<T, 1>(from, from.rows, &weights, &packed, threads, rows,
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

AUTOSEL_EXPORT(gemv_packed, autosel::gemv_packed);
