// gate_up   h = rmsnorm(x); y = act(h @ w_gate^T) * (h @ w_up^T)
//                                                  x[M,d], norm_weight[d], w_gate[I,d], w_up[I,d] -> y[M,I]
//
// act: 0 silu, 1 gelu (erf), 2 gelu (tanh)     bytes   2 I d b + (M d + d + M I) b      FLOPs   4 M I d + 4 M d + 5 M I
// roofline at M=1, d=4096, I=14336, bf16 on an H200: 235 MB at 4.3 TB/s are 54.6 us; three kernels instead of one would be
// two nodes and their latencies more, 5.6 us.
// knobs   as gemv.cu (knobs/gpu/gemv.py), with AUTOSEL_ROWS and AUTOSEL_UNROLL counting the rows and loads of both
//         matrices.
// design  project.cuh, with the norm of norm_qkv.cu. A warp takes matching rows of gate and up: x is read and widened
//         once for both, and the product needs no exchange.
// status  compiled and emulated; not yet run on silicon
#include "activation.cuh"
#include "project.cuh"

namespace autosel {
namespace {

template <class T> struct Gate {
  Matrix<T> y;
  int activation;
  __device__ __forceinline__ void operator()(int64_t m, int64_t n, const float (&v)[2]) const {
    y.row(m)[n] = narrow<T>(activate(activation, v[0]) * v[1]);
  }
};

template <class T, int M, bool Aligned>
__global__ void __launch_bounds__(kThreads, kResident<Aligned>)
    gate_up_rows(Matrix<const T> x, const T* gain, float eps, float offset, Weights<T, 2> w, Gate<T> gate) {
  release_dependents();
  Projector<T, T, 2, M, Aligned> projector(w);
  Normed<T, M, Aligned> source(x, int(blockIdx.y) * kMostRows, gain, eps, offset);
  projector.run(source, gate);
}

void gate_up(TensorView x, TensorView norm_weight, TensorView w_gate, TensorView w_up, double eps, double offset,
             int64_t activation, TensorView y, int64_t grid, int64_t split, int64_t pdl) {
  AUTOSEL_CHECK(activation >= kSilu && activation <= kGeluTanh, "activation is " << activation << ", expected 0, 1 or 2");
  Plan plan{grid, split, pdl != 0};
  check_plan(plan);
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    auto first = matrix<const T>(w_gate, "w_gate", x, -1, from.columns);
    const int64_t n = first.rows;
    Weights<T, 2> weights{{first, matrix<const T>(w_up, "w_up", x, n, from.columns)}, int(split)};
    const T* gain = vector<const T>(norm_weight, "norm_weight", x, from.columns);
    Gate<T> gate{matrix<T>(y, "y", x, from.rows, n), int(activation)};
    check_sizes(from, weights.part[0]);
    Stream stream(x);
    const bool vectorised = aligned(from) && aligned(first) && aligned(weights.part[1]) && aligned(gain);
    by_rows(from.rows, [&](auto rows) {
      by_flag(vectorised, [&](auto is_aligned) {
        constexpr int M = decltype(rows)::value;
        constexpr bool kAligned = decltype(is_aligned)::value;
        launch(shape_of<Projector<T, T, 2, M, kAligned>>(plan, n, from.rows), stream, gate_up_rows<T, M, kAligned>, from,
               gain, float(eps), float(offset), weights, gate);
      });
    });
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(gate_up, autosel::gate_up);
