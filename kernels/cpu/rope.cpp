// rope   (a, b) -> (a cos - b sin, b cos + a sin) over the first R of D elements of each head; the rest is copied
//        style 0: pairs (i, i + R/2); style 1: pairs (2i, 2i + 1)          angle = position * inv_freq[i]
//        q[M,Hq,D], k[M,Hkv,D], positions[M] int64, inv_freq[R/2] fp32 -> q_out[M,Hq,D], k_out[M,Hkv,D]; rows, heads strided
//
// bytes   2 M (Hq + Hkv) D b      FLOPs   3 M (Hq + Hkv) R
// roofline at M=1, 32 + 8 heads of 128, bf16: 20 KB in L1 and L2: about 0.3 us; the 64 sines and cosines 0.1 us.
// knobs   threads (knobs/cpu/rows.py): shares of tokens; at M=1 a fork-join costs more than the work.
// Sine and cosine are computed once per token, in double: with a float's 24 bits, an angle of 131072 would have an
// error of 0.008; a double's range reduction by one multiple of pi/2 is exact enough up to positions of 2^31. All heads
// share them. Each pair is read before it is written: q_out may be q.
#include "rotate.h"

namespace autosel {

template <class T>
static void heads(const TensorView& x, const TensorView& y, int64_t m, const Turn& t, int64_t pairs, int64_t style) {
  int64_t rest = x.size(2) - 2 * pairs;
  for (int64_t h = 0; h < x.size(1); ++h) {
    const T* from = data<T>(x) + m * x.stride(0) + h * x.stride(1);
    T* to = data<T>(y) + m * y.stride(0) + h * y.stride(1);
    rotate(from, to, t, pairs, style);
    if (rest > 0 && from != to) memcpy(to + 2 * pairs, from + 2 * pairs, size_t(rest) * sizeof(T));
  }
}

static void check(const TensorView& x, const TensorView& y, int64_t m, int64_t rotated) {
  AUTOSEL_CHECK(x.ndim() == 3 && y.ndim() == 3, "rope takes q[M,Hq,D] and k[M,Hkv,D]");
  AUTOSEL_CHECK(x.size(0) == m && x.size(2) >= rotated, "rope: sizes differ, or more rotates than a head has");
  for (int i = 0; i < 3; ++i) AUTOSEL_CHECK(x.size(i) == y.size(i), "rope: sizes differ");
  AUTOSEL_CHECK(x.size(2) <= 1 || (x.stride(2) == 1 && y.stride(2) == 1), "rope: last dimension not contiguous");
}

static void rope(TensorView q, TensorView k, TensorView positions, TensorView inv_freq, int64_t style, TensorView q_out,
                 TensorView k_out, int64_t threads) {
  AUTOSEL_CHECK(positions.ndim() == 1 && inv_freq.ndim() == 1, "rope takes positions[M] and inv_freq[R/2]");
  int64_t m = positions.size(0), pairs = inv_freq.size(0);
  AUTOSEL_CHECK(pairs <= kMostPairs, "rope: rotates at most " << 2 * kMostPairs << " elements of a head");
  check(q, q_out, m, 2 * pairs), check(k, k_out, m, 2 * pairs);
  DLDataType p = positions.dtype(), f = inv_freq.dtype();
  AUTOSEL_CHECK(p.code == kDLInt && p.bits == 64, "rope: positions must be int64");
  AUTOSEL_CHECK(f.code == kDLFloat && f.bits == 32 && (pairs <= 1 || inv_freq.stride(0) == 1), "rope: inv_freq must be fp32");
  AUTOSEL_CHECK(same_dtype(q, k) && same_dtype(q, q_out) && same_dtype(k, k_out), "rope: dtypes differ");
  by_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    parallel(threads, m, 1, [&](int64_t begin, int64_t end, int) {
      Turn t;
      for (int64_t i = begin; i < end; ++i) {
        turn(t, data<int64_t>(positions)[i * positions.stride(0)], data<float>(inv_freq), pairs, style != 0);
        heads<T>(q, q_out, i, t, pairs, style);
        heads<T>(k, k_out, i, t, pairs, style);
      }
    });
  });
}

}  // namespace autosel

AUTOSEL_EXPORT(rope, autosel::rope);
