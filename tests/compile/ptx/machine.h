// A GPU's threads, blocks and clusters, run by one CPU thread, one instruction after the other.
//
// A thread runs until it must wait, or its turn ends. Asynchronous work (copies, products of warp groups) is done as
// early or as late as a device may do it: at once, or when a thread waits for it and no other thread can continue. A
// thread that does not wait reads memory that is not written yet: NaN.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <random>

#include "program.h"
#include "races.h"

namespace ptx {

constexpr unsigned kWarp = 32, kGroup = 128;
constexpr size_t kMostShared = 227 << 10;             // of a block on sm_90
constexpr size_t kReserved = 1024;                    // in addition, bytes at its start that the system reserves
constexpr size_t kWindow = 1 << 24;                   // from one block of a cluster to the next, in shared addresses
constexpr unsigned kMostCluster = 16, kResident = 8;  // blocks that run at once
constexpr unsigned kProcessors = 2, kBlocksEach = 2;  // memory that the device reports
constexpr uint64_t kTurn = 4096;                      // instructions

enum class State : uint8_t { runs, at_barrier, at_lanes, at_group, at_phase, at_cluster, done };
enum class Order : uint8_t { early, late, mixed };  // of asynchronous work

struct Frame {
  const Function* function = nullptr;
  uint32_t pc = 0;
  std::vector<uint64_t> slots;
  std::unique_ptr<char[]> room;
  char *parameters = nullptr, *locals = nullptr;
};

struct Block;
struct Cluster;

// Work that a thread has started and not yet waited for.
struct Begun {
  std::vector<std::vector<std::function<void()>>> groups;  // committed, oldest first
  std::vector<std::function<void()>> open;
  void commit() { groups.push_back(std::move(open)), open.clear(); }
  // `ends`: effects that are visible only after a wait.
  void add(bool later, std::function<void()> work, std::function<void()> ends) {
    if (later) return open.push_back([work, ends] { work(), ends(); });
    for (auto& group : groups) group = done(group);  // products of a warp group are made in order
    open = done(open);
    work(), open.push_back(ends);
  }
  static std::vector<std::function<void()>> done(std::vector<std::function<void()>>& group) {
    for (auto& one : group) one();
    return {};
  }
  void leave(size_t count) {  // completes all but the latest `count` groups
    while (groups.size() > count) {
      for (auto& one : groups.front()) one();
      groups.erase(groups.begin());
    }
  }
};

struct Thread {
  uint64_t* slots = nullptr;
  uint32_t pc = 0;  // of the next instruction, also while one is executed or waits
  State state = State::runs;
  bool stop = false;   // yields although it could continue
  bool looks = false;  // polls memory that others must write: it may make no progress
  bool carry = false;
  unsigned tid[3] = {}, index = 0;
  uint32_t number = 0;  // of the launch
  Block* block = nullptr;
  std::vector<Frame> frames;
  uint32_t lanes = 0;     // it waits for
  uint64_t phase_at = 0;  // mbarrier it waits for: shared address
  bool phase = false;     // has arrived at its cluster's barrier, and not yet waited
  uint64_t fenced = 0;    // time of its last fence between plain and asynchronous accesses
  Begun copies, bulk;     // cp.async, bulk stores
};

struct Barrier {
  Clocks clocks;  // of arrived threads
  unsigned arrived = 0, expected = 0;
  bool any = false, all = true;
  unsigned count = 0;
  bool said_any = false, said_all = false;
  unsigned said_count = 0;
};

// The last writer of 16 bytes of shared memory by plain stores, and the time.
struct Written {
  uint32_t thread = kNone;
  uint64_t when = 0;
};

struct Block {
  std::vector<Written> written;
  unsigned at[3] = {}, rank = 0, done = 0;
  Cluster* cluster = nullptr;
  std::vector<Thread> threads;
  Barrier barriers[16];
  std::vector<Begun> products;  // of warp groups
};

struct Cluster {
  Clocks coming, met;  // clocks of threads at its barrier, and of the last complete barrier
  unsigned at[3] = {}, arrived = 0, alive = 0;
  char* arena = nullptr;  // of all its blocks' shared memory
  std::vector<std::unique_ptr<Block>> blocks;
};

struct Launch {
  Module* module = nullptr;
  const Function* function = nullptr;
  unsigned grid[3] = {1, 1, 1}, block[3] = {1, 1, 1}, cluster[3] = {1, 1, 1};
  size_t shared_bytes = 0;  // dynamic
  std::vector<char> parameters;
  bool dependent = false, together = false;
};

class Machine {
 public:
  Order order = Order::early;
  bool backwards = false;
  uint64_t clock_ns = 1000;  // a test's; the host's own if the device belongs to a whole process
  std::vector<std::pair<char*, size_t>> allowed;  // global memory; empty: all
  std::map<char*, size_t> own;                    // that the device allocated for itself
  bool strict = false;                            // other memory is an error, even if no range was allowed
  std::deque<std::function<void()>> pending;      // asynchronous copies in no group
  std::mt19937 random{12345};
  bool waited = false;  // a thread of this launch has waited for the kernels ahead
  Races races;
  std::map<int, std::string> sites;  // lines that order accesses, and were executed
  int omitted = 0;                   // one of them to skip
  alignas(64) char meeting[64] = {};
  const Launch* launch = nullptr;
  uint64_t executed = 0;

  void run(const Launch& l);
  // Now, or later.
  void begin(std::function<void()> work) {
    if (order == Order::early || (order == Order::mixed && random() % 2))
      work();
    else
      pending.push_back(std::move(work));
  }
  uint64_t now_ns() const {
    if (!strict) return clock_ns;
    return uint64_t(std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
  }
  bool delays() { return order == Order::late || (order == Order::mixed && random() % 2); }
  char* shared(Block& b, uint64_t address, size_t bytes, size_t align);  // [shared::cluster]
  char* global(uint64_t address, size_t bytes, size_t align);
  char* local(Thread& t, uint64_t address, size_t bytes, size_t align);
  char* generic(Thread& t, uint64_t address, size_t bytes, size_t align);
  size_t shared_total() const {
    return launch->module->shared_bytes() ? rounded(launch->module->shared_bytes(), 128) + launch->shared_bytes
                                          : launch->shared_bytes;
  }
  void wake(Cluster& c, uint64_t address);

 private:
  std::vector<std::unique_ptr<Cluster>> resident_;
  std::vector<char*> arenas_;
  std::unique_ptr<Cluster> make(uint64_t index);
  bool turn(Cluster& c);
  void step(Thread& t);
  std::string where() const;
  char* arena();
};

inline Machine& machine() {
  static Machine m;
  return m;
}

// --- slots -----------------------------------------------------------------------------------------------------------

template <class T>
[[gnu::always_inline]] inline T as(uint64_t bits) {
  T v;
  memcpy(&v, &bits, sizeof v);
  return v;
}
template <class T>
[[gnu::always_inline]] inline uint64_t bits(T v) {
  if constexpr (std::is_integral_v<T> && std::is_signed_v<T>) return uint64_t(int64_t(v));
  uint64_t b = 0;
  memcpy(&b, &v, sizeof v);
  return b;
}
inline uint64_t word(const Thread& t, const Operand& o) { return t.slots[o.slot] + uint64_t(o.offset); }
template <class T>
[[gnu::always_inline]] inline T get(const Thread& t, const Instruction& i, size_t k) {
  return as<T>(t.slots[i.at[k]]);
}
inline bool truth(const Thread& t, const Operand& o) { return bool(t.slots[o.slot] & 1) != o.negated; }
template <class T>
void put(Thread& t, const Operand& o, T v) {
  if (o.slot != kNone) t.slots[o.slot] = bits(v);
}
template <class T>
[[gnu::always_inline]] inline void put(Thread& t, const Instruction& i, T v) {
  if (i.at[0] != kNone) t.slots[i.at[0]] = bits(v);
}

// --- memory ----------------------------------------------------------------------------------------------------------

inline std::string hex(uint64_t v) {
  char text[32];
  snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(v));
  return text;
}

inline void check_alignment(uint64_t address, size_t align, const char* space) {
  if (address & (align - 1))
    throw Error(std::string("misaligned ") + space + " address " + hex(address) + ": must be a multiple of " +
                std::to_string(align));
}

inline char* Machine::shared(Block& b, uint64_t address, size_t bytes, size_t align) {
  address &= 0xffffffff;
  const uint64_t rank = address / kWindow, offset = address % kWindow;
  check_alignment(offset, align, "shared");
  if (rank >= b.cluster->blocks.size() || offset < kReserved || offset + bytes > kReserved + shared_total())
    throw Error("shared address " + hex(address) + " (" + std::to_string(bytes) + " bytes) is outside of the " +
                std::to_string(shared_total()) + " bytes that the block has");
  return b.cluster->arena + address;
}

inline char* Machine::global(uint64_t address, size_t bytes, size_t align) {
  check_alignment(address, align, "global");
  char* p = reinterpret_cast<char*>(address);
  if (address < 4096) throw Error("global address " + hex(address));
  if ((allowed.empty() && !strict) || (p >= meeting && p + bytes <= meeting + sizeof meeting)) return p;
  for (auto& [at, size] : allowed)
    if (p >= at && p + bytes <= at + size) return p;
  auto next = own.upper_bound(p);
  if (next != own.begin() && p + bytes <= std::prev(next)->first + std::prev(next)->second) return p;
  throw Error("global address " + hex(address) + " (" + std::to_string(bytes) + " bytes) is in no tensor");
}

inline char* Machine::local(Thread& t, uint64_t address, size_t bytes, size_t align) {
  const Frame& frame = t.frames.back();
  if (address >> 32) return generic(t, address, bytes, align);
  check_alignment(address, align, "local");
  if (address + bytes > frame.function->local_bytes)
    throw Error("local address " + hex(address) + " is outside of its frame");
  return frame.locals + address;
}

inline char* Machine::generic(Thread& t, uint64_t address, size_t bytes, size_t align) {
  char* p = reinterpret_cast<char*>(address);
  char* arena = t.block->cluster->arena;
  if (p >= arena && p < arena + kMostCluster * kWindow) return shared(*t.block, uint64_t(p - arena), bytes, align);
  for (Frame& frame : t.frames)
    if ((p >= frame.locals && p + bytes <= frame.locals + frame.function->local_bytes) ||
        (p >= frame.parameters && p + bytes <= frame.parameters + frame.function->parameter_bytes)) {
      check_alignment(address, align, "local");
      return p;
    }
  return global(address, bytes, align);
}

inline char* Machine::arena() {
  if (!arenas_.empty()) {
    char* a = arenas_.back();
    arenas_.pop_back();
    return a;
  }
  void* p =
      mmap(nullptr, kMostCluster * kWindow, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw Error("no room for shared memory");
  return static_cast<char*>(p);
}

// The asynchronous proxy (bulk copies, products of warp groups) sees plain stores only after a fence, by the writer or
// by the reader, between the two accesses.
inline void wrote(Thread& t, const char* p, size_t bytes) {
  Cluster& c = *t.block->cluster;
  if (p < c.arena || p >= c.arena + kMostCluster * kWindow) return;
  const size_t at = size_t(p - c.arena);
  if (at / kWindow != t.block->rank) return;  // another block's
  const uint64_t now = machine().executed;
  for (size_t k = (at % kWindow - kReserved) / 16; k <= (at % kWindow - kReserved + bytes - 1) / 16; ++k)
    t.block->written[k] = {t.index, now};
}
inline void must_be_fenced(const Block& b, uint64_t address, size_t bytes, uint64_t reader_fenced) {
  const size_t at = address % kWindow - kReserved;
  for (size_t k = at / 16; k <= (at + bytes - 1) / 16; ++k) {
    const Written& w = b.written[k];
    if (w.thread != kNone && std::max(reader_fenced, b.threads[w.thread].fenced) <= w.when)
      throw Error("shared memory at " + hex(address) + " is read asynchronously, and neither thread " +
                  std::to_string(w.thread) + " that wrote it nor the reader has fenced since (fence.proxy.async)");
  }
}
inline void overwritten(Block& b, uint64_t address, size_t bytes) {  // by the asynchronous proxy itself
  const size_t at = address % kWindow - kReserved;
  for (size_t k = at / 16; k <= (at + bytes - 1) / 16; ++k) b.written[k] = Written{};
}

// --- the beginning of blocks -----------------------------------------------------------------------------------------

inline uint64_t special_value(Special special, const Thread& t) {
  const Launch& l = *machine().launch;
  const Block& b = *t.block;
  const unsigned lane = t.index % kWarp, *c = l.cluster, axis = unsigned(special) % 3;
  const uint64_t meeting = l.together ? uint64_t(machine().meeting) : 0;  // the barrier of a cooperative launch
  switch (special) {
    case Special::tid_x ... Special::tid_z: return t.tid[axis];
    case Special::ntid_x ... Special::ntid_z: return l.block[axis];
    case Special::ctaid_x ... Special::ctaid_z: return b.at[axis];
    case Special::nctaid_x ... Special::nctaid_z: return l.grid[axis];
    case Special::clusterid_x ... Special::clusterid_z: return b.at[axis] / c[axis];
    case Special::nclusterid_x ... Special::nclusterid_z: return l.grid[axis] / c[axis];
    case Special::cluster_ctaid_x ... Special::cluster_ctaid_z: return b.at[axis] % c[axis];
    case Special::cluster_nctaid_x ... Special::cluster_nctaid_z: return c[axis];
    case Special::laneid: return lane;
    case Special::warpid: return t.index / kWarp;
    case Special::smid: return (b.at[0] + b.at[1] * l.grid[0]) % kProcessors;
    case Special::nsmid: return kProcessors;
    case Special::cluster_ctarank: return b.rank;
    case Special::cluster_nctarank: return c[0] * c[1] * c[2];
    case Special::dynamic_smem_size: return l.shared_bytes;
    case Special::total_smem_size: return machine().shared_total();
    case Special::lanemask_eq: return 1u << lane;
    case Special::lanemask_lt: return (1u << lane) - 1;
    case Special::lanemask_le: return (2u << lane) - 1;
    case Special::lanemask_gt: return uint32_t(~((2ull << lane) - 1));
    case Special::lanemask_ge: return uint32_t(~((1ull << lane) - 1));
    case Special::envreg1: return meeting >> 32;
    case Special::envreg2: return meeting & 0xffffffff;
    default: return 0;  // a clock, which has an instruction of its own
  }
}

inline void enter(Thread& t, const Function& f, const std::vector<char>& parameters) {
  Frame frame;
  frame.function = &f;
  frame.slots = f.initial;
  const size_t first = rounded(f.parameter_bytes, 128);
  frame.room = std::make_unique<char[]>(first + f.local_bytes + 256);
  frame.parameters = reinterpret_cast<char*>(rounded(size_t(frame.room.get()), 128));
  frame.locals = frame.parameters + first;
  memset(frame.locals, 0xff, f.local_bytes);
  if (!parameters.empty()) memcpy(frame.parameters, parameters.data(), std::min(parameters.size(), f.parameter_bytes));
  const uint64_t base = t.block->rank * kWindow + kReserved;
  const uint64_t starts[] = {0, base, uint64_t(frame.locals), uint64_t(frame.parameters)};  // by Space
  for (const Function::Place& p : f.places) frame.slots[p.slot] = starts[int(p.space)] + p.at;
  for (const auto& [slot, special] : f.specials) frame.slots[slot] = special_value(special, t);
  if (!t.frames.empty()) t.frames.back().pc = t.pc;
  t.frames.push_back(std::move(frame));
  t.slots = t.frames.back().slots.data(), t.pc = 0;
}

inline void leave(Thread& t) {
  t.frames.pop_back();
  t.slots = t.frames.back().slots.data(), t.pc = t.frames.back().pc;
}

inline std::unique_ptr<Cluster> Machine::make(uint64_t index) {
  const Launch& l = *launch;
  auto c = std::make_unique<Cluster>();
  unsigned many[3], size = 1;
  for (int d = 0; d < 3; ++d) many[d] = l.grid[d] / l.cluster[d], size *= l.cluster[d];
  c->at[0] = unsigned(index % many[0]), c->at[1] = unsigned(index / many[0] % many[1]),
  c->at[2] = unsigned(index / many[0] / many[1]);
  c->arena = arena();
  for (unsigned r = 0; r < size; ++r) {
    auto b = std::make_unique<Block>();
    const unsigned in[3] = {r % l.cluster[0], r / l.cluster[0] % l.cluster[1], r / l.cluster[0] / l.cluster[1]};
    for (int d = 0; d < 3; ++d) b->at[d] = c->at[d] * l.cluster[d] + in[d];
    b->rank = r, b->cluster = c.get();
    races.forget(c->arena + r * kWindow, kReserved + shared_total());
    memset(c->arena + r * kWindow + kReserved, 0xff, shared_total());
    b->written.assign(shared_total() / 16 + 2, Written{});
    const unsigned threads = l.block[0] * l.block[1] * l.block[2];
    b->threads.resize(threads), b->products.resize((threads + kGroup - 1) / kGroup);
    for (unsigned i = 0; i < threads; ++i) {
      Thread& t = b->threads[i];
      t.block = b.get(), t.index = i;
      t.number = uint32_t((b->at[0] + l.grid[0] * (b->at[1] + uint64_t(l.grid[1]) * b->at[2])) * threads + i);
      t.tid[0] = i % l.block[0], t.tid[1] = i / l.block[0] % l.block[1], t.tid[2] = i / l.block[0] / l.block[1];
      enter(t, *l.function, l.parameters);
    }
    c->blocks.push_back(std::move(b));
  }
  c->alive = size * l.block[0] * l.block[1] * l.block[2];
  return c;
}

// --- waiting ---------------------------------------------------------------------------------------------------------

// Threads of a block for which a barrier without a number waits.
inline unsigned alive(const Block& b) { return unsigned(b.threads.size()) - b.done; }

inline void pass(Block& b, unsigned id) {
  Barrier& bar = b.barriers[id];
  const Clocks met = std::move(bar.clocks);
  Barrier next;
  next.said_any = bar.any, next.said_all = bar.all, next.said_count = bar.count;
  bar = next;
  for (Thread& t : b.threads)
    if (t.state == State::at_barrier && t.lanes == id) {
      t.state = State::runs;
      machine().races.acquire(t.number, met);
    }
}

// The thread arrives at barrier `id` of `expected` threads (0: all). It continues when all have arrived.
inline void arrive(Thread& t, unsigned id, unsigned expected, bool waits) {
  Block& b = *t.block;
  if (id > 15) throw Error("barrier " + std::to_string(id));
  Barrier& bar = b.barriers[id];
  if (expected % kWarp) throw Error("a barrier of " + std::to_string(expected) + " threads");
  if (bar.arrived && bar.expected != expected)
    throw Error("barrier " + std::to_string(id) + " is asked for " + std::to_string(expected) +
                " threads, and before for " + std::to_string(bar.expected));
  bar.expected = expected, bar.arrived += 1;
  machine().races.release(t.number, bar.clocks);
  if (waits) t.state = State::at_barrier, t.lanes = id;
  if (bar.arrived >= (expected ? expected : alive(b))) pass(b, id);
}

inline void pass_cluster(Cluster& c) {
  c.arrived = 0;
  c.met = std::move(c.coming), c.coming.clear();
  for (auto& b : c.blocks)
    for (Thread& t : b->threads) {
      t.phase = false;
      if (t.state != State::at_cluster) continue;
      t.state = State::runs;
      machine().races.acquire(t.number, c.met);
    }
}

inline void end(Thread& t) {
  for (Begun* begun : {&t.copies, &t.bulk}) {  // work without a wait may still complete later
    begun->commit();
    for (auto& group : begun->groups)
      for (auto& one : group) machine().pending.push_back(std::move(one));
  }
  t.state = State::done;
  Block& b = *t.block;
  b.done += 1, b.cluster->alive -= 1;
  for (unsigned id = 0; id < 16; ++id)
    if (b.barriers[id].arrived && !b.barriers[id].expected && b.barriers[id].arrived >= alive(b)) pass(b, id);
  if (b.cluster->arrived && b.cluster->arrived >= b.cluster->alive) pass_cluster(*b.cluster);
}

inline Thread* lane(Thread& t, unsigned k) {
  const unsigned first = t.index / kWarp * kWarp;
  return first + k < t.block->threads.size() ? &t.block->threads[first + k] : nullptr;
}

// Returns true if the whole mask has arrived at this instruction: then all may continue, and the caller does the work
// for all. Otherwise the thread waits.
inline bool together(Thread& t, uint32_t mask) {
  if (!(mask >> t.index % kWarp & 1)) throw Error("the thread is not in its own mask " + hex(mask));
  t.lanes = mask, t.state = State::at_lanes;
  for (unsigned k = 0; k < kWarp; ++k) {
    if (!(mask >> k & 1)) continue;
    Thread* o = lane(t, k);
    if (!o || o->state == State::done) throw Error("lane " + std::to_string(k) + " is in the mask, and has ended");
    if (o->state != State::at_lanes || o->pc != t.pc || o->frames.size() != t.frames.size()) return false;
    if (o->lanes != mask) throw Error("lanes name the masks " + hex(mask) + " and " + hex(o->lanes));
  }
  for (unsigned k = 0; k < kWarp; ++k)
    if (mask >> k & 1) lane(t, k)->state = State::runs;
  return true;
}

// The same for the four warps of a group.
inline bool group_together(Thread& t) {
  Block& b = *t.block;
  const unsigned first = t.index / kGroup * kGroup;
  if (first + kGroup > b.threads.size()) throw Error("a warp group of less than four warps");
  t.state = State::at_group;
  for (unsigned k = first; k < first + kGroup; ++k)
    if (b.threads[k].state != State::at_group || b.threads[k].pc != t.pc) return false;
  for (unsigned k = first; k < first + kGroup; ++k) b.threads[k].state = State::runs;
  return true;
}

// --- the run ---------------------------------------------------------------------------------------------------------

inline void Machine::step(Thread& t) {
  t.stop = t.looks = false;
  for (uint64_t n = 0; n < kTurn && t.state == State::runs && !t.stop; ++n) {
    const Function& f = *t.frames.back().function;
    if (t.pc >= f.code.size()) throw Error("ran beyond the end of " + f.name);
    const Instruction& i = f.code[t.pc++];
    ++executed;
    if (i.orders && (sites.emplace(i.line, i.opcode), i.line == omitted)) continue;
    if (i.guard != kNone && bool(t.slots[i.guard] & 1) == i.guard_negated) continue;
    try {
      i.execute(t, i);
    } catch (const Error& e) {
      throw Error(std::string(e.what()) + "\n  at line " + std::to_string(i.line) + " of " + f.name.substr(0, 60) +
                  ": " + i.opcode + "\n  block (" + std::to_string(t.block->at[0]) + "," +
                  std::to_string(t.block->at[1]) + "," + std::to_string(t.block->at[2]) + "), thread " +
                  std::to_string(t.index));
    }
  }
}

// Run a turn of every thread of the cluster that can run; return false if none could.
inline bool Machine::turn(Cluster& c) {
  bool any = false;
  for (size_t k = 0; k < c.blocks.size(); ++k) {
    Block& b = *c.blocks[backwards ? c.blocks.size() - 1 - k : k];
    const size_t n = b.threads.size();
    for (size_t j = 0; j < n; ++j) {
      Thread& t = b.threads[backwards ? n - 1 - j : j];
      if (t.state != State::runs) continue;
      step(t);
      any = any || !t.looks;
    }
  }
  return any;
}

inline void Machine::run(const Launch& l) {
  launch = &l, waited = false;
  races.begin(size_t(l.grid[0]) * l.grid[1] * l.grid[2] * l.block[0] * l.block[1] * l.block[2]);
  memset(meeting, 0, sizeof meeting);
  pending.clear();
  for (auto& c : resident_) arenas_.push_back(c->arena);
  resident_.clear();
  uint64_t clusters = 1, next = 0;
  unsigned size = 1;
  for (int d = 0; d < 3; ++d) clusters *= l.grid[d] / l.cluster[d], size *= l.cluster[d];
  const uint64_t most = l.together ? clusters : std::max(1u, kResident / size);
  unsigned idle = 0;
  uint64_t rounds = 0;
  while (next < clusters || !resident_.empty()) {
    while (next < clusters && resident_.size() < most)
      resident_.push_back(make(backwards ? clusters - 1 - next : next)), ++next;
    bool any = false;
    for (size_t k = 0; k < resident_.size(); ++k)
      any = turn(*resident_[backwards ? resident_.size() - 1 - k : k]) || any;
    clock_ns += 100;
    for (size_t k = resident_.size(); k-- > 0;)
      if (resident_[k]->alive == 0) {
        while (!pending.empty()) pending.front()(), pending.pop_front();
        arenas_.push_back(resident_[k]->arena), resident_.erase(resident_.begin() + long(k)), any = true;
      }
    if (any && ++rounds % 1024) {
      idle = 0;
      continue;
    }
    if (!pending.empty()) {  // the latest moment: no thread can continue without it
      const size_t k = order == Order::mixed ? random() % pending.size() : 0;
      auto work = std::move(pending[k]);
      pending.erase(pending.begin() + long(k));
      work(), idle = 0;
      continue;
    }
    if (any) continue;
    const bool spins = where().find("runs") != std::string::npos;
    if (!spins || (++idle > 100000 && !strict)) throw Error("deadlock: " + where());  // a device spins on
  }
  if (l.dependent && !waited) throw Error("no thread of a dependent launch has waited for the kernels ahead");
}

inline std::string Machine::where() const {
  static const char* const names[] = {"runs",
                                      "at a barrier",
                                      "wait for their warp",
                                      "wait for their warp group",
                                      "wait for a phase",
                                      "wait for their cluster",
                                      "have ended"};
  std::string text;
  for (const auto& c : resident_)
    for (const auto& b : c->blocks) {
      std::map<std::string, unsigned> counts;
      for (const Thread& t : b->threads) {
        std::string at = names[int(t.state)];
        if (t.state != State::done && t.state != State::runs)
          at += " at line " + std::to_string(t.frames.back().function->code[t.pc - 1].line);
        counts[at] += 1;
      }
      text += "\n  block (" + std::to_string(b->at[0]) + "," + std::to_string(b->at[1]) + "," +
              std::to_string(b->at[2]) + "):";
      for (auto& [at, n] : counts) text += " " + std::to_string(n) + " " + at + ",";
      text.pop_back();
    }
  return text;
}

// A phase of the barrier at this shared address has ended.
inline void Machine::wake(Cluster& c, uint64_t address) {
  for (auto& b : c.blocks)
    for (Thread& t : b->threads)
      if (t.state == State::at_phase && t.phase_at == address) t.state = State::runs, --t.pc;  // looks again
}

}  // namespace ptx
