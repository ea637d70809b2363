// The projection for operands that wide loads cannot read: unaligned or overlapping rows. Correct for every shape and
// stride, and slow: a build that is raced on aligned operands must also serve the others.
#pragma once
#include "../cuda/launch.cuh"

namespace autosel {

constexpr int kPlainTile = 16;  // outputs on either side; 256 threads, one each

// Addends of the product before its one rounding; null: none.
template <class T> struct Extras {
  const T* bias;
  Matrix<const T> residual;
  __device__ __forceinline__ float operator()(int64_t m, int64_t n) const {
    return (bias ? widen(bias[n]) : 0.0f) + (residual.at ? widen(residual.row(m)[n]) : 0.0f);
  }
};

template <class T>
__global__ void __launch_bounds__(kPlainTile * kPlainTile)
    plain_product(Matrix<const T> x, Matrix<const T> w, Matrix<T> y, Extras<T> extras) {
  release_dependents();
  wait_for_producers();
  float* xs = reinterpret_cast<float*>(shared_memory());
  float* ws = xs + kPlainTile * (kPlainTile + 1);
  const int across = int(threadIdx.x) % kPlainTile, down = int(threadIdx.x) / kPlainTile;
  const int64_t n = int64_t(blockIdx.x) * kPlainTile + across, m = int64_t(blockIdx.y) * kPlainTile + down;
  const int64_t loaded_n = int64_t(blockIdx.x) * kPlainTile + down;
  float sum = 0;
  for (int64_t k = 0; k < x.columns; k += kPlainTile) {
    const bool inside = k + across < x.columns;
    xs[down * (kPlainTile + 1) + across] = inside && m < x.rows ? widen(x.row(m)[k + across]) : 0.0f;
    ws[down * (kPlainTile + 1) + across] = inside && loaded_n < w.rows ? widen(w.row(loaded_n)[k + across]) : 0.0f;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPlainTile; ++i)
      sum = fmaf(xs[down * (kPlainTile + 1) + i], ws[across * (kPlainTile + 1) + i], sum);
    __syncthreads();
  }
  if (m < x.rows && n < w.rows) y.row(m)[n] = narrow<T>(sum + extras(m, n));
}

template <class T>
void run_plain(const Matrix<const T>& x, const Matrix<const T>& w, const Matrix<T>& y, const Extras<T>& extras,
               const Stream& stream, bool dependent) {
  const int64_t across = (w.rows + kPlainTile - 1) / kPlainTile, down = (x.rows + kPlainTile - 1) / kPlainTile;
  AUTOSEL_CHECK(down <= 65535, "x has " << x.rows << " rows that are not aligned to 16 bytes");
  Shape shape{dim3(unsigned(across), unsigned(down)), kPlainTile * kPlainTile,
              2 * kPlainTile * (kPlainTile + 1) * sizeof(float), dependent};
  launch(shape, stream, plain_product<T>, x, w, y, extras);
}

}  // namespace autosel
