"""Test the rules that mutate C++ source: one change at a time, and none without an effect on results."""

from __future__ import annotations

import re

import pytest

from autosel import resources
from autosel.testing.mutants.cpp import changes

SOURCE = """
#define SIZE 4
static float total(const float* x, int64_t n, float most) {
  AUTOSEL_CHECK(n < 9, "too many");  // n < 9
  float buffer[SIZE + 1], sum = 0.5f;
  for (int64_t i = 0; i < n; ++i) sum += x[i + 1] * buffer[i];
  if (sum > most && n != 3) sum = max(sum, most);
  prefetch_l2(x + 64);
  store(sum, most);
  return sum - float(n);
}
"""


def made(rule: str) -> list[str]:
    """Return the lines that a rule changes, after the change."""
    before, found = SOURCE.splitlines(), []
    for change in changes(SOURCE):
        if change.rule == rule:
            after = change.apply(SOURCE).splitlines()
            assert len(after) == len(before)
            (line,) = [b for a, b in zip(before, after, strict=True) if a != b]
            assert before[change.line - 1] != after[change.line - 1]
            found.append(" ".join(line.split()))
    return found


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("relation", "for (int64_t i = 0; i <= n; ++i) sum += x[i + 1] * buffer[i];"),
        ("relation", "if (sum > most && n == 3) sum = max(sum, most);"),
        ("arithmetic", "return sum + float(n);"),
        ("arithmetic", "if (sum > most || n != 3) sum = max(sum, most);"),
        ("assignment", "for (int64_t i = 0; i < n; ++i) sum -= x[i + 1] * buffer[i];"),
        ("constant", "if (sum > most && n != (3 - 1)) sum = max(sum, most);"),
        ("negated", "if (!(sum > most && n != 3)) sum = max(sum, most);"),
        ("branch left out", "if (false) sum = max(sum, most);"),
        ("loop left out", "for (int64_t i = 0;false; ++i) sum += x[i + 1] * buffer[i];"),
        ("extreme", "if (sum > most && n != 3) sum = min(sum, most);"),
        ("index", "for (int64_t i = 0; i < n; ++i) sum += x[(i + 1) + 1] * buffer[i];"),
        ("narrowed", "for (int16_t i = 0; i < n; ++i) sum += x[i + 1] * buffer[i];"),
        ("swapped", "store(most, sum);"),
        ("deleted", "(void)0;"),
    ],
)
def test_each_rule_changes_one_place(rule: str, line: str) -> None:
    assert line in made(rule)


def test_checks_of_arguments_requests_for_memory_sizes_of_arrays_and_comments_stay() -> None:
    for change in changes(SOURCE):
        kept = change.apply(SOURCE)
        for text in (
            'AUTOSEL_CHECK(n < 9, "too many");  // n < 9',
            "prefetch_l2(x + 64);",
            "buffer[SIZE + 1]",
            "SIZE 4",
        ):
            assert text in kept, change.name


def test_names_are_distinct_and_contain_line_rule_and_change() -> None:
    names = [change.name for change in changes(SOURCE)]
    assert len(set(names)) == len(names) > 20
    assert "return sum - float(n); | arithmetic: - to +" in names


def test_our_kernels_offer_hundreds_of_changes_and_arguments_that_commute_are_not_swapped() -> None:
    source = (resources.kernels() / "cpu" / "rmsnorm.cpp").read_text()
    found = changes(source)
    assert len(found) > 100
    assert not [c for c in found if c.rule == "swapped" and re.match(r"fma\((\w+), (\w+)", source[c.start - 4 :])]


RIGHT = """
static vreg load_tail(const float* p, int64_t n) {
  memcpy(buffer, p, size_t(n) * 4);
  return load(buffer);
}
template <class T> static auto choice(int64_t rows) {
  if (rows == 3) return block<T, 3>;
  if (rows == 2) return 5;
  return block<T, 1>;
}
static void work(const float* x, int64_t n, int64_t threads) {
  for (int64_t b = 0; b < n; ++b) {
    int64_t at = b * 2;
    AUTOSEL_CHECK(at < n, "too far");
  }
  for (int64_t b = 0; b < n; ++b) {
    AUTOSEL_CHECK(b < n, "too far");
    total = total + x[b];
  }
  threads = threads < n ? threads : n;
  if (threads > 255) threads = 255;
  parallel(threads, n, 7, [&](int64_t begin, int64_t, int) {
    if (begin < end) sum = fma(load_tail(x, end), one, sum);
    if (begin < end) sum = sum + 9;
  });
}
"""


def right(rule: str) -> list[str]:
    """Return the lines where a change of this rule makes a right kernel, and why."""
    return [f"{change.name.partition(' | ')[0]}: {change.right}" for change in changes(RIGHT) if change.rule == rule]


@pytest.mark.parametrize(
    ("rule", "line", "why"),
    [
        ("narrowed", "static vreg load_tail(const float* p, int64_t n) {", "less than a vector's length"),
        ("narrowed", "memcpy(buffer, p, size_t(n) * 4);", "less than a vector's length"),
        ("branch left out", "if (rows == 3) return block<T, 3>;", "another instance of the same template"),
        ("relation", "threads = threads < n ? threads : n;", "how many threads work"),
        ("branch left out", "if (threads > 255) threads = 255;", "how many threads work"),
        ("narrowed", "parallel(threads, n, 7, [&](int64_t begin, int64_t, int) {", "which nothing reads"),
        ("loop left out", "for (int64_t b = 0; b < n; ++b) {", "a loop that only checks arguments"),
        ("constant", "parallel(threads, n, 7, [&](int64_t begin, int64_t, int) {", "how finely work is shared out"),
        ("relation", "if (begin < end) sum = fma(load_tail(x, end), one, sum);", "a tail of no elements"),
        # Similar changes that may be wrong.
        ("branch left out", "if (rows == 2) return 5;", ""),
        ("negated", "if (rows == 3) return block<T, 3>;", ""),
        ("relation", "if (begin < end) sum = sum + 9;", ""),
        ("constant", "if (begin < end) sum = sum + 9;", ""),
        ("arithmetic", "total = total + x[b];", ""),
    ],
)
def test_changes_that_make_a_right_kernel_are_known_by_rule(rule: str, line: str, why: str) -> None:
    told = [found.removeprefix(f"{line}: ") for found in right(rule) if found.startswith(f"{line}: ")]
    assert any(why in one for one in told) if why else "" in told


def test_a_loop_that_does_more_than_check_is_mutated() -> None:
    assert sorted(right("loop left out"))[0] == "for (int64_t b = 0; b < n; ++b) {: "


def test_most_changes_of_our_kernels_may_be_wrong() -> None:
    for name in ("rmsnorm.cpp", "kv_append.cpp", "dot.h", "simd.h"):
        found = changes((resources.kernels() / "cpu" / name).read_text())
        told = [change for change in found if change.right]
        assert 0 < len(told) < 0.25 * len(found), (name, len(told), len(found))
