// The handling of arguments in every entry point: check, get pointers, choose the storage type.
#pragma once
#include "system.h"

#if defined(AUTOSEL_PLAIN_C)
#include "plain_c.h"
#else
#include "../ffi.h"
#endif

#include "simd.h"
#include "team.h"

namespace autosel {

#define AUTOSEL_CHECK(condition, message) \
  do {                                    \
    if (!(condition)) AUTOSEL_THROW(ValueError) << message; \
  } while (0)

template <class T> static inline T* data(const TensorView& t) {
  return reinterpret_cast<T*>(static_cast<char*>(t.data_ptr()) + t.byte_offset());
}

// A build serves one storage type if -DAUTOSEL_BF16, _FP16 or _FP32 names it: a third of the work for the compiler, and
// a tune needs one. Without such a flag it serves all three.
#if defined(AUTOSEL_BF16) || defined(AUTOSEL_FP16) || defined(AUTOSEL_FP32)
#define AUTOSEL_ONE_DTYPE 1
#endif

// Calls body(T{}) with T the tensor's storage type.
template <class Body> static inline void by_dtype(const TensorView& t, const Body& body) {
  DLDataType d = t.dtype();
#if defined(AUTOSEL_BF16) || !defined(AUTOSEL_ONE_DTYPE)
  if (d.code == kDLBfloat && d.bits == 16) return body(bf16{});
#endif
#if defined(AUTOSEL_FP16) || !defined(AUTOSEL_ONE_DTYPE)
  if (d.code == kDLFloat && d.bits == 16) return body(f16{});
#endif
#if defined(AUTOSEL_FP32) || !defined(AUTOSEL_ONE_DTYPE)
  if (d.code == kDLFloat && d.bits == 32) return body(float{});
#endif
#if defined(AUTOSEL_ONE_DTYPE)
  AUTOSEL_THROW(TypeError) << "this build serves one dtype, and the tensor has another";
#else
  AUTOSEL_THROW(TypeError) << "dtype must be bfloat16, float16 or float32";
#endif
}

// Every kernel exports this, so inspecting and changing the process's threads needs no separate build. `command` 0:
// inspect; 1, 2: place workers on separate cores, or restore their earlier affinity; 3, 4: use OpenMP's threads, or our
// own helpers; 5, 6: wake sleeping workers for every job, or only if it is worth it. Then state int64[4] contains: on
// OpenMP's threads? placing? number of placed workers; waking for every job?
static void threads(TensorView state, int64_t command) {
  AUTOSEL_CHECK(state.numel() == 4 && state.dtype().code == kDLInt && state.dtype().bits == 64, "state is int64 [4]");
  team_v2::Team& team = team_v2::team();
  if (command == 1 || command == 2) team.placement().enable(command == 1);
  if (command == 3 || command == 4) team.leave_openmp(command == 4);
  if (command == 5 || command == 6) team.wake_always(command == 5);
  int64_t found[] = {team.on_openmp(), team.placement().enabled(), team.placement().placed(), team.wakes()};
  memcpy(data<int64_t>(state), found, sizeof found);
}

static inline bool same_dtype(const TensorView& a, const TensorView& b) {
  DLDataType x = a.dtype(), y = b.dtype();
  return x.code == y.code && x.bits == y.bits && x.lanes == y.lanes;
}

}  // namespace autosel

AUTOSEL_EXPORT(threads, autosel::threads);
