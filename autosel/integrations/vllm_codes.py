"""Serve vLLM's linears in codes on a CPU with decided kernels. Importing this needs vLLM.

For codes of 4 bits in groups (compressed-tensors' W4A16), the faster of the decided kernel and vLLM's own serves, as
for plain weights. For symmetric codes of 8 bits (W8A16), vLLM has no kernel on a CPU and refuses the model; autosel
registers one, which runs the decided kernel, else PyTorch's product with int8. Other quantised layers run vLLM's own
kernels. Two lines of vLLM's log name the layers that are served, and those that are not, by number and format.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm import envs
from vllm.model_executor.kernels.linear import MPLinearKernel, register_linear_kernel
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.model_loader import base_loader
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types

from autosel.decode.compressed import put_scales
from autosel.decode.words import unpacked
from autosel.formats import WEIGHT_FORMATS, WeightFormat
from autosel.integrations.vllm_quantised import told_layers
from autosel.ops import eager_stored
from autosel.ops.contract import DTYPE_NAME
from autosel.ops.weight import Weight, empty

log = logging.getLogger("vllm.autosel")  # a child of vLLM's logger, which shows INFO

Own = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # of (x, codes, bias)
SERVED = "autosel_codes"  # attribute of a layer that is served: its product
HALF = 0x80  # by which codes of 8 bits are offset
CODES = {scalar_types.uint4b8: "int4", scalar_types.uint8b128: "int8", scalar_types.uint4: "uint4"}


class Server(Protocol):
    """The weights that are served, and how (vllm_linear.Linears)."""

    def wants(self, weight: Weight, dtype: torch.dtype) -> bool: ...

    def serve_codes(
        self, weight: Weight, dtype: torch.dtype, own: Own
    ) -> Callable[[Tensor, Tensor | None], Tensor]: ...


def register(server: Server) -> None:
    """Serve codes of 4 bits beside vLLM's kernel, add a kernel for 8 bits, and log what is served."""
    _serve_beside(CPUWNA16LinearKernel, server)
    register_linear_kernel(_w8a16(server), PlatformEnum.CPU)
    base_loader.process_weights_after_loading = _telling(base_loader.process_weights_after_loading)


# --- the codes of a layer --------------------------------------------------------------------------------------------


def format_of(how: Any) -> WeightFormat | None:
    """Return the weight format of an MPLinearLayerConfig; None if no kernel here reads it."""
    code = CODES.get(how.weight_type)
    if code is None or how.zero_points != (code == "uint4") or how.act_type not in DTYPE_NAME:
        return None
    return WEIGHT_FORMATS.get(f"{code}-row" if how.group_size == -1 else f"{code}-g{how.group_size}")


def codes_of(kernel: Any, layer: Any) -> Weight | None:
    """Return the codes of a layer, before vLLM packs them for its own kernel; None for another format, or another order
    than that of compressed-tensors."""
    how, packed, scales = kernel.config, getattr(layer, kernel.w_q_name), getattr(layer, kernel.w_s_name)
    found = format_of(how)
    if found is None or packed.input_dim != 1 or scales.dtype != how.act_type:
        return None
    k, n = how.partition_weight_shape
    if k % (found.group or k) or scales.shape != (n, k // (found.group or k)):
        return None
    zeros = unpacked(getattr(layer, kernel.w_zp_name).data.T, found.bits)[:, :n].T if how.zero_points else None
    made, used = empty(found, n, k, dtype=how.act_type), k * found.bits // 8
    raw = packed.data.contiguous().view(torch.uint8)[:, :used]
    made.codes.view(torch.uint8).fill_(0)[:, :used] = raw if found.bits == 4 else raw ^ HALF
    put_scales(made, scales.data, zeros)
    return made


# --- kernels ---------------------------------------------------------------------------------------------------------


def _serve_beside(kind: Any, server: Server) -> None:
    """Let vLLM's kernel for codes ask for a decided one, in layers whose shape is decided."""
    pack, multiply = kind.process_weights_after_loading, kind.apply_weights

    @functools.wraps(pack)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        weight = None if envs.VLLM_BATCH_INVARIANT else codes_of(self, layer)
        pack(self, layer)
        dtype = self.config.act_type
        if weight is not None and server.wants(weight, dtype):
            served = server.serve_codes(weight, dtype, lambda x, _, bias: multiply(self, layer, x, bias))
            setattr(layer, SERVED, served)

    @functools.wraps(multiply)
    def apply_weights(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        served = getattr(layer, SERVED, None)
        made: Tensor = multiply(self, layer, x, bias) if served is None else served(x, bias)
        return made

    kind.process_weights_after_loading, kind.apply_weights = process_weights_after_loading, apply_weights


def _w8a16(server: Server) -> type:
    """Return vLLM's class of a kernel for symmetric codes of 8 bits on a CPU."""

    class AutoselW8A16LinearKernel(MPLinearKernel):  # type: ignore[misc]
        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            found = format_of(c)
            if found is None or found.bits != 8:
                return False, "autosel reads symmetric codes of 8 bits, with a scale per channel or in groups of 128"
            if envs.VLLM_BATCH_INVARIANT:
                return False, "its products depend on the batch"
            return True, None

        def process_weights_after_loading(self, layer: Any) -> None:
            weight = codes_of(self, layer)
            if weight is None:
                raise ValueError("autosel reads codes of 8 bits in the order of compressed-tensors only")
            held: Weight = weight
            getattr(layer, self.w_q_name).data = torch.empty(0, dtype=torch.int32)  # the codes replace them

            def own(x: Tensor, _: Tensor, bias: Tensor | None) -> Tensor:
                rows = x.reshape(-1, x.shape[-1])
                return eager_stored.linear(rows, held, bias, None).view(*x.shape[:-1], held.shape[0])

            setattr(layer, SERVED, server.serve_codes(held, self.config.act_type, own))

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            made: Tensor = getattr(layer, SERVED)(x, bias)
            return made

    return AutoselW8A16LinearKernel


# --- the log ---------------------------------------------------------------------------------------------------------


def _telling(own: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(own)
    def process_weights_after_loading(model: Any, *more: Any) -> None:
        own(model, *more)
        layers: dict[bool, list[Any]] = {True: [], False: []}
        for layer in model.modules():
            layers[hasattr(layer, SERVED)].append(layer)
        for who, served in ("autosel serves", True), ("vLLM's own kernels run", False):
            count, told = told_layers(layers[served])
            if count:
                log.info("%s %d quantised linear layers: %s", who, count, told)

    return process_weights_after_loading
