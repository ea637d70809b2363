// Instructions of one thread: arithmetic, comparison, conversion, loads and stores, atomics, control.
#pragma once
#include "machine.h"
#include "numbers.h"

namespace ptx {

// detail's bits for floating point
constexpr int64_t kFlush = 1, kSaturate = 2, kNaN = 4, kRelu = 8;
constexpr int64_t kZero = 16, kDown = 32, kUp = 64;                                 // how a number is rounded
constexpr int64_t kNearest = 128, kTruncated = 256, kFloor = 512, kCeiling = 1024;  // to an integer

template <class T>
T flush(const Instruction& i, T v) {
  if constexpr (std::is_same_v<T, float>)
    return i.detail & kFlush ? flushed(v) : v;
  else
    return v;
}

// Return work(v), where v has the C++ type of an integer type; bits are unsigned.
template <class W>
auto with_integer(Type type, W&& work) {
  switch (type) {
    case Type::b8:
    case Type::u8: return work(uint8_t());
    case Type::b16:
    case Type::u16: return work(uint16_t());
    case Type::b32:
    case Type::u32: return work(uint32_t());
    case Type::b64:
    case Type::u64: return work(uint64_t());
    case Type::s8: return work(int8_t());
    case Type::s16: return work(int16_t());
    case Type::s32: return work(int32_t());
    case Type::s64: return work(int64_t());
    default: throw Error("no such type of it");
  }
}

// --- arithmetic ------------------------------------------------------------------------------------------------------

// Halves are computed in float and rounded once; pairs of them a half at a time.
template <class F, size_t N>
void halves(Thread& t, const Instruction& i) {
  const bool brain = i.type == Type::bf16 || i.type == Type::bf16x2,
             pair = i.type == Type::bf16x2 || i.type == Type::f16x2;
  uint64_t out = 0;
  for (int h = 0; h < (pair ? 2 : 1); ++h) {
    double v[3] = {};
    for (size_t k = 0; k < N; ++k) {
      const uint16_t b = uint16_t(t.slots[i.at[k + 1]] >> 16 * h);
      v[k] = brain ? bf16_to(b) : f16_to(b);
    }
    double r = F::of(v[0], v[1], v[2], i);
    if (i.detail & kSaturate) r = std::isnan(r) ? 0 : std::clamp(r, 0.0, 1.0);
    if ((i.detail & kRelu)) r = r > 0 ? r : 0;
    out |= uint64_t(brain ? to_bf16(float(r)) : to_f16(r)) << 16 * h;
  }
  t.slots[i.at[0]] = out;
}

template <class T, class F, size_t N>
void plain(Thread& t, const Instruction& i) {
  T a = flush(i, get<T>(t, i, 1)), b{}, c{};
  if constexpr (N > 1) b = flush(i, get<T>(t, i, 2));
  if constexpr (N > 2) c = flush(i, get<T>(t, i, 3));
  T r = flush(i, T(F::of(a, b, c, i)));
  if constexpr (std::is_floating_point_v<T>)
    if (i.detail & kSaturate) r = std::isnan(r) ? T(0) : std::clamp(r, T(0), T(1));
  put(t, i, r);
}

inline int rounding(const Instruction& i) {
  if (bool(i.detail & kZero)) return FE_TOWARDZERO;
  if ((i.detail & kDown)) return FE_DOWNWARD;
  return (i.detail & kUp) ? FE_UPWARD : FE_TONEAREST;
}

template <class T, class F, size_t N>
void directed(Thread& t, const Instruction& i) {
  const Rounding mode(rounding(i));
  plain<T, F, N>(t, i);
}

template <class F, size_t N>
Execute of_type(const Instruction& i) {
  const bool other = rounding(i) != FE_TONEAREST;
  switch (i.type) {
    case Type::f32: return other ? directed<float, F, N> : plain<float, F, N>;
    case Type::f64: return other ? directed<double, F, N> : plain<double, F, N>;
    case Type::f16:
    case Type::bf16:
    case Type::f16x2:
    case Type::bf16x2: return halves<F, N>;
    default: return with_integer(i.type, [](auto v) -> Execute { return plain<decltype(v), F, N>; });
  }
}

#define PTX_OPERATION(Name, ...)                       \
  struct Name {                                        \
    template <class T>                                 \
    static T of(T a, T b, T c, const Instruction& i) { \
      (void)a, (void)b, (void)c, (void)i;              \
      __VA_ARGS__                                      \
    }                                                  \
  };
template <class T>
using Wrapping = std::conditional_t<std::is_integral_v<T>, uint64_t, T>;
// volatile: the compiler must not move it out of a rounding mode
template <class T>
T held(T v) {
  volatile T h = v;
  return h;
}
PTX_OPERATION(Add, return T(held(Wrapping<T>(a)) + Wrapping<T>(b));)
PTX_OPERATION(Subtract, return T(held(Wrapping<T>(a)) - Wrapping<T>(b));)
PTX_OPERATION(Multiply, return T(held(Wrapping<T>(a)) * Wrapping<T>(b));)
PTX_OPERATION(Divide, if constexpr (std::is_integral_v<T>) { return b ? T(a / b) : T(~T(0)); } else return held(a) / b;)
PTX_OPERATION(Remainder, if constexpr (std::is_integral_v<T>) { return b ? T(a % b) : a; } else return a;)
PTX_OPERATION(
    MultiplyAdd, if constexpr (std::is_integral_v<T>) {
      return T(uint64_t(a) * uint64_t(b) + uint64_t(c));
    } else return std::fma(held(a), b, c);)
PTX_OPERATION(Negate, if constexpr (std::is_integral_v<T>) { return T(0 - uint64_t(a)); } else return -a;)
PTX_OPERATION(
    Absolute, if constexpr (std::is_integral_v<T>) {
      return std::is_signed_v<T> && a < T(0) ? T(0 - uint64_t(a)) : a;
    } else return std::fabs(a);)
// For a number and NaN, return the number, unless the instruction has .NaN; -0 is less than +0.
template <bool LEAST>
struct Extreme {
  template <class T>
  static T of(T a, T b, T, const Instruction& i) {
    if constexpr (!std::is_integral_v<T>) {
      if (std::isnan(a) || std::isnan(b)) return i.detail & kNaN ? T(NAN) : std::isnan(a) ? b : a;
      if (a == b) return std::signbit(a) == LEAST ? a : b;
    }
    return (a < b) == LEAST ? a : b;
  }
};
using Least = Extreme<true>;
using Most = Extreme<false>;
PTX_OPERATION(And, if constexpr (std::is_integral_v<T>) { return a & b; } else return a;)
PTX_OPERATION(Or, if constexpr (std::is_integral_v<T>) { return a | b; } else return a;)
PTX_OPERATION(Xor, if constexpr (std::is_integral_v<T>) { return a ^ b; } else return a;)
PTX_OPERATION(Not, if constexpr (std::is_integral_v<T>) { return ~a; } else return a;)
PTX_OPERATION(CopySign, if constexpr (std::is_floating_point_v<T>) { return std::copysign(b, a); } else return a;)
PTX_OPERATION(Reciprocal, return T(1) / held(a);)
PTX_OPERATION(Root, return std::sqrt(held(a));)
PTX_OPERATION(InverseRoot, return T(1 / std::sqrt(double(a)));)
PTX_OPERATION(PowerOfTwo, return T(std::exp2(double(a)));)
PTX_OPERATION(Logarithm, return T(std::log2(double(a)));)
PTX_OPERATION(Sine, return T(std::sin(double(a)));)
PTX_OPERATION(Cosine, return T(std::cos(double(a)));)
PTX_OPERATION(Tangent, return T(std::tanh(double(a)));)

template <class T, class F>
void shift(Thread& t, const Instruction& i) {
  put(t, i, F::of(get<T>(t, i, 1), get<uint32_t>(t, i, 2)));
}
struct Left {
  template <class T>
  static T of(T a, uint32_t n) {
    return n >= sizeof a * 8 ? T(0) : T(uint64_t(a) << n);
  }
};
struct Right {
  template <class T>
  static T of(T a, uint32_t n) {
    return n >= sizeof a * 8 ? T(a < T(0) ? ~T(0) : T(0)) : T(a >> n);
  }
};
template <class F>
Execute shift_of(Type type) {
  return with_integer(type, [](auto v) -> Execute { return shift<decltype(v), F>; });
}

// shf: the 64 bits of b:a shifted, and one half of them.
template <bool LEFT>
void funnel(Thread& t, const Instruction& i) {
  const uint64_t both = uint64_t(get<uint32_t>(t, i, 2)) << 32 | get<uint32_t>(t, i, 1);
  uint32_t n = get<uint32_t>(t, i, 3);
  n = i.has("wrap") ? n & 31 : std::min(n, 32u);
  put<uint32_t>(t, i,
                LEFT ? uint32_t((n == 32 ? both << 32 : both << n) >> 32) : uint32_t(n == 32 ? both >> 32 : both >> n));
}

// mul, mad: .lo, .hi, .wide
template <class T, bool ADDS>
void multiply(Thread& t, const Instruction& i) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  const Wide product = Wide(get<T>(t, i, 1)) * Wide(get<T>(t, i, 2));
  if (i.words[1] == "wide") {
    using Half = std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                                    std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>>;
    Half r = Half(product);
    if constexpr (ADDS) r = Half(uint64_t(r) + uint64_t(get<Half>(t, i, 3)));
    put(t, i, r);
  } else {
    T r = i.words[1] == "hi" ? T(product >> sizeof(T) * 8) : T(product);
    if constexpr (ADDS) r = T(uint64_t(r) + uint64_t(get<T>(t, i, 3)));
    put(t, i, r);
  }
}
template <bool ADDS>
Execute multiply_of(Type type) {
  return with_integer(type, [](auto v) -> Execute { return multiply<decltype(v), ADDS>; });
}

// add.cc, addc, sub.cc, subc, mad.cc, madc: with the carry of the instruction before. Unsigned arithmetic does for
// both.
template <class T>
void carried(Thread& t, const Instruction& i) {
  using Wide = unsigned __int128;
  const std::string& name = i.words[0];
  const bool takes = name.back() == 'c', sets = i.has("cc");
  const Wide a = get<T>(t, i, 1), b = get<T>(t, i, 2);
  Wide sum;
  if (name.compare(0, 3, "mad") == 0) {
    const Wide product = a * b;
    sum = (i.words[1] == "hi" ? T(product >> sizeof(T) * 8) : T(product)) + Wide(get<T>(t, i, 3)) +
          (takes && t.carry ? 1 : 0);
  } else if (name.compare(0, 3, "sub") == 0) {
    sum = a - b - (takes && t.carry ? 1 : 0);
  } else {
    sum = a + b + (takes && t.carry ? 1 : 0);
  }
  if (sets) t.carry = (sum >> sizeof(T) * 8 & 1) != 0;
  put(t, i, T(sum));
}

template <class T>
void extract(Thread& t, const Instruction& i) {
  const unsigned at = get<uint32_t>(t, i, 2) & 255, length = get<uint32_t>(t, i, 3) & 255, size = sizeof(T) * 8;
  uint64_t v = at >= size ? 0 : uint64_t(std::make_unsigned_t<T>(get<T>(t, i, 1))) >> at;
  const unsigned kept = std::min(length, at >= size ? 0 : size - at);
  if (kept < 64) v &= (uint64_t(1) << kept) - 1;
  if (std::is_signed_v<T> && length) {
    const unsigned sign_at = std::min(at + length - 1, size - 1);
    const bool negative = uint64_t(std::make_unsigned_t<T>(get<T>(t, i, 1))) >> sign_at & 1;
    if (negative && length < 64) v |= ~uint64_t(0) << std::min(length, kept);
  }
  put(t, i, T(v));
}
template <class T>
void insert(Thread& t, const Instruction& i) {
  const unsigned at = get<uint32_t>(t, i, 3) & 255, length = get<uint32_t>(t, i, 4) & 255, size = sizeof(T) * 8;
  T mask = 0;
  for (unsigned k = 0; k < length && at + k < size; ++k) mask |= T(1) << (at + k);
  put(t, i, T((get<T>(t, i, 2) & ~mask) | (at < size ? (get<T>(t, i, 1) << at) & mask : 0)));
}

template <class T>
void count_bits(Thread& t, const Instruction& i) {
  const T v = get<T>(t, i, 1);
  const std::string& name = i.words[0];
  uint32_t r;
  if (name == "popc")
    r = uint32_t(__builtin_popcountll(v));
  else if (name == "clz")
    r = v ? uint32_t(__builtin_clzll(v)) - (64 - sizeof(T) * 8) : uint32_t(sizeof(T) * 8);
  else
    r = v ? 63 - uint32_t(__builtin_clzll(v)) : 0xffffffff;  // bfind, unsigned
  put(t, i, r);
}
inline void reverse_bits(Thread& t, const Instruction& i) {
  uint64_t v = t.slots[i.at[1]], r = 0;
  const unsigned size = unsigned(bytes_of(i.type) * 8);
  for (unsigned k = 0; k < size; ++k) r |= (v >> k & 1) << (size - 1 - k);
  t.slots[i.at[0]] = r;
}
inline void permute(Thread& t, const Instruction& i) {
  const uint64_t both = uint64_t(get<uint32_t>(t, i, 2)) << 32 | get<uint32_t>(t, i, 1);
  const uint32_t selector = get<uint32_t>(t, i, 3);
  uint32_t r = 0;
  for (int k = 0; k < 4; ++k) {
    const uint32_t s = selector >> 4 * k & 15;
    uint32_t byte = uint32_t(both >> 8 * (s & 7)) & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << 8 * k;
  }
  put(t, i, r);
}
inline void logic_of_three(Thread& t, const Instruction& i) {
  const uint32_t a = get<uint32_t>(t, i, 1), b = get<uint32_t>(t, i, 2), c = get<uint32_t>(t, i, 3),
                 table = get<uint32_t>(t, i, 4);
  uint32_t r = 0;
  for (int k = 0; k < 8; ++k)
    if (table >> k & 1) r |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
  put(t, i, r);
}

// --- predicates ------------------------------------------------------------------------------------------------------

template <class F>
void logic(Thread& t, const Instruction& i) {
  const bool a = truth(t, i.operands[1]), b = i.operands.size() > 2 && truth(t, i.operands[2]);
  put<uint64_t>(t, i, F::of(uint64_t(a), uint64_t(b), uint64_t(0), i) & 1);
}

enum Compare { EQ, NE, LT, LE, GT, GE, NAN_, NUM, EQU, NEU, LTU, LEU, GTU, GEU };
inline int compare_named(const std::string& s) {
  static const std::map<std::string, int> known = {
      {"eq", EQ},   {"ne", NE},   {"lt", LT},   {"lo", LT},   {"le", LE},    {"ls", LE},
      {"gt", GT},   {"hi", GT},   {"ge", GE},   {"hs", GE},   {"nan", NAN_}, {"num", NUM},
      {"equ", EQU}, {"neu", NEU}, {"ltu", LTU}, {"leu", LEU}, {"gtu", GTU},  {"geu", GEU}};
  auto at = known.find(s);
  if (at == known.end()) throw Error("comparison " + s);
  return at->second;
}
template <class T>
bool compare(int how, T a, T b) {
  bool unordered = false;
  if constexpr (std::is_floating_point_v<T>) unordered = std::isnan(a) || std::isnan(b);
  switch (how) {
    case EQ: return a == b;
    case NE: return !unordered && a != b;
    case LT: return a < b;
    case LE: return a <= b;
    case GT: return a > b;
    case GE: return a >= b;
    case NAN_: return unordered;
    case NUM: return !unordered;
    case EQU: return unordered || a == b;
    case NEU: return unordered || a != b;
    case LTU: return unordered || a < b;
    case LEU: return unordered || a <= b;
    case GTU: return unordered || a > b;
    default: return unordered || a >= b;
  }
}

// setp.how[.and|.or|.xor].type p[|q], a, b[, c]; detail: how | the combining operation << 8
template <class T>
void set_predicate(Thread& t, const Instruction& i) {
  T a, b;
  if constexpr (std::is_same_v<T, float>) {
    const Type y = i.type;
    auto value = [&](size_t k) {
      const uint64_t v = t.slots[i.at[k]];
      return y == Type::bf16 ? bf16_to(uint16_t(v)) : y == Type::f16 ? f16_to(uint16_t(v)) : as<float>(v);
    };
    a = value(1), b = value(2);
    if (i.detail >> 16) a = flushed(a), b = flushed(b);
  } else {
    a = get<T>(t, i, 1), b = get<T>(t, i, 2);
  }
  const bool r = compare(int(i.detail & 255), a, b);
  bool p = r, q = !r;
  const int by = int(i.detail >> 8 & 255);
  if (by) {
    const bool c = truth(t, i.operands[3]);
    p = by == 1 ? r && c : by == 2 ? r || c : r != c;
    q = by == 1 ? !r && c : by == 2 ? !r || c : !r != c;
  }
  put<uint64_t>(t, i.operands[0], p);
  if (i.operands[0].second != kNone) t.slots[i.operands[0].second] = q;
}
inline Execute predicate_of(Type type) {
  switch (type) {
    case Type::f32:
    case Type::f16:
    case Type::bf16: return set_predicate<float>;
    case Type::f64: return set_predicate<double>;
    default: return with_integer(type, [](auto v) -> Execute { return set_predicate<decltype(v)>; });
  }
}

inline void select(Thread& t, const Instruction& i) {
  t.slots[i.at[0]] = truth(t, i.operands[3]) ? t.slots[i.at[1]] : t.slots[i.at[2]];
}

// --- moves and conversions -------------------------------------------------------------------------------------------

inline void move(Thread& t, const Instruction& i) { t.slots[i.at[0]] = t.slots[i.at[1]]; }
inline void move_place(Thread& t, const Instruction& i) {  // a variable's address, or one near it
  t.slots[i.at[0]] = word(t, i.operands[1]);
}
inline void move_predicate(Thread& t, const Instruction& i) { t.slots[i.at[0]] = truth(t, i.operands[1]); }
inline void read_clock(Thread& t, const Instruction& i) {
  t.slots[i.at[0]] = machine().now_ns();
  t.stop = true;  // reading the clock advances it
}
inline void pack(Thread& t, const Instruction& i) {
  const std::vector<uint32_t>& parts = i.operands[1].many;
  const unsigned size = unsigned(bytes_of(i.type) * 8 / parts.size());
  uint64_t r = 0;
  for (size_t k = 0; k < parts.size(); ++k)
    r |= (t.slots[parts[k]] & (size < 64 ? (uint64_t(1) << size) - 1 : ~uint64_t(0))) << size * k;
  t.slots[i.at[0]] = r;
}
inline void unpack(Thread& t, const Instruction& i) {
  const std::vector<uint32_t>& parts = i.operands[0].many;
  const unsigned size = unsigned(bytes_of(i.type) * 8 / parts.size());
  const uint64_t v = t.slots[i.at[1]];
  for (size_t k = 0; k < parts.size(); ++k)
    if (parts[k] != kNone) t.slots[parts[k]] = v >> size * k & (size < 64 ? (uint64_t(1) << size) - 1 : ~uint64_t(0));
}

inline bool is_float(Type t) {
  return t == Type::f16 || t == Type::bf16 || t == Type::f32 || t == Type::f64 || t == Type::tf32;
}

inline double float_value(Type from, uint64_t b) {
  switch (from) {
    case Type::f16: return f16_to(uint16_t(b));
    case Type::bf16: return bf16_to(uint16_t(b));
    case Type::f64: return as<double>(b);
    default: return as<float>(b);
  }
}
inline double whole(const Instruction& i, double v) {
  if ((i.detail & kNearest)) return std::nearbyint(v);
  if ((i.detail & kTruncated)) return std::trunc(v);
  if ((i.detail & kFloor)) return std::floor(v);
  return (i.detail & kCeiling) ? std::ceil(v) : v;
}
template <class T>
uint64_t clamped(double v) {
  if (std::isnan(v)) return sizeof(T) == 8 ? bits(T(T(1) << (sizeof(T) * 8 - 1))) : 0;
  constexpr double low = double(std::numeric_limits<T>::min()), high = double(std::numeric_limits<T>::max());
  if (v <= low) return bits(std::numeric_limits<T>::min());
  if (v >= high) return bits(std::numeric_limits<T>::max());
  return bits(T(v));
}
inline uint64_t as_float(const Instruction& i, double v) {
  if (i.detail & kSaturate) v = std::isnan(v) ? 0 : std::clamp(v, 0.0, 1.0);
  const bool zero = bool(i.detail & kZero);
  if ((i.detail & kRelu) && !(v > 0)) v = 0;
  switch (i.type) {
    case Type::f16: return to_f16(v, zero);
    case Type::bf16: return to_bf16(float(v), zero);
    case Type::f64: return bits(v);
    case Type::tf32: return bits_of(float(v)) & 0xffffe000u;
    default: {
      const Rounding mode(rounding(i));
      const float f = float(held(v));
      return bits(i.detail & kFlush ? flushed(f) : f);
    }
  }
}

inline void convert(Thread& t, const Instruction& i) {
  const uint64_t b = t.slots[i.at[1]];
  uint64_t r;
  if (is_float(i.from)) {
    double v = float_value(i.from, b);
    if (i.detail & kFlush && i.from == Type::f32) v = flushed(float(v));
    v = whole(i, v);
    r = is_float(i.type) ? as_float(i, v) : with_integer(i.type, [v](auto n) { return clamped<decltype(n)>(v); });
  } else {
    const int64_t v = with_integer(i.from, [b](auto n) { return int64_t(decltype(n)(b)); });
    if (is_float(i.type)) {
      if (i.type == Type::f32) {  // once rounded, from all 64 bits
        const Rounding mode(rounding(i));
        volatile float f = i.from == Type::u64 ? float(uint64_t(v)) : float(v);
        r = bits(float(f));
      } else {
        r = as_float(i, i.from == Type::u64 ? double(uint64_t(v)) : double(v));
      }
    } else if (i.detail & kSaturate) {
      const double d = i.from == Type::u64 ? double(uint64_t(v)) : double(v);
      r = bytes_of(i.type) == 8 ? uint64_t(v) : with_integer(i.type, [d](auto n) { return clamped<decltype(n)>(d); });
    } else {
      r = with_integer(i.type, [v](auto n) { return bits(decltype(n)(v)); });
    }
  }
  t.slots[i.at[0]] = r;
}

// cvt of pairs: two floats into a pair of narrower ones (the first operand above), or a pair of fp8 into one of fp16.
inline void convert_pair(Thread& t, const Instruction& i) {
  uint64_t r = 0;
  if (i.from == Type::f32) {
    for (int h = 0; h < 2; ++h) {
      const float v = get<float>(t, i, size_t(2 - h));
      const float w = (i.detail & kRelu) && !(v > 0) ? 0 : v;
      switch (i.type) {
        case Type::bf16x2: r |= uint64_t(to_bf16(w, bool(i.detail & kZero))) << 16 * h; break;
        case Type::f16x2: r |= uint64_t(to_f16(w, bool(i.detail & kZero))) << 16 * h; break;
        case Type::e4m3x2: r |= uint64_t(to_fp8(w, e4m3_to, 0x7e)) << 8 * h; break;
        default: r |= uint64_t(to_fp8(w, e5m2_to, 0x7b)) << 8 * h;
      }
    }
  } else {
    const uint64_t b = t.slots[i.at[1]];
    for (int h = 0; h < 2; ++h) {
      const uint8_t c = uint8_t(b >> 8 * h);
      if (i.from == Type::f16x2) {
        const float v = f16_to(uint16_t(b >> 16 * h));
        r |= uint64_t(i.type == Type::e4m3x2 ? to_fp8(v, e4m3_to, 0x7e) : to_fp8(v, e5m2_to, 0x7b)) << 8 * h;
      } else {
        r |= uint64_t(to_f16(i.from == Type::e4m3x2 ? e4m3_to(c) : e5m2_to(c))) << 16 * h;
      }
    }
  }
  t.slots[i.at[0]] = r;
}

// --- memory ----------------------------------------------------------------------------------------------------------

inline std::string space_of(const Instruction& i) {
  for (size_t w = 1; w < i.words.size(); ++w) {
    const std::string s = i.words[w].substr(0, i.words[w].find(':'));
    if (s == "global" || s == "shared" || s == "local" || s == "param" || s == "const") return s;
  }
  return "generic";
}
enum Where : int64_t { kGlobal, kShared, kLocal, kGeneric };
inline Where where_of(const Instruction& i) {
  const std::string s = space_of(i);
  return s == "global" || s == "const"  ? kGlobal
         : s == "shared"                ? kShared
         : s == "local" || s == "param" ? kLocal
                                        : kGeneric;
}

inline char* reach(Thread& t, Where where, uint64_t address, size_t bytes, size_t align) {
  Machine& m = machine();
  if (where == kGlobal) return m.global(address, bytes, align);
  if (where == kShared) return m.shared(*t.block, address, bytes, align);
  if (where == kLocal) return m.local(t, address, bytes, align);
  return m.generic(t, address, bytes, align);
}

// Accesses to a thread's own frames cannot race.
inline bool meets(const Thread& t, Where where, const char* p) {
  if (!machine().races.on() || where == kLocal) return false;
  if (where != kGeneric) return true;
  for (const Frame& f : t.frames)
    if (p >= f.parameters && p < f.locals + f.function->local_bytes) return false;
  return true;
}

// detail: where
template <class T>
void load(Thread& t, const Instruction& i) {
  const Operand &into = i.operands[0], &from = i.operands[1];
  const size_t n = into.many.empty() ? 1 : into.many.size();
  const char* p = reach(t, Where(i.detail), word(t, from), n * sizeof(T), n * sizeof(T));
  if (meets(t, Where(i.detail), p)) machine().races.read(t.number, p, n * sizeof(T), i.line);
  for (size_t k = 0; k < n; ++k) {
    T v;
    memcpy(&v, p + k * sizeof v, sizeof v);
    const uint32_t slot = into.many.empty() ? into.slot : into.many[k];
    if (slot != kNone) t.slots[slot] = bits(v);
  }
}
inline void load_and_yield(Thread& t, const Instruction& i) {  // polled: other threads write it in the meantime
  const size_t size = bytes_of(i.type);
  const char* p = reach(t, Where(i.detail), word(t, i.operands[1]), size, size);
  uint64_t v = 0;
  memcpy(&v, p, size);
  if (i.type == Type::s32) v = uint64_t(int64_t(int32_t(v)));
  t.slots[i.at[0]] = v;
  t.stop = t.looks = true;
  machine().races.synchronises(t.number, uint64_t(p), true, false, i.has("acquire"), false);
}
inline void store_and_yield(Thread& t, const Instruction& i) {
  const size_t size = bytes_of(i.type);
  char* p = reach(t, Where(i.detail), word(t, i.operands[0]), size, size);
  memcpy(p, &t.slots[i.at[1]], size);
  t.stop = true;
  machine().races.synchronises(t.number, uint64_t(p), false, true, false, i.has("release"));
}
template <class T>
void store(Thread& t, const Instruction& i) {
  const Operand &to = i.operands[0], &from = i.operands[1];
  const size_t n = from.many.empty() ? 1 : from.many.size();
  char* p = reach(t, Where(i.detail), word(t, to), n * sizeof(T), n * sizeof(T));
  const bool looks = meets(t, Where(i.detail), p);
  for (size_t k = 0; k < n; ++k) {
    const T v = as<T>(t.slots[from.many.empty() ? from.slot : from.many[k]]);
    const bool there = machine().races.lenient && memcmp(p + k * sizeof v, &v, sizeof v) == 0;
    if (looks && !there) machine().races.write(t.number, p + k * sizeof v, sizeof v, i.line);
    memcpy(p + k * sizeof v, &v, sizeof v);
  }
  if (Where(i.detail) != kGlobal) wrote(t, p, n * sizeof(T));
}
// The integer type whose bits a load or store of this type moves.
inline Type in_memory(Type type) {
  switch (type) {
    case Type::pred: return Type::b8;
    case Type::f16:
    case Type::bf16: return Type::b16;
    case Type::f32:
    case Type::f16x2:
    case Type::bf16x2: return Type::b32;
    case Type::f64: return Type::b64;
    default: return type;
  }
}

// atom, red. `detail`: where; the operation is the word before the type
template <class T>
T combined(const std::string& how, T old, T a, T b) {
  if (how == "add") return T(old + a);
  if (how == "exch") return a;
  if (how == "min") return a < old ? a : old;
  if (how == "max") return old < a ? a : old;
  if constexpr (std::is_integral_v<T>) {
    if (how == "inc") return old >= a ? T(0) : T(old + 1);
    if (how == "dec") return old == 0 || old > a ? a : T(old - 1);
    if (how == "and") return old & a;
    if (how == "or") return old | a;
    if (how == "xor") return old ^ a;
    if (how == "cas") return old == a ? b : old;
  }
  throw Error("atomic " + how);
}
template <class T>
void atomic(Thread& t, const Instruction& i) {
  const bool returns = i.words[0] == "atom";
  const size_t at = returns ? 1 : 0;
  std::string how;
  for (const std::string& w : i.words)
    for (const char* known : {"add", "exch", "min", "max", "inc", "dec", "and", "or", "xor", "cas"})
      if (w == known) how = w;
  char* p = reach(t, Where(i.detail), word(t, i.operands[at]), sizeof(T), sizeof(T));
  T old;
  memcpy(&old, p, sizeof old);
  const T made = combined(how, old, get<T>(t, i, at + 1), i.operands.size() > at + 2 ? get<T>(t, i, at + 2) : T());
  memcpy(p, &made, sizeof made);
  const bool both = i.has("acq_rel");
  machine().races.synchronises(t.number, uint64_t(p), true, true, both || i.has("acquire"), both || i.has("release"));
  if (returns) put(t, i, old);
  t.stop = true;  // others can see this change: let them run
}

// cp.async.ca|cg.shared.global [to], [from], bytes[, bytes read]
inline void copy_async(Thread& t, const Instruction& i) {
  const size_t size = get<uint32_t>(t, i, 2);
  size_t read = size;
  if (i.operands.size() > 3) {
    const Operand& o = i.operands[3];
    read = i.detail & 1 ? (truth(t, o) ? 0 : size) : std::min<size_t>(as<uint32_t>(t.slots[o.slot]), size);
  }
  if (size != 16 && (i.has("cg") || (size != 4 && size != 8)))
    throw Error("an asynchronous copy of " + std::to_string(size) + " bytes");
  char* to = machine().shared(*t.block, word(t, i.operands[0]), size, size);
  const uint64_t source = word(t, i.operands[1]);
  check_alignment(source, size, "global");
  const char* from = read ? machine().global(source, read, 1) : nullptr;
  auto work = [to, from, size, read] {
    char all[16] = {};
    if (read) memcpy(all, from, read);
    memcpy(to, all, size);
  };
  const bool later = machine().delays();
  if (later) memset(to, 0xff, size);
  Races& races = machine().races;
  if (from) races.read(t.number, from, read, i.line);
  races.begin_write(t.number, to, size, i.line);
  t.copies.add(later, work, [&races, &t, to, size, &i] { races.end_write(t.number, to, size, i.line); });
  wrote(t, to, size);
}
inline void commit_copies(Thread& t, const Instruction&) { t.copies.commit(); }
inline void wait_copies(Thread& t, const Instruction& i) {
  if (i.words[2] == "wait_all")
    t.copies.commit(), t.copies.leave(0);
  else
    t.copies.leave(size_t(t.slots[i.at[0]]));
}

inline void shared_to_generic(Thread& t, const Instruction& i) {
  t.slots[i.at[0]] = uint64_t(t.block->cluster->arena) + (word(t, i.operands[1]) & 0xffffffff);
}
inline void generic_to_shared(Thread& t, const Instruction& i) {
  t.slots[i.at[0]] = word(t, i.operands[1]) - uint64_t(t.block->cluster->arena);
}
inline void local_to_generic(Thread& t, const Instruction& i) {
  t.slots[i.at[0]] = uint64_t(t.frames.back().locals) + (word(t, i.operands[1]) & 0xffffffff);
}
inline void generic_to_local(Thread& t, const Instruction& i) {
  t.slots[i.at[0]] = word(t, i.operands[1]) - uint64_t(t.frames.back().locals);
}
inline void is_space(Thread& t, const Instruction& i) {
  const uint64_t a = word(t, i.operands[1]), arena = uint64_t(t.block->cluster->arena);
  const bool shared = a >= arena && a < arena + kMostCluster * kWindow;
  put<uint64_t>(t, i.operands[0], space_of(i) == "shared" ? shared : !shared);
}
inline void map_shared(Thread& t, const Instruction& i) {  // mapa
  const uint64_t rank = get<uint32_t>(t, i, 2);
  if (rank >= t.block->cluster->blocks.size())
    throw Error("block " + std::to_string(rank) + " of a cluster of " +
                std::to_string(t.block->cluster->blocks.size()));
  const uint64_t base = i.type == Type::u64 && !i.has("shared::cluster") ? uint64_t(t.block->cluster->arena) : 0,
                 a = word(t, i.operands[1]) - base;
  t.slots[i.at[0]] = base + rank * kWindow + a % kWindow;
}

// --- control ---------------------------------------------------------------------------------------------------------

inline void nothing(Thread&, const Instruction&) {}
inline void branch(Thread& t, const Instruction& i) { t.pc = i.target; }
inline void branch_indexed(Thread& t, const Instruction& i) {
  const uint32_t k = get<uint32_t>(t, i, 0);
  if (k >= i.targets.size()) throw Error("branch " + std::to_string(k) + " of " + std::to_string(i.targets.size()));
  t.pc = i.targets[k];
}
inline void trap(Thread&, const Instruction&) { throw Error("trap"); }
inline void sleep(Thread& t, const Instruction&) { t.stop = t.looks = true; }
inline void return_(Thread& t, const Instruction&) {
  if (t.frames.size() == 1) return end(t);
  // results into the caller's parameters
  Frame done = std::move(t.frames.back());
  leave(t);
  const Instruction& call = t.frames.back().function->code[t.pc - 1];
  for (size_t k = 0; k < call.operands[0].many.size(); ++k)
    memcpy(reinterpret_cast<char*>(t.slots[call.operands[0].many[k]]),
           done.parameters + done.function->results[k].offset, done.function->results[k].bytes);
}
inline void exit_(Thread& t, const Instruction&) { end(t); }
inline void call(Thread& t, const Instruction& i) {
  const Function& f = *i.callee;
  std::vector<char> parameters(f.parameter_bytes);
  if (i.operands[1].many.size() != f.parameters.size()) throw Error("a call with another number of parameters");
  for (size_t k = 0; k < f.parameters.size(); ++k)
    memcpy(parameters.data() + f.parameters[k].offset, reinterpret_cast<char*>(t.slots[i.operands[1].many[k]]),
           f.parameters[k].bytes);
  enter(t, f, parameters);
}
inline void wait_for_producers(Thread&, const Instruction&) { machine().waited = true; }

// --- barriers and warps ----------------------------------------------------------------------------------------------

// bar.sync a[, n]; barrier.sync; bar.arrive a, n; bar.red.popc|and|or d, a[, n], p
inline void barrier(Thread& t, const Instruction& i) {
  arrive(t, get<uint32_t>(t, i, 0), i.operands.size() > 1 ? get<uint32_t>(t, i, 1) : 0, !i.has("arrive"));
}
inline void barrier_reduce(Thread& t, const Instruction& i) {
  const uint32_t id = get<uint32_t>(t, i, 1);
  const bool p = truth(t, i.operands.back());
  Barrier& b = t.block->barriers[id];
  b.any = b.any || p, b.all = b.all && p, b.count += p;
  const uint32_t into = i.operands[0].slot;
  arrive(t, id, i.operands.size() > 3 ? get<uint32_t>(t, i, 2) : 0, true);
  if (t.state == State::at_barrier) return;  // the last one to arrive writes for all
  for (Thread& o : t.block->threads)
    if (o.state != State::done && o.frames.size() == t.frames.size())
      o.slots[into] = i.has("popc") ? b.said_count : i.has("and") ? b.said_all : b.said_any;
}

template <class F>
void each_of(Thread& t, uint32_t mask, F&& work) {
  for (unsigned k = 0; k < kWarp; ++k)
    if (mask >> k & 1) work(*lane(t, k), k);
}

inline void warp_sync(Thread& t, const Instruction& i) {
  const uint32_t mask = get<uint32_t>(t, i, 0);
  if (!together(t, mask)) return;
  Clocks met;
  each_of(t, mask, [&](Thread& o, unsigned) { machine().races.release(o.number, met); });
  each_of(t, mask, [&](Thread& o, unsigned) { machine().races.acquire(o.number, met); });
}

// shfl.sync.mode.b32 d[|p], a, b, c, mask
inline void shuffle(Thread& t, const Instruction& i) {
  const uint32_t mask = get<uint32_t>(t, i, 4);
  if (!together(t, mask)) return;
  uint32_t values[kWarp], results[kWarp];
  bool inside[kWarp];
  each_of(t, mask, [&](Thread& o, unsigned k) { values[k] = get<uint32_t>(o, i, 1); });
  each_of(t, mask, [&](Thread& o, unsigned k) {
    const uint32_t b = get<uint32_t>(o, i, 2), c = get<uint32_t>(o, i, 3), clamp = c & 31, segment = c >> 8 & 31;
    const uint32_t most = (k & segment) | (clamp & ~segment), least = k & segment;
    uint32_t from;
    bool ok;
    const int64_t mode = i.detail;
    if (mode == 'u')
      from = k - (b & 31), ok = int(from) >= int(most);
    else if (mode == 'd')
      from = k + (b & 31), ok = from <= most;
    else if (mode == 'b')
      from = k ^ (b & 31), ok = from <= most;
    else
      from = least | (b & ~segment & 31), ok = from <= most;
    if (!ok) from = k;
    if (!(mask >> (from & 31) & 1))
      throw Error("a shuffle reads lane " + std::to_string(from) + ", which is not in its mask");
    results[k] = values[from & 31], inside[k] = ok;
  });
  each_of(t, mask, [&](Thread& o, unsigned k) {
    put(o, i.operands[0], results[k]);
    if (i.operands[0].second != kNone) o.slots[i.operands[0].second] = inside[k];
  });
}

// vote.sync.any|all|uni.pred p, q, mask; vote.sync.ballot.b32 d, q, mask
inline void vote(Thread& t, const Instruction& i) {
  const uint32_t mask = get<uint32_t>(t, i, 2);
  if (!together(t, mask)) return;
  uint32_t said = 0;
  each_of(t, mask, [&](Thread& o, unsigned k) { said |= uint32_t(truth(o, i.operands[1])) << k; });
  const std::string& mode = i.words[2];
  const uint32_t r = mode == "ballot" ? said
                     : mode == "any"  ? said != 0
                     : mode == "all"  ? said == mask
                                      : said == 0 || said == mask;
  each_of(t, mask, [&](Thread& o, unsigned) { put(o, i.operands[0], r); });
}

// elect.sync d|p, mask
inline void elect(Thread& t, const Instruction& i) {
  const uint32_t mask = get<uint32_t>(t, i, 1);
  if (!together(t, mask)) return;
  const uint32_t leader = uint32_t(__builtin_ctz(mask));
  each_of(t, mask, [&](Thread& o, unsigned k) {
    put(o, i.operands[0], leader);
    o.slots[i.operands[0].second] = k == leader;
  });
}

template <class T>
void warp_reduce(Thread& t, const Instruction& i) {  // redux.sync.op.type d, a, mask
  const uint32_t mask = get<uint32_t>(t, i, 2);
  if (!together(t, mask)) return;
  bool first = true;
  T all{};
  each_of(t, mask, [&](Thread& o, unsigned) {
    const T v = get<T>(o, i, 1);
    all = first ? v : combined(i.words[2], all, v, T());
    first = false;
  });
  each_of(t, mask, [&](Thread& o, unsigned) { put(o, i.operands[0], all); });
}

inline void match(Thread& t, const Instruction& i) {  // match.sync.any.b32 d, a, mask
  const uint32_t mask = get<uint32_t>(t, i, 2);
  if (!together(t, mask)) return;
  each_of(t, mask, [&](Thread& o, unsigned) {
    uint32_t same = 0;
    each_of(t, mask,
            [&](Thread& p, unsigned j) { same |= uint32_t(get<uint32_t>(o, i, 1) == get<uint32_t>(p, i, 1)) << j; });
    put(o, i.operands[0], same);
  });
}

}  // namespace ptx
