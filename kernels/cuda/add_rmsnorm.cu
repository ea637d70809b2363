// add_rmsnorm   sandwich 0 (Llama): r = x + residual; y = rmsnorm(r); new_residual = r
//               sandwich 1 (Gemma): y = rmsnorm(x); new_residual = residual + y
//               sandwich 2 (vLLM):  as 0, y of the unrounded sum, which this kernel normalises in either case
//               x[M,d], residual[M,d], weight[d] -> y[M,d], new_residual[M,d];  rmsnorm as in rmsnorm.cu
//
// bytes   4 M d b + d b (b = bytes an element)      FLOPs   5 M d
// roofline at M=1, d=4096, bf16 on an H200: 41 KB at 4.3 TB/s are 10 ns; a graph node and two latencies are 2.8 us.
// knobs   threads = d b / 16 in whole warps, grid = M (knobs/gpu/rows.py); pdl: launched as a programmatic dependent.
// design  As rmsnorm.cu. The sum is computed in fp32 and normalised before it is rounded. Registers hold the two
//         operands, not their fp32 sum: 8 registers per vector in either case, and no rounding in between. The thread
//         that writes an element reads it first: new_residual may be residual, and y may be x.
// idea    flashinfer's fused_add_rmsnorm; quack's ladder of row lengths.
// status  compiled and emulated; not yet run on silicon
#include "launch.cuh"
#include "reduce.cuh"

namespace autosel {
namespace {

constexpr unsigned kMostThreads = 1024;

template <class T> struct Operands {
  Matrix<const T> x, residual;
  const T* weight;
  Matrix<T> y, new_residual;
  float eps, offset;
};

// Held: vectors of each operand in a thread's registers; 0: none, the row is longer and is read twice.
template <class T, int Held, bool Sandwich, bool Aligned>
__global__ void __launch_bounds__(kMostThreads) add_rmsnorm_rows(Operands<T> o) {
  constexpr int V = kVec<T>;
  float* scratch = reinterpret_cast<float*>(shared_memory());
  const int d = int(o.x.columns), step = int(blockDim.x) * V, first = int(threadIdx.x) * V;
  release_dependents();
  auto gain = [&](int i) { return load_vector<T, Aligned>(o.weight + i, d - i); };
  constexpr int kEarly = Held <= 1 ? Held : 0;  // more would not fit the registers of 1024 threads
  uint4 gains[kEarly ? kEarly : 1];
#pragma unroll
  for (int i = 0; i < kEarly; ++i) gains[i] = gain(first + i * step);
  wait_for_producers();

  for (int64_t m = blockIdx.x; m < o.x.rows; m += gridDim.x) {
    struct Pair { uint4 x, residual; };
    auto both = [&](int i) {
      return Pair{load_vector<T, Aligned>(o.x.row(m) + i, d - i), load_vector<T, Aligned>(o.residual.row(m) + i, d - i)};
    };
    float squares = 0, v[V], s[V], g[V];
    auto normed = [&](const Pair& p) {  // v: the values to normalise; s: the residual as given
      widen<T>(p.x, v), widen<T>(p.residual, s);
#pragma unroll
      for (int e = 0; e < V; ++e) v[e] = Sandwich ? v[e] : v[e] + s[e];
    };
    auto add_squares = [&](const Pair& p) {
      normed(p);
#pragma unroll
      for (int e = 0; e < V; ++e) squares = fmaf(v[e], v[e], squares);
    };
    auto finish = [&](const Pair& p, const uint4& by, int i, float rstd) {
      normed(p), widen<T>(by, g);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const float out = v[e] * rstd * (g[e] + o.offset);
        g[e] = Sandwich ? s[e] + out : v[e], v[e] = out;
      }
      store_vector<T, Aligned>(o.y.row(m) + i, narrow<T>(v), d - i);
      store_vector<T, Aligned>(o.new_residual.row(m) + i, narrow<T>(g), d - i);
    };
    Pair held[Held ? Held : 1];
#pragma unroll
    for (int i = 0; i < Held; ++i) held[i] = both(first + i * step);
#pragma unroll
    for (int i = 0; i < Held; ++i) add_squares(held[i]);
    if (Held == 0)
      for (int i = first; i < d; i += step) add_squares(both(i));
    const float rstd = rsqrtf(block_sum(squares, scratch) / float(d) + o.eps);
#pragma unroll
    for (int i = 0; i < Held; ++i) finish(held[i], i < kEarly ? gains[i] : gain(first + i * step), first + i * step, rstd);
    if (Held == 0)
      for (int i = first; i < d; i += step) finish(both(i), gain(i), i, rstd);
    __syncthreads();  // the next row's sums go into the same scratch
  }
}

template <class T, bool Sandwich, bool Aligned> auto kernel_for(int64_t vectors) {
  if (vectors <= 1) return add_rmsnorm_rows<T, 1, Sandwich, Aligned>;
  if constexpr (Aligned) {
    if (vectors <= 2) return add_rmsnorm_rows<T, 2, Sandwich, Aligned>;
    // Sandwich norms need the residual and the sum until the end: with four vectors the fp16 build spills 64 bytes on
    // sm_100 and sm_120.
    if constexpr (!Sandwich)
      if (vectors <= 4) return add_rmsnorm_rows<T, 4, Sandwich, Aligned>;
  }
  return add_rmsnorm_rows<T, 0, Sandwich, Aligned>;
}

void add_rmsnorm(TensorView x, TensorView residual, TensorView weight, double eps, double offset, int64_t sandwich,
                 TensorView y, TensorView new_residual, int64_t threads, int64_t grid, int64_t pdl) {
  AUTOSEL_CHECK(threads >= kWarp && threads <= kMostThreads && threads % kWarp == 0, "threads is " << threads);
  AUTOSEL_CHECK(grid >= 1, "grid is " << grid);
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    const int64_t m = from.rows, d = from.columns;
    Operands<T> o{from,
                  matrix<const T>(residual, "residual", x, m, d),
                  vector<const T>(weight, "weight", x, d),
                  matrix<T>(y, "y", x, m, d),
                  matrix<T>(new_residual, "new_residual", x, m, d),
                  float(eps),
                  float(offset)};
    Stream stream(x);
    Shape shape{dim3(unsigned(std::min(grid, m))), unsigned(threads), size_t(threads) / kWarp * sizeof(float), pdl != 0};
    const int64_t vectors = (d + threads * kVec<T> - 1) / (threads * kVec<T>);
    const bool vectorised =
        aligned(o.x) && aligned(o.residual) && aligned(o.weight) && aligned(o.y) && aligned(o.new_residual);
    by_flag(vectorised, [&](auto is_aligned) {
      by_flag(sandwich == 1, [&](auto is_sandwich) {
        launch(shape, stream, kernel_for<T, decltype(is_sandwich)::value, decltype(is_aligned)::value>(vectors), o);
      });
    });
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(add_rmsnorm, autosel::add_rmsnorm);
