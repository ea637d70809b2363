// Parts of decode attention, contiguous or paged: query rows packed by KV head, one tile of keys at a time, online
// softmax in fp32, and equal shares of the work for the team.
//
// The G = Hq/Hkv query heads (times S positions) that share a KV head form R rows and pass over K and V together, four
// rows per block: the tile is read from memory once, and from L1/L2 by the other blocks. Where AMX multiplies, it takes
// all rows at once of a tile that they all see (attention_amx.h). A row sees one interval of keys (causal, window,
// length), so a mask is an interval, never a value: keys outside it are not multiplied by zero but never read, and a
// NaN there has no effect.
//
// Shares: the tiles of all (sequence, KV head) units, laid end to end, are cut into `threads` equal ranges. A unit
// inside one range is written at once. The parts of a unit in several ranges are merged after the join, in order: the
// same bits every time.
#pragma once
#include "attention_amx.h"

namespace autosel {
namespace attention {

// --- one unit: the R rows of a (sequence, KV head) -------------------------------------------------------------------

struct Shape {
  int64_t batch, q_heads, kv_heads, positions, d;
  int64_t group, rows, width;  // rows = group * positions; width = d rounded up to kPair
  float scale, softcap;
  int64_t window, tile;
};

template <class T> struct Strided4 {
  T* data;
  int64_t s0, s1, s2;
  T* at(int64_t i, int64_t j, int64_t k) const { return data + i * s0 + j * s1 + k * s2; }
};

// A thread's state: packed queries, accumulators, running maximum and sum of each row, weights of one block (of all
// rows if tiles multiply them; then also the queries in pairs, and room for 16 keys).
template <class T> struct Bench {
  Factor<T>*q, *pairs, *room;
  float *o, *m, *l, *s;
  int64_t ld;  // floats of s a row
  int64_t padded;
  bool tiles;

  explicit Bench(const Shape& a) : padded(round_up(a.rows, kRows)), tiles(by_tiles<T>(a.rows, a.d)) {
    static thread_local Scratch scratch;
    ld = round_up(a.tile, 16) + 16;  // 16 more, so that four rows do not share an L1 set
    const int64_t block = tiles ? padded : kRows;
    size_t q_bytes = size_t(round_up(padded * a.width * int64_t(sizeof(Factor<T>)), 64));
    size_t room_bytes = tiles ? size_t(kTileRows * a.d) * sizeof(Factor<T>) : 0;
    size_t o_bytes = size_t(padded * a.width) * 4, s_bytes = size_t(block * ld) * 4;
    char* p = scratch.get<char>(int64_t((tiles ? 2 : 1) * q_bytes + room_bytes + o_bytes + s_bytes) + padded * 8);
    auto take = [&p](size_t bytes) { return (p += bytes) - bytes; };
    q = reinterpret_cast<Factor<T>*>(take(q_bytes)), pairs = reinterpret_cast<Factor<T>*>(take(tiles ? q_bytes : 0));
    room = reinterpret_cast<Factor<T>*>(take(room_bytes)), o = reinterpret_cast<float*>(p);
    s = o + padded * a.width, m = s + block * ld, l = m + padded;
  }

  // Row r is query head h * group + r % group at position r / group: neighbours see (nearly) the same keys.
  void start(const Shape& a, const Strided4<const T>& query, int64_t b, int64_t h) {
    memset(q, 0, size_t(round_up(a.rows, kRows) * a.width) * sizeof(Factor<T>));
    memset(o, 0, size_t(a.rows * a.width) * 4);
    for (int64_t r = 0; r < round_up(a.rows, kRows); ++r) m[r] = -INFINITY, l[r] = 0;
    for (int64_t r = 0; r < a.rows; ++r) {
      const T* from = query.at(b, h * a.group + r % a.group, r / a.group);
      Factor<T>* to = q + r * a.width;
      if constexpr (std::is_same_v<Factor<T>, T>) {
        memcpy(to, from, size_t(a.d) * sizeof(T));
      } else {
        for (int64_t c = 0; c < a.d; c += kPair) {
          vreg x, y;
          if (c + kPair <= a.d) load2(from + c, x, y);
          else load2_tail(from + c, a.d - c, x, y);
          store(to + c, x), store(to + c + kLanes, y);
        }
      }
    }
#if defined(AUTOSEL_AMX)
    if constexpr (std::is_same_v<T, bf16>)
      if (tiles) pair_queries(q, padded, a.width, a.d, pairs);
#endif
  }

#if defined(AUTOSEL_AMX)
  // `tile`, if all rows see all keys.
  template <class Rows>
  void tile_by_amx(const Shape& a, int64_t n, const Rows& k, const Rows& v, Coming<Rows> coming) {
    tile_scores(pairs, padded, k, n, a.d, s, ld, room, coming);
    for (int64_t r0 = 0; r0 < a.rows; r0 += kRows) {
      float keep[kRows];
      soften<T, kRows>(s + r0 * ld, ld, n, nullptr, nullptr, a.scale, a.softcap, m + r0, l + r0, keep,
                       [&](int64_t slot) {
                         if (slot % 2) coming.ask();
                       });
      for (int64_t r = r0; r < r0 + kRows && r < a.rows; ++r)
        for (int64_t c = 0; c < a.d; c += kLanes)
          store(o + r * a.width + c, load(o + r * a.width + c) * splat(keep[r - r0]));
    }
    const T* p = reinterpret_cast<const T*>(s);
    int64_t c = 0;
    for (; c + 2 * kPair <= a.d; c += 2 * kPair) tile_gather<2>(o, a.width, p, 2 * ld, v, n, c, coming);
    if (c < a.d) tile_gather<1>(o, a.width, p, 2 * ld, v, n, c, coming);
  }
#endif

  // Keys [first, first + n) of a sequence of `length` keys.
  template <class Rows>
  void tile(const Shape& a, int64_t length, int64_t first, int64_t n, Rows k, Rows v, Ahead<Rows> next_k,
            Ahead<Rows> next_v) {
    const int64_t row_bytes = a.d * int64_t(sizeof(T));
#if defined(AUTOSEL_AMX)
    if constexpr (std::is_same_v<T, bf16>) {
      const bool all_see = first + n <= length - a.positions + 1 && (a.window <= 0 || length - a.window <= first);
      if (tiles && all_see)
        return tile_by_amx(a, n, k, v, Coming<Rows>{next_k.rows, next_v.rows, next_k.n, row_bytes});
    }
#endif
    for (int64_t r0 = 0; r0 < a.rows; r0 += kRows) {
      int64_t rows = a.rows - r0 < kRows ? a.rows - r0 : kRows, begin[kRows] = {}, end[kRows] = {};
      bool whole = true, some = false;
      for (int64_t r = 0; r < rows; ++r) {
        int64_t position = length - a.positions + (r0 + r) / a.group;
        int64_t lo = a.window > 0 ? position - a.window + 1 - first : 0, hi = position + 1 - first;
        begin[r] = lo < 0 ? 0 : lo > n ? n : lo, end[r] = hi < 0 ? 0 : hi > n ? n : hi;
        whole = whole && begin[r] == 0 && end[r] == n;
        some = some || begin[r] < end[r];
      }
      if (!some) continue;
      scores<T>(q + r0 * a.width, a.width, k, n, a.d, s, ld, next_k);
      float keep[kRows];
      soften<T, kRows>(s, ld, n, whole ? nullptr : begin, end, a.scale, a.softcap, m + r0, l + r0, keep,
                       [&](int64_t t) { fetch<1>(next_v.rows, t, next_v.n, 0, row_bytes); });
      const Factor<T>* p = reinterpret_cast<const Factor<T>*>(s);
      int64_t p_ld = ld * int64_t(sizeof(float) / sizeof(Factor<T>));
      if (whole) {
        gather_rows<T>(rows, o + r0 * a.width, a.width, p, p_ld, v, n, a.d, keep, next_v);
      } else {
        for (int64_t r = 0; r < rows; ++r)
          if (begin[r] < end[r])
            gather_rows<T>(1, o + (r0 + r) * a.width, a.width, p + r * p_ld + begin[r], p_ld, v.from(begin[r]),
                           end[r] - begin[r], a.d, keep + r, next_v);
      }
      next_k.n = next_v.n = next_k.again = next_v.again = 0;  // other blocks find the tile in the cache
    }
  }
};

// Writes rows o / l; a row that sees no key (its position is before the first) is zero.
template <class T>
static void finish(const Shape& a, const Strided4<T>& out, int64_t b, int64_t h, int64_t length, const float* o,
                   const float* l) {
  for (int64_t r = 0; r < a.rows; ++r) {
    T* to = out.at(b, h * a.group + r % a.group, r / a.group);
    bool blind = length - a.positions + r / a.group < 0;
    vreg by = splat(blind ? 0.0f : 1.0f / l[r]);
    for (int64_t c = 0; c < a.d; c += kPair) {
      vreg x = load(o + r * a.width + c) * by, y = load(o + r * a.width + c + kLanes) * by;
      if (blind) x = y = vreg{};
      T buffer[kPair];
      if (c + kPair <= a.d) store2(to + c, x, y);
      else store2(buffer, x, y), memcpy(to + c, buffer, size_t(a.d - c) * sizeof(T));
    }
  }
}

// --- the whole call --------------------------------------------------------------------------------------------------

struct Lengths {
  const int32_t* data;  // nullptr: every sequence has max_len keys
  int64_t stride, max_len;
  Lengths(const Optional<TensorView>& t, int64_t longest, int64_t room)
      : data(t.has_value() ? autosel::data<int32_t>(t.value()) : nullptr),
        stride(t.has_value() ? t.value().stride(0) : 0), max_len(longest < room ? longest : room) {}
  Lengths(const int32_t* one_a_sequence, int64_t room) : data(one_a_sequence), stride(1), max_len(room) {}
  int64_t of(int64_t b) const {  // never more than the cache holds, whatever the tensor contains
    int64_t n = data ? data[b * stride] : max_len;
    return n < 0 ? 0 : n > max_len ? max_len : n;
  }
};

struct Sequence {
  int64_t length, low, tiles, start;  // first key any row sees; tiles a KV head; first tile in the line of all tiles
};

struct Part {  // one unit's unfinished rows: o[rows][width], m[rows], l[rows] behind it
  int64_t unit;
  bool used;
};

// Tiles of a contiguous cache; `tiles` has room for two a rank.
template <class T> struct Contiguous {
  Strided4<const T> keys, values;
  struct Tile { const T *k, *v; };
  Tile (*tiles)[2];
  void fill(int rank, int slot, int64_t b, int64_t h, int64_t first, int64_t) const {
    tiles[rank][slot] = {keys.at(b, h, first), values.at(b, h, first)};
  }
  Spaced<T> k(int rank, int slot) const { return {tiles[rank][slot].k, keys.s2}; }
  Spaced<T> v(int rank, int slot) const { return {tiles[rank][slot].v, values.s2}; }
};

// The threads' shares of the work. `sequences` has room for a.batch.
struct Cut {
  Sequence* sequences;
  int64_t total, threads;  // tiles in all; threads that have a share of them: the first ranks

  Cut(const Shape& a, const Lengths& lengths, int64_t most_threads, int64_t chunk, Sequence* room)
      : sequences(room), total(0), threads(most_threads) {
    int64_t keys = 0;
    for (int64_t b = 0; b < a.batch; ++b) {
      int64_t length = lengths.of(b);
      int64_t low = a.window > 0 ? length - a.positions - a.window + 1 : 0;
      low = low < 0 ? 0 : low;
      sequences[b] = {length, low, (length - low + a.tile - 1) / a.tile, total};
      total += sequences[b].tiles * a.kv_heads, keys += (length - low) * a.kv_heads;
    }
    int64_t worth = chunk > 0 ? keys / chunk : keys;
    threads = threads < worth ? threads : worth > 1 ? worth : 1;
    threads = threads < total ? threads : total;
  }

  int64_t begin(int64_t rank) const { return total * rank / threads; }

  int64_t of(const Shape& a, int64_t i) const {  // the sequence that tile i of the line belongs to
    int64_t lo = 0, hi = a.batch - 1;
    while (lo < hi) {
      int64_t mid = (lo + hi + 1) / 2;
      if (sequences[mid].start <= i) lo = mid;
      else hi = mid - 1;
    }
    return lo;
  }
};

// Memory for unfinished units: two parts per thread, `floats` each.
struct Unfinished {
  Part* parts;
  float* partial;
  size_t floats;

  static size_t floats_of(const Shape& a) { return size_t(a.rows * (a.width + 2)); }
  static size_t bytes(const Shape& a, int64_t threads) {
    return size_t(round_up(2 * threads * int64_t(sizeof(Part)), 64)) + size_t(2 * threads) * floats_of(a) * 4;
  }
  Unfinished(const Shape& a, int64_t threads, char* memory)
      : parts(reinterpret_cast<Part*>(memory)),
        partial(reinterpret_cast<float*>(memory + round_up(2 * threads * int64_t(sizeof(Part)), 64))),
        floats(floats_of(a)) {}
  void clear(int64_t rank) const { parts[2 * rank].used = parts[2 * rank + 1].used = false; }
};

// One thread's tiles [begin, end), after its parts were cleared; it prefetches up to `beyond` >= end. source.fill(rank,
// slot, b, h, first, n) readies a tile's rows; source.k(rank, slot) and source.v(rank, slot) give them. ready(b, h,
// last) is called before the queries of (b, h) are read, and before its keys are: `last` if the newest key is among
// those that this thread reads.
template <class T, class Source, class Ready>
static void attend_share(const Shape& a, const Cut& cut, const Unfinished& saved, const Strided4<const T>& query,
                         const Strided4<T>& out, int64_t prefetch, const Source& source, int64_t begin, int64_t end,
                         int64_t beyond, int rank, const Ready& ready) {
  Bench<T> bench(a);
  AttentionTiles tiles(bench.tiles ? a.rows : 0);
  auto fill = [&](int64_t i) -> int64_t {  // readies tile i in slot i & 1; returns its keys
    int64_t b = cut.of(a, i);
    const Sequence& q = cut.sequences[b];
    int64_t h = (i - q.start) / q.tiles, first = q.low + (i - q.start) % q.tiles * a.tile;
    int64_t n = q.length - first < a.tile ? q.length - first : a.tile;
    source.fill(rank, int(i & 1), b, h, first, n);
    return n;
  };
  int64_t n = fill(begin);
  for (int64_t i = begin; i < end;) {
    int64_t b = cut.of(a, i);
    const Sequence& q = cut.sequences[b];
    int64_t h = (i - q.start) / q.tiles, from = (i - q.start) % q.tiles;
    int64_t to = from + (end - i) < q.tiles ? from + (end - i) : q.tiles;
    ready(b, h, to == q.tiles);
    bench.start(a, query, b, h);
    for (int64_t tile = from; tile < to; ++tile, ++i) {
      int slot = int(i & 1);
      int64_t next = i + 1 < beyond ? fill(i + 1) : 0, asked = prefetch ? next : 0;
      using Rows = decltype(source.k(rank, slot));
      bench.tile(a, q.length, q.low + tile * a.tile, n, source.k(rank, slot), source.v(rank, slot),
                 Ahead<Rows>{source.k(rank, slot ^ 1), asked, prefetch, 0},
                 Ahead<Rows>{source.v(rank, slot ^ 1), asked, prefetch, softening_slots(kRows, n)});
      n = next;
    }
    if (from == 0 && to == q.tiles) {
      finish(a, out, b, h, q.length, bench.o, bench.l);
      continue;
    }
    int64_t part = 2 * rank + (from == 0);  // a unit's beginning is a range's last piece, any other its first
    saved.parts[part] = {b * a.kv_heads + h, true};
    float* save = saved.partial + size_t(part) * saved.floats;
    memcpy(save, bench.o, size_t(a.rows * a.width) * 4);
    memcpy(save + a.rows * a.width, bench.m, size_t(a.rows) * 4);
    memcpy(save + a.rows * (a.width + 1), bench.l, size_t(a.rows) * 4);
  }
}

// After all shares are done: the thread `leader`, which has the beginning of a unit, merges the ranges that continue
// it.
template <class T>
static void attend_merge(const Shape& a, const Cut& cut, const Unfinished& saved, const Strided4<T>& out,
                         int64_t leader) {
  const Part* parts = saved.parts;
  if (!parts[2 * leader + 1].used) return;
  int64_t unit = parts[2 * leader + 1].unit;
  float* sum = saved.partial + size_t(2 * leader + 1) * saved.floats;
  float *sum_m = sum + a.rows * a.width, *sum_l = sum_m + a.rows;
  for (int64_t j = leader + 1; j < cut.threads && parts[2 * j].used && parts[2 * j].unit == unit; ++j) {
    const float* add = saved.partial + size_t(2 * j) * saved.floats;
    const float *add_m = add + a.rows * a.width, *add_l = add_m + a.rows;
    for (int64_t r = 0; r < a.rows; ++r) {
      float m = add_m[r] > sum_m[r] ? add_m[r] : sum_m[r], base = m == -INFINITY ? 0.0f : m;
      float old = expf(sum_m[r] - base), fresh = expf(add_m[r] - base);
      for (int64_t c = 0; c < a.width; c += kLanes)
        store(sum + r * a.width + c,
              fma(load(add + r * a.width + c), splat(fresh), load(sum + r * a.width + c) * splat(old)));
      sum_l[r] = sum_l[r] * old + add_l[r] * fresh, sum_m[r] = m;
    }
  }
  int64_t b = unit / a.kv_heads;
  finish(a, out, b, unit % a.kv_heads, cut.sequences[b].length, sum, sum_l);
}

template <class T, class Source>
static void attend(const Shape& a, const Strided4<const T>& query, const Strided4<T>& out, const Lengths& lengths,
                   int64_t threads, int64_t chunk, int64_t prefetch, const Source& source) {
  static thread_local Scratch scratch;
  if (threads > 255) threads = 255;
  if (threads < 1) threads = 1;
  size_t head = size_t(round_up(a.batch * int64_t(sizeof(Sequence)), 64));
  char* memory = scratch.get<char>(int64_t(head + Unfinished::bytes(a, threads)));
  Cut cut(a, lengths, threads, chunk, reinterpret_cast<Sequence*>(memory));
  Unfinished saved(a, threads, memory + head);
  for (int64_t b = 0; b < a.batch; ++b)
    if (cut.sequences[b].length == 0)
      for (int64_t h = 0; h < a.q_heads; ++h)
        for (int64_t s = 0; s < a.positions; ++s) memset(out.at(b, h, s), 0, size_t(a.d) * sizeof(T));
  if (cut.total == 0) return;
  threads = cut.threads;
  for (int64_t i = 0; i < threads; ++i) saved.clear(i);
  parallel(threads, cut.total, 1, [&](int64_t begin, int64_t end, int rank) {
    attend_share(a, cut, saved, query, out, prefetch, source, begin, end, end, rank, [](int64_t, int64_t, bool) {});
  });
  // With few threads there is little to add, so there is no second fork.
  parallel(threads > 8 ? threads : 1, threads, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t leader = begin; leader < end; ++leader) attend_merge(a, cut, saved, out, leader);
  });
}

template <class T> static inline Strided4<T> strided4(const TensorView& t) {
  return {data<std::remove_const_t<T>>(t), t.stride(0), t.stride(1), t.stride(2)};
}

static inline bool is_int32(const TensorView& t) { return t.dtype().code == kDLInt && t.dtype().bits == 32; }

// q, o [B,Hq,S,D] and lengths[B] in the form that every cached attention takes.
static inline void check_queries(const TensorView& q, const TensorView& o, const Optional<TensorView>& lengths,
                                 int64_t kv_heads, int64_t d) {
  AUTOSEL_CHECK(q.ndim() == 4 && o.ndim() == 4, "attention takes q[B,Hq,S,D] and o[B,Hq,S,D]");
  for (int i = 0; i < 4; ++i) AUTOSEL_CHECK(q.size(i) == o.size(i), "attention: q and o differ in size");
  AUTOSEL_CHECK(q.size(3) == d && d > 0, "attention: head widths of q and the cache differ");
  AUTOSEL_CHECK(kv_heads > 0 && q.size(1) % kv_heads == 0, "attention: query heads are no multiple of KV heads");
  AUTOSEL_CHECK(q.stride(3) == 1 && o.stride(3) == 1, "attention: last dimension not contiguous");
  AUTOSEL_CHECK(same_dtype(q, o), "attention: dtypes differ");
  if (lengths.has_value()) {
    const TensorView& n = lengths.value();
    AUTOSEL_CHECK(n.ndim() == 1 && n.size(0) == q.size(0) && is_int32(n), "attention: lengths must be int32 [B]");
  }
}

static inline Shape shape_of(const TensorView& q, int64_t kv_heads, double scale, int64_t window, double softcap,
                             int64_t tile) {
  Shape a{};
  a.batch = q.size(0), a.q_heads = q.size(1), a.kv_heads = kv_heads, a.positions = q.size(2), a.d = q.size(3);
  a.group = a.q_heads / kv_heads, a.rows = a.group * a.positions, a.width = round_up(a.d, kPair);
  a.scale = float(scale == 0 ? 1.0 / sqrt(double(a.d)) : scale), a.softcap = float(softcap);
  a.window = window, a.tile = tile < kLanes ? kLanes : round_up(tile, kLanes);
  return a;
}

}  // namespace attention
}  // namespace autosel
