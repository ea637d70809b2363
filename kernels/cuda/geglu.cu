// geglu   y = gelu(gate) * up; tanh 0: gelu(g) = g/2 (1 + erf(g / sqrt 2)); tanh 1: its tanh approximation
//                                                                                      gate[M,I], up[M,I] -> y[M,I]
//
// bytes   3 M I b (b = bytes an element)      FLOPs   10 M I
// roofline at M=1, I=6912, bf16 on an H200: 41 KB at 4.3 TB/s are 10 ns; a graph node and two latencies are 2.8 us.
// knobs   grid = ceil(M I b / 16 / 256), 256 threads, one vector each (knobs/gpu/rows.py); pdl: a programmatic
//         dependent.
// design  gated.cuh; forms of gelu that keep their digits for negative gates: activation.cuh.
// status  compiled and emulated; not yet run on silicon
#include "gated.cuh"

namespace autosel {

static void geglu(TensorView gate, TensorView up, int64_t tanh, TensorView y, int64_t grid, int64_t pdl) {
  if (tanh) gated<kGeluTanh>(gate, up, y, grid, pdl);
  else gated<kGeluErf>(gate, up, y, grid, pdl);
}

}  // namespace autosel

AUTOSEL_EXPORT(geglu, autosel::geglu);
