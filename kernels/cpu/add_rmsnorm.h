// One row of add_rmsnorm: what it computes and what its results may alias is said in add_rmsnorm.cpp.
#pragma once
#include "tensor.h"

namespace autosel {

template <class T, bool kSandwich>
static void add_rmsnorm_row(const T* x, const T* residual, const T* w, T* y, T* r, int64_t d, float eps, float offset) {
  constexpr int W = kLanes;
  auto normed = [&](int64_t i) { return kSandwich ? load(x + i) : load(x + i) + load(residual + i); };
  vreg a0{}, a1{}, a2{}, a3{};  // four chains hide the FMA latency
  int64_t i = 0;
  for (; i + 4 * W <= d; i += 4 * W) {
    vreg v0 = normed(i), v1 = normed(i + W), v2 = normed(i + 2 * W), v3 = normed(i + 3 * W);
    a0 = fma(v0, v0, a0), a1 = fma(v1, v1, a1), a2 = fma(v2, v2, a2), a3 = fma(v3, v3, a3);
  }
  for (; i + W <= d; i += W) { vreg v = normed(i); a0 = fma(v, v, a0); }
  if (i < d) {
    vreg v = load_tail(x + i, d - i);
    if (!kSandwich) v += load_tail(residual + i, d - i);
    a0 = fma(v, v, a0);
  }
  const vreg rstd = splat(1.0f / sqrtf(sum((a0 + a1) + (a2 + a3)) / float(d) + eps)), o = splat(offset);
  for (i = 0; i + W <= d; i += W) {
    vreg s = load(residual + i), v = kSandwich ? load(x + i) : load(x + i) + s;
    vreg out = v * rstd * (load(w + i) + o);
    store(y + i, out), store(r + i, kSandwich ? s + out : v);
  }
  if (int64_t n = d - i; n > 0) {
    vreg s = load_tail(residual + i, n), v = kSandwich ? load_tail(x + i, n) : load_tail(x + i, n) + s;
    vreg out = v * rstd * (load_tail(w + i, n) + o);
    store_tail(y + i, out, n), store_tail(r + i, kSandwich ? s + out : v, n);
  }
}

}  // namespace autosel
