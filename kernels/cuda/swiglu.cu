// swiglu   y = silu(gate) * up, silu(g) = g / (1 + exp(-g))                            gate[M,I], up[M,I] -> y[M,I]
//
// bytes   3 M I b (b = bytes an element)      FLOPs   5 M I
// roofline at M=1, I=14336, bf16 on an H200: 86 KB at 4.3 TB/s are 20 ns; a graph node and two latencies are 2.8 us.
// knobs   grid = ceil(M I b / 16 / 256), 256 threads, one vector each (knobs/gpu/rows.py); pdl: a programmatic
//         dependent.
// design  gated.cuh. In the epilogue of gate_up it costs nothing; this kernel is for programs that already have gate
//         and up.
// status  compiled and emulated; not yet run on silicon
#include "gated.cuh"

namespace autosel {

static void swiglu(TensorView gate, TensorView up, TensorView y, int64_t grid, int64_t pdl) {
  gated<kSilu>(gate, up, y, grid, pdl);
}

}  // namespace autosel

AUTOSEL_EXPORT(swiglu, autosel::swiglu);
