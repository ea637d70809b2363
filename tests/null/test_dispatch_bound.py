"""Test a kernel's second closure, for a chain of launches that may start early, and its users."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autosel.candidates import load
from autosel.decode.step import Step
from autosel.dispatch.bound import make_bound, put
from autosel.dispatch.resolve import Resolution
from autosel.ops import OPS
from autosel.values import NativeRecipe

RECIPE = NativeRecipe(source="cuda/rmsnorm.cu", entry="rmsnorm", flags=(), knob_args=("threads", "grid", "pdl"))
KNOBS = {"threads": 64, "grid": 2, "pdl": 0}
X, WEIGHT, OUT = torch.ones(2, 8), torch.ones(8), torch.empty(2, 8)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return the arguments of the calls of the kernel's entry."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(load, "load_entry", lambda digest, entry: lambda *arguments: seen.append(arguments))
    return seen


def test_a_kernel_that_can_wait_has_a_closure_for_chains(launched: list[tuple[Any, ...]]) -> None:
    function = load.load(OPS["rmsnorm"], RECIPE, "digest", KNOBS)
    for call in (function, function.chained):  # type: ignore[attr-defined]
        call(X, WEIGHT, 1e-6, 0.0, OUT)
    assert [made[-3:] for made in launched] == [(64, 2, 0), (64, 2, 1)]
    assert all(one is other for one, other in zip(launched[0][:5], launched[1][:5], strict=True))


def test_a_kernel_that_cannot_wait_has_no_closure_for_chains(launched: list[tuple[Any, ...]]) -> None:
    recipe = NativeRecipe(source="cpu/rmsnorm.cpp", entry="rmsnorm", flags=(), knob_args=("threads",))
    assert not hasattr(load.load(OPS["rmsnorm"], recipe, "digest", KNOBS), "chained")


def test_a_bound_callable_returns_the_chain_closure_of_the_serving_kernel() -> None:
    def kernel(*arguments: Any) -> str:
        return "kernel"

    def other(*arguments: Any) -> str:
        return "other"

    kernel.chained = lambda *arguments: "chained"  # type: ignore[attr-defined]
    op = OPS["rmsnorm"]
    w = op.workload("bf16", {"M": 2, "d": 8})
    first, second = (
        Resolution(workload=w, run=run, candidate="x", decision=None, reason="") for run in (kernel, other)
    )
    bound, cell = make_bound(op, first, kernel, kernel)
    put(bound, cell, first, None)
    assert bound.chained is not None and bound.chained() == "chained"
    put(bound, cell, second, None)  # as a demotion does
    assert bound.chained is None


def test_a_step_to_be_captured_uses_chain_closures_if_there_are_any() -> None:
    made: list[tuple[str, Any]] = []

    def plain(x: int) -> None:
        made.append(("plain", x))

    def ours(x: int) -> None:
        made.append(("ours", x))

    ours.chained = lambda x: made.append(("chained", x))  # type: ignore[attr-defined]
    step = Step(
        decoder=SimpleNamespace(), cache=SimpleNamespace(), chain=SimpleNamespace(), calls=[], chosen=None,
        logits=torch.empty(1), length=3, place=SimpleNamespace(longest=3), flat=[(plain, [1]), (ours, [2])],
    )  # type: ignore[arg-type]  # fmt: skip
    step.run()
    step.run_chained()
    assert made == [("plain", 1), ("ours", 2), ("plain", 1), ("chained", 2)]
