// The vector functions the kernels share, over arrays, for tests that look at many arguments.
#include "../../kernels/cpu/activation.h"

using namespace autosel;

template <class F> static void map(const float* x, float* y, int64_t n, const F& f) {
  for (int64_t i = 0; i + kLanes <= n; i += kLanes) store(y + i, f(load(x + i)));
}

extern "C" {
int64_t lanes() { return kLanes; }
void map_exp(const float* x, float* y, int64_t n) { map(x, y, n, [](vreg v) { return exp(v); }); }
void map_silu(const float* x, float* y, int64_t n) { map(x, y, n, [](vreg v) { return silu(v); }); }
void map_gelu_tanh(const float* x, float* y, int64_t n) { map(x, y, n, [](vreg v) { return gelu_tanh(v); }); }
void map_gelu_erf(const float* x, float* y, int64_t n) { map(x, y, n, [](vreg v) { return gelu_erf(v); }); }
void widen_bf16(const uint16_t* x, float* y, int64_t n) {
  for (int64_t i = 0; i + kLanes <= n; i += kLanes) store(y + i, load(reinterpret_cast<const bf16*>(x) + i));
}
void widen_f16(const uint16_t* x, float* y, int64_t n) {
  for (int64_t i = 0; i + kLanes <= n; i += kLanes) store(y + i, load(reinterpret_cast<const f16*>(x) + i));
}
void narrow_bf16(const float* x, uint16_t* y, int64_t n) {
  for (int64_t i = 0; i + kLanes <= n; i += kLanes) store(reinterpret_cast<bf16*>(y) + i, load(x + i));
}
void narrow_f16(const float* x, uint16_t* y, int64_t n) {
  for (int64_t i = 0; i + kLanes <= n; i += kLanes) store(reinterpret_cast<f16*>(y) + i, load(x + i));
}
}
