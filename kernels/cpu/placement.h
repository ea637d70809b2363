// Assigns the workers of a pool to cores.
//
// A worker that slept is often woken on its caller's own core, above all in a virtual machine, where an idle core looks
// busy. It then waits until the caller yields: up to 8 ms with libgomp, whose threads spin that long. So the cores are
// divided into one slice per thread, and a worker runs only in its own slice, unless the caller is there: then the two
// swap slices. A worker places itself in its next job: no thread changes the affinity of another thread or of the
// caller. Not placed: a worker whose affinity differs from the caller's (another library or `taskset` has bound it),
// and all workers if OpenMP binds its threads or if there are fewer cores than threads.
#pragma once
#include "system.h"

namespace autosel {
namespace team_v2 {

constexpr int kMostCpus = 4096;

struct CpuSet {
  unsigned long bits[kMostCpus / (8 * sizeof(unsigned long))] = {};
  static constexpr int kWord = 8 * sizeof(unsigned long);

  bool has(int cpu) const { return cpu >= 0 && cpu < kMostCpus && (bits[cpu / kWord] >> cpu % kWord & 1); }
  void add(int cpu) { bits[cpu / kWord] |= 1ul << cpu % kWord; }
  bool operator==(const CpuSet& other) const { return memcmp(bits, other.bits, sizeof bits) == 0; }

  // Return the calling thread's affinity; empty if it cannot be read.
  static CpuSet mine() {
    CpuSet made;
    if (sched_getaffinity(0, sizeof made.bits, reinterpret_cast<cpu_set_t*>(made.bits)) != 0) made = {};
    return made;
  }
  bool bind_me() const { return sched_setaffinity(0, sizeof bits, reinterpret_cast<const cpu_set_t*>(bits)) == 0; }
};

// Return the cores of a set of CPUs, in order: threads of one core stay together.
class Cores {
 public:
  explicit Cores(const CpuSet& allowed) : core_of_(kMostCpus, -1) {
    for (int cpu = 0; cpu < kMostCpus; ++cpu) {
      if (!allowed.has(cpu)) continue;
      int first = first_sibling(cpu);
      if (first >= 0 && first < cpu && core_of_[size_t(first)] >= 0) core_of_[size_t(cpu)] = core_of_[size_t(first)];
      else core_of_[size_t(cpu)] = count_++;
    }
  }
  int count() const { return count_; }

  // Core i belongs to slice i * slices / count. -1: no such CPU.
  int slice_of(int cpu, int slices) const {
    int core = cpu >= 0 && cpu < kMostCpus ? core_of_[size_t(cpu)] : -1;
    return core < 0 ? -1 : int(int64_t(core) * slices / count_);
  }
  CpuSet slice(int which, int slices) const {
    CpuSet made;
    for (int cpu = 0; cpu < kMostCpus; ++cpu)
      if (slice_of(cpu, slices) == which) made.add(cpu);
    return made;
  }

 private:
  static int first_sibling(int cpu) {
    char path[96], text[16];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    FILE* file = fopen(path, "r");
    if (file == nullptr) return -1;
    int first = fgets(text, sizeof text, file) ? atoi(text) : -1;
    fclose(file);
    return first;
  }
  std::vector<int> core_of_;
  int count_ = 0;
};

// A job's message to its workers. `slices` 0: keep the present affinity; -1: restore the earlier one.
struct Where {
  int slices = 0, callers = 0;
  uint32_t epoch = 0;
};

class Placement {
 public:
  // For a job of `threads` threads whose caller is the calling thread.
  Where where(int threads) {
    uint32_t epoch = epoch_.load(std::memory_order_acquire);
    if (!enabled(epoch)) return {-1, 0, epoch};
    const Cores& cores = cores_of_the_process();
    if (cores.count() < threads) return {0, 0, epoch};
    return {threads, cores.slice_of(sched_getcpu(), threads), epoch};
  }

  // The worker's side, at the start of each job.
  void take(int rank, const Where& where) {
    static thread_local Place mine;
    if (mine.same(rank, where)) return;
    mine.last = where, mine.rank = rank;
    if (where.slices == 0 || mine.foreign) return;
    if (where.slices < 0) return mine.give_back(placed_);
    int slice = rank == where.callers ? 0 : rank;
    mine.move_to(cores_.load(std::memory_order_acquire)->slice(slice, where.slices), allowed_, placed_);
  }

  // Takes effect in each worker's next job.
  void enable(bool on) {
    uint32_t before = epoch_.load();
    while (enabled(before) != on && !epoch_.compare_exchange_weak(before, before + 1)) {}
  }
  bool enabled() const { return enabled(epoch_.load(std::memory_order_acquire)); }
  int placed() const { return placed_.load(); }

 private:
  struct Place {
    Where last;
    int rank = -1;
    bool ours = false, foreign = false;
    CpuSet set;

    bool same(int other_rank, const Where& where) const {
      return rank == other_rank && last.epoch == where.epoch && last.slices == where.slices && last.callers == where.callers;
    }
    void move_to(const CpuSet& to, const CpuSet& allowed, std::atomic<int>& placed) {
      if (ours && to == set) return;
      foreign = !(CpuSet::mine() == (ours ? set : allowed)) || !to.bind_me();
      if (ours && foreign) placed.fetch_sub(1);
      if (!ours && !foreign) placed.fetch_add(1);
      ours = !foreign, set = to, before = allowed;
    }
    void give_back(std::atomic<int>& placed) {
      if (ours && CpuSet::mine() == set) before.bind_me();
      if (ours) placed.fetch_sub(1);
      ours = false;
    }
    CpuSet before;
  };

  static bool enabled(uint32_t epoch) { return epoch % 2 == 0; }

  const Cores& cores_of_the_process() {
    const Cores* cores = cores_.load(std::memory_order_acquire);
    if (cores != nullptr) return *cores;
    std::lock_guard<std::mutex> once(making_);
    if (cores_.load() == nullptr) allowed_ = CpuSet::mine(), cores_.store(new Cores(allowed_), std::memory_order_release);
    return *cores_.load();
  }

  std::atomic<uint32_t> epoch_{0};  // odd: off
  std::atomic<const Cores*> cores_{nullptr};
  std::atomic<int> placed_{0};
  CpuSet allowed_;  // of the first caller
  std::mutex making_;
};

}  // namespace team_v2
}  // namespace autosel
