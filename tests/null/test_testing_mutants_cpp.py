"""Rules make faults of C++ source, one at a time, and leave alone what no result shows."""

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
    """Return the lines that a rule changes, as it leaves them."""
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


def test_names_are_distinct_and_say_line_rule_and_change() -> None:
    names = [change.name for change in changes(SOURCE)]
    assert len(set(names)) == len(names) > 20
    assert "return sum - float(n); | arithmetic: - to +" in names


def test_our_kernels_offer_hundreds_of_changes_and_arguments_that_commute_are_not_swapped() -> None:
    source = (resources.kernels() / "cpu" / "rmsnorm.cpp").read_text()
    found = changes(source)
    assert len(found) > 100
    assert not [c for c in found if c.rule == "swapped" and re.match(r"fma\((\w+), (\w+)", source[c.start - 4 :])]
