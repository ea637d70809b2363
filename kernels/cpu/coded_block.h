// x[M,K] . w[N,K]^T from codes and scales for many rows of x: codes become weights in the block that block.h
// multiplies, once per block, and the register tile is that of plain weights.
//
// A weight is code x scale, plus the offset if there is one: one multiply-add in fp32; or (code - zero point) x scale.
// Lanes of fp32 keep it. For the bf16 dot it is rounded to bf16, once and as a whole, which the contract allows
// (docs/formats.md). An offset alone, or a code x scale beside an offset, is never rounded to bf16. If a row has one
// scale, the block holds the codes, minus the zero point, which are exact, and the scale multiplies the sum.
//
// A lane of a piece (coded.h) holds R neighbours along K, in R registers. Eight rows are transposed in registers like
// plain weights, and stored R lanes apart (R / 2 with the bf16 dot): the block has the order of K, and x is packed as
// for plain weights. While a block is made, the same lines of the next strip are prefetched: it takes longer than
// reading them. Figures: docs/kernels.md.
#pragma once
#include "coded.h"

namespace autosel {

// Registers of fp32 weights of several rows, or of pairs of neighbours in bf16: number q of a piece.
template <class T, class F, int q> static inline vreg weights_at(const vu* words, const Scaled& s) {
  using C = typename F::template Codes<float>;
  using S = typename F::Scales;
#if defined(AUTOSEL_BF16_DOT)
  if constexpr (kPaired<T>) {
    __m512 even = reinterpret_cast<__m512>(weight_of<S>(C::template numbers<2 * q>(words), s));
    __m512 odd = reinterpret_cast<__m512>(weight_of<S>(C::template numbers<2 * q + 1>(words), s));
    alignas(64) static constexpr uint16_t turns[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return reinterpret_cast<vreg>(
        _mm512_permutexvar_epi16(_mm512_load_si512(turns), (__m512i)_mm512_cvtne2ps_pbh(odd, even)));
  } else
#endif
    return weight_of<S>(C::template numbers<q>(words), s);
}

// Piece p of eight rows from n on, `rows` of them real: each row's weights go to one column of `to`. The same piece of
// the row `apart` rows further is prefetched.
template <class T, class F>
static inline void turn_piece(const Coded& w, int64_t n, int64_t rows, int64_t apart, int64_t p, float* to) {
  using C = typename F::template Codes<float>;
  using S = typename F::Scales;
  constexpr int P = kPerLane<T>, R = C::kRegisters / P;
  static_assert(C::place(0, 1) == C::kRegisters && C::place(1, 0) == 1, "a lane of a piece holds neighbours along K");
  const int64_t left = w.columns - p * C::kCodes;
  const bool whole = left >= C::kCodes;
  vu words[8][C::kWords] = {};
  Scaled scaled[8] = {};
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) {
    if (r >= rows) continue;
    const uint8_t *codes = w.row(n + r), *scales = w.scales_of(n + r);
    for (int64_t at = 0; at < C::kBytes; at += 64) prefetch_l2(codes + apart * w.stride + p * C::kBytes + at);
    if (whole || C::kFilled)
      for (int line = 0; line < C::kWords; ++line) words[r][line] = C::word(codes, p, line);
    else memcpy(&words[r][0], codes + p * C::kBytes, size_t(left));
    scaled[r] = whole ? S::template piece<C>(scales, p) : S::template last<C>(scales, p, w.columns);
  }
  each_of([&](auto q) __attribute__((always_inline)) {
    vreg v[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r) v[r] = weights_at<T, F, q>(words[r], scaled[r]);
    exchange_all<1>(v), exchange_all<2>(v), exchange_all<4>(v);
#pragma GCC unroll 2
    for (int half = 0; half < kLanes / 8; ++half)
#pragma GCC unroll 8
      for (int l = 0; l < 8; ++l) {
        const int64_t lane = (half * 8 + l) * R + q;
        if (whole || lane < lanes_of<T>(left)) store_eight(to + lane * kStrip, v[l], half);
      }
  }, std::make_integer_sequence<int, R>{});
  if (P == 2 && !whole && left % 2 == 1)  // the second weight of the last lane lies behind K
    for (int r = 0; r < 8; ++r) {
      float& last = to[left / 2 * kStrip + r];
      last = bits_to_float(float_to_bits(last) & 0xffffu);
    }
}

// How the rows of codes of format F become lanes.
template <class T, class F> struct CodedStrips {
  static_assert(!F::Scales::kOfRow || !F::Scales::kOffsets || F::Scales::kZeros, "`finish` adds no offsets");
  static constexpr bool kAsks = false;  // `turn` does
  static void turn(const Half<Coded>& half, int64_t j, int64_t count, float* to) {
    constexpr int64_t kCodes = F::template Codes<float>::kCodes;
    for (int64_t group = 0; group < kLanes; group += 8)
      for (int64_t k = j; k < j + count; k += kCodes)
        turn_piece<T, F>(*half.w, half.first + group, half.rows - group, half.apart, k / kCodes,
                         to + group + (k - j) / kPerLane<T> * kStrip);
  }
  static void finish([[maybe_unused]] const Strip<Coded>& strip, [[maybe_unused]] float* sums,
                     [[maybe_unused]] int64_t m) {
    if constexpr (F::Scales::kOfRow)
      for (int v = 0; v < 2; ++v) {
        const Half<Coded>& half = strip.half[v];
        float scales[kLanes] = {};
        for (int64_t c = 0; c < half.rows; ++c)
          scales[c] = number_at<typename F::Scales::Stored>(half.w->scales_of(half.first + c));
        for (float* at = sums + v * kLanes; at < sums + m * kStrip; at += kStrip) store(at, load(at) * load(scales));
      }
  }
};

// As `blocked` in block.h.
template <class T, int Parts, class X, class Done, class F = OnlyFormat>
static void blocked_coded(const X& x, int64_t m, const Coded* w, int64_t threads, int64_t k_block, int64_t m_block,
                          const Done& done) {
  AUTOSEL_CHECK(k_block > 0 && k_block % kBlockCodes == 0, "k_block must be whole blocks of " << kBlockCodes);
  const Walk walk{k_block, (w->columns / k_block + 1) * k_block, m_block};
  blocked<T, Parts, CodedStrips<T, F>>(x, m, w, threads, walk, done);
}

// rows > 0: stream (few rows of x), with `rows` rows of weights together; rows = 0: in blocks.
template <class T, int Parts, class X, class Done>
static void project_coded(const X& x, int64_t m, const Coded* w, int64_t threads, int64_t rows, int64_t k_block,
                          int64_t m_block, const Done& done) {
  if (rows > 0) stream_coded<T, Parts>(x, m, w, threads, rows, done);
  else blocked_coded<T, Parts>(x, m, w, threads, k_block, m_block, done);
}

}  // namespace autosel
