// One team of threads for every kernel in the process.
//
// The team is an inline function's static object: g++ emits it as STB_GNU_UNIQUE, so all shared objects built from this
// header share one team even under RTLD_LOCAL. Its layout is therefore an ABI: change it, change the namespace's number.
//
// A call publishes a job and runs its own share; helpers spin for a short while, then sleep on a futex, so a decode loop
// pays about a microsecond a fork-join and an idle process burns nothing. `run` is not re-entrant and takes one caller
// at a time (a mutex), which is what a decode loop is.
#pragma once
#include <atomic>
#include <climits>
#include <cstdint>
#include <mutex>
#include <thread>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace autosel {
namespace team_v1 {

static inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using Job = void (*)(void* context, int rank, int size);

class Team {
 public:
  // Runs job(context, rank, size) once for each rank in [0, size); returns when all are done.
  void run(int size, Job job, void* context) {
    if (size > kMaxHelpers) size = kMaxHelpers;
    if (size <= 1) return job(context, 0, 1);
    std::lock_guard<std::mutex> one_caller(caller_);
    grow(size - 1);
    job_ = job, context_ = context;
    pending_.store(size - 1, std::memory_order_relaxed);
    uint32_t next = (generation_.load(std::memory_order_relaxed) >> 8) + 1;
    generation_.store(next << 8 | uint32_t(size), std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) > 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
    job(context, 0, size);
    // On a busy machine a helper may be waiting for this very CPU: after a while give it away, or it waits a whole slice.
    for (int spins = 0; pending_.load(std::memory_order_acquire) != 0;)
      if (++spins < kSpins) relax();
      else sched_yield();
  }

 private:
  static constexpr int kSpins = 4000;  // about 40-100 us of `pause`: longer than the gap between two ops of a step
  static constexpr int kMaxHelpers = 255;

  void grow(int helpers) {
    if (pid_ != getpid()) helpers_ = 0, asleep_ = 0, pid_ = getpid();  // after fork the helpers are gone
    while (helpers_ < helpers && helpers_ < kMaxHelpers) {
      int rank = helpers_ + 1;
      uint32_t seen = generation_.load(std::memory_order_relaxed);
      std::thread([this, rank, seen] { serve(rank, seen); }).detach();
      helpers_ = rank;  // only now: where no thread can be had, this throws, and the next call must not wait for one
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
      if (rank >= size) continue;  // not invited; only an invited rank may read job_, which then cannot change
      job_(context_, rank, size);
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
  Job job_ = nullptr;
  void* context_ = nullptr;
  int helpers_ = 0;
  pid_t pid_ = getpid();
  std::mutex caller_;
};

// Never destroyed: helpers may still be spinning at exit.
inline Team& team() {
  static Team* the = new Team;
  return *the;
}

}  // namespace team_v1

// parallel(threads, count, grain, body): body(begin, end, rank) over [0, count) in `threads` contiguous shares whose
// ends are multiples of `grain`. Static: on a quiet machine equal shares finish together and stream contiguously.
template <class Body> void parallel(int64_t threads, int64_t count, int64_t grain, const Body& body) {
  int64_t units = (count + grain - 1) / grain;
  int size = int(threads < units ? threads : units);
  if (size <= 1) {
    if (count > 0) body(int64_t(0), count, 0);
    return;
  }
  struct Context { const Body* body; int64_t count, grain, units; } context{&body, count, grain, units};
  team_v1::team().run(size, [](void* p, int rank, int n) {
    auto& c = *static_cast<Context*>(p);
    int64_t begin = c.units * rank / n * c.grain, end = c.units * (rank + 1) / n * c.grain;
    if (end > c.count) end = c.count;
    if (begin < end) (*c.body)(begin, end, rank);
  }, &context);
}

}  // namespace autosel
