"""Provide settings that sample a real vocabulary: the cases for every kernel of `sample`, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autosel.ops import OPS
from autosel.ops.contract import Match, Mismatch

SAMPLING = [
    ("a nucleus of thousands", {"top_k": 0, "top_p": 0.9, "temperature": 1.0}),
    ("a nucleus of nearly all", {"top_k": 0, "top_p": 0.999, "temperature": 5.0}),
    ("a small nucleus", {"top_k": 0, "top_p": 0.3, "temperature": 0.3}),
    ("k beyond the blocks", {"top_k": 5000, "top_p": 1.0}),
    ("k beyond the blocks, then p", {"top_k": 5000, "top_p": 0.5, "temperature": 3.0}),
    ("k of all but one", {"top_k": 128_255, "top_p": 1.0}),
    ("everything", {"top_k": 0, "top_p": 1.0}),
]


def judged(settings: dict[str, float], kernel: Callable[..., Any], *knobs: int) -> Match | Mismatch:
    """Sample two rows of 128,256 logits by a native kernel with these settings, and judge the tokens."""
    op = OPS["sample"]
    inputs = op.inputs(op.workload("bf16", {"B": 2, "V": 128_256, "L": 16}), 21)
    for name, value in settings.items():
        inputs[name].fill_(value)
    token = torch.full((2,), -1)
    kernel(*op.arguments(inputs), token, *knobs)
    return op.verify(inputs, [token])
