// sample   one token a row: repetition penalty, temperature, top_k, top_p, then the token whose interval of cumulative
//          probability (index order) contains `uniform`; temperature 0: the lowest index of the largest penalised logit
//          logits[B,V], history[B,L] int64 (-1 empty), temperature[B], top_k[B] int32, top_p[B], repetition_penalty[B],
//          uniform[B] -> token[B] int64
//
// bytes   B V b + 8 B L      FLOPs   about 6 B V
// roofline at B=1, V=128256, bf16 on one Zen 4 core: 257 KB from L2 or L3 is 3 us; kept as fp32 (513 KB), another 5.
// knobs   threads (knobs/cpu/rows.py), by rows.
//
// Only tokens that may be kept are sorted. One pass stores the row as fp32, with the maximum of every 128 logits; later
// passes skip whole blocks by their maximum:
//   top_k   the k-th largest block maximum is at most the k-th largest logit, since k blocks hold one each as large; the
//           logits above it are few, and the k-th of those is found by selection.
//   top_p   tokens of less than (1 - p) / V of the mass cannot be needed: together they are less than 1 - p. The rest is
//           sorted; if it is still large (a flat distribution), a histogram of mass first finds the bin of the edge.
// The kept set is always {logit > edge} and, of the logits equal to it, the lowest indices: a Cut.

#include "tensor.h"

namespace autosel {

constexpr int64_t kBlock = 128, kFew = 4096, kBins = 2048;

struct Token { float z; int64_t index; };

// Kept: z > edge, or z == edge and index <= last.
struct Cut {
  float edge;
  int64_t last;
  bool keeps(float z, int64_t index) const { return z > edge || (z == edge && index <= last); }
};

// A thread's memory between calls: no allocation once the largest vocabulary has been seen.
struct Room {
  std::vector<float> z, top, order;
  std::vector<double> mass;
  std::vector<Token> some;
  std::vector<int64_t> seen;
};

struct Row {
  Room& room;
  int64_t v, blocks;
  float most, over_t;  // largest logit; 1 / temperature

  const float* block(int64_t b) const { return room.z.data() + b * kBlock; }
  vreg weight(vreg z) const { return exp((z - splat(most)) * splat(over_t)); }
};

// --- the row as fp32 ---------------------------------------------------------------------------------------------------

static float block_max(const float* z) {
  vreg m = load(z);
  for (int64_t i = kLanes; i < kBlock; i += kLanes) m = max(load(z + i), m);
  return max(m);
}

// The row is padded with -inf, which no step ever draws: no loop has a tail. NaN also becomes -inf: selection and
// sorting need an order.
template <class T> static void widen_row(const T* logits, int64_t v, Room& room) {
  int64_t blocks = (v + kBlock - 1) / kBlock;
  room.z.resize(size_t(blocks * kBlock)), room.top.resize(size_t(blocks));
  float* z = room.z.data();
  for (int64_t b = 0; b < blocks; ++b, z += kBlock, logits += kBlock) {
    int64_t n = v - b * kBlock < kBlock ? v - b * kBlock : kBlock, i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      vreg x = load(logits + i);
      store(z + i, x == x ? x : splat(-INFINITY));
    }
    for (; i < kBlock; ++i) z[i] = i < n && widen(logits[i]) == widen(logits[i]) ? widen(logits[i]) : -INFINITY;
    room.top[size_t(b)] = block_max(z);
  }
}

// Once per distinct token: sorting the history, which is short, removes the repeats.
static void penalise(const int64_t* history, int64_t n, int64_t stride, float penalty, int64_t v, Room& room) {
  room.seen.clear();
  for (int64_t i = 0; i < n; ++i)
    if (int64_t t = history[i * stride]; t >= 0 && t < v) room.seen.push_back(t);
  std::sort(room.seen.begin(), room.seen.end());
  room.seen.erase(std::unique(room.seen.begin(), room.seen.end()), room.seen.end());
  for (int64_t t : room.seen) {
    float& z = room.z[size_t(t)];
    z = z > 0 ? z / penalty : z * penalty;
    if (z != z) z = -INFINITY;
  }
  for (int64_t t : room.seen) room.top[size_t(t / kBlock)] = block_max(room.z.data() + t / kBlock * kBlock);
}

static int64_t argmax(const Row& row) {
  for (int64_t b = 0; b < row.blocks; ++b)
    if (row.room.top[size_t(b)] == row.most)
      for (int64_t i = 0; i < kBlock; ++i)
        if (row.block(b)[i] == row.most) return b * kBlock + i;
  return 0;
}

// --- what is kept --------------------------------------------------------------------------------------------------------

// Every kept token with z >= from, in index order, into room.some.
static void gather(const Row& row, const Cut& cut, float from) {
  row.room.some.clear();
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (!(row.room.top[size_t(b)] >= from)) continue;
    const float* z = row.block(b);
    for (int64_t g = 0; g < kBlock; g += kLanes) {
      if (!(max(load(z + g)) >= from)) continue;
      for (int64_t i = g; i < g + kLanes; ++i)
        if (z[i] >= from && cut.keeps(z[i], b * kBlock + i)) row.room.some.push_back({z[i], b * kBlock + i});
    }
  }
}

static Cut top_k(const Row& row, const Cut& all, int64_t k) {
  Room& room = row.room;
  float from = -INFINITY;
  if (k <= row.blocks) {
    room.order = room.top;
    std::nth_element(room.order.begin(), room.order.begin() + (k - 1), room.order.end(), std::greater<float>());
    from = room.order[size_t(k - 1)];
  }
  gather(row, all, from);
  if (int64_t(room.some.size()) < k) return all;
  room.order.resize(room.some.size());
  for (size_t i = 0; i < room.some.size(); ++i) room.order[i] = room.some[i].z;
  std::nth_element(room.order.begin(), room.order.begin() + (k - 1), room.order.end(), std::greater<float>());
  float edge = room.order[size_t(k - 1)];
  int64_t left = k;
  for (const Token& t : room.some) left -= t.z > edge;
  for (const Token& t : room.some)
    if (t.z == edge && --left == 0) return {edge, t.index};
  return all;
}

// Sum of exp((z - most) / t) over the kept tokens of block b: lanes in fp32, blocks are added in double.
static float block_mass(const Row& row, const Cut& cut, int64_t b) {
  const float* z = row.block(b);
  int64_t first = b * kBlock;
  vreg edge = splat(cut.edge), a{};
  if (cut.last >= first && cut.last < first + kBlock - 1) {  // the one block in which ties are cut
    float sum = 0;
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      vreg w = row.weight(load(z + i));
      for (int k = 0; k < kLanes; ++k) sum += cut.keeps(z[i + k], first + i + k) ? w[k] : 0.0f;
    }
    return sum;
  }
  bool ties = first <= cut.last;
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    vreg v = load(z + i), w = row.weight(v);
    a += ties ? (v >= edge ? w : vreg{}) : (v > edge ? w : vreg{});
  }
  return sum(a);
}

// Fills room.mass[b] for every block; returns the total.
static double masses(const Row& row, const Cut& cut) {
  row.room.mass.resize(size_t(row.blocks));
  double total = 0;
  for (int64_t b = 0; b < row.blocks; ++b)
    total += row.room.mass[size_t(b)] = row.room.top[size_t(b)] >= cut.edge ? double(block_mass(row, cut, b)) : 0.0;
  return total;
}

static float weight_of(const Row& row, float z) { return row.weight(splat(z))[0]; }

// Keeps the most probable tokens until their mass reaches `wanted`, at least one. room.mass then holds the bins'
// masses.
static Cut top_p(const Row& row, const Cut& cut, float p) {
  Room& room = row.room;
  double total = masses(row, cut), wanted = double(p) * total, before = 0;
  if (!(total > 0)) return cut;
  // A thousandth of a temperature lower, to allow for the roundings of exp and log.
  float from = row.most + (float(std::log((1.0 - double(p)) * total / double(row.v))) - 1e-3f) / row.over_t;
  from = from > cut.edge ? from : cut.edge;
  gather(row, cut, from);
  if (int64_t(room.some.size()) > kFew) {
    float scale = float(kBins) / (row.most - from);
    auto bin = [&](float z) {
      float at = (row.most - z) * scale;
      return at < float(kBins - 1) ? int64_t(at) : kBins - 1;  // also for an infinite or NaN scale
    };
    room.mass.assign(size_t(kBins), 0.0);
    for (size_t i = 0; i < room.some.size(); i += kLanes) {
      int n = int(std::min<size_t>(kLanes, room.some.size() - i));
      vreg z = splat(row.most);
      for (int k = 0; k < n; ++k) z[k] = room.some[i + size_t(k)].z;
      vreg w = row.weight(z);
      for (int k = 0; k < n; ++k) room.mass[size_t(bin(z[k]))] += double(w[k]);
    }
    int64_t edge = 0;
    while (edge < kBins - 1 && before + room.mass[size_t(edge)] < wanted) before += room.mass[size_t(edge++)];
    auto outside = [&](const Token& t) { return bin(t.z) != edge; };
    room.some.erase(std::remove_if(room.some.begin(), room.some.end(), outside), room.some.end());
  }
  std::sort(room.some.begin(), room.some.end(), [](const Token& a, const Token& b) {
    return a.z > b.z || (a.z == b.z && a.index < b.index);
  });
  Cut made = cut;
  for (const Token& t : room.some) {
    made = {t.z, t.index};
    before += double(weight_of(row, t.z));
    if (before >= wanted) break;
  }
  return made;
}

// --- the draw --------------------------------------------------------------------------------------------------------------

static int64_t draw(const Row& row, const Cut& cut, double uniform) {
  double target = uniform * masses(row, cut), before = 0;
  const std::vector<double>& mass = row.room.mass;
  int64_t b = 0, last = -1;  // the last block with any mass: rounding may put the target past the end
  for (; b < row.blocks; ++b) {
    if (mass[size_t(b)] > 0) last = b;
    if (before + mass[size_t(b)] > target) break;
    before += mass[size_t(b)];
  }
  if (b == row.blocks) b = last;
  if (b < 0) return argmax(row);
  int64_t found = -1;
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    vreg w = row.weight(load(row.block(b) + i));
    for (int k = 0; k < kLanes; ++k) {
      int64_t index = b * kBlock + i + k;
      if (!(w[k] > 0) || !cut.keeps(row.block(b)[i + k], index)) continue;
      found = index, before += double(w[k]);
      if (before > target) return found;
    }
  }
  return found < 0 ? argmax(row) : found;
}

struct Settings { float temperature, p, penalty, uniform; int64_t k; };

template <class T>
static int64_t sample_row(const T* logits, int64_t v, const int64_t* history, int64_t n, int64_t stride, const Settings& s) {
  static thread_local Room room;
  widen_row(logits, v, room);
  if (s.penalty != 1.0f) penalise(history, n, stride, s.penalty, v, room);
  Row row{room, v, int64_t(room.top.size()), *std::max_element(room.top.begin(), room.top.end()), 1.0f / s.temperature};
  // A temperature below 1 / FLT_MAX acts as 0; a row without a finite maximum has no distribution.
  if (!(s.temperature > 0) || !(row.over_t <= 3.0e38f) || !(std::fabs(row.most) <= 3.4e38f)) return argmax(row);
  Cut cut{-INFINITY, v - 1};
  if (s.k > 0 && s.k < v) cut = top_k(row, cut, s.k);
  if (s.p < 1.0f) cut = top_p(row, cut, s.p);
  return draw(row, cut, s.uniform);
}

static void vector_of(const TensorView& t, int64_t n, DLDataTypeCode code, int bits, const char* name) {
  DLDataType d = t.dtype();
  AUTOSEL_CHECK(t.ndim() == 1 && t.size(0) == n, "sample: " << name << " must be [B]");
  AUTOSEL_CHECK(d.code == code && d.bits == bits, "sample: " << name << " has another dtype");
}

static void sample(TensorView logits, TensorView history, TensorView temperature, TensorView top_k, TensorView top_p,
                   TensorView repetition_penalty, TensorView uniform, TensorView token, int64_t threads) {
  AUTOSEL_CHECK(logits.ndim() == 2 && history.ndim() == 2, "sample takes logits[B,V], history[B,L]");
  int64_t rows = logits.size(0), v = logits.size(1);
  AUTOSEL_CHECK(v > 0 && (v == 1 || logits.stride(1) == 1), "sample: logits' last dimension not contiguous, or empty");
  AUTOSEL_CHECK(history.size(0) == rows && history.dtype().code == kDLInt && history.dtype().bits == 64,
                "sample: history must be [B,L] int64");
  vector_of(temperature, rows, kDLFloat, 32, "temperature"), vector_of(top_k, rows, kDLInt, 32, "top_k");
  vector_of(top_p, rows, kDLFloat, 32, "top_p"), vector_of(uniform, rows, kDLFloat, 32, "uniform");
  vector_of(repetition_penalty, rows, kDLFloat, 32, "repetition_penalty"), vector_of(token, rows, kDLInt, 64, "token");
  auto at = [](const TensorView& t, int64_t i) { return data<float>(t)[i * t.stride(0)]; };
  by_dtype(logits, [&](auto tag) {
    using T = decltype(tag);
    parallel(threads, rows, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t b = begin; b < end; ++b) {
        Settings s{at(temperature, b), at(top_p, b), at(repetition_penalty, b), at(uniform, b),
                   data<int32_t>(top_k)[b * top_k.stride(0)]};
        data<int64_t>(token)[b * token.stride(0)] =
            sample_row(data<T>(logits) + b * logits.stride(0), v, data<int64_t>(history) + b * history.stride(0),
                       history.size(1), history.stride(1), s);
      }
    });
  });
}

}  // namespace autosel

AUTOSEL_EXPORT(sample, autosel::sample);
