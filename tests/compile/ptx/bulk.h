// Barriers that count arrivals and bytes, and the copies that report to them: bulk copies, of tensors by their maps.
#pragma once
#include "matrix.h"

namespace ptx {

// --- mbarrier: missing arrivals, arrivals of a phase, bytes in flight, the phase's parity ----------------------------

struct Phases {
  uint64_t bits;
  unsigned left() const { return bits & 0xfffff; }
  unsigned expected() const { return bits >> 20 & 0xfffff; }
  int64_t bytes() const { return int64_t(bits << 2) >> 42; }  // of 22 bits, signed
  bool parity() const { return bits >> 62 & 1; }
  static uint64_t made(uint64_t left, uint64_t expected, int64_t bytes, bool parity) {
    return left | expected << 20 | (uint64_t(bytes) & 0x3fffff) << 40 | uint64_t(parity) << 62;
  }
};

inline Phases phases_at(Block& b, uint64_t address) {
  Phases p;
  memcpy(&p.bits, machine().shared(b, address, 8, 8), 8);
  if (p.bits >> 63 || p.expected() == 0) throw Error("no mbarrier at " + hex(address));
  return p;
}
inline Races::Phase& clocks_at(Block& b, uint64_t address) {
  return machine().races.phase(uint64_t(machine().shared(b, address, 8, 8)));
}

// Subtracts `arrivals` from the missing ones, adds `bytes` in flight; `from`: the arriving thread, if any.
inline void advance(Block& b, uint64_t address, unsigned arrivals, int64_t bytes, const Thread* from) {
  const Phases p = phases_at(b, address);
  if (arrivals > p.left())
    throw Error("more arrivals at mbarrier " + hex(address) + " than its phase has: " + std::to_string(p.expected()));
  unsigned left = p.left() - arrivals;
  const int64_t under_way = p.bytes() + bytes;
  const bool over = left == 0 && under_way == 0;
  const uint64_t made = Phases::made(over ? p.expected() : left, p.expected(), under_way, p.parity() != over);
  memcpy(machine().shared(b, address, 8, 8), &made, 8);
  Races::Phase& clocks = clocks_at(b, address);
  if (arrivals && from) machine().races.release(from->number, clocks.now);
  if (!over) return;
  clocks.over = std::move(clocks.now), clocks.now.clear();
  machine().wake(*b.cluster, address & 0xffffffff);
}

inline void mbarrier_init(Thread& t, const Instruction& i) {
  const uint64_t count = get<uint32_t>(t, i, 1);
  if (count == 0 || count >= 1 << 20) throw Error("an mbarrier for " + std::to_string(count) + " arrivals");
  const uint64_t made = Phases::made(count, count, 0, false);
  memcpy(machine().shared(*t.block, word(t, i.operands[0]), 8, 8), &made, 8);
}
inline void mbarrier_end(Thread& t, const Instruction& i) {
  memset(machine().shared(*t.block, word(t, i.operands[0]), 8, 8), 0xff, 8);
}
// arrive[.expect_tx] state, [address][, count or bytes]; expect_tx, complete_tx [address], bytes
inline void mbarrier_count(Thread& t, const Instruction& i) {
  const bool arrives = i.words[1] == "arrive" || i.words[1] == "arrive_drop", expects = i.has("expect_tx"),
             completes = i.has("complete_tx");
  const size_t at = arrives ? (i.operands[0].address ? 0 : 1) : 0;
  const uint64_t address = word(t, i.operands[at]);
  const uint32_t n = i.operands.size() > at + 1 ? get<uint32_t>(t, i, at + 1) : 1;
  Block& owner = *t.block;
  if (at == 1 && i.operands[0].slot != kNone) put<uint64_t>(t, i.operands[0], phases_at(owner, address).parity());
  advance(owner, address, arrives ? (expects ? 1 : n) : 0, expects ? int64_t(n) : completes ? -int64_t(n) : 0, &t);
}
// try_wait, test_wait[.parity] p, [address], phase[, time]
inline void mbarrier_wait(Thread& t, const Instruction& i) {
  const uint64_t address = word(t, i.operands[1]);
  const bool waits_for = t.slots[i.operands[2].slot] & 1, over = phases_at(*t.block, address).parity() != waits_for;
  if (!over && i.words[1] == "try_wait") {
    t.state = State::at_phase, t.phase_at = address & 0xffffffff;
    return;
  }
  if (over) machine().races.acquire(t.number, clocks_at(*t.block, address).over);
  t.stop = t.looks = !over;
  put<uint64_t>(t, i.operands[0], over);
}
// cp.async.mbarrier.arrive[.noinc] [address]: arrives when this thread's earlier copies are complete
inline void copies_arrive(Thread& t, const Instruction& i) {
  const uint64_t address = word(t, i.operands[0]);
  Block& b = *t.block;
  if (!i.has("noinc")) {
    const Phases p = phases_at(b, address);
    const uint64_t made = Phases::made(p.left() + 1, p.expected(), p.bytes(), p.parity());
    memcpy(machine().shared(b, address, 8, 8), &made, 8);
  }
  auto works = std::make_shared<Begun>(std::move(t.copies));
  t.copies = Begun{};
  machine().begin([works, &b, &t, address] { works->commit(), works->leave(0), advance(b, address, 1, 0, &t); });
}

// --- tensors ---------------------------------------------------------------------------------------------------------

// The contents of the 128 bytes of our driver's cuTensorMapEncodeTiled, in our own order.
struct TensorMap {
  uint64_t mark, base;
  uint64_t strides[4];  // bytes, from the second dimension on
  uint32_t sizes[5];
  uint16_t box[5];
  uint8_t rank, element, swizzle, fills_nan;  // swizzle: bytes, 0 for none
};
static_assert(sizeof(TensorMap) <= 128);
constexpr uint64_t kMark = 0x6175746f73656c31;

inline TensorMap map_at(Thread& t, uint64_t address) {
  TensorMap m;
  memcpy(&m, machine().generic(t, address, 128, 64), sizeof m);
  if (m.mark != kMark) throw Error("no tensor map at " + hex(address));
  return m;
}

// Calls work(shared address, global pointer or null, bytes) for each 16 bytes of the box.
template <class F>
void each_part(const TensorMap& m, const std::vector<int64_t>& at, uint64_t shared, F&& work) {
  uint64_t parts = 1;
  const uint64_t row = uint64_t(m.box[0]) * m.element;
  for (unsigned d = 1; d < m.rank; ++d) parts *= m.box[d];
  for (uint64_t n = 0; n < parts; ++n) {
    uint64_t rest = n, from = m.base;
    bool inside = true;
    for (unsigned d = 1; d < m.rank; ++d) {
      const int64_t k = at[d] + int64_t(rest % m.box[d]);
      rest /= m.box[d];
      inside = inside && k >= 0 && k < int64_t(m.sizes[d]);
      from += uint64_t(k) * m.strides[d - 1];
    }
    for (uint64_t byte = 0; byte < row; byte += m.element) {
      const int64_t k = at[0] + int64_t(byte / m.element);
      const bool in = inside && k >= 0 && k < int64_t(m.sizes[0]);
      uint64_t to = shared + n * row + byte;
      if (m.swizzle) to ^= (to >> 7 & (m.swizzle / 16u - 1)) << 4;
      work(to, in ? reinterpret_cast<char*>(from + uint64_t(k) * m.element) : nullptr, size_t(m.element));
    }
  }
}

inline std::vector<int64_t> coordinates(Thread& t, const Operand& o, const TensorMap& m) {
  std::vector<int64_t> at;
  for (uint32_t s : o.inner.at(0).many) at.push_back(as<int32_t>(t.slots[s]));
  if (at.size() != m.rank)
    throw Error("a map of rank " + std::to_string(m.rank) + " with " + std::to_string(at.size()) + " coordinates");
  return at;
}

// cp.async.bulk.tensor.Nd.shared::cluster.global...[.multicast::cluster] [to], [map, {at}], [mbarrier][, blocks][,
// hint]
inline void load_tensor(Thread& t, const Instruction& i) {
  const TensorMap m = map_at(t, word(t, i.operands[1]));
  const std::vector<int64_t> at = coordinates(t, i.operands[1], m);
  const uint64_t to = word(t, i.operands[0]) & 0xffffffff, barrier = word(t, i.operands[2]) & 0xffffffff;
  check_alignment(to, 128, "shared");
  uint32_t blocks = 1u << to / kWindow;
  const bool many = i.has("multicast::cluster");
  if (many) blocks = get<uint16_t>(t, i, 3);
  Cluster& c = *t.block->cluster;
  Races& races = machine().races;
  if (races.on())
    for (unsigned r = 0; r < c.blocks.size(); ++r)
      if (blocks >> r & 1)
        each_part(m, at, r * kWindow + to % kWindow, [&](uint64_t shared, const char*, size_t n) {
          races.begin_write(t.number, machine().shared(*c.blocks[r], shared, n, 1), n, i.line);
        });
  auto work = [m, at, to, barrier, blocks, many, &c, &races, &i] {
    uint64_t bytes = m.element;
    for (unsigned d = 0; d < m.rank; ++d) bytes *= m.box[d];
    for (unsigned r = 0; r < c.blocks.size(); ++r) {
      if (!(blocks >> r & 1)) continue;
      Block& b = *c.blocks[r];
      const uint64_t window = r * kWindow, there = window + to % kWindow;
      const uint64_t reports = many ? window + barrier % kWindow : barrier;
      each_part(m, at, there, [&](uint64_t shared, const char* global, size_t n) {
        char* p = machine().shared(b, shared, n, 1);
        if (global)
          memcpy(p, machine().global(uint64_t(global), n, 1), n);
        else
          memset(p, m.fills_nan ? 0xff : 0, n);
        races.end_copy(p, n, i.line, clocks_at(b, reports).now);
      });
      overwritten(b, there, bytes);
      advance(b, reports, 0, -int64_t(bytes), nullptr);
    }
  };
  machine().begin(work);
}

// cp.async.bulk.tensor.Nd.global.shared::cta.bulk_group [map, {at}], [from]
inline void store_tensor(Thread& t, const Instruction& i) {
  const TensorMap m = map_at(t, word(t, i.operands[0]));
  const std::vector<int64_t> at = coordinates(t, i.operands[0], m);
  const uint64_t from = word(t, i.operands[1]) & 0xffffffff;
  check_alignment(from, 128, "shared");
  Block& b = *t.block;
  each_part(m, at, from, [&](uint64_t shared, const char*, size_t n) { must_be_fenced(b, shared, n, t.fenced); });
  auto ends = [m, at, from, &b, &t, &i] {  // it may not be overwritten until it has been read
    if (machine().races.on())
      each_part(m, at, from, [&](uint64_t shared, const char*, size_t n) {
        machine().races.read(t.number, machine().shared(b, shared, n, 1), n, i.line);
      });
  };
  ends();
  auto work = [m, at, from, &b] {
    each_part(m, at, from, [&](uint64_t shared, char* global, size_t n) {
      if (global) memcpy(machine().global(uint64_t(global), n, 1), machine().shared(b, shared, n, 1), n);
    });
  };
  t.bulk.add(machine().delays(), work, ends);
}

// cp.async.bulk.shared::cluster.global... [to], [from], bytes, [mbarrier]; ....global.shared::cta.bulk_group [to],
// [from], bytes
inline void copy_bulk(Thread& t, const Instruction& i) {
  const bool loads = i.words[3] != "global";
  const uint64_t to = word(t, i.operands[0]), from = word(t, i.operands[1]);
  const uint32_t size = get<uint32_t>(t, i, 2);
  if (size % 16) throw Error("a bulk copy of " + std::to_string(size) + " bytes");
  check_alignment(to, 16, "target"), check_alignment(from, 16, "source");
  Block& b = *t.block;
  if (!loads) must_be_fenced(b, from, size, t.fenced);
  const uint64_t barrier = loads ? word(t, i.operands[3]) : 0;
  Races& races = machine().races;
  auto ends = [=, &b, &t, &i, &races] { races.read(t.number, machine().shared(b, from, size, 16), size, i.line); };
  if (loads)
    races.begin_write(t.number, machine().shared(b, to, size, 16), size, i.line);
  else
    ends();
  auto work = [=, &b, &i, &races] {
    if (loads) {
      char* p = machine().shared(b, to, size, 16);
      memcpy(p, machine().global(from, size, 16), size);
      overwritten(b, to, size);
      races.end_copy(p, size, i.line, clocks_at(b, barrier).now);
      advance(b, barrier, 0, -int64_t(size), nullptr);
    } else {
      memcpy(machine().global(to, size, 16), machine().shared(b, from, size, 16), size);
    }
  };
  if (loads)
    machine().begin(work);
  else
    t.bulk.add(machine().delays(), work, ends);
}

inline void bulk_commit(Thread& t, const Instruction&) { t.bulk.commit(); }
inline void bulk_wait(Thread& t, const Instruction& i) { t.bulk.leave(size_t(t.slots[i.operands[0].slot])); }
inline void fence(Thread& t, const Instruction& i) {
  if (i.has("proxy")) t.fenced = machine().executed;
  if (i.has("acq_rel") || i.has("sc") || i.words[0] == "membar") machine().races.fence(t.number);
}

// barrier.cluster.arrive, barrier.cluster.wait: all threads of the cluster that have not ended
inline void cluster_barrier(Thread& t, const Instruction& i) {
  Cluster& c = *t.block->cluster;
  if (i.words[2] == "arrive") {
    c.arrived += 1;
    t.phase = true;  // has arrived, not yet waited
    machine().races.release(t.number, c.coming);
    if (c.arrived >= c.alive) pass_cluster(c);
    return;
  }
  if (t.phase)
    t.state = State::at_cluster;
  else  // all have arrived
    machine().races.acquire(t.number, c.met);
}

}  // namespace ptx
