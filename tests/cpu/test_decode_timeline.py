"""Test the timeline of a step: the spans of a thread are in order and apart, in a list of ops and in a thread team."""

from __future__ import annotations

from itertools import groupby, pairwise

from autosel import models
from autosel.decode.measure import measure
from autosel.decode.run import AskedStep, Plan, Span
from autosel.decode.weights import load_weights
from tests.cpu.test_decode import Oracle, oracle
from tests.cpu.test_decode_team import one_family, team_of

__all__ = ["oracle", "team_of"]  # fixtures


def lanes_of(oracle: Oracle, step: AskedStep) -> dict[str, list[Span]]:
    shape = models.load(oracle.folder)
    plan = Plan(model=shape, weights=str(oracle.folder), dtype="fp32", seq=30, iters=1, warmup=1, step=step)
    found = measure(plan, load_weights(plan), traced=True).timeline
    lanes = {lane: list(spans) for lane, spans in groupby(found, key=lambda span: span.lane)}
    for spans in lanes.values():
        assert all(0 <= a.begin_ns < a.end_ns <= b.begin_ns for a, b in pairwise(spans))
    return lanes


@one_family
def test_a_list_of_ops_has_one_lane_with_every_call_in_order(oracle: Oracle) -> None:
    (spans,) = lanes_of(oracle, "ops").values()
    layers = models.load(oracle.folder).layers
    assert sum(span.label.startswith("attn") for span in spans) == layers
    assert spans[-1].end_ns > 0 and spans[0].site == "embed"


@one_family
def test_a_thread_team_has_a_lane_for_each_thread(oracle: Oracle, team_of: int) -> None:
    lanes = lanes_of(oracle, "whole")
    assert list(lanes) == [f"thread {rank}" for rank in range(team_of)]
    assert all(span.candidate for span in lanes["thread 0"] if span.label.startswith("attn"))
