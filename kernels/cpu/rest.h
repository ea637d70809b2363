// Decides whether a job is worth waking the workers.
//
// Waiting threads spin for a while, then sleep. Waking one costs 50 us on bare metal and 130 us in a virtual machine,
// more than a short job takes. So after a rest a caller runs short jobs alone, until the time lost since the rest
// equals the cost of a wake-up; then it wakes them. The total cost is at most twice that of the better choice (ski
// rental). Measured on two cores of Zen 4 (a virtual machine), attention of 25 us after a rest of 20 ms: 147 us alone,
// of which the cold caches take 110, and 230 us on two threads.
#pragma once
#include "system.h"

namespace autosel {
namespace team_v2 {

static inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// State of one calling thread. A job is identified by its function and its size in units: `key`.
class Rest {
 public:
  // Return true if the caller may run `size` shares of this job one after the other, at time `now`. Workers spin for
  // `spins` after a job.
  bool alone(uint64_t key, int size, int64_t now, int64_t spins) {
    if (now - shared_ < spins) return false;
    if (now - alone_ > spins) lost_ = 0;  // a new rest
    const Share& known = shares_[key % kShares];
    if (known.key != key || lost_ + known.took * (size - 1) > kWakeUp) return false;
    lost_ += known.took * (size - 1);
    return true;
  }
  // Records the duration of the caller's share of a job.
  void share_took(uint64_t key, int64_t took) { shares_[key % kShares] = {key, took}; }
  void ended(bool alone, int64_t now) { (alone ? alone_ : shared_) = now; }

  static Rest& mine() {
    static thread_local Rest the;
    return the;
  }

 private:
  static constexpr int64_t kWakeUp = 100000;  // ns
  static constexpr int kShares = 61;          // a prime, because keys are addresses and sizes
  struct Share { uint64_t key = 0; int64_t took = 0; };
  Share shares_[kShares];
  int64_t shared_ = 0, alone_ = 0, lost_ = 0;
};

}  // namespace team_v2
}  // namespace autosel
