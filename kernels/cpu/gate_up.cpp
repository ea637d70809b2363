// gate_up   h = rmsnorm(x); y = act(h @ w_gate^T) * (h @ w_up^T)
//                                                  x[M,d], norm_weight[d], w_gate[I,d], w_up[I,d] -> y[M,I]
//
// act: 0 silu, 1 gelu (erf), 2 gelu (tanh)     bytes   2 I d b + (M d + d + M I) b      FLOPs   4 M I d + 4 M d + 5 M I
// roofline at M=1, d=4096, I=14336, bf16 on two cores of Zen 4 reading 37 GB/s: 235 MB is 6.3 ms; gate and up alone
// would write and read back 2 I, and read x and normalise it twice.
// knobs   threads, rows (M <= 8) or k_block, k_ahead, m_block (knobs/cpu/linear.py).
// Matching rows of gate and up belong to one thread. For few rows of x: `rows` rows of gate, then the same rows of up,
// each prefetching for the other, so that memory sees two linear streams in turn. For many: a register tile holds both
// side by side.
#include "activation.h"
#include "fused.h"

namespace autosel {

static void gate_up(TensorView x, TensorView norm_weight, TensorView w_gate, TensorView w_up, double eps, double offset,
                    int64_t activation, TensorView y, int64_t threads, int64_t rows, int64_t k_block, int64_t k_ahead,
                    int64_t m_block) {
  AUTOSEL_CHECK(activation >= 0 && activation <= 2, "activation is " << activation << ", expected 0, 1 or 2");
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    auto gate = matrix<const T>(w_gate, "w_gate", x, -1, from.columns);
    Matrix<const T> weights[2] = {gate, matrix<const T>(w_up, "w_up", x, gate.rows, from.columns)};
    auto to = matrix<T>(y, "y", x, from.rows, gate.rows);
    auto scale = vector<const T>(norm_weight, "norm_weight", x, from.columns);
    Normalised<T> normalised{from, scale, float(eps), float(offset)};
    project<T, 2>(normalised, from.rows, weights, Plan{threads, rows, {k_block, k_ahead, m_block}},
                  [&](int, int64_t i, int64_t n, int64_t count, const float* const* v) {
                    store_some(to.row(i) + n, activate(activation, load(v[0])) * load(v[1]), count);
                  });
  });
}

}  // namespace autosel

AUTOSEL_EXPORT(gate_up, autosel::gate_up);
