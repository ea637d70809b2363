// A program around kernels/cpu/team.h; `test_kernels_cpu_team.py` builds it with and without OpenMP and reads what it prints.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include <sys/resource.h>
#include <sys/wait.h>

#include "team.h"

using namespace autosel::team_v2;

namespace {

struct Seen {
  std::mutex lock;
  std::multiset<int> ranks;
  std::set<long> tids;
  std::set<std::string> masks;  // of threads other than the caller
  int rank_that_throws = -1;
};

std::string my_mask() {
  CpuSet mine = CpuSet::mine();
  std::string text;
  for (int cpu = 0; cpu < kMostCpus; ++cpu)
    if (mine.has(cpu)) text += (text.empty() ? "" : ",") + std::to_string(cpu);
  return text;
}

long caller_tid = 0;

void look(void* to, int rank, int) {
  Seen& seen = *static_cast<Seen*>(to);
  std::lock_guard<std::mutex> one(seen.lock);
  long tid = syscall(SYS_gettid);
  seen.ranks.insert(rank), seen.tids.insert(tid);
  if (tid != caller_tid) seen.masks.insert(my_mask());
  if (rank == seen.rank_that_throws) throw std::runtime_error("rank " + std::to_string(rank));
}

// Every rank waits for all others: ends only if each has a thread.
struct Meeting { std::atomic<int> arrived{0}; };
void meet(void* to, int, int size) {
  Meeting& m = *static_cast<Meeting*>(to);
  ++m.arrived;
  while (m.arrived < size) sched_yield();
}

Seen job(int size, Ranks ranks = Ranks::kAtOnce) {
  Seen seen;
  caller_tid = syscall(SYS_gettid);
  team().run(size, look, &seen, ranks);
  return Seen{{}, seen.ranks, seen.tids, seen.masks};
}

bool whole(const Seen& seen, int size) {
  for (int rank = 0; rank < size; ++rank)
    if (seen.ranks.count(rank) != 1) return false;
  return int(seen.ranks.size()) == size;
}

std::string joined(const std::set<std::string>& all) {
  std::string text;
  for (const auto& one : all) text += (text.empty() ? "" : " ") + one;
  return text;
}

void report(int size) {
  Seen seen = job(size);
  printf("whole %d threads %zu openmp %d\n", whole(seen, size), seen.tids.size(), team().on_openmp());
}

void bind_me_to(const char* cpus) {
  CpuSet set;
  for (const char* at = cpus; *at; at += strcspn(at, ","), at += *at == ',') set.add(atoi(at));
  set.bind_me();
}

void bind_foreign(void*, int rank, int) {
  if (rank > 0) bind_me_to("0");
}

}  // namespace

int main(int count, char** words) {
  std::string what = words[1];
  int size = count > 2 ? atoi(words[2]) : 2;
  if (what == "run") {
    report(size);
  } else if (what == "sizes") {  // one thread more or less a call must not make the runtime end and start threads
    std::set<long> tids;
    for (int i = 0; i < 50; ++i)
      for (int n : {size, 2}) {
        Seen seen = job(n);
        tids.insert(seen.tids.begin(), seen.tids.end());
        if (!whole(seen, n)) puts("not whole");
      }
    printf("threads %zu\n", tids.size());
  } else if (what == "at-once") {
    Meeting meeting;
    team().run(size, meet, &meeting, Ranks::kAtOnce);
    printf("met %d\n", meeting.arrived.load());
  } else if (what == "placed") {
    std::string before = my_mask();
    for (int i = 0; i < 3; ++i) job(size);
    Seen placed = job(size);
    printf("caller %s\nworkers %s\nplaced %d\n", my_mask() == before ? "unchanged" : "changed", joined(placed.masks).c_str(),
           team().placement().placed());
    team().placement().enable(false);
    Seen released = job(size);
    printf("released %s\nplaced %d\n", joined(released.masks).c_str(), team().placement().placed());
  } else if (what == "foreign") {
    team().placement().enable(false);
    team().run(size, bind_foreign, nullptr, Ranks::kAtOnce);
    team().placement().enable(true);
    job(size);
    printf("workers %s\nplaced %d\n", joined(job(size).masks).c_str(), team().placement().placed());
  } else if (what == "fork") {
    report(size);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
      alarm(20);
      report(size);
      fflush(stdout);
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    printf("child %s\n", status == 0 ? "ended" : "hung");
  } else if (what == "callers") {
    std::atomic<int> wrong{0};
    std::vector<std::thread> callers;
    for (int c = 0; c < 4; ++c)
      callers.emplace_back([&] {
        for (int i = 0; i < 200; ++i) {
          Seen seen;
          team().run(size, look, &seen);
          if (!whole(seen, size)) ++wrong;
        }
      });
    for (auto& caller : callers) caller.join();
    printf("wrong %d\n", wrong.load());
  } else if (what == "throws") {
    for (int rank = 0; rank < size; ++rank) {
      Seen seen;
      seen.rank_that_throws = rank;
      try {
        team().run(size, look, &seen);
        puts("nothing was raised");
      } catch (const std::runtime_error& error) {
        printf("%s\n", error.what());
      }
    }
    report(size);
  } else if (what == "rested") {  // short jobs after a rest stay with the caller, until they have lost a wake-up's time
    auto threads_of = [&](int busy_us) {
      struct Busy { Seen seen; int us; } busy;
      busy.us = busy_us;
      team().run(size, [](void* to, int rank, int n) {
        Busy& b = *static_cast<Busy*>(to);
        look(&b.seen, rank, n);
        for (int64_t end = now_ns() + b.us * 1000; now_ns() < end;) {}
      }, &busy, Ranks::kAnyOrder, busy_us);
      return busy.seen.tids.size();
    };
    for (int us : {20, 2000}) {
      caller_tid = syscall(SYS_gettid);
      threads_of(us);
      usleep(30000);
      printf("%d us:", us);
      for (int call = 0; call < 12; ++call) printf(" %zu", threads_of(us));
      puts("");
    }
  } else if (what == "short-of-threads") {
    rlimit all;
    getrlimit(RLIMIT_AS, &all);
    rlimit little{64u << 20, all.rlim_max};  // a stack takes 8 MiB of it
    setrlimit(RLIMIT_AS, &little);
    try {
      job(40);
      puts("ran");
    } catch (const std::exception&) {
      puts("failed");
    }
    setrlimit(RLIMIT_AS, &all);
    printf("then %zu\n", job(40).ranks.size());
  }
  fflush(stdout);
  _exit(0);
}
