// rope   (a, b) -> (a cos - b sin, b cos + a sin) over the first R of D elements of each head; the rest is copied
//        style 0: pairs (i, i + R/2); style 1: pairs (2i, 2i + 1)          angle = position * inv_freq[i]
//        q[M,Hq,D], k[M,Hkv,D], positions[M] int64, inv_freq[R/2] fp32 -> q_out[M,Hq,D], k_out[M,Hkv,D]; rows, heads strided
//
// bytes   2 M (Hq + Hkv) D b      FLOPs   3 M (Hq + Hkv) R
// roofline at M=1, 32 + 8 heads of 128, bf16: 20 KB in L1 and L2: about 0.3 us; the 64 sines and cosines 0.1 us.
// knobs   threads (knobs/cpu/rows.py): by tokens; at M=1 a fork-join costs more than the work.
// Sine and cosine once a token, in double: a float's 24 bits would leave an angle of 131072 with an error of 0.008, and
// a double's range reduction by one multiple of pi/2 is exact enough up to positions of 2^31. All heads share them.
// Each pair is read before it is written: q_out may be q.
#include "tensor.h"

namespace autosel {

constexpr int64_t kMostPairs = 512;
typedef double vdouble __attribute__((vector_size(kLanes * 8)));
typedef int64_t vlong __attribute__((vector_size(kLanes * 8)));

struct Turn {  // cos and sin of one position's angles; style 1: each twice, sin with alternating sign
  alignas(64) float cos[2 * kMostPairs + kLanes], sin[2 * kMostPairs + kLanes];
};

// cos and sin of x by Taylor's series on [-pi/4, pi/4]: absolute error below 3e-11 at the interval's ends, and x by
// |n| * 2^-53 pi from the reduction; both then round to float.
static inline void cos_sin(vdouble x, vreg& cos, vreg& sin) {
  const vdouble magic = vdouble{} + 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, kept in the low bits
  vdouble shifted = x * 0.63661977236758134308 + magic, n = shifted - magic;
  vlong quadrant = reinterpret_cast<vlong>(shifted);
  vdouble r = (x - n * 1.5707963267341256142) - n * 6.0771005065061922e-11;  // pi/2 in two parts, the first of 33 bits
  vdouble s = r * r;
  vdouble a = ((((-1.0 / 39916800 * s + 1.0 / 362880) * s - 1.0 / 5040) * s + 1.0 / 120) * s - 1.0 / 6) * s * r + r;
  vdouble b = ((((-1.0 / 3628800 * s + 1.0 / 40320) * s - 1.0 / 720) * s + 1.0 / 24) * s - 0.5) * s + 1.0;
  vlong odd = (quadrant & 1) != 0;
  vdouble c = odd ? a : b, d = odd ? b : a;
  c = ((quadrant + 1) & 2) != 0 ? -c : c;
  d = (quadrant & 2) != 0 ? -d : d;
  cos = __builtin_convertvector(c, vreg), sin = __builtin_convertvector(d, vreg);
}

static void turn(Turn& t, int64_t position, const float* inv_freq, int64_t pairs, bool interleaved) {
  for (int64_t i = 0; i < pairs; i += kLanes) {
    int64_t n = pairs - i < kLanes ? pairs - i : kLanes;
    vreg f = n < kLanes ? load_tail(inv_freq + i, n) : load(inv_freq + i), c, s;
    cos_sin(__builtin_convertvector(f, vdouble) * double(position), c, s);
    if (!interleaved) {
      store(t.cos + i, c), store(t.sin + i, s);
    } else {
      for (int k = 0; k < n; ++k) {
        t.cos[2 * (i + k)] = t.cos[2 * (i + k) + 1] = c[k];
        t.sin[2 * (i + k)] = -s[k], t.sin[2 * (i + k) + 1] = s[k];
      }
    }
  }
}

template <class T> static void half(const T* x, T* y, const Turn& t, int64_t pairs) {
  int64_t i = 0;
  for (; i + kLanes <= pairs; i += kLanes) {
    vreg a = load(x + i), b = load(x + pairs + i), c = load(t.cos + i), s = load(t.sin + i);
    store(y + i, fma(a, c, -(b * s))), store(y + pairs + i, fma(b, c, a * s));
  }
  if (int64_t n = pairs - i; n > 0) {
    vreg a = load_tail(x + i, n), b = load_tail(x + pairs + i, n), c = load_tail(t.cos + i, n), s = load_tail(t.sin + i, n);
    store_tail(y + i, fma(a, c, -(b * s)), n), store_tail(y + pairs + i, fma(b, c, a * s), n);
  }
}

static inline vreg swap_neighbours(vreg v) {
  vi lanes;
  for (int k = 0; k < kLanes; ++k) lanes[k] = k ^ 1;
#if defined(__clang__)
  vreg out;
  for (int k = 0; k < kLanes; ++k) out[k] = v[k ^ 1];
  return out;
#else
  return __builtin_shuffle(v, lanes);
#endif
}

template <class T> static void interleaved(const T* x, T* y, const Turn& t, int64_t pairs) {
  int64_t i = 0, n = 2 * pairs;
  for (; i + kLanes <= n; i += kLanes) {
    vreg v = load(x + i);
    store(y + i, fma(v, load(t.cos + i), swap_neighbours(v) * load(t.sin + i)));
  }
  if (i < n) {
    vreg v = load_tail(x + i, n - i), c = load_tail(t.cos + i, n - i), s = load_tail(t.sin + i, n - i);
    store_tail(y + i, fma(v, c, swap_neighbours(v) * s), n - i);
  }
}

template <class T>
static void heads(const TensorView& x, const TensorView& y, int64_t m, const Turn& t, int64_t pairs, int64_t style) {
  int64_t rest = x.size(2) - 2 * pairs;
  for (int64_t h = 0; h < x.size(1); ++h) {
    const T* from = data<T>(x) + m * x.stride(0) + h * x.stride(1);
    T* to = data<T>(y) + m * y.stride(0) + h * y.stride(1);
    if (style) interleaved(from, to, t, pairs);
    else half(from, to, t, pairs);
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
