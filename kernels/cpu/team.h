// The threads of every kernel in the process: those of PyTorch's OpenMP runtime if there is one, otherwise our own
// helpers.
//
// There is one pool, because two pools compete for the cores: an op of PyTorch leaves its threads spinning for 8 ms, on
// the cores that the helpers of the next kernel need. Measured on two cores of Zen 5, attention of 15 us: right after a
// linear of PyTorch's, 34 to 125 us on helpers, 18 us on PyTorch's pool.
//
// The team is an inline function's static object: g++ emits it as STB_GNU_UNIQUE, so all shared objects built from this
// header share one team even under RTLD_LOCAL. Its layout is therefore an ABI: if you change it, change the namespace's
// number.
#pragma once
#include "system.h"

#include "openmp.h"
#include "placement.h"
#include "rest.h"

namespace autosel {
namespace team_v2 {

static inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using Job = void (*)(void* context, int rank, int size);

constexpr int kMostThreads = 255;

// How ranks may run: one after the other, or each in a thread, because the job contains a barrier.
enum class Ranks { kAnyOrder, kAtOnce };

// The first exception of a job's threads; the caller raises it after all have ended.
class FirstError {
 public:
  void keep() noexcept {
    if (!taken_.exchange(true)) error_ = std::current_exception();
  }
  void raise() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::atomic<bool> taken_{false};
  std::exception_ptr error_;
};

// One call's job, shared by its threads.
struct Work {
  Job job;
  void* context;
  int size;
  Ranks ranks;
  int64_t took = 0;  // the first rank's share, ns
  FirstError error{};

  void share(int rank) {
    int64_t start = rank == 0 ? now_ns() : 0;
    try {
      job(context, rank, size);
    } catch (...) {
      error.keep();
    }
    if (rank == 0) took = now_ns() - start;
  }
};

// Threads of our own. A call publishes a job and runs its own share; helpers spin for a short while, then sleep on a
// futex, so a decode loop pays about a microsecond per fork-join and an idle process uses no CPU. One caller at a time
// (a mutex).
class Helpers {
 public:
  static constexpr int64_t kSpinsFor = 40000;  // ns: kSpins at the fastest

  // Runs all ranks at the same time, one thread each; returns when all are done. Throws std::system_error if it cannot
  // create a thread.
  void run(Work& work, Placement& placement) {
    std::lock_guard<std::mutex> one_caller(caller_);
    int size = work.size;
    grow(size - 1);
    work_ = &work, placement_ = &placement, where_ = placement.where(helpers_ + 1);
    pending_.store(size - 1, std::memory_order_relaxed);
    uint32_t next = (generation_.load(std::memory_order_relaxed) >> 8) + 1;
    generation_.store(next << 8 | uint32_t(size), std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) > 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
    work.share(0);
    // On a busy machine a helper may be waiting for this very CPU: yield it after a while, or the helper waits a whole
    // slice.
    for (int spins = 0; pending_.load(std::memory_order_acquire) != 0;)
      if (++spins < kSpins) relax();
      else sched_yield();
  }

 private:
  static constexpr int kSpins = 4000;  // about 40-100 us of `pause`: longer than the gap between two ops of a step

  void grow(int helpers) {
    if (pid_ != getpid()) helpers_ = 0, asleep_ = 0, pid_ = getpid();  // after fork the helpers are gone
    while (helpers_ < helpers) {
      int rank = helpers_ + 1;
      uint32_t seen = generation_.load(std::memory_order_relaxed);
      std::thread([this, rank, seen] { serve(rank, seen); }).detach();
      helpers_ = rank;  // last: if no thread can be created, this throws, and the next call must not wait for it
    }
  }

  void serve(int rank, uint32_t seen) {
    pthread_setname_np(pthread_self(), "autosel-team");
    for (;;) {
      int spins = 0;
      while (generation_.load(std::memory_order_acquire) == seen)
        if (++spins < kSpins) relax();
        else sleep(seen);
      seen = generation_.load(std::memory_order_acquire);
      int size = int(seen & 255);
      if (rank >= size) continue;  // not invited; only an invited rank may read work_, which then cannot change
      placement_->take(rank, where_);
      work_->share(rank);
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  void sleep(uint32_t seen) {
    asleep_.fetch_add(1, std::memory_order_seq_cst);
    if (generation_.load(std::memory_order_seq_cst) == seen) futex(FUTEX_WAIT_PRIVATE, seen);
    asleep_.fetch_sub(1, std::memory_order_seq_cst);
  }

  void futex(int op, uint32_t value) { syscall(SYS_futex, &generation_, op, value, nullptr, nullptr, 0); }

  // Job number << 8 | team size: one word, so that a late helper cannot pair one job's number with another's size.
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int> pending_{0};
  alignas(64) std::atomic<int> asleep_{0};
  Work* work_ = nullptr;
  Placement* placement_ = nullptr;
  Where where_;
  int helpers_ = 0;
  pid_t pid_ = getpid();
  std::mutex caller_;
};

class Team {
 public:
  // Runs job(context, rank, size) once for each rank in [0, size); returns when all are done, or raises the first
  // exception of its threads. Several callers may run jobs at the same time. `size` is at most kMostThreads; `units`
  // tells long and short jobs of one function apart.
  void run(int size, Job job, void* context, Ranks ranks = Ranks::kAnyOrder, int64_t units = 0) {
    if (size <= 1) return job(context, 0, 1);
    Work work{job, context, size, ranks};
    Rest& rest = Rest::mine();
    const OpenMP* openmp = runtime();
    uint64_t key = reinterpret_cast<uintptr_t>(job) ^ uint64_t(units) << 40 ^ uint64_t(size) << 32;
    bool alone = ranks == Ranks::kAnyOrder && !wakes_.load(std::memory_order_relaxed) &&
                 rest.alone(key, size, now_ns(), openmp ? kOpenMPSpins : Helpers::kSpinsFor);
    if (alone)
      for (int rank = 0; rank < size; ++rank) work.share(rank);
    else if (!openmp || !on_its_threads(*openmp, work)) helpers_.run(work, placement_);
    rest.share_took(key, work.took);
    rest.ended(alone, now_ns());
    work.error.raise();
  }

  bool on_openmp() { return runtime() != nullptr; }
  void leave_openmp(bool leave) { left_.store(leave); }  // to compare the two, or because its threads were lost in a fork
  bool wakes() const { return wakes_.load(); }
  void wake_always(bool always) { wakes_.store(always); }  // for proofs and races, in which a job must use several threads
  Placement& placement() { return placement_; }

 private:
  static constexpr int64_t kOpenMPSpins = 5000000;  // ns; libgomp's threads spin for 8 ms at 2.6 GHz

  struct Region {
    const OpenMP& openmp;
    Placement& placement;
    Where where;
    Work& work;
    std::atomic<bool> too_few{false};
  };

  // False: the runtime gave fewer threads than a job with a barrier inside needs, and no rank ran.
  bool on_its_threads(const OpenMP& openmp, Work& work) {
    // All of its threads; otherwise libgomp would end the unused ones and start new ones for PyTorch's next op.
    int threads = openmp.max_threads();
    if (threads < work.size) threads = work.size;
    Region region{openmp, placement_, openmp.bound() ? Where{} : placement_.where(threads), work};
    openmp.parallel(enter, &region, unsigned(threads), 0);
    return !region.too_few.load();
  }

  static void enter(void* at) {
    Region& region = *static_cast<Region*>(at);
    int rank = region.openmp.thread_num(), threads = region.openmp.num_threads();
    if (rank > 0) region.placement.take(rank, region.where);
    if (region.work.ranks == Ranks::kAtOnce && threads < region.work.size) return region.too_few.store(true);
    for (int i = rank; i < region.work.size; i += threads) region.work.share(i);
  }

  // Return the runtime to run on; null: none, or it is disabled. PyTorch may be imported after the first kernel has
  // run.
  const OpenMP* runtime() {
    if (left_.load(std::memory_order_relaxed)) return nullptr;
    const OpenMP* known = openmp_.load(std::memory_order_acquire);
    if (known) return known;
    unsigned long long loaded = libraries_loaded();
    if (loaded == looked_at_.exchange(loaded)) return nullptr;
    if (OpenMP found = find_openmp()) openmp_.store(new OpenMP(found), std::memory_order_release);
    return openmp_.load(std::memory_order_acquire);
  }

  std::atomic<const OpenMP*> openmp_{nullptr};
  std::atomic<unsigned long long> looked_at_{0};
  Placement placement_;
  Helpers helpers_;
  std::atomic<bool> left_{false}, wakes_{false};
};

// Never destroyed: helpers may still be spinning at exit.
inline Team& team() {
  static Team* the = [] {
    Team* made = new Team;
    pthread_atfork(nullptr, nullptr, [] { team().leave_openmp(true); });
    return made;
  }();
  return *the;
}

// While it exists, every job wakes the workers: for probes, which time the threads.
class Awake {
 public:
  Awake() { team().wake_always(true); }
  ~Awake() { team().wake_always(before_); }

 private:
  bool before_ = team().wakes();
};

}  // namespace team_v2

// parallel(threads, count, grain, body): body(begin, end, rank) over [0, count) in `threads` contiguous shares whose
// ends are multiples of `grain`. Static: on a quiet machine equal shares finish together and stream contiguously.
template <class Body> void parallel(int64_t threads, int64_t count, int64_t grain, const Body& body) {
  int64_t units = (count + grain - 1) / grain;
  int size = int(threads < units ? threads : units);
  if (size > team_v2::kMostThreads) size = team_v2::kMostThreads;
  if (size <= 1) {
    if (count > 0) body(int64_t(0), count, 0);
    return;
  }
  struct Context { const Body* body; int64_t count, grain, units; } context{&body, count, grain, units};
  team_v2::team().run(size, [](void* p, int rank, int n) {
    auto& c = *static_cast<Context*>(p);
    int64_t begin = c.units * rank / n * c.grain, end = c.units * (rank + 1) / n * c.grain;
    if (end > c.count) end = c.count;
    if (begin < end) (*c.body)(begin, end, rank);
  }, &context, team_v2::Ranks::kAnyOrder, units);
}

}  // namespace autosel
