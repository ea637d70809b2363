// gemm   y = x @ w^T (+ bias) (+ residual)                      x[M,K], w[N,K], bias[N], residual[M,N] -> y[M,N], any M
//
// bytes   N K b + (M K + M N + ...) b, b bytes an element      FLOPs   2 M N K
// roofline at M=64, N=K=4096, bf16 on two cores of Zen 4: 2.1 GFLOP at 2 x 236 GFLOP/s is 4.6 ms; 34 MB is 0.9 ms.
// knobs   threads, k_block, k_ahead, m_block (knobs/cpu/linear.py): the part of K in L1, the part prefetched into L2,
//         the rows of x that are multiplied by a strip of weights once it is transposed.
// The method, its figures and the rejected alternatives: block.h. One rounding: product, bias and residual are summed
// in fp32.
#include "block.h"

namespace autosel {

static void gemm(TensorView x, TensorView w, Optional<TensorView> bias, Optional<TensorView> residual, TensorView y,
                 int64_t threads, int64_t k_block, int64_t k_ahead, int64_t m_block) {
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    auto weights = matrix<const T>(w, "w", x, -1, from.columns);
    auto to = matrix<T>(y, "y", x, from.rows, weights.rows);
    auto add = residual ? matrix<const T>(*residual, "residual", x, from.rows, weights.rows) : Matrix<const T>{};
    const T* b = bias ? vector<const T>(*bias, "bias", x, weights.rows) : nullptr;
    blocked<T, 1>(from, from.rows, &weights, threads, Walk{k_block, k_ahead, m_block},
                  [&](int, int64_t i, int64_t n, int64_t count, const float* const* v) {
                    vreg value = load(v[0]);
                    if (b) value = value + load_some(b + n, count);
                    if (add.at) value = value + load_some(add.row(i) + n, count);
                    store_some(to.row(i) + n, value, count);
                  });
  });
}

}  // namespace autosel

AUTOSEL_EXPORT(gemm, autosel::gemm);
