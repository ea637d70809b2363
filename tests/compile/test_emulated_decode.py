"""Whole steps on emulated threads, by the very way a GPU would take: list of ops -> tasks -> launch -> tokens.

Only the library is another one: the kernel compiled for this CPU in the place of the one that nvcc would make.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from autosel import models
from autosel.candidates.cuda import step as kernel
from autosel.candidates.cuda.step import Entries, StepBuild
from autosel.decode import persistent
from autosel.decode.generate import generate
from autosel.decode.model import Decoder
from autosel.decode.run import Plan
from autosel.decode.weights import load_weights
from autosel.fingerprint import known
from autosel.models.shape import ModelShape
from autosel.values import DTypeName, Fingerprint
from tests.compile.emulate import emulated

PRESETS = {"llama": "llama-1b", "qwen3": "qwen3-1.7b", "gemma3": "gemma3-1b"}
SIZES = {"d": 32, "I": 48, "V": 97, "Hq": 4, "Hkv": 2, "D": 16, "max_context": 256}
WINDOW = 11
PROMPTS = [[5, 60, 3, 96, 41, 8, 22, 9, 77, 13, 2, 50, 31], [90, 4, 17, 33, 61]]  # one past the window
COUNT = 8  # past the end of a bucket of lengths: the tasks are written anew on the way


def tiny(family: str) -> ModelShape:
    """A preset's own traits at a size for emulated threads; both kinds of Gemma's layers."""
    whole = models.load(PRESETS[family])
    types = ("sliding", "full") if whole.window else ("full", "full")
    rope = dataclasses.replace(whole.rope, rotary_dim=SIZES["D"])
    local = dataclasses.replace(whole.rope_local, rotary_dim=SIZES["D"]) if whole.rope_local else None
    changes: dict[str, Any] = {"layers": 2, "layer_types": types, "rope": rope, "rope_local": local}
    return dataclasses.replace(whole, **SIZES, **changes, window=WINDOW if whole.window else 0)


def decoder_of(family: str, dtype: DTypeName = "fp32") -> Decoder:
    return Decoder(load_weights(Plan(model=tiny(family), dtype=dtype, seq=40)))


@pytest.fixture(scope="module")
def fp() -> Fingerprint:
    return known.load("h200")


def compiled_for_this_cpu(build: StepBuild) -> Entries:
    macros = [flag.removeprefix("-D") for flag in build.recipe.flags if flag.startswith("-D")]
    step, check, resident = (emulated("step", name, *macros) for name in ("step", "step_check", "step_resident"))
    return Entries(step=step, check=check, resident=resident, digest="emulated")


@pytest.fixture(autouse=True)
def emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "compiled", compiled_for_this_cpu)
    monkeypatch.setitem(persistent.KINDS, "cpu", persistent.KINDS["cuda"])  # where the tensors of the played device lie


@pytest.mark.parametrize("family", PRESETS)
def test_one_launch_a_step_gives_the_tokens_of_the_step_op_by_op(family: str, fp: Fingerprint) -> None:
    decoder = decoder_of(family)
    asked: dict[str, Any] = {"keep_logits": True}
    expected = generate(decoder, PROMPTS, COUNT, **asked)
    made = generate(decoder, PROMPTS, COUNT, team=fp, **asked)
    assert made.tokens == expected.tokens
    for ours, theirs in zip(made.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
