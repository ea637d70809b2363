// Launching on the stream that PyTorch is on, with or without programmatic dependent launch.
#pragma once
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>

#include "memory.cuh"
#include "tensor.cuh"

namespace autosel {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // reported here: a check after a later launch, as in CUTLASS, must not see it
  AUTOSEL_THROW(RuntimeError) << what << ": " << cudaGetErrorString(error);
}

// The caller's current stream on a tensor's device; while this object lives, that device is current.
class Stream {
 public:
  explicit Stream(const TensorView& t) : device_(t.device().device_id) {
    stream_ = static_cast<cudaStream_t>(TVMFFIEnvGetStream(AUTOSEL_DEVICE, device_));
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (device_ != before_) check(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~Stream() {
    if (device_ != before_) cudaSetDevice(before_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t get() const { return stream_; }
  int device() const { return device_; }

 private:
  int device_, before_ = 0;
  cudaStream_t stream_;
};

struct Shape {
  dim3 grid;
  unsigned threads;
  size_t shared_bytes = 0;
  bool dependent = false;  // may start before the previous kernel has finished, which it can wait for
  bool together = false;   // its CTAs wait for each other: launched only if all of them can be resident at once
};

constexpr size_t kSharedUnasked = 48 << 10;  // more must be requested, once per kernel and device

// Functions with static variables are static: if they were inline, all libraries of the process that were compiled from
// any version of this header would share the variables.

// The most shared memory that a block of this device can request.
static inline size_t most_shared(const Stream& stream) {
  static std::mutex guard;
  static std::map<int, size_t> known;
  std::lock_guard<std::mutex> hold(guard);
  size_t& bytes = known[stream.device()];
  if (bytes == 0) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, stream.device()), "shared memory");
    bytes = size_t(value);
  }
  return bytes;
}

// Return true if a kernel can wait for the previous one, and so be launched before that has ended: sm_90 and later.
// Older devices have no such instruction and may refuse the launch.
static inline bool can_wait(const Stream& stream) {
  static std::mutex guard;
  static std::map<int, int> known;
  std::lock_guard<std::mutex> hold(guard);
  int& major = known[stream.device()];
  if (major == 0)
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, stream.device()), "compute capability");
  return major >= 9;
}

// Allows a kernel more than 48 KiB on this device; raises RuntimeError if the device has less.
static inline void permit_shared(const void* kernel, const Stream& stream, size_t bytes) {
  static std::mutex guard;
  static std::map<std::pair<const void*, int>, size_t> permitted;
  if (bytes <= kSharedUnasked) return;
  std::lock_guard<std::mutex> hold(guard);
  size_t& known = permitted[{kernel, stream.device()}];
  if (bytes <= known) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), "shared memory");
  known = bytes;
}

template <class... Params, class... Args>
void launch(const Shape& shape, const Stream& stream, void (*kernel)(Params...), Args&&... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  permit_shared(reinterpret_cast<const void*>(kernel), stream, shape.shared_bytes);
  const bool early = shape.dependent && can_wait(stream);
  cudaLaunchAttribute attribute{};
  attribute.id = shape.together ? cudaLaunchAttributeCooperative : cudaLaunchAttributeProgrammaticStreamSerialization;
  if (shape.together) attribute.val.cooperative = 1;
  else attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid, config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes, config.stream = stream.get();
  config.attrs = &attribute, config.numAttrs = early || shape.together ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), "launch");
}

}  // namespace autosel
