// spot   recompute a few randomly chosen elements of a served result, and compare (autosel/guard/spot.py)
//
//   spot_<op>(*arguments, *outputs, seed) -> largest |got - expected| / tolerance; 0 if nothing can be judged
//
// The runtime guard calls an entry after some of the calls it watches. A check may take only a few microseconds, so it
// reads one row of a weight for each element, one head of a cache, one slot. It runs on the caller's thread alone.
//
// The tolerance is a first-order estimate of the roundings that the op's contract allows (autosel/ops/<op>.py has the
// bound itself). It only decides whether the exact judge runs: an estimate that is too small costs time; one that is
// too large hides errors below it. If the expected value is not finite, the check does not judge it; the shadow checks
// compare NaN and Inf patterns. A result that is not finite although the expected value is gives infinity.
//
// bytes   linear, norm_qkv, gate_up, lm_head: kElements rows of each weight attn: one head's keys and values
// A thread team's attention (step.cpp) has no separate op: step_attend checks norm, rotation, append and attention.
// time (Zen 4, bf16, llama-1b): linear 2048x2048 2 us, gate_up 8192x2048 5 us, attn L 2048 20 us, the others below 1 us

#include "project.h"
#include "rotate.h"

namespace autosel {
namespace {

thread_local double worst;  // of the current call

constexpr int kElements = 4;     // of a product
constexpr int kChannels = 16;    // of a row
constexpr double kLambda = 4.0;  // autosel/ops/rounding.py
constexpr double kU32 = 0x1p-24;

template <class T> constexpr double kUnit = kU32;
template <> constexpr double kUnit<bf16> = 0x1p-8;
template <> constexpr double kUnit<f16> = 0x1p-11;
template <class T> constexpr double kTiny = 0x1p-126;  // the smallest normal: below it a flush to zero is legal
template <> constexpr double kTiny<f16> = 0x1p-14;

// splitmix64: Steele, Lea, Flood, OOPSLA 2014
struct Draw {
  uint64_t state;
  int64_t below(int64_t n) {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9, z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return int64_t((z ^ z >> 31) % uint64_t(n));
  }
};

#if defined(AUTOSEL_FP16)
constexpr double kLargest = 65504.0;
#else
constexpr double kLargest = 0x1.fep127;  // of bf16, and almost that of fp32
#endif

// If the expected value may be stored as infinity, it is not judged.
void compare(double got, double expected, double tolerance) {
  if (!(std::fabs(expected) + tolerance < kLargest)) return;
  double ratio = std::isfinite(got) ? std::fabs(got - expected) / tolerance : INFINITY;
  worst = std::max(worst, ratio);
}

// A bound callable does not check its arguments again, so they are checked here before they are read.
void need(bool holds) { AUTOSEL_CHECK(holds, "spot: arguments outside the op's contract"); }

void shaped(const TensorView& t, const TensorView& like, std::initializer_list<int64_t> sizes) {
  need(same_dtype(t, like) && t.ndim() == int(sizes.size()) && t.device().device_type == kDLCPU);
  int i = 0;
  for (int64_t size : sizes) need(t.size(i++) == size && size > 0);
  need(t.stride(-1) == 1);
}

bool is_int(const TensorView& t, int bits, int ndim) {
  return t.dtype().code == kDLInt && t.dtype().bits == bits && t.ndim() == ndim && t.device().device_type == kDLCPU;
}

// Row-major [rows, columns] with a contiguous last dimension.
template <class T> const T* row(const TensorView& t, int64_t i) { return data<T>(t) + i * t.stride(0); }

struct Dot {
  double sum = 0, magnitude = 0, energy = 0;  // of the products: plain, absolute, squared
};

// fp32 lanes within a block, float64 across blocks; fp32 operands in float64 throughout. `scale`: of x, with `by`[k].
template <class T, class X> Dot dot(const X* x, const T* w, int64_t n) {
  Dot d;
  if constexpr (std::is_same<T, float>::value) {
    for (int64_t i = 0; i < n; ++i) {
      double p = double(x[i]) * double(w[i]);
      d.sum += p, d.magnitude += std::fabs(p), d.energy += p * p;
    }
    return d;
  }
  constexpr int64_t kBlock = 64 * kLanes;
  const vu sign = vu{} + 0x7fffffffu;
  for (int64_t from = 0; from < n; from += kBlock) {
    int64_t to = std::min(n, from + kBlock), i = from;
    vreg s{}, m{}, e{};
    for (; i + kLanes <= to; i += kLanes) {
      vreg p = load(x + i) * load(w + i);
      s += p, m += reinterpret_cast<vreg>(reinterpret_cast<vu>(p) & sign), e += p * p;
    }
    if (i < to) {
      vreg p = load_tail(x + i, to - i) * load_tail(w + i, to - i);
      s += p, m += reinterpret_cast<vreg>(reinterpret_cast<vu>(p) & sign), e += p * p;
    }
    d.sum += sum(s), d.magnitude += sum(m), d.energy += sum(e);
  }
  return d;
}

// Error bound of accumulating K products in fp32. Flushed subnormal operands are left to the exact judge.
double accumulated(const Dot& d, int64_t k) {
  return kLambda * std::sqrt(double(k)) * kU32 * d.magnitude + 0x1p-126 * double(k);
}

template <class T> double optional_at(const Optional<TensorView>& t, int64_t m, int64_t n) {
  if (!t.has_value()) return 0;
  const TensorView& v = t.value();
  return widen(v.ndim() == 1 ? data<T>(v)[n * v.stride(0)] : row<T>(v, m)[n]);
}

// --- products --------------------------------------------------------------------------------------------------------

void linear(TensorView x, TensorView w, Optional<TensorView> bias, Optional<TensorView> residual, TensorView y,
            int64_t seed) {
  need(x.ndim() == 2 && w.ndim() == 2);
  shaped(x, x, {x.size(0), x.size(1)}), shaped(w, x, {w.size(0), x.size(1)}), shaped(y, x, {x.size(0), w.size(0)});
  if (bias.has_value()) shaped(bias.value(), x, {w.size(0)});
  if (residual.has_value()) shaped(residual.value(), x, {x.size(0), w.size(0)});
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Draw draw{uint64_t(seed)};
    int64_t k = x.size(1), m = draw.below(x.size(0));
    for (int i = 0; i < kElements; ++i) {
      int64_t n = draw.below(w.size(0));
      Dot d = dot(row<T>(x, m), row<T>(w, n), k);
      double b = optional_at<T>(bias, m, n), r = optional_at<T>(residual, m, n), value = d.sum + b + r;
      double stores = std::fabs(d.sum) + std::fabs(d.sum + b) + std::fabs(value);
      compare(widen(row<T>(y, m)[n]), value, accumulated(d, k) + kUnit<T> * stores + kTiny<T>);
    }
  });
}

// x normalised in float64, before rounding to fp32 lanes, whose error is far below the tolerance.
template <class T> void normalise(const T* x, const T* weight, int64_t d, double eps, double offset, std::vector<float>& h) {
  double squares = 0;
  for (int64_t i = 0; i < d; ++i) squares += double(widen(x[i])) * widen(x[i]);
  double rstd = 1 / std::sqrt(squares / double(d) + eps);
  h.resize(size_t(d) + kLanes);
  for (int64_t i = 0; i < d; ++i) h[size_t(i)] = float(widen(x[i]) * rstd * (widen(weight[i]) + offset));
}

// Change of a product if h is stored twice: autosel/ops/norm_qkv.py.
template <class T> double normed(const Dot& d, int64_t k) {
  double apart = kLambda * (std::sqrt(2.0) * kUnit<T> + 4 * kU32) * std::sqrt(d.energy);
  double together = (2 * kUnit<T> + (2 * std::sqrt(double(k)) + 8) * kU32) * std::fabs(d.sum);
  return accumulated(d, k) + apart + together + kUnit<T> * std::fabs(d.sum) + kTiny<T>;
}

thread_local std::vector<float> scratch, scores;
thread_local std::vector<std::pair<int64_t, int64_t>> places;  // (page, slot)

void norm_qkv(TensorView x, TensorView weight, TensorView w, double eps, double offset, TensorView y, int64_t seed) {
  need(x.ndim() == 2 && w.ndim() == 2);
  shaped(x, x, {x.size(0), x.size(1)}), shaped(w, x, {w.size(0), x.size(1)}), shaped(y, x, {x.size(0), w.size(0)});
  shaped(weight, x, {x.size(1)});
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Draw draw{uint64_t(seed)};
    int64_t k = x.size(1), m = draw.below(x.size(0));
    normalise(row<T>(x, m), data<T>(weight), k, eps, offset, scratch);
    for (int i = 0; i < kElements; ++i) {
      int64_t n = draw.below(w.size(0));
      Dot d = dot(scratch.data(), row<T>(w, n), k);
      compare(widen(row<T>(y, m)[n]), d.sum, normed<T>(d, k));
    }
  });
}

double activate(int64_t kind, double g) {
  if (kind == 0) return g / (1 + std::exp(-g));
  if (kind == 1) return 0.5 * g * std::erfc(-g / std::sqrt(2.0));
  return 0.5 * g * (1 + std::tanh(0.7978845608028654 * (g + 0.044715 * g * g * g)));
}

constexpr double kSteepest = 1.13;  // slope of silu (1.0998) and gelu (1.1290)

void gate_up(TensorView x, TensorView weight, TensorView w_gate, TensorView w_up, double eps, double offset,
             int64_t activation, TensorView y, int64_t seed) {
  need(x.ndim() == 2 && w_gate.ndim() == 2);
  shaped(x, x, {x.size(0), x.size(1)}), shaped(weight, x, {x.size(1)});
  shaped(w_gate, x, {w_gate.size(0), x.size(1)}), shaped(w_up, x, {w_gate.size(0), x.size(1)});
  shaped(y, x, {x.size(0), w_gate.size(0)});
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Draw draw{uint64_t(seed)};
    int64_t k = x.size(1), m = draw.below(x.size(0));
    normalise(row<T>(x, m), data<T>(weight), k, eps, offset, scratch);
    for (int i = 0; i < kElements; ++i) {
      int64_t n = draw.below(w_gate.size(0));
      Dot g = dot(scratch.data(), row<T>(w_gate, n), k), u = dot(scratch.data(), row<T>(w_up, n), k);
      double a = activate(activation, g.sum), value = a * u.sum;
      double a_error = kSteepest * normed<T>(g, k) + kUnit<T> * std::fabs(a) + 8 * kU32 * (std::fabs(g.sum) + 1);
      double u_error = normed<T>(u, k);
      double error = a_error * std::fabs(u.sum) + std::fabs(a) * u_error + a_error * u_error;
      compare(widen(row<T>(y, m)[n]), value, error + kUnit<T> * (std::fabs(value) + error) + kTiny<T>);
    }
  });
}

// Checks logits, or the index of the largest: no other of a few drawn logits may be larger.
void lm_head(TensorView x, TensorView w, int64_t greedy, TensorView out, int64_t seed) {
  if (!greedy) return linear(x, w, Optional<TensorView>(), Optional<TensorView>(), out, seed);
  need(x.ndim() == 2 && w.ndim() == 2 && is_int(out, 64, 1) && out.size(0) == x.size(0));
  shaped(x, x, {x.size(0), x.size(1)}), shaped(w, x, {w.size(0), x.size(1)});
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Draw draw{uint64_t(seed)};
    int64_t k = x.size(1), m = draw.below(x.size(0)), token = data<int64_t>(out)[m * out.stride(0)];
    if (token < 0 || token >= w.size(0)) return compare(INFINITY, 0, 1);
    Dot chosen = dot(row<T>(x, m), row<T>(w, token), k);
    for (int i = 0; i < kElements; ++i) {
      Dot other = dot(row<T>(x, m), row<T>(w, draw.below(w.size(0))), k);
      double tolerance = accumulated(chosen, k) + accumulated(other, k) + kTiny<T> +
                         2 * kUnit<T> * (std::fabs(chosen.sum) + std::fabs(other.sum));
      if (other.sum > chosen.sum) compare(other.sum, chosen.sum, tolerance);
    }
  });
}

// --- rows ------------------------------------------------------------------------------------------------------------

void rmsnorm(TensorView x, TensorView weight, double eps, double offset, TensorView y, int64_t seed) {
  need(x.ndim() == 2);
  shaped(x, x, {x.size(0), x.size(1)}), shaped(weight, x, {x.size(1)}), shaped(y, x, {x.size(0), x.size(1)});
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Draw draw{uint64_t(seed)};
    int64_t d = x.size(1), m = draw.below(x.size(0));
    normalise(row<T>(x, m), data<T>(weight), d, eps, offset, scratch);
    double relative = 3 * kUnit<T> + (2 * std::sqrt(double(d)) + 8) * kU32;
    for (int i = 0; i < kChannels; ++i) {
      int64_t at = draw.below(d);
      double scale = std::fabs(widen(data<T>(weight)[at]) + offset), value = scratch[size_t(at)];
      compare(widen(row<T>(y, m)[at]), value, relative * std::fabs(value) + kTiny<T> * (1 + 2 * scale));
    }
  });
}

// A thread team does not store y.
void add_rmsnorm(TensorView x, TensorView residual, TensorView weight, double eps, double offset, int64_t sandwich,
                 Optional<TensorView> y, TensorView joined, int64_t seed) {
  need(x.ndim() == 2);
  for (const TensorView* t : {&x, &residual, &joined}) shaped(*t, x, {x.size(0), x.size(1)});
  if (y.has_value()) shaped(y.value(), x, {x.size(0), x.size(1)});
  shaped(weight, x, {x.size(1)});
  const bool gemma = sandwich == 1;
  by_dtype(x, [&](auto tag) {
    using T = decltype(tag);
    Draw draw{uint64_t(seed)};
    int64_t d = x.size(1), m = draw.below(x.size(0));
    const T *a = row<T>(x, m), *b = row<T>(residual, m), *w = data<T>(weight);
    double squares = 0;
    for (int64_t i = 0; i < d; ++i) {
      double v = gemma ? widen(a[i]) : double(widen(a[i])) + widen(b[i]);
      squares += v * v;
    }
    double rstd = 1 / std::sqrt(squares / double(d) + eps);
    double relative = 6 * kUnit<T> + (2 * std::sqrt(double(d)) + 8) * kU32;
    for (int i = 0; i < kChannels; ++i) {
      int64_t at = draw.below(d);
      double scale = widen(w[at]) + offset, r = double(widen(a[at])) + widen(b[at]);
      double value = (gemma ? widen(a[at]) : r) * rstd * scale, sum = gemma ? widen(b[at]) + value : r;
      double tiny = kTiny<T> * (2 + (2 + 2 * rstd) * std::fabs(scale));
      if (y.has_value()) compare(widen(row<T>(y.value(), m)[at]), value, relative * std::fabs(value) + tiny);
      double error = gemma ? relative * std::fabs(value) : 2 * kU32 * std::fabs(r);
      compare(widen(row<T>(joined, m)[at]), sum, error + 2 * kUnit<T> * std::fabs(sum) + tiny);
    }
  });
}

void gated(TensorView gate, TensorView up, int64_t kind, TensorView y, int64_t seed) {
  need(gate.ndim() == 2);
  for (const TensorView* t : {&gate, &up, &y}) shaped(*t, gate, {gate.size(0), gate.size(1)});
  by_dtype(gate, [&](auto tag) {
    using T = decltype(tag);
    Draw draw{uint64_t(seed)};
    int64_t m = draw.below(gate.size(0));
    for (int i = 0; i < kChannels; ++i) {
      int64_t at = draw.below(gate.size(1));
      double g = widen(row<T>(gate, m)[at]), u = widen(row<T>(up, m)[at]), a = activate(kind, g);
      double a_error = kUnit<T> * std::fabs(a) + (8 + 2 * std::fabs(g)) * kU32 * (std::fabs(a) + std::fabs(g)) + kTiny<T>;
      double error = a_error * std::fabs(u) + kUnit<T> * std::fabs(a * u) + kTiny<T> * (2 + std::fabs(a));
      compare(widen(row<T>(y, m)[at]), a * u, 1.1 * error);
    }
  });
}

void swiglu(TensorView gate, TensorView up, TensorView y, int64_t seed) { gated(gate, up, 0, y, seed); }
void geglu(TensorView gate, TensorView up, int64_t tanh, TensorView y, int64_t seed) {
  gated(gate, up, tanh ? 2 : 1, y, seed);
}

template <class T> const T* head(const TensorView& t, int64_t m, int64_t h) {  // [M, H, D]
  return data<T>(t) + m * t.stride(0) + h * t.stride(1);
}

void rope(TensorView q, TensorView k, TensorView positions, TensorView inv_freq, int64_t style, TensorView q_out,
          TensorView k_out, int64_t seed) {
  need(q.ndim() == 3 && k.ndim() == 3 && is_int(positions, 64, 1) && positions.size(0) == q.size(0));
  need(inv_freq.ndim() == 1 && inv_freq.dtype().bits == 32 && 2 * inv_freq.size(0) <= q.size(2));
  for (const TensorView* t : {&q, &q_out}) shaped(*t, q, {q.size(0), q.size(1), q.size(2)});
  for (const TensorView* t : {&k, &k_out}) shaped(*t, q, {q.size(0), k.size(1), q.size(2)});
  by_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    Draw draw{uint64_t(seed)};
    int64_t m = draw.below(q.size(0)), pairs = inv_freq.size(0), d = q.size(2);
    int64_t position = data<int64_t>(positions)[m * positions.stride(0)];
    for (int i = 0; i < kChannels; ++i) {
      const TensorView &from = i % 2 ? k : q, &to = i % 2 ? k_out : q_out;
      int64_t h = draw.below(from.size(1)), p = draw.below(pairs);
      const T *x = head<T>(from, m, h), *y = head<T>(to, m, h);
      int64_t first = style ? 2 * p : p, second = style ? 2 * p + 1 : p + pairs;
      double angle = double(position) * data<float>(inv_freq)[p * inv_freq.stride(0)];
      double a = widen(x[first]), b = widen(x[second]), c = std::cos(angle), s = std::sin(angle);
      double turned = 12 * kU32 * (std::fabs(angle) + 1) * (std::fabs(a) + std::fabs(b));
      double one = std::fabs(a * c) + std::fabs(b * s), other = std::fabs(b * c) + std::fabs(a * s);
      compare(widen(y[first]), a * c - b * s, turned + 4 * kUnit<T> * one + 4 * kTiny<T>);
      compare(widen(y[second]), b * c + a * s, turned + 4 * kUnit<T> * other + 4 * kTiny<T>);
      if (d > 2 * pairs) {  // not rotated: copied
        int64_t at = 2 * pairs + draw.below(d - 2 * pairs);
        compare(widen(y[at]), widen(x[at]), 2 * kTiny<T>);
      }
    }
  });
}

// --- caches ----------------------------------------------------------------------------------------------------------

int32_t int32_at(const TensorView& t, int64_t i) { return data<int32_t>(t)[i * t.stride(0)]; }

// The bits of one slot of one head, of K and of V.
void kv_append(TensorView k, TensorView v, TensorView positions, Optional<TensorView> block_table, TensorView k_cache,
               TensorView v_cache, int64_t seed) {
  need(k.ndim() == 4 && k_cache.ndim() == 4 && is_int(positions, 32, 1) && positions.size(0) == k.size(0));
  for (const TensorView* t : {&k, &v}) shaped(*t, k, {k.size(0), k.size(1), k.size(2), k.size(3)});
  bool paged = block_table.has_value();
  for (const TensorView* t : {&k_cache, &v_cache})
    shaped(*t, k, {k_cache.size(0), paged ? k_cache.size(1) : k.size(1), paged ? k.size(1) : k_cache.size(2), k.size(3)});
  need(paged ? is_int(block_table.value(), 32, 2) && block_table.value().size(0) == k.size(0)
             : k_cache.size(0) == k.size(0));
  by_dtype(k, [&](auto tag) {
    using T = decltype(tag);
    Draw draw{uint64_t(seed)};
    int64_t b = draw.below(k.size(0)), h = draw.below(k.size(1)), s = draw.below(k.size(2)), d = k.size(3);
    int64_t at = int32_at(positions, b) + s;
    for (auto [now, cache] : {std::pair<TensorView, TensorView>{k, k_cache}, {v, v_cache}}) {
      const T* from = data<T>(now) + b * now.stride(0) + h * now.stride(1) + s * now.stride(2);
      const T* to = data<T>(cache);
      if (paged) {
        const TensorView& t = block_table.value();
        int64_t page = cache.size(1);
        if (at < 0 || at / page >= t.size(1)) return;
        int64_t id = data<int32_t>(t)[b * t.stride(0) + at / page * t.stride(1)];
        if (id < 0 || id >= cache.size(0)) return;
        to += id * cache.stride(0) + at % page * cache.stride(1) + h * cache.stride(2);
      } else {
        if (at < 0 || at >= cache.size(2)) return;
        to += b * cache.stride(0) + h * cache.stride(1) + at * cache.stride(2);
      }
      if (memcmp(from, to, size_t(d) * sizeof(T))) worst = INFINITY;
    }
  });
}

// The next lanes of `left` elements, zeros behind them.
template <class T> vreg part(const T* p, int64_t left) { return left >= kLanes ? load(p) : load_tail(p, left); }

// One query of one head over its keys, in a few of its channels. `key(j)`, `value(j)` give the addresses of position j.
template <class T, class Key, class Value>
void attend(Draw& draw, const T* q, int64_t d, int64_t first, int64_t end, double scale, double softcap, const Key& key,
            const Value& value, const T* o) {
  int64_t width = std::min<int64_t>(d, kLanes), from = draw.below(d - width + 1), keys = end - first;
  if (keys <= 0) {
    for (int64_t c = from; c < from + width; ++c) compare(widen(o[c]), 0, kTiny<T>);
    return;
  }
  scores.resize(size_t(keys) + kLanes);
  float peak = -INFINITY, far = 0;
  for (int64_t j = 0; j < keys; ++j) {
    const T* k = key(first + j);
    vreg a{}, b{};
    int64_t i = 0;
    for (; i + 2 * kLanes <= d; i += 2 * kLanes)
      a = fma(load(q + i), load(k + i), a), b = fma(load(q + i + kLanes), load(k + i + kLanes), b);
    for (; i < d; i += kLanes) a = fma(part(q + i, d - i), part(k + i, d - i), a);
    float s = sum(a + b) * float(scale);
    if (softcap > 0) s = float(softcap) * std::tanh(s / float(softcap));
    scores[size_t(j)] = s, peak = std::max(peak, s), far = std::max(far, std::fabs(s));
  }
  if (!std::isfinite(far)) return;
  for (int64_t j = 0; j < keys; j += kLanes) store(&scores[size_t(j)], exp(load(&scores[size_t(j)]) - splat(peak)));
  constexpr int64_t kBlock = 256;  // keys summed in fp32
  double total = 0, sums[kLanes] = {}, magnitudes[kLanes] = {};
  const vu sign = vu{} + 0x7fffffffu;
  for (int64_t j = 0; j < keys;) {
    vreg s{}, m{};
    float p = 0;
    for (int64_t end_of = std::min(keys, j + kBlock); j < end_of; ++j) {
      vreg v = part(value(first + j) + from, width), weight = splat(scores[size_t(j)]);
      p += scores[size_t(j)], s = fma(weight, v, s);
      m = fma(weight, reinterpret_cast<vreg>(reinterpret_cast<vu>(v) & sign), m);
    }
    total += p;
    for (int c = 0; c < kLanes; ++c) sums[c] += s[c], magnitudes[c] += m[c];
  }
  // Errors: scores, by the roundings of their dot products and of exp's argument; P and the result, by one store each.
  double score = (kLambda * std::sqrt(double(d)) + 16) * kU32 * (double(far) + 1) * 4;
  double relative = 2 * score + (2 * kLambda * std::sqrt(double(keys)) + 16) * kU32 + kUnit<T>;
  for (int64_t c = 0; c < width; ++c) {
    double expected = sums[c] / total, error = relative * magnitudes[c] / total;
    compare(widen(o[from + c]), expected, error + kUnit<T> * std::fabs(expected) + 2 * kTiny<T>);
  }
}

template <class T> const T* at4(const TensorView& t, int64_t b, int64_t h, int64_t i) {  // [B, H, L, D]
  return data<T>(t) + b * t.stride(0) + h * t.stride(1) + i * t.stride(2);
}

double scale_of(double scale, int64_t d) { return scale > 0 ? scale : 1 / std::sqrt(double(d)); }

void attn(TensorView q, TensorView k, TensorView v, Optional<TensorView> lengths, int64_t max_len, double scale,
          int64_t window, double softcap, TensorView o, int64_t seed) {
  need(q.ndim() == 4 && k.ndim() == 4 && q.size(1) % k.size(1) == 0);
  for (const TensorView* t : {&q, &o}) shaped(*t, q, {q.size(0), q.size(1), q.size(2), q.size(3)});
  for (const TensorView* t : {&k, &v}) shaped(*t, q, {q.size(0), k.size(1), k.size(2), q.size(3)});
  if (lengths.has_value()) need(is_int(lengths.value(), 32, 1) && lengths.value().size(0) == q.size(0));
  by_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    Draw draw{uint64_t(seed)};
    int64_t b = draw.below(q.size(0)), h = draw.below(q.size(1)), s = draw.below(q.size(2)), d = q.size(3);
    int64_t length = lengths.has_value() ? int32_at(lengths.value(), b) : max_len, kv = h / (q.size(1) / k.size(1));
    length = std::min(length, k.size(2));
    int64_t end = length - q.size(2) + s + 1, first = window > 0 ? std::max<int64_t>(0, end - window) : 0;
    attend(draw, at4<T>(q, b, h, s), d, first, end, scale_of(scale, d), softcap,
           [&](int64_t j) { return at4<T>(k, b, kv, j); }, [&](int64_t j) { return at4<T>(v, b, kv, j); },
           at4<T>(o, b, h, s));
  });
}

void prefill_attn(TensorView q, TensorView k, TensorView v, double scale, int64_t window, double softcap, TensorView o,
                  int64_t seed) {
  attn(q, k, v, Optional<TensorView>(), q.size(2), scale, window, softcap, o, seed);
}

void paged_attn(TensorView q, TensorView k_pages, TensorView v_pages, TensorView block_table, TensorView lengths,
                int64_t max_len, double scale, int64_t window, double softcap, TensorView o, int64_t seed) {
  need(q.ndim() == 4 && k_pages.ndim() == 4 && q.size(1) % k_pages.size(2) == 0);
  for (const TensorView* t : {&q, &o}) shaped(*t, q, {q.size(0), q.size(1), q.size(2), q.size(3)});
  for (const TensorView* t : {&k_pages, &v_pages})
    shaped(*t, q, {k_pages.size(0), k_pages.size(1), k_pages.size(2), q.size(3)});
  need(is_int(block_table, 32, 2) && block_table.size(0) == q.size(0) && is_int(lengths, 32, 1));
  need(lengths.size(0) == q.size(0));
  by_dtype(q, [&](auto tag) {
    using T = decltype(tag);
    Draw draw{uint64_t(seed)};
    int64_t b = draw.below(q.size(0)), h = draw.below(q.size(1)), s = draw.below(q.size(2)), d = q.size(3);
    int64_t page = k_pages.size(1), kv = h / (q.size(1) / k_pages.size(2));
    int64_t length = std::min<int64_t>(int32_at(lengths, b), block_table.size(1) * page);
    int64_t end = length - q.size(2) + s + 1, first = window > 0 ? std::max<int64_t>(0, end - window) : 0;
    const int32_t* table = data<int32_t>(block_table) + b * block_table.stride(0);
    places.resize(size_t(std::max<int64_t>(0, end)));  // each position's slot, counted in slots from the first page
    for (int64_t j = std::max<int64_t>(0, first), base = 0; j < end; ++j) {
      if (j % page == 0 || j == first) {
        base = table[j / page * block_table.stride(1)];
        if (base < 0 || base >= k_pages.size(0)) return;
      }
      places[size_t(j)] = {base, j % page};
    }
    auto place = [&](const TensorView& t, int64_t j) {
      return data<T>(t) + places[size_t(j)].first * t.stride(0) + places[size_t(j)].second * t.stride(1) + kv * t.stride(2);
    };
    attend(draw, at4<T>(q, b, h, s), d, first, end, scale_of(scale, d), softcap,
           [&](int64_t j) { return place(k_pages, j); }, [&](int64_t j) { return place(v_pages, j); },
           at4<T>(o, b, h, s));
  });
}

// Norms (if a weight is given) and rotates a head of a thread team's qkv into `to` with the team's own arithmetic;
// compares a few elements with float64, and with `stored` if given.
template <class T>
void turned_head(Draw& draw, const T* from, const Optional<TensorView>& norm, double eps, double offset, const Turn& turn,
                 int64_t position, const TensorView& inv_freq, int64_t style, int64_t d, T* to, const T* stored) {
  static thread_local std::vector<T> rounded;
  const T* source = from;
  double rstd = 1, unit = 0;
  if (norm.has_value()) {
    rounded.resize(size_t(d) + kLanes);
    normalise_row(from, data<T>(norm.value()), rounded.data(), d, float(eps), float(offset));
    source = rounded.data();
    double squares = 0;
    for (int64_t i = 0; i < d; ++i) squares += double(widen(from[i])) * widen(from[i]);
    rstd = 1 / std::sqrt(squares / double(d) + eps), unit = 2 * kUnit<T> + (2 * std::sqrt(double(d)) + 8) * kU32;
  }
  int64_t pairs = inv_freq.size(0);
  rotate(source, to, turn, pairs, style);
  memcpy(to + 2 * pairs, source + 2 * pairs, size_t(d - 2 * pairs) * sizeof(T));
  auto at = [&](int64_t i) {
    return norm.has_value() ? widen(from[i]) * rstd * (widen(data<T>(norm.value())[i]) + offset) : double(widen(from[i]));
  };
  const T* got = stored ? stored : to;
  for (int i = 0; i < kElements; ++i) {
    int64_t p = draw.below(pairs), first = style ? 2 * p : p, second = style ? 2 * p + 1 : p + pairs;
    double angle = double(position) * data<float>(inv_freq)[p * inv_freq.stride(0)];
    double a = at(first), b = at(second), c = std::cos(angle), s = std::sin(angle);
    double turned = (12 * kU32 * (std::fabs(angle) + 1) + unit) * (std::fabs(a) + std::fabs(b));
    double one = std::fabs(a * c) + std::fabs(b * s), other = std::fabs(b * c) + std::fabs(a * s);
    compare(widen(got[first]), a * c - b * s, turned + 4 * kUnit<T> * one + 4 * kTiny<T>);
    compare(widen(got[second]), b * c + a * s, turned + 4 * kUnit<T> * other + 4 * kTiny<T>);
  }
  if (d > 2 * pairs) {
    int64_t i = 2 * pairs + draw.below(d - 2 * pairs);
    compare(widen(got[i]), at(i), unit * std::fabs(at(i)) + 2 * kTiny<T>);
  }
}

// Checks one query head of one sequence, from qkv [B, (Hq + 2 Hkv) D] to out [B, Hq, 1, D], and the new slot of its KV
// head.
void step_attend(TensorView qkv, Optional<TensorView> q_norm, Optional<TensorView> k_norm, double eps, double offset,
                 TensorView positions, TensorView inv_freq, int64_t style, TensorView starts, TensorView lengths,
                 TensorView k_cache, TensorView v_cache, double scale, int64_t window, double softcap, TensorView out,
                 int64_t seed) {
  need(out.ndim() == 4 && k_cache.ndim() == 4 && qkv.ndim() == 2 && inv_freq.ndim() == 1);
  int64_t batch = out.size(0), heads = out.size(1), d = out.size(3), kv_heads = k_cache.size(1);
  need(heads % kv_heads == 0 && inv_freq.dtype().bits == 32 && 2 * inv_freq.size(0) <= d && inv_freq.size(0) <= kMostPairs);
  shaped(qkv, qkv, {batch, (heads + 2 * kv_heads) * d}), shaped(out, qkv, {batch, heads, 1, d});
  for (const TensorView* t : {&k_cache, &v_cache}) shaped(*t, qkv, {batch, kv_heads, k_cache.size(2), d});
  for (const Optional<TensorView>* t : {&q_norm, &k_norm})
    if (t->has_value()) shaped(t->value(), qkv, {d});
  need(is_int(positions, 64, 1) && is_int(starts, 32, 1) && is_int(lengths, 32, 1));
  need(positions.size(0) == batch && starts.size(0) == batch && lengths.size(0) == batch && inv_freq.stride(0) == 1);
  by_dtype(qkv, [&](auto tag) {
    using T = decltype(tag);
    static thread_local std::vector<T> q, k;
    static thread_local Turn angles;
    q.resize(size_t(d) + kLanes), k.resize(size_t(d) + kLanes);
    Draw draw{uint64_t(seed)};
    int64_t b = draw.below(batch), h = draw.below(heads), kv = h / (heads / kv_heads);
    int64_t position = data<int64_t>(positions)[b * positions.stride(0)], slot = int32_at(starts, b);
    int64_t end = int32_at(lengths, b), first = window > 0 ? std::max<int64_t>(0, end - window) : 0;
    need(slot >= 0 && slot < k_cache.size(2) && end <= k_cache.size(2));
    const T *of_q = row<T>(qkv, b) + h * d, *of_k = row<T>(qkv, b) + (heads + kv) * d, *of_v = of_k + kv_heads * d;
    turn(angles, position, data<float>(inv_freq), inv_freq.size(0), style != 0);
    turned_head(draw, of_q, q_norm, eps, offset, angles, position, inv_freq, style, d, q.data(), static_cast<T*>(nullptr));
    turned_head(draw, of_k, k_norm, eps, offset, angles, position, inv_freq, style, d, k.data(),
                at4<T>(k_cache, b, kv, slot));
    if (memcmp(of_v, at4<T>(v_cache, b, kv, slot), size_t(d) * sizeof(T))) worst = INFINITY;
    attend(draw, q.data(), d, first, end, scale_of(scale, d), softcap,
           [&](int64_t j) { return at4<T>(k_cache, b, kv, j); }, [&](int64_t j) { return at4<T>(v_cache, b, kv, j); },
           at4<T>(out, b, h, 0));
  });
}

// --- tokens ----------------------------------------------------------------------------------------------------------

// A greedy row's token is an index of its largest logit; the token of any other row is in the vocabulary and is
// possible.
void sample(TensorView logits, TensorView history, TensorView temperature, TensorView, TensorView, TensorView penalty,
            TensorView, TensorView token, int64_t seed) {
  need(logits.ndim() == 2 && is_int(token, 64, 1) && token.size(0) == logits.size(0));
  shaped(logits, logits, {logits.size(0), logits.size(1)});
  for (const TensorView* t : {&temperature, &penalty})
    need(t->ndim() == 1 && t->size(0) == logits.size(0) && t->dtype().code == kDLFloat && t->dtype().bits == 32);
  by_dtype(logits, [&](auto tag) {
    using T = decltype(tag);
    Draw draw{uint64_t(seed)};
    int64_t b = draw.below(logits.size(0)), vocabulary = logits.size(1);
    int64_t chosen = data<int64_t>(token)[b * token.stride(0)];
    if (chosen < 0 || chosen >= vocabulary) return compare(INFINITY, 0, 1);
    const T* row_of = row<T>(logits, b);
    double found = widen(row_of[chosen]);
    bool plain = data<float>(penalty)[b * penalty.stride(0)] == 1.0f;
    if (data<float>(temperature)[b * temperature.stride(0)] > 0 || !plain) return;
    double largest = -INFINITY;
    for (int64_t i = 0; i < vocabulary; ++i) largest = std::max<double>(largest, widen(row_of[i]));
    if (found < largest) compare(found, largest, 1e-3 * std::fabs(largest - found));
  });
}

}  // namespace
}  // namespace autosel

// As AUTOSEL_EXPORT; returns `worst`.
#define SPOT(name)                                                                                                  \
  extern "C" __attribute__((visibility("default"))) int __tvm_ffi_spot_##name(void*, const TVMFFIAny* args,         \
                                                                              int32_t count, TVMFFIAny* result) {   \
    ::autosel::worst = 0;                                                                                           \
    int failed = ::autosel::guarded("spot_" #name, &::autosel::name, args, count, result);                          \
    if (!failed) result->type_index = kTVMFFIFloat, result->v_float64 = ::autosel::worst;                           \
    return failed;                                                                                                  \
  }

SPOT(linear)
SPOT(norm_qkv)
SPOT(gate_up)
SPOT(lm_head)
SPOT(rmsnorm)
SPOT(add_rmsnorm)
SPOT(swiglu)
SPOT(geglu)
SPOT(rope)
SPOT(kv_append)
SPOT(attn)
SPOT(prefill_attn)
SPOT(paged_attn)
SPOT(sample)
SPOT(step_attend)
