"""Test the single lowering of a step's calls: no call is missing, no name is used twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from autosel import models
from autosel.decode.cache import make_cache
from autosel.decode.model import Decoder
from autosel.decode.program import Attend, Embed, Norm, Program, Project, Rotate, lower
from autosel.decode.run import GREEDY, Plan, Sampling
from autosel.decode.sample import Sampler
from autosel.decode.step import Place, Step, write_step
from autosel.decode.weights import load_weights
from tests import steps


def listed(family: str, folder: Path, sampling: Sampling | None = None) -> Step:
    model = models.load(steps.write_model(folder / family, family))
    decoder = Decoder(load_weights(Plan(model=model, weights=str(folder / family), dtype="fp32")))
    cache = make_cache(model, "fp32", rows=2, room=32)
    place = Place.at(torch.zeros(2, dtype=torch.int64), [9, 7])
    logits = torch.empty(2, model.V)
    sampler = Sampler(sampling, [[1], [2]], 32, logits) if sampling else None
    return write_step(decoder, cache, place, sampler=sampler)


def weights_of(program: Program) -> Counter[str]:
    named = ("table", "norm", "w", "up", "q_norm", "k_norm", "weight")
    operands = (getattr(op, name, None) for op in program.ops for name in named)
    return Counter(name for name in operands if isinstance(name, str))


@pytest.mark.parametrize("family", steps.FAMILIES)
def test_a_program_contains_every_call_and_names_every_weight_once(family: str, tmp_path: Path) -> None:
    step = listed(family, tmp_path)
    program = lower(step)
    told = Counter(id(call) for op in program.ops for call in op.calls)
    assert told == Counter(id(call) for call in step.calls)
    weights = step.decoder.weights
    tied = Counter(embedding=1) if weights.shape.tied else Counter[str]()
    assert weights_of(program) == Counter(dict.fromkeys(weights.named, 1)) + tied


def test_the_ops_of_a_layer_come_in_the_order_of_the_step(tmp_path: Path) -> None:
    kinds = {family: [type(op) for op in lower(listed(family, tmp_path)).ops] for family in steps.FAMILIES}
    layer = [Project, Rotate, Attend, Project, Project, Project]
    assert kinds["llama"] == kinds["qwen3"] == [Embed, *layer * 3, Norm, Project]
    sandwiched = [Project, Rotate, Attend, Project, Norm, Project, Project, Norm]
    assert kinds["gemma3"] == [Embed, *sandwiched * 7, Norm, Project]


@pytest.mark.parametrize(("sampling", "site"), [(GREEDY, "argmax"), (Sampling(temperature=0.7), "token")])
def test_the_choice_of_tokens_comes_behind_the_ops(sampling: Sampling, site: str, tmp_path: Path) -> None:
    program = lower(listed("llama", tmp_path, sampling))
    assert [call.site for call in program.rest] == [site]
    assert isinstance(program.ops[-1], Project) and program.ops[-1].w == "head"
