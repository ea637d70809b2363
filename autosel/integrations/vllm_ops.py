"""Serve vLLM's norms and gated activations with decided kernels. Importing this needs vLLM."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm import envs
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from autosel.integrations import engine_ops

UNROUNDED = 2  # the op's `sandwich`: vLLM normalises the sum before it rounds it


def _normed(layer: Any, x: Tensor, residual: Tensor | None, offset: float) -> Any:
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


class AutoselRMSNorm(RMSNorm):  # type: ignore[misc]
    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
        made = _normed(self, x, residual, 0.0)
        return super().forward_cuda(x, residual) if made is None else made

    def forward_cpu(self, x: Tensor, residual: Tensor | None = None) -> Any:
        made = _normed(self, x, residual, 0.0)
        return super().forward_cpu(x, residual) if made is None else made


class AutoselGemmaRMSNorm(GemmaRMSNorm):  # type: ignore[misc]
    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
        made = _normed(self, x, residual, 1.0)
        return super().forward_cuda(x, residual) if made is None else made

    def forward_cpu(self, x: Tensor, residual: Tensor | None = None) -> Any:
        made = _normed(self, x, residual, 1.0)
        return super().forward_cpu(x, residual) if made is None else made


class AutoselSiluAndMul(SiluAndMul):  # type: ignore[misc]
    def forward_cuda(self, x: Tensor) -> Any:
        made = _gated("swiglu", x)
        return super().forward_cuda(x) if made is None else made

    def forward_cpu(self, x: Tensor) -> Any:
        made = _gated("swiglu", x)
        return super().forward_cpu(x) if made is None else made


class AutoselGeluAndMul(GeluAndMul):  # type: ignore[misc]
    def forward_cuda(self, x: Tensor) -> Any:
        made = _gated("geglu", x, int(self.approximate == "tanh"))
        return super().forward_cuda(x) if made is None else made

    def forward_cpu(self, x: Tensor) -> Any:
        made = _gated("geglu", x, int(self.approximate == "tanh"))
        return super().forward_cpu(x) if made is None else made


REPLACED: dict[Any, Any] = {
    RMSNorm: AutoselRMSNorm,
    GemmaRMSNorm: AutoselGemmaRMSNorm,
    SiluAndMul: AutoselSiluAndMul,
    GeluAndMul: AutoselGeluAndMul,
}
