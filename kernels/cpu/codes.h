// Codes with scales in registers: how formats of 4, 6 and 8 bits become numbers, and what multiplies them.
//
//   Nibbles   codes of 4 bits, unsigned, the number is code - bias: a 32-bit word holds 8 neighbours along K, the first in
//             its lowest bits; a row is whole lines of 128 codes
//   Octets    codes of 8 bits, signed, one after another
//   Floats    e4m3 floats of 8 bits, one after another: any number, subnormals and NaN too
//   Fours     codes of 4 bits, unsigned, in blocks of 256 (two lines of 64 bytes)       } word l of each line holds parts of
//   Sixes     codes of 6 bits, two's complement, in blocks of 256 (three lines)         } codes 16 l to 16 l + 15
//
// autosel/formats.py and ops/codes.py define the formats. Codes become numbers in registers, exactly: pairs of bf16 if
// there is the bf16 dot and x is bf16, otherwise fp32.
//
// A piece is what one round of a row's loop reads: one or more registers of 32-bit words. A lane only ever holds the
// codes of its own words, so lanes never mix groups, and one multiplication by a vector of scales serves all groups of a
// piece. x is laid out to match, once per call: `place` below.
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
// In fp32, two shifts and a conversion for each register of 4-bit codes took longer than its product. Now:
//   AVX-512   vpermps takes the 4 lowest bits of each lane as an index into a table of 16 floats: a shift and a lookup
//   AVX2      vpshufb runs on a port that products do not need. Nibbles: the lower and the upper bytes of the bf16 of 32
//             codes from two tables, interleaved, and each half word shifted or masked: 19 operations for 64 weights
//             where there were 24. Interleaving changes which lane of its 128 bits, which are one group or part of one,
//             a code is in: `dots_place`. Fours, two of whose lanes may differ in scale, and Nibbles for many rows:
//             vpshufb moves each byte to a lane and clears the rest; that has no sign, so Symmetric keeps the shifts
// Before and after, in turn, one core of Emerald Rapids, 256 x 2048 from L2:
//   AVX-512, fp16   M=1 and 4: int4-g128 1.18, 1.13, uint4-g128 1.16, 1.12, q4_0 1.19, 1.15, q4_k 1.22, 1.12;
//                   4096 x 14336 from memory, M=1: uint4-g128 1.17, q4_0 1.13
//   AVX2            M=1, 2, 4: int4-g128 1.29, 1.25, 1.19, uint4-g128 1.22, 1.15, 1.14, q4_0 1.18, 1.16, 1.18,
//                   q4_k 1.14, 1.18, 1.10; 4096 x 14336 from memory, M=1: int4-g128 1.18, q4_k 1.00
// Left out with AVX2: vpermps as a table (two lookups and a blend for 8 weights), and products of integers with x to a
// common exponent (not exact: a large x hides the others of its group).
#pragma once
#include "fused.h"

namespace autosel {

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

#if defined(__AVX2__)
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
#endif

#if defined(AUTOSEL_BF16_DOT)
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

#if defined(AUTOSEL_AVX512)
// fp32 of all numbers of a code of 4 bits.
template <int bias> struct FourBitNumbers {
  float fp32[16];
  constexpr FourBitNumbers() : fp32() {
    for (int i = 0; i < 16; ++i) fp32[i] = float(i - bias);
  }
};
template <int bias> alignas(64) constexpr FourBitNumbers<bias> kFourBits{};
#elif defined(__AVX2__)
// The lower and the upper bytes of the bf16 of all numbers of a code of 4 bits, twice, as vpshufb looks them up.
template <int bias> struct FourBitBytes {
  uint8_t lower[32], upper[32];
  constexpr FourBitBytes() : lower(), upper() {
    for (int i = 0; i < 32; ++i) {
      lower[i] = uint8_t(kNumbers<4, bias>.bf16[i]);
      upper[i] = uint8_t(kNumbers<4, bias>.bf16[i] >> 8);
    }
  }
};
template <int bias> alignas(32) constexpr FourBitBytes<bias> kFourBits{};

// The lower or the upper code of each byte.
template <bool upper> static inline __m256i codes_of_bytes(vu words) {
  __m256i w = reinterpret_cast<__m256i>(words);
  return _mm256_and_si256(upper ? _mm256_srli_epi16(w, 4) : w, _mm256_set1_epi8(15));
}

// Register r of eight: the upper (r / 4) codes of all bytes, of these the upper (r / 2 % 2) half of each 128 bits, of
// these the odd (r % 2) ones.
template <int bias, int r> static inline vreg four_bits_by_bytes(vu words) {
  const __m256i code = codes_of_bytes<r / 4>(words);
  auto found = [&](const uint8_t* table) __attribute__((always_inline)) {
    return _mm256_shuffle_epi8(_mm256_load_si256(reinterpret_cast<const __m256i*>(table)), code);
  };
  const __m256i lower = found(kFourBits<bias>.lower), upper = found(kFourBits<bias>.upper);
  const vu pairs =
      reinterpret_cast<vu>(r / 2 % 2 ? _mm256_unpackhi_epi8(lower, upper) : _mm256_unpacklo_epi8(lower, upper));
  return reinterpret_cast<vreg>(r % 2 ? pairs & 0xffff0000u : pairs << 16);
}
#endif

// The 4 bits of each lane from `shift` on, less the bias, in fp32.
template <int bias, int shift> static inline vreg four_bits(vu words) {
#if defined(AUTOSEL_AVX512)
  return reinterpret_cast<vreg>(_mm512_permutexvar_ps(_mm512_srli_epi32(reinterpret_cast<__m512i>(words), shift),
                                                      _mm512_load_ps(kFourBits<bias>.fp32)));
#else
#if defined(__AVX2__)
  if constexpr (bias == 0) {
    constexpr int byte = shift / 8 | ~255;  // the three others become 0
    const __m256i lane = _mm256_setr_epi32(byte, byte + 4, byte + 8, byte + 12, byte, byte + 4, byte + 8, byte + 12);
    const __m256i codes = _mm256_shuffle_epi8(codes_of_bytes<shift % 8 != 0>(words), lane);
    return reinterpret_cast<vreg>(_mm256_cvtepi32_ps(codes));
  }
#endif
  if constexpr (bias == 8) return signed_bits<4>(words ^ 0x88888888u, shift);
  else return unsigned_bits<4>(words, shift);
#endif
}

// Codes in one register of words per piece, in order: a piece begins 4 * kLanes bytes after the one before.
struct InOrder {
  static constexpr int kWords = 1, kType = kDLUInt;  // the codes' type in DLPack
  static constexpr int64_t kBytes = 4 * kLanes;  // of a piece
  static constexpr bool kOwnDots = false;
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
#if defined(__AVX2__) && !defined(AUTOSEL_AVX512)
  static constexpr bool kOwnDots = true;
  template <int r> static inline vreg dots(const vu* words) { return four_bits_by_bytes<bias, r>(words[0]); }
  static constexpr int64_t dots_place(int64_t r, int64_t e) {
    return (e / 4 * 16 + r / 2 % 2 * 8 + e % 4 * 2 + r % 2) * 2 + r / 4;
  }
#endif
  template <int r> static inline Numbers<T> numbers(const vu* words) {
#if defined(AUTOSEL_BF16_DOT)
    if constexpr (kPaired<T>) return four_bits_to_bf16(words[0], 4 * r, kNumbers<4, bias>.bf16);
    else
#endif
      return four_bits<bias, 4 * r>(words[0]);
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
  static constexpr bool kFilled = true, kOwnDots = false;
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
      return four_bits<0, r % 2 * 16 + r / 2 % 4 * 4>(words[r / 8]);
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

// A number as a weight; if a row has one scale, that multiplies the sum.
template <class S> static inline __attribute__((always_inline)) vreg weight_of(vreg number, const Scaled& s) {
  if constexpr (S::kOfRow) return S::kZeros ? number - s.offset : number;
  else if constexpr (S::kZeros) return (number - s.offset) * s.scale;
  else if constexpr (S::kOffsets) return fma(number, s.scale, s.offset);
  else return number * s.scale;
}

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

// --- matrices --------------------------------------------------------------------------------------------------------

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

template <class F, int... I>
static inline __attribute__((always_inline)) void each_of(const F& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}

// Lines from these on are prefetched, as many as a block reads.
struct Coming { const uint8_t *codes, *scales; };

// --- x ---------------------------------------------------------------------------------------------------------------

template <class C> constexpr int64_t place_in_dots(int64_t r, int64_t e) {
  if constexpr (C::kOwnDots) return C::dots_place(r, e);
  else return C::place(r, e);
}

template <class C, int r> static inline auto number_in_dots(const vu* words) {
  if constexpr (C::kOwnDots) return C::template dots<r>(words);
  else return C::template numbers<r>(words);
}

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
      for (int64_t e = 0; e < W; ++e) to[r * apart + e] = x[place_in_dots<C>(r, e)];
  }
}

// The elements of a row of x that meet a piece, widened and followed by zeros in `room` where they must be.
template <class T, class C, class X>
static inline const Wide<T>* piece_of(const Matrix<const X>& x, int64_t i, int64_t k, Wide<T>* room) {
  const X* from = x.row(i) + k;
  const int64_t some = x.columns - k < C::kCodes ? x.columns - k : C::kCodes;
  if constexpr (std::is_same_v<X, Wide<T>>) if (some == C::kCodes) return from;
  for (int64_t c = 0; c < C::kCodes; ++c) {
    if (c >= some) room[c] = Wide<T>{};
    else if constexpr (std::is_same_v<X, Wide<T>>) room[c] = from[c];
    else room[c] = widen(from[c]);
  }
  return room;
}

}  // namespace autosel
