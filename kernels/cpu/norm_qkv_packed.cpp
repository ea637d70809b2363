// norm_qkv_packed   y = rmsnorm(x) @ w^T from lossless 12-bit weights
//                                                 x[M,d], norm_weight[d], w[N,d], packed bytes of w -> y[M,N]
//
// bytes   1.5 N d and some, + (M d + d + M N) b, b bytes an element      FLOPs   2 M N d + 4 M d
// roofline at M=1, d=4096, N=6144 on two cores of Zen 4 reading 37 GB/s: 37.7 MB is 1 ms; w itself is 50 MB.
// knobs   threads, rows (knobs/cpu/linear.py): those of norm_qkv for few rows of x; the results have the same bits.
// The method and its figures: packed.h. If the packed bytes are missing or stale, it works as norm_qkv.
#include "fused.h"
#include "pack.h"

namespace autosel {

static void norm_qkv_packed(TensorView x, TensorView norm_weight, TensorView w, Optional<TensorView> packed, double eps,
                            double offset, TensorView y, int64_t threads, int64_t rows) {
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    auto weights = matrix<const T>(w, "w", x, -1, from.columns);
    auto to = matrix<T>(y, "y", x, from.rows, weights.rows);
    auto scale = vector<const T>(norm_weight, "norm_weight", x, from.columns);
    Normalised<T> normalised{from, scale, float(eps), float(offset)};
    stream_packed<T, 1>(normalised, from.rows, &weights, &packed, threads, rows,
                        [&](int, int64_t i, int64_t n, int64_t count, const float* const* v) {
                          store_some(to.row(i) + n, load(v[0]), count);
                        });
  });
}

}  // namespace autosel

AUTOSEL_EXPORT(norm_qkv_packed, autosel::norm_qkv_packed);
