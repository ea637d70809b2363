// `libcuda` on the same device: driver functions that cupy, Triton's launchers, torch and autosel use. It is part of
// the library for a whole process (tests/rehearsal); CUDA_REHEARSAL_DEVICE describes the device: `bytes late tells`.
#include "device.h"

#include <dlfcn.h>

#include <fstream>

using namespace ptx;

namespace {

struct Loaded {  // a CUmodule
  Module* module = nullptr;
  std::map<std::string, std::unique_ptr<struct Entry>> entries;
};
struct Entry {  // a CUfunction
  Module* module = nullptr;
  std::string name;
  size_t permitted = 48 << 10;
};

CUresult answer(cudaError_t e) { return CUresult(int(e)); }  // the driver's numbers are the runtime's
char the_context;
CUcontext context() { return reinterpret_cast<CUcontext>(&the_context); }
thread_local CUcontext current = nullptr;
cudaStream_t same(CUstream s) { return reinterpret_cast<cudaStream_t>(s); }

[[gnu::constructor]] void rehearse() {
  size_t bytes = 0;
  int late = 0, tells = 0;
  const char* said = getenv("CUDA_REHEARSAL_DEVICE");
  if (!said || sscanf(said, "%zu %d %d", &bytes, &late, &tells) != 3) return;
  device().total_bytes = bytes, device().late = late != 0, device().tells = tells != 0, machine().strict = true;
  const char* tool = getenv("CUDA_REHEARSAL_TOOL");
  device().tool = tool ? tool : "";
  // Triton has several threads store the same value.
  machine().races.asked = machine().races.lenient = device().tool == "racecheck";
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* v) { return *v = 13000, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult e, const char** text) {
  return *text = cudaGetErrorString(cudaError_t(int(e))), CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult e, const char** text) {
  return *text = cudaGetErrorName(cudaError_t(int(e))), CUDA_SUCCESS;
}
// Logs are empty; with `tells`, the device writes its errors to stderr.
CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle* out) { return *out = {}, CUDA_SUCCESS; }
CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }
CUresult cuGetProcAddress_v2(const char* name, void** at, int, cuuint64_t, CUdriverProcAddressQueryResult* found) {
  *at = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
  if (!*at) *at = dlsym(RTLD_DEFAULT, name);
  if (found) *found = *at ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *at ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// Undocumented tables start with their size, from which NVRTC knows if they have the functions that it uses.
CUresult cuGetExportTable(const void** table, const CUuuid*) {
  static const uint64_t empty[1] = {sizeof empty};
  return *table = empty, CUDA_SUCCESS;
}

// --- the device ------------------------------------------------------------------------------------------------------

CUresult cuDeviceGetCount(int* n) { return *n = 1, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* d, int ordinal) {
  return *d = 0, ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetName(char* text, int room, CUdevice) {
  return snprintf(text, size_t(room), "PTX on a CPU"), CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice) {
  for (int k = 0; k < 16; ++k) uuid->bytes[k] = char(0x11 * (k + 1));
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) { return *bytes = device().total_bytes, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  return answer(attribute(value, int(which)));  // the same numbers
}
CUresult cuDeviceGetPCIBusId(char* text, int room, CUdevice) { return answer(cudaDeviceGetPCIBusId(text, room, 0)); }
CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice) { return *c = context(), CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* c) { return *c = current ? current : context(), CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { return current = c, CUDA_SUCCESS; }
CUresult cuCtxPushCurrent_v2(CUcontext c) { return current = c, CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext* c) { return *c = context(), CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* d) { return *d = 0, CUDA_SUCCESS; }
CUresult cuCtxSynchronize() { return answer(cudaDeviceSynchronize()); }
CUresult cuCtxGetLimit(size_t* value, CUlimit which) {
  return answer(cudaDeviceGetLimit(value, cudaLimit(int(which))));
}
CUresult cuCtxSetLimit(CUlimit which, size_t value) { return answer(cudaDeviceSetLimit(cudaLimit(int(which)), value)); }
CUresult cuCtxResetPersistingL2Cache() { return answer(cudaCtxResetPersistingL2Cache()); }
CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total) { return answer(cudaMemGetInfo(free_bytes, total)); }
CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr p) {
  Locked held;
  if (!allocation_of(reinterpret_cast<void*>(p), 1)) return CUDA_ERROR_NOT_FOUND;
  const auto& [at, found] = *--device().allocations.upper_bound(reinterpret_cast<char*>(p));
  if (base) *base = CUdeviceptr(at);
  if (bytes) *bytes = found.bytes;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* out, CUpointer_attribute which, CUdeviceptr p) {
  Locked held;
  const Allocation* found = allocation_of(reinterpret_cast<void*>(p), 1);
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *static_cast<CUcontext*>(out) = context(); break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<CUdeviceptr*>(out) = p; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(out) = 0; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(out) = found->kind == Kind::device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
  return CUDA_SUCCESS;
}

// --- modules ---------------------------------------------------------------------------------------------------------

// PTX as text, or in a fat binary.
CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  Locked held;
  if (device().fault != cudaSuccess) return answer(device().fault);
  const char* data = static_cast<const char*>(image);
  uint32_t magic;
  memcpy(&magic, data, 4);
  std::string text;
  if (magic == 0xba55ed50)
    text = ptx_of(data);
  else if (memcmp(data, "\177ELF", 4) != 0)
    text = data;
  if (text.empty()) return answer(say(cudaErrorNoKernelImageForDevice, "machine code, where PTX is wanted"));
  try {
    auto* made = new Loaded;
    made->module = load(text);
    *out = reinterpret_cast<CUmodule>(made);
    return CUDA_SUCCESS;
  } catch (const std::exception& e) { return answer(say(cudaErrorInvalidPtx, e.what())); }
}
CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(out, image);
}
CUresult cuModuleLoad(CUmodule* out, const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return cuModuleLoadData(out, text.c_str());
}
CUresult cuLinkCreate_v2(unsigned, CUjit_option*, void**, CUlinkState* out) {
  return *out = reinterpret_cast<CUlinkState>(new std::string), CUDA_SUCCESS;
}
CUresult cuLinkAddData_v2(CUlinkState link, CUjitInputType type, void* data, size_t bytes, const char*, unsigned,
                          CUjit_option*, void**) {
  if (type != CU_JIT_INPUT_PTX) return answer(say(cudaErrorNotSupported, "only PTX is linked here"));
  reinterpret_cast<std::string*>(link)->assign(static_cast<char*>(data), bytes);
  return CUDA_SUCCESS;
}
CUresult cuLinkComplete(CUlinkState link, void** image, size_t* bytes) {
  auto& text = *reinterpret_cast<std::string*>(link);
  return *image = text.data(), *bytes = text.size() + 1, CUDA_SUCCESS;
}
CUresult cuLinkDestroy(CUlinkState link) { return delete reinterpret_cast<std::string*>(link), CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule m) { return delete reinterpret_cast<Loaded*>(m), CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* out, CUmodule m, const char* name) {
  Locked held;
  auto& loaded = *reinterpret_cast<Loaded*>(m);
  try {
    if (!loaded.module->function(name).entry) return CUDA_ERROR_NOT_FOUND;
  } catch (const std::exception& e) { return answer(say(cudaErrorSymbolNotFound, e.what())); }
  auto& entry = loaded.entries[name];
  if (!entry) entry.reset(new Entry{loaded.module, name});
  *out = reinterpret_cast<CUfunction>(entry.get());
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction f) {
  Locked held;
  const auto& entry = *reinterpret_cast<Entry*>(f);
  switch (which) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = int(entry.module->function(entry.name).most_threads); break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = int(entry.module->shared_bytes()); break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = int(entry.permitted); break;
    default: *value = 0; break;
  }
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute which, int value) {
  Locked held;
  if (which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if (size_t(value) > kMostShared) return answer(say(cudaErrorInvalidValue, "invalid value"));
    reinterpret_cast<Entry*>(f)->permitted = size_t(value);
  }
  return CUDA_SUCCESS;
}
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

// --- launches --------------------------------------------------------------------------------------------------------

CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** args, void**) {
  Locked held;
  const auto& entry = *reinterpret_cast<Entry*>(f);
  const dim3 grid(c->gridDimX, c->gridDimY, c->gridDimZ), block(c->blockDimX, c->blockDimY, c->blockDimZ);
  const Shape shape = Shape{grid, block, c->sharedMemBytes, same(c->hStream)}.with(
      reinterpret_cast<const cudaLaunchAttribute*>(c->attrs), c->numAttrs);
  return answer(start(entry.module, entry.name, entry.permitted, shape, args));
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void** args, void** extra) {
  CUlaunchConfig c{};
  c.gridDimX = gx, c.gridDimY = gy, c.gridDimZ = gz, c.blockDimX = bx, c.blockDimY = by, c.blockDimZ = bz;
  c.sharedMemBytes = shared, c.hStream = stream;
  return cuLaunchKernelEx(&c, f, args, extra);
}
CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                   unsigned bz, unsigned shared, CUstream stream, void** args) {
  CUlaunchAttribute together{};
  together.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, together.value.cooperative = 1;
  CUlaunchConfig c{};
  c.gridDimX = gx, c.gridDimY = gy, c.gridDimZ = gz, c.blockDimX = bx, c.blockDimY = by, c.blockDimZ = bz;
  c.sharedMemBytes = shared, c.hStream = stream, c.attrs = &together, c.numAttrs = 1;
  return cuLaunchKernelEx(&c, f, args, nullptr);
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, CUfunction, int, size_t) {
  return *count = int(kBlocksEach), CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, CUfunction, int, size_t, unsigned) {
  return *count = int(kBlocksEach), CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig*) {
  return *count = 4, CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream s) { return answer(cudaStreamSynchronize(same(s))); }
CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus* status) {
  return answer(cudaStreamIsCapturing(same(s), reinterpret_cast<cudaStreamCaptureStatus*>(status)));
}

// --- functions that torch looks up, but does not call here -----------------------------------------------------------

#define NOT_HERE(name) [[gnu::alias("ptx_not_here")]] int ptx_no_##name() asm(#name);
int ptx_not_here() { return answer(say(cudaErrorNotSupported, "the driver's memory mapping is not to be had here")); }
NOT_HERE(cuCtxFromGreenCtx)
NOT_HERE(cuDevResourceGenerateDesc)
NOT_HERE(cuDevSmResourceSplitByCount)
NOT_HERE(cuDeviceGetDevResource)
NOT_HERE(cuGreenCtxCreate)
NOT_HERE(cuGreenCtxDestroy)
NOT_HERE(cuGreenCtxStreamCreate)
NOT_HERE(cuMemAddressFree)
NOT_HERE(cuMemAddressReserve)
NOT_HERE(cuMemCreate)
NOT_HERE(cuMemExportToShareableHandle)
NOT_HERE(cuMemGetAllocationGranularity)
NOT_HERE(cuMemGetAllocationPropertiesFromHandle)
NOT_HERE(cuMemImportFromShareableHandle)
NOT_HERE(cuMemMap)
NOT_HERE(cuMemRelease)
NOT_HERE(cuMemRetainAllocationHandle)
NOT_HERE(cuMemSetAccess)
NOT_HERE(cuMemUnmap)
NOT_HERE(cuMulticastAddDevice)
NOT_HERE(cuMulticastBindMem)
NOT_HERE(cuMulticastCreate)
NOT_HERE(cuMulticastUnbind)
NOT_HERE(cuMemsetD32Async_v2)
NOT_HERE(cuStreamWriteValue32_v2)

}  // extern "C"
