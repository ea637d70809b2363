"""Check a module and its replacement against the op's float64 reference, and choose what serves an op."""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autosel import dispatch, ops
from autosel.ops.contract import Match
from autosel.ops.stored import mapped

Forward = Callable[..., Any]  # of (module, ...)
Names = dict[str, Any]  # globals that a module's own forward reads instead of its module's
PROVEN_ON = "_autosel_on"  # attribute of a patched module, so that a deep copy has it too: the device of the proof


class NotReplaceable(Exception):
    """Raised with the reason why a module cannot be replaced."""


def names_used(module: nn.Module) -> dict[str, Any]:
    """Return the globals that its class's forward names, without decorators around it."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, types.FunctionType):
        return {}
    return {name: forward.__globals__[name] for name in forward.__code__.co_names if name in forward.__globals__}


def refuse_replaced(module: nn.Module) -> None:
    """Check that its forward is its class's own, not replaced by autosel, `kernels`, accelerate or other code."""
    if "forward" in module.__dict__:
        raise NotReplaceable("its forward was replaced by other code, and is kept")


def drawn_tensor(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Draw without touching the user's random state, on the present device."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def why_wrong(op: str, inputs: Mapping[str, Any], *got: Tensor) -> str:
    """Return why this is not the op's result for these inputs; "" if it is. The CPU's float64 reference decides."""
    with torch.device("cpu"):
        there = {name: mapped(value, Tensor.cpu) for name, value in inputs.items()}
        found = ops.find(op).verify(there, [t.cpu() for t in got])
    return "" if isinstance(found, Match) else f"{found.check}: {found.reason}"


def refuse_wrong_kernel(op: str, inputs: Mapping[str, Any], *got: Tensor) -> None:
    wrong = why_wrong(op, inputs, *got)
    if wrong:
        raise NotReplaceable(f"what serves {op} fails parity on its weights ({wrong})")


class _OwnCode(threading.local):
    on = False


_OWN = _OwnCode()


@contextmanager
def own_code(on: bool = True) -> Iterator[None]:
    """Make patched modules run their own code in this context and thread."""
    before, _OWN.on = _OWN.on, on or _OWN.on
    try:
        yield
    finally:
        _OWN.on = before


def needs_own_code(module: nn.Module, *tensors: Tensor) -> bool:
    """Return True if the call must run the module's own code: no op describes it, or the model was moved since. Without
    a proof the baseline would serve, which is slower than the module's own code."""
    proven_on = module.__dict__.get(PROVEN_ON)
    for t in tensors:
        if t.device != proven_on:
            return True
    return undescribed(*tensors)


def undescribed(*tensors: Tensor) -> bool:
    """Return True for an empty computation, one that needs a gradient, or any in `own_code`."""
    if not torch.compiler.is_compiling() and _OWN.on:
        return True
    return tensors[0].numel() == 0 or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def as_rows(x: Tensor) -> Tensor:
    """Return x as [M, K], each row contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def serving(op: str) -> Callable[..., Any]:
    """Return the callable that serves an op; in a graph that is being compiled, the operator."""
    served, operator = dispatch.best(op), _operator(op)

    def ask(*values: Any) -> Any:
        return operator(*values) if torch.compiler.is_compiling() else served(*values)

    return ask


def deciding(op: str) -> Callable[..., Any]:
    """Return the present board: models share one attention function."""
    return _operator(op) if torch.compiler.is_compiling() else dispatch.best(op)


def _operator(op: str) -> Callable[..., Any]:
    from autosel.integrations import torch_ops  # registers them

    found: Callable[..., Any] = getattr(getattr(torch.ops, torch_ops.NAMESPACE), op)
    return found
