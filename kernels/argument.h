// Helpers for the arguments of an entry point: an optional one, and an exception with Python's name for it.
#pragma once
#include <cstdint>
#include <exception>
#include <string>
#include <utility>

namespace autosel {

template <class T> class Optional {
 public:
  Optional() : has_(false), held_{} {}
  Optional(const T& held) : has_(true), held_(held) {}
  bool has_value() const { return has_; }
  explicit operator bool() const { return has_; }
  const T& value() const { return held_; }
  const T& operator*() const { return held_; }
  const T* operator->() const { return &held_; }

 private:
  bool has_;
  T held_;
};

// `kind` is the Python exception it becomes.
class Raised : public std::exception {
 public:
  Raised(const char* kind, std::string text) : kind(kind), text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }
  const char* kind;

 private:
  std::string text_;
};

// Collects a message and throws it at the end of the statement. No stream: <sstream> costs each build half a second.
class Thrower {
 public:
  explicit Thrower(const char* kind) : kind_(kind) {}
  Thrower& operator<<(const char* part) { text_ += part; return *this; }
  Thrower& operator<<(int64_t part) { text_ += std::to_string(part); return *this; }
  [[noreturn]] ~Thrower() noexcept(false) { throw Raised(kind_, std::move(text_)); }

 private:
  const char* kind_;
  std::string text_;
};

template <class T> struct Bare { using type = T; };
template <class T> struct Bare<const T&> { using type = T; };

}  // namespace autosel

#define AUTOSEL_THROW(kind) ::autosel::Thrower(#kind)
