// The state of a device in CUDA's runtime and driver: memory, kernels, streams, events, graphs and errors.
//
// Work is done by the host's thread: at once, or, if the device is `late`, when a caller waits for it, as late as a
// device may. The next call and all later ones then report a fault.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <time.h>

#include <mutex>
#include <set>

#include "decode.h"

namespace ptx {

// --- memory ----------------------------------------------------------------------------------------------------------

// Allocations up to this size are filled with NaN; larger ones are not, to leave their pages untouched.
constexpr size_t kFilled = 64 << 20;

enum class Kind : uint8_t { device, pinned, registered };
struct Allocation {
  size_t bytes;
  Kind kind;
};

// --- kernels ---------------------------------------------------------------------------------------------------------

// A registered object of nvcc; its PTX is read at the first use of one of its kernels.
struct Image {
  const char* data = nullptr;
  Module* module = nullptr;
  bool looked = false;
};

struct Kernel {
  Image* image = nullptr;
  std::string name;
  size_t permitted = 48 << 10;
};

// --- streams ---------------------------------------------------------------------------------------------------------

using Work = std::function<cudaError_t()>;

struct Graph {
  std::vector<Work> nodes;
};

struct Capture;
struct Stream {
  std::deque<Work> queue;
  uint64_t issued = 0, done = 0;
  bool blocking = true;  // waits for the default stream, and is waited for by it
  int priority = 0;
  unsigned long long id = 0;
  std::shared_ptr<Capture> capture;
};

struct Capture {
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  std::weak_ptr<Stream> origin;
  std::map<Stream*, std::pair<std::shared_ptr<Stream>, bool>> streams;  // and if some of its work was not joined yet
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  unsigned long long id = 0;
  bool invalid = false;
};

// The position of an event in a stream.
struct Mark {
  std::weak_ptr<Stream> stream;
  uint64_t at = 0;
  bool done = false;
  double time_ms = 0;
};

struct Event {
  std::shared_ptr<Mark> mark;
  std::shared_ptr<Capture> capture;
  bool timing = true;
};

// --- the device ------------------------------------------------------------------------------------------------------

struct Device {
  std::recursive_mutex lock;
  std::vector<std::unique_ptr<Module>> modules;
  std::map<const void*, Kernel> kernels;  // by the host's function
  std::map<char*, Allocation> allocations;
  size_t total_bytes = size_t(1) << 30, used_bytes = 0;
  std::map<Stream*, std::shared_ptr<Stream>> streams;
  std::shared_ptr<Stream> base = std::make_shared<Stream>();  // the default stream
  std::set<Event*> events;
  std::map<Graph*, std::shared_ptr<Graph>> graphs;
  std::string failed;  // text of the last error
  std::string tool;    // the tool in use: racecheck
  cudaError_t fault = cudaSuccess;
  cudaError_t last = cudaSuccess;
  bool late = false, tells = false;  // tells: write errors to stderr
  int major = 9, minor = 0;
  unsigned long long serial = 0;
  std::map<int, size_t> limits;
  struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
  } configured{};
};

inline Device& device() {
  static Device* d = new Device;  // outlives every static object that still calls
  return *d;
}

struct Locked {
  std::lock_guard<std::recursive_mutex> held{device().lock};
};

inline cudaError_t say(cudaError_t e, const std::string& what) {
  Device& d = device();
  d.failed = what, d.last = e;
  if (d.tells && e != cudaSuccess && e != cudaErrorNotReady) fprintf(stderr, "device: %s (%d)\n", what.c_str(), int(e));
  return e;
}

inline double now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) * 1e3 + double(t.tv_nsec) * 1e-6;
}

inline cudaError_t code_of(const std::string& what) {
  if (what.find("misaligned") != std::string::npos) return cudaErrorMisalignedAddress;
  if (what.find("global address") != std::string::npos) return cudaErrorIllegalAddress;
  return cudaErrorLaunchFailure;
}

// --- the order of work -----------------------------------------------------------------------------------------------

inline std::shared_ptr<Stream> stream_of(cudaStream_t s) {
  if (s == nullptr || s == cudaStreamLegacy || s == cudaStreamPerThread) return device().base;
  auto at = device().streams.find(reinterpret_cast<Stream*>(s));
  return at == device().streams.end() ? nullptr : at->second;
}

// Do the stream's work up to its `upto`-th item; a fault ends all work.
inline cudaError_t advance(Stream& s, uint64_t upto) {
  Device& d = device();
  while (s.done < upto && !s.queue.empty() && d.fault == cudaSuccess) {
    Work work = std::move(s.queue.front());
    s.queue.pop_front();
    const cudaError_t e = work();
    s.done += 1;
    if (e != cudaSuccess) d.fault = e;
  }
  return d.fault;
}

inline cudaError_t advance_all() {
  Device& d = device();
  advance(*d.base, d.base->issued);
  for (auto& [p, s] : d.streams) advance(*s, s->issued);
  return d.fault;
}

inline cudaError_t invalidate(Capture& c, cudaError_t e, const std::string& what) {
  c.invalid = true;
  return say(e, what);
}

// Captures that a call of the default stream would have to wait for.
inline std::shared_ptr<Capture> blocking_capture() {
  for (auto& [p, s] : device().streams)
    if (s->capture && s->blocking) return s->capture;
  return nullptr;
}

inline cudaError_t submit(cudaStream_t stream, Work work) {
  Device& d = device();
  if (d.fault != cudaSuccess) return d.fault;
  auto s = stream_of(stream);
  if (!s) return say(cudaErrorInvalidResourceHandle, "no such stream");
  if (s->capture) {
    Capture& c = *s->capture;
    if (c.invalid) return say(cudaErrorStreamCaptureInvalidated, "the capture was invalidated before");
    c.graph->nodes.push_back(std::move(work));
    c.streams[s.get()] = {s, true};
    return cudaSuccess;
  }
  std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> first;
  if (s == d.base) {
    if (auto c = blocking_capture())
      return invalidate(*c, cudaErrorStreamCaptureImplicit, "the default stream would wait for a stream's capture");
    for (auto& [p, other] : d.streams)
      if (other->blocking) first.emplace_back(other, other->issued);
  } else if (s->blocking) {
    first.emplace_back(d.base, d.base->issued);
  }
  s->queue.push_back([first, work = std::move(work)] {
    for (auto& [other, upto] : first)
      if (const cudaError_t e = advance(*other, upto); e != cudaSuccess) return e;
    return work();
  });
  s->issued += 1;
  return d.late ? cudaSuccess : advance(*s, s->issued);
}

thread_local inline cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

// Refuse a call that is forbidden to all threads during a capture, unless the capture is relaxed.
inline cudaError_t allowed_now(const char* what) {
  if (device().fault != cudaSuccess) return device().fault;
  if (capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (auto& [p, s] : device().streams)
    if (s->capture && s->capture->mode == cudaStreamCaptureModeGlobal)
      return invalidate(*s->capture, cudaErrorStreamCaptureUnsupported,
                        std::string(what) + " is not permitted when a stream is capturing");
  return cudaSuccess;
}

// --- memory ----------------------------------------------------------------------------------------------------------

// The allocation that starts at this address, or the last one before it.
inline const std::pair<char* const, Allocation>* allocation_before(const void* p) {
  auto& all = device().allocations;
  auto next = all.upper_bound(static_cast<char*>(const_cast<void*>(p)));
  return next == all.begin() ? nullptr : &*std::prev(next);
}

inline const Allocation* allocation_of(const void* p, size_t bytes) {
  auto at = allocation_before(p);
  return at && static_cast<const char*>(p) + bytes <= at->first + at->second.bytes ? &at->second : nullptr;
}

inline cudaError_t allocate(void** p, size_t bytes, Kind kind) {
  Device& d = device();
  *p = nullptr;
  if (kind == Kind::device && d.used_bytes + bytes > d.total_bytes)
    return say(cudaErrorMemoryAllocation, "out of memory");
  if (bytes == 0) return cudaSuccess;
  *p = aligned_alloc(512, rounded(bytes, 512));
  if (!*p) return say(cudaErrorMemoryAllocation, "out of memory");
  if (bytes <= kFilled) memset(*p, 0xff, bytes);
  d.allocations[static_cast<char*>(*p)] = {bytes, kind};
  machine().own[static_cast<char*>(*p)] = bytes;
  if (kind == Kind::device) d.used_bytes += bytes;
  return cudaSuccess;
}

inline cudaError_t release(void* p) {
  Device& d = device();
  if (!p) return cudaSuccess;
  auto at = d.allocations.find(static_cast<char*>(p));
  if (at == d.allocations.end()) return say(cudaErrorInvalidValue, "free of what was not allocated");
  if (at->second.kind == Kind::device) d.used_bytes -= at->second.bytes;
  if (at->second.kind != Kind::registered) free(p);
  machine().own.erase(at->first), d.allocations.erase(at);
  return cudaSuccess;
}

// Returns false if the bytes extend past the end of the allocation in which they start.
inline bool reachable(const void* p, size_t bytes) {
  auto at = allocation_before(p);
  if (!at) return true;
  const char *first = static_cast<const char*>(p), *end = at->first + at->second.bytes;
  return first >= end || first + bytes <= end;
}

inline cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream, bool waits) {
  if (bytes == 0) return device().fault;
  if (!reachable(to, bytes) || !reachable(from, bytes)) return say(cudaErrorInvalidValue, "a copy beyond its memory");
  auto s = stream_of(stream);
  const bool capturing = s && s->capture;
  auto host = [&](const void* p) { return !allocation_of(p, bytes); };
  if (host(from) && !capturing) {  // pageable memory is staged before the call returns
    auto staged =
        std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    const cudaError_t e = submit(stream, [=] { return memcpy(to, staged->data(), bytes), cudaSuccess; });
    return e != cudaSuccess || !waits ? e : advance(*s, s->issued);
  }
  const cudaError_t e = submit(stream, [=] { return memmove(to, from, bytes), cudaSuccess; });
  if (e != cudaSuccess || capturing) return e;
  return waits || host(to) ? advance(*s, s->issued) : cudaSuccess;
}

// --- modules and launches --------------------------------------------------------------------------------------------

// The text of the first PTX in a fat binary; "" if it has only machine code.
inline std::string ptx_of(const char* data) {
  auto at = [data](size_t offset, auto* value) { memcpy(value, data + offset, sizeof *value); };
  uint16_t header;
  uint64_t size;
  at(6, &header), at(8, &size);
  for (size_t p = header; p + 16 < header + size;) {
    uint16_t kind;
    uint32_t own;
    uint64_t bytes;
    at(p, &kind), at(p + 4, &own), at(p + 8, &bytes);
    if (kind == 1) {
      const std::string text(data + p + own, strnlen(data + p + own, bytes));
      const size_t begin = text.find(".version");
      if (begin != std::string::npos) return text.substr(begin);
    }
    p += own + bytes;
  }
  return "";
}

inline Module* load(const std::string& text) {
  Device& d = device();
  d.modules.push_back(std::make_unique<Module>(text));
  for (auto& [at, bytes] : d.modules.back()->globals()) machine().own[at] = bytes;
  return d.modules.back().get();
}

inline Module* module_of(Image& image) {
  if (!image.looked) {
    image.looked = true;
    const std::string text = ptx_of(image.data);
    if (!text.empty()) image.module = load(text);
  }
  return image.module;
}

// Attributes of a launch in addition to its kernel and arguments.
struct Shape {
  dim3 grid, block;
  size_t shared = 0;
  cudaStream_t stream = nullptr;
  dim3 cluster{1, 1, 1};
  bool dependent = false, together = false;

  // The driver has the same attributes, with other names.
  Shape& with(const cudaLaunchAttribute* attributes, unsigned count) {
    for (const cudaLaunchAttribute* a = attributes; a < attributes + count; ++a) {
      if (a->id == cudaLaunchAttributeClusterDimension)
        cluster = dim3(a->val.clusterDim.x, a->val.clusterDim.y, a->val.clusterDim.z);
      if (a->id == cudaLaunchAttributeProgrammaticStreamSerialization)
        dependent = a->val.programmaticStreamSerializationAllowed != 0;
      if (a->id == cudaLaunchAttributeCooperative) together = a->val.cooperative != 0;
    }
    return *this;
  }
};
static_assert(sizeof(CUlaunchAttribute) == sizeof(cudaLaunchAttribute));

inline cudaError_t prepare(Module* module, const std::string& name, size_t permitted, const Shape& shape, void** args,
                           Launch& l) {
  const Function& f = module->function(name);
  if (!f.entry) return say(cudaErrorInvalidDeviceFunction, name + " is no kernel");
  l.module = module, l.function = &f;
  const unsigned g[3] = {shape.grid.x, shape.grid.y, shape.grid.z};
  const unsigned b[3] = {shape.block.x, shape.block.y, shape.block.z};
  const unsigned cluster[3] = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
  for (int d = 0; d < 3; ++d) {
    l.grid[d] = g[d], l.block[d] = b[d];
    l.cluster[d] = cluster[d] > 1 ? cluster[d] : f.cluster[d] ? f.cluster[d] : 1;
    if (g[d] == 0 || b[d] == 0 || g[d] % l.cluster[d])
      return say(cudaErrorInvalidConfiguration, "invalid configuration: a grid of " + std::to_string(g[d]));
  }
  const unsigned threads = b[0] * b[1] * b[2];
  if (threads > f.most_threads || g[1] > 65535 || g[2] > 65535)
    return say(cudaErrorInvalidConfiguration, "invalid configuration: " + std::to_string(threads) +
                                                  " threads of a kernel for " + std::to_string(f.most_threads));
  if (l.cluster[0] * l.cluster[1] * l.cluster[2] > 8) return say(cudaErrorInvalidClusterSize, "invalid cluster size");
  if (shape.shared > permitted || shape.shared + module->shared_bytes() > kMostShared)
    return say(cudaErrorInvalidValue, "invalid value: " + std::to_string(shape.shared) +
                                          " bytes of shared memory, of which " + std::to_string(permitted) +
                                          " are permitted");
  const uint64_t blocks = uint64_t(g[0]) * g[1] * g[2];
  if (shape.together && blocks > kProcessors * kBlocksEach)
    return say(cudaErrorCooperativeLaunchTooLarge,
               std::to_string(blocks) + " blocks are too many for a cooperative launch");
  l.shared_bytes = rounded(shape.shared, 16), l.dependent = shape.dependent, l.together = shape.together;
  l.parameters.resize(f.parameter_bytes);
  for (size_t p = 0; p < f.parameters.size(); ++p)
    memcpy(l.parameters.data() + f.parameters[p].offset, args[p], f.parameters[p].bytes);
  return cudaSuccess;
}

inline cudaError_t start(Module* module, const std::string& name, size_t permitted, const Shape& shape, void** args) {
  if (device().fault != cudaSuccess) return device().fault;
  try {
    auto l = std::make_shared<Launch>();
    const cudaError_t e = prepare(module, name, permitted, shape, args, *l);
    if (e != cudaSuccess) return e;
    const cudaError_t done = submit(shape.stream, [l] {
      try {
        machine().run(*l);
        return cudaSuccess;
      } catch (const std::exception& error) { return say(code_of(error.what()), error.what()); }
    });
    if (!machine().strict) device().fault = cudaSuccess;  // the test continues
    return done;
  } catch (const std::exception& error) { return say(cudaErrorInvalidDeviceFunction, error.what()); }
}

// --- properties of the device ----------------------------------------------------------------------------------------

inline cudaError_t attribute(int* value, int which) {
  switch (cudaDeviceAttr(which)) {
    case cudaDevAttrComputeCapabilityMajor: *value = device().major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = device().minor; break;
    case cudaDevAttrMultiProcessorCount: *value = int(kProcessors); break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxBlockDimX: *value = 1024; break;
    case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 0x7fffffff; break;
    case cudaDevAttrMaxGridDimY: *value = 65535; break;
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrTotalConstantMemory: *value = 64 << 10; break;
    case cudaDevAttrWarpSize: *value = kWarp; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrClockRate: *value = 1000000; break;
    case cudaDevAttrMemoryClockRate: *value = 1000000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 64; break;
    case cudaDevAttrL2CacheSize: *value = 1 << 20; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(kMostShared); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = int(kMostShared + kReserved); break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = int(kReserved); break;
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrAsyncEngineCount:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrClusterLaunch: *value = 1; break;
    default: *value = 0; break;
  }
  return cudaSuccess;
}

}  // namespace ptx
