// gate_up_coded   h = rmsnorm(x); y = act(h @ gate^T) * (h @ up^T), gate and up [I,d] of codes and scales
//
// act: 0 silu, 1 gelu (erf), 2 gelu (tanh)
// bytes   2 I d (bits / 8 + scale / group) + (M d + d + M I) b      FLOPs   4 M I d + 4 M d + 5 M I
// roofline at M=1, d=4096, I=14336, on two cores of Zen 4 reading 37 GB/s: 117 MB is 3.2 ms in int8.
// knobs   threads, rows (M <= 8) or k_block, m_block (knobs/cpu/linear.py). As gate_up.cpp, with the weights of coded.h.
#include "activation.h"
#include "coded_block.h"

namespace autosel {

static void gate_up_coded(TensorView x, TensorView norm_weight, TensorView gate_codes, TensorView gate_scales,
                         TensorView up_codes, TensorView up_scales, double eps, double offset, int64_t activation,
                         TensorView y, int64_t threads, int64_t rows, int64_t k_block, int64_t m_block) {
  AUTOSEL_CHECK(activation >= 0 && activation <= 2, "activation is " << activation << ", expected 0, 1 or 2");
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    auto gate = coded_matrix<OnlyFormat>(gate_codes, gate_scales, "w_gate", -1, from.columns);
    Coded weights[2] = {gate, coded_matrix<OnlyFormat>(up_codes, up_scales, "w_up", gate.rows, from.columns)};
    auto to = matrix<T>(y, "y", x, from.rows, gate.rows);
    auto scale = vector<const T>(norm_weight, "norm_weight", x, from.columns);
    Normalised<T> normalised{from, scale, float(eps), float(offset)};
    project_coded<T, 2>(normalised, from.rows, weights, threads, rows, k_block, m_block,
                        [&](int, int64_t i, int64_t n, int64_t count, const float* const* v) {
                          store_some(to.row(i) + n, activate(activation, load(v[0])) * load(v[1]), count);
                        });
  });
}

}  // namespace autosel

AUTOSEL_EXPORT(gate_up_coded, autosel::gate_up_coded);
