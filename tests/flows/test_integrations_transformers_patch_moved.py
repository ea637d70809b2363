"""Test that a patched model that was moved to another device runs its own code there."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import autosel
from autosel import dispatch
from autosel.errors import UsageError
from tests.flows.test_integrations_transformers import LAYERS, V, llama, made


@torch.inference_mode()
def test_a_model_moved_off_the_device_it_was_proven_on_runs_its_own_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run its own code there, because the baseline would be slower, and masks are not read on other devices."""
    with dispatch.use(tmp_path) as board:
        model = made(llama)
        autosel.patch(model)
        model.to("meta")
        before = sum(use.calls for use in board.uses())
        ids = torch.zeros(2, 9, dtype=torch.long, device="meta")
        cache = model(ids, use_cache=True).past_key_values
        step = model(ids[:, :1], past_key_values=cache, use_cache=True)
        assert step.logits.shape == (2, 1, V) and len(cache.layers) == LAYERS
        assert sum(use.calls for use in board.uses()) == before


def test_a_mask_on_another_device_is_not_read() -> None:
    from autosel.integrations.transformers.masks import look

    assert look(torch.ones(2, 1, 1, 10, dtype=torch.bool, device="meta"), llama()) is None


def test_a_model_on_an_unsupported_device_is_refused_with_the_right_reason() -> None:
    with torch.device("meta"):
        hollow = llama()
    with pytest.raises(UsageError, match="proves every module on its device, which must be one CPU or one GPU"):
        autosel.patch(hollow)
    spread = llama()
    spread.lm_head.to("meta")
    with pytest.raises(UsageError, match="on cpu, meta"):
        autosel.patch(spread)


def test_the_device_of_the_proof_is_stored_with_the_module_until_the_patch_ends() -> None:
    from autosel.integrations.transformers.proof import PROVEN_ON

    model = made(llama)
    autosel.patch(model)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        assert one.model.layers[0].self_attn.__dict__[PROVEN_ON] == torch.device("cpu")
        autosel.unpatch(one)
        assert not any(PROVEN_ON in module.__dict__ for module in one.modules())
