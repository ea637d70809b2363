"""Test sweeps of settings on real kernels: a setting that is fast because it is wrong does not compete."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from autosel import fingerprint
from autosel.candidates.registry import find
from autosel.ops import OPS
from benchmarks import bench_regret as regret
from benchmarks.gpu.entrants import entrant
from benchmarks.gpu.instrument import Timer
from benchmarks.halving import LEAST_VISITS, Sweep

W = OPS["rmsnorm"].workload("bf16", {"M": 3, "d": 512})
CELL = regret.Cell(kind="decode", kernels=("cpp:rmsnorm",), workload=W)


@pytest.fixture
def timer() -> Iterator[Timer]:
    made = Timer(fingerprint.take("cpu"), "cpu")
    yield made
    made.close()


def seated(timer: Timer, **spoilt: Callable[..., Any]) -> list[str]:
    """Seat the kernel unchanged, and once for each of `spoilt`, which wraps its call; return their names."""
    plain = entrant(find("rmsnorm", "cpp:rmsnorm"), W, timer.fp)
    arms = {"plain": plain, **{name: replace(plain, candidate=name) for name in spoilt}}
    for name, wrap in spoilt.items():
        timer.bench.load(arms[name])
        loaded = timer.bench.arms[arms[name].loaded_name]
        loaded.call = wrap(loaded.call)
    timer.seat(W, arms)
    return list(arms)


def idle(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: None


def once(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the first result in every call: correct until the contents change."""
    kept: list[Any] = []

    def made(*arguments: Any) -> Any:
        if not kept:
            call(*arguments)
            kept.append(arguments[-1].clone())
        arguments[-1].copy_(kept[0])

    return made


def test_settings_that_compute_nothing_or_an_earlier_result_are_found(timer: Timer) -> None:
    found = regret.mistaken(timer, seated(timer, idle=idle, once=once))
    assert set(found) == {"idle", "once"}


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip timing, because a busy machine may give no clean samples."""
    swept = Sweep(settings=2)
    monkeypatch.setattr(
        regret, "nominate", lambda bench, closed, rivals, *_, **__: replace(swept, nominees=[*rivals][:1])
    )
    monkeypatch.setattr(regret, "final", lambda timer, met, *_, **__: {name: [1.0] * LEAST_VISITS for name in met})


@pytest.mark.usefixtures("untimed")
def test_a_wrong_rival_is_reported_and_not_timed(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regret, "mistaken", lambda timer, names: {n: "elements" for n in names[1:] if n != regret.TWIN})
    found = regret.measure(CELL, timer, 0.5, Random(1))
    assert regret.CONSTANT in found["wrong"] and len(found["wrong"]) >= 2
    assert found["best"] == found["closed"]
    assert "constant" not in found


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("which", [0, -1])
def test_a_wrong_closed_form_is_a_fault_not_a_regret(timer: Timer, monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    """Break the closed form, or its twin, which has the same setting."""
    monkeypatch.setattr(regret, "mistaken", lambda timer, names: {[names[0], regret.TWIN][which]: "elements"})
    with pytest.raises(regret.Mistaken, match="closed form"):
        regret.measure(CELL, timer, 0.5, Random(1))
