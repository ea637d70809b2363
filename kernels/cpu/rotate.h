// The rotation of rope.cpp, for all kernels that rotate heads: first the angles of a position, then each head.
#pragma once
#include "tensor.h"

namespace autosel {

constexpr int64_t kMostPairs = 512;
typedef double vdouble __attribute__((vector_size(kLanes * 8)));
typedef int64_t vlong __attribute__((vector_size(kLanes * 8)));

struct Turn {  // cos and sin of one position's angles; style 1: each twice, sin with alternating sign
  alignas(64) float cos[2 * kMostPairs + kLanes], sin[2 * kMostPairs + kLanes];
};

// cos and sin of x by Taylor's series on [-pi/4, pi/4]: absolute error below 3e-11 at the interval's ends, plus x by
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

template <class T> static void rotate_half(const T* x, T* y, const Turn& t, int64_t pairs) {
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

template <class T> static void rotate_interleaved(const T* x, T* y, const Turn& t, int64_t pairs) {
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

// Rotates the first 2 * pairs elements of a head by style 0 or 1. y may be x.
template <class T> static void rotate(const T* x, T* y, const Turn& t, int64_t pairs, int64_t style) {
  if (style) rotate_interleaved(x, y, t, pairs);
  else rotate_half(x, y, t, pairs);
}

}  // namespace autosel
