// add_rmsnorm   sandwich 0 (Llama): r = x + residual; y = rmsnorm(r); new_residual = r
//               sandwich 1 (Gemma): y = rmsnorm(x); new_residual = residual + y
//               sandwich 2 (vLLM):  as 0, y of the unrounded sum, which this kernel normalises in either case
//               x[M,d], residual[M,d], weight[d] -> y[M,d], new_residual[M,d];  rmsnorm as in rmsnorm.cpp
//
// bytes   4 M d b + d b      FLOPs   5 M d
// roofline at M=1, d=4096, bf16: 41 KB, L1 and L2: about 0.4 us, less than a fork-join: threads = 1 until M d pays for it.
// knobs   threads (knobs/cpu/rows.py).
// The sum is formed in fp32 and normalised before it is rounded. It is formed twice, once for the mean square and once
// for the results: a second addition is cheaper than a scratch row, and as each element is read before its own place is
// written, new_residual may be residual itself, and y may be x.
#include "add_rmsnorm.h"

namespace autosel {

static void add_rmsnorm(TensorView x, TensorView residual, TensorView weight, double eps, double offset, int64_t sandwich,
                        TensorView y, TensorView new_residual, int64_t threads) {
  AUTOSEL_CHECK(x.ndim() == 2 && weight.ndim() == 1, "add_rmsnorm takes x[M,d], residual[M,d], weight[d]");
  int64_t m = x.size(0), d = x.size(1);
  AUTOSEL_CHECK(weight.size(0) == d && weight.stride(0) == 1 && same_dtype(x, weight), "add_rmsnorm: weight is not [d]");
  for (const TensorView* t : {&x, &residual, &y, &new_residual}) {
    AUTOSEL_CHECK(t->ndim() == 2 && t->size(0) == m && t->size(1) == d, "add_rmsnorm: sizes differ");
    AUTOSEL_CHECK(d <= 1 || t->stride(1) == 1, "add_rmsnorm: last dimension not contiguous");
    AUTOSEL_CHECK(same_dtype(x, *t), "add_rmsnorm: dtypes differ");
  }
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto one = sandwich == 1 ? add_rmsnorm_row<T, true> : add_rmsnorm_row<T, false>;
    parallel(threads, m, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i)
        one(data<T>(x) + i * x.stride(0), data<T>(residual) + i * residual.stride(0), data<T>(weight),
            data<T>(y) + i * y.stride(0), data<T>(new_residual) + i * new_residual.stride(0), d, float(eps), float(offset));
    });
  });
}

}  // namespace autosel

AUTOSEL_EXPORT(add_rmsnorm, autosel::add_rmsnorm);
