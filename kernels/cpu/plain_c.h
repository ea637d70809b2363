// Entry points in plain C: compiled with -DAUTOSEL_PLAIN_C, a kernel needs no header but its own, and ctypes can call
// it. `autosel export --repro` writes scripts that do.
//
// An entry takes an array of pointers, one per argument: TensorView*, or null for an absent optional, double*,
// int64_t*. It returns null, or the message of the exception.
#pragma once
#include <cstddef>

#include "../argument.h"

// DLPack's numbers
enum DLDataTypeCode { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6, kDLFloat8_e4m3fn = 10 };
struct DLDataType { uint8_t code, bits; uint16_t lanes; };

namespace autosel {

// The ctypes structure in the script has the same fields.
struct TensorView {
  void* data_;
  int64_t ndim_, shape_[8], stride_[8], code_, bits_;

  void* data_ptr() const { return data_; }
  uint64_t byte_offset() const { return 0; }
  int ndim() const { return int(ndim_); }
  int64_t size(int64_t i) const { return shape_[i < 0 ? i + ndim_ : i]; }
  int64_t stride(int64_t i) const { return stride_[i < 0 ? i + ndim_ : i]; }
  DLDataType dtype() const { return {uint8_t(code_), uint8_t(bits_), 1}; }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < ndim_; ++i) n *= shape_[i];
    return n;
  }
};

template <class T> struct Unpack { static T from(void* p) { return *static_cast<T*>(p); } };
template <class T> struct Unpack<Optional<T>> {
  static Optional<T> from(void* p) { return p ? Optional<T>(*static_cast<const T*>(p)) : Optional<T>(); }
};

template <class... A, size_t... I> static inline void call(void (*f)(A...), void** args, std::index_sequence<I...>) {
  f(Unpack<typename Bare<A>::type>::from(args[I])...);
}

template <class... A> static inline const char* guarded(void (*f)(A...), void** args) {
  static thread_local std::string message;
  try {
    call(f, args, std::index_sequence_for<A...>{});
    return nullptr;
  } catch (const Raised& error) {
    message = std::string(error.kind) + ": " + error.what();
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}

}  // namespace autosel

#define AUTOSEL_EXPORT(name, function)                                                        \
  extern "C" __attribute__((visibility("default"))) const char* autosel_##name(void** args) { \
    return ::autosel::guarded(&function, args);                                               \
  }
