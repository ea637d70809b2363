// gated units   y[m,:] = activation(gate[m,:]) * up[m,:]              gate[M,I], up[M,I] -> y[M,I]; shared by swiglu, geglu
//
// fp32 throughout, one rounding at the store; each element is read before it is written: y may be gate or up itself.
#pragma once
#include "activation.h"
#include "tensor.h"

namespace autosel {

template <class T, class Activation>
static void gated_row(const T* gate, const T* up, T* y, int64_t n, const Activation& activation) {
  constexpr int W = kLanes;
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {  // two independent chains: the polynomials are latency-bound
    vreg a = activation(load(gate + i)), b = activation(load(gate + i + W));
    vreg u = load(up + i), v = load(up + i + W);
    store(y + i, a * u), store(y + i + W, b * v);
  }
  for (; i + W <= n; i += W) store(y + i, activation(load(gate + i)) * load(up + i));
  if (i < n) store_tail(y + i, activation(load_tail(gate + i, n - i)) * load_tail(up + i, n - i), n - i);
}

// Shares are runs of elements over all rows, so that a single long row is also divided.
template <class Activation>
static void gated(TensorView gate, TensorView up, TensorView y, int64_t threads, const Activation& activation) {
  AUTOSEL_CHECK(gate.ndim() == 2 && up.ndim() == 2 && y.ndim() == 2, "a gated unit takes gate[M,I], up[M,I], y[M,I]");
  int64_t m = gate.size(0), n = gate.size(1);
  for (const TensorView* t : {&up, &y})
    AUTOSEL_CHECK(t->size(0) == m && t->size(1) == n, "a gated unit's gate, up and y have one size");
  for (const TensorView* t : {&gate, &up, &y})
    AUTOSEL_CHECK(n <= 1 || t->stride(1) == 1, "a gated unit's last dimension must be contiguous");
  AUTOSEL_CHECK(same_dtype(gate, up) && same_dtype(gate, y), "a gated unit's dtypes differ");
  by_dtype(gate, [&](auto tag) {
    using T = decltype(tag);
    parallel(threads, m * n, 64, [&](int64_t begin, int64_t end, int) {
      while (begin < end) {
        int64_t row = begin / n, column = begin % n, run = n - column < end - begin ? n - column : end - begin;
        gated_row(data<T>(gate) + row * gate.stride(0) + column, data<T>(up) + row * up.stride(0) + column,
                  data<T>(y) + row * y.stride(0) + column, run, activation);
        begin += run;
      }
    });
  });
}

}  // namespace autosel
