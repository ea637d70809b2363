// norm_qkv_coded   y = rmsnorm(x) @ w^T      x[M,d], norm_weight[d], codes and scales of w[N,d] -> y[M,N]
//
// bytes   N d (bits / 8 + scale / group) + (M d + d + M N) b      FLOPs   2 M N d + 4 M d
// roofline at M=1, d=4096, N=6144, on two cores of Zen 4 reading 37 GB/s: 25 MB (int8) is 0.68 ms.
// knobs   threads, rows (M <= 8) or k_block, m_block (knobs/cpu/linear.py). As norm_qkv.cpp, with the weights of coded.h.
#include "coded_block.h"

namespace autosel {

static void norm_qkv_coded(TensorView x, TensorView norm_weight, TensorView codes, TensorView scales, double eps,
                          double offset, TensorView y, int64_t threads, int64_t rows, int64_t k_block, int64_t m_block) {
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    auto weights = coded_matrix<OnlyFormat>(codes, scales, "w", -1, from.columns);
    auto to = matrix<T>(y, "y", x, from.rows, weights.rows);
    auto scale = vector<const T>(norm_weight, "norm_weight", x, from.columns);
    Normalised<T> normalised{from, scale, float(eps), float(offset)};
    project_coded<T, 1>(normalised, from.rows, &weights, threads, rows, k_block, m_block,
                        [&](int, int64_t i, int64_t n, int64_t count, const float* const* v) {
                          store_some(to.row(i) + n, load(v[0]), count);
                        });
  });
}

}  // namespace autosel

AUTOSEL_EXPORT(norm_qkv_coded, autosel::norm_qkv_coded);
