// lm_head   logits = x @ w^T, or in each row the lowest index of their maximum
//                                                         x[M,d], w[V,d] -> logits[M,V] or token[M] int64
//
// bytes   V d b + M d b + (M V b or 8 M)      FLOPs   2 M V d
// roofline at M=1, V=128256, d=4096, bf16 on an H200: 1.05 GB at 4.3 TB/s are 244 us; a separate argmax would be a node
// and its latencies, 2.8 us, and 257 KB written and read.
// knobs   as gemv.cu (knobs/gpu/gemv.py).
// design  project.cuh. Greedy: each lane keeps the best of its rows in registers; lanes, warps and finally CTAs are
//         compared once, the CTAs by the one that arrives last, so there is no second launch. Logits are compared after
//         rounding to the dtype; of equal ones the lowest index wins, whichever lane saw it first, and a NaN beats
//         every number, as in torch.argmax(logits).
// status  compiled and emulated; not yet run on silicon
#include "project.cuh"
#include "workspace.cuh"

namespace autosel {
namespace {

struct Best {
  float value;
  int index;  // -1: none yet
};

__device__ __forceinline__ bool beats(const Best& a, const Best& b) {
  if (a.index < 0 || b.index < 0) return b.index < 0 && a.index >= 0;
  const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
  if (a_nan || b_nan) return a_nan && (!b_nan || a.index < b.index);
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

template <class T, int M, bool Aligned>
__global__ void __launch_bounds__(kThreads, kResident<Aligned>)
    lm_head_logits(Matrix<const T> x, Weights<T, 1> w, Keep<T> keep) {
  release_dependents();
  Projector<T, T, 1, M, Aligned> projector(w);
  Plain<T, M, Aligned> source(x, int(blockIdx.y) * kMostRows);
  projector.run(source, keep);
}

// found[passes][CTAs][8], counters[passes]
template <class T, int M, bool Aligned>
__global__ void __launch_bounds__(kThreads, kResident<Aligned>)
    lm_head_greedy(Matrix<const T> x, Weights<T, 1> w, int64_t* token, Best* found, unsigned* counters,
                   int partial_bytes) {
  release_dependents();
  using P = Projector<T, T, 1, M, Aligned>;
  P projector(w);
  const int first = int(blockIdx.y) * kMostRows;
  Plain<T, M, Aligned> source(x, first);
  Best best{0.0f, -1};  // of this lane: row m = lane / R, columns n = lane % R (mod R)
  projector.run(source, [&](int64_t, int64_t n, const float (&v)[1]) {
    const Best other{widen(narrow<T>(v[0])), int(n)};
    if (beats(other, best)) best = other;
  });
  // After the exchange of split rows: the warps' bests, then the flag.
  Best* kept = reinterpret_cast<Best*>(shared_memory() + partial_bytes);
  unsigned* flag = reinterpret_cast<unsigned*>(kept + kWarps * kMostRows);
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
#pragma unroll
  for (int apart = P::R / 2; apart > 0; apart /= 2) {
    Best other{__shfl_xor_sync(kAll, best.value, apart), __shfl_xor_sync(kAll, best.index, apart)};
    if (beats(other, best)) best = other;
  }
  if (lane % P::R == 0 && lane / P::R < M) kept[warp * kMostRows + lane / P::R] = best;
  __syncthreads();
  Best* mine = found + (int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * kMostRows;
  if (threadIdx.x < M) {
    best = kept[threadIdx.x];
    for (int i = 1; i < kWarps; ++i)
      if (beats(kept[i * kMostRows + threadIdx.x], best)) best = kept[i * kMostRows + threadIdx.x];
    mine[threadIdx.x] = best;
  }
  if (!last_to_arrive(counters + blockIdx.y, gridDim.x, flag)) return;
  // One warp per row of x, in turn.
  for (int m = warp; m < M && first + m < x.rows; m += kWarps) {
    best = Best{0.0f, -1};
    const Best* all = found + int64_t(blockIdx.y) * gridDim.x * kMostRows;
    for (unsigned i = unsigned(lane); i < gridDim.x; i += kWarp) {
      const float value = __ldcg(&all[int64_t(i) * kMostRows + m].value);
      const Best other{value, __ldcg(&all[int64_t(i) * kMostRows + m].index)};
      if (beats(other, best)) best = other;
    }
#pragma unroll
    for (int apart = kWarp / 2; apart > 0; apart /= 2) {
      Best other{__shfl_xor_sync(kAll, best.value, apart), __shfl_xor_sync(kAll, best.index, apart)};
      if (beats(other, best)) best = other;
    }
    if (lane == 0) token[first + m] = best.index;
  }
}

void lm_head(TensorView x, TensorView w, int64_t greedy, TensorView out, int64_t grid, int64_t split, int64_t pdl) {
  Plan plan{grid, split, pdl != 0};
  check_plan(plan);
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    auto from = matrix<const T>(x, "x", x);
    Weights<T, 1> weights{{matrix<const T>(w, "w", x, -1, from.columns)}, int(split)};
    const int64_t v = weights.part[0].rows;
    if (greedy) {
      check_form(out, "token", x, 1);
      AUTOSEL_CHECK(is(out, kDLInt, 64) && out.size(0) == from.rows, "token must be int64[" << from.rows << "]");
    }
    Keep<T> keep = greedy ? Keep<T>{} : Keep<T>{matrix<T>(out, "logits", x, from.rows, v)};
    check_sizes(from, weights.part[0]);
    Stream stream(x);
    by_rows(from.rows, [&](auto rows) {
      by_flag(aligned(from) && aligned(weights.part[0]), [&](auto is_aligned) {
        constexpr int M = decltype(rows)::value;
        constexpr bool kAligned = decltype(is_aligned)::value;
        Shape shape = shape_of<Projector<T, T, 1, M, kAligned>>(plan, v, from.rows);
        if (!greedy) return launch(shape, stream, lm_head_logits<T, M, kAligned>, from, weights, keep);
        const int partial = int(shape.shared_bytes);
        shape.shared_bytes += kWarps * kMostRows * sizeof(Best) + sizeof(unsigned);
        Workspace space(stream, size_t(shape.grid.x) * shape.grid.y * kMostRows * sizeof(Best), shape.grid.y);
        launch(shape, stream, lm_head_greedy<T, M, kAligned>, from, weights, data<int64_t>(out), space.memory<Best>(),
               space.counters(), partial);
      });
    });
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(lm_head, autosel::lm_head);
