// rmsnorm   y[m,:] = x[m,:] * rsqrt(mean(x[m,:]^2) + eps) * (weight + offset)          x[M,d], weight[d] -> y[M,d]
//
// bytes   2 M d b + d b (b = bytes an element)      FLOPs   4 M d
// roofline at M=1, d=4096, bf16 on an H200: 25 KB at 4.3 TB/s are 6 ns; a graph node and two latencies are 2.8 us. So
// the chain of latencies decides: one load of x, one reduction, one store.
// knobs   threads = d b / 16 in whole warps, grid = M (knobs/gpu/rows.py); pdl: launched as a programmatic dependent.
// design  One CTA per row. The row is read once and stays in registers, 8 bf16 per thread and vector, up to 4 vectors;
//         a longer row (above 32768) is read again from L2. The weight, if registers also hold it (2 vectors), is
//         fetched before the wait for x's producer.
// tried   (ptxas, sm_90a, bf16) the weight in registers with 4 and 8 vectors of x: spills 56 and 384 bytes; 8 vectors
//         of x without it: 64 bytes.
// idea    quack's rmsnorm ladder (threads and registers by row length).
// status  compiled and emulated; not yet run on silicon
#include "launch.cuh"
#include "reduce.cuh"

namespace autosel {
namespace {

constexpr unsigned kMostThreads = 1024;

// Held: vectors of its row in a thread's registers; 0: none, the row is longer than 4 per thread and is read twice.
template <class T, int Held, bool Aligned>
__global__ void __launch_bounds__(kMostThreads)
    rmsnorm_rows(Matrix<const T> x, const T* weight, Matrix<T> y, float eps, float offset) {
  constexpr int V = kVec<T>;
  float* scratch = reinterpret_cast<float*>(shared_memory());
  const int d = int(x.columns), step = int(blockDim.x) * V, first = int(threadIdx.x) * V;
  release_dependents();
  auto gain = [&](int i) { return load_vector<T, Aligned>(weight + i, d - i); };
  constexpr int kEarly = Held <= 2 ? Held : 0;  // more would not fit the registers of 1024 threads
  uint4 gains[kEarly ? kEarly : 1];
#pragma unroll
  for (int i = 0; i < kEarly; ++i) gains[i] = gain(first + i * step);
  wait_for_producers();

  for (int64_t m = blockIdx.x; m < x.rows; m += gridDim.x) {
    const T* from = x.row(m);
    T* to = y.row(m);
    uint4 held[Held ? Held : 1];
    float squares = 0, v[V], g[V];
    auto add_squares = [&](const uint4& raw) {
      widen<T>(raw, v);
#pragma unroll
      for (int e = 0; e < V; ++e) squares = fmaf(v[e], v[e], squares);
    };
    auto finish = [&](const uint4& raw, const uint4& by, int i, float rstd) {
      widen<T>(raw, v), widen<T>(by, g);
#pragma unroll
      for (int e = 0; e < V; ++e) v[e] = v[e] * rstd * (g[e] + offset);
      store_vector<T, Aligned>(to + i, narrow<T>(v), d - i);
    };
#pragma unroll
    for (int i = 0; i < Held; ++i) held[i] = load_vector<T, Aligned>(from + first + i * step, d - first - i * step);
#pragma unroll
    for (int i = 0; i < Held; ++i) add_squares(held[i]);
    if (Held == 0)
      for (int i = first; i < d; i += step) add_squares(load_vector<T, Aligned>(from + i, d - i));
    const float rstd = rsqrtf(block_sum(squares, scratch) / float(d) + eps);
#pragma unroll
    for (int i = 0; i < Held; ++i) finish(held[i], i < kEarly ? gains[i] : gain(first + i * step), first + i * step, rstd);
    if (Held == 0)
      for (int i = first; i < d; i += step)
        finish(load_vector<T, Aligned>(from + i, d - i), gain(i), i, rstd);
    __syncthreads();  // the next row's sums go into the same scratch
  }
}

template <class T, bool Aligned> auto kernel_for(int64_t vectors) {
  if (vectors <= 1) return rmsnorm_rows<T, 1, Aligned>;
  if (vectors <= 2) return rmsnorm_rows<T, 2, Aligned>;
  if constexpr (Aligned) {
    if (vectors <= 4) return rmsnorm_rows<T, 4, Aligned>;
  }
  return rmsnorm_rows<T, 0, Aligned>;
}

void rmsnorm(TensorView x, TensorView weight, double eps, double offset, TensorView y, int64_t threads, int64_t grid,
             int64_t pdl) {
  AUTOSEL_CHECK(threads >= kWarp && threads <= kMostThreads && threads % kWarp == 0, "threads is " << threads);
  AUTOSEL_CHECK(grid >= 1, "grid is " << grid);
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    auto to = matrix<T>(y, "y", x, from.rows, from.columns);
    const T* gain = vector<const T>(weight, "weight", x, from.columns);
    Stream stream(x);
    Shape shape{dim3(unsigned(std::min(grid, from.rows))), unsigned(threads), size_t(threads) / kWarp * sizeof(float),
                pdl != 0};
    int64_t vectors = (from.columns + threads * kVec<T> - 1) / (threads * kVec<T>);
    by_flag(aligned(from) && aligned(to) && aligned(gain), [&](auto is_aligned) {
      auto kernel = kernel_for<T, decltype(is_aligned)::value>(vectors);
      launch(shape, stream, kernel, from, gain, to, float(eps), float(offset));
    });
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(rmsnorm, autosel::rmsnorm);
