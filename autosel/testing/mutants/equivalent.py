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
    "cpu/attn_prefill.cpp: float* c, int64_t c_ld, const float* keep) { | narrowed: int64_t to int16_t #2": (
        "a row of scores or of sums in scratch is a tile or a head wide"
    ),
    "cpu/attn_prefill.cpp: for (int64_t r = 0; r < kQueries; ++r) m[r] = -INFINITY, l[r] = 0; "
    "| constant: 0 to (0 + 1) #2": "the first key scales the sum so far by exp(-inf), which is 0",
    "cpu/lm_head_int8.cpp: [&](int, int64_t i, int64_t n, int64_t count, const float* const* v) { "
    "| narrowed: int64_t to int16_t #3": "`count` is at most a strip, two vectors",
    "cpu/lm_head_packed.cpp: [&](int rank, int64_t i, int64_t n, int64_t count, const float* const* v) { "
    "| narrowed: int64_t to int16_t": "`i` is a row of x, of which a strip has at most 16",
    "cpu/packed.h: for (int64_t u = 0;; ++u, next_unit()) { | narrowed: int64_t to int16_t": (
        "no row has 2^15 units, which are 4 million elements"
    ),
    "cpu/pack.h: for (int64_t i = 0; i < kUnit; ++i) code[i] = kNoCode; | narrowed: int64_t to int16_t": (
        "a unit has 128 elements"
    ),
    "cpu/pack.h: parallel(threads, w.rows, 1, [&](int64_t begin, int64_t end, int rank) { "
    "| swapped: threads, w.rows to w.rows, threads": (
        "codes chosen by fewer rows: other values are stored whole, so the size is another and the weights are the same"
    ),
    "cpu/pack.h: size_t bytes = sizeof(bf16) * size_t(std::min(kUnit, w.columns - u * kUnit)); | extreme: min to max": (
        "a weight that seems to have changed is read as it is: slower, the same weights"
    ),
    "cpu/pack.h: if (__atomic_load_n(&head.changed, __ATOMIC_RELAXED)) return false; "
    "| negated: __atomic_load_n(&head.changed, __ATOM... to !(__atomic_load_n(&head.changed, __AT...": (
        "a weight that seems to have changed is read as it is: slower, the same weights"
    ),
    "cpu/pack.h: unit(n, u, weights, std::min(kUnit, columns - u * kUnit)); "
    "| deleted: unit(n, u, weights, std::min(kUnit, c... to (void)0": (
        "it unpacks for the comparison after packing, which test_candidates_layouts.py tests; no call reads by it"
    ),
    'cpu/gate_up_packed.cpp: auto gate = matrix<const T>(w_gate, "w_gate", x, -1, from.columns); '
    "| constant: 1 to (1 + 1)": ("any negative number of rows means any: an argument of a check"),
    "cpu/dot.h: if constexpr (M * 3 <= A && L * 4 > A) if (rows == 3) return dot_block<T, M, 3>; "
    "| relation: > to >=": "fewer rows of weights go together: slower, the same sums",
    "cpu/gemm.cpp: [&](int, int64_t i, int64_t n, int64_t count, const float* const* v) { "
    "| narrowed: int64_t to int16_t #3": "`count` is at most a strip, two vectors",
    "cpu/gemv.cpp: for (int64_t c = 0; c < count; ++c) { | narrowed: int64_t to int16_t": (
        "`count` is at most the eight rows of weights that go together"
    ),
    "cpu/dot.h: bool whole = n + blocks.rows <= to; | relation: <= to <": (
        "the last whole block goes row by row, as a rest does: slower, the same sums"
    ),
    "cpu/dot.h: template <int M> constexpr int chains(int r) { return M > 1 || r >= 7 ? 1 : (8 + r - 1) / r; } "
    "| constant: 8 to (8 - 1)": "how many sums run beside each other decides the speed alone",
    "cpu/block.h: if (rows - group >= 8) | relation: >= to >": (
        "a group of eight rows takes the way of a smaller one: slower, the same elements"
    ),
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
