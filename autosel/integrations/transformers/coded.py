"""Prove and replace linear layers whose weights are codes: compressed-tensors' `pack-quantized`, W4A16 and W8A16.

compressed-tensors dequantises all codes at the model's first call, and keeps the scales; `patch` lets it do so at once
(`dequantise`). A code is then weight / scale, rounded, and the codes must give every weight of the module again.
Decided kernels serve the codes. Every other call runs the module's own forward, on the dequantised weight.

Layers in other formats, and of other packages, run their own code; the reason names class and format.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autosel import devices, ops
from autosel.formats import WeightFormat
from autosel.integrations.engine_ops import EngineDecisions
from autosel.integrations.transformers.layer_format import (
    COMPRESSED_TENSORS,
    format_of_scheme,
    package_of,
    scheme_of,
    told_format,
)
from autosel.integrations.transformers.linear import CHECKED
from autosel.integrations.transformers.proof import (
    Forward,
    NotReplaceable,
    as_rows,
    drawn_tensor,
    needs_own_code,
    refuse_wrong_kernel,
    why_wrong,
)
from autosel.ops.arguments import FLOATS
from autosel.ops.codes import CODES, Nibbles
from autosel.ops.stored import changes_of
from autosel.ops.weight import BLOCK, Weight, empty
from autosel.values import count_bucket

HOOK = "ct_decompress_hook"  # the attribute with the handle of the hook that dequantises a model at its first call
LINEAR = EngineDecisions("linear")


def dequantise(model: nn.Module) -> None:
    """Let compressed-tensors dequantise the model now instead of at its first call.

    It then has wrapped every forward, to move tensors between devices. Where all are on one, the wrapper is removed.
    """
    handle = getattr(model, HOOK, None)
    hook: Any = None if handle is None else model._forward_pre_hooks.get(handle.id)
    if hook is not None:
        hook(model, ())
    for module in model.modules():
        held: Any = module._parameters
        if package_of(held) == COMPRESSED_TENSORS and _in_place(held):
            _unwrap(module)


def _in_place(held: Any) -> bool:
    """Return True if a module's tensors are where its wrapper would move them."""
    return all(t is None or t.device == torch.device(held.onload_device) for t in held.offloaded_values.values())


def _unwrap(module: nn.Module) -> None:
    from compressed_tensors.offload.module import remove_module_offload

    remove_module_offload(module)
    if module.__dict__["forward"].__func__ is type(module).forward:
        del module.__dict__["forward"]


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class Codes:
    """The codes of a module's weight. They hold for that tensor as long as it is unchanged."""

    weight: Weight
    decided: bool  # for one row, when they were proven
    own: weakref.ref[Tensor]
    address: int
    version: int | None

    def are_of(self, weight: Tensor) -> bool:
        """Return True if this is the weight that the codes were taken from, unchanged."""
        return weight is self.own() and weight.data_ptr() == self.address and changes_of(weight) == self.version


_HELD: weakref.WeakKeyDictionary[Any, Codes] = weakref.WeakKeyDictionary()  # by the function that serves them


def held_codes(forwards: Iterable[tuple[str, Any]]) -> dict[str, Codes]:
    """Return the codes that proven forwards serve, by the name of the module."""
    return {name: found for name, what in forwards if callable(what) and (found := _HELD.get(what)) is not None}


def prove_coded(module: nn.Linear) -> Forward:
    """Prove a layer by its dequantised weight, on the module's device. Raises NotReplaceable."""
    format_, own = _served_format(module), _own_forward(module)
    weight, bias = module.weight, module.bias
    codes = _recovered(module, format_)
    contract = ops.find("linear")
    x = drawn_tensor(1, module.in_features, dtype=weight.dtype)
    inputs = {"x": x, "w": codes, "bias": bias, "residual": None}
    w, made = contract.workload_of(inputs), _decided(x, codes, bias)
    few = contract.rows(w, inputs, 1, 1)
    wrong = why_wrong("linear", few.inputs, *few.pick((own(module, x),)))
    if wrong:
        raise NotReplaceable(f"{type(module).__name__} computes something else than x @ weight^T + bias ({wrong})")
    if made is not None:
        rows = contract.rows(w, inputs, CHECKED, 1)
        refuse_wrong_kernel("linear", rows.inputs, *rows.pick((made,)))
    held = Codes(
        weight=codes,
        decided=made is not None,
        own=weakref.ref(weight),
        address=weight.data_ptr(),
        version=changes_of(weight),
    )

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        if (
            weight is not None
            and not torch.compiler.is_compiling()
            and not needs_own_code(self, input, weight)
            and held.are_of(weight)
        ):
            made = _decided(as_rows(input), held.weight, bias)
            if made is not None:
                return made.view(*input.shape[:-1], made.shape[-1])
        found: Tensor = own(self, input)
        return found

    _HELD[forward] = held
    return forward


def _decided(rows: Tensor, w: Weight, bias: Tensor | None) -> Tensor | None:
    """Return the product by the decided kernel; None if nothing but the baseline is decided for these rows."""
    key = (count_bucket(len(rows)), w.shape, w.dtype, rows.stride(0), rows.dtype, bias is None)
    made: Tensor | None = LINEAR(key, rows, w, bias, None)
    return made


def _own_forward(module: nn.Module) -> Forward:
    """Return the forward that compressed-tensors has put on the module, to be called with the module."""
    found = module.__dict__.get("forward")
    function: Any = getattr(found, "__func__", None)
    if found is None:
        return type(module).forward
    if getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0] != COMPRESSED_TENSORS:
        raise NotReplaceable("its forward was replaced by other code, and is kept")
    return function  # type: ignore[no-any-return]


def _served_format(module: nn.Module) -> WeightFormat:
    """Return the weight format of a layer. Raises NotReplaceable, with class and format, if no kernel reads it."""
    scheme, name = scheme_of(module), f"{type(module).__name__} in {told_format(module)}"
    found = format_of_scheme(scheme) if scheme is not None else None
    if found is None:
        raise NotReplaceable(f"{name} has no kernel here, and runs its own code")
    weight, scales = (module._parameters.get(part) for part in ("weight", "weight_scale"))
    if weight is None or scales is None:
        raise NotReplaceable(f"{name} holds packed codes only, which its model has not dequantised")
    if weight.dtype not in FLOATS or scales.dtype != weight.dtype:
        raise NotReplaceable(f"{name} has weights in {weight.dtype} and scales in {scales.dtype}")
    if not devices.on_host(weight.device.type):
        raise NotReplaceable(f"{name}: codes are served on a CPU")
    return found


def _recovered(module: nn.Linear, format: WeightFormat) -> Weight:
    """Return the codes of the module's weight. Raises NotReplaceable if they do not give it again."""
    weight, scales = (module.get_parameter(part).detach() for part in ("weight", "weight_scale"))
    n, k = weight.shape
    size = format.group or k
    if k % size or scales.numel() != n * k // size:
        raise NotReplaceable(f"{told_format(module)}: {list(scales.shape)} scales for a weight {[n, k]}")
    made, wide = empty(format, n, k, dtype=weight.dtype), scales.float().view(n, -1, 1)
    made.scales.copy_(scales.reshape(made.scales.shape))
    for first in range(0, n, each := max(1, BLOCK // k)):
        rows = slice(first, first + each)
        numbers = (weight[rows].float().view(-1, k // size, size) / wide[rows]).nan_to_num_(0.0).round_()
        made.codes[rows] = _stored(numbers.view(-1, k), format)
        again = _numbers(made.codes[rows], format)[:, :k].reshape(numbers.shape).mul_(wide[rows])
        if not torch.equal(again.to(weight.dtype).view(-1, k), weight[rows]):
            raise NotReplaceable(f"its weight was changed since {told_format(module)} was loaded")
    return made


def _stored(numbers: Tensor, format: WeightFormat) -> Tensor:
    code = CODES[format.code]
    return code.nearest(numbers) if isinstance(code, Nibbles) else numbers.clamp_(-128, 127).to(code.dtype)


def _numbers(codes: Tensor, format: WeightFormat) -> Tensor:
    """Return the codes' numbers in fp32, where products with scales are exact, or rounded once to fp32."""
    if format.bits == 8:
        return codes.float()
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2).float().sub_(8)


def told_codes(held: Mapping[str, Codes]) -> str:
    """Return a line about the layers that are served as codes; "" without any."""
    if not held:
        return ""
    names = ", ".join(sorted({codes.weight.format.name for codes in held.values()}))
    size = sum(codes.weight.nbytes for codes in held.values())
    own = sum(tensor.nbytes for codes in held.values() if (tensor := codes.own()) is not None)
    decided = sum(codes.decided for codes in held.values())
    return (
        f"{len(held)} linear layers as codes ({names}), {decided} of them decided for one row; "
        f"the codes take {size / 1e6:,.0f} MB in addition to {own / 1e6:,.0f} MB that compressed-tensors dequantises"
    )
