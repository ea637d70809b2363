// Products of warps (mma.sync) and of warp groups (wgmma), and the moves of their operands. Layouts: PTX ISA 9.0,
// 9.7.14
// and 9.7.15.
#pragma once
#include "scalar.h"

namespace ptx {

enum class Element : uint8_t { f16, bf16, tf32, e4m3, e5m2 };
inline size_t width(Element e) { return e == Element::tf32 ? 4 : e == Element::e4m3 || e == Element::e5m2 ? 1 : 2; }
inline float value_of(Element e, uint32_t b) {
  switch (e) {
    case Element::f16: return f16_to(uint16_t(b));
    case Element::bf16: return bf16_to(uint16_t(b));
    case Element::tf32: return float_of(b & 0xffffe000u);
    case Element::e4m3: return e4m3_to(uint8_t(b));
    default: return e5m2_to(uint8_t(b));
  }
}
inline Element element_named(const std::string& s) {
  if (s == "f16") return Element::f16;
  if (s == "bf16") return Element::bf16;
  if (s == "tf32") return Element::tf32;
  if (s == "e4m3") return Element::e4m3;
  if (s == "e5m2") return Element::e5m2;
  throw Error("a product of " + s);
}

// m16n8k16 -> 16, 8, 16
inline void shape_of(const Instruction& i, int& m, int& n, int& k) {
  for (const std::string& w : i.words)
    if (w[0] == 'm' && sscanf(w.c_str(), "m%dn%dk%d", &m, &n, &k) == 3) return;
  throw Error("a product without a shape");
}

// The part `part` of the register `r` of lane `l` that holds elements of 4 bytes / parts, of a tile whose registers are
// pairs of rows, then pairs of halves of k: its row and column. (A of mma; B by its columns.)
struct Spot {
  int row, k;
};
inline Spot spot_of_a(unsigned l, unsigned r, unsigned part, unsigned parts) {
  return {int(l / 4 + 8 * (r & 1)), int((l % 4) * parts + part + 4 * parts * (r >> 1))};
}
inline Spot spot_of_b(unsigned l, unsigned r, unsigned part, unsigned parts) {
  return {int(l / 4), int((l % 4) * parts + part + 4 * parts * r)};
}

inline void mma(Thread& t, const Instruction& i) {
  if (!together(t, 0xffffffff)) return;
  int m, n, k;
  shape_of(i, m, n, k);
  const size_t types = i.words.size() - 4;  // ... .f32.bf16.bf16.f32
  const Element ea = element_named(i.words[types + 1]), eb = element_named(i.words[types + 2]);
  if (i.words[types] != "f32" || m != 16 || n != 8) throw Error("mma of this kind");
  const unsigned parts = unsigned(4 / width(ea));
  float a[16][32], b[8][32], c[16][8];
  for (unsigned l = 0; l < kWarp; ++l) {
    Thread& o = *lane(t, l);
    const auto &ra = i.operands[1].many, &rb = i.operands[2].many, &rc = i.operands[3].many;
    for (unsigned r = 0; r < ra.size(); ++r)
      for (unsigned p = 0; p < parts; ++p) {
        const Spot s = spot_of_a(l, r, p, parts);
        a[s.row][s.k] = value_of(ea, uint32_t(o.slots[ra[r]]) >> (32 / parts * p));
      }
    for (unsigned r = 0; r < rb.size(); ++r)
      for (unsigned p = 0; p < parts; ++p) {
        const Spot s = spot_of_b(l, r, p, parts);
        b[s.row][s.k] = value_of(eb, uint32_t(o.slots[rb[r]]) >> (32 / parts * p));
      }
    for (unsigned r = 0; r < 4; ++r) c[l / 4 + 8 * (r >> 1)][(l % 4) * 2 + (r & 1)] = as<float>(o.slots[rc[r]]);
  }
  for (int y = 0; y < 16; ++y)
    for (int x = 0; x < 8; ++x) {
      float sum = 0;
      for (int z = 0; z < k; ++z) sum += a[y][z] * b[x][z];
      c[y][x] += sum;
    }
  for (unsigned l = 0; l < kWarp; ++l)
    for (unsigned r = 0; r < 4; ++r)
      lane(t, l)->slots[i.operands[0].many[r]] = bits(c[l / 4 + 8 * (r >> 1)][(l % 4) * 2 + (r & 1)]);
}

// ldmatrix.sync.aligned.m8n8.xN[.trans].shared.b16 {d}, [address]; stmatrix turned about. Lane j names row j % 8 of
// matrix j / 8.
template <bool LOADS>
void move_matrices(Thread& t, const Instruction& i) {
  if (!together(t, 0xffffffff)) return;
  const Operand &registers = i.operands[LOADS ? 0 : 1], &address = i.operands[LOADS ? 1 : 0];
  const std::vector<uint32_t> one = {registers.slot}, &r = registers.many.empty() ? one : registers.many;
  const bool turned = i.has("trans");
  for (unsigned x = 0; x < r.size(); ++x) {
    char *rows[8], before[8][16];
    for (unsigned y = 0; y < 8; ++y) {
      Thread& owner = *lane(t, 8 * x + y);
      rows[y] = machine().shared(*t.block, word(owner, address), 16, 16);
      if (!LOADS) wrote(owner, rows[y], 16);
      if (LOADS)
        machine().races.read(owner.number, rows[y], 16, i.line);
      else
        memcpy(before[y], rows[y], 16);
    }
    for (unsigned l = 0; l < kWarp; ++l)
      for (unsigned h = 0; h < 2; ++h) {
        const unsigned fixed = l / 4, pair = 2 * (l % 4) + h;
        char* p = turned ? rows[pair] + 2 * fixed : rows[fixed] + 2 * pair;
        uint64_t& slot = lane(t, l)->slots[r[x]];
        uint16_t v = uint16_t(slot >> 16 * h);
        if (LOADS) {
          memcpy(&v, p, 2);
          slot = (h ? slot & 0xffff : 0) | uint64_t(v) << 16 * h;
        } else {
          memcpy(p, &v, 2);
        }
      }
    for (unsigned y = 0; y < 8 && !LOADS; ++y)
      if (!machine().races.lenient || memcmp(before[y], rows[y], 16) != 0)
        machine().races.write(lane(t, 8 * x + y)->number, rows[y], 16, i.line);
  }
}

// --- products of warp groups -----------------------------------------------------------------------------------------

// An operand's place in shared memory. Canonical layouts: PTX ISA 9.0, 9.7.15.5.1; in 16-byte units, n the index of
// eight rows (K-major) or of 8 to 64 elements along M or N:
//   K-major   none ((8,n),2):((1,SBO),LBO)   32 B ((8,n),2):((2,SBO),1)   64 B ((4 a row,SBO),1)   128 B ((8 a
// row,SBO),1)
//   MN-major  none ((1,n),(8,k)):((X,SBO),(1,LBO))   else ((w,n),(8,k)):((1,LBO),(w,SBO)), w = 2, 4, 8
struct Matrix {
  uint64_t start, leading, stride;  // bytes
  unsigned swizzle;                 // 0, or 32, 64, 128 bytes
  bool k_major;
  Element element;

  uint64_t address(uint64_t mn, uint64_t k) const {
    const uint64_t w = width(element), per = 16 / w;  // elements of 16 bytes
    uint64_t a;
    if (k_major) {
      const uint64_t row = swizzle ? swizzle : 16;
      a = start + mn / 8 * stride + mn % 8 * row + k % per * w + k / per * (swizzle ? 16 : leading);
    } else if (!swizzle) {
      a = start + mn % per * w + mn / per * stride + k % 8 * 16 + k / 8 * leading;
    } else {
      const uint64_t wide = swizzle / w;
      a = start + mn % wide * w + mn / wide * leading + k % 8 * swizzle + k / 8 * stride;
    }
    return swizzle ? a ^ ((a >> 7 & (swizzle / 16 - 1)) << 4) : a;
  }
};

inline Matrix matrix_of(uint64_t d, bool k_major, Element e) {
  static const unsigned swizzles[] = {0, 128, 64, 32};
  if (d >> 49 & 7) throw Error("a descriptor with a base offset");
  return {(d & 0x3fff) << 4, (d >> 16 & 0x3fff) << 4, (d >> 32 & 0x3fff) << 4, swizzles[d >> 62], k_major, e};
}

// All elements [rows][k] as floats.
inline std::vector<float> read_matrix(Block& b, const Matrix& m, unsigned rows, unsigned depth) {
  std::vector<float> all(size_t(rows) * depth);
  const uint64_t window = b.rank * kWindow;
  for (unsigned r = 0; r < rows; ++r)
    for (unsigned k = 0; k < depth; ++k) {
      const uint64_t at = window + m.address(r, k);
      uint32_t v = 0;
      memcpy(&v, machine().shared(b, at, width(m.element), width(m.element)), width(m.element));
      all[size_t(r) * depth + k] = value_of(m.element, v);
    }
  return all;
}

// Calls work(address) for each 16 bytes of the matrix.
template <class F>
void each_unit(const Matrix& m, unsigned rows, unsigned depth, F&& work) {
  const unsigned step = unsigned(16 / width(m.element)), down = m.k_major ? 1 : step, across = m.k_major ? step : 1;
  for (unsigned r = 0; r < rows; r += down)
    for (unsigned k = 0; k < depth; k += across) work(m.address(r, k));
}

// wgmma.mma_async.sync.aligned.m64nNkK.f32.ta.tb {d}, a, b, scale-d, imm-a, imm-b[, turned-a, turned-b]: a is a
// descriptor
// or four registers. Reads and writes happen when it is started, or when it is waited for.
inline void group_product(Thread& t, const Instruction& i) {
  if (!group_together(t)) return;
  Block& b = *t.block;
  const unsigned first = t.index / kGroup * kGroup;
  int m, n, depth;
  shape_of(i, m, n, depth);
  const size_t types = i.words.size() - 3;
  if (i.words[types] != "f32") throw Error("a product of warp groups into " + i.words[types]);
  const Element ea = element_named(i.words[types + 1]), eb = element_named(i.words[types + 2]);
  const bool in_registers = !i.operands[1].many.empty();
  // Descriptors and flags are read when it is started, memory and registers at some time until the wait.
  auto value = [&](size_t k) { return t.slots[i.operands[k].slot]; };
  auto flag = [&](size_t k) { return i.operands.size() > k && as<uint32_t>(value(k)) == 1; };
  const bool adds = value(3) & 1, turned_b = flag(in_registers ? 6 : 7), turned_a = !in_registers && flag(6);
  const float sign = (as<int32_t>(value(4)) == -1) != (as<int32_t>(value(5)) == -1) ? -1.0f : 1.0f;
  const Matrix b_at = matrix_of(value(2), !turned_b, eb),
               a_at = in_registers ? Matrix{} : matrix_of(value(1), !turned_a, ea);
  uint64_t fenced = ~uint64_t(0);
  for (unsigned g = first; g < first + kGroup; ++g) fenced = std::min(fenced, b.threads[g].fenced);
  auto each_operand = [=](auto&& visit) {
    each_unit(b_at, unsigned(n), unsigned(depth), visit);
    if (!in_registers) each_unit(a_at, 64, unsigned(depth), visit);
  };
  each_operand([&](uint64_t address) { must_be_fenced(b, address, 1, fenced); });
  auto work = [=, &b, &i] {
    const Operand &d = i.operands[0], &a = i.operands[1];
    const std::vector<float> right = read_matrix(b, b_at, unsigned(n), unsigned(depth));
    std::vector<float> left;
    if (in_registers) {
      const unsigned parts = unsigned(4 / width(ea));
      left.resize(64 * size_t(depth));
      for (unsigned g = 0; g < kGroup; ++g)
        for (unsigned r = 0; r < a.many.size(); ++r)
          for (unsigned p = 0; p < parts; ++p) {
            const Spot s = spot_of_a(g % kWarp, r, p, parts);
            left[size_t(g / kWarp * 16 + unsigned(s.row)) * size_t(depth) + size_t(s.k)] =
                value_of(ea, uint32_t(b.threads[first + g].slots[a.many[r]]) >> (32 / parts * p));
          }
    } else {
      left = read_matrix(b, a_at, 64, unsigned(depth));
    }
    for (unsigned g = 0; g < kGroup; ++g) {
      Thread& o = b.threads[first + g];
      for (unsigned r = 0; r < d.many.size(); ++r) {
        const unsigned row = g / kWarp * 16 + g % kWarp / 4 + 8 * (r >> 1 & 1),
                       column = r / 4 * 8 + g % 4 * 2 + (r & 1);
        float sum = 0;
        for (int k = 0; k < depth; ++k)
          sum += left[size_t(row) * size_t(depth) + size_t(k)] * right[size_t(column) * size_t(depth) + size_t(k)];
        o.slots[d.many[r]] = bits((adds ? as<float>(o.slots[d.many[r]]) : 0.0f) + sign * sum);
      }
    }
  };
  auto ends = [=, &b, &i] {
    if (!machine().races.on()) return;
    each_operand([&](uint64_t address) {
      const char* p = machine().shared(b, b.rank * kWindow + address, 16, 16);
      machine().races.read(b.threads[first].number, p, 16, i.line);
    });
  };
  ends();  // its operands must be written before it starts, and must not change until it has ended
  b.products[first / kGroup].add(machine().delays(), work, ends);
}
inline void group_commit(Thread& t, const Instruction&) {
  if (group_together(t)) t.block->products[t.index / kGroup].commit();
}
inline void group_wait(Thread& t, const Instruction& i) {
  const uint64_t count = t.slots[i.at[0]];
  if (!group_together(t)) return;
  Block& b = *t.block;
  const unsigned first = t.index / kGroup * kGroup;
  b.products[first / kGroup].leave(size_t(count));
  Clocks met;  // all have read, even if only one of them waits
  for (unsigned k = first; k < first + kGroup; ++k) machine().races.release(b.threads[k].number, met);
  for (unsigned k = first; k < first + kGroup; ++k) machine().races.acquire(b.threads[k].number, met);
}

}  // namespace ptx
