// Rows that run along K become lanes: the transposition of x or of weights for products whose lanes run along M or N.
#pragma once
#include "project.h"

namespace autosel {

// kPaired: a 32-bit lane holds two neighbours along K, multiplied by one bf16 dot instruction.
template <class T> constexpr bool kPaired = false;
#if defined(AUTOSEL_BF16_DOT)
template <> inline constexpr bool kPaired<bf16> = true;
#endif

// The type of x between its rounding and the dot: bf16 if the instruction takes it, otherwise fp32.
template <class T> using Wide = std::conditional_t<kPaired<T>, bf16, float>;

template <class T> constexpr int kPerLane = kPaired<T> ? 2 : 1;  // elements along K in a lane
template <class T> static inline int64_t lanes_of(int64_t k) { return (k + kPerLane<T> - 1) / kPerLane<T>; }

template <class T> static inline vreg lanes_at(const T* p) { return load(p); }
template <class T> static inline vreg lanes_at_tail(const T* p, int64_t n) { return load_tail(p, n); }
#if defined(AUTOSEL_BF16_DOT)
template <> inline vreg lanes_at(const bf16* p) { return reinterpret_cast<vreg>(_mm512_loadu_si512(p)); }
template <> inline vreg lanes_at_tail(const bf16* p, int64_t n) {
  bf16 buffer[2 * kLanes] = {};
  memcpy(buffer, p, size_t(n) * sizeof(bf16));
  return lanes_at(buffer);
}
#endif

// bf16 to be widened, eight lanes: neighbours along K are transposed as the 32-bit lane they share, and separated at
// the store. Half the loads and half the exchanges of widening first.
template <class S, int kPer> constexpr bool kSplit = std::is_same_v<S, bf16> && kPer == 1 && kLanes == 8;

// kLanes 32-bit lanes of neighbours, zeros after n elements.
static inline vreg neighbours_at(const bf16* p, int64_t n) {
  vreg v{};
  memcpy(&v, p, n < 2 * kLanes ? size_t(n) * sizeof(bf16) : sizeof v);
  return v;
}

// Swaps a's lanes with bit `Stride` set for b's with it clear.
template <int Stride> static inline void exchange(vreg& a, vreg& b) {
  vi low, high;
  for (int i = 0; i < kLanes; ++i) {
    low[i] = i & Stride ? kLanes + i - Stride : i;
    high[i] = i & Stride ? kLanes + i : i + Stride;
  }
  vreg l = __builtin_shuffle(a, b, low), h = __builtin_shuffle(a, b, high);
  a = l, b = h;
}

template <int Stride> static inline void exchange_all(vreg* v) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    if (!(i & Stride)) exchange<Stride>(v[i], v[i + Stride]);
}

// Lanes from 8 * half on.
static inline void store_eight(float* p, vreg v, int half) {
#if defined(AUTOSEL_AVX512)
  __m512 z = reinterpret_cast<__m512>(v);
  _mm256_storeu_ps(p, half ? _mm512_extractf32x8_ps(z, 1) : _mm512_castps512_ps256(z));
#else
  (void)half, store(p, v);
#endif
}

// One step of turn_rows: eight rows of as many elements as a register takes. Whole: all of them are there.
template <class S, int kPer, bool Whole>
static inline void turn_eight(const S* from, int64_t stride, int64_t rows, int64_t left, float* out, int64_t pitch) {
  constexpr bool split = kSplit<S, kPer>;
  const int64_t lanes = (left + kPer - 1) / kPer;
  vreg v[8];
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) {
    const S* p = from + r * stride;
    if (!Whole && r >= rows) v[r] = vreg{};
    else if constexpr (split) v[r] = neighbours_at(p, Whole ? 2 * kLanes : left);
    else v[r] = Whole || left >= kLanes * kPer ? lanes_at(p) : lanes_at_tail(p, left);
  }
  exchange_all<1>(v), exchange_all<2>(v), exchange_all<4>(v);
  if constexpr (split) {
#pragma GCC unroll 8
    for (int l = 0; l < 8; ++l, out += 2 * pitch) {
      vu both = reinterpret_cast<vu>(v[l]);
      if (Whole || 2 * l < lanes) store_eight(out, reinterpret_cast<vreg>(both << 16), 0);
      if (Whole || 2 * l + 1 < lanes) store_eight(out + pitch, reinterpret_cast<vreg>(both & 0xffff0000u), 0);
    }
  } else {
#pragma GCC unroll 2
    for (int half = 0; half < kLanes / 8; ++half)
#pragma GCC unroll 8
      for (int l = 0; l < 8; ++l, out += pitch)
        if (Whole || half * 8 + l < lanes) store_eight(out, v[l], half);
  }
}

// to[l * pitch + r] = lane l of row r, r < columns; missing rows and elements are zero.
//
// Eight rows at a time: sixteen rows a multiple of 4 KB apart share 8 ways of L1 and evict each other (6.4 cycles per
// line for sixteen, 4.5 for eight; a staged copy of the rows 7.2). Groups go from the last to the first and write eight
// values per lane, whatever `columns`: a later group overwrites the surplus, except 7 values after the last lane.
template <class S, int kPer>
static void turn_rows(const S* from, int64_t stride, int64_t rows, int64_t k, float* to, int64_t columns,
                      int64_t pitch) {
  constexpr int64_t lanes = kSplit<S, kPer> ? 2 * kLanes : kLanes, step = lanes * kPer;
  for (int64_t group = (columns - 1) / 8 * 8; group >= 0; group -= 8) {
    const S* p = from + group * stride;
    float* out = to + group;
    int64_t j = 0;
    if (rows - group >= 8)
      for (; j + step <= k; j += step, out += lanes * pitch)
        turn_eight<S, kPer, true>(p + j, stride, 8, step, out, pitch);
    for (; j < k; j += step, out += lanes * pitch)
      turn_eight<S, kPer, false>(p + j, stride, rows - group, k - j, out, pitch);
  }
}

}  // namespace autosel
