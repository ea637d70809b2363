"""Test the warm-up of a measurement with steps that only count, and a guard whose first checks take a known time."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autosel import dispatch
from autosel.decode import measure
from autosel.decode.run import Silent

STEP_NS = 1_000_000


@dataclass
class Guarded:
    """A clock, an arm and a board: each step takes STEP_NS, and `extra_ns` more while first checks are left."""

    checks: int
    extra_ns: int
    now_ns: int = 0
    spent_ns: float = 0.0
    steps: list[str] = field(default_factory=list)

    def step(self, arm: str) -> None:
        self.steps.append(arm)
        self.now_ns += STEP_NS
        if arm == "ours" and self.checks:
            self.checks -= 1
            self.now_ns += self.extra_ns
            self.spent_ns += self.extra_ns

    def first_checks_ns(self) -> float:
        return self.spent_ns


def warmed_up(guarded: Guarded, monkeypatch: pytest.MonkeyPatch, *, warmup: int = 10) -> list[str]:
    monkeypatch.setattr(dispatch, "board", lambda: guarded)
    monkeypatch.setattr(measure, "step", guarded.step)
    scene = SimpleNamespace(plan=SimpleNamespace(warmup=warmup), listener=Silent(), clock=lambda: guarded.now_ns)
    measure._warm_up(cast(Any, scene), cast(Any, "ours"), cast(Any, "theirs"))
    return guarded.steps


def test_steps_are_timed_once_the_guards_first_checks_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = Guarded(checks=32, extra_ns=STEP_NS)
    steps = warmed_up(guarded, monkeypatch)
    assert guarded.checks == 0
    assert steps.count("theirs") == 10
    assert steps.count("ours") == 33  # the last one shows that no check is left


def test_first_checks_that_hardly_show_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(warmed_up(Guarded(checks=32, extra_ns=STEP_NS // 1000), monkeypatch)) == 21


def test_without_a_warm_up_no_step_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warmed_up(Guarded(checks=32, extra_ns=STEP_NS), monkeypatch, warmup=0) == []
