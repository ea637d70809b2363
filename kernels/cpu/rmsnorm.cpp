// rmsnorm   y[m,:] = x[m,:] * rsqrt(mean(x[m,:]^2) + eps) * (weight + offset)          x[M,d], weight[d] -> y[M,d]
//
// bytes   2 M d b + d b (b = bytes an element)      FLOPs   4 M d
// roofline at M=1, d=4096, bf16: 24 KB from L1/L2, about 0.3 us; the fork-join of a team costs more, so threads = 1
// unless M*d is large.
// knobs   threads (knobs/cpu/rows.py).
// The row is read twice; the second time it is in L1 up to d = 16k. fp32 throughout, one rounding.
#include "tensor.h"

namespace autosel {

template <class T> static void row(const T* x, const T* w, T* y, int64_t d, float eps, float offset) {
  constexpr int W = kLanes;
  vreg a0{}, a1{}, a2{}, a3{};  // four chains hide the FMA latency
  int64_t i = 0;
  for (; i + 4 * W <= d; i += 4 * W) {
    vreg v0 = load(x + i), v1 = load(x + i + W), v2 = load(x + i + 2 * W), v3 = load(x + i + 3 * W);
    a0 = fma(v0, v0, a0), a1 = fma(v1, v1, a1), a2 = fma(v2, v2, a2), a3 = fma(v3, v3, a3);
  }
  for (; i + W <= d; i += W) { vreg v = load(x + i); a0 = fma(v, v, a0); }
  if (i < d) { vreg v = load_tail(x + i, d - i); a0 = fma(v, v, a0); }
  float rstd = 1.0f / sqrtf(sum((a0 + a1) + (a2 + a3)) / float(d) + eps);
  vreg r = splat(rstd), o = splat(offset);
  for (i = 0; i + W <= d; i += W) store(y + i, load(x + i) * r * (load(w + i) + o));
  if (i < d) store_tail(y + i, load_tail(x + i, d - i) * r * (load_tail(w + i, d - i) + o), d - i);
}

static void rmsnorm(TensorView x, TensorView weight, double eps, double offset, TensorView y, int64_t threads) {
  AUTOSEL_CHECK(x.ndim() == 2 && weight.ndim() == 1 && y.ndim() == 2, "rmsnorm takes x[M,d], weight[d], y[M,d]");
  int64_t m = x.size(0), d = x.size(1);
  AUTOSEL_CHECK(weight.size(0) == d && y.size(0) == m && y.size(1) == d, "rmsnorm: sizes differ");
  AUTOSEL_CHECK(x.stride(1) == 1 && weight.stride(0) == 1 && y.stride(1) == 1, "rmsnorm: last dimension not contiguous");
  AUTOSEL_CHECK(same_dtype(x, weight) && same_dtype(x, y), "rmsnorm: dtypes differ");
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    parallel(threads, m, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i)
        row(data<T>(x) + i * x.stride(0), data<T>(weight), data<T>(y) + i * y.stride(0), d, float(eps), float(offset));
    });
  });
}

}  // namespace autosel

AUTOSEL_EXPORT(rmsnorm, autosel::rmsnorm);
