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

// y = x + 1 behind a kernel that makes x. 1: right. 0: x is read before the wait. 2: y is written before it, which the
// kernel ahead may still be reading. 3: one thread does not wait.
__global__ void follow(const float* x, float* y, int how) {
  const float early = how == 0 ? x[threadIdx.x] : 0.0f;
  if (how == 2) y[threadIdx.x] = -1.0f;
  if (how != 3 || threadIdx.x != 5) wait_for_producers();
  y[threadIdx.x] = (how == 0 ? early : x[threadIdx.x]) + 1.0f;
}

// Blocks that count themselves in. 0: fences on both sides of the count. 1: ahead of the barrier instead; 2: none behind.
__global__ void arrive(unsigned* counter, int how) {
  if (how == 1) __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    if (how != 1) __threadfence();
    const bool last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    if (last && how != 2) __threadfence();
  }
  __syncthreads();
}

void step_on(TensorView x, TensorView y, int64_t how) {
  Stream stream(x);
  launch(Shape{dim3(1), kThreads, 0, true}, stream, follow, data<const float>(x), data<float>(y), int(how));
}

void meet(TensorView counter, int64_t how) {
  Stream stream(counter);
  launch(Shape{dim3(3), kThreads}, stream, arrive, reinterpret_cast<unsigned*>(data<int32_t>(counter)), int(how));
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
AUTOSEL_EXPORT(step_on, autosel::step_on);
AUTOSEL_EXPORT(meet, autosel::meet);
