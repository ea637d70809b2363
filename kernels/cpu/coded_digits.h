// One row of bf16 x against codes of 8 bits with one scale per row, in integers: y = scale * 2^e * sum of codes[k] X[k].
//
// A bf16 has 8 significant bits, so a row of x whose exponents differ by at most 22 is exactly X[k] * 2^e with integers
// |X| < 2^30. Each is 2 to 4 digits of -128 .. 127 to the base 256, as few as the row needs, and vpdpbusd multiplies 64
// codes by 64 digits: 4 instructions for 64 codes where numbers in bf16 take 10. It wants one factor without a sign, so
// the codes are code + 128 (one xor), and 128 sum X is subtracted at the end, like a zero point's product. Sums are exact
// up to K = 65,536: 32 bits in a lane, 64 in the end. Other rows of x (a wider range, infinity, NaN) are multiplied as
// before. Typical rows take 3 digits; a row of products of activations 4.
//
// Against two lookups of bytes and two dots, in turn (a loop of its own, not kept), from 1 GB on large pages, two cores
// of Emerald Rapids, 2026-11-30, K = 2,048: 21 -> 25 GB/s with 4 digits, 26 with 3, where a loop that only loads and
// prefetches reads 29; from L2 17 -> 47 and 55 GB/s per core. Rejected there: codes widened to fp32 and FMA (23 GB/s; 26
// from L2); prefetches into L1 or past L2 (0.95, 0.6); distances of 12 to 128 KB (0.97-1.02). With a scale per group,
// each piece of 64 or 128 codes becomes fp32 by digits before the scales multiply it: 0.98 to 0.99 of the lookups' speed
// (int4-g128, q4_0, q8_0).
#pragma once
#include "codes.h"

namespace autosel {

#if defined(AUTOSEL_BF16_DOT)
#define AUTOSEL_WITH_VNNI __attribute__((target("avx512vnni")))

template <class T, class F>
constexpr bool kByDigits = kPaired<T> && F::Scales::kOfRow && (!F::Scales::kOffsets || F::Scales::kZeros) &&
                           std::is_same_v<typename F::template Codes<T>, Octets<T>>;
constexpr int64_t kMostByDigits = 65536, kDigits = 64;  // K; codes of a piece
constexpr int kMostDigits = 4;

// Before the digits [piece][digit][64]; no digits: the row of x follows as for the dots.
struct alignas(64) DigitsHead {
  int64_t digits, sum;  // of each X; of all X
  double unit;          // 2^e
};
constexpr int64_t kHeadElements = sizeof(DigitsHead) / sizeof(bf16);

template <class T, class F> static inline bool by_digits(int64_t m, int64_t k) {
  if constexpr (!kByDigits<T, F>) return false;
  static const bool has = __builtin_cpu_supports("avx512vnni");
  return has && m == 1 && k <= kMostByDigits;
}

static inline int64_t digits_panel_elements(int64_t k) {
  return kHeadElements + (k + kDigits - 1) / kDigits * kDigits * kMostDigits / int64_t(sizeof(bf16));
}

// The exponent field of a bf16; a subnormal's is that of the smallest normal number.
static inline int exponent_field(uint16_t bits) {
  int field = bits >> 7 & 255;
  return field ? field : 1;
}

// X of a bf16 if fields count from `least` on.
static inline int32_t whole_number(uint16_t bits, int least) {
  int32_t size = ((bits & 127) | (bits >> 7 & 255 ? 128 : 0)) << ((bits & 0x7fff) ? exponent_field(bits) - least : 0);
  return bits & 0x8000 ? -size : size;
}

// Digits that hold every number of the row, 0 if that takes too many; sets the least exponent field.
static inline int64_t digits_of_row(const bf16* x, int64_t k, int& least) {
  int lowest = 255, highest = 1;
  for (int64_t i = 0; i < k; ++i) {
    const int field = exponent_field(x[i].bits), there = (x[i].bits & 0x7fff) ? field : 255;
    lowest = there < lowest ? there : lowest;
    highest = field > highest ? field : highest;
  }
  least = lowest < highest ? lowest : highest;  // a row of zeros has no lowest field
  const int bits = 8 + highest - least;         // |X| < 2^bits; D digits hold less than .498 * 256^D
  return highest == 255 || bits + 2 > 8 * kMostDigits ? 0 : bits <= 14 ? 2 : bits <= 22 ? 3 : 4;
}

// Writes the row's digits, or only a head without digits; returns whether there are any.
static inline bool pack_digits(const bf16* x, int64_t k, void* panel) {
  DigitsHead& head = *static_cast<DigitsHead*>(panel);
  int least;
  head = {digits_of_row(x, k, least), 0, 0.0};
  if (!head.digits) return false;
  head.unit = std::ldexp(1.0, least - 134);
  int8_t* to = reinterpret_cast<int8_t*>(&head + 1);
  for (int64_t p = 0; p < k; p += kDigits, to += head.digits * kDigits) {
    int32_t left[kDigits];
    for (int64_t i = 0; i < kDigits; ++i) left[i] = p + i < k ? whole_number(x[p + i].bits, least) : 0;
    for (int64_t i = 0; i < kDigits; ++i) head.sum += left[i];
    for (int64_t d = 0; d < head.digits; ++d)
      for (int64_t i = 0; i < kDigits; ++i) {
        const int8_t digit = int8_t(left[i]);
        to[d * kDigits + i] = digit;
        left[i] = (left[i] - digit) >> 8;
      }
  }
  return true;
}

// As coded_block, for R rows of codes and a row of x with this many digits.
template <class F, int Digits, int R>
AUTOSEL_WITH_VNNI static void digits_block(const Coded& w, int64_t n, const bf16* x, const Coming& coming, float* out) {
  using S = typename F::Scales;
  const DigitsHead& head = reinterpret_cast<const DigitsHead*>(x)[-1];
  const __m512i flip = _mm512_set1_epi8(char(0x80));
  const uint8_t* codes = w.row(n);
  __m512i acc[R][Digits];
  for (int i = 0; i < R; ++i)
    for (int d = 0; d < Digits; ++d) acc[i][d] = _mm512_setzero_si512();
  const bool turn = R > 1 && w.stride >= kShortRow && asks_in_turn();  // rows are sequences of lines
  const int64_t next_row = turn ? w.stride : kDigits, next_piece = turn ? kDigits : R * kDigits;
  const int64_t pieces = (w.columns + kDigits - 1) / kDigits, left = w.columns % kDigits;
  for (int64_t p = 0; p < pieces; ++p) {
    const bool rest = left && p + 1 == pieces;
    __m512i digit[Digits];
#pragma GCC unroll 4
    for (int d = 0; d < Digits; ++d) digit[d] = _mm512_loadu_si512(x + (p * Digits + d) * (kDigits / 2));
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) {
      prefetch_l2(coming.codes + p * next_piece + i * next_row);
      const uint8_t* at = codes + i * w.stride + p * kDigits;
      const __m512i some = rest ? _mm512_maskz_loadu_epi8((uint64_t(1) << left) - 1, at) : _mm512_loadu_si512(at);
      const __m512i positive = _mm512_xor_si512(some, flip);
#pragma GCC unroll 4
      for (int d = 0; d < Digits; ++d) acc[i][d] = _mm512_dpbusd_epi32(acc[i][d], positive, digit[d]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i) {
    int64_t total = -128 * head.sum;
    for (int d = 0; d < Digits; ++d) total += int64_t(_mm512_reduce_add_epi32(acc[i][d])) << (8 * d);
    using Stored = typename S::Stored;
    const uint8_t* scale = w.scales_of(n + i);
    double sum = double(total);
    if constexpr (S::kZeros) sum -= double(number_at<Stored>(scale + sizeof(Stored))) * double(head.sum);
    out[i] = float(sum * head.unit * double(number_at<Stored>(scale)));
  }
}

template <class F, int R> static auto digits_block_of(int64_t digits) {
  return digits == 2 ? digits_block<F, 2, R> : digits == 3 ? digits_block<F, 3, R> : digits_block<F, 4, R>;
}
#endif

}  // namespace autosel
