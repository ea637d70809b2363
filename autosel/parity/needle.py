"""A needle: full-size inputs whose result depends on few elements in secret places, to detect a skipped element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autosel.ops.attention_cases import ends_of, plant
from autosel.ops.contract import Inputs, Op
from autosel.ops.draw import Draw
from autosel.values import Workload


def needle(op: Op, w: Workload, inputs: Inputs, seed: int) -> dict[str, Any]:
    """Return the inputs with a needle planted. Changed tensors are new ones."""
    draw = Draw(seed, w.dtype)
    if {"q", "k", "v", "max_len"} <= set(inputs):
        return _in_cache(inputs, draw)
    resident = {a.name for a in op.args if a.role == "resident"}
    planted = dict(inputs)
    for name, value in inputs.items():
        if name in resident and isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2:
            planted[name] = _one_a_row(value, draw)
    return planted


def _one_a_row(x: Tensor, draw: Draw) -> Tensor:
    """Return zeros with one other element per row. In the first row it is the last, which a wrong tail loop drops."""
    rows = torch.zeros_like(x, memory_format=torch.contiguous_format).view(-1, x.shape[-1])
    at = draw.integers(0, x.shape[-1], rows.shape[0])
    at[0] = x.shape[-1] - 1
    rows[torch.arange(rows.shape[0]), at] = 3.0
    return rows.view(x.shape)


def _in_cache(inputs: Mapping[str, Any], draw: Draw) -> dict[str, Any]:
    """Give one key of each sequence nearly all the weight: the last key, or one at a secret place in the window."""
    planted = dict(inputs) | {n: inputs[n].clone() for n in ("q", "k", "v")}
    window = int(inputs["window"])
    places = []
    for row, end in enumerate(max(1, n) for n in ends_of(inputs)):
        first = max(0, end - window) if window else 0
        places.append(end - 1 if row % 2 == 0 else int(draw.integers(first, end, 1)))
    plant(planted, draw, places)
    return planted
