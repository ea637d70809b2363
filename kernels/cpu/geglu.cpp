// geglu   y = gelu(gate) * up; tanh 0: x Phi(x), tanh 1: its tanh approximation (Gemma)    gate[M,I], up[M,I] -> y[M,I]
//
// bytes   3 M I b      FLOPs   about 40 M I with erf, 25 M I with tanh
// roofline at M=1, I=6912 (gemma3-1b), bf16 on one Zen 4 core: 41 KB from L2 is 0.5 us; measured
// 3.1 us with tanh, 4.9 us with erf (a second division and eight more coefficients).
// knobs   threads (knobs/cpu/rows.py).
#include "gated.h"

namespace autosel {

static void geglu(TensorView gate, TensorView up, int64_t tanh, TensorView y, int64_t threads) {
  if (tanh) gated(gate, up, y, threads, [](vreg x) { return gelu_tanh(x); });
  else gated(gate, up, y, threads, [](vreg x) { return gelu_erf(x); });
}

}  // namespace autosel

AUTOSEL_EXPORT(geglu, autosel::geglu);
