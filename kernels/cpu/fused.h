// The norm before a projection, and the choice of the method: dot.h for few rows of x, block.h for many.
#pragma once
#include "block.h"
#include "dot.h"

namespace autosel {

// rows > 0: stream (M <= 8), with `rows` rows of weights together; rows = 0: blocked, by `walk`.
struct Plan {
  int64_t threads, rows;
  Walk walk;
};

template <class T, int Parts, class X, class Done>
static void project(const X& x, int64_t m, const Matrix<const T>* w, const Plan& plan, const Done& done) {
  if (plan.rows > 0) stream<T, Parts>(x, m, w, plan.threads, plan.rows, done);
  else blocked<T, Parts>(x, m, w, plan.threads, plan.walk, done);
}

// Rows of x on request, normalised once per thread into its own memory: no barrier, and they stay in its L2. If the dot
// takes bf16, this is one rounding (eager composes two); otherwise they stay fp32.
template <class T> struct Normalised {
  Matrix<const T> x;
  const T* weight;
  float eps, offset;

  Matrix<const Wide<T>> operator()(int64_t m0, int64_t m) const {
    static thread_local Scratch scratch;
    Wide<T>* rows = scratch.get<Wide<T>>(m * x.columns);
    for (int64_t i = 0; i < m; ++i) normalise_row(x.row(m0 + i), weight, rows + i * x.columns, x.columns, eps, offset);
    return {rows, m, x.columns, x.columns};
  }
};

}  // namespace autosel
