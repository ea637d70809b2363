// kernels/cuda/probes.cu on emulated threads, launched as the driver launches: by name, arguments as addresses. And
// cuLaunchKernelEx itself, on cuda.h's own structures: what ctypes hands over is read as the driver would read it.
#include <cuda.h>
#include <atomic>

// Moves while threads look at it: by a tick each time.
inline long long clock64() {
  simt::rest();
  return (long long)simt::clock_ns();
}

#include "../../kernels/cuda/probes.cu"

// What grid_sync.cu asks of the toolkit's header, by a counter in memory, as a device does it.
namespace cooperative_groups {
struct Grid {
  static inline std::atomic<unsigned> met{0};
  void sync() {
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned round = met.fetch_add(1) / gridDim.x + 1;
      while (met.load() < round * gridDim.x) simt::rest();
    }
    __syncthreads();
  }
};
inline Grid this_grid() { return {}; }
}  // namespace cooperative_groups
#include "../../kernels/cuda/grid_sync.cu"

namespace {

std::string refused;  // why the last launch was not made

template <class T> T read(void* const* values, const size_t* sizes, size_t i) {
  if (sizes[i] != sizeof(T) && refused.empty())
    refused = "argument " + std::to_string(i) + " has " + std::to_string(sizes[i]) + " bytes; the kernel takes " +
              std::to_string(sizeof(T));
  T value{};
  memcpy(&value, values[i], std::min(sizes[i], sizeof(T)));
  return value;
}

// A launch of one thread is played by the first of a warp; blocks that wait for each other run at once.
template <class... P, size_t... I>
cudaError_t call(void (*kernel)(P...), unsigned blocks, unsigned threads, size_t shared, bool together, void* const* values,
                 const size_t* sizes, size_t count, std::index_sequence<I...>) {
  if (count != sizeof...(P)) refused = std::to_string(count) + " arguments; the kernel takes " + std::to_string(sizeof...(P));
  if (!refused.empty()) return cudaErrorInvalidValue;
  std::tuple<P...> held{read<P>(values, sizes, I)...};
  if (!refused.empty()) return cudaErrorInvalidValue;
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative, cooperative.val.cooperative = 1;
  cudaLaunchConfig_t c{};
  c.gridDim = dim3(blocks), c.blockDim = dim3(threads == 1 ? 32 : threads), c.dynamicSmemBytes = shared;
  c.attrs = &cooperative, c.numAttrs = together ? 1 : 0;
  return simt::run(c, reinterpret_cast<const void*>(kernel), [&] {
    if (threads > 1 || threadIdx.x == 0) kernel(std::get<I>(held)...);
  });
}

template <class... P> auto bound(void (*kernel)(P...), bool together = false) {
  return [=](unsigned blocks, unsigned threads, size_t shared, void* const* values, const size_t* sizes, size_t count) {
    return call(kernel, blocks, threads, shared, together, values, sizes, count, std::index_sequence_for<P...>());
  };
}

using Launch = std::function<cudaError_t(unsigned, unsigned, size_t, void* const*, const size_t*, size_t)>;

const std::map<std::string, Launch>& kernels() {
  static const std::map<std::string, Launch> all = {
      {"probe_read", bound(probe_read)},       {"probe_read_one", bound(probe_read_one)},
      {"probe_copy", bound(probe_copy)},       {"probe_chunks", bound(probe_chunks)},
      {"probe_chase", bound(probe_chase)},     {"probe_tiny", bound(probe_tiny)},
      {"probe_gate", bound(probe_gate)},       {"probe_tiny_dependent", bound(probe_tiny_dependent)},
      {"probe_exp2", bound(probe_exp2)},       {"probe_barrier", bound(probe_barrier, true)},
      {"probe_fma", bound(probe_fma)},         {"probe_clock", bound(probe_clock)},
      {"probe_from_fp8", bound(probe_from_fp8)},   {"probe_shared", bound(probe_shared)},
      {"probe_mma_bf16", bound(probe_mma_bf16)},   {"probe_mma_fp8", bound(probe_mma_fp8)},
      {"probe_grid_sync", bound(probe_grid_sync, true)},
  };
  return all;
}

}  // namespace

extern "C" {

// "" or why not.
const char* launch(const char* name, unsigned blocks, unsigned threads, size_t shared, void* const* values,
                   const size_t* sizes, size_t count) {
  refused.clear();
  auto found = kernels().find(name);
  if (found == kernels().end()) refused = std::string("no kernel ") + name;
  else if (found->second(blocks, threads, shared, values, sizes, count) != cudaSuccess && refused.empty())
    refused = simt_error(cudaErrorLaunchFailure);
  return refused.c_str();
}

int dependent_launches = 0;

// The one launch that Python makes by this call: a link of a chain, allowed to start before the one ahead has ended.
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void** arguments, void** extra) {
  bool as_agreed = c->gridDimX == 1 && c->gridDimY == 1 && c->gridDimZ == 1 && c->blockDimX == 32 && c->blockDimY == 1 &&
                   c->blockDimZ == 1 && c->sharedMemBytes == 0 && c->hStream != nullptr && c->numAttrs == 1 &&
                   c->attrs[0].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
                   c->attrs[0].value.programmaticStreamSerializationAllowed == 1 && function != nullptr && !extra;
  if (!as_agreed) return CUDA_ERROR_INVALID_VALUE;
  const size_t sizes[] = {sizeof(void*)};
  dependent_launches += 1;
  return *launch("probe_tiny_dependent", 1, 32, 0, arguments, sizes, 1) ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
}

}  // extern "C"
