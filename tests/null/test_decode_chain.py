"""Test that a fused op is used only if the whole step gets faster, and that the cost of each choice is stored and
shown."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from autosel.certify import verify
from autosel.certify.audit import Attribution, audit
from autosel.certify.certificate import Certificate
from autosel.cli.certificate import fusions
from autosel.decode import chain as choosing
from autosel.decode.run import Chain, Chosen, Way
from tests.null.certificates import certificate, decode_run


def chosen(
    cost: dict[tuple[str, str], float], monkeypatch: pytest.MonkeyPatch, *, sandwich: bool = False
) -> tuple[Chain, tuple[Way, ...]]:
    """Return the choice for a step of 100 us; the arguments are the time that each form of a half adds."""

    def medians(scene: Any, chains: list[Chain]) -> list[float]:
        return [1e5 + 1e3 * (cost.get(("attn", c.attn), 0) + cost.get(("mlp", c.mlp), 0)) for c in chains]

    monkeypatch.setattr(choosing, "_medians", medians)
    scene: Any = SimpleNamespace(decoder=SimpleNamespace(shape=SimpleNamespace(sandwich=sandwich)))
    return choosing.choose_chain(scene)


def test_a_fused_op_that_makes_the_step_faster_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ways = chosen({("attn", "normed"): 3, ("attn", "added"): 5, ("mlp", "fused"): 4}, monkeypatch)
    assert (made.attn, made.mlp) == ("fused", "normed")
    assert [(w.half, w.form) for w in ways if w.taken] == [("attn", "fused"), ("mlp", "normed")]


def test_a_fused_op_that_gains_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = chosen({}, monkeypatch)
    assert made == Chain(attn="normed", mlp="normed")
    made, _ = chosen({("attn", "normed"): 0.5, ("mlp", "normed"): 0.5}, monkeypatch)  # half a percent
    assert made == Chain(attn="normed", mlp="normed")


def test_each_half_is_timed_with_the_chosen_form_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ways = chosen({("attn", "normed"): 10, ("mlp", "normed"): 20, ("mlp", "added"): 30}, monkeypatch)
    by_form = {(w.half, w.form): w.step_us for w in ways}
    assert by_form["attn", "normed"] == pytest.approx(110)  # with the fused feed-forward, not the plain one
    assert by_form["mlp", "normed"] == pytest.approx(120) and by_form["mlp", "fused"] == pytest.approx(100)


def test_a_sandwich_of_norms_has_no_residual_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ways = chosen({}, monkeypatch, sandwich=True)
    assert {w.form for w in ways} == {"fused", "normed"}


# --- in a certificate ------------------------------------------------------------------------------------------------


def way(half: Any, form: Any, step_us: float, *, taken: bool = False) -> Way:
    return Way(half=half, form=form, step_us=step_us, taken=taken)


WAYS = (
    way("attn", "fused", 100.0, taken=True),
    way("attn", "normed", 104.0),
    way("mlp", "fused", 103.0),
    way("mlp", "normed", 100.0, taken=True),
    way("mlp", "added", 102.0),
)


def made_with(*ways: Way) -> Certificate:
    return certificate(dataclasses.replace(decode_run(), chosen=Chosen(ways=ways)))


def test_the_audit_shows_the_cost_of_leaving_out_a_fused_op() -> None:
    made = made_with(*WAYS)
    assert verify.wrong(made) == ""
    found = audit(made)
    assert found.attribution[0] == Attribution(op="norm_qkv", taken="fused", other="normed", step_over_taken=1.04)
    said = fusions(found)
    assert said[0] == "norm_qkv: taken; with norm and projections apart the step takes +4.0%"
    assert "gate_up: left out for norm and projections apart; with it the step takes +3.0%" in " ".join(
        " ".join(said).split()
    )
    assert len(said) == 2


@pytest.mark.parametrize(
    "ways",
    [
        (way("attn", "fused", 100.0),),
        (way("attn", "fused", 100.0, taken=True), way("attn", "normed", 1.0, taken=True)),
        (way("attn", "fused", 0.0, taken=True),),
        (way("attn", "folded", 1.0, taken=True),),
        (way("head", "fused", 1.0, taken=True),),
    ],
)
def test_impossible_ways_are_found(ways: tuple[Way, ...]) -> None:
    assert verify.wrong(made_with(*ways)).startswith("ways: ")
