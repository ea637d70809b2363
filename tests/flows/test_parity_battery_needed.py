"""Test that each check of the behaviour is needed: without it, a wrong kernel passes all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

from autosel.ops import OPS
from autosel.parity import calls, whole
from autosel.parity.battery import FAR_ROWS, FRESH, GAPS, KEPT, MANY, REPEATED, STATE
from autosel.parity.check import HABITS, INPUTS, Prover, Terms
from autosel.parity.session import Proof, Session
from autosel.parity.stage import Placed
from autosel.values import Failed, Parity, Passed
from tests import drawn
from tests.cpu.planting import WIDE, functional, proof

pytestmark = pytest.mark.usefixtures("preforked")

SIZE = "full size"


@dataclass(frozen=True)
class Check:
    """One check: a step that is left out, or a function that is replaced; and a kernel that passes without it.
    `inputs` is the allowed number of draws of inputs, if another check finds the fault for some of them."""

    name: str
    survivor: Proof
    removed: Sequence[tuple[Any, str, Callable[..., Any]]] = ()
    inputs: int = 1


def nothing(*_: Any, **__: Any) -> None:
    """Find no fault."""


def always_numbers(self: Placed, filling: str, *, keep: Sequence[str] = ()) -> None:
    fill(self, "some", keep=keep)


fill = Placed.fill
ADDED = OPS["add_rmsnorm"].workload("bf16", {"M": 3, "d": 512})
ADVERSARIES = (
    proof("rmsnorm_without_eps_in_inference_mode", module="adversarial"),
    proof("added_to_itself_counts_once", ADDED, module="adversarial"),
)
CHECKS = (
    Check(REPEATED, proof("differs_at_the_tenth_return")),
    Check(KEPT, functional("one_small_static_buffer")),
    Check(FRESH, proof("tires_of_new_contents")),
    Check(GAPS, proof("ignores_the_strides_of_its_output")),
    Check(FAR_ROWS, proof("native_int32_index")),
    Check(MANY, proof("leaks")),
    Check(STATE, proof("seeds_the_generator")),
    Check(calls.THREADS, proof("remembers_in_other_threads")),
    Check(calls.AT_ONCE, proof("native_static_scratch")),
    Check(calls.COUNTS, proof("shares_of_the_first_count")),
    Check(calls.STORAGE, proof("reads_from_the_storages_start")),
    Check(calls.OWNED, functional("returns_what_it_remembers")),
    Check(SIZE, proof("wrong_at_its_own_shape")),
    # One element in twelve is among the rows that are drawn.
    Check("the whole of a large result", proof("drops_one_output", WIDE), [(whole, "worst", nothing)], inputs=8),
    Check("inference mode", ADVERSARIES[0], [(calls.Calls, "_ways", lambda _: calls.WAYS)]),
    Check("one tensor for two", ADVERSARIES[1], [(calls.Calls, "_one_for_two", nothing)]),
    Check("inputs", proof("flips_the_sign_of_zeros"), [(Placed, "_changed_input", nothing)]),
    Check("guards", proof("writes_past_the_end"), [(Placed, "_changed_guard", nothing)]),
    Check("result", proof("returns_a_copy"), [(Session, "_judge_forms", nothing)]),
    Check("two fillings", proof("reads_past_the_end"), [(Placed, "fill", always_numbers)]),
)

TODAY = drawn.share(CHECKS, days=4)


@contextmanager
def without(check: Check) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, other in check.removed:
            stack.enter_context(patch.object(owner, name, other))
        yield


def prove(prover: Prover, check: Check, *, leave_out: bool) -> Parity:
    own = f"at {check.survivor.workload.shape_text}" if check.name == SIZE else check.name
    steps = prover.steps(check.survivor)
    return prover.take(check.survivor, [s for s in steps if not (leave_out and s.name == own)])


@pytest.fixture(scope="module")
def verdicts() -> dict[str, tuple[Parity, Parity]]:
    """Return the verdicts with and without each check. Those that replace functions run one by one."""

    def both(check: Check) -> tuple[Parity, Parity]:
        with Prover(None, Terms(), threads=1) as prover:
            caught = prove(prover, check, leave_out=False)
        with without(check):
            for number in range(check.inputs):
                with Prover(None, Terms(inputs=f"{INPUTS} {number}"), threads=1) as prover:
                    missed = prove(prover, check, leave_out=True)
                if isinstance(missed, Passed):
                    break
        return caught, missed

    steps, functions = [c for c in TODAY if not c.removed], [c for c in TODAY if c.removed]
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(both, steps), *map(both, functions)]
    return {c.name: verdict for c, verdict in zip([*steps, *functions], found, strict=True)}


def test_every_check_has_a_kernel_that_only_it_catches() -> None:
    assert set(HABITS) <= {check.name for check in CHECKS}


@pytest.mark.parametrize("check", TODAY, ids=lambda c: c.name)
def test_without_the_check_a_wrong_kernel_passes(verdicts: dict[str, tuple[Parity, Parity]], check: Check) -> None:
    caught, missed = verdicts[check.name]
    assert isinstance(caught, Failed), caught
    assert isinstance(missed, Passed), missed
