// swiglu   y = silu(gate) * up, silu(g) = g / (1 + exp(-g))                                gate[M,I], up[M,I] -> y[M,I]
//
// bytes   3 M I b      FLOPs   about 20 M I (one exponential, one division)
// roofline at M=1, I=14336, bf16 on one Zen 4 core (AVX-512, 3.7 GHz): 86 KB from L2 is 1 us; 14336 exponentials 2.6 us
// at the probed 5.6 G/s, divisions 2.4 us: compute-bound (measured 5.4 us), hence threads from the exp rate, not bytes.
// knobs   threads (knobs/cpu/rows.py).
#include "gated.h"

namespace autosel {

static void swiglu(TensorView gate, TensorView up, TensorView y, int64_t threads) {
  gated(gate, up, y, threads, [](vreg x) { return silu(x); });
}

}  // namespace autosel

AUTOSEL_EXPORT(swiglu, autosel::swiglu);
