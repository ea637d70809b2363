"""JSON in rows is the same JSON, with a line for each row."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from autosel.json_rows import in_rows

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(values)
def test_it_reads_back_as_the_same_value(value: Any) -> None:
    assert json.loads(in_rows(value)) == value


def test_each_entry_of_the_first_two_levels_has_a_line() -> None:
    found = in_rows({"date": "2026-11-25", "rows": [{"op": "attn", "us": [1, 2]}, {"op": "rope", "us": []}]})
    assert found.splitlines() == [
        "{",
        ' "date": "2026-11-25",',
        ' "rows": [',
        '  {"op": "attn", "us": [1, 2]},',
        '  {"op": "rope", "us": []}',
        " ]",
        "}",
    ]
