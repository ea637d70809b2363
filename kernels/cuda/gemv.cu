// gemv   y = x @ w^T (+ bias) (+ residual), few rows of x        x[M,K], w[N,K], bias[N], residual[M,N] -> y[M,N]
//
// bytes   N K b + (M K + M N + ...) b, b bytes an element      FLOPs   2 M N K
// roofline at M=1, N=K=4096, bf16 on an H200: 33.6 MB at 4.3 TB/s are 7.8 us; a node and two latencies come to it.
// knobs   (knobs/gpu/gemv.py; beta read rate, lambda latency, S SMs; H200 and RTX 5070 Ti)
//   AUTOSEL_UNROLL   U: loads in flight per lane, so that c * threads * 16 B * U >= beta * lambda / S: 4 and 2
//   AUTOSEL_ROWS     R: rows of weights that a warp reads together: L1 gives 64 activations per clock, each used R times
//   grid             c * S CTAs that loop over the rows, or one per group of rows if that is four waves or more
//   split_k          warps that share a row, if N warps alone would hold fewer bytes than beta * lambda: 1 to 8
//   pdl              launched as a programmatic dependent: the first weights are fetched while x is computed
// design  project.cuh. The warps of a split row are in one CTA: no workspace, no second kernel, no atomics.
// idea    wide loads, several in flight, weights before the dependency: msaroufim/megakernels-vs-cuda-graphs; one warp
//         per row: llama.cpp's mmvf.cu.
// status  compiled and emulated; not yet run on silicon
#include "project.cuh"

namespace autosel {
namespace {

template <class T> struct Add {
  Matrix<T> y;
  const T* bias;
  Matrix<const T> residual;
  __device__ __forceinline__ void operator()(int64_t m, int64_t n, const float (&v)[1]) const {
    float sum = v[0];
    if (bias) sum += widen(bias[n]);
    if (residual.at) sum += widen(residual.row(m)[n]);
    y.row(m)[n] = narrow<T>(sum);
  }
};

template <class T, int M, bool Aligned>
__global__ void __launch_bounds__(kThreads, kResident<Aligned>)
    gemv_rows(Matrix<const T> x, Weights<T, 1> w, Add<T> add) {
  release_dependents();
  Projector<T, T, 1, M, Aligned> projector(w);
  Plain<T, M, Aligned> source(x, int(blockIdx.y) * kMostRows);
  projector.run(source, add);
}

void gemv(TensorView x, TensorView w, Optional<TensorView> bias, Optional<TensorView> residual, TensorView y,
          int64_t grid, int64_t split, int64_t pdl) {
  Plan plan{grid, split, pdl != 0};
  check_plan(plan);
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    Weights<T, 1> weights{{matrix<const T>(w, "w", x, -1, from.columns)}, int(split)};
    const int64_t n = weights.part[0].rows;
    Add<T> add{matrix<T>(y, "y", x, from.rows, n), bias ? vector<const T>(*bias, "bias", x, n) : nullptr,
               residual ? matrix<const T>(*residual, "residual", x, from.rows, n) : Matrix<const T>{}};
    check_sizes(from, weights.part[0]);
    Stream stream(x);
    by_rows(from.rows, [&](auto rows) {
      by_flag(aligned(from) && aligned(weights.part[0]), [&](auto is_aligned) {
        constexpr int M = decltype(rows)::value;
        constexpr bool kAligned = decltype(is_aligned)::value;
        launch(shape_of<Projector<T, T, 1, M, kAligned>>(plan, n, from.rows), stream, gemv_rows<T, M, kAligned>, from,
               weights, add);
      });
    });
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(gemv, autosel::gemv);
