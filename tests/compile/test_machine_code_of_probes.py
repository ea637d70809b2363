"""The fingerprint's probes for every target: whole loads, nothing spilled, no work optimised away.

By default an older target and a newer one, others each day; --every-target takes all.
"""

from __future__ import annotations

import pytest

from tests.compile.machine_code import Function, functions
from tests.compile.targets import CUDA

OLDER, NEWER = CUDA[:3], CUDA[3:]
LOADS = {"probe_read": 8, "probe_copy": 4, "probe_chunks": 4, "probe_read_one": 1}  # 16-byte loads, at least


def named(cc: tuple[int, int]) -> dict[str, Function]:
    return {f.name.rpartition(" ")[2].partition("(")[0]: f for f in functions("probes", cc)}


@pytest.mark.in_turns({"older": lambda: OLDER, "newer": lambda: NEWER}, label=lambda cc: f"sm_{cc[0]}{cc[1]}")
def test_probes_load_16_bytes_and_spill_nothing(choice: tuple[int, int]) -> None:
    found = named(choice)
    for name, loads in LOADS.items():
        wide = sum(n for op, n in found[name].instructions.items() if op.startswith("LDG") and op.endswith("128"))
        assert wide >= loads, (choice, name, dict(found[name].instructions))
    for f in found.values():
        assert f.spill_bytes == 0 and f.stack_bytes == 0, (choice, f.name)
