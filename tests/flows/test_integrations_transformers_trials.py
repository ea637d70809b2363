"""Test that a patched model runs its own code where that is faster, on a clock that the two arms set."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autosel
from autosel import dispatch
from autosel.integrations import trial
from autosel.integrations.transformers import proof
from autosel.integrations.transformers.trials import FIRST, LATER
from autosel.integrations.trial import TIMED
from tests.flows.test_integrations_transformers import V, board, home, llama, made, natively

__all__ = ["board", "home"]  # fixtures

Clock = Callable[[Any, int, int], None]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return how to set the costs of a model's step: over patched modules, and over its own code."""

    class Now:
        ns = 0

        def perf_counter_ns(self) -> int:
            return self.ns

    now = Now()
    monkeypatch.setattr(trial, "time", now)

    def set_costs(model: Any, patched_ns: int, own_ns: int) -> None:
        def cost(*_: Any) -> None:
            now.ns += own_ns if proof._OWN.on else patched_ns

        model.model.norm.register_forward_hook(cost)

    return set_costs


def steps(model: Any, count: int, prompt: int = 17) -> None:
    """Run this many decode steps, each of the first token after a prompt."""
    with torch.inference_mode():
        filled = model(torch.arange(2, 2 + prompt)[None], use_cache=True).past_key_values
        for _ in range(count):
            model(torch.tensor([[V - 1]]), cache=copy.deepcopy(filled), use_cache=True)


@pytest.mark.parametrize(("patched_ns", "own_ns"), [(120, 100), (100, 120)], ids=["own", "patched"])
def test_the_faster_code_runs_from_then_on_and_a_warning_says_if_it_is_the_models_own(
    board: dispatch.Board, timed: Clock, patched_ns: int, own_ns: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = made(llama)
    autosel.patch(model)
    timed(model, patched_ns, own_ns)
    with caplog.at_level(logging.WARNING):
        steps(model, FIRST + 2 * TIMED)
        before = natively(board)
        steps(model, 5)
    ran = {op: calls - before[op] for op, calls in natively(board).items()}
    if patched_ns < own_ns:
        assert "runs its own code" not in caplog.text and ran["attn"] == 5 * len(model.model.layers)
        return
    assert "runs its own code in decode steps of 1 sequences at 17 to 32 tokens" in caplog.text
    assert caplog.text.count("runs its own code") == 1
    assert set(before) >= {"linear", "attn", "rmsnorm"} and not any(ran.values()), "the prompt is no decode step"


def test_another_context_has_its_own_short_trial(board: dispatch.Board, timed: Clock) -> None:
    model = made(llama)
    autosel.patch(model)
    timed(model, 120, 100)
    steps(model, FIRST + 2 * TIMED)
    before = natively(board)["linear"]
    steps(model, 1, prompt=8)
    assert natively(board)["linear"] > before, "a new trial begins over patched modules"
    steps(model, LATER + 2 * TIMED, prompt=8)
    before = natively(board)["linear"]
    steps(model, 1, prompt=8)
    assert natively(board)["linear"] == before


def test_own_code_of_a_patched_model_gives_the_bits_of_the_model_before(board: dispatch.Board) -> None:
    model = made(llama)
    ids = torch.arange(2, 12)[None]
    with torch.inference_mode():
        before = model(ids).logits
        autosel.patch(model)
        proven = natively(board)
        with proof.own_code():
            assert torch.equal(model(ids).logits, before)
    assert natively(board) == proven
