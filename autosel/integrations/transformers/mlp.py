"""Prove and replace gated MLPs."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from autosel.errors import BadArguments
from autosel.integrations.transformers.proof import (
    Forward,
    NotReplaceable,
    drawn_tensor,
    needs_own_code,
    refuse_replaced,
    refuse_wrong_kernel,
    serving,
    why_wrong,
)

_GATED = (("swiglu", ()), ("geglu", (1,)), ("geglu", (0,)))


def prove_mlp(module: Any) -> Forward:
    """Replace the product in the middle; the projections are separate modules."""
    refuse_replaced(module)
    _refuse_other_mlp(module)
    dtype = next(module.parameters()).dtype
    gate, up = drawn_tensor(1, 256, dtype=torch.float32), drawn_tensor(1, 256, dtype=torch.float32, seed=2)
    own = module.act_fn(gate) * up
    found = [(op, more) for op, more in _GATED if not why_wrong(op, _gated(op, gate, up, more), own)]
    if not found:
        raise NotReplaceable(f"its activation is {type(module.act_fn).__name__}, neither SiLU nor GELU")
    op, more = found[0]
    served = serving(op)
    gate, up = gate.to(dtype), up.to(dtype)
    refuse_wrong_kernel(op, _gated(op, gate, up, more), served(gate, up, *more))

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        middle = None
        if not needs_own_code(self, gate, up):
            rows = (gate.reshape(-1, gate.shape[-1]), up.reshape(-1, up.shape[-1]))
            with suppress(BadArguments):
                middle = served(*rows, *more).view(gate.shape)
        made: Tensor = self.down_proj(self.act_fn(gate) * up if middle is None else middle)
        return made

    return forward


def _gated(op: str, gate: Tensor, up: Tensor, more: tuple[int, ...]) -> dict[str, Any]:
    return {"gate": gate, "up": up, **dict(zip(("tanh",), more, strict=False))}


def _refuse_other_mlp(module: Any) -> None:
    """Check that its class computes down(act(gate(x)) * up(x)) and nothing more, in float64 on a small module of that
    class."""
    probe = copy.copy(module)
    probe._modules = {**module._modules}
    for seed, (name, sizes) in enumerate({"gate_proj": (8, 6), "up_proj": (8, 6), "down_proj": (6, 8)}.items()):
        part = nn.Linear(*sizes, bias=False, dtype=torch.float64, device="meta")
        part.weight = nn.Parameter(drawn_tensor(*sizes[::-1], dtype=torch.float64, seed=seed), requires_grad=False)
        probe._modules[name] = part
    x = drawn_tensor(3, 8, dtype=torch.float64, seed=9)
    expected = probe.down_proj(probe.act_fn(probe.gate_proj(x)) * probe.up_proj(x))
    try:
        got = type(module).forward(probe, x)
    except Exception as error:
        raise NotReplaceable(f"{type(module).__name__} takes more than its projections: {error}") from error
    # The same sums of eight products in float64, in any order: they differ by roundings of 2^-53 alone.
    if not isinstance(got, Tensor) or not torch.allclose(got, expected, rtol=1e-12, atol=1e-12):
        raise NotReplaceable(f"{type(module).__name__} computes something else than down(act(gate(x)) * up(x))")
