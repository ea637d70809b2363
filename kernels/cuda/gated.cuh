// act(gate) * up, element by element: swiglu and geglu.
#pragma once
#include "activation.cuh"
#include "launch.cuh"

namespace autosel {

constexpr unsigned kGatedThreads = 256;

// One vector per thread; `columns` vectors per row, rows one after the other.
template <class T, int Kind, bool Aligned>
__global__ void __launch_bounds__(kGatedThreads)
    gated_rows(Matrix<const T> gate, Matrix<const T> up, Matrix<T> y, int64_t columns) {
  constexpr int V = kVec<T>;
  release_dependents();
  wait_for_producers();
  const int64_t count = gate.rows * columns, step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    const int64_t m = i / columns, at = i % columns * V, left = gate.columns - at;
    float g[V], u[V];
    widen<T>(load_vector<T, Aligned>(gate.row(m) + at, left), g);
    widen<T>(load_vector<T, Aligned>(up.row(m) + at, left), u);
#pragma unroll
    for (int e = 0; e < V; ++e) g[e] = activate(Kind, g[e]) * u[e];
    store_vector<T, Aligned>(y.row(m) + at, narrow<T>(g), left);
  }
}

template <int Kind> void gated(TensorView gate, TensorView up, TensorView y, int64_t grid, int64_t pdl) {
  AUTOSEL_CHECK(grid >= 1 && grid <= kMostElements, "grid is " << grid);
  by_dtype(gate, [&](auto tag) {
    using T = decltype(tag);
    auto g = matrix<const T>(gate, "gate", gate);
    auto u = matrix<const T>(up, "up", gate, g.rows, g.columns);
    auto to = matrix<T>(y, "y", gate, g.rows, g.columns);
    const int64_t columns = (g.columns + kVec<T> - 1) / kVec<T>;
    const int64_t most = (g.rows * columns + kGatedThreads - 1) / kGatedThreads;
    Stream stream(gate);
    Shape shape{dim3(unsigned(std::min(grid, most))), kGatedThreads, 0, pdl != 0};
    by_flag(aligned(g) && aligned(u) && aligned(to), [&](auto is_aligned) {
      launch(shape, stream, gated_rows<T, Kind, decltype(is_aligned)::value>, g, u, to, columns);
    });
  });
}

}  // namespace autosel
