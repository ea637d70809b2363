"""Test the machine code of the fingerprint's probes: wide loads, no spills, no work optimised away.

By default an older and a newer target run, which change each day; --every-target runs all.
"""

from __future__ import annotations

import pytest

from tests.compile.machine_code import Function, functions
from tests.compile.targets import CUDA

OLDER, NEWER = CUDA[:3], CUDA[3:]
LOADS = {"probe_read": 8, "probe_copy": 4, "probe_chunks": 4, "probe_read_one": 1}  # 16-byte loads, at least

# Eight chains of an instruction, on targets that have it; others emulate it, and are not measured.
ARITHMETIC = (
    ("probe_exp2", "MUFU", CUDA),
    ("probe_fma", "FFMA", CUDA),
    ("probe_from_fp8", "F2FP", [cc for cc in CUDA if cc >= (8, 9)]),
    ("probe_mma_bf16", "HMMA", CUDA),
    ("probe_mma_fp8", "QMMA", [cc for cc in CUDA if cc == (8, 9) or cc >= (12, 0)]),
)


def named(cc: tuple[int, int]) -> dict[str, Function]:
    return {f.name.rpartition(" ")[2].partition("(")[0]: f for f in functions("probes", cc)}


@pytest.mark.in_turns({"older": lambda: OLDER, "newer": lambda: NEWER}, label=lambda cc: f"sm_{cc[0]}{cc[1]}")
def test_probes_load_16_bytes_and_spill_nothing(choice: tuple[int, int]) -> None:
    found = named(choice)
    for name, loads in LOADS.items():
        wide = sum(n for op, n in found[name].instructions.items() if op.startswith("LDG") and op.endswith("128"))
        assert wide >= loads, (choice, name, dict(found[name].instructions))
    assert found["probe_shared"].instructions["LDS.128"] >= 8
    for name, instruction, at in ARITHMETIC:
        assert (found[name].instructions.get(instruction, 0) >= 8) == (choice in at), (choice, name)
    for f in found.values():
        assert f.spill_bytes == 0 and f.stack_bytes == 0, (choice, f.name)


@pytest.mark.in_turns({"older": lambda: OLDER, "newer": lambda: NEWER}, label=lambda cc: f"sm_{cc[0]}{cc[1]}")
def test_the_toolkits_barrier_of_a_grid_compiles(choice: tuple[int, int]) -> None:
    (found,) = functions("grid_sync", choice)
    assert found.spill_bytes == 0 and found.instructions["BAR"] >= 2  # around the wait of one thread
