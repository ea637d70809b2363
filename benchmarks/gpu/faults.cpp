// What a kernel does to take its process down, for the containment stage's dry run on a CPU: as faults.cu, entry by
// entry. Each takes rmsnorm's arguments.
#include <sys/mman.h>

#include <new>

#include "tensor.h"

namespace autosel {

static void illegal_access(TensorView, TensorView, double, double, TensorView) { *static_cast<volatile int*>(nullptr) = 1; }

static void endless(TensorView, TensorView, double, double, TensorView) {
  for (volatile uint64_t i = 0;; ++i) {
  }
}

// Address space without a page behind it: what ends is the worker's allowance, not the machine's memory.
static void out_of_memory(TensorView, TensorView, double, double, TensorView) {
  for (;;) {
    void* p = mmap(nullptr, size_t(256) << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
  }
}

}  // namespace autosel

AUTOSEL_EXPORT(illegal_access, autosel::illegal_access);
AUTOSEL_EXPORT(endless, autosel::endless);
AUTOSEL_EXPORT(out_of_memory, autosel::out_of_memory);
