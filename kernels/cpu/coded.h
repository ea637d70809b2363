// Weights as codes with scales: y[m] = sum over groups g of scale[n, g] * (x[m, g] . codes[n, g]); if groups have offsets,
// plus offset[n, g] * (sum of x[m, g]), whose sums are computed once per row of x. If groups have zero points,
// scale[n, g] * (x[m, g] . codes[n, g] - zero[n, g] * (sum of x[m, g])): no product of a scale and a zero is rounded.
//
// codes.h has the formats, and turns codes into numbers in registers. They are multiplied as in dot.h: by the bf16 dot if
// there is one and x is bf16, otherwise in fp32. Only the sums are rounded; a scale multiplies the sum of its group once.
// x is laid out to match the registers, once per call; with offsets, followed by each lane's sum of x.
//
// Codes are prefetched at least 8 KB ahead: four rows of 4 bits with K = 2048 are 4 KB, which a core multiplies in less
// time than memory answers. Scales are a stream of their own, of up to an eighth of the bytes, and are prefetched too.
// Against codes of the next four rows only, in turn, M=1, two cores of Zen 4, N 16384 K 2048 and N 2048 K 8192:
//   q4_0 1.10 and 1.10 at 32 GB/s, 1.44 for the first at 58 GB/s; int4-g128 1.40, 1.00 (45 GB/s); q4_k 1.11, 1.13 (1.22
//   at 40 GB/s); q6_k 1.03-1.10, 1.07-1.15; q8_0 1.02, 1.04; int8-row 1.00. M=2 and 4: q4_0 1.13, 1.10, int4-g128
//   1.20, 1.04. Distances of 6 to 32 KB differ by less than 5 %; q4_0's codes alone 12 KB ahead: 1.29 of the 1.44.
// On an Intel core (kInTurn) four rows of 4 KB or more are sequences in turn. Emerald Rapids, N 4096, K 14336, M=1:
//   int8-row 1.13, int4-g128 1.14, q8_0 1.05, q4_0 1.11, q4_k 1.03, q6_k 1.15 (bench_quantised.py --before)
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
#include "coded_amx.h"
#include "coded_digits.h"

namespace autosel {

constexpr int64_t kAheadOfCodes = 8 << 10;  // bytes at least from the row in use to the prefetched one

// --- R rows of codes against M rows of x -----------------------------------------------------------------------------

// Registers of x per piece: those that meet numbers, and the sums.
template <class T, class F>
constexpr int64_t kRegistersOfX = F::template Codes<T>::kRegisters + (F::Scales::kOffsets ? 1 : 0);
template <class T, class F> static inline int64_t coded_panel_elements(int64_t m, int64_t k) {
  if (by_amx<T>(m)) return amx_panel_elements(m, whole_pieces<T, F>(k) * F::template Codes<T>::kCodes);
#if defined(AUTOSEL_BF16_DOT)
  if (by_digits<T, F>(m, k)) return digits_panel_elements(k);
#endif
  constexpr int64_t kCodes = F::template Codes<T>::kCodes;
  return (k + kCodes - 1) / kCodes * kRegistersOfX<T, F> * kWidthOfX<T> * m;
}

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
    } else if constexpr (kLanes == 8) {  // 16 registers: one row of codes at a time
#pragma GCC unroll 4
      for (int i = 0; i < R; ++i) {
        vreg part[M] = {};
        each_of([&](auto r) __attribute__((always_inline)) {
          const vreg number = number_in_dots<C, r>(words[i]);
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) part[m] = multiply_codes<T>(part[m], number, x + (r * M + m) * W);
        }, registers);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) add(i, m, part[m]);
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
  const bool turn = R > 1 && w.stride >= kShortRow && asks_in_turn();  // rows are sequences of lines
  const int64_t next_row = turn ? w.stride : C::kBytes, next_piece = turn ? C::kBytes : R * C::kBytes;
  for (int64_t p = 0; p < whole; ++p) {
    vu words[R][C::kWords];
    Scaled scaled[R];
    if constexpr (!S::kOfRow)
      for (int64_t at = 0; at == 0 || at < S::template bytes<C>(R); at += 64)
        prefetch_l2(coming.scales + S::template bytes<C>(p * R) + at);
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) {
      if (C::kBytes >= 64 || (turn ? p : p * R + i) % 2 == 0)
        for (int64_t at = 0; at < C::kBytes; at += 64) prefetch_l2(coming.codes + p * next_piece + i * next_row + at);
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
#if defined(AUTOSEL_AMX)
  if constexpr (kPaired<T>) if (by_amx<T>(x.rows)) return pack_for_amx_codes<F>(x, out);
#endif
#if defined(AUTOSEL_BF16_DOT)
  if constexpr (kByDigits<T, F>)
    if (by_digits<T, F>(x.rows, x.columns)) {
      static_assert(std::is_same_v<X, bf16>, "digits are of bf16; CodedColumns expects a head");
      if (pack_digits(x.row(0), x.columns, out)) return;
      out += kHeadElements;
    }
#endif
  using C = typename F::template Codes<T>;
  constexpr int64_t W = kWidthOfX<T>, kCodes = C::kCodes;
  Groups groups(x.rows, kMostCoded<T, F>);
  for (int64_t g = 0, first = 0; g < groups.count; first += groups.of(g++)) {
    int64_t m = groups.of(g);
    for (int64_t i = 0; i < m; ++i) {
      Wide<T>* to = out + coded_panel_elements<T, F>(first, x.columns) + i * W;
      for (int64_t k = 0; k < x.columns; k += kCodes, to += kRegistersOfX<T, F> * W * m) {
        Wide<T> room[kCodes];
        lay_out<T, C>(piece_of<T, C>(x, first + i, k, room), to, m * W);
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
  int64_t amx;                       // rows of x, or 0: blocks
#if defined(AUTOSEL_AMX)
  AmxValid<F> valid;
#endif

  CodedColumns() = default;
  CodedColumns(const Coded* w, const Wide<T>* panel, int64_t m, int64_t together)
      : w(w), panel(panel), groups(m, kMostCoded<T, F>), amx(by_amx<T>(m) ? m : 0) {
#if defined(AUTOSEL_AMX)
    if (amx) valid = AmxValid<F>(w->columns);
#endif
    rows = rows_of_codes(groups.rows);
    if (together < rows) rows = 1;
    ahead = (kAheadOfCodes / (rows * w->stride + 1) + 1) * rows;
    for (int64_t smaller = 0; smaller < (groups.larger < groups.count ? 2 : 1); ++smaller) {
      several[smaller] = coded_block_for<T, F>(groups.rows - smaller, rows);
      one[smaller] = coded_block_for<T, F>(groups.rows - smaller, 1);
    }
#if defined(AUTOSEL_BF16_DOT)
    if constexpr (kByDigits<T, F>)
      if (by_digits<T, F>(m, w->columns)) {
        const int64_t digits = reinterpret_cast<const DigitsHead*>(panel)->digits;
        this->panel += kHeadElements;
        if (digits) {
          one[0] = digits_block_of<F, 1>(digits);
          several[0] = rows > 1 ? digits_block_of<F, 4>(digits) : one[0];
        }
      }
#endif
  }
  const void* at(int64_t n) const { return w->row(n); }
  Amx hold() const { return {amx, w->rows}; }
  int64_t run() const {
    if (amx) return kAmxColumns;
    if (w->stride >= kShortRow) return rows;
    int64_t fit = kRunBytes / (w->stride + 1);
    return (fit < rows ? rows : fit < kMostRun ? fit : kMostRun) / rows * rows;
  }
  int64_t dots(int64_t n, int64_t to, const void* then, float* out) const {
#if defined(AUTOSEL_AMX)
    if constexpr (kPaired<T>)
      if (amx) {
        AmxColumns columns(n, to);
        const int64_t next = n + columns.taken;
        const Coming coming{next < to ? w->row(next) : static_cast<const uint8_t*>(then), w->scales_of(next)};
        (columns.few ? amx_codes<F, true> : amx_codes<F, false>)(*w, n - columns.skipped, panel, amx, valid, coming,
                                                                  columns, out);
        return columns.taken;
      }
#endif
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
