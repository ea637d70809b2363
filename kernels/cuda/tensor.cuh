// The handling of arguments in every entry point before it launches: check, get pointers, choose the storage type.
#pragma once
#include <tvm/ffi/extra/c_env_api.h>

#include <type_traits>

#include "../ffi.h"
#include "types.cuh"

#ifndef AUTOSEL_DEVICE
#define AUTOSEL_DEVICE kDLCUDA
#endif

namespace autosel {

#define AUTOSEL_CHECK(condition, message)                   \
  do {                                                      \
    if (!(condition)) AUTOSEL_THROW(ValueError) << message; \
  } while (0)

constexpr int64_t kMostElements = (int64_t(1) << 31) - 1;  // of a dimension: indices within one are 32-bit

template <class T> T* data(const TensorView& t) {
  return reinterpret_cast<T*>(static_cast<char*>(t.data_ptr()) + t.byte_offset());
}

inline bool same_dtype(const TensorView& a, const TensorView& b) {
  DLDataType x = a.dtype(), y = b.dtype();
  return x.code == y.code && x.bits == y.bits && x.lanes == y.lanes;
}

inline bool is(const TensorView& t, int code, int bits) {
  return t.dtype().code == code && t.dtype().bits == bits && t.dtype().lanes == 1;
}

// Raises ValueError unless t lies on `like`'s device, a GPU, has `dims` dimensions and a contiguous last one.
inline void check_form(const TensorView& t, const char* name, const TensorView& like, int dims) {
  DLDevice d = t.device(), l = like.device();
  AUTOSEL_CHECK(d.device_type == AUTOSEL_DEVICE, name << " is not on a CUDA device");
  AUTOSEL_CHECK(d.device_id == l.device_id, name << " is on device " << d.device_id << ", others on " << l.device_id);
  AUTOSEL_CHECK(t.ndim() == dims, name << " has " << t.ndim() << " dimensions, expected " << dims);
  AUTOSEL_CHECK(t.size(-1) <= 1 || t.stride(-1) == 1, name << ": last dimension not contiguous");
  for (int i = 0; i < dims; ++i)
    AUTOSEL_CHECK(t.size(i) <= kMostElements, name << ": a dimension of " << t.size(i) << " elements is too long");
}

// Rows of elements, each row contiguous; `stride` in elements. Absent if `at` is null.
template <class T> struct Matrix {
  T* at;
  int64_t rows, columns, stride;
  __device__ __forceinline__ T* row(int64_t i) const { return at + i * stride; }
};

// Raises ValueError unless t is rows x columns (-1: any) in `like`'s dtype, on its device.
template <class T>
Matrix<T> matrix(const TensorView& t, const char* name, const TensorView& like, int64_t rows = -1,
                 int64_t columns = -1) {
  check_form(t, name, like, 2);
  AUTOSEL_CHECK((rows < 0 || t.size(0) == rows) && (columns < 0 || t.size(1) == columns),
                name << " is " << t.size(0) << " x " << t.size(1) << ", expected " << rows << " x " << columns
                     << " (-1: any)");
  AUTOSEL_CHECK(same_dtype(t, like), name << ": dtypes differ");
  return {data<T>(t), t.size(0), t.size(1), t.stride(0)};
}

// Raises ValueError unless t has `size` contiguous elements of `like`'s dtype, on its device.
template <class T> T* vector(const TensorView& t, const char* name, const TensorView& like, int64_t size) {
  check_form(t, name, like, 1);
  AUTOSEL_CHECK(t.size(0) == size, name << " has " << t.size(0) << " elements, expected " << size);
  AUTOSEL_CHECK(same_dtype(t, like), name << ": dtypes differ");
  return data<T>(t);
}

// e4m3 bytes: torch.float8_e4m3fn, or plain uint8 if a framework has no such type.
inline bool is_e4m3(const TensorView& t) {
  return is(t, kDLFloat8_e4m3fn, 8) || is(t, kDLUInt, 8);
}

// Return true if rows of m may be read as 16-byte vectors from their first element on. A null matrix has no constraint.
template <class T> bool aligned(const Matrix<T>& m) {
  return uintptr_t(m.at) % 16 == 0 && (m.rows <= 1 || m.stride * int64_t(sizeof(T)) % 16 == 0);
}
template <class T> bool aligned(const T* p) { return uintptr_t(p) % 16 == 0; }

// A build serves one storage type if -DAUTOSEL_BF16, _FP16 or _FP32 names it: a third of the work for the compiler, and
// a tune needs one. Without such a flag it serves all three.
#if defined(AUTOSEL_BF16) || defined(AUTOSEL_FP16) || defined(AUTOSEL_FP32)
#define AUTOSEL_ONE_DTYPE 1
#endif

// Calls body(T{}) with T the tensor's storage type.
template <class Body> void by_dtype(const TensorView& t, const Body& body) {
#if defined(AUTOSEL_BF16) || !defined(AUTOSEL_ONE_DTYPE)
  if (is(t, kDLBfloat, 16)) return body(bf16{});
#endif
#if defined(AUTOSEL_FP16) || !defined(AUTOSEL_ONE_DTYPE)
  if (is(t, kDLFloat, 16)) return body(f16{});
#endif
#if defined(AUTOSEL_FP32) || !defined(AUTOSEL_ONE_DTYPE)
  if (is(t, kDLFloat, 32)) return body(float{});
#endif
#if defined(AUTOSEL_ONE_DTYPE)
  AUTOSEL_THROW(TypeError) << "this build serves one dtype, and the tensor has another";
#else
  AUTOSEL_THROW(TypeError) << "dtype must be bfloat16, float16 or float32";
#endif
}

// body(std::true_type) or body(std::false_type).
template <class Body> void by_flag(bool flag, const Body& body) {
  if (flag) body(std::true_type{});
  else body(std::false_type{});
}

}  // namespace autosel
