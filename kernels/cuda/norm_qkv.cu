// norm_qkv   y = rmsnorm(x) @ w^T                                           x[M,d], norm_weight[d], w[N,d] -> y[M,N]
//
// bytes   N d b + (M d + d + M N) b, b bytes an element      FLOPs   2 M N d + 4 M d
// roofline at M=1, d=4096, N=6144, bf16 on an H200: 50 MB at 4.3 TB/s are 11.7 us; the norm alone would be another node
// and its latencies, 2.8 us.
// knobs   as gemv.cu (knobs/gpu/gemv.py).
// design  project.cuh. The rows are not normalised first: every warp sums x (norm_weight + offset) w and x^2 together
//         and multiplies the sum by 1/rms, a scalar per row. So no CTA waits for a reduction, and the weights stream
//         from the start. It costs four more instructions per weight at M=1, of the 13.8 that an H200 has in the time
//         the weight takes to arrive.
// idea    rstd after the dot: Hazy Research's Llama megakernel.
// status  compiled and emulated; not yet run on silicon
#include "project.cuh"

namespace autosel {
namespace {

template <class T, int M, bool Aligned>
__global__ void __launch_bounds__(kThreads, kResident<Aligned>)
    norm_qkv_rows(Matrix<const T> x, const T* gain, float eps, float offset, Weights<T, 1> w, Keep<T> keep) {
  release_dependents();
  Projector<T, T, 1, M, Aligned> projector(w);
  Normed<T, M, Aligned> source(x, int(blockIdx.y) * kMostRows, gain, eps, offset);
  projector.run(source, keep);
}

void norm_qkv(TensorView x, TensorView norm_weight, TensorView w, double eps, double offset, TensorView y, int64_t grid,
              int64_t split, int64_t pdl) {
  Plan plan{grid, split, pdl != 0};
  check_plan(plan);
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    Weights<T, 1> weights{{matrix<const T>(w, "w", x, -1, from.columns)}, int(split)};
    const int64_t n = weights.part[0].rows;
    const T* gain = vector<const T>(norm_weight, "norm_weight", x, from.columns);
    Keep<T> keep{matrix<T>(y, "y", x, from.rows, n)};
    check_sizes(from, weights.part[0]);
    Stream stream(x);
    by_rows(from.rows, [&](auto rows) {
      by_flag(aligned(from) && aligned(weights.part[0]) && aligned(gain), [&](auto is_aligned) {
        constexpr int M = decltype(rows)::value;
        constexpr bool kAligned = decltype(is_aligned)::value;
        launch(shape_of<Projector<T, T, 1, M, kAligned>>(plan, n, from.rows), stream, norm_qkv_rows<T, M, kAligned>,
               from, gain, float(eps), float(offset), weights, keep);
      });
    });
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(norm_qkv, autosel::norm_qkv);
