// gate_up_packed   h = rmsnorm(x); y = act(h @ w_gate^T) * (h @ w_up^T) from lossless 12-bit weights
//                              x[M,d], norm_weight[d], w_gate[I,d], w_up[I,d] and packed bytes of both -> y[M,I]
//
// act: 0 silu, 1 gelu (erf), 2 gelu (tanh)     bytes   3 I d and some, + (M d + d + M I) b      FLOPs   4 M I d + ...
// roofline at M=1, d=4096, I=14336 on two cores of Zen 4 reading 37 GB/s: 176 MB is 4.8 ms; the weights are 235 MB.
// knobs   threads, rows (knobs/cpu/linear.py): those of gate_up for few rows of x; the results have the same bits.
// The method and its figures: packed.h. If packed bytes of either matrix are missing or stale, it works as gate_up.
#include "activation.h"
#include "fused.h"
#include "pack.h"

namespace autosel {

static void gate_up_packed(TensorView x, TensorView norm_weight, TensorView w_gate, Optional<TensorView> packed_gate,
                           TensorView w_up, Optional<TensorView> packed_up, double eps, double offset,
                           int64_t activation, TensorView y, int64_t threads, int64_t rows) {
  AUTOSEL_CHECK(activation >= 0 && activation <= 2, "activation is " << activation << ", expected 0, 1 or 2");
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    auto gate = matrix<const T>(w_gate, "w_gate", x, -1, from.columns);
    Matrix<const T> weights[2] = {gate, matrix<const T>(w_up, "w_up", x, gate.rows, from.columns)};
    Optional<TensorView> packed[2] = {packed_gate, packed_up};
    auto to = matrix<T>(y, "y", x, from.rows, gate.rows);
    auto scale = vector<const T>(norm_weight, "norm_weight", x, from.columns);
    Normalised<T> normalised{from, scale, float(eps), float(offset)};
    stream_packed<T, 2>(normalised, from.rows, weights, packed, threads, rows,
                        [&](int, int64_t i, int64_t n, int64_t count, const float* const* v) {
                          store_some(to.row(i) + n, activate(activation, load(v[0])) * load(v[1]), count);
                        });
  });
}

}  // namespace autosel

AUTOSEL_EXPORT(gate_up_packed, autosel::gate_up_packed);
