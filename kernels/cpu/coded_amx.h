// Codes by AMX: x[M,K] . w[N,K]^T for a few rows of bf16 x. A piece of 16 rows of codes becomes bf16 weights in L1, which
// the tiles multiply by all rows of x (amx.h) while the next piece is made.
//
// A tile adds up groups of K, so weights are whole before they are multiplied: code x scale, plus the offset if there is
// one, in fp32, and rounded to bf16 once, as in coded_block.h. If a row has one scale, the tiles multiply the codes
// (minus the zero point), which are exact, and the scale multiplies the sum. So the figures of the contract are those
// of many rows of x. For 32 codes of 4 bits: 2 operations, then 7 with the scale of a group.
// x lies in the order of the registers of codes: those of a piece, one after another; where weights are rounded, each
// register's even elements come before its odd ones, because one instruction rounds both.
//
// Figures: docs/kernels.md.
#pragma once
#include "codes.h"

namespace autosel {

template <class T, class F> static inline int64_t whole_pieces(int64_t k) {
  constexpr int64_t kCodes = F::template Codes<T>::kCodes;
  return (k + kCodes - 1) / kCodes;
}

#if defined(AUTOSEL_AMX)
template <class F> constexpr bool kAsCodes = F::Scales::kOfRow && !F::Scales::kZeros;

// Element e of register r of a piece's weights is this code of the piece.
template <class F> constexpr int64_t amx_place(int64_t r, int64_t e) {
  return F::template Codes<bf16>::place(r, kAsCodes<F> ? e : e < kLanes ? 2 * e : 2 * (e - kLanes) + 1);
}

template <class F, class X> static void pack_for_amx_codes(const Matrix<const X>& x, bf16* out) {
  using C = typename F::template Codes<bf16>;
  static thread_local Scratch scratch;
  const int64_t pieces = whole_pieces<bf16, F>(x.columns), wide = pieces * C::kCodes;
  bf16* rows = scratch.get<bf16>(x.rows * wide);
  alignas(64) static constexpr uint16_t turns[32] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                     1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
  bf16 room[C::kCodes];
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t p = 0; p < pieces; ++p) {
      bf16* to = rows + i * wide + p * C::kCodes;
      lay_out<bf16, C>(piece_of<bf16, C>(x, i, p * C::kCodes, room), to, kAmxWidth);
      if constexpr (!kAsCodes<F>)
        for (int r = 0; r < C::kRegisters; ++r, to += kAmxWidth)
          _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(turns), _mm512_loadu_si512(to)));
    }
  pack_for_amx({rows, x.rows, wide, wide}, out);
}

// Register r of a piece of one row as bf16 weights.
template <class F, int r> static inline __m512i amx_weights(const vu* words, const Scaled& s) {
  const vu pairs = F::template Codes<bf16>::template numbers<r>(words);
  if constexpr (kAsCodes<F>) return reinterpret_cast<__m512i>(pairs);
  auto weight = [&](vu half) __attribute__((always_inline)) {
    return reinterpret_cast<__m512>(weight_of<typename F::Scales>(reinterpret_cast<vreg>(half), s));
  };
  return (__m512i)_mm512_cvtne2ps_pbh(weight(pairs & 0xffff0000u), weight(pairs << 16));
}

// The codes of the last piece before column k, as bits of each register; infinite scales make NaN of those behind it.
template <class F> struct AmxValid {
  static constexpr int kRegisters = F::template Codes<bf16>::kRegisters;
  uint32_t bits[kRegisters] = {};
  AmxValid() = default;
  explicit AmxValid(int64_t k) {
    const int64_t left = k - (whole_pieces<bf16, F>(k) - 1) * F::template Codes<bf16>::kCodes;
    for (int r = 0; r < kRegisters; ++r)
      for (int e = 0; e < kAmxWidth; ++e) bits[r] |= uint32_t(amx_place<F>(r, e) < left) << e;
  }
};

// Columns of y from codes; those of `coming` are prefetched, as many lines as are read.
template <class F, bool Few>
AUTOSEL_WITH_AMX static void amx_codes(const Coded& w, int64_t n, const bf16* x, int64_t m, const AmxValid<F>& valid,
                                       const Coming& coming, const AmxColumns& columns, float* out) {
  using C = typename F::template Codes<bf16>;
  using S = typename F::Scales;
  constexpr int64_t kTall = Few ? kAmxFew : kAmxColumns;
  constexpr auto registers = std::make_integer_sequence<int, C::kRegisters>{};
  const int64_t rows = w.rows - n < kTall ? w.rows - n : kTall, pieces = whole_pieces<bf16, F>(w.columns);
  const int64_t left = w.columns - (pieces - 1) * C::kCodes;  // codes of the last piece
  // Sequences in turn: int8-row 1.07 times as fast at M=4, 1.14 at 8. Where groups have scales, the conversion takes
  // longer than memory: 0.97-0.99 with four.
  constexpr int64_t kSequences = S::kOfRow ? kInTurn : 1;
  const int64_t sequence = kAmxColumns / kSequences * w.stride;
  alignas(64) bf16 weights[2][kTall][C::kCodes];
  const uint8_t *codes_of[kTall], *scales_of[kTall];
  for (int64_t i = 0; i < rows; ++i) codes_of[i] = w.row(n + i), scales_of[i] = w.scales_of(n + i);
  auto make = [&](int64_t p) {
    const bool whole = p + 1 < pieces || left == C::kCodes;
    if constexpr (!S::kOfRow)
      for (int64_t at = 0; at == 0 || at < S::template bytes<C>(kTall); at += 64)
        prefetch_l2(coming.scales + S::template bytes<C>(p * kTall) + at);
    for (int64_t i = 0; i < rows; ++i) {
      const uint8_t *codes = codes_of[i], *scales = scales_of[i];
      const int64_t ahead = i % kSequences * sequence + (p * kTall + i) / kSequences * C::kBytes;
      for (int64_t at = 0; at < C::kBytes; at += 64) prefetch_l2(coming.codes + ahead + at);
      vu words[C::kWords] = {};
      if (whole || C::kFilled)
        for (int line = 0; line < C::kWords; ++line) words[line] = C::word(codes, p, line);
      else memcpy(&words[0], codes + p * C::kBytes, size_t(left));
      const Scaled scaled = whole ? S::template piece<C>(scales, p) : S::template last<C>(scales, p, w.columns);
      bf16* to = weights[p % 2][i];
      each_of([&](auto r) __attribute__((always_inline)) {
        __m512i found = amx_weights<F, r>(words, scaled);
        if (!whole) found = _mm512_maskz_mov_epi16(valid.bits[r], found);
        _mm512_store_si512(to + kAmxWidth * r, found);
      }, registers);
    }
  };
  amx_clear<Few>();
  if (pieces > 0) make(0);
  for (int64_t p = 0; p < pieces; ++p) {
    if (p + 1 < pieces) make(p + 1);
    amx_fence();
    for (int64_t r = 0; r < C::kRegisters; ++r, x += kAmxWidth * m)
      amx_multiply<Few>(weights[p % 2][0] + kAmxWidth * r, C::kCodes * int64_t(sizeof(bf16)), x, m);
    amx_fence();
  }
  amx_sums<Few>(m, columns.skipped, columns.taken, out);
  if constexpr (S::kOfRow)
    for (int64_t c = 0; c < columns.taken; ++c) {
      const float scale = number_at<typename S::Stored>(w.scales_of(n + columns.skipped + c));
      for (int64_t i = 0; i < m; ++i) out[i * columns.taken + c] *= scale;
    }
}
#endif

}  // namespace autosel
