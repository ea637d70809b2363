// Numbers of two bytes and less, and the roundings of instructions.
#pragma once
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace ptx {

inline float float_of(uint32_t b) {
  float f;
  memcpy(&f, &b, 4);
  return f;
}
inline uint32_t bits_of(float f) {
  uint32_t b;
  memcpy(&b, &f, 4);
  return b;
}

// A bf16 is the upper half of a float.
inline float bf16_to(uint16_t b) { return float_of(uint32_t(b) << 16); }
inline uint16_t to_bf16(float f, bool toward_zero = false) {
  uint32_t b = bits_of(f);
  if (std::isnan(f)) return 0x7fff;
  if (!toward_zero) b += 0x7fff + (b >> 16 & 1);
  return uint16_t(b >> 16);
}
inline float f16_to(uint16_t b) {
  _Float16 h;
  memcpy(&h, &b, 2);
  return float(h);
}
inline uint16_t to_f16(double v, bool toward_zero = false) {
  _Float16 h = _Float16(v);
  uint16_t b;
  memcpy(&b, &h, 2);
  if (std::isnan(v)) return 0x7fff;
  if (toward_zero && std::fabs(double(h)) > std::fabs(v)) b -= 1;
  return b;
}

// E4M3: no infinity; 0x7f is NaN, 448 the largest.
inline float e4m3_to(uint8_t b) {
  const int e = b >> 3 & 15, m = b & 7;
  if (e == 15 && m == 7) return NAN;
  const float v = e ? std::ldexp(float(8 + m), e - 10) : std::ldexp(float(m), -9);
  return b & 0x80 ? -v : v;
}
inline float e5m2_to(uint8_t b) { return f16_to(uint16_t(b << 8)); }

// To the nearest of the type's values, ties to the even code; beyond the largest the largest.
template <class From>
uint8_t to_fp8(float v, From from, uint8_t largest) {
  if (std::isnan(v)) return 0x7f;
  const uint8_t sign = std::signbit(v) ? 0x80 : 0;
  const float a = std::fabs(v);
  if (a >= from(largest)) return sign | largest;
  uint8_t low = 0, high = largest;
  while (high - low > 1) {
    const uint8_t mid = uint8_t((low + high) / 2);
    (from(mid) <= a ? low : high) = mid;
  }
  const double down = double(a) - from(low), up = double(from(high)) - a;
  return sign | (down < up || (down == up && low % 2 == 0) ? low : high);
}

inline float flushed(float f) { return std::fpclassify(f) == FP_SUBNORMAL ? std::copysign(0.0f, f) : f; }

class Rounding {
 public:
  explicit Rounding(int mode) : before_(fegetround()), set_(mode != before_) {
    if (set_) fesetround(mode);
  }
  ~Rounding() {
    if (set_) fesetround(before_);
  }

 private:
  int before_;
  bool set_;
};

}  // namespace ptx
