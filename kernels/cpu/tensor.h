// What every entry point does with its arguments: check, give pointers, choose the storage type.
#pragma once
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

// A build serves one storage type where -DAUTOSEL_BF16, _FP16 or _FP32 names it: a third of the work for the compiler, and
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

static inline bool same_dtype(const TensorView& a, const TensorView& b) {
  DLDataType x = a.dtype(), y = b.dtype();
  return x.code == y.code && x.bits == y.bits && x.lanes == y.lanes;
}

}  // namespace autosel
