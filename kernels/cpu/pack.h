// pack   lossless 12-bit weights   w[N,K] bf16 <-> bytes (packed.h), and the checks before a kernel reads them
//
// bytes   without an output 2 N K read twice (which values are frequent; which weights have none of them), otherwise three
//         times, and about 1.5 N K written; `compare` 3.5 N K read      once per matrix
// roofline of all that for llama-1b's 1.24e9 weights at 35 GB/s: 0.5 s; it takes about 2 s, in bytes and counters
// knobs   threads
// A source that includes this exports `pack`, `unpack` and `compare`. `pack` without an output returns the size needed.
// A weight without a code costs 4 bytes more: a matrix gains nothing if an eighth of its weights have none; the caller
// decides from the size. `compare` unpacks with the instructions of the kernels, so kernels read what it found equal.
#pragma once
#include "packed.h"

namespace autosel {
namespace {

constexpr uint8_t kNoCode = 255;
constexpr int kValues = 8;  // that have a code, each with both signs

// The most frequent upper bytes without their signs, in order; of equally frequent ones the lower first.
struct Codes {
  uint8_t value[kValues];
};

Codes codes_of(const Matrix<const bf16>& w, int64_t threads) {
  std::vector<int64_t> counts(size_t(threads) * 128);
  parallel(threads, w.rows, 1, [&](int64_t begin, int64_t end, int rank) {
    int64_t count[4][128] = {};  // neighbours are often equal; one counter would make them wait for each other
    for (int64_t n = begin; n < end; ++n)
      for (int64_t k = 0; k < w.columns; ++k) ++count[k % 4][w.row(n)[k].bits >> 8 & 127];
    for (int i = 0; i < 512; ++i) counts[size_t(rank * 128 + i % 128)] += count[i / 128][i % 128];
  });
  for (int64_t i = 128; i < threads * 128; ++i) counts[size_t(i % 128)] += counts[size_t(i)];
  int order[128];
  for (int i = 0; i < 128; ++i) order[i] = i;
  std::stable_sort(order, order + 128, [&](int a, int b) { return counts[size_t(a)] > counts[size_t(b)]; });
  Codes found;
  std::copy(order, order + kValues, found.value);
  return found;
}

// Writes code[i] of unit[i], without its sign, or kNoCode; returns how many have none. (Loops that a compiler turns
// into vectors of bytes.)
int32_t encode(const bf16* unit, const Codes& codes, uint8_t* upper, uint8_t* code) {
  int32_t none = 0;
  for (int64_t i = 0; i < kUnit; ++i) upper[i] = uint8_t(unit[i].bits >> 8);
  for (int64_t i = 0; i < kUnit; ++i) code[i] = kNoCode;
  for (uint8_t j = 0; j < kValues; ++j)
    for (int64_t i = 0; i < kUnit; ++i) code[i] = (upper[i] & 127) == codes.value[j] ? j : code[i];
  for (int64_t i = 0; i < kUnit; ++i) none += code[i] == kNoCode;
  return none;
}

// The unit that begins with the row's k-th weight; weights without a code are added to `others`.
void pack_unit(const bf16* from, int64_t k, const Codes& codes, uint8_t* to, uint32_t*& others) {
  uint8_t upper[kUnit], code[kUnit], lower[kUnit];
  if (encode(from, codes, upper, code))
    for (int64_t i = 0; i < kUnit; ++i)
      if (code[i] == kNoCode) *others++ = uint32_t(k + i) << 8 | upper[i];
  for (int64_t i = 0; i < kUnit; ++i) code[i] = uint8_t((code[i] & 7) | (upper[i] >> 4 & 8));
  for (int64_t i = 0; i < kUnit; ++i) lower[i] = uint8_t(from[i].bits);
  for (int64_t i = 0; i < kUnit / 2; ++i) code[i] = uint8_t(code[i] | code[i + kUnit / 2] << 4);
  for (int64_t i = 0; i < kUnit / 2; i += 8) {  // place() keeps groups of eight together
    memcpy(to + place(i), code + i, 8);
    memcpy(to + 64 + place(i), lower + i, 8), memcpy(to + 128 + place(i), lower + kUnit / 2 + i, 8);
  }
}

// Return a unit of a row; the last unit of a row is padded, in `room`, with a finite weight that has a code.
const bf16* unit_of(const Matrix<const bf16>& w, int64_t n, int64_t u, const Codes& codes, bf16* room) {
  int64_t left = w.columns - u * kUnit;
  if (left >= kUnit) return w.row(n) + u * kUnit;
  std::copy_n(w.row(n) + u * kUnit, left, room);
  std::fill(room + left, room + kUnit, bf16{uint16_t(codes.value[0] << 8)});
  return room;
}

int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Writes the bytes of w to `out`; without an output only size[0], the number of bytes needed.
void pack(TensorView w, Optional<TensorView> out, TensorView size, int64_t threads) {
  AUTOSEL_CHECK(w.dtype().code == kDLBfloat && w.dtype().bits == 16, "pack: w must be bfloat16");
  Matrix<const bf16> from = matrix<const bf16>(w, "w", w);
  AUTOSEL_CHECK(from.rows > 0 && from.columns > 0, "pack: w is " << from.rows << " x " << from.columns);
  AUTOSEL_CHECK(from.columns < 1 << 24, "pack: w has " << from.columns << " columns, of at most 2^24 - 1");
  AUTOSEL_CHECK(threads >= 1 && threads <= 255, "pack: 1 to 255 threads");
  int64_t units = units_in(from.columns), rows = whole_rows(from.rows);
  Codes codes = codes_of(from, threads);
  std::vector<int32_t> starts(size_t(rows + 1));
  parallel(threads, from.rows, 1, [&](int64_t begin, int64_t end, int) {
    uint8_t upper[kUnit], code[kUnit];
    bf16 room[kUnit];
    for (int64_t n = begin; n < end; ++n)
      for (int64_t u = 0; u < units; ++u)
        starts[size_t(n + 1)] += encode(unit_of(from, n, u, codes, room), codes, upper, code);
  });
  for (int64_t n = 0; n < rows; ++n) {
    AUTOSEL_CHECK(int64_t(starts[size_t(n)]) + from.columns < INT32_MAX, "pack: too many weights without a code");
    starts[size_t(n + 1)] += starts[size_t(n)];
  }
  PackedHead head{};
  head.version = kPackedVersion, head.lanes = kLanes, head.rows = from.rows, head.columns = from.columns;
  head.units = whole_lines(sizeof head);
  head.starts = head.units + rows * units * kUnitBytes;
  head.others = head.starts + whole_lines((rows + 1) * 4);
  head.bytes = head.others + whole_lines(int64_t(starts.back()) * 4);
  for (int i = 0; i < 16; ++i) head.table[i] = uint8_t(codes.value[i % kValues] | i / kValues << 7);
  *vector<int64_t>(size, "size", size, 1) = head.bytes;
  if (!out) return;
  AUTOSEL_CHECK(out->ndim() == 1 && out->size(0) == head.bytes && out->dtype().bits == 8 && out->stride(0) == 1 &&
                    reinterpret_cast<uintptr_t>(data<uint8_t>(*out)) % 64 == 0,
                "pack: out must be " << head.bytes << " bytes, aligned to 64");
  uint8_t* to = data<uint8_t>(*out);
  memcpy(to, &head, sizeof head);
  memcpy(to + head.starts, starts.data(), starts.size() * 4);
  PackedMatrix made(to);
  parallel(threads, rows, kRowsTogether, [&](int64_t begin, int64_t end, int) {
    bf16 room[kUnit];
    for (int64_t n = begin; n < end; ++n) {
      uint8_t* unit = to + (made.row(n) - to);
      uint32_t* others = reinterpret_cast<uint32_t*>(to + head.others) + starts[size_t(n)];
      for (int64_t u = 0; u < units; ++u, unit += kRowsTogether * kUnitBytes) {
        if (n < from.rows) pack_unit(unit_of(from, n, u, codes, room), u * kUnit, codes, unit, others);
        else memset(unit, 0, kUnitBytes);
      }
    }
  });
}

// Writes the 128 weights of a unit in the form that the dots take.
void read_unit(const uint8_t* unit, const PackedMatrix& w, bf16* to) {
#if defined(AUTOSEL_UNPACKS)
  for (int part = 0; part < kParts; ++part) {
    Bytes v[kTaken];
    unpack(unit, part, packed_table(w), v);
    memcpy(to + part * kTaken * 2 * kLanes, v, sizeof v);
  }
#else
  for (int64_t i = 0; i < kUnit; ++i) {
    int64_t at = place(i % 64);
    to[i].bits = uint16_t(w.head->table[unit[at] >> i / 64 * 4 & 15] << 8 | unit[64 + i / 64 * 64 + at]);
  }
#endif
}

// Return true if these are the bytes of a matrix of that size.
bool holds(const TensorView& packed, int64_t rows, int64_t columns) {
  if (packed.numel() < int64_t(sizeof(PackedHead))) return false;
  const PackedHead& head = *data<const PackedHead>(packed);
  return head.version == kPackedVersion && head.lanes == kLanes && head.bytes == packed.numel() && head.rows == rows &&
         head.columns == columns;
}

// Calls unit(n, u, weights, count) for all units of w.
template <class Unit>
void each_unit(const TensorView& packed, int64_t rows, int64_t columns, int64_t threads, const Unit& unit) {
  PackedMatrix from(data<uint8_t>(packed));
  AUTOSEL_CHECK(holds(packed, rows, columns),
                "unpack: these are not the bytes of a " << rows << " x " << columns << " matrix");
  parallel(threads, rows, 1, [&](int64_t begin, int64_t end, int) {
    bf16 weights[kUnit];
    for (int64_t n = begin; n < end; ++n) {
      const uint8_t* at = from.row(n);
      Others others(from, n);
      for (int64_t u = 0; u < units_in(columns); ++u, at += kRowsTogether * kUnitBytes) {
        read_unit(at, from, weights);
        others.put(u, weights);
        unit(n, u, weights, std::min(kUnit, columns - u * kUnit));
      }
    }
  });
}

// The bytes -> w[N,K].
void unpack_all(TensorView packed, TensorView w, int64_t threads) {
  Matrix<bf16> to = matrix<bf16>(w, "w", w);
  each_unit(packed, to.rows, to.columns, threads, [&](int64_t n, int64_t u, const bf16* weights, int64_t count) {
    std::copy_n(weights, count, to.row(n) + u * kUnit);
  });
}

// Writes different[0]: the number of units of the bytes that differ from those of w[N,K] in any bit.
void compare(TensorView packed, TensorView w, TensorView different, int64_t threads) {
  Matrix<const bf16> expected = matrix<const bf16>(w, "w", w);
  std::atomic<int64_t> count{0};
  each_unit(packed, expected.rows, expected.columns, threads, [&](int64_t n, int64_t u, const bf16* weights, int64_t some) {
    if (memcmp(expected.row(n) + u * kUnit, weights, sizeof(bf16) * size_t(some)) != 0) ++count;
  });
  *vector<int64_t>(different, "different", different, 1) = count;
}

// --- before a kernel reads them --------------------------------------------------------------------------------------

constexpr int64_t kLooks = 8;  // units compared before each call, others each time

// Return true if the matrix is still the one that was packed, judging by some of its units. A matrix that was
// overwritten as a whole is detected at once, a single changed weight within as many calls as there are groups of eight
// units. Once detected, the packed bytes stay unused.
bool unchanged(const PackedMatrix& packed, const Matrix<const bf16>& w) {
  PackedHead& head = const_cast<PackedHead&>(*packed.head);
  if (__atomic_load_n(&head.changed, __ATOMIC_RELAXED)) return false;
  int64_t units = units_in(w.columns), all = w.rows * units, apart = (all + kLooks - 1) / kLooks;
  int64_t first = __atomic_fetch_add(&head.looks, 1, __ATOMIC_RELAXED) % apart;
  for (int64_t at = first; at < all; at += apart) {
    bf16 weights[kUnit];
    int64_t n = at / units, u = at % units;
    read_unit(packed.row(n) + u * kRowsTogether * kUnitBytes, packed, weights);
    Others others(packed, n);
    while (others.unit() < u) ++others.next;
    others.put(u, weights);
    size_t bytes = sizeof(bf16) * size_t(std::min(kUnit, w.columns - u * kUnit));
    if (memcmp(w.row(n) + u * kUnit, weights, bytes) == 0) continue;
    __atomic_store_n(&head.changed, 1, __ATOMIC_RELAXED);
    return false;
  }
  return true;
}

}  // namespace

// As `stream` in dot.h: from packed matrices if each of them exists and still matches its matrix, otherwise from the
// matrices. The bits are the same if K is whole units.
template <class T, int Parts, class X, class Done>
static void stream_packed(const X& x, int64_t m, const Matrix<const T>* w,
                          [[maybe_unused]] const Optional<TensorView>* packed, int64_t threads, int64_t rows,
                          const Done& done) {
#if defined(AUTOSEL_UNPACKS)
  if constexpr (kUnpacks<T>) {
    PackedMatrix from[Parts];
    bool all = w->rows > 0 && w->columns > 0;
    for (int p = 0; p < Parts && all; ++p) {
      all = packed[p] && holds(*packed[p], w[p].rows, w[p].columns);
      if (all) from[p] = PackedMatrix(data<uint8_t>(*packed[p]));
      all = all && unchanged(from[p], w[p]);
    }
    if (all) {
      AUTOSEL_CHECK(rows >= 1, "rows is " << rows << ", expected at least 1");
      parallel(threads, w->rows, 8, [&](int64_t begin, int64_t end, int rank) {
        static thread_local Scratch scratch;
        for (int64_t m0 = 0; m0 < m; m0 += kMaxRows) {
          int64_t some = m - m0 < kMaxRows ? m - m0 : kMaxRows;
          auto panel = scratch.get<Wide<T>>(packed_panel_elements(some, w->columns));
          pack_for_units(x(m0, some), panel);
          PackedColumns columns[Parts];
          for (int p = 0; p < Parts; ++p) columns[p] = PackedColumns(from[p].head, panel, some, rows);
          stream_runs<Parts>(columns, some, begin, end, columns->at(end),
                             [&](int64_t i, int64_t n, int64_t count, const float* const* v) {
                               done(rank, m0 + i, n, count, v);
                             });
        }
      });
      return;
    }
  }
#endif
  stream<T, Parts>(x, m, w, threads, rows, done);
}

}  // namespace autosel

AUTOSEL_EXPORT(pack, autosel::pack);
AUTOSEL_EXPORT(unpack, autosel::unpack_all);
AUTOSEL_EXPORT(compare, autosel::compare);
