// bf16 weights in 12 bits, lossless: a projection limited by memory reads three quarters of the bytes.
//
// A bf16 has a sign, 8 bits of exponent and 7 of mantissa. The exponents of a matrix's weights are close together: of
// the 128 values of the upper 7 bits, the 8 most frequent cover all but 1 in 10,000 of normally distributed weights. So
// a weight's upper byte (sign and those 7 bits) becomes a 4-bit code into a table of 16 bytes; its lower byte is
// unchanged. 128 neighbours along K are a unit of three cache lines:
//
//     64 bytes of codes: weight i in the lower half of byte place(i), weight 64 + i in the upper
//     64 lower bytes, of weights 0 .. 63, at the same places      64 lower bytes, of weights 64 .. 127
//
// place() is the order that two bytewise interleavings of a register undo: a unit becomes 128 bf16 with 3 loads and 9
// cheap operations with AVX-512, 8 and 18 with AVX2. A weight whose upper byte has no code gets an arbitrary one, and
// its upper byte goes to a separate list: 4 bytes each, in order, row after row. A unit with such weights is corrected
// on its way to the registers. All bits are kept: zeros, subnormals, infinities, NaN. The same registers go into the
// same dots in the same order as in dot.h, so y has the same bits.
//
// Four rows are stored together, unit by unit: memory sees one stream, which the hardware prefetcher follows.
//
// Measured on 2 cores, 130 to 600 MB of weights, normally distributed (0.95 % of the units have some without a code),
// M=1, times the speed of dot.h on the same weights in bf16, in turn, medians; the bytes allow 1.33 if dot.h is at the
// read rate.
// Zen 3 (AVX2), at 29 GB/s: K = 2048 1.26-1.42, K = 8192 1.21-1.32: each line prefetched 36 lines ahead into L2 and 24
// ahead into L1; 24 and 18 1.23-1.42, 36 and 12 1.16-1.27, only into L2 1.18-1.33, two of three lines 0.95-1.1, none
// 1.05. Rows of a unit one after another: 1.0. Four chains of four rows (K = 1152) spill: 1.4-1.55, two rows at a time
// 1.1-1.3. From L2 0.85: there the loads and the widening to fp32 take the time.
// Zen 4 (AVX-512-BF16), while units with such weights were also stored in bf16, which is slower on Zen 3 (1.08 instead
// of 1.30: each misses in memory, for 0.6 us):
//   at 37 GB/s, K = 2048 .. 14336: 1.30-1.32; no prefetch 1.29-1.32; eight rows at a time, two streams: 1.14-1.25
//   at 61 GB/s, K = 2048: 1.38 with two of three lines prefetched 0.8 to 3 KB ahead; one 1.37, all three 1.33-1.36, none
//     1.35; 12 KB ahead 0.76; into L1 1.06-1.09
//   rejected: rows one behind the other, as dot.h has them, each line of the next 8 prefetched: 1.17-1.25; no prefetch
//     1.02-1.23. Eight rows together in memory: 1.28-1.32, and 0.9 for four at a time.
//   From L2, 1.27-1.35: decoding a unit costs less than the loads that are saved.
//   Several rows of x, N=8192, K=2048 (K=8192), at 26 GB/s, as now against one group of up to eight rows, two of three
//   lines 24 ahead, and four rows of weights that each load x: M=4 1.15 (1.30), 5 1.22, 6 1.31, 7 2.03, 8 1.85 (1.75);
//   without the bf16 dot M=4 1.32, 6 1.17, 8 1.41. M=4 in detail: x shared and nothing else 0.89 (0.91), because the
//   prefetches come in a cluster; all three lines 24 ahead 0.99 (1.10), 36 to 48 ahead 1.07-1.09 (1.18), 64 and 96 1.00
//   (1.14); not shared, three lines 48 ahead 1.06 (1.19). M=6 in one group, shared: 0.70-0.98, sums are spilled.
//   M=1 and 2: the same within 2 % with all of these.
//   Since then, from M=3 on, two lines are asked for in one half of a unit and one in the other, 96 lines ahead, against
//   three in one half 40 ahead, at 29 to 35 GB/s: M=3 1.02-1.04, M=4 1.05-1.08 (1.05), M=8 1.14-1.17; M=2 0.94. Spread
//   and 40 ahead 1.00, 64 1.04, 128 1.05, 192 1.04. If units with weights without a code, one in 26 of four rows, asked
//   40 ahead: 1.01, because those behind them were not asked for.
// Granite Rapids (AVX-512-BF16, 165 ns to memory), at 32 GB/s, M=1, K=2048 (K=8192): all three lines 48 ahead, as now,
// 1.33 (1.40) of dot.h's speed; two of three lines 24 ahead 1.20 (1.27), 36 1.19 (1.31), 48 1.30 (1.34), 60 1.23 (1.28),
// 144 1.26 (1.18); three lines 24 ahead 1.23, 144 1.27 (1.29); none 0.99. M=2: 1.04 times as fast as 40 ahead.
// Emerald Rapids, at 26 to 30 GB/s: the rows behind these asked for in turn (UnitsAhead) against lines 48 or 96 ahead, in
// turn, M=1, 2, 3: K=1024 1.08-1.12, 1.06-1.07, 1.02-1.04; K=2048 1.01-1.06, 1.06-1.09, 1.04-1.05; K=8192 1.06-1.09,
// 1.11-1.20, 1.15-1.22; K=14336 1.08, 1.16-1.19, 1.21; M=1 with four sequences 1.01-1.09, M=2 and 3 with two 1.07-1.13.
// Not used without AMX: not measured on Zen.
// Whole steps of llama-1b: benchmarks/bench_step.py.
// Source of the idea that exponents carry 3 bits of information: Zhang et al., "70% Size, 100% Accuracy: Lossless LLM
// Compression for Efficient GPU Inference via Dynamic-Length Float (DFloat11)", arXiv 2504.11651: Huffman codes, 11
// bits per weight.
#pragma once
#include "dot.h"

namespace autosel {

constexpr int64_t kUnit = 128;  // weights
constexpr int64_t kUnitBytes = 192;
constexpr int64_t kRowsTogether = 4;
constexpr int64_t kPackedVersion = 3;  // of the layout; also LOSSLESS_12 in candidates/cpp/linear.py
constexpr int64_t kAheadOfPacked = (kLanes == 16 ? 48 : 36) * 64;  // bytes from the unit in use to the prefetched line
// The same, if the prefetches of a unit do not come together: for three and more rows of x and 32 registers.
template <int M> constexpr bool kSpread = kPaired<bf16> && M > 2;
constexpr int64_t kAheadOfSpread = 96 * 64;
constexpr int kMostPacked = kLanes == 16 ? 4 : kMostTogether;  // rows of x in one kernel
constexpr int64_t kAheadIntoL1 = 24 * 64;  // the same, for the second prefetch

// Header of a packed matrix; offsets are in bytes from its beginning. Rows are padded to whole kRowsTogether, columns
// to whole units, with finite numbers that are multiplied by zeros or whose products are dropped.
struct PackedHead {
  int64_t version, lanes, rows, columns, bytes;
  int64_t units;   // [rows / kRowsTogether][columns / kUnit][kRowsTogether][kUnitBytes]
  int64_t starts;  // int32 [rows + 1]: where a row's weights without a code begin in others
  int64_t others;  // uint32: k << 8 | upper byte, ascending within a row
  uint8_t table[16];
  int64_t looks;    // of `unchanged`
  int64_t changed;  // 1 once the matrix was found to have changed
};

static inline int64_t units_in(int64_t columns) { return (columns + kUnit - 1) / kUnit; }
static inline int64_t whole_rows(int64_t rows) { return (rows + kRowsTogether - 1) / kRowsTogether * kRowsTogether; }

// Byte position of weight i < 64 of half a unit: a register's 16-byte lanes hold 8 weights of its first half, then 8 of
// its second.
constexpr int64_t kRegister = 4 * kLanes;  // bytes
static inline int64_t place(int64_t i) {
  constexpr int64_t half = kRegister / 2;
  return i / kRegister * kRegister + i % half / 8 * 16 + i / half % 2 * 8 + i % 8;
}

// A packed matrix as kernels read it.
struct PackedMatrix {
  const PackedHead* head;
  const uint8_t* units;
  const int32_t* starts;
  const uint32_t* others;

  PackedMatrix() = default;
  explicit PackedMatrix(const void* at) : head(static_cast<const PackedHead*>(at)) {
    auto base = static_cast<const uint8_t*>(at);
    units = base + head->units;
    starts = reinterpret_cast<const int32_t*>(base + head->starts);
    others = reinterpret_cast<const uint32_t*>(base + head->others);
  }
  // Return the first unit of a row; the next one is kRowsTogether * kUnitBytes further.
  const uint8_t* row(int64_t i) const {
    return units + (i / kRowsTogether * units_in(head->columns) * kRowsTogether + i % kRowsTogether) * kUnitBytes;
  }
};

// Iterates over the weights of one row that have no code.
struct Others {
  const uint32_t *next, *end;
  Others() = default;
  Others(const PackedMatrix& w, int64_t row) : next(w.others + w.starts[row]), end(w.others + w.starts[row + 1]) {}
  int64_t unit() const { return next < end ? int64_t(*next >> 8) / kUnit : INT64_MAX; }
  // Corrects the 128 bf16 of unit u.
  void put(int64_t u, void* weights) {
    for (; unit() == u; ++next) static_cast<uint8_t*>(weights)[2 * ((*next >> 8) % kUnit) + 1] = uint8_t(*next);
  }
};

template <class T> constexpr bool kUnpacks = false;

#if defined(__AVX2__)
#define AUTOSEL_UNPACKS 1
template <> inline constexpr bool kUnpacks<bf16> = true;

// Registers of bf16 that are unpacked at once, and the number of such groups in a unit.
constexpr int kTaken = kLanes == 16 ? 4 : 2, kParts = int(kUnit) / (kTaken * 2 * kLanes);

#if defined(AUTOSEL_AVX512)

using Bytes = __m512i;

static inline Bytes packed_table(const PackedMatrix& w) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w.head->table)));
}

static inline void unpack(const uint8_t* unit, int, Bytes table, Bytes* v) {
  const __m512i four_bits = _mm512_set1_epi8(15);
  __m512i codes = _mm512_loadu_si512(unit), low = _mm512_loadu_si512(unit + 64), high = _mm512_loadu_si512(unit + 128);
  __m512i a = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, four_bits));
  __m512i b = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(codes, 4), four_bits));
  v[0] = _mm512_unpacklo_epi8(low, a), v[1] = _mm512_unpackhi_epi8(low, a);
  v[2] = _mm512_unpacklo_epi8(high, b), v[3] = _mm512_unpackhi_epi8(high, b);
}

#else

using Bytes = __m256i;

static inline Bytes packed_table(const PackedMatrix& w) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w.head->table)));
}

static inline void unpack(const uint8_t* unit, int part, Bytes table, Bytes* v) {
  auto at = [unit](int64_t byte) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(unit + byte)); };
  Bytes codes = at(part % 2 * kRegister), lower = at(64 + part * kRegister);
  if (part >= 2) codes = _mm256_srli_epi16(codes, 4);
  Bytes upper = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, _mm256_set1_epi8(15)));
  v[0] = _mm256_unpacklo_epi8(lower, upper), v[1] = _mm256_unpackhi_epi8(lower, upper);
}

#endif

// What is prefetched while the units of rows that are stored together are multiplied: three lines for each unit.
template <int M> struct UnitsAhead {
  const uint8_t* at;  // for the first row of the unit in use
  int64_t other, pair, step;  // bytes to every other row's lines, to those of the third row, to the next unit's

  // `next`: the units that this thread reads behind these, of which sequences are asked for in turn: two for one row of
  // x, otherwise four.
  UnitsAhead(const uint8_t* units, const uint8_t* next, int64_t count) {
    if (asks_in_turn()) {
      at = next, step = (M == 1 ? 2 : 1) * kUnitBytes;
      other = count * step, pair = M == 1 ? kUnitBytes : 2 * other;
    } else {
      at = units + (kSpread<M> ? kAheadOfSpread : kAheadOfPacked);
      other = kUnitBytes, pair = 2 * kUnitBytes, step = kRowsTogether * kUnitBytes;
    }
  }
  const uint8_t* of(int row) const { return at + row % 2 * other + row / 2 * pair; }
  // With AVX-512, a unit is one part; otherwise four, of which three ask for a line, twice: 28 loads per unit leave L1 no
  // time to wait for L2.
  void ask(const uint8_t* unit, int row, int part) const {
    const uint8_t* lines = of(row);
    if (kLanes == 16) prefetch_l2(lines), prefetch_l2(lines + 128), prefetch_l2(lines + 64);
    else if (part < 3) prefetch_l2(lines + part * 64), __builtin_prefetch(unit + kAheadIntoL1 + part * 64, 0, 3);
  }
};

static inline Step<bf16> step_of(Bytes v) {
#if defined(AUTOSEL_BF16_DOT)
  return {v};
#else
  vu both = reinterpret_cast<vu>(v);
  return {reinterpret_cast<vreg>(both << 16), reinterpret_cast<vreg>(both & 0xffff0000u)};
#endif
}

#if defined(AUTOSEL_BF16_DOT)
static inline void unpack_half(const uint8_t* unit, int half, Bytes table, Bytes* v) {
  __m512i codes = _mm512_loadu_si512(unit), low = _mm512_loadu_si512(unit + 64 + 64 * half);
  if (half) codes = _mm512_srli_epi16(codes, 4);
  __m512i upper = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, _mm512_set1_epi8(15)));
  v[0] = _mm512_unpacklo_epi8(low, upper), v[1] = _mm512_unpackhi_epi8(low, upper);
}

// One unit of R rows against several rows of x: two rows of weights share each load of x, half a unit at a time.
template <int M, int R>
static inline __attribute__((always_inline)) void multiply_unit(const uint8_t* p, const bf16* x, Bytes table,
                                                                const UnitsAhead<M>& ahead, vreg (&acc)[R][M][1]) {
  constexpr int W = Step<bf16>::kWidth;
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half)
#pragma GCC unroll 2
    for (int r = 0; r < R; r += 2) {
      asm("" : "+r"(x));  // otherwise GCC keeps the first pair's x for the second one, and spills sums for it
      Bytes v[2][2];
      for (int i = 0; i < 2; ++i) {
        const uint8_t* unit = p + (r + i) * kUnitBytes;
        if constexpr (kSpread<M>) {
          const uint8_t* lines = ahead.of(r + i);
          if (!half) prefetch_l2(lines), prefetch_l2(lines + 128);
          else prefetch_l2(lines + 64);
        } else if (!half) {
          ahead.ask(unit, r + i, 0);
        }
        unpack_half(unit, half, table, v[i]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < 2 * M; ++i) {
        Step<bf16> of_x = Step<bf16>::at(x + (2 * half * M + i) * W);
        vreg &one = acc[r][i % M][0], &other = acc[r + 1][i % M][0];
        one = of_x.times(one, v[0][i / M]), other = of_x.times(other, v[1][i / M]);
      }
    }
}
#endif

// out[m * R + r] = (row + r) . x[m] for R rows that are stored together. Sums: `Chains` per output, used in turn.
// `next`: the units that this thread reads then.
using PackedBlock = void (*)(const PackedMatrix& w, int64_t row, const Wide<bf16>* x, const uint8_t* next, float* out);

template <int M, int R, int Chains>
static void packed_block(const PackedMatrix& w, int64_t row, const Wide<bf16>* x, const uint8_t* next, float* out) {
  static_assert((M * R * Chains <= kAccumulators || Chains == 4) && kRowsTogether % R == 0);
  constexpr int W = Step<bf16>::kWidth;
  const Bytes table = packed_table(w);
  const int64_t units = units_in(w.head->columns);
  const uint8_t* p = w.row(row);
  UnitsAhead<M> ahead(p, next, units);
  Others others[R];
  for (int r = 0; r < R; ++r) others[r] = Others(w, row + r);
  vreg acc[R][M][Chains] = {};
  auto multiply = [&](int r, int part, const Bytes* v) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < kTaken; ++i) {
      const int s = part * kTaken + i;
      Step<bf16> weights = step_of(v[i]);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) acc[r][m][s % Chains] = weights.add(acc[r][m][s % Chains], x + (s * M + m) * W);
    }
  };
  auto next_unit = [&] { p += kRowsTogether * kUnitBytes, x += kUnit * M, ahead.at += ahead.step; };
  for (int64_t u = 0;; ++u, next_unit()) {
    int64_t stop = units;
    for (int r = 0; r < R; ++r) stop = others[r].unit() < stop ? others[r].unit() : stop;
    for (; u < stop; ++u, next_unit()) {
#if defined(AUTOSEL_BF16_DOT)
      if constexpr (M > 1) {
        multiply_unit<M, R>(p, x, table, ahead, acc);
        continue;
      }
#endif
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part)  // rows in turn: with one chain each they hide each other's latency
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const uint8_t* unit = p + r * kUnitBytes;
          ahead.ask(unit, r, part);
          Bytes v[kTaken];
          unpack(unit, part, table, v);
          multiply(r, part, v);
        }
    }
    if (u == units) break;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      Bytes v[kParts * kTaken];
      for (int part = 0; part < kParts; ++part) {
        ahead.ask(p + r * kUnitBytes, r, part);
        unpack(p + r * kUnitBytes, part, table, v + part * kTaken);
      }
      others[r].put(u, v);
      for (int part = 0; part < kParts; ++part) multiply(r, part, v + part * kTaken);
    }
  }
#pragma GCC unroll 24
  for (int i = 0; i < R * M; ++i) {
    auto& a = acc[i / M][i % M];
    vreg total = a[0];
    if constexpr (Chains == 2) total = total + a[1];
    if constexpr (Chains == 4) total = (total + a[1]) + (a[2] + a[3]);
    out[i % M * R + i / M] = sum(total);
  }
}

// Rows of weights read together if each has `sums` sums.
constexpr int packed_rows(int sums) { return 4 * sums <= kAccumulators ? 4 : 2; }

// The larger of two groups decides.
template <int M> static PackedBlock packed_block_of(int64_t rows) {
  constexpr int larger = M < kMostPacked ? M + 1 : M;
  if constexpr (packed_rows(M) == 4) if (rows == 4) return packed_block<M, 4, 1>;
  if constexpr (packed_rows(larger) == 2) if (rows == 2) return packed_block<M, 2, 1>;
  return nullptr;
}

// The kernel for a group of m rows of x, with as many chains as in dot.h, so the bits are the same. Exception: for one
// row of x with a small L2, which makes `together` 1, sums are added in another order. `rows`: rows of weights at a
// time, as given by the first group.
static PackedBlock packed_block_for(int64_t m, int64_t k, int64_t together, int64_t& rows) {
  if (!rows) rows = packed_rows(int(m));
  if (m == 1 && together != 8) return packed_block<1, 4, 2>;
  if (m == 1 && is_short<bf16>(k)) return packed_block<1, 4, 4>;  // on 16 registers some sums lie in L1
  switch (m) {
    case 1: return packed_block_of<1>(rows);
    case 2: return packed_block_of<2>(rows);
    case 3: return packed_block_of<3>(rows);
    case 4: return packed_block_of<4>(rows);
  }
  if constexpr (kMostPacked == 6) switch (m) {
    case 5: return packed_block_of<5>(rows);
    case 6: return packed_block_of<6>(rows);
  }
  return nullptr;
}

// Rows of x as pack_for_dot lays them out, with zeros to the end of the last unit.
static inline int64_t packed_panel_elements(int64_t m, int64_t k) {
  return by_amx<bf16>(m) ? amx_panel_elements(m, units_in(k) * kUnit) : units_in(k) * kUnit * m;
}

template <class S> static void pack_for_units(const Matrix<const S>& x, Wide<bf16>* out) {
#if defined(AUTOSEL_AMX)
  if (by_amx<bf16>(x.rows)) {
    int64_t given = x.rows * amx_lanes(x.columns), all = x.rows * amx_lanes(units_in(x.columns) * kUnit);
    pack_for_amx(x, out);
    memset(static_cast<void*>(out + 2 * given), 0, size_t(2 * (all - given)) * sizeof *out);
    return;
  }
#endif
  Groups groups(x.rows, kMostPacked);
  for (int64_t g = 0, i = 0; g < groups.count; i += groups.of(g++)) {
    int64_t m = groups.of(g), taken = dot_panel_elements<bf16>(m, x.columns);
    Wide<bf16>* to = out + packed_panel_elements(i, x.columns);
    pack_group<bf16>(x(i, m), to);
    memset(static_cast<void*>(to + taken), 0, size_t(packed_panel_elements(m, x.columns) - taken) * sizeof *to);
  }
}

#if defined(AUTOSEL_AMX)
// amx_plain for packed rows from `row` on: each unit of all rows is unpacked into L1, while the tiles multiply the one
// before it.
template <bool Few>
AUTOSEL_WITH_AMX static void amx_packed(const PackedMatrix& w, int64_t row, const bf16* x, int64_t m, const void* next,
                                        const AmxColumns& columns, float* out) {
  constexpr int64_t kTall = Few ? kAmxFew : kAmxColumns;
  const int64_t rows = w.head->rows - row < kTall ? w.head->rows - row : kTall, units = units_in(w.head->columns);
  const Bytes table = packed_table(w);
  const char* ahead = static_cast<const char*>(next);  // its four blocks of rows in turn
  const uint8_t* at[kTall];
  Others others[kTall];
  for (int64_t r = 0; r < kTall; ++r) at[r] = w.row(r < rows ? row + r : row);
  for (int64_t r = 0; r < rows; ++r) others[r] = Others(w, row + r);
  alignas(64) bf16 unpacked[2][kTall][kUnit];
  int64_t stop = -1;  // the next unit with a weight without a code
  auto unpack_rows = [&](int64_t u) AUTOSEL_WITH_AMX {
    auto& to = unpacked[u % 2];
    for (int64_t r = 0; r < kTall; ++r) {
      const int64_t block = r % kRowsTogether, of_block = r / kRowsTogether;
      const char* line = ahead + ((block * units + u) * kRowsTogether + of_block) * kUnitBytes;
      prefetch_l2(line), prefetch_l2(line + 64), prefetch_l2(line + 128);
      Bytes v[4];
      unpack(at[r] + u * kRowsTogether * kUnitBytes, 0, table, v);
      for (int i = 0; i < 4; ++i) _mm512_store_si512(to[r] + 32 * i, v[i]);
    }
    if (u < stop) return;
    stop = INT64_MAX;
    for (int64_t r = 0; r < rows; ++r) {
      others[r].put(u, to[r]);
      stop = others[r].unit() < stop ? others[r].unit() : stop;
    }
  };
  amx_clear<Few>();
  unpack_rows(0);
  for (int64_t u = 0; u < units; ++u) {
    if (u + 1 < units) unpack_rows(u + 1);
    amx_fence();
    for (int64_t j = 0; j < kUnit; j += kAmxWidth, x += kAmxWidth * m)
      amx_multiply<Few>(unpacked[u % 2][0] + j, kUnit * int64_t(sizeof(bf16)), x, m);
    amx_fence();
  }
  amx_sums<Few>(m, columns.skipped, columns.taken, out);
}
#endif

// The columns that stream_runs computes.
struct PackedColumns {
  PackedMatrix w;
  const Wide<bf16>* panel;
  Groups groups;
  PackedBlock block[2];  // for the larger groups and the smaller ones
  int64_t rows = 0;
  int64_t amx;  // rows of x, or 0: blocks

  PackedColumns() = default;
  PackedColumns(const void* packed, const Wide<bf16>* panel, int64_t m, int64_t together)
      : w(packed), panel(panel), groups(m, kMostPacked), amx(by_amx<bf16>(m) ? m : 0) {
    for (int64_t smaller = 0; smaller < (groups.larger < groups.count ? 2 : 1); ++smaller)
      block[smaller] = packed_block_for(groups.rows - smaller, w.head->columns, together, rows);
  }
  const void* at(int64_t n) const { return w.row(n); }
  Amx hold() const { return {amx, w.head->rows}; }
  // Consecutive columns of a matrix, before the next matrix is read.
  int64_t run() const {
    if (amx) return kAmxColumns;
    int64_t fit = kRunBytes / (units_in(w.head->columns) * kUnitBytes) / 8 * 8;
    return fit < 8 ? 8 : fit < kMostRun ? fit : kMostRun;
  }
  int64_t dots(int64_t n, int64_t to, const void* then, float* out) const {
#if defined(AUTOSEL_AMX)
    if (amx) {
      AmxColumns columns(n, to);
      const uint8_t* next = n + columns.taken < to ? w.row(n + columns.taken) : static_cast<const uint8_t*>(then);
      (columns.few ? amx_packed<true> : amx_packed<false>)(w, n - columns.skipped, panel, amx, next, columns, out);
      return columns.taken;
    }
#endif
    const uint8_t* next = n + rows < to ? w.row(n + rows) : static_cast<const uint8_t*>(then);
    if (n + rows >= to && !asks_in_turn())  // otherwise the stream continues by itself
      for (int64_t line = 0; line < kAheadOfPacked; line += 64) prefetch_l2(static_cast<const char*>(then) + line);
    for (int64_t g = 0, i = 0; g < groups.count; i += groups.of(g++))
      block[g >= groups.larger](w, n, panel + packed_panel_elements(i, w.head->columns), next, out + i * rows);
    return rows;
  }
};

#endif
}  // namespace autosel
