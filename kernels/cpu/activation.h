// SiLU and the two GELUs on vectors of fp32, for swiglu, geglu and gate_up.
//
// Each is x * (a sigmoid or a normal distribution), formed so that nothing cancels: relative errors of a few units of
// fp32 on both sides of zero, where the textbook forms (1 + erf, 1 + tanh) lose all digits of a negative argument.
#pragma once
#include "simd.h"

namespace autosel {

static inline vreg silu(vreg x) { return x / (splat(1.0f) + exp(-x)); }

// 1/2 (1 + tanh u) = 1 / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3).
static inline vreg gelu_tanh(vreg x) {
  vreg u2 = x * fma(x * x, splat(-0.0713548163f), splat(-1.59576912f));
  return x / (splat(1.0f) + exp(u2));
}

// x Phi(x) = max(x, 0) - t Q(t), t = |x|, Q(t) = erfc(t / sqrt 2) / 2 = exp(-t^2 / 2) S(1 / (1 + 0.3 t)).
// S: minimax in relative error over t in [0, 14], 1.7e-7 with these coefficients; beyond 14, Q is 0 in fp32.
static inline vreg gelu_erf(vreg x) {
  const vreg one = splat(1.0f), last = splat(14.0f);
  vreg t = x < vreg{} ? -x : x;
  t = t > last ? last : t;  // NaN stays NaN; infinity must not be multiplied by Q's zero
  vreg s = one / fma(t, splat(0.3f), one);
  vreg square = t * t, rest = fma(t, t, -square);  // t^2 exactly: its rounding, times t^2, would be the error of exp
  vreg q = exp(square * splat(-0.5f));
  q = fma(q, rest * splat(-0.5f), q);
  vreg p = splat(0.0356747732f);
  p = fma(p, s, splat(-0.157203078f));
  p = fma(p, s, splat(0.2063535f));
  p = fma(p, s, splat(-0.0536836423f));
  p = fma(p, s, splat(0.128561631f));
  p = fma(p, s, splat(0.0999134928f));
  p = fma(p, s, splat(0.120753959f));
  p = fma(p, s, splat(0.119629301f));
  vreg positive = x > vreg{} ? x : vreg{};
  return positive - t * (p * s) * q;
}

// gate_up's numbers: 0 silu, 1 gelu (erf), 2 gelu (tanh).
static inline vreg activate(int64_t kind, vreg g) {
  return kind == 0 ? silu(g) : kind == 1 ? gelu_erf(g) : gelu_tanh(g);
}

}  // namespace autosel
