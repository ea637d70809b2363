"""Check that steps of tiny models give stored results: equal bits on a recorded machine, equal values on any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autosel.decode.scene import judged
from tests import steps


@pytest.fixture(scope="module", params=steps.names())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def found(case: tuple[str, Path]) -> dict[str, steps.Run]:
    return steps.runs(*case)


def recorded_here() -> dict[str, Any]:
    """Return the record of a machine like this one; skip the test if there is none."""
    here = steps.here()
    for record in steps.records():
        if record["recorded_on"] == here:
            return record
    known = "; ".join(str(record["recorded_on"]) for record in steps.records())
    pytest.skip(f"bits not compared, only values: this machine is {here}; recorded on {known}")


@pytest.mark.parametrize("arm", steps.ARMS)
def test_a_steps_logits_and_cache_are_the_recorded_bits(
    case: tuple[str, Path], found: dict[str, steps.Run], arm: str
) -> None:
    record = recorded_here()
    assert found[arm].record() == record["cases"][case[0]][arm], f"bits compared with {record['recorded_on']}"


@pytest.mark.parametrize("arm", ["torch", "kernels"])
def test_a_steps_logits_and_the_recorded_ones_are_within_one_bound(
    case: tuple[str, Path], found: dict[str, steps.Run], arm: str
) -> None:
    """Judge both by a pass in higher precision, which is computed here."""
    name, folder = case
    theirs, exact = (torch.stack(made).squeeze(1) for made in steps.reference(name, folder))
    for record in steps.records():
        for logits in (found[arm].logits[-1], torch.tensor(record["values"][name][arm])):
            error, bound = judged(logits, theirs, exact, name.split()[1])  # type: ignore[arg-type]
            assert error <= bound, f"values compared with {record['recorded_on']}"


def test_the_models_are_those_that_were_recorded() -> None:
    """Check the models first: other weights would look like a changed kernel."""
    made = [steps.digest(steps.drawn(shape, 5, 1)) for shape in ((3, 7), (64,))]
    assert made == ["05928e3bc35b53c7", "8f7bf9a668fc779a"]
    assert steps.prompt(1)[:4] == [13, 21, 31, 43]
