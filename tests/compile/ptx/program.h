// PTX as text, and a function of it as instructions whose every scalar operand is a slot of a thread's registers.
//
// Constants, special registers and addresses of variables have separate slots, filled when a thread starts, so that an
// instruction need not check the kind of its operands.
#pragma once
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace ptx {

struct Error : std::runtime_error {
  using runtime_error::runtime_error;
};

struct Thread;
struct Instruction;
using Execute = void (*)(Thread&, const Instruction&);

constexpr uint32_t kNone = 0xffffffff;

enum class Type : uint8_t {
  none, pred, b8, b16, b32, b64, b128, u8, u16, u32, u64, s8, s16, s32, s64, f16, bf16, f16x2, bf16x2, f32,
  tf32, f64, e4m3x2, e5m2x2
};

inline size_t bytes_of(Type t) {
  switch (t) {
    case Type::pred:
    case Type::b8:
    case Type::u8:
    case Type::s8: return 1;
    case Type::b16:
    case Type::u16:
    case Type::s16:
    case Type::f16:
    case Type::bf16:
    case Type::e4m3x2:
    case Type::e5m2x2: return 2;
    case Type::b64:
    case Type::u64:
    case Type::s64:
    case Type::f64: return 8;
    case Type::b128: return 16;
    case Type::none: return 0;
    default: return 4;
  }
}

inline Type type_named(std::string_view name) {
  static const char* const names[] = {
    "none", "pred", "b8", "b16", "b32", "b64", "b128", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64",
    "f16", "bf16", "f16x2", "bf16x2", "f32", "tf32", "f64", "e4m3x2", "e5m2x2"};
  for (size_t i = 1; i < sizeof names / sizeof *names; ++i)
    if (name == names[i]) return Type(i);
  return Type::none;
}

struct Operand {
  uint32_t slot = kNone;       // kNone: `_`, or many
  uint32_t second = kNone;     // of a pair a|b
  int64_t offset = 0;          // of an address
  bool negated = false;        // of a predicate
  bool address = false;        // in brackets
  std::vector<uint32_t> many;  // of a vector
  std::vector<Operand> inner;  // of an address with coordinates
};

struct Instruction {
  Execute execute = nullptr;
  uint32_t at[6] = {};  // slots of the first operands, for quick reach
  uint32_t guard = kNone;
  bool guard_negated = false;
  Type type = Type::none, from = Type::none;  // the first and last type among the modifiers
  uint32_t target = 0;                        // of a branch
  int64_t detail = 0;                         // data of the instruction's decoder
  std::vector<Operand> operands;
  std::vector<uint32_t> targets;  // of an indexed branch
  const struct Function* callee = nullptr;
  std::string opcode;              // as written, with modifiers
  std::vector<std::string> words;  // its parts
  int line = 0;
  bool orders = false;  // a barrier, a fence or a wait, which orders accesses

  bool has(std::string_view word) const {
    for (const std::string& w : words)
      if (w == word) return true;
    return false;
  }
};

struct Variable {
  std::string name;
  size_t bytes = 0, align = 1, offset = 0;
};

// Special registers, in the order of `special_named`: first those with three axes.
enum class Special : uint8_t {
  tid_x, tid_y, tid_z, ntid_x, ntid_y, ntid_z, ctaid_x, ctaid_y, ctaid_z, nctaid_x, nctaid_y, nctaid_z,
  clusterid_x, clusterid_y, clusterid_z, nclusterid_x, nclusterid_y, nclusterid_z,
  cluster_ctaid_x, cluster_ctaid_y, cluster_ctaid_z, cluster_nctaid_x, cluster_nctaid_y, cluster_nctaid_z,
  laneid, warpid, smid, nsmid, cluster_ctarank, cluster_nctarank, dynamic_smem_size, total_smem_size,
  lanemask_eq, lanemask_lt, lanemask_le, lanemask_gt, lanemask_ge, globaltimer, clock, envreg1, envreg2
};

inline bool special_named(const std::string& name, Special& out) {
  static const char* const names[] = {
    "tid.x", "tid.y", "tid.z", "ntid.x", "ntid.y", "ntid.z", "ctaid.x", "ctaid.y", "ctaid.z", "nctaid.x",
    "nctaid.y", "nctaid.z", "clusterid.x", "clusterid.y", "clusterid.z", "nclusterid.x", "nclusterid.y",
    "nclusterid.z", "cluster_ctaid.x", "cluster_ctaid.y", "cluster_ctaid.z", "cluster_nctaid.x",
    "cluster_nctaid.y", "cluster_nctaid.z", "laneid", "warpid", "smid", "nsmid", "cluster_ctarank",
    "cluster_nctarank", "dynamic_smem_size", "total_smem_size", "lanemask_eq", "lanemask_lt", "lanemask_le",
    "lanemask_gt", "lanemask_ge", "globaltimer", "clock", "envreg1", "envreg2"};
  for (size_t i = 0; i < sizeof names / sizeof *names; ++i)
    if (name == names[i]) return out = Special(i), true;
  if (name == "clock64") return out = Special::clock, true;
  return false;
}

enum class Space : uint8_t { global, shared, local, parameter };

struct Function {
  std::string name;
  bool entry = false;
  std::vector<Variable> parameters, results;
  size_t parameter_bytes = 0;  // of the entry's parameters, or of a function's with its results
  size_t local_bytes = 0;      // depots and the parameters of calls
  std::vector<Instruction> code;
  std::vector<uint64_t> initial;  // of all slots
  std::vector<std::pair<uint32_t, Special>> specials;
  struct Place {
    uint32_t slot;
    Space space;
    uint64_t at;
  };  // global: an address; else an offset into the space
  std::vector<Place> places;
  unsigned most_threads = 1024;
  unsigned cluster[3] = {0, 0, 0};  // required
};

// A module: its variables are placed; its functions are found, and parsed at their first use.
class Module {
 public:
  explicit Module(std::string text);
  const Function& function(const std::string& name);
  size_t shared_bytes() const { return shared_bytes_; }  // static
  std::vector<std::pair<char*, size_t>> globals() const;

 private:
  friend class Parser;
  struct Found {
    size_t begin, end;
    bool entry;
  };
  struct Global {
    std::unique_ptr<char[]> room;
    char* at;
    size_t bytes;
  };
  std::string text_;
  std::map<std::string, Found> found_;
  std::map<std::string, std::unique_ptr<Function>> parsed_;
  std::map<std::string, Global> globals_;
  std::map<std::string, size_t>
      shared_;  // offset of a static variable; of the extern one: the start of the dynamic part
  std::vector<std::string> dynamic_;
  size_t shared_bytes_ = 0;
  void variable(const std::string& statement);
};

// Set the function of an instruction; raises Error for an unknown one.
void decode(Instruction& i);
void read_clock(Thread& t, const Instruction& i);

// --- text ----------------------------------------------------------------------------------------------------------

inline bool is_blank(char c) { return isspace(static_cast<unsigned char>(c)); }

// The place after the white space, or after the word, that starts here.
inline size_t spaces_end(std::string_view s, size_t at) {
  while (at < s.size() && is_blank(s[at])) ++at;
  return at;
}
inline size_t word_end(std::string_view s, size_t at) {
  while (at < s.size() && !is_blank(s[at])) ++at;
  return at;
}

inline std::string trimmed(std::string_view s) {
  while (!s.empty() && is_blank(s.front())) s.remove_prefix(1);
  while (!s.empty() && is_blank(s.back())) s.remove_suffix(1);
  return std::string(s);
}

inline std::vector<std::string> split(std::string_view s, char at) {
  std::vector<std::string> out;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i <= s.size(); ++i) {
    if (i < s.size() && strchr("{[(", s[i])) ++depth;
    if (i < s.size() && strchr("}])", s[i])) --depth;
    if (i == s.size() || (s[i] == at && depth == 0)) out.push_back(trimmed(s.substr(begin, i - begin))), begin = i + 1;
  }
  if (out.size() == 1 && out[0].empty()) out.clear();
  return out;
}

inline std::string without_comments(const std::string& text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '/' && i + 1 < text.size() && text[i + 1] == '/') {
      while (i < text.size() && text[i] != '\n') ++i;
      out += '\n';
    } else if (text[i] == '/' && i + 1 < text.size() && text[i + 1] == '*') {
      i += 2;
      while (i + 1 < text.size() && !(text[i] == '*' && text[i + 1] == '/')) {
        if (text[i] == '\n') out += '\n';
        ++i;
      }
      ++i;
    } else {
      out += text[i];
    }
  }
  return out;
}

// `.param .align 64 .b8 name[128]`, `.reg`'s cousins: bytes and alignment of a variable, and its name.
inline Variable variable_of(const std::string& declaration) {
  Variable v;
  size_t element = 0;
  size_t i = 0;
  auto word = [&] {
    const size_t begin = spaces_end(declaration, i);
    i = word_end(declaration, begin);
    return declaration.substr(begin, i - begin);
  };
  for (std::string w = word(); !w.empty(); w = word()) {
    if (w == ".align")
      v.align = std::max(v.align, size_t(atoi(word().c_str())));
    else if (w[0] == '.' && type_named(w.substr(1)) != Type::none)
      element = bytes_of(type_named(w.substr(1)));
    else if (w[0] != '.')
      v.name += w;
  }
  v.bytes = element;
  v.align = std::max(v.align, element);
  size_t bracket = v.name.find('[');
  if (bracket != std::string::npos) {
    v.bytes = element * size_t(strtoull(v.name.c_str() + bracket + 1, nullptr, 0));
    v.name.resize(bracket);
  }
  return v;
}

inline size_t rounded(size_t n, size_t to) { return (n + to - 1) / to * to; }

// --- a function's text -----------------------------------------------------------------------------------------------

class Parser {
 public:
  Parser(Module& m, Function& f) : module_(m), function_(f) { scopes_.emplace_back(); }

  void parse(const std::string& head, const std::string& body, int line) {
    header(head);
    line_ = line;
    statements(body);
    resolve();
  }

 private:
  struct Range {
    uint32_t base, count;
  };
  struct Scope {
    std::map<std::string, uint32_t> names;
    std::map<std::string, Range> ranges;
    std::map<std::string, uint32_t> labels;
  };
  struct Jump {
    size_t instruction;
    std::vector<std::string> names;
    std::vector<size_t> scopes;
  };

  Module& module_;
  Function& function_;
  std::vector<Scope> scopes_;
  std::vector<size_t> open_ = {0};  // scopes that are open, innermost last
  std::map<std::string, uint32_t> constants_;
  std::map<std::string, std::vector<std::string>> tables_;
  std::vector<Jump> jumps_;
  int line_ = 0;

  [[noreturn]] void fail(const std::string& what) {
    throw Error(function_.name + ", line " + std::to_string(line_) + ": " + what);
  }

  uint32_t slot(uint64_t initial) {
    function_.initial.push_back(initial);
    return uint32_t(function_.initial.size() - 1);
  }

  uint32_t place(Space space, uint64_t at) {
    uint32_t s = slot(0);
    function_.places.push_back({s, space, at});
    return s;
  }

  void header(const std::string& head) {
    // [results] name (parameters) directives
    size_t open = head.find('('), name_at = 0;
    std::string before = trimmed(head.substr(0, open));
    auto list = [&](size_t from, size_t& end) {
      int depth = 0;
      end = from;
      for (; end < head.size(); ++end) {
        depth += head[end] == '(', depth -= head[end] == ')';
        if (depth == 0) break;
      }
      return head.substr(from + 1, end - from - 1);
    };
    std::string directives = head;
    size_t end = 0;
    if (open != std::string::npos && !function_.entry && before.empty()) {  // results first
      lay_out(list(open, end), function_.results);
      name_at = end + 1;
      open = head.find('(', name_at);
    }
    if (open != std::string::npos) lay_out(list(open, end), function_.parameters), directives = head.substr(end + 1);
    size_t at = directives.find(".maxntid");
    if (at == std::string::npos) at = directives.find(".reqntid");
    if (at != std::string::npos) function_.most_threads = product(directives, at + 8, nullptr);
    at = directives.find(".reqnctapercluster");
    if (at != std::string::npos) product(directives, at + 18, function_.cluster);
  }

  static unsigned product(const std::string& s, size_t at, unsigned* each) {
    unsigned n = 1;
    for (int d = 0; d < 3; ++d) {
      char* end = nullptr;
      unsigned v = unsigned(strtoul(s.c_str() + at, &end, 0));
      if (each) each[d] = v ? v : 1;
      n *= v ? v : 1;
      at = size_t(end - s.c_str());
      at = spaces_end(s, at);
      if (at >= s.size() || s[at] != ',') {
        if (each)
          for (int r = d + 1; r < 3; ++r) each[r] = 1;
        break;
      }
      ++at;
    }
    return n;
  }

  void lay_out(const std::string& text, std::vector<Variable>& into) {
    for (const std::string& one : split(text, ',')) {
      if (one.empty()) continue;
      Variable v = variable_of(one);
      v.offset = function_.parameter_bytes = rounded(function_.parameter_bytes, v.align);
      function_.parameter_bytes += v.bytes;
      scopes_[0].names[v.name] = place(Space::parameter, v.offset);
      into.push_back(v);
    }
  }

  void statements(const std::string& body) {
    size_t i = 0;
    while (i < body.size()) {
      char c = body[i];
      if (c == '\n') {
        ++line_, ++i;
        continue;
      }
      if (is_blank(c) || c == ';') {
        ++i;
        continue;
      }
      if (c == '{') {
        open_.push_back(scopes_.size()), scopes_.emplace_back(), ++i;
        continue;
      }
      if (c == '}') {
        open_.pop_back(), ++i;
        continue;
      }
      if (body.compare(i, 5, ".loc ") == 0 || body.compare(i, 5, ".loc\t") == 0 ||
          body.compare(i, 5, ".file") == 0) {
        while (i < body.size() && body[i] != '\n') ++i;
        continue;
      }
      size_t end = i;  // a label: a name and a colon that is not of a pair
      while (end < body.size() && (isalnum(static_cast<unsigned char>(body[end])) || strchr("_$%", body[end]))) ++end;
      if (end > i && end < body.size() && body[end] == ':' && body[end + 1] != ':') {
        last_label_ = body.substr(i, end - i);
        scopes_[open_.back()].labels[last_label_] = uint32_t(function_.code.size());
        i = end + 1;
        continue;
      }
      size_t stop = i;
      while (stop < body.size() && body[stop] != ';') ++stop;
      const std::string s = trimmed(std::string_view(body).substr(i, stop - i));
      statement(s);
      for (size_t k = i; k < stop && k < body.size(); ++k) line_ += body[k] == '\n';
      i = stop + 1;
    }
  }

  std::string last_label_;

  void statement(const std::string& s) {
    if (s.compare(0, 4, ".reg") == 0) return registers(s);
    if (s.compare(0, 6, ".local") == 0 || s.compare(0, 6, ".param") == 0) {
      Variable v = variable_of(s.substr(6));
      function_.local_bytes = rounded(function_.local_bytes, v.align);
      // A depot's address is an offset into the frame, of 32 bits as LLVM takes it; a call's parameters are only named.
      scopes_[open_.back()].names[v.name] =
          s[1] == 'l' ? slot(function_.local_bytes) : place(Space::local, function_.local_bytes);
      function_.local_bytes += v.bytes;
      return;
    }
    if (s.compare(0, 7, ".shared") == 0 || s.compare(0, 7, ".global") == 0 || s.compare(0, 6, ".const") == 0)
      return module_.variable(s);
    if (s.compare(0, 14, ".branchtargets") == 0) {
      tables_[last_label_] = split(s.substr(14), ',');
      return;
    }
    if (s[0] == '.') return;  // .pragma, .callprototype
    instruction(s);
  }

  void registers(const std::string& s) {
    const size_t at = word_end(s, spaces_end(s, 4));  // `.reg .b32 %r<100>` or `.reg .pred p, q`
    Scope& scope = scopes_[open_.back()];
    for (const std::string& name : split(std::string_view(s).substr(at), ',')) {
      size_t angle = name.find('<');
      if (angle == std::string::npos) {
        scope.names[name] = slot(kPoison);
        continue;
      }
      uint32_t count = uint32_t(strtoul(name.c_str() + angle + 1, nullptr, 0));
      uint32_t base = uint32_t(function_.initial.size());
      function_.initial.resize(base + count, kPoison);
      scope.ranges[name.substr(0, angle)] = {base, count};
    }
  }

  static constexpr uint64_t kPoison = 0x7fff7fff7fff7fff;  // NaN in every type of two bytes and more

  bool named(const std::string& name, uint32_t& out) {
    size_t digits = name.size();
    while (digits > 0 && isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
    for (size_t k = open_.size(); k-- > 0;) {
      Scope& scope = scopes_[open_[k]];
      auto one = scope.names.find(name);
      if (one != scope.names.end()) return out = one->second, true;
      if (digits == name.size()) continue;
      auto range = scope.ranges.find(name.substr(0, digits));
      if (range == scope.ranges.end()) continue;
      uint32_t n = uint32_t(strtoul(name.c_str() + digits, nullptr, 10));
      if (n < range->second.count) return out = range->second.base + n, true;
    }
    return false;
  }

  uint32_t scalar(const std::string& text, Type type) {
    uint32_t found;
    if (named(text, found)) return found;
    auto again = [&](const std::string& key, auto make) {
      auto known = constants_.find(key);
      return known != constants_.end() ? known->second : constants_[key] = make();
    };
    Special special;
    if (text[0] == '%' && special_named(text.substr(1), special))
      return again(text, [&] {
        uint32_t s = slot(0);
        function_.specials.push_back({s, special});
        return s;
      });
    if (text == "WARP_SZ") return again(text, [&] { return slot(32); });
    if (text[0] == '0' && ((strchr("fF", text[1]) && text.size() == 10) || (strchr("dD", text[1]) && text.size() == 18)))
      return again(text, [&] { return slot(strtoull(text.c_str() + 2, nullptr, 16)); });
    if (isdigit(static_cast<unsigned char>(text[0])) || text[0] == '-') {
      if (text.find('.') != std::string::npos) {
        double v = atof(text.c_str());
        uint64_t bits = 0;
        float narrow = float(v);
        if (type == Type::f64)
          memcpy(&bits, &v, 8);
        else
          memcpy(&bits, &narrow, 4);
        return again(text + (type == Type::f64 ? "d" : "f"), [&] { return slot(bits); });
      }
      return again(text, [&] {
        return slot(text[0] == '-' ? uint64_t(strtoll(text.c_str(), nullptr, 0)) : strtoull(text.c_str(), nullptr, 0));
      });
    }
    auto shared = module_.shared_.find(text);
    if (shared != module_.shared_.end()) return again(text, [&] { return place(Space::shared, shared->second); });
    auto global = module_.globals_.find(text);
    if (global != module_.globals_.end())
      return again(text, [&] { return place(Space::global, uint64_t(global->second.at)); });
    fail("unknown name " + text);
  }

  // [base], [base+offset], [base, {coordinates}], [base, {coordinates}, ...]
  Operand address(const std::string& text, Type type) {
    Operand o;
    std::vector<std::string> parts = split(text, ',');
    size_t plus = parts[0].find('+');
    const std::string base = trimmed(std::string_view(parts[0]).substr(0, plus));
    if (plus != std::string::npos)
      o.offset = strtoll(trimmed(std::string_view(parts[0]).substr(plus + 1)).c_str(), nullptr, 0);
    o.slot = scalar(base, Type::u64), o.address = true;
    for (size_t k = 1; k < parts.size(); ++k) o.inner.push_back(operand(parts[k], type));
    return o;
  }

  Operand operand(const std::string& text, Type type) {
    Operand o;
    if (text == "_") return o;
    if (text[0] == '[') return address(trimmed(std::string_view(text).substr(1, text.size() - 2)), type);
    if (text[0] == '{') {
      for (const std::string& one : split(std::string_view(text).substr(1, text.size() - 2), ','))
        o.many.push_back(one == "_" ? kNone : scalar(one, type));
      return o;
    }
    if (text[0] == '!') return o = operand(trimmed(std::string_view(text).substr(1)), type), o.negated = true, o;
    size_t bar = text.find('|');
    if (bar != std::string::npos) {
      const std::string one = trimmed(std::string_view(text).substr(0, bar)),
                        other = trimmed(std::string_view(text).substr(bar + 1));
      if (one != "_") o.slot = scalar(one, type);
      if (other != "_") o.second = scalar(other, Type::pred);
      return o;
    }
    size_t plus = text.find('+');
    if (plus != std::string::npos && plus > 0 &&
        !isdigit(static_cast<unsigned char>(text[0]))) {  // a variable's address and an offset
      o.slot = scalar(trimmed(std::string_view(text).substr(0, plus)), type);
      o.offset = strtoll(text.c_str() + plus + 1, nullptr, 0);
      return o;
    }
    o.slot = scalar(text, type);
    return o;
  }

  void instruction(const std::string& s) {
    Instruction i;
    i.line = line_;
    size_t at = 0, end = word_end(s, 0);
    if (s[0] == '@') {
      std::string name = s.substr(1, end - 1);
      i.guard_negated = name[0] == '!';
      i.guard = scalar(i.guard_negated ? name.substr(1) : name, Type::pred);
      at = spaces_end(s, end), end = word_end(s, at);
    }
    i.opcode = s.substr(at, end - at);
    at = spaces_end(s, end);
    for (size_t b = 0; b <= i.opcode.size();) {
      size_t dot = i.opcode.find('.', b);
      if (dot == std::string::npos) dot = i.opcode.size();
      i.words.push_back(i.opcode.substr(b, dot - b));
      b = dot + 1;
    }
    for (size_t w = 1; w < i.words.size(); ++w) {
      Type t = type_named(i.words[w]);
      if (t == Type::none) continue;
      if (i.type == Type::none) i.type = t;
      i.from = t;
    }
    const std::string rest = trimmed(std::string_view(s).substr(at));
    if (i.words[0] == "bra")
      jumps_.push_back({function_.code.size(), {rest}, open_});
    else if (i.words[0] == "brx") {
      std::vector<std::string> parts = split(rest, ',');
      i.operands.push_back(operand(parts[0], Type::u32));
      jumps_.push_back({function_.code.size(), {"*" + parts[1]}, open_});
    } else if (i.words[0] == "call")
      call(i, rest);
    else
      for (const std::string& one : split(rest, ',')) i.operands.push_back(operand(one, i.from));
    for (size_t k = 0; k < i.operands.size() && k < 6; ++k) i.at[k] = i.operands[k].slot;
    try {
      decode(i);
      if (rest.find("%globaltimer") != std::string::npos || rest.find("%clock") != std::string::npos)
        i.execute = read_clock;
    } catch (const Error& e) { fail(std::string(e.what()) + ": " + s); }
    function_.code.push_back(std::move(i));
  }

  // (results), name, (parameters)
  void call(Instruction& i, const std::string& rest) {
    std::vector<std::string> parts = split(rest, ',');
    size_t name = !parts.empty() && parts[0][0] == '(' ? 1 : 0;
    Operand results, arguments;
    auto all = [&](const std::string& text, Operand& into) {
      for (const std::string& one : split(std::string_view(text).substr(1, text.size() - 2), ','))
        if (!one.empty()) into.many.push_back(scalar(one, Type::u64));
    };
    if (name == 1) all(parts[0], results);
    if (parts.size() > name + 1) all(parts[name + 1], arguments);
    i.operands = {results, arguments};
    i.callee = &module_.function(parts[name]);
  }

  void resolve() {
    for (Jump& j : jumps_) {
      Instruction& i = function_.code[j.instruction];
      std::vector<std::string> names = j.names;
      const bool many = names[0][0] == '*';
      if (many) names = tables_.at(names[0].substr(1));
      for (const std::string& name : names) {
        bool found = false;
        for (size_t k = j.scopes.size(); k-- > 0 && !found;) {
          auto label = scopes_[j.scopes[k]].labels.find(name);
          if (label == scopes_[j.scopes[k]].labels.end()) continue;
          found = true;
          if (many)
            i.targets.push_back(label->second);
          else
            i.target = label->second;
        }
        if (!found) fail("no label " + name);
      }
    }
  }
};

// --- a module's text -------------------------------------------------------------------------------------------------

inline Module::Module(std::string text) : text_(without_comments(text)) {
  size_t i = 0;
  const size_t n = text_.size();
  auto balanced = [&](size_t from) {  // past the brace that closes the one at `from`
    int depth = 0;
    for (size_t k = from; k < n; ++k) {
      depth += text_[k] == '{', depth -= text_[k] == '}';
      if (depth == 0) return k + 1;
    }
    throw Error("a brace that is not closed");
  };
  while (i < n) {
    if (is_blank(text_[i]) || text_[i] == ';') {
      ++i;
      continue;
    }
    size_t line_end = text_.find('\n', i);
    if (line_end == std::string::npos) line_end = n;
    auto starts = [&](const char* word) { return text_.compare(i, strlen(word), word) == 0; };
    if (starts(".version") || starts(".target") || starts(".address_size") || starts(".file")) {
      i = line_end;
      continue;
    }
    if (starts(".section")) {
      i = balanced(text_.find('{', i));
      continue;
    }
    size_t semicolon = std::min(text_.find(';', i), n), brace = std::min(text_.find('{', i), n);
    const std::string head = text_.substr(i, std::min(semicolon, brace) - i);
    size_t entry = head.find(".entry"), func = head.find(".func");
    if (entry == std::string::npos && func == std::string::npos) {  // a variable
      size_t end = brace < semicolon ? text_.find(';', balanced(brace)) : semicolon;
      variable(text_.substr(i, end - i));
      i = std::min(end + 1, n);
      continue;
    }
    if (semicolon < brace) {
      i = semicolon + 1;
      continue;
    }  // a declaration
    size_t at = (entry != std::string::npos ? entry + 6 : func + 5), end = balanced(brace);
    std::string rest = head.substr(at);
    size_t name_at = 0;
    if (func != std::string::npos && trimmed(rest)[0] == '(') name_at = rest.find(')') + 1;
    name_at = spaces_end(rest, name_at);
    size_t name_end = name_at;
    while (name_end < rest.size() && !is_blank(rest[name_end]) && rest[name_end] != '(')
      ++name_end;
    found_[rest.substr(name_at, name_end - name_at)] = {i + at, end, entry != std::string::npos};
    i = end;
  }
}

inline void Module::variable(const std::string& statement) {
  const bool shared = statement.find(".shared") != std::string::npos;
  size_t equals = statement.find('=');
  std::string head = statement.substr(0, equals);
  for (const char* word :
       {".visible", ".weak", ".extern", ".common", ".shared", ".global", ".const", ".attribute(.managed)"})
    for (size_t at; (at = head.find(word)) != std::string::npos;) head.erase(at, strlen(word));
  Variable v = variable_of(trimmed(head));
  if (v.name.empty()) throw Error("a variable without a name: " + statement.substr(0, 200));
  if (shared && statement.find(".extern") != std::string::npos) {
    dynamic_.push_back(v.name);
    shared_[v.name] = rounded(shared_bytes_, 128);
    return;
  }
  if (shared) {
    shared_bytes_ = rounded(shared_bytes_, v.align);
    shared_[v.name] = shared_bytes_;
    shared_bytes_ += v.bytes;
    for (const std::string& d : dynamic_) shared_[d] = rounded(shared_bytes_, 128);
    return;
  }
  Global g{std::make_unique<char[]>(v.bytes + 256), nullptr, v.bytes};
  g.at = reinterpret_cast<char*>(rounded(size_t(g.room.get()), 256));
  memset(g.at, 0, v.bytes);
  if (equals != std::string::npos) {
    std::string values = statement.substr(equals + 1);
    std::string kind = head;
    Type element = Type::b8;
    for (size_t at = 0; (at = kind.find('.', at)) != std::string::npos; ++at) {
      size_t end = kind.find_first_of(" \t\n", at);
      Type t = type_named(std::string_view(kind).substr(at + 1, end - at - 1));
      if (t != Type::none) element = t;
    }
    for (char& c : values)
      if (strchr("{}", c)) c = ' ';
    size_t k = 0;
    for (const std::string& one : split(values, ',')) {
      uint64_t bits = one.size() > 2 && one[0] == '0' && strchr("fFdD", one[1]) ? strtoull(one.c_str() + 2, nullptr, 16)
                      : one[0] == '-' ? uint64_t(strtoll(one.c_str(), nullptr, 0))
                                      : strtoull(one.c_str(), nullptr, 0);
      if (k + bytes_of(element) <= v.bytes) memcpy(g.at + k, &bits, bytes_of(element));
      k += bytes_of(element);
    }
  }
  globals_[v.name] = std::move(g);
}

inline std::vector<std::pair<char*, size_t>> Module::globals() const {
  std::vector<std::pair<char*, size_t>> all;
  for (const auto& [name, g] : globals_) all.push_back({g.at, g.bytes});
  return all;
}

inline const Function& Module::function(const std::string& name) {
  auto known = parsed_.find(name);
  if (known != parsed_.end()) return *known->second;
  auto at = found_.find(name);
  if (at == found_.end()) throw Error("no function " + name);
  Function& f = *(parsed_[name] = std::make_unique<Function>());
  f.name = name, f.entry = at->second.entry;
  const size_t brace = text_.find('{', at->second.begin);
  const std::string head = text_.substr(at->second.begin, brace - at->second.begin);
  int line = 1;
  for (size_t k = 0; k <= brace; ++k) line += text_[k] == '\n';
  Parser(*this, f).parse(head, text_.substr(brace + 1, at->second.end - brace - 2), line);
  return f;
}

}  // namespace ptx
