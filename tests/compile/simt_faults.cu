// Kernels with the mistakes that the SIMT harness exists to show.
#include "../../kernels/cuda/launch.cuh"
#include "../../kernels/cuda/reduce.cuh"

namespace autosel {
namespace {

constexpr int kThreads = 64;

// y[i] = x[63 - i] through shared memory; right only with a barrier in between.
__global__ void reverse(const float* x, float* y, int barriers) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  shared[threadIdx.x] = x[threadIdx.x];
  if (barriers) __syncthreads();
  y[threadIdx.x] = shared[kThreads - 1 - int(threadIdx.x)];
}

// Each thread writes its place again for the next round; without the second barrier some read what is already new.
__global__ void rotate(const float* x, float* y, int barriers) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  float own = x[threadIdx.x];
  for (int round = 0; round < 2; ++round) {
    shared[threadIdx.x] = own;
    __syncthreads();
    own = shared[(threadIdx.x + 1) % kThreads];
    if (barriers) __syncthreads();
  }
  y[threadIdx.x] = own;
}

// Half of a warp shuffles, the other half waits at a barrier.
__global__ void diverge(const float* x, float* y, int) {
  float v = x[threadIdx.x];
  if (threadIdx.x % 32 < 16) v = lanes_sum(v);
  else __syncthreads();
  y[threadIdx.x] = v;
}

// Half of a warp votes while the other half shuffles.
__global__ void mix(const float* x, float* y, int) {
  float v = x[threadIdx.x];
  if (threadIdx.x % 2) v = __shfl_xor_sync(kAll, v, 1);
  else v = float(__ballot_sync(kAll, v > 0));
  y[threadIdx.x] = v;
}

__global__ void overrun(const float* x, float* y, int) {
  float* shared = reinterpret_cast<float*>(shared_memory());
  shared[threadIdx.x + 1] = x[threadIdx.x];  // the last thread: one float beyond what was asked for
  y[threadIdx.x] = x[threadIdx.x];
}

void run(TensorView x, TensorView y, int64_t which, int64_t barriers) {
  Stream stream(x);
  Shape shape{dim3(1), kThreads, kThreads * sizeof(float), false};
  void (*kernels[])(const float*, float*, int) = {reverse, rotate, diverge, mix, overrun};
  launch(shape, stream, kernels[which], data<const float>(x), data<float>(y), int(barriers));
}

}  // namespace
}  // namespace autosel

AUTOSEL_EXPORT(run, autosel::run);
