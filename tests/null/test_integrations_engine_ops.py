"""Test which decided kernels an engine's plug-in runs, and which calls it leaves to the engine. Arms are Python
functions."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import dispatch, ops
from autosel.integrations import engine_ops
from tests.null.test_dispatch import WEIGHT, User, W, X, arms_of_module, decision, fault_of, home, publish, unguarded

__all__ = ["home", "unguarded"]  # fixtures

KERNELS = """
import torch
def sevens(x, weight, eps, offset):
    return torch.full_like(x, 7)
def raises(x, weight, eps, offset):
    raise RuntimeError("no such kernel image")
def elevens(x, w, bias, residual):
    return x.new_full((x.shape[0], w.shape[0]), 11)
def fails(x, w, bias, residual):
    raise RuntimeError("no such kernel image")
def nines(q, k, v, table, lengths, max_len, scale, window, softcap, out=None):
    return (torch.empty_like(q) if out is None else out).fill_(9)
"""


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> User:
    return arms_of_module(tmp_path_factory.mktemp("kernels") / "engine_ops_kernels.py", KERNELS)


def norm() -> Any:
    with torch.inference_mode():
        return engine_ops.norm(X, WEIGHT, 1e-6)


def test_a_demoted_arm_leaves_the_call_to_the_engine(home: Path, arm: User) -> None:
    """Run the engine's kernel, not autosel's baseline, which is eager PyTorch."""
    d = decision(W, arm("sevens"))
    publish(home, [d])
    with dispatch.use(home) as board:
        assert norm().eq(7).all()
        board.report(fault_of(d))
        assert norm() is None


def test_a_stale_arm_leaves_the_call_to_the_engine(home: Path, arm: User) -> None:
    stale = dataclasses.replace(arm("sevens"), digest="0" * 64)
    publish(home, [decision(W, stale)])
    with dispatch.use(home):
        assert norm() is None


def test_calls_left_to_the_engine_are_counted_and_reported_as_misses(home: Path) -> None:
    publish(home, [])
    with dispatch.use(home) as board:
        assert [norm() for _ in range(3)] == [None] * 3
        (use,) = (use for use in board.uses() if use.calls)
        assert (use.candidate, use.decision_id, use.calls) == ("engine:own", None, 3)
        assert board.asked() == {W: 3}
        engine_ops.NORM.bound.clear()  # its owner lets go of the callable
        assert norm() is None
        assert sum(use.calls for use in board.uses()) == 4


def test_calls_that_no_workload_describes_are_counted_with_the_reason(home: Path) -> None:
    publish(home, [])
    with dispatch.use(home) as board, torch.inference_mode():
        assert [engine_ops.norm(X.double(), WEIGHT.double(), 1e-6) for _ in range(3)] == [None] * 3
        (use,) = (use for use in board.uses() if use.calls)
        assert (use.op, use.bucket, use.candidate, use.calls) == ("rmsnorm", "", "engine:own", 3)
        assert use.reason.startswith("no workload describes these tensors: ")
        assert board.asked() == {}


def test_calls_with_gradients_are_counted(home: Path) -> None:
    publish(home, [])
    with dispatch.use(home) as board:
        assert engine_ops.norm(X.clone().requires_grad_(), WEIGHT, 1e-6) is None
        assert [(use.reason, use.calls) for use in board.uses()] == [(engine_ops.AUTOGRAD, 1)]


def test_after_an_exception_the_engines_kernel_runs_with_one_warning_and_its_calls_are_counted(
    home: Path, arm: User, caplog: pytest.LogCaptureFixture
) -> None:
    publish(home, [decision(W, arm("raises"))])
    decided = engine_ops.EngineDecisions("rmsnorm")
    with dispatch.use(home) as board, caplog.at_level(logging.WARNING):
        assert [decided("key", X, WEIGHT, 1e-6, 0.0) for _ in range(3)] == [None] * 3
        (use,) = (use for use in board.uses() if use.candidate == "engine:own")
        assert use.calls == 3 and "no such kernel image" in use.reason
        assert board.asked()[W] >= 3, "they are misses"
    assert caplog.text.count("no such kernel image") == 1


def test_no_kernel_is_loaded_during_a_capture(
    home: Path, arm: User, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Serve shapes that ran before; new shapes run the engine's kernel, until they are loaded outside a capture."""
    publish(home, [decision(W, arm("sevens"))])
    with dispatch.use(home) as board:
        monkeypatch.setattr(engine_ops, "captured", lambda values: True)
        assert norm() is None and norm() is None
        (use,) = (use for use in board.uses() if use.calls)
        assert (use.reason, use.calls) == ("captured in a CUDA graph before its shapes ran", 2)
        assert board.asked() == {W: 2}
        monkeypatch.setattr(engine_ops, "captured", lambda values: False)
        assert norm().eq(7).all()
        monkeypatch.setattr(engine_ops, "captured", lambda values: True)
        assert norm().eq(7).all()
    assert caplog.text.count("was captured before") == 1


def test_undecided_lengths_of_a_split_bucket_run_the_engines_kernel(home: Path, arm: User) -> None:
    dims = {"B": 1, "Hq": 2, "Hkv": 1, "S": 1, "D": 8, "L": 80, "page": 16}
    w = ops.find("paged_attn").workload("fp32", dims)
    publish(home, [decision(w, arm("nines"), length_range=(70, 96))])
    pages, table = torch.zeros(8, 16, 1, 8), torch.arange(8, dtype=torch.int32)[None]

    def step(length: int) -> bool:
        out, lengths = torch.zeros(1, 2, 1, 8), torch.tensor([length], dtype=torch.int32)
        made = engine_ops.paged(out.clone(), pages, pages, table, lengths, length, scale=1.0, out=out)
        assert bool(out.eq(9).all()) == made
        return made

    with dispatch.use(home):
        assert [step(n) for n in (80, 66, 96, 97, 128)] == [True, False, True, False, False]


def test_a_step_is_run_for_the_context_of_the_capture_before_it(
    home: Path, arm: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM warms up with contexts of one token and captures for the longest."""
    dims = {"B": 1, "Hq": 2, "Hkv": 1, "S": 1, "D": 8, "L": 128, "page": 16}
    publish(home, [decision(ops.find("paged_attn").workload("fp32", dims), arm("nines"))])
    pages, table = torch.zeros(8, 16, 1, 8), torch.arange(8, dtype=torch.int32)[None]

    def step(max_len: int, longest: int) -> bool:
        q, out = torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8)
        one = torch.ones(1, dtype=torch.int32)
        return engine_ops.paged(q, pages, pages, table, one, max_len, scale=1.0, out=out, longest=longest)

    with dispatch.use(home):
        assert step(1, 128) is True and step(1, 128) is False  # once; contexts of one token are not decided
        monkeypatch.setattr(engine_ops, "captured", lambda values: True)
        assert step(128, 128) is True
    with dispatch.use(home):
        assert step(1, 128) is False and step(128, 128) is False  # no trial during a capture


# --- linears ---------------------------------------------------------------------------------------------------------

ROWS, MATRIX = torch.ones(1, 8), torch.ones(4, 8)
PRODUCT = ops.find("linear").workload("fp32", {"M": 1, "N": 4, "K": 8})


def multiplied(calls: int) -> list[float]:
    """Return the first element of each result; the engine's own has 8."""
    made = (engine_ops.linear(ROWS, MATRIX, None, lambda: ROWS @ MATRIX.T, weights=1) for _ in range(calls))
    return [float(y[0, 0]) for y in made]


def test_a_linear_without_a_decision_runs_the_engines_kernel(home: Path) -> None:
    publish(home, [])
    with dispatch.use(home) as board:
        assert multiplied(2) == [8.0, 8.0]
        assert board.asked() == {PRODUCT: 2}


@pytest.mark.parametrize(("pays", "kept"), [(True, 11.0), (False, 8.0)])
def test_a_linear_runs_the_faster_kernel(
    pays: bool, kept: float, home: Path, arm: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(home, [decision(PRODUCT, arm("elevens"))])
    monkeypatch.setattr(engine_ops.ServingTrial, "pays", pays)
    with dispatch.use(home) as board:
        assert {8.0, 11.0} == set(multiplied(200))
        assert multiplied(5) == [kept] * 5
        assert any("own is faster here" in use.reason for use in board.uses()) is not pays


def test_a_linear_whose_kernel_fails_runs_the_engines_kernel(home: Path, arm: User) -> None:
    publish(home, [decision(PRODUCT, arm("fails"))])
    with dispatch.use(home):
        assert multiplied(200) == [8.0] * 200


def test_the_decided_buckets_of_an_op_are_those_with_another_arm(home: Path, arm: User) -> None:
    publish(home, [decision(PRODUCT, arm("elevens")), decision(W, arm("sevens"), id=2)])
    with dispatch.use(home) as board:
        assert board.decided("linear") == {PRODUCT.bucket}
        assert board.decided("rmsnorm") == {W.bucket}


def test_products_that_an_engine_holds_in_its_own_layout_are_counted_as_misses(home: Path) -> None:
    publish(home, [])
    with dispatch.use(home) as board:
        for rows in (1, 1, 3):
            engine_ops.missed_linear(torch.zeros(rows, 64), 96, "fp32", None)
        engine_ops.missed_linear(torch.zeros(0, 64), 96, "fp32", None)
        one, three = (ops.find("linear").workload("fp32", {"M": m, "N": 96, "K": 64}) for m in (1, 3))
        assert board.asked() == {one: 2, three: 1}
        assert {(use.candidate, use.decision_id) for use in board.uses() if use.calls} == {("engine:own", None)}
        assert len(board._handover._missed) == 2, "a daemon learns of them"
