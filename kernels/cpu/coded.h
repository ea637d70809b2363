// Weights as codes with scales: y[m] = sum over groups g of scale[n, g] * (x[m, g] . codes[n, g]); if groups have offsets,
// plus offset[n, g] * (sum of x[m, g]), whose sums are computed once per row of x. If groups have zero points,
// scale[n, g] * (x[m, g] . codes[n, g] - zero[n, g] * (sum of x[m, g])): no product of a scale and a zero is rounded.
//
//   Nibbles   codes of 4 bits, unsigned, the number is code - bias: a 32-bit word holds 8 neighbours along K, the first in
//             its lowest bits; a row is whole lines of 128 codes
//   Octets    codes of 8 bits, signed, one after another
//   Floats    e4m3 floats of 8 bits, one after another: any number, subnormals and NaN too
//   Fours     codes of 4 bits, unsigned, in blocks of 256 (two lines of 64 bytes)       } word l of each line holds parts of
//   Sixes     codes of 6 bits, two's complement, in blocks of 256 (three lines)         } codes 16 l to 16 l + 15
//
// autosel/formats.py and ops/codes.py define the formats. Codes become numbers in registers, exactly, and are multiplied
// as in dot.h: by the bf16 dot if there is one and x is bf16, otherwise in fp32. Only the sums are rounded; a scale
// multiplies the sum of its group once.
//
// A piece is what one round of a row's loop reads: one or more registers of 32-bit words. A lane only ever holds the
// codes of its own words, so lanes never mix groups, and one multiplication by a vector of scales serves all groups of a
// piece. x is laid out to match, once per call: `place` below; with offsets, followed by each lane's sum of x.
//
// Nibbles and Fours with the bf16 dot: vpermw takes the 5 lowest bits of each half word as an index; a table of two equal
// halves ignores the fifth bit, so no bit is masked. 3 shifts, 4 lookups, 4 dots for 128 weights and a row of x.
// Sixes with the bf16 dot: vpermi2w takes the 6 lowest bits of each half word. A half word of each line has two codes and
// four bits that make two more: 9 operations, 8 lookups, 8 dots for 256 weights. A lane has one scale.
// Octets with the bf16 dot: the upper and the lower byte of the bf16 of |code| come from two tables of 128 bytes (VBMI,
// which the flags of the bf16 dot include), the sign is added to the upper byte, and interleaving the bytes gives 64
// bf16: 8 operations, 2 dots. |-128| has bit 7, which the index ignores: its upper byte is set apart.
// Floats with the bf16 dot: the same by the seven bits of |code|; the sign is bit 7 of both: 5 operations, 2 dots.
//
// Codes are prefetched at least 8 KB ahead: four rows of 4 bits with K = 2048 are 4 KB, which a core multiplies in less
// time than memory answers. Scales are a stream of their own, of up to an eighth of the bytes, and are prefetched too.
// Against codes of the next four rows only, in turn, M=1, two cores of Zen 4, N 16384 K 2048 and N 2048 K 8192:
//   q4_0 1.10 and 1.10 at 32 GB/s, 1.44 for the first at 58 GB/s; int4-g128 1.40, 1.00 (45 GB/s); q4_k 1.11, 1.13 (1.22
//   at 40 GB/s); q6_k 1.03-1.10, 1.07-1.15; q8_0 1.02, 1.04; int8-row 1.00. M=2 and 4: q4_0 1.13, 1.10, int4-g128
//   1.20, 1.04. Distances of 6 to 32 KB differ by less than 5 %; q4_0's codes alone 12 KB ahead: 1.29 of the 1.44.
//
// From the fifth row of x on, x no longer fits L1 and every load of it comes from L2, so two rows of codes share it: with
// the bf16 dot all numbers of a piece stay in registers and rows of x meet them in turn; otherwise rows of x are split
// into groups of at most four. Measured on 2 cores of Zen 4 (N 4096, K 14336, from memory), against one row of codes at
// a time and one group of up to eight rows (AVX2: six), medians, for int8-row, int4-g128, q4_k, q6_k:
//   AVX-512-BF16   M=5 1.89, 1.76, 1.61, 1.61    M=6 1.95, 1.80, 1.56, 1.75    M=8 1.75, 1.83, 1.87, 1.60
//   AVX-512        M=5 1.47, 1.64, 1.42, 1.31    M=6 1.35, 1.48, 1.36, 1.25    M=8 1.57, 1.77, 1.57, 1.50
//   AVX2           M=5 1.63, 1.55, 1.53, 1.30    M=6 1.76, 1.59, 1.46, 1.24
//   Rejected: numbers in registers at M=4 (0.85-1.1: x still fits L1).
#pragma once
#include <tuple>

#include "fused.h"

namespace autosel {

constexpr int64_t kAheadOfCodes = 8 << 10;  // bytes at least from the row in use to the prefetched one
constexpr int64_t kNibblesInLine = 128;
constexpr int64_t kBlockCodes = 256, kLaneCodes = 16;  // of Fours and Sixes: a block, and a word of each of its lines

// --- codes -> registers of numbers -----------------------------------------------------------------------------------

// What a register of numbers is: bf16 pairs for the dot, or fp32 lanes; and how many elements of x it meets.
template <class T> using Numbers = std::conditional_t<kPaired<T>, vu, vreg>;
template <class T> constexpr int64_t kWidthOfX = kPaired<T> ? 2 * kLanes : kLanes;

template <class T> static inline vreg multiply_codes(vreg acc, Numbers<T> w, const Wide<T>* x) {
#if defined(AUTOSEL_BF16_DOT)
  if constexpr (kPaired<T>)
    return reinterpret_cast<vreg>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), reinterpret_cast<__m512bh>(w),
                                                   (__m512bh)_mm512_loadu_si512(x)));
  else
#endif
    return fma(w, load(x), acc);
}

#if defined(AUTOSEL_BF16_DOT)
// bf16 of -32 .. 31, by their lowest bits: all numbers of a code with fewer than 7.
template <int bits, int bias> struct NumberTable {
  uint16_t bf16[64];
  constexpr NumberTable() : bf16() {
    for (int i = 0; i < 64; ++i) {
      int code = i & ((1 << bits) - 1), n = bias < 0 ? (code ^ -bias) + bias : code - bias;  // bias < 0: two's complement
      unsigned size = unsigned(n < 0 ? -n : n), e = 0;
      while (size >> (e + 1)) ++e;
      if (size) bf16[i] = uint16_t((n < 0 ? 0x8000u : 0u) | (127 + e) << 7 | (size << (7 - e) & 127));
    }
  }
};
template <int bits, int bias> alignas(64) constexpr NumberTable<bits, bias> kNumbers{};

static inline vu four_bits_to_bf16(vu words, int shift, const uint16_t* table) {
  return reinterpret_cast<vu>(_mm512_permutexvar_epi16(
      _mm512_srli_epi16(reinterpret_cast<__m512i>(words), unsigned(shift)), _mm512_load_si512(table)));
}
#endif

// Bits shift .. shift + bits - 1 of each lane as a number in two's complement, or without a sign.
template <int bits> static inline vreg signed_bits(vu words, int shift) {
  return __builtin_convertvector(reinterpret_cast<vi>(words << (32 - bits - shift)) >> (32 - bits), vreg);
}
template <int bits> static inline vreg unsigned_bits(vu words, int shift) {
  return __builtin_convertvector(reinterpret_cast<vi>(words << (32 - bits - shift) >> (32 - bits)), vreg);
}

// Codes in one register of words per piece, in order: a piece begins 4 * kLanes bytes after the one before.
struct InOrder {
  static constexpr int kWords = 1, kType = kDLUInt;  // the codes' type in DLPack
  static constexpr int64_t kBytes = 4 * kLanes;  // of a piece
  static inline vu word(const uint8_t* row, int64_t p, int) {
    vu words;
    memcpy(&words, row + p * kBytes, sizeof words);
    return words;
  }
};

template <class T, int bias> struct Nibbles : InOrder {
  static constexpr int kRegisters = kPaired<T> ? 4 : 8;  // of numbers, and of x, per piece
  static constexpr int64_t kCodes = 8 * kLanes;
  static constexpr bool kFilled = true;  // rows end with whole pieces
  static constexpr int64_t row_bytes(int64_t k) { return (k + kNibblesInLine - 1) / kNibblesInLine * (kNibblesInLine / 2); }
  // Which code of the piece is element e of register r of x.
  static constexpr int64_t place(int64_t r, int64_t e) { return kPaired<T> ? e / 2 * 8 + e % 2 * 4 + r : e * 8 + r; }
  template <int r> static inline Numbers<T> numbers(const vu* words) {
#if defined(AUTOSEL_BF16_DOT)
    if constexpr (kPaired<T>) return four_bits_to_bf16(words[0], 4 * r, kNumbers<4, bias>.bf16);
    else
#endif
    if constexpr (bias == 8) return signed_bits<4>(words[0] ^ 0x88888888u, 4 * r);
    else return unsigned_bits<4>(words[0], 4 * r);
  }
  static int number(const uint8_t* row, int64_t k) { return (row[k / 2] >> (k % 2 * 4) & 15) - bias; }
};

#if defined(AUTOSEL_BF16_DOT)
// The upper bytes of the bf16 of integers n or e4m3 floats with the lowest bits n, for n = 0 .. 127, then the lower ones.
template <bool floats> struct ByteTable {
  uint8_t byte[256];
  constexpr ByteTable() : byte() {
    for (unsigned n = 1; n < 128; ++n) {
      unsigned size = floats && n > 7 ? n % 8 + 8 : n, e = 0;  // times a power of two
      while (size >> (e + 1)) ++e;
      unsigned exponent = !floats ? e : n > 7 ? n / 8 - 7 : e - 9, bits = (127 + exponent) << 7 | (size << (7 - e) & 127);
      if (floats && n == 127) bits = 0x7fc0;  // NaN
      byte[n] = uint8_t(bits >> 8), byte[128 + n] = uint8_t(bits);
    }
  }
  __m512i at(int i) const { return _mm512_load_si512(byte + i); }
};
template <bool floats> alignas(64) constexpr ByteTable<floats> kByteTable{};
#endif

// One code per byte: four neighbours in a word.
template <class T> struct InBytes : InOrder {
  static constexpr int kRegisters = kPaired<T> ? 2 : 4;
  static constexpr int64_t kCodes = 4 * kLanes;
  static constexpr bool kFilled = false;
  static constexpr int64_t row_bytes(int64_t k) { return k; }
  static constexpr int64_t place(int64_t r, int64_t e) {
    return kPaired<T> ? e / 8 * 16 + r * 8 + e % 8 : e * 4 + r;
  }
#if defined(AUTOSEL_BF16_DOT)
  // Half r of 64 numbers, by bytes of their bf16 without the sign of w.
  template <int r> static inline vu interleaved(__m512i lower, __m512i upper, __m512i w) {
    upper = _mm512_ternarylogic_epi64(upper, w, _mm512_set1_epi8(char(0x80)), 0xf8);  // upper | (w & 0x80)
    return reinterpret_cast<vu>(r ? _mm512_unpackhi_epi8(lower, upper) : _mm512_unpacklo_epi8(lower, upper));
  }
#endif
};

template <class T> struct Octets : InBytes<T> {
  static constexpr int kType = kDLInt;
  template <int r> static inline Numbers<T> numbers(const vu* words) {
    if constexpr (!kPaired<T>) {
      return signed_bits<8>(words[0], 8 * r);
    } else {
#if defined(AUTOSEL_BF16_DOT)
      constexpr const ByteTable<false>& table = kByteTable<false>;
      __m512i w = reinterpret_cast<__m512i>(words[0]), size = _mm512_abs_epi8(w);
      __m512i upper = _mm512_permutex2var_epi8(table.at(0), size, table.at(64));
      __m512i lower = _mm512_permutex2var_epi8(table.at(128), size, table.at(192));
      upper = _mm512_mask_mov_epi8(upper, _mm512_movepi8_mask(size), _mm512_set1_epi8(0x43));  // 128
      return InBytes<T>::template interleaved<r>(lower, upper, w);
#else
      return {};
#endif
    }
  }
  static int number(const uint8_t* row, int64_t k) { return int8_t(row[k]); }
};

// The e4m3 float in the lowest bits of each lane: normal ones have fp32's exponent once 120 is added to theirs.
static inline vreg e4m3_floats(vu codes) {
  const vu size = (codes & 127) << 20, normal = size + (120u << 23);
  const vreg tiny = reinterpret_cast<vreg>(normal) - 0x1p-7f;  // subnormal: 2^-7 (1 + m / 8) became m 2^-10
  vu found = size < (1u << 23) ? reinterpret_cast<vu>(tiny + tiny) : normal;
  found = size == (127u << 20) ? vu{} + 0x7fc00000u : found;
  return reinterpret_cast<vreg>(found | (codes & 128) << 24);
}

template <class T> struct Floats : InBytes<T> {
  static constexpr int kType = kDLFloat8_e4m3fn;
  template <int r> static inline Numbers<T> numbers(const vu* words) {
    if constexpr (!kPaired<T>) {
      return e4m3_floats(words[0] >> (8 * r));
    } else {
#if defined(AUTOSEL_BF16_DOT)
      constexpr const ByteTable<true>& table = kByteTable<true>;
      __m512i w = reinterpret_cast<__m512i>(words[0]);
      __m512i upper = _mm512_permutex2var_epi8(table.at(0), w, table.at(64));
      __m512i lower = _mm512_permutex2var_epi8(table.at(128), w, table.at(192));
      return InBytes<T>::template interleaved<r>(lower, upper, w);
#else
      return {};
#endif
    }
  }
  static float number(const uint8_t* row, int64_t k) { return e4m3_floats(vu{} + row[k])[0]; }
};

// Codes in blocks of `lines` lines. A piece is a block, or half of one if there are 8 lanes. Number 2 r + h of a lane is
// in half h of its words, so that register r of pairs has neighbours.
template <class T, int lines> struct InBlocks {
  static constexpr int kWords = lines, kType = kDLUInt, kRegisters = kPaired<T> ? 8 : 16;
  static constexpr int64_t kCodes = kLaneCodes * kLanes, kBytes = lines * 4 * kLanes;
  static constexpr bool kFilled = true;
  static constexpr int64_t kLine = 64;
  static constexpr int64_t row_bytes(int64_t k) { return (k + kBlockCodes - 1) / kBlockCodes * lines * kLine; }
  static constexpr int64_t place(int64_t r, int64_t e) {
    return kPaired<T> ? e / 2 * kLaneCodes + r * 2 + e % 2 : e * kLaneCodes + r;
  }
  static inline vu word(const uint8_t* row, int64_t p, int line) {
    vu words;
    memcpy(&words, row + p * kCodes / kBlockCodes * lines * kLine + line * kLine + p * kLanes % 16 * 4, sizeof words);
    return words;
  }
  // The half word of code k in a line.
  static unsigned half(const uint8_t* row, int64_t k, int line) {
    uint16_t found;
    memcpy(&found, row + k / kBlockCodes * lines * kLine + line * kLine + k % kBlockCodes / kLaneCodes * 4 + k % 2 * 2,
           sizeof found);
    return found;
  }
};

template <class T> struct Fours : InBlocks<T, 2> {
  template <int r> static inline Numbers<T> numbers(const vu* words) {
#if defined(AUTOSEL_BF16_DOT)
    if constexpr (kPaired<T>) return four_bits_to_bf16(words[r / 4], 4 * (r % 4), kNumbers<4, 0>.bf16);
    else
#endif
      return unsigned_bits<4>(words[r / 8], r % 2 * 16 + r / 2 % 4 * 4);
  }
  static int number(const uint8_t* row, int64_t k) {
    int64_t r = k % kLaneCodes / 2;
    return int(InBlocks<T, 2>::half(row, k, int(r / 4)) >> (r % 4 * 4) & 15);
  }
};

template <class T> struct Sixes : InBlocks<T, 3> {
  template <int r> static inline Numbers<T> numbers(const vu* words) {
#if defined(AUTOSEL_BF16_DOT)
    if constexpr (kPaired<T>) {
      auto w = [&](int line) { return reinterpret_cast<__m512i>(words[line]); };
      __m512i index;
      if constexpr (r < 6) index = _mm512_srli_epi16(w(r / 2), 6 * (r % 2));
      else  // low four bits | (upper two & 0x30)
        index = _mm512_ternarylogic_epi64(_mm512_srli_epi16(w(r - 6), 12), _mm512_srli_epi16(w(2), r == 6 ? 8 : 10),
                                          _mm512_set1_epi16(0x30), 0xf8);
      const uint16_t* table = kNumbers<6, -32>.bf16;
      return reinterpret_cast<vu>(
          _mm512_permutex2var_epi16(_mm512_load_si512(table), index, _mm512_load_si512(table + 32)));
    } else
#endif
    {
      constexpr int pair = r / 2, half = r % 2 * 16;
      if constexpr (pair < 6) return signed_bits<6>(words[pair / 2], half + 6 * (pair % 2));
      else return signed_bits<6>((words[pair - 6] >> (half + 12) & 15) | (words[2] >> (half + (pair == 6 ? 8 : 10)) & 0x30), 0);
    }
  }
  static int number(const uint8_t* row, int64_t k) {
    int r = int(k % kLaneCodes / 2);
    auto half = [&](int line) { return InBlocks<T, 3>::half(row, k, line); };
    unsigned code = r < 6 ? half(r / 2) >> (6 * (r % 2)) & 63 : half(r - 6) >> 12 | (half(2) >> (2 * r) & 3) << 4;
    return int(code ^ 32) - 32;
  }
};

// --- scales ----------------------------------------------------------------------------------------------------------

// A scale, and an offset or a zero point, for each lane of a piece.
struct Scaled { vreg scale, offset; };

// What a group has beside its scale s: nothing, an offset m (a weight is s q + m), or a zero point z (s (q - z)).
enum class Beside { kNothing, kOffset, kZero };

template <class S> static inline float number_at(const uint8_t* at) {
  S found;
  memcpy(&found, at, sizeof found);
  return widen(found);
}

#if defined(AUTOSEL_AVX512)
static inline vreg chosen(__m512 from, __m512i lanes) {
  return reinterpret_cast<vreg>(_mm512_permutexvar_ps(lanes, from));
}
template <class S> static inline __m256 eight_at(const uint8_t* at) {
  if constexpr (sizeof(S) == 4) return _mm256_loadu_ps(reinterpret_cast<const float*>(at));
  __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  if constexpr (std::is_same_v<S, f16>) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
#elif defined(__AVX2__)
static inline vreg chosen(__m256 from, __m256i lanes) {
  return reinterpret_cast<vreg>(_mm256_permutevar8x32_ps(from, lanes));
}
#endif
#if defined(__AVX2__)
template <class S> static inline __m128 four_at(const uint8_t* at) {
  if constexpr (sizeof(S) == 4) return _mm_loadu_ps(reinterpret_cast<const float*>(at));
  __m128i halves = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
  if constexpr (std::is_same_v<S, f16>) return _mm_cvtph_ps(halves);
  return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(halves), 16));
}
#endif

// Numbers of type S for each group of neighbours (0: for a row): its scale, and what is beside it.
template <int64_t group, class S, Beside beside> struct PerGroup {
  using Stored = S;
  static constexpr bool offsets = beside != Beside::kNothing;
  static constexpr bool kOfRow = group == 0, kOffsets = offsets, kZeros = beside == Beside::kZero;
  static constexpr int64_t kEntry = (offsets ? 2 : 1) * int64_t(sizeof(S));
  static_assert(group == 0 || group == 32 || group == 64 || group == 128, "a scale is for a row or 32 to 128 codes");
  static int64_t stored(int64_t k) { return (group ? (k + group - 1) / (group ? group : 1) : 1) * (offsets ? 2 : 1); }
  // Bytes of the scales of several pieces.
  template <class C> static int64_t bytes(int64_t pieces) { return pieces * C::kCodes * kEntry / (group ? group : 1); }
  template <class C> static constexpr int64_t kMany = group == 0 || group >= C::kCodes ? 1 : C::kCodes / (group ? group : 1);

  template <class C> static inline Scaled piece(const uint8_t* at, int64_t p) {
    if constexpr (group == 0) return of_row(at);
    else return spread<kMany<C>>(at + p * C::kCodes / group * kEntry);
  }
  // The last piece, which ends at column k.
  template <class C> static inline Scaled last(const uint8_t* at, int64_t p, int64_t k) {
    if constexpr (group == 0) return of_row(at);
    else {
      uint8_t some[kMany<C> * kEntry] = {};
      const int64_t first = p * C::kCodes / group, there = (k + group - 1) / group - first;
      memcpy(some, at + first * kEntry, size_t((there < kMany<C> ? there : kMany<C>) * kEntry));
      return spread<kMany<C>>(some);
    }
  }
  static double weight(const uint8_t* at, int64_t k, double code) {
    const uint8_t* entry = at + (group ? k / (group ? group : 1) : 0) * kEntry;
    double scale = number_at<S>(entry), other = offsets ? number_at<S>(entry + sizeof(S)) : 0.0;
    return kZeros ? scale * (code - other) : scale * code + other;
  }

 private:
  // A row's scale multiplies its sum; its zero point is subtracted before.
  static inline Scaled of_row(const uint8_t* at) {
    if constexpr (offsets) return {vreg{}, splat(number_at<S>(at + sizeof(S)))};
    else return Scaled{};
  }
  // N entries, for as many equal parts of the lanes.
  template <int64_t N> static inline Scaled spread(const uint8_t* s) {
    if constexpr (N == 1 && offsets && std::is_same_v<S, bf16>) {  // one load instead of two
      uint32_t both;
      memcpy(&both, s, sizeof both);
      vu all = vu{} + both;
      return {reinterpret_cast<vreg>(all << 16), reinterpret_cast<vreg>(all & 0xffff0000u)};
    }
    if constexpr (N == 1) return {splat(number_at<S>(s)), offsets ? splat(number_at<S>(s + sizeof(S))) : vreg{}};
#if defined(AUTOSEL_AVX512)
    if constexpr (N == 2 && !offsets)
      return {reinterpret_cast<vreg>(_mm512_mask_mov_ps(_mm512_set1_ps(number_at<S>(s)), 0xff00,
                                                        _mm512_set1_ps(number_at<S>(s + kEntry)))), vreg{}};
    if constexpr (N == 4 && !offsets) {
      const __m512i lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
      return {chosen(_mm512_castps128_ps512(four_at<S>(s)), lane), vreg{}};
    }
    if constexpr (N == 2 && offsets) {
      __m512 all = _mm512_castps128_ps512(four_at<S>(s));
      const __m512i even = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2);
      return {chosen(all, even), chosen(all, _mm512_or_epi32(even, _mm512_set1_epi32(1)))};
    }
    if constexpr (N == 4 && offsets) {
      __m512 all = _mm512_castps256_ps512(eight_at<S>(s));
      const __m512i even = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
      return {chosen(all, even), chosen(all, _mm512_or_epi32(even, _mm512_set1_epi32(1)))};
    }
#elif defined(__AVX2__)
    if constexpr (N == 2 && !offsets)
      return {reinterpret_cast<vreg>(_mm256_set_m128(_mm_set1_ps(number_at<S>(s + kEntry)),
                                                     _mm_set1_ps(number_at<S>(s)))), vreg{}};
    if constexpr (N == 2 && offsets) {
      __m256 all = _mm256_castps128_ps256(four_at<S>(s));
      return {chosen(all, _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2)),
              chosen(all, _mm256_setr_epi32(1, 1, 1, 1, 3, 3, 3, 3))};
    }
#endif
    Scaled v{};
    for (int i = 0; i < kLanes; ++i) {
      v.scale[i] = number_at<S>(s + i * N / kLanes * kEntry);
      if (offsets) v.offset[i] = number_at<S>(s + i * N / kLanes * kEntry + sizeof(S));
    }
    return v;
  }
};

// For each block fp16 d and e, 8 bytes s and 8 bytes t: two lanes have the scale d s and the offset -e t.
struct FourScales {
  using Stored = uint8_t;
  static constexpr bool kOfRow = false, kOffsets = true, kZeros = false;
  static constexpr int64_t kBlock = 20;
  static int64_t stored(int64_t k) { return (k + kBlockCodes - 1) / kBlockCodes * kBlock; }
  template <class C> static int64_t bytes(int64_t pieces) { return pieces * C::kCodes / kBlockCodes * kBlock; }

  template <class C> static inline Scaled piece(const uint8_t* at, int64_t p) {
    const uint8_t* block = at + p * C::kCodes / kBlockCodes * kBlock;
    const int64_t first = p * kLanes % 16 / 2;
#if defined(__AVX2__)
    uint32_t both;
    memcpy(&both, block, sizeof both);
    __m128 pair = _mm_cvtph_ps(_mm_cvtsi32_si128(int(both ^ 0x80000000u)));  // d, -e
#endif
#if defined(AUTOSEL_AVX512)
    __m512 integers =
        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 4 + first))));
    const __m512i half = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i lane = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    __m512 all = _mm512_mul_ps(integers, _mm512_permutexvar_ps(half, _mm512_castps128_ps512(pair)));
    return {chosen(all, lane), chosen(all, _mm512_or_epi32(lane, _mm512_set1_epi32(8)))};
#elif defined(__AVX2__)
    uint64_t four[2];
    memcpy(four, block + 4, sizeof four);
    int64_t bytes = int64_t((four[0] >> (8 * first) & 0xffffffffu) | four[1] >> (8 * first) << 32);
    __m256 integers = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes)));
    __m256 halves = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(pair), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
    __m256 all = _mm256_mul_ps(integers, halves);
    return {chosen(all, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)), chosen(all, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
#else
    Scaled v{};
    float d = number_at<f16>(block), e = number_at<f16>(block + 2);
    for (int i = 0; i < kLanes; ++i)
      v.scale[i] = d * block[4 + first + i / 2], v.offset[i] = -e * block[12 + first + i / 2];
    return v;
#endif
  }
  template <class C> static inline Scaled last(const uint8_t* at, int64_t p, int64_t) { return piece<C>(at, p); }
  static double weight(const uint8_t* at, int64_t k, double code) {
    const uint8_t *block = at + k / kBlockCodes * kBlock, *group = block + 4 + k % kBlockCodes / 32;
    return double(number_at<f16>(block)) * group[0] * code - double(number_at<f16>(block + 2)) * group[8];
  }
};

// For each block 16 signed bytes s, then fp16 d: a lane has the scale d s. With minimums 8 bytes t stand before d, and e
// behind it: two lanes have the offset -e t.
template <bool minimums> struct SixScales {
  using Stored = uint8_t;
  static constexpr bool kOfRow = false, kOffsets = minimums, kZeros = false;
  static constexpr int64_t kBlock = minimums ? 28 : 18, kHalves = minimums ? 24 : 16;
  static int64_t stored(int64_t k) { return (k + kBlockCodes - 1) / kBlockCodes * kBlock; }
  template <class C> static int64_t bytes(int64_t pieces) { return pieces * C::kCodes / kBlockCodes * kBlock; }

  template <class C> static inline Scaled piece(const uint8_t* at, int64_t p) {
    const uint8_t* block = at + p * C::kCodes / kBlockCodes * kBlock;
    const int64_t first = p * kLanes % 16;
    const uint8_t *bytes = block + first, *least = block + 16 + first / 2;
    vreg d = splat(number_at<f16>(block + kHalves)), e{};
    if constexpr (minimums) e = splat(-number_at<f16>(block + kHalves + 2));
#if defined(AUTOSEL_AVX512)
    auto wide = [](__m512i integers) { return reinterpret_cast<vreg>(_mm512_cvtepi32_ps(integers)); };
    vreg scale = wide(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)))) * d;
    if constexpr (!minimums) return {scale, e};
    __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(least));
    return {scale, wide(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(eight, eight))) * e};
#elif defined(__AVX2__)
    auto wide = [](__m256i integers) { return reinterpret_cast<vreg>(_mm256_cvtepi32_ps(integers)); };
    vreg scale = wide(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)))) * d;
    if constexpr (!minimums) return {scale, e};
    __m128i four = _mm_loadu_si32(least);
    return {scale, wide(_mm256_cvtepu8_epi32(_mm_unpacklo_epi8(four, four))) * e};
#else
    Scaled v{};
    for (int i = 0; i < kLanes; ++i) v.scale[i] = d[i] * int8_t(bytes[i]), v.offset[i] = minimums ? e[i] * least[i / 2] : 0;
    return v;
#endif
  }
  template <class C> static inline Scaled last(const uint8_t* at, int64_t p, int64_t) { return piece<C>(at, p); }
  static double weight(const uint8_t* at, int64_t k, double code) {
    const uint8_t* block = at + k / kBlockCodes * kBlock;
    double w = double(number_at<f16>(block + kHalves)) * int8_t(block[k % kBlockCodes / 16]) * code;
    if (minimums) w -= double(number_at<f16>(block + kHalves + 2)) * block[16 + k % kBlockCodes / 32];
    return w;
  }
};

// --- formats ---------------------------------------------------------------------------------------------------------

template <int bits, int64_t group, class S> struct Symmetric {
  static_assert(bits == 4 || bits == 8, "codes have 4 or 8 bits");
  template <class T> using Codes = std::conditional_t<bits == 4, Nibbles<T, 8>, Octets<T>>;
  using Scales = PerGroup<group, S, Beside::kNothing>;
};
template <int64_t group, class S> struct Floating {
  template <class T> using Codes = Floats<T>;
  using Scales = PerGroup<group, S, Beside::kNothing>;
};
template <int64_t group, class S> struct Affine {
  template <class T> using Codes = Nibbles<T, 0>;
  using Scales = PerGroup<group, S, Beside::kOffset>;
};
template <int bits, int64_t group, class S> struct Asymmetric {
  static_assert(bits == 4 || bits == 8, "codes have 4 or 8 bits");
  template <class T> using Codes = std::conditional_t<bits == 4, Nibbles<T, 0>, Octets<T>>;
  using Scales = PerGroup<group, S, Beside::kZero>;
};
struct Q4K {
  template <class T> using Codes = Fours<T>;
  using Scales = FourScales;
};
template <bool minimums> struct SixK {
  template <class T> using Codes = Sixes<T>;
  using Scales = SixScales<minimums>;
};
using Q6K = SixK<false>;
using Q6KM = SixK<true>;

// The formats that a build reads, by the numbers that a caller gives them; the kernel of one op reads the first.
#if !defined(AUTOSEL_FORMATS)
#define AUTOSEL_FORMATS Symmetric<8, 0, float>
#endif
using Formats = std::tuple<AUTOSEL_FORMATS>;
using OnlyFormat = std::tuple_element_t<0, Formats>;

// Calls act with a value of the format's type.
template <size_t i = 0, class Act> static inline decltype(auto) with_format(int64_t format, const Act& act) {
  if constexpr (i + 1 < std::tuple_size_v<Formats>)
    if (format != int64_t(i)) return with_format<i + 1>(format, act);
  return act(std::tuple_element_t<i, Formats>{});
}

// --- R rows of codes against M rows of x -----------------------------------------------------------------------------

// A matrix [rows, columns] of codes. Strides are in bytes.
struct Coded {
  const uint8_t* codes;
  int64_t rows, columns, stride;
  const uint8_t* scales;
  int64_t scale_stride;
  const uint8_t* row(int64_t n) const { return codes + n * stride; }
  const uint8_t* scales_of(int64_t n) const { return scales + n * scale_stride; }
};

// One weight in T, rounded once, as an embedding reads it. Double holds it exactly; a float that lies between the numbers
// of 16 bits like the weight does rounds as the weight itself.
template <class T, class F> static inline T weight_at(const Coded& w, int64_t n, int64_t k) {
  double exact = F::Scales::weight(w.scales_of(n), k, F::template Codes<T>::number(w.row(n), k));
  float near = float(exact);
  if (sizeof(T) == 2 && double(near) != exact && std::isfinite(near)) {
    uint32_t bits = float_to_bits(near) - (std::fabs(double(near)) > std::fabs(exact) ? 1 : 0);
    near = bits_to_float(bits | 1);
  }
  return narrow<T>(near);
}

// Registers of x per piece: those that meet numbers, and the sums.
template <class T, class F>
constexpr int64_t kRegistersOfX = F::template Codes<T>::kRegisters + (F::Scales::kOffsets ? 1 : 0);
template <class T, class F> static inline int64_t coded_panel_elements(int64_t m, int64_t k) {
  constexpr int64_t kCodes = F::template Codes<T>::kCodes;
  return (k + kCodes - 1) / kCodes * kRegistersOfX<T, F> * kWidthOfX<T> * m;
}

template <class F, int... I>
static inline __attribute__((always_inline)) void each_of(const F& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}

// Lines from these on are prefetched, as many as a block reads.
struct Coming { const uint8_t *codes, *scales; };

// out[m * R + r] = x[m] . (row n + r).
template <class T>
using CodedBlock = void (*)(const Coded& w, int64_t n, const Wide<T>* x, const Coming& coming, float* out);

// Rows of x in one kernel: as many as leave registers for two rows of codes.
template <class T, class F>
constexpr int kMostCoded = !kPaired<T> ? 4 : F::template Codes<T>::kRegisters > 4 ? 6 : 8;

// Rows of codes that are read together.
constexpr int64_t rows_of_codes(int64_t m) { return m <= 2 ? 4 : 2; }

// True if the numbers of a piece stay in registers and every row of x meets them in turn, so that it is loaded once for
// all rows of codes. Otherwise each register of numbers meets all rows of x at once.
template <class T> constexpr bool holds_numbers(int m) { return kPaired<T> && m > 4; }

template <class T, class F, int M, int R>
static void coded_block(const Coded& w, int64_t n, const Wide<T>* x, const Coming& coming, float* out) {
  using C = typename F::template Codes<T>;
  using S = typename F::Scales;
  constexpr int64_t W = kWidthOfX<T>;
  const uint8_t *codes = w.row(n), *scales = w.scales_of(n);
  vreg acc[R][M] = {};
  auto piece = [&](const vu (*words)[C::kWords], const Scaled* scaled) __attribute__((always_inline)) {
    const Wide<T>* sums = x + C::kRegisters * M * W;
    auto add = [&](int i, int m, vreg part) __attribute__((always_inline)) {
      if constexpr (S::kZeros)
        part = fma(load(reinterpret_cast<const float*>(sums + m * W)), scaled[i].offset, part);
      acc[i][m] = S::kOfRow ? acc[i][m] + part : fma(part, scaled[i].scale, acc[i][m]);
      if constexpr (S::kOffsets && !S::kZeros)
        acc[i][m] = fma(load(reinterpret_cast<const float*>(sums + m * W)), scaled[i].offset, acc[i][m]);
    };
    constexpr auto registers = std::make_integer_sequence<int, C::kRegisters>{};
    if constexpr (holds_numbers<T>(M)) {
      Numbers<T> number[R][C::kRegisters];
      for (int i = 0; i < R; ++i)
        each_of([&](auto r) __attribute__((always_inline)) {
          number[i][r] = C::template numbers<r>(words[i]);
        }, registers);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        vreg part[R] = {};
#pragma GCC unroll 8
        for (int r = 0; r < C::kRegisters; ++r)
          for (int i = 0; i < R; ++i) part[i] = multiply_codes<T>(part[i], number[i][r], x + (r * M + m) * W);
        for (int i = 0; i < R; ++i) add(i, m, part[i]);
      }
    } else {
      vreg part[R][M] = {};
      each_of([&](auto r) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int i = 0; i < R; ++i) {
          Numbers<T> number = C::template numbers<r>(words[i]);
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) part[i][m] = multiply_codes<T>(part[i][m], number, x + (r * M + m) * W);
        }
      }, registers);
#pragma GCC unroll 4
      for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) add(i, m, part[i][m]);
    }
    x += kRegistersOfX<T, F> * M * W;
  };
  const int64_t whole = w.columns / C::kCodes;
  for (int64_t p = 0; p < whole; ++p) {
    vu words[R][C::kWords];
    Scaled scaled[R];
    if constexpr (!S::kOfRow)
      for (int64_t at = 0; at == 0 || at < S::template bytes<C>(R); at += 64)
        prefetch_l2(coming.scales + S::template bytes<C>(p * R) + at);
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) {
      if (C::kBytes >= 64 || (p * R + i) % 2 == 0)
        for (int64_t at = 0; at < C::kBytes; at += 64) prefetch_l2(coming.codes + (p * R + i) * C::kBytes + at);
      for (int line = 0; line < C::kWords; ++line) words[i][line] = C::word(codes + i * w.stride, p, line);
      scaled[i] = S::template piece<C>(scales + i * w.scale_stride, p);
    }
    piece(words, scaled);
  }
  const int64_t left = w.columns - whole * C::kCodes;
  if (left > 0) {
    vu words[R][C::kWords] = {};
    Scaled scaled[R];
    for (int i = 0; i < R; ++i) {
      if constexpr (C::kFilled)
        for (int line = 0; line < C::kWords; ++line) words[i][line] = C::word(codes + i * w.stride, whole, line);
      else memcpy(&words[i][0], codes + i * w.stride + whole * C::kBytes, size_t(left));
      scaled[i] = S::template last<C>(scales + i * w.scale_stride, whole, w.columns);
    }
    piece(words, scaled);
  }
#pragma GCC unroll 8
  for (int i = 0; i < R * M; ++i) {
    float total = sum(acc[i / M][i % M]);
    if constexpr (S::kOfRow) total *= number_at<typename S::Stored>(scales + i / M * w.scale_stride);
    out[i % M * R + i / M] = total;
  }
}

// The kernels: M=2 with two rows of codes is the smaller of two groups.
template <class T, class F, int M> static CodedBlock<T> coded_block_of(int64_t rows) {
  if constexpr (M <= 2) if (rows == 4) return coded_block<T, F, M, 4>;
  if constexpr (M >= 2) if (rows == 2) return coded_block<T, F, M, 2>;
  return coded_block<T, F, M, 1>;
}

template <class T, class F> static CodedBlock<T> coded_block_for(int64_t m, int64_t rows) {
  switch (m) {
    case 1: return coded_block_of<T, F, 1>(rows);
    case 2: return coded_block_of<T, F, 2>(rows);
    case 3: return coded_block_of<T, F, 3>(rows);
    case 4: return coded_block_of<T, F, 4>(rows);
  }
  if constexpr (kMostCoded<T, F> >= 6) switch (m) {
    case 5: return coded_block_of<T, F, 5>(rows);
    case 6: return coded_block_of<T, F, 6>(rows);
  }
  if constexpr (kMostCoded<T, F> == 8) switch (m) {
    case 7: return coded_block_of<T, F, 7>(rows);
    case 8: return coded_block_of<T, F, 8>(rows);
  }
  return nullptr;
}

// --- x ---------------------------------------------------------------------------------------------------------------

// Writes a piece of x, register r to to + r * apart.
template <class T, class C> static inline void lay_out(const Wide<T>* x, Wide<T>* to, int64_t apart) {
  constexpr int64_t W = kWidthOfX<T>;
  if constexpr (kPaired<T> && C::kWords == 1 && C::kRegisters == 4) {  // x[4 e + r]: the fourths of a 64-bit word
    uint64_t fours[W];
    memcpy(fours, x, sizeof fours);
    for (int64_t r = 0; r < 4; ++r)
      for (int64_t e = 0; e < W; ++e) to[r * apart + e].bits = uint16_t(fours[e] >> (16 * r));
  } else if constexpr (kPaired<T> && C::kWords > 1) {  // pairs
    for (int64_t lane = 0; lane < kLanes; ++lane)
      for (int64_t r = 0; r < C::kRegisters; ++r)
        memcpy(to + r * apart + 2 * lane, x + kLaneCodes * lane + 2 * r, 2 * sizeof(*x));
  } else {
    for (int64_t r = 0; r < C::kRegisters; ++r)
      for (int64_t e = 0; e < W; ++e) to[r * apart + e] = x[C::place(r, e)];
  }
}

// Writes the sum of each lane's x behind the registers of a piece, negative if zero points are subtracted.
template <class T, class C, bool negative> static inline void add_up(Wide<T>* x, int64_t apart) {
  vreg sums{};
  for (int64_t r = 0; r < C::kRegisters; ++r) {
#if defined(AUTOSEL_BF16_DOT)
    if constexpr (kPaired<T>)
      sums = multiply_codes<T>(sums, reinterpret_cast<vu>(_mm512_set1_epi16(0x3f80)), x + r * apart);
    else
#endif
      sums = sums + load(x + r * apart);
  }
  store(reinterpret_cast<float*>(x + C::kRegisters * apart), negative ? -sums : sums);
}

// Rows of x [piece][register][rows][W], group after group (dot.h), zeros behind K.
template <class T, class F, class X> static void pack_for_codes(const Matrix<const X>& x, Wide<T>* out) {
  using C = typename F::template Codes<T>;
  constexpr int64_t W = kWidthOfX<T>, kCodes = C::kCodes;
  Groups groups(x.rows, kMostCoded<T, F>);
  for (int64_t g = 0, first = 0; g < groups.count; first += groups.of(g++)) {
    int64_t m = groups.of(g);
    for (int64_t i = 0; i < m; ++i) {
      Wide<T>* to = out + coded_panel_elements<T, F>(first, x.columns) + i * W;
      for (int64_t k = 0; k < x.columns; k += kCodes, to += kRegistersOfX<T, F> * W * m) {
        const X* from = x.row(first + i) + k;
        int64_t some = x.columns - k < kCodes ? x.columns - k : kCodes;
        bool direct = false;
        if constexpr (std::is_same_v<X, Wide<T>>) direct = some == kCodes;
        if constexpr (std::is_same_v<X, Wide<T>>) if (direct) lay_out<T, C>(from, to, m * W);
        if (!direct) {
          Wide<T> wide[kCodes] = {};
          for (int64_t c = 0; c < some; ++c)
            if constexpr (std::is_same_v<X, Wide<T>>) wide[c] = from[c];
            else wide[c] = widen(from[c]);
          lay_out<T, C>(wide, to, m * W);
        }
        if constexpr (F::Scales::kOffsets) add_up<T, C, F::Scales::kZeros>(to, m * W);
      }
    }
  }
}

// The columns that stream_runs computes.
template <class T, class F> struct CodedColumns {
  const Coded* w;
  const Wide<T>* panel;
  Groups groups;
  int64_t rows = 1, ahead = 1;  // rows from the one in use to the prefetched one
  CodedBlock<T> several[2], one[2];  // for the larger groups and the smaller ones

  CodedColumns() = default;
  CodedColumns(const Coded* w, const Wide<T>* panel, int64_t m, int64_t together)
      : w(w), panel(panel), groups(m, kMostCoded<T, F>) {
    rows = rows_of_codes(groups.rows);
    if (together < rows) rows = 1;
    ahead = (kAheadOfCodes / (rows * w->stride + 1) + 1) * rows;
    for (int64_t smaller = 0; smaller < (groups.larger < groups.count ? 2 : 1); ++smaller) {
      several[smaller] = coded_block_for<T, F>(groups.rows - smaller, rows);
      one[smaller] = coded_block_for<T, F>(groups.rows - smaller, 1);
    }
  }
  const void* at(int64_t n) const { return w->row(n); }
  Amx hold(int64_t m) const { return {false, m, w->rows}; }
  int64_t run() const {
    if (w->stride >= kShortRow) return rows;
    int64_t fit = kRunBytes / (w->stride + 1);
    return (fit < rows ? rows : fit < kMostRun ? fit : kMostRun) / rows * rows;
  }
  int64_t dots(int64_t n, int64_t to, const void* then, float* out) const {
    bool whole = n + rows <= to;
    int64_t taken = whole ? rows : 1;
    const uint8_t *at = w->row(n), *next = static_cast<const uint8_t*>(then);
    if (rows == 1) next = at + kAheadOfShort;
    else if (n + ahead < to) next = w->row(n + ahead);
    else next += (n + ahead - to) * w->stride;
    const CodedBlock<T>* block = whole ? several : one;
    for (int64_t g = 0, i = 0; g < groups.count; i += groups.of(g++), next = at)
      block[g >= groups.larger](*w, n, panel + coded_panel_elements<T, F>(i, w->columns),
                                {next, w->scales_of(n + ahead)}, out + i * taken);
    return taken;
  }
};

// --- all of it -------------------------------------------------------------------------------------------------------

template <int type> constexpr const char* kCodesName = "uint8";
template <> inline constexpr const char* kCodesName<kDLInt> = "int8";
template <> inline constexpr const char* kCodesName<kDLFloat8_e4m3fn> = "float8_e4m3fn";
template <class S> constexpr const char* kTypeName = "float32";
template <> inline constexpr const char* kTypeName<bf16> = "bfloat16";
template <> inline constexpr const char* kTypeName<f16> = "float16";
template <> inline constexpr const char* kTypeName<uint8_t> = "uint8";
template <class S> constexpr int kTypeCode = kDLFloat;
template <> inline constexpr int kTypeCode<bf16> = kDLBfloat;
template <> inline constexpr int kTypeCode<uint8_t> = kDLUInt;

// Raises ValueError unless the operands are a matrix of `rows` x `columns` (-1: any) in the format.
template <class F>
static Coded coded_matrix(const TensorView& codes, const TensorView& scales, const char* name, int64_t rows,
                          int64_t columns) {
  using C = typename F::template Codes<float>;
  using S = typename F::Scales;
  using Stored = typename S::Stored;
  constexpr bool of_row = S::kOfRow && !S::kOffsets;  // one number, else a pair
  const int64_t wide = C::row_bytes(columns), many = S::stored(columns);
  DLDataType c = codes.dtype(), s = scales.dtype();
  AUTOSEL_CHECK(codes.ndim() == 2 && c.code == C::kType && c.bits == 8,
                name << ".codes must be " << kCodesName<C::kType> << " [N," << (C::kFilled ? "bytes]" : "K]"));
  AUTOSEL_CHECK((rows < 0 || codes.size(0) == rows) && codes.size(1) == wide,
                name << ".codes is " << codes.size(0) << " x " << codes.size(1) << ", expected " << rows << " x "
                     << wide << " (-1: any)");
  AUTOSEL_CHECK(wide <= 1 || codes.stride(1) == 1, name << ".codes: last dimension not contiguous");
  AUTOSEL_CHECK(s.code == kTypeCode<Stored> && s.bits == 8 * sizeof(Stored) && scales.ndim() == (of_row ? 1 : 2) &&
                    scales.size(0) == codes.size(0) && (of_row || scales.size(1) == many),
                name << ".scales must be " << kTypeName<Stored> << " [" << codes.size(0)
                     << (of_row ? "]" : ",K/group or bytes]"));
  constexpr int last = of_row ? 0 : 1;
  AUTOSEL_CHECK(scales.size(last) <= 1 || scales.stride(last) == 1, name << ".scales: not contiguous");
  return {data<const uint8_t>(codes), codes.size(0), columns, codes.stride(0),
          reinterpret_cast<const uint8_t*>(data<const Stored>(scales)), scales.stride(0) * int64_t(sizeof(Stored))};
}

// As dot.h's `stream`.
template <class T, int Parts, class X, class Done, class F = OnlyFormat>
static void stream_coded(const X& x, int64_t m, const Coded* w, int64_t threads, int64_t rows, const Done& done) {
  AUTOSEL_CHECK(rows >= 1, "rows is " << rows << ", expected at least 1");
  parallel(threads, w->rows, 8, [&](int64_t begin, int64_t end, int rank) {
    static thread_local Scratch scratch;
    for (int64_t m0 = 0; m0 < m; m0 += kMaxRows) {
      int64_t some = m - m0 < kMaxRows ? m - m0 : kMaxRows;
      Wide<T>* panel = scratch.get<Wide<T>>(coded_panel_elements<T, F>(some, w->columns));
      pack_for_codes<T, F>(x(m0, some), panel);
      CodedColumns<T, F> columns[Parts];
      for (int p = 0; p < Parts; ++p) columns[p] = CodedColumns<T, F>(w + p, panel, some, rows);
      auto offset = [&](int64_t i, int64_t n, int64_t count, const float* const* v) {
        done(rank, m0 + i, n, count, v);
      };
      stream_runs<Parts>(columns, some, begin, end, w->row(end), offset);
    }
  });
}

}  // namespace autosel
