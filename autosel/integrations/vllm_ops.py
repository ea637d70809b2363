"""Serve vLLM's norms and gated activations with decided kernels. Importing this needs vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from vllm import envs
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from autosel.integrations import engine_ops

UNROUNDED = 2  # the op's `sandwich`: vLLM normalises the sum before it rounds it


def _normed(layer: Any, x: Tensor, residual: Tensor | None = None, *, offset: float) -> Any:
    """Leave to vLLM what is not the op: half of a row's elements for its mean, no weight, or one rounding for all
    batches."""
    norm = engine_ops.NORM if residual is None else engine_ops.ADD_NORM
    if envs.VLLM_BATCH_INVARIANT:
        norm.leave(engine_ops.INVARIANT)
        return None
    if getattr(layer, "variance_size_override", None) is not None or not getattr(layer, "has_weight", True):
        norm.leave("a mean over part of the row, or no weight")
        return None
    return engine_ops.norm(x, layer.weight.data, layer.variance_epsilon, offset, residual, UNROUNDED)


def _gated(op: str, x: Tensor, *more: int) -> Any:
    if envs.VLLM_BATCH_INVARIANT:
        engine_ops.GATED[op].leave(engine_ops.INVARIANT)
        return None
    return engine_ops.gated(op, x, *more)


def _served(layer: Any, serve: Callable[..., Any]) -> Any:
    """Return a subclass of vLLM's layer that asks `serve(layer, x, ...)` first, and runs vLLM's method where that
    returns None."""

    def first(theirs: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(theirs)
        def forward(self: Any, x: Tensor, *more: Any, **named: Any) -> Any:
            made = serve(self, x, *more, **named)
            return theirs(self, x, *more, **named) if made is None else made

        return forward

    methods = {name: first(getattr(layer, name)) for name in ("forward_cuda", "forward_cpu")}
    return type(f"Autosel{layer.__name__}", (layer,), methods)


REPLACED: dict[Any, Any] = {
    RMSNorm: _served(RMSNorm, partial(_normed, offset=0.0)),
    GemmaRMSNorm: _served(GemmaRMSNorm, partial(_normed, offset=1.0)),
    SiluAndMul: _served(SiluAndMul, lambda layer, x: _gated("swiglu", x)),
    GeluAndMul: _served(GeluAndMul, lambda layer, x: _gated("geglu", x, int(layer.approximate == "tanh"))),
}
