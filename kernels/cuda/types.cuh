// Storage types, and 16-byte vectors of them: a loaded vector stays 16 raw bytes until it is multiplied.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cstring>

namespace autosel {

using bf16 = __nv_bfloat16;
using f16 = __half;
using e4m3 = __nv_fp8_e4m3;

constexpr int kWarp = 32;
template <class T> constexpr int kVec = 16 / int(sizeof(T));  // elements in one vector

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(f16 x) { return __half2float(x); }
__device__ __forceinline__ float widen(e4m3 x) { return float(x); }

// One rounding, to nearest even; beyond the range it becomes infinite, as PyTorch's conversions do.
template <class T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ f16 narrow<f16>(float x) { return __float2half_rn(x); }

__device__ __forceinline__ float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// One word of a vector: two bf16 or fp16, one fp32, four e4m3.
__device__ __forceinline__ void widen_word(float, uint32_t w, float* x) { x[0] = bits_to_float(w); }
__device__ __forceinline__ void widen_word(bf16, uint32_t w, float* x) {
  x[0] = bits_to_float(w << 16), x[1] = bits_to_float(w & 0xffff0000u);  // bf16 is the upper half of an fp32
}
__device__ __forceinline__ void widen_word(f16, uint32_t w, float* x) {
  __half2 h;
  memcpy(&h, &w, 4);
  float2 f = __half22float2(h);
  x[0] = f.x, x[1] = f.y;
}
__device__ __forceinline__ void widen_word(e4m3, uint32_t w, float* x) {
  for (int i = 0; i < 2; ++i) {  // the packed conversion: two values an instruction on sm_89 and later
    __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(w >> (16 * i)), __NV_E4M3);
    float2 f = __half22float2(__half2(raw));
    x[2 * i] = f.x, x[2 * i + 1] = f.y;
  }
}

template <class T> __device__ __forceinline__ void widen(const uint4& v, float (&x)[kVec<T>]) {
  constexpr int kWord = kVec<T> / 4;
  widen_word(T{}, v.x, x), widen_word(T{}, v.y, x + kWord);
  widen_word(T{}, v.z, x + 2 * kWord), widen_word(T{}, v.w, x + 3 * kWord);
}

__device__ __forceinline__ uint32_t narrow_word(float, const float* x) {
  uint32_t w;
  memcpy(&w, x, 4);
  return w;
}
__device__ __forceinline__ uint32_t narrow_word(bf16, const float* x) {
  __nv_bfloat162 h = __floats2bfloat162_rn(x[0], x[1]);
  uint32_t w;
  memcpy(&w, &h, 4);
  return w;
}
__device__ __forceinline__ uint32_t narrow_word(f16, const float* x) {
  __half2 h = __floats2half2_rn(x[0], x[1]);
  uint32_t w;
  memcpy(&w, &h, 4);
  return w;
}

template <class T> __device__ __forceinline__ uint4 narrow(const float (&x)[kVec<T>]) {
  constexpr int kWord = kVec<T> / 4;
  return uint4{narrow_word(T{}, x), narrow_word(T{}, x + kWord), narrow_word(T{}, x + 2 * kWord),
               narrow_word(T{}, x + 3 * kWord)};
}

}  // namespace autosel
