// Decode attention over a KV cache, contiguous or paged: shared by attn_decode.cu and paged_attn_decode.cu.
//
// A CTA of four warps serves a chunk of the keys of one KV head for R packed query rows (query heads of the group times
// positions), so that the cache is read once for all of them. Each warp takes blocks of keys in turn:
//
//   ring     `slots` blocks per warp, filled by cp.async; all but the block in use are in flight. A lane copies exactly the
//            16-byte pieces that it reads itself: the ring acts as registers that loads can fill. No other lane reads them,
//            and the main loop has no barrier.
//   scores   Lanes lanes share a key, 16 bytes each; their R partial dot products are added by halving exchanges.
//   softmax  online, base 2; the lanes of a warp share its running maximum, and their sums stay separate until the end.
//   values   the same lanes hold the same channels of V: no exchange at all.
//
// Then the lanes' and warps' sums are joined in shared memory. If the keys were split among CTAs, these store their
// sums in a workspace, and the last CTA to arrive joins them in the order of the keys: one launch, the same bits each
// time.
//
// A row sees its own keys lo <= key <= hi (causality by cache offset, window). Blocks that all rows see in full take no
// masks. A key that a row does not see cannot affect it, even if it is NaN.
//
// Nothing is read before the producers are done, not even past keys: both lengths and cache may be new.
#pragma once
#include "reduce.cuh"
#include "workspace.cuh"

namespace autosel {
namespace attention {

constexpr int kWarps = 4, kThreads = kWarps * kWarp;
constexpr int kMostSlots = 8;
constexpr int kMostAhead = 4096;  // keys that a ring reads beyond the last: their numbers are 32-bit too
constexpr float kLog2E = 1.4426950408889634f;

struct Strides { int64_t batch, head, token; };  // in elements

// Location of the keys. A source finds a key's place (a load, for pages), then the rows of K and V there.
struct Place { int outer, inner; };  // batch row and key, or page and slot; outer < 0: nowhere

template <class KV> struct Cache {
  const KV *k, *v;
  Strides ks, vs;  // of a paged cache: page, head, slot
  __device__ __forceinline__ const KV* key_row(const Place& p, int64_t h) const {
    return k + p.outer * ks.batch + h * ks.head + p.inner * ks.token;
  }
  __device__ __forceinline__ const KV* value_row(const Place& p, int64_t h) const {
    return v + p.outer * vs.batch + h * vs.head + p.inner * vs.token;
  }
};

// One key's rows; not `there`: beyond the end, or in a page that does not exist.
template <class KV> struct Rows {
  const KV *k, *v;
  bool there;
};

// A source's Ahead<Turns> holds the places of a lane's keys in a block, key, key + step, ..., below `end`. `look` gets
// them, perhaps by a load, one block before they are used.
template <class KV> struct Contiguous : Cache<KV> {
  __device__ __forceinline__ Place find(int b, int key) const { return {b, key}; }

  template <int Turns> struct Ahead {
    const KV *k, *v;
    int key;
    __device__ __forceinline__ void look(const Contiguous& c, int b, int64_t h, int64_t from, int, int) {
      key = int(from), k = c.key_row({b, key}, h), v = c.value_row({b, key}, h);
    }
    __device__ __forceinline__ Rows<KV> rows(const Contiguous& c, int64_t, int turn, int step, int end) const {
      const int further = turn * step;
      return {k + further * c.ks.token, v + further * c.vs.token, key + further < end};
    }
  };
};

template <class KV> struct Paged : Cache<KV> {
  const int32_t* table;
  int64_t table_row;
  int pages;
  unsigned page;
  __device__ __forceinline__ Place find(int b, int key) const {
    const int id = table[b * table_row + unsigned(key) / page];
    return {id < pages ? id : -1, int(unsigned(key) % page)};
  }

  template <int Turns> struct Ahead {
    Place places[Turns];
    __device__ __forceinline__ void look(const Paged& p, int b, int64_t, int64_t from, int step, int end) {
#pragma unroll
      for (int t = 0; t < Turns; ++t)
        places[t] = from + t * step < end ? p.find(b, int(from) + t * step) : Place{-1, 0};
    }
    __device__ __forceinline__ Rows<KV> rows(const Paged& p, int64_t h, int turn, int, int) const {
      const bool there = places[turn].outer >= 0;
      const Place at = there ? places[turn] : Place{0, 0};
      return {p.key_row(at, h), p.value_row(at, h), there};
    }
  };
};

template <class T> struct Queries {
  const T* q;
  T* o;
  int64_t q_batch, q_head, q_token, o_batch, o_head, o_token;
  const int32_t* lengths;  // null: all max_len
  int64_t length_step;
  int max_len, heads, positions, group, width;  // Hkv, S, Hq / Hkv, D
  int window;                                   // 0: none
  float scale, softcap;                         // scale in base 2; with a softcap: before tanh, the softcap in base 2
  const float *k_scale, *v_scale;               // [Hkv], of a cache that is stored divided by them; or null
  int chunk, splits, slots;
  bool aligned_q;
};

struct Scratch {
  float* sums;         // [task][split][R][D + 2]
  unsigned* counters;  // [task]
};

// A CTA's task: the keys begin <= key < end for R packed rows of one KV head.
struct Task {
  int b, h, begin, end;
  int row0, rows, length, active;  // active: CTAs that share these rows
};

// Position of the task: the split of the keys, the tile of rows (of `tiles` per sequence), the sequence. In a launch
// that has one CTA for each, the CTA's place in it.
struct Seat { unsigned split, tile, tiles, b; };

__device__ __forceinline__ Seat own_seat() { return {blockIdx.x, blockIdx.y, gridDim.y, blockIdx.z}; }

template <int R, class T> __device__ __forceinline__ Task task_of(const Queries<T>& a, const Seat& seat) {
  Task t;
  const int all = a.group * a.positions, tiles = (all + R - 1) / R;
  t.b = int(seat.b), t.h = int(seat.tile / unsigned(tiles)), t.row0 = int(seat.tile % unsigned(tiles)) * R;
  t.rows = all - t.row0 < R ? all - t.row0 : R;
  const int length = a.lengths ? a.lengths[t.b * a.length_step] : a.max_len;
  t.length = length < 0 ? 0 : length < a.max_len ? length : a.max_len;
  const int first = a.window ? max(0, t.length - a.positions - a.window + 1) : 0;
  t.active = max(1, int((int64_t(t.length) - first + a.chunk - 1) / a.chunk));
  const int64_t begin = first + int64_t(seat.split) * a.chunk;
  t.begin = int(min(begin, int64_t(t.length))), t.end = int(min(begin + a.chunk, int64_t(t.length)));
  return t;
}

// 2^(m - most); 0 for a part that saw no key.
__device__ __forceinline__ float weight(float m, float most) { return m == -INFINITY ? 0.0f : exp2_flushed(m - most); }

template <class T>
__device__ __forceinline__ void put(const Queries<T>& a, const Task& t, int r, int d, float value, float total) {
  const int row = t.row0 + r, s = row % a.positions;
  T* to = a.o + t.b * a.o_batch + (t.h * a.group + row / a.positions) * a.o_head + s * a.o_token;
  const float by = a.v_scale ? a.v_scale[t.h] : 1.0f;
  to[d] = narrow<T>(total == 0 ? 0.0f : value / total * by);  // a row that sees nothing gives zeros
}

constexpr size_t join_bytes(int rows, int wide) { return size_t(kWarps) * rows * (wide + 2) * sizeof(float) + 16; }

// From the warps' sums in shared memory, [warp][R][Wide channels, maximum, sum], to the result, or to the workspace,
// from which the CTA that arrives last reads them.
template <int R, int Wide, class T>
__device__ void finish(const Queries<T>& a, const Task& task, const Scratch& scratch, const Seat& seat) {
  constexpr int kRow = Wide + 2;
  float* all = reinterpret_cast<float*>(shared_memory());
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int64_t index = int64_t(seat.b) * seat.tiles + seat.tile, room = a.width + 2;
  float* parts = scratch.sums + index * a.splits * R * room;  // [split][R][D + 2]
  // One warp per row: its joint maximum and sum, then its channels.
  for (int r = warp; r < task.rows; r += kWarps) {
    float most = -INFINITY, total = 0;
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, all[(w * R + r) * kRow + Wide]);
    for (int w = 0; w < kWarps; ++w) {
      const float* row = all + (w * R + r) * kRow;
      total += row[Wide + 1] * weight(row[Wide], most);
    }
    float* part = parts + (int64_t(seat.split) * R + r) * room;
    for (int d = lane; d < a.width; d += kWarp) {
      float value = 0;
      for (int w = 0; w < kWarps; ++w) {
        const float* row = all + (w * R + r) * kRow;
        value += row[d] * weight(row[Wide], most);
      }
      if (task.active == 1) put(a, task, r, d, value, total);
      else part[d] = value;
    }
    if (task.active > 1 && lane == 0) part[a.width] = most, part[a.width + 1] = total;
  }
  if (task.active == 1) return;
  unsigned* flag = reinterpret_cast<unsigned*>(shared_memory() + size_t(kWarps) * R * kRow * sizeof(float));
  if (!last_to_arrive(scratch.counters + index, unsigned(task.active), flag)) return;
  for (int r = warp; r < task.rows; r += kWarps) {
    float most = -INFINITY, total = 0;
    for (int i = lane; i < task.active; i += kWarp) most = fmaxf(most, __ldcg(parts + (i * R + r) * room + a.width));
    most = lanes_max(most);
    for (int i = lane; i < task.active; i += kWarp) {
      const float* part = parts + (i * R + r) * room + a.width;
      total += __ldcg(part + 1) * weight(__ldcg(part), most);
    }
    total = lanes_sum(total);
    for (int d = lane; d < a.width; d += kWarp) {
      float value = 0;
      for (int i = 0; i < task.active; ++i) {
        const float* part = parts + (i * R + r) * room;
        value += __ldcg(part + d) * weight(__ldcg(part + a.width), most);
      }
      put(a, task, r, d, value, total);
    }
  }
}

template <class T, class KV, int R, int Lanes, int Chunks, class Source, bool Aligned> struct Attend {
  static constexpr int W = kVec<KV>, kPieces = Chunks * W;  // channels a lane holds
  static constexpr int kTurns = R < 8 ? 4 : 2;                              // keys a lane group takes in a block
  static constexpr int kGroups = kWarp / Lanes, kBlock = kGroups * kTurns;  // keys at once; keys a warp's block
  static constexpr int kWide = Chunks * Lanes * W;                          // most channels
  static constexpr size_t kSlotBytes = size_t(kTurns) * 2 * Chunks * kWarp * 16;  // of one warp
  using Ahead = typename Source::template Ahead<kTurns>;

  const Queries<T>& a;
  const Source& source;
  const Task& task;
  int lane, warp, piece, member;  // member: the lane group's key of kGroups
  uint4* ring;  // this warp's
  float q[R][kPieces];
  float acc[R][kPieces] = {};
  float top[R], sum[R] = {};

  __device__ __forceinline__ Attend(const Queries<T>& queries, const Source& from, const Task& t)
      : a(queries), source(from), task(t) {
    lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
    piece = lane % Lanes, member = lane / Lanes;
    ring = reinterpret_cast<uint4*>(shared_memory()) + warp * (a.slots * kSlotBytes / 16);
  }

  __device__ __forceinline__ int channel(int c) const { return (c * Lanes + piece) * W; }
  __device__ __forceinline__ int row_of(int r) const { return task.row0 + (r < task.rows ? r : task.rows - 1); }

  __device__ __forceinline__ void take_queries() {
    const float scale = a.k_scale ? a.scale * a.k_scale[task.h] : a.scale;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = row_of(r);
      const T* from = a.q + task.b * a.q_batch + (task.h * a.group + row / a.positions) * a.q_head +
                      row % a.positions * a.q_token;
      top[r] = -INFINITY;
#pragma unroll
      for (int c = 0; c < Chunks; ++c)
#pragma unroll
        for (int part = 0; part < W; part += kVec<T>) {
          const int at = channel(c) + part, left = a.width - at;
          float x[kVec<T>];
          const uint4 raw = a.aligned_q && left >= kVec<T> ? load_resident(from + at) : load_elements(from + at, left);
          widen<T>(raw, x);
#pragma unroll
          for (int e = 0; e < kVec<T>; ++e) q[r][c * W + part + e] = x[e] * scale;
        }
    }
  }

  // --- the ring -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint4* at(int slot, int turn, int which, int c) const {
    return ring + (((slot * kTurns + turn) * 2 + which) * Chunks + c) * kWarp + lane;
  }

  __device__ __forceinline__ void look(Ahead& ahead, int64_t base) const {
    ahead.look(source, task.b, task.h, base + member, kGroups, task.end);
  }

  __device__ __forceinline__ void fill(int slot, const Ahead& ahead) const {
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      const Rows<KV> rows = ahead.rows(source, task.h, t, kGroups, task.end);
#pragma unroll
      for (int c = 0; c < Chunks; ++c) {
        const int from = channel(c), left = rows.there ? a.width - from : 0;
        if (Aligned) {
          copy_async(at(slot, t, 0, c), rows.k + from, left > 0);
          copy_async(at(slot, t, 1, c), rows.v + from, left > 0);
        } else {
          *at(slot, t, 0, c) = load_elements(rows.k + from, left);
          *at(slot, t, 1, c) = load_elements(rows.v + from, left);
        }
      }
    }
  }

  // --- a block ------------------------------------------------------------------------------------------------------

  template <bool Masked> __device__ __forceinline__ void work(int slot, int base) {
    float s[kTurns][R];
    bool hidden[kTurns][R];
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      float part[R] = {};
#pragma unroll
      for (int c = 0; c < Chunks; ++c) {
        float k[W];
        widen<KV>(*at(slot, t, 0, c), k);
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
          for (int e = 0; e < W; ++e) part[r] = fmaf(q[r][c * W + e], k[e], part[r]);
      }
      lanes_sum_each<R, Lanes>(part);
#pragma unroll
      for (int r = 0; r < R; ++r) s[t][r] = part[r];
    }
    if (a.softcap != 0) {
#pragma unroll
      for (int t = 0; t < kTurns; ++t)
#pragma unroll
        for (int r = 0; r < R; ++r) s[t][r] = a.softcap * tanhf(s[t][r]);
    }
    if (Masked) {  // at edges only: computing them again costs less than registers for every row's first and last key
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int hi = task.length - a.positions + row_of(r) % a.positions, lo = a.window ? hi - a.window + 1 : 0;
#pragma unroll
        for (int t = 0; t < kTurns; ++t) {
          const int key = base + t * kGroups + member;
          hidden[t][r] = key >= task.end || key < lo || key > hi;
          if (hidden[t][r]) s[t][r] = -INFINITY;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float most = s[0][r];
#pragma unroll
      for (int t = 1; t < kTurns; ++t) most = fmaxf(most, s[t][r]);
#pragma unroll
      for (int apart = Lanes; apart < kWarp; apart *= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, apart));
      most = fmaxf(most, top[r]);
      const float base_of = most == -INFINITY ? 0.0f : most;  // nothing seen yet: exp2 of -inf, not of NaN
      if (most > top[r]) {  // the same for the whole warp
        const float shrink = exp2_flushed(top[r] - base_of);
        sum[r] *= shrink, top[r] = most;
#pragma unroll
        for (int e = 0; e < kPieces; ++e) acc[r][e] *= shrink;
      }
#pragma unroll
      for (int t = 0; t < kTurns; ++t) s[t][r] = exp2_flushed(s[t][r] - base_of), sum[r] += s[t][r];
    }
#pragma unroll
    for (int t = 0; t < kTurns; ++t)
#pragma unroll
      for (int c = 0; c < Chunks; ++c) {
        float v[W];
        widen<KV>(*at(slot, t, 1, c), v);
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
          for (int e = 0; e < W; ++e)
            if (!Masked || !hidden[t][r]) acc[r][c * W + e] = fmaf(s[t][r], v[e], acc[r][c * W + e]);
      }
  }

  __device__ __forceinline__ void walk() {
    const int64_t stride = kWarps * kBlock, first = task.begin + warp * kBlock;
    // The keys that every row sees.
    const int64_t clear_to = int64_t(task.length) - a.positions + 1, clear_from = a.window ? task.length - a.window : 0;
    Ahead ahead;
    look(ahead, first);
    for (int slot = 0; slot < a.slots - 1; ++slot) {
      fill(slot, ahead), commit_copies();
      look(ahead, first + (slot + 1) * stride);
    }
    int slot = 0, free = a.slots - 1;
    for (int64_t base = first; base < task.end; base += stride) {
      await_copies_but(a.slots - 2);
      fill(free, ahead), commit_copies();
      look(ahead, base + a.slots * stride);
      if (base >= clear_from && base + kBlock <= clear_to && base + kBlock <= task.end) work<false>(slot, int(base));
      else work<true>(slot, int(base));
      free = slot, slot = slot + 1 < a.slots ? slot + 1 : 0;
    }
    await_copies<0>();
  }

  // Joins the lanes' sums, in shared memory for `finish`.
  __device__ __forceinline__ void lay_out() {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int apart = Lanes; apart < kWarp; apart *= 2) {
        sum[r] += __shfl_xor_sync(kAll, sum[r], apart);
#pragma unroll
        for (int e = 0; e < kPieces; ++e) acc[r][e] += __shfl_xor_sync(kAll, acc[r][e], apart);
      }
    }
    float* all = reinterpret_cast<float*>(shared_memory());
    __syncthreads();  // all warps are done with their rings
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float* own = all + (warp * R + r) * (kWide + 2);
      if (member == 0) {
#pragma unroll
        for (int c = 0; c < Chunks; ++c)
#pragma unroll
          for (int e = 0; e < W; ++e) own[channel(c) + e] = acc[r][c * W + e];
      }
      if (lane == 0) own[kWide] = top[r], own[kWide + 1] = sum[r];
    }
    __syncthreads();
  }
};

template <class T, class KV, int R, int Lanes, int Chunks, class Source, bool Aligned>
__global__ void __launch_bounds__(kThreads, Aligned ? 2 : 1) attend(Queries<T> queries, Source source, Scratch scratch) {
  release_dependents();
  wait_for_producers();
  const Task task = task_of<R>(queries, own_seat());
  if (int(blockIdx.x) >= task.active) return;  // a shorter sequence than the longest
  using A = Attend<T, KV, R, Lanes, Chunks, Source, Aligned>;
  A a(queries, source, task);
  a.take_queries();
  a.walk();
  a.lay_out();
  finish<R, A::kWide>(queries, task, scratch, own_seat());
}

// --- host -----------------------------------------------------------------------------------------------------------

struct Settings {
  int64_t tile, stages, chunk, pdl;
};

template <class KV> bool aligned(const KV* p, const Strides& s, int64_t width) {
  const int64_t bytes = sizeof(KV);
  return uintptr_t(p) % 16 == 0 && s.batch * bytes % 16 == 0 && s.head * bytes % 16 == 0 && s.token * bytes % 16 == 0 &&
         width * bytes % 16 == 0;
}
template <class KV> bool aligned(const Cache<KV>& c, int64_t width) {
  return aligned(c.k, c.ks, width) && aligned(c.v, c.vs, width);
}

inline void check_cache(const TensorView& q, const TensorView& k, const TensorView& v) {
  check_form(q, "q", q, 4), check_form(k, "k", q, 4), check_form(v, "v", q, 4);
  for (int i = 0; i < 4; ++i) AUTOSEL_CHECK(k.size(i) == v.size(i), "attention: k and v differ in size");
  AUTOSEL_CHECK(k.size(3) == q.size(3), "attention: q and k differ in width");
  AUTOSEL_CHECK(same_dtype(k, v), "attention: dtypes differ");
}

template <class KV>
Contiguous<KV> contiguous(const TensorView& q, const TensorView& k, const TensorView& v, int64_t max_len) {
  check_cache(q, k, v);
  AUTOSEL_CHECK(k.size(0) == q.size(0), "attention: q and k differ in batch");
  AUTOSEL_CHECK(max_len >= 0 && max_len <= k.size(2), "attention: max_len exceeds the cache");
  return {{data<KV>(k), data<KV>(v), {k.stride(0), k.stride(1), k.stride(2)}, {v.stride(0), v.stride(1), v.stride(2)}}};
}

template <class KV>
Paged<KV> paged(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& table, int64_t max_len) {
  check_cache(q, k, v), check_form(table, "block_table", q, 2);
  AUTOSEL_CHECK(k.size(0) > 0 && k.size(1) > 0, "attention: no pages");
  AUTOSEL_CHECK(is(table, kDLInt, 32) && table.size(0) == q.size(0), "attention: block_table must be int32 [B,n]");
  AUTOSEL_CHECK(max_len >= 0 && max_len <= table.size(1) * k.size(1), "attention: max_len exceeds the block table");
  return {{data<KV>(k), data<KV>(v), {k.stride(0), k.stride(2), k.stride(1)}, {v.stride(0), v.stride(2), v.stride(1)}},
          data<int32_t>(table), table.stride(0), int(k.size(0)), unsigned(k.size(1))};
}

// The checks and numbers that do not depend on the layout of the cache.
template <class T>
Queries<T> queries_of(const TensorView& q, const TensorView& o, const Optional<TensorView>& lengths, int64_t heads,
                      int64_t max_len, double scale, int64_t window, double softcap, int64_t chunk) {
  check_form(o, "o", q, 4);
  for (int i = 0; i < 4; ++i) AUTOSEL_CHECK(o.size(i) == q.size(i), "attention: q and o differ in size");
  AUTOSEL_CHECK(same_dtype(o, q), "attention: q and o differ in dtype");
  AUTOSEL_CHECK(heads > 0 && q.size(1) % heads == 0, "attention: query heads are no multiple of KV heads");
  AUTOSEL_CHECK(chunk >= 1 && chunk <= kMostElements && window >= 0 && window <= kMostElements, "chunk is " << chunk);
  AUTOSEL_CHECK(max_len <= kMostElements - kMostAhead, "attention: max_len is " << max_len);
  AUTOSEL_CHECK(scale >= 0 && softcap >= 0, "attention: scale is " << scale << ", softcap " << softcap);
  if (lengths) {
    check_form(*lengths, "lengths", q, 1);
    AUTOSEL_CHECK(is(*lengths, kDLInt, 32) && lengths.value().size(0) == q.size(0), "attention: lengths must be int32 [B]");
  }
  if (window >= max_len) window = 0;  // it hides nothing
  const int64_t d = q.size(3), s = q.size(2);
  const double by = scale != 0 ? scale : 1.0 / std::sqrt(double(d));
  Queries<T> a{};
  a.q = data<T>(q), a.q_batch = q.stride(0), a.q_head = q.stride(1), a.q_token = q.stride(2);
  a.o = data<T>(o), a.o_batch = o.stride(0), a.o_head = o.stride(1), a.o_token = o.stride(2);
  a.lengths = lengths ? data<int32_t>(*lengths) : nullptr, a.length_step = lengths ? lengths.value().stride(0) : 0;
  a.max_len = int(max_len), a.heads = int(heads), a.positions = int(s), a.group = int(q.size(1) / heads);
  a.width = int(d), a.window = int(window), a.chunk = int(chunk);
  a.scale = float(softcap != 0 ? by / softcap : by * double(kLog2E)), a.softcap = float(softcap * double(kLog2E));
  a.aligned_q = aligned(a.q, Strides{a.q_batch, a.q_head, a.q_token}, d);
  return a;
}

// As many slots as the bytes of the stages, and the device, allow: a narrow head leaves some lanes of a slot empty.
inline int slots_of(const Settings& knobs, int64_t row_bytes, size_t slot_bytes, const Stream& stream) {
  const size_t wanted = size_t(knobs.stages * knobs.tile * 2 * row_bytes) / slot_bytes;
  const size_t most = std::min<size_t>(kMostSlots, most_shared(stream) / slot_bytes);
  return int(std::max<size_t>(2, std::min(wanted, most)));
}

// A grid for rows in tiles of R, and the workspace if keys are split. `slot_bytes`: per CTA; `wide`: channels of a row
// of its joined sums.
template <class T, class Source>
void start(void (*kernel)(Queries<T>, Source, Scratch), Queries<T> a, const Source& source, int64_t batch, int rows,
           int wide, size_t slot_bytes, size_t row_bytes, const Settings& knobs, const Stream& stream) {
  a.slots = slots_of(knobs, int64_t(row_bytes), slot_bytes, stream);
  const int64_t tiles = (int64_t(a.group) * a.positions + rows - 1) / rows, tasks = batch * a.heads * tiles;
  const int64_t span = a.window ? std::min<int64_t>(a.max_len, int64_t(a.window) + a.positions - 1) : a.max_len;
  // Many query rows fill the chip without splits, and each split stores an output for each of them.
  a.chunk = int(std::min<int64_t>(a.chunk * tiles, kMostElements));
  a.splits = int(std::max<int64_t>(1, (span + a.chunk - 1) / a.chunk));
  AUTOSEL_CHECK(batch <= 65535 && a.heads * tiles <= 65535, "attention: more than 65535 sequences or row tiles");
  Shape shape{dim3(unsigned(a.splits), unsigned(a.heads * tiles), unsigned(batch)), unsigned(kThreads),
              std::max(a.slots * slot_bytes, join_bytes(rows, wide)), knobs.pdl != 0};
  Scratch scratch{};
  if (a.splits > 1) {
    Workspace space(stream, size_t(tasks) * a.splits * rows * (a.width + 2) * sizeof(float), size_t(tasks));
    scratch = {space.memory<float>(), space.counters()};
  }
  launch(shape, stream, kernel, a, source, scratch);
}

// R rows per tile, as few as hold all of them or as many as registers allow: R x channels per lane are at most 64.
template <class T, class KV, class Source>
void run(const Queries<T>& a, const Source& source, int64_t batch, bool is_aligned, const Settings& knobs,
         const Stream& stream) {
  using std::integral_constant;
  constexpr int W = kVec<KV>;
  auto with = [&](auto r, auto lanes, auto chunks, auto alignment) {
    constexpr int R = decltype(r)::value, kLanes = decltype(lanes)::value, kChunks = decltype(chunks)::value;
    constexpr bool kAligned = decltype(alignment)::value;
    using A = Attend<T, KV, R, kLanes, kChunks, Source, kAligned>;
    start(attend<T, KV, R, kLanes, kChunks, Source, kAligned>, a, source, batch, R, A::kWide, kWarps * A::kSlotBytes,
          size_t(a.width) * sizeof(KV), knobs, stream);
  };
  auto by_lanes = [&](auto r, auto alignment) {
    constexpr int R = decltype(r)::value;
    if constexpr (R * W <= 64) {
      if (a.width <= 8 * W) return with(r, integral_constant<int, 8>{}, integral_constant<int, 1>{}, alignment);
      if (a.width <= 16 * W) return with(r, integral_constant<int, 16>{}, integral_constant<int, 1>{}, alignment);
      if (a.width <= 32 * W) return with(r, integral_constant<int, 32>{}, integral_constant<int, 1>{}, alignment);
    }
    if constexpr (R * W * 2 <= 64)
      if (a.width <= 64 * W) return with(r, integral_constant<int, 32>{}, integral_constant<int, 2>{}, alignment);
    if constexpr (R * W * 4 <= 64)
      if (a.width <= 128 * W) return with(r, integral_constant<int, 32>{}, integral_constant<int, 4>{}, alignment);
    AUTOSEL_CHECK(false, "attention: heads of " << a.width << " channels are too wide");
  };
  const int rows = a.group * a.positions, most = 64 / W / std::max(1, (a.width + 32 * W - 1) / (32 * W));
  if (!is_aligned) {  // slow in any case: two variants are enough
    if (most < 4) return by_lanes(integral_constant<int, 1>{}, std::false_type{});
    return by_lanes(integral_constant<int, 4>{}, std::false_type{});
  }
  if (rows <= 1 || most < 2) return by_lanes(integral_constant<int, 1>{}, std::true_type{});
  if (rows <= 2 || most < 4) return by_lanes(integral_constant<int, 2>{}, std::true_type{});
  if (rows <= 4 || most < 8) return by_lanes(integral_constant<int, 4>{}, std::true_type{});
  by_lanes(integral_constant<int, 8>{}, std::true_type{});
}

}  // namespace attention
}  // namespace autosel
