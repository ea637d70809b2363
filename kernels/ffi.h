// Entry points in tvm-ffi's calling convention, using only its C interface: its C++ templates took more than half of a
// build (g++ -O3 of rmsnorm.cpp 2.3 s with them and 0.9 s without, gemv.cpp 3.3 and 1.9 s, on one Zen 4 core).
//
// AUTOSEL_EXPORT(name, function) exports `__tvm_ffi_<name>`, which takes TensorView, Optional<TensorView>, double and
// int64_t by position. An argument of another kind raises TypeError.
#pragma once
#include <tvm/ffi/c_api.h>

#include <new>

#include "argument.h"

namespace autosel {

// Borrows the caller's tensor for the length of the call.
class TensorView {
 public:
  TensorView() : t_(nullptr) {}
  explicit TensorView(const DLTensor* t) : t_(t) {}
  void* data_ptr() const { return t_->data; }
  uint64_t byte_offset() const { return t_->byte_offset; }
  int ndim() const { return t_->ndim; }
  int64_t size(int64_t i) const { return t_->shape[i < 0 ? i + t_->ndim : i]; }
  int64_t stride(int64_t i) const { return t_->strides[i < 0 ? i + t_->ndim : i]; }
  DLDataType dtype() const { return t_->dtype; }
  DLDevice device() const { return t_->device; }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < t_->ndim; ++i) n *= t_->shape[i];
    return n;
  }

 private:
  const DLTensor* t_;
};

template <class T> struct Unpack;

[[noreturn]] static inline void not_a(const char* expected, int64_t position) {
  AUTOSEL_THROW(TypeError) << "argument " << position << " is not " << expected;
  __builtin_unreachable();
}

template <> struct Unpack<TensorView> {
  static TensorView from(const TVMFFIAny& a, int64_t position) {
    const DLTensor* t = nullptr;
    if (a.type_index == kTVMFFIDLTensorPtr) t = static_cast<const DLTensor*>(a.v_ptr);
    if (a.type_index == kTVMFFITensor) t = TVMFFITensorGetDLTensorPtr(a.v_obj);
    if (t == nullptr) not_a("a tensor", position);
    if (t->strides == nullptr && t->ndim > 0) not_a("a tensor with strides", position);
    return TensorView(t);
  }
};

template <class T> struct Unpack<Optional<T>> {
  static Optional<T> from(const TVMFFIAny& a, int64_t position) {
    return a.type_index == kTVMFFINone ? Optional<T>() : Optional<T>(Unpack<T>::from(a, position));
  }
};

template <> struct Unpack<int64_t> {
  static int64_t from(const TVMFFIAny& a, int64_t position) {
    if (a.type_index != kTVMFFIInt && a.type_index != kTVMFFIBool) not_a("an integer", position);
    return a.v_int64;
  }
};

template <> struct Unpack<double> {
  static double from(const TVMFFIAny& a, int64_t position) {
    if (a.type_index == kTVMFFIFloat) return a.v_float64;
    if (a.type_index != kTVMFFIInt && a.type_index != kTVMFFIBool) not_a("a number", position);
    return double(a.v_int64);
  }
};

template <class... A, size_t... I>
static inline void call(void (*f)(A...), const TVMFFIAny* args, std::index_sequence<I...>) {
  f(Unpack<typename Bare<A>::type>::from(args[I], int64_t(I))...);
}

template <class... A>
static inline int guarded(const char* name, void (*f)(A...), const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  try {
    if (count != int32_t(sizeof...(A)))
      AUTOSEL_THROW(TypeError) << name << " takes " << int64_t(sizeof...(A)) << " arguments, not " << int64_t(count);
    call(f, args, std::index_sequence_for<A...>{});
    *result = TVMFFIAny{};  // None
    return 0;
  } catch (const Raised& error) {
    TVMFFIErrorSetRaisedFromCStr(error.kind, error.what());
  } catch (const std::bad_alloc& error) {
    TVMFFIErrorSetRaisedFromCStr("MemoryError", error.what());
  } catch (const std::exception& error) {
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", error.what());
  }
  return -1;
}

}  // namespace autosel

#define AUTOSEL_EXPORT(name, function)                                                                                \
  extern "C" __attribute__((visibility("default"))) int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t count, \
                                                                         TVMFFIAny* result) {                         \
    return ::autosel::guarded(#name, &function, args, count, result);                                                 \
  }
