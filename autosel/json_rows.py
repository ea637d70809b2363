"""JSON for files that people compare: a row is a line."""

from __future__ import annotations

import json
from typing import Any

ROWS_AT = 2  # levels of containers above a row


def in_rows(found: Any, depth: int = 0) -> str:
    """Return JSON with one line for each entry of the first two levels, so that a diff shows rows."""
    if not isinstance(found, (dict, list, tuple)) or not found or depth == ROWS_AT:
        return json.dumps(found)
    margin = " " * (depth + 1)
    if isinstance(found, dict):
        entries = [f"{margin}{json.dumps(str(k))}: {in_rows(v, depth + 1)}" for k, v in found.items()]
    else:
        entries = [margin + in_rows(v, depth + 1) for v in found]
    opening, closing = "{}" if isinstance(found, dict) else "[]"
    return f"{opening}\n" + ",\n".join(entries) + f"\n{' ' * depth}{closing}"
