// A CUDA runtime whose device is machine.h: what a shared object that nvcc made with PTX alone asks of `libcudart`,
// and of
// the driver for tensor maps. Loaded ahead of the object, with its symbols for all.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "decode.h"

namespace {

using namespace ptx;

struct Kernel {
  Module* module;
  std::string name;
  size_t permitted = 48 << 10;
};

struct State {
  std::vector<std::unique_ptr<Module>> modules;
  std::map<const void*, Kernel> kernels;  // by the host's function
  std::string failed;
  int major = 9, minor = 0;
  struct {
    dim3 grid, block;
    size_t shared;
  } configured{};
};

State& state() {
  static State s;
  return s;
}

cudaError_t say(cudaError_t e, const std::string& what) {
  state().failed = what;
  return e;
}

cudaError_t run(Kernel& k, dim3 grid, dim3 block, const unsigned (&cluster)[3], size_t shared, bool dependent,
                bool together, void** args) {
  try {
    const Function& f = k.module->function(k.name);
    if (!f.entry) throw Error(k.name + " is no kernel");
    Launch l;
    l.module = k.module, l.function = &f;
    const unsigned g[3] = {grid.x, grid.y, grid.z}, b[3] = {block.x, block.y, block.z};
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
    if (shared > k.permitted || shared + k.module->shared_bytes() > kMostShared)
      return say(cudaErrorInvalidValue, "invalid value: " + std::to_string(shared) +
                                            " bytes of shared memory, of which " + std::to_string(k.permitted) +
                                            " are permitted");
    const uint64_t blocks = uint64_t(g[0]) * g[1] * g[2];
    if (together && blocks > kProcessors * kBlocksEach)
      return say(cudaErrorCooperativeLaunchTooLarge,
                 std::to_string(blocks) + " blocks are too many for a cooperative launch");
    l.shared_bytes = rounded(shared, 16), l.dependent = dependent, l.together = together;
    l.parameters.resize(f.parameter_bytes);
    for (size_t p = 0; p < f.parameters.size(); ++p)
      memcpy(l.parameters.data() + f.parameters[p].offset, args[p], f.parameters[p].bytes);
    machine().run(l);
    return cudaSuccess;
  } catch (const std::exception& e) { return say(cudaErrorLaunchFailure, e.what()); }
}

}  // namespace

extern "C" {

// --- for tests -------------------------------------------------------------------------------------------------------

// order: 0 what is asynchronous happens at once, 1 as late as it may, 2 mixed by `seed`
void ptx_order(int order, int backwards, unsigned seed) {
  machine().order = ptx::Order(order), machine().backwards = backwards != 0, machine().random.seed(seed);
}
// Global memory is what was allowed since the last ptx_forbid; without any, all of it.
void ptx_allow(void* at, size_t bytes) { machine().allowed.push_back({static_cast<char*>(at), bytes}); }
void ptx_forbid() { machine().allowed.clear(); }
void ptx_device(int major, int minor) { state().major = major, state().minor = minor; }
// Launches of at most Races::kMost threads are looked at for accesses that nothing orders; how many were so far.
// how: 0 not, 1 yes, 2 yes but for stores of what is there already
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
const char* ptx_failed() { return state().failed.c_str(); }

// A module from text, and a launch of one of its kernels; null and ptx_failed() where that is not possible.
void* ptx_load(const char* text) {
  try {
    state().modules.push_back(std::make_unique<Module>(text));
    for (auto& [at, bytes] : state().modules.back()->globals()) machine().own.push_back({at, bytes});
    return state().modules.back().get();
  } catch (const std::exception& e) {
    say(cudaErrorInvalidValue, e.what());
    return nullptr;
  }
}
int ptx_launch(void* module, const char* name, const unsigned* grid, const unsigned* block, const unsigned* cluster,
               size_t shared, int dependent, int together, void** args) {
  Kernel k{static_cast<Module*>(module), name, kMostShared};
  const unsigned c[3] = {cluster[0], cluster[1], cluster[2]};
  return run(k, dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2]), c, shared, dependent != 0,
             together != 0, args);
}

// --- what nvcc's objects register ------------------------------------------------------------------------------------

void** __cudaRegisterFatBinary(void* wrapper) {
  struct Wrapper {
    int magic, version;
    const char* data;
  };
  const char* data = static_cast<Wrapper*>(wrapper)->data;
  uint64_t size;
  memcpy(&size, data + 8, 8);
  const std::string_view all(data, size_t(size) + 16);
  const size_t at = all.find(".version");
  auto** handle = new Module*(nullptr);
  if (at == std::string_view::npos) {
    say(cudaErrorInvalidKernelImage, "no PTX in this object");
    return reinterpret_cast<void**>(handle);
  }
  *handle = static_cast<Module*>(ptx_load(std::string(all.substr(at, strnlen(data + at, all.size() - at))).c_str()));
  return reinterpret_cast<void**>(handle);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void** handle, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  state().kernels[host] = Kernel{*reinterpret_cast<Module**>(handle), name};
}

// --- launches --------------------------------------------------------------------------------------------------------

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t) {
  state().configured = {grid, block, shared};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = state().configured.grid, *block = state().configured.block, *shared = state().configured.shared;
  *static_cast<cudaStream_t*>(stream) = nullptr;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* host, void** args) {
  auto at = state().kernels.find(host);
  if (at == state().kernels.end() || !at->second.module)
    return say(cudaErrorInvalidDeviceFunction, "invalid device function");
  unsigned cluster[3] = {1, 1, 1};
  bool dependent = false, together = false;
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    const cudaLaunchAttribute& a = c->attrs[i];
    if (a.id == cudaLaunchAttributeClusterDimension)
      cluster[0] = a.val.clusterDim.x, cluster[1] = a.val.clusterDim.y, cluster[2] = a.val.clusterDim.z;
    if (a.id == cudaLaunchAttributeProgrammaticStreamSerialization)
      dependent = a.val.programmaticStreamSerializationAllowed != 0;
    if (a.id == cudaLaunchAttributeCooperative) together = a.val.cooperative != 0;
  }
  return run(at->second, c->gridDim, c->blockDim, cluster, c->dynamicSmemBytes, dependent, together, args);
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

// --- the rest that hosts ask for -------------------------------------------------------------------------------------

cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute attribute, int value) {
  auto at = state().kernels.find(host);
  if (at == state().kernels.end()) return cudaErrorInvalidDeviceFunction;
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (size_t(value) > kMostShared) return say(cudaErrorInvalidValue, "invalid value");
    at->second.permitted = size_t(value);
  }
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "no error" : state().failed.c_str(); }
const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = state().major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = state().minor; break;
    case cudaDevAttrMultiProcessorCount: *value = int(kProcessors); break;
    case cudaDevAttrCooperativeLaunch: *value = 1; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = int(kMostShared); break;
    default: return say(cudaErrorInvalidValue, "no attribute " + std::to_string(int(attribute)));
  }
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
cudaError_t cudaMalloc(void** p, size_t bytes) {
  *p = aligned_alloc(256, rounded(bytes, 256));
  if (!*p) return say(cudaErrorMemoryAllocation, "out of memory");
  memset(*p, 0xff, bytes);
  machine().own.push_back({static_cast<char*>(*p), bytes});
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) { return free(p), cudaSuccess; }
cudaError_t cudaMemset(void* p, int value, size_t bytes) { return memset(p, value, bytes), cudaSuccess; }
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  return memset(p, value, bytes), cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return *stream = nullptr, cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}

// --- the driver ------------------------------------------------------------------------------------------------------

// Refuses what the driver's documentation says that it refuses.
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
CUresult cuDriverGetVersion(int* v) { return *v = 13000, CUDA_SUCCESS; }
cudaError_t cudaDriverGetVersion(int* v) { return *v = 13000, cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** at, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *at = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  if (found) *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return known ? cudaSuccess : say(cudaErrorSymbolNotFound, std::string("no ") + name);
}

}  // extern "C"
