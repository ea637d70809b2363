"""Test whole decode steps of patched models: by a decision they serve plain decode steps, and give the model's tokens.

The decision is recorded by a race of real steps with simulated times, as in test_decode_decision.py.
"""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import autosel
from autosel import dispatch, fingerprint, models
from autosel.decode import packed
from autosel.decode.measure import measure
from autosel.decode.run import FUSED, Plan
from autosel.decode.team import PACKED
from autosel.decode.weights import load_weights
from autosel.errors import UsageError
from autosel.formats import PLAIN
from autosel.integrations.transformers import whole
from autosel.ledger.commands import Demote
from autosel.ledger.store import open_ledger
from autosel.values import DTypeName, Rejected
from tests import drawn, engines
from tests.cpu.test_decode import compiled, one_thread
from tests.flows.test_decode_decision import home, timed
from tests.flows.test_integrations_transformers_coded import SERVED, codes_of, compressed_tensors, folders, loaded, tiny

transformers = pytest.importorskip("transformers")

__all__ = ["compiled", "compressed_tensors", "folders", "home", "one_thread", "timed"]  # fixtures

LAYERS, V, PROMPT, NEW = 2, 512, 17, 9
SIZES = {"layers": LAYERS, "d": 128, "Hq": 2, "Hkv": 1, "D": 64, "I": 256, "V": V, "tied": False}
CACHES = [{}, {"cache_implementation": "static"}]
Timed = Callable[..., list[str]]


@pytest.fixture
def fused(compiled: set[str], timed: Timed, monkeypatch: pytest.MonkeyPatch) -> Timed:
    """Return how to set the times of steps, whose ops are fused."""
    monkeypatch.setattr("autosel.decode.choose.choose_chain", lambda *_: (FUSED, ()))
    return timed


@pytest.fixture
def decided(fused: Timed, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dispatch.Board]:
    """Decide steps of 17 to 32 tokens for a thread team, for batches of 1 and 2 in fp32; once for all tests."""
    kept = tmp_path_factory.getbasetemp() / "decided-whole-steps"
    if not kept.exists():
        fused(1.1)
        decide()
        shutil.copytree(home, kept, symlinks=True)
    for path in kept.glob("*.*"):
        shutil.copy(path, home)
    with dispatch.use(home) as board:
        yield board


def decide(
    weight: str = PLAIN, state: str = "promoted", batches: Sequence[int] = (1, 2), dtype: DTypeName = "fp32"
) -> None:
    base = models.load("llama-1b")
    rope, types = replace(base.rope, rotary_dim=64), ("full",) * LAYERS
    shape = replace(base, name="tiny", **SIZES, rope=rope, layer_types=types)  # type: ignore[arg-type]
    if weight != PLAIN:
        shape = replace(shape, weight=weight, table=PLAIN)
    with open_ledger() as ledger:
        for batch in batches:
            plan = Plan(model=shape, dtype=dtype, batch=batch, seq=32, iters=2, warmup=0)
            measure(plan, load_weights(plan), ledger=ledger)
        assert [d.state for d in ledger.history("step")] == [state] * len(batches)


def prompts(rows: int = 1) -> torch.Tensor:
    return torch.randint(2, V, (rows, PROMPT), generator=torch.Generator().manual_seed(3))


def tokens(model: Any, rows: int = 1, **options: Any) -> list[list[int]]:
    found: list[list[int]] = model.generate(prompts(rows), max_new_tokens=NEW, do_sample=False, **options).tolist()
    return found


def steps(board: dispatch.Board) -> int:
    """Return how many whole steps decisions served."""
    return sum(use.calls for use in board.uses() if use.op == "step")


@pytest.mark.parametrize("cache", CACHES, ids=["dynamic", "static"])
@pytest.mark.parametrize("rows", [1, 2])
def test_generate_runs_whole_steps_and_gives_the_models_tokens(
    decided: dispatch.Board, cache: dict[str, str], rows: int
) -> None:
    model = tiny()
    before = tokens(model, rows, **cache)
    patched = autosel.patch(model)
    assert "decode steps run whole" in str(patched) and f"batch {rows} at 17 to 32 tokens" in patched.steps
    assert tokens(model, rows, **cache) == before
    assert steps(decided) == NEW - 1  # the first token is the prompt's
    assert tokens(model, rows, **cache) == before and steps(decided) == 2 * (NEW - 1)
    autosel.unpatch(model)
    assert tokens(model, rows, **cache) == before and steps(decided) == 2 * (NEW - 1)


def test_a_step_decided_op_by_op_runs_as_a_list_of_ops(fused: Timed, home: Path) -> None:
    """The team is level with it. Modules run the same kernels, and their own code between them."""
    fused(1.0, pytorch=0.5)
    decide(state="kept", batches=(1,))
    with dispatch.use(home) as board:
        model = tiny()
        before = tokens(model)
        assert "whole, as a list of ops: batch 1 at 17 to 32 tokens" in autosel.patch(model).steps
        assert tokens(model) == before and steps(board) == NEW - 1


def test_a_step_that_pytorch_wins_runs_the_models_own_modules(fused: Timed, home: Path) -> None:
    fused(0.9, pytorch=1.2)
    decide(batches=(1,))
    with dispatch.use(home) as board:
        model = tiny()
        assert "module by module" in autosel.patch(model).steps
        tokens(model)
        assert steps(board) == 0


def test_a_decision_for_packed_weights_serves_plain_ones_if_packed_ones_do_not_fit(
    fused: Timed, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(support := packed.supports("bf16", fingerprint.take("cpu")), Rejected):
        pytest.skip(support.reason)
    fused(1.1)
    decide(batches=(1,), dtype="bf16")

    def no_room(*_: Any, **__: Any) -> None:
        raise UsageError("packed weights", why="no room")

    monkeypatch.setattr(packed, "pack", no_room)
    with dispatch.use(home) as board:
        model = tiny().bfloat16()
        autosel.patch(model)
        tokens(model)
        assert [(use.candidate, use.calls) for use in board.uses() if use.op == "step"] == [(PACKED, NEW - 1)]


def test_a_parameter_made_under_inference_mode_beside_others_is_no_error(decided: dispatch.Board) -> None:
    model = tiny()
    with torch.inference_mode():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    autosel.patch(model)
    tokens(model)
    assert steps(decided) == NEW - 1


def test_the_cache_stays_transformers_own(decided: dispatch.Board) -> None:
    """Test that prompts, crops and reorders between whole steps see the right keys."""

    def logits(model: Any) -> list[torch.Tensor]:
        found, ids = [], prompts(2)
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
            for part in ids[:, :1], ids[:, 1:2], ids[:, 2:6], ids[:, 3:4]:
                found.append(model(part, past_key_values=cache).logits)
            cache.crop(-3)
            found += [model(part, past_key_values=cache).logits for part in (ids[:, 4:5], ids[:, 5:6])]
            cache.reorder_cache(torch.tensor([1, 0]))
            found += [model(part, past_key_values=cache).logits for part in (ids[:, 4:5], ids[:, 5:6])]
        return found

    model = tiny()
    before = logits(model)
    autosel.patch(model)
    after = logits(model)
    assert steps(decided) == 7
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def add_to_weights(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.5)


def replace_a_weight(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(torch.zeros(128, 128), requires_grad=False)


def replace_a_module(model: Any) -> None:
    model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, torch.nn.Dropout())


def hook_a_module(model: Any) -> None:
    model.model.norm.register_forward_hook(lambda _module, _args, out: out * 1.01)


def replace_a_forward(model: Any) -> None:
    norm = model.model.norm
    norm.forward = lambda x, forward=norm.forward: forward(x) * 1.01


CHANGES = [add_to_weights, replace_a_weight, replace_a_module, hook_a_module, replace_a_forward]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_runs_its_own_forward(decided: dispatch.Board, change: Callable[[Any], None]) -> None:
    model = tiny()
    autosel.patch(model)
    tokens(model)
    served = steps(decided)
    change(model)
    other = tiny()
    change(other)
    assert tokens(model.eval()) == tokens(other.eval()) and steps(decided) == served


def test_calls_that_no_step_describes_run_the_models_own_forward(decided: dispatch.Board) -> None:
    model = tiny()
    ids, mask = prompts(2), torch.ones(2, PROMPT, dtype=torch.int64)
    mask[1, :4] = 0

    def calls() -> list[Any]:
        asked = {"max_new_tokens": 3, "do_sample": False}
        padded = model.generate(ids, attention_mask=mask, **asked)
        states = model.generate(ids, **asked, output_hidden_states=True, return_dict_in_generate=True)
        beams = model.generate(ids[:1], **asked, num_beams=2)
        cache = model(ids, use_cache=True).past_key_values
        grown = model(ids[:, :1], past_key_values=cache).logits  # with gradients
        return [padded.tolist(), len(states.hidden_states), beams.tolist(), bool(grown.requires_grad)]

    before = calls()
    autosel.patch(model)
    assert calls() == before
    beams = 2  # of equal length: whole steps of a batch of 2 serve them
    assert steps(decided) == beams


def test_a_token_outside_the_vocabulary_is_the_models_own_error(decided: dispatch.Board) -> None:
    model = tiny()
    autosel.patch(model)
    with torch.no_grad():
        cache = model(prompts(), use_cache=True).past_key_values
        for token in (V, -1):
            with pytest.raises(IndexError):
                model(torch.tensor([[token]]), past_key_values=cache)
        model(torch.tensor([[V - 1]]), past_key_values=cache)
    assert steps(decided) == 1


def test_a_copy_of_the_model_runs_its_own_forward(decided: dispatch.Board) -> None:
    model = tiny()
    autosel.patch(model)
    tokens(model)
    served, copied = steps(decided), copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.neg_()
    other = tiny()
    with torch.no_grad():
        other.lm_head.weight.neg_()
    assert tokens(copied) == tokens(other) and steps(decided) == served


def test_a_demoted_step_is_not_served(decided: dispatch.Board) -> None:
    model = tiny()
    before = tokens(model)
    autosel.patch(model)
    with open_ledger() as ledger:
        for decision in ledger.history("step"):
            ledger.write(Demote(decision_id=decision.id, reason="for the test"))
    decided.refresh()
    assert tokens(model) == before and steps(decided) == 0


def test_a_wrong_step_is_refused_by_its_proof(
    decided: dispatch.Board, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Test a step that reads a weight of another layer."""
    model = tiny()
    before = tokens(model)
    autosel.patch(model)
    right = whole.write

    def wrong(decoder: Any, *given: Any, **named: Any) -> Any:
        weights = decoder.weights
        mixed = replace(weights, named={**weights.named, "1.o": weights["0.o"]})
        return right(type(decoder)(mixed), *given, **named)

    monkeypatch.setattr(whole, "write", wrong)
    with caplog.at_level(logging.WARNING):
        assert tokens(model) == before and steps(decided) == 0
    assert "the logits of the whole step are off by" in caplog.text


@pytest.mark.skipif(bool(engines.missing()), reason=engines.missing())
def test_a_model_in_codes_runs_whole_steps_on_them(
    fused: Timed, home: Path, compressed_tensors: None, folders: dict[str, Path]
) -> None:
    """Test the decision that `autosel run --model DIR` makes for the same checkpoint."""
    name = drawn.todays(SERVED)
    fused(1.1)
    decide(name)
    model, other = loaded(folders[name]), loaded(folders[name])
    before = [tokens(other, rows) for rows in (1, 2)]
    with dispatch.use(home) as board:
        patched = autosel.patch(model)
        assert "decode steps run whole" in patched.steps and name in patched.codes
        proven = [codes_of(layer.mlp.down_proj).codes.clone() for layer in model.model.layers]
        assert [tokens(model, rows) for rows in (1, 2)] == before
        assert steps(board) == 2 * (NEW - 1)
        for layer, codes in zip(model.model.layers, proven, strict=True):
            assert torch.equal(codes_of(layer.mlp.down_proj).codes, codes), "the modules read the step's copy"
        with torch.no_grad():
            for changed in (model, other):
                changed.model.layers[0].mlp.gate_proj.weight.neg_()
        assert tokens(model) == tokens(other) and steps(board) == 2 * (NEW - 1)


def test_a_model_that_computes_something_else_is_refused_by_its_proof(
    decided: dispatch.Board, caplog: pytest.LogCaptureFixture
) -> None:
    """Test a subclass whose forward differs from the one that its configuration describes."""

    class Scaled(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            made = super().forward(*args, **kwargs)
            made.logits = made.logits * 1.001
            return made

    model = tiny()
    model.__class__ = Scaled
    Scaled.__name__ = "LlamaForCausalLM"
    before = tokens(model)
    autosel.patch(model)
    with caplog.at_level(logging.WARNING):
        assert tokens(model) == before and steps(decided) == 0
    assert "the logits of the model's own forward are off by" in caplog.text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "rope type"),
    ],
)
def test_patch_says_why_no_whole_step_is_possible(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with dispatch.use(tmp_path):
        patched = autosel.patch(tiny(**changes))
        assert "no whole decode steps" in patched.steps and why in patched.steps


def test_patch_names_the_command_that_decides_a_step(tmp_path: Path) -> None:
    with dispatch.use(tmp_path):
        assert "autosel run --model DIR" in autosel.patch(tiny()).steps


def test_patch_tells_why_a_decided_step_does_not_run(decided: dispatch.Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosel.candidates.validity._python_digest", lambda recipe: "0" * 64)  # as after an upgrade
    told = autosel.patch(tiny()).steps
    assert "decode steps run module by module (decision " in told and "ops:step's code or its libraries" in told
