// Weights of eight bits with a scale per row: y = (x . codes[n]) * scales[n], computed with the loop of dot.h.
//
// A code is a number from -128 to 127, exact in bf16 and fp32. It is widened in registers and multiplied as in dot.h:
// with the bf16 dot if there is one and x is bf16, otherwise in fp32. So only the sums are rounded; the scale is
// applied after them, once per output. The bf16 dot takes 32 codes as bf16: two extensions to int32, two conversions,
// one exact narrowing. x is laid out as for a plain weight of `PanelOf<T>`.
//
// Instructions for 32 codes at M=1, AVX-512: 6 with the bf16 dot (one more for each further row of x), 8 in fp32 (two
// more). Two cores of Zen 4 reading 60 GB/s have 8 cycles for 64 codes.
#pragma once
#include "fused.h"

namespace autosel {

// A code, for rows of x of type T.
template <class T> struct Int8 { int8_t code; };

template <> inline constexpr bool kPaired<Int8<bf16>> = kPaired<bf16>;

// The plain type that has the same layout of x.
template <class T> using PanelOf = std::conditional_t<kPaired<T>, T, float>;

template <class T> struct Step<Int8<T>> {
  static constexpr int kWidth = kLanes;
  vreg w;
  static Step at(const Int8<T>* p) {
#if defined(AUTOSEL_AVX512)
    return {reinterpret_cast<vreg>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))))};
#elif defined(__AVX2__)
    return {reinterpret_cast<vreg>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))))};
#else
    vreg v;
    for (int i = 0; i < kLanes; ++i) v[i] = float(p[i].code);
    return {v};
#endif
  }
  vreg add(vreg acc, const float* x) const { return fma(w, load(x), acc); }
};

#if defined(AUTOSEL_BF16_DOT)
template <> struct Step<Int8<bf16>> {
  static constexpr int kWidth = 2 * kLanes;
  __m512bh w;
  static Step at(const Int8<bf16>* p) {
    auto half = [p](int i) {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i)));
    };
    return {_mm512_cvtne2ps_pbh(half(1), half(0))};
  }
  vreg add(vreg acc, const bf16* x) const {
    return reinterpret_cast<vreg>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), w, (__m512bh)_mm512_loadu_si512(x)));
  }
};
#endif

// Codes [n, k] with contiguous rows and their scales [n].
template <class T> struct Int8Matrix {
  Matrix<const Int8<T>> codes;
  const float* scales;
};

// Raises ValueError unless codes are int8 rows x columns (-1: any) and scales fp32 [rows].
template <class T>
static Int8Matrix<T> int8_matrix(const TensorView& codes, const TensorView& scales, const char* name, int64_t rows,
                                 int64_t columns) {
  DLDataType c = codes.dtype(), s = scales.dtype();
  AUTOSEL_CHECK(codes.ndim() == 2 && c.code == kDLInt && c.bits == 8, name << ".codes must be int8 [N,K]");
  AUTOSEL_CHECK((rows < 0 || codes.size(0) == rows) && codes.size(1) == columns,
                name << ".codes is " << codes.size(0) << " x " << codes.size(1) << ", expected " << rows << " x "
                     << columns << " (-1: any)");
  AUTOSEL_CHECK(columns <= 1 || codes.stride(1) == 1, name << ".codes: last dimension not contiguous");
  AUTOSEL_CHECK(s.code == kDLFloat && s.bits == 32 && scales.ndim() == 1 && scales.size(0) == codes.size(0),
                name << ".scales must be float32 [" << codes.size(0) << "]");
  AUTOSEL_CHECK(scales.size(0) <= 1 || scales.stride(0) == 1, name << ".scales: not contiguous");
  return {{data<const Int8<T>>(codes), codes.size(0), columns, codes.stride(0)}, data<const float>(scales)};
}

// Rows of x in the form that the dots take, from T or from rows already widened.
template <class T, class S> static void pack_for_int8(const Matrix<const S>& x, Wide<Int8<T>>* out) {
  using P = PanelOf<T>;
  if constexpr (std::is_same_v<S, P>) {
    pack_for_dot<P>(x, out);
  } else {
    static thread_local Scratch scratch;
    float* wide = scratch.get<float>(x.rows * x.columns);
    for (int64_t i = 0; i < x.rows; ++i)
      for (int64_t j = 0; j < x.columns; ++j) wide[i * x.columns + j] = widen(x.row(i)[j]);
    pack_for_dot<P>(Matrix<const float>{wide, x.rows, x.columns, x.columns}, out);
  }
}

// Scales v[p][0 .. count) and passes them on.
template <class T, int Parts, class Done> struct Scaled {
  const Int8Matrix<T>* w;
  const Done& done;
  void operator()(int64_t i, int64_t n, int64_t count, const float* const* v) const {
    float scaled[Parts][kLanes] = {};
    const float* at[Parts];
    for (int p = 0; p < Parts; ++p) {
      for (int64_t c = 0; c < count; ++c) scaled[p][c] = v[p][c] * w[p].scales[n + c];
      at[p] = scaled[p];
    }
    done(i, n, count, at);
  }
};

// As dot.h's `stream`.
template <class T, int Parts, class X, class Done>
static void stream_int8(const X& x, int64_t m, const Int8Matrix<T>* w, int64_t threads, int64_t rows,
                        const Done& done) {
  AUTOSEL_CHECK(rows >= 1, "rows is " << rows << ", expected at least 1");
  parallel(threads, w->codes.rows, 8, [&](int64_t begin, int64_t end, int rank) {
    static thread_local Scratch scratch;
    Matrix<const Int8<T>> codes[Parts];
    for (int p = 0; p < Parts; ++p) codes[p] = w[p].codes;
    for (int64_t m0 = 0; m0 < m; m0 += kMaxRows) {
      int64_t some = m - m0 < kMaxRows ? m - m0 : kMaxRows, k = codes->columns;
      Wide<Int8<T>>* panel = scratch.get<Wide<Int8<T>>>(dot_panel_elements<Int8<T>>(some, k));
      pack_for_int8<T>(x(m0, some), panel);
      auto offset = [&](int64_t i, int64_t n, int64_t count, const float* const* v) {
        done(rank, m0 + i, n, count, v);
      };
      Scaled<T, Parts, decltype(offset)> scaled{w, offset};
      stream_columns<Int8<T>, Parts>(panel, some, codes, begin, end, rows, codes->row(end), scaled);
    }
  });
}

}  // namespace autosel
