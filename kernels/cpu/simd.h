// Vectors of fp32 lanes over three instruction sets, chosen by the flags a kernel is compiled with:
//   AVX-512 (+BF16 dot)   16 lanes      AVX2 + FMA + F16C   8 lanes      portable   8 lanes, GCC vector extensions
//
// Storage types are bf16, f16 and float; arithmetic is always fp32. Stores round to nearest even.
// Flush-to-zero of bf16 subnormals is legal by contract: vdpbf16ps and vcvtneps2bf16 flush.
#pragma once
#include "system.h"

namespace autosel {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define AUTOSEL_AVX512 1
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
#if defined(__AVX512BF16__) && defined(AUTOSEL_AVX512)
#define AUTOSEL_BF16_DOT 1
#endif

typedef float vf __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(kLanes * 4)));
typedef int32_t vi __attribute__((vector_size(kLanes * 4)));
typedef uint16_t vh __attribute__((vector_size(kLanes * 2)));
typedef float vreg __attribute__((vector_size(kLanes * 4)));

// The compiler does not treat vreg{} + x as a broadcast: -0 + 0 is 0, so it keeps the addition, and the load cannot
// become a broadcast.
#if defined(AUTOSEL_AVX512)
static inline vreg splat(float x) { return vreg{} + x; }
#else
static inline vreg splat(float x) { return vreg{x, x, x, x, x, x, x, x}; }
#endif

// --- scalars ---------------------------------------------------------------------------------------------------------

static inline float bits_to_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
static inline uint32_t float_to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) { return bits_to_float(uint32_t(x.bits) << 16); }
static inline float widen(f16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // Scaling by 2^112 re-biases the exponent and normalises subnormals in one multiplication.
  return bits_to_float(sign | float_to_bits(bits_to_float(rest << 13) * 0x1p112f));
#endif
}

template <class T> static inline T narrow(float x);
template <> inline float narrow<float>(float x) { return x; }
template <> inline bf16 narrow<bf16>(float x) {
  uint32_t u = float_to_bits(x);
  if ((u & 0x7fffffff) > 0x7f800000) return bf16{uint16_t(u >> 16 | 0x40)};  // NaN stays NaN
  return bf16{uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
template <> inline f16 narrow<f16>(float x) {
#if defined(__F16C__)
  return f16{uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
#else
  uint32_t u = float_to_bits(x), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
  if (rest > 0x7f800000) return f16{uint16_t(sign | 0x7e00)};
  if (rest >= 0x477ff000) return f16{uint16_t(sign | 0x7c00)};  // rounds beyond 65504
  if (rest < 0x38800000) {                                       // subnormal in fp16: let fp32 addition round
    float shifted = bits_to_float(rest) + 0.5f;
    return f16{uint16_t(sign | (float_to_bits(shifted) - 0x3f000000))};
  }
  return f16{uint16_t(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13)};
#endif
}

// --- vectors ---------------------------------------------------------------------------------------------------------

static inline vreg load(const float* p) { return *reinterpret_cast<const vf*>(p); }
static inline vreg load(const bf16* p) {
#if defined(__AVX2__) && !defined(AUTOSEL_AVX512)
  // GCC 12 compiles the conversion below as two halves, five operations instead of these two.
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return reinterpret_cast<vreg>(_mm256_slli_epi32(wide, 16));
#else
  vh h;
  memcpy(&h, p, sizeof h);
  return reinterpret_cast<vreg>(__builtin_convertvector(h, vu) << 16);
#endif
}
static inline vreg load(const f16* p) {
#if defined(AUTOSEL_AVX512)
  return reinterpret_cast<vreg>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__)
  return reinterpret_cast<vreg>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  vreg v;
  for (int i = 0; i < kLanes; ++i) v[i] = widen(p[i]);
  return v;
#endif
}

static inline void store(float* p, vreg v) { *reinterpret_cast<vf*>(p) = v; }
static inline void store(bf16* p, vreg v) {
#if defined(AUTOSEL_BF16_DOT)
  __m256bh h = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v));
  memcpy(p, &h, 32);
#else
  vu u = reinterpret_cast<vu>(v);
  vu rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  vu nan = (u & 0x7fffffff) > 0x7f800000 ? vu{} + 1 : vu{};
  vh h = __builtin_convertvector(nan ? (u >> 16 | 0x40) : rounded, vh);
  memcpy(p, &h, sizeof h);
#endif
}
static inline void store(f16* p, vreg v) {
#if defined(AUTOSEL_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = narrow<f16>(v[i]);
#endif
}

// Loads the first n (< kLanes) elements, zeros after them; never reads past p + n.
template <class T> static inline vreg load_tail(const T* p, int64_t n) {
  T buffer[kLanes] = {};
  memcpy(buffer, p, size_t(n) * sizeof(T));
  return load(buffer);
}
template <class T> static inline void store_tail(T* p, vreg v, int64_t n) {
  T buffer[kLanes];
  store(buffer, v);
  memcpy(p, buffer, size_t(n) * sizeof(T));
}

static inline vreg fma(vreg a, vreg b, vreg c) {
#if defined(AUTOSEL_AVX512)
  return reinterpret_cast<vreg>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__FMA__)
  return reinterpret_cast<vreg>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#else
  return a * b + c;
#endif
}

// No caller needs a maximum that keeps NaN: callers that must keep NaN add the operands instead.
static inline vreg max(vreg a, vreg b) { return a > b ? a : b; }

static inline float sum(vreg v) {
#if defined(AUTOSEL_AVX512)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(v));
#else
  float a = (v[0] + v[4]) + (v[2] + v[6]), b = (v[1] + v[5]) + (v[3] + v[7]);
  return a + b;
#endif
}
static inline float max(vreg v) {
#if defined(AUTOSEL_AVX512)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(v));
#else
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

// exp(x) = 2^n * e^f, |f| <= ln2 / 2: relative error below 2^-23 (tests/cpu/test_candidates_cpp_rows.py tests a million
// arguments). Below -87.33, where the result would be subnormal, it gives 0; above 88.72 infinity; NaN stays NaN.
static inline vreg exp(vreg x) {
  const vreg lo = splat(-87.33f);
#if defined(AUTOSEL_AVX512)
  // min returns its second operand if either is NaN. The bound only keeps f finite: scalef handles the overflow.
  vreg c = reinterpret_cast<vreg>(_mm512_min_ps(_mm512_set1_ps(89.0f), reinterpret_cast<__m512>(x)));
#else
  const vreg hi = splat(88.72f);
  vreg c = x < lo ? lo : (x > hi ? hi : x);
#endif
  const vreg magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  vreg n = fma(c, splat(1.44269504f), magic) - magic;
  vreg f = fma(n, splat(-0.693145752f), c);
  f = fma(n, splat(-1.42860677e-6f), f);
  // Minimax in relative error for 1 + f + f^2 p(f): 3.1e-9 (Taylor's polynomial of this degree: 1.2e-7).
  vreg p = splat(0.00138142193f);
  p = fma(p, f, splat(0.00836889911f));
  p = fma(p, f, splat(0.0416684076f));
  p = fma(p, f, splat(0.166665196f));
  p = fma(p, f, splat(0.49999994f));
  p = fma(p, f, splat(1.0f));
  p = fma(p, f, splat(1.0f));
#if defined(AUTOSEL_AVX512)
  __m512 v = reinterpret_cast<__m512>(x);
  __mmask16 normal = _mm512_cmp_ps_mask(v, reinterpret_cast<__m512>(lo), _CMP_NLT_UQ);  // true for NaN
  return reinterpret_cast<vreg>(_mm512_maskz_scalef_ps(normal, reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(n)));
#else
  // Two halves, because 2^128 alone is not a float.
  vi e = __builtin_convertvector(n, vi), half = e >> 1;
  vreg scaled = p * reinterpret_cast<vreg>((half + 127) << 23) * reinterpret_cast<vreg>((e - half + 127) << 23);
  scaled = x < lo ? vreg{} : scaled;
  scaled = x > hi ? splat(INFINITY) : scaled;
  return x != x ? x : scaled;
#endif
}

// --- dot products: acc += sum of products of kLanes (fp32, fp16) or 2 * kLanes (bf16 with the dot instruction) -------

#if defined(AUTOSEL_BF16_DOT)
template <class T> constexpr int kDotWidth = kLanes;
template <> inline constexpr int kDotWidth<bf16> = 2 * kLanes;
static inline vreg dot(vreg acc, const bf16* a, const bf16* b) {
  __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
  return reinterpret_cast<vreg>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), (__m512bh)x, (__m512bh)y));
}
#else
template <class T> constexpr int kDotWidth = kLanes;
static inline vreg dot(vreg acc, const bf16* a, const bf16* b) { return fma(load(a), load(b), acc); }
#endif
static inline vreg dot(vreg acc, const f16* a, const f16* b) { return fma(load(a), load(b), acc); }
static inline vreg dot(vreg acc, const float* a, const float* b) { return fma(load(a), load(b), acc); }

}  // namespace autosel
