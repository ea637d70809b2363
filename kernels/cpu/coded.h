// Weights as codes with scales: y[m] = sum over groups g of scale[n, g] * (x[m, g] . codes[n, g]).
//
//   Nibbles   codes of 4 bits, unsigned, the weight is code - 8: a 32-bit word holds 8 neighbours along K, the first in
//             its lowest bits; a row is whole lines of 128 codes
//   Octets    codes of 8 bits, signed, one after another
//
// A scale is fp32, fp16 or bf16 and belongs to a row, or to 32, 64 or 128 neighbours in it. Codes become numbers in
// registers, exactly, and are multiplied as in dot.h: by the bf16 dot if there is one and x is bf16, otherwise in fp32.
// Only the sums are rounded; a scale multiplies the sum of its group once.
//
// A register of 32-bit words is a piece: 8 * kLanes nibbles or 4 * kLanes octets. A lane only ever holds the codes of
// its own word, so lanes never mix groups, and one multiplication by a vector of scales serves all groups of a piece.
// x is laid out to match, once per call: `place` below.
//
// Nibbles with the bf16 dot: vpermw takes the 5 lowest bits of each half word as an index; a table of two equal halves
// ignores the fifth bit, so no bit is masked. 3 shifts, 4 lookups, 4 dots for 128 weights and a row of x.
// Octets with the bf16 dot: the upper and the lower byte of the bf16 of |code| come from two tables of 128 bytes (VBMI,
// which the flags of the bf16 dot include), the sign is added to the upper byte, and interleaving the bytes gives 64
// bf16: 8 operations, 2 dots. |-128| has bit 7, which the index ignores: its upper byte is set apart.
#pragma once
#include "fused.h"

namespace autosel {

constexpr int64_t kNibblesInLine = 128;

// --- codes -> registers of numbers -----------------------------------------------------------------------------------

// What a register of numbers is: bf16 pairs for the dot, or fp32 lanes.
template <class T> using Numbers = std::conditional_t<kPaired<T>, vu, vreg>;

template <class T> static inline vreg multiply_codes(vreg acc, Numbers<T> w, const Wide<T>* x) {
#if defined(AUTOSEL_BF16_DOT)
  if constexpr (kPaired<T>)
    return reinterpret_cast<vreg>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), reinterpret_cast<__m512bh>(w),
                                                   (__m512bh)_mm512_loadu_si512(x)));
  else
#endif
    return fma(w, load(x), acc);
}

// bf16 of -8 .. 7 by code, twice.
alignas(64) static constexpr uint16_t kNibbleTable[32] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

template <class T> struct Nibbles {
  static constexpr int kBits = 4, kRegisters = kPaired<T> ? 4 : 8;  // of numbers, and of x, per piece
  static constexpr int64_t kCodes = 8 * kLanes;
  // Which code of the piece is element e of register r of x.
  static constexpr int64_t place(int64_t r, int64_t e) { return kPaired<T> ? e / 2 * 8 + e % 2 * 4 + r : e * 8 + r; }
  template <int r> static inline Numbers<T> numbers(vu words) {
#if defined(AUTOSEL_BF16_DOT)
    if constexpr (kPaired<T>)
      return reinterpret_cast<vu>(_mm512_permutexvar_epi16(
          _mm512_srli_epi16(reinterpret_cast<__m512i>(words), 4 * r), _mm512_load_si512(kNibbleTable)));
    else
#endif
    {
      vi both = reinterpret_cast<vi>(words ^ 0x88888888u);  // code - 8 in two's complement
      return __builtin_convertvector(both << (28 - 4 * r) >> 28, vreg);
    }
  }
};

#if defined(AUTOSEL_BF16_DOT)
// The upper bytes of the bf16 of 0 .. 127, then the lower ones.
struct OctetTable {
  uint8_t byte[256];
  constexpr OctetTable() : byte() {
    for (unsigned n = 1; n < 128; ++n) {
      unsigned e = 0;
      while (n >> (e + 1)) ++e;
      unsigned bits = (127 + e) << 7 | (n << (7 - e) & 127);
      byte[n] = uint8_t(bits >> 8), byte[128 + n] = uint8_t(bits);
    }
  }
};
alignas(64) static constexpr OctetTable kOctetTable{};
#endif

template <class T> struct Octets {
  static constexpr int64_t kCodes = 4 * kLanes;
  static constexpr int kBits = 8;
  static constexpr int kRegisters = kPaired<T> ? 2 : 4;
  static constexpr int64_t place(int64_t r, int64_t e) {
    return kPaired<T> ? e / 8 * 16 + r * 8 + e % 8 : e * 4 + r;
  }
  template <int r> static inline Numbers<T> numbers(vu words) {
    if constexpr (!kPaired<T>) {
      return __builtin_convertvector(reinterpret_cast<vi>(words << (24 - 8 * r)) >> 24, vreg);
    } else {
#if defined(AUTOSEL_BF16_DOT)
      __m512i w = reinterpret_cast<__m512i>(words), size = _mm512_abs_epi8(w);
      __m512i upper = _mm512_permutex2var_epi8(table(0), size, table(64));
      __m512i lower = _mm512_permutex2var_epi8(table(128), size, table(192));
      upper = _mm512_mask_mov_epi8(upper, _mm512_movepi8_mask(size), _mm512_set1_epi8(0x43));  // 128
      upper = _mm512_ternarylogic_epi64(upper, w, _mm512_set1_epi8(char(0x80)), 0xf8);         // upper | (w & 0x80)
      return reinterpret_cast<vu>(r ? _mm512_unpackhi_epi8(lower, upper) : _mm512_unpacklo_epi8(lower, upper));
#else
      return {};
#endif
    }
  }
#if defined(AUTOSEL_BF16_DOT)
  static inline __m512i table(int at) { return _mm512_load_si512(kOctetTable.byte + at); }
#endif
};

// What the flags of a build choose: bits of a code, neighbours that share a scale (0: a row), the type of a scale.
#if !defined(AUTOSEL_CODE_BITS)
#define AUTOSEL_CODE_BITS 8
#define AUTOSEL_GROUP 0
#define AUTOSEL_SCALE float
#endif
template <class T> using Code = std::conditional_t<AUTOSEL_CODE_BITS == 4, Nibbles<T>, Octets<T>>;
using Scale = AUTOSEL_SCALE;
constexpr int64_t kGroup = AUTOSEL_GROUP;
static_assert(AUTOSEL_CODE_BITS == 4 || AUTOSEL_CODE_BITS == 8, "codes have 4 or 8 bits");
static_assert(kGroup == 0 || kGroup == 32 || kGroup == 64 || kGroup == 128, "a scale is for a row or 32 to 128 codes");

// --- scales ----------------------------------------------------------------------------------------------------------

// Scales of a piece; 0: a row's scale is applied to its sum.
template <class T>
constexpr int64_t kScales = kGroup == 0 ? 0 : kGroup < Code<T>::kCodes ? Code<T>::kCodes / kGroup : 1;

#if defined(AUTOSEL_AVX512)
static inline __m128 four_at(const float* s) { return _mm_loadu_ps(s); }
static inline __m128i halves_at(const void* s) { return _mm_loadl_epi64(static_cast<const __m128i*>(s)); }
static inline __m128 four_at(const f16* s) { return _mm_cvtph_ps(halves_at(s)); }
static inline __m128 four_at(const bf16* s) {
  return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(halves_at(s)), 16));
}
#endif

// The scale of each lane of a piece that has N of them.
template <int64_t N> static inline vreg spread(const Scale* s) {
  if constexpr (N == 1) return splat(widen(s[0]));
#if defined(AUTOSEL_AVX512)
  if constexpr (N == 2)
    return reinterpret_cast<vreg>(
        _mm512_mask_mov_ps(_mm512_set1_ps(widen(s[0])), 0xff00, _mm512_set1_ps(widen(s[1]))));
  if constexpr (N == 4) {
    const __m512i lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return reinterpret_cast<vreg>(_mm512_permutexvar_ps(lane, _mm512_castps128_ps512(four_at(s))));
  }
#elif defined(__AVX2__)
  if constexpr (N == 2)
    return reinterpret_cast<vreg>(_mm256_set_m128(_mm_set1_ps(widen(s[1])), _mm_set1_ps(widen(s[0]))));
#endif
  vreg v;
  for (int i = 0; i < kLanes; ++i) v[i] = widen(s[i * N / kLanes]);
  return v;
}

// --- R rows of codes against M rows of x -----------------------------------------------------------------------------

// A matrix [rows, columns] of codes. Strides are in bytes and in scales.
struct Coded {
  const uint8_t* codes;
  int64_t rows, columns, stride;
  const Scale* scales;
  int64_t scale_stride;
  const uint8_t* row(int64_t n) const { return codes + n * stride; }
};

// One weight, as an embedding reads it.
static inline float number(const Coded& w, int64_t n, int64_t k) {
  const uint8_t* codes = w.row(n);
  int code = AUTOSEL_CODE_BITS == 4 ? (codes[k / 2] >> (k % 2 * 4) & 15) - 8 : int(int8_t(codes[k]));
  return float(code) * widen(w.scales[n * w.scale_stride + (kGroup ? k / (kGroup ? kGroup : 1) : 0)]);
}

template <class T> static inline int64_t pieces_in(int64_t k) { return (k + Code<T>::kCodes - 1) / Code<T>::kCodes; }
template <class T> static inline int64_t coded_panel_elements(int64_t m, int64_t k) {
  return pieces_in<T>(k) * Code<T>::kCodes * m;
}

template <class F, int... I>
static inline __attribute__((always_inline)) void each_of(const F& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}

// out[m * R + r] = x[m] . (row n + r). Lines from `next` on are prefetched, as many as are read.
template <class T>
using CodedBlock = void (*)(const Coded& w, int64_t n, const Wide<T>* x, const uint8_t* next, float* out);

template <class T, int M, int R>
static void coded_block(const Coded& w, int64_t n, const Wide<T>* x, const uint8_t* next, float* out) {
  constexpr int64_t W = kPaired<T> ? 2 * kLanes : kLanes, N = kScales<T>, kPieceBytes = 4 * kLanes;
  const uint8_t* codes = w.row(n);
  const Scale* scales = w.scales + n * w.scale_stride;
  vreg acc[R][M] = {};
  auto piece = [&](const vu* words, const vreg* scale) __attribute__((always_inline)) {
    vreg part[R][M] = {};
    each_of([&](auto r) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int i = 0; i < R; ++i) {
        Numbers<T> number = Code<T>::template numbers<r>(words[i]);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) part[i][m] = multiply_codes<T>(part[i][m], number, x + (r * M + m) * W);
      }
    }, std::make_integer_sequence<int, Code<T>::kRegisters>{});
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) acc[i][m] = N == 0 ? acc[i][m] + part[i][m] : fma(part[i][m], scale[i], acc[i][m]);
    x += Code<T>::kRegisters * M * W;
  };
  const int64_t whole = w.columns / Code<T>::kCodes;
  for (int64_t p = 0; p < whole; ++p) {
    vu words[R];
    vreg scale[R];
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) {
      if (kPieceBytes == 64 || (p * R + i) % 2 == 0) prefetch_l2(next + (p * R + i) * kPieceBytes);
      memcpy(&words[i], codes + i * w.stride + p * kPieceBytes, sizeof words[i]);
      if constexpr (N > 1) scale[i] = spread<N>(scales + i * w.scale_stride + p * N);
      else if constexpr (N == 1) scale[i] = spread<1>(scales + i * w.scale_stride + p * Code<T>::kCodes / kGroup);
    }
    piece(words, scale);
  }
  const int64_t left = w.columns - whole * Code<T>::kCodes;
  if (left > 0) {
    vu words[R] = {};
    vreg scale[R];
    for (int i = 0; i < R; ++i) {
      memcpy(&words[i], codes + i * w.stride + whole * kPieceBytes, size_t(left * Code<T>::kBits + 7) / 8);
      if constexpr (N > 0) {
        const Scale* from = scales + i * w.scale_stride;
        const int64_t first = whole * Code<T>::kCodes / kGroup, there = (w.columns + kGroup - 1) / kGroup - first;
        Scale some[N] = {};
        for (int64_t s = 0; s < N && s < there; ++s) some[s] = from[first + s];
        scale[i] = spread<N>(some);
      }
    }
    piece(words, scale);
  }
#pragma GCC unroll 8
  for (int i = 0; i < R * M; ++i) {
    float total = sum(acc[i / M][i % M]);
    if constexpr (N == 0) total *= widen(scales[i / M * w.scale_stride]);
    out[i % M * R + i / M] = total;
  }
}

// The kernels: four rows together for one or two rows of x, two for three or four, otherwise one.
template <class T, int M> static CodedBlock<T> coded_block_of(int64_t rows) {
  if constexpr (M <= 2) if (rows >= 4) return coded_block<T, M, 4>;
  if constexpr (M > 2 && M <= 4) if (rows >= 2) return coded_block<T, M, 2>;
  return coded_block<T, M, 1>;
}

template <class T> static CodedBlock<T> coded_block_for(int64_t m, int64_t rows) {
  switch (m) {
    case 1: return coded_block_of<T, 1>(rows);
    case 2: return coded_block_of<T, 2>(rows);
    case 3: return coded_block_of<T, 3>(rows);
    case 4: return coded_block_of<T, 4>(rows);
    case 5: return coded_block_of<T, 5>(rows);
    case 6: return coded_block_of<T, 6>(rows);
  }
  if constexpr (kMostTogether == 8) switch (m) {
    case 7: return coded_block_of<T, 7>(rows);
    case 8: return coded_block_of<T, 8>(rows);
  }
  return nullptr;
}

// Writes a piece of x, register r to to + r * apart.
template <class T> static inline void lay_out(const Wide<T>* x, Wide<T>* to, int64_t apart) {
  constexpr int64_t W = kPaired<T> ? 2 * kLanes : kLanes;
  if constexpr (kPaired<T> && AUTOSEL_CODE_BITS == 4) {  // x[4 e + r]: the fourths of a 64-bit word
    uint64_t fours[W];
    memcpy(fours, x, sizeof fours);
    for (int64_t r = 0; r < 4; ++r)
      for (int64_t e = 0; e < W; ++e) to[r * apart + e].bits = uint16_t(fours[e] >> (16 * r));
  } else {
    for (int64_t r = 0; r < Code<T>::kRegisters; ++r)
      for (int64_t e = 0; e < W; ++e) to[r * apart + e] = x[Code<T>::place(r, e)];
  }
}

// Rows of x [piece][register][rows][W], group after group (dot.h), zeros behind K.
template <class T, class X> static void pack_for_codes(const Matrix<const X>& x, Wide<T>* out) {
  constexpr int64_t W = kPaired<T> ? 2 * kLanes : kLanes, kCodes = Code<T>::kCodes;
  Groups groups(x.rows);
  for (int64_t g = 0, first = 0; g < groups.count; first += groups.of(g++)) {
    int64_t m = groups.of(g);
    for (int64_t i = 0; i < m; ++i) {
      Wide<T>* to = out + coded_panel_elements<T>(first, x.columns) + i * W;
      for (int64_t k = 0; k < x.columns; k += kCodes, to += kCodes * m) {
        const X* from = x.row(first + i) + k;
        int64_t some = x.columns - k < kCodes ? x.columns - k : kCodes;
        Wide<T> wide[kCodes] = {};
        if constexpr (std::is_same_v<X, Wide<T>>) {
          if (some == kCodes) { lay_out<T>(from, to, m * W); continue; }
          memcpy(wide, from, size_t(some) * sizeof(X));
        } else {
          for (int64_t c = 0; c < some; ++c) wide[c] = widen(from[c]);
        }
        lay_out<T>(wide, to, m * W);
      }
    }
  }
}

// The columns that stream_runs computes.
template <class T> struct CodedColumns {
  const Coded* w;
  const Wide<T>* panel;
  Groups groups;
  int64_t rows = 1;
  CodedBlock<T> several[2], one[2];  // for the larger groups and the smaller ones

  CodedColumns() = default;
  CodedColumns(const Coded* w, const Wide<T>* panel, int64_t m, int64_t together) : w(w), panel(panel), groups(m) {
    rows = together >= 4 && groups.rows <= 2 ? 4 : together >= 2 && groups.rows > 2 && groups.rows <= 4 ? 2 : 1;
    if (groups.larger < groups.count && groups.rows == 3) rows = 1;  // a group of three and one of two
    for (int64_t smaller = 0; smaller < (groups.larger < groups.count ? 2 : 1); ++smaller) {
      several[smaller] = coded_block_for<T>(groups.rows - smaller, rows);
      one[smaller] = coded_block_for<T>(groups.rows - smaller, 1);
    }
  }
  const void* at(int64_t n) const { return w->row(n); }
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
    else if (n + taken < to) next = at + taken * w->stride;
    const CodedBlock<T>* block = whole ? several : one;
    for (int64_t g = 0, i = 0; g < groups.count; i += groups.of(g++), next = at)
      block[g >= groups.larger](*w, n, panel + coded_panel_elements<T>(i, w->columns), next, out + i * taken);
    return taken;
  }
};

// --- all of it -------------------------------------------------------------------------------------------------------

// Raises ValueError unless the operands are a matrix of `rows` x `columns` (-1: any) in the build's format.
static Coded coded_matrix(const TensorView& codes, const TensorView& scales, const char* name, int64_t rows,
                          int64_t columns) {
  constexpr bool packed = AUTOSEL_CODE_BITS == 4;
  const int64_t wide = packed ? (columns + kNibblesInLine - 1) / kNibblesInLine * (kNibblesInLine / 2) : columns;
  const int64_t groups = kGroup ? (columns + kGroup - 1) / kGroup : 1;
  DLDataType c = codes.dtype(), s = scales.dtype();
  AUTOSEL_CHECK(codes.ndim() == 2 && c.code == (packed ? kDLUInt : kDLInt) && c.bits == 8,
                name << ".codes must be " << (packed ? "uint8 [N,K/2]" : "int8 [N,K]"));
  AUTOSEL_CHECK((rows < 0 || codes.size(0) == rows) && codes.size(1) == wide,
                name << ".codes is " << codes.size(0) << " x " << codes.size(1) << ", expected " << rows << " x "
                     << wide << " (-1: any)");
  AUTOSEL_CHECK(wide <= 1 || codes.stride(1) == 1, name << ".codes: last dimension not contiguous");
  constexpr bool is_bf16 = std::is_same_v<Scale, bf16>;
  constexpr const char* dtype = is_bf16 ? "bfloat16" : sizeof(Scale) == 2 ? "float16" : "float32";
  AUTOSEL_CHECK(s.code == (is_bf16 ? kDLBfloat : kDLFloat) && s.bits == 8 * sizeof(Scale) &&
                    scales.ndim() == (kGroup ? 2 : 1) && scales.size(0) == codes.size(0) &&
                    (!kGroup || scales.size(1) == groups),
                name << ".scales must be " << dtype << " [" << codes.size(0) << (kGroup ? ",K/group]" : "]"));
  constexpr int last = kGroup ? 1 : 0;
  AUTOSEL_CHECK(scales.size(last) <= 1 || scales.stride(last) == 1, name << ".scales: not contiguous");
  return {data<const uint8_t>(codes), codes.size(0),      columns, codes.stride(0),
          data<const Scale>(scales),  scales.stride(0)};
}

// As dot.h's `stream`.
template <class T, int Parts, class X, class Done>
static void stream_coded(const X& x, int64_t m, const Coded* w, int64_t threads, int64_t rows, const Done& done) {
  AUTOSEL_CHECK(rows >= 1, "rows is " << rows << ", expected at least 1");
  parallel(threads, w->rows, 8, [&](int64_t begin, int64_t end, int rank) {
    static thread_local Scratch scratch;
    for (int64_t m0 = 0; m0 < m; m0 += kMaxRows) {
      int64_t some = m - m0 < kMaxRows ? m - m0 : kMaxRows;
      Wide<T>* panel = scratch.get<Wide<T>>(coded_panel_elements<T>(some, w->columns));
      pack_for_codes<T>(x(m0, some), panel);
      CodedColumns<T> columns[Parts];
      for (int p = 0; p < Parts; ++p) columns[p] = CodedColumns<T>(w + p, panel, some, rows);
      auto offset = [&](int64_t i, int64_t n, int64_t count, const float* const* v) {
        done(rank, m0 + i, n, count, v);
      };
      stream_runs<Parts>(columns, some, begin, end, w->row(end), offset);
    }
  });
}

}  // namespace autosel
