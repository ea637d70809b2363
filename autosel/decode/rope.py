"""Rotation frequencies of each layer's heads; the op `rope` does the rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from autosel.models.shape import ModelShape


def frequencies(shape: ModelShape, device: torch.device) -> tuple[Tensor, ...]:
    """Return fp32 [rotary_dim / 2] for each layer; layers with equal frequencies share one tensor.

    Raises BadConfig for a kind of scaling that also rescales attention.
    """
    full = _tensor(shape.rope.inverse_frequencies(), device)
    local = full if shape.rope_local is None else _tensor(shape.rope_local.inverse_frequencies(), device)
    return tuple(local if kind == "sliding" else full for kind in shape.layer_types)


def _tensor(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)
