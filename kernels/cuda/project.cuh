// Parts shared by the projections (gemv, norm_qkv, gate_up, lm_head): few rows of x, streamed weights.
//
// A warp reads AUTOSEL_ROWS rows of weights at a time (for gate and up, that many together), each lane 16 bytes of each
// row in a step of 512 bytes. It keeps AUTOSEL_UNROLL such loads in flight beyond those in use, also across the ends of
// rows, so that the stream never drains. x is read through L1, which all warps of an SM share: no staging, no barrier.
// `split` warps of one CTA may share a row, each taking every split-th step; their sums are added in a fixed order.
//
// Weights are constants: the first of them are loaded before the kernel waits for the producer of x.
//
// tried   (ptxas) as many rows of gate as of up: eight rows of x spill 1.2 KB. A row's sum of squares accumulated in
//         its array element: the array goes to local memory, and is stored there at every step.
#pragma once
#include "launch.cuh"
#include "reduce.cuh"

#ifndef AUTOSEL_UNROLL
#define AUTOSEL_UNROLL 4
#endif
#ifndef AUTOSEL_ROWS
#define AUTOSEL_ROWS 1
#endif

#ifndef AUTOSEL_THREADS
#define AUTOSEL_THREADS 256
#endif

namespace autosel {

constexpr int kThreads = AUTOSEL_THREADS, kWarps = kThreads / kWarp;
constexpr int kMostRows = 8;  // of x at once: M x AUTOSEL_ROWS accumulators a lane
// CTAs that an SM must be able to hold: caps the registers. Unaligned rows are slow in any case.
template <bool Aligned> constexpr int kResident = Aligned ? 2 : 1;

template <class W, int Parts> struct Weights {
  Matrix<const W> part[Parts];  // of the same size
  int split;                    // warps per row
};

// Plain rows of x.
template <class T, int M, bool Aligned> struct Plain {
  static constexpr bool kNormed = false;
  // 32 bits count whole vectors, of which 2^31 are more than memory holds. Unaligned rows are slow in any case.
  static constexpr int kUnit = Aligned ? kVec<T> : 1;
  using Offset = std::conditional_t<Aligned, int, int64_t>;
  Matrix<const T> x;
  int first;         // row
  Offset begins[M];  // in units; for rows beyond the last, that of the last
  // The next row is chosen by a select, which uniform registers can execute and hold. They have no minimum, and eight
  // more general registers are what eight rows lack.
  __device__ __forceinline__ Plain(const Matrix<const T>& from, int first_row) : x(from), first(first_row) {
    const Offset step = Offset(x.stride / kUnit);
    begins[0] = first * step;
#pragma unroll
    for (int m = 1; m < M; ++m) begins[m] = begins[m - 1] + (first + m < int(x.rows) ? step : 0);
  }
  template <bool Whole> __device__ __forceinline__ void begin(int, int) {}
  // kVec<T> elements of row m from k on, zeros beyond its end; Whole: they do not reach it.
  template <bool Whole> __device__ __forceinline__ void load(int m, int k, int count, float (&out)[kVec<T>]) const {
    const T* from = x.at + int64_t(begins[m] + int(unsigned(k) / kUnit)) * kUnit;  // k: of whole vectors
    widen<T>(Whole ? load_resident(from) : load_vector<T, Aligned>(from, count), out);
  }
};

// x * (gain + offset), not yet divided by its root mean square: a scalar per row, by which the sum can be multiplied
// instead. The sum of squares uses the elements that a lane has loaded anyway.
template <class T, int M, bool Aligned> struct Normed : Plain<T, M, Aligned> {
  static constexpr bool kNormed = true;
  const T* gain;
  float eps, offset;
  float scale[kVec<T>];
  __device__ __forceinline__ Normed(const Matrix<const T>& from, int first_row, const T* by, float e, float o)
      : Plain<T, M, Aligned>(from, first_row), gain(by), eps(e), offset(o) {}
  template <bool Whole> __device__ __forceinline__ void begin(int k, int count) {
    widen<T>(Whole ? load_resident(gain + k) : load_vector<T, Aligned>(gain + k, count), scale);
#pragma unroll
    for (int e = 0; e < kVec<T>; ++e) scale[e] += offset;
  }
};

// W: storage type of the weights, kVec<W> of them per lane and step; T: of x.
template <class T, class W, int Parts, int M, bool Aligned> struct Projector {
  static constexpr int V = kVec<W>, X = kVec<T>, kStep = kWarp * V;
  // Rows of each matrix: one unpacked vector of each takes at most 32 registers.
  static constexpr int kRows = AUTOSEL_ROWS < 32 / V ? AUTOSEL_ROWS : 32 / V, R = kRows > Parts ? kRows / Parts : 1;
  // A load that is multiplied by many rows leaves more time and takes registers: fewer loads in flight are enough.
  static constexpr int kMostLoads = M * V > 64 ? 1 : M == kMostRows || M * V == 64 ? 2 : M * V == 32 ? 4 : 8;
  static constexpr int kLoads = AUTOSEL_UNROLL < kMostLoads ? AUTOSEL_UNROLL : kMostLoads;
  static constexpr int U = kLoads / (R * Parts) > 0 ? kLoads / (R * Parts) : 1;
  // The gain multiplies the smaller number of rows, of weights or of x; on weights its registers are free again before
  // x is loaded.
  static constexpr bool kGainOnWeights = R * Parts < M;
  static_assert(V % X == 0, "a vector of weights meets whole vectors of x");

  struct Raw { uint4 v[U][Parts][R]; };

  const Weights<W, Parts>& w;
  int rows, depth, groups, lane, part;  // a group: R rows of weights

  __device__ __forceinline__ explicit Projector(const Weights<W, Parts>& weights)
      : w(weights), rows(int(weights.part[0].rows)), depth(int(weights.part[0].columns)), groups((rows + R - 1) / R) {
    lane = int(threadIdx.x) % kWarp, part = int(threadIdx.x) / kWarp % w.split;
  }

  // The weights of a group from k on; zeros beyond the ends, so that the multiplication needs no test.
  __device__ __forceinline__ void fetch(Raw& raw, int group, int k) const {
    const bool whole = Aligned && k + U * kStep <= depth;  // the same for the whole warp
#pragma unroll
    for (int p = 0; p < Parts; ++p)
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int row = group * R + r < rows ? group * R + r : rows - 1;
        const W* from = w.part[p].row(row) + k + lane * V;
        if (whole) {
#pragma unroll
          for (int u = 0; u < U; ++u) raw.v[u][p][r] = load_streamed(from + u * kStep);
        } else {
#pragma unroll
          for (int u = 0; u < U; ++u) {
            const int left = depth - k - lane * V - u * kStep;
            if (Aligned && left >= V) raw.v[u][p][r] = load_streamed(from + u * kStep);
            else raw.v[u][p][r] = load_elements(from + u * kStep, left);
          }
        }
      }
  }

  template <bool Whole, class Source>
  __device__ __forceinline__ void multiply(const Raw& raw, int k0, Source& x, float (&sum)[M][Parts][R],
                                           float (&squares)[M]) const {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      // Four vectors of x at a time: with eight steps at once, the compiler loaded all of them first and spilled
      // step.cu's own. No exchange between lanes.
      if (Whole && u > 0 && u * M % 4 == 0) __syncwarp();
      const int k = k0 + u * kStep + lane * V;
      if (!Whole && k >= depth) break;
      float v[Parts][R][V];
#pragma unroll
      for (int p = 0; p < Parts; ++p)
#pragma unroll
        for (int r = 0; r < R; ++r) widen<W>(raw.v[u][p][r], v[p][r]);
#pragma unroll
      for (int h = 0; h < V; h += X) {
        x.template begin<Whole>(k + h, depth - k - h);
        if constexpr (Source::kNormed && kGainOnWeights) {
#pragma unroll
          for (int i = 0; i < Parts * R * X; ++i) v[i / X / R][i / X % R][h + i % X] *= x.scale[i % X];
        }
#pragma unroll
        for (int m = 0; m < M; ++m) {
          float a[X];
          x.template load<Whole>(m, k + h, depth - k - h, a);
          if constexpr (Source::kNormed) {
#pragma unroll
            for (int e = 0; e < X; ++e) {
              squares[m] = fmaf(a[e], a[e], squares[m]);
              if constexpr (!kGainOnWeights) a[e] *= x.scale[e];
            }
          }
#pragma unroll
          for (int p = 0; p < Parts; ++p)
#pragma unroll
            for (int r = 0; r < R; ++r)
#pragma unroll
              for (int e = 0; e < X; ++e) sum[m][p][r] = fmaf(a[e], v[p][r][h + e], sum[m][p][r]);
        }
      }
    }
  }

  // Calls done(m, n, v[Parts]) once for every row m < M of x and row n of the weights, by one lane. Waits for `ready`
  // after issuing the first weights: then x can be read.
  template <class Source, class Done> __device__ __forceinline__ void run(Source& x, const Done& done) const {
    run(x, done, [] { wait_for_producers(); });
  }
  template <class Source, class Done, class Ready>
  __device__ __forceinline__ void run(Source& x, const Done& done, const Ready& ready) const {
    const int teams = kWarps / w.split, team = int(threadIdx.x) / kWarp / w.split;
    const int stride = w.split * U * kStep, start = part * U * kStep;
    float sum[M][Parts][R] = {}, squares[M] = {};
    Raw now, next;
    int turn = 0;
    // Every warp of a CTA processes the same number of groups, because split warps meet at barriers; the last group may
    // be empty.
    int group = int(blockIdx.x) * teams, from = 0;
    fetch(now, group + team, start);
    ready();
    while (group < groups) {
      const bool last = from + stride >= depth;
      const int next_group = last ? group + int(gridDim.x) * teams : group, next_from = last ? 0 : from + stride;
      const int k = start + from;
      if (next_group < groups) fetch(next, next_group + team, start + next_from);
      else next = Raw{};  // otherwise ptxas keeps an older one in registers through all of the surrounding loop
      if (Aligned && k + U * kStep <= depth) multiply<Aligned>(now, k, x, sum, squares);
      else multiply<false>(now, k, x, sum, squares);
      if (last) {
        conclude(group + team, x, sum, squares, turn++, done);
#pragma unroll
        for (int m = 0; m < M; ++m) {
          squares[m] = 0;
#pragma unroll
          for (int i = 0; i < Parts * R; ++i) (&sum[m][0][0])[i] = 0;
        }
      }
      now = next, group = next_group, from = next_from;
    }
  }

  // Floats of shared memory per warp if rows are split; twice, so that one barrier per group is enough.
  static constexpr int kPartial = M * R * (Parts + 1);

 private:
  template <class Source, class Done>
  __device__ __forceinline__ void conclude(int group, const Source& x, float (&sum)[M][Parts][R],
                                           float (&squares)[M], int turn, const Done& done) const {
    float mine[Parts] = {}, energy = 0;  // of this lane's (m, r) = (lane / R, lane % R)
#pragma unroll
    for (int m = 0; m < M; ++m) {
      if constexpr (Source::kNormed) {
        const float total = lanes_sum(squares[m]);  // not squares[m] itself: the array would go to local memory
        if (lane / R == m) energy = total;
      }
#pragma unroll
      for (int p = 0; p < Parts; ++p)
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const float total = lanes_sum(sum[m][p][r]);
          if (lane == m * R + r) mine[p] = total;
        }
    }
    if (w.split > 1) {
      float* kept = reinterpret_cast<float*>(shared_memory()) + turn % 2 * kWarps * kPartial;
      const int warp = int(threadIdx.x) / kWarp;
      if (lane < M * R) {
        float* own = kept + warp * kPartial + lane * (Parts + 1);
        for (int p = 0; p < Parts; ++p) own[p] = mine[p];
        own[Parts] = energy;
      }
      __syncthreads();
      if (part != 0) return;
      if (lane < M * R)
        for (int s = 1; s < w.split; ++s) {
          const float* other = kept + (warp + s) * kPartial + lane * (Parts + 1);
          for (int p = 0; p < Parts; ++p) mine[p] += other[p];
          energy += other[Parts];
        }
    }
    const int m = lane / R;
    const int n = group * R + lane % R;
    if (m >= M || n >= rows || x.first + m >= x.x.rows) return;
    if constexpr (Source::kNormed) {
      const float rstd = rsqrtf(energy / float(depth) + x.eps);
#pragma unroll
      for (int p = 0; p < Parts; ++p) mine[p] *= rstd;
    }
    done(x.first + m, n, mine);
  }
};

// Stores sums without an addend.
template <class T> struct Keep {
  Matrix<T> y;
  __device__ __forceinline__ void operator()(int64_t m, int64_t n, const float (&v)[1]) const {
    y.row(m)[n] = narrow<T>(v[0]);
  }
};

// --- host -----------------------------------------------------------------------------------------------------------

struct Plan {
  int64_t grid, split;
  bool dependent;
};

// Offsets within x, in vectors, rows and depth of the weights are 32-bit.
template <class T, class W> void check_sizes(const Matrix<T>& x, const Matrix<W>& w) {
  AUTOSEL_CHECK(x.rows >= 1 && w.rows >= 1 && w.columns >= 1, "a projection of nothing");
  AUTOSEL_CHECK(x.rows * (std::max(x.stride, x.columns) / kVec<T>) <= kMostElements,
                "x spans more than 2^31 vectors of " << kVec<T> << " elements");
  AUTOSEL_CHECK(w.columns <= kMostElements / 2 && w.rows <= kMostElements / 2, "w has more than 2^30 rows or columns");
}

inline void check_plan(const Plan& plan) {
  AUTOSEL_CHECK(plan.grid >= 1 && plan.grid <= kMostElements, "grid is " << plan.grid);
  AUTOSEL_CHECK(plan.split == 1 || plan.split == 2 || plan.split == 4 || plan.split == 8,
                "split_k is " << plan.split << ", expected 1, 2, 4 or 8");
}

// body(integral_constant<int, M>): M is the smallest of 1, 2, 4 and 8 that is at least `rows`, or 8.
template <class Body> void by_rows(int64_t rows, const Body& body) {
  if (rows <= 1) body(std::integral_constant<int, 1>{});
  else if (rows <= 2) body(std::integral_constant<int, 2>{});
  else if (rows <= 4) body(std::integral_constant<int, 4>{});
  else body(std::integral_constant<int, kMostRows>{});
}

// CTAs: no more than there is work for. Rows of x beyond 8 need further passes over the weights, as gridDim.y.
template <class P> Shape shape_of(const Plan& plan, int64_t outputs, int64_t rows) {
  const int64_t teams = kWarps / plan.split, groups = (outputs + P::R - 1) / P::R;
  const int64_t grid = std::min(plan.grid, (groups + teams - 1) / teams), passes = (rows + kMostRows - 1) / kMostRows;
  AUTOSEL_CHECK(passes <= 65535, "x has " << rows << " rows");
  return {dim3(unsigned(grid), unsigned(passes)), unsigned(kThreads),
          plan.split > 1 ? 2 * kWarps * P::kPartial * sizeof(float) : 0, plan.dependent};
}

}  // namespace autosel
