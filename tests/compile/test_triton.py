"""The Triton kernels without a GPU: compiled for every target, and proven in Triton's interpreter.

Both take long: each day does another part, tests/soak/test_triton.py everything.
"""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

pytest.importorskip("triton", reason="needs Triton: the `cross` extra")

from autosel.values import Passed
from tests.compile.aot import problems
from tests.compile.triton_kernels import DTYPES, KERNELS, PLANS, SHAPES, TARGETS

TURN = datetime.now(UTC).toordinal()


@pytest.mark.parametrize("number", range(len(KERNELS)), ids=list(KERNELS))
def test_a_triton_kernel_compiles_for_the_targets_at_their_own_knobs(number: int) -> None:
    """Two targets and two shapes of it a day."""
    kernel = list(KERNELS.values())[number]
    shapes, targets = SHAPES[kernel.op], list(TARGETS.values())
    first, second = targets[(TURN + number) % len(targets)], targets[(TURN + number + 2) % len(targets)]
    found = problems(kernel, first, shapes[:1], ("bf16",))
    found += problems(kernel, second, [shapes[(TURN + number) % len(shapes)]], (DTYPES[(TURN + number) % 3],))
    assert found == []


@pytest.mark.parametrize("number", range(len(PLANS)), ids=[plan.label for plan in PLANS])
def test_a_triton_kernel_is_proven_in_the_interpreter(number: int) -> None:
    """In one dtype a day."""
    found = PLANS[number].prove(DTYPES[(TURN + number) % 3])
    assert isinstance(found, Passed), found
