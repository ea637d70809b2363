// Device memory that a kernel keeps between calls, and counters by which a CTA knows that it is the last.
//
// There is one per stream, and one per graph captured on it: calls of a stream follow each other, and so do replays of
// a graph, but two graphs captured on one stream may run at the same time on two streams. (cudaStreamPerThread is one
// handle for many streams.) The memory grows when a larger shape comes (at the first call of a bound callable, which is
// not captured) and is never freed: a captured graph may contain its address. Counters are zero between calls: the last
// CTA resets a counter with the increment that detects it.
#pragma once
#include <thread>
#include <tuple>

#include "launch.cuh"

namespace autosel {
namespace {  // one per library: see launch.cuh

class Workspace {
 public:
  // At least `bytes`, and `counters` that are zero; raises RuntimeError if the device has no room.
  Workspace(const Stream& stream, size_t bytes, size_t counters) {
    static std::mutex guard;
    static std::map<std::tuple<int, cudaStream_t, std::thread::id, unsigned long long>, Room> rooms;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long capture = 0;
    check(cudaStreamGetCaptureInfo(stream.get(), &status, &capture), "cudaStreamGetCaptureInfo");
    if (status == cudaStreamCaptureStatusNone) capture = 0;
    const auto thread = stream.get() == cudaStreamPerThread ? std::this_thread::get_id() : std::thread::id();
    std::lock_guard<std::mutex> hold(guard);
    Room& room = rooms[{stream.device(), stream.get(), thread, capture}];
    if (bytes > room.bytes) room.memory = allocate(bytes), room.bytes = bytes;
    if (counters > room.counters) {
      void* made = allocate(counters * sizeof(unsigned));
      clear(made, counters * sizeof(unsigned));  // may raise: they are kept only after they are zero
      room.counter = static_cast<unsigned*>(made), room.counters = counters;
    }
    memory_ = static_cast<char*>(room.memory), counter_ = room.counter;
  }
  template <class T> T* memory(size_t offset = 0) const { return reinterpret_cast<T*>(memory_ + offset); }
  unsigned* counters() const { return counter_; }

 private:
  struct Room {
    void* memory = nullptr;
    unsigned* counter = nullptr;
    size_t bytes = 0, counters = 0;
  };

  // A capture forbids allocation in its own mode, because the replay would not repeat it. This one need not be
  // repeated.
  struct Relaxed {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    Relaxed() { check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode"); }
    ~Relaxed() { (void)cudaThreadExchangeStreamCaptureMode(&mode); }
  };

  static void* allocate(size_t bytes) {
    Relaxed relaxed;
    void* at = nullptr;
    check(cudaMalloc(&at, bytes), "workspace");
    return at;
  }
  static void clear(void* at, size_t bytes) {
    Relaxed relaxed;
    cudaStream_t own;  // not the caller's: it may be capturing
    check(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaMemsetAsync(at, 0, bytes, own), "cudaMemset");
    check(cudaStreamSynchronize(own), "cudaStreamSynchronize");
    check(cudaStreamDestroy(own), "cudaStreamDestroy");
  }

  char* memory_;
  unsigned* counter_;
};

}  // namespace

// Return, in all threads, whether this CTA is the last of `of` to arrive; if it is, its threads see the writes of the
// others before they arrived. `flag`: one word of shared memory. The thread that counts also fences, after the barrier:
// its fence then covers all writes of the CTA, and only this fence is ordered with the count by the memory model.
__device__ __forceinline__ bool last_to_arrive(unsigned* counter, unsigned of, unsigned* flag) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const bool last = atomicInc(counter, of - 1) == of - 1;
    if (last) __threadfence();
    *flag = last;
  }
  __syncthreads();
  return *flag != 0;
}

}  // namespace autosel
