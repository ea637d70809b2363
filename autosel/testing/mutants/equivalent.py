"""Reasons why some mutants are correct kernels. Each must also agree with the reference at points of the domains."""

from __future__ import annotations

from collections.abc import Mapping

REASONS: Mapping[tuple[str, str], str] = {
    ("paged_attn", "max_len off by +1"): "`lengths`, each at most max_len, decide which keys count",
    ("sample", "history[, :] the neighbour's"): "the history is a set: the order of its tokens is irrelevant",
    (
        "add_rmsnorm",
        "result y with infinity clamped",
    ): "no valid operands give an infinite y: where the sum is infinite, y is NaN",
}

# By "file: line | rule". Check an entry again when its line is edited.
SOURCE_REASONS: Mapping[str, str] = {
    "cpu/attn_prefill.cpp: float* c, int64_t c_ld, const float* keep) { | narrowed: int64_t to int16_t #2": (
        "a row of scores or of sums in scratch is a tile or a head wide"
    ),
    "cpu/attn_prefill.cpp: for (int64_t r = 0; r < kQueries; ++r) m[r] = -INFINITY, l[r] = 0; "
    "| constant: 0 to (0 + 1) #2": "the first key scales the sum so far by exp(-inf), which is 0",
    "cpu/gemv_coded.cpp: [&](int, int64_t i, int64_t n, int64_t count, const float* const* v) { "
    "| narrowed: int64_t to int16_t": "`i` is a row of x, of which the kernel takes at most 32",
    'cpu/gate_up_coded.cpp: auto gate = coded_matrix<OnlyFormat>(gate_codes, gate_scales, "w_gate", -1, from.columns); '
    "| constant: 1 to (1 + 1)": "an argument of a check, where any negative number of rows means any number",
    "cpu/coded.h: if (together < rows) rows = 1; | branch left out: together < rows to true": (
        "rows of weights are processed one by one: slower, the same sums"
    ),
    "cpu/coded.h: if (together < rows) rows = 1; | branch left out: together < rows to false": (
        "rows of weights are processed together: the same sums"
    ),
    "cpu/coded.h: if (together < rows) rows = 1; | relation: < to <=": (
        "rows of weights are processed one by one: slower, the same sums"
    ),
    "cpu/coded.h: else if (n + ahead < to) next = w->row(n + ahead); "
    "| branch left out: n + ahead < to to false": "other lines are prefetched: slower, the same sums",
    "cpu/coded.h: else if (n + ahead < to) next = w->row(n + ahead); | relation: < to <=": (
        "other lines are prefetched: slower, the same sums"
    ),
    # In a build with two groups for seven and eight rows (AVX2, codes in blocks) it would be wrong.
    "cpu/coded.h: for (int64_t smaller = 0; smaller < (groups.larger < groups.count ? 2 : 1); ++smaller) { "
    "| relation: < to <=": "the build has one group of rows: a kernel for a second one is looked up and not used",
    "cpu/dot.h: for (int64_t i = 0; i < m; ++i) { | narrowed: int64_t to int16_t": (
        "`i` is a row of x, of which a pass takes at most eight"
    ),
    "cpu/lm_head_coded.cpp: [&](int, int64_t i, int64_t n, int64_t count, const float* const* v) { "
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
        "codes are chosen from fewer rows: other values are stored in full; the size differs, the weights are the same"
    ),
    "cpu/pack.h: size_t bytes = sizeof(bf16) * size_t(std::min(kUnit, w.columns - u * kUnit)); | extreme: min to max": (
        "a weight that appears to have changed is read unpacked: slower, the same weights"
    ),
    "cpu/pack.h: if (__atomic_load_n(&head.changed, __ATOMIC_RELAXED)) return false; "
    "| negated: __atomic_load_n(&head.changed, __ATOM... to !(__atomic_load_n(&head.changed, __AT...": (
        "a weight that appears to have changed is read unpacked: slower, the same weights"
    ),
    "cpu/pack.h: unit(n, u, weights, std::min(kUnit, columns - u * kUnit)); "
    "| deleted: unit(n, u, weights, std::min(kUnit, c... to (void)0": (
        "it unpacks for the comparison after packing, which test_candidates_layouts.py tests; no call uses it"
    ),
    'cpu/gate_up_packed.cpp: auto gate = matrix<const T>(w_gate, "w_gate", x, -1, from.columns); '
    "| constant: 1 to (1 + 1)": ("an argument of a check, where any negative number of rows means any number"),
    "cpu/dot.h: if constexpr (M * 3 <= A && L * 4 > A) if (rows == 3) return dot_block<T, M, 3>; "
    "| relation: > to >=": "fewer rows of weights are processed together: slower, the same sums",
    "cpu/gemm.cpp: [&](int, int64_t i, int64_t n, int64_t count, const float* const* v) { "
    "| narrowed: int64_t to int16_t #3": "`count` is at most a strip, two vectors",
    "cpu/gemv.cpp: for (int64_t c = 0; c < count; ++c) { | narrowed: int64_t to int16_t": (
        "`count` is at most eight, the rows of weights that are processed together"
    ),
    "cpu/dot.h: bool whole = n + blocks.rows <= to; | relation: <= to <": (
        "the last whole block is processed row by row, like a remainder: slower, the same sums"
    ),
    # In a build with two groups for seven and eight rows (AVX2, codes in blocks) it would be wrong.
    "cpu/dot.h: for (int64_t g = 0, i = 0; g < blocks.groups.count; i += blocks.groups.of(g++), next = at) "
    "| assignment: += to -=": "AVX-512 processes up to eight rows of x as one group: the increment is never used",
    "cpu/dot.h: template <int M> constexpr int chains(int r) { return M > 1 || r >= 7 ? 1 : (8 + r - 1) / r; } "
    "| constant: 8 to (8 - 1)": "the number of parallel sums affects only the speed",
    "cpu/turn.h: if (rows - group >= 8) | relation: >= to >": (
        "a group of eight rows is processed like a smaller one: slower, the same elements"
    ),
}

# Domains that no mutant needs, by op and name.
REDUNDANT: Mapping[tuple[str, str], str] = {
    ("kv_append", "positions"): "ordinary positions are random; the domain adds the ends of the cache and of a page",
    ("kv_append", "block_table"): "ordinary tables are shuffled; the domain adds entries that are not pages",
    ("linear", "w.codes"): "ordinary codes are random; the domain adds the smallest and the largest code",
}
