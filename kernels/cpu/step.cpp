// step   one whole decode step of B sequences over a contiguous cache, as one call: tokens -> logits[B,V], and in each row
//        the lowest index of their maximum
//
// bytes   every weight and every cached key and value in reach, once      FLOPs   2 B (weights) + 4 B Hq D (keys)
// roofline of llama-1b at context 128, bf16 on two cores of Zen 4 reading 46 GB/s: 2.5 GB is 54 ms.
// knobs   for each task those of its kernel (gemv.cpp, attn_decode.cpp ...); threads: one number for all.
// The host writes a list of tasks once (autosel/decode/team.py): kinds, addresses, sizes. A call gives the list to the
// team. Every thread goes through it and takes a share of each task, with a barrier between two tasks. A task costs one
// barrier instead of one call: no fork-join, no Python, and a waiting thread prefetches the weights that it needs next.
// Each thread computes for itself what takes less time to compute for one row than to hand over (norms, the rotation of
// a query head, Gemma's sandwich norms). So a layer has five barriers: after the q/k/v projection, attention, the
// output projection, gate and up, down; a sixth if the keys of a KV head are split between two threads. The arithmetic
// is that of the kernels for single ops, from the same headers and in the same order: results have the same bits.

#include "activation.h"
#include "add_rmsnorm.h"
#include "attention.h"
#include "best.h"
#include "coded.h"
#include "packed.h"
#include "rotate.h"

namespace autosel {
namespace {

// --- tasks, as the host writes them: 8-byte words, the rest of a task's slot is unused ------------------------------

constexpr int64_t kTaskWords = 48;
enum Kind : int64_t { kEmbed = 0, kProject = 1, kAttend = 2 };

struct Head {
  int64_t kind, words;  // words: of the struct below, so that host and kernel cannot disagree unnoticed
};

template <class T> struct Embed {
  Head head;
  int64_t rows, d, vocabulary;
  const T* table;
  int64_t stride;
  const int64_t* tokens;
  double scale;
  T* out;  // [rows, d]
  const uint8_t* scales;  // if the table holds codes
  int64_t scale_stride, format;
};

// y = epilogue(prologue(x) @ w^T) for rows <= kMaxRows rows of x.
enum Epilogue : int64_t { kStore = 0, kAdd = 1, kGate = 2, kChoose = 3 };

template <class T> struct Project {
  Head head;
  int64_t rows, n, k, together;  // together: rows of weights that share a load of x
  const T* x;                    // [rows, k]
  // If post_norm is given, x becomes residual + rmsnorm(x), which the first thread also writes to joined [rows, k].
  const T *post_norm, *residual;
  T* joined;
  // If norm is given, then rmsnorm of that, rounded to T or as wide as the dots take it.
  const T* norm;
  double eps, offset;
  int64_t rounded;
  const T *w, *up;  // [n, k]; codes if scales are given, in this format of the build, and strides in bytes
  int64_t w_stride, up_stride;
  const void *packed, *packed_up;  // the same matrices in the form of pack.h, or null
  int64_t epilogue, activation;
  const T* add;    // [rows, n]: kAdd's residual, or null
  T* y;            // [rows, n]
  int64_t* token;  // [rows]: kChoose
  const uint8_t *scales, *up_scales;  // of codes, or null
  int64_t scale_stride, up_scale_stride, format;
};

template <class T> struct Attend {
  Head head;
  int64_t batch, q_heads, kv_heads, d;
  const T* qkv;  // [batch, (q_heads + 2 kv_heads) d]
  const T *q_norm, *k_norm;
  double eps, offset;
  const int64_t* positions;
  const int32_t *starts, *lengths;  // a sequence's new key goes to slot starts[b]; lengths[b] counts it
  const float* inv_freq;
  int64_t pairs, style;
  T *k_cache, *v_cache;
  int64_t room, sequence_stride, head_stride, slot_stride;
  double scale, softcap;
  int64_t window, tile, chunk, prefetch;
  T* out;  // [batch, q_heads d]
};

template <class View> const View& as(const int64_t* task) {
  static_assert(sizeof(View) <= kTaskWords * 8, "a task has a place of kTaskWords words");
  return *reinterpret_cast<const View*>(task);
}

// --- the team's side -------------------------------------------------------------------------------------------------

// A reusable barrier for all `size` threads: phases count up, nothing is cleared. A thread that fails opens it for
// good, and all threads return.
class Barrier {
 public:
  // Calls meanwhile() while waiting. Returns false if a thread failed.
  template <class Meanwhile> bool wait(uint32_t phase, int size, const Meanwhile& meanwhile) {
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == phase * uint32_t(size)) {
      uint32_t before = phase - 1;
      return opened_.compare_exchange_strong(before, phase, std::memory_order_acq_rel);
    }
    for (int spins = 0;; ++spins) {
      uint32_t now = opened_.load(std::memory_order_acquire);
      if (now == kFailed) return false;
      if (now >= phase) return true;
      if (!meanwhile()) {
        if (spins < kSpins) team_v2::relax();
        else sched_yield();  // on a busy machine the others may be waiting for this CPU
      }
    }
  }
  void fail() { opened_.store(kFailed, std::memory_order_release); }

 private:
  static constexpr uint32_t kFailed = ~0u;
  static constexpr int kSpins = 4000;
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> opened_{0};
};

// The rest of a thread's share of a task: its owner takes units from the front, an idle thread from the back. On a
// quiet machine no thread does; if another process uses a core half the time, all threads would wait for a static
// share. The result does not depend on the thread that computes a unit.
class alignas(64) Left {
 public:
  void put(int64_t begin, int64_t end) { ends_.store(pack(begin, end), std::memory_order_relaxed); }
  int64_t count() const {
    uint64_t now = ends_.load(std::memory_order_relaxed);
    return back(now) - front(now);
  }

  // Takes at most `most` units, from the front or the back: [begin, end). Returns false if none are left.
  bool take(int64_t most, bool from_front, int64_t& begin, int64_t& end) {
    uint64_t now = ends_.load(std::memory_order_relaxed), next;
    do {
      int64_t first = front(now), last = back(now), n = last - first < most ? last - first : most;
      if (n <= 0) return false;
      begin = from_front ? first : last - n, end = begin + n;
      next = from_front ? pack(end, last) : pack(first, begin);
    } while (!ends_.compare_exchange_weak(now, next, std::memory_order_relaxed));
    return true;
  }

 private:
  static uint64_t pack(int64_t begin, int64_t end) { return uint64_t(begin) << 32 | uint64_t(end); }
  static int64_t front(uint64_t ends) { return int64_t(ends >> 32); }
  static int64_t back(uint64_t ends) { return int64_t(ends & 0xffffffff); }
  std::atomic<uint64_t> ends_{0};
};

struct Run {
  const int64_t* tasks;
  int64_t count;
  Left* left;      // [count][threads]
  int64_t* times;  // [threads][count][2]: when a thread finished its share, and its wait; ns. Or null.
  Best* best;      // [threads][rows]
  char* unfinished;
  int64_t most_rows;
  Barrier barrier;
  std::atomic<bool> failed{false};
  std::exception_ptr error;

  const int64_t* task(int64_t i) const { return tasks + i * kTaskWords; }
};

// Units of a task: columns of a projection, eight at a time, or a sequence's KV heads.
template <class T> int64_t units_of(const int64_t* task) {
  if (as<Head>(task).kind == kProject) return (as<Project<T>>(task).n + 7) / 8;
  if (as<Head>(task).kind == kAttend) return as<Attend<T>>(task).batch * as<Attend<T>>(task).kv_heads;
  return 0;
}

// One thread and its position in the list.
template <class T> class Walker {
 public:
  Walker(Run& run, int rank, int size) : run_(run), rank_(rank), size_(size) {}

  void walk() {
    for (int64_t i = 0; i < run_.count; ++i) {
      const int64_t* task = run_.task(i);
      next_ = i + 1;
      switch (as<Head>(task).kind) {
        case kEmbed: embed(as<Embed<T>>(task)); break;
        case kProject: project(as<Project<T>>(task)); break;
        case kAttend:
          if (!attend(as<Attend<T>>(task))) return;
      }
      stamp(i, 0);
      if (next_ < run_.count && !wait()) return;
      stamp(i, 1);
    }
  }

 private:
  // Returns the first weights that this thread multiplies next, from task next_ on; null if there are none.
  const void* coming() const {
    for (int64_t i = next_; i < run_.count; ++i)
      if (as<Head>(run_.task(i)).kind == kProject) {
        const Project<T>& p = as<Project<T>>(run_.task(i));
        int64_t first = units_of<T>(run_.task(i)) * rank_ / size_ * 8;
        if (p.scales) return reinterpret_cast<const uint8_t*>(p.w) + first * p.w_stride;
        return p.packed ? static_cast<const void*>(PackedMatrix(p.packed).row(first)) : p.w + first * p.w_stride;
      }
    return nullptr;
  }

  bool wait() {
    const char* ahead = static_cast<const char*>(coming());
    const char* end = ahead ? ahead + kAheadBytes : nullptr;
    return run_.barrier.wait(++phase_, size_, [&] {
      if (ahead == end) return false;
      for (int line = 0; line < 4; ++line, ahead += 64) prefetch_l2(ahead);
      return true;
    });
  }

  void stamp(int64_t i, int64_t which) {
    if (run_.times) run_.times[(rank_ * run_.count + i) * 2 + which] = team_v2::now_ns();
  }

  // --- embedding -----------------------------------------------------------------------------------------------------

  void embed(const Embed<T>& p) {
    for (int64_t i = rank_; i < p.rows; i += size_) {
      const T* from = p.table + p.tokens[i] * p.stride;
      T* to = p.out + i * p.d;
      if (p.scales) {  // a row is rounded once, then scaled like any row
        Coded table{reinterpret_cast<const uint8_t*>(p.table), p.vocabulary, p.d, p.stride, p.scales, p.scale_stride};
        with_format(p.format, [&](auto format) {
          for (int64_t c = 0; c < p.d; ++c) {
            to[c] = weight_at<T, decltype(format)>(table, p.tokens[i], c);
            if (p.scale != 1.0) to[c] = narrow<T>(widen(to[c]) * float(p.scale));
          }
        });
        continue;
      }
      if (p.scale == 1.0) memcpy(to, from, size_t(p.d) * sizeof(T));
      else
        for (int64_t c = 0; c < p.d; ++c) to[c] = narrow<T>(widen(from[c]) * float(p.scale));
    }
  }

  // --- projections ---------------------------------------------------------------------------------------------------

  void project(const Project<T>& p) {
    const Wide<T>* panel = panel_of(p);
    auto at = [](T* base, int64_t stride, int64_t i, int64_t n) { return base + i * stride + n; };
    switch (p.epilogue) {
      case kStore:
        return columns<1>(p, panel, [&](int64_t i, int64_t n, int64_t count, const float* const* v) {
          store_some(at(p.y, p.n, i, n), load(v[0]), count);
        });
      case kAdd:
        return columns<1>(p, panel, [&](int64_t i, int64_t n, int64_t count, const float* const* v) {
          for (int64_t c = 0; c < count; ++c) {
            float value = v[0][c];
            if (p.add) value += widen(p.add[i * p.n + n + c]);
            *at(p.y, p.n, i, n + c) = narrow<T>(value);
          }
        });
      case kGate:
        return columns<2>(p, panel, [&](int64_t i, int64_t n, int64_t count, const float* const* v) {
          store_some(at(p.y, p.n, i, n), activate(p.activation, load(v[0])) * load(v[1]), count);
        });
      case kChoose: {
        Best* best = run_.best + rank_ * run_.most_rows;
        // Units taken from the end of another thread's share may lie before the first ones: each run of columns is
        // judged apart.
        Best run[kMaxRows];
        int64_t from = -1;
        auto keep = [&] {
          for (int64_t i = 0; i < p.rows && from >= 0; ++i) best[i] = better(best[i], run[i]);
        };
        columns<1>(p, panel, [&](int64_t i, int64_t n, int64_t count, const float* const* v) {
          if (i == 0) {
            if (n != from) {
              keep();
              for (int64_t r = 0; r < p.rows; ++r) run[r] = {0, -1};
            }
            from = n + count;
          }
          store_some(at(p.y, p.n, i, n), load(v[0]), count);
          challenge<T>(run[i], n, count, v[0]);
        });
        return keep();
      }
    }
  }

  template <int Parts, class Done> void columns(const Project<T>& p, const Wide<T>* panel, const Done& done) {
#if defined(AUTOSEL_UNPACKS)
    if constexpr (kUnpacks<T>) {
      if (p.packed) {
        PackedColumns w[2] = {{p.packed, panel, p.rows, p.together}};
        if (Parts > 1) w[1] = {p.packed_up, panel, p.rows, p.together};
        return share_columns<Parts>(p, w, Parts > 1 || w->amx ? w->run() / 8 : 1, done);
      }
    }
#endif
    if (p.scales) {
      auto bytes = [](const T* w) { return reinterpret_cast<const uint8_t*>(w); };
      Coded at[2] = {{bytes(p.w), p.n, p.k, p.w_stride, p.scales, p.scale_stride},
                     {bytes(p.up), p.n, p.k, p.up_stride, p.up_scales, p.up_scale_stride}};
      return with_format(p.format, [&](auto format) {
        CodedColumns<T, decltype(format)> w[2];
        for (int part = 0; part < Parts; ++part) w[part] = {at + part, panel, p.rows, p.together};
        share_columns<Parts>(p, w, Parts > 1 || w->amx ? w->run() / 8 : 1, done);
      });
    }
    Matrix<const T> at[2] = {{p.w, p.n, p.k, p.w_stride}, {p.up, p.n, p.k, p.up_stride}};
    PlainColumns<T> w[2];
    for (int part = 0; part < Parts; ++part) w[part] = {at + part, panel, p.rows, p.together};
    share_columns<Parts>(p, w, (Parts > 1 && p.rows == 1) || w->amx ? w->run() / 8 : 1, done);
  }

  // Takes at least `least` units at a time, as long as many are left.
  template <int Parts, class Columns, class Done>
  void share_columns(const Project<T>& p, const Columns* w, int64_t least, const Done& done) {
    const void* after = coming();
    if (!after) after = p.w;
    Left* left = run_.left + (next_ - 1) * size_;
    int64_t row = p.w_stride * (p.scales ? 1 : int64_t(sizeof(T)));
    int64_t most = std::max(kTakenBytes / (8 * Parts * row) + 1, least), begin, end;
    while (take(left, most, begin, end)) {
      int64_t last = 8 * end < p.n ? 8 * end : p.n;
      stream_runs<Parts>(w, p.rows, 8 * begin, last, left[rank_].count() > 0 ? w->at(8 * end) : after, done);
    }
  }

  // Takes this thread's next units: its own, the last ones in ever smaller parts; then those of the thread with most
  // left. Returns false if none are left.
  bool take(Left* left, int64_t most, int64_t& begin, int64_t& end) {
    most = std::min(most, left[rank_].count() / 2 + 1);
    if (left[rank_].take(most, true, begin, end)) return true;
    for (;;) {
      int victim = rank_;
      for (int other = 0; other < size_; ++other)
        if (left[other].count() > left[victim].count()) victim = other;
      if (victim == rank_) return false;
      if (left[victim].take(1, false, begin, end)) return true;
    }
  }

  // The rows of x, laid out for the dots: each thread makes its own copy.
  const Wide<T>* panel_of(const Project<T>& p) {
    static thread_local Scratch sum, normed, packed;
    Matrix<const T> x{p.x, p.rows, p.k, p.k};
    int64_t elements = p.rows * p.k;
    if (p.post_norm) {
      T *joined = sum.get<T>(2 * elements), *y = joined + elements;
      for (int64_t i = 0; i < p.rows; ++i)
        add_rmsnorm_row<T, true>(x.row(i), p.residual + i * p.k, p.post_norm, y + i * p.k, joined + i * p.k, p.k,
                                 float(p.eps), float(p.offset));
      if (rank_ == 0) memcpy(p.joined, joined, size_t(elements) * sizeof(T));
      x.at = joined;
    }
    int64_t room = panel_elements<T>(p.rows, p.k);
    if (p.scales)
      with_format(p.format, [&](auto format) { room = coded_panel_elements<T, decltype(format)>(p.rows, p.k); });
#if defined(AUTOSEL_UNPACKS)
    if (p.packed) room = packed_panel_elements(p.rows, p.k);
#endif
    Wide<T>* panel = packed.get<Wide<T>>(room);
    auto pack = [&p, panel](const auto& rows) {
#if defined(AUTOSEL_UNPACKS)
      if constexpr (kUnpacks<T>)
        if (p.packed) return pack_for_units(rows, panel);
#endif
      if (p.scales) with_format(p.format, [&](auto format) { pack_for_codes<T, decltype(format)>(rows, panel); });
      else pack_for_dot<T>(rows, panel);
    };
    if (!p.norm) {
      pack(x);
    } else if (p.rounded) {
      T* rows = normed.get<T>(elements);
      for (int64_t i = 0; i < p.rows; ++i)
        normalise_row(x.row(i), p.norm, rows + i * p.k, p.k, float(p.eps), float(p.offset));
      pack(Matrix<const T>{rows, p.rows, p.k, p.k});
    } else {
      Wide<T>* rows = normed.get<Wide<T>>(elements);
      for (int64_t i = 0; i < p.rows; ++i)
        normalise_row(x.row(i), p.norm, rows + i * p.k, p.k, float(p.eps), float(p.offset));
      pack(Matrix<const Wide<T>>{rows, p.rows, p.k, p.k});
    }
    return panel;
  }

  // --- attention -----------------------------------------------------------------------------------------------------

  // Returns false if a thread failed.
  bool attend(const Attend<T>& p) {
    using namespace attention;
    static thread_local Scratch scratch, heads;
    Shape a = shape_of_task(p);
    Sequence* room = scratch.get<Sequence>(p.batch);
    Cut cut(a, Lengths(p.lengths, p.room), size_, p.chunk, room);
    Unfinished saved(a, size_, run_.unfinished);
    int64_t row = p.q_heads * p.d;
    T* turned = heads.get<T>(p.batch * row + p.d);
    Strided4<T> out{p.out, row, p.d, row};
    typename Contiguous<T>::Tile tiles[1][2];
    Contiguous<T> source{cached<const T>(p, p.k_cache), cached<const T>(p, p.v_cache), tiles};
    Ready ready{p, turned, turned + p.batch * row};
    auto share = [&](int64_t begin, int64_t end, int64_t beyond) {
      attend_share(a, cut, saved, Strided4<const T>{turned, row, p.d, row}, out, p.prefetch, Mine{source}, begin, end,
                   beyond, rank_, ready);
    };
    if (cut.threads == size_ && p.batch * p.kv_heads >= 2 * size_) {  // enough whole units to take them one at a time
      Left* left = run_.left + (next_ - 1) * size_;
      for (int64_t unit, end; take(left, 1, unit, end);) {
        int64_t from = first_tile(p, cut, unit), to = first_tile(p, cut, unit + 1);
        share(from, to, left[rank_].count() > 0 ? to + 1 : to);
      }
      return true;
    }
    if (rank_ < cut.threads) {
      saved.clear(rank_);
      share(cut.begin(rank_), cut.begin(rank_ + 1), cut.begin(rank_ + 1));
    }
    if (!crosses(a, cut)) return true;
    if (!wait()) return false;
    for (int64_t leader = rank_; leader < cut.threads; leader += size_) attend_merge(a, cut, saved, out, leader);
    return true;
  }

  // The tiles of one thread, for any rank.
  struct Mine {
    const attention::Contiguous<T>& source;
    void fill(int, int slot, int64_t b, int64_t h, int64_t first, int64_t n) const {
      source.fill(0, slot, b, h, first, n);
    }
    attention::Spaced<T> k(int, int slot) const { return source.k(0, slot); }
    attention::Spaced<T> v(int, int slot) const { return source.v(0, slot); }
  };

  static attention::Shape shape_of_task(const Attend<T>& p) {
    attention::Shape a{};
    a.batch = p.batch, a.q_heads = p.q_heads, a.kv_heads = p.kv_heads, a.positions = 1, a.d = p.d;
    a.group = p.q_heads / p.kv_heads, a.rows = a.group, a.width = attention::round_up(p.d, attention::kPair);
    a.scale = float(p.scale), a.softcap = float(p.softcap), a.window = p.window;
    a.tile = p.tile < kLanes ? kLanes : attention::round_up(p.tile, kLanes);
    return a;
  }

  template <class To> static attention::Strided4<To> cached(const Attend<T>& p, T* base) {
    return {base, p.sequence_stride, p.head_stride, p.slot_stride};
  }

  // Position in the line of tiles where a unit (sequence b, KV head h: b * kv_heads + h) begins; after the last, the
  // end.
  static int64_t first_tile(const Attend<T>& p, const attention::Cut& cut, int64_t unit) {
    if (unit == p.batch * p.kv_heads) return cut.total;
    const attention::Sequence& q = cut.sequences[unit / p.kv_heads];
    return q.start + unit % p.kv_heads * q.tiles;
  }

  // Returns true if two threads share some unit. All threads get the same answer.
  static bool crosses(const attention::Shape& a, const attention::Cut& cut) {
    for (int64_t rank = 1; rank < cut.threads; ++rank) {
      const attention::Sequence& q = cut.sequences[cut.of(a, cut.begin(rank))];
      if ((cut.begin(rank) - q.start) % q.tiles != 0) return true;
    }
    return false;
  }

  // Norms and rotates the query heads of a unit; the thread that reads the newest key appends it first.
  struct Ready {
    const Attend<T>& p;
    T *turned, *spare;  // [batch, q_heads, d]; [d]
    mutable Turn turn{};
    mutable int64_t of = -1;  // the sequence whose angles `turn` holds

    Ready(const Attend<T>& p, T* turned, T* spare) : p(p), turned(turned), spare(spare) {}

    void operator()(int64_t b, int64_t h, bool last) const {
      if (of != b) autosel::turn(turn, p.positions[b], p.inv_freq, p.pairs, p.style != 0), of = b;
      int64_t group = p.q_heads / p.kv_heads;
      const T* qkv = p.qkv + b * (p.q_heads + 2 * p.kv_heads) * p.d;
      for (int64_t q = h * group; q < (h + 1) * group; ++q)
        head(qkv + q * p.d, p.q_norm, turned + (b * p.q_heads + q) * p.d);
      if (!last) return;
      const T *k = qkv + (p.q_heads + h) * p.d, *v = k + p.kv_heads * p.d;
      head(k, p.k_norm, cached<T>(p, p.k_cache).at(b, h, p.starts[b]));
      memcpy(cached<T>(p, p.v_cache).at(b, h, p.starts[b]), v, size_t(p.d) * sizeof(T));
    }

    void head(const T* from, const T* norm, T* to) const {
      if (norm) normalise_row(from, norm, spare, p.d, float(p.eps), float(p.offset)), from = spare;
      rotate(from, to, turn, p.pairs, p.style);
      memcpy(to + 2 * p.pairs, from + 2 * p.pairs, size_t(p.d - 2 * p.pairs) * sizeof(T));
    }
  };

  static constexpr int64_t kTakenBytes = 64 << 10;   // of weights at a time: 3 us; runs of short rows take more
  static constexpr int64_t kAheadBytes = 256 << 10;  // a quarter of the smallest L2 in use on servers
  Run& run_;
  int rank_, size_;
  uint32_t phase_ = 0;
  int64_t next_ = 0;
};

// --- the caller's side -----------------------------------------------------------------------------------------------

template <class View> void check_words(const int64_t* task) {
  AUTOSEL_CHECK(as<Head>(task).words * 8 == int64_t(sizeof(View)), "step: host and kernel disagree about a task");
}

template <class T> void check_packed(const Project<T>& p, const void* packed) {
  if (!packed) return;
  const PackedHead& w = *static_cast<const PackedHead*>(packed);
  AUTOSEL_CHECK(kUnpacks<T>, "step: this build multiplies no packed weights");
  AUTOSEL_CHECK(w.version == kPackedVersion && w.lanes == kLanes && w.rows == p.n && w.columns == p.k &&
                    p.k % kUnit == 0,
                "step: packed weights are " << w.rows << " x " << w.columns << " in layout " << w.version);
}

// Checks the values that change from step to step and could point outside the tensors. Returns the rows of the step.
template <class T> int64_t check(const Run& run, size_t* unfinished, int64_t threads) {
  int64_t rows = 1;
  for (int64_t i = 0; i < run.count; ++i) {
    const int64_t* task = run.task(i);
    if (as<Head>(task).kind == kEmbed) {
      check_words<Embed<T>>(task);
      const auto& p = as<Embed<T>>(task);
      for (int64_t b = 0; b < p.rows; ++b)
        AUTOSEL_CHECK(p.tokens[b] >= 0 && p.tokens[b] < p.vocabulary,
                      "step: token " << p.tokens[b] << " of " << p.vocabulary);
    } else if (as<Head>(task).kind == kProject) {
      check_words<Project<T>>(task);
      const auto& p = as<Project<T>>(task);
      AUTOSEL_CHECK(p.rows >= 1 && p.rows <= kMaxRows && p.together >= 1, "step: a projection of " << p.rows << " rows");
      check_packed<T>(p, p.packed), check_packed<T>(p, p.packed_up);
      AUTOSEL_CHECK(!p.scales || (p.format >= 0 && p.format < int64_t(std::tuple_size_v<Formats>)),
                    "step: format " << p.format << " of " << std::tuple_size_v<Formats> << " in this build");
      AUTOSEL_CHECK(!p.packed == !p.packed_up || p.epilogue != kGate, "step: of gate and up one is packed");
      rows = p.rows > rows ? p.rows : rows;
    } else if (as<Head>(task).kind == kAttend) {
      check_words<Attend<T>>(task);
      const auto& p = as<Attend<T>>(task);
      AUTOSEL_CHECK(p.pairs <= kMostPairs && 2 * p.pairs <= p.d, "step: more rotates than a head has");
      for (int64_t b = 0; b < p.batch; ++b)
        AUTOSEL_CHECK(p.starts[b] >= 0 && p.starts[b] < p.room && p.lengths[b] == p.starts[b] + 1,
                      "step: sequence " << b << " holds " << p.lengths[b] << " tokens after slot " << p.starts[b]
                                        << " of a cache of " << p.room);
      attention::Shape a{};
      a.rows = p.q_heads / p.kv_heads, a.width = attention::round_up(p.d, attention::kPair);
      size_t bytes = attention::Unfinished::bytes(a, threads);
      *unfinished = bytes > *unfinished ? bytes : *unfinished;
    } else {
      AUTOSEL_CHECK(false, "step: no task of kind " << as<Head>(task).kind);
    }
  }
  return rows;
}

// tasks int64 [n, kTaskWords]; `like` gives the storage type; times int64 [threads, n, 2] or none.
void step(TensorView tasks, TensorView like, Optional<TensorView> times, int64_t threads) {
  AUTOSEL_CHECK(tasks.ndim() == 2 && tasks.size(1) == kTaskWords && tasks.dtype().code == kDLInt &&
                    tasks.dtype().bits == 64 && tasks.stride(0) == kTaskWords,
                "step takes a list of tasks, int64 [n," << kTaskWords << "]");
  AUTOSEL_CHECK(threads >= 1 && threads <= 255, "step: 1 to 255 threads");
  if (times)
    AUTOSEL_CHECK(times->numel() == threads * tasks.size(0) * 2, "step: times must be int64 [threads, tasks, 2]");
  by_dtype(like, [&](auto tag) {
    using T = decltype(tag);
    static thread_local Scratch memory;
    static thread_local std::vector<Best> best;
    static thread_local std::vector<Left> left;
    Run run{};
    run.tasks = data<int64_t>(tasks), run.count = tasks.size(0), run.times = times ? data<int64_t>(*times) : nullptr;
    size_t unfinished = 0;
    run.most_rows = check<T>(run, &unfinished, threads);
    run.unfinished = memory.get<char>(int64_t(unfinished));
    best.assign(size_t(threads * run.most_rows), Best{0, -1});
    run.best = best.data();
    if (int64_t(left.size()) < run.count * threads) left = std::vector<Left>(size_t(run.count * threads));
    run.left = left.data();
    for (int64_t i = 0; i < run.count; ++i) {
      int64_t units = units_of<T>(run.task(i));
      for (int64_t rank = 0; rank < threads; ++rank)
        left[size_t(i * threads + rank)].put(units * rank / threads, units * (rank + 1) / threads);
    }
    team_v2::team().run(int(threads), [](void* context, int rank, int size) {
      Run& run = *static_cast<Run*>(context);
      try {
        Walker<T>(run, rank, size).walk();
      } catch (...) {
        if (!run.failed.exchange(true)) run.error = std::current_exception();
        run.barrier.fail();
      }
    }, &run, team_v2::Ranks::kAtOnce);
    if (run.error) std::rethrow_exception(run.error);
    for (int64_t i = 0; i < run.count; ++i)
      if (as<Head>(run.task(i)).kind == kProject && as<Project<T>>(run.task(i)).epilogue == kChoose) {
        const auto& p = as<Project<T>>(run.task(i));
        for (int64_t b = 0; b < p.rows; ++b) p.token[b] = best_of(run.best + b, threads, run.most_rows).index;
      }
  });
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(step, autosel::step);
