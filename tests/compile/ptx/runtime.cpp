// A CUDA runtime, like `libcudart`, whose device is machine.h: for shared objects of nvcc with PTX only, which are
// loaded after it, and for a whole process under tests/rehearsal.
#include "device.h"

#include <dlfcn.h>

using namespace ptx;

extern "C" {

// --- for tests -------------------------------------------------------------------------------------------------------

// order: 0 asynchronous work is done at once, 1 as late as allowed, 2 mixed by `seed`
void ptx_order(int order, int backwards, unsigned seed) {
  machine().order = ptx::Order(order), machine().backwards = backwards != 0, machine().random.seed(seed);
}
// Accessible global memory: the ranges allowed since the last ptx_forbid; without any, all memory.
void ptx_allow(void* at, size_t bytes) { machine().allowed.push_back({static_cast<char*>(at), bytes}); }
void ptx_forbid() { machine().allowed.clear(); }
void ptx_device(int major, int minor) { device().major = major, device().minor = minor; }
// Check launches of at most Races::kMost threads for unordered accesses; return the number of checked launches.
// how: 0 no check, 1 check, 2 check except stores of the present value
void ptx_races(int how) { machine().races.asked = how != 0, machine().races.lenient = how == 2; }
unsigned long long ptx_raced() { return machine().races.launches(); }
// Lines of barriers, fences and waits that were executed so far, each with its opcode; and one to leave out, or 0.
const char* ptx_sites() {
  static std::string all;
  all.clear();
  for (const auto& [line, opcode] : machine().sites) all += std::to_string(line) + " " + opcode + "\n";
  return all.c_str();
}
void ptx_omit(int line) { machine().omitted = line; }
const char* ptx_failed() { return device().failed.c_str(); }

// A module from text, and a launch of one of its kernels; null and ptx_failed() if that is not possible.
void* ptx_load(const char* text) {
  try {
    return load(text);
  } catch (const std::exception& e) {
    say(cudaErrorInvalidValue, e.what());
    return nullptr;
  }
}
int ptx_launch(void* module, const char* name, const unsigned* grid, const unsigned* block, const unsigned* cluster,
               size_t shared, int dependent, int together, void** args) {
  auto of = [](const unsigned* sides) { return dim3(sides[0], sides[1], sides[2]); };
  const Shape shape{of(grid), of(block), shared, nullptr, of(cluster), dependent != 0, together != 0};
  return start(static_cast<Module*>(module), name, kMostShared, shape, args);
}

// --- for a whole process ---------------------------------------------------------------------------------------------

// Host code in the order of a stream's work: done now, after all before it, or kept for a graph's replays. 1 if kept.
int ptx_host(cudaStream_t stream, void (*work)(void*), void* with) {
  Locked held;
  auto s = stream_of(stream);
  const bool kept = s && s->capture;
  submit(stream, [=] { return work(with), cudaSuccess; });
  if (!kept && s) advance(*s, s->issued);
  return kept;
}

// --- registration of nvcc's objects ----------------------------------------------------------------------------------

void** __cudaRegisterFatBinary(void* wrapper) {
  struct Wrapper {
    int magic, version;
    const char* data;
  };
  auto* image = new Image;
  image->data = static_cast<Wrapper*>(wrapper)->data;
  return reinterpret_cast<void**>(image);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void** handle, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  Locked held;
  device().kernels[host] = Kernel{reinterpret_cast<Image*>(handle), name};
}

// --- launches --------------------------------------------------------------------------------------------------------

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  device().configured = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = device().configured.grid, *block = device().configured.block, *shared = device().configured.shared;
  *static_cast<cudaStream_t*>(stream) = device().configured.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* host, void** args) {
  Locked held;
  auto at = device().kernels.find(host);
  if (at == device().kernels.end()) return say(cudaErrorInvalidDeviceFunction, "invalid device function");
  Kernel& k = at->second;
  try {
    if (!module_of(*k.image)) {
      if (k.name.find("spin_kernel") != std::string::npos) return cudaSuccess;  // torch.cuda._sleep
      return say(cudaErrorNoKernelImageForDevice, "no PTX of " + k.name);
    }
  } catch (const std::exception& e) { return say(cudaErrorInvalidPtx, e.what()); }
  const Shape shape = Shape{c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream}.with(c->attrs, c->numAttrs);
  return start(k.image->module, k.name, k.permitted, shape, args);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t host, dim3 grid, dim3 block, void** args, size_t shared,
                               cudaStream_t stream) {
  cudaLaunchConfig_t c{};
  c.gridDim = grid, c.blockDim = block, c.dynamicSmemBytes = shared, c.stream = stream;
  return cudaLaunchKernelExC(&c, host, args);
}
cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) {
  return __cudaLaunchKernel(static_cast<cudaKernel_t>(const_cast<void*>(host)), grid, block, args, shared, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* host, dim3 grid, dim3 block, void** args, size_t shared,
                                        cudaStream_t stream) {
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative, together.val.cooperative = 1;
  cudaLaunchConfig_t c{};
  c.gridDim = grid, c.blockDim = block, c.dynamicSmemBytes = shared, c.stream = stream, c.attrs = &together,
  c.numAttrs = 1;
  return cudaLaunchKernelExC(&c, host, args);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t work, void* with) {
  Locked held;
  return submit(stream, [=] { return work(with), cudaSuccess; });
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t work, void* with, unsigned) {
  Locked held;
  return submit(stream, [=] { return work(stream, device().fault, with), cudaSuccess; });
}
cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute which, int value) {
  Locked held;
  auto at = device().kernels.find(host);
  if (at == device().kernels.end()) return cudaErrorInvalidDeviceFunction;
  if (which == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (size_t(value) > kMostShared) return say(cudaErrorInvalidValue, "invalid value");
    at->second.permitted = size_t(value);
  }
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void* host) {
  Locked held;
  auto at = device().kernels.find(host);
  if (at == device().kernels.end()) return cudaErrorInvalidDeviceFunction;
  memset(a, 0, sizeof *a);
  Module* module = module_of(*at->second.image);
  a->maxThreadsPerBlock = module ? int(module->function(at->second.name).most_threads) : 1024;
  a->sharedSizeBytes = module ? module->shared_bytes() : 0;
  a->numRegs = 32, a->maxDynamicSharedSizeBytes = int(at->second.permitted);
  a->ptxVersion = a->binaryVersion = device().major * 10 + device().minor;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) {
  return *count = int(kBlocksEach), cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
  return *count = int(kBlocksEach), cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void*, const cudaLaunchConfig_t*) {
  return *count = 4, cudaSuccess;
}

// --- errors ----------------------------------------------------------------------------------------------------------

const char* cudaGetErrorName(cudaError_t e) {
  switch (e) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorMisalignedAddress: return "cudaErrorMisalignedAddress";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    default: return "cudaError";
  }
}
const char* cudaGetErrorString(cudaError_t e) {
  switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotReady: return "device not ready";
    default: break;
  }
  if (!machine().strict || e == device().last) return device().failed.c_str();
  switch (e) {
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorMisalignedAddress: return "misaligned address";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    default: return "an error of the device";
  }
}
cudaError_t cudaGetLastError() {
  Locked held;
  const cudaError_t e = cudaPeekAtLastError();
  return device().last = cudaSuccess, e;
}
cudaError_t cudaPeekAtLastError() {
  if (!machine().strict) return cudaSuccess;
  return device().fault != cudaSuccess ? device().fault : device().last;
}

// --- the device ------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* n) { return *n = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* which) { return *which = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int which) {
  return which == 0 ? device().fault : say(cudaErrorInvalidDevice, "there is no such device");
}
cudaError_t cudaInitDevice(int, unsigned, unsigned) { return cudaSuccess; }
cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
cudaError_t cudaGetDeviceFlags(unsigned* flags) { return *flags = 0, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) { return attribute(value, int(which)); }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaErrorPeerAccessUnsupported; }
cudaError_t cudaDeviceGetPCIBusId(char* text, int room, int) {
  return snprintf(text, size_t(room), "0000:01:00.0"), cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* v) { return *v = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* v) { return *v = 13000, cudaSuccess; }
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }
cudaError_t cudaDeviceGetLimit(size_t* value, cudaLimit which) {
  Locked held;
  return *value = device().limits[int(which)], cudaSuccess;
}
cudaError_t cudaDeviceSetLimit(cudaLimit which, size_t value) {
  Locked held;
  return device().limits[int(which)] = value, cudaSuccess;
}
cudaError_t cudaCtxResetPersistingL2Cache() { return device().fault; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int which) {
  if (which != 0) return say(cudaErrorInvalidDevice, "there is no such device");
  memset(p, 0, sizeof *p);
  auto of = [](cudaDeviceAttr a) {
    int value;
    return attribute(&value, int(a)), value;
  };
  snprintf(p->name, sizeof p->name, "PTX on a CPU");
  for (int k = 0; k < 16; ++k) p->uuid.bytes[k] = char(0x11 * (k + 1));
  p->totalGlobalMem = device().total_bytes;
  p->sharedMemPerBlock = 48 << 10, p->regsPerBlock = 65536, p->warpSize = kWarp, p->memPitch = 0x7fffffff;
  p->maxThreadsPerBlock = 1024, p->totalConstMem = 64 << 10, p->major = device().major, p->minor = device().minor;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7fffffff, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->textureAlignment = 512, p->multiProcessorCount = int(kProcessors), p->asyncEngineCount = 1;
  p->pciBusID = 1, p->unifiedAddressing = 1, p->concurrentKernels = 1, p->managedMemory = 1;
  p->memoryBusWidth = of(cudaDevAttrGlobalMemoryBusWidth), p->l2CacheSize = of(cudaDevAttrL2CacheSize);
  p->maxThreadsPerMultiProcessor = of(cudaDevAttrMaxThreadsPerMultiProcessor), p->streamPrioritiesSupported = 1;
  p->sharedMemPerMultiprocessor = size_t(of(cudaDevAttrMaxSharedMemoryPerMultiprocessor));
  p->regsPerMultiprocessor = 65536, p->cooperativeLaunch = 1, p->clusterLaunch = 1;
  p->sharedMemPerBlockOptin = kMostShared, p->reservedSharedMemPerBlock = kReserved;
  p->maxBlocksPerMultiProcessor = of(cudaDevAttrMaxBlocksPerMultiprocessor);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  Locked held;
  if (const cudaError_t e = allowed_now("cudaDeviceSynchronize"); e != cudaSuccess) return e;
  return advance_all();
}

// --- memory ----------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** p, size_t bytes) {
  Locked held;
  if (const cudaError_t e = allowed_now("cudaMalloc"); e != cudaSuccess) return e;
  return allocate(p, bytes, Kind::device);
}
cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) { return cudaMalloc(p, bytes); }
cudaError_t cudaFree(void* p) {
  Locked held;
  if (!p) return device().fault;
  if (const cudaError_t e = allowed_now("cudaFree"); e != cudaSuccess) return e;
  if (const cudaError_t e = advance_all(); e != cudaSuccess) return e;
  return release(p);
}
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  Locked held;
  if (const cudaError_t e = allowed_now("cudaHostAlloc"); e != cudaSuccess) return e;
  return allocate(p, bytes, Kind::pinned);
}
cudaError_t cudaMallocHost(void** p, size_t bytes) { return cudaHostAlloc(p, bytes, 0); }
cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
cudaError_t cudaHostGetDevicePointer(void** on_device, void* p, unsigned) { return *on_device = p, cudaSuccess; }
cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
  Locked held;
  device().allocations[static_cast<char*>(p)] = {bytes, Kind::registered};
  machine().own[static_cast<char*>(p)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* p) { return cudaFree(p); }
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  Locked held;
  *free_bytes = device().total_bytes - device().used_bytes, *total = device().total_bytes;
  return device().fault;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  Locked held;
  memset(a, 0, sizeof *a);
  const Allocation* found = allocation_of(p, 1);
  a->type = !found                        ? cudaMemoryTypeUnregistered
            : found->kind == Kind::device ? cudaMemoryTypeDevice
                                          : cudaMemoryTypeHost;
  a->hostPointer = a->type == cudaMemoryTypeDevice ? nullptr : const_cast<void*>(p);
  a->devicePointer = found ? const_cast<void*>(p) : nullptr;
  return cudaSuccess;
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes, nullptr); }
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  Locked held;
  if (machine().strict && !allocation_of(p, bytes)) return say(cudaErrorInvalidValue, "memset beyond its memory");
  return submit(stream, [=] { return memset(p, value, bytes), cudaSuccess; });
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  Locked held;
  return copy(to, from, bytes, nullptr, true);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  Locked held;
  return copy(to, from, bytes, stream, false);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  Locked held;
  return copy(to, from, bytes, stream, false);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  Locked held;
  for (size_t row = 0; row < height; ++row)
    if (const cudaError_t e = copy(static_cast<char*>(to) + row * to_pitch,
                                   static_cast<const char*>(from) + row * from_pitch, width, stream, false);
        e != cudaSuccess)
      return e;
  return cudaSuccess;
}

// --- streams and events ----------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  Locked held;
  auto s = std::make_shared<Stream>();
  s->blocking = !(flags & cudaStreamNonBlocking), s->priority = priority, s->id = ++device().serial;
  device().streams[s.get()] = s;
  *out = reinterpret_cast<cudaStream_t>(s.get());
  return device().fault;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Locked held;
  auto s = stream_of(stream);
  if (!s) return say(cudaErrorInvalidResourceHandle, "no such stream");
  advance(*s, s->issued);
  device().streams.erase(s.get());
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  Locked held;
  auto s = stream_of(stream);
  return *priority = s ? s->priority : 0, cudaSuccess;
}
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  Locked held;
  auto s = stream_of(stream);
  return *flags = s && !s->blocking ? cudaStreamNonBlocking : 0, cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  Locked held;
  auto s = stream_of(stream);
  return *id = s ? s->id : 0, cudaSuccess;
}
cudaError_t cudaStreamGetDevice(cudaStream_t, int* which) { return *which = 0, cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Locked held;
  auto s = stream_of(stream);
  if (!s) return say(cudaErrorInvalidResourceHandle, "no such stream");
  if (s->capture) return invalidate(*s->capture, cudaErrorStreamCaptureUnsupported, "waited for a capturing stream");
  if (s == device().base)
    if (auto c = blocking_capture())
      return invalidate(*c, cudaErrorStreamCaptureImplicit, "the default stream would wait for a stream's capture");
  if (s == device().base)
    for (auto& [p, other] : device().streams)
      if (other->blocking) advance(*other, other->issued);
  return advance(*s, s->issued);
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Locked held;
  auto s = stream_of(stream);
  if (!s) return say(cudaErrorInvalidResourceHandle, "no such stream");
  if (s->capture) return invalidate(*s->capture, cudaErrorStreamCaptureUnsupported, "asked a capturing stream");
  if (s->queue.empty() || device().fault != cudaSuccess) return device().fault;
  advance(*s, s->done + 1);
  return s->queue.empty() ? device().fault : cudaErrorNotReady;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  Locked held;
  auto* e = new Event;
  e->timing = !(flags & cudaEventDisableTiming);
  device().events.insert(e);
  *out = reinterpret_cast<cudaEvent_t>(e);
  return device().fault;
}
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
static Event* event_of(cudaEvent_t e) {
  auto* event = reinterpret_cast<Event*>(e);
  if (device().events.contains(event)) return event;
  return say(cudaErrorInvalidResourceHandle, "no such event"), nullptr;
}
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  Locked held;
  Event* event = event_of(e);
  if (!event) return cudaErrorInvalidResourceHandle;
  device().events.erase(event);
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t stream, unsigned flags) {
  Locked held;
  Event* event = event_of(e);
  auto s = stream_of(stream);
  if (!event || !s) return cudaErrorInvalidResourceHandle;
  auto mark = std::make_shared<Mark>();
  auto reached = [mark] { return mark->done = true, mark->time_ms = now_ms(), cudaSuccess; };
  if (s->capture) {
    if (flags & cudaEventRecordExternal) return event->mark = mark, submit(stream, reached);
    event->capture = s->capture, event->mark = mark, mark->stream = s;
    return cudaSuccess;
  }
  event->capture = nullptr, event->mark = mark;
  const cudaError_t error = submit(stream, reached);
  mark->stream = s, mark->at = s->issued;
  return error;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t stream) { return cudaEventRecordWithFlags(e, stream, 0); }
static cudaError_t reach(Mark& mark) {
  if (auto s = mark.stream.lock()) advance(*s, mark.at);
  return device().fault;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  Locked held;
  Event* event = event_of(e);
  if (!event) return cudaErrorInvalidResourceHandle;
  if (event->capture) return say(cudaErrorCapturedEvent, "waited for an event of a capture");
  return event->mark ? reach(*event->mark) : device().fault;
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
  Locked held;
  Event* event = event_of(e);
  if (!event) return cudaErrorInvalidResourceHandle;
  if (event->capture) return say(cudaErrorCapturedEvent, "asked an event of a capture");
  if (const cudaError_t error = allowed_now("cudaEventQuery"); error != cudaSuccess) return error;
  if (!event->mark || event->mark->done) return device().fault;
  if (auto s = event->mark->stream.lock()) advance(*s, s->done + 1);
  return event->mark->done ? device().fault : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  Locked held;
  Event *a = event_of(from), *b = event_of(to);
  if (!a || !b || !a->timing || !b->timing || !a->mark || !b->mark || a->capture || b->capture)
    return say(cudaErrorInvalidResourceHandle, "an event that was not recorded, or has no time");
  if (device().fault != cudaSuccess) return device().fault;
  if (!a->mark->done || !b->mark->done) return cudaErrorNotReady;
  *ms = float(b->mark->time_ms - a->mark->time_ms);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t e, unsigned) {
  Locked held;
  Event* event = event_of(e);
  auto s = stream_of(stream);
  if (!event || !s) return cudaErrorInvalidResourceHandle;
  if (event->capture) {
    Capture& c = *event->capture;
    if (s->capture && s->capture != event->capture)
      return invalidate(c, cudaErrorStreamCaptureMerge, "a stream would join two captures");
    if (!s->capture) s->capture = event->capture, c.streams[s.get()] = {s, false};
    if (auto from = event->mark->stream.lock(); from && c.streams.contains(from.get()))
      c.streams[from.get()].second = from == c.origin.lock();
    return cudaSuccess;
  }
  if (s->capture)
    return invalidate(*s->capture, cudaErrorStreamCaptureIsolation, "a capture would wait for what is not of it");
  if (!event->mark) return device().fault;
  return submit(stream, [mark = event->mark] { return reach(*mark); });
}

// --- graphs ----------------------------------------------------------------------------------------------------------

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return std::swap(*mode, capture_mode), cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Locked held;
  auto s = stream_of(stream);
  if (device().fault != cudaSuccess) return device().fault;
  if (!s || s == device().base) return say(cudaErrorStreamCaptureUnsupported, "the default stream is never captured");
  if (s->capture) return say(cudaErrorIllegalState, "the stream is captured already");
  auto c = std::make_shared<Capture>();
  c->origin = s, c->mode = mode, c->id = ++device().serial;
  c->streams[s.get()] = {s, false};
  s->capture = c;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) {
  Locked held;
  *out = nullptr;
  auto s = stream_of(stream);
  if (!s || !s->capture || s->capture->origin.lock() != s)
    return say(cudaErrorStreamCaptureUnmatched, "no capture was begun on this stream");
  auto c = s->capture;
  bool unjoined = false;
  for (auto& [p, one] : c->streams) {
    unjoined = unjoined || (p != s.get() && one.second);
    one.first->capture = nullptr;
  }
  if (device().fault != cudaSuccess) return device().fault;
  if (c->invalid) return say(cudaErrorStreamCaptureInvalidated, "the capture was invalidated before");
  if (unjoined) return say(cudaErrorStreamCaptureUnjoined, "a stream that the capture forked was not joined");
  device().graphs[c->graph.get()] = c->graph;
  *out = reinterpret_cast<cudaGraph_t>(c->graph.get());
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Locked held;
  auto s = stream_of(stream);
  if (s == device().base)
    if (blocking_capture())
      return say(cudaErrorStreamCaptureImplicit, "the default stream was asked while another is captured");
  *status = !s || !s->capture     ? cudaStreamCaptureStatusNone
            : s->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                  : cudaStreamCaptureStatusActive;
  return device().fault;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
  Locked held;
  const cudaError_t e = cudaStreamIsCapturing(stream, status);
  auto s = stream_of(stream);
  const bool capturing = e == cudaSuccess && s && s->capture;
  if (id) *id = capturing ? s->capture->id : 0;
  if (graph) *graph = capturing ? reinterpret_cast<cudaGraph_t>(s->capture->graph.get()) : nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return e;
}
static std::shared_ptr<Graph> graph_of(const void* g) {
  auto at = device().graphs.find(static_cast<Graph*>(const_cast<void*>(g)));
  return at == device().graphs.end() ? nullptr : at->second;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t g, unsigned long long) {
  Locked held;
  auto graph = graph_of(g);
  if (!graph) return say(cudaErrorInvalidValue, "no such graph");
  auto made = std::make_shared<Graph>(*graph);
  device().graphs[made.get()] = made;
  *out = reinterpret_cast<cudaGraphExec_t>(made.get());
  return device().fault;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t g, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(out, g, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t stream) {
  Locked held;
  auto graph = graph_of(g);
  if (!graph) return say(cudaErrorInvalidValue, "no such graph");
  return submit(stream, [graph] {
    for (const Work& node : graph->nodes)
      if (const cudaError_t e = node(); e != cudaSuccess) return e;
    return cudaSuccess;
  });
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t g) {
  Locked held;
  return device().graphs.erase(reinterpret_cast<Graph*>(g)) ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g) {
  Locked held;
  return device().graphs.erase(reinterpret_cast<Graph*>(g)) ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t*, size_t* count) {
  Locked held;
  auto graph = graph_of(g);
  return *count = graph ? graph->nodes.size() : 0, cudaSuccess;
}

// --- driver functions that nvcc's objects use ------------------------------------------------------------------------

// Refuse the arguments that the driver refuses according to its documentation.
CUresult cuTensorMapEncodeTiled(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* base,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  static const uint8_t bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  static const unsigned spans[] = {0, 32, 64, 128};
  TensorMap m{};
  if (rank < 1 || rank > 5 || size_t(type) >= sizeof bytes || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      size_t(swizzle) > 3)
    return CUDA_ERROR_INVALID_VALUE;
  if (uintptr_t(base) % 16 || uintptr_t(out) % 64) return CUDA_ERROR_INVALID_VALUE;
  m.mark = kMark, m.base = uint64_t(base), m.rank = uint8_t(rank), m.element = bytes[type],
  m.swizzle = uint8_t(spans[swizzle]);
  m.fills_nan = fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA;
  for (unsigned d = 0; d < rank; ++d) {
    if (sizes[d] == 0 || sizes[d] > uint64_t(1) << 32 || box[d] == 0 || box[d] > 256 || steps[d] != 1)
      return CUDA_ERROR_INVALID_VALUE;
    m.sizes[d] = uint32_t(std::min<uint64_t>(sizes[d], 0xffffffff)), m.box[d] = uint16_t(box[d]);
    if (d == 0) continue;
    if (strides[d - 1] % 16 || strides[d - 1] >= uint64_t(1) << 40) return CUDA_ERROR_INVALID_VALUE;
    m.strides[d - 1] = strides[d - 1];
  }
  const uint64_t row = uint64_t(box[0]) * m.element;
  if (row % 16 || (m.swizzle && row > m.swizzle)) return CUDA_ERROR_INVALID_VALUE;
  memset(out, 0, sizeof *out);
  memcpy(out, &m, sizeof m);
  return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** at, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *at = strcmp(name, "cuTensorMapEncodeTiled") == 0 ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  if (!*at && machine().strict) *at = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (!*at && machine().strict) *at = dlsym(RTLD_DEFAULT, name);
  if (found) *found = *at ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *at ? cudaSuccess : say(cudaErrorSymbolNotFound, std::string("no ") + name);
}
cudaError_t cudaGetDriverEntryPoint(const char* name, void** at, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* found) {
  return cudaGetDriverEntryPointByVersion(name, at, 13000, flags, found);
}

// --- functions that are linked against and never called --------------------------------------------------------------

#define NOT_HERE(name, ...) \
  cudaError_t name(__VA_ARGS__) { return say(cudaErrorNotSupported, #name " is not to be had here"); }
NOT_HERE(cudaDeviceGetDefaultMemPool, cudaMemPool_t*, int)
NOT_HERE(cudaDeviceGetGraphMemAttribute, int, cudaGraphMemAttributeType, void*)
NOT_HERE(cudaDeviceSetGraphMemAttribute, int, cudaGraphMemAttributeType, void*)
NOT_HERE(cudaGetSymbolAddress, void**, const void*)
NOT_HERE(cudaGraphAddNode, cudaGraphNode_t*, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
         cudaGraphNodeParams*)
NOT_HERE(cudaGraphConditionalHandleCreate, cudaGraphConditionalHandle*, cudaGraph_t, unsigned, unsigned)
NOT_HERE(cudaGraphDebugDotPrint, cudaGraph_t, const char*, unsigned)
NOT_HERE(cudaGraphNodeGetDependencies, cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t*)
NOT_HERE(cudaGraphRetainUserObject, cudaGraph_t, cudaUserObject_t, unsigned, unsigned)
NOT_HERE(cudaIpcCloseMemHandle, void*)
NOT_HERE(cudaIpcGetEventHandle, cudaIpcEventHandle_t*, cudaEvent_t)
NOT_HERE(cudaIpcGetMemHandle, cudaIpcMemHandle_t*, void*)
NOT_HERE(cudaIpcOpenEventHandle, cudaEvent_t*, cudaIpcEventHandle_t)
NOT_HERE(cudaIpcOpenMemHandle, void**, cudaIpcMemHandle_t, unsigned)
NOT_HERE(cudaKernelSetAttributeForDevice, cudaKernel_t, cudaFuncAttribute, int, int)
NOT_HERE(cudaLibraryGetKernel, cudaKernel_t*, cudaLibrary_t, const char*)
NOT_HERE(cudaLibraryLoadData, cudaLibrary_t*, const void*, cudaJitOption*, void**, unsigned, cudaLibraryOption*, void**,
         unsigned)
NOT_HERE(cudaLibraryUnload, cudaLibrary_t)
NOT_HERE(cudaMemPoolGetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
NOT_HERE(cudaMemPoolSetAccess, cudaMemPool_t, const cudaMemAccessDesc*, size_t)
NOT_HERE(cudaMemPoolSetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
NOT_HERE(cudaMemPoolTrimTo, cudaMemPool_t, size_t)
NOT_HERE(cudaMemcpyToSymbol, const void*, const void*, size_t, size_t, cudaMemcpyKind)
NOT_HERE(cudaStreamBeginCaptureToGraph, cudaStream_t, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*,
         size_t, cudaStreamCaptureMode)
NOT_HERE(cudaStreamUpdateCaptureDependencies, cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, unsigned)
NOT_HERE(cudaUserObjectCreate, cudaUserObject_t*, void*, cudaHostFn_t, unsigned, unsigned)
NOT_HERE(cudaUserObjectRelease, cudaUserObject_t, unsigned)

}  // extern "C"
