// Shared beginning of both products' entries: check the operands of y = x @ w^T (+ bias) (+ residual), and find out
// whether rows may be read 16 bytes at a time.
#pragma once
#include "plain.cuh"

#if defined(AUTOSEL_FP16)
#define AUTOSEL_HALF f16
#else
#define AUTOSEL_HALF bf16
#endif

namespace autosel {

using Half = AUTOSEL_HALF;  // the build's storage type

struct Operands {
  Matrix<const Half> x, w;
  Matrix<Half> y;
  Extras<Half> extras;
};

// Raises ValueError for operands that do not match, TypeError for another dtype than the build's.
inline Operands operands(const TensorView& x, const TensorView& w, const Optional<TensorView>& bias,
                         const Optional<TensorView>& residual, const TensorView& y) {
  const bool right = std::is_same<Half, bf16>::value ? is(x, kDLBfloat, 16) : is(x, kDLFloat, 16);
  if (!right) AUTOSEL_THROW(TypeError) << "dtype must be bfloat16 or float16, and the build's";
  auto from = matrix<const Half>(x, "x", x);
  auto weights = matrix<const Half>(w, "w", x, -1, from.columns);
  const int64_t n = weights.rows;
  AUTOSEL_CHECK(from.rows >= 1 && n >= 1 && from.columns >= 1, "a projection of nothing");
  return {from, weights, matrix<Half>(y, "y", x, from.rows, n),
          {bias ? vector<const Half>(*bias, "bias", x, n) : nullptr,
           residual ? matrix<const Half>(*residual, "residual", x, from.rows, n) : Matrix<const Half>{}}};
}

// Return true if rows are aligned to 16 bytes and do not overlap, as vectors and TMA's boxes need.
template <class T> bool regular(const Matrix<T>& m) {
  return m.at == nullptr || (aligned(m) && m.columns % kVec<T> == 0 && (m.rows <= 1 || m.stride >= m.columns));
}

inline bool regular(const Operands& o) {
  return regular(o.x) && regular(o.w) && regular(o.y) && regular(o.extras.residual) && aligned(o.extras.bias);
}

}  // namespace autosel
