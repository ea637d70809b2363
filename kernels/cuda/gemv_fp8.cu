// gemv_fp8   y = (x @ w^T) * scale (+ bias) (+ residual), w in fp8 e4m3, one scale a row of it
//            x[M,K], w[N,K] e4m3, scale[N] fp32, bias[N], residual[M,N] -> y[M,N]
//
// bytes   N K + 4 N + (M K + M N + ...) b      FLOPs   2 M N K
// roofline at M=1, N=K=4096 on an H200: 16.8 MB at 4.3 TB/s are 3.9 us; a node and two latencies come to it.
// knobs   as gemv.cu (knobs/gpu/gemv.py, with b = 1).
// design  project.cuh with vectors of 16 weights; one instruction converts each pair into two halves (sm_89 and later;
//         bit operations on older devices). The scale is applied to the sum. An H200 has 6.9 instructions per weight in
//         the time it takes to arrive; conversion and multiply-add take about 2.8.
// idea    FBGEMM's and TensorRT-LLM's CUDA-core fp8 GEMV: twice bf16's rate at M=1.
// status  compiled and emulated; not yet run on silicon
#include "project.cuh"

namespace autosel {
namespace {

template <class T> struct Scaled {
  Matrix<T> y;
  const float* scale;
  const T* bias;
  Matrix<const T> residual;
  __device__ __forceinline__ void operator()(int64_t m, int64_t n, const float (&v)[1]) const {
    float sum = v[0] * scale[n];
    if (bias) sum += widen(bias[n]);
    if (residual.at) sum += widen(residual.row(m)[n]);
    y.row(m)[n] = narrow<T>(sum);
  }
};

template <class T, int M, bool Aligned>
__global__ void __launch_bounds__(kThreads, kResident<Aligned>)
    gemv_fp8_rows(Matrix<const T> x, Weights<e4m3, 1> w, Scaled<T> scaled) {
  release_dependents();
  Projector<T, e4m3, 1, M, Aligned> projector(w);
  Plain<T, M, Aligned> source(x, int(blockIdx.y) * kMostRows);
  projector.run(source, scaled);
}

void gemv_fp8(TensorView x, TensorView w, TensorView scale, Optional<TensorView> bias, Optional<TensorView> residual,
              TensorView y, int64_t grid, int64_t split, int64_t pdl) {
  Plan plan{grid, split, pdl != 0};
  check_plan(plan);
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    check_form(w, "w", x, 2), check_form(scale, "scale", x, 1);
    const int64_t n = w.size(0);
    AUTOSEL_CHECK(is_e4m3(w) && w.size(1) == from.columns, "w must be e4m3[N," << from.columns << "]");
    AUTOSEL_CHECK(is(scale, kDLFloat, 32) && scale.size(0) == n, "scale must be fp32[" << n << "]");
    Weights<e4m3, 1> weights{{{data<const e4m3>(w), n, w.size(1), w.stride(0)}}, int(split)};
    Scaled<T> scaled{matrix<T>(y, "y", x, from.rows, n), data<float>(scale),
                     bias ? vector<const T>(*bias, "bias", x, n) : nullptr,
                     residual ? matrix<const T>(*residual, "residual", x, from.rows, n) : Matrix<const T>{}};
    check_sizes(from, weights.part[0]);
    Stream stream(x);
    by_rows(from.rows, [&](auto rows) {
      by_flag(aligned(from) && aligned(weights.part[0]), [&](auto is_aligned) {
        constexpr int M = decltype(rows)::value;
        constexpr bool kAligned = decltype(is_aligned)::value;
        launch(shape_of<Projector<T, e4m3, 1, M, kAligned>>(plan, n, from.rows), stream, gemv_fp8_rows<T, M, kAligned>,
               from, weights, scaled);
      });
    });
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(gemv_fp8, autosel::gemv_fp8);
