// The functions of instructions.
#pragma once
#include "bulk.h"

namespace ptx {

inline bool starts(const std::string& s, const char* with) { return s.rfind(with, 0) == 0; }

inline Execute arithmetic(Instruction& i) {
  const std::string& op = i.words[0];
  const bool integer = !is_float(i.type) && i.type != Type::f16x2 && i.type != Type::bf16x2;
  if (i.has("cc") || op == "addc" || op == "subc" || op == "madc")
    return bytes_of(i.type) == 8 ? carried<uint64_t> : carried<uint32_t>;
  if (op == "add") return of_type<Add, 2>(i);
  if (op == "sub") return of_type<Subtract, 2>(i);
  if (op == "mul" || op == "mad") {
    const std::string& half = i.words[1];
    if (half == "lo" || half == "hi" || half == "wide")
      return op == "mad" ? multiply_of<true>(i.type) : multiply_of<false>(i.type);
    return op == "mad" ? of_type<MultiplyAdd, 3>(i) : of_type<Multiply, 2>(i);
  }
  if (op == "fma") return of_type<MultiplyAdd, 3>(i);
  if (op == "div") return of_type<Divide, 2>(i);
  if (op == "rem") return of_type<Remainder, 2>(i);
  if (op == "min") return i.operands.size() == 4 ? nullptr : of_type<Least, 2>(i);
  if (op == "max") return i.operands.size() == 4 ? nullptr : of_type<Most, 2>(i);
  if (op == "neg") return of_type<Negate, 1>(i);
  if (op == "abs") return of_type<Absolute, 1>(i);
  if (op == "copysign") return of_type<CopySign, 2>(i);
  if (integer) return nullptr;
  if (op == "rcp") return of_type<Reciprocal, 1>(i);
  if (op == "sqrt") return of_type<Root, 1>(i);
  if (op == "rsqrt") return of_type<InverseRoot, 1>(i);
  if (op == "ex2") return of_type<PowerOfTwo, 1>(i);
  if (op == "lg2") return of_type<Logarithm, 1>(i);
  if (op == "sin") return of_type<Sine, 1>(i);
  if (op == "cos") return of_type<Cosine, 1>(i);
  if (op == "tanh") return of_type<Tangent, 1>(i);
  return nullptr;
}

inline Execute bitwise(Instruction& i) {
  const std::string& op = i.words[0];
  const bool predicate = i.type == Type::pred;
  if (op == "and") return predicate ? logic<And> : of_type<And, 2>(i);
  if (op == "or") return predicate ? logic<Or> : of_type<Or, 2>(i);
  if (op == "xor") return predicate ? logic<Xor> : of_type<Xor, 2>(i);
  if (op == "not") return predicate ? logic<Not> : of_type<Not, 1>(i);
  if (op == "shl") return shift_of<Left>(i.type);
  if (op == "shr") return shift_of<Right>(i.type);
  if (op == "shf") return i.has("l") ? funnel<true> : funnel<false>;
  if (op == "lop3") return logic_of_three;
  if (op == "prmt") return permute;
  if (op == "brev") return reverse_bits;
  const bool wide = bytes_of(i.type) == 8, negative = i.type == Type::s32 || i.type == Type::s64;
  if (op == "popc" || op == "clz" || (op == "bfind" && !negative))
    return wide ? count_bits<uint64_t> : count_bits<uint32_t>;
  if (op == "bfe") return with_integer(i.type, [](auto v) -> Execute { return extract<decltype(v)>; });
  if (op == "bfi") return wide ? insert<uint64_t> : insert<uint32_t>;
  return nullptr;
}

inline Execute moves(Instruction& i) {
  const std::string& op = i.words[0];
  if (op == "mov") {
    if (i.type == Type::pred) return move_predicate;
    if (!i.operands[1].many.empty()) return pack;
    if (!i.operands[0].many.empty()) return unpack;
    return i.operands[1].offset ? move_place : move;
  }
  if (op == "selp") return select;
  if (op == "setp") {
    i.detail = compare_named(i.words[1]) | (i.has("ftz") ? 1 << 16 : 0);
    i.detail |= (i.has("and") ? 1 : i.has("or") ? 2 : i.has("xor") ? 3 : 0) << 8;
    return predicate_of(i.type);
  }
  if (op == "cvt") {
    const bool pair =
        i.type == Type::f16x2 || i.type == Type::bf16x2 || i.type == Type::e4m3x2 || i.type == Type::e5m2x2;
    return pair ? convert_pair : convert;
  }
  if (op == "cvta") {
    if (i.has("local")) return i.has("to") ? generic_to_local : local_to_generic;
    if (!i.has("shared") && !i.has("shared::cta") && !i.has("shared::cluster")) return move;
    return i.has("to") ? generic_to_shared : shared_to_generic;
  }
  if (op == "isspacep") return is_space;
  if (op == "mapa") return map_shared;
  return nullptr;
}

inline Execute memory(Instruction& i) {
  const std::string& op = i.words[0];
  if (op == "ld" || op == "ldu" || op == "st" || op == "atom" || op == "red") i.detail = where_of(i);
  if (op == "ld" || op == "ldu") {
    const bool alone = i.operands[0].many.empty();
    if (alone && (i.has("acquire") || i.has("relaxed") || i.has("volatile")) && !starts(space_of(i), "param"))
      return load_and_yield;
    return with_integer(in_memory(i.type), [](auto v) -> Execute { return load<decltype(v)>; });
  }
  if (op == "st") {
    const bool alone = i.operands[1].many.empty();
    if (alone && (i.has("release") || i.has("relaxed") || i.has("volatile"))) return store_and_yield;
    return with_integer(in_memory(i.type), [](auto v) -> Execute { return store<decltype(v)>; });
  }
  if (op == "atom" || op == "red") {
    if (i.type == Type::f32) return atomic<float>;
    if (i.type == Type::f64) return atomic<double>;
    return with_integer(i.type, [](auto v) -> Execute { return atomic<decltype(v)>; });
  }
  if (starts(i.opcode, "cp.async.bulk.tensor")) return i.words[5] == "global" ? store_tensor : load_tensor;
  if (starts(i.opcode, "cp.async.bulk.commit_group")) return bulk_commit;
  if (starts(i.opcode, "cp.async.bulk.wait_group")) return bulk_wait;
  if (starts(i.opcode, "cp.async.bulk.prefetch")) return nothing;
  if (starts(i.opcode, "cp.async.bulk")) return copy_bulk;
  if (starts(i.opcode, "cp.async.commit_group")) return commit_copies;
  if (starts(i.opcode, "cp.async.wait_group") || starts(i.opcode, "cp.async.wait_all")) return wait_copies;
  if (starts(i.opcode, "cp.async.mbarrier.arrive")) return copies_arrive;
  if (starts(i.opcode, "cp.async")) return copy_async;
  if (op == "mbarrier") {
    if (i.words[1] == "init") return mbarrier_init;
    if (i.words[1] == "inval") return mbarrier_end;
    if (i.words[1] == "try_wait" || i.words[1] == "test_wait") return i.has("parity") ? mbarrier_wait : nullptr;
    if (i.words[1] == "arrive" || i.words[1] == "expect_tx" || i.words[1] == "complete_tx") return mbarrier_count;
    return nullptr;
  }
  if (op == "fence" || op == "membar") return fence;
  if (op == "prefetch" || op == "prefetchu" || op == "discard" || op == "applypriority" || op == "createpolicy")
    return nothing;
  return nullptr;
}

inline Execute control(Instruction& i) {
  const std::string& op = i.words[0];
  if (op == "bra") return branch;
  if (op == "brx") return branch_indexed;
  if (op == "ret") return return_;
  if (op == "exit") return exit_;
  if (op == "call") return call;
  if (op == "trap" || op == "brkpt") return trap;
  if (op == "nanosleep") return sleep;
  if (op == "bar" || op == "barrier") {
    if (i.has("warp")) return warp_sync;
    if (i.has("cluster")) return cluster_barrier;
    if (i.has("red")) return barrier_reduce;
    return barrier;
  }
  if (op == "shfl") return i.detail = i.words[2][0], shuffle;  // up, down, bfly, idx
  if (op == "vote") return vote;
  if (op == "elect") return elect;
  if (op == "match") return i.has("any") ? match : nullptr;
  if (op == "redux") return i.type == Type::s32 ? warp_reduce<int32_t> : warp_reduce<uint32_t>;
  if (op == "activemask") return nullptr;
  if (op == "griddepcontrol") return i.words[1] == "wait" ? wait_for_producers : nothing;
  if (op == "setmaxnreg" || op == "pmevent") return nothing;
  return nullptr;
}

inline Execute matrices(Instruction& i) {
  const std::string& op = i.words[0];
  if (op == "mma") return mma;
  if (op == "ldmatrix") return move_matrices<true>;
  if (op == "stmatrix") return move_matrices<false>;
  if (op != "wgmma") return nullptr;
  if (i.words[1] == "mma_async") return group_product;
  if (i.words[1] == "fence") return nothing;
  return i.words[1] == "commit_group" ? group_commit : group_wait;
}

inline void decode(Instruction& i) {
  static const std::pair<const char*, int64_t> flags[] = {
      {"ftz", kFlush},     {"sat", kSaturate}, {"satfinite", kSaturate},
      {"NaN", kNaN},       {"relu", kRelu},    {"rz", kZero},
      {"rm", kDown},       {"rp", kUp},        {"rni", kNearest},
      {"rzi", kTruncated}, {"rmi", kFloor},    {"rpi", kCeiling}};
  for (const auto& [name, flag] : flags)
    if (i.has(name)) i.detail |= flag;
  if (i.words[0] == "cvt" && i.has("satfinite")) i.detail &= ~kSaturate;  // saturates to the largest value, not to one
  for (Execute (*part)(Instruction&) : {arithmetic, bitwise, moves, memory, control, matrices}) {
    i.execute = part(i);
    if (i.execute) break;
  }
  for (const char* with :
       {"bar.", "barrier.", "membar", "fence.acq_rel", "fence.sc", "cp.async.wait", "cp.async.bulk.wait", "wgmma.wait"})
    i.orders = i.orders || starts(i.opcode, with);
  if (!i.execute) throw Error("an instruction that this machine does not know");
}

}  // namespace ptx
