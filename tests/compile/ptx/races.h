// Which accesses are ordered, by vector clocks, after the PTX memory model: barriers, mbarriers, releases and acquires,
// fences around relaxed accesses. Two that are not ordered, one of them a store, are an error.
//
// The simplifications never report a correct program: scopes and proxies are not distinguished, atomic accesses are not
// compared with plain ones, only the latest four warps that read a byte are remembered, and TMA copies share a clock.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace ptx {

using Clocks = std::vector<uint32_t>;  // by thread of the launch; the last is that of bulk copies

class Races {
 public:
  static constexpr size_t kMost = 4096;  // most threads of a launch that is checked

  bool asked = false;    // of launches to come
  bool lenient = false;  // a store of the present value does not count as a store

  void begin(size_t threads) {
    on_ = asked && threads <= kMost;
    if (!on_) return;
    copies_ = uint32_t(threads);
    clocks_.assign(threads, Clocks(threads + 1, 0));
    for (size_t i = 0; i < threads; ++i) clocks_[i][i] = 1;
    fenced_.assign(threads, {}), seen_.assign(threads, {});
    released_.clear(), phases_.clear(), pages_.clear();
    copy_ = 0, page_at_ = ~uint64_t(0), launches_ += 1;
  }
  // Forget earlier accesses to memory that another block gets.
  void forget(const char* p, size_t bytes) {
    if (!on_) return;
    const uint64_t first = uint64_t(p), end = first + bytes;
    for (uint64_t page = first / 4096; page <= (end - 1) / 4096; ++page) pages_.erase(page);
    std::erase_if(released_, [&](const auto& at) { return at.first >= first && at.first < end; });
    std::erase_if(phases_, [&](const auto& at) { return at.first >= first && at.first < end; });
    page_at_ = ~uint64_t(0);
  }
  bool on() const { return on_; }
  uint64_t launches() const { return launches_; }

  // --- order -------------------------------------------------------------------------------------------------------

  void release(uint32_t t, Clocks& into) {
    if (!on_) return;
    join(into, clocks_[t]);
    clocks_[t][t] += 1;
  }
  void acquire(uint32_t t, const Clocks& from) {
    if (on_) join(clocks_[t], from);
  }
  void fence(uint32_t t) {
    if (!on_) return;
    join(clocks_[t], seen_[t]);
    fenced_[t] = clocks_[t];
    clocks_[t][t] += 1;
  }
  // A relaxed load or store: it orders accesses only together with a fence before or after it.
  void synchronises(uint32_t t, uint64_t address, bool reads, bool writes, bool acquires, bool releases) {
    if (!on_) return;
    Clocks& there = released_[address];
    if (reads) join(acquires ? clocks_[t] : seen_[t], there);
    if (!writes) return;
    if (!reads) there.clear();
    if (releases)
      release(t, there);
    else
      join(there, fenced_[t]);
  }
  struct Phase {
    Clocks now, over;
  };
  Phase& phase(uint64_t address) { return phases_[address]; }

  // --- accesses ----------------------------------------------------------------------------------------------------

  void read(uint32_t t, const char* p, size_t bytes, int line) {
    if (!on_) return;
    for (size_t k = 0; k < bytes; ++k) {
      Cell& c = cell(p + k);
      if (!ordered(t, c.writer)) said(t, line, "reads", c.writer, "wrote", p + k);
      Access& mine = slot(c, t);
      mine = {clocks_[t][t], t, line};
    }
  }
  void write(uint32_t t, const char* p, size_t bytes, int line) {
    if (!on_) return;
    begin_write(t, p, bytes, line);
    end_write(t, p, bytes, line);
  }
  // An asynchronous store: no other access to its bytes may happen between its start and its end.
  void begin_write(uint32_t t, const char* p, size_t bytes, int line) {
    if (!on_) return;
    for (size_t k = 0; k < bytes; ++k) {
      Cell& c = cell(p + k);
      if (!ordered(t, c.writer)) said(t, line, "writes", c.writer, "wrote", p + k);
      for (const Access& r : c.readers)
        if (!ordered(t, r)) said(t, line, "writes", r, "read", p + k);
      c.writer = {~uint32_t(0), t, line}, c.readers = {};
    }
  }
  void end_write(uint32_t t, const char* p, size_t bytes, int line) {
    if (!on_) return;
    for (size_t k = 0; k < bytes; ++k) cell(p + k).writer = {clocks_[t][t], t, line};
  }
  // A bulk copy's access, ordered after its issuing thread, and before threads that wait for its mbarrier.
  void end_copy(const char* p, size_t bytes, int line, Clocks& reports) {
    if (!on_) return;
    copy_ += 1;
    for (size_t k = 0; k < bytes; ++k) cell(p + k).writer = {copy_, copies_, line};
    reports.resize(copies_ + 1), reports[copies_] = copy_;
  }

 private:
  struct Access {
    uint32_t clock = 0, thread = 0;
    int line = 0;
  };
  struct Cell {
    Access writer;
    std::array<Access, 4> readers;
  };
  using Page = std::array<Cell, 4096>;

  bool on_ = false;
  uint32_t copies_ = 0, copy_ = 0;
  uint64_t launches_ = 0, page_at_ = 0;
  Page* page_ = nullptr;
  std::vector<Clocks> clocks_, fenced_, seen_;
  std::unordered_map<uint64_t, Clocks> released_;
  std::unordered_map<uint64_t, Phase> phases_;
  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;

  static void join(Clocks& into, const Clocks& from) {
    if (into.size() < from.size()) into.resize(from.size());
    for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
  }
  bool ordered(uint32_t t, const Access& a) const {
    return a.clock == 0 || a.thread == t || clocks_[t][a.thread] >= a.clock;
  }
  Cell& cell(const char* p) {
    const uint64_t at = uint64_t(p) / 4096;
    if (at != page_at_) {
      std::unique_ptr<Page>& page = pages_[at];
      if (!page) page = std::make_unique<Page>();
      page_ = page.get(), page_at_ = at;
    }
    return (*page_)[uint64_t(p) % 4096];
  }
  static Access& slot(Cell& c, uint32_t t) {
    Access* oldest = &c.readers[0];
    for (Access& r : c.readers) {
      if (r.clock && r.thread / 32 == t / 32) return r;
      if (r.clock < oldest->clock) oldest = &r;
    }
    return *oldest;
  }
  [[noreturn]] void said(uint32_t t, int line, const char* does, const Access& other, const char* did,
                         const char* p) const {
    char where[32];
    snprintf(where, sizeof where, "%p", static_cast<const void*>(p));
    const std::string who =
        other.thread == copies_ ? "a bulk copy" : "thread " + std::to_string(other.thread) + " of the launch";
    throw Error("race: thread " + std::to_string(t) + " of the launch " + does + " at " + where + ", line " +
                std::to_string(line) + ", what " + who + " " + did + " at line " + std::to_string(other.line) +
                ", and nothing puts one before the other");
  }
};

}  // namespace ptx
