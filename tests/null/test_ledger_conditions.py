"""Test the text of every verb about decisions for other conditions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autosel.devices import store
from autosel.fingerprint import known
from autosel.ledger.conditions import other_conditions, other_mode, told_in
from autosel.values import Fingerprint

HERE: dict[str, Any] = {"model": "A CPU", "isa": ["avx2"], "cpus": 1, "cores": 1, "quota_cpus": None, "memory_bytes": 8}

ANY, SAME = "any algorithms", "deterministic"


def cpu(**changes: Any) -> Fingerprint:
    identity = HERE | changes
    return Fingerprint(kind="cpu", name=identity["model"], identity=identity, environment={}, rates={})


@pytest.mark.parametrize(
    ("decided", "here", "told"),
    [
        (["eager.t2.highest"], "eager.t1.highest", "tuned with 2 threads, running with 1"),
        (["eager.t1.highest"], "eager.t4.highest", "tuned with 1 thread, running with 4"),
        (["eager.t2.highest"], "eager.t2.medium", "tuned with matmul precision highest, running with medium"),
        (
            ["eager.t2.highest"],
            "eager.t1.high.deterministic",
            f"tuned with 2 threads and matmul precision highest and {ANY}, running with 1 and high and {SAME} ones",
        ),
        (
            ["eager.t2.highest.deterministic"],
            "eager.t2.highest",
            "tuned with deterministic algorithms, running with any",
        ),
        (["eager.t8.medium", "eager.t2.highest"], "eager.t1.highest", "tuned with 2 threads, running with 1"),
        (["team.t2.highest"], "eager.t2.highest", "tuned under team.t2.highest, running under eager.t2.highest"),
        (["something"], "eager.t2.highest", "tuned under something, running under eager.t2.highest"),
        (["eager.highest"], "eager.high", "tuned with matmul precision highest, running with high"),
        (["eager.deterministic"], "eager", "tuned with deterministic algorithms, running with any"),
    ],
)
def test_the_difference_between_two_modes_is_named(decided: list[str], here: str, told: str) -> None:
    assert other_mode(decided, here) == told
    assert told_in(told) == told


@pytest.mark.parametrize(
    ("there", "told"),
    [
        (cpu(cpus=2, cores=2), "tuned with 2 CPUs, running with 1 CPU"),
        (cpu(model="Another CPU", cpus=2), "tuned on Another CPU, running on A CPU"),
        (cpu(quota_cpus=1.5), "tuned with a quota of 1.5 CPUs, running with no quota of CPUs"),
        (cpu(isa=["avx2", "fma"]), "tuned with the instruction set avx2+fma, running with the instruction set avx2"),
        (cpu(l3_bytes=32), "tuned on A CPU with l3_bytes 32 instead of None"),
        (known.load("h200"), "tuned on NVIDIA H200, running on A CPU"),
    ],
)
def test_the_difference_between_two_devices_is_named(there: Fingerprint, told: str) -> None:
    by_id = {there.hw_id: there}
    asked = {"mode": "eager.t1.highest", "device": cpu(), "identify": by_id.get}
    assert other_conditions([("eager.t2.highest", there.hw_id)], **asked) == told
    assert told_in(told) == told


@pytest.mark.parametrize("reason", ["no decision for rmsnorm/M1.N64/fp32", "won 42 of 42", "tuned with\n2", "tuned"])
def test_other_reasons_are_not_treated_as_conditions(reason: str) -> None:
    assert told_in(reason) == ""
    assert told_in("tuned with " + "x" * 500) == ""


def test_the_nearest_of_several_is_named_and_an_unknown_one_by_its_id() -> None:
    here, near, far = cpu(), cpu(cpus=2), known.load("h200")
    by_id = {fp.hw_id: fp for fp in (near, far)}
    decided = [("eager.t1.highest", hw_id) for hw_id in by_id]
    asked: dict[str, Any] = {"mode": "eager.t1.highest", "device": here, "identify": by_id.get}
    assert other_conditions(decided, **asked) == "tuned with 2 CPUs, running with 1 CPU"
    told = other_conditions([("eager.t1.highest", "ab" * 32)], **asked)
    assert told == f"tuned on another device (abababababab), running on A CPU ({here.hw_id[:12]})"
    mine = ("eager.t2.highest", here.hw_id)
    assert other_conditions([*decided, mine], **asked) == "tuned with 2 threads, running with 1"


def test_no_reason_without_decisions_or_with_one_for_these_conditions() -> None:
    asked: dict[str, Any] = {"mode": "eager.t1.highest", "device": cpu()}
    assert other_conditions([], **asked) == ""
    assert other_conditions([("eager.t1.highest", cpu().hw_id)], **asked) == ""


@pytest.mark.usefixtures("home")
def test_a_device_is_recognised_by_any_of_its_stored_fingerprints() -> None:
    store.of_hardware.cache_clear()
    made = dataclasses.replace(cpu(cpus=2), environment={"torch": "1"})
    assert store.of_hardware(made.hw_id) is None
    store.of_hardware.cache_clear()
    store.write(made)
    assert store.of_hardware(made.hw_id) == made
    store.of_hardware.cache_clear()
