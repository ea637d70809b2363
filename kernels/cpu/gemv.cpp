// gemv   y = x @ w^T (+ bias) (+ residual), few rows of x        x[M,K], w[N,K], bias[N], residual[M,N] -> y[M,N]
//
// bytes   N K b + (M K + M N + ...) b, b bytes an element      FLOPs   2 M N K
// roofline at M=1, N=K=4096, bf16 on two cores of Zen 4 reading 37 GB/s: 33.6 MB is 0.9 ms; the multiplies are 0.02 ms.
// knobs   threads, rows (knobs/cpu/linear.py): `rows` rows of weights are read together, as far as registers and L2
//         allow.
// The method, its figures and the rejected alternatives: dot.h. One rounding: product, bias and residual are summed in
// fp32.
#include "dot.h"

namespace autosel {

static void gemv(TensorView x, TensorView w, Optional<TensorView> bias, Optional<TensorView> residual, TensorView y,
                 int64_t threads, int64_t rows) {
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    auto weights = matrix<const T>(w, "w", x, -1, from.columns);
    auto to = matrix<T>(y, "y", x, from.rows, weights.rows);
    auto add = residual ? matrix<const T>(*residual, "residual", x, from.rows, weights.rows) : Matrix<const T>{};
    const T* b = bias ? vector<const T>(*bias, "bias", x, weights.rows) : nullptr;
    stream<T, 1>(from, from.rows, &weights, threads, rows,
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

AUTOSEL_EXPORT(gemv, autosel::gemv);
