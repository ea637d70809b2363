// rope   (a, b) -> (a cos - b sin, b cos + a sin) over the first R of D elements of each head; the rest is copied
//        style 0: pairs (i, i + R/2); style 1: pairs (2i, 2i + 1)          angle = position * inv_freq[i]
//        q[M,Hq,D], k[M,Hkv,D], positions[M] int64, inv_freq[R/2] fp32 -> q_out[M,Hq,D], k_out[M,Hkv,D]; strided
//
// bytes   2 M (Hq + Hkv) D b      FLOPs   3 M (Hq + Hkv) R
// roofline at M=1, 32 + 8 heads of 128, bf16 on an H200: 20 KB at 4.3 TB/s are 5 ns; a node and two latencies are 2.8 us.
// knobs   a warp per head, 32 min(8, Hq + Hkv) threads, grid = ceil(M (Hq + Hkv) / warps) (knobs/gpu/rows.py); pdl.
// design  The angle is reduced in double, in half turns: exact for positions of any size; with a float's 24 bits,
//         131072 radians would have an error of 0.008. The remainder is in -1 .. 1, and its sincospi needs neither a
//         range reduction nor the local memory of sincosf. Five double operations per pair: 160 clocks per head even if
//         double runs at 1/64 rate. A lane reads both members of its pairs before it writes: q_out may be q.
// status  compiled and emulated; not yet run on silicon
#include "angle.cuh"
#include "launch.cuh"

namespace autosel {
namespace {

constexpr unsigned kMostThreads = 256;

template <class T> struct Heads {  // [M, H, D], rows and heads strided
  T* at;
  int64_t heads, row, head;
  __device__ __forceinline__ T* of(int64_t m, int64_t h) const { return at + m * row + h * head; }
};

template <class T> struct Turns {
  Heads<const T> from[2];  // q, k
  Heads<T> to[2];
  const int64_t* positions;
  int64_t position_step;
  const float* inv_freq;
  int64_t tokens;
  int width, pairs;
};

template <class T, bool Interleaved, bool Aligned>
__global__ void __launch_bounds__(kMostThreads) rope_heads(Turns<T> t) {
  constexpr int V = kVec<T>;
  release_dependents();
  wait_for_producers();
  const int lane = int(threadIdx.x) % kWarp, warps = int(blockDim.x) / kWarp, rotated = 2 * t.pairs;
  const int64_t heads = t.from[0].heads + t.from[1].heads, count = t.tokens * heads;
  for (int64_t i = int64_t(blockIdx.x) * warps + threadIdx.x / kWarp; i < count; i += int64_t(gridDim.x) * warps) {
    const int64_t m = i / heads, h = i % heads;
    const int which = h < t.from[0].heads ? 0 : 1;
    const T* from = t.from[which].of(m, h - (which ? t.from[0].heads : 0));
    T* to = t.to[which].of(m, h - (which ? t.from[0].heads : 0));
    const int64_t position = t.positions[m * t.position_step];
    if (Interleaved) {
      for (int at = lane * V; at < rotated; at += kWarp * V) {
        float x[V], c, s;
        widen<T>(load_vector<T, Aligned>(from + at, rotated - at), x);
#pragma unroll
        for (int e = 0; e < V; e += 2) {
          if (at + e >= rotated) break;
          cos_sin(position, t.inv_freq[(at + e) / 2], c, s);
          const float a = x[e], b = x[e + 1];
          x[e] = a * c - b * s, x[e + 1] = b * c + a * s;
        }
        store_vector<T, Aligned>(to + at, narrow<T>(x), rotated - at);
      }
    } else {
      for (int at = lane * V; at < t.pairs; at += kWarp * V) {
        float x[V], y[V], c, s;
        widen<T>(load_vector<T, Aligned>(from + at, t.pairs - at), x);
        widen<T>(load_vector<T, Aligned>(from + t.pairs + at, t.pairs - at), y);
#pragma unroll
        for (int e = 0; e < V; ++e) {
          if (at + e >= t.pairs) break;
          cos_sin(position, t.inv_freq[at + e], c, s);
          const float a = x[e], b = y[e];
          x[e] = a * c - b * s, y[e] = b * c + a * s;
        }
        store_vector<T, Aligned>(to + at, narrow<T>(x), t.pairs - at);
        store_vector<T, Aligned>(to + t.pairs + at, narrow<T>(y), t.pairs - at);
      }
    }
    if (from != to)
      for (int at = rotated + lane; at < t.width; at += kWarp) to[at] = from[at];
  }
}

template <class T> Heads<T> heads(const TensorView& x, const char* name, const TensorView& like, int64_t m, int64_t d) {
  check_form(x, name, like, 3);
  AUTOSEL_CHECK(x.size(0) == m && x.size(2) == d && same_dtype(x, like), name << ": size or dtype differs");
  return {data<T>(x), x.size(1), x.stride(0), x.stride(1)};
}

template <class T> bool aligned(const Heads<T>& h) {
  return uintptr_t(h.at) % 16 == 0 && h.row * int64_t(sizeof(T)) % 16 == 0 && h.head * int64_t(sizeof(T)) % 16 == 0;
}

void rope(TensorView q, TensorView k, TensorView positions, TensorView inv_freq, int64_t style, TensorView q_out,
          TensorView k_out, int64_t threads, int64_t grid, int64_t pdl) {
  AUTOSEL_CHECK(threads >= kWarp && threads <= kMostThreads && threads % kWarp == 0, "threads is " << threads);
  AUTOSEL_CHECK(grid >= 1 && grid <= kMostElements, "grid is " << grid);
  check_form(q, "q", q, 3), check_form(positions, "positions", q, 1), check_form(inv_freq, "inv_freq", q, 1);
  const int64_t m = q.size(0), d = q.size(2), pairs = inv_freq.size(0);
  AUTOSEL_CHECK(is(positions, kDLInt, 64) && positions.size(0) == m, "positions must be int64[" << m << "]");
  AUTOSEL_CHECK(is(inv_freq, kDLFloat, 32), "inv_freq must be fp32");
  AUTOSEL_CHECK(2 * pairs <= d, "inv_freq rotates " << 2 * pairs << " elements of a head of " << d);
  by_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    Turns<T> t{{heads<const T>(q, "q", q, m, d), heads<const T>(k, "k", q, m, d)},
               {heads<T>(q_out, "q_out", q, m, d), heads<T>(k_out, "k_out", q, m, d)},
               data<int64_t>(positions), positions.stride(0), data<float>(inv_freq), m, int(d), int(pairs)};
    AUTOSEL_CHECK(t.to[0].heads == t.from[0].heads && t.to[1].heads == t.from[1].heads, "rope: numbers of heads differ");
    Stream stream(q);
    Shape shape{dim3(unsigned(grid)), unsigned(threads), 0, pdl != 0};
    bool vectorised = style != 0 || pairs * int64_t(sizeof(T)) % 16 == 0;
    for (int i = 0; i < 2; ++i) vectorised = vectorised && aligned(t.from[i]) && aligned(t.to[i]);
    by_flag(vectorised, [&](auto is_aligned) {
      by_flag(style != 0, [&](auto interleaved) {
        launch(shape, stream, rope_heads<T, decltype(interleaved)::value, decltype(is_aligned)::value>, t);
      });
    });
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(rope, autosel::rope);
