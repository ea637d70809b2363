// A GPU's execution model on one CPU thread, so that a .cu file compiled by g++ runs here as it is written.
//
// Force-included ahead of the file (g++ -x c++ -include simt.h). Blocks run in turn, or, of a cooperative launch, all at
// once; a block's threads are fibers, which change places at barriers, shuffles, votes and rests only. What it checks
// beside the results: shared memory beyond the bytes asked for ends the process (guard pages), and what no thread has
// written is NaN; a barrier or shuffle that not all reach is an error that names who waits where; launches that no device
// would accept are refused. Every other launch runs blocks and threads in reverse, so that a missing barrier shows in one
// order if not in the other. Between simt_hold and simt_release launches are kept back and then run as early as a device
// may: blocks of a programmatic dependent launch before the kernels ahead have done anything, up to where they wait; all
// of its threads must wait. A thread that counts its block in (atomicInc) must fence between the barrier and the count,
// and the last one again before the next barrier.
// It cannot show: speed, races between blocks that run at once, the memory model beyond these fences, alignment faults of
// plain accesses.
#pragma once
#define AUTOSEL_EMULATED 1

// CUDA's headers and the library's come first: they must not see the names redefined below.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

namespace simt {

constexpr unsigned kWarp = 32, kMostThreads = 1024;
constexpr unsigned kMultiprocessors = 2, kResidentBlocks = 2;  // of the device that is played: blocks a multiprocessor
constexpr unsigned kMostTogether = kMultiprocessors * kResidentBlocks;
constexpr size_t kStack = 128 << 10, kMostShared = 227 << 10, kSharedUnasked = 48 << 10;  // sm_90's limits

#if defined(__x86_64__)
// Saves the callee-saved registers and the stack of the caller, and goes on where `to` was left. (swapcontext would ask
// the operating system for the signal mask each time: 100 times slower.)
extern "C" void simt_switch(void** from, void* to);
asm(R"(
.text
.weak simt_switch
.type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, .-simt_switch
)");
struct Context { void* sp = nullptr; };
inline void change(Context& from, Context& to) { simt_switch(&from.sp, to.sp); }
inline void prepare(Context& c, char* stack, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t*>((reinterpret_cast<uintptr_t>(stack) + kStack) & ~uintptr_t(15));
  *--top = 0;  // where a return address would be: aligns the stack as a call does
  *--top = reinterpret_cast<uintptr_t>(entry);
  for (int i = 0; i < 6; ++i) *--top = 0;
  c.sp = top;
}
#else
struct Context { ucontext_t at; };
inline void change(Context& from, Context& to) { swapcontext(&from.at, &to.at); }
inline void prepare(Context& c, char* stack, void (*entry)()) {
  getcontext(&c.at);
  c.at.uc_stack.ss_sp = stack, c.at.uc_stack.ss_size = kStack, c.at.uc_link = nullptr;
  makecontext(&c.at, entry, 0);
}
#endif

enum class State { runs, at_barrier, at_warp, at_producers, done };

struct Fiber {
  Context context;
  State state;
  uint3 thread;
  uint64_t exchanges;  // warp operations so far
  unsigned block;      // of those that run
  bool waited;         // for the kernels ahead
  bool fenced;         // since the last barrier
  bool counted;        // its block in as the last one, and has not fenced since
};

// One of the blocks that run.
struct Block {
  uint3 at{};
  unsigned waiting = 0, done = 0;
  char* shared = nullptr;
};

// What the lanes of a warp lay out for each other. Two, in turns: a lane may be one operation ahead of another.
struct Exchange {
  uint32_t arrived = 0;
  uint64_t values[kWarp][4];
  const char* what = "";
};

struct Machine {
  dim3 grid, block;
  std::vector<Block> blocks;
  std::vector<Fiber> fibers;        // [block][thread]
  std::vector<Exchange> exchanges;  // [warp][2]
  unsigned now = 0;
  int direction = 1;
  Context home;
  char *stacks = nullptr, *shared_ends[kMostTogether] = {};
  size_t shared_bytes = 0;
  unsigned long long clock_ns = 0;  // moves while a thread rests
  std::function<void()> body;
  std::string failed;
  bool dependent = false, early = false;  // a programmatic dependent launch; it runs before the kernels ahead
};

// A launch as it was asked for.
struct Launch {
  dim3 grid, block;
  size_t shared_bytes;
  bool together, dependent;
  std::function<void()> body;
};

// What outlasts a launch. Static: each library its own.
struct Device {
  std::vector<std::unique_ptr<Machine>> machines;  // one, and one more a launch that waits for it
  Machine* current = nullptr;
  bool reverse = false, holds = false;
  std::vector<Launch> held;
  std::string failed;
  std::map<const void*, size_t> permitted;
};

static inline Device& device() {
  static Device d;
  return d;
}

inline Machine& machine() { return *device().current; }

inline Fiber& self() { return machine().fibers[machine().now]; }
inline Block& own() { return machine().blocks[self().block]; }
inline unsigned threads_of_block() { return machine().block.x * machine().block.y * machine().block.z; }

// Gives way to the next thread that can run; returns when this one can again.
inline void give_way() {
  Machine& m = machine();
  const unsigned n = unsigned(m.fibers.size()), from = m.now;
  for (unsigned i = 1; i <= n; ++i) {
    unsigned next = m.direction > 0 ? (from + i) % n : (from + n - i) % n;
    if (m.fibers[next].state != State::runs) continue;
    if (next == from) return;
    m.now = next;
    change(m.fibers[from].context, m.fibers[next].context);
    return;
  }
  change(m.fibers[from].context, m.home);  // nobody can run: all done, or a deadlock; the launch finds out which
}

// All of a block's threads have come to a barrier, or ended: exited threads count as arrived, as on a device.
inline void pass(unsigned block) {
  Machine& m = machine();
  Block& b = m.blocks[block];
  b.waiting = 0;
  for (unsigned i = 0; i < threads_of_block(); ++i) {
    Fiber& f = m.fibers[block * threads_of_block() + i];
    if (f.state == State::at_barrier) f.state = State::runs;
  }
}

inline void fiber_main() {
  machine().body();
  if (machine().dependent && !self().waited)
    machine().failed = "a thread of a dependent launch has ended without waiting for the kernels ahead";
  Block& b = own();
  self().state = State::done;
  b.done += 1;
  if (b.waiting && b.waiting + b.done == threads_of_block()) pass(self().block);
  give_way();
  std::abort();
}

inline void barrier() {
  if (self().counted) machine().failed = "the thread that counted its block in as the last one has not fenced since";
  self().fenced = false;
  Block& b = own();
  b.waiting += 1;
  if (b.waiting + b.done < threads_of_block()) {
    self().state = State::at_barrier;
    give_way();
    return;
  }
  pass(self().block);
}

// Until the kernels ahead have ended.
inline void wait_for_producers() {
  self().waited = true;
  if (!machine().early) return;
  self().state = State::at_producers;
  give_way();
}

inline void fence() { self().fenced = true, self().counted = false; }

inline unsigned count_in(unsigned* at, unsigned most) {
  if (!self().fenced) machine().failed = "a thread counts its block in without a fence since the barrier";
  const unsigned old = *at;
  *at = old >= most ? 0 : old + 1;
  self().counted = old >= most;
  return old;
}

inline unsigned long long clock_ns() { return machine().clock_ns; }

// Between two looks at what another block is to write.
inline void rest() {
  machine().clock_ns += 100;
  give_way();
}

// Lays out four words, waits for the other lanes, and returns all that were laid out. The whole warp must take part.
inline const Exchange& exchange(const char* what, const uint64_t (&mine)[4]) {
  Machine& m = machine();
  const unsigned warp = m.now / kWarp, lane = m.now % kWarp;
  Exchange& e = m.exchanges[2 * warp + self().exchanges++ % 2];
  if (e.arrived && e.what != what && strcmp(e.what, what) != 0)
    m.failed = std::string("lanes of a warp meet at different operations: ") + e.what + " and " + what;
  e.what = what;
  memcpy(e.values[lane], mine, sizeof mine);
  e.arrived |= 1u << lane;
  if (e.arrived != 0xffffffffu) {
    self().state = State::at_warp;
    give_way();
  } else {
    e.arrived = 0;
    for (unsigned i = 0; i < kWarp; ++i) {
      Fiber& f = m.fibers[warp * kWarp + i];
      if (f.state == State::at_warp) f.state = State::runs;
    }
  }
  return e;
}

inline void whole_warp(unsigned mask) {
  if (mask != 0xffffffffu) machine().failed = "a warp operation of less than the whole warp";
}

template <class T> uint64_t pack(T v) {
  static_assert(sizeof(T) <= 8, "a shuffle moves up to 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &v, sizeof v);
  return bits;
}
template <class T> T unpack(uint64_t bits) {
  T v;
  memcpy(&v, &bits, sizeof v);
  return v;
}

template <class T> T shuffle(unsigned mask, T v, unsigned from) {
  whole_warp(mask);
  const uint64_t mine[4] = {pack(v)};
  return unpack<T>(exchange("shuffle", mine).values[from % kWarp][0]);
}

inline uint32_t vote(unsigned mask, bool yes) {
  whole_warp(mask);
  const uint64_t mine[4] = {yes};
  const Exchange& e = exchange("vote", mine);
  uint32_t bits = 0;
  for (unsigned i = 0; i < kWarp; ++i) bits |= uint32_t(e.values[i][0] != 0) << i;
  return bits;
}

// --- launching -----------------------------------------------------------------------------------------------------------

inline std::string where() {
  Machine& m = machine();
  std::string text;
  for (unsigned i = 0; i < m.blocks.size(); ++i) {
    const Block& b = m.blocks[i];
    unsigned warps = 0, barriers = 0;
    for (Fiber& f : m.fibers)
      if (f.block == i) barriers += f.state == State::at_barrier, warps += f.state == State::at_warp;
    if (b.done == threads_of_block()) continue;
    text += "block (" + std::to_string(b.at.x) + "," + std::to_string(b.at.y) + "," + std::to_string(b.at.z) + "): " +
            std::to_string(b.done) + " threads have ended, " + std::to_string(barriers) + " wait at a barrier, " +
            std::to_string(warps) + " for their warp";
  }
  return text;
}

// Shared memory lies against a page that may not be touched, on both sides; bytes are rounded up to 16.
inline char* give_shared(unsigned block, size_t bytes) {
  Machine& m = machine();
  if (!m.shared_ends[block]) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE)), room = (kMostShared + page - 1) / page * page;
    char* at = static_cast<char*>(mmap(nullptr, room + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(at + page, room, PROT_READ | PROT_WRITE);
    m.shared_ends[block] = at + page + room;
  }
  m.shared_bytes = (bytes + 127) / 128 * 128;
  return m.shared_ends[block] - m.shared_bytes;
}

// The blocks [first, first + count) of the launch are next, all at once.
inline void begin_blocks(uint64_t first, unsigned count, size_t shared_bytes) {
  Machine& m = machine();
  const unsigned threads = threads_of_block();
  m.blocks.assign(count, Block()), m.fibers.resize(count * threads), m.exchanges.assign(2 * count * threads / kWarp, Exchange());
  for (unsigned b = 0; b < count; ++b) {
    const uint64_t at = first + b;
    m.blocks[b].at = uint3{unsigned(at % m.grid.x), unsigned(at / m.grid.x % m.grid.y), unsigned(at / m.grid.x / m.grid.y)};
    m.blocks[b].shared = give_shared(b, shared_bytes);
    memset(m.blocks[b].shared, 0xff, m.shared_bytes);  // NaN in every floating-point type
    for (unsigned i = 0; i < threads; ++i) {
      Fiber& f = m.fibers[b * threads + i];
      f.thread = uint3{i % m.block.x, i / m.block.x % m.block.y, i / m.block.x / m.block.y};
      f.state = State::runs, f.exchanges = 0, f.block = b;
      f.waited = f.fenced = f.counted = false;
      prepare(f.context, m.stacks + (b * threads + i) * kStack, fiber_main);
    }
  }
}

// Runs what was begun, until nobody can run.
inline void go() {
  Machine& m = machine();
  const unsigned n = unsigned(m.fibers.size());
  for (unsigned i = 0; i < n; ++i) {
    m.now = m.direction > 0 ? i : n - 1 - i;
    if (m.fibers[m.now].state != State::runs) continue;
    change(m.home, m.fibers[m.now].context);
    return;
  }
}

// The blocks that were begun, to their end.
inline void finish_blocks() {
  Machine& m = machine();
  for (Fiber& f : m.fibers)
    if (f.state == State::at_producers) f.state = State::runs;
  go();
  for (const Block& b : m.blocks)
    if (b.done != threads_of_block() && m.failed.empty()) m.failed = "deadlock in " + where();
}

inline void run_blocks(uint64_t first, unsigned count, size_t shared_bytes) {
  begin_blocks(first, count, shared_bytes);
  finish_blocks();
}

// The machine of the launch that is `ahead` places from being the next, at its beginning.
inline void take_machine(size_t ahead, const Launch& l) {
  Device& d = device();
  while (d.machines.size() <= ahead) d.machines.push_back(std::make_unique<Machine>());
  Machine& m = *d.machines[ahead];
  d.current = &m;
  if (!m.stacks)
    m.stacks = static_cast<char*>(mmap(nullptr, kMostTogether * kMostThreads * kStack, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  m.grid = l.grid, m.block = l.block, m.body = l.body, m.failed.clear();
  m.dependent = l.dependent, m.early = false;
  m.direction = d.reverse ? -1 : 1, d.reverse = !d.reverse;
}

inline uint64_t blocks_of(const Launch& l) { return uint64_t(l.grid.x) * l.grid.y * l.grid.z; }
inline unsigned early_blocks(const Launch& l) { return unsigned(std::min<uint64_t>(blocks_of(l), kMostTogether)); }

// As many blocks as are resident at once, up to where they wait.
inline void start_early(const Launch& l) {
  Machine& m = machine();
  m.early = true;
  begin_blocks(m.direction > 0 ? 0 : blocks_of(l) - early_blocks(l), early_blocks(l), l.shared_bytes);
  go();
}

// The whole launch, or what is left of one that started early.
inline void finish(const Launch& l) {
  Machine& m = machine();
  const uint64_t blocks = blocks_of(l), begun = m.early ? early_blocks(l) : 0;
  if (m.early) finish_blocks();
  m.early = false;
  if (l.together) return run_blocks(0, unsigned(blocks), l.shared_bytes);
  for (uint64_t i = begun; i < blocks && m.failed.empty(); ++i)
    run_blocks(m.direction > 0 ? i : blocks - 1 - i, 1, l.shared_bytes);
}

// Launches in order, and of those that may the first blocks before the launch ahead, and so before all that wait for it.
inline void run_in_order(const std::vector<Launch>& all) {
  Device& d = device();
  d.failed.clear();
  for (size_t first = 0, end; first < all.size() && d.failed.empty(); first = end) {
    for (end = first + 1; end < all.size() && all[end].dependent;) ++end;
    for (size_t i = end; i-- > first;) {
      take_machine(i - first, all[i]);
      if (i > first) start_early(all[i]);
    }
    for (size_t i = first; i < end && d.failed.empty(); ++i) {
      d.current = d.machines[i - first].get();
      if (machine().failed.empty()) finish(all[i]);
      d.failed = machine().failed;
    }
  }
  if (!d.failed.empty()) fprintf(stderr, "simt: %s\n", d.failed.c_str());
}

inline bool has(const cudaLaunchConfig_t& c, cudaLaunchAttributeID id) {
  for (unsigned i = 0; i < c.numAttrs; ++i)
    if (c.attrs[i].id == id) return true;  // none of them is ever set to 0
  return false;
}

inline cudaError_t run(const cudaLaunchConfig_t& c, const void* kernel, std::function<void()> body) {
  Device& d = device();
  const dim3 g = c.gridDim, b = c.blockDim;
  const unsigned threads = b.x * b.y * b.z;
  if (threads == 0 || threads > kMostThreads || threads % kWarp || g.x == 0 || g.y == 0 || g.z == 0 || g.y > 65535 ||
      g.z > 65535 || g.x > 0x7fffffffu)
    return cudaErrorInvalidConfiguration;
  const size_t permitted = d.permitted.count(kernel) ? d.permitted[kernel] : kSharedUnasked;
  if (c.dynamicSmemBytes > permitted || c.dynamicSmemBytes > kMostShared) return cudaErrorInvalidValue;
  const Launch asked{g, b, c.dynamicSmemBytes, has(c, cudaLaunchAttributeCooperative),
                     has(c, cudaLaunchAttributeProgrammaticStreamSerialization), std::move(body)};
  if (asked.together && blocks_of(asked) > kMostTogether) return cudaErrorCooperativeLaunchTooLarge;
  if (d.holds) return d.held.push_back(asked), cudaSuccess;
  run_in_order({asked});
  return d.failed.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace simt

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* c, void (*kernel)(Params...), Args&&... args) {
  return [&](Params... held) {
    return simt::run(*c, reinterpret_cast<const void*>(kernel), [kernel, held...] { kernel(held...); });
  }(std::forward<Args>(args)...);
}

// --- the parts of the runtime that kernels' hosts use --------------------------------------------------------------------

extern "C" {
inline const char* simt_error(cudaError_t e) {
  const std::string& failed = simt::device().failed;
  if (e == cudaErrorLaunchFailure && !failed.empty()) return failed.c_str();
  return e == cudaErrorInvalidConfiguration ? "invalid configuration" : e == cudaErrorInvalidValue ? "invalid value" : "failed";
}
}
// Launches are kept back from simt_hold on, and run by simt_release, which says what went wrong ("": nothing).
extern "C" {
__attribute__((visibility("default"), weak)) void simt_hold() { simt::device().holds = true; }
__attribute__((visibility("default"), weak)) const char* simt_release() {
  simt::Device& d = simt::device();
  d.holds = false;
  simt::run_in_order(std::exchange(d.held, {}));
  return d.failed.c_str();
}
}
#define cudaGetErrorString simt_error
#define cudaGetDevice(device) (*(device) = 0, cudaSuccess)
#define cudaSetDevice(device) ((void)(device), cudaSuccess)
#define cudaGetLastError() cudaSuccess
inline int simt_attribute(cudaDeviceAttr a) {
  if (a == cudaDevAttrComputeCapabilityMajor) return 9;
  if (a == cudaDevAttrMultiProcessorCount) return int(simt::kMultiprocessors);
  return a == cudaDevAttrCooperativeLaunch ? 1 : int(simt::kMostShared);
}
#define cudaDeviceGetAttribute(value, attribute, device) (*(value) = simt_attribute(attribute), (void)(device), cudaSuccess)
#define cudaOccupancyMaxActiveBlocksPerMultiprocessor(count, kernel, threads, bytes) \
  (*(count) = int(simt::kResidentBlocks), (void)(kernel), (void)(threads), (void)(bytes), cudaSuccess)
#define cudaStreamGetCaptureInfo(stream, status, id) (*(status) = cudaStreamCaptureStatusNone, *(id) = 0, cudaSuccess)
#define cudaThreadExchangeStreamCaptureMode(mode) ((void)(mode), cudaSuccess)
inline cudaError_t simt_malloc(void** p, size_t bytes) {
  *p = aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*p) memset(*p, 0xff, bytes);
  return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
#define cudaMalloc(p, bytes) simt_malloc(reinterpret_cast<void**>(p), bytes)
#define cudaMemsetAsync(p, value, bytes, stream) (memset(p, value, bytes), (void)(stream), cudaSuccess)
#define cudaStreamCreateWithFlags(stream, flags) (*(stream) = nullptr, cudaSuccess)
#define cudaStreamSynchronize(stream) ((void)(stream), cudaSuccess)
#define cudaStreamDestroy(stream) ((void)(stream), cudaSuccess)
#define cudaFuncSetAttribute(kernel, attribute, bytes) (simt::device().permitted[kernel] = size_t(bytes), cudaSuccess)
#define TVMFFIEnvGetStream(type, device) nullptr

// --- the language ----------------------------------------------------------------------------------------------------------

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __align__
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

// Objects, not macros: a launch's configuration has members of these names.
#define SIMT_INDEX(name, of)                                                 \
  inline const struct {                                                      \
    struct { operator unsigned() const { return (of).x; } } x;               \
    struct { operator unsigned() const { return (of).y; } } y;               \
    struct { operator unsigned() const { return (of).z; } } z;               \
  } name{};
SIMT_INDEX(threadIdx, simt::self().thread)
SIMT_INDEX(blockIdx, simt::own().at)
SIMT_INDEX(blockDim, simt::machine().block)
SIMT_INDEX(gridDim, simt::machine().grid)
#undef SIMT_INDEX

namespace autosel {
inline char* shared_memory() { return simt::own().shared; }
}  // namespace autosel

inline void __syncthreads() { simt::barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { simt::vote(mask, true); }
inline void __threadfence() { simt::fence(); }
template <class T> T __shfl_sync(unsigned mask, T v, int from) { return simt::shuffle(mask, v, unsigned(from)); }
template <class T> T __shfl_xor_sync(unsigned mask, T v, int with) {
  return simt::shuffle(mask, v, (simt::machine().now % simt::kWarp) ^ unsigned(with));
}
template <class T> T __shfl_up_sync(unsigned mask, T v, unsigned by) {
  const unsigned lane = simt::machine().now % simt::kWarp;
  return simt::shuffle(mask, v, lane >= by ? lane - by : lane);
}
inline unsigned __ballot_sync(unsigned mask, int yes) { return simt::vote(mask, yes != 0); }
inline int __any_sync(unsigned mask, int yes) { return simt::vote(mask, yes != 0) != 0; }

template <class T> T atomicAdd(T* at, std::type_identity_t<T> v) { T old = *at; *at = T(old + v); return old; }
template <class T> T atomicOr(T* at, std::type_identity_t<T> v) { T old = *at; *at = T(old | v); return old; }
template <class T> T atomicMax(T* at, std::type_identity_t<T> v) { T old = *at; if (v > old) *at = v; return old; }
template <class T> T atomicMin(T* at, std::type_identity_t<T> v) { T old = *at; if (v < old) *at = v; return old; }
template <class T> T atomicExch(T* at, std::type_identity_t<T> v) { T old = *at; *at = v; return old; }
inline unsigned atomicInc(unsigned* at, unsigned most) { return simt::count_in(at, most); }

template <class A, class B> std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <class A, class B> std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline void sincospif(float x, float* s, float* c) { *s = float(std::sin(M_PI * double(x))), *c = float(std::cos(M_PI * double(x))); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __float_as_uint(float x) { return simt::unpack<unsigned>(simt::pack(x)); }
inline float __uint_as_float(unsigned x) { return simt::unpack<float>(simt::pack(x)); }
template <class T> T __ldcg(const T* p) { return *p; }
