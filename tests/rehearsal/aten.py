"""Run PyTorch's operators on a device that runs only PTX: their CUDA kernels are machine code, so the CPU's run
instead, on the same memory, in the order of the stream.

During a capture an operator is recorded for the graph's replays: its result has its shape then, and its values after a
replay, as on a GPU.
"""

from __future__ import annotations

import ctypes
import os
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

# Work of a device's runtime: memory, copies without conversion, views; and decisions of the host.
NATIVE = {
    "empty.memory_format", "empty_strided", "as_strided", "view", "view_as_real", "view_as_complex", "unfold",
    "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "set_", "resize_",
    "_local_scalar_dense", "record_stream", "is_pinned", "_pin_memory", "_reshape_alias",
    "_fused_sdp_choice",  # which attention a GPU of this kind is given
}  # fmt: skip
# Attention under another name on the CPU: serving needs only its first result.
ATTENTION = tuple(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn"))

FAILED = 70  # sysexits.h, as in site/sitecustomize.py: an error of the rehearsal, not of the tested program

_host = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_kept: list[Any] = []  # work of graphs, for as long as the process lives


def install(device: ctypes.CDLL) -> None:
    """Replace every operator that has a CUDA kernel, except NATIVE."""
    library = torch.library.Library("aten", "IMPL")
    warnings.filterwarnings("ignore", message="Warning only once for all operators")
    _kept.append(library)
    for name in sorted(torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")):
        space, _, short = name.partition("::")
        if space != "aten" or short in NATIVE:
            continue
        packet, _, overload = short.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(operator, _as_on_cpu(operator, device), "CUDA", allow_override=True)
    for name in ATTENTION:
        operator = getattr(torch.ops.aten, name).default
        library.impl(name, _as_on_cpu(operator, device, _attention), "CUDA", allow_override=True)
    library.impl("copy_", _copying(_as_on_cpu(torch.ops.aten.copy_.default, device)), "CUDA", allow_override=True)


def _attention(operator: Any, *args: Any, scale: float | None = None) -> Any:
    given = dict(zip((a.name for a in operator._schema.arguments), args, strict=False))
    q, k, v = given["query"], given["key"], given["value"]
    formula = torch.ops.aten._scaled_dot_product_attention_math.default
    mask = given.get("attn_bias")
    mask = mask.float() if mask is not None and mask.is_floating_point() else mask
    causal, shared = bool(given.get("is_causal")), q.size(-3) != k.size(-3)
    wide, _ = formula(
        q.float(), k.float(), v.float(), mask, 0.0, causal, None, scale=scale, enable_gqa=shared
    )  # scores in fp32, as these kernels have them
    out = wide.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)  # and laid out as they do
    number = torch.zeros((), dtype=torch.int64)
    others = {"Tensor": number, "SymInt": 0, "int": 0}
    return (out, *(others[str(r.type)] for r in operator._schema.returns[1:]))


def _as_on_cpu(operator: Any, device: ctypes.CDLL, how: Callable[..., Any] | None = None) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if torch.cuda.is_current_stream_capturing():
            return _keep(operator, args, named, device, stream, how)
        _in_order(device, stream, lambda: None)  # wait until all earlier work is done
        return _run(operator, args, named, how)

    return call


def _copying(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Leave plain copies to the runtime; other copies need a kernel."""
    native, own = torch.ops.aten.copy_.default, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def copy_(to: torch.Tensor, value: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        plain = to.dtype == value.dtype and to.shape == value.shape and to.is_contiguous() and value.is_contiguous()
        if plain and not any(t.is_conj() or t.is_neg() for t in (to, value)):
            return native.redispatch(own, to, value, non_blocking)
        return convert(to, value, non_blocking)

    return copy_


def _in_order(device: ctypes.CDLL, stream: ctypes.c_void_p, work: Callable[[], Any]) -> None:
    def now(_: Any) -> None:
        try:
            work()
        except BaseException:  # which ctypes would only print
            traceback.print_exc()
            os._exit(FAILED)

    made = _host(now)
    if device.ptx_host(stream, made, None):
        _kept.append(made)


def _keep(operator: Any, args: Any, named: Any, device: ctypes.CDLL, stream: ctypes.c_void_p, how: Any) -> Any:
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in operator._schema.arguments)
    if writes:
        if any(t.numel() == 0 for t in _flat(_written_to(operator, args, named)) if isinstance(t, torch.Tensor)):
            _run(operator, args, named, how)  # its size is given by the host, under a capture too
        _in_order(device, stream, lambda: _run(operator, args, named, how))
        return _written(operator, args, named)
    outputs = _run(operator, args, named, how)
    flat = [t for t in _flat(outputs) if isinstance(t, torch.Tensor)]

    def again() -> None:
        made = [t for t in _flat(_on_cpu(operator, args, named, how)[0]) if isinstance(t, torch.Tensor)]
        for to, value in zip(flat, made, strict=True):
            alias(to).copy_(value)

    _in_order(device, stream, again)
    return outputs


def _written(operator: Any, args: Any, named: Any) -> Any:
    """Return the arguments that an operator writes, which are its result."""
    found = _written_to(operator, args, named)
    returns = len(operator._schema.returns)
    return None if returns == 0 else found[0] if returns == 1 else tuple(found[:returns])


def _written_to(operator: Any, args: Any, named: Any) -> list[Any]:
    values = dict(zip((a.name for a in operator._schema.arguments), args, strict=False)) | named
    arguments = operator._schema.arguments
    return [
        values[a.name] for a in arguments if a.alias_info is not None and a.alias_info.is_write and a.name in values
    ]


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [one for part in value for one in _flat(part)]
    return [value]


def _run(operator: Any, args: Any, named: Any, how: Any) -> Any:
    made, originals = _on_cpu(operator, args, named, how)

    def back(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        for twin, original in originals:
            if value is twin:
                return original
        on_device = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        if value.numel():
            alias(on_device).copy_(value)
        return on_device

    return tree_map(back, made)


def _on_cpu(operator: Any, args: Any, named: Any, how: Any) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    originals: list[tuple[torch.Tensor, torch.Tensor]] = []

    def across(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            twin = alias(value)
            originals.append((twin, value))
            return twin
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        if isinstance(value, torch.Generator):
            return torch.Generator().manual_seed(value.initial_seed())
        return value

    cpu_args, cpu_named = tree_map(across, args), tree_map(across, named)
    # Select by types: an operator with a number where this form has a tensor is another form.
    form = partial(how, operator) if how else operator.overloadpacket
    made = form(*cpu_args, **cpu_named)
    for twin, original in originals:  # an `out` that it has given a size
        if twin.shape != original.shape:
            original.resize_(twin.shape)
            alias(original).copy_(twin)
    return made, originals


def alias(t: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a CPU tensor."""
    if t.numel() == 0:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    storage = t.untyped_storage()
    room = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(room, dtype=torch.uint8)
    size = t.element_size()
    typed = whole[: storage.nbytes() // size * size].view(t.dtype)
    return typed.as_strided(t.shape, t.stride(), t.storage_offset())
