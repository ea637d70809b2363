"""Prove and replace RMS norms, plain and gated, by what they compute."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autosel import ops
from autosel.errors import BadArguments
from autosel.integrations.transformers.proof import (
    Forward,
    NotReplaceable,
    as_rows,
    drawn_tensor,
    needs_own_code,
    refuse_replaced,
    refuse_wrong_kernel,
    serving,
    why_wrong,
)
from autosel.ops.arguments import FLOATS
from autosel.ops.contract import U32
from autosel.ops.stored import mapped

SCALES = (1.0, 1.0, 1e-3, 30.0)  # of a probe's rows; at 1e-3 the epsilon decides
WIDTH = 64  # of the probe of a norm without weights
CONSTANTS = (1e-6, 1e-5, 1e-8, 1e-12)  # epsilons that a forward may have instead of an attribute
GATES: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": nn.functional.silu, "sigmoid": torch.sigmoid}
GATE_ROUNDINGS = 8  # of a gate's exponential, quotient and products, fp32, relative to the result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    """Say how a module normalises. `epsilon` is the attribute that holds it, else the number; None: the dtype's own."""

    weighted: bool
    epsilon: str | float | None
    offset: float
    gate: Callable[[Tensor], Tensor] | None = None  # of a second argument
    gate_first: bool = False

    def eps(self, module: Any, dtype: torch.dtype) -> float:
        found = getattr(module, self.epsilon) if isinstance(self.epsilon, str) else self.epsilon
        return torch.finfo(dtype).eps if found is None else float(found)

    def weight(self, module: Any, like: Tensor) -> Tensor:
        found: Tensor = module.weight if self.weighted else _ones(like.shape[-1], like.dtype, like.device)
        return found


def is_called_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def resembles_norm(module: nn.Module) -> bool:
    """Return True for a module without others in it that is called a norm, or has one vector and nothing else."""
    if next(module.children(), None) is not None:
        return False
    held = tensors_of(module)
    return is_called_norm(module) or [(t.dim(), t.is_floating_point()) for t in held.values()] == [(1, True)]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def prove_norm(module: Any) -> Forward:
    """Prove a norm by what it computes: its name says neither whether 1 is added to the weight, nor the epsilon."""
    refuse_replaced(module)
    held = tensors_of(module)
    weight = held.pop("weight", None)
    if held or (weight is not None and (weight.dim() != 1 or weight.dtype not in FLOATS)):
        raise NotReplaceable(f"{type(module).__name__} has other tensors than one vector of floats")
    how = _way_to_norm(module, weight)
    served, original = serving("rmsnorm"), type(module).forward
    x = (
        drawn_tensor(3, WIDTH, dtype=torch.float32)
        if weight is None
        else drawn_tensor(3, len(weight), dtype=weight.dtype)
    )
    inputs = {"x": x, "weight": how.weight(module, x), "eps": how.eps(module, x.dtype), "offset": how.offset}
    refuse_wrong_kernel("rmsnorm", inputs, served(*inputs.values()))

    return _plain_norm(how, served, original) if how.gate is None else _gated_norm(how, served, original)


def _plain_norm(how: _Norm, served: Callable[..., Any], original: Forward) -> Forward:
    weight_of, eps_of, offset = how.weight, how.eps, how.offset

    def forward(self: Any, *states: Tensor, **named: Any) -> Tensor:
        if len(states) == 1 and not named:
            (x,) = states
            weight = weight_of(self, x)
            if not needs_own_code(self, x, weight):
                try:
                    made: Tensor = served(as_rows(x), weight, eps_of(self, x.dtype), offset)
                    return made.view(x.shape)
                except BadArguments:
                    pass
        found: Tensor = original(self, *states, **named)
        return found

    return forward


def _gated_norm(how: _Norm, served: Callable[..., Any], original: Forward) -> Forward:
    """Apply the gate in fp32, as the modules do. A gate in front makes the norm one of fp32."""
    opening, first = how.gate, how.gate_first
    assert opening is not None

    def gated(module: Any, x: Tensor, gate: Tensor) -> Tensor:
        weight, opened = how.weight(module, x), opening(gate.float())
        rows = as_rows(opened * x if first else x)
        weight = weight.float() if first else weight
        made: Tensor = served(rows, weight, how.eps(module, x.dtype), how.offset).view(x.shape)
        return (made if first else made * opened).to(x.dtype)

    def forward(self: Any, *states: Tensor, **named: Any) -> Tensor:
        given = (*states, *named.values())
        if len(given) == 2 and all(isinstance(t, Tensor) for t in given):
            x, gate = given
            if x.shape == gate.shape and not needs_own_code(self, x, gate, how.weight(self, x)):
                with suppress(BadArguments):
                    return gated(self, x, gate)
        found: Tensor = original(self, *states, **named)
        return found

    return forward


def _way_to_norm(module: Any, weight: Tensor | None) -> _Norm:
    """Return how the module's class computes the op, found in fp32 on a copy with another weight."""
    name, width = type(module).__name__, WIDTH if weight is None else len(weight)
    probe = copy.copy(module)
    drawn = 1.0 + 0.3 * drawn_tensor(width, dtype=torch.float32, seed=3)
    for kind in ("_parameters", "_buffers"):
        changed = {
            n: nn.Parameter(drawn, requires_grad=False) if n == "weight" and t is not None else t
            for n, t in getattr(module, kind).items()
        }
        probe.__dict__[kind] = changed
    scales = torch.tensor(SCALES).to(torch.get_default_device())
    x = drawn_tensor(len(SCALES), width, dtype=torch.float32) * scales[:, None]
    gate = drawn_tensor(len(SCALES), width, dtype=torch.float32, seed=2)
    taken = inspect.signature(type(module).forward).parameters.values()
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in taken) - 1  # without self
    states = (x[None], gate[None])[: max(1, min(count, 2))]
    own = type(module).forward(probe, *states)
    if not isinstance(own, Tensor) or own.shape != x[None].shape:
        raise NotReplaceable(f"{name} returns something else than one tensor of its input's shape")
    for how in _ways_to_norm(module, weighted=weight is not None, gated=len(states) == 2):
        vector = drawn if how.weighted else _ones(width, torch.float32, x.device)
        inputs = {"x": x, "weight": vector, "eps": how.eps(module, torch.float32), "offset": how.offset}
        if _is_norm(how, inputs, gate, own[0]):
            return how
    raise NotReplaceable(f"{name} does not compute an RMSNorm by weight or 1 + weight")


def _ways_to_norm(module: Any, *, weighted: bool, gated: bool) -> Iterator[_Norm]:
    """Yield what a module may compute, by its own attributes first."""
    names = [name for name, value in vars(module).items() if isinstance(value, float) and 0.0 <= value < 1.0]
    unset = [name for name in ("eps", "variance_epsilon") if getattr(module, name, 0.0) is None]
    gates = [(g, first) for g in GATES.values() for first in (False, True)] if gated else [(None, False)]
    for epsilon in (*names, *unset, None, *CONSTANTS):
        for offset, used in ((0.0, True), (1.0, True), (0.0, False)) if weighted else ((0.0, False),):
            for gate, first in gates:
                yield _Norm(weighted=used, epsilon=epsilon, offset=offset, gate=gate, gate_first=first)


def _is_norm(how: _Norm, inputs: dict[str, Any], gate: Tensor, own: Tensor) -> bool:
    if how.gate is None:
        return not why_wrong("rmsnorm", inputs, own)
    if how.gate_first:
        return not why_wrong("rmsnorm", {**inputs, "x": inputs["x"] * how.gate(gate)}, own)
    contract, there = ops.find("rmsnorm"), {name: mapped(value, Tensor.cpu) for name, value in inputs.items()}
    (y,), opened = contract.reference(there), how.gate(gate.cpu().double())
    (bound,) = contract.bound(there, (y,))
    allowed = bound * opened.abs() + GATE_ROUNDINGS * U32 * (y * opened).abs()
    return bool(((own.cpu().double() - y * opened).abs() <= allowed).all())


@functools.cache
def _ones(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(width, dtype=dtype, device=device)
