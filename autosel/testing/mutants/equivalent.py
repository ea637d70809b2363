"""Mutants that are right kernels: why, by op and name. Each must agree with the reference on points of the domains."""

from __future__ import annotations

from collections.abc import Mapping

REASONS: Mapping[tuple[str, str], str] = {
    ("paged_attn", "max_len off by +1"): "`lengths`, none of which is longer than max_len, says which keys count",
    ("sample", "history[, :] the neighbour's"): "the history is a set: the order of its tokens means nothing",
    (
        "add_rmsnorm",
        "result y with infinity clamped",
    ): "no operands that the contract admits have an infinite norm: beside an infinity it is NaN",
}

# By "file: line | rule"; an edited line has to be looked at again.
SOURCE_REASONS: Mapping[str, str] = {
    "cpu/add_rmsnorm.cpp: parallel(threads, m, 1, [&](int64_t begin, int64_t end, int) { | constant: 1 to (1 + 1)": (
        "how finely rows are shared out decides the speed alone"
    ),
    "cpu/simd.h: memcpy(buffer, p, size_t(n) * sizeof(T)); | narrowed: size_t to uint16_t": (
        "a tail is shorter than a vector"
    ),
    "cpu/simd.h: template <class T> static inline vreg load_tail(const T* p, int64_t n) { "
    "| narrowed: int64_t to int16_t": ("a tail is shorter than a vector"),
    "cpu/gemm.cpp: [&](int, int64_t i, int64_t n, int64_t count, const float* const* v) { "
    "| narrowed: int64_t to int16_t #3": "`count` is at most a strip, two vectors",
    "cpu/gemv.cpp: for (int64_t c = 0; c < count; ++c) { | narrowed: int64_t to int16_t": (
        "`count` is at most the eight rows of weights that go together"
    ),
    "cpu/dot.h: bool whole = n + blocks.rows <= to; | relation: <= to <": (
        "the last whole block goes row by row, as a rest does: slower, the same sums"
    ),
    "cpu/dot.h: if constexpr (M * 3 <= A && L * 4 > A) if (rows == 3) return dot_block<T, M, 3>; "
    "| branch left out: rows == 3 to false": "fewer rows of weights go together: slower, the same sums",
    "cpu/dot.h: if constexpr (M * 4 <= A) if (rows == 4) return dot_block<T, M, 4>; "
    "| branch left out: rows == 4 to false": "fewer rows of weights go together: slower, the same sums",
    "cpu/dot.h: template <int M> constexpr int chains(int r) { return M > 1 || r >= 7 ? 1 : (8 + r - 1) / r; } "
    "| constant: 8 to (8 - 1)": "how many sums run beside each other decides the speed alone",
    "cpu/dot.h: if constexpr (M == 1) if (rows == 8 && one_by_one) return dot_rows<T, 8>; "
    "| branch left out: rows == 8 && one_by_one to false": "short rows go together too: slower, the same sums",
    "cpu/attention.h: threads = threads < total ? threads : total; "
    "| deleted: threads = threads < total ? threads :... to (void)0": "threads beyond the work have an empty share",
    "cpu/kv_append.cpp: for (int64_t i = at / page; i <= (at + count - 1) / page; ++i) { "
    "| loop left out: i <= (at + count - 1) / page to false": "the loop checks arguments, and copies nothing",
    "cpu/kv_append.cpp: for (int64_t i = at / page; i <= (at + count - 1) / page; ++i) { | relation: <= to <": (
        "the loop checks arguments, and copies nothing"
    ),
    "cpu/kv_append.cpp: for (int64_t b = 0; b < batch && count > 0; ++b) { | constant: 0 to (0 - 1) #2": (
        "the loop checks arguments, and copies nothing"
    ),
    "cpu/block.h: if (rows - group >= 8) | relation: >= to >": (
        "a group of eight rows takes the way of a smaller one: slower, the same elements"
    ),
    "cpu/rmsnorm.cpp: if (i < d) { vreg v = load_tail(x + i, d - i); a0 = fma(v, v, a0); } | relation: < to <=": (
        "an empty tail adds zeros"
    ),
    "cpu/gated.h: static void gated(TensorView gate, TensorView up, TensorView y, int64_t threads, "
    "const Activation& activation) { | narrowed: int64_t to int16_t": "no machine has 2^15 threads",
}

# Domains without which every mutant dies, by op and name.
REDUNDANT: Mapping[tuple[str, str], str] = {
    ("kv_append", "positions"): "ordinary positions are random; it stays for the ends of the cache and of a page",
    ("kv_append", "block_table"): "ordinary tables are shuffled; it stays for entries that are no page",
    ("linear", "w.codes"): "ordinary codes are random; it stays for the least and the largest code",
}


def reason(op: str, name: str) -> str:
    """Return why this mutant is right, or ""."""
    return REASONS.get((op, name), "")


def source_reason(name: str) -> str:
    """Return why this change of a kernel's source makes no wrong kernel, or ""."""
    return SOURCE_REASONS.get(name, "")


def redundant(op: str, domain: str) -> str:
    """Return why a domain stays that no mutant needs, or ""."""
    return REDUNDANT.get((op, domain), "")
