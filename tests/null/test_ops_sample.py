"""Test the sampling contract against a definition written by hand, and the results that its judge accepts."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autosel.ops import OPS, eager
from autosel.ops.contract import Match, Mismatch

SAMPLE = OPS["sample"]


def request(logits: list[float], **settings: Any) -> dict[str, Any]:
    given = {"history": [-1], "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "uniform": 0.5}
    given |= settings
    return {
        "logits": torch.tensor([logits]),
        "history": torch.tensor([given["history"]]),
        "top_k": torch.tensor([given["top_k"]], dtype=torch.int32),
        **{n: torch.tensor([float(given[n])]) for n in ("temperature", "top_p", "repetition_penalty", "uniform")},
    }


def accepted(inputs: dict[str, Any]) -> set[int]:
    vocabulary = inputs["logits"].shape[1]
    return {t for t in range(vocabulary) if isinstance(SAMPLE.verify(inputs, (torch.tensor([t]),)), Match)}


def log(*probabilities: float) -> list[float]:
    return [math.log(p) if p else -math.inf for p in probabilities]


def test_the_token_is_the_one_whose_interval_holds_uniform() -> None:
    logits = log(0.1, 0.2, 0.3, 0.4)
    for uniform, token in ((0.05, 0), (0.15, 1), (0.45, 2), (0.65, 3), (0.999, 3)):
        assert accepted(request(logits, uniform=uniform)) == {token}


def test_a_boundary_within_rounding_allows_both_neighbours() -> None:
    assert accepted(request(log(0.25, 0.25, 0.25, 0.25), uniform=0.5)) == {1, 2}


def test_top_k_keeps_the_lowest_indices_of_a_tie() -> None:
    assert accepted(request([1.0, 2.0, 2.0, 2.0], top_k=2, uniform=0.75)) == {2}
    assert accepted(request([1.0, 2.0, 2.0, 2.0], top_k=2, uniform=0.25)) == {1}


def test_top_p_applies_after_top_k() -> None:
    logits = log(0.4, 0.3, 0.2, 0.1)
    # Of the two kept, 4/7 and 3/7: the first alone reaches 0.5.
    assert accepted(request(logits, top_k=2, top_p=0.5, uniform=0.99)) == {0}
    assert accepted(request(logits, top_k=2, top_p=0.6, uniform=0.99)) == {1}


def test_top_p_of_zero_keeps_the_most_probable() -> None:
    assert accepted(request(log(0.2, 0.5, 0.3), top_p=0.0, uniform=0.99)) == {1}


def test_the_penalty_counts_once_and_in_both_directions() -> None:
    # 3 / 2 = 1.5 (twice would be 0.75, below 1); -1 * 2 = -2.
    greedy = {"temperature": 0.0, "repetition_penalty": 2.0}
    assert accepted(request([3.0, 1.0, 1.4], history=[0, 0, 0, -1], **greedy)) == {0}
    assert accepted(request([-1.0, -1.5], history=[0, -1], **greedy)) == {1}


def test_greedy_takes_the_lowest_index_of_exact_ties() -> None:
    assert accepted(request([5.0, 7.0, 7.0], temperature=0.0)) == {1}


def test_a_masked_token_is_never_right() -> None:
    for uniform in (0.0, 0.5, 1.0 - 2.0**-24):
        assert accepted(request(log(0.0, 0.5, 0.0, 0.5, 0.0), uniform=uniform)) <= {1, 3}


def test_a_row_without_a_distribution_requires_a_token_in_range() -> None:
    inputs = request([math.nan, 1.0])
    assert accepted(inputs) == {0, 1}
    for outside in (-1, 2):
        found = SAMPLE.verify(inputs, (torch.tensor([outside]),))
        assert isinstance(found, Mismatch) and found.check == "range"


def test_uniforms_spread_evenly_give_each_token_its_share() -> None:
    n, shares = 1000, (0.1, 0.2, 0.3, 0.4)
    one = request(log(*shares))
    inputs = {name: t.expand(n, *t.shape[1:]).contiguous() for name, t in one.items()}
    inputs["uniform"] = (torch.arange(n) + 0.5) / n
    counts = Counter(eager.sample(*SAMPLE.arguments(inputs)).tolist())
    assert [counts[t] for t in range(4)] == [pytest.approx(n * share, abs=1) for share in shares]


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.floats(-20, 20, width=16), min_size=1, max_size=40),
    st.integers(0, 45),
    st.floats(0.0, 1.0, width=32),
    st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    st.sampled_from([1.0, 1.3, 0.7]),
    st.floats(0.0, 1.0, width=32, exclude_max=True),
    st.lists(st.integers(-1, 39), min_size=1, max_size=5),
)
def test_the_baseline_is_right_for_any_request(
    logits: list[float], k: int, p: float, temperature: float, penalty: float, uniform: float, history: list[int]
) -> None:
    history = [min(t, len(logits) - 1) for t in history]
    inputs = request(
        logits, top_k=k, top_p=p, temperature=temperature, repetition_penalty=penalty, uniform=uniform, history=history
    )
    token = eager.sample(*SAMPLE.arguments(inputs))
    assert isinstance(SAMPLE.verify(inputs, (token,)), Match)
    assert isinstance(SAMPLE.verify(inputs, SAMPLE.reference(inputs)), Match)
