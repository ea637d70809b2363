// Parts shared by the projections (gemv, gemm, norm_qkv, gate_up, lm_head): matrices, memory, the norm before them.
#pragma once
#include "tensor.h"

namespace autosel {

// Memory that a thread keeps between calls: no allocation once its largest shape has been seen.
class Scratch {
 public:
  ~Scratch() { free(memory_); }
  template <class T> T* get(int64_t elements) {
    size_t bytes = (size_t(elements) * sizeof(T) + 63) / 64 * 64;
    if (bytes > size_) {
      free(memory_);
      memory_ = aligned_alloc(64, bytes), size_ = memory_ ? bytes : 0;
      AUTOSEL_CHECK(memory_, "out of memory: " << bytes << " bytes of scratch");
    }
    return static_cast<T*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

// Rows of elements, each row contiguous; `stride` in elements. Absent if `at` is null.
template <class T> struct Matrix {
  T* at;
  int64_t rows, columns, stride;
  T* row(int64_t i) const { return at + i * stride; }
  Matrix operator()(int64_t first, int64_t count) const { return {row(first), count, columns, stride}; }  // some rows
};

// Raises ValueError unless t is rows x columns (-1: any) with contiguous rows and `like`'s dtype.
template <class T>
static Matrix<T> matrix(const TensorView& t, const char* name, const TensorView& like, int64_t rows = -1,
                        int64_t columns = -1) {
  AUTOSEL_CHECK(t.ndim() == 2, name << " must have two dimensions");
  AUTOSEL_CHECK((rows < 0 || t.size(0) == rows) && (columns < 0 || t.size(1) == columns),
                name << " is " << t.size(0) << " x " << t.size(1) << ", expected " << rows << " x " << columns
                     << " (-1: any)");
  AUTOSEL_CHECK(t.size(1) <= 1 || t.stride(1) == 1, name << ": last dimension not contiguous");
  AUTOSEL_CHECK(same_dtype(t, like), name << ": dtypes differ");
  return {data<T>(t), t.size(0), t.size(1), t.stride(0)};
}

// Raises ValueError unless t has `size` contiguous elements of `like`'s dtype.
template <class T> static T* vector(const TensorView& t, const char* name, const TensorView& like, int64_t size) {
  AUTOSEL_CHECK(t.ndim() == 1 && t.size(0) == size, name << " must have " << size << " elements");
  AUTOSEL_CHECK(size <= 1 || t.stride(0) == 1, name << " not contiguous");
  AUTOSEL_CHECK(same_dtype(t, like), name << ": dtypes differ");
  return data<T>(t);
}

// Loads the first n (<= kLanes) elements of p into a vector, or stores them.
template <class T> static inline vreg load_some(const T* p, int64_t n) {
  return n == kLanes ? load(p) : load_tail(p, n);
}
template <class T> static inline void store_some(T* p, vreg v, int64_t n) {
  if (n == kLanes) store(p, v);
  else store_tail(p, v, n);
}

// y[i] = x[i] * rsqrt(mean(x^2) + eps) * (weight[i] + offset), fp32 inside, rounded once to To (not at all if fp32).
template <class T, class To>
static void normalise_row(const T* x, const T* weight, To* y, int64_t d, float eps, float offset) {
  constexpr int W = kLanes;
  vreg a[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= d; i += 4 * W)
    for (int u = 0; u < 4; ++u) { vreg v = load(x + i + u * W); a[u] = fma(v, v, a[u]); }
  for (; i < d; i += W) { vreg v = load_some(x + i, d - i < W ? d - i : W); a[0] = fma(v, v, a[0]); }
  vreg scale = splat(1.0f / sqrtf(sum((a[0] + a[1]) + (a[2] + a[3])) / float(d) + eps)), o = splat(offset);
  for (i = 0; i < d; i += W) {
    int64_t n = d - i < W ? d - i : W;
    store_some(y + i, load_some(x + i, n) * scale * (load_some(weight + i, n) + o), n);
  }
}

}  // namespace autosel
